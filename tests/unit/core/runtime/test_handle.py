"""The future of a handle: it has the tensor, or raises what went wrong, however it is asked."""

import pytest
import torch

from ncz_plugins.core.errors import PeerError
from ncz_plugins.core.runtime.handle import Handles
from ncz_plugins.core.runtime.worker import Worker


@pytest.fixture
def worker():
    worker = Worker("test")
    yield worker
    assert worker.close(5)


def refused() -> None:
    raise PeerError("rank 1 is gone")


def test_a_future_has_the_output(worker):
    output = torch.zeros(3)
    handle = worker.submit(lambda: output.fill_(7)).giving(output)
    future = handle.get_future()
    assert future.wait()[0] is output and output.tolist() == [7, 7, 7]
    assert handle.get_future().value()[0] is output  # also of what is over
    assert future.then(lambda done: done.value()[0].sum().item()).wait() == 21


def test_a_future_raises_what_went_wrong(worker):
    future = worker.submit(refused).giving(torch.zeros(1)).get_future()
    with pytest.raises(PeerError, match="rank 1"):
        future.wait()
    with pytest.raises(RuntimeError, match="PeerError: rank 1"):  # torch keeps the text only
        future.then(lambda done: done.value()).wait()


def test_the_future_of_several_has_all_outputs_or_raises_what_went_wrong(worker):
    first, second = torch.zeros(2), torch.zeros(3)
    handles = [worker.submit(lambda: first.fill_(1)), worker.submit(lambda: second.fill_(2))]
    both = Handles([each.giving(out) for each, out in zip(handles, (first, second))]).giving(first, second)
    got = both.get_future().wait()
    assert got[0] is first and got[1] is second and first.sum() + second.sum() == 8
    both = [handles[0].giving(first), worker.submit(refused).giving(second)]
    with pytest.raises(PeerError, match="rank 1"):
        Handles(both).giving(first, second).get_future().wait()
