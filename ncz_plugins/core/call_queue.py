"""Calls run one after another on a background thread, and a failure ends them all."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import torch

from .call import Call
from .collective import Collectives
from .errors import NczError, UnsupportedError, memory_errors
from .runtime.device import record_event
from .runtime.handle import Handle
from .runtime.worker import Worker
from .transport.routes import Routes

_CLOSE_SECONDS = 5.0


class CallQueue:
    """Runs the calls of one group of ranks in the order in which they were submitted.

    After a failure the ranks no longer agree on what comes next. So the first one closes all connections, which lets
    peers notice, and further calls raise at once.

    Args:
        routes: how tensors reach the other ranks. The queue closes them.
        name: of the thread.
    """

    def __init__(self, routes: Routes, name: str):
        self.routes = routes
        self._worker = Worker(name)
        self._broken: NczError | None = None

    def require_open(self) -> None:
        """Raise what ended this queue, if anything did, and UnsupportedError in a fork of the process that made it."""
        if self._broken is not None:
            raise self._broken
        self._worker.require_own_process()

    def submit(self, collectives: Collectives, call: Call) -> Handle:
        """Run a call after all earlier ones."""
        asked = record_event(call.source.data.device)
        return self._worker.submit(partial(self._run, collectives, call, asked))

    def close(self) -> None:
        """Finish what was submitted and close the connections. Safe to call twice."""
        if self._broken is None:
            with suppress(UnsupportedError):  # in a fork, which has no part in them
                self._worker.submit(self.routes.close)
        if self._worker.close(_CLOSE_SECONDS) and self._broken is None:
            self._broken = NczError("this communicator was closed")

    def _run(self, collectives: Collectives, call: Call, asked: torch.cuda.Event | None) -> None:
        """On the background thread."""
        if self._broken is not None:
            raise self._broken
        try:
            device, transport = self.routes.of(call.source.data.device)
            with device.after(asked), memory_errors(call.collective):
                collectives.run(call, device, transport)
        except BaseException as error:
            self._broken = error if isinstance(error, NczError) else NczError(f"{call.collective} failed: {error!r}")
            self.routes.abort(error)
            raise
