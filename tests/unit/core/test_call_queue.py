"""Calls run in order, one failure ends them all, and so does the end of the program."""

import threading
from functools import partial

import pytest
import torch
from ranks import play

from ncz_plugins.core import call_queue
from ncz_plugins.core.call_queue import CallQueue
from ncz_plugins.core.errors import NczError, PeerError
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.transport.routes import Route

HOST = torch.device("cpu")


class OneRoute:
    """The route of host tensors, as `Routes` has it; tells what became of it."""

    def __init__(self, transport):
        self.route = Route(Host(), transport)
        self.ended_by: list = []

    def of(self, device):
        return self.route

    def close(self):
        self.ended_by.append(None)
        self.route.transport.close()

    def abort(self, error):
        self.ended_by.append(error)
        self.route.transport.abort(error)


class Jobs:
    """Jobs that note when they ran and on which thread, and raise what they were told to."""

    def __init__(self, raises=None):
        self.ran: list[int] = []
        self.threads: list[threading.Thread] = []
        self.raises = raises or {}

    def job(self, number: int):
        return partial(self._run, number)

    def _run(self, number, device, transport):
        self.ran.append(number)
        self.threads.append(threading.current_thread())
        if error := self.raises.get(number):
            raise error


def queue_of(transport) -> CallQueue:
    return CallQueue(OneRoute(transport), "test")


def submit(queue: CallQueue, job):
    return queue.submit("all_reduce", HOST, job)


def blocked_by(go: threading.Event):
    return lambda device, transport: go.wait(30)


def test_calls_run_in_the_order_in_which_they_were_submitted():
    def body(transport):
        queue, jobs = queue_of(transport), Jobs()
        handles = [submit(queue, jobs.job(number)) for number in range(20)]
        assert all(handle.wait() for handle in handles)
        assert jobs.ran == list(range(20))
        queue.close()
        queue.close()
        assert queue.routes.ended_by == [None]
        with pytest.raises(NczError, match="closed"):
            queue.require_open()

    play(1, body)


def test_a_call_that_is_waited_for_runs_on_its_callers_thread_if_no_other_is_before_it():
    def body(transport):
        queue, jobs, go = queue_of(transport), Jobs(), threading.Event()
        queue.run("all_reduce", HOST, jobs.job(0))
        submit(queue, blocked_by(go))
        submit(queue, jobs.job(1))
        by_queue = queue.submit
        queue.submit = lambda *arguments: (by_queue(*arguments), go.set())[0]  # those before it wait for it
        queue.run("all_reduce", HOST, jobs.job(2))
        queue.run("all_reduce", HOST, jobs.job(3))
        assert jobs.ran == [0, 1, 2, 3]
        caller = threading.current_thread()
        assert [thread is caller for thread in jobs.threads] == [True, False, False, True]
        queue.close()

    play(1, body)


def test_a_default_device_of_the_callers_thread_does_not_concern_a_call():
    def body(transport):
        queue, jobs, made = queue_of(transport), Jobs(), []
        with torch.device("meta"):
            queue.run("all_reduce", HOST, jobs.job(0))
            queue.run("all_reduce", HOST, lambda device, transport: made.append(torch.empty(3)))
        assert jobs.threads != [threading.current_thread()]
        assert made[0].device == HOST
        queue.close()

    play(1, body)


def test_draining_waits_for_all_and_leaves_errors_to_those_who_wait_for_them():
    def body(transport):
        queue, jobs = queue_of(transport), Jobs({0: PeerError("gone")})
        handle = submit(queue, jobs.job(0))
        queue.drain()
        assert handle.is_completed() and isinstance(handle.exception(), PeerError)
        queue.close()

    play(1, body)


@pytest.mark.parametrize(("raised", "further"), [(PeerError("gone"), PeerError), (ValueError("no"), NczError)])
@pytest.mark.parametrize("on_the_callers_thread", [False, True])
def test_a_failure_ends_all_calls_after_it(raised, further, on_the_callers_thread):
    def body(transport):
        queue, jobs = queue_of(transport), Jobs({1: raised})
        assert submit(queue, jobs.job(0)).wait()
        with pytest.raises(type(raised)) as caught:
            if on_the_callers_thread:
                queue.run("all_reduce", HOST, jobs.job(1))
            else:
                submit(queue, jobs.job(1)).wait()
        assert str(caught.value) == str(raised)
        with pytest.raises(further):
            submit(queue, jobs.job(2)).wait()
        assert jobs.ran == [0, 1] and queue.routes.ended_by == [raised]
        with pytest.raises(further):
            queue.require_open()
        queue.close()
        assert queue.routes.ended_by == [raised]  # closed already

    play(1, body)


def test_a_call_that_is_given_up_meanwhile_fails_even_if_it_comes_to_its_end():
    """What it waited for may have ended without being there."""

    def body(transport):
        queue = queue_of(transport)
        with pytest.raises(PeerError, match="aborted"):
            queue.run("all_reduce", HOST, lambda device, transport: queue.abort(PeerError("aborted")))

    play(1, body)


def test_what_ended_a_queue_first_is_what_it_tells_from_then_on():
    """However it is given up, and closed, after that."""

    def body(transport):
        queue = queue_of(transport)
        with pytest.raises(PeerError, match="gone"):
            queue.run("all_reduce", HOST, Jobs({1: PeerError("gone")}).job(1))
        for end in (lambda: queue.abort(PeerError("aborted")), queue.close):
            end()
            with pytest.raises(PeerError, match="gone"):
                queue.require_open()

    play(1, body)


def test_what_is_given_up_ends_its_thread():
    def body(transport):
        queue, jobs = queue_of(transport), Jobs()
        submit(queue, jobs.job(1)).wait()
        queue.abort(PeerError("aborted"))
        jobs.threads[0].join(5)
        assert not jobs.threads[0].is_alive()

    play(1, body)


@pytest.mark.parametrize("how, told", [("abort", "aborted"), ("close", "this communicator was closed")])
def test_a_call_that_another_thread_has_overtaken_with_the_end_is_refused(how, told):
    """It found the queue open, and was decided while the other one ended it. Its handle would never be over."""

    def body(transport):
        queue, jobs = queue_of(transport), Jobs()
        queue.require_open()
        queue.abort(PeerError("aborted")) if how == "abort" else queue.close()
        with pytest.raises(NczError, match=told):
            submit(queue, jobs.job(1))
        assert not jobs.ran

    play(1, body)


@pytest.mark.parametrize("waits_for", ["a new call", "an earlier one", "a future"])
def test_a_callback_may_wait_for_further_calls(waits_for):
    """As those of torch's PowerSGD hook do."""

    def body(transport):
        queue, jobs = queue_of(transport), Jobs()
        go_on = threading.Event()
        first = submit(queue, lambda device, transport: go_on.wait(10) and None)
        second = submit(queue, jobs.job(1))

        def callback(done):
            if waits_for == "an earlier one":
                return second.wait(10)
            call = submit(queue, jobs.job(2)).giving(torch.zeros(1))
            return call.wait(10) if waits_for == "a new call" else call.get_future().wait() is not None

        future = first.giving(torch.zeros(1)).get_future().then(callback)
        go_on.set()
        assert future.wait() is True

    play(1, body)


def test_the_future_of_a_call_that_is_over_is_complete():
    """Whoever asks for it may rely on that, as torchft does."""

    def body(transport):
        handle = submit(queue_of(transport), Jobs().job(1)).giving(torch.zeros(1))
        handle.wait()
        assert handle.get_future().done()

    play(1, body)


def test_running_out_of_memory_has_a_type_of_its_own():
    def body(transport):
        queue = queue_of(transport)
        with pytest.raises(MemoryError, match="all_reduce: no memory left"):
            submit(queue, Jobs({1: MemoryError()}).job(1)).wait()

    play(1, body)


def test_closing_lets_calls_finish_that_were_submitted():
    def body(transport):
        queue, go = queue_of(transport), threading.Event()
        handle = submit(queue, blocked_by(go))
        threading.Timer(0.1, go.set).start()
        queue.close()
        assert handle.is_success()

    play(1, body)


@pytest.mark.parametrize("ends", [False, True])
def test_closing_lets_the_call_of_another_thread_finish(ends):
    def body(transport):
        queue, go, begun = queue_of(transport), threading.Event(), threading.Event()

        def job(device, transport):
            begun.set()
            go.wait(30)
            assert queue.routes.ended_by == []

        caller = threading.Thread(target=lambda: queue.run("all_reduce", HOST, job))
        caller.start()
        begun.wait(30)
        threading.Timer(0.1, go.set).start()
        queue.end(30) if ends else queue.close()
        caller.join(30)
        assert queue.routes.ended_by == [None]

    play(1, body)


def test_what_is_closed_takes_no_calls_even_while_one_goes_on(monkeypatch):
    monkeypatch.setattr(call_queue, "_CLOSE_SECONDS", 0.1)

    def body(transport):
        queue, go = queue_of(transport), threading.Event()
        handle = submit(queue, blocked_by(go))
        queue.close()
        with pytest.raises(NczError, match="this communicator was closed"):
            queue.require_open()
        assert queue.routes.ended_by == []
        go.set()
        assert handle.wait()
        queue.close()
        assert queue.routes.ended_by == [None]

    play(1, body)


# ------------------------------------------------------------------ the end of the program


def test_at_the_end_calls_under_way_come_to_their_end():
    def body(transport):
        queue, go = queue_of(transport), threading.Event()
        handle = submit(queue, blocked_by(go))
        threading.Timer(0.1, go.set).start()
        queue.end(30)
        assert handle.is_success() and queue.routes.ended_by == [None]

    play(1, body)


def test_at_the_end_a_call_that_takes_longer_is_given_up(monkeypatch):
    monkeypatch.setattr(call_queue, "_CLOSE_SECONDS", 0.1)

    def body(transport):
        queue, go = queue_of(transport), threading.Event()
        handle = submit(queue, blocked_by(go))
        late = threading.Timer(3, go.set)
        late.start()
        queue.end(0.1)
        [error] = queue.routes.ended_by
        late.cancel()
        go.set()
        with pytest.raises(NczError, match="the program ended before this call did"):
            raise error
        with pytest.raises(NczError, match="the program ended"):
            handle.wait()

    play(1, body)
