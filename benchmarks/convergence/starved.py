"""What quantization does to the single weights: which get no gradient at all, and which get mostly noise.

    .venv/bin/python benchmarks/convergence/starved.py [--task "GPT large"] [--steps 120] [--of 2000]

Trains plain for some steps. Then it compares the gradients of two ranks, over the batches of the next 16 steps, with
what is left of them. A weight is starved if all that it would have got is zero, and it should have got something.
The second table looks at noise as Adam does, which divides each weight's gradient by the root of its mean square: noise
makes that larger, so that quiet weights learn more slowly.
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

RANKS, BATCHES = 2, 16
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
    parser.add_argument("--of", type=int, default=2000, help="steps of the whole training, for the learning rate")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[arguments.task]()
    torch.manual_seed(0)
    model = task.model()
    named = dict(model.named_parameters())
    parameters = list(named.values())
    used = optimizers("AdamW", named, task.sgd_rate)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: rate(step, arguments.of)) for each in used]

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
    exact = torch.stack([sum(each) / RANKS for each in gradients])
    needed = (exact != 0).any(0)
    noise = Table("scale", "parameters", "noise", "seen by Adam", "slower", "at most half", title="Noise in gradients")
    kinds = [kind(name, weight) for name, weight in named.items()]
    for candidate in CANDIDATES:
        quantizer = Quantizer(candidate, [tuple(each.shape) for each in parameters], seed=0)
        averages = torch.stack([quantizer(each) for each in gradients])
        starved = needed & ~(averages != 0).any(0)
        shares = zip((part.float().mean().item() for part in starved.split(lengths)), named)
        worst = sorted(((share, name) for share, name in shares if named[name].ndim > 1), reverse=True)[:3]
        said = ", ".join(f"{name} {share:.2%}" for share, name in worst if share)
        table.add_row(candidate.describe(), f"{starved.float().mean().item():.4%}", said)
        parts = list(zip(kinds, exact.split(lengths, 1), averages.split(lengths, 1)))
        for which in dict.fromkeys(kinds):
            chosen = [part[1:] for part in parts if part[0] == which]
            noise.add_row(candidate.describe(), which, *seen(*(torch.cat(each, 1) for each in zip(*chosen))))
    Console(width=140).print(table, noise)


def kind(name: str, weight: torch.Tensor) -> str:
    """What sort of a parameter it is: "attention", "biases", ..."""
    if weight.ndim == 1:
        return "norms" if "norm" in name else "biases"
    return next((each for each in ("tokens", "positions", "attention", "mlp") if each in name), "other matrices")


def seen(exact: torch.Tensor, averages: torch.Tensor) -> list[str]:
    """What is made of gradients, [steps, weights]: the noise, as a share of them, and what Adam makes of it.

    That is the mean over weights of noise over mean square; how much slower weights learn in the mean; and the share of
    those that learn at most half as fast.
    """
    used = (exact != 0).any(0)
    exact, averages = exact[:, used].double(), averages[:, used].double()
    error, square = ((averages - exact) ** 2).mean(0), (exact**2).mean(0)
    speed = (square / (averages**2).mean(0).clamp_min(1e-300)).sqrt().clamp_max(1)
    of_all = (error.sum() / square.sum()).sqrt()
    numbers = (of_all, (error / square).clamp_max(100).mean(), 1 - speed.mean(), (speed <= 0.5).double().mean())
    return [f"{number.item():.1%}" for number in numbers]


if __name__ == "__main__":
    main()
