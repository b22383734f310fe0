"""Configuration: the settings, their meaning, and how they are read.

model           `Config`, all settings in one object, and how it is loaded
sections        the sections of the configuration: quantizer, entropy, transport, ...
section         base class of all sections: validation, error messages, the list of settings
fields          types and allowed values of settings, and sizes in bytes
presets         configurations by name, such as "ncclz:small"
documents       strict reading of YAML and JSON files
deepspeed_file  our key in a DeepSpeed configuration
paths           paths in settings, with ~ and $NAME

Import from this package, not from its modules. Nothing here imports torch, so that checking a file is quick.
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
from .model import ROLE_DEFAULTS, Config, json_schema, settings
from .paths import expanded_path
from .presets import PRESETS, SHORT_FORM, is_preset
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
    "ROLE_DEFAULTS",
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
    "is_preset",
    "json_schema",
    "read_document",
    "settings",
    "shorten",
    "size_type",
]
