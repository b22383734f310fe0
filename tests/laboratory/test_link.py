"""The laboratory's network: bytes really cross it, no more than the rate lets through, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import gone
from links import needs_links

from benchmarks.laboratory.link import Node, bits_per_second, link
from ncz_plugins.core.errors import ConfigError, UnsupportedError

SECONDS = 60
RECEIVER = """
import socket, sys
connections = []
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    for _ in range(int(sys.argv[2])):
        connections.append(server.accept()[0])
while connections:
    connections = [connection for connection in connections if connection.recv(1 << 20)]
"""
SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


def send(senders: list[Node], receiver: Node, size: int) -> None:
    """Send `size` bytes from each sender by TCP; returns when all have arrived."""
    command = [sys.executable, "-c", RECEIVER, receiver.address, str(len(senders))]
    with subprocess.Popen(receiver.command(command), stdout=subprocess.PIPE) as receiving:
        receiving.stdout.readline()
        command = [sys.executable, "-c", SENDER, receiver.address, str(size)]
        sending = [subprocess.Popen(sender.command(command)) for sender in senders]
        assert [process.wait(SECONDS) for process in [*sending, receiving]] == [0] * (len(senders) + 1)


@pytest.mark.parametrize(
    ("rate", "bits"),
    [("1gbit", 1e9), ("2.5gbit", 2.5e9), ("100mbit", 1e8), ("56kbit", 56e3), ("unlimited", None), (None, None)],
)
def test_rates(rate, bits):
    assert bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["", "fast", "1", "1gb", "0gbit", "-1gbit", "1 gbit", "1e3mbit", "\u0661gbit"])
def test_what_is_no_rate_is_told(rate):
    with pytest.raises(ConfigError, match="1gbit, 2.5gbit, 100mbit or unlimited"), link(2, rate):
        pass


@needs_links
def test_bytes_cross_the_link_and_are_counted():
    size = 3_000_000
    with link(2) as (sender, receiver):
        send([sender], receiver, size)
        for counted in (sender.bytes_sent(), receiver.bytes_received()):
            assert size < counted < 1.1 * size
        for counted in (sender.bytes_received(), receiver.bytes_sent()):
            assert 0 < counted < 0.1 * size


@needs_links
def test_what_stays_inside_a_node_does_not_cross_its_link():
    with link(2) as (node, _):
        send([node], node, 1_000_000)
        assert node.bytes_sent() < 10_000


@needs_links
def test_no_more_goes_out_or_comes_in_than_the_rate_lets_through():
    size, rate, burst = 400_000, 10e6, 128 << 10
    with link(3, "10mbit") as (receiver, *senders):
        started = time.monotonic()
        send(senders, receiver, size)
        allowed = rate / 8 * (time.monotonic() - started) + burst
        assert 2 * size < receiver.bytes_received() <= allowed
        for sender in senders:
            assert size < sender.bytes_sent() <= allowed


@needs_links
def test_each_node_is_a_host_of_its_own():
    with link(2, "1gbit") as nodes:
        names = [subprocess.run(node.command(["uname", "-n"]), capture_output=True, text=True) for node in nodes]
        assert [done.stdout.strip() for done in names] == [node.address for node in nodes]
        assert len({node.address for node in nodes}) == 2


@needs_links
def test_the_network_of_this_machine_is_not_touched():
    before = os.uname().nodename
    with link(2, "1gbit") as nodes:
        outside = Path("/proc/net/dev").read_text()
        assert not [name for name in ("switch", *(node.name for node in nodes)) if f"{name}:" in outside]
        assert f"{nodes[0].interface}:" not in outside
        assert os.uname().nodename == before


@needs_links
def test_two_laboratories_at_once():
    with link(2, "1gbit") as one, link(2, "100mbit") as other:
        send(one[:1], one[1], 100_000)
        assert one[1].bytes_received() > 100_000 > other[1].bytes_received()


@needs_links
def test_nothing_is_left_after_an_error():
    with pytest.raises(ZeroDivisionError), link(2, "1gbit") as nodes:
        raise ZeroDivisionError
    gone([node.pid for node in nodes])


@needs_links
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_owner_is_ended(sent):
    script = """
import time
from benchmarks.laboratory.link import link
with link(2, "1gbit") as nodes:
    print(*(node.pid for node in nodes), flush=True)
    time.sleep(60)
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with owner:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        os.killpg(owner.pid, sent)
        owner.wait(SECONDS)
    gone(pids)


@needs_links
def test_what_the_kernel_refuses_is_told():
    with pytest.raises(UnsupportedError, match="tc qdisc add dev ncz0 .* says: "), link(1, "99999999999gbit"):
        pass


def test_who_is_not_root_is_told(monkeypatch):
    monkeypatch.setattr("benchmarks.laboratory.link.shutil.which", lambda tool: f"/usr/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UnsupportedError, match="root.*sudo"), link(2):
        pass


def test_a_missing_tool_is_told(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnsupportedError, match="'ip'.*iproute2"), link(2):
        pass
