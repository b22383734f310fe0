"""What a test file uses in the process of a rank. `scenarios` is the other side: it starts the ranks."""

import hashlib
import io
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from ncz_plugins import NczError

PATIENCE = timedelta(seconds=30)  # how long ranks wait in a test for one that has failed already

BF16_ROUNDING = 2**-9  # of a value that becomes bfloat16, as residuals do in every step

# In pytest's process, which imports test files too, there is one rank and the CPU.
rank = int(os.environ.get("RANK") or os.environ.get("HOROVOD_RANK") or 0)
world_size = int(os.environ.get("WORLD_SIZE") or os.environ.get("HOROVOD_SIZE") or 1)
device = torch.device(os.environ.get("NCZ_TEST_DEVICE", "cpu"))


def places(repeat: bool = False) -> list[torch.device]:
    """Where something is computed that has the bits of the CPU: `device` and the CPU, or once if they are the same.

    With `repeat` it is twice on the CPU too, which must have the same bits then.
    """
    return [device, torch.device("cpu")] if repeat or device.type == "cuda" else [device]


# A rank of Horovod alone communicates over Horovod. It has no process group of torch.distributed.
UNDER_HOROVOD = "HOROVOD_RANK" in os.environ and "RANK" not in os.environ
if UNDER_HOROVOD:
    import horovod.torch as hvd

# What a call that fails raises. Horovod's error is what its elastic training recovers from.
ERRORS = (NczError, hvd.HorovodInternalError) if UNDER_HOROVOD else NczError
_started = False


def start(backend: str | None = None) -> None:
    """Join the other ranks, by default over gloo, and NCCL too if `device` is a GPU. All ranks share the first GPU.

    A rank of Horovod joins by `hvd.init`. Process sets can be added if HOROVOD_DYNAMIC_PROCESS_SETS is 1.
    """
    global _started
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(0)
    if UNDER_HOROVOD:
        os.environ["NCCL_HOSTID"] = f"host-{rank}"  # NCCL refuses ranks of one host that share a GPU
        hvd.init()
        return
    dist.init_process_group(backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"))
    _started = True


def finish() -> None:
    """Leave together with the others, if this rank has called `start`."""
    if not _started:
        return
    # A barrier and no other collective: gloo sometimes aborts if a peer's connection goes while it ends.
    dist.barrier(dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo"))
    dist.destroy_process_group()


def folder() -> Path:
    """A folder for files, which all ranks of one run share."""
    return Path(os.environ["NCZ_TEST_RESULT"]).parent


def leave(result: object) -> None:
    """Write this rank's result now. A scenario needs it if it ends without returning."""
    file = Path(os.environ["NCZ_TEST_RESULT"])
    written = file.with_suffix(".new")
    written.write_text(json.dumps(result))
    written.rename(file)  # complete, whenever this process is killed


def leave_alone(result: object) -> None:
    """Write this rank's result and end the process now. After a peer's death gloo may abort on the usual way out."""
    leave(result)
    os._exit(0)


def others_have_left_results() -> bool:
    """Whether each other rank has called `leave`, or has returned from its scenario."""
    others = set(range(world_size)) - {rank}
    return all((folder() / f"rank{other}.json").exists() for other in others)


def others_have_ended() -> bool:
    """Whether the process of each other rank has ended."""
    try:
        exits = json.loads((folder() / "exits.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # none has ended, or one is just written
        return False
    return all(when is not None for other, (_, when) in enumerate(exits) if other != rank)


def be_silent(until: Callable[[], bool], seconds: float) -> None:
    """Do nothing that a peer could notice until something has happened, or for `seconds`."""
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        time.sleep(0.02)


# ------------------------------------------------------------------ tests that share their processes


def run_tests(module: ModuleType, tests: dict[str, Sequence]) -> None:
    """Run tests of `module` on this rank, one after another.

    Leaves a dict for `scenarios`: for each test an empty string, or the traceback of its failure on this rank. Every
    test has a process group of its own, so that collectives which a failed test has not finished disturb no other.
    Under Horovod the group is None.

    Args:
        tests: for each name of a test its function's name and arguments, in the order in which they run.
    """
    outcomes = {}
    for name, (function, arguments) in tests.items():
        group = None if UNDER_HOROVOD else dist.new_group(timeout=PATIENCE)
        try:
            getattr(module, function)(group, **arguments)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
        leave(outcomes)  # at once: a later test may end the process
        # The next test starts when all ranks are done with this one.
        hvd.barrier() if UNDER_HOROVOD else dist.all_reduce(torch.zeros(1))


# ------------------------------------------------------------------ values and assertions


def values(rank: int, numel: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """What `rank` holds. Every rank can compute it, so that the exact answer is known everywhere."""
    generator = torch.Generator().manual_seed(97 * rank + seed)
    return (torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu") * (1 + rank)).to(dtype)


def digest(tensor: torch.Tensor) -> str:
    """A hash of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy()).hexdigest()


def saved(training) -> dict:
    """The state of a `Training` after a way through a file, read as what may come from anybody."""
    file = io.BytesIO()
    torch.save(training.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def of_all_ranks(value: object, group: dist.ProcessGroup | None = None) -> list:
    """The `value` of each rank. Under Horovod `group` must be None."""
    if UNDER_HOROVOD:
        # Horovod would take the name of a value's type, and ranks with other types would wait for each other.
        return hvd.allgather_object(value, name="value")
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group)
    return everyone


def same_on_all_ranks(value: object, group: dist.ProcessGroup | None = None) -> None:
    """Fail on every rank unless all ranks have the same `value`."""
    everyone = of_all_ranks(value, group)
    assert all(each == everyone[0] for each in everyone), everyone


def raises(error: type, call: Callable, *words: str) -> None:
    """Fail unless `call` raises `error` with all `words` in its message."""
    try:
        call()
    except error as caught:
        assert all(word in str(caught) for word in words), caught
    else:
        raise AssertionError(f"no {error.__name__}")


def attempt(call: Callable) -> dict | None:
    """How `call` fails, and after how many seconds. None if it does not fail."""
    started = time.monotonic()
    try:
        call()
    except ERRORS as error:
        return {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - started}
    return None
