"""Uncompressed collectives over the connections of our own."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import play
from torch.futures import Future

from ncz_plugins.core.errors import PeerError, UnsupportedError
from ncz_plugins.core.transport.base import Work
from ncz_plugins.core.transport.plain import TorchCollectives, WorkHandle
from ncz_plugins.core.transport.subset import SubsetCollectives

WORLD = 3


def on_each_rank(body) -> list:
    """What `body` leaves on each rank; it takes the collectives and the rank."""
    return play(WORLD, lambda transport: body(transport.plain, transport.rank))


@pytest.mark.parametrize(
    ("op", "scale", "expected"),
    [
        (dist.ReduceOp.SUM, 1.0, 6.0),
        (dist.ReduceOp.SUM, 0.5, 3.0),
        (dist.ReduceOp.AVG, 1.0, 2.0),
        (dist.ReduceOp.AVG, 0.5, 1.0),
        (dist.ReduceOp.MAX, 1.0, 3.0),
        (dist.ReduceOp.MIN, 1.0, 1.0),
    ],
)
@pytest.mark.parametrize("is_parameter", [False, True])
def test_all_reduce(op, scale, expected, is_parameter):
    def body(plain, rank):
        tensor = torch.full((5,), rank + 1.0, requires_grad=is_parameter)
        assert plain.all_reduce(tensor, op, scale).wait()
        return tensor.tolist()

    assert on_each_rank(body) == [[expected] * 5] * WORLD


@pytest.mark.parametrize(("op", "expected"), [(dist.ReduceOp.SUM, 6.0), (dist.ReduceOp.AVG, 2.0)])
def test_reduce_scatter(op, expected):
    def body(plain, rank):
        output = torch.zeros(2)
        plain.reduce_scatter_single(output, (rank + 1.0) * torch.tensor([1.0, 1, 10, 10, 100, 100]), op).wait()
        return output.tolist()

    assert on_each_rank(body) == [[expected * 10**rank] * 2 for rank in range(WORLD)]


@pytest.mark.parametrize(
    ("op", "expected"), [(dist.ReduceOp.SUM, 6.0), (dist.ReduceOp.AVG, 2.0), (dist.ReduceOp.MAX, 3.0)]
)
@pytest.mark.parametrize("is_parameter", [False, True])
def test_reduce_changes_nothing_but_on_its_root(op, expected, is_parameter):
    def body(plain, rank):
        tensor = torch.full((5,), rank + 1.0, requires_grad=is_parameter)
        assert plain.reduce(tensor, 1, op).wait()
        return tensor.tolist()

    assert on_each_rank(body) == [[expected if rank == 1 else rank + 1.0] * 5 for rank in range(WORLD)]


def test_all_gather():
    def body(plain, rank):
        output = torch.zeros(2 * WORLD, dtype=torch.int64)
        plain.all_gather_single(output, torch.tensor([rank, -rank])).wait()
        return output.tolist()

    assert on_each_rank(body) == [[0, 0, 1, -1, 2, -2]] * WORLD


def test_broadcast():
    def body(plain, rank):
        tensor = torch.full((4,), rank, dtype=torch.uint8)
        plain.broadcast(tensor, 1).wait()
        return tensor.tolist()

    assert on_each_rank(body) == [[1] * 4] * WORLD


def test_exchange():
    def body(plain, rank):
        right, left = (rank + 1) % WORLD, (rank - 1) % WORLD
        received = torch.zeros(3)
        for work in plain.exchange([(right, torch.full((3,), float(rank)))], [(left, received)]):
            work.wait()
        return received.tolist()

    assert on_each_rank(body) == [[float((rank - 1) % WORLD)] * 3 for rank in range(WORLD)]


def test_an_average_is_divided_once_however_often_it_is_waited_for():
    def body(plain, rank):
        tensor = torch.full((4,), 6.0)
        work = plain.all_reduce(tensor, dist.ReduceOp.AVG)
        work.wait()
        work.wait()
        return tensor.tolist()

    assert on_each_rank(body) == [[6.0] * 4] * WORLD


def gloo_of_two(body) -> None:
    """Run `body` on each of two ranks of a gloo group; it takes the group and the rank."""
    store = dist.HashStore()

    def run(rank: int) -> None:
        body(dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20)), rank)

    with ThreadPoolExecutor(2) as ranks:
        for each in [ranks.submit(run, rank) for rank in range(2)]:
            each.result(timeout=60)


@pytest.mark.parametrize("way", ["asked", "its future"])
def test_an_average_is_divided_once_whoever_looks_at_it_first(way):
    def body(group, rank):
        tensor = torch.full((4,), 6.0)
        work = TorchCollectives(lambda: group).all_reduce(tensor, dist.ReduceOp.AVG)
        if way == "asked":
            deadline = time.monotonic() + 20
            while not work.is_completed():
                assert time.monotonic() < deadline
        else:
            work.get_future().wait()
        assert tensor.tolist() == [6.0] * 4
        work.wait()
        assert work.is_completed() and tensor.tolist() == [6.0] * 4

    gloo_of_two(body)


def test_the_handle_of_a_work_tells_how_it_ended():
    over = threading.Event()

    def body(group, rank):
        tensor = torch.full((3,), rank + 1.0)
        handle = WorkHandle(group.allreduce([tensor]), "the sum")
        assert handle.wait() and handle.is_completed() and handle.is_success() and handle.exception() is None
        assert tensor.tolist() == [3.0] * 3
        if rank == 1:
            over.wait(30)  # without this the connection would close, and rank 0 could not begin to receive
            return
        try:
            lost = WorkHandle(group.recv([tensor], 1, 7), "a message that nobody sends")
            assert not lost.is_completed()
            with pytest.raises(PeerError, match="a message that nobody sends failed"):
                lost.wait(timedelta(milliseconds=200))
            with pytest.raises(PeerError, match="a message that nobody sends failed"):
                lost.wait()
            assert lost.is_completed() and not lost.is_success() and isinstance(lost.exception(), PeerError)
        finally:
            over.set()

    gloo_of_two(body)


# ---------------------------------------------------------------- between some ranks


@pytest.mark.parametrize("numel", [1, 6, 7])
def test_some_ranks_have_collectives_of_their_own(numel):
    ranks = (3, 0, 2)

    def body(transport):
        if transport.rank not in ranks:
            return None
        rank = ranks.index(transport.rank)
        some = SubsetCollectives(transport.plain, ranks, rank)
        highest = torch.arange(numel) * (rank - 1)
        some.all_reduce(highest, dist.ReduceOp.MAX).wait()
        dealt, gathered, sent = (torch.full((count,), -1) for count in (3, 6, 2))
        some.all_to_all_single(dealt, 10 * rank + torch.arange(3)).wait()
        uneven = torch.full((3 * (rank + 1), 2), -1)  # rank r gets r + 1 rows of each rank
        rows = torch.arange(rank, rank + 6)[:, None].expand(6, 2).contiguous()
        some.all_to_all_single(uneven, rows, [rank + 1] * 3, [1, 2, 3]).wait()
        some.all_gather_single(gathered, torch.tensor([rank, 5])).wait()
        if rank == 1:
            sent.fill_(8)
        some.broadcast(sent, 1).wait()
        assert highest.tolist() == list(range(numel))
        assert dealt.tolist() == [rank, 10 + rank, 20 + rank]
        first = sum(range(1, rank + 1))
        assert uneven[:, 0].tolist() == [r + first + i for r in range(3) for i in range(rank + 1)]
        assert gathered.tolist() == [0, 5, 1, 5, 2, 5] and sent.tolist() == [8, 8]
        with pytest.raises(UnsupportedError, match="SUM"):
            some.all_reduce(highest, dist.ReduceOp.SUM)
        return rank

    assert play(4, body, reuse=True) == [1, None, 2, 0]


def test_a_collective_of_some_ranks_is_complete_when_all_of_its_messages_are():
    complete, waited = [True, False], []
    messages = [
        SimpleNamespace(is_completed=lambda i=i: complete[i], wait=lambda *timeout, i=i: waited.append((i, *timeout)))
        for i in range(2)
    ]
    plain = SimpleNamespace(exchange=lambda sends, receives: messages)
    work = SubsetCollectives(plain, (4, 6, 7), 0).broadcast(torch.ones(1), 0)
    assert not work.is_completed()
    complete[1] = True
    assert work.is_completed()
    second = timedelta(seconds=1)
    assert work.wait(second) and waited == [(0, second), (1, second)]


def test_a_future_of_several_messages_ends_with_the_last_or_fails_as_one_does():
    def of_two() -> tuple[Work, list[Future]]:
        futures = [Future(), Future()]
        messages = [
            SimpleNamespace(get_future=lambda each=each: each, is_completed=each.done, wait=lambda *_, each=each: each)
            for each in futures
        ]
        plain = SimpleNamespace(exchange=lambda sends, receives: messages)
        return SubsetCollectives(plain, (4, 6, 7), 0).broadcast(torch.ones(1), 0), futures

    work, (first, second) = of_two()
    whole = work.get_future()
    first.set_result(None)
    assert not whole.done()
    second.set_result(None)
    assert whole.wait() is None

    work, (first, second) = of_two()
    whole = work.get_future()
    first.set_exception(RuntimeError("connection closed"))
    second.set_result(None)
    with pytest.raises(RuntimeError, match="connection closed"):
        whole.wait()
