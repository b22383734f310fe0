"""Tensors are put into buckets, each of which is reduced at once: the same ones in the same order on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..core.training.policy import ParameterSlice, Treatment
from ..core.training.state import Training

BUCKET_BYTES = 64 << 20  # what is reduced at once; enough to make latency negligible, little enough to fit in memory


class Kind(NamedTuple):
    """What tensors must have in common to share a bucket, besides their treatment."""

    op: int
    scale: float
    dtype: str


@dataclass(eq=False)
class Piece:
    """A tensor that is to be reduced, in place.

    Attributes:
        name, index: what sorts it alike on all ranks: how it was submitted, and its number within a group.
        tensor: of any shape and strides.
        part: by which policies know it.
        kept_as: by which error feedback knows it, apart from the parameters of other optimizers.
        reduced: whether that has been done.
    """

    kind: Kind
    name: str
    index: int
    tensor: Tensor
    part: ParameterSlice
    kept_as: ParameterSlice
    reduced: bool = False

    @property
    def order(self) -> tuple:
        return (*self.kind, self.name, self.index)

    @property
    def key(self) -> tuple:
        """What it has in common with its like of another step."""
        return (*self.order, self.tensor.numel())


class Bucket(NamedTuple):
    """Tensors that are reduced together."""

    treatment: Treatment
    pieces: list[Piece]

    @property
    def kind(self) -> Kind:
        return self.pieces[0].kind


def buckets(pieces: list[Piece], training: Training, ranks: list[int]) -> Iterator[Bucket]:
    """All `pieces`, in buckets of up to BUCKET_BYTES of those that are of one kind and treated alike.

    Args:
        pieces: in their order.
        ranks: those that reduce them.
    """
    for _, group in itertools.groupby(pieces, key=lambda piece: piece.kind):
        alike = list(group)
        parts = [piece.part for piece in alike]
        for treatment, indices in training.grouped(parts, alike[0].tensor.dtype, "gradient", ranks):
            for some in _cut([alike[at] for at in indices]):
                yield Bucket(treatment, some)


def _cut(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Neighbours, up to BUCKET_BYTES at a time, or one if that is larger."""
    bucket: list[Piece] = []
    size = 0
    for piece in pieces:
        if bucket and size + piece.tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += piece.tensor.nbytes
    yield bucket
