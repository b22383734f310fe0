"""The way of every call, whichever door it came by: decide, prepare, compare, agree, run, count."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from ..kernels.backend import Backend
from .bypass import Bypass, before_call, by_rate, by_size
from .call import Call, PlainCall, Request, plain_wire_bytes
from .call_description import (
    checksum_of,
    connecting,
    kind_described,
    measuring,
    numbered,
    refusal,
    require_plain,
    require_same,
)
from .call_layout import adds_up_whole, frames_of, layout_of_parts, layout_of_sum
from .call_run import fixed_rate_codec, require_same_call, run
from .codec.layout import Layout, Window
from .config import Config
from .config.fields import Role
from .errors import UnsupportedError
from .runtime.device import Device, require_kernels, require_tensor
from .runtime.statistics import Counters
from .schedules import direct, fixed_rate, ring
from .schedules.choice import schedule_for
from .schedules.hierarchy import in_nodes
from .training.error_feedback import Feedback
from .training.group import GroupState
from .training.policy import ParameterSlice, named
from .training.state import Training
from .transport.base import CollectiveTransport, Transport, peer_errors
from .transport.comparison import RankComparison
from .transport.gpu_speed import measured_on_gpus, use_fastest_groups
from .transport.topology import Nodes

_MOST_KINDS = 1000  # of requests that are remembered
_ROLES = (*get_args(Role), None)
_SCHEDULES = {"ring": ring, "direct": direct, "fixed rate": fixed_rate}


class Decision(NamedTuple):
    """How a request will be served, as far as ranks know without asking each other.

    Attributes:
        config: its settings.
        bypass: why it goes plain, if it does.
    """

    config: Config
    bypass: Bypass | None


class _Kind(NamedTuple):
    """What is known of all requests of a kind, see `Request.kind`. To find out takes longer than small calls travel.

    Attributes:
        decision: what is sure before it is looked at what their parts are.
        described: what ranks compare of each of them, see `kind_described`.
    """

    decision: Decision
    described: Mapping[str, int]


class Collectives:
    """The compressed collectives of one group of ranks, on one rank.

    A call passes through `decide`; then, if nothing speaks against it, `prepare` and `run`. All ranks make the same
    calls in the same order. Adapters supply devices and transports, and run what goes plain at once.

    Args:
        training: what lasts from call to call.
        config: the settings; a resolved configuration.
        ranks: global ranks of the group; `rank` is this one's number among them.
        nodes: which of them share a node; None where every rank stands for itself.
        auto_schedule: the schedule that `transport.schedule: auto` means; None: by the number of ranks.
        communicator: its number, see `Training.free_number`.
    """

    def __init__(
        self,
        training: Training,
        config: Config,
        ranks: Sequence[int],
        rank: int,
        nodes: Nodes | None = None,
        auto_schedule: str | None = None,
        communicator: int = 0,
    ):
        self.training = training
        self.config = config
        self.ranks = ranks
        self.rank = rank
        self.world_size = len(ranks)
        self.nodes = nodes
        self._auto_schedule = auto_schedule
        self._communicator = communicator
        self._exact_calls = 0  # plain ones and those without loss, which draw no random numbers
        self._checksum = checksum_of(config)
        self._config_on_gpus, self._checksum_on_gpus = config, self._checksum
        self._kinds: dict[tuple, _Kind] = {}
        self._uncompared = 0  # a checksum of calls on GPUs that no host waits for

    @property
    def state(self) -> GroupState:
        """What the ranks have in common from call to call."""
        return self.training.of_group(self.ranks)

    @property
    def calls(self) -> int:
        """How many calls were asked for so far."""
        return self.state.calls + self._exact_calls

    def await_gpus(self, collective: str, number: int, device: Device, transport: Transport) -> None:
        """Wait until all ranks are about to connect their GPUs: NCCL would wait without a limit for one that is not.

        Raises MismatchError on every rank unless all are, before `collective`, and PeerError.

        Args:
            number: of `calls` before it.
            device, transport: those of tensors in host memory.
        """
        require_same_call(collective, connecting(number), transport, Counters(), self.ranks)

    def measure_gpus(
        self, collective: str, device: Device, transport: Transport, *, config: Config, where: torch.device
    ) -> None:
        """Measure how fast calls go on GPUs, and serve tensors there by what follows from it from now on.

        Raises MismatchError on every rank unless all do so before `collective`, and PeerError.

        Args:
            config: the settings, which leave the speed of the link open.
            where: this rank's GPU.
        """
        numbers = measuring(self.calls)
        require_same_call(collective, numbers, transport, Counters(), self.ranks)
        config = measured_on_gpus(config, device, transport, where)
        if self.nodes is None and self._schedule_of_frames() == "direct":  # in others no rank gathers frames
            use_fastest_groups(config, device, transport, where)
        self._config_on_gpus, self._checksum_on_gpus = config, checksum_of(config)
        self._kinds.clear()

    # ---------------------------------------------------------------- before a call

    def decide(self, request: Request) -> Decision:
        """The settings of a request, and the reason to go plain, if there is one. Asks no other rank.

        Raises UnsupportedError for tensors that can't be served, where a request's parts are treated differently, and
        where error feedback would not know a parameter by name.
        """
        for tensor in (request.input,) if request.output is request.input else (request.input, request.output):
            require_tensor(tensor)
            require_kernels(tensor.device)
        decision = self._kind_of(request).decision
        if decision.bypass:
            return decision
        dtype = request.input.dtype
        alike = self.training.grouped(request.parts, dtype, request.role, self.ranks)
        if len(alike) > 1:
            raise UnsupportedError(
                f"parts of one tensor are treated differently, by {' and '.join(how.because for how, _ in alike)}: "
                "pass them in calls of their own, see Training.grouped"
            )
        treatment, _ = alike[0]
        if request.baseline is not None:
            treatment = treatment.without_loss()
        config = treatment.settings(decision.config)
        bypass = treatment.bypass or by_rate(dtype, config)
        if bypass is None and _feeds_back(request, config):
            if all(part.name is None for part in _residual_parts(request)):
                raise UnsupportedError(
                    "quantizer.error_feedback is on, and this tensor has no name to keep what it loses by: pass "
                    "name=, names= or parts=, or set it to false"
                )
        return Decision(config, bypass)

    def _kind_of(self, request: Request) -> _Kind:
        """What is known of requests like this one. Raises UnsupportedError for dtypes that can't be served."""
        key = request.kind
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) == _MOST_KINDS:
                self._kinds.clear()
            kind = self._kinds[key] = _Kind(self._decide_by_kind(request), kind_described(request))
        return kind

    def _decide_by_kind(self, request: Request) -> Decision:
        if request.role not in _ROLES:
            known = ", ".join(map(repr, _ROLES[:-1]))
            raise ValueError(f"{request.collective}: role={request.role!r} is none; pass one of {known}, or None")
        dtypes, on_gpu = (request.input.dtype, request.output.dtype), request.input.is_cuda
        config = self._config_on_gpus if on_gpu else self.config
        bypass = before_call(config, self.world_size, request.role, request.op, dtypes)
        if bypass:
            require_plain(request)
        return Decision(config, bypass or by_size(request.larger.nbytes, config, on_gpu, self.world_size))

    def prepare_plain(self, request: Request, bypass: Bypass) -> PlainCall:
        """The uncompressed call that serves a request, numbered."""
        self._exact_calls += 1
        return PlainCall(request, bypass, self._described(request, bypass))

    def count_plain(self, request: Request, bypass: Bypass) -> None:
        """Count a request that goes plain. What a baseline knows of its output holds no more."""
        if request.baseline is not None:
            request.baseline.forget()
        self._count(bypassed(request, bypass, self.world_size), request.role)

    def _count(self, counters: Counters, role: str | None) -> None:
        """Count a call."""
        if role is not None:
            counters.plain_bytes_by_role = {role: counters.plain_bytes}
            counters.wire_bytes_by_role = {role: counters.wire_bytes}
        self.training.stats.record(counters)

    def note_uncompared(self, request: Request, bypass: Bypass | None, config: Config | None = None) -> None:
        """A request is served without a comparison. The next call that is compared tells whether ranks differed.

        Args:
            bypass, config: why it goes plain, or the settings with which it is compressed.
        """
        if bypass is not None:
            self._exact_calls += 1
        numbers = [self._uncompared, *self._described(request, bypass, config).values()]
        self._uncompared = zlib.crc32(repr(numbers).encode())

    def _described(self, request: Request, bypass: Bypass | None, config: Config | None = None) -> dict[str, int]:
        kind = self._kind_of(request).described
        step = self.training.compared_step
        return numbered(kind, request, self.calls, bypass, self._checksum_of(config), self._uncompared, step)

    def _checksum_of(self, config: Config | None) -> int:
        """Of the settings of a call; 0 for none. To look up that of other settings than the usual ones takes longer."""
        if config is None:
            return 0
        if config is self.config:
            return self._checksum
        return self._checksum_on_gpus if config is self._config_on_gpus else checksum_of(config)

    def prepare(self, request: Request, config: Config) -> Call:
        """The call that serves a request, numbered, with the settings that `decide` returned."""
        feedback = None
        if _feeds_back(request, config):
            feedback = Feedback(self.training.residuals, self._own_names(_residual_parts(request)))
        state = self.state
        if config.quantizer.kind == "lossless":  # so that weights sent as changes leave gradients as they are
            self._exact_calls += 1
        else:
            state.calls += 1
        call = self._call(request, config, state.calls, feedback)
        if self.nodes is None or call.baseline is not None:  # what ranks hold of it would not pass through nodes
            return call
        return in_nodes(call, self.nodes, config.quantizer.block_in_effect)

    def _own_names(self, parts: Sequence[ParameterSlice]) -> Sequence[ParameterSlice]:
        """Parts by names of this communicator: another one of the training may carry another model."""
        if self._communicator == 0:
            return parts
        prefix = f"communicator {self._communicator + 1}/"
        return [part if part.name is None else part._replace(name=prefix + part.name) for part in parts]

    def _call(self, request: Request, config: Config, number: int, feedback: Feedback | None) -> Call:
        n, rank = self.world_size, self.rank
        source, output = (Window(each.detach().view(-1)) for each in (request.input, request.output))
        schedule = _SCHEDULES[self._schedule_name(config, request)]
        call = partial(
            Call,
            request.collective,
            config,
            number=number,
            plain=request.start_plain,
            role=request.role,
            baseline=request.baseline,
            described=self._described(request, None, config),
        )
        if request.collective == "broadcast":
            layout = Layout.of([request.input.numel()], *frames_of(request.input, config))
            run = partial(schedule.broadcast, root=request.root)
            measured = range(1 if rank == request.root else 0)
            return call(layout, source, output, measured, run, root=request.root)
        if request.collective == "all_gather_into_tensor":
            layout = layout_of_parts(request.input, n, config)
            source = Window(source.data, layout.segment(rank).start)
            return call(layout, source, output, range(rank, rank + 1), schedule.all_gather)
        divisor = n if request.op == torch.distributed.ReduceOp.AVG else 1
        call = partial(
            call,
            addends=n,
            addend=rank,
            divisor=divisor if request.scale == 1 else divisor / request.scale,
            feedback=feedback,
            verify_as=(named(request.parts) or "") if self.state.picks(self.training.step) else None,
        )
        if request.collective == "all_reduce":
            whole = schedule is direct and self.nodes is None and adds_up_whole(request.input, n, config)
            segments = 1 if whole else n
            layout = layout_of_sum(request.input, segments, config)
            return call(layout, source, output, range(segments), schedule.all_reduce)
        layout = layout_of_parts(request.output, n, config)
        output = Window(output.data, layout.segment(rank).start)
        return call(layout, source, output, range(n), schedule.reduce_scatter)

    def _schedule_name(self, config: Config, request: Request) -> str:
        if config.quantizer.bits is not None:
            return "fixed rate"
        if request.baseline is not None and self.nodes is not None:
            return "ring"  # in which each part enters a node once
        return self._schedule_of_frames()

    def _schedule_of_frames(self) -> str:
        name = self.config.transport.schedule
        if name != "auto":
            return name
        return self._auto_schedule or schedule_for(self.nodes.count if self.nodes else self.world_size)

    # ---------------------------------------------------------------- running

    def run(self, call: Call, device: Device, transport: Transport) -> None:
        """Run a call to its end on this rank, count it, and verify it where the guard asked for that.

        Raises MismatchError on every rank if the ranks make different calls, PeerError, FrameError.
        """
        contribution = None if call.verify_as is None else call.source.data.clone()
        done = run(call, device, transport, self.ranks)
        self._count(done, call.role)
        if contribution is not None and done.compressed_calls:
            self._verify(call, contribution, device, transport)

    def queue(self, call: Call, backend: Backend, transport: CollectiveTransport) -> None:
        """Queue a call at a fixed rate on the current stream of a GPU, and count it: no host waits, here or elsewhere.

        So nothing is compared either: see `note_uncompared`.

        Args:
            backend: the kernels for the GPU.
        """
        counters = call.counters(transport.world_size)
        started = time.perf_counter()
        codec = fixed_rate_codec(call, backend, transport, counters)
        call.schedule(transport, codec, counters)
        if call.feedback:
            call.feedback.keep(codec.remainder(call.measured), call.config.quantizer.bits is None)
        counters.compressed_calls = 1
        counters.seconds = time.perf_counter() - started
        self._count(counters, call.role)

    def run_plain(self, call: PlainCall, device: Device, transport: Transport) -> None:
        """Run an uncompressed call to its end on this rank, and count it.

        Raises MismatchError on every rank if the ranks make different calls, and PeerError.
        """
        request, small = call.request, transport.small
        if small is not None and small.serve(request.collective, request.input, request.op):
            comparison = RankComparison(call.described, transport.rank, transport.world_size)
            given = (request.collective, request.input, request.output, request.op, request.root)
            under_way = small.start(*given, comparison, self.config.transport.link_gbps)
            self.count_plain(request, call.bypass)  # while the values travel
            under_way.finish(partial(require_same, request.collective, comparison, self.ranks))
            return
        require_same_call(request.collective, call.described, transport, Counters(), self.ranks)
        with peer_errors(f"the plain {request.collective}"):
            request.start_plain(transport.plain).wait()
        device.synchronize()
        self.count_plain(request, call.bypass)

    def refuse(self, collective: str, number: int, device: Device, transport: Transport) -> None:
        """Tell the other ranks that this one can't make its call.

        Raises MismatchError unless all refuse it, and PeerError.

        Args:
            number: of `calls` before it.
        """
        numbers = refusal(number)
        require_same_call(collective, numbers, transport, Counters(), self.ranks)

    def _verify(self, call: Call, contribution: Tensor, device: Device, transport: Transport) -> None:
        """Let the guard compare the result with the uncompressed sum of what the ranks contributed."""
        exact = contribution.to(torch.promote_types(contribution.dtype, torch.float32))
        with peer_errors("the uncompressed sum that verifies a compressed one"):
            transport.plain.all_reduce(exact, torch.distributed.ReduceOp.SUM).wait()
        device.synchronize()
        exact /= call.divisor
        result, whole = call.output.data, call.collective == "all_reduce"
        if not whole:  # part of this rank, which a call through nodes has elsewhere in its layout
            exact = exact[self.rank * result.numel() :][: result.numel()]
        self.state.guard.verify(call.verify_as or None, result, exact, whole, transport)


def _feeds_back(request: Request, config: Config) -> bool:
    """Whether what a request loses is kept for the next one."""
    return request.op is not None and config.quantizer.feeds_back


def _residual_parts(request: Request) -> Sequence[ParameterSlice]:
    """What error feedback knows the parts of a request by."""
    return request.parts if request.residual_parts is None else request.residual_parts


def bypassed(request: Request, bypass: Bypass, world_size: int) -> Counters:
    """The counters of a request that goes plain without asking the other ranks."""
    sent = plain_wire_bytes(request.collective, request.input.nbytes, world_size)
    reason = bypass.value
    because = {"bypasses": {reason: 1}, "bypassed_bytes": {reason: sent}}
    return Counters(calls=1, bytes_in=request.input.nbytes, plain_bytes=sent, wire_bytes=sent, **because)
