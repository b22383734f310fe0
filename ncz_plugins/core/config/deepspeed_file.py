"""Our key in a DeepSpeed configuration, and how it is found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from ..errors import ConfigError

DEEPSPEED_KEY = "communication_compression"  # our key at the top level of a DeepSpeed configuration

# Top-level keys that DeepSpeed configurations have and ours don't.
_DEEPSPEED_KEYS = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_optimization",
    "fp16",
    "bf16",
}


def is_deepspeed(document: Mapping[Any, Any]) -> bool:
    """Whether `document` is a DeepSpeed configuration rather than one of ours."""
    return any(key in _DEEPSPEED_KEYS or _means_our_key(key) for key in document)


def find_in_deepspeed(document: Mapping[Any, Any]) -> Any:
    """Value of the top-level key "communication_compression": a source for `Config.load`. None for null and false.

    Raises ConfigError if the key is misspelt or not at the top level, where DeepSpeed would silently ignore it and
    train uncompressed.
    """
    for path in _paths_of_our_key(document):
        if len(path) > 1:
            raise ConfigError(f"'{DEEPSPEED_KEY}' stands at {'.'.join(path)}; move it to the top level of the file")
        if path[0] != DEEPSPEED_KEY:
            raise ConfigError(f"{path[0]}: unknown key; did you mean '{DEEPSPEED_KEY}'?")
    source = document.get(DEEPSPEED_KEY)
    return None if source is False else source


def _means_our_key(key: object) -> bool:
    """Whether `key` is our key or a misspelling of it. DeepSpeed's communication_data_type is neither."""
    letters = re.sub("[^a-z]", "", str(key).lower())
    return SequenceMatcher(None, letters, DEEPSPEED_KEY.replace("_", "")).ratio() > 0.7


def _paths_of_our_key(document: Mapping[Any, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in document.items():
        path = (*prefix, str(key))
        if _means_our_key(key):
            yield path
        elif isinstance(value, Mapping):
            yield from _paths_of_our_key(value, path)
