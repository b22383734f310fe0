"""HUFFMAN's compiled kernels where they change their ways: each kind of codes takes others through them."""

from __future__ import annotations

import pytest
import torch

from ncz_plugins import kernels
from ncz_plugins.kernels.format import CHUNK, Coder, Coding, Predictor, max_frame_bytes

REFERENCE = kernels.load("reference")
HUFFMAN = Coding(Coder.HUFFMAN, Predictor.NONE)
CODER = 5  # where the header has it
COUNT = 3 * CHUNK + 77


def gaussian(deviation: float) -> torch.Tensor:
    """Symbols, int64: magnitudes as a Gaussian has, so that long and short codes occur."""
    x = torch.randn(COUNT, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (x.abs() * deviation).long()


def with_bursts(symbols: torch.Tensor, largest: int, length: int) -> torch.Tensor:
    """Every now and then `length` symbols in one lane that are all large: more bits than are taken at once."""
    symbols = symbols.clone()
    for first in range(100, COUNT - 4 * length, 1000):
        lane = torch.arange(length) * 4 + first
        symbols[lane] = largest - torch.arange(length)
    return symbols


def check(backend, symbols: torch.Tensor, what: str = "") -> None:
    codes = ((symbols >> 1) ^ -(symbols & 1)).to(torch.int32)
    frame, expected = torch.empty(2, max_frame_bytes(COUNT), dtype=torch.uint8)
    written = backend.encode_codes(codes, HUFFMAN, frame)
    assert written == REFERENCE.encode_codes(codes, HUFFMAN, expected), what
    assert torch.equal(frame[:written], expected[:written]), what
    assert frame[CODER] == Coder.HUFFMAN, what
    decoded = torch.empty_like(codes)
    backend.decode_codes(frame[:written].clone(), decoded)  # a buffer that ends with the frame
    assert torch.equal(decoded, codes), what


@pytest.mark.parametrize("largest", [1, 2, 31, 32, 63, 64, 127, 128, 4095, 4096, 65535, 65536, (1 << 32) - 1])
def test_largest_symbol(backend, largest):
    """Tables end with a symbol of these, or one less."""
    symbols = gaussian(min(largest, 1000) / 3).clamp(max=largest)
    symbols[COUNT // 2] = largest
    check(backend, symbols)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("largest", [4000, 60000, (1 << 32) - 1])
def test_bursts(backend, largest, length):
    for deviation in (0.1, 0.4, 3, 300, 3000, 10000):
        check(backend, with_bursts(gaussian(deviation), largest, length), f"a deviation of {deviation}")


@pytest.mark.parametrize("tokens", [2, 3, 5, 17, 127])
def test_one_token_has_all_but_the_others(backend, tokens):
    """Runs of the shortest code, cut off by all others."""
    symbols = torch.zeros(COUNT, dtype=torch.int64)
    places = torch.arange(0, COUNT, 13)
    symbols[places] = places % tokens
    check(backend, symbols)
