"""Verdict on a prediction: whether compression pays, what limits the step, and where that changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from ...core.config import Config
from ...core.tuning.decisions import WORTH
from ..loss import describe
from .simulation.costs import CodingCosts
from .simulation.fleet import Link
from .step import Setup, Step, predict, resolved
from .workload import Interval

_MAX_RANKS = 512  # tried for the break-even
_SLOWEST_GBPS, _FASTEST_GBPS = 0.01, 10_000.0
_HALVINGS = 12
_NOTHING = Interval(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Verdict:
    """Verdict on one plan.

    Attributes:
        pays: whether compression pays: "yes", "no", or "perhaps" if the intervals overlap.
        against: kind of step that the compressed one is compared with: the fastest of the others.
        speed_up: speed-up against that kind.
        limits: cost -> seconds by which the compressed step would be shorter without it, the largest first.
        break_even_gbps: fastest link of a node for which compression pays; None if it pays for no link.
        paying_ranks: lowest and highest number of ranks, of those tried, for which it pays; None if there is none.
        loss: known effect of the bound on the loss.
    """

    pays: Literal["yes", "no", "perhaps"]
    against: str
    speed_up: float
    limits: dict[str, float]
    break_even_gbps: float | None
    paying_ranks: tuple[int, int] | None
    loss: str


def judge(setup: Setup, steps: list[Step]) -> Verdict:
    """Verdict from the predicted steps of all kinds."""
    ours = next(each for each in steps if each.kind == "compressed")
    best = min((each for each in steps if each is not ours), key=lambda each: each.seconds.middle)
    return Verdict(
        pays=_pays(ours, best),
        against=best.kind,
        speed_up=best.seconds.middle / ours.seconds.middle if ours.seconds.middle else 1.0,
        limits=_limits(setup, ours),
        break_even_gbps=_break_even_link(setup),
        paying_ranks=_paying_ranks(setup),
        loss=describe(setup.config.quantizer),
    )


def _pays(ours: Step, best: Step) -> Literal["yes", "no", "perhaps"]:
    if not ours.compressed_calls or ours.seconds.middle > WORTH * best.seconds.middle:
        return "no"
    # Both steps contain the same computing: compare low with low, and high with high.
    surely = all(mine < other for mine, other in zip(ours.seconds, best.seconds))
    apart = ours.seconds.middle + (ours.seconds.high - ours.seconds.middle) / 2 < best.seconds.middle
    return "yes" if surely and apart else "perhaps"


def _gains(setup: Setup) -> bool:
    ours = predict(setup, "compressed")
    best = min(predict(setup, kind).seconds.middle for kind in setup.kinds if kind != "compressed")
    return ours.compressed_calls > 0 and ours.seconds.middle <= WORTH * best


def _break_even_link(setup: Setup) -> float | None:
    """The fastest link for which compression pays, found by bisection; None if there is none.

    Compression pays below some speed only. Look above the given speed if it pays there, else below.
    """
    given = setup.group.link.gbps
    if _gains(setup):
        low, high = given, max(given, _FASTEST_GBPS)
        if _gains(setup.with_link(high)):
            return high
    else:
        low, high = min(given, _SLOWEST_GBPS), given
        if not _gains(setup.with_link(low)):
            return None
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _gains(setup.with_link(middle)) else (low, middle)
    return low


def _paying_ranks(setup: Setup) -> tuple[int, int] | None:
    size = setup.group.ranks_per_node
    tried = [2**power for power in range(1, 21) if 2**power * size <= _MAX_RANKS] or [2]
    # From both ends, as only these are told, and most ranks take longest to simulate.
    gains = cache(lambda nodes: _gains(setup.with_nodes(nodes)))
    fewest = next(filter(gains, tried), None)
    return fewest and (fewest * size, next(filter(gains, reversed(tried))) * size)


def _limits(setup: Setup, ours: Step) -> dict[str, float]:
    group, costs = setup.group, setup.group.costs
    free = {name: CodingCosts(encode=0, decode=0) for name in costs.coders}
    fast = Link(1e6, group.link.latency)
    without = {
        "computing": replace(setup, workload=replace(setup.workload, compute=setup.workload.compute.times(_NOTHING))),
        "the link": replace(setup, config=_decided(setup), group=replace(group, link=fast)),
        "coding": _with_costs(setup, coders=free, measure_ps=0),
        "messages and latency": _with_costs(
            replace(setup, group=replace(group, link=replace(group.link, latency=0))),
            call_us=0, fixed_rate_call_us=None, message_us=0, plain_call_us=0, plain_message_us=0, local_us=0,
        ),
        "weights": replace(setup, sendings=[each for each in setup.sendings if each.role != "parameter"]),
    }  # fmt: skip
    saved = {name: ours.seconds.middle - predict(other, "compressed").seconds.middle for name, other in without.items()}
    return dict(sorted(((name, max(0.0, each)) for name, each in saved.items()), key=lambda item: -item[1]))


def _decided(setup: Setup) -> Config:
    """Settings with fixed sizes: those that follow from the link must not change for a link that costs nothing."""
    group = setup.group
    config, on_gpu = resolved(setup.config, group), group.costs.kind == "gpu"
    decided = {
        "min_bytes": config.min_bytes_in_effect(on_gpu, group.ranks),
        "frame_bytes": config.transport.frame_bytes_in_effect(on_gpu),
    }
    return config.model_copy(update={"transport": config.transport.model_copy(update=decided)})


def _with_costs(setup: Setup, **changes) -> Setup:
    return replace(setup, group=replace(setup.group, costs=setup.group.costs.model_copy(update=changes)))
