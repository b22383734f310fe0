"""How long a training step takes: what computes, what travels beside it, and what the step waits for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ...core.config import Config
from .simulation import calls
from .simulation.calls import Group, Timed
from .strategy import Sending
from .workload import Interval, Workload

Kind = Literal["plain", "bfloat16", "compressed"]

_FORWARD = 1 / 3  # of computing: the backward pass takes twice as long as the forward pass
_GUESSED_ERROR = 0.25  # of predictions that nobody has compared with measurements
# How many times fewer bytes weights take as changes, by bytes of a weight: a GPT at a learning rate of 1e-3 after 20
# steps, docs/results/weights.md. Where weights are gathered and freed, all of them are sent, in that many fewer bytes.
_CHANGES, _WHOLE = {2: 3.4, 4: 1.5}, {2: 1.5, 4: 1.2}


@dataclass(frozen=True)
class Setup:
    """A training on some machines.

    Attributes:
        workload: what is trained.
        sendings: what each step sends.
        group: the ranks, and what connects them.
        config: of ours.
        price: dollars per hour of all machines; None if it is not known.
    """

    workload: Workload
    sendings: list[Sending]
    group: Group
    config: Config
    price: float | None = None

    @property
    def kinds(self) -> list[Kind]:
        """What can be sent: bfloat16 is plain where gradients have 16 bits already."""
        return ["plain", "bfloat16", "compressed"] if self.workload.itemsize == 4 else ["plain", "compressed"]

    def with_link(self, gbps: float) -> Setup:
        """The same with links of another speed, and flows that are not limited more than they were."""
        link = self.group.link
        if link.flow_gbps is not None:
            link = replace(link, flow_gbps=max(link.flow_gbps, gbps / link.connections))
        return replace(self, group=replace(self.group, link=replace(link, gbps=gbps)))

    def with_nodes(self, nodes: int) -> Setup:
        """The same on another number of nodes."""
        price = None if self.price is None else self.price * nodes / self.group.nodes
        return replace(self, group=replace(self.group, nodes=nodes), price=price)


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        kind: how gradients travel.
        seconds: of all of it.
        compute: seconds of computing, with what coding takes from it on the same cores.
        communication: seconds in which something travels or is coded.
        exposed: seconds in which the step waits for that.
        wire_bytes: that a rank sends.
        compressed_calls: share of the calls that go compressed.
        dollars: of 1,000 steps; None if no price is known.
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
        """Seconds of communication that run beside computing."""
        return max(0.0, self.communication - self.exposed)


@dataclass
class _Calls:
    """What the calls of a step take, by one kind; each is timed once."""

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
        ratio = (_CHANGES if sending.phase == "after" else _WHOLE)[itemsize]
        sent = calls.plain(group, sending.collective, round(nbytes / ratio))
        costs = group.costs.coders["huffman"]
        values = nbytes / itemsize
        coding = 1e-12 * group.costs.coding_times * (costs.encode / group.ranks + costs.decode) * values * group.sharing
        return replace(sent, seconds=sent.seconds + coding, busy_seconds=sent.busy_seconds + coding)


def resolved(config: Config, group: Group) -> Config:
    """As ranks of several hosts would resolve it, which measure their link."""
    # GPUs measure uncompressed calls, whose rings have a node's whole link.
    gbps = group.link.gbps / (1 if group.costs.kind == "gpu" else group.ranks_per_node)
    return config.resolved(
        link_gbps=float(f"{min(max(gbps, 1e-3), 1e4):.3g}"),  # what a configuration allows
    )


def predict(setup: Setup, kind: Kind) -> Step:
    """A step, with gradients sent in one way."""
    known = _Calls(setup, kind)
    error = _GUESSED_ERROR if setup.group.costs.error is None else setup.group.costs.error
    ends = [
        _timeline(setup, known, compute, factor)
        for compute, factor in zip(setup.workload.compute, (1 - error, 1, 1 + error))
    ]
    seconds = Interval(*(total for total, _, _ in ends))
    total, compute, communication = ends[1]
    hourly = None if setup.price is None else setup.price / 3600
    return Step(
        kind=kind,
        seconds=seconds,
        compute=compute,
        communication=communication,
        exposed=max(0.0, total - compute),
        wire_bytes=sum(known.of(each).wire_bytes * each.count / each.steps for each in setup.sendings),
        compressed_calls=_share_compressed(setup, known),
        dollars=None if hourly is None else seconds.times(Interval.exactly(1000 * hourly)),
    )


def _share_compressed(setup: Setup, known: _Calls) -> float:
    gradients = [each for each in setup.sendings if each.role == "gradient"]
    return sum(each.count * known.of(each).compressed for each in gradients) / sum(each.count for each in gradients)


def _timeline(setup: Setup, known: _Calls, compute: float, factor: float) -> tuple[float, float, float]:
    """Seconds of a step, of its computing, and of its communication, one collective after the other.

    Args:
        compute: seconds that would be computed if nothing travelled.
        factor: on what collectives take.
    """
    group = setup.group
    taken = {each: factor * known.of(each).seconds / each.steps for each in setup.sendings}
    if group.costs.kind == "cpu" and group.cores is not None and group.cores < 2 * group.ranks_per_node:
        # What codes and sends beside computing takes its cores.
        beside = [each for each in setup.sendings if each.phase != "after"]
        compute += factor * sum(known.of(each).busy_seconds * each.count for each in beside)
    computed = link = 0.0  # until when the ranks have computed, and their links are busy
    for phase, share in (("forward", _FORWARD), ("backward", 1 - _FORWARD)):
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
