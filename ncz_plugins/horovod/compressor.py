"""Compressors of Horovod: `NCZ`, which users pass as `compression`, and the form that an optimizer holds."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import MethodType

import horovod.torch as hvd
from horovod.torch.compression import Compressor
from torch import Tensor
from torch.optim import Optimizer

from ..core.config import Config
from ..core.errors import ConfigError, UnsupportedError
from ..core.runtime.statistics import Statistics
from ..core.training.rotation import refuse
from ..core.training.state import Training
from ..core.tuning.tuning_file import apply_tuning_file

ENVIRONMENT = "NCZ_CONFIG"  # a preset or the path of a configuration file, for NCZ without arguments


@dataclass(frozen=True)
class Tagged:
    """Tensor on its way from `compress` to the all-reduce, with the compressor of its optimizer."""

    tensor: Tensor
    owner: OptimizerCompressor


class _OnClassOrInstance:
    """Descriptor of a method that, called on the class, acts on the class's default instance.

    Horovod's own compressors are classes that are never instantiated, so users write both `compression=NCZ` and
    `compression=NCZ(...)`.
    """

    def __init__(self, function):
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance, owner):
        return MethodType(self._function, owner.default() if instance is None else instance)


class NCZ(Compressor):
    """Compressor of gradients for `hvd.DistributedOptimizer(..., compression=...)`.

    `NCZ` itself, without parentheses, means its default instance, `NCZ.default()`.

    Args:
        source: anything that `Config.load` takes. None: what NCZ_CONFIG names, else all defaults.
        sections: instead of `source`, sections of the configuration: `NCZ(quantizer={"value": 0.1})`.

    Raises ConfigError for settings that are invalid, or that Horovod can't serve.

    Attributes:
        config: the settings. Assign anything that `Config.load` takes between two steps, the same on all ranks.
        stats: `Statistics`. A step is one `synchronize` of the optimizer.
        training: state that lasts from step to step.
    """

    # The same attributes as OptimizerCompressor's, for tensors that no optimizer submitted.
    label = "allreduce/"
    knows_names = True
    positions: Mapping[str, int] = {}

    def __init__(self, source=None, **sections):
        if source is not None and sections:
            raise ConfigError(f"NCZ takes a configuration or sections of one, not both ({', '.join(sections)})")
        source = sections or (os.environ.get(ENVIRONMENT) or None if source is None else source)
        self.training = Training(_resolved(source))
        self._is_optimizers = False
        # The first parameter of each optimizer, or the optimizer itself if it has none.
        self._first_parameters: list[weakref.ref] = []

    def __repr__(self) -> str:
        return f"NCZ({self.config.describe()}; step {self.training.step}, {self.stats.total.describe()})"

    def __reduce__(self):
        """Copy or pickle the settings only. The copy starts a training of its own."""
        return type(self), (self.config,)

    @classmethod
    def default(cls) -> NCZ:
        """The instance that the class stands for when it is passed as `compression`."""
        if "_default" not in vars(cls):  # each subclass has its own
            cls._default = cls()
        return cls._default

    @property
    def compressor(self) -> NCZ:
        """This object, as OptimizerCompressor has an attribute of this name."""
        return self

    @property
    def config(self) -> Config:
        return self.training.config

    @config.setter
    def config(self, source) -> None:
        self.training.config = _resolved(source)

    @property
    def stats(self) -> Statistics:
        return self.training.stats

    @_OnClassOrInstance
    def compress(self, tensor: Tensor) -> tuple[Tagged, None]:
        """Raise UnsupportedError: only a function of Horovod that this plugin could not replace calls this."""
        raise UnsupportedError(
            "a function such as hvd.allreduce or hvd.DistributedOptimizer was imported by its name before "
            "ncz_plugins.horovod, so it does not know NCZ. Import ncz_plugins.horovod first, or write "
            "`import horovod.torch as hvd` and call hvd.allreduce"
        )

    @_OnClassOrInstance
    def decompress(self, tensor: Tensor, ctx) -> Tensor:
        """Return the tensor: the all-reduce has decoded it already."""
        return tensor

    # ---------------------------------------------------------------- steps and checkpoints

    @_OnClassOrInstance
    def state_dict(self) -> dict:
        """State of this rank for a checkpoint: see `Training.state_dict`. Each rank must save its own."""
        self._update_rank()
        return self.training.state_dict()

    @_OnClassOrInstance
    def load_state_dict(self, state: dict) -> None:
        """Load what `state_dict` returned on the same rank: see `Training.load_state_dict`.

        Ranks that load nothing take the step from those that do, and start without error-feedback residuals.
        """
        self._update_rank()
        self.training.load_state_dict(state)

    def begin(self) -> None:
        """Prepare for the first reduction. Raises ConfigError for settings that can't be used here."""
        self._update_rank()
        self.training.begin(ranks=hvd.size(), backend="horovod", link_gbps=self.config.transport.link_gbps)

    @property
    def may_run_ahead(self) -> bool:
        """Whether buckets may be reduced before the program waits for them.

        False if several optimizers share this compressor: a step of one could then end in the middle of another's.
        """
        return sum(first() is not None for first in self._first_parameters) == 1

    def end_reduction(self, owner: NCZ | OptimizerCompressor) -> None:
        """End a step after all tensors of `owner` were reduced. Single tensors end no step if there are optimizers."""
        if owner is not self or not self._is_optimizers:
            self.training.end_step()

    def held_by(self, optimizer: Optimizer, knows_names: bool, takes_part: bool) -> OptimizerCompressor:
        """Compressor for one optimizer that shares this one's settings and state.

        An optimizer that is made again for the same parameters continues with the same error-feedback residuals. The
        first optimizer must be gone by then, and Horovod's hooks with it.

        Args:
            knows_names: whether the optimizer is told the names of its parameters.
            takes_part: whether this rank is in the optimizer's process set.
        """
        self._is_optimizers |= takes_part
        first = next((each for group in optimizer.param_groups for each in group["params"]), optimizer)
        known = (at for at, parameter in enumerate(self._first_parameters) if parameter() is first)
        number = next(known, len(self._first_parameters))
        if number == len(self._first_parameters):
            self._first_parameters.append(weakref.ref(first))
        return OptimizerCompressor(self, f"optimizer {number + 1}/" if number else "", knows_names)

    def _update_rank(self) -> None:
        """Tell the training this rank's number.

        Elastic training may have changed the number. The training's state is then loaded like a checkpoint from another
        rank.
        """
        training, now = self.training, (hvd.rank(), hvd.size())
        before = training.rank, training.world_size
        if now == before:
            return
        state = training.state_dict()
        training.rank, training.world_size = now
        if None not in before:
            training.load_state_dict(state)


class OptimizerCompressor(Compressor):
    """Compressor of one optimizer, which may share an NCZ with others.

    Tensors of different optimizers are never reduced together. Ranks may have different gradients pending until an
    optimizer's own `synchronize`, which shows that no more gradients will come.

    Attributes:
        compressor: settings and state, which optimizers may share.
        label: prefix of its parameters' names in error feedback, as two optimizers may use the same names.
        knows_names: True if it was told names; else Horovod names parameters by their position.
        positions: position of each parameter in the model, by name; empty if unknown.
    """

    def __init__(self, compressor: NCZ, label: str, knows_names: bool):
        self.label = label
        self.knows_names = knows_names
        self.positions: Mapping[str, int] = {}
        self.compressor = compressor
        self._names_in_group: dict[str, list[str]] = {}

    def compress(self, tensor: Tensor) -> tuple[Tagged, None]:
        return Tagged(tensor, self), None

    def decompress(self, tensor: Tensor, ctx) -> Tensor:
        return tensor

    def learn_names(self, names: list[str], groups: list[list[str]]) -> None:
        """Note the names of all parameters in order, and of those that are reduced as a group."""
        self.positions = {name: position for position, name in enumerate(names)}
        self._names_in_group = {names[0]: names for names in groups}

    def names_in_group(self, first: str) -> list[str]:
        """Names of the parameters in the group that Horovod calls by its first parameter."""
        return self._names_in_group[first]


def as_instance(compression) -> NCZ | None:
    """The NCZ that a `compression` argument means; None for any other compressor.

    Raises UnsupportedError if settings are passed instead of a compressor.
    """
    if isinstance(compression, (str, Mapping)):
        raise UnsupportedError(
            f"compression={compression!r} must be a compressor. Write compression=NCZ for all defaults, or NCZ(...) "
            "with a file or a mapping of settings; `from ncz_plugins.horovod import NCZ`"
        )
    if isinstance(compression, NCZ):
        return compression
    if isinstance(compression, type) and issubclass(compression, NCZ):
        return compression.default()
    return None


def _resolved(source) -> Config:
    """Configuration from anything that `Config.load` takes, with every `auto` replaced. Raises ConfigError."""
    config = Config.load(source)
    if config.roles != ("gradient",):
        raise ConfigError(
            f'roles: {list(config.roles)}: under Horovod only gradients are compressed; allowed: ["gradient"]'
        )
    refuse(config, "Horovod")
    if isinstance(config.transport.hierarchy, int):
        raise ConfigError(
            f"transport.hierarchy: {config.transport.hierarchy}: Horovod can't send between chosen ranks, so "
            "ranks can't be grouped by node; allowed: auto, off"
        )
    config = apply_tuning_file(config, hvd.size() if hvd.is_initialized() else None)
    if config.needs_measuring:
        raise ConfigError(
            "transport: frame_bytes or min_bytes is auto: under Horovod ranks can't measure at the start; run "
            "`horovodrun -np N ncz tune --output tuned.json` and name that file in transport.tuning"
        )
    return config
