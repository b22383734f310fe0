"""Paths in settings, in which `~` and `$NAME` are expanded when the path is used.

A configuration stores the path as written: expanded paths may differ between ranks, settings must not. Nothing here
imports torch.
"""

from __future__ import annotations

import os
import re
import sys

from ..errors import ConfigError

_VARIABLE = re.compile(r"\$(?:(\$)|([A-Za-z_][A-Za-z0-9_]*)|\{([^{}]*)\})")


def expanded_path(path: str | os.PathLike) -> str:
    """A path from a setting with ~, ~user, $NAME and ${NAME} expanded, and $$ replaced by a dollar sign.

    Raises ConfigError, naming the path, for an unknown user or an undefined variable.
    """
    path = os.fsdecode(path)
    # Expand ~ first and separately, as a home folder may have a dollar sign in its name.
    first, rest = "", path
    if path.startswith("~"):
        user, slash, rest = path.partition(os.sep)
        first = os.path.expanduser(user) + slash
        if first == user + slash:
            raise ConfigError(
                f"{path}: {user} is not a user with a home folder; for a file of that name, write ./{user}"
            )
    try:
        return first + _VARIABLE.sub(_value, rest)
    except KeyError as error:
        raise ConfigError(
            f"{path}: the environment variable {error.args[0]} is not defined; set it, or write $$ for a dollar sign"
        ) from None


def _value(found: re.Match[str]) -> str:
    """The text that replaces a match of _VARIABLE. Raises KeyError for an undefined variable."""
    dollar, name, name_in_braces = found.groups()
    return dollar or os.environ[name_in_braces if name is None else name]


def path_setting(value: object) -> str:
    """Validate a path in a setting and return its text. Raises ConfigError if it can't be expanded, else ValueError."""
    text = os.fsdecode(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError("no path")
    try:
        os.fsencode(expanded_path(text))
    except UnicodeEncodeError:
        raise ConfigError(
            f"{text!a}: file names are encoded in {sys.getfilesystemencoding()} here, which lacks some of these "
            "characters; use another name, or set PYTHONUTF8=1"
        ) from None
    return str(text)


def escaped(folder: str) -> str:
    """`folder`, escaped so that `expanded_path` returns it unchanged."""
    return ("./" if folder.startswith("~") else "") + folder.replace("$", "$$")
