"""Changes of elements, and frames of them: every bit comes back, and close floats make small codes."""

from functools import cache
from itertools import product

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
)
from ncz_plugins.kernels.updates import decode_update, encode_update, max_update_bytes

REFERENCE = kernels.load("reference")
AUTO = Coding()
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SHORT = DTYPES[:3]  # those that have differences
OTHERS = (torch.float64, *INTEGERS.values())  # those that change byte by byte
SIZES = (0, 1, 7, 33, CHUNK - 1, CHUNK + 1, 2 * CHUNK + 5)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(INTEGERS[x.element_size()])


def any_floats(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Any bits: NaN with all kinds of payload, both infinities, denormals, and the largest jumps between two."""
    data = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype) if count else torch.empty(0, dtype=dtype)


def moved(base: torch.Tensor, steps: int) -> torch.Tensor:
    """Floats that lie a few floats from `base`, none of which changes its sign."""
    generator = torch.Generator().manual_seed(2)
    return (
        (bits(base) + torch.randint(-steps, steps + 1, base.shape, generator=generator))
        .to(bits(base).dtype)
        .view(base.dtype)
    )


def encoded(backend, x, base, coding=AUTO) -> torch.Tensor:
    buffer = torch.full((max_update_bytes(x.numel(), x.element_size()) + 8,), 0xA5, dtype=torch.uint8)
    size = encode_update(backend, x, base, coding, buffer[:-8])
    assert (buffer[-8:] == 0xA5).all()
    return buffer[:size].clone()


def coder_of(frame: torch.Tensor) -> Coder:
    return Coder(HEADER.unpack(frame[:HEADER_BYTES].numpy())[2])


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("count", SIZES)
def test_differences_are_those_of_the_reference(backend, dtype, count):
    x, base = any_floats(dtype, count, 0), any_floats(dtype, count, 1)
    expected, codes = torch.empty(2, count, dtype=torch.int32)
    REFERENCE.differences(x, base, expected)
    backend.differences(x, base, codes)
    assert torch.equal(codes, expected)
    out = base.clone()
    backend.add_differences(codes, out, out)  # in place
    assert torch.equal(bits(out), bits(x))
    REFERENCE.add_differences(codes, base, out)
    assert torch.equal(bits(out), bits(x))


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_a_difference_counts_the_floats_in_between(any_backend, dtype):
    info = torch.finfo(dtype)
    after = float(torch.tensor(1.0, dtype=dtype) + info.eps)
    x = torch.tensor([1.0, after, 1.0, 0.0, -0.0, info.smallest_normal, -1.0, -after], dtype=dtype)
    base = torch.tensor([1.0, 1.0, after, -0.0, 0.0, 0.0, -after, -1.0], dtype=dtype)
    codes = torch.empty(8, dtype=torch.int32)
    any_backend.differences(x, base, codes)
    normal = int(bits(torch.tensor([info.smallest_normal], dtype=dtype)))
    assert codes.tolist() == [0, 1, -1, 1, -1, normal, 1, -1]


@pytest.mark.parametrize("dtype", SHORT + OTHERS, ids=str)
def test_every_bit_comes_back(backend, dtype):
    for count, coder in product(SIZES, [Coder.RAW, Coder.FIXED, Coder.HUFFMAN, Coder.RANS, Coder.AUTO]):
        base = any_floats(dtype, count, 1)
        for number, x in enumerate((any_floats(dtype, count, 0), base, moved(base, 3))):
            frame = encoded(backend, x, base, Coding(coder, Predictor.AUTO))
            out = base.clone()
            decode_update(backend, frame, out, out)
            assert torch.equal(bits(out), bits(x)), (count, coder, number)


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("every", [1, 300])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_result_may_be_larger_than_a_cache_and_lie_anywhere(backend, dtype, every, offset):
    """Large results at addresses that are multiples of 64 are written past the caches."""
    base, digests = any_floats(dtype, (1 << 19) + 5, 1), np.zeros(2, np.uint32)
    x = torch.where(torch.arange(len(base)) % every == 0, moved(base, 3), base)
    frame, row = (
        encoded(backend, x, base, Coding(costs=backend.costs._replace(link=80_000))),
        torch.empty(len(x) + 64, dtype=dtype),
    )
    first = -row.data_ptr() % 64 // row.itemsize + offset
    row.view(INTEGERS[row.itemsize]).fill_(7)
    decode_update(backend, frame, base, row[first : first + len(x)], digests)
    assert torch.equal(bits(row[first : first + len(x)]), bits(x))
    assert (bits(row[:first]) == 7).all() and (bits(row[first + len(x) :]) == 7).all()
    assert digests.tolist() == [backend.digest(base), backend.digest(x)]


@cache
def with_moves(dtype: torch.dtype, count: int, every: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A version, a newer one that differs in each `every`-th element, and the reference's frame of it."""
    base = any_floats(dtype, count, 1)
    x = torch.where(torch.arange(count) % every == 0, moved(base, 3), base)
    return base, x, encoded(REFERENCE, x, base)


@pytest.mark.parametrize("dtype", SHORT + OTHERS, ids=str)
def test_checksums_come_with_changes(any_backend, dtype):
    """Of the base and of what is made of it, in place too: by SPARSE, another coder, or SPLIT."""
    digests = np.zeros(2, np.uint32)
    for case in product([1, 5, 4096, 9001], [1, 300]):
        base, x, frame = with_moves(dtype, *case)
        expected = [REFERENCE.digest(base), REFERENCE.digest(x)]
        decode_update(any_backend, frame, base, torch.empty_like(base), digests)
        assert digests.tolist() == expected, case
        out = base.clone()
        digests[:] = 0
        decode_update(any_backend, frame, out, out, digests)
        assert digests.tolist() == expected and torch.equal(bits(out), bits(x)), case


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_two_versions(data):
    dtype = data.draw(st.sampled_from(SHORT + OTHERS))
    base = any_floats(dtype, data.draw(st.integers(0, 300)), data.draw(st.integers(0, 99)))
    x = base.clone()
    for at in data.draw(st.lists(st.integers(0, max(0, x.numel() - 1)), max_size=20)):
        if x.numel():
            bits(x)[at] = data.draw(st.integers(-(1 << 8 * dtype.itemsize - 1), (1 << 8 * dtype.itemsize - 1) - 1))
    for name in (name for name, status in kernels.statuses().items() if status == "ok"):
        backend = kernels.load(name)
        frame, out = encoded(backend, x, base), torch.empty_like(x)
        decode_update(backend, frame, base, out)
        assert torch.equal(bits(out), bits(x))


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_small_moves_take_few_bits(backend, dtype):
    base = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert 8 * encoded(backend, moved(base, 1), base).numel() < 2.4 * base.numel()
    assert 8 * encoded(backend, base, base).numel() < 0.3 * base.numel()


@pytest.mark.parametrize("share", [0, 1e-4, 1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("farthest", [1, 3000])
def test_rare_moves_are_those_of_the_reference(backend, share, farthest):
    """By RANS, in pages with and without changes, near ones and far ones."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(70_005, generator=generator).to(torch.bfloat16)
    x = torch.where(torch.rand(70_005, generator=generator) < share, moved(base, farthest), base)
    x[16384 : 2 * 16384] = base[16384 : 2 * 16384]
    frame = encoded(backend, x, base, Coding(Coder.RANS, Predictor.NONE))
    assert torch.equal(frame, encoded(REFERENCE, x, base, Coding(Coder.RANS, Predictor.NONE)))
    out = torch.empty_like(x)
    decode_update(backend, frame, base, out)
    assert torch.equal(bits(out), bits(x))


def test_what_moved_far_is_sent_as_it_is(backend):
    base = torch.zeros(1 << 16, dtype=torch.bfloat16)
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    frame = encoded(backend, x, base)
    assert coder_of(frame) is Coder.SPLIT
    assert 8 * frame.numel() < 12 * x.numel()


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_rare_changes_of_other_dtypes_take_few_bits(backend, dtype):
    base = any_floats(dtype, 1 << 16, 0)
    x = base.clone()
    x.view(torch.uint8)[5 :: 100 * dtype.itemsize] += 3
    smallest = AUTO._replace(costs=AUTO.costs._replace(link=10**6))
    frame, unchanged = encoded(backend, x, base, smallest), encoded(backend, base, base, smallest)
    assert 8 * frame.numel() < 0.2 * base.numel() and 8 * unchanged.numel() < 0.03 * base.numel()


def test_the_frame_of_bytes_is_as_the_specification_says(backend):
    """Written out by hand: the second of 4 planes of bytes, from the top, did not change, nor did the third."""
    base = torch.tensor([0x01000001, 0x020304FF], dtype=torch.int32)
    x = torch.tensor([0x00000001, 0x02030400], dtype=torch.int32)
    frame = encoded(backend, x, base, Coding(Coder.RAW, Predictor.NONE)).numpy().tobytes()
    planes = [bytes([1, 0]), bytes([0, 2])]  # less 1, and one more; zigzag
    inner = [HEADER.pack(MAGIC, VERSION, Coder.RAW, Predictor.NONE, 8, 2, 2, 0, 0) + plane for plane in planes]
    payload = (0b1001).to_bytes(4, "little") + b"".join(inner)
    assert frame == HEADER.pack(MAGIC, VERSION, Coder.SPLIT, Predictor.DELTA, 32, 2, len(payload), 0, 0) + payload


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_changes_of_bytes_that_can_not_be_are_refused(dtype):
    backend = kernels.cpu_backend()
    base = any_floats(dtype, 900, 0)
    x = base.clone()
    x.view(torch.uint8)[:40] += 1
    frame = encoded(backend, x, base)
    assert frame[6] == Predictor.DELTA

    def refused(changed: torch.Tensor, older: torch.Tensor | None) -> None:
        out = base.clone()
        with pytest.raises(DamagedFrame):
            decode_update(backend, changed, older, out)
        assert torch.equal(bits(out), bits(base))

    refused(frame, None)  # no older version
    for size in range(frame.numel()):
        refused(frame[:size], base)
    planes = 7 if dtype.itemsize == 8 else dtype.itemsize
    for mask in (0, (1 << planes) - 1 ^ 1 << planes - 1, 1 << planes, 1 << 31):  # the last plane is always there
        changed = frame.clone()
        changed[HEADER_BYTES : HEADER_BYTES + 4] = torch.tensor(list(mask.to_bytes(4, "little")), dtype=torch.uint8)
        refused(changed, base)
    changed = frame.clone()
    changed[6] = 2
    refused(changed, base)


@pytest.mark.parametrize("kind", ["moved", "far"])
def test_damage_is_found_and_changes_nothing(backend, kind):
    base = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x = moved(base, 2) if kind == "moved" else any_floats(torch.bfloat16, 5000, 3)
    frame = encoded(backend, x, base)
    for damaged in (frame[:-1], frame[:10], frame[:0], torch.cat([frame, frame[:1]])):
        out = base.clone()
        with pytest.raises(DamagedFrame):
            decode_update(backend, damaged, out, out)
        assert torch.equal(bits(out), bits(base))


def test_a_digest_sees_every_byte(any_backend):
    x = any_floats(torch.float32, 50, 0)
    found = {any_backend.digest(x)}
    for at in range(x.numel()):
        other = x.clone()
        bits(other)[at] ^= 1 << at % 32 if at % 32 != 31 else -1 << 31
        found.add(any_backend.digest(other))
    assert len(found) == 1 + x.numel()
    assert REFERENCE.digest(x) == any_backend.digest(x)


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7])
def test_a_digest_of_few_bytes(any_backend, count):
    x = torch.ones(count, dtype=torch.float32)
    assert any_backend.digest(x) == REFERENCE.digest(x)
    if count:
        assert any_backend.digest(x) != any_backend.digest(-x)
