"""Who owns connections closes them: peers notice at once, whatever still refers to what went through them."""

import gc
import math
import os
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import play

from ncz_plugins.core.errors import FrameError, PeerError
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.transport import mesh
from ncz_plugins.core.transport.agreements import MAX_BYTES_WITH_COMPARISON, distances, memory_of
from ncz_plugins.core.transport.comparison import Extremes, RankComparison
from ncz_plugins.core.transport.connections import Connections, timeout_of
from ncz_plugins.core.transport.gloo import GlooTransport
from ncz_plugins.core.transport.routes import Routes
from ncz_plugins.kernels.format import HEADER, HEADER_BYTES, MAGIC

CAPACITY = 4096
SOON = 20.0  # seconds; the time-out is 60
TAG = 7


def stream_of(transport):
    """A stream to and from the other one of two ranks."""
    (stream,) = transport.streams([(1 - transport.rank,) * 2], [1, 1], CAPACITY, Counters())
    return stream


def require_error_soon(wait) -> None:
    started = time.monotonic()
    with pytest.raises(PeerError):
        wait()
    assert time.monotonic() - started < SOON


# ---------------------------------------------------------------- closing


def receive_damage(transport, stream) -> None:
    stream.receive()


def ask_for_too_much(transport, stream) -> None:
    transport.plain.broadcast(torch.zeros(3), root=99)  # gloo's own error


def send_what_gloo_refuses(transport, stream) -> None:
    transport._connections.send(torch.zeros(3, 4).t(), 1, TAG)


@pytest.mark.parametrize("fail", [receive_damage, ask_for_too_much, send_what_gloo_refuses])
def test_a_peer_notices_at_once_although_the_exception_is_kept(fail):
    noticed = threading.Event()

    def misbehave(transport) -> None:
        stream = stream_of(transport)
        plain = transport.plain.all_reduce(torch.zeros(3))
        plain.wait()
        under_way = [
            transport.start_max(torch.zeros(1), Counters()),
            transport._connections.receive(torch.zeros(3), 1, TAG),
            transport._connections.send(torch.zeros(3), 1, TAG),
        ]
        assert plain and under_way  # which the traceback keeps, as well as the stream
        fail(transport, stream)

    def body(transport):
        if transport.rank == 0:
            with pytest.raises((FrameError, RuntimeError, ValueError)) as kept:
                misbehave(transport)
            transport.abort(kept.value)
            assert noticed.wait(60)
            frames = [entry.frame.f_locals for entry in kept.traceback]
            assert any("under_way" in names for names in frames)
            return
        stream = stream_of(transport)
        transport.plain.all_reduce(torch.zeros(3)).wait()

        def talk() -> None:
            stream.send(torch.full((CAPACITY,), 7, dtype=torch.uint8))  # fails where rank 0 has closed already
            stream.receive()

        require_error_soon(talk)
        noticed.set()

    play(2, body)


def test_what_is_used_after_closing_says_why():
    opened = threading.Barrier(2)

    def body(transport):
        stream = stream_of(transport)
        pending = transport._connections.receive(torch.zeros(3), 1 - transport.rank, TAG)
        opened.wait(60)
        transport.abort(FrameError("a frame is damaged"))
        transport.close()  # too late to matter
        for use in (
            stream.receive,
            pending.wait,
            lambda: stream.send(torch.zeros(8, dtype=torch.uint8)),
            lambda: stream_of(transport),
            lambda: transport.start_max(torch.zeros(1), Counters()),
            lambda: transport.plain.all_reduce(torch.zeros(3)),
        ):
            with pytest.raises(PeerError, match="closed after .*a frame is damaged"):
                use()

    play(2, body)


def test_what_was_sent_before_closing_arrives():
    def body(transport):
        stream = stream_of(transport)
        if transport.rank == 0:
            sent = transport._connections.send(torch.arange(100_000), 1, TAG)
            sent.wait()
            transport.close()
            return None
        time.sleep(0.2)  # so that it has been closed by then, most of the time
        received = torch.zeros(100_000, dtype=torch.int64)
        transport._connections.receive(received, 0, TAG).wait()
        require_error_soon(stream.receive)
        return received

    assert torch.equal(play(2, body)[1], torch.arange(100_000))


def test_another_thread_may_close_while_one_waits():
    """The wait ends, at the latest when the peer closes as well, and the peer does not have to wait for that."""

    def body(transport):
        stream = stream_of(transport)
        closing = threading.Timer(0.2, lambda: [transport.close() for _ in range(2)])
        closing.start()
        with pytest.raises(PeerError):
            if transport.rank == 0:
                stream.receive()
            else:
                closing.join()
                stream.receive()
        closing.join()

    started = time.monotonic()
    play(2, body)
    assert time.monotonic() - started < SOON


# ---------------------------------------------------------------- what is under way


def test_memory_of_a_receive_lives_until_its_message_is_there():
    """Gloo still fills the buffer of a receive that nobody refers to any more; the next receive gets what follows."""

    def body(transport):
        if transport.rank == 0:
            for i in range(3):
                transport._connections.send(torch.full((CAPACITY,), i), 1, TAG).wait()
            return None
        for _ in range(2):
            transport._connections.receive(torch.zeros(CAPACITY, dtype=torch.int64), 0, TAG)
            gc.collect()
        received = torch.zeros(CAPACITY, dtype=torch.int64)
        transport._connections.receive(received, 0, TAG).wait()
        transport.close()
        return received

    assert torch.equal(play(2, body)[1], torch.full((CAPACITY,), 2))


def test_what_is_over_is_forgotten():
    def body(transport):
        connections, peer = transport._connections, 1 - transport.rank
        works = [connections.receive(torch.zeros(1), peer, TAG), connections.send(torch.zeros(1), peer, TAG)]
        assert len(connections._under_way) == 2
        for work in works * 2:  # waiting again does no harm
            assert work.wait()
        transport.start_max(torch.zeros(1), Counters()).wait()
        transport.plain.all_reduce(torch.zeros(1)).wait()
        assert not connections._under_way

    play(2, body, way="gloo")


def test_a_fork_closes_nothing():
    def body(transport):
        if transport.rank == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: that is the subject
                process = os.fork()
            if process == 0:
                try:
                    transport.close()
                    transport.abort(RuntimeError("in a fork"))
                    del transport
                finally:
                    os._exit(0)
            deadline = time.monotonic() + SOON
            while not os.waitpid(process, os.WNOHANG)[0]:
                assert time.monotonic() < deadline, "the fork hangs"
                time.sleep(0.01)
        tensor = torch.tensor([float(transport.rank)])
        transport.start_max(tensor, Counters()).wait()
        return tensor.item()

    assert play(2, body) == [1.0, 1.0]


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nbytes", [2, 16 << 10, 100_000, 262_147])
def test_a_maximum_is_the_same_on_all_ranks_and_costs_the_fewest_bytes(world_size, dtype, nbytes):
    """Whatever its size, also with two under way."""
    numel = max(1, nbytes // dtype.itemsize)
    values = torch.rand(2, world_size, numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = values.amax(1)

    def body(transport):
        counters, mine = Counters(), [each[transport.rank].clone() for each in values]
        for agreement in [transport.start_max(each, counters) for each in mine]:
            agreement.wait()
        assert all(torch.equal(found, right) for found, right in zip(mine, expected))
        return counters.wire_bytes / 2 / mine[0].nbytes

    for sent in play(world_size, body, reuse=True):
        n = world_size
        in_one_round = n == 2 or numel * dtype.itemsize * (n - 1) <= 256 << 10
        assert sent == pytest.approx(n - 1 if in_one_round else 2 * (n - 1) / n, rel=1e-3)


# ---------------------------------------------------------------- routes


def routes_of(world_size: int, body) -> list:
    """What `body` returns for each rank's routes."""
    store = dist.HashStore()
    return play(world_size, lambda transport: body(Routes(store, transport.rank, world_size, timedelta(seconds=60))))


def test_host_memory_has_a_route_from_the_start():
    def body(routes):
        device, transport = routes.of(torch.device("cpu"))
        assert isinstance(device, Host) and isinstance(transport, GlooTransport)
        assert routes.of(torch.device("cpu")).transport is transport
        transport.start_max(torch.zeros(1), Counters()).wait()
        for _ in range(2):
            routes.close()
        with pytest.raises(PeerError, match="closed"):
            routes.of(torch.device("cpu"))
        with pytest.raises(PeerError, match="closed"):
            transport.start_max(torch.zeros(1), Counters())

    routes_of(2, body)


def test_aborting_routes_frees_the_tensors_of_the_call_that_failed():
    noticed = threading.Event()

    def call(transport) -> None:
        stream, large = stream_of(transport), torch.zeros(1000)
        assert stream and large is not None
        raise MemoryError("for this test")

    def body(routes):
        _, transport = routes.of(torch.device("cpu"))
        if transport.rank == 1:
            require_error_soon(stream_of(transport).receive)
            return noticed.set()
        with pytest.raises(MemoryError) as kept:
            call(transport)
        routes.abort(kept.value)
        assert not any("large" in entry.frame.f_locals for entry in kept.traceback)
        assert noticed.wait(60)

    routes_of(2, body)


def test_a_rank_that_does_not_come_is_an_error():
    with pytest.raises(PeerError, match="connecting to the other ranks"):
        Connections(dist.HashStore(), 0, 2, timedelta(seconds=0.2))


@pytest.mark.parametrize("use", ["plain collectives", "frames"])
def test_what_connects_later_does_not_need_the_store_of_others(use):
    """Another thread waits in it until a rank has connected, as `new_group` waits for a rank that waits for a call."""
    n = 8
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = [dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(n)]

    def on_rank(rank, pool):
        connections = Connections(dist.PrefixStore("connections", shared[rank]), rank, n, timedelta(seconds=60))
        waiting = pool.submit(shared[rank].wait, ["connected"], timedelta(seconds=30)) if rank else None
        time.sleep(0.2)  # so that it waits
        if use == "frames":
            connections.frames.connect([(rank + 3) % n, (rank - 3) % n])  # of which agreements take none
        else:
            assert connections.group is not None
        if rank:
            waiting.result()
        else:
            shared[rank].set("connected", "")
        connections.close()

    with patch.object(mesh, "MOST_RANKS", 2 if use == "frames" else mesh.MOST_RANKS), ThreadPoolExecutor(2 * n) as pool:
        for each in [pool.submit(on_rank, rank, pool) for rank in range(n)]:
            each.result()


def test_closed_connections_let_go_of_the_store():
    def body(rank):
        mine = dist.PrefixStore("", store)
        connections = Connections(mine, rank, 2, timedelta(seconds=60))
        known = weakref.ref(mine)
        del mine
        connections.close()
        return known() is None

    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(body, range(2))) == [True, True]


# ---------------------------------------------------------------- how calls begin


def test_a_call_that_opens_with_values_meets_one_that_only_compares():
    """Both learn the maximum: neither knows beforehand what the other one does."""

    def body(transport):
        comparison = RankComparison({"call": transport.rank}, transport.rank, 2)
        if transport.rank == 0:
            transport.start_comparison(comparison, Counters()).wait()
        else:
            values = torch.ones(MAX_BYTES_WITH_COMPARISON, dtype=torch.uint8)
            mesh = transport._connections.mesh
            mesh.tell([memory_of(values)] * 2, comparison).receive(0, MAX_BYTES_WITH_COMPARISON).wait()
        return comparison.differing()

    assert play(2, body) == [{"call": Extremes(0, 0, 1, 1)}] * 2


def test_values_reach_the_ranks_that_they_are_for():
    def body(transport):
        outgoing = [memory_of(torch.full((to + 1,), 10.0 * transport.rank + to)) for to in range(3)]
        comparison = RankComparison({"call": 7}, transport.rank, 3)
        received = transport._connections.mesh.tell(outgoing, comparison).receive(0, MAX_BYTES_WITH_COMPARISON).wait()
        return [message.cast("f").tolist() for message in received]

    wanted = [[[10.0], [20.0]], [[1.0] * 2, [21.0] * 2], [[2.0] * 3, [12.0] * 3]]
    assert play(3, body) == wanted


def test_the_time_out_of_a_group_is_that_of_a_backend_or_the_default():
    seconds = timedelta(seconds=17)
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, seconds)
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    assert timeout_of(group) == dist.distributed_c10d.default_pg_timeout
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    assert timeout_of(group) == seconds


# ---------------------------------------------------------------- more ranks than tell each other directly


@pytest.mark.parametrize("way", ["sparse", "gloo"])
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 7, 9_000, 40_001])
def test_a_maximum_in_rounds_is_that_of_all_ranks_and_costs_two_tensors(way, world_size, dtype, numel):
    """Whatever its size, also with two under way; small ones take half the rounds, and more bytes."""
    drawn = torch.rand(2, world_size, numel, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = (1000 * drawn - 500).to(dtype)
    expected = values.amax(1)

    def body(transport):
        counters, mine = Counters(), [each[transport.rank].clone() for each in values]
        for agreement in [transport.start_max(each, counters) for each in mine]:
            agreement.wait()
        assert all(torch.equal(found, right) for found, right in zip(mine, expected))
        return counters.wire_bytes / 2 / mine[0].nbytes

    n = world_size
    rounds = len(distances(n))
    is_spread = numel * dtype.itemsize * rounds <= 64 << 10
    for sent in play(n, body, way=way, reuse=True):
        assert sent == pytest.approx(rounds if is_spread else 2 * (n - 1) / n, rel=2e-3)


@pytest.mark.parametrize("world_size", [17, 32, 33])
def test_many_ranks_agree_in_few_rounds_over_few_connections(world_size):
    """Also on several things at a time, and on what is too large for that."""

    def body(transport):
        connections, rank, rounds = transport._connections, transport.rank, math.ceil(math.log2(world_size))
        comparison = RankComparison({"rank": rank, "call": 7}, rank, world_size)
        floats = torch.linspace(0, 1, 100) + (rank == 3)
        agreements = [transport.start_comparison(comparison, Counters()), transport.start_max(floats, Counters())]
        for each in agreements:
            each.wait()
        assert comparison.differing() == {"rank": Extremes(0, 0, world_size - 1, world_size - 1)}
        assert torch.equal(floats, torch.linspace(0, 1, 100) + 1)
        large = torch.full((20_000,), float(rank))
        transport.start_max(large, Counters()).wait()
        assert (large == world_size - 1).all()
        assert connections.mesh is None
        assert len(connections.neighbors.ranks) <= 2 * rounds and not connections.frames.ranks

    play(world_size, body)


@pytest.mark.parametrize("world_size", [2, 5, 17])
@pytest.mark.parametrize("numel", [1, 2_001])
def test_values_travel_with_the_comparison_of_many_ranks(world_size, numel):
    """In as many rounds; where ranks have other numbers of them, their comparison says so."""
    values = torch.rand(world_size, numel, generator=torch.Generator().manual_seed(0)).bfloat16()

    def body(transport):
        rank, counters = transport.rank, Counters()
        comparison, mine = RankComparison({"call": 7}, rank, world_size), values[rank].clone()
        assert mine.nbytes <= transport.most_with_comparison
        transport.start_comparison(comparison, counters, mine).wait()
        assert not comparison.differing() and torch.equal(mine, values.amax(0))
        assert counters.wire_bytes == len(distances(world_size)) * (2 * 8 + mine.nbytes)
        last = rank == world_size - 1
        comparison = RankComparison({"call": 7 + last}, rank, world_size)
        transport.start_comparison(comparison, counters, None if last else mine).wait()
        return comparison.differing()

    found = play(world_size, body, way="sparse", reuse=True)
    assert found == [{"call": Extremes(7, 0, 8, world_size - 1)}] * world_size


@pytest.mark.parametrize("schedule", ["ring", "far", "all"])
def test_ranks_are_connected_with_those_that_they_exchange_frames_with(schedule):
    """Whoever comes first, and in whatever order they are asked for."""
    n = 7
    distances_of = {"ring": [1], "far": [3, 2], "all": list(range(1, n))}[schedule]

    def body(transport):
        pairs = [((transport.rank + by) % n, (transport.rank - by) % n) for by in distances_of]
        streams = [transport.streams([pair], [1], CAPACITY, Counters())[0] for pair in pairs]
        frame = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        HEADER.pack_into(frame.numpy(), 0, MAGIC, *[0] * (len(HEADER.unpack(bytes(HEADER.size))) - 1))
        for stream in streams:
            stream.send(frame)
        for stream in streams:
            assert torch.equal(stream.receive(), frame)
            stream.finish()
        return sorted(transport._connections.frames.ranks)

    for rank, connected in enumerate(play(n, body, way="sparse")):
        assert connected == sorted({(rank + sign * by) % n for by in distances_of for sign in (1, -1)})


@pytest.mark.parametrize("world_size", [5, 17])
@pytest.mark.parametrize("nbytes", [8, 1 << 20])
def test_a_rank_that_fails_is_named_by_all_with_what_happened(world_size, nbytes):
    """Most are not connected with it."""
    opened = threading.Barrier(world_size)

    def body(transport):
        opened.wait(60)
        if transport.rank == 4:
            transport.abort(MemoryError("for this test"))
            return "its own"
        return failure_of(transport, nbytes)

    *found, of_last = play(world_size, body, way="sparse")
    for rank, message in enumerate([*found, of_last]):
        assert rank == 4 or "rank 4 has failed: MemoryError('for this test')" in message, (rank, message)


@pytest.mark.parametrize("world_size", [5, 17])
def test_a_rank_that_dies_is_named_by_all(world_size):
    """It says nothing: its sockets are closed, as at the end of a process."""
    opened = threading.Barrier(world_size)

    def body(transport):
        opened.wait(60)
        if transport.rank == 4:
            for each in (transport._connections.neighbors, transport._connections.frames):
                each.drop()
            return "its own"
        return failure_of(transport, 8)

    for rank, message in enumerate(play(world_size, body, way="sparse")):
        assert rank == 4 or "rank 4 has closed its connections" in message, (rank, message)


def test_a_silent_rank_is_named_by_all():
    """Also by those that wait for ranks that wait for it themselves."""
    n, seconds = 9, 2.0
    store, done = dist.HashStore(), threading.Barrier(n)

    def body(connections):
        rank = connections.rank
        found = "its own"
        if rank != 4:
            found = failure_of(GlooTransport(connections), 8)
        done.wait(60)
        return found

    def on_rank(rank):
        return body(Connections(store, rank, n, timedelta(seconds=seconds)))

    with patch.object(mesh, "MOST_RANKS", 2), ThreadPoolExecutor(n) as pool:
        found = list(pool.map(on_rank, range(n)))
    for rank, message in enumerate(found):
        assert rank == 4 or message.startswith("rank 4 has not answered within"), (rank, message)


def failure_of(transport, nbytes: int) -> str:
    """The error of agreements, the first of which may still succeed where a rank has begun it. Closes after it."""
    started = time.monotonic()
    with pytest.raises(PeerError) as caught:
        while True:
            transport.start_max(torch.zeros(nbytes // 8, dtype=torch.int64), Counters()).wait()
    transport.abort(caught.value)
    assert time.monotonic() - started < SOON
    return str(caught.value)
