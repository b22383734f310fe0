"""Starts a script once per rank, as a launcher does, in forks of a process that has imported what takes long.

usage: forked_ranks.py torch | horovod RANKS PORT MODULES SCRIPT [ARGUMENTS]

For tests that are not about a launcher: those import PyTorch, and what is built on it, in every process anew. Ends all
ranks when one fails, and then itself with status 1. MODULES are separated by commas; none may start a thread.
"""

import os
import runpy
import signal
import sys
from importlib import import_module
from pathlib import Path


def torch_environment(rank: int, ranks: int, port: str) -> dict[str, str]:
    """As torchrun has it, and LOCAL_SIZE as DeepSpeed's launcher."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "LOCAL_SIZE": ranks}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


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


def run(script: str, arguments: list[str]) -> None:
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def serve_horovod(ranks: int, port: int) -> None:
    """Be what Horovod's ranks meet at. Starts a thread, so this comes after the forks; they try until it is there."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    from horovod.runner.util.threads import in_thread

    server = RendezvousHTTPServer(("127.0.0.1", port), RendezvousHandler, 0)
    server.init(get_host_assignments(parse_hosts(f"localhost:{ranks}"), ranks))
    in_thread(target=server.serve_forever)


def main() -> int:
    kind, ranks, port, modules, script, *arguments = sys.argv[1:]
    for module in filter(None, modules.split(",")):
        import_module(module)
    environment = horovod_environment if kind == "horovod" else torch_environment
    processes = []
    for rank in range(int(ranks)):
        process = os.fork()
        if process == 0:
            os.environ |= environment(rank, int(ranks), port)
            run(script, arguments)
            return 0
        processes.append(process)
    if kind == "horovod":
        serve_horovod(int(ranks), int(port))
    failed = False
    while processes:
        process, status = os.wait()
        processes.remove(process)
        if status and not failed:
            failed = True
            for each in processes:
                os.kill(each, signal.SIGTERM)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
