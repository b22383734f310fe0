"""Short messages between all ranks: they arrive, whole and in order, or it is an error within the time-out."""

import gc
import os
import signal
import socket
import struct
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ncz_plugins.core.errors import PeerError
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.transport import endpoint, mesh
from ncz_plugins.core.transport.mesh import open_mesh
from ncz_plugins.core.transport.mesh_stream import MeshStream
from ncz_plugins.kernels.format import HEADER, HEADER_BYTES, MAGIC

MOST = 1 << 24


def play(world_size: int, body, seconds: float = 30.0, channels: int = 1) -> list:
    """What `body` returns for the mesh of each rank, each on a thread of its own."""
    store = dist.HashStore()

    def run(rank: int):
        opened = open_mesh(store, rank, world_size, timedelta(seconds=seconds), channels)
        try:
            return body(rank, opened)
        finally:
            if opened is not None:
                opened.close("the test is over")

    with ThreadPoolExecutor(world_size) as pool:
        return [each.result(60) for each in [pool.submit(run, rank) for rank in range(world_size)]]


def message(*numbers: int) -> bytes:
    return bytes(numbers)


class Heads:
    """In place of a comparison: `told` goes out, and what others told is in `heard`."""

    def __init__(self, told: bytes):
        self.told, self.heard = told, []

    def hear(self, heard: list[tuple[int, bytes]]) -> None:
        self.heard += heard


def lists(received: list[memoryview]) -> list[list[int]]:
    return [each.tolist() for each in received]


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_each_rank_gets_what_each_other_one_sent_it(world_size):
    def body(rank, opened):
        return lists(opened.start([message(rank, peer) for peer in range(world_size)], 2, 2).wait())

    wanted = [[[peer, rank] for peer in range(world_size) if peer != rank] for rank in range(world_size)]
    assert play(world_size, body) == wanted


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300_000)), min_size=1, max_size=4), st.booleans())
def test_messages_of_any_size_stay_in_order_also_when_several_are_under_way(sizes, in_order):
    """Far more than fits in the buffers of a socket, and waited for in either order."""

    def body(rank, opened):
        started = []
        for at, (head, size) in enumerate(sizes):
            heads = Heads(bytes([10 * rank + at]) * head)
            exchange = opened.tell([bytes([10 * rank + at]) * size] * 2, heads)
            started.append((exchange.receive(0, MOST), heads))
        for at in range(len(sizes))[:: 1 if in_order else -1]:
            exchange, heads = started[at]
            [received], (head, size) = exchange.wait(), sizes[at]
            assert received.tobytes() == bytes([10 * (1 - rank) + at]) * size
            assert heads.heard == [(1 - rank, bytes([10 * (1 - rank) + at]) * head)]

    play(2, body)


@pytest.mark.parametrize("head", [b"", b"ab"])
@pytest.mark.parametrize(
    ("sent", "is_placed"), [(b"xyz", True), (b"", False), (b"xy", False), (b"wxyz", False), (None, False)]
)
def test_a_message_goes_to_its_place_if_it_fits(head, sent, is_placed):
    """None: it has the length, and begins otherwise."""
    theirs = b"?" * len(head) if sent is None else head

    def body(rank, opened):
        if rank == 0:
            opened.tell([b"xyz" if sent is None else sent] * 2, Heads(theirs)).receive(0, 9).wait()
            return None
        place, heads = bytearray(3), Heads(head)
        [came] = opened.tell([b""] * 2, heads).receive(0, 9, [memoryview(place), None]).wait()
        assert heads.heard == [(0, theirs)]
        return came.tobytes(), bytes(place)

    if sent is None:
        sent, is_placed = b"xyz", not head  # there is no other beginning
    assert play(2, body)[1] == ((b"", sent) if is_placed else (sent, bytes(3)))


def test_what_is_to_leave_has_left_by_then_as_well():
    """Who adds to a tensor what comes for it overwrites what it sends."""
    large = bytes(16 << 20)
    returned = threading.Event()

    def body(rank, opened):
        if rank == 0:
            opened.start([large] * 2, 0, 1 << 26).wait()
            returned.set()
            return
        connection = opened._connections[0].socket
        connection.setblocking(True)
        connection.sendall(struct.pack("<q", len(large)) + large)  # which rank 0 takes in meanwhile
        assert not returned.wait(0.3)
        left = len(large) + 8
        while left:
            left -= len(connection.recv(min(left, 1 << 20)))
        assert returned.wait(20)

    play(2, body)


def test_a_message_may_have_more_parts_than_one_system_call_sends():
    parts = tuple(bytes([number % 251]) for number in range(3000))

    def body(rank, opened):
        arrived = bytearray(len(parts))
        messages = [opened.receive(1 - rank, 0, len(parts), memory=memoryview(arrived)), opened.send(1 - rank, parts)]
        opened.finish(messages)
        return bytes(arrived)

    assert play(2, body) == [b"".join(parts)] * 2


def test_a_message_that_waits_for_room_does_not_hold_up_an_exchange_before_it():
    """The peer looks at the large one only after something else that needs this rank."""
    large = bytes(32 << 20)
    between = threading.Barrier(2)

    def body(rank, opened):
        first, second = opened.start([message(1)] * 2, 1, 1), opened.start([large] * 2, 0, 1 << 26)
        first.wait()
        between.wait(20)
        return second.wait()[0].nbytes

    assert play(2, body) == [32 << 20] * 2


def test_a_peer_that_takes_what_it_can_is_not_silent(monkeypatch):
    """However long that takes: only who neither sends nor takes anything runs out of time."""

    class Slow:
        def __init__(self, connection):
            self.connection = connection

        def recvmsg_into(self, memories):
            time.sleep(0.01)
            return self.connection.recvmsg_into([memories[0][: 1 << 16]])

    advance = mesh.Incoming.advance
    monkeypatch.setattr(mesh.Incoming, "advance", lambda message, source: advance(message, Slow(source)))
    sent = np.arange(MOST, dtype=np.uint8)

    def body(rank, opened):
        started = time.monotonic()
        if rank == 0:
            opened.finish([opened.send(1, memoryview(sent))])
            return time.monotonic() - started
        received = opened.receive(0, 0, MOST)
        opened.finish([received])
        return bytes(received.values) == sent.tobytes()

    seconds, is_right = play(2, body, seconds=1)
    assert is_right and seconds > 1


def test_the_longest_time_out_is_none_too_long():
    def body(rank, opened):
        time.sleep(0.2 * rank)
        return lists(opened.start([message(rank)] * 2, 1, 1).wait())

    assert play(2, body, seconds=1e7) == [[[1]], [[0]]]


def test_waiting_to_send_is_not_woken_by_what_is_not_asked_for(monkeypatch):
    """The peer has sent its next message, and takes none of the large one yet."""
    large = bytes(32 << 20)
    sent, counted = threading.Event(), threading.Event()
    polls = []
    wait_for = mesh.Mesh._wait_for
    monkeypatch.setattr(mesh.Mesh, "_wait_for", lambda self, *rest: (polls.append(self), wait_for(self, *rest))[1])

    def count():
        polls.append(len(polls))
        counted.set()

    def body(rank, opened):
        if rank == 1:
            exchanges = [opened.start([message(1)] * 2, 0, 1 << 26) for _ in range(2)]
            sent.set()
            assert counted.wait(20)
            return [len(each.wait()) for each in exchanges]
        assert sent.wait(20)
        first = opened.start([large] * 2, 0, 1 << 26)
        threading.Timer(0.3, count).start()
        first.wait()
        opened.start([message(1)] * 2, 0, 1 << 26).wait()
        assert next(count for count in polls if isinstance(count, int)) < 100

    play(2, body)


def test_what_is_not_awaited_is_taken_in_while_waiting():
    """The peer sends what is awaited after what is not, which is more than fits into buffers."""
    large = bytes(32 << 20)

    def body(rank, opened):
        if rank == 0:
            late, early = opened.receive(1, 0, 1 << 26, channel=1), opened.receive(1, 0, 1 << 26, channel=0)
            opened.finish([early])
            opened.finish([late])
            return late.values.nbytes, early.values.tolist()
        opened.finish([opened.send(0, large, channel=1)])
        opened.finish([opened.send(0, bytes([7]), channel=0)])

    assert play(2, body, seconds=20, channels=2)[0] == (32 << 20, [7])


def test_who_only_sends_takes_in_what_comes_meanwhile():
    """Else two ranks that code and send, and wait only at the end, would hold up each other."""
    large, left, arrived = bytes(32 << 20), threading.Event(), threading.Event()

    def body(rank, opened):
        if rank == 0:
            opened.finish([opened.send(1, large)])
            left.set()
            return arrived.wait(10)  # as what has not been read is lost when a connection is closed
        received = opened.receive(0, 0, 1 << 26)
        deadline = time.monotonic() + 10
        while not left.is_set():
            assert time.monotonic() < deadline
            opened.send(0, b"")
            time.sleep(0.001)
        opened.finish([received])
        arrived.set()

    play(2, body)


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("sent", [0, 3, 8, 1000])
def test_a_peer_that_closes_amid_a_long_message_is_noticed_at_once(sent):
    def body(rank, opened):
        if rank == 1:
            said = struct.pack("<q", 1 << 20) + bytes(1000)
            opened._connections[0].socket.send(said[:sent])
            time.sleep(0.1)
            return opened.close("for this test")
        started = time.monotonic()
        with pytest.raises(PeerError, match="rank 1 has closed its connections"):
            opened.finish([opened.receive(1, 0, 1 << 21)])
        assert time.monotonic() - started < 15

    play(2, body)


def test_a_peer_that_closes_is_noticed_at_once_and_what_it_said_before_is_read():
    def body(rank, opened):
        exchange = opened.start([message(rank)] * 2, 1, 1)
        if rank == 1:
            exchange.wait()
            return None
        time.sleep(0.2)
        first = lists(exchange.wait())
        started = time.monotonic()
        with pytest.raises(PeerError, match="rank 1 has closed its connections"):
            opened.start([message(2)] * 2, 1, 1).wait()
        assert time.monotonic() - started < 10
        return first

    assert play(2, body)[0] == [[1]]


def test_what_a_peer_said_is_read_although_it_closed_with_messages_unread():
    """The system resets such a connection. So closes a rank that finds out that ranks differ: others must hear it."""
    large = bytes(32 << 20)
    closed = threading.Event()

    def body(rank, opened):
        first = opened.start([message(5)] * 2, 1, 1)
        if rank == 1:
            first.wait()
            opened.close("for this test")
            closed.set()
            return None
        second = opened.start([large] * 2, 0, 1 << 26)
        assert closed.wait(20)
        told = lists(first.wait())
        with pytest.raises(PeerError, match="rank 1"):
            second.wait()
        with pytest.raises(PeerError, match="rank 1"):
            opened.start([message(1)] * 2, 1, 1).wait()
        return told

    assert play(2, body)[0] == [[5]]


def test_waiting_for_one_peer_takes_no_core_once_another_one_has_closed():
    """What it closed with is told whenever it is waited for, and not before."""
    closed = threading.Event()

    def body(rank, opened):
        if rank == 2:
            time.sleep(0.5)  # the others wait by then
            opened.close("for this test")
            closed.set()
        elif rank == 1:
            assert closed.wait(20)
            time.sleep(2)
            opened.finish([opened.send(0, message(1))])
        else:
            first, never = opened.receive(1, 1, 1), opened.receive(2, 1, 1)
            started = time.thread_time()
            opened.finish([first])
            used = time.thread_time() - started
            for _ in range(2):
                with pytest.raises(PeerError, match="rank 2 has closed its connections"):
                    opened.finish([never])
            return used

    assert play(3, body)[0] < 0.5


def test_a_message_of_an_impossible_size_is_no_message_when_it_is_waited_for_later():
    def body(rank, opened):
        if rank:
            return opened.finish([opened.send(0, bytes(5 * rank))])
        first, refused = opened.receive(1, 5, 5), opened.receive(2, 1, 9)
        time.sleep(0.2)
        opened.finish([first])
        for _ in range(2):
            with pytest.raises(PeerError, match="rank 2 sent a message of 10 bytes; 1 to 9 are possible"):
                opened.finish([refused])

    play(3, body)


def test_a_silent_peer_is_named_after_the_time_out():
    over = threading.Barrier(3)  # nobody leaves before the others have seen it

    def body(rank, opened):
        started = time.monotonic()
        if rank < 2:
            with pytest.raises(PeerError, match="rank 2 has not answered within the time-out of 1.5 s"):
                opened.start([message(1)] * 3, 1, 1).wait()
            assert 1.4 < time.monotonic() - started < 15
        over.wait(20)

    play(3, body, seconds=1.5)


def test_of_several_receivers_the_one_that_takes_nothing_is_named():
    large, over = bytes(64 << 20), threading.Barrier(3)

    def body(rank, opened):
        if rank == 0:
            with pytest.raises(PeerError, match="rank 1 has not answered"):
                opened.finish([opened.send(1, large), opened.send(2, large)])
        elif rank == 2:
            opened.finish([opened.receive(0, len(large), len(large))])
        over.wait(20)

    play(3, body, seconds=2)


@pytest.mark.parametrize(("sent", "least", "most"), [(3, 4, 10), (11, 4, 10), (1, 0, 0)])
def test_a_message_of_an_impossible_size_is_refused(sent, least, most):
    def body(rank, opened):
        exchange = opened.start([bytes(sent)] * 2, least, most)
        with pytest.raises(PeerError, match=f"sent a message of {sent} bytes; {least} to {most} are possible"):
            exchange.wait()

    play(2, body)


@pytest.mark.parametrize("nbytes", [-1, 1 << 62])
def test_a_length_that_makes_no_sense_takes_no_memory(nbytes):
    def body(rank, opened):
        if rank == 1:
            opened._connections[0].socket.send(struct.pack("<q", nbytes))
            time.sleep(0.2)
            return
        with pytest.raises(PeerError, match="are possible"):
            opened.start([message()] * 2, 0, MOST).wait()

    play(2, body)


@pytest.mark.parametrize("nbytes", [-1, 1, 1 << 62])
def test_such_a_length_is_refused_at_once_although_a_head_is_expected_behind_it(nbytes):
    refused = threading.Event()

    def body(rank, opened):
        if rank == 1:
            opened._connections[0].socket.send(struct.pack("<q", nbytes))
            assert refused.wait(20)
            return
        exchange = opened.tell([b""] * 2, Heads(b"head")).receive(0, MOST - 4, [None, memoryview(bytearray(9))])
        with pytest.raises(PeerError, match=f"sent a message of {nbytes} bytes; 4 to {MOST} are possible"):
            exchange.wait()
        refused.set()

    play(2, body)


def test_another_thread_may_close_while_one_waits():
    noticed = threading.Event()

    def body(rank, opened):
        if rank == 1:
            assert noticed.wait(20)
            return
        threading.Timer(0.2, opened.close, ["closed by somebody else"]).start()
        started = time.monotonic()
        with pytest.raises(PeerError, match="closed by somebody else"):
            opened.start([message(1)] * 2, 1, 1).wait()
        assert time.monotonic() - started < 15  # half of the time-out
        noticed.set()
        for use in (
            lambda: opened.start([message(1)] * 2, 1, 1),
            lambda: opened.send(1, b"x"),
            lambda: opened.receive(1, 1, 1),
        ):
            with pytest.raises(PeerError, match="closed by somebody else"):
                use()
        opened.close("closed once more")
        with pytest.raises(PeerError, match="closed by somebody else"):
            opened.send(1, b"x")

    play(2, body)


def test_closing_lets_go_of_the_memory_of_what_was_under_way():
    def body(rank, opened):
        opened.start([bytes(32 << 20)] * 2, 0, 1 << 26)  # of which some has left
        opened.close("for this test")
        return [len(peer.outgoing) + len(peer.incoming) for peer in opened._connections]

    assert play(2, body) == [[0]] * 2


def test_a_fork_does_not_keep_connections_open():
    """Else nobody would notice the death of a rank whose data loaders live on."""

    def body(rank, opened):
        if rank == 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: that is the subject
                process = os.fork()
            if process == 0:
                time.sleep(30)
                os._exit(0)
            opened.close("the parent is over")
            return process
        started = time.monotonic()
        with pytest.raises(PeerError, match="rank 1 has closed"):
            opened.start([message(1)] * 2, 1, 1).wait()
        assert time.monotonic() - started < 15
        return None

    process = play(2, body)[1]
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


# ---------------------------------------------------------------- several channels


@pytest.mark.parametrize("world_size", [2, 3])
@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.integers(1, 600_000), min_size=1, max_size=12), channels=st.integers(1, 5))
def test_frames_take_channels_in_turns_and_come_in_order(world_size, sizes, channels):
    def frame(rank: int, at: int, size: int) -> torch.Tensor:
        values = torch.full((HEADER_BYTES + size,), 10 * rank + at, dtype=torch.uint8)
        header = HEADER.pack(MAGIC, 0, 0, 0, 0, size, size, 0, 0)
        values[:HEADER_BYTES] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        return values

    def body(rank, opened):
        to, source = (rank + 1) % world_size, (rank - 1) % world_size
        counters = Counters()
        stream = MeshStream(opened, to, source, [1] * len(sizes), HEADER_BYTES + max(sizes), counters)
        for at, size in enumerate(sizes):
            stream.send(frame(rank, at, size))
        for at, size in enumerate(sizes):
            assert torch.equal(stream.receive(), frame(source, at, size))
        stream.finish()
        assert opened.channels == channels and counters.wire_bytes == sum(HEADER_BYTES + size for size in sizes)

    play(world_size, body, channels=channels)


def test_channels_that_are_not_in_use_can_be_closed():
    def body(rank, opened):
        count = len(opened._connections)
        opened.channels = 2
        opened.close_unused()
        assert (count, len(opened._connections), opened.channels) == (10, 4, 2)
        for channel in range(2):
            for peer in {0, 1, 2} - {rank}:
                opened.send(peer, bytes([10 * rank + channel]), channel)
            messages = [opened.receive(peer, 1, 1, channel) for peer in sorted({0, 1, 2} - {rank})]
            opened.finish(messages)
            expected = [10 * peer + channel for peer in sorted({0, 1, 2} - {rank})]
            assert [message.values[0] for message in messages] == expected

    play(3, body, channels=5)


def test_the_end_of_one_channel_is_noticed():
    def body(rank, opened):
        if rank == 1:
            opened._by_rank[0][2].socket.close()
            return
        message = opened.receive(1, 1, MOST, channel=2)
        with pytest.raises(PeerError, match="rank 1 has closed"):
            opened.finish([message])

    play(2, body, channels=3)


# ---------------------------------------------------------------- connecting


def test_strangers_are_turned_away_and_do_not_hold_ranks_up(monkeypatch):
    """They come first, and say nothing, too little, or something else; or know the secret, and are not expected."""
    monkeypatch.setattr(endpoint, "_HELLO_SECONDS", 0.2)
    monkeypatch.setattr(endpoint.secrets, "token_bytes", lambda count: bytes(range(count)))
    listen, secret = endpoint._listener, bytes(range(16))
    said = [b"", b"short", endpoint._HELLO.pack(bytes(16), 1, 0)]
    said += [endpoint._HELLO.pack(secret, rank, channel) for rank, channel in ((0, 0), (2, 0), (1, 1))]

    def visited(address):
        listener = listen(address)
        for hello in said:
            visitors.append(socket.create_connection(listener.getsockname()))
            visitors[-1].send(hello)
        return listener

    visitors: list[socket.socket] = []
    monkeypatch.setattr(endpoint, "_listener", visited)
    assert play(2, lambda rank, opened: lists(opened.start([message(rank)] * 2, 1, 1).wait())) == [[[1]], [[0]]]
    for visitor in visitors:
        visitor.close()


def test_who_closes_before_saying_hello_is_not_waited_for(monkeypatch):
    listen = endpoint._listener

    def visited(address):
        listener = listen(address)
        socket.create_connection(listener.getsockname()).close()
        return listener

    monkeypatch.setattr(endpoint, "_listener", visited)
    started = time.monotonic()
    play(2, lambda rank, opened: opened.start([message(rank)] * 2, 1, 1).wait())
    assert time.monotonic() - started < 0.8 * endpoint._HELLO_SECONDS


def late(monkeypatch, before: float = 0, after: float = 0) -> None:
    """The first connection is made after so many seconds, and says hello after some more."""
    for name, seconds in {"connect_ex": before, "sendall": after}.items():
        monkeypatch.setattr(socket.socket, name, slow_at_first(getattr(socket.socket, name), seconds))


def slow_at_first(method, seconds: float):
    calls = []

    def slowly(*arguments):
        calls.append(1)
        time.sleep(seconds if len(calls) == 1 else 0)
        return method(*arguments)

    return slowly


def test_who_says_hello_too_late_is_let_in_when_it_comes_again(monkeypatch):
    """As a process that was stopped for a moment, or swapped out."""
    monkeypatch.setattr(endpoint, "_HELLO_SECONDS", 0.1)
    late(monkeypatch, after=0.5)
    assert play(2, lambda rank, opened: lists(opened.start([message(rank)] * 2, 1, 1).wait())) == [[[1]], [[0]]]


def test_a_time_out_that_a_socket_could_not_count_is_none_too_long(monkeypatch):
    late(monkeypatch, before=1.5)
    wrapped = 2**32 / 1000 + 1  # modulo 2^32 milliseconds, a second
    assert len(play(2, lambda rank, opened: rank, seconds=wrapped)) == 2


def test_a_rank_that_does_not_come_is_an_error_within_the_time_out():
    with pytest.raises(PeerError, match="connecting to the other ranks"):
        open_mesh(dist.HashStore(), 0, 2, timedelta(seconds=0.2))


def test_strangers_do_not_make_it_longer_than_the_time_out(monkeypatch):
    listen, visitors = endpoint._listener, []

    def visited(address):
        listener = listen(address)
        visitors.extend(socket.create_connection(listener.getsockname()) for _ in range(5))
        return listener

    monkeypatch.setattr(endpoint, "_listener", visited)
    store = dist.HashStore()
    store.set("1", f"127.0.0.1 1 {bytes(16).hex()}")  # a rank that never connects
    started = time.monotonic()
    with pytest.raises(PeerError, match="rank 1 has not connected within the time-out of 0.5 s"):
        open_mesh(store, 0, 2, timedelta(seconds=0.5))
    assert time.monotonic() - started < 4
    for visitor in visitors:
        visitor.close()


def test_an_address_that_nothing_can_listen_at_is_none(monkeypatch):
    monkeypatch.setattr(endpoint, "own_address", lambda: "203.0.113.7")  # for documentation, nobody has it
    assert play(2, lambda rank, opened: opened) == [None] * 2


def test_a_mesh_that_nobody_closed_closes_its_sockets_without_a_warning():
    def body(rank, opened):
        return [peer.socket for peer in opened._connections]

    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool, warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        jobs = [pool.submit(lambda r=rank: body(r, open_mesh(store, r, 2, timedelta(seconds=20)))) for rank in range(2)]
        sockets = [each for job in jobs for each in job.result(30)]
    gc.collect()
    assert all(each.fileno() == -1 for each in sockets)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_says_where_it_is_and_is_not_there(rank):
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    store.set(f"{1 - rank}", f"127.0.0.1 {port} {bytes(16).hex()}")
    started = time.monotonic()
    with pytest.raises(PeerError, match=f"rank {1 - rank} (has not connected|can.t be reached)"):
        open_mesh(store, rank, 2, timedelta(seconds=0.5))
    assert time.monotonic() - started < 10


def test_none_of_them_connects_where_one_can_not(monkeypatch):
    calls = iter([None, "127.0.0.1", "127.0.0.1"])
    lock = threading.Lock()

    def address():
        with lock:
            return next(calls)

    monkeypatch.setattr(endpoint, "own_address", address)
    assert play(3, lambda rank, opened: opened) == [None] * 3


def test_where_gloo_is_to_encrypt_nothing_goes_round_it(monkeypatch):
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "TCP_TLS")
    assert play(2, lambda rank, opened: opened) == [None] * 2
