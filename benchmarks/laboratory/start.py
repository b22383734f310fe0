"""Starts a command on ranks behind links of a given rate, as torchrun does without links.

    sudo .venv/bin/python -m benchmarks.laboratory.start --link 1gbit --ranks 2 .venv/bin/ncz tune --output tuned.json

Every rank's output goes to this terminal. If one rank fails, all are ended, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from contextlib import ExitStack

from ncz_plugins.cli.perf.launch import end_process, ending_with_this_process
from ncz_plugins.core.errors import NczError

from .launch import environments_of, placed
from .link import link

_POLL_SECONDS = 0.1


def main() -> int:
    """Run the program. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", metavar="RATE", default="1gbit", help="1gbit, 100mbit, unlimited ...")
    parser.add_argument("--ranks", metavar="N", type=int, default=2, help="2 by default")
    parser.add_argument("--ranks-per-node", metavar="K", type=int, default=1, help="ranks on each link, 1 by default")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    options = parser.parse_args()
    if not options.command or options.ranks % options.ranks_per_node:
        parser.error("give a command, and a number of ranks that --ranks-per-node divides")
    try:
        return start(options.command, options.ranks, options.ranks_per_node, options.link)
    except NczError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def start(command: list[str], ranks: int, per_node: int, rate: str) -> int:
    """Run the command on all ranks. Returns 0, or 2 if one rank failed."""
    with link(ranks // per_node, rate) as nodes, ExitStack() as stack:
        started = []
        for rank, environment in enumerate(environments_of(ranks, nodes, per_node, {})):
            # A session of its own, so that Ctrl-C interrupts this process only, which then ends the ranks.
            process = subprocess.Popen(
                ending_with_this_process(placed(command, nodes, rank // per_node)),
                env=os.environ | environment,
                start_new_session=True,
            )
            stack.callback(end_process, process)
            started.append(process)
        # Wait for all ranks to end, or for one to fail.
        while True:
            codes = [process.poll() for process in started]
            if any(codes):
                return 2
            if None not in codes:
                return 0
            time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
