"""`NCZ`: what users pass as `compression`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import MethodType

import horovod.torch as hvd
from horovod.torch.compression import Compressor
from torch import Tensor

from ..core import tuning
from ..core.config import Config
from ..core.errors import ConfigError
from ..core.stats import Statistics

ENVIRONMENT = "NCZ_CONFIG"  # a configuration file, for NCZ without settings of its own


@dataclass(frozen=True)
class Tagged:
    """A tensor on its way from `compress` to the all-reduce.

    Attributes:
        owner: what has the same owner is reduced together.
    """

    tensor: Tensor
    compressor: NCZ
    owner: Compressor


class _OnClassOrInstance:
    """A method or an attribute that on the class stands for that of its default instance.

    Horovod's own compressors are classes that are never instantiated, so users write both
    `compression=NCZ` and `compression=NCZ(...)`.
    """

    def __init__(self, function):
        self._function = function

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

    The class itself can be passed too and then means its default instance, `NCZ.default()`.
    """

    def __init__(self, source=None, **sections):
        if source is not None and sections:
            raise ConfigError(f"NCZ takes a configuration or sections of one, not both ({', '.join(sections)})")
        self.config = sections or (os.environ.get(ENVIRONMENT) or None if source is None else source)
        self.stats = Statistics(self.config.statistics.history)
        self._steps = 0

    @classmethod
    def default(cls) -> NCZ:
        """The instance that the class stands for where it is passed as such."""
        if "_default" not in vars(cls):  # a subclass has one of its own
            cls._default = cls()
        return cls._default

    def end_step(self) -> None:
        """Close one step in the statistics, and report it where the configuration says so."""
        self._steps += 1
        done = self.stats.end_step()
        every = self.config.statistics.report_every
        if every and self._steps % every == 0 and hvd.rank() == 0:
            print(f"ncz_plugins: step {self._steps}: {done.describe()}", flush=True)

    @property
    def config(self) -> Config:
        return self._config

    @config.setter
    def config(self, source) -> None:
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
        config = tuning.settle(config, hvd.size() if hvd.is_initialized() else None)
        if tuning.is_open(config):
            raise ConfigError(
                "transport: frame_bytes and min_bytes: auto: Horovod's ranks can't measure as they start; run "
                "`horovodrun -np N ncz tune --output tuned.json` and name that file in transport.tuning"
            )
        self._config = config

    @_OnClassOrInstance
    def compress(self, tensor: Tensor) -> tuple[Tagged, None]:
        """Mark `tensor` for the compressed all-reduce, which does the coding."""
        return Tagged(tensor, self, owner=self), None

    @_OnClassOrInstance
    def decompress(self, tensor: Tensor, ctx) -> Tensor:
        """The all-reduce has done that already; sparse gradients never came to `compress`."""
        return tensor


class OfOneOptimizer(Compressor):
    """An NCZ in the hands of one optimizer, which may share it with others.

    That a gradient never fires is known only when its own optimizer synchronizes. Until then ranks may differ in
    what is pending, so that others must not reduce it with theirs.
    """

    def __init__(self, compressor: NCZ):
        self._compressor = compressor

    def compress(self, tensor: Tensor) -> tuple[Tagged, None]:
        return Tagged(tensor, self._compressor, owner=self), None

    def decompress(self, tensor: Tensor, ctx) -> Tensor:
        return tensor


def as_instance(compression) -> NCZ | None:
    """The NCZ that a `compression` argument means, None for any other compressor."""
    if isinstance(compression, NCZ):
        return compression
    if isinstance(compression, type) and issubclass(compression, NCZ):
        return compression.default()
    return None
