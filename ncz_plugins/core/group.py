"""What lasts beside calls: settings, order of calls and statistics of one process group, for one kind of device."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from .bypass import least_of_pieces
from .call_description import checksum_of
from .config import Config, QuantizerConfig
from .runtime.statistics import Counters
from .schedules.choice import schedule_for
from .training.group import GroupState
from .training.policy import ParameterSlice
from .training.state import Training
from .transport.topology import Nodes

_MOST_SETTINGS = 256  # that are remembered, as a training may have other ones in each step


@dataclass(slots=True)
class Order:
    """The calls of a process group so far, on all devices.

    Attributes:
        exact_calls: plain and lossless calls, which draw no random numbers. `GroupState.calls` counts the others.
        uncompared: checksum of the calls that no host waits for; the next compared call compares the checksum, too.
    """

    exact_calls: int = 0
    uncompared: int = 0


class Settings(NamedTuple):
    """Settings of calls, and what follows from them.

    Attributes:
        config: the settings.
        checksum: by which ranks tell whether theirs differ.
        least_of_pieces: see `bypass.least_of_pieces`.
    """

    config: Config
    checksum: int
    least_of_pieces: int | str


class Group:
    """The ranks that make calls together, as one of them sees them, for tensors in host memory or on GPUs.

    `run` says what happens to a call. `for_gpus` makes the group for tensors on GPUs.

    Args:
        training: error feedback, policies and statistics, which last from step to step.
        config: the settings; a resolved configuration.
        ranks: global ranks of the group.
        rank: this rank's number among `ranks`.
        nodes: which ranks share a node; None if sums are not formed inside nodes first.
        auto_schedule: the schedule that `transport.schedule: auto` means; None: see schedules/choice.py.
        communicator: number of the communicator, see `Training.free_number`.
        key: what `Training.of_group` knows the state of these ranks by; None: `ranks`.
        trip_seconds: see `Transport`.

    Attributes:
        key, communicator: see above.
        on_gpu: whether tensors are on a GPU.
        order: the calls so far, on all devices.
        decisions: decisions and descriptions by `Call.signature`, see `run.decide`.
    """

    on_gpu = False

    def __init__(
        self,
        training: Training,
        config: Config,
        ranks: Sequence[int],
        rank: int,
        nodes: Nodes | None = None,
        auto_schedule: str | None = None,
        communicator: int = 0,
        key: Sequence[int] | None = None,
        trip_seconds: float = 0.0,
    ):
        self.training = training
        self.ranks = ranks
        self.rank = rank
        self.world_size = len(ranks)
        self.nodes = nodes
        self.order = Order()
        self._auto_schedule = auto_schedule
        self.communicator = communicator
        self.key = tuple(ranks if key is None else key)
        self._trip_seconds = trip_seconds
        self.use(config)

    def use(self, config: Config) -> None:
        """Serve calls by these settings from now on."""
        self.config = config
        self.decisions: dict[tuple, tuple] = {}
        self._settings: dict[int, tuple[QuantizerConfig, Settings]] = {}  # by the identity of the quantizer

    def for_gpus(self) -> Group:
        """The same ranks and the same order of calls, for tensors on GPUs, whose settings may become others."""
        other = copy(self)
        other.on_gpu = True
        other.use(self.config.for_gpus())
        return other

    @property
    def state(self) -> GroupState:
        """State that all ranks of the group have in common."""
        return self.training.of_group(self.key)

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return self.state.calls + self.order.exact_calls

    def schedule_for(self, nbytes: int, nodes: Nodes | None = None) -> str:
        """The schedule of frames for a tensor of so many bytes: ring, direct or halving.

        Args:
            nodes: between which frames travel; None: between all ranks.
        """
        name = self.config.transport.schedule
        if name != "auto":
            return name
        exchanging, shares = (nodes.count, nodes.speakers) if nodes else (self.world_size, 1)
        link = self.config.transport.link_gbps, self.on_gpu, self._trip_seconds
        return self._auto_schedule or schedule_for(exchanging, nbytes // shares, *link)

    def settings_with(self, quantizer: QuantizerConfig) -> Settings:
        """The settings of calls with this quantizer. Found once for each, as hashing it takes longer than to decide."""
        found = self._settings.get(id(quantizer))
        if found is None:
            if len(self._settings) >= _MOST_SETTINGS:
                self._settings.clear()
                self.decisions.clear()  # which hold what follows from these settings
            config = self.config
            if quantizer != config.quantizer:
                config = config.model_copy(update={"quantizer": quantizer})
            made = Settings(config, checksum_of(config), least_of_pieces(config, self.on_gpu, self.world_size))
            # Keeps the quantizer, so that no other object gets its id.
            found = self._settings[id(quantizer)] = quantizer, made
        return found[1]

    def note_uncompared(self, described: dict[str, int]) -> None:
        """Remember a call that the ranks do not compare. Its description holds the checksum of those before it."""
        self.order.uncompared = zlib.crc32(repr(list(described.values())).encode())

    def own_names(self, parts: Sequence[ParameterSlice]) -> Sequence[ParameterSlice]:
        """Parts by names of this communicator: another one of the training may carry a model with the same names."""
        if self.communicator == 0:
            return parts
        prefix = f"communicator {self.communicator + 1}/"
        return [part if part.name is None else part._replace(name=prefix + part.name) for part in parts]

    def count(self, counters: Counters, role: str | None) -> None:
        """Add the counters of a call to the statistics."""
        if role is not None:
            counters.plain_bytes_by_role = {role: counters.plain_bytes}
            counters.wire_bytes_by_role = {role: counters.wire_bytes}
        self.training.stats.record(counters)
