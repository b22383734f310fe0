"""State that outlives a step: step number, error-feedback residuals, statistics. Saved with the model.

Adapters create a `Training` and pass it to their communicators. A communicator without an adapter creates its own.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from itertools import count
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
from .error_feedback import Residuals, dtype_of
from .group import GroupState
from .metrics import Metrics
from .policy import ParameterSlice, Policies, Treatment
from .records import Records
from .report import CompressionReport
from .rotation import Rotations
from .saved import key_of, require_saved

if TYPE_CHECKING:
    from ..communicator import Communicator

_KEPT_STEPS = 1000  # steps whose counters stay in memory: about 1 MB
_FORMAT = 3  # version of what state_dict returns
_FIXED_SECTIONS = "entropy", "transport", "roles"  # a communicator reads these sections once, when it is created


class Training:
    """State of one training on one rank.

    Args:
        config: anything that `Config.load` accepts.

    Attributes:
        config: the settings. May be replaced between steps, on all ranks alike, by anything that `Config.load` accepts.
            Raises ConfigError for a change to settings that open communicators have connected with.
        stats: counters of all calls.
        step: number of completed steps.
        depends_on_step: whether results depend on the step number, through `guard` or `steps`.
        ends_steps_in_order: whether all ranks end a step between the same two calls, so that calls can compare their
            step numbers. False under DDP, where another thread ends the step.
        residuals: residuals of error feedback.
        rotations: bases that matrices are coded in.
        metrics: destinations of step records, on rank 0.
        rank, world_size: global rank and number of ranks; None: those of torch.distributed.
    """

    def __init__(self, config=None):
        self._groups: dict[tuple[int, ...], GroupState] = {}
        self._communicators: dict[tuple[int, ...], dict[int, weakref.ref[Communicator]]] = {}  # by ranks and number
        self.ends_steps_in_order = True
        self.config = config
        self.stats = Statistics(_KEPT_STEPS)
        self.step = 0
        self.residuals = Residuals()
        self.rotations = Rotations()
        self._records = Records(self.config)
        self._report = CompressionReport(self.config)
        self.rank: int | None = None
        self.world_size: int | None = None
        # Last known rank and number of ranks of torch.distributed, which may be shut down when they are needed.
        self._last_place = 0, 1
        self._loaded: dict[tuple[int, ...], dict] = {}  # loaded states of groups that no communicator has used yet
        self._tightening = 1.0  # initial tightening of a new group
        self._returned: dict[str, dict] | None = None  # what `state_dict` returned last for this rank

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
        """Step number that ranks compare before a call; 0 if results don't depend on it."""
        return self.step if self.depends_on_step and self.ends_steps_in_order else 0

    @property
    def metrics(self) -> Metrics:
        """Destinations of step records."""
        return self._records.metrics

    def of_group(self, ranks: Sequence[int]) -> GroupState:
        """State of the group of these global ranks; created when first needed."""
        key = tuple(ranks)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = GroupState(self.config.guard)
            group.guard.tightening = self._tightening
            if key in self._loaded:
                group.load_state_dict(self._loaded.pop(key))
        return group

    def free_number(self, ranks: Sequence[int]) -> int:
        """Lowest number that no open communicator between these global ranks has.

        A communicator that replaces another, in this run or after a restart from a checkpoint, so finds the residuals
        of its predecessor. A rank that has not yet garbage-collected a communicator gets a higher number than others.
        """
        known = self._communicators.get(tuple(ranks), {})
        return next(number for number in count() if number not in known or not _is_open(known[number]))

    def number(self, communicator: Communicator, number: int) -> None:
        """Register a communicator under its number. All ranks of the communicator must pass the same number."""
        self._communicators.setdefault(tuple(communicator.ranks), {})[number] = weakref.ref(communicator)

    def _require_connected_with(self, config: Config) -> None:
        """Raise ConfigError if `config` changes settings that open communicators have connected with."""
        if not any(_is_open(each) for known in self._communicators.values() for each in known.values()):
            return
        for section in _FIXED_SECTIONS:
            if getattr(config, section) != getattr(self._config, section):
                raise ConfigError(
                    f"{section}: can't be changed while communicators of this training are open, which have connected "
                    f"with it: leave {section} unchanged, or close the communicators and make new ones"
                )

    def forget_groups(self) -> None:
        """Drop the state of all groups, also if it was loaded from a checkpoint.

        For elastic trainings: when ranks meet again, new ranks don't have this state, and all ranks must have the same.
        """
        self._groups.clear()
        self._loaded.clear()

    # ---------------------------------------------------------------- deciding

    def treatment(self, part: ParameterSlice, dtype: torch.dtype, role: str | None, ranks: Sequence[int]) -> Treatment:
        """Treatment of a part of a tensor in this step.

        Args:
            part: the part.
            dtype: dtype of the tensor.
            role: "gradient", "parameter" or "activation"; None if unknown.
            ranks: global ranks of the group.
        """
        return self._policies.treatment(part, dtype, role, self.step, self.of_group(ranks).guard.tightening)

    def grouped(
        self, parts: Sequence[ParameterSlice], dtype: torch.dtype, role: str | None, ranks: Sequence[int]
    ) -> list[tuple[Treatment, list[int]]]:
        """Treatments in order of first use, each with the indices of the parts that get it."""
        if parts and not self.config.policies:  # all parts get the same treatment, and there can be thousands
            return [(self.treatment(parts[0], dtype, role, ranks), list(range(len(parts))))]
        indices: dict[Treatment, list[int]] = {}
        treatment = None
        for index, part in enumerate(parts):
            if treatment is None or part.numel != 0:  # padding gets the treatment of the part before it
                treatment = self.treatment(part, dtype, role, ranks)
            indices.setdefault(treatment, []).append(index)
        return list(indices.items())

    # ---------------------------------------------------------------- steps

    def begin(self, **header) -> None:
        """Open the files of `statistics` on rank 0 and write a header. Raises ConfigError if a file can't be written.

        Args:
            header: further keys of the header. Nothing is written if they equal those of the previous header.
        """
        rank, world_size = self._place()
        if rank == 0:
            self._records.begin(self.config, header, world_size)

    def end_step(self) -> Counters:
        """Close a step and return its counters. Wait for all results of the step first.

        Rank 0 writes the record of the step, prints a line every `statistics.report_every` steps, and after the first
        steps prints the share of bytes that goes compressed.

        Raises AccuracyError after an alarm with `guard.on_alarm: stop`, on all ranks of a group.
        """
        # Calls that verify their result belong to this step.
        groups = list(self._groups.values())
        for group in groups:
            group.wait_for_pending()

        # Count, write the record, and print what is due.
        done = self.stats.end_step()
        self.step += 1
        rank, _ = self._place()
        if rank == 0:
            self._record(done)
        self._records.end_step()

        # All guards close their step, even if one raises: ranks of the other groups don't see that error.
        errors = []
        for group in groups:
            try:
                group.guard.end_step()
            except AccuracyError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return done

    def _record(self, done: Counters) -> None:
        """Write the record of the step that has just ended, and print what is due."""
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

    def _place(self) -> tuple[int, int]:
        """Rank and number of ranks: those that were set, else those of torch.distributed, else the last known ones."""
        if dist.is_initialized():
            self._last_place = dist.get_rank(), dist.get_world_size()
        rank, world_size = self._last_place
        return rank if self.rank is None else self.rank, world_size if self.world_size is None else self.world_size

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict:
        """State with which this rank can continue, bit by bit, like a run that was not stopped. Call between steps.

        Contains tensors, numbers, strings, tuples and mappings only, so that `torch.load(..., weights_only=True)` reads
        it. Each rank must save its own state. Tensors are not copied, and change in the next step: to go back to a
        state that stays in memory, keep a `copy.deepcopy` of it.

        `torch.distributed.checkpoint` accepts a Training itself. It reads only keys that the new process has, and saves
        the value of one rank if several ranks have the same key. So the keys of a rank never change, and what differs
        between ranks stands under a key with the number of the rank. The value of that key is a tuple, because a
        mapping would be split into several keys.
        """
        rank, world_size = self._place()
        groups = self._loaded | {ranks: group.state_dict() for ranks, group in self._groups.items()}
        # Initial tightening of a group that this state does not contain. Ranks of the new group may load states of
        # different ranks, and must get the same number. So the group of all ranks counts, if there is one, as all
        # states contain it.
        everyone = tuple(range(world_size))
        counted = [groups[everyone]] if everyone in groups else groups.values()
        tightening = min((each["guard"]["tightening"] for each in counted), default=self._tightening)
        self._returned = {
            "residuals": dict(self.residuals.by_name),
            "groups": {" ".join(map(str, ranks)): state for ranks, state in groups.items()},
        }
        if self.rotations.by_name:  # earlier versions don't know them
            self._returned["rotations"] = self.rotations.state_dict()
        return {
            "format": _FORMAT,
            "world_size": world_size,
            "step": self.step,
            "tightening": tightening,
            key_of(rank): (self._returned,),
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned on the same rank of an earlier run.

        The state of another rank is restored without its residuals, which start at zero. So is a state of a run with
        another number of ranks, whose random numbers also start over. Both cases print a line on stderr. Step number
        and tightening of the guard are always restored.

        Raises ConfigError if this version can't read `state`, if a part is missing, or if `state` is what this very
        object returned, which would restore nothing.
        """
        found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
        if found != _FORMAT:
            raise ConfigError(
                f"state of ncz_plugins: format {found!r} is not one that {__version__} reads; "
                f"allowed: {_FORMAT}, what Training.state_dict returns"
            )
        # Choose the part of this rank, or else that of another one.
        parts = require_saved(state)
        rank, ranks = self._place()
        saved_by = rank if rank in parts else min(parts)
        is_own = (saved_by, state["world_size"]) == (rank, ranks)
        residuals = parts[saved_by]["residuals"]
        if is_own:
            self._require_another(parts[rank], key_of(rank))

        # Restore what all ranks have in common: step, tightening, and groups if there are the same ranks.
        self.step = state["step"]
        self._tightening = state["tightening"]
        self._returned = None
        self._groups.clear()
        self._loaded = {}
        if state["world_size"] == ranks:  # all ranks of a group have the same state of it
            self._loaded = {tuple(map(int, key.split())): each for key, each in parts[saved_by]["groups"].items()}

        # All ranks code in the same bases. Their momenta are kept by single ranks.
        self.rotations = Rotations()
        if state["world_size"] == ranks:
            with outside_of_inference_mode():
                self.rotations.load_state_dict(parts[saved_by].get("rotations", {}), is_own)

        # Restore residuals if they are this rank's; else say what is lost.
        self.residuals = Residuals()
        if is_own:
            with outside_of_inference_mode():
                for name, kept in residuals.items():
                    # A copy: residuals change in place, and the caller may load the same state again. Older states
                    # hold float32.
                    copy = kept.to(dtype_of(kept.dtype), copy=True)
                    self.residuals.by_name[name] = copy.nan_to_num_(0, 0, 0)
            return
        lost = ["what error feedback has kept starts at zero"] if residuals else []
        lost += ["random numbers begin anew"] if state["world_size"] != ranks else []
        if lost and (state["world_size"] == ranks or rank == 0):
            say(
                f"ncz_plugins: this state was saved by rank {saved_by} of {state['world_size']} and is loaded by "
                f"rank {rank} of {ranks}: {'; '.join(lost)}",
                sys.stderr,
            )

    def _require_another(self, part: Mapping[str, Mapping], key: str) -> None:
        """Raise ConfigError if `part`, saved as `key`, is the state in use: only the step number would be restored."""
        kept = self.residuals.by_name
        if part is self._returned or any(each is kept.get(name) for name, each in part["residuals"].items()):
            raise ConfigError(
                f'state of ncz_plugins: "{key}" is what state_dict() of the same object has returned. It changes with '
                "each step, so it would restore nothing. A state that stays in memory must be a copy.deepcopy of it. "
                f'If torch.distributed.checkpoint has read this state, the checkpoint has no "{key}" of this object, '
                "or the planner has flatten_state_dict=False"
            )


def _is_open(reference: weakref.ref[Communicator]) -> bool:
    """Whether a communicator exists, and has neither failed nor been closed."""
    communicator = reference()
    return communicator is not None and communicator.error is None
