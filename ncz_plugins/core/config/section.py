"""Base class of the sections of the configuration: validation, list of settings, error messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ..errors import ConfigError
from .documents import shorten
from .fields import Allowed

_MAX_INTEGER = 1 << 64  # larger floats stay floats


class Section(BaseModel):
    """Immutable group of settings. Refuses unknown keys, and reports all problems in one ConfigError.

    Accepts numbers of numpy and torch, and 256.0 for 256.

    Attributes:
        removed: settings of earlier versions -> what to do instead, for the error message.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    removed: ClassVar[dict[str, str]] = {}

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error, type(self))) from None

    # Lets pydantic build nested sections without calling __init__, so that errors keep their full path.
    __init__.__pydantic_base_init__ = True

    @model_validator(mode="before")
    @classmethod
    def _with_numbers_of_python(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {name: _plain(each) for name, each in values.items()}


def _plain(value: Any) -> Any:
    """A numpy or torch number as a Python number, a float without a fraction as an int, anything else unchanged."""
    value = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_INTEGER:
        return int(value)
    return value


def settings_of(
    section: type[BaseModel], prefix: str = "", of_elements: bool = False
) -> Iterator[tuple[str, Any, str, str]]:
    """(dotted key, default, allowed values, description) of every setting, in order.

    Args:
        section: the section to list.
        prefix: text before each key.
        of_elements: whether a list is followed by the settings of its elements, such as "policies[].name".
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
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _element(annotation: object) -> type[BaseModel] | None:
    """The section class of the elements of a list; None if the elements are no sections."""
    element = next(iter(get_args(annotation)), None) if get_origin(annotation) is tuple else None
    return element if _is_section(element) else None


def _allowed(section: type[BaseModel], name: str) -> str:
    field = section.model_fields[name]
    if _is_section(field.annotation):
        return f"a mapping with the keys {', '.join(field.annotation.model_fields)}"
    if get_origin(field.annotation) is Literal:
        return ", ".join(map(str, get_args(field.annotation)))
    return next(note.text for note in field.metadata if isinstance(note, Allowed))


# ------------------------------------------------------------------ error messages


def _explain(error: ValidationError, section: type[BaseModel]) -> str:
    """All problems that pydantic found, in our words: one line, or a list if there are several."""
    lines = {}  # by key: one line for a setting, even if pydantic reports several problems of it
    for problem in error.errors():
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError) and not problem["loc"]:  # the message is complete
            lines.setdefault(str(cause), str(cause))
            continue
        owner, path, key = _locate(section, problem["loc"])
        value = shorten(problem["input"])
        if isinstance(cause, ConfigError):
            line = f"{key}: {cause}"
        elif path[-1] in getattr(owner, "removed", {}):
            line = f"{key}: this setting has been removed (value {value}): {owner.removed[path[-1]]}"
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
    """Section that owns the setting at `location`, path of the setting, and its key as messages show it."""
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
    """The key most likely meant: the same name in another section, else a similar name here or elsewhere."""
    section, _, name = key.rpartition(".")
    elsewhere = {key.rpartition(".")[2]: key for key, *_ in settings_of(root)}
    if name in elsewhere:
        return elsewhere[name]
    if near := get_close_matches(name, owner.model_fields, n=1, cutoff=0.5):
        return f"{section}.{near[0]}" if section else near[0]
    near = get_close_matches(name, elsewhere, n=1)
    return elsewhere[near[0]] if near else None
