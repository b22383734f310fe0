"""Which weights get no gradient at all, step after step, because their quantization step is too wide for them.

    .venv/bin/python tests/convergence/starved.py [--task "GPT large"] [--steps 120]

Trains plain for some steps. Then it compares the gradients of two ranks, over the batches of the next 16 steps, with
what is left of them. A weight is starved if all that it would have got is zero, and it should have got something.
"""

from __future__ import annotations

import argparse

import torch
from candidates import Candidate, Quantizer
from optimizers import optimizers, rate
from rich.console import Console
from rich.table import Table
from tasks import TASKS
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

RANKS, BATCHES, SCHEDULE = 2, 16, 2000  # the last: steps of the whole training, for the learning rate
CANDIDATES = (
    *(Candidate("strata", "block", 0.375, block) for block in (128, 256, 4096)),
    Candidate("strata", "row", 0.375),
    Candidate("strata", "rows and columns", 0.375),
    Candidate("nearest", "block", 0.5),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="GPT large")
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[arguments.task]()
    torch.manual_seed(0)
    model = task.model()
    named = dict(model.named_parameters())
    parameters = list(named.values())
    used = optimizers("AdamW", named, task.sgd_rate)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: rate(step, SCHEDULE)) for each in used]

    def gradient(step: int, rank: int, ranks: int) -> torch.Tensor:
        model.zero_grad()
        task.loss(model, task.training_batch(0, step, rank, ranks)).backward()
        return parameters_to_vector([each.grad for each in parameters])

    for step in range(arguments.steps):
        gradient(step, 0, 1)
        clip_grad_norm_(parameters, task.clip or float("inf"))
        for each in (*used, *schedules):
            each.step()
    steps = range(arguments.steps, arguments.steps + BATCHES)
    gradients = [[gradient(step, rank, RANKS) for rank in range(RANKS)] for step in steps]
    table = Table(
        "scale", "starved", "matrices with most of them", title=f"Weights without a gradient in {BATCHES} steps"
    )
    lengths = [each.numel() for each in parameters]
    needed = (torch.stack([sum(each) for each in gradients]) != 0).any(0)
    for candidate in CANDIDATES:
        quantizer = Quantizer(candidate, [tuple(each.shape) for each in parameters], seed=0)
        starved = needed & ~(torch.stack([quantizer(each) for each in gradients]) != 0).any(0)
        shares = zip((part.float().mean().item() for part in starved.split(lengths)), named)
        worst = sorted(((share, name) for share, name in shares if named[name].ndim > 1), reverse=True)[:3]
        said = ", ".join(f"{name} {share:.2%}" for share, name in worst if share)
        table.add_row(candidate.describe(), f"{starved.float().mean().item():.4%}", said)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
