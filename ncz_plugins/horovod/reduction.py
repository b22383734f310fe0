"""Tagged tensors are collected, put into buckets in the same order on every rank, and reduced.

Ranks may produce gradients in different orders, and which ones they produce may differ until the optimizer
synchronizes; by then all have submitted the same names. So everything starts there.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections import Counter

import horovod.torch as hvd
import torch
from torch import Tensor

from ..core import direct, ring
from ..core.collective import Call, bypassed, layout_of_sum, run
from ..core.device import Host
from ..core.errors import MismatchError, PeerError, UnsupportedError
from ..core.frame import Window
from ..core.handshake import Comparison
from ..core.quantize import Bypass, bypass_by_size
from ..core.transport import Transport
from ..kernels.format import DTYPES
from .compressor import NCZ
from .transport import HorovodTransport, open_ring

BUCKET_BYTES = 64 << 20  # what is reduced at once; enough to make latency negligible, little enough to fit in memory

UNNAMED = "ncz.noname."  # and a number, which may differ between ranks


class Pending:
    """The handle of tensors that wait for their reduction, in place."""

    def __init__(
        self, compressor: NCZ, owner, tensors: list[Tensor], grouped, name: str, op, scale: float, process_set
    ):
        self.compressor = compressor
        self.owner = owner
        self.tensors = tensors
        self.name = name
        self.op = op
        self.scale = scale
        self.process_set = process_set
        self.done = False
        self._grouped = grouped

    def __call__(self) -> Tensor | list[Tensor]:
        """Reduce everything that its owner has pending, this one included, and return the result(s)."""
        if not self.done:
            _State.current.reduce_all(self.compressor, self.owner)
        if not self.done:  # it was dropped: an earlier reduction failed, or Horovod was initialized again
            raise hvd.HorovodInternalError(f"the reduction of {self.name} was given up; nothing was reduced")
        return list(self.tensors) if self._grouped else self.tensors[0]

    @property
    def order(self) -> tuple:
        """Sorts alike on all ranks; what differs in anything but the name can't share a bucket."""
        return (*self.kind, self.name)

    @property
    def kind(self) -> tuple:
        return (self.process_set.process_set_id, self.op, self.scale, str(self.tensors[0].dtype))


class _State:
    """What lives from one `hvd.init` to the next; an elastic reset begins with a clean one.

    Handles that their owner dropped, as the optimizer does when it is restored, are not waited for any more.
    """

    current: _State

    def __init__(self):
        # Per process set: its ranks, as Horovod gives the number of a removed set to a new one with other ranks.
        self.calls: Counter[tuple[int, ...]] = Counter()
        self._rings: dict[tuple[int, ...], Transport] = {}
        self._pending: list[weakref.ref[Pending]] = []

    def submit(self, pending: Pending) -> Pending:
        self._pending.append(weakref.ref(pending))
        return pending

    def reduce_all(self, compressor: NCZ, owner) -> None:
        """Reduce all that is pending for one owner."""
        alive = [pending for reference in self._pending if (pending := reference()) is not None]
        mine = sorted((p for p in alive if p.owner is owner), key=lambda p: p.order)
        self._pending = [weakref.ref(p) for p in alive if p.owner is not owner]
        # What is counted must be counted per process set, as others in it may not be in all of ours.
        for _, of_one_process_set in itertools.groupby(mine, key=lambda p: p.process_set.process_set_id):
            pendings = list(of_one_process_set)
            self._compare_ranks(compressor, pendings)
            for index, bucket in enumerate(_buckets(pendings)):
                self._reduce(compressor, bucket, index)
                for pending in bucket:
                    pending.done = True
        compressor.end_step()

    def _compare_ranks(self, compressor: NCZ, pendings: list[Pending]) -> None:
        """Raise MismatchError on every rank of a process set if not all are about to do the same.

        Else some could wait for ever: for what the others send uncompressed, say, as their configuration is another.
        """
        process_set = pendings[0].process_set
        tensors = [
            ("" if p.name.startswith(UNNAMED) else p.name, *p.kind, [t.numel() for t in p.tensors]) for p in pendings
        ]
        described = {
            "configuration": zlib.crc32(compressor.config.canonical().encode()),
            "number of reductions so far": self.calls[tuple(process_set.ranks)],
            "number of tensors to reduce": len(pendings),
            "names, sizes, dtypes or scale factors of the tensors to reduce": zlib.crc32(repr(tensors).encode()),
        }
        comparison = Comparison(described)
        name = f"ncz.{process_set.process_set_id}.compare"
        hvd.synchronize(hvd.allreduce_async_(comparison.tensor, op=hvd.Max, name=name, process_set=process_set))
        if differing := comparison.differing():
            raise MismatchError(
                f"ranks {', '.join(map(str, process_set.ranks))} differ in: {'; '.join(differing)}. All must have the "
                f"same configuration and make the same calls. On rank {hvd.rank()}: {compressor.config.canonical()}; "
                f"{len(pendings)} to reduce, the first is {pendings[0].name}"
            )

    def _reduce(self, compressor: NCZ, bucket: list[Pending], index: int) -> None:
        first, tensors = bucket[0], [tensor for pending in bucket for tensor in pending.tensors]
        process_set, world_size = first.process_set, first.process_set.size()
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.calls[tuple(process_set.ranks)] += 1
        number = self.calls[tuple(process_set.ranks)]
        name = f"ncz.{process_set.process_set_id}.{index}"  # the same in every step, as Horovod caches by name

        def plain():
            # Horovod can't add bfloat16; float32 holds it exactly.
            wide = flat.float() if flat.dtype == torch.bfloat16 else flat
            handle = hvd.allreduce_async_(
                wide, name=f"{name}.plain", op=first.op, prescale_factor=first.scale, process_set=process_set
            )
            flat.copy_(hvd.synchronize(handle))

        reason = _bypass(flat, world_size, compressor)
        if reason is not None:
            plain()
            compressor.stats.record(bypassed("all_reduce", flat, reason, world_size))
        else:
            on_ring = compressor.config.transport.schedule == "ring"
            call = Call(
                "all_reduce",
                layout_of_sum(flat, world_size, compressor.config),
                source=Window(flat),
                output=Window(flat),
                measured=range(world_size),
                schedule=ring.all_reduce if on_ring else direct.all_reduce,
                plain=plain,
                addends=world_size,
                divisor=(world_size if first.op == hvd.Average else 1) / first.scale,
            )
            transport = self._ring(compressor, process_set) if on_ring else HorovodTransport(process_set, name)
            try:
                compressor.stats.record(run(call, number, transport, Host(), compressor.config))
            except PeerError as error:  # what elastic training recovers from
                raise hvd.HorovodInternalError(str(error)) from error
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view(tensor.shape))

    def _ring(self, compressor: NCZ, process_set) -> Transport:
        ranks = tuple(process_set.ranks)
        if ranks not in self._rings:
            self._rings[ranks] = open_ring(process_set, compressor.config.transport.timeout_seconds)
        return self._rings[ranks]


_State.current = _State()


def reset() -> None:
    """Forget everything; called when Horovod is initialized."""
    _State.current = _State()


def submit(compressor: NCZ, owner, tensors, grouped: bool, name: str, op, scale: float, process_set) -> Pending | None:
    """Put tensors among the pending; None if Horovod's own all-reduce must take them, which is then counted."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"{name}: tensor on {tensor.device}: this version compresses CPU tensors only; "
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
    return _State.current.submit(Pending(compressor, owner, list(tensors), grouped, name, op, scale, process_set))


def _bypass(flat: Tensor, world_size: int, compressor: NCZ) -> Bypass | None:
    if world_size == 1:
        return Bypass.ONE_RANK
    return bypass_by_size(flat.nbytes, compressor.config)


def _buckets(pendings: list[Pending]) -> list[list[Pending]]:
    """Neighbours of the same kind, up to BUCKET_BYTES each."""
    buckets: list[list[Pending]] = []
    size = 0
    for pending in pendings:
        nbytes = sum(tensor.nbytes for tensor in pending.tensors)
        if not buckets or buckets[-1][0].kind != pending.kind or size + nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(pending)
        size += nbytes
    return buckets
