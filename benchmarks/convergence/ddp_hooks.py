"""What each of two ranks sends for a step under DDP's hooks and ours, and what that adds to the loss under AdamW.

    sudo .venv/bin/python benchmarks/convergence/ddp_hooks.py [--report]

Runs under_ddp.py in a network namespace, where nothing else sends. Runs that are done are kept in
results/ddp-hooks.jsonl. Writes benchmarks/results/ddp-hooks.json, and the table of docs/guides/coming-from.md. What
ours adds to the loss is that of the suite, which has more seeds.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import plan
import suite
import torch
from outcome import interval, outcomes, put_into

from ncz_plugins.cli import machine
from ncz_plugins.version import __version__

NUMBERS = plan.ROOT / "benchmarks" / "results" / "ddp-hooks.json"
PAGE, MARK = plan.ROOT / "docs" / "guides" / "coming-from.md", "<!-- hooks -->"
KEPT = plan.ROOT / "results" / "ddp-hooks.jsonl"
CONFIGS = {  # what under_ddp.py takes: its name in the table, and seeds
    "plain": ("plain", 3),
    "fp16": ("DDP's fp16 hook", 1),
    "powersgd-16": ("PowerSGD, rank 16", 3),
    "ncclz": ("`ncclz`", 1),
    "powersgd-4": ("PowerSGD, rank 4", 3),
}

Run = dict[str, Any]


def train(config: str, seed: int) -> Run:
    """One training of two ranks, alone in its network."""
    program = Path(__file__).with_name("under_ddp.py")
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program), config,
             "--optimizer", "AdamW", "--seed", str(seed)]  # fmt: skip
    inside = f"ip link set lo up && {shlex.join(words)}"
    done = subprocess.run(["unshare", "--net", "sh", "-c", inside], stdout=subprocess.PIPE, text=True, check=True)
    return {"config": config, "seed": seed, **json.loads(done.stdout.splitlines()[-1])}


def added(runs: list[Run], config: str) -> list[float]:
    """To the loss of the plain run of the same seed, as a share of it."""
    plain = {run["seed"]: run["training_loss"] for run in runs if run["config"] == "plain"}
    return [run["training_loss"] / plain[run["seed"]] - 1 for run in runs if run["config"] == config]


def markdown(runs: list[Run]) -> str:
    """A row for each configuration."""
    [ours] = [
        each
        for each in outcomes(suite.published())
        if (each.group, each.setting) == (("GPT", "AdamW", 2, 300), plan.NAMED["balanced"])
    ]
    sent = {run["config"]: run["bytes_of_last_step"] for run in runs if run["seed"] == 0}
    lines = ["| | bytes | times fewer | added to the loss |", "|---|---:|---:|---|"]
    for config, (name, seeds) in CONFIGS.items():
        found = ours.added if config == "ncclz" else added(runs, config) if seeds > 1 and config != "plain" else []
        told = f"{100 * fmean(found):+.2f} % ± {100 * interval(found):.2f} ({len(found)} seeds)" if found else ""
        fewer = f"{sent['plain'] / sent[config]:.1f}" if config != "plain" else "1"
        lines.append(f"| {name} | {sent[config]:,} | {fewer} | {told} |".replace("|  |", "| |"))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="train nothing: write what is there")
    runs = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    KEPT.parent.mkdir(exist_ok=True)
    jobs = [(config, seed) for seed in range(3) for config, (_, seeds) in CONFIGS.items() if seed < seeds]
    for config, seed in [] if parser.parse_args().report else jobs:
        if (config, seed) not in [(run["config"], run["seed"]) for run in runs]:
            runs.append(train(config, seed))
            with KEPT.open("a") as file:
                print(json.dumps(runs[-1]), file=file)
    document = {
        "command": "python benchmarks/convergence/ddp_hooks.py",
        "versions": {"ncz_plugins": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "cpu": machine.cpu(),
        "runs": runs,
    }
    NUMBERS.write_text(json.dumps(document, indent=1) + "\n")
    put_into(PAGE, markdown(runs) + "\n", MARK)
    print(markdown(runs))


if __name__ == "__main__":
    main()
