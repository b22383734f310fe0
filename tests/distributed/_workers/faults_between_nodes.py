"""One rank misbehaves, on one of two nodes. Usage: faults_between_nodes.py killed|left|size"""

import os
import signal
import sys

from common import attempt, leave, start, values

from ncz_plugins import Communicator, kernels

SECONDS = 4.0
case = sys.argv[1]
rank, world_size = start()
communicator = Communicator({"transport": {"timeout_seconds": SECONDS, "min_bytes": 0}})
tensor = values(rank, 1_000_000)
communicator.all_reduce(tensor)  # one that works
if rank == 1:
    if case == "killed":
        # In the middle: after the agreement, when the others wait for frames.
        kernels.cpu_backend().encode = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    elif case == "left":
        leave("left")
        os._exit(0)
    elif case == "size":
        tensor = tensor[:-1]

leave([attempt(lambda: communicator.all_reduce(tensor)) for _ in range(2)])
os._exit(0)  # the default group is not to be trusted any more
