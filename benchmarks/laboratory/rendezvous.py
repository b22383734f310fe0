"""Server at which Horovod's ranks meet. `launch` starts it instead of horovodrun, which needs ssh between hosts.

    python -m benchmarks.laboratory.rendezvous HOST:SLOTS,HOST:SLOTS RANKS

Prints one line of JSON with the port and the variables of each rank. Runs until its standard input ends.
"""

from __future__ import annotations

import json
import sys

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer


def main() -> None:
    hosts, ranks = sys.argv[1:]
    plan = get_host_assignments(parse_hosts(hosts), int(ranks))
    server = RendezvousServer()
    port = server.start()
    server.init(plan)
    slots = sorted(plan, key=lambda slot: slot.rank)
    print(json.dumps({"port": port, "ranks": [create_slot_env_vars(slot) for slot in slots]}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
