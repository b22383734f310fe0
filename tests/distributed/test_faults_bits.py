"""Bits that flip in a frame on its way: found with checksums, and harmless to everything but the result without."""

import pytest
from processes import results, run

CODERS = ["raw", "fixed", "huffman", "rans", "lossless"]
DAMAGES = 24 + 12  # one in each byte of the header, and others


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return results(run("faults_bits", 2, tmp_path_factory.mktemp("bits"), seconds=240))


@pytest.mark.parametrize("coder", CODERS)
def test_checksums_find_every_damage(coder, ranks):
    receiver, sender = (rank[f"{coder}, checksums on"] for rank in ranks)
    assert receiver == {"FrameError": DAMAGES}
    assert set(sender) <= {"PeerError", "as without damage"} and sum(sender.values()) == DAMAGES


@pytest.mark.parametrize("coder", CODERS)
def test_without_checksums_it_is_a_typed_error_or_a_wrong_number(coder, ranks):
    receiver, sender = (rank[f"{coder}, checksums off"] for rank in ranks)
    possible = {"FrameError", "PeerError", "as without damage", "another result"}
    assert set(receiver) <= possible and set(sender) <= possible
    assert sum(receiver.values()) == sum(sender.values()) == DAMAGES
    assert receiver["FrameError"]
    if coder in ("raw", "lossless"):  # which have few ways to be invalid
        assert receiver["another result"]
