"""Loader of the model that the user names, as FILE.py:NAME or package.module:NAME.

NAME is a torch.nn.Module, or a class or function that returns one without arguments. The file is run, as by an import.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError

_FORMS = "FILE.py:NAME or package.module:NAME"
_NAME = "a torch.nn.Module, or a class or function that makes one without arguments"


def load_model(spec: str) -> tuple[str, nn.Module]:
    """Name of the model, and the model itself, built on the meta device if possible.

    NAME may be left out if there is only one candidate. Candidates are global variables that are models, and classes of
    models and functions annotated to return one, if the file itself defines them and they need no arguments.

    Raises ConfigError if there is no such model, or it can't be built.
    """
    where, separator, name = spec.rpartition(":")
    if not separator or not name.isidentifier():
        where, name = spec, ""
    try:
        with _like_a_script(where):
            module = _imported(where)
            name = name or _only_candidate(module)
            return name, _built(_named(module, name), name)
    except ConfigError as error:
        raise ConfigError(f"--model {spec}: {error}") from None


# ------------------------------------------------------------------ finding the model


@contextmanager
def _like_a_script(where: str) -> Iterator[None]:
    """Context manager in which modules beside the file, or else in the working directory, can be imported."""
    folder = Path(where).resolve().parent if _is_file(where) else Path.cwd()
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


def _is_file(where: str) -> bool:
    return where.endswith(".py")


def _imported(where: str) -> ModuleType:
    if _is_file(where):
        if not Path(where).is_file():
            raise ConfigError(f"{where}: no such file (looked in {Path.cwd()}); allowed: {_FORMS}")
        return _reported(lambda: _run(where), f"running {where}")
    if not all(part.isidentifier() for part in where.split(".")):
        raise ConfigError(f"{where!r} is neither a .py file nor a module; allowed: {_FORMS}")
    return _reported(lambda: importlib.import_module(where), f"importing {where}")


def _run(file: str) -> ModuleType:
    """Run a file as a module, under a name of our own: the file may be called like a package that it imports."""
    found = importlib.util.spec_from_file_location(f"ncz_check_{Path(file).stem}", file)
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look up their annotations there
    found.loader.exec_module(module)
    return module


def _only_candidate(module: ModuleType) -> str:
    candidates = _candidates(module)
    if len(candidates) == 1:
        return candidates[0]
    found = f"contains several models, {', '.join(candidates)}" if candidates else "contains no model"
    raise ConfigError(f"{found}: add :NAME, where NAME is {_NAME}")


def _candidates(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if not name.startswith("_") and _is_candidate(value, module)]


def _is_candidate(value: Any, module: ModuleType) -> bool:
    if isinstance(value, nn.Module):
        return True
    if getattr(value, "__module__", None) != module.__name__:  # imported from another module
        return False
    if inspect.isclass(value):
        makes_a_model = issubclass(value, nn.Module)
    else:
        makes_a_model = inspect.isfunction(value) and _returns_a_model(value)
    return makes_a_model and not _required(value)


def _returns_a_model(function: Callable) -> bool:
    try:
        returned = typing.get_type_hints(function).get("return")
    except Exception:  # an annotation may be any expression, and fail
        return False
    return inspect.isclass(returned) and issubclass(returned, nn.Module)


def _required(make: Callable) -> list[str]:
    """The arguments that a class or function can't be called without."""
    some = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return []
    return [each.name for each in parameters if each.default is each.empty and each.kind not in some]


def _named(module: ModuleType, name: str) -> nn.Module | Callable[[], Any]:
    # A module may have a function, `__getattr__`, that imports what is asked for.
    if not _reported(lambda: hasattr(module, name), f"importing {name}"):
        near = get_close_matches(name, vars(module), n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        there = f"; its models: {', '.join(_candidates(module)) or 'none'}"
        raise ConfigError(f"contains no {name}{meant}{there}")
    value = getattr(module, name)
    if not isinstance(value, nn.Module):
        if not callable(value):
            raise ConfigError(f"{name} is {type(value).__name__}; allowed: {_NAME}")
        if missing := _required(value):
            raise ConfigError(
                f"{name} needs arguments ({', '.join(missing)}): name a function without any that returns the model"
            )
    return value


# ------------------------------------------------------------------ building the model


def _built(found: nn.Module | Callable[[], Any], name: str) -> nn.Module:
    model = found if isinstance(found, nn.Module) else _reported(lambda: _without_memory(found), f"building {name}")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name}() returned {type(model).__name__}; allowed: {_NAME}")
    for parameter, value in model.named_parameters():
        if nn.parameter.is_lazy(value):
            raise ConfigError(
                f"{parameter} has no shape before the first forward pass: name a function that runs one and returns "
                "the model"
            )
    return model


def _without_memory(make: Callable[[], Any]) -> Any:
    """Call `make`, on the meta device if possible: some constructors need values."""
    try:
        with torch.device("meta"):
            return make()
    except Exception:
        return make()


def _reported(action: Callable[[], Any], doing: str) -> Any:
    """Call `action`, which runs the user's code. Raises ConfigError for any error in it."""
    try:
        return action()
    except (Exception, SystemExit) as error:
        text = f": {error}" if str(error) else ""
        raise ConfigError(f"{doing} failed with {type(error).__name__}{text}") from error
