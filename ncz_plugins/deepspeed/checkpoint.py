"""What DeepSpeed's checkpoints hold of compression: one file per rank in the folder of the checkpoint's tag."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed import comm

from ..core.errors import MismatchError, NczError
from ..core.training.state import Training
from ..core.transport.handshake import RankComparison

_NONE, _DAMAGED = -1, -2  # in place of the step of a file that is not there, or can't be read
_REMEDY = "take another checkpoint, or delete the files ncz_plugins_rank_* in it to begin anew"


def file_of(folder: str | os.PathLike, rank: int) -> Path:
    """Where a rank's state lies in a checkpoint."""
    return Path(folder) / f"ncz_plugins_rank_{rank:05d}.pt"


def save(training: Training, folder: str | os.PathLike) -> None:
    """Write this rank's state. Whoever reads its file finds all of it, or what stood there before."""
    path = file_of(folder, dist.get_rank())
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with open(partial, "wb") as file:
        torch.save(training.state_dict(), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load(training: Training, folder: str | os.PathLike, device: torch.device) -> None:
    """Take over what `save` wrote. All ranks must call this; they compare what they find.

    Where a run has more ranks than the one that saved, those beyond read the file of rank 0: what is the same on all
    ranks. After a checkpoint that holds nothing of ours `training` begins anew, and rank 0 says so.

    device: of tensors that ranks may exchange.

    Raises MismatchError on all ranks where they find different things, and NczError where a file can't be read.
    """
    state, error = None, None
    try:
        state = _read(folder)
        found = (_NONE, 0) if state is None else (state["step"], state["world_size"])
    except Exception as problem:  # torch.load does not say what it raises for bytes that are no file of its own
        found, error = (_DAMAGED, 0), problem
    try:
        _compare(*found, folder, device)
    except MismatchError:
        if error is None:
            raise
    if error is not None:
        raise NczError(
            f"{folder}: what rank {dist.get_rank()} saved there about compression can't be read ({error!r}); {_REMEDY}"
        ) from error
    training.load_state_dict(Training(training.config).state_dict() if state is None else state)
    if state is None and dist.get_rank() == 0:
        print(
            f"ncz_plugins: {folder} was saved without compression: error feedback, warm-up and schedule begin anew",
            flush=True,
        )


def _read(folder: str | os.PathLike) -> dict | None:
    """This rank's state, or rank 0's if it was saved by fewer ranks; None if it is not there."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = file_of(folder, rank)
    path = own if own.exists() else file_of(folder, 0)
    if not path.exists():
        return None
    state = torch.load(path, map_location="cpu", weights_only=True)
    lost = path != own and state["world_size"] == world_size
    return None if lost else state


def _compare(step: int, saved_by: int, folder: str | os.PathLike, device: torch.device) -> None:
    comparison = RankComparison({"step": step, "ranks that saved it": saved_by})
    comparison.tensor = comparison.tensor.to(device)
    comm.all_reduce(comparison.tensor, op=comm.ReduceOp.MAX)
    for what, (lowest, highest) in comparison.differing().items():
        ends = [{_NONE: "no file", _DAMAGED: "a damaged file"}.get(end, f"{what}: {end}") for end in (lowest, highest)]
        raise MismatchError(f"{folder}: about compression some ranks find {ends[0]}, others {ends[1]} there; {_REMEDY}")
