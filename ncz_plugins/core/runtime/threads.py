"""Threads that are awaited when the program ends, for a moment.

When a thread ends, it frees what it has kept for itself: tensors, such as its scratch. Torch lets go of the GIL to free
memory. A thread that takes the GIL back while the interpreter ends aborts the process.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable

_EXIT_SECONDS = 3.0  # for threads that have nothing left to do when the program ends

# Nobody else may know a thread that has run to its end and still frees what it kept, so these are no weak references.
_started: dict[threading.Thread, queue.SimpleQueue] = {}


def start_thread(run: Callable[[queue.SimpleQueue], None], jobs: queue.SimpleQueue, name: str) -> threading.Thread:
    """Start a daemon that runs `run(jobs)`, which returns once it takes None from `jobs`."""
    for earlier in [thread for thread in list(_started) if not thread.is_alive()]:
        earlier.join()  # returns at once, or when all is freed
        _started.pop(earlier, None)
    thread = threading.Thread(target=run, args=(jobs,), name=name, daemon=True)
    thread.start()
    _started[thread] = jobs
    return thread


@atexit.register
def _end_all() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS  # of all together
    for thread, jobs in list(_started.items()):
        jobs.put(None)
        thread.join(max(0.0, deadline - time.monotonic()))
