"""The future of a handle: it has the tensor, or raises what went wrong, however it is asked."""

import pytest
import torch

from ncz_plugins.core.errors import PeerError
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
