"""Hosts with several interfaces: a management network that reaches no other host, and one interface for each rank."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from links import link, needs_links
from on_rank import attempt, digest, rank, values, world_size
from scenarios import program, search_path

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


def meets_and_sums() -> dict:
    """An all_reduce. Only our own connections are made, so what is sent is what is counted."""
    torch.set_num_threads(1)
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

    found = attempt(sums) if os.environ["ENDS"] == "badly" else sums()
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
    """What two ranks on each host return. They are started as srun starts them, each with variables of its own."""
    argv = [sys.executable, *program(meets_and_sums, folder)]
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": search_path(), "WORLD_SIZE": "4", "ENDS": ends}
    ours["MASTER_ADDR"] = nodes[0].address
    script = f'mount --bind {folder / "hosts"} /etc/hosts; exec "$@"'
    ranks = []
    try:
        for number in range(4):
            own = {"RANK": f"{number}", "LOCAL_RANK": f"{number % 2}", "GLOO_SOCKET_IFNAME": interfaces[number % 2]}
            command = nodes[number // 2].command(["unshare", "--mount", "sh", "-ec", script, "sh", *argv])
            ranks.append(subprocess.Popen(command, env={**os.environ, **ours, **own}, start_new_session=True))
        assert [each.wait(90) for each in ranks] == [0] * 4
    finally:
        for each in ranks:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
    return [json.loads((folder / f"rank{number}.json").read_text()) for number in range(4)]


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
