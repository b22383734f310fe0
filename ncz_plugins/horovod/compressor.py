"""`NCZ`: what users pass as `compression`."""

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
from ..core.training.state import Training
from ..core.transport.link_speed import gloo_link_gbps
from ..core.tuning.tuning_file import apply_tuning_file

ENVIRONMENT = "NCZ_CONFIG"  # a configuration file, for NCZ without settings of its own


@dataclass(frozen=True)
class Tagged:
    """A tensor on its way from `compress` to the all-reduce.

    Attributes:
        owner: what has the same owner is reduced together.
    """

    tensor: Tensor
    compressor: NCZ
    owner: NCZ | OptimizerCompressor


class _OnClassOrInstance:
    """A method or an attribute that on the class stands for that of its default instance.

    Horovod's own compressors are classes that are never instantiated, so users write both
    `compression=NCZ` and `compression=NCZ(...)`.
    """

    def __init__(self, function):
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance, owner):
        return MethodType(self._function, owner.default() if instance is None else instance)


class NCZ(Compressor):
    """Compressed gradient all-reduces for `hvd.DistributedOptimizer(..., compression=...)`.

    Args:
        source: anything that `Config.load` takes. None: the file named in NCZ_CONFIG, else all defaults.
        sections: instead of `source`, sections of the configuration: `NCZ(quantizer={"value": 0.1})`.

    Attributes:
        config: may be replaced between steps, on all ranks alike, by anything that `Config.load` takes.
        stats: `Statistics`; one step is one `synchronize` of the optimizer.
        training: what lasts from step to step.

    The class itself can be passed too and then means its default instance, `NCZ.default()`.
    """

    # Of single tensors, as OptimizerCompressor has them.
    label = "allreduce/"
    knows_names = True
    positions: Mapping[str, int] = {}

    def __init__(self, source=None, **sections):
        if source is not None and sections:
            raise ConfigError(f"NCZ takes a configuration or sections of one, not both ({', '.join(sections)})")
        source = sections or (os.environ.get(ENVIRONMENT) or None if source is None else source)
        self.training = Training(_resolved(source))
        self._is_optimizers = False
        self._first_parameters: list[weakref.ref] = []  # of each optimizer; itself if it has none

    def __repr__(self) -> str:
        return f"NCZ({self.config.describe()}; step {self.training.step}, {self.stats.total.describe()})"

    def __reduce__(self):
        """A copy, here or in another process, has the same settings and begins a training of its own."""
        return type(self), (self.config,)

    @classmethod
    def default(cls) -> NCZ:
        """The instance that the class stands for where it is passed as such."""
        if "_default" not in vars(cls):  # a subclass has one of its own
            cls._default = cls()
        return cls._default

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
        """Raise UnsupportedError: only functions of Horovod that this plugin could not replace call this."""
        raise UnsupportedError(
            "a function such as hvd.allreduce or hvd.DistributedOptimizer was imported by its name before "
            "ncz_plugins.horovod, so that it does not know NCZ. Import ncz_plugins.horovod first, or write "
            "`import horovod.torch as hvd` and call hvd.allreduce"
        )

    @_OnClassOrInstance
    def decompress(self, tensor: Tensor, ctx) -> Tensor:
        """Nothing is left to do: the all-reduce has decoded already."""
        return tensor

    # ---------------------------------------------------------------- steps and checkpoints

    @_OnClassOrInstance
    def state_dict(self) -> dict:
        """What this rank needs to go on like a run that was not stopped: see `Training.state_dict`."""
        self._update_rank()
        return self.training.state_dict()

    @_OnClassOrInstance
    def load_state_dict(self, state: dict) -> None:
        """Take over what `state_dict` gave to the same rank of a run before: see `Training.load_state_dict`.

        Ranks that load nothing take the step from those that do, and begin with nothing kept by error feedback.
        """
        self._update_rank()
        self.training.load_state_dict(state)

    def begin(self) -> None:
        """Get ready to reduce; find now what can be found wrong before. Raises ConfigError."""
        self._update_rank()
        transport = self.config.transport
        link_gbps = transport.link_gbps or (gloo_link_gbps() if transport.schedule == "ring" else None) or 1
        self.training.begin(ranks=hvd.size(), backend="horovod", link_gbps=link_gbps)

    @property
    def may_run_ahead(self) -> bool:
        """Whether gradients may be reduced while others are computed.

        Not if several optimizers share this: steps of one could then end in the middle of another's.
        """
        return sum(first() is not None for first in self._first_parameters) == 1

    def end_reduction(self, owner: NCZ | OptimizerCompressor) -> None:
        """What `owner` had to reduce is reduced: a step is over, unless optimizers tell steps and it is none."""
        if owner is not self or not self._is_optimizers:
            self.training.end_step()

    def held_by(self, optimizer: Optimizer, knows_names: bool, takes_part: bool) -> OptimizerCompressor:
        """This compressor in the hands of an optimizer.

        One that is made anew for the same parameters goes on with what error feedback kept. The first must be gone by
        then, and Horovod's hooks with it.

        Args:
            knows_names: whether it is told the names of its parameters.
            takes_part: whether this rank is in its process set.
        """
        self._is_optimizers |= takes_part
        first = next((each for group in optimizer.param_groups for each in group["params"]), optimizer)
        known = (at for at, parameter in enumerate(self._first_parameters) if parameter() is first)
        number = next(known, len(self._first_parameters))
        if number == len(self._first_parameters):
            self._first_parameters.append(weakref.ref(first))
        return OptimizerCompressor(self, f"optimizer {number + 1}/" if number else "", knows_names)

    def _update_rank(self) -> None:
        """Tell the training which rank this is.

        Elastic training may have changed that: what is known from before is then like a checkpoint from another rank.
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
    """An NCZ in the hands of one optimizer, which may share it with others.

    That a gradient never fires is known only when its own optimizer synchronizes. Until then ranks may differ in
    what is pending, so that others must not reduce it with theirs.

    Attributes:
        label: what error feedback puts before the names of its parameters, as other optimizers may have the same.
        knows_names: whether it was told names; else Horovod names its parameters by their positions in it.
        positions: of its parameters in the model, by name, as far as that is known.
    """

    def __init__(self, compressor: NCZ, label: str, knows_names: bool):
        self.label = label
        self.knows_names = knows_names
        self.positions: Mapping[str, int] = {}
        self._compressor = compressor
        self._names_in_group: dict[str, list[str]] = {}

    def compress(self, tensor: Tensor) -> tuple[Tagged, None]:
        return Tagged(tensor, self._compressor, owner=self), None

    def decompress(self, tensor: Tensor, ctx) -> Tensor:
        return tensor

    def learn_names(self, names: list[str], groups: list[list[str]]) -> None:
        """Take note of the names of its parameters, in their order, and of those that are reduced as a group."""
        self.positions = {name: position for position, name in enumerate(names)}
        self._names_in_group = {names[0]: names for names in groups}

    def names_in_group(self, first: str) -> list[str]:
        """The parameters whose group Horovod calls by the first of them."""
        return self._names_in_group[first]


def as_instance(compression) -> NCZ | None:
    """The NCZ that a `compression` argument means, None for any other compressor.

    Raises UnsupportedError for settings in place of a compressor.
    """
    if isinstance(compression, (str, Mapping)):
        raise UnsupportedError(
            f"compression={compression!r}: this is no compressor. Write compression=NCZ for all defaults, or NCZ(...) "
            "with a file or a mapping of settings; `from ncz_plugins.horovod import NCZ`"
        )
    if isinstance(compression, NCZ):
        return compression
    if isinstance(compression, type) and issubclass(compression, NCZ):
        return compression.default()
    return None


def _resolved(source) -> Config:
    """The configuration that `source` describes, in which nothing is left open. Raises ConfigError."""
    config = Config.load(source)
    if config.roles != ("gradient",):
        raise ConfigError(
            f'roles: {list(config.roles)}: under Horovod only gradients are compressed; allowed: ["gradient"]'
        )
    if isinstance(config.transport.hierarchy, int):
        raise ConfigError(
            f"transport.hierarchy: {config.transport.hierarchy}: under Horovod every rank stands for itself, as "
            "its runtime has no way between chosen ranks; allowed: auto, off"
        )
    config = apply_tuning_file(config, hvd.size() if hvd.is_initialized() else None)
    if config.needs_measuring:
        raise ConfigError(
            "transport: frame_bytes and min_bytes: auto: Horovod's ranks can't measure as they start; run "
            "`horovodrun -np N ncz tune --output tuned.json` and name that file in transport.tuning"
        )
    return config
