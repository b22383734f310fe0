"""What a fixed rate does to data: the error of one rank's contribution, and the ratio, for each number of bits.

    python benchmarks/fixed_rate.py [--json FILE]

The error is that of `quantizer.mode: bits` by itself, in L2, as a share of the data. The ratio is that of an all_reduce
of float32: what a bandwidth-optimal one sends, over what a call at this rate sends.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ncz_plugins import kernels
from ncz_plugins.cli import machine
from ncz_plugins.cli.perf import data
from ncz_plugins.core.codec.fixed_rate import levels_of, sum_bits
from ncz_plugins.core.config.fields import LEAST_BITS, MOST_BITS
from ncz_plugins.core.whole_files import write_whole
from ncz_plugins.kernels.format import RATE_BLOCK, Noise, Rows, packed_bytes

ELEMENTS = 1 << 22
RANKS = (2, 4, 8)


def error(x: torch.Tensor, bits: int, noise: Noise | None) -> float:
    """Of one rank's values, [elements], in L2, as a share of them."""
    backend, rows = kernels.cpu_backend(), Rows.of(x.numel(), 1, x.numel())
    magnitudes = torch.empty(rows.blocks, dtype=torch.bfloat16)
    packed = torch.empty(rows.blocks * packed_bytes(bits), dtype=torch.uint8)
    values = torch.empty_like(x)
    backend.block_magnitudes(x, rows, magnitudes)
    backend.pack(x, rows, magnitudes, bits, packed, noise)
    backend.unpack(packed, 1, bits, rows, magnitudes, levels_of(bits), values)
    return ((values - x).double().norm() / x.double().norm()).item()


def ratio(bits: int, ranks: int) -> float:
    """Of an all_reduce: both ways 32 bits, or codes one way, sums back, and a magnitude per block both ways.

    Two ranks send each other codes both ways.
    """
    back = bits if ranks == 2 else sum_bits(bits, ranks)
    return 64 / (bits + back + 2 * 16 / RATE_BLOCK)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sources = {"noise": data.noise, "gradient": data.Gradients(data.trained())}  # as `ncz perf` has them
    samples = {name: data.values(source, 0, ELEMENTS) for name, source in sources.items()}
    rows = []
    for bits in range(LEAST_BITS, MOST_BITS + 1):
        row = {"bits": bits, "bound": 1 / (2 * levels_of(bits))}
        row |= {f"error, {name}": error(x, bits, None) for name, x in samples.items()}
        row |= {f"at random, {name}": error(x, bits, Noise(0, 1, 0)) for name, x in samples.items()}
        rows.append(row | {f"ratio, {ranks} ranks": ratio(bits, ranks) for ranks in RANKS})
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.3g}" for value in row.values()))
    Console().print(table)
    if arguments.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        about = {"cpu": machine.cpu(), **versions}
        report = {"command": "python benchmarks/fixed_rate.py", "machine": about, "rows": rows}
        write_whole(arguments.json, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
