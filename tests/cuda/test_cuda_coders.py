"""HUFFMAN and the selector on the emulator against the reference: the data that are hard for them, and damage."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from test_cuda_kernels import (
    REFERENCE,
    SEEDS,
    assert_same,
    assert_same_frames,
    check,
    codes_of_width,
    coding_name,
    cuda,
    encode_codes,
    sparse_codes,
)

from ncz_plugins.kernels.format import (
    CHUNK,
    DIRECT,
    GAPPED,
    HEADER_BYTES,
    HUFFMAN32_LANES,
    HUFFMAN32_PAGE,
    PIECE,
    SAMPLE_PIECES,
    TOKENS,
    Coder,
    Coding,
    Predictor,
    SelectorCosts,
)
from ncz_plugins.kernels.reference.symbols import EXTRA_BITS, FIRST_SYMBOLS, tokens_of

CODINGS = [Coding(Coder.HUFFMAN, predictor) for predictor in (Predictor.NONE, Predictor.DELTA)]
codings = pytest.mark.parametrize("coding", CODINGS, ids=coding_name)
seeds = pytest.mark.parametrize("seed", SEEDS)
# Where lanes, rows, chunks and pages begin and end.
COUNTS = (1, 2, 5, 8, 33, 127, 129, CHUNK - 3, CHUNK, CHUNK + 1, 2 * HUFFMAN32_PAGE - 1, 2 * HUFFMAN32_PAGE + 9)


def codes_of(symbols: torch.Tensor) -> torch.Tensor:
    """Inverse of zigzag: int64 to int32."""
    return ((symbols >> 1) ^ -(symbols & 1)).to(torch.int32)


def shuffled(symbols: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return symbols[torch.randperm(len(symbols), generator=torch.Generator().manual_seed(seed))]


def drawn(weights: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Numbers below len(weights), as likely as these say."""
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights.double(), count, replacement=True, generator=generator)


def symbols_of_tokens(tokens: torch.Tensor, seed: int) -> torch.Tensor:
    """A symbol with random extra bits for each token, now and then the lowest or the highest one."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.from_numpy(FIRST_SYMBOLS.astype(np.int64))[tokens]
    buffer = 1 << torch.from_numpy(EXTRA_BITS.astype(np.int64))[tokens]
    extra = (torch.rand(tokens.shape, generator=generator, dtype=torch.float64) * 1.2 - 0.1) * buffer
    return first + 2 * torch.minimum(extra.long().clamp(min=0), buffer - 1)


def mostly_zero(count: int, share: float, seed: int = 0) -> torch.Tensor:
    """As `sparse_codes`, whose frequent code is -1, but 0 is frequent."""
    return sparse_codes(count, share, seed) + 1


# ------------------------------------------------------------------ frames


@codings
@seeds
def test_every_count(seed, coding):
    for count in COUNTS:
        share = 0.05 + 0.2 * seed
        for codes in (codes_of_width(count, 6, seed), sparse_codes(count, share), mostly_zero(count, share)):
            assert_same_frames(cuda(seed), codes, coding)


@codings
@pytest.mark.parametrize("slope", [0.0, 0.02, 0.2])
def test_every_token(coding, slope):
    """All of the alphabet, equally often or some far more often than others, with every number of extra bits."""
    weights = torch.exp(-slope * torch.arange(TOKENS))
    tokens = torch.cat([torch.arange(TOKENS), drawn(weights, 9000, seed=1)])
    symbols = symbols_of_tokens(shuffled(tokens), seed=2)
    assert set(tokens_of(symbols.numpy().astype(np.uint32))[0]) == set(range(TOKENS))
    assert_same_frames(cuda(1), codes_of(symbols), coding)


@codings
@pytest.mark.parametrize("code", [0, -1, 63, -64, 64, 2**31 - 1, -(2**31)])
def test_one_token(coding, code):
    for count in (1, 9, CHUNK + 1):
        assert_same_frames(cuda(), torch.full((count,), code, dtype=torch.int32), coding)


@seeds
def test_long_symbols(seed):
    """Of many bits, between short ones; and tokens that the sample does not have."""
    codes = torch.arange(3 * HUFFMAN32_PAGE + 300, dtype=torch.int32) % 5
    codes[1::97] = codes_of_width(len(codes[1::97]), 31, seed)
    coding = Coding(Coder.HUFFMAN, Predictor.NONE)
    assert encode_codes(REFERENCE, codes, coding)[5] == Coder.HUFFMAN32
    assert_same_frames(cuda(seed), codes, coding)


@pytest.mark.parametrize("kinds", [12, 17, 22])
def test_skewed_counts(kinds):
    """Counts like Fibonacci's numbers: Huffman codes over 11 bits, of which some must change for all to fit."""
    counts = [1, 1]
    while len(counts) < kinds:
        counts.append(counts[-1] + counts[-2])
    symbols = shuffled(torch.arange(kinds).repeat_interleave(torch.tensor(counts)))
    assert_same_frames(cuda(2), codes_of(symbols), CODINGS[0])


def seen_as(piece: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """`codes`, but that every piece at which the selector looks is this one."""
    pieces = len(codes) // PIECE
    for i in range(SAMPLE_PIECES):
        codes[PIECE * (i * (pieces - 1) // (SAMPLE_PIECES - 1)) :][:PIECE] = piece
    return codes


@seeds
@pytest.mark.parametrize("predictor", [Predictor.NONE, Predictor.DELTA])
def test_huffman_gives_way_to_planes(seed, predictor):
    """Where a lane has more words than it may: in the first page, in the last one, or in the middle, or by one word."""
    coding = Coding(Coder.HUFFMAN, predictor)
    outcomes = set()
    for count, first in itertools.product((HUFFMAN32_PAGE - 1, 9 * HUFFMAN32_PAGE + 5), (0, 4, 8)):
        for wide in (10, 50, 70, 200):
            codes = (torch.arange(count, dtype=torch.int32) * 7 % 5).clone()
            lane = (torch.arange(count) - first * HUFFMAN32_PAGE >= 0) & (torch.arange(count) // 4 % 32 == 9)
            at = lane.nonzero()[:wide, 0]
            codes[at] = codes_of_width(len(at), 31, seed)
            assert_same_frames(cuda(seed), codes, coding)
            outcomes.add(int(encode_codes(REFERENCE, codes, coding)[5]))
    assert outcomes == {Coder.PLANES, Coder.HUFFMAN32}


def with_gaps(gaps: torch.Tensor, symbols: torch.Tensor, count: int) -> torch.Tensor:
    """Codes whose lanes have these gaps and symbols one behind the other, over and over."""
    lanes = torch.zeros(HUFFMAN32_LANES, HUFFMAN32_PAGE // HUFFMAN32_LANES, dtype=torch.int64)
    starts = (gaps + 1).cumsum(0) - 1
    for lane in range(HUFFMAN32_LANES):
        at = (starts - starts[lane] + gaps[lane]) % int(starts[-1] + 1)
        inside = at < lanes.shape[1]
        lanes[lane, at[inside]] = symbols[inside]
    page = lanes.view(HUFFMAN32_LANES, -1, 4).transpose(0, 1).reshape(-1)
    return codes_of(page.repeat(-(-count // HUFFMAN32_PAGE))[:count])


@codings
@pytest.mark.parametrize("count", [127, CHUNK + 3, 3 * HUFFMAN32_PAGE + 77])
def test_every_gap(coding, count):
    """Of every length, in front of small symbols and of large ones; lanes that end with zeros, or with others."""
    generator = torch.Generator().manual_seed(count)
    gaps = torch.randperm(250, generator=generator)
    symbols = torch.randint(1, 20, (250,), generator=generator)
    symbols[::25] = symbols_of_tokens(torch.arange(DIRECT, TOKENS, 10), seed=3)
    for last in (0, 5):
        codes = with_gaps(gaps, symbols, count)
        codes[-HUFFMAN32_LANES * 4 :] = last
        assert_same_frames(cuda(1), codes, coding)


@codings
def test_gaps_that_the_sample_does_not_have(coding):
    """Letters without a code are escaped."""
    codes = torch.zeros(20 * HUFFMAN32_PAGE, dtype=torch.int32)
    codes[5::11], codes[6::173] = 3, 10**6
    codes = seen_as(torch.arange(128) % 7 // 6, codes)
    frame = encode_codes(REFERENCE, codes, coding)
    assert frame[5] == Coder.HUFFMAN32 and frame[7] == GAPPED
    assert_same_frames(cuda(2), codes, coding)


def test_letters_are_those_of_gaps_if_half_of_the_sample_is_zero():
    widths = []
    for others in (4096, 4097):
        codes = torch.zeros(HUFFMAN32_PAGE, dtype=torch.int32)
        codes[:others] = 1
        assert_same_frames(cuda(), codes, CODINGS[0])
        widths.append(int(encode_codes(REFERENCE, codes, CODINGS[0])[7]))
    assert widths == [GAPPED, 0]


def test_another_width_is_refused():
    """A version of this format that knew only tokens refused frames of gaps so."""
    frame = frame_of(900, CODINGS[0], True).clone()
    frame[7] = 2
    assert check(cuda(), frame, 900) == "coder 5 with width 2 is unknown: damaged, or of a newer ncz_plugins"


def test_huffman_gives_way_to_planes_where_bytes_would_do():
    outcomes = set()
    for count in range(20, 400, 20):
        codes = codes_of_width(count, 6)
        assert_same_frames(cuda(1), codes, Coding(Coder.HUFFMAN, Predictor.NONE))
        outcomes.add(int(encode_codes(REFERENCE, codes, Coding(Coder.HUFFMAN, Predictor.NONE))[5]))
    assert outcomes == {Coder.PLANES, Coder.HUFFMAN32}


@seeds
def test_a_code_that_the_sample_got_wrong(seed):
    """What is frequent does not occur in the sample, so that it has no code of its own, or hardly one."""
    codes = seen_as(torch.arange(128) % 7, torch.full((4 * HUFFMAN32_PAGE,), 70, dtype=torch.int32))
    for predictor in (Predictor.NONE, Predictor.DELTA):
        assert_same_frames(cuda(seed), codes, Coding(Coder.HUFFMAN, predictor))


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@codings
def test_nothing_is_raced_for_or_out_of_bounds(coding, sanitizer):
    """Buffers of exactly the bytes that they must have, at odd addresses, and several blocks at a time."""
    for seed, count in enumerate((31, CHUNK + 3, 4 * HUFFMAN32_PAGE + 17)):
        for codes in (sparse_codes(count, 0.3), mostly_zero(count, 0.3)):
            assert_same_frames(cuda(seed, sanitizer), torch.cat([codes[:1], codes])[1:], coding)


# ------------------------------------------------------------------ the selector


def kinds_of_codes(count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, generator=generator)
    kinds = [
        codes_of_width(count, 3 + 4 * seed, seed),
        sparse_codes(count, 0.01 * 4**seed, seed=count),
        mostly_zero(count, 0.01 * 4**seed, seed=count),
        noise.mul(4.0**seed).round(),
        noise.mul(50).round().cumsum(0),
        noise.mul(0.6).round().cumsum(0),
        torch.arange(count) * (2 * seed + 1),
        torch.zeros(count),
    ]
    mixed = torch.stack([kind.to(torch.int32)[: count // 3] for kind in kinds[:3]]).reshape(-1)
    return [kind.to(torch.int32) for kind in (*kinds, mixed)]


LINKS = [
    SelectorCosts(link=10**7),
    SelectorCosts(link=800),
    *(cuda().costs._replace(link=link) for link in (8000, 80, 0)),
]


@pytest.mark.parametrize("seed,count", [(0, 700), (1, 64 * 128 - 1), (2, 64 * 128 + 1), (3, 20000)])
def test_the_selector_decides_alike(seed, count):
    """For all kinds of data, prices, and counts about the size of the sample."""
    choices = set()
    for codes, costs in itertools.product(kinds_of_codes(count, seed), LINKS):
        expected = encode_codes(REFERENCE, codes, Coding(costs=costs))
        assert_same(encode_codes(cuda(seed % 3), codes, Coding(costs=costs)), expected)
        choices.add((int(expected[5]), int(expected[6])))
    assert len(choices) >= 3


def test_the_selector_changes_its_mind_at_the_same_price():
    """To one part in ten million, so that no measure of the sample may be off by a bit."""
    changes = set()
    costs = SelectorCosts(*(1000 * price for price in SelectorCosts()))
    for codes in kinds_of_codes(7000, 0) + kinds_of_codes(700, 1):

        @functools.cache
        def choice(link, backend=REFERENCE, codes=codes):
            return tuple(encode_codes(backend, codes, Coding(costs=costs._replace(link=link)))[5:7].tolist())

        for exponent in range(4, 9):
            low, high = 10**exponent, 10 ** (exponent + 1)
            if choice(low) == choice(high):
                continue
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if choice(middle) == choice(low) else (low, middle)
            assert [choice(link, cuda()) for link in (low, high)] == [choice(low), choice(high)]
            changes.add((choice(low), choice(high)))
    assert len(changes) >= 3


@pytest.mark.parametrize(
    "coding",
    [Coding(predictor=Predictor.NONE), Coding(predictor=Predictor.DELTA), Coding(Coder.HUFFMAN)],
    ids=coding_name,
)
def test_the_selector_decides_what_is_left(coding):
    for codes, costs in itertools.product(kinds_of_codes(9000, 1), LINKS[1::2]):
        assert_same_frames(cuda(1), codes, coding._replace(costs=costs))


# ------------------------------------------------------------------ damage


DOES_NOT_END = "a HUFFMAN32 page does not end where it should"


@functools.cache
def frame_of(count: int, coding: Coding, is_gapped: bool) -> torch.Tensor:
    codes = mostly_zero(count, 0.2)  # such as pay
    frame = encode_codes(REFERENCE, codes if is_gapped else codes + torch.arange(count).int() * 7 % 5, coding)
    assert frame[5] == Coder.HUFFMAN32 and frame[7] == (GAPPED if is_gapped else 0)
    return frame


letters = pytest.mark.parametrize("is_gapped", [True, False], ids=["gaps", "tokens"])


def damaged(frame: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    """A few other bytes, half of the time near the payload's tables."""
    frame = frame.clone()
    for _ in range(generator.integers(1, 4)):
        end = frame.numel() if generator.integers(2) else min(frame.numel(), HEADER_BYTES + 160)
        at = generator.integers(HEADER_BYTES, end)
        frame[at] = generator.choice([generator.integers(256), int(frame[at]) ^ 1 << generator.integers(8), 0, 255])
    return frame


def huffman_page_table(frame: torch.Tensor, count: int) -> tuple[int, int]:
    """Where HUFFMAN's table of pages begins, and its bytes but for those that fill it."""
    return HEADER_BYTES + -(-(2 + int(frame[HEADER_BYTES]) // 2) // 4) * 4, 2 * -(-count // HUFFMAN32_PAGE)


def first_page(frame: torch.Tensor, count: int) -> int:
    """Where HUFFMAN's first page begins, with the words of each of its lanes."""
    at, size = huffman_page_table(frame, count)
    return at + -(-size // 4) * 4


def moved(frame: torch.Tensor, count: int, generator: np.random.Generator) -> torch.Tensor:
    """A few words or bytes more for a part of a page, and as many fewer for another: their sum is what it was."""
    of_lanes, of_pages = (first_page(frame, count), HUFFMAN32_LANES), huffman_page_table(frame, count)
    (at, size), unit = (of_lanes, "u1") if generator.integers(2) else (of_pages, "<u2")
    sizes = frame[at : at + size].numpy().view(unit).copy()
    one, other = generator.choice(len(sizes), 2, replace=False)
    step = generator.integers(1, 5)
    sizes[one] += step
    sizes[other] -= step
    frame = frame.clone()
    frame[at : at + size] = torch.from_numpy(sizes.view(np.uint8))
    return frame


@pytest.mark.parametrize("sanitizer,rounds", [(None, 60), ("address", 15)], ids=["plain", "asan"])
@codings
@letters
def test_other_bytes(coding, is_gapped, sanitizer, rounds):
    refused = 0
    for count in (900, CHUNK + 100, HUFFMAN32_PAGE + 500):
        generator = np.random.default_rng(count)
        for i in range(rounds):
            verdict = check(cuda(i % 3, sanitizer), damaged(frame_of(count, coding, is_gapped), generator), count)
            refused += isinstance(verdict, str)
    assert refused > 2 * rounds


@pytest.mark.parametrize(
    "sanitizer,rounds", [(None, 30), ("address", 10), ("thread", 5)], ids=["plain", "asan", "tsan"]
)
@codings
@letters
def test_other_sizes(coding, is_gapped, sanitizer, rounds):
    """Only the decoders themselves can find these."""
    for count in (2 * CHUNK + 100, 4 * HUFFMAN32_PAGE + 500):
        generator = np.random.default_rng(count)
        for i in range(rounds):
            verdict = check(cuda(i % 3, sanitizer), moved(frame_of(count, coding, is_gapped), count, generator), count)
            assert verdict == DOES_NOT_END


@codings
@letters
def test_a_frame_with_more_or_less_behind_it(coding, is_gapped):
    for count in (900, CHUNK + 100):
        whole = frame_of(count, coding, is_gapped)
        for size in (*range(-9, 0), *range(1, 9)):
            other = torch.cat([whole[: whole.numel() + min(0, size)], torch.zeros(max(0, size), dtype=torch.uint8)])
            assert isinstance(check(cuda(), with_length(other), count), str)


def with_length(frame: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """With the length that it has in its header, and perhaps another count."""
    frame = frame.clone()
    frame[12:16] = torch.tensor([frame.numel() - HEADER_BYTES], dtype=torch.int32).view(torch.uint8)
    if count is not None:
        frame[8:12] = torch.tensor([count], dtype=torch.int32).view(torch.uint8)
    return frame


@letters
def test_what_fills_a_lane_must_be_zero(is_gapped):
    count = CHUNK + 100
    frame = frame_of(count, CODINGS[0], is_gapped)
    at = first_page(frame, count)
    sizes = frame[at : at + HUFFMAN32_LANES].numpy().astype(int)
    has_word = np.arange(sizes.max())[:, None] < sizes
    places = at + HUFFMAN32_LANES + 2 * (has_word.cumsum().reshape(has_word.shape) - 1)
    refused = 0
    for lane, words in enumerate(sizes):
        damaged = frame.clone()
        damaged[places[words - 1, lane] + 1] ^= 128  # part of a code if there is nothing to fill
        refused += check(cuda(), damaged, count) == DOES_NOT_END
    assert refused >= HUFFMAN32_LANES // 2
