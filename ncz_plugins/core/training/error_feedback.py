"""Error feedback: what quantizing loses of a gradient is added to the next one.

For every parameter, each rank keeps a residual: the difference between its contribution and what its codes stood for.
It adds the residual to its next contribution before that is quantized (Seide et al., Interspeech 2014; Karimireddy et
al., ICML 2019). So errors do not add up over the training steps, however wide the bound.

A call that goes plain leaves the residuals as they are, for the next call that is compressed.

A slice whose gradient is zero leaves its residual as it is, too: the parameter may be unused in this step, and what
comes out for it may be dropped (DDP does so with parameters that no rank uses). The residual stays for the next step
that uses the parameter. Each rank decides that for itself: zeros are quantized without loss, so whatever the other
ranks do, what this rank has yet to contribute is what it keeps.
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
        self._used: list[bool | Tensor] = []  # for each slice that `added_to` found a residual for

    def added_to(self, source: Window) -> Window:
        """`source` plus the residuals, in memory that is valid until this thread makes another call."""
        values = _buffer(source.data)
        values.copy_(source.data)
        compensated = Window(values, source.start)
        for part, elements in self._named(source):
            own = compensated[elements]
            used = _is_used(own)
            self._used.append(used)
            if used is True:
                own.add_(self._residuals.of(part, values))
            elif used is not False:  # on a GPU
                own.add_(self._residuals.of(part, values) * used)
        return compensated

    def keep(self, lost: Window, is_finite: bool = True) -> None:
        """Keep `lost`, what quantizing lost of the tensor that `added_to` returned, as the new residuals.

        What `added_to` left alone stays as it is.

        Args:
            is_finite: whether all of that is for sure. What is not is no residual.
        """
        for used, (part, elements) in zip(self._used, self._named(lost), strict=True):
            if used is False:
                continue
            residual = self._residuals.of(part, lost.data)
            if used is True:
                residual.copy_(lost[elements])
            else:  # on a GPU
                torch.where(used, lost[elements], residual, out=residual)
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
            if part.name is not None and part.feeds_back:
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
            yield ParameterSlice(part.name, end - begin, part.start + begin - at, part.of, part.feeds_back)
        at += part.length


def _is_used(gradient: Tensor) -> bool | Tensor:
    """Whether any element is not zero. On a GPU a tensor of one bool: the host does not wait for it."""
    if gradient.device.type != "cpu":
        return gradient.any()
    return bool(gradient.numpy()[0] != 0 or gradient.any())  # mostly the first one tells, without a pass over all


def _dtype(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _buffer(like: Tensor) -> Tensor:
    if like.device.type == "cpu":  # fresh memory would cost as much as the addition
        return _scratch.of("compensated", like.numel(), _dtype(like))
    return torch.empty_like(like, dtype=_dtype(like))
