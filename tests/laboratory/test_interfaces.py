"""Hosts with several interfaces: a management network that reaches no other host, and one interface for each rank."""

import ctypes
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from links import link, needs_links
from on_rank import attempt, digest, rank, values, world_size
from scenarios import on_ranks

from benchmarks.laboratory.link import Node
from benchmarks.opening import Group
from ncz_plugins import Communicator

pytestmark = needs_links

NUMEL = 1 << 20
BOUND = 0.05
SECONDS = 8  # the time-out of a rank
PORT = 29511
INTERFACES = ("ncz0", "ncz1")  # of the ranks of a host


# ------------------------------------------------------------------ what ranks do


def reads_hosts_from(file: str) -> None:
    """Have this process, and no other, find `file` at /etc/hosts. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, bind = 0x20000, 0x44000, 0x1000  # CLONE_NEWNS; MS_REC | MS_PRIVATE; MS_BIND
    if (
        libc.unshare(new_mounts)
        or libc.mount(b"none", b"/", None, private, None)
        or libc.mount(file.encode(), b"/etc/hosts", None, bind, None)
    ):
        raise OSError(ctypes.get_errno(), "hosts")


def meets_and_sums(hosts: str, interfaces: list[str], ends: str) -> dict:
    """An all_reduce. Only our own connections are made, so what is sent is what is counted.

    Args:
        hosts: what is to be found at /etc/hosts.
        interfaces: that are named for the ranks of a host.
        ends: "well", or "badly": then it returns how the all_reduce fails.
    """
    torch.set_num_threads(1)
    reads_hosts_from(hosts)
    assert socket.gethostbyname(socket.gethostname()).startswith("192.168.9."), "the management network"
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces[rank % 2]
    store = dist.TCPStore(os.environ["MASTER_ADDR"], PORT, world_size, rank == 0, wait_for_workers=False)
    transport = {"min_bytes": 0, "link_gbps": 1, "hierarchy": "off", "schedule": "direct", "timeout_seconds": SECONDS}
    config = {"quantizer": {"mode": "abs", "value": BOUND}, "transport": transport}

    def sums() -> dict:
        with Communicator(config, Group(rank, world_size), store=dist.PrefixStore("test", store)) as communicator:
            tensor = values(rank, NUMEL)
            communicator.all_reduce(tensor)
            exact = sum(values(r, NUMEL).double() for r in range(world_size))
            assert (tensor.double() - exact).abs().max() <= world_size * BOUND + 1e-5
            return {"digest": digest(tensor), "sent": communicator.stats.total.wire_bytes}

    found = attempt(sums) if ends == "badly" else sums()
    # Rank 0 serves the store until all are done.
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < world_size:
        time.sleep(0.05)
    return found


# ------------------------------------------------------------------ hosts


def in_node(node: Node, *lines: str) -> None:
    subprocess.run(node.command(["sh", "-ec", "\n".join(lines)]), check=True)


@contextmanager
def hosts(folder: Path) -> Iterator[list[Node]]:
    """Two hosts. Their names are those of a management network, over which nothing passes. Two interfaces are joined.

    Both have addresses of one network, so the kernel takes the first one for all that has no address yet. What comes
    from the address of an interface leaves by that interface, as clouds set up hosts with several.
    """
    with link(2) as nodes:
        pair = f"ip link add ncz1 type veth peer name ncz1 netns {nodes[1].pid}"
        in_node(nodes[0], pair)
        for number, node in enumerate(nodes, 1):
            in_node(
                node,
                f"ip addr add 10.77.1.{number}/16 dev ncz1",
                "ip link set ncz1 addrgenmode none up",
                "ip link add mgmt0 type veth peer name nowhere",
                f"ip addr add 192.168.9.{number}/24 dev mgmt0",
                "ip link set nowhere addrgenmode none up",
                "ip link set mgmt0 addrgenmode none up",
                f"echo host{number} >/proc/sys/kernel/hostname",
                *(
                    line
                    for table, (name, network) in enumerate(zip(INTERFACES, (0, 1)), 101)
                    for line in (
                        f"ip rule add from 10.77.{network}.{number} lookup {table}",
                        f"ip route add 10.77.0.0/16 dev {name} table {table}",
                    )
                ),
            )
        lines = ["127.0.0.1 localhost", "192.168.9.1 host1", "192.168.9.2 host2"]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        yield nodes


def run(nodes: list[Node], folder: Path, interfaces: tuple[str, str], ends: str = "well") -> list[dict]:
    """What two ranks on each host return."""
    return on_ranks(4, meets_and_sums, folder, folder / "hosts", interfaces, ends, nodes=nodes)


def sent_over(node: Node, interface: str) -> int:
    return Node(node.name, node.address, interface, node.pid).bytes_sent()


# ------------------------------------------------------------------ tests


def test_each_rank_sends_over_the_interface_that_is_named_for_it(tmp_path):
    with hosts(tmp_path) as nodes:
        found = run(nodes, tmp_path, INTERFACES)
        sent = {(host, name): sent_over(node, name) for host, node in enumerate(nodes) for name in INTERFACES}
        assert [sent_over(node, "mgmt0") for node in nodes] == [0, 0]
    assert len({each["digest"] for each in found}) == 1
    for number, each in enumerate(found):
        to_other_host = each["sent"] * 2 / 3  # two of three others are there
        own = sent[number // 2, INTERFACES[number % 2]]
        assert 0.9 * to_other_host < own < 1.1 * to_other_host + (200 << 10), (sent, found)  # the store is on ncz0


@pytest.mark.parametrize("interface", ["", "mgmt0"], ids=["none is named", "the wrong one is named"])
def test_ranks_that_cannot_reach_each_other_say_where_to_look(interface, tmp_path):
    """By default the address of the host's name counts."""
    with hosts(tmp_path) as nodes:
        found = run(nodes, tmp_path, (interface, interface), ends="badly")
    assert {each["error"] for each in found} == {"PeerError"}
    assert all(each["seconds"] < 4 * SECONDS for each in found)
    assert any("GLOO_SOCKET_IFNAME" in each["message"] for each in found), found
