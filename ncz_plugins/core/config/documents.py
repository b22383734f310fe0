"""Reading YAML and JSON files strictly: no repeated keys, and every error names the file and the line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ..errors import ConfigError

_MOST_NODES = 10_000  # values of a file, each counted as often as the file refers to it


def read_document(path: str | os.PathLike) -> dict[Any, Any]:
    """The mapping that a .yaml, .yml or .json file holds, not yet checked any further.

    Raises `ConfigError`, naming the file and where possible the line, if the file cannot be read,
    is not valid YAML or JSON, repeats a key, refers to itself, holds half of a surrogate pair, or does not hold a
    mapping.
    """
    path = Path(os.fsdecode(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error}") from None
    except ValueError as error:  # a name that no file can have
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    parse = {".yaml": _parse_yaml, ".yml": _parse_yaml, ".json": _parse_json}.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(f"{path}: unknown kind of file; allowed: .yaml, .yml, .json")
    try:
        document = parse(text, path)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # the date 2026-13-01, or brackets nested too deeply
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: holds {shorten(document)}, not a mapping of settings")
    try:
        text = json.dumps(document, ensure_ascii=False, default=str)
    except (TypeError, ValueError) as error:  # a date as a key, or a number of thousands of digits
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
        if _expanded(yaml.compose(text, _YamlLoader), path, {}) > _MOST_NODES:
            raise ConfigError(
                f"{path}: has more than {_MOST_NODES:,} values, counting each alias as what it stands for"
            )
        return yaml.load(text, _YamlLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{path}:{mark.line + 1}: invalid YAML: {error.problem}") from None
    except yaml.YAMLError as error:  # a character that YAML forbids
        raise ConfigError(f"{path}: invalid YAML: {error}") from None


def _expanded(node: yaml.Node | None, path: Path, known: dict[int, int]) -> int:
    """How many values a node stands for. Raises ConfigError if it is part of itself.

    Args:
        known: the nodes that were counted before, by id; 0 for those that are being counted.
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
    known[id(node)] = 1 + sum(_expanded(child, path, known) for child in children)
    return known[id(node)]


class _YamlLoader(yaml.SafeLoader):
    """The safe loader, made to refuse repeated keys and to read 1e-3 as the number it is."""

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
    """The first thing that pydantic found wrong: where it is, the value if there is one, and what pydantic says."""
    problem = error.errors()[0]
    value = [] if problem["type"] == "missing" else [shorten(problem["input"])]
    return ": ".join([".".join(map(str, problem["loc"])), *value, problem["msg"]])


def shorten(value: object) -> str:
    """`repr`, cut to a length that fits a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
