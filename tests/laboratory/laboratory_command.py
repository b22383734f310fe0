"""A whole command: two ranks, in a node each or here, and what rank 0 tells printed, until somebody ends it."""

import sys
from contextlib import nullcontext
from pathlib import Path

from benchmarks.laboratory.launch import run
from benchmarks.laboratory.link import link


def tell(record: object) -> None:
    print(*record, *(node.pid for node in nodes or ()), flush=True)


worker, records, where = sys.argv[1:]
with link(2, "1gbit") if where == "links" else nullcontext() as nodes:
    run([sys.executable, worker, "waits", ""], 2, Path(records), nodes=nodes, on_record=tell, timeout=120)
