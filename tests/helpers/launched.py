"""One rank started by `ncz_plugins.cli.perf.launch`: does what its argument says."""

import json
import os
import sys
import time
from pathlib import Path

TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")


def write(record: object) -> None:
    with os.fdopen(int(os.environ["NCZ_PERF_OUT"]), "w", closefd=False, buffering=1) as out:
        out.write(json.dumps(record) + "\n")


def received(folder: str) -> None:
    """What the environment and the standard input say."""
    found = {name: os.environ.get(name) for name in TOLD} | {"input": sys.stdin.read(), "host": os.uname().nodename}
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


def gloo(_: str) -> None:
    """Two sums, each told at once."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for _ in range(2):
        value = torch.ones(1 << 18) * (dist.get_rank() + 1)
        dist.all_reduce(value)
        if dist.get_rank() == 0:
            write({"sum": value.unique().tolist()})
    dist.barrier()
    dist.destroy_process_group()


def horovod(_: str) -> None:
    """A sum, and who Horovod thinks we are."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    value = hvd.allreduce(torch.ones(1 << 18) * (hvd.rank() + 1), op=hvd.Sum)
    ranks = hvd.allgather_object((hvd.rank(), hvd.local_rank(), hvd.cross_rank(), os.environ["RANK"]))
    if hvd.rank() == 0:
        write({"sum": value.unique().tolist(), "ranks": ranks})
    hvd.shutdown()


def dies(_: str) -> None:
    """Rank 1 fails, the others wait for it."""
    if os.environ["RANK"] == "1":
        raise ValueError("the cat sat on the keyboard")
    time.sleep(600)


def killed(_: str) -> None:
    if os.environ["RANK"] == "1":
        os.abort()
    time.sleep(600)


def waits(_: str) -> None:
    """Tells its process id and that of a child, and sleeps."""
    child = os.fork()
    if child and os.environ["RANK"] == "0":
        print("waiting", flush=True)
        write([os.getpid(), child])
    time.sleep(600 if child else 60)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
