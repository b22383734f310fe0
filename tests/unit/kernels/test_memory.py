"""How much memory the compiled kernels borrow, and that nothing is lost where they write into the memory they read."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from ncz_plugins import kernels
from ncz_plugins.kernels.format import (
    BLOCK,
    CHUNK,
    RANS_PAGE,
    Coder,
    Coding,
    Noise,
    Predictor,
    blocks_of,
    max_frame_bytes,
)

REFERENCE = kernels.load("reference")
UNIT_BYTES = 4 * RANS_PAGE + 4 * BLOCK  # the symbols that are coded together, and what is touched behind them
CODER, WIDTH = 5, 7  # where the header has them
SEVERAL_UNITS = RANS_PAGE + CHUNK + 77


@pytest.mark.parametrize("count", [0, 1, 8, 100, CHUNK, CHUNK + 1, RANS_PAGE - 1, 1 << 18, 10**6 + 7, 1 << 30])
def test_scratch_is_hardly_larger_than_a_frame(backend, count):
    assert 0 < backend._scratch_bytes(count) <= 1.2 * max_frame_bytes(count) + UNIT_BYTES


def test_reading_takes_one_unit(backend):
    assert backend._scratch_bytes(0) == UNIT_BYTES


def uniform(count: int, width: int) -> torch.Tensor:
    """Codes of `width` bits at random, int64, the highest left out: one can be added to each."""
    half = 1 << width - 1
    return torch.randint(-half, half - 1, (count,), generator=torch.Generator().manual_seed(width))


def all_different(count: int, width: int) -> torch.Tensor:
    """As `uniform`, but no two of the codes are the same."""
    prime = 2654435761
    return torch.arange(count) * prime % ((1 << width) - 1) - (1 << width - 1)


def reduced(backend, total: torch.Tensor, sent: Coder, coding: Coding, noise: Noise | None = None) -> torch.Tensor:
    """The frame of `total`, made of a received frame with coder `sent`, and of floats.

    With noise the floats lie halfway between two codes, so that it is of `total` or one more.
    """
    own = torch.arange(total.numel()) % 1000 - 500
    received, frame = torch.empty(2, max_frame_bytes(total.numel()), dtype=torch.uint8)
    written = backend.encode_codes((total - own).to(torch.int32), Coding(sent, Predictor.NONE), received)
    x = own.double() + (0.5 if noise else 0)
    inverse_steps = torch.ones(blocks_of(total.numel()), dtype=torch.float64)
    return frame[: backend.reduce(received[:written], x, inverse_steps, coding, frame, noise)]


CODES = {  # each with the width of its symbols in RAW
    "8": (uniform(SEVERAL_UNITS, 8), 8),
    "16": (uniform(SEVERAL_UNITS, 16), 16),
    "32": (uniform(SEVERAL_UNITS, 32), 32),
    "8-different": (all_different(200, 8), 8),
    "16-different": (all_different(SEVERAL_UNITS, 16), 16),
    "32-different": (all_different(SEVERAL_UNITS, 32), 32),
    "few": (uniform(20, 7), 8),  # so few that the tables alone are too much; kept as bytes
    "mixed": (torch.cat([uniform(RANS_PAGE, 7), uniform(9 * RANS_PAGE + 9, 8)]), 8),  # a unit of bytes before others
}
coders = pytest.mark.parametrize("coder", [Coder.HUFFMAN, Coder.RANS], ids=lambda c: c.name)


@cache
def reduced_to_raw(name: str, noise: Noise | None) -> torch.Tensor:
    """The reference's frame of some of CODES, which takes a while."""
    return reduced(REFERENCE, CODES[name][0], Coder.FIXED, Coding(Coder.RAW, Predictor.NONE), noise)


@pytest.mark.parametrize("name", CODES)
@coders
def test_reduce_gives_up_in_favour_of_raw(backend, coder, name):
    """The symbols lie where the codes did, and RAW must find them there."""
    codes, width = CODES[name]
    for sent, noise in product((Coder.FIXED, Coder.HUFFMAN, Coder.RANS), (None, Noise(3, 1, 4))):
        case = sent, noise
        frame = reduced(backend, codes, sent, Coding(coder, Predictor.NONE), noise)
        assert (frame[CODER], frame[WIDTH]) == (Coder.RAW, width), case
        assert torch.equal(frame, reduced_to_raw(name, noise)), case


@coders
def test_reduce_with_delta_gives_up_in_favour_of_raw(backend, coder):
    total = torch.cat([chunk.cumsum(0) for chunk in uniform(SEVERAL_UNITS, 16).split(CHUNK)])
    frame = reduced(backend, total, Coder.FIXED, Coding(coder, Predictor.DELTA))
    assert (frame[CODER], frame[WIDTH]) == (Coder.RAW, 16)
    assert torch.equal(frame, reduced(REFERENCE, total, Coder.FIXED, Coding(coder, Predictor.DELTA)))


@coders
@pytest.mark.parametrize("width", [8, 16, 32])
def test_encode_with_noise_gives_up_in_favour_of_raw(backend, width, coder):
    x = uniform(SEVERAL_UNITS, width).double() + 0.5
    inverse_steps = torch.ones(blocks_of(x.numel()), dtype=torch.float64)
    frames = torch.empty(2, max_frame_bytes(x.numel()), dtype=torch.uint8)
    arguments = inverse_steps, Coding(coder, Predictor.NONE)
    sizes = [each.encode(x, *arguments, frame, Noise(1, 2, 3)) for each, frame in zip((backend, REFERENCE), frames)]
    assert (frames[0][CODER], frames[0][WIDTH]) == (Coder.RAW, width)
    assert torch.equal(frames[0][: sizes[0]], frames[1][: sizes[1]])
