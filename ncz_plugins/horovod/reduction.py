"""Tagged tensors are collected until all ranks have submitted the same, and then reduced by a thread of their own.

Ranks may produce gradients in different orders, and which ones they produce may differ until the optimizer
synchronizes; by then all have submitted the same names. What the optimizer's plan puts together may be reduced before,
as soon as it is there, if it is on all ranks.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import weakref
import zlib
from collections import Counter
from functools import partial
from typing import NamedTuple

import horovod.torch as hvd
import torch
from horovod.torch import ProcessSet
from torch import Tensor

from ..core.codec.layout import Window
from ..core.codec.quantize import Bypass, bypass_by_size
from ..core.collective import Call, bypassed, checksum_of, layout_of_sum
from ..core.errors import MismatchError, PeerError, UnsupportedError, memory_errors
from ..core.runtime.device import Host
from ..core.runtime.worker import Worker
from ..core.schedules import direct, ring
from ..core.training.error_feedback import Feedback
from ..core.training.policy import ParameterSlice, named
from ..core.training.state import Training
from ..core.transport.base import Transport
from ..core.transport.handshake import RankComparison, described, differences
from ..kernels.format import DTYPES
from ..version import __version__
from .buckets import Bucket, Kind, Piece, buckets
from .compressor import NCZ, OfOneOptimizer
from .plan import Plan
from .transport import HorovodTransport, open_ring, result_of

_COUNT = "number of tensors to reduce"
_BLOCKING = "whether the program waits for them"
_CLOSING_SECONDS = 10.0  # for what is under way when Horovod is initialized again, which fails then
_UNNAMED = "ncz.noname."  # and a number, which may differ between ranks
_unnamed = itertools.count()


class Pending:
    """The handle of tensors that wait for their reduction, in place.

    Args:
        names: of each tensor, None for those that have none.
        grouped: whether the result is a list.
    """

    def __init__(
        self,
        compressor: NCZ,
        owner: NCZ | OfOneOptimizer,
        tensors: list[Tensor],
        names: list[str | None],
        op: int,
        scale: float,
        process_set,
        grouped: bool,
    ):
        self.compressor = compressor
        self.owner = owner
        self.process_set = process_set
        self.name = f"{_UNNAMED}{next(_unnamed):09d}" if names[0] is None else names[0]
        self.pieces = [
            Piece(
                Kind(op, scale, str(tensor.dtype)),
                self.name,
                index,
                tensor,
                ParameterSlice(name, tensor.numel()),
                ParameterSlice(name and owner.label + name, tensor.numel()),
            )
            for index, (tensor, name) in enumerate(zip(tensors, names))
        ]
        self.done = False
        self._grouped = grouped

    def __call__(self) -> Tensor | list[Tensor]:
        """Reduce everything that its owner has pending, this one included, and return the result(s)."""
        if not self.done:
            _State.current.reduce_all(self.compressor, self.owner)
        if not self.done:  # it was dropped: an earlier reduction failed, or Horovod was initialized again
            raise hvd.HorovodInternalError(f"the reduction of {self.name} was given up; nothing was reduced")
        results = [piece.tensor for piece in self.pieces]
        return results if self._grouped else results[0]


class _Job(NamedTuple):
    """For whom a process set reduces, and by which plan."""

    compressor: NCZ
    owner: NCZ | OfOneOptimizer
    plan: Plan
    process_set: ProcessSet


class _State:
    """What lives from one `hvd.init` to the next; an elastic reset begins with a clean one.

    Handles that their owner dropped, as the optimizer does when it is restored, are not waited for any more.
    """

    current: _State

    def __init__(self):
        # Per process set: its ranks, as Horovod gives the number of a removed set to a new one with other ranks.
        self.calls: Counter[tuple[int, ...]] = Counter()
        self._rings: dict[tuple[int, ...], Transport] = {}
        self._workers: dict[tuple[int, ...], Worker] = {}
        self._plans: weakref.WeakKeyDictionary[OfOneOptimizer, Plan] = weakref.WeakKeyDictionary()
        self._process = os.getpid()
        self._pending: list[weakref.ref[Pending]] = []

    def submit(self, pending: Pending) -> Pending:
        """Put among the pending, and begin to reduce what is complete by its optimizer's plan."""
        self._require_own_process()
        self._pending.append(weakref.ref(pending))
        plan = self._plans.get(pending.owner)
        if plan is not None and pending.compressor.may_run_ahead:
            job = _Job(pending.compressor, pending.owner, plan, pending.process_set)
            for number, pieces in plan.take(pending.pieces):
                ahead = partial(self._run_ahead, job, number, pieces)
                plan.under_way.append(self._worker(pending.process_set).submit(ahead))
        return pending

    def reduce_all(self, compressor: NCZ, owner: NCZ | OfOneOptimizer) -> None:
        """Reduce all that is pending for one owner."""
        self._require_own_process()
        compressor.begin()
        alive = [pending for reference in self._pending if (pending := reference()) is not None]
        mine = sorted((p for p in alive if p.owner is owner), key=lambda p: p.process_set.process_set_id)
        self._pending = [weakref.ref(p) for p in alive if p.owner is not owner]
        # What is counted must be counted per process set, as others in it may not be in all of ours.
        for _, of_one_process_set in itertools.groupby(mine, key=lambda p: p.process_set.process_set_id):
            pendings = list(of_one_process_set)
            pieces = sorted((piece for p in pendings for piece in p.pieces), key=lambda piece: piece.order)
            self._finish(compressor, owner, pieces, pendings[0].process_set)
            for pending in pendings:
                pending.done = True
        compressor.end_reduction(owner)

    def close(self) -> None:
        """End the threads."""
        for worker in self._workers.values():
            worker.close(_CLOSING_SECONDS)

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise UnsupportedError(
                f"process {os.getpid()} is a fork of process {self._process}, which has Horovod's threads and "
                "connections to itself. Start processes by spawn or forkserver"
            )

    def _worker(self, process_set: ProcessSet) -> Worker:
        """The thread for a process set. Each has its own, as ranks may come to what they share in different orders."""
        ranks = tuple(process_set.ranks)
        if ranks not in self._workers:
            self._workers[ranks] = Worker("ncz_plugins horovod")
        return self._workers[ranks]

    def _finish(
        self, compressor: NCZ, owner: NCZ | OfOneOptimizer, pieces: list[Piece], process_set: ProcessSet
    ) -> None:
        """Reduce what a step has left of `pieces`, all that it reduces for one owner in one process set."""
        plan = self._plans.pop(owner, None)
        if plan is not None:
            plan.wait()
        if plan is None or not plan.covers(pieces):
            plan = Plan(pieces, owner.places)
        if rest := [piece for piece in pieces if not piece.reduced]:
            job = _Job(compressor, owner, plan, process_set)
            self._worker(process_set).submit(partial(self._run_rest, job, rest)).wait()
        if owner.places:
            plan.begin()
            self._plans[owner] = plan

    # ---------------------------------------------------------------- on the worker's thread

    def _run_ahead(self, job: _Job, number: int, pieces: list[Piece]) -> None:
        """Reduce a round of the plan if all ranks are about to; else all leave it for the end of the step."""
        ran = False
        try:
            if not job.plan.left and self._agree(job, pieces, blocking=False):
                self._run_round(job, number, pieces)
                ran = True
        finally:
            if not ran:
                job.plan.leave()

    def _run_rest(self, job: _Job, pieces: list[Piece]) -> None:
        """Reduce what the program waits for."""
        while not self._agree(job, pieces, blocking=True):
            pass  # some ranks are ahead with something else, which they leave now
        for number, of_one_round in job.plan.cut(pieces):
            self._run_round(job, number, of_one_round)

    def _agree(self, job: _Job, pieces: list[Piece], blocking: bool) -> bool:
        """Whether all ranks of a process set are about to do the same.

        Else some could wait for ever: for what the others send uncompressed, say, as their configuration is another.

        How far the training is need not be the same, as ranks come later (elastic training), or a checkpoint is loaded
        by the first only: all then follow the one that is farthest.

        Args:
            waited_for: whether the program waits for `pieces`, or they are reduced ahead of it.

        Returns False where they are not, and some ranks are ahead. Raises MismatchError on every rank where the
        programs wait for different things.
        """
        compressor, _, _, process_set = job
        training = compressor.training
        guard = training.of_group(process_set.ranks).guard
        tensors = [
            ("" if p.name.startswith(_UNNAMED) else p.name, p.part.name, p.kind, p.tensor.numel()) for p in pieces
        ]
        numbers = {
            "version": zlib.crc32(__version__.encode()),
            "configuration": checksum_of(compressor.config),
            "number of reductions so far": self.calls[tuple(process_set.ranks)],
            _COUNT: len(pieces),
            "names, sizes, dtypes or scale factors of the tensors to reduce": zlib.crc32(repr(tensors).encode()),
            _BLOCKING: int(blocking),
        }
        comparison = RankComparison(numbers)
        before = guard.state_dict()
        progress = torch.tensor([training.step, before["calls"], round(-math.log2(before["tightening"]))])
        highest = torch.cat([comparison.tensor, progress])
        comparison.tensor, progress = highest.split([comparison.tensor.numel(), progress.numel()])
        name = f"ncz.{process_set.process_set_id}.compare"
        result_of(hvd.allreduce_async_(highest, op=hvd.Max, name=name, process_set=process_set))
        differing = comparison.differing()
        if differing.get(_COUNT, (1, 1))[0] == 0:  # Horovod lets a rank that has joined take part with zeros
            raise MismatchError(
                f"a rank has called hvd.join and can't take part in the compressed reduction of {pieces[0].name} "
                f"(on rank {hvd.rank()}). Give every rank the same number of steps"
            )
        if differing and (not blocking or _BLOCKING in differing):
            return False
        if differing:
            settings = _differences(compressor, process_set)
            raise MismatchError(
                f"ranks {', '.join(map(str, process_set.ranks))} differ in: {'; '.join(differing)}. "
                f"{settings and f'By their place in that list: {settings}. '}All must run the same version with the "
                f"same configuration and make the same calls. On rank {hvd.rank()}, {len(pieces)} are to be reduced, "
                f"the first is {pieces[0].name}"
            )
        training.step, calls, halvings = progress.tolist()
        guard.load_state_dict({"tightening": 2.0**-halvings, "calls": calls})
        return True

    def _run_round(self, job: _Job, number: int, pieces: list[Piece]) -> None:
        compressor, owner, plan, process_set = job
        _require_names(compressor, owner)
        for index, bucket in enumerate(buckets(pieces, compressor.training, process_set.ranks)):
            # The same in every step, as Horovod caches by name.
            name = f"ncz.{process_set.process_set_id}.{number}.{index}"
            plan.compressed += self._reduce(compressor, bucket, process_set, name, plan.compressed)
        for piece in pieces:
            piece.reduced = True

    def _reduce(self, compressor: NCZ, bucket: Bucket, process_set: ProcessSet, name: str, compressed: int) -> bool:
        """Reduce one bucket.

        Args:
            name: of Horovod's operations, together with what each is for.
            compressed: how many of this step's buckets before were not bypassed.

        Returns: whether this one was not.
        """
        training, kind, world_size = compressor.training, bucket.kind, process_set.size()
        config = bucket.treatment.settings(compressor.config)
        flat = torch.cat([piece.tensor.reshape(-1) for piece in bucket.pieces])
        self.calls[tuple(process_set.ranks)] += 1

        def plain():
            # Horovod can't add bfloat16; float32 holds it exactly.
            wide = flat.float() if flat.dtype == torch.bfloat16 else flat
            handle = hvd.allreduce_async_(
                wide, name=f"{name}.plain", op=kind.op, prescale_factor=kind.scale, process_set=process_set
            )
            flat.copy_(result_of(handle))

        def plain_sum(tensor):
            result_of(hvd.allreduce_async_(tensor, name=f"{name}.exact", op=hvd.Sum, process_set=process_set))

        reason = Bypass.ONE_RANK if world_size == 1 else bucket.treatment.bypass or bypass_by_size(flat.nbytes, config)
        if reason is not None:
            plain()
            training.stats.record(bypassed("all_reduce", flat, reason, world_size))
        else:
            on_ring = config.transport.schedule == "ring"
            group = training.of_group(process_set.ranks)
            group.calls += 1
            call = Call(
                "all_reduce",
                layout_of_sum(flat, world_size, config),
                source=Window(flat),
                output=Window(flat),
                measured=range(world_size),
                schedule=ring.all_reduce if on_ring else direct.all_reduce,
                plain=plain,
                addends=world_size,
                divisor=(world_size if kind.op == hvd.Average else 1) / kind.scale,
                feedback=_feedback(training, bucket) if config.quantizer.feeds_back else None,
                plain_sum=plain_sum,
                in_pieces=on_ring,  # Horovod's own operations take all frames at once
                draw=group.calls,
            )
            transport = self._ring(config, process_set) if on_ring else HorovodTransport(process_set, name)
            verify = None
            if group.guard.picks(training.step, compressed):
                verify = named([piece.part for piece in bucket.pieces]) or ""
            number = self.calls[tuple(process_set.ranks)]
            try:
                with memory_errors(call.collective):
                    training.run(call, number, transport, Host(), config, group, verify)
            except BaseException as error:
                if on_ring:  # else its other ranks would wait for the time-out
                    del self._rings[tuple(process_set.ranks)]
                    transport.abort(error)
                if isinstance(error, PeerError):  # what elastic training recovers from
                    raise hvd.HorovodInternalError(str(error)) from error
                raise
        for piece, result in zip(bucket.pieces, flat.split([piece.tensor.numel() for piece in bucket.pieces])):
            piece.tensor.copy_(result.view(piece.tensor.shape))
        return reason is None

    def _ring(self, config, process_set: ProcessSet) -> Transport:
        ranks = tuple(process_set.ranks)
        if ranks not in self._rings:
            self._rings[ranks] = open_ring(process_set, config.transport.timeout_seconds)
        return self._rings[ranks]


_State.current = _State()


def reset() -> None:
    """Forget everything; called when Horovod is initialized."""
    before, _State.current = _State.current, _State()
    before.close()


def submit(
    compressor: NCZ,
    owner: NCZ | OfOneOptimizer,
    tensors: list[Tensor],
    names: list[str | None],
    op: int,
    scale: float,
    process_set,
    *,
    grouped: bool,
) -> Pending | None:
    """Put tensors among the pending; None if Horovod's own all-reduce must take them, which is then counted.

    Args:
        names: see `Pending`.
    """
    for tensor, name in zip(tensors, names):
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"{name or 'allreduce'}: tensor on {tensor.device}: this version compresses CPU tensors only; "
                "use another compression for it"
            )
    reason = None
    if op not in (hvd.Average, hvd.Sum):
        reason = Bypass.OP
    elif any(tensor.dtype not in DTYPES for tensor in tensors):
        reason = Bypass.DTYPE
    elif scale <= 0:
        reason = Bypass.OP
    if reason is not None:
        for tensor in tensors:
            compressor.stats.record(bypassed("all_reduce", tensor, reason, process_set.size()))
        return None
    return _State.current.submit(Pending(compressor, owner, tensors, names, op, scale, process_set, grouped))


def _differences(compressor: NCZ, process_set) -> str:
    """How the versions and settings of a process set's ranks differ. All of them must call this."""
    text = json.dumps(described(compressor.config)).encode()
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    name = f"ncz.{process_set.process_set_id}.settings"
    sizes = hvd.allgather(torch.tensor([len(text)]), name=f"{name}.sizes", process_set=process_set)
    texts = hvd.allgather(mine, name=name, process_set=process_set).split(sizes.tolist())
    return differences([json.loads(text.numpy().tobytes()) for text in texts])


def _require_names(compressor: NCZ, owner: NCZ | OfOneOptimizer) -> None:
    """Raise UnsupportedError if policies go by names that an optimizer was not told."""
    for at, policy in enumerate(compressor.config.policies):
        if policy.name is not None and not owner.knows_names:
            raise UnsupportedError(
                f"policies[{at}].name: {policy.name!r}: this optimizer does not know the names of its parameters; "
                "make it with hvd.DistributedOptimizer(..., named_parameters=model.named_parameters())"
            )


def _feedback(training: Training, bucket: Bucket) -> Feedback:
    """What error feedback needs to know of a bucket. Raises UnsupportedError without a name for each tensor."""
    parts = [piece.kept_as for piece in bucket.pieces]
    names = Counter(part.name for part in parts)
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
    return Feedback(training.residuals, parts)
