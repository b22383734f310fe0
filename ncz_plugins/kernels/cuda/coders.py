"""Launches the kernels of the selector and of HUFFMAN and RANS: select.cuh, huffman.cuh and rans.cuh.

Nothing here waits for the device. Grids depend only on the number of codes: a coder's kernels are launched even if
another coder was chosen, or wrote the frame, and then return at once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..format import HUFFMAN_LANES, RANS_PAGE, Coder, Coding, chunks_of
from .arguments import coding_argument

_ANY = torch.float32  # these kernels don't depend on the element type; the module for float32 has them
_THREADS = 256  # of a block, as in types.cuh

# Threads of a block where there are fewer, as in huffman.cuh and rans.cuh.
_HUFFMAN_DECODERS = 128
_RANS_ENCODERS = 32
_RANS_DECODERS = 128

# Bytes of the structures of the same name.
_HUFFMAN_ENCODING, _HUFFMAN_DECODING = 1840, 8200
_RANS_ENCODING, _RANS_DECODING = 10256, 32784
_RANS_PAGE = 7 * RANS_PAGE + 16


def select(launcher, sample: Tensor, sampled: int, count: int, coding: Coding, choice: Tensor) -> None:
    """Choose coder, predictor and RANS's mode for `count` codes.

    Args:
        sample: int32, of which the first `sampled` are what the selector looks at. None where `coding` says which
            coder and predictor, and the coder isn't RANS: the mode is 0 then.
        choice: ncz::Choice, of which all but the symbols is written.
    """
    argument = coding_argument(coding)
    launcher.launch("ncz_select", _ANY, 1, _THREADS, sample, np.int32(sampled), np.int64(count), argument, choice)


def encode(launcher, codes: Tensor, coding: Coding, choice: Tensor, frame: Tensor, size: Tensor) -> None:
    """Write `codes` (int32, [count]) to `frame`, and its size to `size`, if `choice` is HUFFMAN or RANS.

    Where RAW takes fewer bytes, only `choice` is changed to it; what `frame` holds is undefined then.

    Args:
        coding: what was asked for: kernels of a coder that it rules out are not launched.
        choice: ncz::Choice, complete.
        size: int64, [1].
    """
    if coding.coder in (Coder.HUFFMAN, Coder.AUTO):
        _encode_huffman(launcher, codes, choice, frame, size)
    if coding.coder in (Coder.RANS, Coder.AUTO):
        _encode_rans(launcher, codes, choice, frame, size)


def decode(launcher, frame: Tensor, status: Tensor, codes: Tensor) -> None:
    """Read the codes (int32, [count]) of a frame that was opened, if its coder is HUFFMAN or RANS.

    Args:
        status: ncz::Status, where damage is recorded. What `codes` holds is undefined then.
    """
    count = np.int64(codes.numel())
    chunks, pages = chunks_of(codes.numel()), _pages_of(codes.numel())

    decoding, begins = _scratch(frame, _HUFFMAN_DECODING), _scratch(frame, 4 * chunks)
    launcher.launch("ncz_huffman_open", _ANY, 1, _THREADS, frame, count, decoding, begins, status)
    if chunks:
        blocks = -(-HUFFMAN_LANES * chunks // _HUFFMAN_DECODERS)  # a thread decodes a lane
        arguments = frame, count, decoding, begins, codes, status
        launcher.launch("ncz_huffman_decode", _ANY, blocks, _HUFFMAN_DECODERS, *arguments)

    decoding, begins = _scratch(frame, _RANS_DECODING), _scratch(frame, 4 * pages)
    launcher.launch("ncz_rans_open", _ANY, 1, _THREADS, frame, count, decoding, begins, status)
    if pages:
        arguments = frame, count, decoding, begins, codes, status
        launcher.launch("ncz_rans_decode", _ANY, pages, _RANS_DECODERS, *arguments)


def _encode_huffman(launcher, codes: Tensor, choice: Tensor, frame: Tensor, size: Tensor) -> None:
    count, chunks = np.int64(codes.numel()), chunks_of(codes.numel())
    encoding, places = _zeros(codes, _HUFFMAN_ENCODING, chunks)
    launcher.launch("ncz_huffman_count", _ANY, max(1, chunks), _THREADS, codes, count, choice, encoding, frame)
    if chunks:
        arguments = codes, count, choice, encoding, places, frame, size
        launcher.launch("ncz_huffman_encode", _ANY, chunks, _THREADS, *arguments)


def _encode_rans(launcher, codes: Tensor, choice: Tensor, frame: Tensor, size: Tensor) -> None:
    count, number = np.int64(codes.numel()), _pages_of(codes.numel())
    encoding, places = _zeros(codes, _RANS_ENCODING, number)
    pages = _scratch(codes, _RANS_PAGE * number)
    launcher.launch("ncz_rans_collect", _ANY, max(1, number), _THREADS, codes, count, choice, encoding, pages, frame)
    if number:
        arguments = count, choice, encoding, pages, places, frame, size
        launcher.launch("ncz_rans_encode", _ANY, number, _RANS_ENCODERS, *arguments)


def _pages_of(count: int) -> int:
    return -(-count // RANS_PAGE)


def _scratch(like: Tensor, size: int) -> Tensor:
    """`size` bytes, aligned for any structure, where `like` is."""
    return torch.empty(size, dtype=torch.uint8, device=like.device)


def _zeros(like: Tensor, size: int, places: int) -> tuple[Tensor, Tensor]:
    """A structure of `size` bytes, a multiple of 16, and a 64-bit number for each block: all zeros."""
    memory = torch.zeros(size + 8 * places, dtype=torch.uint8, device=like.device)
    return memory[:size], memory[size:]
