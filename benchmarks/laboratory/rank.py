"""One rank of the laboratory: joins the others and measures. Rank 0 reports the results.

python -m benchmarks.laboratory.rank    # started by `perf`, with a LinkJob as JSON on its standard input
"""

from __future__ import annotations

import json
import sys

from ncz_plugins.cli.perf.launch import emitter
from ncz_plugins.cli.perf.rank import take_part
from ncz_plugins.core.errors import NczError

from .measure import LinkJob, LinkMeasurement


def main() -> int:
    """Run one rank of the job on standard input. Returns the exit code."""
    job = LinkJob(**json.load(sys.stdin))
    try:
        take_part(job, emitter(), LinkMeasurement)
    except NczError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
