"""What one span of our tracing costs while nothing records, beside `torch.profiler.record_function`.

python benchmarks/spans.py    # prints the median of 200 batches of 2,000 spans of each kind, in turns, in microseconds
"""

from __future__ import annotations

import statistics
import time

from torch.profiler import record_function

from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.runtime.trace import span

BATCHES, SPANS = 200, 2000


def main() -> None:
    counters = Counters()
    kinds = {
        "span and counter": lambda: span("encode", 4096, counters),
        "span": lambda: span("encode", 4096),
        "record_function": lambda: record_function("encode"),
    }
    seconds = {name: [] for name in kinds}
    for _ in range(BATCHES):
        for name, make in kinds.items():
            started = time.perf_counter()
            for _ in range(SPANS):
                with make():
                    pass
            seconds[name].append((time.perf_counter() - started) / SPANS)
    for name, taken in seconds.items():
        print(f"{name}: {1e6 * statistics.median(taken):.2f} us (fastest batch {1e6 * min(taken):.2f})")


if __name__ == "__main__":
    main()
