"""What one training knows over its steps: its step, what is left to contribute, what it has counted.

Adapters own a `Training` and hand it to their communicators; a communicator by itself makes one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...version import __version__
from ..config import Config
from ..config.sections import StepsConfig
from ..errors import AccuracyError, ConfigError
from ..messages import say
from ..runtime.inference_mode import outside_of_inference_mode
from ..runtime.statistics import Counters, Statistics
from .error_feedback import Residuals
from .group import GroupState
from .guard import Guard
from .metrics import Metrics
from .policy import ParameterSlice, Policies, Treatment
from .records import Records
from .report import CompressionReport
from .saved import key_of, require_saved

if TYPE_CHECKING:
    from ..communicator import Communicator

_FORMAT = 3  # of state_dict
_OF_COMMUNICATORS = "entropy", "transport", "roles"  # sections that each takes as it is made


class Training:
    """The state of one training, on one rank.

    Args:
        config: anything that `Config.load` takes.

    Attributes:
        config: may be replaced between steps, on all ranks alike, by anything that `Config.load` takes. ConfigError
            where that would change what a communicator has connected with.
        stats: what was counted.
        step: steps that are over.
        depends_on_step: whether what is done to tensors depends on the step, by the guard or by what `steps` says.
        ends_steps_in_order: whether all ranks end a step between the same calls, so that each call can compare it. Not
            under DDP, where a step ends on another thread.
        residuals: what error feedback has kept.
        metrics: takes a record of each step, on rank 0.
        rank, world_size: of this process among all; by default, those of torch.distributed.
    """

    def __init__(self, config=None):
        self._groups: dict[tuple[int, ...], GroupState] = {}
        self._communicators: dict[tuple[int, ...], list[Callable[[], Communicator | None]]] = {}
        self.ends_steps_in_order = True
        self.config = config
        self.stats = Statistics(self.config.statistics.history)
        self.step = 0
        self.residuals = Residuals()
        self._records = Records(self.config)
        self._report = CompressionReport(self.config)
        self.rank: int | None = None
        self.world_size: int | None = None
        self._seen = 0, 1  # rank and number of ranks in torch.distributed, which may be gone when they are asked for
        self._loaded: dict[tuple[int, ...], dict] = {}  # of groups that no communicator has asked for yet
        self._tightening = 1.0  # where a group begins
        self._returned: dict[str, dict] | None = None  # by `state_dict`, of this rank

    @property
    def config(self) -> Config:
        return self._config

    @config.setter
    def config(self, config) -> None:
        config = Config.load(config)
        self._require_connected_with(config)
        self._config = config
        self._policies = Policies(config)
        self.depends_on_step = bool(config.guard.every) or config.steps != StepsConfig()
        for group in self._groups.values():
            group.guard.settings = config.guard

    @property
    def compared_step(self) -> int:
        """The step, where what is done to tensors depends on it, so that ranks must agree on it; else 0."""
        return self.step if self.depends_on_step and self.ends_steps_in_order else 0

    @property
    def metrics(self) -> Metrics:
        """Where the records of steps go."""
        return self._records.metrics

    def of_group(self, ranks: Sequence[int]) -> GroupState:
        """The state of the group of these global ranks."""
        key = tuple(ranks)
        if key not in self._groups:
            group = self._groups[key] = GroupState(self.config.guard)
            group.guard.tightening = self._tightening
            if key in self._loaded:
                group.load_state_dict(self._loaded.pop(key))
        return self._groups[key]

    def free_number(self, ranks: Sequence[int]) -> int:
        """The lowest number that no communicator between these global ranks has that is in use.

        So one that takes the place of another, in this run or in one that goes on from a checkpoint, finds what that
        one has kept. Ranks that have yet to collect one of their garbage find a higher number than others.
        """
        used = [_is_used(each) for each in self._communicators.get(tuple(ranks), [])]
        return used.index(False) if False in used else len(used)

    def number(self, communicator: Communicator, number: int) -> None:
        """Give a communicator a number among those between its ranks, on all of these ranks the same one."""
        known = self._communicators.setdefault(tuple(communicator.ranks), [])
        known.extend([_no_communicator] * (number + 1 - len(known)))
        known[number] = weakref.ref(communicator)

    def _require_connected_with(self, config: Config) -> None:
        """Raise ConfigError where communicators that are in use would go on with other settings than these."""
        if not any(_is_used(each) for known in self._communicators.values() for each in known):
            return
        for section in _OF_COMMUNICATORS:
            if getattr(config, section) != getattr(self._config, section):
                raise ConfigError(
                    f"{section}: the communicators of this training have connected with {section} as they were, and "
                    "would keep them: leave them as they are, or close the communicators and make new ones"
                )

    def forget_groups(self) -> None:
        """Ranks meet anew, and not all of them have met before: what they have in common begins from nothing.

        So does what a state has brought that only some of them have loaded.
        """
        self._groups.clear()
        self._loaded.clear()

    # ---------------------------------------------------------------- deciding

    def treatment(self, part: ParameterSlice, dtype: torch.dtype, role: str | None, ranks: Sequence[int]) -> Treatment:
        """What a part of a tensor gets in this step, in the group of these global ranks.

        Args:
            dtype: of the tensor.
            role: what it is: "gradient", "parameter" or "activation"; None where that is not known.
        """
        return self._policies.treatment(part, dtype, role, self.step, self.of_group(ranks).guard.tightening)

    def grouped(
        self, parts: Sequence[ParameterSlice], dtype: torch.dtype, role: str | None, ranks: Sequence[int]
    ) -> list[tuple[Treatment, list[int]]]:
        """The indices of the parts that are treated alike, in the order in which each treatment comes first."""
        if parts and not self.config.policies:  # nothing tells them apart, and there can be thousands
            return [(self.treatment(parts[0], dtype, role, ranks), list(range(len(parts))))]
        alike: dict[Treatment, list[int]] = {}
        how = None
        for at, part in enumerate(parts):
            if how is None or part.numel != 0:
                how = self.treatment(part, dtype, role, ranks)
            alike.setdefault(how, []).append(at)
        return list(alike.items())

    # ---------------------------------------------------------------- steps

    def begin(self, **header) -> None:
        """Open the files of `statistics`, on rank 0, and say there what steps have in common. Raises ConfigError.

        Args:
            header: what is to be said besides. Nothing happens if it is what was said before.
        """
        if self._my_rank() == 0:
            self._records.begin(self.config, header, self._ranks())

    def end_step(self) -> Counters:
        """Close a step, all of whose results have been waited for, and return what was counted in it.

        Rank 0 writes the step's record, prints a line where `statistics.report_every` says so, and prints after the
        first steps which share of the bytes goes compressed. Acts on what the guard found: raises AccuracyError, on all
        ranks of a group alike, where `guard.on_alarm` is stop.
        """
        groups = list(self._groups.values())
        for group in groups:
            group.wait_for_pending()
        done = self.stats.end_step()
        self.step += 1
        if self._my_rank() == 0:
            self._record(done)
        self._records.end_step()
        _end_step_of_each([group.guard for group in groups])
        return done

    def _record(self, done: Counters) -> None:
        """Write what a step was, and print it where that is wanted."""
        if not self._records.begun:
            self.begin()
        guards = [group.guard for group in self._groups.values()]
        tightening = min((guard.tightening for guard in guards), default=self._tightening)
        bound_times = self.config.steps.bounds_times(self.step - 1) * tightening
        self._records.write(self.step, done, bound_times, [finding for guard in guards for finding in guard.findings])
        every = self.config.statistics.report_every
        if every and self.step % every == 0:
            say(f"ncz_plugins: step {self.step}: {done.describe()}")
        if line := self._report.end_step(self.step, done):
            say(line)

    def _my_rank(self) -> int:
        return self.rank if self.rank is not None else self._place()[0]

    def _ranks(self) -> int:
        return self.world_size if self.world_size is not None else self._place()[1]

    def _place(self) -> tuple[int, int]:
        """The rank and the number of ranks in torch.distributed."""
        if dist.is_initialized():
            self._seen = dist.get_rank(), dist.get_world_size()
        return self._seen

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict:
        """What this rank needs to go on, to the bit, like a run that was not stopped. Call it between steps.

        Holds tensors, numbers, strings, tuples and mappings only, so that `torch.load(..., weights_only=True)` reads
        it. It differs between ranks: each saves its own. Tensors are not copied, and change with the next step: to go
        back to a state that stays in memory, keep a `copy.deepcopy` of it.

        `torch.distributed.checkpoint` takes a Training itself. It reads only keys that the new process has, and saves
        one rank's value where several ranks have the same key. So a rank has the same keys at any time, and what
        differs between ranks is under a key with the rank's number. That value is a tuple: a mapping would be split
        into keys of its own.
        """
        groups = self._loaded | {key: group.state_dict() for key, group in self._groups.items()}
        ranks = self._ranks()
        self._returned = {
            "residuals": dict(self.residuals.by_name),
            "groups": {_text(key): state for key, state in groups.items()},
        }
        return {
            "format": _FORMAT,
            "world_size": ranks,
            "step": self.step,
            "tightening": _tightening_of_all(groups, ranks, self._tightening),
            key_of(self._my_rank()): (self._returned,),
        }

    def load_state_dict(self, state: dict) -> None:
        """Take over what `state_dict` gave to the same rank of a run before.

        Of the state of another rank, all is taken over but what that rank had yet to contribute: residuals start at
        zero. If that run had another number of ranks, it is the same, and random numbers begin anew. A line on stderr
        says so. The step and what the guard has tightened among all ranks are kept in any case.

        Raises ConfigError if `state` is none of this version's, if a part of it is missing, or if it is what this
        training itself has returned, so that nothing would be restored.
        """
        found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
        if found != _FORMAT:
            raise ConfigError(
                f"state of ncz_plugins: format {found!r} is not one that {__version__} reads; "
                f"allowed: {_FORMAT}, what Training.state_dict returns"
            )
        parts = require_saved(state)
        rank, ranks = self._my_rank(), self._ranks()
        saved_by = rank if rank in parts else min(parts)
        is_own = (saved_by, state["world_size"]) == (rank, ranks)
        residuals = parts[saved_by]["residuals"]
        if is_own:
            self._require_another(parts[rank])
        self.step = state["step"]
        self._tightening = state["tightening"]
        self._returned = None
        self._groups.clear()
        self._loaded = {}
        if state["world_size"] == ranks:  # all ranks of a group have its state alike
            self._loaded = {tuple(map(int, key.split())): each for key, each in parts[saved_by]["groups"].items()}
        self.residuals = Residuals()
        if is_own:
            with outside_of_inference_mode():
                for name, kept in residuals.items():
                    # The caller may load the same state again, and what is kept is changed in place.
                    self.residuals.by_name[name] = kept.clone().nan_to_num_(0, 0, 0)
            return
        lost = ["what error feedback has kept starts at zero"] if residuals else []
        lost += ["random numbers begin anew"] if state["world_size"] != ranks else []
        if lost and (state["world_size"] == ranks or rank == 0):
            say(
                f"ncz_plugins: this state was saved by rank {saved_by} of {state['world_size']} and is loaded by "
                f"rank {rank} of {ranks}: {'; '.join(lost)}",
                sys.stderr,
            )

    def _require_another(self, part: Mapping[str, Mapping]) -> None:
        """Raise ConfigError where this is the state in use itself, so that the step would be restored at most."""
        kept = self.residuals.by_name
        if part is self._returned or any(each is kept.get(name) for name, each in part["residuals"].items()):
            key = key_of(self._my_rank())
            raise ConfigError(
                f'state of ncz_plugins: "{key}" is what state_dict() of the same object has returned. It changes with '
                "each step, so it would restore nothing. A state that stays in memory must be a copy.deepcopy of it. "
                f'If torch.distributed.checkpoint has read this state, the checkpoint has no "{key}" of this object, '
                "or the planner has flatten_state_dict=False"
            )


def _end_step_of_each(guards: Sequence[Guard]) -> None:
    """Close a step for all of them, also where one raises: their groups have other ranks, which do not learn of it."""
    errors = []
    for guard in guards:
        try:
            guard.end_step()
        except AccuracyError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _tightening_of_all(groups: Mapping[tuple[int, ...], Mapping], world_size: int, default: float) -> float:
    """Where a group begins that a saved state does not know. Its ranks have read states of different ranks.

    So what all of these have in common counts: the group of all ranks, if there was one.
    """
    of_all = groups.get(tuple(range(world_size)))
    return min((each["guard"]["tightening"] for each in ([of_all] if of_all else groups.values())), default=default)


def _no_communicator() -> None:
    """In place of a weak reference."""


def _is_used(communicator: Callable[[], Communicator | None]) -> bool:
    there = communicator()
    return there is not None and there.error is None


def _text(ranks: tuple[int, ...]) -> str:
    return " ".join(map(str, ranks))
