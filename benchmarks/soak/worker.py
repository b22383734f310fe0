"""One rank of a soak. Started by soak.py, which says in JSON, the only argument, what to run.

Prints a line for each session, so that whoever started it sees that it goes on.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import hashlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import drawing
import reference
import torch
import torch.distributed as dist
from drawing import Call, Meeting
from reference import Done
from torch import Tensor

from ncz_plugins import Communicator

_MOST_CALLS = 1024  # of one rank in a session
# By what a run may grow, and by how many bytes for each session: communicators leave their addresses and settings in
# torch's store, which forgets nothing.
_MORE = {"files": 4, "threads": 4, "allocated": 8 << 20, "resident": 64 << 20}
_SESSION_BYTES = 32 << 10


@dataclass
class Seen:
    """What one rank did."""

    calls: int = 0
    elements: int = 0
    largest: int = 0
    counts: dict[str, Counter] = field(default_factory=dict)
    worst: float = 0.0  # error as a share of the bound

    def count(self, **kinds: str) -> None:
        for kind, name in kinds.items():
            self.counts.setdefault(kind, Counter())[name] += 1


class Recorder:
    """Takes a communicator's counters, call by call: of calls that went plain at once, and of those that it ran."""

    def __init__(self, communicator: Communicator):
        self._record = communicator.stats.record
        self.at_once, self.run = [], []
        communicator.stats.record = self

    def __call__(self, counters) -> None:
        caller = threading.current_thread() is threading.main_thread()
        (self.at_once if caller else self.run).append(counters)
        self._record(counters)


class Made:
    """A call under way on one communicator."""

    def __init__(self, call: Call, meeting: Meeting, communicator: Communicator, recorder: Recorder):
        ranks, rank = len(meeting.ranks), communicator.rank
        dtype = getattr(torch, call.dtype)
        parts = ranks if call.collective == "reduce_scatter" else 1
        self.input = reference.values(call, rank, 0, parts * call.length)
        self.result = self.input
        if call.has_parts:
            whole = self.input if call.collective == "reduce_scatter" else torch.empty(call.length * ranks, dtype=dtype)
            own = slice(rank * call.length, (rank + 1) * call.length)
            if call.collective == "reduce_scatter":
                self.result = whole[own] if call.aliased else torch.empty(call.length, dtype=dtype)
            else:
                self.result = whole
                if call.aliased:
                    whole[own] = self.input
                    self.input = whole[own]
        before = len(recorder.at_once)
        self.work = self._start(call, meeting, communicator)
        self.counters = recorder.at_once[before] if len(recorder.at_once) > before else None

    def _start(self, call: Call, meeting: Meeting, communicator: Communicator):
        how = {"async_op": call.asynchronous, "role": call.role, "name": call.name}
        op = call.op and getattr(dist.ReduceOp, call.op)
        if call.collective == "all_reduce":
            return communicator.all_reduce(self.input, op, **how)
        if call.collective == "reduce_scatter":
            return communicator.reduce_scatter_single(self.result, self.input, op, **how)
        if call.collective == "all_gather":
            return communicator.all_gather_single(self.result, self.input, **how)
        if call.collective == "reduce":
            return communicator.reduce(self.input, meeting.ranks[call.root], op, **how)
        return communicator.broadcast(self.input, meeting.ranks[call.root], **how)


def play(meeting: Meeting, group: dist.ProcessGroup, seen: Seen) -> list[int]:
    """Make all calls of a meeting and check them; the digests of the results that all of its ranks must share."""
    digests = []
    with ExitStack() as stack:
        communicators = [stack.enter_context(Communicator(config, group)) for config in meeting.configs]
        recorders = [Recorder(communicator) for communicator in communicators]
        before: list[dict[str, list[Done]]] = [{} for _ in communicators]  # by the name of what is fed back
        for step, batch in enumerate(meeting.batches):
            made = [[Made(call, meeting, *each) for each in zip(communicators, recorders)] for call in batch]
            waiting = [one.work for ones in made for one in ones if one.work is not None]
            random.shuffle(waiting)  # each rank waits in its own order
            for work in waiting:
                work.wait()
            for communicator in communicators:
                communicator.end_step()
            for number, (call, ones) in enumerate(zip(batch, made)):
                what = f"call {number} of step {step} ({call})"
                for one, config, recorder, earlier in zip(ones, meeting.configs, recorders, before):
                    one.counters = one.counters or recorder.run.pop(0)
                    try:
                        digests.append(_checked(call, config, step, meeting, communicators[0].rank, one, earlier, seen))
                    except AssertionError as error:
                        raise AssertionError(f"{what} with {config}: {error}") from None
                if meeting.twins and len({_digest(one) for one in ones}) > 1:
                    one, other = meeting.configs
                    raise AssertionError(f"{what}: other bits with {other} than with {one}")
    return digests


def _checked(call, config, step, meeting, rank, made: Made, before: dict[str, list[Done]], seen: Seen) -> int:
    """A digest of the result, 0 where ranks have different ones; raises AssertionError where it is wrong."""
    ranks, counters = len(meeting.ranks), made.counters
    assert counters.calls == 1 and counters.compressed_calls + sum(counters.bypasses.values()) == 1, counters
    reason = next(iter(counters.bypasses), None)
    quantizer, early = reference.treated(call, config, ranks, step)
    late = ("non-finite", "code overflow", "not worth it")
    assert reason == early if early else reason in (None, *late), f"went plain for {reason}, and not for {early}"
    assert reason or quantizer["kind"] == "lossless" or not call.poison, "NaN or infinity was quantized"
    done = Done(call, quantizer, not reason, made.result)
    feeds_back = reference.feeds_back(call, quantizer)
    calls = [*before.get(call.name, []), done] if feeds_back else [done]
    gets_nothing = call.collective == "reduce" and rank != call.root
    if gets_nothing:
        assert _bits(reference.values(call, rank, 0, call.length)).equal(_bits(made.result)), "the input has changed"
    share = None if gets_nothing else reference.check(calls, config, ranks, rank)
    if feeds_back and call.length <= drawing.USUAL:  # no larger one is made again
        before[call.name] = calls
    if call.has_parts and not call.aliased:
        kept = reference.values(call, rank, 0, made.input.numel())
        assert _bits(kept).equal(_bits(made.input)), "the input has changed"
    seen.calls += 1
    seen.elements += call.elements(ranks)
    seen.largest = max(seen.largest, call.elements(ranks))
    seen.worst = max(seen.worst, share or 0)
    seen.count(collective=call.collective, dtype=call.dtype, op=str(call.op), ranks=str(ranks))
    seen.count(went=reason or "compressed")
    if not reason:
        transport = config["transport"]
        in_nodes = isinstance(transport["hierarchy"], int)
        seen.count(quantizer=quantizer["kind"], mode=quantizer["mode"], schedule=transport["schedule"])
        seen.count(ranks_are="in nodes" if in_nodes else "alone", checksums=str(config["entropy"]["checksum"]))
        seen.count(feedback=f"{len([each for each in calls if each.compressed])} calls" if feeds_back else "none")
    return 0 if call.collective in ("reduce_scatter", "reduce") else _digest(made)


def _digest(made: Made) -> int:
    reason = ",".join(made.counters.bypasses)
    found = hashlib.blake2b(reason.encode(), digest_size=8)
    found.update(_bits(made.result).numpy())
    return int.from_bytes(found.digest(), "little", signed=True)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


# ------------------------------------------------------------------ all ranks together


def _compare(digests: list[int], ranks: tuple[int, ...]) -> None:
    """Raise AssertionError unless all of `ranks` have the same digests. Every rank of the world must call this."""
    mine = torch.zeros(_MOST_CALLS, dtype=torch.int64)
    mine[: len(digests)] = torch.tensor(digests, dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    for rank in ranks:
        differing = (everyone[rank] != mine).nonzero()
        assert not len(differing), f"result {int(differing[0])} has other bits on rank {rank}"


def _goes_on(job: dict, begun: float, index: int) -> bool:
    """Whether there is time for one more session, as rank 0 says."""
    left = torch.tensor([time.monotonic() - begun < job["seconds"] and index < job["sessions"]])
    dist.broadcast(left, 0)
    return bool(left)


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _usage() -> dict[str, int]:
    """Open files, threads, bytes that are allocated, and bytes of memory that the process takes."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    libc.malloc_trim(0)
    info = libc.mallinfo2()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "allocated": info.uordblks + info.hblkhd,
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # the stacks of all threads, before a rank that hangs is killed
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=drawing.TIMEOUT_SECONDS))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sets = [ranks for size in range(1, world_size + 1) for ranks in itertools.combinations(range(world_size), size)]
    groups = {ranks: dist.new_group(ranks) for ranks in sets}
    seen, usages, sessions = Seen(), [], 0
    begun = time.monotonic()
    index = job["first"]
    while _goes_on(job, begun, index - job["first"]):
        meetings = drawing.session(job["seed"], index, world_size, job["largest"])
        mine = next((meeting for meeting in meetings if rank in meeting.ranks), None)
        try:
            _compare(play(mine, groups[mine.ranks], seen) if mine else [], mine.ranks if mine else ())
        except Exception as error:
            what = "WRONG" if isinstance(error, AssertionError) else "FAILED"
            print(f"{what} seed {job['seed']}, session {index}, rank {rank}: {error}", flush=True)
            raise
        sessions += 1
        if sessions % job["warm_up"] == 0:
            usages.append(_usage())
        print(f"session {index}: {seen.calls} calls, {seen.elements} elements", flush=True)
        index += 1
    usages.append(_usage())
    found = {**vars(seen), "sessions": sessions, "seconds": time.monotonic() - begun, "usages": usages}
    Path(job["results"], f"rank{rank}.json").write_text(json.dumps(found))
    for key, most in _MORE.items():
        most += _SESSION_BYTES * sessions if key in ("allocated", "resident") else 0
        assert usages[-1][key] <= usages[0][key] + most, f"rank {rank} takes more and more {key}: {usages}"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
