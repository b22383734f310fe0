"""Paths in settings: `~` and `$NAME` stand for folders of whoever uses the path.

A configuration keeps a path as it was written, as the folders of ranks may differ and their settings may not. Nothing
here imports torch.
"""

from __future__ import annotations

import os
import re
import sys

from ..errors import ConfigError

_VARIABLE = re.compile(r"\$(?:(\$)|([A-Za-z_][A-Za-z0-9_]*)|\{([^{}]*)\})")


def expanded_path(path: str | os.PathLike) -> str:
    """A path of a setting, with ~, ~user, $NAME and ${NAME} replaced, and $$ for a dollar sign.

    Raises ConfigError, which names the path, for a user or a variable that this process does not know.
    """
    path = os.fsdecode(path)
    # A home folder may have a dollar sign in its own name.
    first, rest = "", path
    if path.startswith("~"):
        user, slash, rest = path.partition(os.sep)
        first = os.path.expanduser(user) + slash
        if first == user + slash:
            raise ConfigError(f"{path}: {user} is no user with a home here; a file of that name is ./{user}")
    try:
        return first + _VARIABLE.sub(_value, rest)
    except KeyError as error:
        raise ConfigError(
            f"{path}: the environment variable {error.args[0]} is not defined; set it, or write $$ for a dollar sign"
        ) from None


def _value(found: re.Match[str]) -> str:
    """What a match of _VARIABLE stands for. Raises KeyError."""
    dollar, name, name_in_braces = found.groups()
    return dollar or os.environ[name_in_braces if name is None else name]


def path_setting(value: object) -> str:
    """The text that a setting holds for a path. Raises ConfigError for one that can't be expanded, else ValueError."""
    text = os.fsdecode(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError("no path")
    try:
        os.fsencode(expanded_path(text))
    except UnicodeEncodeError:
        raise ConfigError(
            f"{text!a}: names of files are {sys.getfilesystemencoding()} here, which lacks some of these characters; "
            "use another name, or set PYTHONUTF8=1"
        ) from None
    return str(text)


def escaped(folder: str) -> str:
    """`folder` as a path that stands for itself where paths are expanded."""
    return ("./" if folder.startswith("~") else "") + folder.replace("$", "$$")
