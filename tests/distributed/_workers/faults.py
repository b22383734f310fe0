"""One rank misbehaves; every other must raise the right error soon. Usage: faults.py CASE"""

import os
import signal
import sys
import time

from common import leave, start, values

from ncz_plugins import Communicator, NczError, kernels

SECONDS = 4.0
case = sys.argv[1]
rank, world_size = start()
culprit = rank == 1
config = {"transport": {"timeout_seconds": SECONDS, "min_bytes": 0}}

if case == "config" and culprit:
    config["quantizer"] = {"value": 0.125}
if case == "version" and culprit:
    import ncz_plugins.core.handshake as handshake

    handshake.__version__ = "0.0.0"

started = time.monotonic()
try:
    communicator = Communicator(config)
except NczError as error:
    leave({"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - started})
    sys.exit(0)

tensor = values(rank, 1_000_000)
communicator.all_reduce(tensor)  # one that works
if culprit:
    if case == "killed":
        # In the middle: after the agreement, when the others wait for frames.
        kernels.cpu_backend().encode = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    elif case == "stopped":

        def stopping(*_):
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)  # the signal is for the process: this thread may go on for a moment

        kernels.cpu_backend().encode = stopping
    elif case == "left":
        leave("left")
        os._exit(0)
    elif case == "damaged":
        encode = kernels.cpu_backend().encode

        def damaging(x, inverse_steps, coding, frame, noise=None):
            size = encode(x, inverse_steps, coding, frame, noise)
            frame[4] += 1  # the version
            return size

        kernels.cpu_backend().encode = damaging
    elif case == "size":
        tensor = tensor[:-1]
    elif case == "dtype":
        tensor = tensor.bfloat16()
    elif case == "order":
        communicator.broadcast(tensor, 0, async_op=True)

outcome = []
started = time.monotonic()
for _ in range(2):
    try:
        communicator.all_reduce(tensor)
        outcome.append(None)
    except NczError as error:
        outcome.append({"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - started})
leave(outcome)
if case == "damaged":
    # Those who saw the damage stay alive: their peers must learn of it from closed connections.
    time.sleep(2 * SECONDS)
os._exit(0)  # the default group is not to be trusted any more
