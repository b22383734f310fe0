"""What every worker needs."""

import hashlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ncz_plugins import NczError


def start(device: torch.device | None = None) -> tuple[int, int]:
    """Join the others; returns rank and world size. With `device` a GPU, all ranks share the first one."""
    torch.set_num_threads(1)
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def finish(result: object) -> None:
    """Leave the result for the test, and leave together with the others."""
    leave(result)
    # A barrier and no other collective: gloo sometimes aborts if a peer's connection goes while it ends.
    dist.barrier(dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo"))
    dist.destroy_process_group()


def leave(result: object) -> None:
    """Leave the result for the test; for a rank whose peers are gone."""
    Path(os.environ["NCZ_TEST_RESULT"]).write_text(json.dumps(result))


def attempt(call) -> dict | None:
    """How `call` fails; None if it does not."""
    started = time.monotonic()
    try:
        call()
    except NczError as error:
        return {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - started}
    return None


def values(rank: int, numel: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """What `rank` holds; every rank can compute it, so that the exact answer is known everywhere."""
    generator = torch.Generator().manual_seed(97 * rank + seed)
    return (torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu") * (1 + rank)).to(dtype)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
