"""The background thread and its handles."""

import gc
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from datetime import timedelta

import pytest

from ncz_plugins.core.errors import NczError, PeerError
from ncz_plugins.core.runtime.worker import Worker


def test_jobs_run_in_order_on_one_other_thread():
    worker, seen = Worker("test"), []
    handles = [worker.submit(lambda i=i: seen.append((i, threading.current_thread().name))) for i in range(50)]
    assert all(handle.wait() for handle in handles)
    assert seen == [(i, "test") for i in range(50)]
    assert worker.close(5)


@pytest.mark.parametrize("error", [ValueError("no"), TimeoutError("the job's own"), PeerError("gone")])
def test_what_a_job_raises_comes_out_of_wait_each_time(error):
    def job():
        raise error

    worker = Worker("test")
    handle = worker.submit(job)
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            handle.wait(5)
    assert handle.is_completed() and not handle.is_success() and handle.exception() is error
    assert worker.submit(lambda: None).wait()  # the thread goes on
    assert worker.close(5)


@pytest.mark.parametrize("timeout", [0.05, timedelta(seconds=0.05)])
def test_waiting_is_bounded_where_asked_for(timeout):
    worker, go = Worker("test"), threading.Event()
    handle = worker.submit(go.wait)
    with pytest.raises(PeerError, match="0.05 s"):
        handle.wait(timeout)
    assert not handle.is_completed() and handle.exception() is None
    go.set()
    assert handle.wait()
    assert worker.close(5)


def test_closing_finishes_what_was_asked_for():
    worker, seen = Worker("test"), []
    for i in range(10):
        worker.submit(lambda i=i: seen.append(i))
    assert worker.close(5)
    assert seen == list(range(10))


def test_a_job_after_the_end_is_refused_and_not_left_behind_it():
    worker = Worker("test")
    assert worker.close(5)
    with pytest.raises(NczError, match="has ended"):
        worker.submit(lambda: None)


def test_what_was_submitted_while_another_thread_closes_is_over():
    for _ in range(20):
        worker, handles = Worker("test"), []
        closing = threading.Thread(target=worker.close, args=(5,))
        closing.start()
        with suppress(NczError):
            while True:
                handles.append(worker.submit(lambda: None))
        closing.join()
        assert all(handle.wait(5) for handle in handles)


def test_closing_does_not_wait_for_ever():
    worker, go = Worker("test"), threading.Event()
    worker.submit(go.wait)
    assert not worker.close(0.05)
    go.set()


@pytest.mark.parametrize("is_under_way", [False, True])
def test_closing_ends_the_threads_of_callbacks_as_well(is_under_way):
    """At once, or when their callbacks return."""
    worker, begun, go, threads = Worker("test"), threading.Event(), threading.Event(), []

    def callback():
        threads.append(threading.current_thread())
        begun.set()
        go.wait(10)

    if not is_under_way:
        go.set()
    worker._callbacks.run(callback)
    assert begun.wait(10)
    assert worker.close(5)
    go.set()
    threads[0].join(5)
    assert not threads[0].is_alive()


def test_an_idle_thread_holds_on_to_nothing():
    class Tensor:
        def job(self):
            pass

    worker, tensor = Worker("test"), Tensor()
    watched = weakref.ref(tensor)
    worker.submit(tensor.job).wait()
    worker.submit(lambda: None).wait()
    del tensor
    gc.collect()
    assert watched() is None
    assert worker.close(5)


def test_a_forgotten_worker_ends_its_thread():
    worker = Worker("forgotten")
    worker.submit(lambda: None).wait()
    thread = next(t for t in threading.enumerate() if t.name == "forgotten")
    del worker
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


# Torch frees large tensors without the GIL, as this one sleeps. What a thread keeps for itself is freed when it ends.
ENDING = """
import sys, threading, time
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.runtime.worker import Worker

class Kept:
    def __del__(self):
        time.sleep(0.5)
        print("freed", flush=True)

mine = threading.local()
worker = {"worker": lambda: Worker("test"), "device": lambda: Host(two_threads=True)}[sys.argv[1]]()
worker.submit(lambda: setattr(mine, "kept", Kept()))
del worker
time.sleep(float(sys.argv[2]))  # by 0.2 s, the thread has run to its end, and nobody but the interpreter knows it
"""


@pytest.mark.parametrize(("owner", "seconds"), [("worker", 0.2), ("device", 0)])
def test_the_end_of_the_program_waits_for_a_thread_that_nobody_closed(owner, seconds):
    command = [sys.executable, "-c", ENDING, owner, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "freed\n", "")
