"""The trainer dies between two versions: workers get an error in bounded time."""

import os

import torch
from common import attempt, leave, start

from ncz_plugins import WeightSync

rank, _ = start()
sync = WeightSync()
state = {"w": torch.ones(1000)}
if rank == 0:
    sync.publish(state)
    leave("published")
    os._exit(0)
sync.receive()
leave(attempt(sync.receive))
os._exit(0)
