"""A trainer publishes its weights after every few steps, and a worker follows, as in RL and in serving.

    cd examples
    torchrun --nproc_per_node 2 sync_weights.py [--rate 1e-4] [--steps-per-version 1]

Rank 0 trains the small GPT in bfloat16, with float32 masters; the last versions are fine-tuning at the given learning
rate. Rank 1 gets each version as a patch, to the bit, and evaluates it. A line says what a version took.
"""

import argparse

import torch
import torch.distributed as dist
from data import Corpus
from gpt import GPT, GPTConfig
from rich.console import Console
from rich.table import Table

from ncz_plugins import WeightSync


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm-up", type=int, default=60, help="steps at a rate of 1e-3 before the first version")
    parser.add_argument("--versions", type=int, default=8)
    parser.add_argument("--steps-per-version", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1e-5, help="learning rate between versions")
    return parser.parse_args()


def bfloat16(model: GPT) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}


def trainer(arguments, sync: WeightSync) -> None:
    torch.manual_seed(0)
    model, corpus = GPT(GPTConfig()), Corpus()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    def train(steps: range) -> None:
        for step in steps:
            loss = model(*corpus.batch(12, model.config.context, seed=0, step=step, rank=0))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    train(range(arguments.warm_up))
    for group in optimizer.param_groups:
        group["lr"] = arguments.rate
    found = Table("version", "sent", "of bfloat16", "times fewer", "worker's loss", box=None)
    for number in range(arguments.versions):
        first = arguments.warm_up + number * arguments.steps_per_version
        train(range(first, first + arguments.steps_per_version))
        version = sync.publish(bfloat16(model))
        loss = torch.zeros(1)
        dist.broadcast(loss, 1)
        whole = 2 * sum(parameter.numel() for parameter in model.parameters())
        sizes = f"{sync.bytes_sent / 1e6:.3f} MB", f"{whole / 1e6:.3f} MB", f"{whole / sync.bytes_sent:.1f}"
        found.add_row(str(version), *sizes, f"{loss.item():.4f}")
    Console(width=100).print(found)


def worker(arguments, sync: WeightSync) -> None:
    model, corpus = GPT(GPTConfig()).eval(), Corpus()
    for _ in range(arguments.versions):
        model.load_state_dict(sync.receive())
        with torch.no_grad():
            tokens, targets = corpus.batch(12, model.config.context, seed=1, step=0, rank=0)
            loss = model(tokens, targets)
        dist.broadcast(loss.reshape(1), 1)


def main():
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    sync = WeightSync(src=0)
    (trainer if dist.get_rank() == 0 else worker)(arguments, sync)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
