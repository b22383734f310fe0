"""The kernels for a fixed rate against the numpy reference, and what the reference promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import assert_same, floats

from ncz_plugins import kernels
from ncz_plugins.kernels.format import RATE_BLOCK, Noise, Rows, packed_bytes, rate_blocks_of

REFERENCE = kernels.load("reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = range(3, 9)
NOISE = Noise(2**64 - 3, 2**32 - 1, 2**32 - 77, 2**34 - 7)
MARK = 0xA5

# (elements of the tensor, rows, elements of a row): short blocks, short and empty rows, no elements at all.
SHAPES = [
    (0, 2, 0),
    (1, 1, 1),
    (1, 3, RATE_BLOCK),
    (7, 2, 4),
    (3 * RATE_BLOCK, 3, RATE_BLOCK),
    (2 * (RATE_BLOCK + 13), 2, RATE_BLOCK + 13),
    (5 * RATE_BLOCK + 77, 2, 3 * RATE_BLOCK),
    (2 * RATE_BLOCK - 1, 4, RATE_BLOCK),
]


def magnitudes_of(backend, x, rows) -> torch.Tensor:
    magnitudes = torch.full((rows.count * rate_blocks_of(rows.elements),), -1.0, dtype=torch.bfloat16)
    backend.block_magnitudes(x, rows, magnitudes)
    return magnitudes


def pack(backend, x, rows, magnitudes, bits, noise=None) -> torch.Tensor:
    """The codes, behind which nothing was written."""
    size = rows.count * rows.blocks * packed_bytes(bits)
    memory = torch.full((size + 64,), MARK, dtype=torch.uint8)
    backend.pack(x, rows, magnitudes, bits, memory[:size], noise)
    assert (memory[size:] == MARK).all()
    return memory[:size]


def add(backend, packed, count, bits, out_bits) -> torch.Tensor:
    size = packed.numel() // count // bits * out_bits
    memory = torch.full((size + 64,), MARK, dtype=torch.uint8)
    backend.add_packed(packed, count, bits, memory[:size], out_bits)
    assert (memory[size:] == MARK).all()
    return memory[:size]


def unpack(backend, packed, bits, rows, magnitudes, denominator, dtype, addends=1) -> torch.Tensor:
    """The values; those that `rows` does not cover stay -1."""
    memory = torch.full((rows.numel + 64,), -1.0, dtype=dtype)
    backend.unpack(packed, addends, bits, rows, magnitudes, denominator, memory[: rows.numel])
    assert (memory[rows.numel :] == -1).all()
    return memory[: rows.numel]


def levels_of(bits: int) -> int:
    return 2 ** (bits - 1) - 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_backend_gives_the_same(backend, dtype, shape):
    rows = Rows.of(*shape)
    x = floats(rows.numel, dtype)
    magnitudes = magnitudes_of(REFERENCE, x, rows)
    assert_same(magnitudes_of(backend, x, rows), magnitudes)
    for bits in BITS:
        for noise in (None, NOISE):
            expected = pack(REFERENCE, x, rows, magnitudes, bits, noise)
            assert_same(pack(backend, x, rows, magnitudes, bits, noise), expected)
        sums = add(REFERENCE, expected, rows.count, bits, bits + 3)
        assert_same(add(backend, expected, rows.count, bits, bits + 3), sums)
        for denominator in (levels_of(bits), levels_of(bits) * 3 / 1.7):
            values = unpack(REFERENCE, expected, bits, rows, magnitudes, denominator, dtype)
            assert_same(unpack(backend, expected, bits, rows, magnitudes, denominator, dtype), values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_outputs(backend, dtype):
    """Which may go past the caches, row by row, if a row begins at the right address."""
    rows = Rows.of(4 * ((1 << 18) + 13), 4, (1 << 18) + 13)
    x = floats(rows.numel, dtype)
    magnitudes = magnitudes_of(REFERENCE, x, rows)
    packed = pack(REFERENCE, x, rows, magnitudes, 4)
    expected = unpack(REFERENCE, packed, 4, rows, magnitudes, 7.0, dtype)
    assert_same(unpack(backend, packed, 4, rows, magnitudes, 7.0, dtype), expected)


@pytest.mark.parametrize("addends", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_that_are_added_up_as_they_are_decoded_give_the_values_of_their_sums(any_backend, shape, addends):
    rows = Rows.of(*shape)
    x = floats(rows.numel, torch.float32)
    magnitudes = magnitudes_of(REFERENCE, x, rows)
    for bits in BITS:
        of_ranks = [pack(REFERENCE, x, rows, magnitudes, bits, NOISE.from_block(rank)) for rank in range(addends)]
        together, of_sums = torch.cat(of_ranks), bits + 2
        sums = add(REFERENCE, together, addends, bits, of_sums)
        expected = unpack(REFERENCE, sums, of_sums, rows, magnitudes, 7.0, torch.float32)
        assert_same(unpack(any_backend, together, bits, rows, magnitudes, 7.0, torch.float32, addends), expected)


@pytest.mark.parametrize("first, blocks", [(0, 1), (1, 2), (2, 0), (2, 1)])
def test_some_blocks_of_each_row(backend, first, blocks):
    whole = Rows.of(2 * 700, 2, 700)
    x = floats(whole.numel, torch.float32)
    magnitudes = magnitudes_of(REFERENCE, x, whole)
    rows = whole._replace(first=first, blocks=blocks)
    packed = pack(REFERENCE, x, rows, magnitudes, 5)
    assert_same(pack(backend, x, rows, magnitudes, 5), packed)
    everything = pack(REFERENCE, x, whole, magnitudes, 5).view(2, whole.blocks, packed_bytes(5))
    assert_same(packed.view(2, blocks, packed_bytes(5)), everything[:, first : first + blocks])
    values = unpack(REFERENCE, packed, 5, rows, magnitudes, 15.0, torch.float32)
    assert_same(unpack(backend, packed, 5, rows, magnitudes, 15.0, torch.float32), values)


@pytest.mark.parametrize("out_bits", [9, 12, 16, 17, 24, 32])
def test_wide_sums(backend, out_bits):
    """Of codes that many ranks have added up already."""
    count = 3 * RATE_BLOCK
    packed = torch.randint(0, 256, (2 * count // 8 * 8,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    expected = add(REFERENCE, packed, 2, 8, out_bits)
    assert_same(add(backend, packed, 2, 8, out_bits), expected)
    rows = Rows.of(count, 1, count)
    magnitudes = torch.ones(3, dtype=torch.bfloat16)
    values = unpack(REFERENCE, expected, out_bits, rows, magnitudes, 7.0, torch.float32)
    assert_same(unpack(backend, expected, out_bits, rows, magnitudes, 7.0, torch.float32), values)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_error_is_at_most_half_a_step(data):
    """Of each block: half a step to the nearest, a whole one at random, beside the roundings of float32."""
    bits = data.draw(st.sampled_from(BITS))
    numel = data.draw(st.integers(0, 700))
    exponent = data.draw(st.integers(-40, 40))
    noise = data.draw(st.sampled_from([None, NOISE]))
    backend = kernels.cpu_backend()
    x = torch.randn(numel, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) * 2.0**exponent
    rows = Rows.of(numel, 1, numel)
    magnitudes = magnitudes_of(backend, x, rows)
    packed = pack(backend, x, rows, magnitudes, bits, noise)
    values = unpack(backend, packed, bits, rows, magnitudes, levels_of(bits), torch.float32)
    steps = magnitudes.double().repeat_interleave(RATE_BLOCK)[:numel] / levels_of(bits)
    error = (values.double() - x.double()).abs()
    assert (error <= steps * ((0.5 if noise is None else 1) + 1e-5)).all()
    largest = [block.abs().max() for block in x.split(RATE_BLOCK)] if numel else []
    assert all(most <= scale <= most * (1 + 2.0**-7) for most, scale in zip(largest, magnitudes.float()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_comes_out_as_nan(any_backend, dtype, special):
    x = torch.ones(3 * RATE_BLOCK, dtype=dtype)
    x[RATE_BLOCK + 3] = special
    rows = Rows.of(x.numel(), 1, x.numel())
    magnitudes = magnitudes_of(any_backend, x, rows)
    values = unpack(any_backend, pack(any_backend, x, rows, magnitudes, 4), 4, rows, magnitudes, 7.0, dtype)
    assert values[RATE_BLOCK : 2 * RATE_BLOCK].isnan().all()
    assert (values[:RATE_BLOCK] == 1).all() and (values[2 * RATE_BLOCK :] == 1).all()


@pytest.mark.parametrize("bits", BITS)
def test_no_code_leaves_its_bits(any_backend, bits):
    """The largest values of both signs, for all significands of a magnitude, also at random."""
    x = torch.arange(0x3F800000, 0x3F800000 + (1 << 23), 4099, dtype=torch.int32).view(torch.float32)
    x = torch.cat([x, -x])
    rows = Rows.of(x.numel() * RATE_BLOCK, x.numel(), RATE_BLOCK)
    spread = torch.zeros(x.numel(), RATE_BLOCK)
    spread[:, 5] = x
    magnitudes = magnitudes_of(any_backend, spread.view(-1), rows)
    for noise in (None, NOISE):
        packed = pack(any_backend, spread.view(-1), rows, magnitudes, bits, noise)
        values = unpack(any_backend, packed, bits, rows, magnitudes, levels_of(bits), torch.float32)
        values = values.view(-1, RATE_BLOCK)
        assert ((values[:, 5].abs() - x.abs()).abs() <= magnitudes.float() / levels_of(bits)).all()
        assert (values[:, 5].sign() == x.sign()).all()
        assert (values[:, :5] == 0).all() and (values[:, 6:] == 0).all()


def test_tiny_values_share_the_least_scale(any_backend):
    x = torch.full((RATE_BLOCK,), 1e-38)
    rows = Rows.of(RATE_BLOCK, 1, RATE_BLOCK)
    assert magnitudes_of(any_backend, x, rows).tolist() == [2.0**-100]
    packed = pack(any_backend, x, rows, magnitudes_of(any_backend, x, rows), 4)
    assert not packed.any()
