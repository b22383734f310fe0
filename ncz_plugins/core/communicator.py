"""Compressed collectives with torch.distributed's signatures: the one way into the core."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .. import kernels
from ..kernels.format import DTYPES
from . import direct, plain, ring
from .codec import TensorCodec
from .config import Config
from .errors import MismatchError, NczError, UnsupportedError
from .frame import Layout, Window
from .handshake import compare_ranks, meet
from .quantize import Bypass, Scales, derive, measure
from .stats import Counters, Statistics
from .transport import Transport, open_group, peer_errors
from .worker import Handle, Worker

_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_DIRECT_RANKS = range(3, 9)  # 2 ranks send the same either way; with many, all-to-all opens too many paths
_CLOSE_SECONDS = 5.0


class Communicator:
    """Compressed collectives over one process group.

    Args:
        config: a Config or anything that `Config.load` takes.
        group: the process group whose ranks take part; None is the default group.
        stats: where to count; communicators may share one. None makes one of its own.

    Constructing one is itself a collective: every rank of the group must do it, in the same order
    relative to its other collectives. It opens a process group of its own over the same ranks, so
    that nothing else gets between its messages, and refuses (MismatchError) ranks that differ in
    version or configuration.

    The collectives work in place like torch.distributed's, on contiguous tensors of any shape.
    With `async_op=True` they return a handle with `wait()`; calls run one after another on a
    background thread, in the order they were made. Results are bit-identical on all ranks. For
    float32 and float64 the error of an element is at most `eb` times the ranks summed (SUM), or
    `eb` (AVG, gathers, broadcasts), where `eb` is what the configured bound comes to in that
    element's block; for float16 and bfloat16 the rounding of the result to that dtype is added.

    Calls that compression can't serve or help run plain and are counted by reason in `stats` (see
    `quantize.Bypass`). `role` says what a tensor is ("gradient", "parameter", "activation"): roles
    that the configuration does not enable go plain; None means that compression is wanted.

    Waiting may raise PeerError (a peer died or fell silent), MismatchError (ranks made different
    calls) or FrameError (damaged data). After any of them the communicator is broken: it closes
    its connections, so that peers notice too, and further calls raise at once.
    """

    def __init__(self, config=None, group: dist.ProcessGroup | None = None, stats: Statistics | None = None):
        self.config = Config.load(config)
        self.stats = Statistics(self.config.statistics.history) if stats is None else stats
        self.group = dist.group.WORLD if group is None else group
        self.ranks = dist.get_process_group_ranks(self.group)
        self.rank = dist.get_rank(self.group)
        self.world_size = len(self.ranks)
        self._backend = kernels.cpu_backend()
        self._broken: NczError | None = None
        self._calls = 0
        if self.world_size > 1:
            store = meet(self.ranks, "communicator")
            compare_ranks(store, self.rank, self.world_size, self.config)
            self._own_group = open_group(self.group, store, self.config.transport.timeout_seconds)
            self._transport = Transport(self._own_group)
            self._worker = Worker(f"ncz-communicator-{self.rank}")

    # ---------------------------------------------------------------- collectives

    def all_reduce(self, tensor: Tensor, op=dist.ReduceOp.SUM, async_op: bool = False, *, role: str | None = None):
        """Sum `tensor` over ranks (or average, for AVG), in place on every rank.

        Returns: a handle if `async_op`, else None.
        """
        run_plain = partial(plain.all_reduce, tensor, op)
        bypass = self._bypass(role, op, tensor, tensor)
        if bypass:
            return self._plain("all_reduce", tensor, bypass, run_plain, async_op)
        block = 0 if self.config.quantizer.mode == "abs" else self.config.quantizer.block
        layout = Layout.split(tensor.numel(), self.world_size, self._frame_elements(tensor), block)
        flat = Window(tensor.view(-1))
        return self._start(
            _Call(
                "all_reduce", layout, flat, flat, range(self.world_size), self._schedule.all_reduce, run_plain, op=op
            ),
            async_op,
        )

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op=dist.ReduceOp.SUM, async_op: bool = False, *, role: str | None = None
    ):
        """Sum `input` over ranks (or average, for AVG) and leave the rank's own of world_size equal parts in `output`.

        Returns: a handle if `async_op`, else None.
        """
        self._check_parts("reduce_scatter_tensor", whole=input, part=output)
        run_plain = partial(plain.reduce_scatter_tensor, output, input, op)
        bypass = self._bypass(role, op, input, output)
        if bypass:
            return self._plain("reduce_scatter_tensor", input, bypass, run_plain, async_op)
        layout = Layout.of([output.numel()] * self.world_size, self._frame_elements(input))
        source = Window(input.view(-1))
        own = Window(output.view(-1), layout.segment(self.rank).start)
        schedule = self._schedule.reduce_scatter
        return self._start(
            _Call("reduce_scatter_tensor", layout, source, own, range(self.world_size), schedule, run_plain, op=op),
            async_op,
        )

    def all_gather_into_tensor(self, output: Tensor, input: Tensor, async_op: bool = False, *, role: str | None = None):
        """Put the `input` of every rank into `output`, in rank order.

        A rank's own part comes out with the same loss as on its peers, so that all ranks agree.

        Returns: a handle if `async_op`, else None.
        """
        self._check_parts("all_gather_into_tensor", whole=output, part=input)
        run_plain = partial(plain.all_gather_into_tensor, output, input)
        bypass = self._bypass(role, None, output, input)
        if bypass:
            return self._plain("all_gather_into_tensor", input, bypass, run_plain, async_op)
        layout = Layout.of([input.numel()] * self.world_size, self._frame_elements(input))
        own = Window(input.view(-1), layout.segment(self.rank).start)
        result = Window(output.view(-1))
        measured = range(self.rank, self.rank + 1)
        return self._start(
            _Call("all_gather_into_tensor", layout, own, result, measured, self._schedule.all_gather, run_plain),
            async_op,
        )

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False, *, role: str | None = None):
        """Replace `tensor` on every rank by what the global rank `src` holds.

        It changes on `src` as well, by the same loss as on its peers, so that all ranks agree.

        Returns: a handle if `async_op`, else None.
        """
        if src not in self.ranks:
            raise UnsupportedError(f"broadcast: src={src} is not a rank of this group; they are {self.ranks}")
        root = self.ranks.index(src)
        run_plain = partial(plain.broadcast, tensor, root)
        bypass = self._bypass(role, None, tensor, tensor)
        if bypass:
            return self._plain("broadcast", tensor, bypass, run_plain, async_op)
        layout = Layout.of([tensor.numel()], self._frame_elements(tensor))
        flat = Window(tensor.view(-1))
        measured = range(1 if self.rank == root else 0)
        schedule = partial(self._schedule.broadcast, root=root)
        return self._start(_Call("broadcast", layout, flat, flat, measured, schedule, run_plain, root=root), async_op)

    # ---------------------------------------------------------------- life cycle

    def close(self) -> None:
        """Finish what was asked for and free the connections. Safe to call twice."""
        if self.world_size > 1 and self._worker.close(_CLOSE_SECONDS) and self._broken is None:
            self._broken = NczError("this communicator was closed")
            # Dropped and not aborted: what is still on its way to a peer arrives.
            del self._transport, self._own_group

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # ---------------------------------------------------------------- deciding

    @property
    def _schedule(self):
        name = self.config.transport.schedule
        if name == "auto":
            name = "direct" if self.world_size in _DIRECT_RANKS else "ring"
        return {"ring": ring, "direct": direct}[name]

    def _frame_elements(self, tensor: Tensor) -> int:
        return self.config.transport.frame_bytes // tensor.element_size()

    def _bypass(self, role: str | None, op, whole: Tensor, part: Tensor) -> Bypass | None:
        """A reason to go plain that every rank sees without asking the others; raises on what can't be served."""
        if self._broken is not None:
            raise self._broken
        for tensor in (whole, part):
            if tensor.device.type != "cpu":
                raise UnsupportedError(
                    f"tensor on {tensor.device}: this version compresses CPU tensors only; "
                    "use torch.distributed for this tensor"
                )
            if not tensor.is_contiguous():
                raise UnsupportedError(f"tensor with strides {tensor.stride()}: pass tensor.contiguous()")
        if self.world_size == 1:
            return Bypass.ONE_RANK
        if role is not None and role not in self.config.roles:
            return Bypass.ROLE
        if op is not None and op not in _OPS:
            return Bypass.OP
        if whole.dtype not in DTYPES or part.dtype != whole.dtype:
            return Bypass.DTYPE
        if whole.nbytes < max(self.config.transport.min_bytes, 1):
            return Bypass.TOO_SMALL
        return None

    def _check_parts(self, collective: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self.world_size:
            raise ValueError(
                f"{collective}: {whole.numel()} elements are not {self.world_size} (ranks) times {part.numel()}"
            )

    # ---------------------------------------------------------------- running

    def _plain(self, collective: str, input: Tensor, bypass: Bypass, run_plain: Callable, async_op: bool):
        self.stats.record(_plain_counters(collective, input, bypass, self.world_size))
        work = run_plain(self.group)
        return work if async_op else work.wait() and None

    def _start(self, call: _Call, async_op: bool) -> Handle | None:
        self._calls += 1
        handle = self._worker.submit(partial(self._guarded, call, self._calls))
        if async_op:
            return handle
        handle.wait()
        return None

    def _guarded(self, call: _Call, number: int) -> None:
        """Run on the worker thread. A failure ends the communicator: its ranks no longer agree on what comes next."""
        if self._broken is not None:
            raise self._broken
        try:
            self.stats.record(self._run(call, number))
        except BaseException as error:
            self._break(error if isinstance(error, NczError) else NczError(f"{call.collective} failed: {error!r}"))
            raise

    def _run(self, call: _Call, number: int) -> Counters:
        input, n = call.source.data, self.world_size
        plain_bytes = plain.sent_bytes(call.collective, input.nbytes, n)
        counters = Counters(calls=1, bytes_in=input.nbytes, plain_bytes=plain_bytes)
        started = time.perf_counter()
        scales = self._agree(call, number, counters)
        counters.agree_seconds = time.perf_counter() - started
        if isinstance(scales, Bypass):
            with peer_errors("the plain collective", counters):
                call.plain(self._own_group).wait()
            counters.wire_bytes += plain_bytes
            counters.bypasses[scales.value] = 1
        else:
            counters.compressed_calls = 1
            entropy = self.config.entropy
            codec = TensorCodec(self._backend, call.layout, scales, entropy, call.source, call.output, counters)
            call.schedule(self._transport, codec, counters)
        counters.seconds = time.perf_counter() - started
        return counters

    def _agree(self, call: _Call, number: int, counters: Counters) -> Scales | Bypass:
        quantizer, dtype = self.config.quantizer, call.source.data.dtype
        # Whether all ranks make the same call is asked first: the vector after it has a length that
        # depends on the call. The answer travels while the tensor is being measured.
        described = call.described(number)
        both = torch.tensor([*described.values(), *(-v for v in described.values())])
        same_call = self._transport.start_max(both, counters)
        agreed = measure(self._backend, call.source, call.layout, call.measured, quantizer)
        same_call.wait()
        highest, lowest = both[: len(described)].tolist(), (-both[len(described) :]).tolist()
        for (what, mine), low, high in zip(described.items(), lowest, highest):
            if low != high:
                raise MismatchError(
                    f"{call.collective}: ranks differ in {what}: {mine} on rank {self.rank}, from {low} to {high} "
                    "over all ranks. Every rank must make the same calls in the same order."
                )
        self._transport.start_max(agreed, counters).wait()
        addends = self.world_size if call.op is not None else 1
        divisor = self.world_size if call.op == dist.ReduceOp.AVG else 1
        return derive(agreed, call.layout, quantizer, dtype, addends, divisor)

    def _break(self, error: NczError) -> None:
        """Refuse further calls and close the connections, so that peers that wait for us notice."""
        if self._broken is None:
            self._broken = error
            self._transport.abort()
            del self._transport, self._own_group


@dataclass(frozen=True)
class _Call:
    """One collective, ready to run.

    Attributes:
        measured: segments of `source` that count in the agreement on steps.
        schedule: takes the transport, the codec and the counters.
        plain: the uncompressed collective; takes the process group and returns the work under way.
        op: the reduction, None where nothing is summed.
        root: group rank that a broadcast starts from.
    """

    collective: str
    layout: Layout
    source: Window
    output: Window
    measured: range
    schedule: Callable
    plain: Callable
    op: dist.ReduceOp | None = None
    root: int = 0

    def described(self, number: int) -> dict[str, int]:
        """What all ranks must have in common."""
        return {
            "number of the call": number,
            "collective": plain.COLLECTIVES.index(self.collective),
            "elements": self.layout.numel,
            "dtype": DTYPES.index(self.source.data.dtype),
            "reduce op": 0 if self.op is None else 1 + _OPS.index(self.op),
            "source rank": self.root,
        }


def _plain_counters(collective: str, input: Tensor, bypass: Bypass, world_size: int) -> Counters:
    sent = plain.sent_bytes(collective, input.nbytes, world_size)
    return Counters(calls=1, bytes_in=input.nbytes, plain_bytes=sent, wire_bytes=sent, bypasses={bypass.value: 1})
