"""SPARSE frames, of changes that are rare: every bit comes back, in few bytes, and damage is found."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import with_flipped_bits

from ncz_plugins import kernels
from ncz_plugins.kernels.format import (
    CHUNK,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    OCTET,
    VERSION,
    Coder,
    Coding,
    DamagedFrame,
    Predictor,
    SelectorCosts,
    max_frame_bytes,
)
from ncz_plugins.kernels.updates import decode_update, encode_update, max_update_bytes

COUNT = 3 * CHUNK + 5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
AUTO = Coding(costs=SelectorCosts(link=80_000))  # 100 Mbit/s, as for patches
BACKEND, REFERENCE = kernels.cpu_backend(), kernels.load("reference")
COMPILED = [kernels.load(name) for name in ("avx2", "portable") if kernels.statuses()[name] == "ok"]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.itemsize])


def versions(dtype: torch.dtype, places, steps=1, count: int = COUNT) -> tuple[torch.Tensor, torch.Tensor]:
    """An older version and a newer one, which differ by some floats at these places."""
    base = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = base.clone()
    bits(x)[torch.as_tensor(list(places), dtype=torch.int64)] += torch.as_tensor(steps).to(bits(x).dtype)
    return base, x


def encoded(backend, x: torch.Tensor, base: torch.Tensor, coding: Coding = AUTO) -> torch.Tensor:
    frame = torch.empty(max_update_bytes(x.numel(), x.itemsize), dtype=torch.uint8)
    return frame[: encode_update(backend, x, base, coding, frame)].clone()


def with_parts(*parts: tuple[list[int], Coder], count: int = COUNT) -> torch.Tensor:
    """A SPARSE frame of any codes."""
    inner = b""
    for codes, coder in parts:
        frame = torch.empty(max_frame_bytes(len(codes)), dtype=torch.uint8)
        size = BACKEND.encode_codes(torch.tensor(codes, dtype=torch.int32), Coding(coder, Predictor.NONE), frame)
        inner += frame[:size].numpy().tobytes()
    header = HEADER.pack(MAGIC, VERSION, Coder.SPARSE, Predictor.NONE, 0, count, len(inner), 0, 0)
    return torch.frombuffer(bytearray(header + inner), dtype=torch.uint8)


def refused(frame: torch.Tensor, base: torch.Tensor, why: str | None = None) -> None:
    out = base.clone()
    with pytest.raises(DamagedFrame, match=why):
        decode_update(BACKEND, frame, out, out)
    assert torch.equal(bits(out), bits(base))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "places", [[0], [COUNT - 1], [0, 1, COUNT - 2, COUNT - 1], range(7, COUNT, 9), range(300)], ids=str
)
def test_every_bit_comes_back(backend, dtype, places):
    steps = np.random.default_rng(0).integers(1, 30_000, len(places))
    for some in (1, steps):
        base, x = versions(dtype, places, some)
        frame = encoded(backend, x, base)
        assert frame[5] == Coder.SPARSE
        for out in (base.clone(), torch.empty_like(base)):
            before = base.clone()
            decode_update(backend, frame, out if torch.equal(bits(out), bits(base)) else before, out)
            assert torch.equal(bits(out), bits(x)) and torch.equal(bits(before), bits(base))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_changes_that_are_found_are_those_of_the_reference(backend, dtype):
    for case in product([1, 7, CHUNK, COUNT, 2 * CHUNK + 8], [1, 2, 7, 1000]):
        count, every = case
        base, x = versions(dtype, range(0, count, every), np.arange(1, 1 + len(range(0, count, every))), count)
        expected, found = torch.full((2, 2, count + OCTET + 1), 7, dtype=torch.int32)
        changes = REFERENCE.rare_differences(x, base, count, *expected)
        assert changes == len(range(0, count, every)) > 0, case
        # With room for these alone, and not for one of them.
        assert backend.rare_differences(x, base, changes, found[0, :-1], found[1]) == changes, case
        assert torch.equal(found[:, :changes], expected[:, :changes]), case
        assert found[0, -1] == 7 and (found[1, changes:] == 7).all(), case
        found[1] = 7
        assert backend.rare_differences(x, base, changes - 1, found[0, :-1], found[1]) >= changes, case
        assert found[0, -1] == 7 and (found[1, changes - 1 :] == 7).all(), case


def test_backends_read_the_frames_of_each_other(any_backend):
    base, x = versions(torch.bfloat16, range(5, COUNT, 37), 3)
    frame = encoded(kernels.load("reference"), x, base, coding := Coding(costs=any_backend.costs))
    assert torch.equal(frame, encoded(any_backend, x, base, coding))
    out = base.clone()
    decode_update(any_backend, frame, out, out)
    assert torch.equal(bits(out), bits(x))


def test_rare_changes_take_fewer_bytes_than_by_any_other_coder(backend):
    base, x = versions(torch.bfloat16, torch.randperm(1 << 20)[:1000], 1, 1 << 20)
    sizes = {coder: encoded(backend, x, base, Coding(coder)).numel() for coder in (Coder.HUFFMAN, Coder.RANS)}
    assert 1.4 * encoded(backend, x, base).numel() < min(sizes.values())


@pytest.mark.parametrize("case", ["none", "many", "short"])
def test_where_it_would_not_pay_all_codes_are_coded(backend, case):
    places = {"none": [], "many": range(0, COUNT, 3), "short": [3]}[case]
    base, x = versions(torch.bfloat16, list(places), 1, CHUNK - 1 if case == "short" else COUNT)
    assert encoded(backend, x, base)[5] != Coder.SPARSE


@pytest.mark.parametrize("every", [3, 5, 25, 40, 1000])
@pytest.mark.parametrize("link, least", [(80, None), (800, None), (4_999, None), (8_000, 32), (80_000, 4)])
def test_the_link_says_whether_fewer_bytes_pay(backend, link, least, every):
    base, x = versions(torch.bfloat16, range(5, COUNT, every))
    coder = encoded(backend, x, base, Coding(costs=backend.costs._replace(link=link)))[5]
    assert (coder == Coder.SPARSE) == (least is not None and every > least)


def test_the_frame_is_as_the_specification_says():
    """Written out by hand: elements 2 and 700 change by 1 and -1 floats."""
    base = torch.ones(COUNT, dtype=torch.bfloat16)
    frame = with_parts(([2, 697], Coder.RAW), ([1, -1], Coder.RAW))
    expected = "4e435a46 01 07 00 00 05300000 36000000 00000000 00000000"
    expected += "4e435a46 01 00 00 10 02000000 04000000 00000000 00000000 0400 7205"
    expected += "4e435a46 01 00 00 08 02000000 02000000 00000000 00000000 02 01"
    assert frame.numpy().tobytes() == bytes.fromhex(expected)
    out = base.clone()
    decode_update(BACKEND, frame, base, out)
    assert torch.nonzero(out != base).view(-1).tolist() == [2, 700]
    assert bits(out)[[2, 700]].tolist() == [0x3F81, 0x3F7F]


def test_damage_is_found_and_changes_nothing():
    base, x = versions(torch.bfloat16, range(5, COUNT, 37), 3)
    frame = encoded(BACKEND, x, base)
    for size in range(frame.numel()):
        refused(frame[:size], base)
    refused(torch.cat([frame, frame[:1]]), base, "payload has")
    one = [5], Coder.RAW
    refused(with_parts(one, one, one), base, "bytes behind its changes")
    refused(with_parts(([], Coder.RAW), ([], Coder.RAW)), base, "no changes")
    refused(with_parts(([5, 9], Coder.RAW), ([1, 0], Coder.RAW)), base, "zeros among its changes")
    refused(with_parts(([-1], Coder.RAW), one), base, "do not lie in its")
    refused(with_parts(([5, -6], Coder.RAW), ([1, 1], Coder.RAW)), base, "do not lie in its")
    refused(with_parts(([COUNT], Coder.RAW), one), base, "do not lie in its")
    refused(with_parts(([2**31 - 1] * 9, Coder.FIXED), ([1] * 9, Coder.RAW)), base, "do not lie in its")
    refused(with_parts(one, ([1, 1], Coder.RAW)), base, "holds 2 codes, expected 1")
    refused(with_parts(([0] * (COUNT + 1), Coder.HUFFMAN), one), base, "changes of")
    refused(with_parts(one, one, count=COUNT - 1), base, "expected")
    sealed = with_parts(one, one)
    sealed[HEADER_BYTES + 16] = 1  # the first inner frame claims to have a checksum
    refused(sealed, base, "only the whole may have a checksum")
    for at, value in ((4, 2), (6, 1), (7, 16), (16, 2), (20, 1)):
        damaged = with_parts(one, one)
        damaged[at] = value
        refused(damaged, base)


def test_changes_of_nothing_are_refused():
    with pytest.raises(DamagedFrame):
        decode_update(BACKEND, with_parts(([5], Coder.RAW), ([1], Coder.RAW)), None, torch.zeros(COUNT))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_random_flips(data):
    base, x = versions(torch.bfloat16, range(5, COUNT, 397), 3)
    damaged = with_flipped_bits(encoded(BACKEND, x, base), data)
    expected = made_of(REFERENCE, damaged, base)
    for backend in COMPILED:
        found = made_of(backend, damaged, base)
        assert (found is None) == (expected is None) and (found is None or torch.equal(bits(found), bits(expected)))


def made_of(backend, frame: torch.Tensor, base: torch.Tensor) -> torch.Tensor | None:
    """The newer version; None if the frame is damaged."""
    out = base.clone()
    try:
        decode_update(backend, frame, out, out)
    except DamagedFrame:
        assert torch.equal(bits(out), bits(base))
        return None
    return out


@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    parts=st.lists(st.tuples(st.integers(-2, 5000), st.integers(-(2**31), 2**31 - 1)), max_size=12),
)
def test_any_gaps_and_changes(dtype, parts):
    base, _ = versions(dtype, [])
    gaps, codes = (torch.tensor([part[k] for part in parts], dtype=torch.int32) for k in range(2))
    expected = base.clone()
    is_right = REFERENCE.add_rare_differences(gaps, codes, base, expected)
    for backend in COMPILED:
        for out in (torch.zeros_like(base), base.clone()):
            before = out.clone()
            assert backend.add_rare_differences(gaps, codes, base, out) == is_right
            assert torch.equal(bits(out), bits(expected if is_right else before))
