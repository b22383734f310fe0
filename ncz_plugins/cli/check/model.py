"""The model that the user names, as FILE.py:NAME or package.module:NAME.

NAME is a torch.nn.Module, or a class or function that makes one without arguments. Finding it runs the file, as an
import does.
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
    """The name of what `spec` means and the model, whose parameters are on the device meta where it can be built there.

    NAME may be left out where there is only one candidate: a global variable that is a model, or, defined in the file
    itself, a class of models or a function annotated to return one, which needs no arguments.

    Raises ConfigError if there is no such thing or it can't be built.
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


# ------------------------------------------------------------------ finding it


@contextmanager
def _like_a_script(where: str) -> Iterator[None]:
    """What stands beside a file, or in the working directory, can be imported."""
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
    """The module that a file makes, under a name of its own: the file may be called like a package it needs."""
    found = importlib.util.spec_from_file_location(f"ncz_check_{Path(file).stem}", file)
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look there for what their annotations mean
    found.loader.exec_module(module)
    return module


def _only_candidate(module: ModuleType) -> str:
    candidates = _candidates(module)
    if len(candidates) == 1:
        return candidates[0]
    found = f"there are several models in it, {', '.join(candidates)}" if candidates else "found no model in it"
    raise ConfigError(f"{found}: add :NAME, where NAME is {_NAME}")


def _candidates(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if not name.startswith("_") and _is_candidate(value, module)]


def _is_candidate(value: Any, module: ModuleType) -> bool:
    if isinstance(value, nn.Module):
        return True
    if getattr(value, "__module__", None) != module.__name__:  # it was imported there
        return False
    if _is_class(value):
        makes_a_model = issubclass(value, nn.Module)
    else:
        makes_a_model = inspect.isfunction(value) and _returns_a_model(value)
    return makes_a_model and not _required(value)


def _returns_a_model(function: Callable) -> bool:
    try:
        returned = typing.get_type_hints(function).get("return")
    except Exception:  # an annotation may be any expression, and only some can be evaluated
        return False
    return _is_class(returned) and issubclass(returned, nn.Module)


def _is_class(value: Any) -> bool:
    return inspect.isclass(value) and typing.get_origin(value) is None  # to Python 3.10 list[int] is one as well


def _required(make: Callable) -> list[str]:
    """The arguments that a class or function can't be called without."""
    some = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # some built-in ones tell nothing
        return []
    return [each.name for each in parameters if each.default is each.empty and each.kind not in some]


def _named(module: ModuleType, name: str) -> nn.Module | Callable[[], Any]:
    if not hasattr(module, name):
        near = get_close_matches(name, vars(module), n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        there = f"; models in it: {', '.join(_candidates(module)) or 'none'}"
        raise ConfigError(f"there is no {name} in it{meant}{there}")
    value = getattr(module, name)
    if not isinstance(value, nn.Module):
        if not callable(value):
            raise ConfigError(f"{name} is {type(value).__name__}; allowed: {_NAME}")
        if missing := _required(value):
            raise ConfigError(
                f"{name} needs arguments ({', '.join(missing)}): name a function without any that returns the model"
            )
    return value


# ------------------------------------------------------------------ building it


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
    """What `make` makes, on the device meta if possible: some constructors need values."""
    try:
        with torch.device("meta"):
            return make()
    except Exception:
        return make()


def _reported(action: Callable[[], Any], doing: str) -> Any:
    """What `action` returns; what the user's own code raises becomes a ConfigError."""
    try:
        return action()
    except (Exception, SystemExit) as error:
        text = f": {error}" if str(error) else ""
        raise ConfigError(f"{doing} failed with {type(error).__name__}{text}") from error
