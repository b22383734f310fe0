"""Measures which figures of the guard are normal: relative errors and cosines of compressed gradients, by settings.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 benchmarks/guard.py [--output benchmarks/results/guard-4-ranks.json]

The example GPT is trained uncompressed in plain torch. In every step after the first ones, its gradient, as one tensor,
is also averaged with each of some settings, and verified. What comes out does not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ncz_plugins import Communicator, __version__
from ncz_plugins.core.config import PRESETS
from ncz_plugins.core.whole_files import write_whole

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SETTINGS = {name: each.get("quantizer", {}) for name, each in PRESETS.items() if "policies" not in each} | {
    f"error feedback, {value:g}": {"kind": "error_bound", "value": value, "error_feedback": True}
    for value in (0.25, 0.5, 1.0)
}
FIRST, LAST = 25, 100  # the steps that are counted: from, and up to
BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="FILE.json", help="also write everything to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    communicators = {name: _communicator(quantizer) for name, quantizer in SETTINGS.items()}
    findings = {name: [] for name in communicators}
    for step, gradient in enumerate(_gradients(rank, ranks)):
        if step >= FIRST:
            for name, communicator in communicators.items():
                communicator.all_reduce(gradient.clone(), dist.ReduceOp.AVG, name="gradient")
                findings[name] += communicator.training.of_group(communicator.ranks).guard.findings
                communicator.end_step()
    rows = [_row(name, findings[name], communicators[name].stats.total.ratio) for name in communicators]
    if rank == 0:
        show(rows)
        if options.output:
            report = {
                "command": shlex.join(["torchrun", "--nproc-per-node", str(ranks), *sys.argv]),
                "versions": {"ncz_plugins": __version__, "torch": torch.__version__},
                "ranks": ranks,
                "steps": [FIRST, LAST],
                "batch": BATCH,
                "rows": rows,
            }
            write_whole(options.output, json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _communicator(quantizer: dict) -> Communicator:
    never_alarm = {"every": 1, "max_relative_error": 1e30}
    slow = {"link_gbps": 0.1}  # so that frames are coded as small as they can be
    return Communicator({"quantizer": quantizer, "guard": never_alarm, "transport": slow})


def _gradients(rank: int, ranks: int):
    """This rank's gradient of each step, flat; the model follows the average of all."""
    sys.path.insert(0, str(EXAMPLES))
    from data import Corpus
    from gpt import GPT

    torch.manual_seed(0)
    model, corpus = GPT(), Corpus()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for step in range(LAST):
        optimizer.zero_grad()
        model(*corpus.batch(BATCH, model.config.context, seed=0, step=step, rank=rank)).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in parameters])
        yield gradient
        dist.all_reduce(gradient)
        for parameter, mean in zip(parameters, (gradient / ranks).split([p.numel() for p in parameters])):
            parameter.grad.copy_(mean.view_as(parameter))
        optimizer.step()


def _row(name: str, findings: list, ratio: float) -> dict:
    errors, cosines = [found.relative_error for found in findings], [found.cosine for found in findings]
    return {
        "settings": name,
        "quantizer": SETTINGS[name],
        "verified": len(findings),
        "relative_error": {"median": statistics.median(errors), "max": max(errors)},
        "cosine": {"median": statistics.median(cosines), "min": min(cosines)},
        "ratio": ratio,
    }


def show(rows: list[dict]) -> None:
    """The table of docs/notebook/settings.md."""
    print("| settings | relative error | largest | cosine | smallest | ratio |\n|---|---|---|---|---|---|")
    for row in rows:
        error, cosine = row["relative_error"], row["cosine"]
        figures = f"{error['median']:.3f} | {error['max']:.2f} | {cosine['median']:.4f} | {cosine['min']:.3f}"
        print(f"| {row['settings']} | {figures} | {row['ratio']:.1f} |")


if __name__ == "__main__":
    main()
