"""SPLIT frames: every bit of every float comes back, and nothing but a valid frame is believed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncz_plugins import kernels
from ncz_plugins.kernels.format import (
    CHUNK,
    DTYPES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Coder,
    Coding,
    DamagedFrame,
    Predictor,
    max_frame_bytes,
)
from ncz_plugins.kernels.lossless import decode_floats, encode_floats, max_lossless_bytes

BACKEND = kernels.cpu_backend()
AUTO = Coding()
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
PLANES = {2: 2, 4: 4, 8: 7}
SIZES = (0, 1, 2, 7, 33, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5)


def encoded(x: torch.Tensor, coding: Coding = AUTO) -> torch.Tensor:
    buffer = torch.empty(max_lossless_bytes(x.numel(), x.element_size()), dtype=torch.uint8)
    return buffer[: encode_floats(BACKEND, x, coding, buffer)].clone()


def decoded(frame: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(like, 3.0)
    decode_floats(BACKEND, frame, out)
    return out


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(INTEGERS[x.element_size()])


def any_floats(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """Any bits: NaN with all kinds of payload among them, denormals, and both infinities."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    data = np.random.default_rng(seed).integers(0, 256, count * itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype) if count else torch.empty(0, dtype=dtype)


def normal(dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_comes_back(dtype, count):
    for x in (any_floats(dtype, count), normal(dtype, count)):
        frame = encoded(x)
        assert torch.equal(bits(decoded(frame, x)), bits(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_come_back(dtype):
    info = torch.finfo(dtype)
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, info.max, info.min, info.tiny, -info.tiny]
    x = torch.tensor(special, dtype=torch.float64).to(dtype).repeat(500)
    bits(x)[9:18] = torch.arange(9)  # denormals
    bits(x)[18] = bits(x)[0] + 1  # a NaN that carries something
    assert torch.equal(bits(decoded(encoded(x), x)), bits(x))


@pytest.mark.parametrize("coder", [Coder.RAW, Coder.FIXED, Coder.HUFFMAN, Coder.RANS, Coder.AUTO])
@pytest.mark.parametrize("predictor", Predictor)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_frame_exceeds_its_limit(dtype, predictor, coder):
    extremes = any_floats(dtype, CHUNK + 9)
    bits(extremes)[::2], bits(extremes)[1::2] = 0x2AAA, -0x2AAB  # DELTA makes the most of these
    for x in (any_floats(dtype, CHUNK + 9), extremes, extremes[:1], extremes[:0]):
        frame = encoded(x, Coding(coder, predictor))
        assert torch.equal(bits(decoded(frame, x)), bits(x))


def test_the_limit_is_close():
    x = any_floats(torch.float32, 10 * CHUNK)
    assert len(encoded(x, Coding(Coder.RAW, Predictor.DELTA))) > 0.95 * max_lossless_bytes(x.numel(), 4)


def test_the_frame_is_as_the_specification_says():
    """Written out by hand: 1.0 and -2.0 have exponents 127 and 128, whose mean is 127 (rounded down)."""
    x = torch.tensor([1.0, -2.0])
    frame = encoded(x, Coding(Coder.RAW, Predictor.NONE)).numpy().tobytes()
    planes = [bytes([0, 2]), bytes([0, 0]), bytes([0, 0]), bytes([0, 2])]  # exponents 0 and 1; signs 0 and 1; zigzag
    inner = [HEADER.pack(MAGIC, VERSION, Coder.RAW, Predictor.NONE, 8, 2, 2, 0, 0) + plane for plane in planes]
    payload = (127).to_bytes(4, "little") + b"".join(inner)
    assert frame == HEADER.pack(MAGIC, VERSION, Coder.SPLIT, 0, 32, 2, len(payload), 0, 0) + payload


@pytest.mark.parametrize(
    "dtype, values, base",
    [
        (torch.float32, [0.0, -0.0, float("nan"), float("inf"), 1e-42], 0),  # none that counts
        (torch.float32, [1.0, 1.0, 0.0, float("inf")], 127),
        (torch.bfloat16, [2.0**127, 2.0**126], 253),  # above 127: the codes wrap
        (torch.float16, [1.0], 15 << 3),
        (torch.float64, [1.0, 2.0**1023], ((1023 << 5) + (2046 << 5)) // 2),
    ],
)
def test_the_base_is_the_mean_of_the_top_parts_that_count(dtype, values, base):
    x = torch.tensor(values, dtype=dtype)
    frame = encoded(x)
    assert int.from_bytes(frame[HEADER_BYTES:][:4].numpy().tobytes(), "little") == base
    assert torch.equal(bits(decoded(frame, x)), bits(x))


def test_what_was_a_bfloat16_once_takes_little_more_than_one():
    """Two bytes that are always zero cost nothing; that sign and mantissa stand in different bytes costs a bit."""
    x = normal(torch.bfloat16, 1 << 16)
    smallest = AUTO._replace(costs=AUTO.costs._replace(link=10**6))
    assert len(encoded(x.float(), smallest)) < len(encoded(x, smallest)) + 0.2 * x.numel() < 0.85 * x.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_backends_write_the_same_frame(dtype):
    x = normal(dtype, 20_000)
    frames = []
    for name in (name for name, status in kernels.statuses().items() if status == "ok"):
        buffer = torch.empty(max_lossless_bytes(x.numel(), x.element_size()), dtype=torch.uint8)
        size = encode_floats(kernels.load(name), x, Coding(), buffer)
        frames.append(buffer[:size].tolist())
    assert all(frame == frames[0] for frame in frames)


# ---------------------------------------------------------------- damage


def refused(frame: torch.Tensor, like: torch.Tensor) -> None:
    out = torch.full_like(like, 3.0)
    with pytest.raises(DamagedFrame):
        decode_floats(BACKEND, frame, out)
    assert (out == 3.0).all()  # nothing was written


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frame_cut_anywhere_or_too_long_is_refused(dtype):
    x = normal(dtype, 9)
    frame = encoded(x)
    for size in range(len(frame)):
        refused(frame[:size], x)
    refused(torch.cat([frame, frame[:1]]), x)
    refused(frame, torch.cat([x, x[:1]]))
    refused(frame, x[:8])
    for other in DTYPES:
        if torch.finfo(other).bits != torch.finfo(dtype).bits:
            refused(frame, x.to(other))


def test_a_frame_of_codes_is_not_one_of_floats():
    codes = torch.zeros(5, dtype=torch.int32)
    frame = torch.empty(max_frame_bytes(5), dtype=torch.uint8)
    refused(frame[: BACKEND.encode_codes(codes, Coding(), frame)], torch.zeros(5))
    with pytest.raises(DamagedFrame):
        BACKEND.decode_codes(encoded(torch.zeros(5)), codes)


def rebuilt(x: torch.Tensor, planes: list[list[int]], base: int = 0, change=lambda inner: inner) -> torch.Tensor:
    """A SPLIT frame of any codes."""
    data = base.to_bytes(4, "little")
    for plane in planes:
        buffer = torch.empty(max_frame_bytes(len(plane)), dtype=torch.uint8)
        codes = torch.tensor(plane, dtype=torch.int32)
        data += change(buffer[: BACKEND.encode_codes(codes, Coding(), buffer)].clone()).numpy().tobytes()
    head = HEADER.pack(MAGIC, VERSION, Coder.SPLIT, 0, 8 * x.element_size(), x.numel(), len(data), 0, 0)
    return torch.frombuffer(bytearray(head + data), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_planes_can_not_be_is_refused(dtype):
    x = torch.zeros(2, dtype=dtype)
    planes = [[0, 0]] * PLANES[x.element_size()]
    top_bits = 16 if dtype == torch.float64 else 8
    assert torch.equal(decoded(rebuilt(x, planes), x), x)
    for plane in range(len(planes)):
        width = top_bits if plane == 0 else 8
        for code, fits in ((-(1 << width - 1), True), ((1 << width - 1) - 1, True), (1 << width - 1, False)):
            changed = [*planes[:plane], [0, code], *planes[plane + 1 :]]
            if fits:
                decoded(rebuilt(x, changed), x)
            else:
                refused(rebuilt(x, changed), x)
                refused(rebuilt(x, [*planes[:plane], [-code - 1, 0], *planes[plane + 1 :]]), x)
    decoded(rebuilt(x, planes, base=(1 << top_bits) - 1), x)
    refused(rebuilt(x, planes, base=1 << top_bits), x)
    refused(rebuilt(x, planes[1:]), x)
    refused(rebuilt(x, [*planes, planes[0]]), x)
    refused(rebuilt(x, [[0], *planes[1:]]), x)  # another count
    refused(rebuilt(x, planes, change=lambda inner: BACKEND.seal(inner) or inner), x)  # a checksum of its own


def test_a_plane_that_claims_more_than_there_is_is_refused():
    x = torch.zeros(2)

    def claim(size: int):
        def change(inner: torch.Tensor) -> torch.Tensor:
            inner[12:16] = torch.tensor(list(size.to_bytes(4, "little")), dtype=torch.uint8)
            return inner

        return change

    for size in (0, 1, 100, 2**31, 2**32 - 1):
        refused(rebuilt(x, [[1, 2]] * 4, change=claim(size)), x)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(DTYPES), st.integers(1, 40))
def test_overwritten_bytes_are_refused_or_give_some_floats(data, dtype, count):
    x = normal(dtype, count)
    frame = encoded(x, Coding(data.draw(st.sampled_from([Coder.AUTO, Coder.HUFFMAN, Coder.RANS]))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded(frame, x)
    except DamagedFrame:
        pass


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_finds_every_flipped_bit(dtype):
    x = normal(dtype, 5)
    frame = encoded(x)
    BACKEND.seal(frame)
    assert torch.equal(decoded(frame, x), x)
    for position in range(len(frame)):
        for bit in range(8):
            frame[position] ^= 1 << bit
            refused(frame, x)
            frame[position] ^= 1 << bit
