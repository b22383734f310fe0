"""Lossless coding of bytes: the SPLIT frames of docs/reference/wire-format.md, which consist of frames of codes.

A SPLIT frame holds floats, or changes of elements of any dtype: each byte minus the byte of an older version. Torch
operations split elements into planes of bytes, and a backend's `encode_codes` and `decode_codes` code the planes.
Shapes are those of backend.py. Elements have 1, 2, 4 or 8 bytes. On a GPU the host waits for the size of each plane.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

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

_HEAD = struct.Struct(f"{HEADER.format}I")  # header and base
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_scratch = Scratch()


def max_lossless_bytes(count: int, itemsize: int) -> int:
    """Upper bound of the bytes of a SPLIT frame of `count` elements of `itemsize` bytes."""
    # With DELTA a code of 8 bits becomes one of 9, for which the coders take at most 16 bits. A code of 16 bits takes
    # at most 32.
    planes = itemsize - 1 if itemsize == 8 else itemsize
    of_a_byte = max_frame_bytes(count) - 2 * OCTET * -(-count // OCTET)
    return _HEAD.size + (planes - 1) * of_a_byte + (max_frame_bytes(count) if itemsize == 8 else of_a_byte)


def encode_floats(backend: Backend, x: Tensor, coding: Coding, frame: Tensor) -> int:
    """Write `x` as one frame to `frame`: uint8, at least `max_lossless_bytes` long. Returns the bytes written."""
    rotated = _scratch.of("rotated", x.numel(), INTEGERS[x.element_size()], x.device)
    _rotate_left(x.view(rotated.dtype), rotated)
    planes = _planes(rotated)
    codes = _scratch.of("codes", x.numel(), torch.int32, x.device)
    base = _base(codes.copy_(planes[0]), _largest(planes[0]))
    planes[0].sub_(_signed(base, planes[0]))
    return _write(backend, planes, x, (Predictor.NONE, base), coding, frame)


def encode_byte_changes(backend: Backend, x: Tensor, before: Tensor, coding: Coding, frame: Tensor) -> int:
    """Write each byte of `x` minus that of `before`, an older version, as one frame. Returns the bytes written.

    `frame` is uint8, at least `max_lossless_bytes` long.
    """
    changes = _scratch.of("rotated", x.numel(), INTEGERS[x.element_size()], x.device)
    torch.sub(x.view(torch.uint8), before.view(torch.uint8), out=changes.view(torch.uint8))
    planes = _planes(changes)
    # Always hold the last plane: otherwise a frame of a few bytes could claim to be a huge tensor.
    held = [number for number, plane in enumerate(planes) if number == len(planes) - 1 or plane.any()]
    mask = sum(1 << number for number in held)
    return _write(backend, [planes[number] for number in held], x, (Predictor.DELTA, mask), coding, frame)


def _write(backend: Backend, planes: list[Tensor], x: Tensor, head: tuple, coding: Coding, frame: Tensor) -> int:
    """Write a header with predictor and base, then the planes. Returns the bytes written."""
    codes = _scratch.of("codes", x.numel(), torch.int32, x.device)
    inner = _scratch.of("plane", max_frame_bytes(x.numel()), torch.uint8, x.device)
    end = _HEAD.size
    for plane in planes:
        size = int(backend.encode_codes(codes.copy_(plane), coding, inner))
        frame[end : end + size] = inner[:size]
        end += size
    predictor, base = head
    header = (MAGIC, VERSION, Coder.SPLIT, predictor, 8 * x.element_size(), x.numel(), end - HEADER_BYTES, 0, 0)
    frame[: _HEAD.size] = torch.frombuffer(bytearray(_HEAD.pack(*header, base)), dtype=torch.uint8)
    return end


def decode_floats(backend: Backend, frame: Tensor, out: Tensor, before: Tensor | None = None) -> None:
    """Read one frame into `out`, which may be `before`, the older version. Without `before` only floats can be read.

    Raises DamagedFrame unless every byte is valid. `out` is unchanged then.
    """
    predictor, base = _check_head(backend, frame, out, before is not None)
    bits = _scratch.of("rotated", out.numel(), INTEGERS[out.element_size()], out.device)
    planes = _planes(bits)
    if predictor == Predictor.NONE:
        if base > _largest(planes[0]):
            raise DamagedFrame(f"SPLIT frame has base {base}, which its floats can't have")
        _read(backend, frame, planes)
        planes[0].add_(_signed(base, planes[0]))
        _rotate_right(bits, out.view(bits.dtype))
        return
    if base >> len(planes) - 1 != 1:
        raise DamagedFrame(f"SPLIT frame has a mask {base:#x}, which its {len(planes)} planes can't have")
    bits.zero_()
    _read(backend, frame, [plane for number, plane in enumerate(planes) if base >> number & 1])
    torch.add(before.view(torch.uint8), bits.view(torch.uint8), out=out.view(torch.uint8))


def _read(backend: Backend, frame: Tensor, planes: list[Tensor]) -> None:
    """Read the planes behind the header. Raises DamagedFrame if one is damaged, or if bytes follow the last one."""
    codes = _scratch.of("codes", planes[0].numel(), torch.int32, frame.device)
    rest = frame[_HEAD.size :]
    for plane in planes:
        inner, rest = next_frame(rest)
        # The GPU's kernels need frames at aligned addresses, which a clone has.
        backend.decode_codes(inner if inner.device.type == "cpu" else inner.clone(), codes)
        backend.check()
        if codes.numel() and not _fits(codes, plane.dtype):
            raise DamagedFrame(f"SPLIT frame has codes of more than {8 * plane.element_size()} bits in a plane")
        plane.copy_(codes)
    if rest.numel():
        raise DamagedFrame(f"SPLIT frame goes on for {rest.numel()} bytes behind its last plane")


def _check_head(backend: Backend, frame: Tensor, out: Tensor, has_older: bool) -> tuple[int, int]:
    """Predictor and base from a frame's header. Raises DamagedFrame unless the header fits the elements of `out`."""
    if frame.numel() < _HEAD.size:
        raise DamagedFrame(f"{frame.numel()} bytes are too few for the header of a SPLIT frame")
    is_change = has_older and int(frame[6]) == Predictor.DELTA
    predictor = Predictor.DELTA if is_change else Predictor.NONE
    check_header(backend, frame, (Coder.SPLIT, predictor, 8 * out.element_size()), out.numel())
    return predictor, _HEAD.unpack(frame[: _HEAD.size].cpu().numpy())[-1]


def check_header(backend: Backend, frame: Tensor, kind: tuple[Coder, Predictor, int], count: int) -> None:
    """Raise DamagedFrame unless a frame that consists of frames has these coder, predictor, width and count."""
    *first_fields, stored, payload_bytes, flags, checksum = HEADER.unpack(frame[:HEADER_BYTES].cpu().numpy())
    expected = [MAGIC, VERSION, *kind]
    for name, found, wanted in zip(("magic", "version", "coder", "predictor", "width"), first_fields, expected):
        if found != wanted:
            raise DamagedFrame(f"{name} is {found:#x}, that of a {kind[0].name} frame here is {int(wanted):#x}")
    if stored != count:
        raise DamagedFrame(f"frame holds {stored} elements, expected {count}")
    if payload_bytes != frame.numel() - HEADER_BYTES:
        raise DamagedFrame(f"payload has {frame.numel() - HEADER_BYTES} bytes, the header says {payload_bytes}")
    if flags not in (0, HAS_CHECKSUM) or (not flags and checksum):
        raise DamagedFrame(f"header has unknown flags {flags:#x}, or a checksum ({checksum:#x}) without its flag")
    if flags and (actual := backend.checksum(frame)) != checksum:
        raise DamagedFrame(f"checksum is {actual:#010x}, the header says {checksum:#010x}")


def next_frame(data: Tensor) -> tuple[Tensor, Tensor]:
    """The inner frame that `data` starts with, and the rest of `data`."""
    if data.numel() < HEADER_BYTES:
        raise DamagedFrame(f"the frame ends after {data.numel()} bytes of the header of an inner frame")
    *_, payload_bytes, flags, _ = HEADER.unpack(data[:HEADER_BYTES].cpu().numpy())
    if flags:
        raise DamagedFrame(f"an inner frame has flags {flags:#x}; only the whole may have a checksum")
    size = HEADER_BYTES + payload_bytes
    if size > data.numel():
        raise DamagedFrame(f"an inner frame has {size} bytes, only {data.numel()} are left")
    return data[:size], data[size:]


def _planes(rotated: Tensor) -> list[Tensor]:
    """Views of the top 8 bits (16 of 64) of each integer, and of each byte below them, from the top down."""
    size = rotated.element_size()
    top = torch.int16 if size == 8 else torch.int8
    tops = rotated.view(top).view(-1, size // top.itemsize)[:, -1]  # little endian
    single = rotated.view(torch.int8).view(-1, size)
    return [tops, *(single[:, k] for k in reversed(range(size - top.itemsize)))]


def _base(tops: Tensor, largest: int) -> int:
    """Mean of the top parts, rounded down. All zeros and all ones don't count.

    Args:
        tops: int32. It is overwritten.
        largest: the largest top part without a sign.
    """
    counts = torch.bincount(tops.bitwise_and_(largest), minlength=largest + 1)
    counts[0] = counts[-1] = 0
    total = int(counts.sum())
    numbers = torch.arange(largest + 1, dtype=torch.int64, device=counts.device)
    return int((counts * numbers).sum()) // total if total else 0


def _largest(plane: Tensor) -> int:
    """Largest unsigned number in an element of `plane`."""
    return (1 << 8 * plane.element_size()) - 1


def _signed(base: int, tops: Tensor) -> int:
    """`base` as a signed number with the same bits in the dtype of `tops`, whose arithmetic wraps."""
    return base - (_largest(tops) + 1) if base > torch.iinfo(tops.dtype).max else base


def _fits(codes: Tensor, dtype: torch.dtype) -> bool:
    """Whether all codes fit into `dtype`."""
    lowest, highest = codes.aminmax()
    return torch.iinfo(dtype).min <= int(lowest) and int(highest) <= torch.iinfo(dtype).max


def _rotate_left(bits: Tensor, out: Tensor) -> None:
    """Rotate left by one bit, which moves the sign to the bottom.

    The shift to the right fills up with the sign: 0 or -1.
    """
    torch.bitwise_right_shift(bits, 8 * bits.element_size() - 1, out=out)
    out.neg_().add_(bits, alpha=2)


def _rotate_right(bits: Tensor, out: Tensor) -> None:
    """Rotate right by one bit. Overwrites `bits`."""
    torch.bitwise_right_shift(bits, 1, out=out).bitwise_and_(torch.iinfo(bits.dtype).max)
    out.bitwise_or_(bits.bitwise_left_shift_(8 * bits.element_size() - 1))
