"""The trainer dies: workers get an error in bounded time. `weight_sync_death.py before | within` the second version."""

import os
import sys

import torch
from common import attempt, leave, start

from ncz_plugins import WeightSync

rank, _ = start()
sync = WeightSync()
state = {"w": torch.ones(1000)}
if rank == 0:
    sync.publish(state)
    leave("published")
    if sys.argv[1] == "within":  # where ranks have compared their versions, and sizes come next
        sync._broadcast = lambda tensor: os._exit(0)
        sync.publish(state)
    os._exit(0)
sync.receive()
leave(attempt(sync.receive))
os._exit(0)
