"""How the tensors of calls are cut into segments and frames."""

from __future__ import annotations

from torch import Tensor

from .codec.fixed_rate import equal_rows
from .codec.layout import Layout
from .config import Config

_WHOLE_BYTES = 256 << 10  # of a tensor: two frames cost more than it takes to code one while the other one travels


def frames_of(tensor: Tensor, config: Config, on_gpu: bool | None = None) -> tuple[int, bool]:
    """How segments of `tensor` are cut into frames: elements of a full one, and `overlap`, see `Layout.of`.

    Args:
        on_gpu: whether it is, or stands for one that is; None: as it is.
    """
    transport, on_gpu = config.transport, tensor.is_cuda if on_gpu is None else on_gpu
    elements = transport.frame_bytes_in_effect(on_gpu) // tensor.element_size()
    return elements, not on_gpu and not transport.has_fast_link


def layout_of_sum(tensor: Tensor, segments: int, config: Config, on_gpu: bool | None = None) -> Layout:
    """How a tensor that is summed over ranks is cut: usually into as many segments as there are ranks."""
    elements, overlap = frames_of(tensor, config, on_gpu)
    if config.quantizer.bits is not None:
        return equal_rows(tensor.numel(), segments, elements, overlap)
    return Layout.split(tensor.numel(), segments, elements, config.quantizer.block_in_effect, overlap)


def adds_up_whole(tensor: Tensor, world_size: int, config: Config, on_gpu: bool | None = None) -> bool:
    """Whether two ranks send each other all of `tensor` as one segment, see `direct`.

    Codes are the same in any layout. On a GPU each frame takes an operation of NCCL, so there the fewest are best.

    Args:
        on_gpu: see `frames_of`.
    """
    on_gpu = tensor.is_cuda if on_gpu is None else on_gpu
    return world_size == 2 and config.quantizer.kind != "lossless" and (on_gpu or tensor.nbytes <= _WHOLE_BYTES)


def layout_of_parts(segment: Tensor, world_size: int, config: Config, on_gpu: bool | None = None) -> Layout:
    """How a tensor is cut that has such a part for each rank."""
    return Layout.of([segment.numel()] * world_size, *frames_of(segment, config, on_gpu))
