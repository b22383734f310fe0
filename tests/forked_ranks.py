"""Starts a script once per rank, as a launcher does, in forks of a process that has imported what takes long.

For tests that are not about a launcher: those import PyTorch, and what is built on it, in every process anew.
"""

import argparse
import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import struct
import sys
import time
from importlib import import_module
from pathlib import Path


def torch_environment(rank: int, ranks: int, port: str) -> dict[str, str]:
    """As torchrun has it, and LOCAL_SIZE as DeepSpeed's launcher."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "LOCAL_SIZE": ranks}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def hosts_environment(rank: int, ranks: int, port: str) -> dict[str, str]:
    """As if every rank had a host of its own: several may then share its first GPU, which LOCAL_RANK names."""
    numbers = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": ranks}
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "NCCL_HOSTID": f"host-{rank}",
    }


def horovod_environment(rank: int, ranks: int, port: str) -> dict[str, str]:
    """As horovodrun --gloo has it."""
    numbers = {"RANK": rank, "SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": ranks, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    return {f"HOROVOD_{name}": str(number) for name, number in numbers.items()} | {
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


ENVIRONMENTS = {"torch": torch_environment, "hosts": hosts_environment, "horovod": horovod_environment}


_has_returned = False  # whether this is a rank whose script has


def end_soon() -> None:
    """Leave out what Python and C++ tidy up last of all, which takes a fork a third of a second: it copies all memory.

    The first to be registered, so the last to be called: all that a program asked for has been done. A script that
    raises, SystemExit too, ends as programs do.
    """
    if _has_returned:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def run(script: str, arguments: list[str]) -> None:
    global _has_returned
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    _has_returned = True


def leave_in(folder: Path, rank: int) -> None:
    """Have what this rank prints, and what it saves for the test, in files of its own."""
    os.environ["NCZ_TEST_RESULT"] = str(folder / f"rank{rank}.json")
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)


def enter_private_network() -> None:
    """Leave the machine's network for one that has a loopback interface and nothing else. Raises OSError."""
    new_user, new_network = 0x10000000, 0x40000000  # CLONE_NEWUSER, without which only root may do this; CLONE_NEWNET
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(new_network if os.geteuid() == 0 else new_user | new_network):
        raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket() as any_socket:
        set_flags, is_up = 0x8914, 1  # SIOCSIFFLAGS, IFF_UP
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH22x", b"lo", is_up))


def enter_node(process: int) -> None:
    """Move to where a process of the laboratory keeps a node: its network and its host name. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts"):
        with open(f"/proc/{process}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")


def serve_horovod(ranks: int, port: int) -> None:
    """Be what Horovod's ranks meet at. Starts a thread, so this comes after the forks; they try until it is there."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    from horovod.runner.util.threads import in_thread

    server = RendezvousHTTPServer(("127.0.0.1", port), RendezvousHandler, 0)
    server.init(get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks))
    in_thread(target=server.serve_forever)


def wait_for(processes: list[int], folder: Path | None) -> bool:
    """Whether all ranks ended well. When one did not, ends the others, unless their exits go to a folder."""
    exits: list[tuple[int | None, float | None]] = [(None, None)] * len(processes)
    while (None, None) in exits:
        process, status = os.wait()
        exits[processes.index(process)] = os.waitstatus_to_exitcode(status), time.time()
        if folder is not None:
            (folder / "exits.json").write_text(json.dumps(exits))
        elif status:
            for rank, process in enumerate(processes):
                if exits[rank] == (None, None):
                    os.kill(process, signal.SIGTERM)
    return not any(code for code, _ in exits)


def import_modules(names: str) -> None:
    """Import modules whose names commas separate, for good: forks that end would take a second to collect them."""
    for name in filter(None, names.split(",")):
        import_module(name)
    gc.freeze()


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line says, or `arguments` in its place. Returns in ranks only; their parent just ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", help="to import before the forks, separated by commas; none may start a thread")
    parser.add_argument("environment", choices=ENVIRONMENTS)
    parser.add_argument("ranks", type=int)
    parser.add_argument("port")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="for rankN.log, rankN.json, and exits.json: exit status and time of each rank, null while it runs",
    )
    parser.add_argument("--private-network", action="store_true", help="run in one that only the ranks use")
    parser.add_argument(
        "--nodes",
        type=lambda text: text.split(","),
        metavar="ADDRESS,PID,PID...",
        help="run in the laboratory: the first node's address, and a process of each; as many ranks on each node",
    )
    args = parser.parse_args(arguments)
    import_modules(args.modules)
    if args.private_network:
        enter_private_network()
    processes = []
    for rank in range(args.ranks):
        process = os.fork()
        if process == 0:
            os.environ |= ENVIRONMENTS[args.environment](rank, args.ranks, args.port)
            if args.nodes:
                os.environ["MASTER_ADDR"], *nodes = args.nodes
                enter_node(int(nodes[rank * len(nodes) // args.ranks]))
            if args.into is not None:
                leave_in(args.into, rank)
            run(args.script, args.arguments)
            return 0
        processes.append(process)
    if args.environment == "horovod":
        serve_horovod(args.ranks, int(args.port))
    ended_well = wait_for(processes, args.into)
    sys.stdout.flush()
    os._exit(0 if ended_well else 1)  # it has nothing to tidy up, and what it has imported goes slowly


if __name__ == "__main__":
    atexit.register(end_soon)
    sys.exit(main())
