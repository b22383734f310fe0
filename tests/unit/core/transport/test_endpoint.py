"""Ranks that connect notice who has died, hear who gives up, and are let in whatever strangers do."""

import os
import socket
import stat
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist

from ncz_plugins.core.errors import PeerError
from ncz_plugins.core.transport import mesh
from ncz_plugins.core.transport.connections import Connections
from ncz_plugins.core.transport.endpoint import Endpoint

SOON = 8.0  # seconds; the time-out is 30


@pytest.fixture
def endpoints():
    store = dist.HashStore()
    with ExitStack() as closing:
        opened = [Endpoint(store, rank, timedelta(seconds=30)) for rank in range(3)]
        for each in opened:
            closing.callback(each.close)
        yield opened


def error_of(endpoint: Endpoint, peer: int) -> str:
    """Why it can't connect, which it learns soon."""
    started = time.monotonic()
    with pytest.raises(PeerError) as caught:
        endpoint.connect([peer], range(1))
    assert time.monotonic() - started < SOON
    return str(caught.value)


def connected(endpoints, *pair: int) -> bool:
    with ThreadPoolExecutor(2) as pool:
        sockets = list(pool.map(lambda rank: endpoints[rank].connect(set(pair) - {rank}, range(1)), pair))
    for each in [each for of_one in sockets for each in of_one.values()]:
        each.close()
    return len(sockets) == 2


@pytest.mark.parametrize(("waiting", "dead"), [(0, 1), (1, 0)])
def test_a_rank_that_died_is_noticed_by_those_that_call_it_and_by_those_that_it_should_call(endpoints, waiting, dead):
    endpoints[dead].close()
    assert error_of(endpoints[waiting], dead).startswith(f"rank {dead} can't be reached")


@pytest.mark.parametrize(("waiting", "dead"), [(0, 1), (1, 0)])
def test_a_rank_that_dies_meanwhile_is_noticed_as_well(endpoints, waiting, dead):
    dying = threading.Timer(2.5, endpoints[dead].drop)
    dying.start()
    assert error_of(endpoints[waiting], dead).startswith(f"rank {dead} can't be reached")
    dying.join()


@pytest.mark.parametrize("peer", [0, 2])
def test_words_are_heard_by_a_rank_that_waits_for_a_call_or_for_an_answer(endpoints, peer):
    endpoints[peer].address_of(1)
    other = 2 - peer
    endpoints[other].address_of(1)
    speaking = threading.Timer(0.3, lambda: endpoints[other].tell("rank 7 has failed", [1]))
    speaking.start()
    assert error_of(endpoints[1], peer) == endpoints[1].cause == "rank 7 has failed"
    speaking.join()


def test_who_can_not_be_reached_may_have_said_why(endpoints):
    endpoints[0].address_of(1)
    endpoints[0].tell("rank 7 has failed", [1])
    endpoints[0].close()
    assert error_of(endpoints[1], 0) == "rank 7 has failed"


def test_words_that_blame_a_rank_count_for_it_once_nobody_answers(endpoints):
    for peer in (0, 1):
        endpoints[2].address_of(peer)
    endpoints[2].tell("rank 1 has not answered", [1])
    assert connected(endpoints, 0, 1)
    endpoints[0].close()
    assert error_of(endpoints[1], 0) == "rank 1 has not answered"


@pytest.mark.parametrize("peer", [0, 2])
def test_another_thread_may_close_while_one_connects(endpoints, peer):
    closing = threading.Timer(0.3, lambda: endpoints[1].close("closed for this test"))
    closing.start()
    assert error_of(endpoints[1], peer) == "closed for this test"
    closing.join()


def open_sockets() -> set[int]:
    found = set()
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):  # closed by now
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                found.add(number)
    return found


@pytest.mark.parametrize("peer", [0, 2])
def test_a_fork_keeps_no_connection_that_is_under_way(endpoints, peer):
    """Otherwise a peer would not notice that this process has ended."""
    before = open_sockets() - {each._listener.fileno() for each in endpoints}
    connecting = threading.Thread(target=error_of, args=(endpoints[1], peer))
    connecting.start()
    deadline = time.monotonic() + SOON
    while not open_sockets() - before > {each._listener.fileno() for each in endpoints}:
        assert time.monotonic() < deadline
    time.sleep(0.3)  # until the endpoint knows of it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: that is the subject
        process = os.fork()
    if process == 0:
        os._exit(len(open_sockets() - before))
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    endpoints[1].close()
    connecting.join()


@pytest.mark.parametrize("count", [20, 200])
def test_silent_strangers_neither_hold_ranks_up_nor_take_all_descriptors(endpoints, count):
    with ExitStack() as closing:
        for _ in range(count):
            closing.enter_context(socket.create_connection(endpoints[0]._listener.getsockname()))
        before, started = len(open_sockets()), time.monotonic()
        assert connected(endpoints, 0, 1)
        assert time.monotonic() - started < 4  # less than one of them may take to say hello
        assert len(open_sockets()) - before <= 64


def test_a_rank_that_fails_tells_those_that_have_called_it():
    """One of them waits for messages, and is no neighbor of the rank that fails."""
    n, peer = 8, 3  # ranks of 0 in agreements are 1, 2, 4, 6 and 7
    store = dist.HashStore()

    def opened(rank: int) -> Connections:
        return Connections(store, rank, n, timedelta(seconds=30))

    with patch.object(mesh, "MOST_RANKS", 2), ThreadPoolExecutor(n) as pool:
        ranks = list(pool.map(opened, range(n)))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks[0].frames.connect, [5])  # which never comes
        ranks[peer].frames.connect([0])
        deadline = time.monotonic() + SOON
        while peer not in ranks[0].frames._endpoint.known:  # rank 0 is yet to read its address
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ranks[0].close(MemoryError("for this test"))
        with pytest.raises(PeerError, match="rank 0 has failed: MemoryError"):
            ranks[peer].frames.finish([ranks[peer].frames.receive(0, 1, 1)])
        with pytest.raises(PeerError, match="closed after MemoryError"):
            waiting.result()
    for each in ranks:
        each.close()
