"""Error feedback: what quantizing loses of a gradient is added to the next gradient.

Each rank keeps a residual for every parameter: the difference between its contribution and the values that its codes
stand for. The residual is added to the rank's next contribution before quantizing (Seide et al., Interspeech 2014;
Karimireddy et al., ICML 2019). So errors do not accumulate over steps, however wide the bound.

Residuals are bfloat16, which halves their memory and has the range of float32. Rounding loses at most 1/512 of a
residual. Residuals of float64 tensors are float64.

A call that goes plain leaves the residuals unchanged, for the next compressed call.

A slice whose gradient is all zeros leaves its residual unchanged, too. The parameter may be unused in this step, and
its result may be dropped (DDP drops results of parameters that no rank uses). The residual waits for the next step that
uses the parameter. Each rank decides this alone: zeros are quantized without loss, so the rank loses nothing, whatever
the other ranks do.
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
    """Residuals of this rank, by parameter.

    Attributes:
        by_name: name of the parameter -> residual, [elements of the parameter], see `dtype_of`. Created when first
            needed.
    """

    def __init__(self):
        self.by_name: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Memory taken by the residuals, in bytes."""
        return sum(each.nbytes for each in list(self.by_name.values()))  # a copy: another thread may add residuals

    def of(self, part: ParameterSlice, like: Tensor) -> Tensor:
        """View of the residual of `part`, [part.length], on the device of `like`; zeros for a new parameter.

        Raises MismatchError if the parameter had another number of elements before.
        """
        residual = self.by_name.get(part.name)
        if residual is None:
            residual = self.by_name[part.name] = torch.zeros(part.of, dtype=dtype_of(like.dtype), device=like.device)
        if residual.numel() != part.of:
            raise MismatchError(
                f"{part.name} has {part.of} elements and had {residual.numel()} before: error feedback needs one name "
                "for each parameter; pass another name, or set quantizer.error_feedback to false. If the model has "
                "changed since the state that was loaded, call training.residuals.by_name.clear() after loading it"
            )
        if residual.device != like.device:  # loaded from a checkpoint
            residual = self.by_name[part.name] = residual.to(like.device)
        return residual[part.start : part.start + part.length]


class Feedback:
    """Error feedback of one call.

    Args:
        residuals: residuals of this rank.
        parts: slices of parameters that make up the whole tensor of the call, in order.

    Raises UnsupportedError if slices overlap: their residual would be added twice and stored once.
    """

    def __init__(self, residuals: Residuals, parts: Sequence[ParameterSlice]):
        _require_apart(tuple(parts))
        self._residuals = residuals
        self._parts = parts
        self._used: list[bool | Tensor] = []  # of each named slice: whether its gradient has a value other than 0

    def added_to(self, source: Window) -> Window:
        """`source` plus the residuals, float32 or float64. Valid until this thread makes its next call."""
        dtype = torch.promote_types(source.data.dtype, torch.float32)
        # Memory for the sum. On a CPU it is reused: fresh memory would cost as much time as the addition.
        if source.data.is_cpu:
            values = _scratch.of("compensated", source.data.numel(), dtype, source.data.device)
        else:
            values = torch.empty_like(source.data, dtype=dtype)
        values.copy_(source.data)

        # Add the residual of each slice whose gradient is not all zeros.
        compensated = Window(values, source.start)
        for part, elements in self._named(source):
            own = compensated[elements]
            used = _is_used(own)
            self._used.append(used)
            if used is True:
                own.add_(self._residuals.of(part, values))
            elif used is not False:  # a tensor, on a GPU
                own.add_(self._residuals.of(part, values) * used)
        return compensated

    def keep(self, lost: Window, is_finite: bool = True) -> None:
        """Store `lost`, what quantizing lost of the tensor that `added_to` returned, as the new residuals.

        Slices to which `added_to` added nothing keep their residuals.

        Args:
            is_finite: whether `lost` is known to be finite. Otherwise NaN and infinity are stored as 0.
        """
        for used, (part, elements) in zip(self._used, self._named(lost), strict=True):
            if used is False:
                continue
            residual = self._residuals.of(part, lost.data)
            if used is True:
                residual.copy_(lost[elements])
            else:  # a tensor, on a GPU
                residual.copy_(torch.where(used, lost[elements], residual))
            if not is_finite:
                residual.nan_to_num_(0, 0, 0)

    def in_order(self, shares: Sequence[int], of: int) -> Feedback:
        """Error feedback with the same residuals, for a tensor whose shares are in another order.

        Args:
            shares: indices of the shares, in their new order.
            of: number of shares of the whole tensor, all of the same length.
        """
        length = sum(part.length for part in self._parts) // of
        parts = [part for share in shares for part in _cut(self._parts, share * length, (share + 1) * length)]
        return Feedback(self._residuals, parts)

    def _named(self, window: Window) -> Iterator[tuple[ParameterSlice, slice]]:
        """Slices of named parameters within `window`, each with its range of elements in the whole tensor."""
        at = window.start
        for part in _cut(self._parts, at, at + window.data.numel()):
            if part.name is not None and part.feeds_back:
                yield part, slice(at, at + part.length)
            at += part.length


@lru_cache(maxsize=1024)
def _require_apart(parts: tuple[ParameterSlice, ...]) -> None:
    """Raise UnsupportedError if two slices of one parameter overlap."""
    named = [each for each in parts if each.name is not None and each.length]
    if len({each.name for each in named}) == len(named):
        return
    ends: dict[str, int] = {}
    for name, start, end in sorted((each.name, each.start, each.start + each.length) for each in named):
        if start < ends.get(name, 0):
            raise UnsupportedError(
                f"{name}: two tensors of one call have this name: error feedback needs a different name for each; pass "
                "other names, or set quantizer.error_feedback to false"
            )
        ends[name] = max(end, ends.get(name, 0))


def _cut(parts: Sequence[ParameterSlice], first: int, last: int) -> Iterator[ParameterSlice]:
    """Slices that make up the elements [first, last) of the whole tensor."""
    at = 0
    for part in parts:
        begin, end = max(at, first), min(at + part.length, last)
        if begin < end:
            yield part._replace(length=end - begin, start=part.start + begin - at, numel=part.of)
        at += part.length


def _is_used(gradient: Tensor) -> bool | Tensor:
    """Whether any element differs from 0. On a GPU, a tensor of one bool, so that the host need not wait."""
    if gradient.device.type != "cpu":
        return gradient.any()
    return bool(gradient.numpy()[0] != 0 or gradient.any())  # usually the first one decides, without a pass


def dtype_of(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the residuals of tensors of a dtype: float64 for float64, else bfloat16."""
    return torch.float64 if dtype == torch.float64 else torch.bfloat16
