"""Which parameters the gradients belong to that DeepSpeed reduces.

DeepSpeed copies gradients into buckets, cuts these at the borders of partitions, and sorts the pieces by process group
before it reduces them; which goes where changes with the order of the backward pass. But every piece lies in the memory
of some parameter's gradient, and that is how its name is found.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from ..core.training.policy import ParameterSlice

PADDING = ""  # in place of a name
NamedGradient = tuple[str | None, Tensor]


def parts_of(tensors: Iterable[Tensor], gradients: Iterable[NamedGradient]) -> tuple[list[ParameterSlice], int]:
    """What `tensors` consist of, one after another, and how many of their elements belong to no named parameter.

    gradients: with the names of their parameters, or None; `PADDING` names what belongs to none. The tensors are these
        gradients, or lie in their memory.
    """
    spans = sorted(
        ((gradient.data_ptr(), gradient.numel(), name) for name, gradient in gradients if gradient.numel()),
        key=itemgetter(0),
    )
    starts = [start for start, _, _ in spans]
    parts, unknown = [], 0
    for tensor in tensors:
        address, left = tensor.data_ptr(), tensor.numel()
        while left:
            begin, numel, name = spans[at] if (at := bisect_right(starts, address) - 1) >= 0 else (address, 0, None)
            start = (address - begin) // tensor.element_size()
            if start >= numel:  # past the end of the gradient before it
                parts.append(ParameterSlice(None, left))
                unknown += left
                break
            length = min(left, numel - start)
            parts.append(_padding(length) if name is PADDING else ParameterSlice(name, length, start, numel))
            unknown += length if name is None else 0
            address, left = address + length * tensor.element_size(), left - length
    return parts, unknown


def rank_major(parts: Sequence[ParameterSlice], ranks: int) -> list[ParameterSlice]:
    """Whole parameters as `reduce_scatter_coalesced` lays them out: rank by rank, its share of each, padded."""
    shares = []
    for rank in range(ranks):
        for name, numel, *_ in parts:
            share = -(-numel // ranks)
            start = min(rank * share, numel)
            length = min(share, numel - start)
            if length:
                shares.append(ParameterSlice(name, length, start, numel))
            if length < share:
                shares.append(_padding(share - length))
    return shares


def _padding(length: int) -> ParameterSlice:
    return ParameterSlice(None, length, numel=0)


# ------------------------------------------------------------------ where the gradients are that may be reduced now


def of_engine(engine) -> Iterator[NamedGradient]:
    """Without ZeRO: of all parameters."""
    names, optimizer = engine.param_names, engine.optimizer
    if hasattr(optimizer, "get_grads_for_reduction"):  # BF16_Optimizer, which accumulates in buffers of its own
        for at, group in enumerate(optimizer.bf16_groups):
            for parameter, gradient in zip(group, optimizer.fp32_groups_gradients[at]):
                yield names.get(parameter), gradient
            used = optimizer.fp32_groups_actual_gradients_flat[at].numel()
            yield PADDING, optimizer.fp32_groups_gradients_flat[at][used:]
    else:
        for parameter, name in names.items():
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                yield name, parameter.grad


def of_stages_1_and_2(optimizer) -> Iterator[NamedGradient]:
    """Of the parameters that wait in buckets."""
    for bucket in optimizer.ipg_buckets.values():
        for (group, index, _), gradient in zip(bucket.params, bucket.grads):
            yield optimizer.param_names.get(optimizer.bit16_groups[group][index]), gradient


def of_stage_3(optimizer) -> Iterator[NamedGradient]:
    """Of the parameters that wait in buckets."""
    for bucket in optimizer.ipg_buckets.values():
        for parameter in bucket.params:
            yield optimizer.param_names.get(parameter), parameter.grad
