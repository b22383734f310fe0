"""Calls run in order on a thread, and one failure ends them all."""

import threading

import pytest
import torch
from calls import call
from ranks import play

from ncz_plugins.core.call_queue import CallQueue
from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.core.errors import NczError, PeerError
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.transport.routes import Route


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


class Noting:
    """In place of `Collectives`: notes which calls ran, and raises what it was told to."""

    def __init__(self, raises=None):
        self.ran: list[int] = []
        self.raises = raises or {}

    def run(self, call, device, transport):
        self.ran.append(call.number)
        if error := self.raises.get(call.number):
            raise error


def queue_of(transport) -> CallQueue:
    return CallQueue(OneRoute(transport), "test")


def test_calls_run_in_the_order_in_which_they_were_submitted():
    def body(transport):
        queue, collectives = queue_of(transport), Noting()
        handles = [queue.submit(collectives, call(number=number)) for number in range(20)]
        assert all(handle.wait() for handle in handles)
        assert collectives.ran == list(range(20))
        queue.close()
        queue.close()
        assert queue.routes.ended_by == [None]
        with pytest.raises(NczError, match="closed"):
            queue.require_open()

    play(1, body)


@pytest.mark.parametrize(("raised", "further"), [(PeerError("gone"), PeerError), (ValueError("no"), NczError)])
def test_a_failure_ends_all_calls_after_it(raised, further):
    def body(transport):
        queue, collectives = queue_of(transport), Noting({1: raised})
        first, failing, after = (queue.submit(collectives, call(number=number)) for number in range(3))
        assert first.wait()
        with pytest.raises(type(raised)) as caught:
            failing.wait()
        assert caught.value is raised
        with pytest.raises(further):
            after.wait()
        assert collectives.ran == [0, 1] and queue.routes.ended_by == [raised]
        with pytest.raises(further):
            queue.require_open()
        queue.close()
        assert queue.routes.ended_by == [raised]  # closed already

    play(1, body)


def test_running_out_of_memory_has_a_type_of_its_own():
    def body(transport):
        queue = queue_of(transport)
        with pytest.raises(MemoryError, match="all_reduce: no memory left"):
            queue.submit(Noting({1: MemoryError()}), call()).wait()

    play(1, body)


def test_closing_lets_calls_finish_that_were_submitted():
    def body(transport):
        queue, go = queue_of(transport), threading.Event()

        class Slow(Noting):
            def run(self, call, device, transport):
                go.wait(30)
                super().run(call, device, transport)

        collectives = Slow()
        handle = queue.submit(collectives, call(source=Window(torch.zeros(8)), layout=Layout.of([8], 8)))
        threading.Timer(0.1, go.set).start()
        queue.close()
        assert handle.is_success() and collectives.ran == [1]

    play(1, body)
