"""The table of the demonstration in docs/notebook/performance.md, from what `make demo` has left.

    make demo
    .venv/bin/python -m benchmarks.demo_page [results/demo.json]

Keeps in benchmarks/results/demo.json what pages and their picture show: versions, summaries, and the loss of each step.
"""

from __future__ import annotations

import argparse
import json
import shlex
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.pages import put_into, write_figures
from benchmarks.performance import Record, rows_of

ROOT = Path(__file__).resolve().parents[1]
PAGE, MARKS = ROOT / "docs" / "notebook" / "performance.md", ("<!-- demo -->", "<!-- end of demo -->")
RATE = 100  # Mbit/s, which the kernel lets connections of the last steps carry
MB = 1e6


def kept(whole: Record) -> Record:
    """What pages show of a run: summaries, losses, and bytes that a rank has sent in a slow step, weights included."""
    words = shlex.split(whole["runs"]["plain"]["command"])
    steps, slow, ranks = (int(words[words.index(name) + 1]) for name in ("--steps", "--slow-steps", "--num_gpus"))
    runs = {}
    for name, run in whole["runs"].items():
        counted = [step["interface_bytes_so_far"] for step in run["steps"][steps - slow - 1 :]]
        sent = median(after - before for before, after in pairwise(counted)) / ranks
        runs[name] = run["summary"] | {"bytes_of_slow_step": sent, "losses": [step["loss"] for step in run["steps"]]}
    return {"versions": whole["versions"], "steps": steps, "slow_steps": slow, "ranks": ranks, "runs": runs}


def markdown(found: Record) -> str:
    """Both runs side by side."""
    plain, ours = (found["runs"][name] for name in ("plain", "ncclz"))
    slow, fast = found["slow_steps"], found["steps"] - found["slow_steps"]

    def row(words: str, key: str, form: str, unit: float = 1, more: str = "") -> list[str]:
        return [words, form.format(plain[key] / unit), form.format(ours[key] / unit) + more]

    def times(key: str) -> str:
        return f"{plain[key] / ours[key]:.1f} x"

    def share(key: str) -> str:
        return f" ({100 * (ours[key] / plain[key] - 1):+.2f} %)"

    rows = [
        row(f"step at {RATE} Mbit/s, median of the last {slow}", "slow_step_seconds", "{:.2f} s",
            more=f" ({times('slow_step_seconds')} as fast)"),
        row("sent in such a step by a rank, weights included", "bytes_of_slow_step", "{:.1f} MB", MB),
        row("gradient bytes per step of all ranks, counted at the network interface", "interface_bytes_per_step",
            "{:.2f} MB", MB, f" ({times('interface_bytes_per_step')} fewer)"),
        row("training loss, last 10 steps", "training_loss", "{:.4f}", more=share("training_loss")),
        row("validation loss", "validation_loss", "{:.4f}", more=share("validation_loss")),
        row(f"step on the loopback, median of the first {fast}", "step_seconds", "{:.3f} s"),
        ["replicas bit-identical", *("yes" if each["replicas_identical"] else "NO" for each in (plain, ours))],
    ]  # fmt: skip
    return rows_of(["", "plain", "ncclz"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "results" / "demo.json")
    found = kept(json.loads(parser.parse_args().file.read_text()))
    write_figures("demo.json", ["make", "demo"], found.pop("versions"), None, **found)
    put_into(PAGE, markdown(found), MARKS)
    print(markdown(found))


if __name__ == "__main__":
    main()
