"""Hosts as clusters have them: names that resolve to IPv6 alone, one range of open ports, ranks that die.

Each host is a network namespace with its own /etc/hosts. The ranks are started by torchrun, which meets over c10d.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from links import link, needs_links
from on_rank import rank, start, values, world_size
from scenarios import program

from benchmarks.laboratory.link import Node
from ncz_plugins import Communicator

pytestmark = needs_links

BOUND = 0.05
MEETING_PORT = 29400  # of torchrun's rendezvous
PORTS = range(31000, 31200)  # that a firewall lets through
SECONDS = 120
_LISTEN = "0A"  # state of a socket in /proc/net/tcp


# ------------------------------------------------------------------ what ranks do


def sum_over(numel: int, schedule: str = "auto") -> dict:
    """A compressed sum, and what this host listens at meanwhile."""
    transport = {"min_bytes": "64KiB", "link_gbps": 1, "schedule": schedule}
    config = {"quantizer": {"mode": "abs", "value": BOUND}, "transport": transport}
    with Communicator(config) as communicator:
        tensor = values(rank, numel)
        communicator.all_reduce(tensor)
        exact = sum(values(r, numel).double() for r in range(world_size))
        error = (tensor.double() - exact).abs().max().item()
        assert error <= world_size * BOUND + 1e-5, error
        dist.barrier()  # so that all ranks have opened what they open
        return {"ports": listening(), "ratio": communicator.stats.total.ratio}


def listening() -> list[int]:
    """Ports of this host that are open to other hosts."""
    open_ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            if state == _LISTEN and address != "0100007F":  # 127.0.0.1
                open_ports.add(int(port, 16))
    return sorted(open_ports)


def sums_twice(died: str) -> dict:
    """Two sums. Rank 1 is killed before the second, which halves, and torchrun starts all ranks again."""
    start()
    sum_over(1 << 18)
    if rank == 1 and not Path(died).exists():
        Path(died).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return sum_over(1 << 18, "halving")


# ------------------------------------------------------------------ hosts and torchrun


@contextmanager
def hosts(count: int, folder: Path) -> Iterator[list[Node]]:
    """Hosts named host0, host1, ... that have IPv6 addresses alone, and open no other ports than `PORTS`."""
    with link(count) as nodes:
        lines = ["127.0.0.1 localhost", *(f"fd77::{i + 1} host{i}" for i in range(count))]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        for number, node in enumerate(nodes):
            commands = [
                f"ip -4 addr flush dev {node.interface}",
                f"ip -6 addr add fd77::{number + 1}/64 dev {node.interface} nodad",
                f"echo {PORTS.start} {PORTS.stop - 1} >/proc/sys/net/ipv4/ip_local_port_range",
                f"echo host{number} >/proc/sys/kernel/hostname",
            ]
            subprocess.run(node.command(["sh", "-ec", "\n".join(commands)]), check=True)
        yield nodes


def torchrun(node: Node, folder: Path, argv: Sequence[str]) -> subprocess.Popen:
    """Start torchrun on one of two hosts, with one rank there."""
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.2"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=host0:{MEETING_PORT}", "--rdzv-id=job"]
    patience = "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=10,last_call_timeout=1"
    run = shlex.join([sys.executable, "-m", "torch.distributed.run", *options, *meeting, patience, *argv])
    script = f"mount --bind {folder / 'hosts'} /etc/hosts; exec {run}"
    ours = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "attempts:1 timeout:1"}
    # Each start gets a store of its own. In the shared one gloo finds addresses of the start before.
    ours["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return subprocess.Popen(
        node.command(["unshare", "--mount", "sh", "-ec", script]),
        env={**os.environ, **ours},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(agents: Sequence[subprocess.Popen], seconds: float = SECONDS) -> None:
    """Wait until all agents have ended well. Kills them, and fails, after `seconds`."""
    deadline = time.monotonic() + seconds
    output = []
    for agent in agents:
        try:
            output.append(agent.communicate(timeout=max(0.1, deadline - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            agent.terminate()  # which ends its ranks
            output.append(agent.communicate()[0])
    assert not any(agent.returncode for agent in agents), "\n---\n".join(output)


# ------------------------------------------------------------------ tests


def test_ranks_start_again_on_hosts_with_ipv6_alone_and_open_ports_of_one_range(tmp_path):
    with hosts(2, tmp_path) as nodes:
        argv = program(sums_twice, tmp_path, str(tmp_path / "died"))
        end([torchrun(node, tmp_path, argv) for node in nodes])
    assert (tmp_path / "died").exists()
    for number in range(2):
        found = json.loads((tmp_path / f"rank{number}.json").read_text())
        assert found["ratio"] > 4
        assert found["ports"] and set(found["ports"]) <= {MEETING_PORT, *PORTS}
