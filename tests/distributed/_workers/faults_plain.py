"""The last rank falls silent, then dies, while the others make calls that go plain, small and large ones."""

import os
import signal
import time
from functools import partial

import torch
from common import attempt, leave, start

from ncz_plugins import Communicator

SECONDS, LONG = 3.0, 120.0  # for what ends by time, and for what must end before
SIZES = {"small": 1000, "large": 400_000}
rank, world_size = start()
last = rank == world_size - 1
outcomes = {}


def opened(seconds: float) -> Communicator:
    communicator = Communicator({"transport": {"timeout_seconds": seconds}})
    communicator.all_reduce(torch.ones(1000))
    return communicator


def reduced(communicator: Communicator, elements: int) -> None:
    communicator.all_reduce(torch.ones(elements), role="parameter")  # not enabled, so it goes plain


def failures(communicator: Communicator, elements: int) -> list[dict | None]:
    return [attempt(partial(reduced, communicator, elements)) for _ in range(2)]


cases = {f"silent, {name}": (opened(SECONDS), elements) for name, elements in SIZES.items()}
for case, (communicator, elements) in cases.items():
    if not last:
        outcomes[case] = failures(communicator, elements)
if last:
    time.sleep(4 * SECONDS)
cases = {f"dead, {name}": (opened(LONG), elements) for name, elements in SIZES.items()}
if last:
    os.kill(os.getpid(), signal.SIGKILL)
for case, (communicator, elements) in cases.items():
    outcomes[case] = failures(communicator, elements)
leave(outcomes)
os._exit(0)  # the default group is not to be trusted any more
