"""Reduction of buckets over one process set, on its own thread, once all ranks are about to reduce the same."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from contextlib import nullcontext
from enum import Enum, auto
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import horovod.torch as hvd
import torch

from ..core.bypass import Bypass
from ..core.call import Call
from ..core.call_description import checksum_of
from ..core.config import Config
from ..core.errors import MismatchError, PeerError, UnsupportedError, memory_errors
from ..core.group import Group
from ..core.run import count_plain, decide, enter, run
from ..core.runtime.device import Host, record_event
from ..core.runtime.handle import Handle
from ..core.runtime.worker import Worker
from ..core.training.group import GroupState
from ..core.transport.comparison import RankComparison
from ..core.transport.handshake import described, differences
from ..version import __version__
from .bucket_plan import BucketPlan
from .compressor import NCZ, OptimizerCompressor
from .connections import OwnConnections
from .fusion import copy_back, flattened, fused
from .gathering import gathered
from .gpu_streams import GpuStreams
from .pending import TORCH_OPS, UNNAMED, PendingTensor, Signature
from .transport import HorovodCollectives, HorovodTransport, result_of

_OP_NAMES = {getattr(hvd, name): name for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product")}
_COUNT = "number of tensors to reduce"
_BLOCKING = "whether the program waits for them"
_BUCKETS = "buckets"
# Ranks that have called hvd.join take part in a maximum with zeros. This offset lifts all compared numbers above zero.
_COMPARED_OFFSET = 1 << 50


class Readiness(Enum):
    """Result of asking the ranks of a process set what they are about to reduce."""

    DIFFERENT = auto()  # some ranks are ahead of others, and about to reduce other tensors
    SAME = auto()  # all ranks are about to reduce the same tensors
    SAME_BUT_JOINED = auto()  # some ranks have called hvd.join; all others are about to reduce the same tensors


class Job(NamedTuple):
    """Context of a reduction: owner of the tensors, plan of the buckets, and process set."""

    owner: NCZ | OptimizerCompressor
    plan: BucketPlan
    process_set: hvd.ProcessSet


class ProcessSetReducer:
    """Thread that reduces buckets over the ranks of one process set.

    Each process set has its own thread, because ranks may come to the sets that they share in different orders.
    """

    def __init__(self):
        self._worker = Worker("ncz_plugins horovod")
        self._connections = OwnConnections()
        self._streams = GpuStreams()
        self._host = Host()  # keeps the memory for frames between calls
        # For each compressor, settings and what lasts between calls with them, by whether Horovod carries the calls and
        # whether GPUs hold tensors.
        self._groups: WeakKeyDictionary[NCZ, dict[tuple[bool, bool], tuple[Config, Group]]] = WeakKeyDictionary()

    def start(self, job: Job, number: int, tensors: list[PendingTensor]) -> Handle:
        """Start to reduce a bucket before the program waits for it. If not all ranks are about to, the plan stops.

        Args:
            number: number of the bucket in `job.plan`.
        """
        return self._worker.submit(partial(self._reduce_ahead, job, number, tensors))

    def reduce(self, job: Job, tensors: list[PendingTensor]) -> None:
        """Reduce tensors that the program waits for.

        Raises MismatchError on every rank if the programs wait for different tensors.
        """
        self._worker.submit(partial(self._reduce_rest, job, tensors)).wait()

    def close(self, seconds: float) -> None:
        """End the thread and close its connections. A reduction under way is aborted after `seconds`."""
        if self._worker.close(seconds):
            self._connections.close()
        else:  # the thread still uses the connections
            self._connections.abort(PeerError("Horovod was initialized again before this reduction was over"))

    # ---------------------------------------------------------------- on the thread

    def _reduce_ahead(self, job: Job, number: int, tensors: list[PendingTensor]) -> None:
        reduced = False
        try:
            if not job.plan.stopped and agree(job, tensors, blocking=False) is Readiness.SAME:
                self._reduce_bucket(job, number, tensors)
                reduced = True
        finally:
            if not reduced:
                job.plan.stop()

    def _reduce_rest(self, job: Job, tensors: list[PendingTensor]) -> None:
        # Ranks that were ahead give up their bucket, and then agree on all tensors that are left.
        while (found := agree(job, tensors, blocking=True)) is Readiness.DIFFERENT:
            pass
        bypass = Bypass.JOINED if found is Readiness.SAME_BUT_JOINED else None
        try:
            for number, bucket in job.plan.buckets(tensors):
                self._reduce_bucket(job, number, bucket, bypass)
        except BaseException:
            # Elastic training repeats a step that failed. All ranks then count its sums from the beginning.
            job.owner.compressor.training.of_group(job.process_set.ranks).guard.sums = 0
            raise

    def _reduce_bucket(self, job: Job, number: int, tensors: list[PendingTensor], bypass: Bypass | None = None) -> None:
        _require_names(job.owner)
        # Horovod caches operations by name, so use the same names in every step.
        name = f"ncz.{job.process_set.process_set_id}.{number}"
        others = [each for each in tensors if not each.signature.bypass]
        with self._streams.after(tensors):
            _reduce_by_horovod(job, [each for each in tensors if each.signature.bypass], f"{name}.plain")
            alike = fused(others, job.owner.compressor.training, job.process_set.ranks)
            for index, together in enumerate(alike):
                self._reduce_together(job, together, f"{name}.{index}", bypass)
        for pending in tensors:
            pending.reduced = True

    def _reduce_together(self, job: Job, tensors: list[PendingTensor], name: str, bypass: Bypass | None) -> None:
        """Reduce tensors of one signature and the same settings in one call.

        Args:
            name: prefix of the names of Horovod's operations.
            bypass: a reason to reduce them uncompressed; None: decide here.
        """
        signature, flat = tensors[0].signature, flattened(tensors)
        by_horovod = job.owner.compressor.config.transport.schedule in ("auto", "direct") and not flat.is_cuda
        group = self._group(job, by_horovod, flat.is_cuda)
        call = Call(
            "all_reduce",
            flat,
            flat,
            TORCH_OPS[signature.op],
            signature.scale,
            role="gradient",
            parts=[pending.parameter for pending in tensors],
            residual_parts=[pending.residual for pending in tensors],
            # Horovod also reduces a call whose values turn out not to be worth compressing.
            plain=HorovodCollectives(job.process_set, f"{name}.plain", (signature.prescale, signature.postscale)),
        )
        decide(group, call)
        call.bypass = bypass or call.bypass
        if call.bypass is not None:
            call.start_plain(call.plain).wait()
            count_plain(group, call)
        else:
            if call.feeds_back:
                _require_unique_names(tensors)
            self._run(job, group, call, signature, name, by_horovod)
        copy_back(flat, tensors)

    def _run(self, job: Job, group: Group, call: Call, signature: Signature, name: str, by_horovod: bool) -> None:
        """Run a compressed call. Raises hvd.HorovodInternalError if a rank fails: elastic training recovers from it."""
        # A lossless sum applies the factors before and after the sum, as Horovod does: the result is the same to the
        # bit.
        exactly = call.config.quantizer.kind == "lossless" and signature.scale != 1
        if exactly:
            call.input.mul_(signature.prescale)
            call.scale, call.plain = 1.0, HorovodCollectives(job.process_set, f"{name}.plain")
        enter(group, call)
        if by_horovod:
            route = nullcontext((self._host, HorovodTransport(job.process_set, name)))
        else:
            route = self._connections.route(job.process_set, group.config.transport, call.input.device)
        with route as (device, transport):
            try:
                with device.after(record_event(call.input.device)), memory_errors(call.collective):
                    run(group, call, device, transport)
            except PeerError as error:
                raise hvd.HorovodInternalError(str(error)) from error
        if exactly:
            call.output.mul_(signature.postscale)

    def _group(self, job: Job, by_horovod: bool, on_gpu: bool) -> Group:
        """What lasts between the calls of one compressor, made anew if its settings were changed."""
        compressor, process_set = job.owner.compressor, job.process_set
        groups, way = self._groups.setdefault(compressor, {}), (by_horovod, on_gpu)
        made_with, group = groups.get(way, (None, None))
        if made_with is not compressor.config:
            # Horovod's own operations carry the direct schedule only.
            schedule, ranks = "direct" if by_horovod else None, (process_set.ranks, process_set.rank())
            group = Group(compressor.training, compressor.config, *ranks, auto_schedule=schedule)
            group = group.for_gpus() if on_gpu else group
            groups[way] = compressor.config, group
        group.order.exact_calls = 0  # only some ranks may have counted a call that failed
        return group


def _reduce_by_horovod(job: Job, tensors: list[PendingTensor], name: str) -> None:
    """Reduce by Horovod's own all-reduce: for tensors that can't be compressed.

    Args:
        name: prefix of the names of Horovod's operations.
    """
    works = []
    for index, pending in enumerate(tensors):
        op, prescale, postscale, *_ = pending.signature
        plain = HorovodCollectives(job.process_set, f"{name}.{index}", (prescale, postscale))
        works.append(plain.as_horovod_does(pending.tensor, op))
    for work, pending in zip(works, tensors):
        work.wait()
        call = Call("all_reduce", pending.tensor, pending.tensor, bypass=pending.signature.bypass)
        job.owner.compressor.stats.record(call.plain_counters(job.process_set.size()))


# ------------------------------------------------------------------ what ranks agree on before each bucket


def agree(job: Job, tensors: list[PendingTensor], blocking: bool) -> Readiness:
    """Find out whether all ranks of a process set are about to reduce the same.

    This is the only comparison of the calls over Horovod. Without it some ranks could wait for ever, for example for
    tensors that others, with another configuration, send uncompressed.

    Args:
        blocking: True if the program waits for `tensors`, False if they are reduced ahead of it.

    Raises MismatchError on every rank if the programs wait for different tensors.
    """
    process_set = job.process_set

    # One maximum over ranks carries what must be equal, what lagging ranks take over, and whether a rank has joined.
    comparison = RankComparison(_compared(job, tensors, blocking), process_set.rank(), process_set.size())
    progress = _Progress(job.owner.compressor, process_set)
    not_joined = torch.tensor([-1], dtype=torch.int64, device="cpu")
    highest = torch.cat([comparison.tensor + _COMPARED_OFFSET, progress.tensor, not_joined])
    sizes = [comparison.tensor.numel(), progress.tensor.numel(), 1]
    name = f"ncz.{process_set.process_set_id}.compare"
    result_of(hvd.allreduce_async_(highest, op=hvd.Max, name=name, process_set=process_set))
    comparison.tensor, progress.tensor, joined = highest.split(sizes)
    comparison.tensor -= _COMPARED_OFFSET
    some_joined = joined.item() == 0
    differing = comparison.differing()

    # Ranks that are ahead of others wait until the program waits on all of them.
    if differing and (not blocking or _BLOCKING in differing):
        return Readiness.DIFFERENT

    # Ranks that know their parameters in different orders, for example from a set, use one bucket.
    if differing.keys() == {_BUCKETS}:
        job.plan.merge()
        job.owner.positions = {}
        differing = {}

    if differing:
        # Joined ranks can't take part in comparing details.
        found = f"{' and '.join(differing)} (a rank has called hvd.join)" if some_joined else _differences(job, tensors)
        raise MismatchError(
            f"ranks differ: {found}. All must run the same version with the same configuration and make the same "
            f"calls. Rank {hvd.rank()} waits for {len(tensors)} tensors, the first is {tensors[0].name}"
        )
    if some_joined:
        return Readiness.SAME_BUT_JOINED
    progress.follow()
    return Readiness.SAME


def _compared(job: Job, tensors: list[PendingTensor], blocking: bool) -> dict[str, int]:
    """Numbers that must be equal on all ranks that are about to reduce these tensors."""
    in_common = [
        (
            "" if each.name.startswith(UNNAMED) else each.name,
            each.parameter.name,
            each.signature,
            tuple(each.tensor.shape),
        )
        for each in tensors
    ]
    return {
        "version": zlib.crc32(__version__.encode()),
        "configuration": checksum_of(job.owner.compressor.config),
        _COUNT: len(tensors),
        "tensors to reduce": zlib.crc32(repr(in_common).encode()),
        _BLOCKING: int(blocking),
        _BUCKETS: zlib.crc32(repr([job.plan.bucket_of(each) for each in tensors]).encode()) if blocking else 0,
    }


class _Progress:
    """Numbers of the training and the process set that must be the same on all ranks: step, guard and calls.

    Ranks that join later (elastic training) or load no checkpoint have smaller numbers, and take over those of the
    others.

    Attributes:
        tensor: int64, [5]. Replace it by its maximum over ranks before `follow`.
    """

    def __init__(self, compressor: NCZ, process_set: hvd.ProcessSet):
        self._training = compressor.training
        self._state: GroupState = compressor.training.of_group(process_set.ranks)
        state, guard = self._state, self._state.guard.state_dict()
        halvings = round(-math.log2(guard["tightening"]))
        numbers = [self._training.step, guard["calls"], halvings, state.calls, state.guard.sums]
        self.tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def follow(self) -> None:
        """Take over the numbers in `tensor`: those of the rank that is farthest."""
        guard = self._state.guard
        self._training.step, calls, halvings, self._state.calls, guard.sums = self.tensor.tolist()
        guard.load_state_dict({"tightening": 2.0**-halvings, "calls": calls})


def _differences(job: Job, tensors: list[PendingTensor]) -> str:
    """Text that says how versions, settings and tensors differ between ranks.

    All ranks of the process set must call this.
    """
    process_set = job.process_set
    mine = {
        "settings": described(job.owner.compressor.config),
        "tensors": [_in_words(each) for each in sorted(tensors, key=lambda each: (each.name, each.index))],
    }
    everyone = gathered(mine, f"ncz.{process_set.process_set_id}.differences", process_set)
    lists = [each["tensors"] for each in everyone]
    counts = [{_COUNT: len(each)} for each in lists]
    found = [differences([each["settings"] for each in everyone], process_set.ranks)]
    found += [differences(counts, process_set.ranks)]
    first = next((each for each in zip(*lists) if any(other != each[0] for other in each)), None)
    if first is not None:
        names = {each["name"] for each in first}
        found += [(f"{names.pop()}: " if len(names) == 1 else "") + differences(list(first), process_set.ranks)]
    return "; ".join(filter(None, found))


def _in_words(pending: PendingTensor) -> dict[str, object]:
    """Properties of a tensor that all ranks must agree on, by the names that messages use."""
    return {
        "name": "a tensor without a name" if pending.name.startswith(UNNAMED) else pending.name,
        "dtype": pending.signature.dtype,
        "device": pending.signature.device,
        "reduce op": _OP_NAMES.get(pending.signature.op, pending.signature.op),
        "shape": list(pending.tensor.shape),
        "prescale factor": pending.signature.prescale,
        "postscale factor": pending.signature.postscale,
    }


def _require_names(owner: NCZ | OptimizerCompressor) -> None:
    """Raise UnsupportedError if a policy selects by name, and the optimizer was not told the names."""
    for at, policy in enumerate(owner.compressor.config.policies):
        if policy.name is not None and not owner.knows_names:
            raise UnsupportedError(
                f"policies[{at}].name: {policy.name!r}: this optimizer was not told the names of its parameters; "
                "make it with hvd.DistributedOptimizer(..., named_parameters=model.named_parameters())"
            )


def _require_unique_names(tensors: list[PendingTensor]) -> None:
    """Raise UnsupportedError unless each tensor has a name of its own, which error feedback needs."""
    names = Counter(pending.residual.name for pending in tensors)
    if None in names:
        raise UnsupportedError(
            "quantizer.error_feedback is on and needs names, but a tensor has none: pass name= to allreduce"
        )
    name, times = names.most_common(1)[0]
    if times > 1:
        raise UnsupportedError(
            f"quantizer.error_feedback is on, and {times} pending tensors have the name {name}: give each its own name"
        )
