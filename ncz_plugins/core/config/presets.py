"""Configurations by name: "ncclz" for the defaults, "ncclz:small" and others."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from ..errors import ConfigError

SHORT_FORM = "ncclz"  # stands for all defaults, wherever a configuration is expected

# Settings that differ from the defaults. docs/guides/choosing-a-bound.md says what each preset costs and saves.
PRESETS: dict[str, dict[str, Any]] = {
    "accurate": {"quantizer": {"value": 0.25}},
    "balanced": {},
    "small": {"quantizer": {"value": 0.85}},
    # For the optimizer Muon. All parameters are treated alike: in one call, and vectors are few.
    "muon": {"quantizer": {"kind": "error_bound", "value": 0.025, "error_feedback": True}},
    # The same for DDP, whose calls have whole matrices. Muon trains those of the layers, which have numbers in all
    # models that we know: blocks.0, h.0, layers.0. Embeddings and heads have none.
    "muon-ddp": {
        "quantizer": {"value": 0.1},
        "policies": [
            {
                "name": "*.[0-9]*.*",
                "shape": "matrix",
                "quantizer": {
                    "kind": "error_bound",
                    "value": 0.06,
                    "block": 32768,
                    "error_feedback": True,
                    "rotation": True,
                },
            }
        ],
    },
}
NAMES = ", ".join(f"'{name}'" for name in (SHORT_FORM, *(f"{SHORT_FORM}:{each}" for each in PRESETS)))  # in messages


def is_preset(source: str) -> bool:
    """Whether a string names a preset, known or unknown, rather than a file."""
    return source == SHORT_FORM or source.startswith(f"{SHORT_FORM}:")


def preset(source: str) -> dict[str, Any]:
    """Settings of a preset that differ from the defaults. Raises ConfigError if there is no such preset."""
    name = source.removeprefix(f"{SHORT_FORM}:") if source != SHORT_FORM else "balanced"
    if name not in PRESETS:
        close = get_close_matches(name.lower(), PRESETS, n=1)
        meant = f"did you mean '{SHORT_FORM}:{close[0]}'? " if close else ""
        raise ConfigError(f"{source!r} is not a configuration; {meant}allowed: {NAMES}")
    return PRESETS[name]
