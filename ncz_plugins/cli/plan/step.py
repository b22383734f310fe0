"""Predicted time of a training step: computing, and communication that overlaps it or that the step waits for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ...core.config import Config
from .simulation import calls
from .simulation.calls import Group, Timed
from .strategy import Sending
from .workload import Interval, Workload

Kind = Literal["plain", "bfloat16", "compressed"]

_FORWARD_SHARE = 1 / 3  # share of computing; the backward pass takes twice as long as the forward pass
_GUESSED_ERROR = 0.25  # relative error of predictions that were not compared with measurements
# Ratio of weights by bytes of a weight, from docs/results/weights.md: a GPT at a learning rate of 1e-3 after 20 steps.
# Kept weights are sent as changes; weights that are gathered and freed (ZeRO 3, FSDP) are sent whole.
_RATIO_OF_CHANGES, _RATIO_OF_WHOLE = {2: 3.4, 4: 1.5}, {2: 1.5, 4: 1.2}


@dataclass(frozen=True)
class Setup:
    """Training on certain machines.

    Attributes:
        workload: the training.
        sendings: collectives of each step.
        group: the ranks and their link.
        config: our settings.
        price: dollars per hour of all machines; None if unknown.
    """

    workload: Workload
    sendings: list[Sending]
    group: Group
    config: Config
    price: float | None = None

    @property
    def kinds(self) -> list[Kind]:
        """Kinds of steps to predict. bfloat16 is left out if gradients have 16 bits already."""
        return ["plain", "bfloat16", "compressed"] if self.workload.itemsize == 4 else ["plain", "compressed"]

    def with_link(self, gbps: float) -> Setup:
        """A copy with another speed of the link. The limit of one connection grows if it would limit the link."""
        link = self.group.link
        if link.flow_gbps is not None:
            link = replace(link, flow_gbps=max(link.flow_gbps, gbps / link.connections))
        return replace(self, group=replace(self.group, link=replace(link, gbps=gbps)))

    def with_nodes(self, nodes: int) -> Setup:
        """A copy with another number of nodes."""
        price = None if self.price is None else self.price * nodes / self.group.nodes
        return replace(self, group=replace(self.group, nodes=nodes), price=price)


@dataclass(frozen=True)
class Step:
    """Predicted step.

    Attributes:
        kind: how gradients are sent.
        seconds: seconds of the whole step.
        compute: seconds of computing, including coding that takes the same cores.
        communication: seconds of all collectives, coding included.
        exposed: seconds in which the step waits for collectives.
        wire_bytes: bytes that a rank sends.
        compressed_calls: share of gradient calls that are compressed.
        dollars: price of 1,000 steps; None if unknown.
    """

    kind: Kind
    seconds: Interval
    compute: float
    communication: float
    exposed: float
    wire_bytes: float
    compressed_calls: float
    dollars: Interval | None

    @property
    def hidden(self) -> float:
        """Seconds of communication that overlap with computing."""
        return max(0.0, self.communication - self.exposed)


@dataclass
class _Calls:
    """Times of the calls of a step of one kind. Each call is simulated once."""

    setup: Setup
    kind: Kind
    _known: dict[Sending, Timed] = field(default_factory=dict)

    def of(self, sending: Sending) -> Timed:
        if sending not in self._known:
            self._known[sending] = self._timed(sending)
        return self._known[sending]

    def _timed(self, sending: Sending) -> Timed:
        group, itemsize = self.setup.group, sending.itemsize or self.setup.workload.itemsize
        nbytes = sending.nbytes
        if sending.inside:
            size = group.ranks_per_node
            link = replace(group.link, gbps=group.link.gbps / size)
            cores = None if group.cores is None else group.cores / size
            group, nbytes = replace(group, ranks_per_node=1, link=link, cores=cores), nbytes // size
        if sending.role == "parameter":
            return self._weights(group, sending, nbytes)
        if self.kind == "compressed" and "gradient" in self.setup.config.roles:
            config = resolved(self.setup.config, group)
            workload = self.setup.workload
            ratio = workload.ratio, workload.ratio_ranks
            return calls.compressed(group, sending.collective, nbytes, config, itemsize, *ratio)
        return calls.plain(group, sending.collective, nbytes, itemsize, cast=self.kind == "bfloat16")

    def _weights(self, group: Group, sending: Sending, nbytes: int) -> Timed:
        if self.kind != "compressed" or "parameter" not in self.setup.config.roles:
            return calls.plain(group, sending.collective, nbytes)
        itemsize = self.setup.workload.itemsize
        ratio = (_RATIO_OF_CHANGES if sending.phase == "after" else _RATIO_OF_WHOLE)[itemsize]
        sent = calls.plain(group, sending.collective, round(nbytes / ratio))
        costs = group.costs.coders["huffman"]
        values = nbytes / itemsize
        coding = 1e-12 * group.costs.coding_times * (costs.encode / group.ranks + costs.decode) * values * group.sharing
        return replace(sent, seconds=sent.seconds + coding, busy_seconds=sent.busy_seconds + coding)


def resolved(config: Config, group: Group) -> Config:
    """`config` as ranks on several hosts resolve it after measuring their link."""
    # On GPUs the link is measured with uncompressed calls, whose rings get the whole link of a node.
    on_gpu = group.costs.kind == "gpu"
    gbps = group.link.gbps / (1 if on_gpu else group.ranks_per_node)
    return (config.for_gpus() if on_gpu else config).resolved(
        link_gbps=float(f"{min(max(gbps, 1e-3), 1e4):.3g}"),  # the range of transport.link_gbps
    )


def predict(setup: Setup, kind: Kind) -> Step:
    """Predict a step of one kind."""
    # Low end, middle and high end: of the given computing time, and of the error of simulated collectives.
    known = _Calls(setup, kind)
    error = _GUESSED_ERROR if setup.group.costs.error is None else setup.group.costs.error
    ends = [
        _timeline(setup, known, compute, factor)
        for compute, factor in zip(setup.workload.compute, (1 - error, 1, 1 + error))
    ]
    seconds = Interval(*(total for total, _, _ in ends))
    total, compute, communication = ends[1]
    gradients = [each for each in setup.sendings if each.role == "gradient"]
    compressed = sum(each.count * known.of(each).compressed for each in gradients)
    price_per_second = None if setup.price is None else setup.price / 3600
    return Step(
        kind=kind,
        seconds=seconds,
        compute=compute,
        communication=communication,
        exposed=max(0.0, total - compute),
        wire_bytes=sum(known.of(each).wire_bytes * each.count / each.steps for each in setup.sendings),
        compressed_calls=compressed / sum(each.count for each in gradients),
        dollars=None if price_per_second is None else seconds.times(Interval.exactly(1000 * price_per_second)),
    )


def _timeline(setup: Setup, known: _Calls, compute: float, factor: float) -> tuple[float, float, float]:
    """Seconds of a step, of its computing, and of its communication. Collectives run one after another.

    Args:
        setup: the training.
        known: times of the calls.
        compute: seconds of computing without communication.
        factor: factor on the times of collectives.
    """
    group = setup.group
    taken = {each: factor * known.of(each).seconds / each.steps for each in setup.sendings}
    if group.costs.kind == "cpu" and group.cores is not None and group.cores < 2 * group.ranks_per_node:
        # Coding and sending take cores from computing.
        beside = [each for each in setup.sendings if each.phase != "after"]
        compute += factor * sum(known.of(each).busy_seconds * each.count for each in beside)
    computed = link = 0.0  # times until which the ranks compute, and their links are busy
    for phase, share in (("forward", _FORWARD_SHARE), ("backward", 1 - _FORWARD_SHARE)):
        sent = [each for each in setup.sendings if each.phase == phase]
        parts = max((each.count for each in sent), default=1)
        for part in range(parts):
            for each in sent:
                if each.role == "parameter" and part < each.count:
                    link += taken[each]
                    computed = max(computed, link)
            computed += share * compute / parts
            for each in sent:
                if each.role == "gradient" and part < each.count:
                    link = max(link, computed) + taken[each]
    total = max(computed, link)
    total += sum(taken[each] * each.count for each in setup.sendings if each.phase == "after")
    return total, compute, sum(taken[each] * each.count for each in setup.sendings)
