"""A whole command: two nodes, a rank in each, and what rank 0 tells printed, until somebody ends it."""

import sys
from pathlib import Path

from ncz_plugins.cli.perf.launch import run
from ncz_plugins.cli.perf.link import link


def tell(record: object) -> None:
    print(*record, *(node.pid for node in nodes), flush=True)


worker, records = sys.argv[1:]
with link(2, "1gbit") as nodes:
    run([sys.executable, worker, "waits", ""], 2, Path(records), nodes=nodes, on_record=tell, timeout=120)
