"""Warning about DeepSpeed's gradient buckets that are too small to be compressed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...core.config import Config

_DEFAULT_ELEMENTS = 500_000_000  # DeepSpeed's default
_KEY = "zero_optimization.reduce_bucket_size"


def warning(document: Mapping[Any, Any], config: Config) -> str | None:
    """Warning about the buckets of a DeepSpeed configuration; None if they are large enough.

    Args:
        document: the DeepSpeed configuration.
        config: the settings under our key.
    """
    least = config.min_bytes_in_effect(on_gpu=True)
    if not isinstance(least, int) or least == 0:  # auto: measured at the start; never: nothing is compressed
        return None
    least = min(least, config.min_bytes_in_effect(ranks=2))  # in host memory, two ranks may compress smaller ones
    zero = document.get("zero_optimization") or {}
    size = zero.get("reduce_bucket_size", _DEFAULT_ELEMENTS) if isinstance(zero, Mapping) else _DEFAULT_ELEMENTS
    itemsize = _itemsize(document)
    enough = -(-least // itemsize)
    remedy = "Set 5e8 elements, the default of DeepSpeed"
    if size == "auto":
        return (
            f"{_KEY}: auto: Hugging Face makes it the square of hidden_size. For a hidden_size below "
            f"{math.isqrt(enough - 1) + 1} that is less than transport.min_bytes ({least:,} bytes), and gradients of "
            f"parameters below that size go uncompressed. {remedy}"
        )
    if isinstance(size, (int, float)) and size < enough:
        return (
            f"{_KEY}: {size:,.0f} elements of {itemsize} bytes are less than transport.min_bytes ({least:,} bytes), so "
            f"gradients of parameters below that size go uncompressed. {remedy}"
        )
    return None


def _itemsize(document: Mapping[Any, Any]) -> int:
    """Bytes of a gradient element, judging by the configuration."""
    dtype = document.get("communication_data_type")
    if dtype is None:
        halves = (document.get(name) for name in ("fp16", "bf16"))
        return 2 if any(isinstance(each, Mapping) and each.get("enabled") is not False for each in halves) else 4
    return 4 if dtype in ("fp32", "float32") else 2
