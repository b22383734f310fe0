"""This process: what it finishes before it ends, and what a fork of it closes or keeps.

At the end of the program:

1. Queues of calls finish the calls that are under way: see CallQueue.
2. Threads end. A thread that ends frees its own tensors, such as its scratch memory. Torch releases the GIL to free
   memory, and a thread that takes the GIL again while the interpreter ends aborts the process.

In a fork, which has the parent's descriptors but none of its threads:

1. The descriptors of connections are closed, so that peers of the parent notice when the parent closes its own.
2. Process groups live for ever, as the end of a process group waits for its threads.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable

_CALLS_EXIT_SECONDS = 10.0  # for the calls of all queues together
_THREADS_EXIT_SECONDS = 3.0  # after that, for all threads together

_ended_with_program: weakref.WeakSet = weakref.WeakSet()
_dropped_in_forks: weakref.WeakSet = weakref.WeakSet()
_kept_in_forks: weakref.WeakSet = weakref.WeakSet()
# Strong references: a thread that has run to its end still frees its tensors when all others have forgotten it.
_threads: dict[threading.Thread, queue.SimpleQueue] = {}


def start_thread(run: Callable[[queue.SimpleQueue], None], jobs: queue.SimpleQueue, name: str) -> threading.Thread:
    """Start a daemon thread that runs `run(jobs)`. `run` must return when it takes None from `jobs`."""
    for earlier in [thread for thread in list(_threads) if not thread.is_alive()]:
        earlier.join()  # waits until its tensors are freed
        _threads.pop(earlier, None)
    thread = threading.Thread(target=run, args=(jobs,), name=name, daemon=True)
    thread.start()
    _threads[thread] = jobs
    return thread


def end_with_program(calls: object) -> None:
    """Call `calls.end(seconds)` at the end of the program, unless `calls` has been freed by then."""
    _ended_with_program.add(calls)


def leave_to_itself(calls: object) -> None:
    """Undo `end_with_program`."""
    _ended_with_program.discard(calls)


def drop_in_forks(connections: object) -> None:
    """Call `connections.drop()` in each fork of this process."""
    _dropped_in_forks.add(connections)


def keep_in_forks(owner: object) -> None:
    """Keep `owner`, and the process groups that it holds, alive for ever in each fork of this process."""
    _kept_in_forks.add(owner)


def _before_exit() -> None:
    deadline = time.monotonic() + _CALLS_EXIT_SECONDS
    for calls in list(_ended_with_program):
        calls.end(max(0.0, deadline - time.monotonic()))

    deadline = time.monotonic() + _THREADS_EXIT_SECONDS
    for thread, jobs in list(_threads.items()):
        jobs.put(None)
        thread.join(max(0.0, deadline - time.monotonic()))


def _in_fork() -> None:
    for connections in list(_dropped_in_forks):
        connections.drop()
    for owner in _kept_in_forks:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


atexit.register(_before_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)
