"""All backends against the numpy reference: the same bytes, the same numbers, nothing touched out of bounds."""

from __future__ import annotations

import ctypes
import itertools
import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncz_plugins import kernels
from ncz_plugins.kernels import cpu
from ncz_plugins.kernels.format import CHUNK, DTYPES, Coder, Predictor, chunks_of, max_frame_bytes

REFERENCE = kernels.load("reference")
STATUSES = kernels.statuses()
COMPILED = [
    pytest.param(name, marks=pytest.mark.skipif(STATUSES[name] != "ok", reason=STATUSES[name]))
    for name in ("avx2", "portable")
]
ASKED = list(itertools.product(Coder, Predictor))
SOME_ASKED = [
    (Coder.AUTO, Predictor.AUTO),
    (Coder.FIXED, Predictor.DELTA),
    (Coder.RAW, Predictor.NONE),
]
COUNTS = (0, 1, 7, 8, 9, 31, 32, 33, 100, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77)
WIDTHS = (0, 1, 5, 8, 9, 13, 16, 17, 24, 31, 32)


@pytest.fixture(params=COMPILED)
def backend(request):
    return kernels.load(request.param)


@pytest.fixture(params=["reference", *COMPILED])
def any_backend(request):
    return kernels.load(request.param)


def codes_of_width(count: int, width: int, seed: int = 0) -> torch.Tensor:
    """Codes whose symbols take up to `width` bits, narrower in some blocks and zero in others."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(0, 1 << width, (count,), generator=generator)
    narrowed = torch.randint(0, width + 1, (-(-count // 32),), generator=generator).repeat_interleave(32)[:count]
    symbols = wide >> narrowed
    return ((symbols >> 1) ^ -(symbols & 1)).to(torch.int32)


def floats(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Gaussian, with NaN, infinities, zeros, subnormals and the largest finite number among them."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    info = torch.finfo(dtype)
    for i, value in enumerate(
        (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, info.smallest_normal / 4, info.max)
    ):
        x[50 + 131 * i :: 1009] = value
    return x


def steps_of(x: torch.Tensor, bits: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse steps and scales that give codes of about `bits` bits to numbers near 1; another in each chunk."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    inverse = 2.0 ** (bits - 1) * (1 + torch.arange(chunks_of(x.numel())) / 7)
    return inverse.to(dtype), (1 / inverse).to(dtype)


def room(count: int) -> torch.Tensor:
    return torch.full((max_frame_bytes(count),), 0xA5, dtype=torch.uint8)


def encode_codes(backend, codes, coder=Coder.FIXED, predictor=Predictor.NONE) -> torch.Tensor:
    frame = room(codes.numel())
    return frame[: backend.encode_codes(codes, coder, predictor, frame)].clone()


def encode(backend, x, inverse_steps, coder=Coder.FIXED, predictor=Predictor.NONE) -> torch.Tensor:
    frame = room(x.numel())
    return frame[: backend.encode(x, inverse_steps, coder, predictor, frame)].clone()


def decode_codes(backend, frame, count) -> torch.Tensor:
    codes = torch.empty(count, dtype=torch.int32)
    backend.decode_codes(frame, codes)
    return codes


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal to the last bit, but for which NaN a NaN is; -0.0 is not 0.0."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    if a.is_floating_point():
        assert torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())


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
    inverse_steps = torch.full((chunks_of(x.numel()),), 3.0)
    expected, codes = torch.empty(2, x.numel(), dtype=torch.int32)
    REFERENCE.quantize(x, inverse_steps, expected)
    backend.quantize(x, inverse_steps, codes)
    assert_same(codes, expected)
    for ours, theirs in zip(backend.chunk_statistics(x), REFERENCE.chunk_statistics(x)):
        assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("special", [0.0, float("nan"), float("inf"), -float("inf"), "max", "tiny"])
def test_chunk_statistics(backend, dtype, special):
    if isinstance(special, str):
        special = getattr(torch.finfo(dtype), special)
    for count in COUNTS:
        x = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64).to(dtype)
        x[count // 2 : count // 2 + 1] = special
        for ours, theirs in zip(backend.chunk_statistics(x), REFERENCE.chunk_statistics(x)):
            assert_same(ours, theirs)


def test_chunk_statistics_are_what_they_say(any_backend):
    x = torch.randn(2 * CHUNK + 5, generator=torch.Generator().manual_seed(0))
    x[CHUNK + 3] = float("nan")
    absmax, squares = any_backend.chunk_statistics(x)
    assert absmax.isinf().tolist() == squares.isinf().tolist() == [False, True, False]
    for c in (0, 2):
        chunk = x[c * CHUNK : (c + 1) * CHUNK].double()
        assert absmax[c] == chunk.abs().max()
        torch.testing.assert_close(squares[c], chunk.square().sum())


# ------------------------------------------------------------------ frames


@pytest.mark.parametrize("count", COUNTS)
def test_frames_are_identical(backend, count):
    widths = WIDTHS if count < CHUNK else (0, 5, 13, 32)  # the reference is slow
    for width, (coder, predictor) in itertools.product(widths, ASKED):
        codes = codes_of_width(count, width)
        expected = encode_codes(REFERENCE, codes, coder, predictor)
        assert_same(encode_codes(backend, codes, coder, predictor), expected)
        assert_same(decode_codes(backend, expected, count), codes)


@pytest.mark.parametrize("predictor", list(Predictor))
@pytest.mark.parametrize("coder", list(Coder))
def test_round_trip(any_backend, coder, predictor):
    for count, width in itertools.product(COUNTS, (0, 4, 32)):
        codes = codes_of_width(count, width)
        frame = encode_codes(any_backend, codes, coder, predictor)
        assert frame.numel() <= max_frame_bytes(count)
        assert_same(decode_codes(any_backend, frame, count), codes)


@pytest.mark.parametrize("name", COMPILED)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_codes(name, data):
    backend = kernels.load(name)
    bits = data.draw(st.integers(0, 31))
    values = data.draw(st.lists(st.integers(-(1 << bits), (1 << bits) - 1), max_size=150))
    coder, predictor = data.draw(st.sampled_from(ASKED))
    codes = torch.tensor(values, dtype=torch.int32).repeat(data.draw(st.sampled_from([1, 1, 1, 40])))
    expected = encode_codes(REFERENCE, codes, coder, predictor)
    assert_same(encode_codes(backend, codes, coder, predictor), expected)
    assert_same(decode_codes(backend, expected, codes.numel()), codes)


def test_selector_samples_the_same_chunks(backend):
    """More chunks than the selector looks at, each of another kind: looking elsewhere chooses otherwise."""
    chunks = 8
    kinds = [torch.arange(CHUNK), torch.randint(-8, 8, (CHUNK,)), torch.randint(-(1 << 30), 1 << 30, (CHUNK,))]
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        picks = torch.randint(0, len(kinds), (chunks,), generator=generator)
        codes = torch.cat([kinds[p] for p in picks]).to(torch.int32)
        for coder, predictor in ((Coder.AUTO, Predictor.AUTO), (Coder.RAW, Predictor.AUTO)):
            expected = encode_codes(REFERENCE, codes, coder, predictor)
            assert_same(encode_codes(backend, codes, coder, predictor), expected)


def test_selector_takes_the_smallest(any_backend):
    for codes in (torch.arange(CHUNK), codes_of_width(CHUNK, 6), codes_of_width(CHUNK, 32), torch.zeros(CHUNK)):
        codes = codes.to(torch.int32)
        sizes = {
            (coder, predictor): encode_codes(any_backend, codes, coder, predictor).numel()
            for coder in (Coder.FIXED, Coder.RAW)
            for predictor in (Predictor.NONE, Predictor.DELTA)
        }
        # RAW has no table of 2 bytes a chunk, which the selector leaves out of account.
        assert encode_codes(any_backend, codes, Coder.AUTO, Predictor.AUTO).numel() <= min(sizes.values()) + 2


# ------------------------------------------------------------------ in one pass


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 11, 20, 40])
def test_encode_and_decode(backend, dtype, bits):
    for count, (coder, predictor) in itertools.product(
        COUNTS, ((Coder.AUTO, Predictor.AUTO), (Coder.FIXED, 1), (0, 0))
    ):
        x = floats(count, dtype)
        inverse_steps, scales = steps_of(x, bits)
        frame = encode(backend, x, inverse_steps, coder, predictor)
        assert_same(frame, encode(REFERENCE, x, inverse_steps, coder, predictor))
        expected, out = torch.empty(2, count, dtype=dtype)
        REFERENCE.decode(frame, scales, expected)
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
@pytest.mark.parametrize("sent", [(Coder.FIXED, Predictor.NONE), (Coder.RAW, Predictor.DELTA)], ids=str)
def test_reduce_is_decode_add_encode(backend, dtype, sent):
    for count, (coder, predictor) in itertools.product(
        COUNTS, ((Coder.AUTO, Predictor.AUTO), (Coder.FIXED, 1), (0, 0))
    ):
        x = floats(count, dtype)
        inverse_steps = steps_of(x, 6)[0]
        received = encode_codes(backend, codes_of_width(count, 7), *sent)
        reduced = room(count)
        reduced = reduced[: backend.reduce(received, x, inverse_steps, coder, predictor, reduced)]

        codes = torch.empty(count, dtype=torch.int32)
        backend.quantize(x, inverse_steps, codes)
        backend.decode_codes(received, codes, add=True)
        assert_same(reduced, encode_codes(REFERENCE, codes, coder, predictor))


@pytest.mark.parametrize("coder", [Coder.RAW, Coder.FIXED])
def test_sums_wrap_around(any_backend, coder):
    codes = torch.tensor([2**31 - 1, -(2**31), -1, 5] * 20, dtype=torch.int32)
    frame = encode_codes(any_backend, codes, coder)
    total = torch.tensor([1, -1, -(2**31), -7] * 20, dtype=torch.int32)
    any_backend.decode_codes(frame, total, add=True)
    assert total.tolist() == [-(2**31), 2**31 - 1, 2**31 - 1, -2] * 20


# ------------------------------------------------------------------ memory


PROT_NONE = 0


class Guarded:
    """Tensors that end where no memory may be touched: one byte too far is a crash of the process."""

    def __init__(self):
        self.maps = []

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        page = mmap.PAGESIZE
        size = count * dtype.itemsize
        pages = -(-size // page)
        area = mmap.mmap(-1, (pages + 1) * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        libc = ctypes.CDLL(None, use_errno=True)
        last = ctypes.c_void_p(start + pages * page)
        assert libc.mprotect(last, ctypes.c_size_t(page), PROT_NONE) == 0
        self.maps.append(area)
        everything = torch.frombuffer(area, dtype=torch.uint8)
        return everything[pages * page - size : pages * page].view(dtype)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        return self.empty(x.numel(), x.dtype).copy_(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("coder", [Coder.RAW, Coder.FIXED])
def test_nothing_behind_a_buffer_is_touched(backend, dtype, coder):
    """Exactly sized buffers of each kind, at each width, with a tail of every length."""
    for width, tail in itertools.product(WIDTHS, (*range(1, 40), CHUNK, CHUNK + 3)):
        guarded = Guarded()
        codes = guarded.copy(codes_of_width(tail, width, seed=tail))
        codes[-1] = int(codes_of_width(1, width)) if width < 2 else -(1 << width - 1)  # the last block is widest
        frame = guarded.empty(max_frame_bytes(tail), torch.uint8)
        written = guarded.copy(frame[: backend.encode_codes(codes, coder, Predictor.NONE, frame)])
        out = guarded.empty(tail, torch.int32)
        backend.decode_codes(written, out)
        assert_same(out, codes)

        x = guarded.copy(floats(tail, dtype))
        inverse_steps, scales = (guarded.copy(t) for t in steps_of(x, min(width, 30)))
        backend.quantize(x, inverse_steps, out)
        backend.chunk_statistics(x)
        frame = guarded.empty(max_frame_bytes(tail), torch.uint8)
        backend.reduce(written, x, inverse_steps, coder, Predictor.DELTA, frame)
        written = guarded.copy(frame[: backend.encode(x, inverse_steps, coder, Predictor.DELTA, frame)])
        backend.decode(written, scales, x)


@pytest.mark.parametrize("count", [1, 40, CHUNK, CHUNK + 9])
def test_nothing_around_a_frame_or_an_output_is_written(backend, count):
    margin, mark = 64, 0xA5
    for width, (coder, predictor) in itertools.product(WIDTHS, ASKED):
        codes = codes_of_width(count, width)
        size = max_frame_bytes(count)
        memory = torch.full((size + 2 * margin,), mark, dtype=torch.uint8)
        frame = memory[margin : margin + size]
        written = backend.encode_codes(codes, coder, predictor, frame)
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
    frame = frame[: backend.encode(x, inverse_steps, Coder.AUTO, Predictor.AUTO, frame)]
    assert_same(frame, encode(REFERENCE, x.clone(), inverse_steps, Coder.AUTO, Predictor.AUTO))

    out = torch.empty(count + offset, dtype=dtype)[offset:]
    expected = torch.empty(count, dtype=dtype)
    backend.decode(frame, scales, out)
    REFERENCE.decode(frame, scales, expected)
    assert_same(out, expected)

    reduced = torch.empty(max_frame_bytes(count) + offset, dtype=torch.uint8)[offset:]
    written = backend.reduce(frame, x, inverse_steps, Coder.FIXED, Predictor.NONE, reduced)
    theirs = room(count)
    assert written == REFERENCE.reduce(frame, x, inverse_steps, Coder.FIXED, Predictor.NONE, theirs)
    assert_same(reduced[:written], theirs[:written])


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
        with pytest.warns(RuntimeWarning, match="libncz_cpu.so.*"):
            assert kernels.cpu_backend().name == "reference"
    finally:
        cpu._library.cache_clear()
        kernels.cpu_backend.cache_clear()
