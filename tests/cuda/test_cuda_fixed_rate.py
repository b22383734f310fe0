"""The CUDA kernels for a fixed rate, on the emulator, against the C++ ones: the same bytes, the same numbers."""

from __future__ import annotations

import functools

import pytest
import torch
from emulator import EmulatedLauncher
from hypothesis import example, given
from hypothesis import strategies as st
from samples import assert_same, floats

from ncz_plugins import kernels
from ncz_plugins.kernels.cuda import CudaBackend
from ncz_plugins.kernels.cuda.arguments import rows_argument
from ncz_plugins.kernels.format import RATE_BLOCK, Noise, Rows, packed_bytes, rate_blocks_of

FAST = kernels.load(next(name for name, status in kernels.statuses().items() if status == "ok"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NOISE = Noise(2**64 - 3, 2**32 - 1, 2**32 - 77, 2**34 - 7)
SHAPES = [
    (0, 2, 0),
    (1, 3, RATE_BLOCK),
    (7, 2, 4),
    (2 * (RATE_BLOCK + 13), 2, RATE_BLOCK + 13),
    (2 * RATE_BLOCK - 1, 4, RATE_BLOCK),
    (30 * RATE_BLOCK + 77, 2, 16 * RATE_BLOCK),
]


@functools.cache
def cuda(seed: int = 0, sanitizer: str | None = None) -> CudaBackend:
    return CudaBackend(EmulatedLauncher(seed=seed, sanitizer=sanitizer))


def round_trip(backend, x: torch.Tensor, rows: Rows, bits: int, noise: Noise | None) -> list[torch.Tensor]:
    """What each of the kernels makes of it."""
    some = rows._replace(first=min(1, rows.blocks), blocks=max(0, rows.blocks - 1)) if bits == 5 else rows
    magnitudes = torch.full((rows.count * rate_blocks_of(rows.elements),), -1.0, dtype=torch.bfloat16)
    backend.block_magnitudes(x, rows, magnitudes)
    packed = torch.empty(some.count * some.blocks * packed_bytes(bits), dtype=torch.uint8)
    backend.pack(x, some, magnitudes, bits, packed, noise)
    summed = torch.empty(some.blocks * packed_bytes(bits + 2), dtype=torch.uint8)
    backend.add_packed(packed, some.count, bits, summed, bits + 2)
    values = torch.full((rows.numel,), -1.0, dtype=x.dtype)
    backend.unpack(packed, 1, bits, some, magnitudes, 2.1 * (2 ** (bits - 1) - 1), values)
    added = [values]
    for addends in (2, 3):  # of which the codes of one row stand for those of ranks
        added.append(torch.full((rows.numel,), -1.0, dtype=x.dtype))
        together = packed.repeat(addends)
        together[: packed.numel()] = packed.view(some.count, -1).flip(0).reshape(-1)
        backend.unpack(together, addends, bits, some, magnitudes, 2.1, added[-1])
    return [magnitudes, packed, summed, *added]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bytes_are_those_of_the_cpu(seed, dtype, shape):
    rows = Rows.of(*shape)
    x = floats(rows.numel, dtype)
    for bits in range(3, 9):
        for noise in (None, NOISE):
            for ours, expected in zip(
                round_trip(cuda(seed), x, rows, bits, noise), round_trip(FAST, x, rows, bits, noise)
            ):
                assert_same(ours, expected)


@pytest.mark.parametrize("out_bits", [9, 13, 17, 32])
def test_wide_sums(out_bits):
    packed = torch.randint(0, 256, (2 * 5 * RATE_BLOCK,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    rows, magnitudes, found = Rows.of(5 * RATE_BLOCK, 1, 5 * RATE_BLOCK), torch.ones(5, dtype=torch.bfloat16), []
    for backend in (cuda(), FAST):
        out, values = torch.empty(5 * packed_bytes(out_bits), dtype=torch.uint8), torch.empty(rows.numel)
        backend.add_packed(packed, 2, 8, out, out_bits)
        backend.unpack(out, 1, out_bits, rows, magnitudes, 7.0, values)
        found.append((out, values))
    for ours, expected in zip(*found):
        assert_same(ours, expected)


@given(number=st.integers(0, 2**31 - 1), blocks=st.integers(1, 2**31 - 1))
@example(number=2**31 - 1, blocks=1)
@example(number=2**31 - 1, blocks=2**31 - 1)
def test_the_row_of_a_block_is_found_without_a_division(number, blocks):
    """As in RowsOfBlocks::block."""
    rows = rows_argument(Rows(0, 1, 0, 0, blocks))
    assert (2 * number * rows.multiplier >> 32) >> rows.shift == number // blocks


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("noise", [None, NOISE], ids=["nearest", "at random"])
def test_no_access_out_of_bounds_and_no_race(sanitizer, noise):
    rows = Rows.of(9 * RATE_BLOCK + 5, 2, 5 * RATE_BLOCK)
    x = floats(rows.numel, torch.float32)
    for bits in (4, 7):
        expected = round_trip(FAST, x, rows, bits, noise)
        for ours, theirs in zip(round_trip(cuda(1, sanitizer), x, rows, bits, noise), expected):
            assert_same(ours, theirs)
