"""Bits that flip in a frame on its way: found with checksums, and harmless to everything but the result without.

What rank 1 hands to its transport is not what it coded. Rank 0 gets the damaged frames.
"""

import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from on_rank import rank, values
from scenarios import ranks

from ncz_plugins import Communicator, NczError
from ncz_plugins.core.transport.mesh_stream import MeshStream
from ncz_plugins.kernels.format import HEADER_BYTES

ELEMENTS = 70_000  # so many that two ranks send two frames each
OTHERS = 12  # damages of each coder beside one in each byte of the header
DAMAGES = HEADER_BYTES + OTHERS
CODERS = ["raw", "fixed", "huffman", "rans", "lossless"]
EACH_CODER = pytest.mark.parametrize(
    ("coder", "schedule"), [*((coder, "direct") for coder in CODERS), ("fixed", "halving"), ("lossless", "halving")]
)
send = MeshStream.send
chance = random.Random(7)
left: list = []  # how the next frames of this rank are damaged, None: not at all


def damaging_send(stream: MeshStream, frame: torch.Tensor) -> None:
    how = left.pop(0) if left else None
    send(stream, frame if how is None else how(frame.clone()))


def flip(frame: torch.Tensor, at: int) -> torch.Tensor:
    frame[at] ^= 1 << chance.randrange(8)
    return frame


def flip_anywhere(frame: torch.Tensor) -> torch.Tensor:
    return flip(frame, chance.randrange(HEADER_BYTES, frame.numel()))


def flip_several(frame: torch.Tensor) -> torch.Tensor:
    for _ in range(chance.randrange(2, 64)):
        flip_anywhere(frame)
    return frame


def damages() -> list:
    in_header = [lambda frame, at=at: flip(frame, at) for at in range(HEADER_BYTES)]
    return in_header + [chance.choice([flip_anywhere, flip_several]) for _ in range(OTHERS)]


def outcome(communicator: Communicator, exact: torch.Tensor) -> str:
    tensor = values(rank, ELEMENTS)
    try:
        communicator.all_reduce(tensor)
    except NczError as error:
        return type(error).__name__
    return "as without damage" if torch.equal(tensor, exact) else "another result"


def broken_anywhere(found: str, group) -> bool:
    errors = torch.tensor([float("Error" in found)])
    dist.all_reduce(errors, group=group)
    return errors.item() > 0


def outcomes_of_damages(coder: str, schedule: str, checksum: bool, group) -> Counter:
    """What comes of all damages on this rank, and how often."""
    entropy = {"checksum": checksum} if coder == "lossless" else {"coder": coder, "checksum": checksum}
    quantizer = {"kind": "lossless" if coder == "lossless" else "error_bound"}  # the same result in every call
    transport = {"min_bytes": 0, "timeout_seconds": 60, "schedule": schedule}
    config = {"entropy": entropy, "quantizer": quantizer, "transport": transport}
    communicator = Communicator(config, group)
    exact = values(rank, ELEMENTS)
    communicator.all_reduce(exact)
    counts = Counter()
    MeshStream.send = damaging_send
    for how in damages():
        # The first frame holds what is to be summed, the second a finished sum.
        left[:] = chance.choice([[how], [None, how]]) if rank == 1 else []
        found = outcome(communicator, exact)
        counts[found] += 1
        if broken_anywhere(found, group):
            communicator.close()
            communicator = Communicator(config, group)
    MeshStream.send = send
    dist.barrier(group)  # the last one may be new, and must not be closed before all ranks have opened it
    communicator.close()
    return counts


@ranks(2)
@EACH_CODER
def test_checksums_find_every_damage(group, coder, schedule):
    counts = outcomes_of_damages(coder, schedule, True, group)
    if rank == 0:
        assert counts == {"FrameError": DAMAGES}
    else:
        assert set(counts) <= {"PeerError", "as without damage"} and sum(counts.values()) == DAMAGES


@ranks(2)
@EACH_CODER
def test_without_checksums_it_is_a_typed_error_or_a_wrong_number(group, coder, schedule):
    counts = outcomes_of_damages(coder, schedule, False, group)
    assert set(counts) <= {"FrameError", "PeerError", "as without damage", "another result"}
    assert sum(counts.values()) == DAMAGES
    if rank == 0:
        assert counts["FrameError"]
        if coder in ("raw", "lossless"):  # which have few ways to be invalid
            assert counts["another result"]
