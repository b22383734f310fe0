"""A call is under way when the program ends, and nobody has closed the communicator.

usage: endings.py returns|raises|waited for|peer gone|peer silent
"""

import atexit
import os
import signal
import sys
import time

import torch
from common import leave, start

SECONDS = 120.0  # which nobody may wait for
rank, world_size = start()
last = rank == world_size - 1


@atexit.register  # before the package registers what it does at the end, so this runs after it
def note_how_long_it_took() -> None:
    leave({"seconds": time.monotonic() - ended})


from ncz_plugins import Communicator  # noqa: E402

case = sys.argv[1]
communicator = Communicator({"transport": {"timeout_seconds": SECONDS}})
tensor = torch.ones(1_000_000)
communicator.all_reduce(tensor)
ended = time.monotonic()
if last and case == "peer gone":
    os.kill(os.getpid(), signal.SIGKILL)
if last and case == "peer silent":
    time.sleep(22)  # longer than the others may need
    os._exit(0)
handle = communicator.all_reduce(tensor, async_op=case != "waited for")
if case == "raises":
    raise ValueError("an error of the program")
