"""Calls run one after another, and a failure ends them all."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial

import torch

from .errors import NczError, UnsupportedError, fresh, memory_errors, without_frames
from .runtime.device import record_event
from .runtime.handle import Handle
from .runtime.process import end_with_program, leave_to_itself
from .runtime.worker import Worker
from .transport.routes import Routes

_CLOSE_SECONDS = 5.0
_no_context = nullcontext()

Job = Callable[..., None]  # takes arguments of its own, then the Device and the Transport of its tensors


class CallQueue:
    """Runs the calls of one group of ranks in the order in which they were asked for.

    After a failure the ranks no longer agree on what comes next. So the first one closes all connections, which lets
    peers notice, and further calls raise at once. When the program ends, calls that are under way come to their end
    first; those that take longer than ten seconds fail.

    Args:
        routes: how tensors reach the other ranks. The queue closes them.
        name: of the thread.
        together: the queues of one communicator. A failure of one ends all of them.
        errors: context that translates the errors of calls.

    Attributes:
        error: what ended this queue; None as long as it is open.
    """

    def __init__(
        self,
        routes: Routes,
        name: str,
        together: list[weakref.ref[CallQueue]] | None = None,
        errors: AbstractContextManager = _no_context,
    ):
        self.routes = routes
        self._errors = errors
        self._worker = Worker(name)
        self.error: NczError | None = None
        self._is_closed = False  # for new calls; those before may still be under way
        self._last: Handle | None = None  # what was submitted last
        self._running = threading.Lock()  # held by the thread that makes calls
        self.together = [] if together is None else together
        self.together.append(weakref.ref(self))
        end_with_program(self)

    def require_open(self) -> None:
        """Raise what ended this queue, if anything did, and UnsupportedError in a fork of the process that made it."""
        if self.error is not None:
            raise fresh(self.error)
        if self._is_closed:
            raise _closed()
        self._worker.require_own_process()

    def submit(self, collective: str, device: torch.device, job: Job, *arguments: object) -> Handle:
        """Run a job on the background thread, after all earlier ones.

        Args:
            collective: what the job does, for messages.
            device: where its tensors live.
            arguments: what `job` takes before the device and the transport of its tensors.

        Raises what `require_open` does: another thread may have closed or aborted this queue since that was asked.
        """
        run = partial(self._run, collective, device, record_event(device), job, arguments)
        try:
            self._last = self._worker.submit(run)
        except NczError:
            self.require_open()
            raise
        return self._last

    def run(self, collective: str, device: torch.device, job: Job, *arguments: object) -> None:
        """Run a job after all earlier ones, on this thread if there is none to wait for. Arguments as of `submit`.

        To hand a small job to the background thread and to wake up again takes as long as the job.
        """
        if (self._last is None or self._last.is_completed()) and not _has_modes():
            self._run(collective, device, record_event(device), job, arguments)
        else:
            self.submit(collective, device, job, *arguments).wait()

    def drain(self) -> None:
        """Return once all that was submitted has come to its end, or failed."""
        if self._last is not None:
            with suppress(Exception):  # it belongs to whoever waits for it
                self._last.wait()

    def close(self) -> None:
        """Finish what was asked for and close the connections. Safe to call twice.

        Returns after five seconds at the latest. What takes longer goes on, and then the connections are closed.
        """
        deadline = time.monotonic() + _CLOSE_SECONDS
        first, *others = self._all()
        for queue in (first, *others):
            queue._is_closed = True
        # The first one last: as long as its connections are open, the others know that this rank is there.
        for queues in (others, [first]):
            for queue in queues:
                queue._start_closing()
            for queue in queues:
                queue._await_closed(deadline)

    def abort(self, error: NczError) -> None:
        """Give up what is under way, and close the connections at once. Later calls raise `error`, or an earlier one.

        A call that waits for a silent peer comes to its end with its time-out only.
        """
        self._fail("aborting", error)
        for queue in self._all():
            leave_to_itself(queue)
            queue._worker.close(0)

    def end(self, seconds: float) -> None:
        """Finish what was submitted within so many seconds, or else give it up; then close the connections.

        A thread that still waits for a peer when the interpreter ends would end the process by a signal.
        """
        deadline = time.monotonic() + seconds
        with suppress(UnsupportedError):
            self._worker.require_own_process()
            if self._last is not None:
                with suppress(Exception):
                    self._last.wait(seconds)
            is_over = self._last is None or self._last.is_completed()
            # Another thread may be making a call, too.
            if is_over and self._running.acquire(timeout=max(0.0, deadline - time.monotonic())):
                self._running.release()
            else:
                self._fail("ending", NczError("the program ended before this call did"))
        self.close()

    def _start_closing(self) -> None:
        if self.error is None:
            with suppress(NczError):  # in a fork, which has no part in them, or as another thread closes this as well
                self._worker.submit(self._close_routes)

    def _await_closed(self, deadline: float) -> None:
        if self._worker.close(max(0.0, deadline - time.monotonic())):
            leave_to_itself(self)
            self.error = self.error or _closed()

    def _close_routes(self) -> None:
        with self._running:
            self.routes.close()

    def _run(
        self, collective: str, device: torch.device, asked: torch.cuda.Event | None, job: Job, arguments: tuple
    ) -> None:
        with self._running:
            if self.error is not None:
                raise fresh(self.error)
            try:
                with self._errors:
                    route, transport = self.routes.of(device)
                    with route.after(asked), memory_errors(collective):
                        job(*arguments, route, transport)
                if self.error is not None:
                    raise fresh(self.error)  # an aborted wait ends as one that was successful does
            except BaseException as error:
                self._fail(collective, error)
                raise

    def _fail(self, collective: str, error: BaseException) -> None:
        is_ours = isinstance(error, NczError)
        stored = without_frames(error) if is_ours else NczError(f"{collective} failed: {error!r}")
        with ExitStack() as stack:  # all are ended even if one raises
            for queue in self._all():
                queue.error = queue.error or stored
                stack.callback(queue.routes.abort, error)

    def _all(self) -> list[CallQueue]:
        """This queue and those that end together with it."""
        return [queue for reference in tuple(self.together) if (queue := reference()) is not None]


def _closed() -> NczError:
    return NczError("this communicator was closed")


def _has_modes() -> bool:
    """Whether functions of torch do other things on this thread than on others, as in `with torch.device("cuda")`."""
    return torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0
