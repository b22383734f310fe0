"""Types and allowed values of the settings, and sizes in bytes. Nothing here imports torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema

from .paths import path_setting

# Copied from kernels.format, which imports torch.
CHUNK, SCALE_BLOCK, RATE_BLOCK = 4096, 128, 256

KiB, MiB = 1 << 10, 1 << 20
FRAME_BYTES, MIN_BYTES = 4 * MiB, 128 * KiB  # defaults
# Smallest size that gains, in MiB per Gbit/s of the link. On two cores, calls break even below this size
# (docs/results/performance.md). On a GPU a call costs 2 to 3 ms, at a fixed rate 1 ms (docs/results/gpus.md).
HOST_MIB_PER_GBPS, GPU_MIB_PER_GBPS, GPU_FIXED_RATE_MIB_PER_GBPS = 1.0, 0.3, 0.1
PIECE_MIB_PER_GBPS = 0.25  # of a piece that one rank sends another, in host memory, on a free core
# For 2 ranks, in host memory, on a link slower than FAST_GBPS.
TWO_RANKS_MIB_PER_GBPS, TWO_RANKS_MIN_BYTES = 0.5, 32 * KiB
MOST_SMALL_RANKS = 16  # among more, an uncompressed call is gloo's ring, whose messages take longer than any link
FAST_GBPS = 2.5  # from here on, ranks wait for each other's cores, not for the link (docs/results/performance.md)
FAR_TRIP_SECONDS = 0.005  # ranks are far apart if a short message takes longer
FAST_FRAME_BYTES = 8 * MiB  # frames on such a link, where overlapping coding with sending gains little
GPU_FRAME_BYTES = 64 * MiB  # frames on a GPU: on an H100, 256 MiB took a quarter of the time of 4 MiB frames
_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": KiB, "MiB": MiB, "GiB": 1 << 30}
_SIZE = re.compile(rf"^([0-9]+) ?({'|'.join(_UNITS)})$")


@dataclass(frozen=True)
class Allowed:
    """Text that error messages and documentation show as the allowed values of a field."""

    text: str


def size_type(minimum: int, maximum: int, words: tuple[str, ...], allowed: str) -> Any:
    """Field type for a number of bytes: an integer, a string such as "64KiB", or one of `words`.

    Args:
        minimum, maximum: range in bytes, both ends included.
        words: further allowed values, such as "auto".
        allowed: text for error messages and documentation.
    """

    def parse(value: object) -> int | str:
        if value in words:
            return value
        match = _SIZE.match(value) if isinstance(value, str) else None
        size = int(match[1]) * _UNITS[match[2]] if match else value
        if type(size) is not int or not minimum <= size <= maximum:  # type() is int: excludes bool
            raise ValueError(allowed)
        return size

    integer = {"type": "integer", "minimum": minimum, "maximum": maximum}
    text = {"type": "string", "pattern": _SIZE.pattern}
    schema = {"anyOf": [integer, text, {"enum": list(words)}]}
    return Annotated[int | str, PlainValidator(parse), WithJsonSchema(schema), Allowed(allowed)]


_MOST_RANKS = 1 << 20
_HIERARCHY = "auto, off, or an integer from 2 to 2^20"


def _parse_hierarchy(value: object) -> int | str:
    if value is False:  # YAML reads a bare `off` as False
        return "off"
    if value in ("auto", "off") or (type(value) is int and 2 <= value <= _MOST_RANKS):
        return value
    raise ValueError(_HIERARCHY)


# Strict: booleans and strings are refused. A float accepts an integer, and an integer accepts 256.0, which `Section`
# converts to 256 first.
Integer = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_FRAME_BYTES = "auto, or 16 KiB to 64 MiB: bytes, or a string such as '1MiB'"
FrameBytes = size_type(16 * KiB, 64 * MiB, ("auto",), _FRAME_BYTES)
OptionalFrameBytes = Annotated[FrameBytes | None, Allowed(f"null, {_FRAME_BYTES}")]
_MIN_BYTES = "auto, never, or 0 to 2^50: bytes, or a string such as '64KiB'"
MinBytes = size_type(0, 1 << 50, ("auto", "never"), _MIN_BYTES)
OptionalMinBytes = Annotated[MinBytes | None, Allowed(f"null, {_MIN_BYTES}")]
Hierarchy = Annotated[
    int | str,
    PlainValidator(_parse_hierarchy),
    WithJsonSchema(
        {"anyOf": [{"enum": ["auto", "off", False]}, {"type": "integer", "minimum": 2, "maximum": _MOST_RANKS}]}
    ),
    Allowed(_HIERARCHY),
]
Connections = Annotated[
    Literal["auto"] | Annotated[Integer, Field(ge=1, le=16)], Allowed("auto, or an integer from 1 to 16")
]
Flag = Annotated[bool, Field(strict=True)]
NonEmptyText = Annotated[str, Field(strict=True, min_length=1)]
FilePath = Annotated[
    str, PlainValidator(path_setting), WithJsonSchema({"type": "string", "minLength": 1}), PlainSerializer(str)
]
OptionalPath = Annotated[FilePath | None, Allowed("null, or a path")]
Role = Literal["gradient", "parameter", "activation"]
Dtype = Literal["float16", "bfloat16", "float32", "float64"]
StepNumber = Annotated[Integer, Field(ge=0, le=1 << 50), Allowed("an integer from 0 to 2^50")]

# Settings of the quantizer, which policies can override.
Kind = Literal["auto", "error_bound", "stochastic", "lossless"]
Mode = Literal["abs", "rel", "rms", "range", "bits"]
BoundValue = Annotated[Number, Field(gt=0)]
Block = Annotated[Integer, Field(ge=0, le=1 << 40, multiple_of=SCALE_BLOCK)]
LEAST_BITS, MOST_BITS = 3, 8  # per value, with mode bits
BOUND_VALUE = Allowed(
    "a finite number above 0; with mode rel or range below 1; with rms at most 10; "
    f"with bits an integer from {LEAST_BITS} to {MOST_BITS}"
)
BLOCK = Allowed(f"null, 0, or a positive multiple of {SCALE_BLOCK}, at most 2^40")
FLAG = Allowed("true, false")


def min_bytes_for(link_gbps: float | None, mib_per_gbps: float = HOST_MIB_PER_GBPS, least: int = MIN_BYTES) -> int:
    """Smallest size in bytes for which compression gains on a link.

    Rounded up to a power of two, so that small changes of the measured speed don't change which calls are compressed.

    Args:
        link_gbps: speed of the link in Gbit/s; None if unknown: the default is returned.
        mib_per_gbps: smallest size on a link of 1 Gbit/s, in MiB.
        least: smallest value returned for a known link, in bytes.
    """
    if link_gbps is None:
        return MIN_BYTES
    return max(least, round(MiB * 2.0 ** math.ceil(math.log2(mib_per_gbps * link_gbps))))


def format_size(size: int) -> str:
    """Bytes in the largest binary unit that holds them evenly: 1048576 is "1 MiB"."""
    for unit in ("GiB", "MiB", "KiB"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]} {unit}"
    return f"{size} B"
