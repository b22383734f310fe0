"""Codec of pieces that ranks send each other where nothing is summed, such as those of an all-to-all.

Nobody has to agree on quantization steps: a sender's own travel with its piece.

1. Its head is what `quantize.measure` returned, as it is. It travels while ranks compare their calls. From its numbers
   sender and receiver derive the same quantization steps, or the same decision to send the values themselves. With kind
   lossless there is none.
2. The values follow in one or several frames, whose number follows from the elements of the piece.

An empty piece has neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.format import Noise
from ...kernels.updates import max_update_bytes
from ..config import Config
from ..runtime.device import Device
from ..runtime.statistics import Counters
from ..runtime.trace import span
from .coded_tensor import CodedTensor, ExchangingCodec
from .from_config import codec_for
from .layout import Layout, Window
from .quantize import (
    Scales,
    derive,
    derive_at_once,
    measure,
    measured_bytes,
    measures_each_block,
    mode_of,
    most_summable,
    step_rule,
)
from .tensor_codec import TensorCodec, frame_errors


@dataclass
class FramedPieces(ExchangingCodec):
    """Codec of the pieces that a rank sends to each rank, and of those that it gets: what is the same on all devices.

    Attributes:
        rank: this rank.
        config: the settings of the call.
        device: where the tensors live.
        tensor, received: see ExchangingCodec.
        counters: see TensorCodec.
        link_gbps, carried_gbps: see `coding_for`.
        noise: random numbers of a stochastic quantizer, see `noise_for`.
    """

    rank: int
    config: Config
    device: Device
    tensor: CodedTensor
    received: CodedTensor
    counters: Counters
    link_gbps: float | None = None
    carried_gbps: float = 0.0
    noise: Noise | None = None

    @property
    def quantizes(self) -> bool:
        """Whether what is measured of a piece travels with it, and pieces are quantized if that serves."""
        return self.config.quantizer.kind != "lossless"

    def frame_counts(self, layout: Layout) -> list[int]:
        """Frames of each piece; none of what this rank keeps."""
        lengths = enumerate(layout.lengths)
        return [-(-length // layout.frame_elements) if rank != self.rank else 0 for rank, length in lengths]

    def codec(self, tensor: CodedTensor, scales: Scales | None = None) -> TensorCodec:
        """The codec of frames: it quantizes if there are scales."""
        return codec_for(
            self.config,
            self.device,
            tensor,
            scales,
            counters=self.counters,
            link_gbps=self.link_gbps,
            carried_gbps=self.carried_gbps,
            noise=self.noise,
        )


class PiecesCodec(FramedPieces):
    """Codec of pieces whose frames are coded one by one, while others travel."""

    @property
    def frame_capacity(self) -> int:
        """Upper limit of a frame's bytes, whatever its values are."""
        frame_elements = max(self.layout.frame_elements, self.received.layout.frame_elements)
        return max_update_bytes(frame_elements, self._dtype.itemsize)

    @cached_property
    def frames_from(self) -> list[int]:
        """How many frames this rank gets from each."""
        return self.frame_counts(self.received.layout)

    @property
    def heads(self) -> tuple[list[Tensor], list[Tensor]]:
        """The heads of the pieces that go to each rank, and memory for those of the pieces that come.

        They must have come before a frame is decoded. Empty with kind lossless, for empty pieces, and for what stays.
        """
        return self._going.each, self._coming.each

    def encode(self, to: int) -> Iterator[Tensor]:
        """The frames of the piece that goes to rank `to`, in order: each uint8, [bytes]."""
        for index in range(self.frame_counts(self.layout)[to]):
            yield self._encoders[to].encode(to, index)

    def decode(self, source: int, index: int, frame: Tensor) -> None:
        """Take frame `index` of the piece from rank `source`. Values are in the output once `finish` returns.

        Raises FrameError if the frame is damaged.
        """
        self._decoders[source].decode(source, index, frame)

    def finish(self) -> None:
        with frame_errors("a frame"):
            self.device.check()

    # ---------------------------------------------------------------- heads

    @property
    def _dtype(self) -> torch.dtype:
        return self.source.data.dtype

    @cached_property
    def _going(self) -> _Heads:
        layout, quantizer, heads = self.layout, self.config.quantizer, self._empty_heads(self.layout)
        pieces = [rank for rank, head in enumerate(heads.each) if head.numel()]
        most = most_summable(quantizer, self._dtype, addends=1)
        with span("measure", self.source.data.nbytes, self.counters):
            if heads.together is not None:
                heads.together.copy_(measure(self.device.backend, self.source, layout, pieces, quantizer, most))
                return heads
            for rank in pieces:
                alone, values = _alone(layout, rank), Window(self.source[layout.segment(rank)])
                heads.each[rank] = measure(self.device.backend, values, alone, range(1), quantizer, most)
        return heads

    @cached_property
    def _coming(self) -> _Heads:
        return self._empty_heads(self.received.layout)

    def _empty_heads(self, layout: Layout) -> _Heads:
        """Memory for the heads of pieces."""
        quantizer, counts = self.config.quantizer, self.frame_counts(layout)
        if self.quantizes and measures_each_block(quantizer, self._dtype):
            together = torch.zeros(layout.steps, dtype=torch.bfloat16, device="cpu")
            steps = [layout.steps_of(range(rank, rank + 1)) for rank in range(len(counts))]
            return _Heads([together[where if count else slice(0)] for where, count in zip(steps, counts)], together)
        dtype = torch.bfloat16
        if mode_of(quantizer, self._dtype) != "rms only":
            dtype = _number_of_steps(self._dtype)
        nbytes = [
            measured_bytes(_alone(layout, rank), quantizer, self._dtype) if count and self.quantizes else 0
            for rank, count in enumerate(counts)
        ]
        return _Heads([torch.empty(size // dtype.itemsize, dtype=dtype, device="cpu") for size in nbytes])

    # ---------------------------------------------------------------- what follows from heads

    @cached_property
    def _encoders(self) -> list[TensorCodec]:
        return self._codecs(self.tensor, self._going)

    @cached_property
    def _decoders(self) -> list[TensorCodec]:
        return self._codecs(self.received, self._coming)

    def _codecs(self, tensor: CodedTensor, heads: _Heads) -> list[TensorCodec]:
        """The codec of each piece, which follows from its head alone, so that both ends find the same."""
        layout, quantizer, backend = tensor.layout, self.config.quantizer, self.device.backend

        # The usual case: the steps of all pieces at once.
        if heads.together is not None:
            rule = step_rule(quantizer, self._dtype, addends=1)
            if derived := derive_at_once(heads.together, self._dtype, rule, backend):
                return [self.codec(tensor, derived.scales)] * len(heads.each)

        # Some pieces may be such that their values are sent as they are.
        exact, number = self.codec(tensor), _number_of_steps(self._dtype)
        scales = Scales(*torch.ones(2, layout.steps, dtype=number, device="cpu"))
        quantizing = self.codec(tensor, scales)
        codecs = [exact] * len(heads.each)
        for rank, head in enumerate(heads.each):
            if not head.numel():
                continue
            derived = derive(head, _alone(layout, rank), quantizer, self._dtype, addends=1, backend=backend)
            if derived.scales is not None and derived.is_worthwhile(self._dtype):
                codecs[rank], own = quantizing, scales[layout.steps_of(range(rank, rank + 1))]
                own.inverse_steps.copy_(derived.scales.inverse_steps)
                own.scales.copy_(derived.scales.scales)
        return codecs


class _Heads(NamedTuple):
    """Heads of the pieces that go to all ranks, or come from them.

    Attributes:
        each: the head of each piece; empty where there is none.
        together: the memory of all heads, a number for each quantization step; None if they consist of other numbers.
    """

    each: list[Tensor]
    together: Tensor | None = None


def _alone(layout: Layout, rank: int) -> Layout:
    """The layout of one piece."""
    return layout.for_segments(range(rank, rank + 1))


def _number_of_steps(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the quantization steps of values."""
    return torch.float64 if dtype == torch.float64 else torch.float32
