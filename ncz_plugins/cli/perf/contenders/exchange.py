"""Base classes of contenders: a contender is opened on all ranks, and then runs one collective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ....core.config import Config
from ....core.errors import UnsupportedError
from .. import COLLECTIVES

ALL = frozenset(COLLECTIVES)

T = TypeVar("T")


@dataclass
class Context:
    """Context that all contenders of one rank share, buffers included, as they run one after another.

    Attributes:
        config: settings of our contender.
        group: process group that takes part; None for the default group.
        world_size: number of ranks of the group.
        rank: rank in the group.
        collective: a key of COLLECTIVES.
        role: what the tensors are, if they are no gradients: "parameter" or "activation".
    """

    config: Config
    group: dist.ProcessGroup | None
    world_size: int
    rank: int
    collective: str
    role: str | None = None
    _kept: dict[str, tuple[Hashable, Any]] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        self.group = dist.group.WORLD if self.group is None else self.group

    def keep(self, name: str, key: Hashable, make: Callable[[], T]) -> T:
        """The object kept under this name; `make` makes a new one if there is none, or one with another key."""
        if name not in self._kept or self._kept[name][0] != key:
            self._kept.pop(name, None)  # free the old object first
            self._kept[name] = key, make()
        return self._kept[name][1]

    def buffer(self, name: str, numel: int, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Buffer of this name, [numel], on the device of `like`. The next user of the same name may overwrite it."""
        key = numel, dtype, like.device
        return self.keep(f"{name} {dtype}", key, lambda: torch.empty(numel, dtype=dtype, device=like.device))


class Exchange(ABC):
    """Open contender on one rank, which runs one collective any number of times. A context manager that closes it.

    Attributes:
        tensor: tensor passed to `load`, or a copy that `run` may overwrite.
    """

    summed = "sum"  # result of a collective that adds: "sum" or "avg"

    def __init__(self, context: Context):
        self.context = context

    @property
    def root(self) -> int:
        """Global rank of the root, where a broadcast starts and a gather ends: the first of the group."""
        return dist.get_global_rank(self.context.group, 0)

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return self.context.rank == 0

    @property
    def op(self) -> str:
        """Reduction of the result: "sum" or "avg" over ranks, "none" if nothing is added."""
        return self.summed if COLLECTIVES[self.context.collective].is_sum else "none"

    def load(self, tensor: Tensor) -> None:
        """Copy the input of the next run to where this contender needs it. Not timed: a training step leaves it there.

        Args:
            tensor: float32, or bfloat16 for weights, [n], the same n on all ranks; not changed. For all_gather and
                gather, the part of the rank; for reduce_scatter, scatter and all_to_all, the whole with one part for
                each rank. broadcast and scatter send from the root; on other ranks only the size matters.
        """
        self.tensor = tensor

    @abstractmethod
    def run(self) -> Tensor:
        """Run the collective; all ranks must call this. The first run of a size allocates buffers: don't time it.

        Returns the result, 1-D, with the dtype of the input, and empty on a rank that gets none; valid until the next
        `load` or `run` of any exchange of this context.
        """

    def details(self) -> dict[str, Any]:
        """Counters of the runs since the last call of this method, of JSON types; empty if nothing is counted."""
        return {}

    def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """Free resources that are not freed automatically."""

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _nothing() -> None:
    """`missing` of contenders that need nothing but torch."""


@dataclass(frozen=True)
class Contender:
    """One way to exchange a tensor.

    Attributes:
        name: name on the command line.
        description: one line, with the settings.
        start: opens the contender; see `open`.
        collectives: collectives that it supports.
        missing: returns the reason why it can't run, such as what is missing; None if it can run.
    """

    name: str
    description: str
    start: Callable[[Context], Exchange]
    collectives: frozenset[str] = ALL
    missing: Callable[[], str | None] = _nothing

    def open(self, context: Context) -> Exchange:
        """Open the contender. A collective: all ranks must call it. Raises UnsupportedError if it can't run."""
        if context.collective not in self.collectives:
            raise UnsupportedError(
                f"{self.name} has no {context.collective}; it has {', '.join(sorted(self.collectives))}"
            )
        if lacking := self.missing():
            raise UnsupportedError(f"{self.name}: {lacking}")
        return self.start(context)
