"""What all sections of the configuration have in common: how they are checked, listed and explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ..errors import ConfigError
from .documents import shorten
from .fields import Allowed

_MOST_INTEGER = 1 << 64  # of those that settings hold


class Section(BaseModel):
    """Immutable, refuses unknown keys, and reports every problem in one `ConfigError`.

    Numbers of numpy and torch are taken for Python's own, and 256.0 for 256.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error, type(self))) from None

    # pydantic then builds nested sections without calling __init__, and its errors keep their full path.
    __init__.__pydantic_base_init__ = True

    @model_validator(mode="before")
    @classmethod
    def _with_numbers_of_python(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {name: _plain(each) for name, each in values.items()}


def _plain(value: Any) -> Any:
    """A number of numpy or torch as Python's own, and a float without a fraction as an integer. All else as it is."""
    value = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MOST_INTEGER:
        return int(value)
    return value


def settings_of(
    section: type[BaseModel], prefix: str = "", of_elements: bool = False
) -> Iterator[tuple[str, Any, str, str]]:
    """(dotted key, default, what is allowed, description) of every setting, in order.

    of_elements: after a list, also the settings of its elements, as "policies[].name".
    """
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            yield from settings_of(field.annotation, f"{prefix}{name}.", of_elements)
            continue
        default = "required" if field.is_required() else field.default
        yield prefix + name, default, _allowed(section, name), field.description
        if of_elements and (element := _element(field.annotation)):
            yield from settings_of(element, f"{prefix}{name}[].", of_elements)


def _is_section(annotation: object) -> bool:
    # To Python 3.10 tuple[int, ...] is a type as well.
    return get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _element(annotation: object) -> type[BaseModel] | None:
    """The section that each element of a list is, if that is what they are."""
    element = next(iter(get_args(annotation)), None) if get_origin(annotation) is tuple else None
    return element if _is_section(element) else None


def _allowed(section: type[BaseModel], name: str) -> str:
    field = section.model_fields[name]
    if _is_section(field.annotation):
        return f"a mapping with the keys {', '.join(field.annotation.model_fields)}"
    if get_origin(field.annotation) is Literal:
        return ", ".join(map(str, get_args(field.annotation)))
    return next(note.text for note in field.metadata if isinstance(note, Allowed))


# ------------------------------------------------------------------ explaining what is wrong


def _explain(error: ValidationError, section: type[BaseModel]) -> str:
    """Every problem that pydantic found, in our words: one line if there is one, else a list."""
    lines = {}  # by key, as several elements of one list may be wrong
    for problem in error.errors():
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError) and not problem["loc"]:  # it says all
            lines.setdefault(str(cause), str(cause))
            continue
        owner, path, key = _locate(section, problem["loc"])
        value = shorten(problem["input"])
        if isinstance(cause, ConfigError):
            line = f"{key}: {cause}"
        elif path[-1] not in owner.model_fields:
            line = f"{key}: unknown key (value {value}); "
            if meant := _closest_key(key, section, owner):
                line += f"did you mean {meant}? "
            line += f"allowed: {', '.join(owner.model_fields)}"
        elif problem["type"] == "missing" and path[-1] == problem["loc"][-1]:
            line = f"{key}: is missing; allowed: {_allowed(owner, path[-1])}"
        else:
            line = f"{key}: {value} is not allowed; allowed: {_allowed(owner, path[-1])}"
        lines.setdefault(key, line)
    if len(lines) == 1:
        return next(iter(lines.values()))
    return f"{len(lines)} problems\n" + "\n".join(f"  {line}" for line in lines.values())


def _locate(section: type[BaseModel], location: tuple[int | str, ...]) -> tuple[type[BaseModel], list[str], str]:
    """The section that owns the setting at `location`, the setting's path, and its key with indices for people."""
    owner, path, key = section, [str(location[0])], str(location[0])
    for step in location[1:]:
        field = owner.model_fields.get(path[-1])
        if field is None:
            break
        if isinstance(step, int) and _element(field.annotation):
            key += f"[{step}]"
            continue
        inner = field.annotation if _is_section(field.annotation) else _element(field.annotation)
        if inner is None:
            break
        owner = inner
        path.append(str(step))
        key += f".{step}"
    return owner, path, key


def _closest_key(key: str, root: type[BaseModel], owner: type[BaseModel]) -> str | None:
    """The dotted key most likely meant: the same name elsewhere, else a similar one, here or elsewhere."""
    section, _, name = key.rpartition(".")
    elsewhere = {key.rpartition(".")[2]: key for key, *_ in settings_of(root)}
    if name in elsewhere:
        return elsewhere[name]
    if near := get_close_matches(name, owner.model_fields, n=1, cutoff=0.5):
        return f"{section}.{near[0]}" if section else near[0]
    near = get_close_matches(name, elsewhere, n=1)
    return elsewhere[near[0]] if near else None
