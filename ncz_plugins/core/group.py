"""What lasts beside calls: settings, order of calls and statistics of one group of ranks, on one rank."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from .call_description import checksum_of
from .config import Config
from .runtime.statistics import Counters
from .schedules.choice import schedule_for
from .training.group import GroupState
from .training.policy import ParameterSlice
from .training.state import Training
from .transport.topology import Nodes


class Group:
    """The ranks that make calls together, as one of them sees them. `run` says what happens to a call.

    Args:
        training: error feedback, policies and statistics, which last from step to step.
        config: the settings; a resolved configuration.
        ranks: global ranks of the group.
        rank: this rank's number among `ranks`.
        nodes: which ranks share a node; None if sums are not formed inside nodes first.
        auto_schedule: the schedule that `transport.schedule: auto` means; None: chosen by the number of ranks.
        communicator: number of the communicator, see `Training.free_number`.

    Attributes:
        config_on_gpus: the settings of calls on GPUs, which may have been measured there.
        exact_calls: calls so far that are plain or lossless, which draw no random numbers.
        uncompared: checksum of the calls so far that no host waits for; the next compared call compares it as well.
        decisions: decisions and descriptions by `Call.kind`, see `run.decide`.
    """

    def __init__(
        self,
        training: Training,
        config: Config,
        ranks: Sequence[int],
        rank: int,
        nodes: Nodes | None = None,
        auto_schedule: str | None = None,
        communicator: int = 0,
    ):
        self.training = training
        self.config = self.config_on_gpus = config
        self.ranks = ranks
        self.rank = rank
        self.world_size = len(ranks)
        self.nodes = nodes
        self.exact_calls = 0
        self.uncompared = 0
        self.decisions: dict[tuple, tuple] = {}
        self._auto_schedule = auto_schedule
        self._communicator = communicator
        self._checksum = self._checksum_on_gpus = checksum_of(config)

    @property
    def state(self) -> GroupState:
        """State that all ranks of the group have in common."""
        return self.training.of_group(self.ranks)

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return self.state.calls + self.exact_calls

    @property
    def schedule(self) -> str:
        """The schedule of frames: ring or direct."""
        name = self.config.transport.schedule
        if name != "auto":
            return name
        return self._auto_schedule or schedule_for(self.nodes.count if self.nodes else self.world_size)

    def use_on_gpus(self, config: Config) -> None:
        """Serve tensors on GPUs by these settings from now on."""
        self.config_on_gpus, self._checksum_on_gpus = config, checksum_of(config)
        self.decisions.clear()

    def checksum_of(self, config: Config | None) -> int:
        """Checksum of a call's settings; 0 for None. That of the usual settings is at hand, as small calls are many."""
        if config is None:
            return 0
        if config is self.config:
            return self._checksum
        return self._checksum_on_gpus if config is self.config_on_gpus else checksum_of(config)

    def note_uncompared(self, described: dict[str, int]) -> None:
        """Remember a call that the ranks do not compare. Its description holds the checksum of those before it."""
        self.uncompared = zlib.crc32(repr(list(described.values())).encode())

    def own_names(self, parts: Sequence[ParameterSlice]) -> Sequence[ParameterSlice]:
        """Parts by names of this communicator: another one of the training may carry a model with the same names."""
        if self._communicator == 0:
            return parts
        prefix = f"communicator {self._communicator + 1}/"
        return [part if part.name is None else part._replace(name=prefix + part.name) for part in parts]

    def count(self, counters: Counters, role: str | None) -> None:
        """Add the counters of a call to the statistics."""
        if role is not None:
            counters.plain_bytes_by_role = {role: counters.plain_bytes}
            counters.wire_bytes_by_role = {role: counters.wire_bytes}
        self.training.stats.record(counters)
