"""Calls as tests need them: with a plan of their own, or decided and run as a door does it."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ncz_plugins.core.call import Call, Plan
from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.core.config import Config
from ncz_plugins.core.group import Group
from ncz_plugins.core.run import decide, enter, run
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.training.state import Training


def planned(
    collective: str,
    config: Config,
    layout: Layout,
    source: Window,
    output: Window,
    measured: range,
    schedule: Callable | None,
    plain: Callable | None = None,
    *,
    op=None,
    root: int = 0,
    role: str | None = None,
    baseline=None,
    described=None,
    **plan,
) -> Call:
    """A compressed call that is carried out as the test says.

    Args:
        plain: starts the uncompressed collective in place of the transport's.
        plan: further attributes of the plan.
    """
    made = Plan(layout, source, output, measured, schedule, **plan)
    call = Call(collective, source.data, output.data, op, root=root, role=role, baseline=baseline, config=config)
    call.plan, call.described = made, described or {}
    call.plain = None if plain is None else _Plain(plain)
    return call


def replanned(call: Call, **changes) -> Call:
    """The call, with these attributes of its plan changed."""
    call.plan = replace(call.plan, **changes)
    return call


def call(**changes) -> Call:
    """An all-reduce of 8 elements on 2 ranks, but for what is said to differ. It has no schedule, so it can't run."""
    flat = Window(torch.zeros(8))
    arguments = {"collective": "all_reduce", "config": Config(), "layout": Layout.of([4, 4], 4), "schedule": None}
    return planned(**arguments | {"source": flat, "output": flat, "measured": range(2)} | changes)


def run_planned(call: Call, device, transport, ranks=None) -> Counters:
    """Run a call that has a plan. Returns its counters."""
    ranks = range(transport.world_size) if ranks is None else ranks
    if isinstance(call.plain, _Plain):
        call.plain.of_transport = transport.plain
    run(Group(Training(Config()), call.config, ranks, transport.rank), call, device, transport)
    return call.counters


def decided(group: Group, call: Call) -> Call:
    """The call, decided."""
    decide(group, call)
    return call


def run_decided(group: Group, call: Call, device, transport) -> Call:
    """Decide a call, which must not go plain, and run it to its end. Returns it."""
    decide(group, call)
    assert call.bypass is None, call.bypass
    enter(group, call)
    run(group, call, device, transport)
    return call


class _Plain:
    """Uncompressed collectives that a test starts by a function of its own."""

    def __init__(self, start: Callable):
        self.start = start
        self.of_transport = None

    def __getattr__(self, name: str) -> Callable:
        return lambda *_: self.start(self.of_transport)
