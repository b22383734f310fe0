"""Calls on tensors on a GPU: on which stream or thread they run, and what they wait for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from .bypass import Bypass
from .call import Call
from .call_comparison import require_same_call
from .call_description import connecting, measuring
from .call_queue import CallQueue
from .config import Config
from .errors import UnsupportedError, memory_errors
from .group import Group
from .run import count_plain, decide, enter, queue, run, tell
from .runtime.device import Device
from .runtime.handle import Handle
from .runtime.stream import CallStream, StreamHandle, require_capturable
from .transport.base import CollectiveTransport, PlainCollectives, Transport, peer_errors
from .transport.gpu_speed import measured_on_gpus, use_fastest_groups
from .transport.nccl_classes import nccl_class_of
from .transport.plain import GroupTransport, TorchCollectives, WorkHandle
from .transport.striped import StripedCollectives


class GpuCalls:
    """Calls of one process group on tensors on one GPU.

    The GPU carries out plain calls and calls at a fixed rate without the host: they are queued on CUDA streams. All
    other calls run one after another on a background thread, or at once if nobody needs a handle.

    Args:
        group: settings and order of the calls, see `Group.for_gpus`.
        device: this GPU.
        calls: runs the calls that need the host; None: the group has one rank.
        user_group: the user's process group, which carries plain calls, in whose streams the GPU does all else.
        open_settings: the settings, if they leave the speed of the link open: the first call measures it.
        plain: what carries plain messages between the two ranks of `group`; None: the user's group carries collectives.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        calls: CallQueue | None,
        user_group: dist.ProcessGroup,
        open_settings: Config | None,
        plain: PlainCollectives | None = None,
    ):
        self._group = group
        self._device = device
        self._calls = calls
        self._user_group = user_group
        self._plain = TorchCollectives(lambda: user_group) if plain is None else plain
        self._are_messages = plain is not None
        self._is_of_nccl = nccl_class_of(user_group) is not None
        self._open_settings = open_settings
        self._is_connected = False  # or about to be
        self._stream: CallStream | None = None  # of calls at a fixed rate
        self._last_plain: Handle | None = None
        self._last_plain_memory: Sequence[Tensor] = ()  # if nobody may have waited for that call yet
        self._last_queued: StreamHandle | None = None

    def decide(self, call: Call) -> None:
        """Decide how to serve a call, on all ranks alike: see `run.decide`.

        The first call measures what connects the GPUs, if the settings leave that open, and waits for the other ranks
        to do so. Raises UnsupportedError if a CUDA graph captures a call that it can't repeat.
        """
        decide(self._group, call)
        if torch.cuda.is_current_stream_capturing():
            if call.bypass is None:
                self._require_capturable(call)
            return
        is_served = call.bypass in (None, Bypass.TOO_SMALL)
        if self._open_settings is None or not is_served:
            return
        config, self._open_settings = self._open_settings, None
        self._connect(call)
        about = self._group, call.collective, config, self._device
        self._calls.submit(call.collective, self._device, measure_gpus, *about).wait()
        decide(self._group, call)

    def begin(self, call: Call, async_op: bool) -> Handle | None:
        """Begin a decided call. Without `async_op` the call may be over when this returns; then there is no handle."""
        captured = torch.cuda.is_current_stream_capturing()
        if call.bypass is not None:
            return self._begin_plain(call, async_op, captured)

        if not captured:
            self._connect(call)
        enter(self._group, call)
        if captured:  # the host would have to look at a sum that is verified
            call.plan = replace(call.plan, verify_as=None)
        verifies = call.is_verified
        # The first of a message's two ranks must not wait for the other one here: it may have more to ask for.
        if call.config.quantizer.bits is not None and not verifies and not self._are_messages:
            return self._begin_at_fixed_rate(call, captured)

        self._follow_calls_before()
        if not async_op and not verifies:
            self._calls.run(call.collective, self._device, run, self._group, call)
            return None
        handle = self._calls.submit(call.collective, self._device, run, self._group, call)
        if verifies:
            self._group.state.wait_at_end_of_step(handle)
        return handle

    def _require_capturable(self, call: Call) -> None:
        """Raise UnsupportedError unless a CUDA graph can repeat this compressed call."""
        require_capturable(call.collective, call.config.quantizer)
        if self._are_messages:
            raise UnsupportedError("compressed messages can't be captured in a CUDA graph: send them plain")

    def _connect(self, call: Call) -> None:
        """Let the first compressed call wait until the other ranks make it as well.

        The call connects the GPUs, and NCCL would wait without a limit for a rank that does not come.
        """
        if not self._is_connected:
            self._is_connected = True
            tell(self._calls, self._group, call.collective, connecting(self._group.calls))

    # ---------------------------------------------------------------- without the host

    def _begin_plain(self, call: Call, async_op: bool, captured: bool) -> Handle:
        """Begin a plain call over the user's process group.

        Args:
            captured: by a CUDA graph, which can't wait for what came before it, nor be waited for by what comes after.
        """
        if self._calls is not None:
            self._calls.drain()
            self._calls.require_open()  # one of those before may have failed, and then not all ranks come here

        # Calls before this one may still write to the same tensor on their stream.
        if call.joined:
            stream = call.pieces_in_place()  # on the current stream
            if not captured:
                self._follow_calls_before()
        elif self._stream is not None:
            stream = self._stream.following(torch.cuda.current_stream(self._device))
        else:
            stream = nullcontext()
        doing = f"the plain {call.collective}"
        with stream, peer_errors(doing):
            handle = WorkHandle(call.start_plain(self._plain), doing)
            # gloo would run callbacks on a thread of its own, which ends the process: see `HostCalls`. Its messages
            # have no futures at all. So its calls are waited for here, and the handle is that of the stream.
            if call.joined or not self._is_of_nccl:
                handle.wait()
            if not self._is_of_nccl and not captured:
                handle = StreamHandle.of_current(self._device)
        if call.joined and not captured:
            handle = StreamHandle.of_current(self._device)  # with the copies back to the joined tensors

        # Numbered and counted while the data travel. The next call that is compared tells whether ranks differed.
        enter(self._group, call)
        if self._calls is not None:
            self._group.note_uncompared(call.described)
        count_plain(self._group, call)

        if not async_op:
            handle.wait()
        if not captured:
            # A work that was waited for would keep its output until the next plain call.
            self._last_plain = handle if async_op else StreamHandle.of_current(self._device)
            self._last_plain_memory = call.memory if async_op else ()
        return handle

    def _begin_at_fixed_rate(self, call: Call, captured: bool) -> Handle:
        """Queue a call at a fixed rate on a stream. The host waits for nothing.

        Args:
            captured: see `_begin_plain`.
        """
        self._calls.drain()
        self._calls.require_open()
        self._group.note_uncompared(call.described)
        if self._stream is None:
            self._stream = CallStream(self._device)
        transport = self._fixed_rate_transport(captured)
        current = torch.cuda.current_stream(self._device)
        doing = f"the {call.collective} at a fixed rate"
        with peer_errors(doing), memory_errors(call.collective), self._stream.following(current, call.memory):
            if not captured:
                self._follow_plain()
            queue(self._group, call, self._stream.backend, transport)
            handle = StreamHandle.of_current(self._device)
        if not captured:
            self._last_queued = handle
        return handle

    def _fixed_rate_transport(self, captured: bool) -> CollectiveTransport:
        """What carries a call at a fixed rate: the user's own NCCL group, or ours where the user's is another kind.

        Large gathers and exchanges go over as many groups as those at a bound: our further groups carry parts of them,
        and the user's the rest. So if a peer dies, the user's group says so, as in a plain call.

        Args:
            captured: by a CUDA graph, which is to depend on no group that we may close: then the user's alone.
        """
        if not self._is_of_nccl:
            return self._calls.routes.of(self._device).transport
        backend = self._user_group._get_backend(self._device)
        groups = [backend] if captured else [backend, *self._calls.routes.further_groups(self._device)]
        return GroupTransport(self._group.rank, self._group.world_size, StripedCollectives(lambda: groups))

    def _follow_calls_before(self) -> None:
        """Let the current stream wait for the calls before that no host waits for."""
        self._follow_plain()
        if self._last_queued is not None:
            self._last_queued.wait()

    def _follow_plain(self) -> None:
        """Let the current stream wait for the plain call before.

        NCCL's work lets go of its tensors when any stream waits for it. The caller's own stream may not have waited,
        and would get their memory while NCCL still uses it. So they are noted as used on the stream that waits.
        """
        if self._last_plain is None:
            return
        for tensor in self._last_plain_memory:
            tensor.record_stream(torch.cuda.current_stream(self._device))
        self._last_plain_memory = ()
        self._last_plain.wait()


def measure_gpus(
    group: Group, collective: str, config: Config, where: torch.device, device: Device, transport: Transport
) -> None:
    """Measure how fast calls go on GPUs, and serve tensors there by what follows from it from now on.

    Raises MismatchError on every rank unless all do so before `collective`, and PeerError.

    Args:
        config: the settings, which leave the speed of the link open.
        where: this rank's GPU.
    """
    require_same_call(collective, measuring(group.calls), transport, group.ranks)
    config = measured_on_gpus(config, device, transport, where)
    if group.nodes is None and group.schedule_for(0) == "direct":  # in others no rank gathers frames
        use_fastest_groups(config, device, transport, where)
    group.use(config)
