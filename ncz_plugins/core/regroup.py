"""Slices of one tensor that are reduced in calls of their own, because policies treat them differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.futures import Future, collect_all

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
    return Regrouped(under_way).giving(tensor)


class Regrouped(Handle):
    """The handle of reductions whose results go where they belong when they are waited for."""

    def __init__(self, under_way: list[tuple]):
        self._under_way = under_way
        self._error: Exception | None = None

    def wait(self, timeout=None) -> bool:
        if self._error is not None:
            raise self._error
        while self._under_way:
            handle, together, pieces = self._under_way[0]
            try:
                handle.wait(timeout)
            except Exception as error:
                if handle.is_completed():  # else it was only not waited for long enough
                    self._error = error
                raise
            for piece, result in zip(pieces, together.split([piece.numel() for piece in pieces])):
                piece.copy_(result)
            del self._under_way[0]
        return True

    def is_completed(self) -> bool:
        if self._error is None and all(handle.is_completed() for handle, _, _ in self._under_way):
            with suppress(Exception):  # `exception` tells it
                self.wait()
        return self._error is not None or not self._under_way

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error if self.is_completed() else None

    def get_future(self) -> Future[list[Tensor]]:
        def result(_: Future) -> list[Tensor]:
            self.wait()
            return [self.output]

        return collect_all([handle.get_future() for handle, _, _ in self._under_way]).then(result)
