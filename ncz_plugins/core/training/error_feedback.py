"""Error feedback: what quantizing loses of a gradient is added to the next one.

For every parameter, each rank keeps a residual: the difference between its contribution and what its codes stood for.
It adds the residual to its next contribution before that is quantized (Seide et al., Interspeech 2014; Karimireddy et
al., ICML 2019). So errors do not add up over the training steps, however wide the bound.

A call that goes plain leaves the residuals as they are, for the next call that is compressed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...kernels.scratch import Scratch
from ..codec.layout import Window
from ..errors import MismatchError, UnsupportedError
from .policy import ParameterSlice

_scratch = Scratch()


class Residuals:
    """The residuals of this rank, by parameter.

    Attributes:
        by_name: by name of the parameter, [elements of the parameter]; float64 for float64 tensors, float32 for all
            others. Made when first needed.
    """

    def __init__(self):
        self.by_name: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the residuals take."""
        return sum(each.nbytes for each in list(self.by_name.values()))  # a call on another thread may add some

    def of(self, part: ParameterSlice, like: Tensor) -> Tensor:
        """A view of the residual of `part`, [part.length], on the device of `like`; zeros for a new parameter.

        Raises MismatchError if the parameter had another size before.
        """
        residual = self.by_name.get(part.name)
        if residual is None:
            residual = self.by_name[part.name] = torch.zeros(part.of, dtype=_dtype(like), device=like.device)
        if residual.numel() != part.of:
            raise MismatchError(
                f"{part.name} has {part.of} elements and had {residual.numel()} before: error feedback needs one name "
                "for each parameter; pass another name, or set quantizer.error_feedback to false. If the model has "
                "changed since the state that was loaded, call training.residuals.by_name.clear() after loading it"
            )
        if residual.device != like.device:  # from a checkpoint
            residual = self.by_name[part.name] = residual.to(like.device)
        return residual[part.start : part.start + part.length]


class Feedback:
    """The residuals of one call.

    Args:
        parts: the slices of parameters that make up the call's whole tensor, in order.

    Raises UnsupportedError where some of them overlap: their residual would be added twice, and kept once.
    """

    def __init__(self, residuals: Residuals, parts: Sequence[ParameterSlice]):
        _require_apart(tuple(parts))
        self._residuals = residuals
        self._parts = parts

    def added_to(self, source: Window) -> Window:
        """`source` plus the residuals, in memory that is valid until this thread makes another call."""
        values = _buffer(source.data)
        values.copy_(source.data)
        compensated = Window(values, source.start)
        for part, elements in self._named(source):
            compensated[elements].add_(self._residuals.of(part, values))
        return compensated

    def keep(self, lost: Window, is_finite: bool = True) -> None:
        """Keep `lost`, what quantizing lost of the tensor that `added_to` returned, as the new residuals.

        Args:
            is_finite: whether all of that is for sure. What is not is no residual.
        """
        for part, elements in self._named(lost):
            residual = self._residuals.of(part, lost.data).copy_(lost[elements])
            if not is_finite:
                residual.nan_to_num_(0, 0, 0)

    def in_order(self, shares: Sequence[int], of: int) -> Feedback:
        """The same residuals for a tensor whose shares are in another order.

        Args:
            shares: numbers of the shares, in their new order.
            of: how many shares of equal size the whole tensor has.
        """
        length = sum(part.length for part in self._parts) // of
        parts = [part for share in shares for part in _cut(self._parts, share * length, (share + 1) * length)]
        return Feedback(self._residuals, parts)

    def _named(self, window: Window) -> Iterator[tuple[ParameterSlice, slice]]:
        """The slices with a name, cut to `window`, each with its elements there."""
        at = window.start
        for part in _cut(self._parts, at, at + window.data.numel()):
            if part.name is not None:
                yield part, slice(at, at + part.length)
            at += part.length


@lru_cache(maxsize=1024)
def _require_apart(parts: tuple[ParameterSlice, ...]) -> None:
    named = [each for each in parts if each.name is not None and each.length]
    if len({each.name for each in named}) == len(named):
        return
    ends: dict[str, int] = {}
    for name, start, end in sorted((each.name, each.start, each.start + each.length) for each in named):
        if start < ends.get(name, 0):
            raise UnsupportedError(
                f"{name}: two tensors of one call have this name: error feedback needs one for each; pass others, or "
                "set quantizer.error_feedback to false"
            )
        ends[name] = max(end, ends.get(name, 0))


def _cut(parts: Sequence[ParameterSlice], first: int, last: int) -> Iterator[ParameterSlice]:
    """The slices that make up the elements from `first` to before `last`."""
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
