"""What a contender is: something that can be opened on every rank, and then runs one collective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ....core.config import Config
from ....core.errors import UnsupportedError
from .. import COLLECTIVES

ALL = frozenset(COLLECTIVES)
_SUMS = ("all_reduce", "reduce_scatter")

T = TypeVar("T")


@dataclass
class Context:
    """What the contenders of one rank share. One run after another, they can share their buffers, too.

    Attributes:
        config: for ours.
        group: the process group that takes part; None is the default group.
        world_size, rank: of this group.
        collective: one of COLLECTIVES.
        sends_weights: whether what is gathered are versions of weights.
    """

    config: Config
    group: dist.ProcessGroup | None
    world_size: int
    rank: int
    collective: str
    sends_weights: bool = False
    _kept: dict[str, tuple[Hashable, Any]] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        self.group = dist.group.WORLD if self.group is None else self.group

    def keep(self, name: str, kind: Hashable, make: Callable[[], T]) -> T:
        """What was made under this name, or what `make` makes now if there was nothing or something of another kind."""
        if name not in self._kept or self._kept[name][0] != kind:
            self._kept.pop(name, None)  # free the old one first
            self._kept[name] = kind, make()
        return self._kept[name][1]

    def buffer(self, name: str, numel: int, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """A buffer, [numel], on the device of `like`. Whoever asks for the same name next may write over it."""
        kind = numel, dtype, like.device
        return self.keep(f"{name} {dtype}", kind, lambda: torch.empty(numel, dtype=dtype, device=like.device))


class Exchange(ABC):
    """A contender at work on one rank: one collective, as often as wanted. Closes what it opened when its context ends.

    Attributes:
        tensor: what `load` was given, or a copy that `run` may write over.
    """

    summed = "sum"  # what the result of an all-reduce or a reduce-scatter holds: this, or "avg"

    def __init__(self, context: Context):
        self.context = context

    @property
    def op(self) -> str:
        """What the result holds: "sum" or "avg" over ranks, or "none" where nothing is added."""
        return self.summed if self.context.collective in _SUMS else "none"

    def load(self, tensor: Tensor) -> None:
        """Put the input of the next run where this contender wants it. Not timed: a training step leaves it there.

        Args:
            tensor: float32, or bfloat16 of weights, [n], the same n on all ranks; it isn't changed. For an all-gather a
                rank's part, for a reduce-scatter the whole, which consists of one part for each rank. A broadcast
                starts from the group's rank 0; on all others, only the size counts.
        """
        self.tensor = tensor

    @abstractmethod
    def run(self) -> Tensor:
        """The collective, on all ranks at once. The first run of a size makes buffers, and should not be timed.

        Returns: of the same dtype, 1-D, valid until the next `load` or `run` of any exchange of this context.
        """

    def details(self) -> dict[str, Any]:
        """What the runs since the last time were found to do, of JSON types; empty where a contender counts nothing."""
        return {}

    def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """Free what is not freed by itself."""

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _nothing() -> None:
    """For contenders that need nothing but torch."""


def needs(module: str, extra: str) -> Callable[[], str | None]:
    """Says what to install if a module is not there."""

    def missing() -> str | None:
        return None if find_spec(module) else f"{module} is not installed: pip install 'ncz_plugins[{extra}]'"

    return missing


@dataclass(frozen=True)
class Contender:
    """One way to exchange a tensor.

    Attributes:
        name: as on the command line.
        description: one line, with the settings.
        start: opens it; see `open`.
        collectives: those that it has.
        missing: what has to be installed before it runs; None if it can run.
        needs_horovod: whether the ranks must have been started as horovodrun does.
    """

    name: str
    description: str
    start: Callable[[Context], Exchange]
    collectives: frozenset[str] = ALL
    missing: Callable[[], str | None] = _nothing
    needs_horovod: bool = False

    def open(self, context: Context) -> Exchange:
        """Get ready, on all ranks at once: a collective. Raises UnsupportedError where it can't run."""
        if context.collective not in self.collectives:
            raise UnsupportedError(
                f"{self.name} has no {context.collective}; it has {', '.join(sorted(self.collectives))}"
            )
        if lacking := self.missing():
            raise UnsupportedError(f"{self.name}: {lacking}")
        return self.start(context)
