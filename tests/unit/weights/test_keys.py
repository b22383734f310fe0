"""Keyed checksums: a patch is read with the publisher's key alone, all of it is covered, and errors name the remedy."""

import hmac

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncz_plugins import (
    FrameError,
    PatchKeyError,
    WeightPublisher,
    WeightSubscriber,
    apply_patch,
    make_patch,
    stage_patch,
)
from ncz_plugins.weights.head import HEAD

KEY, OTHER = bytes(range(32)), bytes(32)
OLD = {"w": torch.randn(500, generator=torch.Generator().manual_seed(0)).bfloat16(), "n": torch.arange(3)}
NEW = {"w": OLD["w"] + 0.01, "n": OLD["n"] + 1}
PATCH = make_patch(NEW, OLD, key=KEY)


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_patches_with_a_key_are_read_with_it_on_every_way():
    assert same(apply_patch(PATCH, OLD, key=KEY), NEW)
    weights = {name: x.clone() for name, x in OLD.items()}
    stage_patch(PATCH, weights, key=KEY).apply()
    assert same(weights, NEW)
    publisher, worker = WeightPublisher(key=KEY), WeightSubscriber(key=KEY)
    for state in (OLD, NEW):
        publisher.publish(state)
        assert same(worker.follow(publisher.patch), state)


def test_it_is_the_patch_and_32_bytes():
    plain = make_patch(NEW, OLD)
    assert PATCH[HEAD.size : -32] == plain[HEAD.size :] and PATCH[:4] == plain[:4] and PATCH[8:16] == plain[8:16]
    assert (PATCH[4], plain[4]) == (4, 3)
    assert PATCH[-32:] == hmac.digest(KEY, PATCH[:-32], "sha256")


@pytest.mark.parametrize(
    ("patch", "key", "says"),
    [
        (PATCH, None, "the patch has a keyed checksum, and no key was given: pass the publisher's key"),
        (make_patch(NEW, OLD), KEY, "a key was given, and the patch has no keyed checksum: publish with the same key"),
        (PATCH, OTHER, "is not that of this key: .* get it again, or pass the publisher's key"),
        (PATCH, b"short", "key must be 16 bytes or more, got 5 bytes"),
        (PATCH, "text", "key must be 16 bytes or more, got str"),
    ],
    ids=["missing", "unexpected", "wrong", "short", "text"],
)
def test_a_key_that_does_not_fit_is_told(patch, key, says):
    for read in (
        lambda: apply_patch(patch, OLD, key=key),
        lambda: stage_patch(patch, OLD, key=key),
        lambda: WeightSubscriber(OLD, key=key).apply(patch),
    ):
        with pytest.raises(PatchKeyError, match=says):
            read()


@pytest.mark.parametrize("key", [b"short", "text"])
def test_a_key_that_is_none_is_told_at_once(key):
    for make in (lambda: make_patch(NEW, key=key), lambda: WeightPublisher(key=key)):
        with pytest.raises(PatchKeyError, match="16 bytes or more"):
            make()


def test_patches_of_several_ranks_all_need_the_key():
    patches = [make_patch(NEW, key=KEY), make_patch(NEW)]
    with pytest.raises(PatchKeyError):
        apply_patch(patches, key=KEY)


def test_no_byte_can_change_and_none_can_be_missing():
    for at in range(len(PATCH)):
        damaged = bytearray(PATCH)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(FrameError):
            apply_patch(bytes(damaged), OLD, key=KEY)
    for length in range(len(PATCH)):
        with pytest.raises(FrameError):
            apply_patch(PATCH[:length], OLD, key=KEY)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_else_is_in_a_patch_nothing_of_it_is_read(data):
    """A patch that others made, with its own right checksums: without the key it fails before its index is unpacked."""
    other = bytearray(make_patch({"x": torch.ones(data.draw(st.integers(0, 99)))}, key=OTHER))
    for at in data.draw(st.lists(st.integers(HEAD.size, len(other) - 1), max_size=5)):
        other[at] = data.draw(st.integers(0, 255))
    with pytest.raises(PatchKeyError, match="not that of this key"):
        apply_patch(bytes(other), key=KEY)
    with pytest.raises(PatchKeyError, match="no keyed checksum"):
        apply_patch(bytes(other[:4]) + b"\3" + bytes(other[5:-32]), key=KEY)
