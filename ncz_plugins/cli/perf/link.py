"""A slow network on one machine: nodes in network namespaces, joined by a switch, each behind a link of a given rate.

    with link(nodes=2, rate="1gbit") as nodes:
        subprocess.run(nodes[0].command(["ping", "-c1", nodes[1].address]))

Every namespace lives exactly as long as a process that waits for the end of its standard input. The other end of that
pipe is here, so the kernel takes all namespaces, interfaces and limits away when this process ends, however it ends.
Nothing has a name in the root namespace, so there is nothing to collide with and nothing to leave behind.
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

from ...core.errors import ConfigError, UnsupportedError

UNLIMITED = "unlimited"  # the rate of a link as fast as the machine moves memory
INTERFACE = "ncz0"  # the node's end of its link; the same name in every node, since each has its own namespace

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}  # as tc has them
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", re.ASCII)
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_SECONDS = 20  # for one of those tools: far more than it needs, so that nothing hangs

# A token bucket lets through at once what has gathered in it while the link was idle, and that much of each message
# travels free. So it is as small as keeps the rate: a millisecond's worth, and no less than two of the 64 KiB packets
# that Linux hands down to an interface.
_BURST_SECONDS, _BURST_BYTES = 1e-3, 128 << 10
_QUEUE = "20ms"  # what the link buffers, as a switch does; more is dropped, and TCP slows down


@dataclass(frozen=True)
class Node:
    """A machine of the laboratory: a network namespace with one interface, and its own host name.

    The host name is its address, so that whoever looks up the host name, as Horovod's gloo does, gets that address.

    Attributes:
        name: of the switch's port that it is connected to.
        address: IPv4 address of its interface.
        interface: name of its interface, for GLOO_SOCKET_IFNAME.
        pid: the process whose network namespace it is.
    """

    name: str
    address: str
    interface: str
    pid: int

    def command(self, argv: list[str]) -> list[str]:
        """The command that runs `argv` in this node; it keeps its process id, as no process stands in between."""
        return _inside(self.pid, argv)

    def bytes_received(self) -> int:
        """Bytes that came in over the link since it came up, headers included, as the kernel counted them."""
        return self._counters()[0]

    def bytes_sent(self) -> int:
        """Bytes that went out over the link since it came up, headers included, as the kernel counted them."""
        return self._counters()[8]  # eight counters of received packets come first

    def _counters(self) -> list[int]:
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == self.interface:
                return [int(counter) for counter in counters.split()]
        raise OSError(f"{self.name}: interface {self.interface} is gone")


@contextmanager
def link(nodes: int, rate: str | None = None) -> Iterator[list[Node]]:
    """A network of `nodes` machines, each with a link of `rate` (see `bits_per_second`) in both directions.

    Whoever started processes in the nodes ends them before leaving the context. Raises ConfigError for a rate that
    is none, UnsupportedError where no namespaces or limits can be made.
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
                _limit(node.pid, node.interface, limit)  # what it sends
                _limit(switch, node.name, limit)  # what it receives
        yield network


def bits_per_second(rate: str | None) -> float | None:
    """A rate as tc has it, such as "1gbit", "2.5gbit" or "100mbit"; None for None or "unlimited"."""
    if rate is None or rate == UNLIMITED:
        return None
    match = _RATE.fullmatch(rate)
    if not match or not float(match[1]):
        raise ConfigError(f"link: '{rate}' is not a rate such as 1gbit, 2.5gbit, 100mbit or {UNLIMITED}")
    return float(match[1]) * _UNITS[match[2]]


def _check_tools() -> None:
    """UnsupportedError, with the remedy, if this process can't make a network."""
    for tool, package in _TOOLS.items():
        if not shutil.which(tool):
            raise UnsupportedError(f"a link needs the command '{tool}' of Linux: install the package {package}")
    if os.geteuid():
        raise UnsupportedError("a link needs network namespaces, which only root can make: run this with sudo")


@contextmanager
def _namespace(hostname: str) -> Iterator[int]:
    """The id of a process in namespaces of its own for network and host name, gone with the context or this process."""
    # In a session of its own, so that Ctrl-C doesn't take the network from under those who are being ended in order.
    script = f"echo {hostname} >/proc/sys/kernel/hostname && echo && exec cat"
    command = ["unshare", "--net", "--uts", "sh", "-c", script]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **streams, start_new_session=True) as process:
        try:
            if not process.stdout.readline():  # the empty line tells that the namespace is there
                words = process.stderr.read().decode().strip()
                raise UnsupportedError(f"a link can't be made here: '{' '.join(command[:3])}' says: {words}")
            yield process.pid
        finally:
            process.kill()


def _connect(switch: int, node: Node) -> None:
    """A pair of interfaces from the node to the switch, without IPv6, whose announcements would be counted too."""
    port = f"{node.name} type veth peer name {node.interface} netns {node.pid}"
    _ip(switch, [f"link add {port}", f"link set {node.name} master switch addrgenmode none up"])
    own = [f"link set {node.interface} addrgenmode none up", f"addr add {node.address}/16 dev {node.interface}"]
    _ip(node.pid, ["link set lo up", *own])


def burst_bytes(limit: float) -> int:
    """What a link of so many bits a second lets through at once after it was idle."""
    return max(_BURST_BYTES, round(_BURST_SECONDS * limit / 8))


def _limit(pid: int, interface: str, limit: float) -> None:
    """Let out at most `limit` bits a second."""
    bucket = ["tbf", "rate", f"{limit:.0f}bit", "burst", f"{burst_bytes(limit)}b", "latency", _QUEUE]
    _run(pid, ["tc", "qdisc", "add", "dev", interface, "root", *bucket])


def _ip(pid: int, lines: list[str]) -> None:
    _run(pid, ["ip", "-batch", "-"], "\n".join(lines))


def _run(pid: int, argv: list[str], lines: str = "") -> None:
    """Run a tool in the namespaces of a process; UnsupportedError with the tool's words if the kernel refuses."""
    try:
        done = subprocess.run(_inside(pid, argv), input=lines, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise UnsupportedError(f"a link can't be made here: '{' '.join(argv)}' did not end in {_SECONDS} s") from None
    if done.returncode:
        words = done.stderr.strip() or f"exit status {done.returncode}"
        raise UnsupportedError(f"a link can't be made here: '{' '.join(argv)}' says: {words}")


def _inside(pid: int, argv: list[str]) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net", "--uts", "--", *argv]
