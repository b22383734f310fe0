"""One rank of the convergence suite: does the jobs on its standard input, and writes a record after each."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from training import Job, train

from ncz_plugins.cli.perf.launch import RECORDS

PATIENCE = timedelta(seconds=120)  # of a rank with the others


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=PATIENCE)
    records = os.fdopen(int(os.environ[RECORDS]), "w", buffering=1) if dist.get_rank() == 0 else None
    for job in map(Job.read, json.load(sys.stdin)):
        started = time.monotonic()
        found = train(job)
        found |= {"seconds": time.monotonic() - started, "torch": torch.__version__}
        if records:
            records.write(json.dumps({"job": job.to_dict(), **found}) + "\n")
    dist.barrier()  # gloo sometimes aborts if a peer's connection goes while it ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
