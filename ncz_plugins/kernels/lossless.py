"""Lossless coding of bytes: the SPLIT frames of docs/reference/wire-format.md, which consist of frames of codes.

A SPLIT frame holds floats, or changes of elements of any dtype: each byte minus the byte of an older version.
Operations that torch and numpy share split elements into planes of bytes, and a backend's `encode_codes` and
`decode_codes` code the planes.
Shapes are those of backend.py. Elements have 1, 2, 4 or 8 bytes. On a GPU the host waits for the size of each plane.
"""

from __future__ import annotations

import operator
import struct
from typing import TYPE_CHECKING

from .arrays import bytes_of, device_of, is_on_host, namespace, put, viewed
from .backend import Backend
from .format import (
    HAS_CHECKSUM,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    OCTET,
    VERSION,
    Coder,
    Coding,
    DamagedFrame,
    Predictor,
    max_frame_bytes,
)
from .scratch import Scratch

if TYPE_CHECKING:
    from .arrays import Array

_HEAD = struct.Struct(f"{HEADER.format}I")  # header and base
_scratch = Scratch()


def max_lossless_bytes(count: int, itemsize: int) -> int:
    """Upper bound of the bytes of a SPLIT frame of `count` elements of `itemsize` bytes."""
    # With DELTA a code of 8 bits becomes one of 9, for which the coders take at most 16 bits. A code of 16 bits takes
    # at most 32.
    planes = itemsize - 1 if itemsize == 8 else itemsize
    of_a_byte = max_frame_bytes(count) - 2 * OCTET * -(-count // OCTET)
    return _HEAD.size + (planes - 1) * of_a_byte + (max_frame_bytes(count) if itemsize == 8 else of_a_byte)


def encode_floats(backend: Backend, x: Array, coding: Coding, frame: Array) -> int:
    """Write `x` as one frame to `frame`: uint8, at least `max_lossless_bytes` long. Returns the bytes written."""
    rotated = _scratch.of("rotated", len(x), _integer(x), device_of(x))
    _rotate_left(viewed(x, _integer(x)), rotated)
    planes = _planes(rotated)
    codes = _scratch.of("codes", len(x), "int32", device_of(x))
    codes[:] = planes[0]
    base = _base(codes, _largest(planes[0]))
    planes[0] -= _signed(base, planes[0])
    return _write(backend, planes, x, (Predictor.NONE, base), coding, frame)


def encode_byte_changes(backend: Backend, x: Array, before: Array, coding: Coding, frame: Array) -> int:
    """Write each byte of `x` minus that of `before`, an older version, as one frame. Returns the bytes written.

    `frame` is uint8, at least `max_lossless_bytes` long.
    """
    changes = _scratch.of("rotated", len(x), _integer(x), device_of(x))
    namespace(x).subtract(viewed(x, "uint8"), viewed(before, "uint8"), out=viewed(changes, "uint8"))
    planes = _planes(changes)
    # Always hold the last plane: otherwise a frame of a few bytes could claim to be a huge tensor.
    held = [number for number, plane in enumerate(planes) if number == len(planes) - 1 or plane.any()]
    mask = sum(1 << number for number in held)
    return _write(backend, [planes[number] for number in held], x, (Predictor.DELTA, mask), coding, frame)


def _write(backend: Backend, planes: list[Array], x: Array, head: tuple, coding: Coding, frame: Array) -> int:
    """Write a header with predictor and base, then the planes. Returns the bytes written."""
    codes = _scratch.of("codes", len(x), "int32", device_of(x))
    inner = _scratch.of("plane", max_frame_bytes(len(x)), "uint8", device_of(x))
    end = _HEAD.size
    for plane in planes:
        codes[:] = plane
        size = int(backend.encode_codes(codes, coding, inner))
        frame[end : end + size] = inner[:size]
        end += size
    predictor, base = head
    header = (MAGIC, VERSION, Coder.SPLIT, predictor, 8 * x.itemsize, len(x), end - HEADER_BYTES, 0, 0)
    put(_HEAD.pack(*header, base), frame[: _HEAD.size])
    return end


def decode_floats(backend: Backend, frame: Array, out: Array, before: Array | None = None) -> None:
    """Read one frame into `out`, which may be `before`, the older version. Without `before` only floats can be read.

    Raises DamagedFrame unless every byte is valid. `out` is unchanged then.
    """
    predictor, base = _check_head(backend, frame, out, before is not None)
    bits = _scratch.of("rotated", len(out), _integer(out), device_of(out))
    planes = _planes(bits)
    if predictor == Predictor.NONE:
        if base > _largest(planes[0]):
            raise DamagedFrame(f"SPLIT frame has base {base}, which its floats can't have")
        _read(backend, frame, planes)
        planes[0] += _signed(base, planes[0])
        _rotate_right(bits, viewed(out, _integer(out)))
        return
    if base >> len(planes) - 1 != 1:
        raise DamagedFrame(f"SPLIT frame has a mask {base:#x}, which its {len(planes)} planes can't have")
    bits[:] = 0
    _read(backend, frame, [plane for number, plane in enumerate(planes) if base >> number & 1])
    namespace(out).add(viewed(before, "uint8"), viewed(bits, "uint8"), out=viewed(out, "uint8"))


def _read(backend: Backend, frame: Array, planes: list[Array]) -> None:
    """Read the planes behind the header. Raises DamagedFrame if one is damaged, or if bytes follow the last one."""
    codes = _scratch.of("codes", len(planes[0]), "int32", device_of(frame))
    rest = frame[_HEAD.size :]
    for plane in planes:
        inner, rest = next_frame(rest)
        # The GPU's kernels need frames at aligned addresses, which a clone has.
        backend.decode_codes(inner if is_on_host(inner) else inner.clone(), codes)
        backend.check()
        if len(codes) and not _fits(codes, plane):
            raise DamagedFrame(f"SPLIT frame has codes of more than {8 * plane.itemsize} bits in a plane")
        plane[:] = codes
    if len(rest):
        raise DamagedFrame(f"SPLIT frame goes on for {len(rest)} bytes behind its last plane")


def _check_head(backend: Backend, frame: Array, out: Array, has_older: bool) -> tuple[int, int]:
    """Predictor and base from a frame's header. Raises DamagedFrame unless the header fits the elements of `out`."""
    if len(frame) < _HEAD.size:
        raise DamagedFrame(f"{len(frame)} bytes are too few for the header of a SPLIT frame")
    is_change = has_older and int(frame[6]) == Predictor.DELTA
    predictor = Predictor.DELTA if is_change else Predictor.NONE
    check_header(backend, frame, (Coder.SPLIT, predictor, 8 * out.itemsize), len(out))
    return predictor, _HEAD.unpack(bytes_of(frame[: _HEAD.size]))[-1]


def check_header(backend: Backend, frame: Array, kind: tuple[Coder, Predictor, int], count: int) -> None:
    """Raise DamagedFrame unless a frame that consists of frames has these coder, predictor, width and count."""
    *first_fields, stored, payload_bytes, flags, checksum = HEADER.unpack(bytes_of(frame[:HEADER_BYTES]))
    expected = [MAGIC, VERSION, *kind]
    for name, found, wanted in zip(("magic", "version", "coder", "predictor", "width"), first_fields, expected):
        if found != wanted:
            raise DamagedFrame(f"{name} is {found:#x}, that of a {kind[0].name} frame here is {int(wanted):#x}")
    if stored != count:
        raise DamagedFrame(f"frame holds {stored} elements, expected {count}")
    if payload_bytes != len(frame) - HEADER_BYTES:
        raise DamagedFrame(f"payload has {len(frame) - HEADER_BYTES} bytes, the header says {payload_bytes}")
    if flags not in (0, HAS_CHECKSUM) or (not flags and checksum):
        raise DamagedFrame(f"header has unknown flags {flags:#x}, or a checksum ({checksum:#x}) without its flag")
    if flags and (actual := backend.checksum(frame)) != checksum:
        raise DamagedFrame(f"checksum is {actual:#010x}, the header says {checksum:#010x}")


def next_frame(data: Array) -> tuple[Array, Array]:
    """The inner frame that `data` starts with, and the rest of `data`."""
    if len(data) < HEADER_BYTES:
        raise DamagedFrame(f"the frame ends after {len(data)} bytes of the header of an inner frame")
    *_, payload_bytes, flags, _ = HEADER.unpack(bytes_of(data[:HEADER_BYTES]))
    if flags:
        raise DamagedFrame(f"an inner frame has flags {flags:#x}; only the whole may have a checksum")
    size = HEADER_BYTES + payload_bytes
    if size > len(data):
        raise DamagedFrame(f"an inner frame has {size} bytes, only {len(data)} are left")
    return data[:size], data[size:]


def _planes(rotated: Array) -> list[Array]:
    """Views of the top 8 bits (16 of 64) of each integer, and of each byte below them, from the top down."""
    size = rotated.itemsize
    top, top_bytes = ("int16", 2) if size == 8 else ("int8", 1)
    tops = viewed(rotated, top).reshape(-1, size // top_bytes)[:, -1]  # little endian
    single = viewed(rotated, "int8").reshape(-1, size)
    return [tops, *(single[:, k] for k in reversed(range(size - top_bytes)))]


def _base(tops: Array, largest: int) -> int:
    """Mean of the top parts, rounded down. All zeros and all ones don't count.

    Args:
        tops: int32. It is overwritten.
        largest: the largest top part without a sign.
    """
    tops &= largest
    counts = namespace(tops).bincount(tops, minlength=largest + 1)
    counts[0] = counts[-1] = 0
    counts = counts.tolist()
    total = sum(counts)
    return sum(map(operator.mul, counts, range(largest + 1))) // total if total else 0


def _largest(plane: Array) -> int:
    """Largest unsigned number in an element of `plane`."""
    return (1 << 8 * plane.itemsize) - 1


def _signed(base: int, tops: Array) -> int:
    """`base` as a signed number with the same bits in the dtype of `tops`, whose arithmetic wraps."""
    return base - (_largest(tops) + 1) if base > _largest(tops) // 2 else base


def _fits(codes: Array, plane: Array) -> bool:
    """Whether all codes fit into the dtype of a plane."""
    highest = _largest(plane) // 2
    return -highest - 1 <= int(codes.min()) and int(codes.max()) <= highest


def _integer(x: Array) -> str:
    """The dtype of integers of as many bytes."""
    return f"int{8 * x.itemsize}"


def _rotate_left(bits: Array, out: Array) -> None:
    """Rotate left by one bit, which moves the sign to the bottom.

    The shift to the right fills up with the sign: 0 or -1.
    """
    namespace(bits).add(bits, bits, out=out)
    out -= bits >> (8 * bits.itemsize - 1)


def _rotate_right(bits: Array, out: Array) -> None:
    """Rotate right by one bit. Overwrites `bits`."""
    out[:] = bits
    out >>= 1
    out &= _largest(bits) // 2
    bits <<= 8 * bits.itemsize - 1
    out |= bits
