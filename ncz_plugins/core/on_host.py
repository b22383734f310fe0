"""Calls on tensors in host memory: on which thread they run."""

from __future__ import annotations

from .call import Call
from .call_queue import CallQueue
from .group import Group
from .planning import plan
from .run import count_plain, decide, enter, run, run_plain
from .runtime.device import HOST
from .runtime.handle import Handle
from .transport.base import PlainCollectives, peer_errors
from .transport.plain import WorkHandle

_QUICK_BYTES = 8 << 20  # of a compressed tensor whose call runs on the thread that makes it


class HostCalls:
    """Calls of one process group on tensors in host memory.

    They run one after another on a background thread. To hand a call over and to wake up again takes as long as a
    small call. So calls of at most 8 MiB that nobody needs a handle of run on the thread that makes them.

    Args:
        group: settings and order of the calls.
        queue: runs the calls; None: the group has one rank, and each call is over the user's process group.
        plain: the uncompressed collectives of the user's process group.
    """

    def __init__(self, group: Group, queue: CallQueue | None, plain: PlainCollectives):
        self._group = group
        self._queue = queue
        self._plain = plain

    def decide(self, call: Call) -> None:
        """Decide how to serve a call, on all ranks alike: see `run.decide`."""
        decide(self._group, call)

    def begin(self, call: Call, async_op: bool) -> Handle | None:
        """Begin a decided call. Without `async_op` the call may be over when this returns; then there is no handle."""
        enter(self._group, call)
        if self._queue is None:
            return self._begin_alone(call)

        is_plain = call.bypass is not None
        # The caller's thread may flush denormals, which would give rotated matrices other bits.
        is_short = call.input.nbytes <= _QUICK_BYTES and not call.is_verified and not call.rotates
        is_quick = is_plain or is_short
        way = run_plain if is_plain else run
        if is_quick and not async_op:
            self._queue.run(call.collective, HOST, way, self._group, call)
            return None
        # A plan has views of the caller's tensors. If another thread made them, what it writes would count as changes
        # of the tensors after the operator that began the call has returned: activation checkpoints refuse that.
        if not is_plain and call.plan is None:
            call.plan = plan(self._group, call)
        handle = self._queue.submit(call.collective, HOST, way, self._group, call)
        if call.is_verified:
            self._group.state.wait_at_end_of_step(handle)
        return handle

    def _begin_alone(self, call: Call) -> Handle:
        """Begin the call of the only rank."""
        doing = f"the plain {call.collective}"
        with call.pieces_in_place(), peer_errors(doing):
            handle = WorkHandle(call.start_plain(self._plain), doing)
            # Callbacks of a call under way would run on gloo's thread. One that holds the last reference to the group
            # would end the process: a group that goes waits for its threads.
            handle.wait()
        count_plain(self._group, call)
        return handle
