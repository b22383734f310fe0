"""All backends against the numpy reference: the same bytes, the same numbers, nothing touched out of bounds."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import COMPILED, assert_same, codes_of_width, floats, sparse_codes, steps_of

from ncz_plugins import kernels
from ncz_plugins.kernels import cpu
from ncz_plugins.kernels.format import (
    CHUNK,
    DTYPES,
    HEADER_BYTES,
    PIECE,
    SAMPLE_PIECES,
    SCALE_BLOCK,
    Coder,
    Coding,
    DamagedFrame,
    Noise,
    Predictor,
    SelectorCosts,
    StepRule,
    blocks_of,
    max_frame_bytes,
)
from ncz_plugins.kernels.reference.symbols import predict
from ncz_plugins.kernels.reference.values import random_bits

REFERENCE = kernels.load("reference")
CODERS = (Coder.RAW, Coder.FIXED, Coder.HUFFMAN, Coder.RANS, Coder.AUTO)
ASKED = [Coding(coder, predictor) for coder, predictor in itertools.product(CODERS, Predictor)]
SOME_ASKED = [
    Coding(),
    Coding(Coder.FIXED, Predictor.DELTA),
    Coding(Coder.RAW, Predictor.NONE),
    Coding(Coder.HUFFMAN, Predictor.NONE),
    Coding(Coder.RANS, Predictor.DELTA),
]
FIXED = Coding(Coder.FIXED, Predictor.NONE)
# From a link so slow that only bytes count to one that costs nothing.
LINKS = [SelectorCosts(link=link) for link in (10**7, 8000, 800, 80, 0)]
COUNTS = (0, 1, 7, 8, 9, 31, 32, 33, 100, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77)
WIDTHS = (0, 1, 5, 8, 9, 13, 16, 17, 24, 31, 32)


def in_turns(values: tuple, first: int):
    """`values` again and again, from another one for each `first`: beside COUNTS, all pairs of the three occur."""
    return itertools.islice(itertools.cycle(values), first % len(values), None)


def buffer(count: int) -> torch.Tensor:
    return torch.full((max_frame_bytes(count),), 0xA5, dtype=torch.uint8)


def encode_codes(backend, codes, coding=FIXED) -> torch.Tensor:
    frame = buffer(codes.numel())
    return frame[: backend.encode_codes(codes, coding, frame)].clone()


def encode(backend, x, inverse_steps, coding=FIXED, noise=None) -> torch.Tensor:
    frame = buffer(x.numel())
    return frame[: backend.encode(x, inverse_steps, coding, frame, noise)].clone()


def decode_codes(backend, frame, count) -> torch.Tensor:
    codes = torch.empty(count, dtype=torch.int32)
    backend.decode_codes(frame, codes)
    return codes


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [1, 5, 12, 23, 31, 40, 200])
def test_quantize(backend, dtype, bits):
    for count in COUNTS:
        x = floats(count, dtype)
        inverse_steps = steps_of(x, min(bits, 120) if dtype != torch.float64 else bits)[0]
        expected, codes = torch.empty(2, count, dtype=torch.int32)
        REFERENCE.quantize(x, inverse_steps, expected)
        backend.quantize(x, inverse_steps, codes)
        assert_same(codes, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_rounds_ties_to_even_and_clamps(any_backend, dtype):
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, float("nan"), float("inf"), -float("inf")], dtype=dtype)
    codes = torch.empty(8, dtype=torch.int32)
    any_backend.quantize(x, torch.ones(1, dtype=torch.float64 if dtype == torch.float64 else torch.float32), codes)
    top = 2**31 - (1 if dtype == torch.float64 else 128)
    assert codes.tolist() == [0, 2, 2, 0, -2, top, top, -top]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exponent", [-140, -26, -20, -14, 0, 9, 90])
def test_dequantize(backend, dtype, exponent):
    """Scales small enough for subnormals of each type, and large enough to overflow it."""
    for count in COUNTS:
        codes = codes_of_width(count, 32)
        scales = 2.0**exponent * steps_of(torch.empty(count, dtype=dtype), 1)[1] / 3
        expected, out = torch.empty(2, count, dtype=dtype)
        REFERENCE.dequantize(codes, scales, expected)
        backend.dequantize(codes, scales, out)
        assert_same(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_number(backend, dtype):
    """Each of the 65536 bit patterns, widened, quantized and measured as the reference does."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    inverse_steps = torch.full((blocks_of(x.numel()),), 3.0)
    expected, codes = torch.empty(2, x.numel(), dtype=torch.int32)
    REFERENCE.quantize(x, inverse_steps, expected)
    backend.quantize(x, inverse_steps, codes)
    assert_same(codes, expected)
    for ours, theirs in zip(backend.block_statistics(x), REFERENCE.block_statistics(x)):
        assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("special", [0.0, float("nan"), float("inf"), -float("inf"), "max", "tiny"])
def test_block_statistics(backend, dtype, special):
    if isinstance(special, str):
        special = getattr(torch.finfo(dtype), special)
    for count in COUNTS:
        x = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64).to(dtype)
        x[count // 2 : count // 2 + 1] = special
        for ours, theirs in zip(backend.block_statistics(x), REFERENCE.block_statistics(x)):
            assert_same(ours, theirs)


def test_block_statistics_are_what_they_say(any_backend):
    x = torch.randn(2 * SCALE_BLOCK + 5, generator=torch.Generator().manual_seed(0))
    x[SCALE_BLOCK + 3] = float("nan")
    lowest, highest, squares = any_backend.block_statistics(x)
    assert (lowest[1], highest[1], squares[1]) == (-torch.inf, torch.inf, torch.inf)
    for b in (0, 2):
        block = x[b * SCALE_BLOCK : (b + 1) * SCALE_BLOCK].double()
        assert (lowest[b], highest[b]) == (block.min(), block.max())
        torch.testing.assert_close(squares[b], block.square().sum())


# ------------------------------------------------------------------ steps


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float64], ids=str)
@pytest.mark.parametrize("special", [0.0, float("nan"), -float("inf"), 1e6, "max", "tiny"])
def test_root_mean_squares(backend, dtype, special):
    if isinstance(special, str):
        special = getattr(torch.finfo(dtype), special)
    for count, most in itertools.product(COUNTS, (1e4, torch.finfo(dtype).max)):
        x = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
        # As a tensor: older versions of torch refuse to fill in a number that becomes infinite.
        x[count // 2 : count // 2 + 1] = torch.tensor(special).to(dtype)
        ours, theirs = torch.full((2, blocks_of(count)), 7.0, dtype=torch.bfloat16)
        backend.root_mean_squares(x, most, ours)
        REFERENCE.root_mean_squares(x, most, theirs)
        assert_same(ours, theirs)


def test_root_mean_squares_are_what_they_say(any_backend):
    x = torch.randn(2 * SCALE_BLOCK + 5, generator=torch.Generator().manual_seed(0))
    x[3], x[SCALE_BLOCK + 3] = 100, float("nan")
    found = torch.empty(3, dtype=torch.bfloat16)
    any_backend.root_mean_squares(x, 100.0, found)
    exact = torch.stack([part.double().square().mean().sqrt() for part in x.split(SCALE_BLOCK)])
    assert found[1] == torch.inf
    for at in (0, 2):
        assert exact[at] / (1 + 2.0**-7) < found[at] <= exact[at]
    any_backend.root_mean_squares(x, 99.9, found)
    assert found[0] == torch.inf


@pytest.mark.parametrize("name", COMPILED)
@settings(deadline=None)
@given(
    bits=st.lists(st.integers(0, 0x7F80), min_size=0, max_size=70),  # from 0 to infinity
    mode=st.sampled_from([(1.0, 0.0), (2.0, 0.0), (1.0, 2.0**-9)]),
    value=st.sampled_from([1e-7, 1e-3, 0.1, 10.0]),
    addends=st.integers(1, 100),
    divisor=st.sampled_from([1, 2, 7.0, 0.3]),
)
def test_steps_of_root_mean_squares(name, bits, mode, value, addends, divisor):
    steps_per_bound, rounding = mode
    rule = StepRule(
        4, value, addends, addends / divisor, divisor, steps_per_bound, 1e-37, 6 * 2.0**-24, 1e38, rounding, 1e-38, 1e38
    )
    agreed = torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16)
    *expected, spread = REFERENCE.steps_of(agreed, rule)
    *found, most = kernels.load(name).steps_of(agreed, rule)
    assert most == spread
    if spread:
        for ours, theirs in zip(found, expected):
            assert_same(ours, theirs)


# ------------------------------------------------------------------ frames


@functools.cache
def expected_frames(count: int, coding: Coding) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Codes of several kinds, and the reference's frames of them, which take a while."""
    widths = WIDTHS if count < CHUNK else (0, 5, 32)
    kinds = [codes_of_width(count, width) for width in widths] + [sparse_codes(count, s) for s in (0.02, 0.3)]
    return [(codes, encode_codes(REFERENCE, codes, coding)) for codes in kinds]


@pytest.mark.parametrize("coding", ASKED, ids=lambda c: f"{c.coder.name}-{c.predictor.name}")
def test_frames_are_identical(backend, coding):
    for count in COUNTS:
        for number, (codes, expected) in enumerate(expected_frames(count, coding)):
            case = f"{count} codes, kind {number}"
            assert_same(encode_codes(backend, codes, coding), expected, case)
            assert_same(decode_codes(backend, expected, count), codes, case)


@pytest.mark.parametrize("coder", [Coder.HUFFMAN, Coder.RANS, Coder.AUTO])
@pytest.mark.parametrize("count", [4 * CHUNK - 1, 4 * CHUNK, 4 * CHUNK + 1, 9 * CHUNK + 77])
def test_frames_of_several_pages_are_identical(backend, count, coder):
    for codes, expected in expected_frames(count, Coding(coder, Predictor.NONE)):
        assert_same(encode_codes(backend, codes, Coding(coder, Predictor.NONE)), expected)
        assert_same(decode_codes(backend, expected, count), codes)


@pytest.mark.parametrize("coding", ASKED, ids=lambda c: f"{c.coder.name}-{c.predictor.name}")
def test_round_trip(any_backend, coding):
    for count, width in zip(COUNTS, in_turns((0, 4, 32), ASKED.index(coding))):
        codes = codes_of_width(count, width)
        frame = encode_codes(any_backend, codes, coding)
        assert frame.numel() <= max_frame_bytes(count)
        assert_same(decode_codes(any_backend, frame, count), codes)


@pytest.mark.parametrize("coder", CODERS)
def test_skewed_counts(backend, coder):
    """Tokens whose counts grow like Fibonacci's numbers: Huffman codes over 11 bits, which must be shortened."""
    counts = [1, 1]
    while sum(counts) < 30000:
        counts.append(counts[-1] + counts[-2])
    codes = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    codes = codes[torch.randperm(codes.numel(), generator=torch.Generator().manual_seed(0))].to(torch.int32)
    coding = Coding(coder, Predictor.NONE)
    frame = encode_codes(backend, codes, coding)
    assert_same(frame, encode_codes(REFERENCE, codes, coding))
    assert_same(decode_codes(backend, frame, codes.numel()), codes)


@pytest.mark.parametrize("coder", [Coder.HUFFMAN, Coder.RANS])
def test_a_coder_that_does_not_pay_gives_way_to_raw(any_backend, coder):
    codes = codes_of_width(2 * CHUNK, 8)
    codes = torch.randint(-128, 128, (2 * CHUNK,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    frame = encode_codes(any_backend, codes, Coding(coder, Predictor.NONE))
    assert frame[5] == Coder.RAW
    assert frame.numel() == HEADER_BYTES + 2 * CHUNK


@pytest.mark.parametrize("name", COMPILED)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_codes(name, data):
    backend = kernels.load(name)
    bits = data.draw(st.integers(0, 31))
    values = data.draw(st.lists(st.integers(-(1 << bits), (1 << bits) - 1), max_size=150))
    coding = data.draw(st.sampled_from(ASKED))._replace(costs=data.draw(st.sampled_from(LINKS)))
    codes = torch.tensor(values, dtype=torch.int32).repeat(data.draw(st.sampled_from([1, 1, 1, 40])))
    expected = encode_codes(REFERENCE, codes, coding)
    assert_same(encode_codes(backend, codes, coding), expected)
    assert_same(decode_codes(backend, expected, codes.numel()), codes)


@functools.cache
def patchworks() -> list[tuple[torch.Tensor, SelectorCosts, torch.Tensor]]:
    """More codes than the selector looks at, each part of another kind; prices, and the reference's frames."""
    generator = torch.Generator().manual_seed(0)
    kinds = [torch.arange(1000), torch.zeros(1000)]
    kinds += [torch.randint(-(1 << bits), 1 << bits, (1000,), generator=generator) for bits in (3, 30)]
    made = []
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        picks = torch.randint(0, len(kinds), (12,), generator=generator)
        codes = torch.cat([kinds[p] for p in picks])[: 11700 + seed].to(torch.int32)
        made += [(codes, costs, encode_codes(REFERENCE, codes, Coding(costs=costs))) for costs in LINKS]
    return made


def test_selector_chooses_the_same(backend):
    for codes, costs, expected in patchworks():
        assert_same(encode_codes(backend, codes, Coding(costs=costs)), expected)
    assert len({(int(expected[5]), int(expected[6])) for _, _, expected in patchworks()}) >= 3


@functools.cache
def mosaics() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of one value each, more than the selector looks at, and the reference's RANS frames."""
    made = []
    for seed in range(24):
        generator = torch.Generator().manual_seed(seed)
        pieces = int(torch.randint(SAMPLE_PIECES + 1, 160, (), generator=generator))
        values = torch.randint(0, 16, (pieces,), generator=generator, dtype=torch.int32)
        codes = values.repeat_interleave(PIECE)[: -1 - seed]
        made.append((codes, encode_codes(REFERENCE, codes, Coding(Coder.RANS, Predictor.NONE))))
    return made


def test_selector_samples_the_same_pieces(backend):
    """The mode in the frame is the most frequent symbol in the sample: with others in it, mostly another one."""
    for codes, expected in mosaics():
        assert_same(encode_codes(backend, codes, Coding(Coder.RANS, Predictor.NONE)), expected)
    assert len({int(expected[HEADER_BYTES]) for _, expected in mosaics()}) > 5


def codes_of_many_kinds() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    count = 4 * CHUNK
    kinds = (
        torch.arange(count),
        codes_of_width(count, 6),
        codes_of_width(count, 32),
        sparse_codes(count, 0.01),
        torch.randn(count, generator=generator) * 2,
        torch.randn(count, generator=generator) * 300,
        torch.randn(count, generator=generator).cumsum(0) * 5,
        torch.zeros(count),
    )
    return [codes.round().to(torch.int32) for codes in kinds]


@functools.cache
def sizes_of_many_kinds(name: str) -> list[dict[Coding, int]]:
    """Bytes of what each coder and predictor makes of each kind, where that does not give way to RAW."""
    backend = kernels.load(name)
    fixed = [c for c in ASKED if c.coder != Coder.AUTO and c.predictor != Predictor.AUTO]
    sizes = []
    for codes in codes_of_many_kinds():
        frames = {coding: encode_codes(backend, codes, coding) for coding in fixed}
        sizes.append({coding: frame.numel() for coding, frame in frames.items() if frame[5] == coding.coder})
    return sizes


@pytest.mark.parametrize("costs", LINKS, ids=lambda costs: f"link-{costs.link}")
def test_selector_takes_the_cheapest(any_backend, costs):
    """At most 3% dearer than the best of all that there are, reckoned as the selector should."""
    for codes, sizes in zip(codes_of_many_kinds(), sizes_of_many_kinds(any_backend.name)):
        prices = {
            (coding.coder, coding.predictor): price(codes, coding._replace(costs=costs), frame_bytes)
            for coding, frame_bytes in sizes.items()
        }
        chosen = encode_codes(any_backend, codes, Coding(costs=costs))
        best = min(prices.values())
        assert prices[Coder(int(chosen[5])), Predictor(int(chosen[6]))] <= 1.03 * best + costs.link * HEADER_BYTES


def price(codes: torch.Tensor, coding: Coding, frame_bytes: int) -> float:
    """Picoseconds that a frame costs on the link and to code."""
    costs, count = coding.costs, codes.numel()
    symbols = predict(codes.numpy(), coding.predictor)
    rest = count - max(np.bincount(symbols[symbols < 128], minlength=1))
    coder = {
        Coder.RAW: costs.raw * count,
        Coder.FIXED: costs.fixed * count,
        Coder.HUFFMAN: costs.huffman * count,
        Coder.RANS: costs.rans * count + costs.rans_rest * rest,
    }
    return costs.link * frame_bytes + coder[coding.coder]


# ------------------------------------------------------------------ checksums


def test_checksum(backend):
    for count in COUNTS[:10]:
        frame = encode_codes(backend, codes_of_width(count, 9))
        assert backend.checksum(frame) == REFERENCE.checksum(frame)
        sealed = frame.clone()
        backend.seal(sealed)
        assert backend.checksum(sealed) == backend.checksum(sealed) != 0
        assert_same(decode_codes(backend, sealed, count), decode_codes(REFERENCE, sealed, count))
        theirs = frame.clone()
        REFERENCE.seal(theirs)
        assert_same(sealed, theirs)


@pytest.mark.parametrize("coding", SOME_ASKED, ids=lambda c: f"{c.coder.name}-{c.predictor.name}")
def test_checksum_finds_every_flipped_bit(any_backend, coding):
    codes = sparse_codes(50, 0.3)
    frame = encode_codes(any_backend, codes, coding)
    any_backend.seal(frame)
    flag = 8 * 16  # without it there is no checksum to look at, but then its field is not 0
    for bit in range(8 * frame.numel()):
        damaged = frame.clone()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedFrame, match="without its flag" if bit == flag else None):
            decode_codes(any_backend, damaged, 50)


# ------------------------------------------------------------------ random rounding


def test_random_numbers_look_random():
    """Evenly distributed, and unrelated between elements, calls, seeds, and where an element's number passes 2**32."""
    count = 1 << 18
    noises = [Noise(0, 0), Noise(0, 1), Noise(1, 0), Noise(1, 0, first=2**32 - blocks_of(count) // 2)]
    noises += [Noise(1, 0, first=2**31), Noise(2**63, 7, shift=2**32 // 3)]
    streams = np.stack([random_bits(noise, count) for noise in noises])
    for bits in range(0, 24, 8):
        for stream in streams:
            found = np.bincount(stream >> np.uint32(bits) & np.uint32(255), minlength=256)
            chi_square = ((found - count / 256) ** 2 / (count / 256)).sum()
            assert abs(chi_square - 255) < 6 * np.sqrt(2 * 255)
    centered = streams.astype(np.float64) / 2**24 - 0.5
    deviation = 1 / 12 / np.sqrt(count)  # of the mean of products of two independent numbers
    for one, other in itertools.combinations(centered, 2):
        for distance in (0, 1, 2, 256):
            assert abs((one[: count - distance] * other[distance:]).mean()) < 5 * deviation
    for stream in centered:
        for distance in (1, 2, 3, 4, 8, 32, 128, 256, 4096, 65536):
            products = stream[:-distance] * stream[distance:]
            assert abs(products.mean()) < 5 * deviation * np.sqrt(count / products.size)


def test_neighbours_that_share_a_hash_are_independent():
    """Any two of the four, and any two of neighbouring fours: all pairs of their upper 5 bits are equally frequent.

    Whatever the ranks' shifts are. Nor does a number below 1 / 512 say anything of the other one.
    """
    count = 1 << 20
    for noise in (Noise(3, 1), Noise(2**64 - 5, 6, shift=2**32 // 3), Noise(8, 9, shift=2**31, first=2**27)):
        fours = random_bits(noise, count).reshape(-1, 4)
        for one, other, distance in itertools.product(range(4), range(4), (0, 1, 8, 32)):
            if distance == 0 and one >= other:
                continue
            first, second = fours[: len(fours) - distance, one], fours[distance:, other]
            found = np.bincount((first >> np.uint32(19)) * np.uint32(32) + (second >> np.uint32(19)), minlength=1024)
            expected = len(first) / 1024
            assert ((found - expected) ** 2 / expected).sum() - 1023 < 6 * np.sqrt(2 * 1023)
            rare = second[first < 2**15]  # one in 512
            assert abs(rare.mean() / 2**24 - 0.5) < 5 * np.sqrt(1 / 12 / rare.size)


def test_the_known_random_numbers():
    """Written down once, so that a change does not go unnoticed: the same seed gives the same results."""
    assert random_bits(Noise(0, 0), 5).tolist() == [12304353, 14783931, 14647065, 1685471, 15044762]
    across_blocks = random_bits(Noise(2**64 - 1, 2**32 - 1, 2**31 + 5, 2**32 - 1), SCALE_BLOCK + 2)[SCALE_BLOCK - 2 :]
    assert across_blocks.tolist() == [4514407, 6773060, 6404585, 15311201]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "noise", [Noise(0, 0), Noise(2**64 - 3, 2**32 - 1, 2**32 - 77, 3), Noise(5, 6, 7, 2**34 - 5)], ids=str
)
def test_random_rounding(backend, dtype, noise):
    for count, bits in itertools.product(COUNTS, (1, 8, 30)):
        x = floats(count, dtype)
        inverse_steps = steps_of(x, bits)[0]
        codes = torch.empty(count, dtype=torch.int32)
        backend.quantize(x, inverse_steps, codes, noise)
        assert_same(codes, expected_at_random(dtype, count, bits, noise))
        assert_same(encode(backend, x, inverse_steps, FIXED, noise), encode_codes(backend, codes))
        received = encode_codes(backend, codes_of_width(count, 7))
        reduced = buffer(count)
        reduced = reduced[: backend.reduce(received, x, inverse_steps, FIXED, reduced, noise)]
        backend.decode_codes(received, codes, add=True)
        assert_same(reduced, encode_codes(backend, codes))


@functools.cache
def expected_at_random(dtype: torch.dtype, count: int, bits: int, noise: Noise) -> torch.Tensor:
    x, codes = floats(count, dtype), torch.empty(count, dtype=torch.int32)
    REFERENCE.quantize(x, steps_of(x, bits)[0], codes, noise)
    return codes


def test_random_rounding_does_not_depend_on_the_cut(any_backend):
    count = 2 * CHUNK + 11
    x = floats(count, torch.float32)
    whole = torch.empty(count, dtype=torch.int32)
    any_backend.quantize(x, torch.full((blocks_of(count),), 3.0), whole, Noise(1, 2, 3, 9))
    for blocks in (1, 5, 33):
        cut = blocks * SCALE_BLOCK
        part = torch.empty(count - cut, dtype=torch.int32)
        any_backend.quantize(x[cut:].clone(), torch.full((blocks_of(count),), 3.0), part, Noise(1, 2, 3, 9 + blocks))
        assert_same(part, whole[cut:])


def test_random_rounding_is_unbiased(any_backend):
    """The mean of 16384 roundings of x lies within 6 standard deviations, which chance exceeds once in 10**9."""
    count = 4 * CHUNK
    codes = torch.empty(count, dtype=torch.int32)
    for fraction in (0.0, 2.0**-12, 0.01, 0.5, 0.93):
        for whole in (-3, -1, 0, 1000):
            any_backend.quantize(
                torch.full((count,), whole + fraction), torch.ones(blocks_of(count)), codes, Noise(1, whole & 7)
            )
            assert ((codes == whole) | (codes == whole + 1)).all() if fraction else (codes == whole).all()
            deviation = (fraction * (1 - fraction) / count) ** 0.5
            assert abs(codes.double().mean() - (whole + fraction)) <= 6 * deviation + 1e-4


def test_rounding_at_random_adds_exactly(any_backend):
    """Where float32 or float64 would round the sum of a value and a random number, to one that has another floor."""
    count = 8 * SCALE_BLOCK
    for dtype, least in ((torch.float32, -30), (torch.float64, -60)):
        numbers = torch.from_numpy(random_bits(Noise(4, 5), count).astype(np.int64))
        below = -(numbers.to(dtype) * 2.0**-24)  # together they are 0
        for x, floor in ((below, 0), (torch.nextafter(below, torch.full_like(below, -3)), -1), (1 + below, 1)):
            codes = torch.empty(count, dtype=torch.int32)
            any_backend.quantize(x, torch.ones(blocks_of(count), dtype=dtype), codes, Noise(4, 5))
            assert (codes == floor).all()
        for x in (2.0**least, -(2.0**least), 2.0**24, -(2.0**24) - 2, 2.0**30):
            codes = torch.empty(count, dtype=torch.int32)
            any_backend.quantize(
                torch.full((count,), x, dtype=dtype), torch.ones(blocks_of(count), dtype=dtype), codes, Noise(4, 5)
            )
            assert codes.tolist() == [int(x)] * count if abs(x) > 1 else set(codes.tolist()) <= {0, int(np.floor(x))}


# ------------------------------------------------------------------ in one pass


@functools.cache
def expected_floats(dtype: torch.dtype, bits: int, count: int, coding: Coding) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's frame of floats, and what it decodes that to."""
    x = floats(count, dtype)
    inverse_steps, scales = steps_of(x, bits)
    frame, out = encode(REFERENCE, x, inverse_steps, coding), torch.empty(count, dtype=dtype)
    REFERENCE.decode(frame, scales, out)
    return frame, out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("coding", SOME_ASKED, ids=lambda c: f"{c.coder.name}-{c.predictor.name}")
def test_encode_and_decode(backend, dtype, coding):
    for count, bits in zip(COUNTS, in_turns((4, 11, 20, 40), SOME_ASKED.index(coding))):
        x = floats(count, dtype)
        inverse_steps, scales = steps_of(x, bits)
        expected_frame, expected = expected_floats(dtype, bits, count, coding)
        frame = encode(backend, x, inverse_steps, coding)
        assert_same(frame, expected_frame)
        out = torch.empty(count, dtype=dtype)
        backend.decode(frame, scales, out)
        assert_same(out, expected)


@pytest.mark.parametrize("bits", [2, 6, 10])
def test_error_is_at_most_half_a_step(any_backend, bits):
    x = torch.randn(CHUNK + 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inverse_steps, scales = steps_of(x, bits)
    out = torch.empty_like(x)
    any_backend.decode(encode(any_backend, x, inverse_steps), scales, out)
    error = (out - x).abs().max()
    assert 0 < error <= scales.max() / 2 * (1 + 1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sent", SOME_ASKED[1:], ids=lambda c: f"{c.coder.name}-{c.predictor.name}")
def test_reduce_is_decode_add_encode(backend, dtype, sent):
    """Each three of count, coding, dtype and what was sent together; not all four."""
    turn = DTYPES.index(dtype) + SOME_ASKED[1:].index(sent)
    for (i, count), (j, coding) in itertools.product(enumerate(COUNTS), enumerate(SOME_ASKED)):
        if (i + j + turn) % 4:
            continue
        x = floats(count, dtype)
        inverse_steps = steps_of(x, 6)[0]
        received = encode_codes(backend, codes_of_width(count, 7), sent)
        reduced = buffer(count)
        reduced = reduced[: backend.reduce(received, x, inverse_steps, coding, reduced)]

        codes = torch.empty(count, dtype=torch.int32)
        backend.quantize(x, inverse_steps, codes)
        backend.decode_codes(received, codes, add=True)
        assert_same(reduced, encode_codes(backend, codes, coding))


@pytest.mark.parametrize("coder", CODERS)
def test_sums_wrap_around(any_backend, coder):
    codes = torch.tensor([2**31 - 1, -(2**31), -1, 5] * 20, dtype=torch.int32)
    frame = encode_codes(any_backend, codes, Coding(coder))
    total = torch.tensor([1, -1, -(2**31), -7] * 20, dtype=torch.int32)
    any_backend.decode_codes(frame, total, add=True)
    assert total.tolist() == [-(2**31), 2**31 - 1, 2**31 - 1, -2] * 20


# ------------------------------------------------------------------ memory


class Guarded:
    """Memory that ends where none may be touched: one byte too far is a crash of the process."""

    _PROT_NONE = 0
    _mprotect = ctypes.CDLL(None, use_errno=True).mprotect

    def __init__(self, capacity: int):
        pages = -(-capacity // mmap.PAGESIZE)
        self._area = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
        everything = torch.frombuffer(self._area, dtype=torch.uint8)
        self._memory = everything[: pages * mmap.PAGESIZE]
        behind = ctypes.c_void_p(everything.data_ptr() + self._memory.numel())
        assert self._mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), self._PROT_NONE) == 0

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The last [count] of it, which is overwritten by the next call."""
        return self._memory[self._memory.numel() - count * dtype.itemsize :].fill_(0xA5).view(dtype)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        return self.empty(x.numel(), x.dtype).copy_(x)


TAILS = (*range(1, 40), CHUNK, CHUNK + 3)


@pytest.mark.parametrize("coder", CODERS)
def test_nothing_behind_codes_is_touched(backend, coder):
    """Exactly sized buffers, at each width, with a tail of every length."""
    of_codes, of_out, of_frame, of_room = (Guarded(max_frame_bytes(max(TAILS))) for _ in range(4))
    coding = Coding(coder, Predictor.NONE)
    for width, tail in itertools.product(WIDTHS, TAILS):
        codes = of_codes.copy(codes_of_width(tail, width, seed=tail))
        codes[-1] = int(codes_of_width(1, width)) if width < 2 else -(1 << width - 1)  # the last block is widest
        buffer = of_room.empty(max_frame_bytes(tail), torch.uint8)
        frame = of_frame.copy(buffer[: backend.encode_codes(codes, coding, buffer)])
        out = of_out.empty(tail, torch.int32)
        backend.decode_codes(frame, out)
        assert_same(out, codes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("coder", CODERS)
def test_nothing_behind_floats_is_touched(backend, dtype, coder):
    """The same for all that floats take part in; codes of about 1, 2 and 4 bytes."""
    sizes = max_frame_bytes(max(TAILS)), 8 * max(TAILS)
    of_x, of_out, of_codes, of_frame, of_room, of_inverse, of_scales = (Guarded(max(sizes)) for _ in range(7))
    coding = Coding(coder, Predictor.DELTA)
    for bits, tail in itertools.product((1, 8, 13, 30), TAILS):
        x = of_x.copy(floats(tail, dtype))
        inverse_steps, scales = (guarded.copy(t) for guarded, t in zip((of_inverse, of_scales), steps_of(x, bits)))
        backend.block_statistics(x)
        codes = of_codes.empty(tail, torch.int32)
        backend.quantize(x, inverse_steps, codes)
        buffer = of_room.empty(max_frame_bytes(tail), torch.uint8)
        frame = of_frame.copy(buffer[: backend.encode(x, inverse_steps, coding, buffer)])
        assert_same(decode_codes(backend, frame, tail), codes)
        out = of_out.empty(tail, dtype)
        backend.decode(frame, scales, out)
        buffer = of_room.empty(max_frame_bytes(tail), torch.uint8)
        summed = buffer[: backend.reduce(frame, x, inverse_steps, coding, buffer)]
        assert_same(decode_codes(backend, summed.clone(), tail), 2 * codes)


@pytest.mark.parametrize("count", [1, 40, CHUNK, CHUNK + 9])
def test_nothing_around_a_frame_or_an_output_is_written(backend, count):
    margin, mark = 64, 0xA5
    for width, coding in itertools.product(WIDTHS, ASKED):
        codes = codes_of_width(count, width)
        size = max_frame_bytes(count)
        memory = torch.full((size + 2 * margin,), mark, dtype=torch.uint8)
        frame = memory[margin : margin + size]
        written = backend.encode_codes(codes, coding, frame)
        assert (memory[:margin] == mark).all() and (memory[margin + size :] == mark).all()

        memory = torch.full((count + 2 * margin,), -mark, dtype=torch.int32)
        backend.decode_codes(frame[:written], memory[margin : margin + count])
        assert (memory[:margin] == -mark).all() and (memory[margin + count :] == -mark).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [1, 3, 5])
def test_views_at_odd_addresses(backend, dtype, offset):
    count = CHUNK + 50
    x = floats(count + offset, dtype)[offset:]
    inverse_steps, scales = (torch.cat([t[:1], t])[1:] for t in steps_of(x, 5))
    frame = torch.empty(max_frame_bytes(count) + offset, dtype=torch.uint8)[offset:]
    frame = frame[: backend.encode(x, inverse_steps, Coding(), frame)]
    assert_same(frame, encode(REFERENCE, x.clone(), inverse_steps, Coding()))

    out = torch.empty(count + offset, dtype=dtype)[offset:]
    expected = torch.empty(count, dtype=dtype)
    backend.decode(frame, scales, out)
    REFERENCE.decode(frame, scales, expected)
    assert_same(out, expected)

    reduced = torch.empty(max_frame_bytes(count) + offset, dtype=torch.uint8)[offset:]
    written = backend.reduce(frame, x, inverse_steps, FIXED, reduced)
    theirs = buffer(count)
    assert written == REFERENCE.reduce(frame, x, inverse_steps, FIXED, theirs)
    assert_same(reduced[:written], theirs[:written])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_large_outputs(backend, dtype, offset):
    """Which may go past the caches, if they begin at the right address."""
    count = (1 << 20) // dtype.itemsize + 77
    x = floats(count, dtype)
    inverse_steps, scales = steps_of(x, 5)
    frame = encode(backend, x, inverse_steps)
    codes = decode_codes(backend, frame, count)
    expected = torch.empty(count, dtype=dtype)
    REFERENCE.dequantize(codes, scales, expected)
    for write in (
        lambda out: backend.decode(frame, scales, out),
        lambda out: backend.dequantize(codes, scales, out),
    ):
        memory = torch.full((count + 64,), 7.0, dtype=dtype)
        write(memory[offset : offset + count])
        assert_same(memory[offset : offset + count], expected)
        assert (memory[:offset] == 7).all() and (memory[offset + count :] == 7).all()


# ------------------------------------------------------------------ loading


def test_load_refuses_what_it_does_not_know():
    with pytest.raises(ImportError, match="'sse9'.*avx2, portable, reference"):
        kernels.load("sse9")


@pytest.mark.parametrize("content", [None, b"not a library"])
def test_without_the_library_the_reference_serves(tmp_path, monkeypatch, content):
    library = tmp_path / "libncz_cpu.so"
    if content:
        library.write_bytes(content)
    monkeypatch.setattr(cpu, "LIBRARY", library)
    monkeypatch.delenv(kernels.ENVIRONMENT, raising=False)
    cpu._library.cache_clear()
    kernels.cpu_backend.cache_clear()
    try:
        statuses = kernels.statuses()
        assert "libncz_cpu.so" in statuses["avx2"] and "reinstall" in statuses["portable"]
        assert statuses["reference"] == "ok"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert kernels.cpu_backend().name == "reference"
        # That there is none was said when the package was imported.
        assert ["libncz_cpu.so" in str(each.message) for each in caught] == ([True] if content else [])
    finally:
        cpu._library.cache_clear()
        kernels.cpu_backend.cache_clear()


def test_an_empty_variable_names_no_kernels(monkeypatch):
    def chosen(value: str) -> str:
        monkeypatch.setenv(kernels.ENVIRONMENT, value)
        kernels.cpu_backend.cache_clear()
        return kernels.cpu_backend().name

    try:
        assert chosen("") == chosen("auto")
        assert chosen("reference") == "reference"
    finally:
        kernels.cpu_backend.cache_clear()
