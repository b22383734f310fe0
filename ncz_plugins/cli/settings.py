"""Configuration from files and options of the command line. Nothing here imports torch."""

from __future__ import annotations

from typing import Any

from ..core.config import (
    DEEPSPEED_KEY,
    SHORT_FORM,
    Config,
    find_in_deepspeed,
    is_deepspeed,
    is_preset,
    read_document,
)
from ..core.errors import ConfigError


def load_config(file: str) -> tuple[Config, dict[str, Any] | None]:
    """The configuration in a file, and the DeepSpeed configuration around it; None for a file of ours.

    The name of a preset, such as "ncclz:small", is as good as a file. Raises ConfigError, naming the file, also for a
    DeepSpeed configuration without compression.
    """
    if is_preset(file):
        return Config.load(file), None
    document = read_document(file)
    if is_deepspeed(document):
        return _from_deepspeed(document, file), document
    return Config.from_document(document, file), None


def config_with(file: str | None, given: dict[str, dict[str, Any]], otherwise: Config | None = None) -> Config:
    """The configuration in a file, overridden by options.

    Args:
        file: path of the file, or a preset's name; None: `otherwise`.
        given: section -> setting -> value; None for a value keeps that of the file.
        otherwise: configuration if there is no file; None: the defaults.

    Raises ConfigError.
    """
    settings = (load_config(file)[0] if file else otherwise or Config()).model_dump(mode="json")
    for section, values in given.items():
        settings[section] |= {name: value for name, value in values.items() if value is not None}
    return Config(**settings)


def parse_bound(text: str | None) -> dict[str, Any]:
    """Settings `mode` and `value` of the quantizer from MODE:VALUE; empty for None. Raises ConfigError."""
    if text is None:
        return {}
    mode, colon, value = text.partition(":")
    if not (mode and colon and value):
        raise ConfigError(f"--bound: '{text}' is not MODE:VALUE, such as rms:0.25 or range:1e-3")
    return {"mode": mode, "value": parse_number(value)}


def parse_number(text: str | None) -> int | float | str | None:
    """The number in `text`. Other text is returned unchanged, and `Config` then reports it."""
    for number_type in (int, float):
        try:
            return number_type(text)
        except (TypeError, ValueError):
            pass
    return text


def _from_deepspeed(document: dict[str, Any], file: str) -> Config:
    """The configuration under our key. Raises ConfigError if the key is missing, null or false."""
    try:
        source = find_in_deepspeed(document)
        if source is None:
            remedy = f'"{DEEPSPEED_KEY}": "{SHORT_FORM}"'
            how = "is switched off" if DEEPSPEED_KEY in document else "is missing"
            raise ConfigError(f"'{DEEPSPEED_KEY}' {how}: training would be uncompressed; add {remedy} at the top level")
        return Config.load(source)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
