"""What contenders need, and how they refuse: without starting any ranks."""

import pytest

from ncz_plugins import Config, UnsupportedError
from ncz_plugins.cli.perf import COLLECTIVES
from ncz_plugins.cli.perf.contenders import CONTENDERS, Context


def test_names_are_unique_and_described():
    assert {"plain", "ncz", "fp16", "bf16", "ddp-powersgd-4"} <= set(CONTENDERS)
    for name, contender in CONTENDERS.items():
        assert name == contender.name
        assert contender.description and "\n" not in contender.description
        assert contender.collectives and contender.collectives <= set(COLLECTIVES)
        assert contender.missing() is None or name == "nccl"  # all others need nothing but torch


def test_a_contender_refuses_collectives_that_it_lacks():
    context = Context(Config(), "a group", 2, 0, "broadcast")
    for name, contender in CONTENDERS.items():
        if "broadcast" not in contender.collectives:
            with pytest.raises(UnsupportedError, match=rf"{name} has no broadcast; it has all_"):
                contender.open(context)
