"""Frames are damaged on their way: what rank 1 hands to its transport is not what it coded.

Leaves {configuration: {outcome: how often}} for rank 0, which gets the damaged frames, and for rank 1.
"""

import random
from collections import Counter

import torch
import torch.distributed as dist
from common import finish, start, values

from ncz_plugins import Communicator, NczError
from ncz_plugins.core.transport.mesh_stream import MeshStream
from ncz_plugins.kernels.format import HEADER_BYTES

ELEMENTS = 70_000  # so many that two ranks send two frames each
OTHERS = 12  # damages in each configuration beside one in each byte of the header
rank, world_size = start()
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


def broken_anywhere(found: str) -> bool:
    errors = torch.tensor([float("Error" in found)])
    dist.all_reduce(errors)
    return errors.item() > 0


results = {}
for coder in ("raw", "fixed", "huffman", "rans", "lossless"):
    for checksum in (True, False):
        entropy = {"checksum": checksum} if coder == "lossless" else {"coder": coder, "checksum": checksum}
        quantizer = {"kind": "lossless" if coder == "lossless" else "error_bound"}  # the same result in every call
        settings = {"entropy": entropy, "quantizer": quantizer}
        settings["transport"] = {"min_bytes": 0, "timeout_seconds": 60}
        communicator = Communicator(settings)
        exact = values(rank, ELEMENTS)
        communicator.all_reduce(exact)
        counts = results[f"{coder}, checksums {'on' if checksum else 'off'}"] = Counter()
        MeshStream.send = damaging_send
        for how in damages():
            # The first frame holds what is to be summed, the second a finished sum.
            left[:] = chance.choice([[how], [None, how]]) if rank == 1 else []
            found = outcome(communicator, exact)
            counts[found] += 1
            if broken_anywhere(found):
                communicator.close()
                communicator = Communicator(settings)
        MeshStream.send = send
        dist.barrier()  # the last one may be new, and must not be closed before all ranks have opened it
        communicator.close()
finish(results)
