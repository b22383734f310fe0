"""Which trainings make up the convergence suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tasks import FINE_TUNING
from training import Job, Setting

from ncz_plugins.core.config import PRESETS, Config
from ncz_plugins.kernels.format import RATE_BLOCK

ROOT = Path(__file__).resolve().parents[2]

PLAIN, BF16 = Setting("plain"), Setting("bf16")
NAMED = {name: Setting.of(Config.load(f"ncclz:{name}")) for name in PRESETS}
ACCURATE, BALANCED, SMALL = NAMED["accurate"], NAMED["balanced"], NAMED["small"]
FORMER = Setting("nearest", 0.25, 4096)  # the default up to November 2026
WIDE_ACCURATE, WIDE, WIDE_SMALL = (Setting("stochastic", value, 256) for value in (0.25, 0.375, 1))  # what followed it
NEAREST = Setting("nearest", WIDE.bound / 2, 256)  # the same step, hence about the same bytes
FINE, COARSE = Setting("stochastic", 0.1, 256), Setting("stochastic", 1, 128)
RATES = {bits: Setting("bits", bits, RATE_BLOCK) for bits in range(3, 9)}
RATES_AT_RANDOM = {bits: Setting("stochastic bits", bits, RATE_BLOCK) for bits in range(3, 9)}
FED, FED_MORE = (Setting("error feedback", value, 256) for value in (0.25, 1.0))


class Group(NamedTuple):
    """Trainings that are compared with each other.

    Attributes:
        settings: each with how many seeds it is tried.
    """

    task: str
    optimizer: str
    steps: int
    ranks: int
    settings: dict[Setting, int]


_ADAMW = {PLAIN: 5, BALANCED: 5, SMALL: 5, ACCURATE: 3, BF16: 3, COARSE: 5, WIDE: 5, WIDE_SMALL: 5, WIDE_ACCURATE: 3}
_MUON = {PLAIN: 5, BALANCED: 3, SMALL: 3, ACCURATE: 3, COARSE: 3, WIDE: 5, WIDE_SMALL: 3, WIDE_ACCURATE: 3}
_MUON |= {NAMED["muon"]: 5, NAMED["muon-ddp"]: 3, FINE: 3, NEAREST: 3}
_CNN = (PLAIN, BF16, ACCURATE, BALANCED, SMALL, COARSE, WIDE_ACCURATE, WIDE, WIDE_SMALL, FORMER, FED_MORE)
_RATES = {**dict.fromkeys(RATES.values(), 5), **dict.fromkeys(RATES_AT_RANDOM.values(), 3)}
GROUPS = (
    Group("GPT", "AdamW", 300, 2, {**_ADAMW, FORMER: 3, FED: 3, **_RATES}),
    Group("GPT", "Muon", 300, 2, {**_MUON, **dict.fromkeys(RATES.values(), 3)}),
    Group("digits CNN", "SGD", 150, 2, dict.fromkeys((*_CNN, *RATES.values(), *RATES_AT_RANDOM.values()), 20)),
    Group("GPT", "AdamW", 300, 8, {PLAIN: 3, BALANCED: 3, WIDE: 3, RATES[4]: 3, RATES_AT_RANDOM[4]: 3}),
    Group("GPT large", "AdamW", 2000, 2, {PLAIN: 1, BF16: 1, BALANCED: 1, WIDE: 1, WIDE_ACCURATE: 1}),
    Group(FINE_TUNING, "AdamW", 200, 2, dict.fromkeys((PLAIN, ACCURATE, BALANCED), 4)),
)


def jobs() -> Iterator[Job]:
    """All trainings. Of each group one seed after the other, so that an interrupted suite has a little of all."""
    for task, optimizer, steps, ranks, settings in GROUPS:
        for seed in range(max(settings.values())):
            for setting, seeds in settings.items():
                if seed < seeds:
                    yield Job(task, optimizer, setting, seed, steps, ranks)
