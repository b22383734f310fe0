"""Error feedback: what quantizing loses of a gradient is added to the next one.

Each rank keeps, for every parameter, the difference between what it had to contribute and what its codes stood for, and
adds it to its next contribution before that is quantized (Seide et al., Interspeech 2014; Karimireddy et al., ICML
2019). So errors do not add up over the steps, however wide the bound.

A call that goes plain leaves what is kept as it is, for the next one that is compressed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...kernels.scratch import Scratch
from ..codec.layout import Window
from ..errors import MismatchError
from .policy import ParameterSlice

_scratch = Scratch()


class Residuals:
    """What this rank has yet to contribute, by parameter.

    Attributes:
        by_name: [elements of the parameter], float64 for float64 tensors and float32 for all others; made when needed.
    """

    def __init__(self):
        self.by_name: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Memory that is taken."""
        return sum(each.nbytes for each in self.by_name.values())

    def of(self, part: ParameterSlice, like: Tensor) -> Tensor:
        """What belongs to `part`, a view; zeros for a parameter that was not there before."""
        residual = self.by_name.get(part.name)
        if residual is None:
            residual = self.by_name[part.name] = torch.zeros(part.of, dtype=_dtype(like), device=like.device)
        if residual.numel() != part.of:
            raise MismatchError(
                f"{part.name} has {part.of} elements and had {residual.numel()} before: error feedback needs one name "
                "for each parameter; pass another name, or set quantizer.error_feedback to false"
            )
        if residual.device != like.device:  # from a checkpoint
            residual = self.by_name[part.name] = residual.to(like.device)
        return residual[part.start : part.start + part.length]


class Feedback:
    """The residuals of one call.

    Args:
        parts: what the call's whole tensor consists of, in order.
    """

    def __init__(self, residuals: Residuals, parts: Sequence[ParameterSlice]):
        self._residuals = residuals
        self._parts = parts

    def added_to(self, source: Window) -> Window:
        """`source` with the residuals added, in memory that lasts until this thread makes another call."""
        values = _buffer(source.data)
        values.copy_(source.data)
        compensated = Window(values, source.start)
        for part, elements in self._named(source):
            compensated[elements].add_(self._residuals.of(part, values))
        return compensated

    def keep(self, lost: Window) -> None:
        """Remember what quantizing lost of what `added_to` returned, in the same memory or not."""
        for part, elements in self._named(lost):
            self._residuals.of(part, lost.data).copy_(lost[elements])

    def in_order(self, shares: Sequence[int], of: int) -> Feedback:
        """The same where the whole tensor's equal shares, `of` of them, stand in this order."""
        length = sum(part.length for part in self._parts) // of
        parts = [part for share in shares for part in _cut(self._parts, share * length, (share + 1) * length)]
        return Feedback(self._residuals, parts)

    def _named(self, window: Window) -> Iterator[tuple[ParameterSlice, slice]]:
        """The parts that have names, as far as they lie in `window`, with their elements there."""
        at = window.start
        for part in _cut(self._parts, at, at + window.data.numel()):
            if part.name is not None:
                yield part, slice(at, at + part.length)
            at += part.length


def _cut(parts: Sequence[ParameterSlice], first: int, last: int) -> Iterator[ParameterSlice]:
    """What the elements from `first` to before `last` consist of."""
    at = 0
    for part in parts:
        begin, end = max(at, first), min(at + part.length, last)
        if begin < end:
            yield ParameterSlice(part.name, end - begin, part.start + begin - at, part.of)
        at += part.length


def _dtype(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _buffer(like: Tensor) -> Tensor:
    if like.device.type == "cpu":  # fresh memory would cost as much as the addition
        return _scratch.of("compensated", like.numel(), _dtype(like))
    return torch.empty_like(like, dtype=_dtype(like))
