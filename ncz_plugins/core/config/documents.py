"""Strict reader of YAML and JSON files: no repeated keys, and every error names file and line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ..errors import ConfigError

_MAX_VALUES = 10_000  # values in one file, counting each alias as the values that it stands for


def read_document(path: str | os.PathLike) -> dict[Any, Any]:
    """The mapping in a .yaml, .yml or .json file. Keys and values are not validated.

    Raises ConfigError, naming the file and if possible the line, if the file can't be read, is not valid YAML or JSON,
    is not a mapping, repeats a key, refers to itself, or contains half of a surrogate pair.
    """
    path = Path(os.fsdecode(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error}") from None
    except ValueError as error:  # a path that no file can have, such as one with a zero byte
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    parse = {".yaml": _parse_yaml, ".yml": _parse_yaml, ".json": _parse_json}.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(f"{path}: unknown type of file; allowed: .yaml, .yml, .json")
    try:
        document = parse(text, path)
    except ConfigError:
        raise
    except RecursionError:  # whose text differs between versions of Python
        raise ConfigError(f"{path}: brackets are nested too deeply") from None
    except ValueError as error:  # for example the date 2026-13-01
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: holds {shorten(document)}, not a mapping of settings")
    try:
        text = json.dumps(document, ensure_ascii=False, default=str)
    except (TypeError, ValueError) as error:  # for example a date as a key, or a number with thousands of digits
        raise ConfigError(f"{path}: {error}") from None
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{path}: holds half of a surrogate pair, \\ud800 to \\udfff, which is no character")
    return document


def _parse_json(text: str, path: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ConfigError(f"{path}: key '{next(k for k in keys if keys.count(k) > 1)}' is given twice")
        return mapping

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: invalid JSON: {error.msg}") from None


def _parse_yaml(text: str, path: Path) -> Any:
    try:
        if _count_values(yaml.compose(text, _YamlLoader), path, {}) > _MAX_VALUES:
            raise ConfigError(
                f"{path}: has more than {_MAX_VALUES:,} values, counting each alias as what it stands for"
            )
        return yaml.load(text, _YamlLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{path}:{mark.line + 1}: invalid YAML: {error.problem}") from None
    except yaml.YAMLError as error:  # a character that YAML forbids
        raise ConfigError(f"{path}: invalid YAML: {error}") from None


def _count_values(node: yaml.Node | None, path: Path, known: dict[int, int]) -> int:
    """Number of values that a node stands for. Raises ConfigError if the node contains itself.

    Args:
        known: id of a node -> its number of values; 0 while the node is being counted.
    """
    if id(node) in known:
        if known[id(node)] == 0:
            raise ConfigError(f"{path}:{node.start_mark.line + 1}: this value refers to itself")
        return known[id(node)]
    known[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    known[id(node)] = 1 + sum(_count_values(child, path, known) for child in children)
    return known[id(node)]


class _YamlLoader(yaml.SafeLoader):
    """Safe loader that refuses repeated keys and reads 1e-3 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key '{key.value}' is given twice", problem_mark=key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


# PyYAML follows YAML 1.1, where a float needs a dot and a signed exponent: 1e-3 would be a string.
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def first_problem(error: ValidationError) -> str:
    """The first problem of a ValidationError: location, value if there is one, and pydantic's message."""
    problem = error.errors()[0]
    value = [] if problem["type"] == "missing" else [shorten(problem["input"])]
    return ": ".join([".".join(map(str, problem["loc"])), *value, problem["msg"]])


def shorten(value: object) -> str:
    """`repr`, cut to 80 characters for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
