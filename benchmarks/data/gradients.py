"""Gradients of a real training: the GPT of the examples at the start, while it learns, and near convergence.

The training is that of examples/train_deepspeed.py and examples/train_horovod.py on one rank: batches of 12 sequences
of 128 bytes, AdamW, 20 steps of warm-up, clipping at 1. A gradient is taken as a collective would get it: right
after the backward pass, before clipping.

The text is the standard library of the Python that runs this, so another version of Python gives other gradients.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from .threads import one_thread

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the examples are not installed

from examples.data import Corpus  # noqa: E402
from examples.gpt import GPT, GPTConfig  # noqa: E402

VERSION = 1
CAPTURED = (0, 50, 200)  # how many optimizer steps came before
DESCRIPTIONS = {
    f"gradients-step-{step}": f"all gradients of a 1.9 M-parameter GPT after {step} steps of training"
    for step in CAPTURED
}

BATCH = 12
SEED = 0


def capture(steps: tuple[int, ...], config: GPTConfig, corpus: Corpus) -> list[np.ndarray]:
    """Train until the last of `steps`, which must ascend.

    Returns the gradient at each: float32, (parameters,), flattened and joined in the order of ``model.parameters()``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))
    captured = []
    for step in range(steps[-1] + 1):
        tokens, targets = corpus.batch(BATCH, config.context, seed=SEED, step=step, rank=0)
        optimizer.zero_grad()
        model(tokens, targets).backward()
        if step in steps:
            captured.append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return captured


def make() -> dict[str, np.ndarray]:
    """One set per captured step, float32, (1853568,)."""
    with one_thread():
        return dict(zip(DESCRIPTIONS, capture(CAPTURED, GPTConfig(), Corpus())))
