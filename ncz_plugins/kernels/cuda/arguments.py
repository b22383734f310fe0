"""Arguments of kernels: the structures of common/format.h, the tables of types.cuh, and how a launch passes them."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ..addresses import require, wrong_tensor
from ..format import DTYPES, Coding, Noise, Rows, StepRule, blocks_of, coder_of_gpus, max_frame_bytes

OF_CODES = torch.float32  # whose module has the kernels that work on codes alone
MOST_PIECES, MOST_INPUTS = 32, 64  # most rows of a table


class CodingArgument(ctypes.Structure):
    """Structure ncz::Coding."""

    _fields_ = [("coder", ctypes.c_int32), ("predictor", ctypes.c_int32), ("costs", ctypes.c_int64 * 6)]


class NoiseArgument(ctypes.Structure):
    """Structure ncz::Noise."""

    _fields_ = [("key", ctypes.c_uint64), ("first", ctypes.c_uint64), ("shift", ctypes.c_uint32)]


_NOISE = struct.Struct("<QQI4x")  # the same


class RowsArgument(ctypes.Structure):
    """Structure ncz::RowsOfBlocks."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in Rows._fields),
        ("multiplier", ctypes.c_uint32),
        ("shift", ctypes.c_uint32),
    ]


@functools.lru_cache(maxsize=64)
def rows_argument(rows: Rows) -> RowsArgument:
    """`rows` as a kernel's argument, with what divides numbers below 2**31 by the blocks of a row, and no division."""
    shift = max(0, rows.blocks - 1).bit_length()
    return RowsArgument(*rows, -(-(1 << 31 + shift) // max(1, rows.blocks)), shift)


class StepRuleArgument(ctypes.Structure):
    """Structure ncz::StepRule."""

    _fields_ = [
        ("mode", ctypes.c_int64),
        *((name, ctypes.c_double) for name in StepRule._fields if name != "mode"),
    ]


@functools.lru_cache(maxsize=64)
def step_rule_argument(rule: StepRule) -> StepRuleArgument:
    """`rule` as a kernel's argument."""
    return StepRuleArgument(*rule)


@functools.lru_cache(maxsize=64)
def coding_argument(coding: Coding) -> CodingArgument:
    """`coding` as a kernel's argument, with the GPU's coder."""
    return CodingArgument(coder_of_gpus(coding.coder), coding.predictor, tuple(coding.costs))


@functools.cache
def integer(value: int) -> np.int32:
    """`value` as a kernel's argument of 32 bits."""
    return np.int32(value)


def noise_argument(noise: Noise | None) -> NoiseArgument:
    """`noise` as a kernel's argument; zeros for None."""
    return NoiseArgument.from_buffer_copy(noise_bytes(noise))


@functools.lru_cache(maxsize=64)
def noise_bytes(noise: Noise | None) -> bytes:
    """The bytes of `noise_argument`, which are found faster than the structure."""
    return _NOISE.pack(0, 0, 0) if noise is None else _NOISE.pack(noise.key, noise.first, noise.shift)


class Table:
    """Table ncz::Pieces, ncz::Inputs or ncz::Runs: what a launch must know about each frame that it works on.

    Args:
        row: format of a row, as in `struct`.
        most: number of rows in the C++ structure.
        rows: members of each row. A tensor stands for its address, None for a null pointer.
    """

    def __init__(self, row: str, most: int, rows: list[tuple]):
        self._row = row
        self._most = most
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @functools.cached_property
    def value(self) -> bytes:
        """Bytes of the structure. Valid as long as this object holds the tensors."""
        members = [each.data_ptr() if isinstance(each, Tensor) else each or 0 for row in self._rows for each in row]
        return _structure(self._row, len(self), self._most).pack(len(self), 0, *members)

    @property
    def tensors(self) -> list[tuple[int, Tensor]]:
        """Offset in the structure, in bytes, and tensor, for each address of a tensor."""
        # Addresses come first in a row, and every member before them has 8 bytes, too.
        size = struct.calcsize(f"<{self._row}")
        return [
            (8 + number * size + 8 * place, member)
            for number, row in enumerate(self._rows)
            for place, member in enumerate(row)
            if isinstance(member, Tensor)
        ]

    def with_tensors(self, other: Callable[[Tensor], Tensor]) -> Table:
        """Table with another tensor in place of each."""
        rows = [tuple(other(each) if isinstance(each, Tensor) else each for each in row) for row in self._rows]
        return Table(self._row, self._most, rows)


@functools.cache
def _structure(row: str, rows: int, most: int) -> struct.Struct:
    return struct.Struct(f"<ii{row * rows}{(most - rows) * struct.calcsize(f'<{row}')}x")


def inputs_table(rows: list[tuple]) -> Table:
    """Table ncz::Inputs. Each row: (frame, bytes, count, first chunk). Raises WrongTensor."""
    for frame, nbytes, *_ in rows:
        require(frame, "frame", torch.uint8, nbytes)
    return Table(_INPUT, MOST_INPUTS, rows)


def pieces_table(rows: list[tuple]) -> Table:
    """Table ncz::Pieces, with a piece for each frame of a launch. Raises WrongTensor.

    Each row: (values, steps, codes, frame, sum, scales, first scale block, count, first chunk, first input, inputs).
    """
    for row in rows:
        _check_piece(row, rows[0])
    return Table(_PIECE, MOST_PIECES, rows)


def _check_piece(row: tuple, first: tuple) -> None:
    """Raise WrongTensor unless each tensor of a row has the dtype and length that kernels expect."""
    values, steps, codes, frame, sums, scales, _, count, *_ = row
    if values is not None:
        dtype = first[0].dtype if first[0].dtype in DTYPES else torch.float32
        require(values, "values", dtype, count)
    per_block = torch.float64 if values is not None and values.dtype is torch.float64 else torch.float32
    if steps is not None:
        require(steps, "steps", per_block, blocks_of(count))
    if codes is not None:
        require(codes, "codes", torch.int32, count)
    if frame is not None:
        require(frame, "frame", torch.uint8, max_frame_bytes(count))
    if sums is not None:
        require(sums, "sum", values.dtype, count)
    if scales is not None:
        require(scales, "scales", per_block, blocks_of(count))


def runs_table(rows: list[tuple]) -> Table:
    """Table ncz::Runs. Each row: (elements, first chunk, chunks, first block, blocks)."""
    return Table(_RUN, MOST_PIECES, rows)


_INPUT, _PIECE, _RUN = "QqII", "7Q4I", "q4I"  # rows of the tables, as formats of `struct`


# ------------------------------------------------------------------ arguments of one launch


def require_on(device: int, arguments: tuple) -> None:
    """Raise WrongTensor unless all tensors among the arguments are contiguous and on the CUDA device of this index."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            _require_on(device, argument)
        elif isinstance(argument, Table):
            for _, tensor in argument.tensors:
                _require_on(device, tensor)


def _require_on(device: int, tensor: Tensor) -> None:
    if tensor.get_device() != device or not tensor.is_contiguous():
        raise wrong_tensor(tensor, "each tensor of a launch", tensor.dtype, 0, f"cuda:{device}")


class ArgumentMemory:
    """Memory that launches of one kernel copy their arguments from, filled for each launch. For one thread.

    Args:
        arguments: those of the first launch. Later launches have arguments of the same types.
    """

    def __init__(self, arguments: tuple):
        formats = list(map(_format, arguments))
        self._fields = struct.Struct(
            "<" + "".join(f"{each}{-struct.calcsize(each) % _ALIGNMENT_BYTES}x" for each in formats)
        )
        self._bytes = ctypes.create_string_buffer(self._fields.size)
        sizes = (-(-struct.calcsize(each) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for each in formats)
        begin = ctypes.addressof(self._bytes)
        places = list(accumulate(sizes, initial=0))[:-1]
        self._pointers = (ctypes.c_void_p * len(places))(*(begin + place for place in places))
        self._noise_places = [at for at, argument in zip(places, arguments) if isinstance(argument, NoiseArgument)]

    def filled(self, arguments: tuple) -> int:
        """Address of the pointers to these arguments, valid until the next call."""
        self._fields.pack_into(self._bytes, 0, *map(_packed, arguments))
        return ctypes.addressof(self._pointers)

    def noise_bytes(self) -> list[memoryview]:
        """The bytes of each argument that is a NoiseArgument. To overwrite them is to change the argument."""
        everything, size = memoryview(self._bytes).cast("B"), ctypes.sizeof(NoiseArgument)
        return [everything[at : at + size] for at in self._noise_places]


_ALIGNMENT_BYTES = 8  # of each parameter of a kernel


def _format(argument) -> str:
    """Format of an argument, as in `struct`."""
    if argument is None or isinstance(argument, Tensor):
        return "Q"
    if isinstance(argument, np.generic):
        return argument.dtype.char.replace("l", "q")
    return f"{len(_packed(argument))}s"


def _packed(argument) -> int | float | bytes:
    """Value of an argument, for `struct`."""
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if argument is None:
        return 0
    if isinstance(argument, np.generic):
        return argument.item()
    return argument.value if isinstance(argument, Table) else bytes(argument)
