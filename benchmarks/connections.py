"""What several connections gain where each of them is limited: by a cloud, or by the distance.

    sudo .venv/bin/python -m benchmarks.connections [--json FILE]

Two ranks in network namespaces, whose packets pass through a relay of this program: it limits each flow, that is each
TCP connection, to a rate, as clouds do, or holds each packet for a while, as a long distance does. Rows of four
all-reduces with 1, 2, 4 and 8 connections, and with as many as the ranks choose, take turns. In a row calls follow each
other as the buckets of a training do. A row's first call does not count: connections that were idle for long begin
anew. Wants root, and /dev/net/tun.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import multiprocessing
import os
import platform
import select
import struct
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import ncz_plugins
from benchmarks.laboratory.launch import run
from benchmarks.laboratory.link import Node, _ip, _namespace
from ncz_plugins import Config
from ncz_plugins.cli import machine
from ncz_plugins.cli.perf.launch import emitter
from ncz_plugins.core.whole_files import write_whole

CONNECTIONS = (1, 2, 4, 8, "auto")
SIZES = (16 << 20, 256 << 20)
ROUNDS = 5
IN_A_ROW = 4  # calls, of which the first does not count
MTU = 9000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x400454CA, 0x0001, 0x1000, 0x4000
_TUNSETOFFLOAD, _TUN_F_CSUM, _TUN_F_TSO4 = 0x400454D0, 0x01, 0x02
_HEADER, _LARGEST = 10, 1 << 16  # bytes: what the kernel puts before a packet, which says where to cut it; a packet
_CLONE_NEWNET = 0x40000000
_QUEUE_SECONDS = 0.1  # of a limited flow; more is dropped, and TCP slows down


class Way(NamedTuple):
    """What the relay does to packets, and how closely values are sent.

    Attributes:
        flow: bits per second of each flow, 0 without a limit.
        delay: seconds on the way.
        value: the bound, as `quantizer.value`.
    """

    name: str
    flow: float
    delay: float
    value: float = Config().quantizer.value


WAYS = (
    Way("100 Mbit/s each", 100e6, 0.0),
    Way("round trip of 50 ms", 0.0, 0.025),
    Way("round trip of 50 ms, rms:0.01", 0.0, 0.025, 0.01),
    Way("round trip of 200 ms", 0.0, 0.1),
)


# ------------------------------------------------------------------ the network


@contextmanager
def relayed(way: Way, nodes: int = 2) -> Iterator[list[Node]]:
    """Nodes, at most 250, and between them the relay."""
    with ExitStack() as stack:
        addresses = [f"10.78.0.{number}" for number in range(1, nodes + 1)]
        pids = [stack.enter_context(_namespace(address)) for address in addresses]
        ready = multiprocessing.Event()
        relay = multiprocessing.Process(target=_relay, args=(pids, way, ready), daemon=True)
        relay.start()
        stack.callback(relay.kill)
        if not ready.wait(10):
            sys.exit("the relay did not come up: is there /dev/net/tun, and is this root?")
        for pid, own in zip(pids, addresses):
            up = f"link set ncz0 addrgenmode none mtu {MTU} txqueuelen 10000 up"
            _ip(pid, ["link set lo up", up, f"addr add {own}/24 dev ncz0"])
        yield [Node(f"node{i}", address, "ncz0", pid) for i, (address, pid) in enumerate(zip(addresses, pids))]


def _tunnel(pid: int) -> int:
    """An interface in the network of that process, whose packets this process reads and writes.

    As with network cards, up to 64 KiB pass as one packet, so that the relay takes less of the cores.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if libc.setns(network, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(network)
    tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH", b"ncz0", _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(tunnel, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return tunnel


def _relay(pids: list[int], way: Way, ready) -> None:
    ends = [_tunnel(pid) for pid in pids]
    ready.set()
    due: list[tuple[float, int, int, bytes]] = []  # when, a number so that equals stay in order, where to, packet
    free: dict[bytes, float] = defaultdict(float)  # when each flow's last packet has left
    number = 0
    while True:
        wait = max(0.0, due[0][0] - time.perf_counter()) if due else None
        readable, _, _ = select.select(ends, [], [], wait)
        for end in readable:
            for _ in range(64):
                try:
                    packet = os.read(end, _HEADER + _LARGEST)
                except BlockingIOError:
                    break
                number_of_node = packet[_HEADER + 19]  # the last byte of the address that it goes to
                if not 1 <= number_of_node <= len(ends):
                    continue  # for a group of addresses
                leaves = now = time.perf_counter()
                if way.flow:
                    flow = packet[_HEADER + 12 : _HEADER + 24]  # addresses and ports
                    leaves = max(now, free[flow]) + 8 * len(packet) / way.flow
                    if leaves - now > _QUEUE_SECONDS:
                        continue
                    free[flow] = leaves
                number += 1
                heapq.heappush(due, (leaves + way.delay, number, ends[number_of_node - 1], packet))
        now = time.perf_counter()
        while due and due[0][0] <= now:
            _, _, to, packet = heapq.heappop(due)
            with suppress(OSError):  # the other end is not up yet, or its queue is full: the packet is lost
                os.write(to, packet)


# ------------------------------------------------------------------ the ranks


def worker(value: float) -> None:
    """One rank: seconds of an all-reduce of each size with each number of connections."""
    emit = emitter()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    communicators = {
        count: ncz_plugins.Communicator({"quantizer": {"value": value}, "transport": {"connections": count}})
        for count in CONNECTIONS
    }
    tile = torch.from_numpy(np.random.default_rng(rank).laplace(size=1 << 18).astype(np.float32))
    for nbytes in SIZES:
        source = tile.repeat(nbytes // tile.nbytes)
        seconds: dict[int, list[float]] = {count: [] for count in CONNECTIONS}
        for _ in range(ROUNDS):
            for count, communicator in communicators.items():
                first, *others = [source.clone() for _ in range(IN_A_ROW)]
                dist.barrier()
                communicator.all_reduce(first)
                started = time.perf_counter()
                for tensor in others:
                    communicator.all_reduce(tensor)
                taken = torch.tensor([(time.perf_counter() - started) / len(others)], dtype=torch.float64)
                dist.all_reduce(taken, dist.ReduceOp.MAX)
                seconds[count].append(taken.item())
        chosen = communicators["auto"].transport.channels
        emit({"bytes": nbytes, "auto": chosen, "seconds": {count: median(taken) for count, taken in seconds.items()}})
    for communicator in communicators.values():
        communicator.close()
    dist.barrier()
    dist.destroy_process_group()


# ------------------------------------------------------------------ what came out


def measured(way: Way) -> list[dict]:
    records: list[dict] = []
    with tempfile.TemporaryDirectory() as folder, relayed(way) as nodes:
        command = [sys.executable, "-m", "benchmarks.connections", "--worker", str(way.value)]
        run(command, 2, Path(folder) / "records", nodes=nodes, on_record=records.append, timeout=400)
    return [{"way": way.name} | record for record in records]


def table(records: list[dict]) -> Table:
    found = Table("connections:", "size", *map(str, CONNECTIONS), "auto chose", "auto beside 1")
    for record in records:
        taken = record["seconds"]
        cells = [f"{1e3 * taken[str(count)]:.0f} ms" for count in CONNECTIONS]
        gain = f"{taken['1'] / taken['auto']:.1f} x"
        found.add_row(record["way"], f"{record['bytes'] >> 20} MiB", *cells, str(record["auto"]), gain)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker)
        return
    records = [record for way in WAYS for record in measured(way)]
    Console().print(table(records))
    if arguments.json:
        versions = {"ncz_plugins": ncz_plugins.__version__, "torch": torch.__version__}
        whole = {
            "command": "python -m benchmarks.connections --json FILE",
            "versions": versions | {"python": platform.python_version()},
            "machine": {"platform": platform.platform(), "cpu": machine.cpu()},
            "rounds": ROUNDS,
            "in_a_row": IN_A_ROW,
            "mtu": MTU,
            "records": records,
        }
        write_whole(arguments.json, json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
