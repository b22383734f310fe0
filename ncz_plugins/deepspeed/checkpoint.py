"""State of compression in DeepSpeed's checkpoints: one file for each rank, in the folder of the checkpoint's tag."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed import comm

from ..core.errors import MismatchError, NczError
from ..core.messages import say
from ..core.training.state import Training
from ..core.transport.comparison import RankComparison
from ..core.whole_files import replacing

_ENGINE_STEP = "engine_step"  # key in a file, beside the keys of Training.state_dict
_NONE, _DAMAGED = -1, -2  # instead of a step: no file, and an unreadable file
_REMEDY = "take another checkpoint, or delete the files ncz_plugins_rank_* in it to begin anew"


def file_of(folder: str | os.PathLike, rank: int) -> Path:
    """Path of a rank's file in a checkpoint."""
    return Path(folder) / f"ncz_plugins_rank_{rank:05d}.pt"


def save(training: Training, folder: str | os.PathLike, engine_step: int) -> None:
    """Write this rank's state atomically: a reader finds the whole new file or the whole old one.

    The engine's first rank removes files of higher ranks, which a run with more ranks has left under the same tag.

    Args:
        engine_step: DeepSpeed's count of steps. `load` recognizes files of an earlier run by it.
    """
    path = file_of(folder, dist.get_rank())
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        torch.save(training.state_dict() | {_ENGINE_STEP: engine_step}, file)
    if training.rank == 0:
        last = file_of(folder, dist.get_world_size() - 1)
        for other in path.parent.glob("ncz_plugins_rank_*.pt"):
            if other.name > last.name:
                other.unlink(missing_ok=True)


def load(
    training: Training,
    folder: str | os.PathLike,
    device: torch.device,
    engine_step: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load the state that `save` wrote into `training`.

    All ranks of `group` must call this, and compare what they found.

    If more ranks load than saved, the additional ranks load rank 0's file, for the state that all ranks share. If the
    checkpoint has no such files, `training` starts from the beginning, and the engine's first rank says so.

    Args:
        device: where torch.distributed needs tensors to be.
        engine_step: DeepSpeed's count of steps in the checkpoint. Files of another step are not part of it.
        group: the ranks that reduce gradients together; None: all ranks.

    Raises MismatchError on all ranks if they found different states, and NczError on a rank whose file is unreadable.
    """
    state, error = None, None
    try:
        state = _read(folder, engine_step)
        found = (_NONE, 0) if state is None else (state["step"], state["world_size"])
    except Exception as problem:  # torch.load documents no exceptions for damaged files
        found, error = (_DAMAGED, 0), problem
    try:
        _compare(*found, folder, device, group)
    except MismatchError:
        if error is None:
            raise
    if error is not None:
        raise NczError(
            f"{folder}: what rank {dist.get_rank()} saved there about compression can't be read ({error!r}); {_REMEDY}"
        ) from error
    training.load_state_dict(Training(training.config).state_dict() if state is None else state)
    if state is None and training.rank == 0:
        why = "was saved without compression"
        if (Path(folder) / "zero").is_dir():  # only universal checkpoints have this folder
            why = (
                "was made by DeepSpeed's ds_to_universal, which leaves out the state of compression (to keep it, copy "
                "the files ncz_plugins_rank_* of the checkpoint that was converted into it)"
            )
        say(f"ncz_plugins: {folder} {why}: error feedback, warm-up and schedule begin anew")


def _read(folder: str | os.PathLike, engine_step: int) -> dict | None:
    """State of this rank, or rank 0's state if fewer ranks saved. None if there is none."""
    if (own := _state_in(file_of(folder, dist.get_rank()), engine_step)) is not None:
        return own
    of_first = _state_in(file_of(folder, 0), engine_step)
    lost = of_first is not None and of_first["world_size"] == dist.get_world_size()
    return None if lost else of_first


def _state_in(path: Path, engine_step: int) -> dict | None:
    """State in a file; None if there is no file, or an earlier run has left it under the same tag."""
    if not path.exists():
        return None
    state = torch.load(path, map_location="cpu", weights_only=True)
    return state if state.pop(_ENGINE_STEP, engine_step) == engine_step else None


def _compare(step: int, saved_by: int, folder: str | os.PathLike, device: torch.device, group) -> None:
    """Raise MismatchError on all ranks of `group` unless they found the same step, saved by as many ranks."""
    numbers = {"step": step, "ranks that saved it": saved_by}
    comparison = RankComparison(numbers, dist.get_rank(group), dist.get_world_size(group))
    comparison.tensor = comparison.tensor.to(device)
    comm.all_reduce(comparison.tensor, op=comm.ReduceOp.MAX, group=group)
    for what, (lowest, _, highest, _) in comparison.differing().items():
        ends = [{_NONE: "no file", _DAMAGED: "a damaged file"}.get(end, f"{what}: {end}") for end in (lowest, highest)]
        raise MismatchError(f"{folder}: for compression some ranks find {ends[0]}, others {ends[1]}; {_REMEDY}")
