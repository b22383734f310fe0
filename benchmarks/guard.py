"""Measures which figures of the guard are normal: relative errors and cosines of compressed gradients, by bound.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 benchmarks/guard.py [--output benchmarks/results/guard-4-ranks.json]

The example GPT is trained uncompressed in plain torch. In every step after the first ones, its gradient, as one tensor,
is also averaged with each bound, without and with error feedback, and verified. What comes out does not depend on the
machine's speed.
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

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0)  # of mode rms
FIRST, LAST = 25, 100  # the steps that are counted: from, and up to
BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="FILE.json", help="also write everything to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    communicators = {
        (bound, feedback): _communicator(bound, feedback) for bound in BOUNDS for feedback in (False, True)
    }
    findings = {kind: [] for kind in communicators}
    for step, gradient in enumerate(_gradients(rank, ranks)):
        if step >= FIRST:
            for kind, communicator in communicators.items():
                communicator.all_reduce(gradient.clone(), dist.ReduceOp.AVG, name="gradient")
                findings[kind] += communicator.training.of_group(communicator.ranks).guard.findings
                communicator.end_step()
    rows = [_row(*kind, findings[kind], communicators[kind].stats.total.ratio) for kind in communicators]
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
            Path(options.output).write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _communicator(bound: float, feedback: bool) -> Communicator:
    never_alarm = {"every": 1, "max_relative_error": 1e30, "min_cosine": -1}
    return Communicator({"quantizer": {"value": bound, "error_feedback": feedback}, "guard": never_alarm})


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


def _row(bound: float, feedback: bool, findings: list, ratio: float) -> dict:
    errors, cosines = [found.relative_error for found in findings], [found.cosine for found in findings]
    return {
        "bound": bound,
        "error_feedback": feedback,
        "verified": len(findings),
        "relative_error": {"median": statistics.median(errors), "max": max(errors)},
        "cosine": {"median": statistics.median(cosines), "min": min(cosines)},
        "ratio": ratio,
    }


def show(rows: list[dict]) -> None:
    """The table of docs/guides/policies.md: without / with error feedback."""
    print("| `quantizer.value` | relative error | largest | cosine | smallest | ratio |\n|---|---|---|---|---|---|")
    for plain, fed in zip(rows[::2], rows[1::2]):
        cells = (
            ("relative_error", "median", "{:.3f}"),
            ("relative_error", "max", "{:.2f}"),
            ("cosine", "median", "{:.4f}"),
            ("cosine", "min", "{:.3f}"),
        )
        texts = [" / ".join(form.format(row[figure][of]) for row in (plain, fed)) for figure, of, form in cells]
        ratios = f"{plain['ratio']:.1f} / {fed['ratio']:.1f}"
        print(f"| {plain['bound']:g} | {' | '.join(texts)} | {ratios} |")


if __name__ == "__main__":
    main()
