"""The future of a handle: it has the tensor, or raises what went wrong, however it is asked."""

import pytest
import torch

from ncz_plugins.core.errors import PeerError
from ncz_plugins.core.regroup import Regrouped
from ncz_plugins.core.runtime.worker import FutureHandle, Worker


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


def test_so_does_that_of_slices_which_were_reduced_by_themselves(worker):
    whole = torch.zeros(4)
    first, second = torch.ones(2), torch.ones(2)

    def handle_of(part: torch.Tensor, job) -> FutureHandle:
        return worker.submit(job).giving(part)

    pieces = whole.split(2)
    under_way = [(handle_of(each, lambda: None), each, [piece]) for each, piece in zip((first, second), pieces)]
    [result] = Regrouped(under_way).giving(whole).get_future().wait()
    assert result is whole and whole.tolist() == [1, 1, 1, 1]

    under_way = [
        (handle_of(first, lambda: None), first, [pieces[0]]),
        (handle_of(second, refused), second, [pieces[1]]),
    ]
    with pytest.raises(RuntimeError, match="PeerError: rank 1"):
        Regrouped(under_way).giving(whole).get_future().wait()
