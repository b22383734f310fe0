"""Collectives that autograd goes through, as functions: `functional.all_to_all_single(tokens, ...)`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.communicator import Communicator

__all__ = ["all_to_all_single"]


@torch.compiler.disable
def all_to_all_single(
    input: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    communicator: Communicator,
    role: str | None = "activation",
    name: str | None = None,
) -> Tensor:
    """Send some rows of `input` to each rank, and return the rows that come from each, in rank order.

    The gradient of the output goes back the same way: the backward pass exchanges it with the split sizes swapped, by a
    call of the same role. So both directions are compressed if the configuration's `roles` lists the role, or neither.
    All ranks must need the gradient, or none.

    Args:
        input: at least 1-D; dtypes as of `Communicator.all_reduce`.
        output_split_sizes: see `Communicator.all_to_all_single`.
        input_split_sizes: see `Communicator.all_to_all_single`.
        communicator: the ranks.
        role: "gradient", "parameter" or "activation"; None: compressed whatever the configuration says.
        name: by which policies know the tensor.

    Returns: contiguous, [rows that come, *input.shape[1:]], on the device of `input` and of its dtype.

    Raises what `Communicator.all_to_all_single` does, in the backward pass too.
    """
    sizes = (None if each is None else tuple(map(int, each)) for each in (output_split_sizes, input_split_sizes))
    return _AllToAll.apply(input, *sizes, communicator, role, name)


class _AllToAll(torch.autograd.Function):
    """The exchange as autograd sees it. The backward pass applies it again, so it can be differentiated twice."""

    @staticmethod
    def forward(ctx, input: Tensor, received, sent, communicator: Communicator, role: str | None, name: str | None):
        ctx.given = sent, received, communicator, role, name
        output = input.new_empty(input.shape if received is None else (sum(received), *input.shape[1:]))
        communicator.all_to_all_single(output, input, received, sent, role=role, name=name)
        return output

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return _AllToAll.apply(gradient, *ctx.given), None, None, None, None, None
