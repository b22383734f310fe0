"""The CUDA kernels, on the emulator, against those of CPUs: the same bytes, the same numbers, the same damages."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from emulator import EmulatedLauncher
from hypothesis import given, settings
from hypothesis import strategies as st
from planes import in_order
from repository import GOLDEN
from samples import assert_same, codes_of_width, floats, sparse_codes, steps_of, with_flipped_bits

from ncz_plugins import kernels
from ncz_plugins.kernels.cuda import CudaBackend
from ncz_plugins.kernels.format import (
    CHUNK,
    DTYPES,
    HEADER_BYTES,
    ON_CPUS_ALONE,
    ON_GPUS,
    Coder,
    Coding,
    DamagedFrame,
    Noise,
    Predictor,
    SelectorCosts,
    blocks_of,
    chunks_of,
    max_frame_bytes,
    tiles_of,
)
from ncz_plugins.kernels.reference import ReferenceBackend
from ncz_plugins.kernels.updates import decode_update, encode_update, max_update_bytes

FAST = kernels.load(next(name for name, status in kernels.statuses().items() if status == "ok"))


class Expected(ReferenceBackend):
    """What the kernels must give. By the C++ ones what these have as well, as the reference is slow."""

    def __init__(self):
        super().__init__(on_gpus=True)
        for name in ("quantize", "dequantize", "block_statistics", "differences", "add_differences", "checksum"):
            setattr(self, name, getattr(FAST, name))


REFERENCE = Expected()
GOLDEN_CODES = dict(np.load(GOLDEN / "codes.npz"))
GOLDEN_FLOATS = dict(np.load(GOLDEN / "floats.npz"))
EARLIER_FRAMES = dict(np.load(GOLDEN / "earlier.npz"))

COUNTS = (0, 1, 7, 8, 9, 31, 32, 33, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77, 10007)
SEEDS = (0, 1)  # of the emulator: orders in which threads and blocks run
CODERS = (Coder.RAW, Coder.FIXED, Coder.HUFFMAN, Coder.AUTO)
ASKED = [Coding(coder, predictor) for coder, predictor in itertools.product(CODERS, Predictor)]
ONE_PASS = [Coding(Coder.FIXED, Predictor.NONE), Coding(Coder.FIXED, Predictor.DELTA)]
NOISE = Noise(2**64 - 3, 2**32 - 1, 2**32 - 77, 2**34 - 7)
MARK = 0xA5


@pytest.fixture(autouse=True, scope="module")
def scratch_is_garbage():
    """What torch.empty gives is filled with large numbers, so that reading it shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@functools.cache
def cuda(seed: int = 0, sanitizer: str | None = None) -> CudaBackend:
    return CudaBackend(EmulatedLauncher(seed=seed, sanitizer=sanitizer))


def buffer(count: int) -> torch.Tensor:
    return torch.full((max_frame_bytes(count) + 64,), MARK, dtype=torch.uint8)[:-64]


def written(frame: torch.Tensor, size) -> torch.Tensor:
    """What was written to the room `frame`. CUDA kernels touch no other byte, but where a coder gave way to PLANES."""
    if not isinstance(size, int):
        assert (frame._base[frame.storage_offset() + frame.numel() :] == MARK).all()
        assert frame[5] == Coder.PLANES or (frame[size:] == MARK).all()
    return in_order(frame[:size].clone())


def encode_codes(backend, codes, coding) -> torch.Tensor:
    frame = buffer(codes.numel())
    return written(frame, backend.encode_codes(codes, coding, frame))


def encode(backend, x, inverse_steps, coding, noise=None) -> torch.Tensor:
    frame = buffer(x.numel())
    return written(frame, backend.encode(x, inverse_steps, coding, frame, noise))


def reduce(backend, frame, x, inverse_steps, coding, noise=None) -> torch.Tensor:
    out = buffer(x.numel())
    return written(out, backend.reduce(frame, x, inverse_steps, coding, out, noise))


def decode_codes(backend, frame, count, add=False) -> torch.Tensor:
    codes = torch.arange(count, dtype=torch.int32)
    backend.decode_codes(frame, codes, add)
    backend.check()
    return codes


def coding_name(coding: Coding) -> str:
    return f"{coding.coder.name}-{coding.predictor.name}"


def assert_same_frames(backend, codes: torch.Tensor, coding: Coding) -> None:
    expected = encode_codes(REFERENCE, codes, coding)
    assert_same(encode_codes(backend, codes, coding), expected)
    assert_same(decode_codes(backend, expected, codes.numel()), codes)


# ------------------------------------------------------------------ differences


def any_floats(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    data = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype) if count else torch.empty(0, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_differences(seed, dtype):
    """Of any bits, at addresses that eight numbers at once can't be loaded from as well."""
    for count, first in itertools.product(COUNTS, (0, 1)):
        x, base = (any_floats(dtype, count + first, each)[first:] for each in (0, 1))
        expected = torch.empty(count, dtype=torch.int32)
        REFERENCE.differences(x, base, expected)
        codes = torch.full((count + 8,), 7, dtype=torch.int32)
        cuda(seed).differences(x, base, codes[:count])
        assert torch.equal(codes[:count], expected) and (codes[count:] == 7).all()
        out = torch.cat([base, base[:1]])
        cuda(seed).add_differences(codes[:count], out[:count], out[:count])  # in place
        assert torch.equal(out[:count].view(torch.uint8), x.view(torch.uint8))
        assert torch.equal(out[count:].view(torch.uint8), base[:1].view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_updates_are_the_same_bytes(dtype):
    for count in (0, 1, 33, 2 * CHUNK + 77):
        base = floats(count, dtype)
        for x in (base, (base * 1.01).to(dtype), any_floats(dtype, count, 3)):
            frames, outs = [], []
            for backend in (REFERENCE, cuda(seed=1)):
                room = torch.zeros(max_update_bytes(count, dtype.itemsize), dtype=torch.uint8)
                coding = Coding(Coder.HUFFMAN, Predictor.NONE)
                frames.append(room[: encode_update(backend, x, base, coding, room)])
                outs.append(base.clone())
                decode_update(backend, frames[0], outs[-1], outs[-1])
                assert torch.equal(outs[-1].view(torch.uint8), x.view(torch.uint8))
            assert torch.equal(*map(in_order, frames))
    assert cuda().digest(any_floats(torch.float32, 999, 0)) == REFERENCE.digest(any_floats(torch.float32, 999, 0))


# ------------------------------------------------------------------ frames


@pytest.mark.parametrize("coding", ASKED, ids=coding_name)
@pytest.mark.parametrize("seed", SEEDS)
def test_frames(seed, coding):
    """Of several kinds of codes; other counts with each seed."""
    for count in COUNTS[seed :: len(SEEDS)]:
        kinds = [codes_of_width(count, width) for width in (3, 32)]
        for codes in [*kinds, sparse_codes(count, 0.1), codes_of_width(count, 9).cumsum(0, dtype=torch.int32)]:
            assert_same_frames(cuda(seed), codes, coding)


@pytest.mark.parametrize("coding", ONE_PASS, ids=coding_name)
def test_every_width(coding):
    for width in range(33):
        assert_same_frames(cuda(), codes_of_width(100, width, seed=width), coding)


@pytest.mark.parametrize("seed", SEEDS)
def test_many_chunks(seed):
    """More blocks than run at a time, so that they look back at others that began, ended or wait."""
    codes = codes_of_width(40 * CHUNK + 3, 12)
    for coding in (*ONE_PASS, Coding(Coder.HUFFMAN, Predictor.NONE)):
        assert_same_frames(cuda(seed), codes, coding)


@pytest.mark.parametrize("link", [10**7, 8000, 80, 0])
def test_the_selector_decides_alike(link):
    generator = torch.Generator().manual_seed(0)
    count = 3 * CHUNK + 5
    for codes in (
        torch.arange(count),
        codes_of_width(count, 6),
        sparse_codes(count, 0.01),
        torch.randn(count, generator=generator).mul(300).round(),
        torch.randn(count, generator=generator).cumsum(0).mul(5).round(),
    ):
        assert_same_frames(cuda(1), codes.to(torch.int32), Coding(costs=SelectorCosts(link=link)))


def is_of_gpus(name: str) -> bool:
    """Whether GPUs write this frame. AUTO's choice is that of CPUs."""
    return "-auto-" not in name and GOLDEN_CODES[name][5] not in ON_CPUS_ALONE


@pytest.mark.parametrize("name", [name for name in GOLDEN_CODES if "-" in name and is_of_gpus(name)])
def test_golden_frames(name):
    kind, coder, predictor = name.split("-")
    coder = {"huffman32": "huffman", "planes": "fixed"}.get(coder, coder)
    codes, golden = torch.from_numpy(GOLDEN_CODES[kind]), torch.from_numpy(GOLDEN_CODES[name])
    coding = Coding(Coder[coder.upper()], Predictor[predictor.upper()])
    assert_same(encode_codes(cuda(1), codes, coding), golden)
    assert_same(decode_codes(cuda(1), golden, codes.numel()), codes)


@pytest.mark.parametrize("name", EARLIER_FRAMES)
def test_frames_that_were_written_once_are_read(name):
    codes, frame = torch.from_numpy(GOLDEN_CODES[name.split("-")[0]]), torch.from_numpy(EARLIER_FRAMES[name])
    assert_same(decode_codes(cuda(1), frame, codes.numel()), codes)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_codes(data):
    bits = data.draw(st.integers(0, 31))
    values = data.draw(st.lists(st.integers(-(1 << bits), (1 << bits) - 1), max_size=150))
    coding = data.draw(st.sampled_from(ASKED))
    codes = torch.tensor(values, dtype=torch.int32).repeat(data.draw(st.sampled_from([1, 1, 1, 40])))
    assert_same_frames(cuda(data.draw(st.sampled_from(SEEDS))), codes, coding)


@pytest.mark.parametrize("coder", CODERS)
def test_decoding_adds_modulo_2_32(coder):
    codes = torch.tensor([2**31 - 1, -(2**31), -1, 5] * 20, dtype=torch.int32)
    frame = encode_codes(REFERENCE, codes, Coding(coder))
    assert_same(decode_codes(cuda(), frame, 80, add=True), decode_codes(REFERENCE, frame, 80, add=True))


# ------------------------------------------------------------------ floats


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("noise", [None, NOISE, Noise(5, 6, 7)], ids=str)
def test_floats(dtype, noise):
    """All that works on floats, for codes of few and of too many bits."""
    for (seed, count), bits in itertools.product(enumerate(COUNTS), (11, 40)):
        backend = cuda(seed % len(SEEDS))
        x = floats(count, dtype)
        inverse_steps, scales = steps_of(x, bits)
        expected, codes = torch.empty(2, count, dtype=torch.int32)
        REFERENCE.quantize(x, inverse_steps, expected, noise)
        backend.quantize(x, inverse_steps, codes, noise)
        assert_same(codes, expected)

        coding = ONE_PASS[seed % 2]
        frame = encode(REFERENCE, x, inverse_steps, coding, noise)
        assert_same(encode(backend, x, inverse_steps, coding, noise), frame)
        assert_same(
            reduce(backend, frame, x, inverse_steps, coding, noise),
            reduce(REFERENCE, frame, x, inverse_steps, coding, noise),
        )
        ours, theirs = torch.empty(2, count, dtype=dtype)
        backend.decode(frame, scales, ours)
        REFERENCE.decode(frame, scales, theirs)
        assert_same(ours, theirs)
        backend.dequantize(codes, scales / 3, ours)
        REFERENCE.dequantize(codes, scales / 3, theirs)
        assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("noise", [None, NOISE], ids=str)
def test_floats_with_all_coders(dtype, noise):
    count = CHUNK + 9
    x = floats(count, dtype)
    inverse_steps, scales = steps_of(x, 5)
    for seed, coding in enumerate(ASKED):
        backend = cuda(seed % len(SEEDS))
        frame = encode(REFERENCE, x, inverse_steps, coding, noise)
        assert_same(encode(backend, x, inverse_steps, coding, noise), frame)
        ours, theirs = torch.empty(2, count, dtype=dtype)
        backend.decode(frame, scales, ours)
        REFERENCE.decode(frame, scales, theirs)
        assert_same(ours, theirs)
        for other in (ONE_PASS[1], coding):
            expected = reduce(REFERENCE, frame, x, inverse_steps, other, noise)
            assert_same(reduce(backend, frame, x, inverse_steps, other, noise), expected)
    cuda().check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_number(dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    inverse_steps = torch.full((blocks_of(x.numel()),), 3.0)
    expected, codes = torch.empty(2, x.numel(), dtype=torch.int32)
    REFERENCE.quantize(x, inverse_steps, expected)
    cuda().quantize(x, inverse_steps, codes)
    assert_same(codes, expected)
    for exponent in (-40, -26, -14, 9, 120):  # subnormal to infinite
        scales = torch.full((blocks_of(x.numel()),), 2.0**exponent / 3)
        ours, theirs = torch.empty(2, x.numel(), dtype=dtype)
        cuda().dequantize(codes, scales, ours)
        REFERENCE.dequantize(codes, scales, theirs)
        assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_block_statistics(dtype):
    special = (0.0, float("nan"), float("inf"), -float("inf"), torch.finfo(dtype).max, torch.finfo(dtype).tiny)
    for (seed, count), value in itertools.product(enumerate(COUNTS), special):
        x = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64).to(dtype)
        x[count // 2 : count // 2 + 1] = value
        for ours, theirs in zip(cuda(seed % len(SEEDS)).block_statistics(x), REFERENCE.block_statistics(x)):
            assert_same(ours, theirs)


@pytest.mark.parametrize("name", [name for name in GOLDEN_FLOATS if "-" not in name])
def test_golden_quantizer_and_statistics(name):
    x, inverse_steps = (torch.from_numpy(GOLDEN_FLOATS[name + part]) for part in ("", "-inverse_steps"))
    codes = torch.empty(x.numel(), dtype=torch.int32)
    for part, noise in (("codes", None), ("noisy_codes", Noise(seed=2**40 + 7, call=3, shift=2**31 + 5, first=10))):
        cuda().quantize(x, inverse_steps, codes, noise)
        assert torch.equal(codes, torch.from_numpy(GOLDEN_FLOATS[f"{name}-{part}"]))
    for part, statistic in zip(("lowest", "highest", "squares"), cuda().block_statistics(x)):
        assert torch.equal(statistic, torch.from_numpy(GOLDEN_FLOATS[f"{name}-{part}"]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [1, 3])
def test_views_at_odd_addresses(dtype, offset):
    count = CHUNK + 50
    x = floats(count + offset, dtype)[offset:]
    inverse_steps, scales = (torch.cat([t[:1], t])[1:] for t in steps_of(x, 5))
    for coding in (*ONE_PASS, Coding(Coder.HUFFMAN)):
        expected = encode(REFERENCE, x.clone(), inverse_steps, coding)
        frame = torch.full((max_frame_bytes(count) + offset,), MARK, dtype=torch.uint8)[offset:]
        frame = written(frame, cuda(1).encode(x, inverse_steps, coding, frame))
        assert_same(frame, expected)
        frame = torch.cat([frame[:offset], frame])[offset:]
        out = torch.empty(count + offset, dtype=dtype)[offset:]
        theirs = torch.empty(count, dtype=dtype)
        cuda(1).decode(frame, scales, out)
        REFERENCE.decode(expected, scales, theirs)
        assert_same(out, theirs)


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_under_sanitizers(sanitizer, coder):
    """Buffers of exactly their size, every kernel: nothing out of bounds, no undefined arithmetic, no race."""
    backend = cuda(1, sanitizer)
    for count, noise, coding in (
        (0, None, Coding(coder)),
        (33, NOISE, Coding(coder, Predictor.NONE)),
        (2 * CHUNK + 77, None, Coding(coder, Predictor.DELTA)),
    ):
        x = floats(count, torch.float32)
        inverse_steps, scales = steps_of(x, 5)
        frame = encode(backend, x, inverse_steps, coding, noise)
        assert_same(frame, encode(REFERENCE, x, inverse_steps, coding, noise))
        backend.seal(frame)
        for other in (ONE_PASS[1], coding):
            expected = reduce(REFERENCE, frame, x, inverse_steps, other, noise)
            assert_same(reduce(backend, frame, x, inverse_steps, other, noise), expected)
        backend.decode(frame, scales, x)
        backend.block_statistics(x)
        assert backend.checksum(frame) == REFERENCE.checksum(frame)
        backend.check()


# ------------------------------------------------------------------ checksums


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_checksums(offset):
    for count in (0, 3, CHUNK + 9, 70000):
        frame = encode_codes(REFERENCE, codes_of_width(count, 9), ONE_PASS[0])
        assert cuda().checksum(torch.cat([frame[:offset], frame])[offset:]) == REFERENCE.checksum(frame)
        unsealed = torch.cat([frame[:offset], frame, frame[:offset]])[offset:]  # with bytes behind it
        cuda(1).seal(unsealed)
        sealed = unsealed[: frame.numel()].clone()
        REFERENCE.seal(frame)
        assert_same(sealed, frame)
        assert_same(decode_codes(cuda(1), sealed, count), decode_codes(REFERENCE, frame, count))


# ------------------------------------------------------------------ damage


TABLE_SUM = re.compile(r"(pages) add up to \d+ bytes, the payload holds (-?\d+)")


def verdict(backend, frame: torch.Tensor, count: int) -> list[int] | str:
    """The codes, or what the backend says is wrong."""
    codes = torch.full((count,), -559038737, dtype=torch.int32)
    try:
        backend.decode_codes(frame, codes)
        backend.check()
    except DamagedFrame as error:
        if frame.numel() < 6 or frame[5] not in (Coder.PLANES, Coder.HUFFMAN32):
            assert (codes == -559038737).all(), f"{backend.name} wrote codes of a damaged frame"
        return str(error)
    return codes.tolist()


def check(backend, frame: torch.Tensor, count: int) -> list[int] | str:
    """The verdict, on which both backends must agree."""
    expected, found = verdict(REFERENCE, frame, count), verdict(backend, frame.clone(), count)
    if isinstance(expected, str) and (sums := TABLE_SUM.fullmatch(expected)):
        # When the host words the message, it has no table to add up.
        assert found == "{} do not add up to the {} bytes that the payload holds".format(*sums.groups())
    else:
        assert found == expected
    return expected


def frame_of(count: int, coder: Coder, predictor: Predictor) -> torch.Tensor:
    """A frame of codes of between 0 and 20 bits, another number in each block."""
    generator = torch.Generator().manual_seed(count)
    codes = torch.randint(-(1 << 20), 1 << 20, (count,), generator=generator)
    codes >>= torch.randint(0, 22, (-(-count // 32),), generator=generator).repeat_interleave(32)[:count]
    if coder == Coder.HUFFMAN:
        codes >>= 14  # such as pay, so that no coder gives way
    frame = encode_codes(REFERENCE, codes.to(torch.int32), Coding(coder, predictor))
    assert frame[5] == ON_GPUS.get(coder, coder)
    return frame


FRAMES = {
    "PLANES": (20, frame_of(20, Coder.FIXED, Predictor.NONE)),
    "PLANES, DELTA": (75, frame_of(75, Coder.FIXED, Predictor.DELTA)),
    "HUFFMAN": (700, frame_of(700, Coder.HUFFMAN, Predictor.NONE)),
    "HUFFMAN, DELTA": (700, frame_of(700, Coder.HUFFMAN, Predictor.DELTA)),
}
frames = pytest.mark.parametrize("count,frame", FRAMES.values(), ids=FRAMES.keys())
sanitized = pytest.mark.parametrize("sanitizer", [None, "address"], ids=["plain", "asan"])


@pytest.mark.parametrize("coder", sorted(ON_CPUS_ALONE))
def test_frames_of_cpus_are_refused(coder):
    codes = sparse_codes(700, 0.2)
    frame = encode_codes(FAST, codes, Coding(coder, Predictor.NONE))
    assert frame[5] == coder
    assert check(cuda(), frame, 700).startswith(f"coder {int(coder)} with width {int(frame[7])} is unknown")


def test_a_coder_that_gpus_lack_is_refused():
    """The core refuses it before: see `core.run.decide`."""
    with pytest.raises(ValueError, match="no coder RANS: pass AUTO or HUFFMAN"):
        encode_codes(cuda(), sparse_codes(700, 0.2), Coding(Coder.RANS))


@sanitized
@frames
def test_truncation(count, frame, sanitizer):
    """At every byte of short frames; of the others near the ends, where their tables are, and here and there."""
    sizes = range(frame.numel())
    if frame.numel() > 300:
        sizes = [*range(HEADER_BYTES + 70), *range(HEADER_BYTES + 70, frame.numel() - 3, 37), *sizes[-3:]]
    for size in sizes[:: 5 if sanitizer else 1]:
        assert isinstance(check(cuda(size % 2, sanitizer), frame[:size], count), str)


@sanitized
@frames
def test_every_header_byte(count, frame, sanitizer):
    accepted = 0
    for at in range(HEADER_BYTES):
        for value in ({0, 1, 255} | (set() if sanitizer else {2, 3, 128})) - {int(frame[at])}:
            damaged = frame.clone()
            damaged[at] = value
            accepted += isinstance(check(cuda(0, sanitizer), damaged, count), list)
    assert accepted == (
        frame[5] != Coder.PLANES
    )  # the other predictor: as valid, other codes, where it takes no word more


@sanitized
@frames
def test_a_payload_that_ends_where_the_header_says(count, frame, sanitizer):
    """Cut, but with a length to match, so that what is behind the header is looked at."""
    for size in range(HEADER_BYTES, frame.numel(), 17 if sanitizer else 5):
        cut = frame[:size].clone()
        cut[12:16] = torch.tensor([size - HEADER_BYTES]).to(torch.int32).view(torch.uint8)
        assert isinstance(check(cuda(1, sanitizer), cut, count), str)


def test_tables_and_masks():
    """The bytes that say where other bytes lie, one at a time, to values about the limits."""
    count = 2 * CHUNK + 75
    for predictor in (Predictor.NONE, Predictor.DELTA):
        frame = frame_of(count, Coder.FIXED, predictor)
        first_tile = HEADER_BYTES + 4 * (chunks_of(count) + tiles_of(count))
        for at in (*range(HEADER_BYTES, first_tile), *range(first_tile, first_tile + 200, 23)):
            for value in (0, 1, 32, 33, 255):
                damaged = frame.clone()
                damaged[at] = value
                check(cuda(), damaged, count)


@frames
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_random_flips(count, frame, data):
    check(cuda(data.draw(st.sampled_from(SEEDS))), with_flipped_bits(frame, data), count)


def test_chunks_lie_in_any_order():
    count = 2 * CHUNK + 75
    frame = frame_of(count, Coder.FIXED, Predictor.NONE)
    tables = HEADER_BYTES, HEADER_BYTES + 4 * chunks_of(count), HEADER_BYTES + 4 * (chunks_of(count) + tiles_of(count))
    header, begins, table, tiles = frame.tensor_split(tables)
    first = begins.view(torch.int32).tolist()
    chunks = [tiles[4 * begin : end and 4 * end] for begin, end in zip(first, [*first[1:], None])]
    sizes = [chunk.numel() // 4 for chunk in chunks]
    other = torch.tensor([sizes[1] + sizes[2], sizes[2], 0], dtype=torch.int32).view(torch.uint8)
    turned = torch.cat([header, other, table, *chunks[::-1]])
    assert not torch.equal(turned, frame) and torch.equal(in_order(turned), frame)
    assert_same(decode_codes(cuda(), turned, count), decode_codes(REFERENCE, frame, count))
    assert_same(decode_codes(REFERENCE, turned, count), decode_codes(REFERENCE, frame, count))


@pytest.mark.parametrize("coding", [*ONE_PASS, Coding(Coder.HUFFMAN), Coding()], ids=coding_name)
@pytest.mark.parametrize("predictor", [Predictor.NONE, Predictor.DELTA])
def test_a_damaged_tile_spoils_what_is_made_of_it(predictor, coding):
    """Which only the kernels that add its codes can find."""
    count = 3 * CHUNK + 5
    frame = frame_of(count, Coder.FIXED, predictor)
    at = HEADER_BYTES + 4 * (chunks_of(count) + 5)  # of the sixth tile: the least and the most of its lanes' widths
    frame[at + 2 : at + 4] = torch.tensor([int(frame[at + 3]), int(frame[at + 2])], dtype=torch.uint8)
    x, ones = torch.zeros(count), torch.ones(blocks_of(count))
    for seed in SEEDS:
        assert "tile is not where it should be" in check(cuda(seed), frame, count)
        out = torch.zeros(max_frame_bytes(count), dtype=torch.uint8)
        size = int(cuda(seed).reduce(frame, x, ones, coding, out))
        with pytest.raises(DamagedFrame, match="tile"):
            cuda(seed).check()
        assert "made of a frame that was damaged" in check(cuda(seed), out[:size], count)


@pytest.mark.parametrize("coder", [Coder.FIXED, Coder.HUFFMAN])
def test_decode_and_reduce_refuse_too(coder):
    backend = cuda()
    frame = frame_of(700, coder, Predictor.NONE)[:-1].clone()
    x, ones = torch.zeros(700), torch.ones(blocks_of(700))
    backend.decode(frame, ones, x)
    assert (x == 0).all()
    with pytest.raises(DamagedFrame, match="payload has"):
        backend.check()
    for coding in (*ONE_PASS, Coding(Coder.HUFFMAN), Coding()):
        out = torch.zeros(max_frame_bytes(700), dtype=torch.uint8)
        size = int(backend.reduce(frame, x, ones, coding, out))
        with pytest.raises(DamagedFrame, match="payload has"):
            backend.check()
        assert "made of a frame that was damaged" in check(backend, out[:size], 700)


def test_check_raises_the_first_damage_once():
    backend = cuda()
    codes = torch.empty(75, dtype=torch.int32)
    whole = FRAMES["PLANES, DELTA"][1]
    backend.decode_codes(whole[:10], codes)
    backend.decode_codes(whole[:-1], codes)
    backend.decode_codes(whole, codes)
    with pytest.raises(DamagedFrame, match="^10 bytes are too few"):
        backend.check()
    backend.check()
    assert_same(decode_codes(backend, whole, 75), decode_codes(REFERENCE, whole, 75))


def test_damage_shows_to_the_thread_that_met_it():
    backend, whole = cuda(), FRAMES["PLANES, DELTA"][1]

    def decode_in_pieces(codes) -> None:
        with pytest.raises(DamagedFrame, match="^10 bytes are too few"):
            backend.decode_codes(whole[:10], codes)
            met.set()
            checked.wait(60)
            backend.check()

    met, checked = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as other:
        job = other.submit(decode_in_pieces, torch.empty(75, dtype=torch.int32))
        met.wait(60)
        try:
            assert_same(decode_codes(backend, whole, 75), decode_codes(REFERENCE, whole, 75))  # with a check of its own
        finally:
            checked.set()
        job.result()


# ------------------------------------------------------------------ what a CUDA graph needs


class Recorder(EmulatedLauncher):
    """A launcher that notes what is launched, and runs it."""

    def __init__(self):
        super().__init__()
        self.launches = []

    def launch(self, kernel, dtype, grid, block, *arguments):
        values = [argument for argument in arguments if isinstance(argument, np.generic)]
        self.launches.append((kernel, dtype, grid, block, values))
        super().launch(kernel, dtype, grid, block, *arguments)


def launched(codes: torch.Tensor, coding: Coding) -> list:
    recorder = Recorder()
    backend = CudaBackend(recorder)
    x, ones = codes.to(torch.float32), torch.ones(blocks_of(codes.numel()))
    frame = encode_codes(REFERENCE, codes_of_width(codes.numel(), 5), Coding(Coder.RAW, Predictor.NONE))
    out = buffer(codes.numel())
    backend.encode(x, ones, coding, out)
    backend.encode_codes(codes, coding, out)
    backend.reduce(frame, x, ones, coding, out)
    backend.decode(frame, ones, x)
    return recorder.launches


@pytest.mark.parametrize("coding", [ONE_PASS[0], Coding(), Coding(Coder.HUFFMAN)], ids=coding_name)
def test_launches_depend_on_nothing_but_the_count(coding):
    count = CHUNK + 5
    assert launched(sparse_codes(count, 0.1), coding) == launched(codes_of_width(count, 8), coding)


@pytest.mark.parametrize("coding", [ONE_PASS[0], Coding(), Coding(Coder.HUFFMAN, Predictor.NONE)], ids=coding_name)
def test_nothing_waits_for_the_device(coding, monkeypatch):
    """No value of a tensor is looked at by the host before a size is used as a number, or `check` is called."""
    backend = cuda()
    count = CHUNK + 5
    x = torch.randn(count, generator=torch.Generator().manual_seed(0))
    inverse_steps, scales = steps_of(x, 5)
    frame, out = encode(REFERENCE, x, inverse_steps, coding), buffer(count)

    def refuse(*arguments):
        pytest.fail("the host looked at a tensor")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__int__", "__index__", "__bool__", "__float__", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, refuse)
        backend.encode(x, inverse_steps, coding, out)
        backend.seal(out)
        backend.quantize(x, inverse_steps, torch.empty(count, dtype=torch.int32))
        backend.block_statistics(x)
        size = backend.reduce(frame, x, inverse_steps, coding, out, NOISE)
        backend.decode(frame, scales, x)
    assert HEADER_BYTES < size.__index__() <= max_frame_bytes(count)


def test_a_size_is_a_number():
    codes = codes_of_width(100, 4)
    size = cuda().encode_codes(codes, ONE_PASS[0], buffer(100))
    expected = encode_codes(REFERENCE, codes, ONE_PASS[0]).numel()
    assert size == expected and int(size) == expected and repr(size) == f"DeviceSize({expected})"
    assert size.tensor.shape == (1,) and size.tensor.dtype == torch.int64
    assert list(range(expected + 5))[:size] == list(range(expected))


# ------------------------------------------------------------------ loading


def test_without_a_device_there_is_no_backend(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kernels.cuda_backend.cache_clear()
    with pytest.raises(ImportError, match="no CUDA device|without CUDA"):
        kernels.cuda_backend()
    assert "CUDA" in kernels.cuda_status()


def test_without_cupy_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delitem(sys.modules, "ncz_plugins.kernels.cuda.nvrtc", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    kernels.cuda_backend.cache_clear()
    with pytest.raises(ImportError, match=r'pip install "ncz_plugins\[cuda\]"'):
        kernels.cuda_backend()
