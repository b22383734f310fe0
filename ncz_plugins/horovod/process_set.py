"""Buckets are reduced over one process set, by a thread of its own, once all ranks have agreed on them."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

import horovod.torch as hvd
import torch

from ..core.bypass import Bypass
from ..core.call import Call
from ..core.call_description import checksum_of
from ..core.errors import MismatchError, PeerError, UnsupportedError, memory_errors
from ..core.group import Group
from ..core.run import count_plain, decide, enter, run
from ..core.runtime.device import Device, Host, record_event
from ..core.runtime.handle import Handle
from ..core.runtime.worker import Worker
from ..core.training.group import GroupState
from ..core.transport.base import Transport
from ..core.transport.comparison import RankComparison
from ..core.transport.handshake import described, differences
from ..version import __version__
from .bucket_plan import BucketPlan
from .compressor import NCZ, OptimizerCompressor
from .connections import OwnConnections
from .fusion import copy_back, flattened, fused
from .gathering import gathered
from .pending import TORCH_OPS, UNNAMED, PendingTensor
from .streams import Streams
from .transport import HorovodCollectives, HorovodTransport, result_of

_OP_NAMES = {getattr(hvd, name): name for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product")}
_COUNT = "number of tensors to reduce"
_BLOCKING = "whether the program waits for them"
_DIVISION = "buckets"
# Horovod lets ranks that have called hvd.join take part with zeros. So what ranks compare is made larger than that.
_ABOVE_ZERO = 1 << 50


class Readiness(Enum):
    """What the ranks of a process set have found out about what they are about to reduce."""

    DIFFERENT = auto()  # some ranks are ahead
    SAME = auto()
    SAME_BUT_JOINED = auto()  # the same on all ranks but those that have called hvd.join


class Job(NamedTuple):
    """For whom tensors are reduced, and by which plan."""

    compressor: NCZ
    owner: NCZ | OptimizerCompressor
    plan: BucketPlan
    process_set: hvd.ProcessSet


class ProcessSetReducer:
    """Reduces buckets over the ranks of one process set, on a thread of its own.

    Each process set has its own, as ranks may come to the sets that they share in different orders.
    """

    def __init__(self):
        self._worker = Worker("ncz_plugins horovod")
        self._connections = OwnConnections()
        self._streams = Streams()
        self._host = Host()  # which keeps memory for frames

    def start(self, job: Job, number: int, tensors: list[PendingTensor]) -> Handle:
        """Begin to reduce a bucket ahead of the program, if all ranks are about to; else they stop the plan.

        Args:
            number: of the bucket.
        """
        return self._worker.submit(partial(self._reduce_ahead, job, number, tensors))

    def reduce(self, job: Job, tensors: list[PendingTensor]) -> None:
        """Reduce what the program waits for. Raises MismatchError on every rank if programs wait for other things."""
        self._worker.submit(partial(self._reduce_rest, job, tensors)).wait()

    def close(self, seconds: float) -> None:
        """End the thread, after at most so many seconds for what it is at, and close its connections."""
        if self._worker.close(seconds):
            self._connections.close()
        else:  # it still uses them
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
        while (found := agree(job, tensors, blocking=True)) is Readiness.DIFFERENT:
            pass  # some ranks are ahead with a bucket, which they leave now
        bypass = Bypass.JOINED if found is Readiness.SAME_BUT_JOINED else None
        try:
            for number, bucket in job.plan.buckets(tensors):
                self._reduce_bucket(job, number, bucket, bypass)
        except BaseException:
            # The step is given up. When elastic training repeats it, its sums are counted from the first again.
            job.compressor.training.of_group(job.process_set.ranks).sums = 0
            raise

    def _reduce_bucket(self, job: Job, number: int, tensors: list[PendingTensor], bypass: Bypass | None = None) -> None:
        _require_names(job.compressor, job.owner)
        # Names are the same in every step, as Horovod caches by them.
        name = f"ncz.{job.process_set.process_set_id}.{number}"
        others = [each for each in tensors if not each.kind.bypass]
        with self._streams.after(tensors):
            _reduce_by_horovod(job, [each for each in tensors if each.kind.bypass], f"{name}.plain")
            for index, together in enumerate(fused(others, job.compressor.training, job.process_set.ranks)):
                self._reduce_together(job, together, f"{name}.{index}", bypass)
        for pending in tensors:
            pending.reduced = True

    def _reduce_together(self, job: Job, tensors: list[PendingTensor], name: str, bypass: Bypass | None) -> None:
        """Reduce tensors of one kind that are treated alike.

        Args:
            name: of Horovod's operations, together with what each is for.
            bypass: why they go plain, if that is sure already.
        """
        training, config, process_set = job.compressor.training, job.compressor.config, job.process_set
        kind, flat = tensors[0].kind, flattened(tensors)
        plain = HorovodCollectives(process_set, f"{name}.plain", (kind.prescale, kind.postscale))
        by_horovod = config.transport.schedule != "ring" and not flat.is_cuda
        # Horovod's own operations carry the direct schedule only.
        auto_schedule = "direct" if by_horovod else None
        group = Group(training, config, process_set.ranks, process_set.rank(), auto_schedule=auto_schedule)
        call = Call(
            "all_reduce",
            flat,
            flat,
            TORCH_OPS[kind.op],
            kind.scale,
            role="gradient",
            parts=[pending.parameter for pending in tensors],
            residual_parts=[pending.residual for pending in tensors],
            plain=plain,  # what goes plain in the end is reduced by Horovod also where frames go round a ring
        )
        decide(group, call)
        call.bypass = bypass or call.bypass
        if call.bypass is not None:
            call.start_plain(plain).wait()
            count_plain(group, call)
        else:
            if call.feeds_back:
                _require_unique_names(tensors)
            exactly = call.config.quantizer.kind == "lossless" and kind.scale != 1
            if exactly:  # the factors are applied when Horovod does it, so that its result comes out to the bit
                flat.mul_(kind.prescale)
                call.scale, call.plain = 1.0, HorovodCollectives(process_set, f"{name}.plain")
            enter(group, call)
            if by_horovod:
                _run(group, call, self._host, HorovodTransport(process_set, name))
            else:
                with self._connections.route(process_set, config.transport, flat.device) as (device, transport):
                    _run(group, call, device, transport)
            if exactly:
                flat.mul_(kind.postscale)
        copy_back(flat, tensors)


def _reduce_by_horovod(job: Job, tensors: list[PendingTensor], name: str) -> None:
    """Reduce tensors that can't be compressed as Horovod would have done without a compressor.

    Args:
        name: begins those of Horovod's operations.
    """
    works = []
    for index, pending in enumerate(tensors):
        op, prescale, postscale, *_ = pending.kind
        plain = HorovodCollectives(job.process_set, f"{name}.{index}", (prescale, postscale))
        works.append(plain.as_horovod_does(pending.tensor, op))
    for work, pending in zip(works, tensors):
        work.wait()
        call = Call("all_reduce", pending.tensor, pending.tensor, bypass=pending.kind.bypass)
        job.compressor.stats.record(call.plain_counters(job.process_set.size()))


def _run(group: Group, call: Call, device: Device, transport: Transport) -> None:
    try:
        with device.after(record_event(call.input.device)), memory_errors(call.collective):
            run(group, call, device, transport)
    except PeerError as error:
        raise hvd.HorovodInternalError(str(error)) from error  # what elastic training recovers from


# ------------------------------------------------------------------ what ranks agree on before each bucket


def agree(job: Job, tensors: list[PendingTensor], blocking: bool) -> Readiness:
    """Find out whether all ranks of a process set are about to reduce the same.

    Without that some could wait for ever: for what others send uncompressed, say, with another configuration.

    Args:
        blocking: whether the program waits for `tensors`, or they are reduced ahead of it.

    Raises MismatchError on every rank where the programs wait for different things.
    """
    compressor, process_set = job.compressor, job.process_set
    tensors_in_common = [
        ("" if each.name.startswith(UNNAMED) else each.name, each.parameter.name, each.kind, tuple(each.tensor.shape))
        for each in tensors
    ]
    comparison = RankComparison(
        {
            "version": zlib.crc32(__version__.encode()),
            "configuration": checksum_of(compressor.config),
            _COUNT: len(tensors),
            "tensors to reduce": zlib.crc32(repr(tensors_in_common).encode()),
            _BLOCKING: int(blocking),
            _DIVISION: zlib.crc32(repr([job.plan.bucket_of(each) for each in tensors]).encode()) if blocking else 0,
        },
        process_set.rank(),
        process_set.size(),
    )
    progress = _Progress(compressor, process_set)
    not_joined = torch.tensor([-1], dtype=torch.int64, device="cpu")
    highest = torch.cat([comparison.tensor + _ABOVE_ZERO, progress.tensor, not_joined])
    sizes = [comparison.tensor.numel(), progress.tensor.numel(), 1]
    name = f"ncz.{process_set.process_set_id}.compare"
    result_of(hvd.allreduce_async_(highest, op=hvd.Max, name=name, process_set=process_set))
    comparison.tensor, progress.tensor, joined = highest.split(sizes)
    comparison.tensor -= _ABOVE_ZERO
    some_joined = joined.item() == 0
    differing = comparison.differing()
    if differing and (not blocking or _BLOCKING in differing):
        return Readiness.DIFFERENT
    if differing.keys() == {_DIVISION}:
        # Ranks were told names in orders of their own, say of a set, so all of them do without orders from now on.
        job.plan.join()
        job.owner.positions = {}
        differing = {}
    if differing and some_joined:  # which can't take part in saying more
        raise MismatchError(
            f"ranks differ: {' and '.join(differing)}, and a rank has called hvd.join. On rank {hvd.rank()}, "
            f"{len(tensors)} are to be reduced, the first is {tensors[0].name}"
        )
    if differing:
        raise MismatchError(
            f"ranks differ: {_differences(job, tensors)}. All must run the same version with the same configuration "
            f"and make the same calls. On rank {hvd.rank()}, {len(tensors)} are to be reduced, the first is "
            f"{tensors[0].name}"
        )
    if some_joined:
        return Readiness.SAME_BUT_JOINED
    progress.follow()
    return Readiness.SAME


class _Progress:
    """How far a training is. Ranks that came later (elastic training), or that loaded no checkpoint, follow the others.

    Attributes:
        tensor: int64, to be replaced by its maximum over ranks before `follow`.
    """

    def __init__(self, compressor: NCZ, process_set: hvd.ProcessSet):
        self._training = compressor.training
        self._state: GroupState = compressor.training.of_group(process_set.ranks)
        state, guard = self._state, self._state.guard.state_dict()
        halvings = round(-math.log2(guard["tightening"]))
        numbers = [self._training.step, guard["calls"], halvings, state.calls, state.sums]
        self.tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def follow(self) -> None:
        """Go on from where the rank is that is farthest."""
        self._training.step, calls, halvings, self._state.calls, self._state.sums = self.tensor.tolist()
        self._state.guard.load_state_dict({"tightening": 2.0**-halvings, "calls": calls})


def _differences(job: Job, tensors: list[PendingTensor]) -> str:
    """How versions, settings and tensors of a process set's ranks differ, in words. All of them must call this."""
    process_set = job.process_set
    mine = {
        "settings": described(job.compressor.config),
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
    """What ranks must have in common of a tensor, for the message about those that have not."""
    return {
        "name": "a tensor without a name" if pending.name.startswith(UNNAMED) else pending.name,
        "dtype": pending.kind.dtype,
        "device": pending.kind.device,
        "reduce op": _OP_NAMES.get(pending.kind.op, pending.kind.op),
        "shape": list(pending.tensor.shape),
        "prescale factor": pending.kind.prescale,
        "postscale factor": pending.kind.postscale,
    }


def _require_names(compressor: NCZ, owner: NCZ | OptimizerCompressor) -> None:
    """Raise UnsupportedError if policies go by names that an optimizer was not told."""
    for at, policy in enumerate(compressor.config.policies):
        if policy.name is not None and not owner.knows_names:
            raise UnsupportedError(
                f"policies[{at}].name: {policy.name!r}: this optimizer does not know the names of its parameters; "
                "make it with hvd.DistributedOptimizer(..., named_parameters=model.named_parameters())"
            )


def _require_unique_names(tensors: list[PendingTensor]) -> None:
    """Raise UnsupportedError unless error feedback can tell the tensors apart."""
    names = Counter(pending.residual.name for pending in tensors)
    if None in names:
        raise UnsupportedError(
            "quantizer.error_feedback is on, and a tensor has no name to keep by what it loses: pass name= to allreduce"
        )
    name, times = names.most_common(1)[0]
    if times > 1:
        raise UnsupportedError(
            f"quantizer.error_feedback is on, and {times} tensors that wait for their reduction have the name {name}: "
            "give each one of its own"
        )
