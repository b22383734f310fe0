"""Slow network on one machine: nodes in network namespaces, joined by a switch, each behind a link of a given rate.

    with link(nodes=2, rate="1gbit") as nodes:
        subprocess.run(nodes[0].command(["ping", "-c1", nodes[1].address]))

Each namespace lives as long as a process that waits for the end of its standard input, a pipe from this process. So
the kernel removes all namespaces, interfaces and limits when this process ends, even if it is killed. Nothing gets a
name in the root namespace, so nothing can collide or be left behind.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ncz_plugins.core.errors import ConfigError, UnsupportedError

UNLIMITED = "unlimited"  # rate of a link without a limit: as fast as the machine moves memory
INTERFACE = "ncz0"  # the node's end of its link, in the namespace of the node

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}  # as tc has them
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", re.ASCII)
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_TOOL_SECONDS = 20  # time limit of one of these tools, far above what it needs

# An idle link lets a burst through at once (a token bucket), and that much of each message travels in no time. So the
# burst is the smallest one that still keeps the rate: one millisecond, and at least two of the 64 KiB packets that
# Linux passes to an interface.
_BURST_SECONDS, _BURST_BYTES = 1e-3, 128 << 10
_QUEUE = "20ms"  # buffer of the link, as in a switch; if it overflows, packets are dropped and TCP slows down


@dataclass(frozen=True)
class Node:
    """Simulated machine: a network namespace with one interface and its own host name.

    The host name is the address, because Horovod's gloo looks up the host name to get the address.

    Attributes:
        name: name of the switch's port that the node is connected to.
        address: IPv4 address of the interface.
        interface: name of the interface, for GLOO_SOCKET_IFNAME.
        pid: id of the process that keeps the namespace alive.
    """

    name: str
    address: str
    interface: str
    pid: int

    def command(self, argv: list[str]) -> list[str]:
        """The command that runs `argv` in this node, without a process in between: the process id stays the same."""
        return _inside(self.pid, argv)

    def bytes_received(self) -> int:
        """Bytes received over the link so far, headers included, as counted by the kernel."""
        return self._counters()[0]

    def bytes_sent(self) -> int:
        """Bytes sent over the link so far, headers included, as counted by the kernel."""
        return self._counters()[8]  # after eight counters for receiving

    def _counters(self) -> list[int]:
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == self.interface:
                return [int(counter) for counter in counters.split()]
        raise OSError(f"{self.name}: interface {self.interface} is gone")


@contextmanager
def link(nodes: int, rate: str | None = None) -> Iterator[list[Node]]:
    """Context manager that yields a network of nodes, each with a link of `rate` in both directions.

    End all processes in the nodes before leaving the context.

    Args:
        nodes: number of nodes.
        rate: see `bits_per_second`.

    Raises ConfigError for an invalid rate, UnsupportedError if namespaces or limits can't be made.
    """
    limit = bits_per_second(rate)
    _check_tools()
    with ExitStack() as stack:
        switch = stack.enter_context(_namespace("switch"))
        addresses = [f"10.77.{index // 250}.{index % 250 + 1}" for index in range(nodes)]
        pids = [stack.enter_context(_namespace(address)) for address in addresses]
        network = [Node(f"node{i}", address, INTERFACE, pid) for i, (address, pid) in enumerate(zip(addresses, pids))]
        _ip(switch, ["link add switch type bridge", "link set switch addrgenmode none up"])
        for node in network:
            _connect(switch, node)
            if limit:
                limit_sending(node.pid, node.interface, limit)  # what it sends
                limit_sending(switch, node.name, limit)  # what it receives
        yield network


def bits_per_second(rate: str | None) -> float | None:
    """Bits per second of a rate such as "1gbit", "2.5gbit" or "100mbit"; None for None or "unlimited".

    Raises ConfigError for an invalid rate.
    """
    if rate is None or rate == UNLIMITED:
        return None
    match = _RATE.fullmatch(rate)
    if not match or not float(match[1]):
        raise ConfigError(f"link: '{rate}' is not a rate such as 1gbit, 2.5gbit, 100mbit or {UNLIMITED}")
    return float(match[1]) * _UNITS[match[2]]


def _check_tools() -> None:
    """Raise UnsupportedError if a tool is missing or this process is not run by root."""
    for tool, package in _TOOLS.items():
        if not shutil.which(tool):
            raise UnsupportedError(f"a link needs the command '{tool}' of Linux: install the package {package}")
    if os.geteuid():
        raise UnsupportedError("a link needs network namespaces, which only root can make: run this with sudo")


@contextmanager
def _namespace(hostname: str) -> Iterator[int]:
    """Context manager that yields the id of a process in its own namespaces for network and host name.

    The namespaces end with the context, or with this process.
    """
    # A session of its own, so that Ctrl-C does not remove the network while ranks are still being ended.
    script = f"echo {hostname} >/proc/sys/kernel/hostname && echo && exec cat"
    command = ["unshare", "--net", "--uts", "sh", "-c", script]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **streams, start_new_session=True) as process:
        try:
            if not process.stdout.readline():  # an empty line says that the namespace exists
                words = process.stderr.read().decode().strip()
                raise UnsupportedError(f"a link can't be made here: '{' '.join(command[:3])}' says: {words}")
            yield process.pid
        finally:
            process.kill()


def _connect(switch: int, node: Node) -> None:
    """Connect a node to the switch, without IPv6, whose announcements would be counted as traffic."""
    port = f"{node.name} type veth peer name {node.interface} netns {node.pid}"
    _ip(switch, [f"link add {port}", f"link set {node.name} master switch addrgenmode none up"])
    own = [f"link set {node.interface} addrgenmode none up", f"addr add {node.address}/16 dev {node.interface}"]
    _ip(node.pid, ["link set lo up", *own])


def burst_bytes(limit: float) -> int:
    """Bytes that an idle link of `limit` bits per second lets through at once."""
    return max(_BURST_BYTES, round(_BURST_SECONDS * limit / 8))


def limit_sending(pid: int, interface: str, limit: float) -> None:
    """Limit an interface to sending `limit` bits per second."""
    bucket = ["tbf", "rate", f"{limit:.0f}bit", "burst", f"{burst_bytes(limit)}b", "latency", _QUEUE]
    _run(pid, ["tc", "qdisc", "add", "dev", interface, "root", *bucket])


def _ip(pid: int, lines: list[str]) -> None:
    _run(pid, ["ip", "-batch", "-"], "\n".join(lines))


def _run(pid: int, argv: list[str], lines: str = "") -> None:
    """Run a tool in the namespaces of a process. Raises UnsupportedError, with the tool's message, if it fails."""
    try:
        done = subprocess.run(_inside(pid, argv), input=lines, capture_output=True, text=True, timeout=_TOOL_SECONDS)
    except subprocess.TimeoutExpired:
        raise UnsupportedError(
            f"a link can't be made here: '{' '.join(argv)}' did not end in {_TOOL_SECONDS} s"
        ) from None
    if done.returncode:
        words = done.stderr.strip() or f"exit status {done.returncode}"
        raise UnsupportedError(f"a link can't be made here: '{' '.join(argv)}' says: {words}")


def _inside(pid: int, argv: list[str]) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net", "--uts", "--", *argv]
