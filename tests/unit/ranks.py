"""All ranks in one process: a thread and a real gloo process group for each."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ncz_plugins.core.transport import Transport

_SECONDS = 60


def play(world_size: int, body: Callable[[Transport], object]) -> list:
    """What `body` returns on each rank. The first rank that raises decides what is raised."""
    store = dist.HashStore()
    results: list = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=_SECONDS))
            results[rank] = body(Transport(group))
        except BaseException as error:
            errors.append((rank, error))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _SECONDS
    while any(thread.is_alive() for thread in threads) and not errors and time.monotonic() < deadline:
        time.sleep(0.001)
    if errors:
        raise errors[0][1]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
