"""Imports once what takes long, and then forks a process per rank that runs a worker.

usage: fork.py WORLD_SIZE FOLDER WORKER.py [ARGUMENTS]

Leaves exits.json in FOLDER, the exit status of each rank as it ended (None: not yet). NCZ_TEST_IMPORTS names modules.
"""

import json
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path

for module in os.environ.get("NCZ_TEST_IMPORTS", "ncz_plugins.core.communicator").split():
    import_module(module)

world_size, folder, worker = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
processes = []
for rank in range(world_size):
    process = os.fork()
    if process == 0:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "NCCL_HOSTID": f"host-{rank}",  # as if on hosts of their own: several ranks may then share one GPU
            "NCZ_TEST_RESULT": str(folder / f"rank{rank}.json"),
        }
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = sys.argv[3:]
        sys.path[0] = str(Path(worker).parent)
        runpy.run_path(worker, run_name="__main__")
        sys.exit()
    processes.append(process)
exits: list[int | None] = [None] * world_size
while None in exits:
    process, status = os.wait()
    exits[processes.index(process)] = os.waitstatus_to_exitcode(status)
    (folder / "exits.json").write_text(json.dumps(exits))
