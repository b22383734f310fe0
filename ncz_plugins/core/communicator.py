"""Compressed collectives with torch.distributed's signatures: the one way into the core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.format import DTYPES
from .codec.layout import Layout, Window
from .codec.quantize import Bypass, bypass_by_size
from .collective import Call, bypassed, frame_elements, layout_of_sum
from .config import Config
from .errors import MismatchError, NczError, UnsupportedError, memory_errors
from .regroup import Regrouped, regrouped
from .runtime.device import Device, Gpu, Host, has_spare_core, record_event, require_kernels
from .runtime.handle import Handle
from .runtime.statistics import Counters, Statistics
from .runtime.worker import Worker
from .schedules import direct, ring
from .schedules.hierarchy import in_nodes
from .training.error_feedback import Feedback
from .training.policy import ParameterSlice, named
from .training.state import Group, Training
from .transport.base import PlainCollectives, Transport, Work, peer_errors
from .transport.gloo import Connections, GlooTransport, timeout_of
from .transport.handshake import compare_ranks, meet
from .transport.intra_node import with_memory
from .transport.link_speed import gloo_link_gbps
from .transport.nccl import NcclTransport, open_nccl, require_healthy
from .transport.plain import TorchCollectives
from .transport.topology import Nodes, find_nodes
from .tuning import choices as tuning
from .tuning import measure as probe

_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_CLOSE_SECONDS = 5.0
_LET_GO_AFTER = 3  # time-outs: a call that fails, and one before it, have told by then


class _Way(NamedTuple):
    """How tensors on one device are served."""

    device: Device
    transport: Transport


class Communicator:
    """Compressed collectives over one process group.

    Args:
        config: a Config or anything that `Config.load` takes; None is that of `training`, else the defaults.
        group: the process group whose ranks take part; None is the default group.
        training: what lasts from step to step, which communicators may share: where to count, error feedback,
            policies. None makes one of its own.

    Constructing one is itself a collective: every rank of the group must do it, in the same order
    relative to its other collectives. It opens a process group of its own over the same ranks, so
    that nothing else gets between its messages, and refuses (MismatchError) ranks that differ in
    version or configuration.

    The collectives work in place like torch.distributed's, on contiguous tensors of any shape.
    With `async_op=True` they return a handle with `wait()`; calls run one after another on a
    background thread, in the order they were made. Results are bit-identical on all ranks. For
    float32 and float64 the error of an element is at most `eb` times the ranks summed (SUM), or
    `eb` (AVG, gathers, broadcasts), where `eb` is what the configured bound comes to in that
    element's block; for sums in float16 and bfloat16 the rounding of the result is added. With kind
    lossless the result is a plain sum of floats.

    Where `transport.hierarchy` asks for it and ranks share nodes, they add up uncompressed first, and
    what goes between nodes is compressed. The bound is the same, but for the rounding of those sums.

    Calls that compression can't serve or help run plain and are counted by reason in `stats` (see
    `quantize.Bypass`). `role` says what a tensor is ("gradient", "parameter", "activation"): roles
    that the configuration does not enable go plain; None means that compression is wanted. `name` is
    what the configuration's policies and error feedback know the tensor by; where it is made of
    several parameters, `parts` says of which. `end_step` tells that a step of the training is over.

    Waiting may raise PeerError (a peer died or fell silent), MismatchError (ranks made different
    calls) or FrameError (damaged data). After any of them the communicator is broken: it closes
    its connections, so that peers notice too, and further calls raise at once.

    Attributes:
        config: the settings in force, in which no size is `auto` where there are several ranks.
        training: what lasts from step to step, and is saved with a checkpoint.
        nodes: which ranks share a node; None where every rank stands for itself.
    """

    def __init__(self, config=None, group: dist.ProcessGroup | None = None, training: Training | None = None):
        self.group = dist.group.WORLD if group is None else group
        self.ranks = dist.get_process_group_ranks(self.group)
        self.rank = dist.get_rank(self.group)
        self.world_size = len(self.ranks)
        self.nodes: Nodes | None = None
        self._broken: NczError | None = None
        self._ways: dict[torch.device, _Way] = {}
        if self.world_size == 1:
            self.config = self._prepared(config, training)
        else:
            self._store = meet(self.ranks, "communicator")
            self.config = self._compared(config, training)
            self.nodes = find_nodes(self.config.transport.hierarchy, self._store, self.rank, self.world_size)
            seconds = self.config.transport.timeout_seconds
            self._timeout = timeout_of(self.group) if seconds is None else timedelta(seconds=seconds)
            self._control = Connections(self._store, self.rank, self.world_size, self._timeout)
            self._ways[torch.device("cpu")] = _Way(Host(has_spare_core()), GlooTransport(self._control))
            if self.nodes is not None:
                self.nodes = with_memory(self.nodes, self.transport)
            self._worker = Worker(f"ncz-communicator-{self.rank}")
            if tuning.is_open(self.config):
                self.config = probe.settle(self)

    # ---------------------------------------------------------------- collectives

    def all_reduce(
        self,
        tensor: Tensor,
        op=dist.ReduceOp.SUM,
        async_op: bool = False,
        *,
        role: str | None = None,
        name: str | None = None,
        parts: Sequence[ParameterSlice] | None = None,
    ):
        """Sum `tensor` over ranks (or average, for AVG), in place on every rank.

        Parts that are treated differently are reduced in one call for each treatment, from and to memory of their own.

        Returns: a handle if `async_op`, else None.
        """
        parts = _parts("all_reduce", tensor, name, parts)
        alike = self.training.grouped(parts, tensor.dtype, role, self.ranks)
        if len(alike) < 2:
            return self._all_reduce(tensor, op, async_op, role, parts)

        def reduce(tensor: Tensor, parts: list[ParameterSlice]):
            return self._all_reduce(tensor, op, True, role, parts)

        handle = regrouped(tensor, parts, [indices for _, indices in alike], reduce)
        return handle if async_op else self._finish(handle, tensor.device)

    def _all_reduce(self, tensor: Tensor, op, async_op: bool, role: str | None, parts: Sequence[ParameterSlice]):
        """As `all_reduce`, where all parts are treated alike."""
        config, bypass = self._decided(role, op, tensor, tensor, parts)
        run_plain = lambda plain: plain.all_reduce(tensor, op)  # noqa: E731
        if bypass:
            return self._plain("all_reduce", tensor, bypass, run_plain, async_op)
        flat = Window(tensor.view(-1))
        call = Call(
            "all_reduce",
            layout_of_sum(tensor, self.world_size, config),
            source=flat,
            output=flat,
            measured=range(self.world_size),
            schedule=self._schedule.all_reduce,
            plain=partial(self._plain_in_own_group, run_plain, tensor.device),
            addends=self.world_size,
            divisor=self._divisor(op),
            feedback=self._feedback(config, parts),
            plain_sum=self._plain_sum,
        )
        return self._start(call, config, async_op, self._verification(parts))

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op=dist.ReduceOp.SUM,
        async_op: bool = False,
        *,
        role: str | None = None,
        name: str | None = None,
        parts: Sequence[ParameterSlice] | None = None,
    ):
        """Sum `input` over ranks (or average, for AVG) and leave the rank's own of world_size equal parts in `output`.

        `parts` are those of `input`. Raises UnsupportedError if they are not all treated alike.

        Returns: a handle if `async_op`, else None.
        """
        self._check_parts("reduce_scatter_tensor", whole=input, part=output)
        parts = _parts("reduce_scatter_tensor", input, name, parts)
        config, bypass = self._decided(role, op, input, output, parts)
        run_plain = lambda plain: plain.reduce_scatter_tensor(output, input, op)  # noqa: E731
        if bypass:
            return self._plain("reduce_scatter_tensor", input, bypass, run_plain, async_op)
        layout = self._equal_parts(output, config)
        call = Call(
            "reduce_scatter_tensor",
            layout,
            source=Window(input.view(-1)),
            output=Window(output.view(-1), layout.segment(self.rank).start),
            measured=range(self.world_size),
            schedule=self._schedule.reduce_scatter,
            plain=partial(self._plain_in_own_group, run_plain, input.device),
            addends=self.world_size,
            divisor=self._divisor(op),
            feedback=self._feedback(config, parts),
            plain_sum=self._plain_sum,
        )
        return self._start(call, config, async_op, self._verification(parts))

    def all_gather_into_tensor(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        role: str | None = None,
        name: str | None = None,
    ):
        """Put the `input` of every rank into `output`, in rank order.

        A rank's own part comes out with the same loss as on its peers, so that all ranks agree.

        Returns: a handle if `async_op`, else None.
        """
        self._check_parts("all_gather_into_tensor", whole=output, part=input)
        parts = _parts("all_gather_into_tensor", output, name, None)
        config, bypass = self._decided(role, None, output, input, parts)
        run_plain = lambda plain: plain.all_gather_into_tensor(output, input)  # noqa: E731
        if bypass:
            return self._plain("all_gather_into_tensor", input, bypass, run_plain, async_op)
        layout = self._equal_parts(input, config)
        call = Call(
            "all_gather_into_tensor",
            layout,
            source=Window(input.view(-1), layout.segment(self.rank).start),
            output=Window(output.view(-1)),
            measured=range(self.rank, self.rank + 1),
            schedule=self._schedule.all_gather,
            plain=partial(self._plain_in_own_group, run_plain, input.device),
        )
        return self._start(call, config, async_op)

    def broadcast(
        self, tensor: Tensor, src: int, async_op: bool = False, *, role: str | None = None, name: str | None = None
    ):
        """Replace `tensor` on every rank by what the global rank `src` holds.

        It changes on `src` as well, by the same loss as on its peers, so that all ranks agree.

        Returns: a handle if `async_op`, else None.
        """
        if src not in self.ranks:
            raise UnsupportedError(f"broadcast: src={src} is not a rank of this group; they are {self.ranks}")
        root = self.ranks.index(src)
        parts = _parts("broadcast", tensor, name, None)
        config, bypass = self._decided(role, None, tensor, tensor, parts)
        run_plain = lambda plain: plain.broadcast(tensor, root)  # noqa: E731
        if bypass:
            return self._plain("broadcast", tensor, bypass, run_plain, async_op)
        flat = Window(tensor.view(-1))
        call = Call(
            "broadcast",
            Layout.of([tensor.numel()], frame_elements(tensor, config)),
            source=flat,
            output=flat,
            measured=range(1 if self.rank == root else 0),
            schedule=partial(self._schedule.broadcast, root=root),
            plain=partial(self._plain_in_own_group, run_plain, tensor.device),
            root=root,
        )
        return self._start(call, config, async_op)

    def end_step(self) -> Counters:
        """A step of the training is over: see `Training.end_step`. All handles must have been waited for."""
        return self.training.end_step()

    @property
    def stats(self) -> Statistics:
        """What was counted."""
        return self.training.stats

    @property
    def transport(self) -> Transport:
        """What carries frames and agreements between all ranks, for tensors in host memory."""
        return self._ways[torch.device("cpu")].transport

    # ---------------------------------------------------------------- life cycle

    def close(self) -> None:
        """Finish what was asked for and free the connections. Safe to call twice."""
        if self.world_size == 1:
            return
        if self._broken is None:
            with suppress(UnsupportedError):  # in a fork, which has no part in them
                self._worker.submit(self._close_transports)
        if self._worker.close(_CLOSE_SECONDS) and self._broken is None:
            self._broken = NczError("this communicator was closed")
            # Dropped and not aborted: what is still on its way to a peer arrives.
            self._ways.clear()
            self._control.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # ---------------------------------------------------------------- deciding

    def _prepared(self, source, training: Training | None) -> Config:
        """The configuration with what its tuning file says. From here on there is a training, with its files open."""
        config = training.config if source is None and training is not None else Config.load(source)
        self.training = Training(config) if training is None else training
        if self.world_size > 1:
            config = tuning.settle(config, self.world_size)
        link_gbps = config.transport.link_gbps or gloo_link_gbps()
        self.training.begin(ranks=self.world_size, backend=dist.get_backend(self.group), link_gbps=link_gbps)
        return config

    def _compared(self, source, training: Training | None) -> Config:
        """The same, once it is sure that all ranks have it in common. An error of one rank ends all of them."""
        try:
            config = self._prepared(source, training)
        except NczError as error:
            with suppress(MismatchError):  # only so that the other ranks know
                compare_ranks(self._store, self.rank, self.world_size, error)
            raise
        compare_ranks(self._store, self.rank, self.world_size, config)
        return config

    @property
    def _schedule(self):
        name = self.config.transport.schedule
        if name == "auto":
            name = tuning.schedule_for(self.nodes.count if self.nodes else self.world_size)
        return {"ring": ring, "direct": direct}[name]

    def _divisor(self, op) -> int:
        return self.world_size if op == dist.ReduceOp.AVG else 1

    def _equal_parts(self, part: Tensor, config: Config) -> Layout:
        return Layout.of([part.numel()] * self.world_size, frame_elements(part, config))

    def _decided(
        self, role: str | None, op, whole: Tensor, part: Tensor, parts: Sequence[ParameterSlice]
    ) -> tuple[Config, Bypass | None]:
        """The settings of a call whose parts are treated alike, and the reason to go plain, if there is one.

        All of it every rank sees without asking the others. Raises on what can't be served.
        """
        if self._broken is not None:
            raise self._broken
        for tensor in (whole, part):
            require_kernels(tensor.device, self.config)
            if not tensor.is_contiguous():
                raise UnsupportedError(f"tensor with strides {tensor.stride()}: pass tensor.contiguous()")
        if self.world_size == 1:
            return self.config, Bypass.ONE_RANK
        self._worker.require_own_process()
        if role is not None and role not in self.config.roles:
            return self.config, Bypass.ROLE
        if op is not None and op not in _OPS:
            return self.config, Bypass.OP
        if whole.dtype not in DTYPES or part.dtype != whole.dtype:
            return self.config, Bypass.DTYPE
        alike = self.training.grouped(parts, whole.dtype, role, self.ranks)
        if len(alike) > 1:
            raise UnsupportedError(
                f"parts of one tensor are treated differently, by {' and '.join(how.because for how, _ in alike)}: "
                "pass them in calls of their own, see Training.grouped"
            )
        treatment, _ = alike[0]
        config = treatment.settings(self.config)
        return config, treatment.bypass or bypass_by_size(whole.nbytes, config)

    def _feedback(self, config: Config, parts: Sequence[ParameterSlice]) -> Feedback | None:
        if not config.quantizer.feeds_back:
            return None
        if all(part.name is None for part in parts):
            raise UnsupportedError(
                "quantizer.error_feedback is on, and this tensor has no name to keep what it loses by: pass name=, or "
                "parts=, or set it to false"
            )
        return Feedback(self.training.residuals, parts)

    def _verification(self, parts: Sequence[ParameterSlice]) -> str | None:
        """What to call the sum that is asked for now, if it is to be verified."""
        return named(parts) or "" if self._group.picks(self.training.step) else None

    @property
    def _group(self) -> Group:
        return self.training.of_group(self.ranks)

    def _check_parts(self, collective: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self.world_size:
            raise ValueError(
                f"{collective}: {whole.numel()} elements are not {self.world_size} (ranks) times {part.numel()}"
            )

    # ---------------------------------------------------------------- running

    def _plain(
        self,
        collective: str,
        input: Tensor,
        bypass: Bypass,
        run_plain: Callable[[PlainCollectives], Work],
        async_op: bool,
    ):
        work = run_plain(TorchCollectives(lambda: self.group))
        self.stats.record(bypassed(collective, input, bypass, self.world_size))  # while the data travel
        return work if async_op else work.wait() and None

    def _plain_in_own_group(self, run_plain: Callable[[PlainCollectives], Work], device: torch.device) -> None:
        with peer_errors("the plain collective"):
            run_plain(self._ways[device].transport.plain).wait()

    def _start(self, call: Call, config: Config, async_op: bool, verify: str | None = None) -> Handle | None:
        """Begin a call.

        Args:
            verify: what a sum is called that is to be verified; None for others.
        """
        group = self._group
        group.calls += 1
        if self.nodes is not None:
            call = in_nodes(call, self.nodes, config.quantizer.block_in_effect)
        asked = record_event(call.source.data.device)
        handle = self._worker.submit(partial(self._guarded, call, group.calls, config, asked, verify))
        if verify is not None or self._holds_up_streams(call.source.data.device):
            group.await_at_end_of_step(handle)
        return handle if async_op else self._finish(handle, call.source.data.device)

    def _finish(self, handle: Handle | Regrouped, device: torch.device) -> None:
        """What a call that is not asynchronous does at last."""
        if self._holds_up_streams(device):
            handle.block_current_stream(_LET_GO_AFTER * self._timeout.total_seconds())
        else:
            handle.wait()

    def _holds_up_streams(self, device: torch.device) -> bool:
        """Whether calls that are not asynchronous hold up the current stream and not the host."""
        return device.type == "cuda" and self.config.transport.wait == "stream"

    def _guarded(
        self, call: Call, number: int, config: Config, asked: torch.cuda.Event | None, verify: str | None
    ) -> None:
        """Run on the worker thread. A failure ends the communicator: its ranks no longer agree on what comes next."""
        if self._broken is not None:
            raise self._broken
        try:
            device, transport = self._way(call.source.data.device)
            group = self._group
            with device.after(asked), memory_errors(call.collective):
                self.training.run(call, number, transport, device, config, group, verify, group.patience)
        except BaseException as error:
            self._break(call, error)
            raise

    def _close_transports(self) -> None:
        """On the worker thread, as the last thing."""
        for way in self._ways.values():
            way.transport.close()

    def _plain_sum(self, tensor: Tensor) -> None:
        self._plain_in_own_group(lambda plain: plain.all_reduce(tensor), tensor.device)
        self._ways[tensor.device].device.synchronize()

    def _way(self, device: torch.device) -> _Way:
        """How tensors on `device` are served. The first one on a GPU connects the GPUs of all ranks."""
        if device not in self._ways:
            store = dist.PrefixStore(f"nccl {len(self._ways)}", self._store)
            group = open_nccl(store, self.rank, self.world_size, device, self._timeout)
            gpu = Gpu(device, self._timeout, partial(require_healthy, group))
            self._ways[device] = _Way(gpu, NcclTransport(self._control, group, device))
        return self._ways[device]

    def _break(self, call: Call, error: BaseException) -> None:
        """Refuse further calls and close the connections, so that peers that wait for us notice."""
        if self._broken is None:
            self._broken = error if isinstance(error, NczError) else NczError(f"{call.collective} failed: {error!r}")
            ways = list(self._ways.values())
            self._ways.clear()
            for way in ways:
                way.transport.abort(error)


def _parts(
    collective: str, tensor: Tensor, name: str | None, parts: Sequence[ParameterSlice] | None
) -> Sequence[ParameterSlice]:
    """What a tensor consists of: one part, called `name`, unless told."""
    if parts is None:
        return [ParameterSlice(name, tensor.numel())]
    if name is not None:
        raise ValueError(f"{collective}: name={name!r} and parts: pass one of both")
    if (elements := sum(part.length for part in parts)) != tensor.numel():
        raise ValueError(f"{collective}: parts of {elements} elements are not the {tensor.numel()} of the tensor")
    return parts
