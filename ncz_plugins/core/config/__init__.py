"""The configuration: what may be set, what it means, and how it is read.

fields          types of the settings, and sizes in bytes
section         what all sections have in common: checks, error messages, the list of settings
sections        the sections: quantizer, entropy, transport, ...
model           `Config`, which holds them, and how it is loaded
presets         configurations by name
deepspeed_file  our key in a DeepSpeed configuration
documents       YAML and JSON files, read strictly
paths           paths in settings, with ~ and $NAME

Others import from this package, not from its modules. Nothing here imports torch, so that checking a file is quick.
"""

from .deepspeed_file import DEEPSPEED_KEY, find_in_deepspeed, is_deepspeed
from .documents import first_problem, read_document, shorten
from .fields import (
    CHUNK,
    FRAME_BYTES,
    MIN_BYTES,
    Allowed,
    Integer,
    KiB,
    MiB,
    Number,
    format_size,
    size_type,
)
from .model import Config, json_schema, settings
from .paths import expanded_path
from .presets import PRESETS, SHORT_FORM
from .section import Section
from .sections import (
    CoderCosts,
    EntropyConfig,
    GuardConfig,
    Policy,
    QuantizerConfig,
    QuantizerOverrides,
    StatisticsConfig,
    StepsConfig,
    TransportConfig,
)

__all__ = [
    "CHUNK",
    "DEEPSPEED_KEY",
    "FRAME_BYTES",
    "MIN_BYTES",
    "PRESETS",
    "SHORT_FORM",
    "Allowed",
    "CoderCosts",
    "Config",
    "EntropyConfig",
    "GuardConfig",
    "Integer",
    "KiB",
    "MiB",
    "Number",
    "Policy",
    "QuantizerConfig",
    "QuantizerOverrides",
    "Section",
    "StatisticsConfig",
    "StepsConfig",
    "TransportConfig",
    "expanded_path",
    "find_in_deepspeed",
    "first_problem",
    "format_size",
    "is_deepspeed",
    "json_schema",
    "read_document",
    "settings",
    "shorten",
    "size_type",
]
