"""Calls as tests need them."""

import torch

from ncz_plugins.core.call import Call
from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.core.config import Config


def call(**changes) -> Call:
    """An all-reduce of 8 elements on 2 ranks, but for what is said to differ. It has no schedule, so it can't run."""
    tensor = torch.zeros(8)
    arguments = {
        "collective": "all_reduce",
        "config": Config(),
        "layout": Layout.of([4, 4], 4),
        "source": Window(tensor),
        "output": Window(tensor),
        "measured": range(2),
        "schedule": None,
        "plain": None,
    }
    return Call(**arguments | changes)
