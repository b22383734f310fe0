"""Search for the parameters that DeepSpeed's reduced gradients belong to.

DeepSpeed copies gradients into buckets, cuts the buckets at the borders of partitions, and sorts the slices by process
group before it reduces them. The order of the backward pass decides where a slice goes. But every slice lies in the
memory of some parameter's gradient, so its address tells the name.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import Tensor

from ..core.training.muon import Gradient
from ..core.training.policy import ParameterSlice

PADDING = ""  # name of elements that belong to no parameter
NamedGradient = tuple[str | None, Tensor]  # a parameter's name, None if unknown, and its gradient in its shape


def parts_of(tensors: Iterable[Tensor], gradients: Iterable[NamedGradient]) -> tuple[list[ParameterSlice], int]:
    """Parameter slices that `tensors` consist of, in order, and how many elements belong to no known parameter.

    Args:
        tensors: contiguous. Each is one of `gradients` or lies in their memory.
        gradients: contiguous. All gradients that may be reduced now.
    """
    spans = sorted(
        ((each.data_ptr(), each.numel(), name, tuple(each.shape)) for name, each in gradients if each.numel()),
        key=itemgetter(0),
    )
    starts = [start for start, *_ in spans]
    parts, unknown = [], 0
    for tensor in tensors:
        address, left = tensor.data_ptr(), tensor.numel()
        while left:
            at = bisect_right(starts, address) - 1
            begin, numel, name, shape = spans[at] if at >= 0 else (address, 0, None, None)
            start = (address - begin) // tensor.element_size()
            if start >= numel:  # the address lies behind the nearest gradient
                parts.append(ParameterSlice(None, left))
                unknown += left
                break
            length = min(left, numel - start)
            part = ParameterSlice(name, length, start, numel, shape=shape)
            parts.append(_padding(length) if name is PADDING else part)
            unknown += length if name is None else 0
            address, left = address + length * tensor.element_size(), left - length
    return parts, unknown


def rank_major(parts: Sequence[ParameterSlice], ranks: int) -> list[ParameterSlice]:
    """Parameter slices in the order of `reduce_scatter_coalesced`: for each rank its padded share of each parameter."""
    shares = []
    for rank in range(ranks):
        for part in parts:
            share = -(-part.length // ranks)
            start = min(rank * share, part.length)
            length = min(share, part.length - start)
            if length:
                shares.append(part._replace(length=length, start=start, numel=part.length))
            if length < share:
                shares.append(_padding(share - length))
    return shares


def _padding(length: int) -> ParameterSlice:
    return ParameterSlice(None, length, numel=0)


def held_by_parts(engine) -> list[str]:
    """Names of parameters of which several parts of one model hold a copy, as one part for each pipeline stage.

    Each part averages its own copy's gradient over its replicas, beside other gradients. Rounding would make the copies
    differ, little by little.
    """
    tied = getattr(engine.module, "tied_comms", {})  # weights that this stage of a pipeline shares with others
    names = [f"tied_modules.{key}.{attribute}" for key in tied for attribute in tied[key]["weight_attr"]]
    # Under tensor parallelism, what is split is marked. To DeepSpeed a pipeline is model parallelism, too.
    if engine.mp_world_size > 1 and bwc_tensor_model_parallel_world_size(engine.mpu) > 1:
        names += [
            name
            for parameter, name in engine.param_names.items()
            if not is_model_parallel_parameter(parameter) and not is_moe_param(parameter)
        ]
    return list(dict.fromkeys(names))


def trained_by_muon(engine) -> list[Gradient]:
    """Gradients of the matrices that Muon trains, if it is the optimizer. DeepSpeed marks those of its own Muon."""
    found = []
    for parameter, name in engine.param_names.items():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO 3 may leave a rank nothing but this
        if len(shape) >= 2 and getattr(parameter, "use_muon", True):
            found.append((ParameterSlice(name, shape.numel(), shape=tuple(shape)), parameter.dtype))
    return found


# ------------------------------------------------------------------ the gradients that may be reduced now


def of_engine(engine) -> Iterator[NamedGradient]:
    """Gradients of all parameters of an engine without ZeRO."""
    names, optimizer = engine.param_names, engine.optimizer
    if hasattr(optimizer, "get_grads_for_reduction"):  # BF16_Optimizer accumulates in its own buffers
        for at, group in enumerate(optimizer.bf16_groups):
            for parameter, gradient in zip(group, optimizer.fp32_groups_gradients[at]):
                yield names.get(parameter), gradient.view(parameter.shape)
            used = optimizer.fp32_groups_actual_gradients_flat[at].numel()
            yield PADDING, optimizer.fp32_groups_gradients_flat[at][used:]
    else:
        for parameter, name in names.items():
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                yield name, parameter.grad


def of_stages_1_and_2(optimizer) -> Iterator[NamedGradient]:
    """Gradients in the buckets of a ZeRO 1 or 2 optimizer that are not reduced yet."""
    for bucket in optimizer.ipg_buckets.values():
        for (group, index, _), gradient in zip(bucket.params, bucket.grads):
            yield optimizer.param_names.get(optimizer.bit16_groups[group][index]), gradient


def of_stage_3(optimizer) -> Iterator[NamedGradient]:
    """Gradients in the buckets of a ZeRO 3 optimizer that are not reduced yet."""
    for bucket in optimizer.ipg_buckets.values():
        for parameter in bucket.params:
            yield optimizer.param_names.get(parameter), parameter.grad
