"""Parts of one tensor that are reduced in different ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .runtime.handle import Handle
from .training.policy import ParameterSlice


def regrouped(
    tensor: Tensor,
    parts: Sequence[ParameterSlice],
    groups: Sequence[Sequence[int]],
    reduce: Callable[[Tensor, list[ParameterSlice]], object],
) -> Regrouped:
    """Put the parts of each group together, reduce them, and put them back once waited for.

    Args:
        tensor: contiguous, of any shape.
        groups: indices of parts; each belongs to one of them.
        reduce: starts a reduction in place and returns its handle.
    """
    pieces = tensor.view(-1).split([part.length for part in parts])
    under_way = []
    for indices in groups:
        mine = [pieces[at] for at in indices]
        together = torch.cat(mine)
        under_way.append((reduce(together, [parts[at] for at in indices]), together, mine))
    return Regrouped(under_way)


class Regrouped:
    """The handle of reductions whose results go where they belong when they are waited for."""

    def __init__(self, under_way: list[tuple]):
        self._under_way = under_way

    def wait(self, *timeout) -> bool:
        """Block until all results are in place. Raises what went wrong."""
        self._put_back(lambda handle: handle.wait(*timeout))
        return True

    def block_current_stream(self, timeout: float | None = None) -> None:
        """Hold up the current CUDA stream, and not the host, until all results are in place: see `Handle`."""

        def hold_up(handle) -> None:
            if isinstance(handle, Handle):
                handle.block_current_stream(timeout)
            else:
                handle.wait()  # for a plain collective, which holds up nothing else on a GPU

        self._put_back(hold_up)

    def is_completed(self) -> bool:
        """True once all results are in place."""
        if all(handle.is_completed() for handle, _, _ in self._under_way):
            self.wait()
        return not self._under_way

    def _put_back(self, wait: Callable[[object], object]) -> None:
        while self._under_way:
            handle, together, pieces = self._under_way[0]
            wait(handle)
            for piece, result in zip(pieces, together.split([piece.numel() for piece in pieces])):
                piece.copy_(result)
            del self._under_way[0]
