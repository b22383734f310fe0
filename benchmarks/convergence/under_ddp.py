"""One training of the suite under DDP with any configuration, a process for each rank:

    torchrun --nproc-per-node 2 benchmarks/convergence/under_ddp.py CONFIG [--task GPT] [--seed 0] [--steps 300]

CONFIG is "plain", a preset, a file, or JSON. Muon trains the layers' matrices. Rank 0 prints the loss, the mean of the
last fifth of the steps, and the ratio of fp32's bytes to what was sent. For the smallest frames set transport.link_gbps
to 0.1.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.distributed as dist
from optimizers import optimizers, rate
from tasks import TASKS
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from training import LAST, identical, plain_average

from ncz_plugins.torch import ddp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--task", choices=TASKS, default="GPT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = train(options)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()  # gloo sometimes aborts if a peer's connection goes while it ends
    dist.destroy_process_group()


def train(options: argparse.Namespace) -> dict[str, float | bool]:
    """Train on every rank, and measure."""
    task, rank, ranks = TASKS[options.task](), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    model = task.model().to(task.dtype)
    used = optimizers("Muon", dict(model.named_parameters()), task.sgd_rate)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: rate(step, options.steps)) for each in used]
    wrapped, compression = DistributedDataParallel(model), None
    if options.config != "plain":
        config = json.loads(options.config) if options.config.startswith("{") else options.config
        compression = ddp.compress(wrapped, config)
    losses = []
    for step in range(options.steps):
        wrapped.zero_grad()
        loss = task.loss(wrapped, task.training_batch(options.seed, step, rank, ranks))
        loss.backward()
        if task.clip:
            clip_grad_norm_(model.parameters(), task.clip)
        for each in (*used, *schedules):
            each.step()
        losses.append(loss.detach().float())
    of_steps = plain_average(torch.stack(losses))
    found = {
        "training_loss": of_steps[-max(1, round(LAST * options.steps)) :].mean().item(),
        "replicas_identical": identical(parameters_to_vector(model.parameters())),
        "ratio": 1.0 if compression is None else compression.training.stats.total.ratio,
    }
    for key, value in task.evaluate(model.eval(), rank, ranks).items():
        found[key] = plain_average(torch.tensor(value)).item() * ranks
    return found


if __name__ == "__main__":
    main()
