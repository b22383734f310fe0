"""Sums of values and of frames in one pass: what several passes make of them, to the bit, and the same damage."""

from __future__ import annotations

import pytest
import torch
from samples import assert_same, codes_of_width, floats, steps_of

from ncz_plugins.kernels.backend import HostBackend, Sum
from ncz_plugins.kernels.format import (
    CHUNK,
    DTYPES,
    RANS_PAGE,
    Coder,
    Coding,
    DamagedFrame,
    Noise,
    Predictor,
    max_frame_bytes,
)

CODINGS = [
    Coding(Coder.FIXED, Predictor.NONE),
    Coding(Coder.HUFFMAN, Predictor.NONE),
    Coding(Coder.RANS, Predictor.NONE),
    Coding(Coder.RAW, Predictor.DELTA),
    Coding(Coder.FIXED, Predictor.DELTA),
]
COUNTS = [0, 1, 75, CHUNK, RANS_PAGE + CHUNK + 77]
NOISES = [None, Noise(seed=3, call=5, shift=1 << 31, first=2**32 - 7)]  # blocks are counted modulo 2**32


def frames_of(backend, count: int, number: int) -> list[torch.Tensor]:
    """So many frames, of several coders."""
    frames = []
    for at in range(number):
        frame = torch.empty(max_frame_bytes(count), dtype=torch.uint8)
        codes = codes_of_width(count, 5, seed=at)
        frames.append(frame[: backend.encode_codes(codes, CODINGS[at % len(CODINGS)], frame)].clone())
    return frames


def in_passes(backend, wanted: Sum, noise: Noise | None) -> torch.Tensor:
    """The codes of a sum, as backends add them up that have no kernel for it."""
    return HostBackend._added_up(backend, wanted, noise).clone()


@pytest.mark.parametrize("noise", NOISES, ids=["to nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_frames_of_sums(backend, dtype, noise):
    for count in COUNTS:
        x = floats(count, dtype)
        for number in (2, 4, 5, 9):
            out, expected = torch.empty(2, max_frame_bytes(count), dtype=torch.uint8)
            wanted = Sum(x, steps_of(x, 6)[0], out, frames_of(backend, count, number), first=30)
            coding = CODINGS[number % len(CODINGS)]
            [size] = backend.encode_sums([wanted], coding, noise)
            assert size == backend.encode_codes(in_passes(backend, wanted, noise), coding, expected)
            assert_same(out[:size], expected[:size])


@pytest.mark.parametrize("noise", NOISES, ids=["to nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_in_place_of_the_values(backend, dtype, noise):
    for count in COUNTS:
        for at, frames in enumerate([[each] for each in frames_of(backend, count, len(CODINGS))] + [[]]):
            x = floats(count, dtype, seed=at)
            inverse_steps, scales = steps_of(x, 6)
            expected = torch.empty_like(x)
            wanted = Sum(x, inverse_steps, x, frames, first=30)
            backend.dequantize(in_passes(backend, wanted, noise), scales, expected)
            backend.decode_sum(wanted, scales, noise)
            assert_same(x, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_may_have_fewer_bits_than_the_values(backend, dtype):
    """As where error feedback adds what it has kept, in float32, to gradients of 16 bits."""
    count = CHUNK + 77
    x = floats(count, torch.float32)
    inverse_steps, scales = steps_of(x, 6)
    for number in (1, 5):
        memory = torch.full((2 * count,), 7.0, dtype=dtype)
        wanted = Sum(x, inverse_steps, memory[:count], frames_of(backend, count, number))
        expected = torch.empty(count, dtype=dtype)
        backend.dequantize(in_passes(backend, wanted, None), scales, expected)
        backend.decode_sum(wanted, scales)
        assert_same(memory, torch.cat([expected, torch.full((count,), 7.0, dtype=dtype)]))


@pytest.mark.parametrize("at,byte", [(0, 5), (3, 9), (4, 5), (5, 9), (1, -1), (6, -1)])
def test_damage_is_that_of_its_frame(backend, at, byte):
    """In the header of any of them; and in the payload of those with HUFFMAN, where decoding finds it."""
    count = CHUNK + 77
    frames = frames_of(backend, count, 7)
    frames[at][byte] ^= 0xFF
    x = floats(count, torch.float32)
    inverse_steps, scales = steps_of(x, 6)
    out = torch.empty(max_frame_bytes(count), dtype=torch.uint8)
    with pytest.raises(DamagedFrame) as alone:
        backend.decode_codes(frames[at], torch.zeros(count, dtype=torch.int32))
    with pytest.raises(DamagedFrame) as several:
        backend.encode_sums([Sum(x, inverse_steps, out, frames)], CODINGS[0])
    with pytest.raises(DamagedFrame) as one:
        backend.decode_sum(Sum(x, inverse_steps, x, frames[at : at + 1]), scales)
    assert str(several.value) == str(one.value) == str(alone.value)


@pytest.mark.parametrize("number", [1, 6])
def test_frames_without_a_checksum_are_refused_where_one_is_wanted(backend, number):
    x = floats(100, torch.float32)
    inverse_steps, scales = steps_of(x, 6)
    frames = frames_of(backend, 100, number)
    for frame in frames[:-1]:
        backend.seal(frame)
    wanted = Sum(x, inverse_steps, torch.empty(max_frame_bytes(100), dtype=torch.uint8), frames)
    with pytest.raises(DamagedFrame, match="no checksum"):
        backend.encode_sums([wanted], CODINGS[0], sealed=True)
    with pytest.raises(DamagedFrame, match="no checksum"):
        backend.decode_sum(wanted._replace(out=torch.empty(100)), scales, sealed=True)
    backend.seal(frames[-1])
    backend.encode_sums([wanted], CODINGS[0], sealed=True)
