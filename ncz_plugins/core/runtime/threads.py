"""Threads that end with the program.

A thread that ends frees its own tensors, such as its scratch memory. Torch releases the GIL to free memory. A thread
that takes the GIL again while the interpreter ends aborts the process, so the program waits for its threads first.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable

_EXIT_SECONDS = 3.0  # the program waits this long at its end, for all threads together

# Strong references: a thread that has run to its end still frees its tensors when all others have forgotten it.
_started: dict[threading.Thread, queue.SimpleQueue] = {}


def start_thread(run: Callable[[queue.SimpleQueue], None], jobs: queue.SimpleQueue, name: str) -> threading.Thread:
    """Start a daemon thread that runs `run(jobs)`. `run` must return when it takes None from `jobs`."""
    for earlier in [thread for thread in list(_started) if not thread.is_alive()]:
        earlier.join()  # waits until its tensors are freed
        _started.pop(earlier, None)
    thread = threading.Thread(target=run, args=(jobs,), name=name, daemon=True)
    thread.start()
    _started[thread] = jobs
    return thread


@atexit.register
def _end_all() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread, jobs in list(_started.items()):
        jobs.put(None)
        thread.join(max(0.0, deadline - time.monotonic()))
