"""From files and options of the command line to a `Config`. Nothing here imports torch."""

from __future__ import annotations

from typing import Any

from ..core.config import DEEPSPEED_KEY, SHORT_FORM, Config, find_in_deepspeed, is_deepspeed, read_document
from ..core.errors import ConfigError


def load_config(file: str) -> tuple[Config, dict[str, Any] | None]:
    """The configuration in a file, and the DeepSpeed configuration that it is part of; None if it is of its own.

    Raises ConfigError that names the file, also if it is a DeepSpeed configuration that leaves compression off.
    """
    document = read_document(file)
    if is_deepspeed(document):
        return _from_deepspeed(document, file), document
    return Config.from_document(document, file), None


def config_with(file: str | None, given: dict[str, dict[str, Any]], otherwise: Config | None = None) -> Config:
    """The configuration in a file, or the default one, with the values that options gave in place of its own.

    Args:
        given: values by section and setting; None for what no option gave.
        otherwise: what is taken without a file, in place of the default one.

    Raises ConfigError.
    """
    settings = (load_config(file)[0] if file else otherwise or Config()).model_dump(mode="json")
    for section, values in given.items():
        settings[section] |= {name: value for name, value in values.items() if value is not None}
    return Config(**settings)


def parse_bound(text: str | None) -> dict[str, Any]:
    """The settings of the quantizer that MODE:VALUE stands for; none for None. Raises ConfigError."""
    if text is None:
        return {}
    mode, colon, value = text.partition(":")
    if not (mode and colon and value):
        raise ConfigError(f"--bound: '{text}' is not MODE:VALUE, such as rms:0.25 or range:1e-3")
    return {"mode": mode, "value": parse_number(value)}


def parse_number(text: str | None) -> int | float | str | None:
    """The number that a YAML file would hold. What is no number comes back as it is, and `Config` explains it."""
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            pass
    return text


def _from_deepspeed(document: dict[str, Any], file: str) -> Config:
    """What a DeepSpeed configuration says about compression."""
    try:
        source = find_in_deepspeed(document)
        if source is None:
            remedy = f'"{DEEPSPEED_KEY}": "{SHORT_FORM}"'
            how = "is switched off" if DEEPSPEED_KEY in document else "is missing"
            raise ConfigError(f"'{DEEPSPEED_KEY}' {how}: training would be uncompressed; add {remedy} at the top level")
        return Config.load(source)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
