"""Which trainings make up the convergence suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from training import Job, Setting

from ncz_plugins.core.config import Config

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = Config().quantizer.value
AGGRESSIVE = Config.load(ROOT / "configs" / "ncclz_aggressive.yaml").quantizer.value
BOUNDS = (0.1, DEFAULT, AGGRESSIVE, 1.0, 2.0)  # times the root mean square of a block

PLAIN = Setting("plain")
MAIN = (
    PLAIN,
    Setting("nearest", DEFAULT),
    Setting("nearest", AGGRESSIVE),
    Setting("error feedback", AGGRESSIVE),
    Setting("nearest", 1.0),
    Setting("error feedback", 1.0),
    Setting("stochastic", DEFAULT),
    Setting("stochastic", 1.0),
)
COARSE = (PLAIN, *(Setting(kind, v) for v in (1.0, 2.0) for kind in ("nearest", "error feedback")))
LONG = (PLAIN, Setting("nearest", DEFAULT), Setting("stochastic", DEFAULT))

SWEPT = (
    ("digits MLP", "SGD", 200),
    ("digits MLP", "AdamW", 200),
    ("digits CNN", "SGD", 150),
    ("GPT fp32", "AdamW", 200),
)


def jobs(seeds: int) -> list[Job]:
    """All trainings, the most telling ones first, none twice."""
    return list(dict.fromkeys(_jobs(range(seeds))))


def _jobs(seeds: range) -> Iterator[Job]:
    for each in (*SWEPT, ("GPT bf16", "AdamW", 200)):
        yield from _of(*each, MAIN, seeds)
    *digits, gpt = SWEPT
    for each in digits:
        yield from _of(*each, _sweep(BOUNDS), seeds)
    yield from _of(*gpt, _sweep(BOUNDS[1:]), seeds)
    yield from _of("GPT fp32", "SGD", 200, COARSE, seeds)
    yield from _of("GPT fp32", "AdamW", 800, LONG, seeds[:1])
    for optimizer in ("SGD", "AdamW"):
        yield from _of("digits MLP", optimizer, 200, COARSE, seeds, ranks=4)


def _sweep(bounds: tuple[float, ...]) -> tuple[Setting, ...]:
    return (PLAIN, *(Setting(kind, v) for v in bounds for kind in ("nearest", "error feedback", "stochastic")))


def _of(task: str, optimizer: str, steps: int, settings: tuple[Setting, ...], seeds: range, ranks: int = 2):
    for seed in seeds:
        for setting in settings:
            yield Job(task, optimizer, setting, seed, steps, ranks)
