"""Several tensors, or slices of them, that one call reduces as one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .errors import memory_errors
from .training.policy import ParameterSlice


class Joined:
    """Memory for pieces one behind the other.

    It is filled when the call runs, not when it is asked for: calls before it may still write to the pieces.

    Args:
        pieces: flat, of one dtype, on one device.

    Attributes:
        pieces: these.
        whole: the memory, [elements of all pieces].
    """

    def __init__(self, pieces: Sequence[Tensor]):
        self.pieces = pieces
        with memory_errors(f"joining {len(pieces)} tensors"):
            self.whole = pieces[0].new_empty(sum([piece.numel() for piece in pieces]))

    @contextmanager
    def filled(self) -> Iterator[None]:
        """A context in which `whole` holds the pieces. Its values are theirs afterwards, unless something is raised."""
        torch.cat(self.pieces, out=self.whole)
        yield
        for piece, result in zip(self.pieces, self.whole.split([piece.numel() for piece in self.pieces])):
            piece.copy_(result)


def slices_of(tensor: Tensor, parts: Sequence[ParameterSlice]) -> Sequence[Tensor]:
    """The parts of a contiguous tensor as flat views of it, which autograd knows nothing of."""
    return tensor.detach().view(-1).split([part.length for part in parts])
