"""Threads that hand over gradients at once, and reductions that are under way when Horovod is initialized again."""

import threading
import time

import pytest

pytest.importorskip("horovod.torch")

from ncz_plugins.core.errors import PeerError
from ncz_plugins.horovod.process_set import ProcessSetReducer
from ncz_plugins.horovod.reduction import _Reductions


class Submitted:
    """In place of a ReductionHandle, its owner and the owner's compressor."""

    may_run_ahead = True
    process_set = None
    tensors = ()

    @property
    def owner(self):
        return self

    compressor = owner


class SlowPlan:
    """Counts those that complete buckets at the same time."""

    inside = most = 0

    def complete(self, tensors):
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.05)
        self.inside -= 1
        return []


def test_one_thread_at_a_time_completes_buckets():
    reductions, pending, plan = _Reductions(), Submitted(), SlowPlan()
    reductions._plans[pending] = plan
    threads = [threading.Thread(target=reductions.submit, args=[pending]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert plan.most == 1


class Routes:
    """In place of connections: how they were closed."""

    def __init__(self):
        self.ended = []

    def close(self):
        self.ended.append("closed")

    def abort(self, error):
        self.ended.append(error)


def test_connections_are_closed_once_nothing_is_under_way():
    reducer, routes = ProcessSetReducer(), Routes()
    reducer._connections._routes = routes
    reducer.close(60)
    assert routes.ended == ["closed"]


def test_connections_of_a_reduction_that_does_not_end_are_aborted():
    reducer, routes, over = ProcessSetReducer(), Routes(), threading.Event()
    reducer._connections._routes = routes
    reducer._worker.submit(over.wait)
    reducer.close(0.01)
    over.set()
    assert [type(each) for each in routes.ended] == [PeerError]
