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
from functools import cached_property, lru_cache

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
from .quantize import Scales, derive, measure, measured_bytes, mode_of, most_summable
from .tensor_codec import TensorCodec, frame_errors


@dataclass
class FramedPieces(ExchangingCodec):
    """Codec of the pieces that a rank sends to each rank, and of those that it gets: what is the same on all devices.

    Attributes:
        config: the settings of the call.
        device: where the tensors live.
        tensor, received: see ExchangingCodec.
        counters: see TensorCodec.
        link_gbps, carried_gbps: see `coding_for`.
        noise: random numbers of a stochastic quantizer, see `noise_for`.
    """

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

    def codec(self, tensor: CodedTensor, scales: Scales | None = None, first: int = 0) -> TensorCodec:
        """The codec of frames, of whose random numbers the first are those of block number `first`."""
        return codec_for(
            self.config,
            self.device,
            tensor,
            scales,
            counters=self.counters,
            link_gbps=self.link_gbps,
            carried_gbps=self.carried_gbps,
            noise=self.noise and self.noise.from_block(first),
        )


class PiecesCodec(FramedPieces):
    """Codec of pieces whose frames are coded one by one, while others travel.

    Args:
        cut: elements of a full frame, and whether coding and transfer overlap: see `Layout.of`.
        rank: this rank.
        given: see FramedPieces.
    """

    def __init__(self, cut: tuple[int, bool], rank: int, *given):
        super().__init__(*given)
        self._cut = cut
        self._rank = rank
        self._decoders: dict[int, TensorCodec] = {}  # by the rank that a piece comes from

    @property
    def frame_capacity(self) -> int:
        """Upper limit of a frame's bytes, whatever its values are."""
        lengths = {*self.layout.lengths, *self.received.layout.lengths}
        return max_update_bytes(max(self._layout(length).frame_elements for length in lengths), self._dtype.itemsize)

    def frames_from(self, rank: int) -> int:
        """How many frames this rank gets from `rank`."""
        length = self.received.layout.lengths[rank]
        return self._layout(length).frames if length else 0

    @cached_property
    def heads(self) -> tuple[list[Tensor], list[Tensor]]:
        """The heads of the pieces that go to each rank, and memory for those of the pieces that come.

        They must have come before a frame is decoded. Empty with kind lossless, for empty pieces, and for what stays.
        """
        sent = [self._measured(to) for to in range(len(self.layout.lengths))]
        nothing = self._empty_head(0)
        received = [
            nothing if rank == self._rank else self._empty_head(n)
            for rank, n in enumerate(self.received.layout.lengths)
        ]
        return sent, received

    def encode(self, to: int) -> Iterator[Tensor]:
        """The frames of the piece that goes to rank `to`, in order: each uint8, [bytes]."""
        elements = self.layout.segment(to)
        layout = self._layout(elements.stop - elements.start)
        if not layout.numel:
            return
        first = self.layout.steps_of(range(to, to + 1)).start
        scales = self._derived(self.heads[0][to], layout)
        codec = self.codec(CodedTensor(layout, source=Window(self.source[elements])), scales, first)
        yield from codec.encode_each((0, index) for index in range(layout.frames))

    def decode(self, source: int, index: int, frame: Tensor) -> None:
        """Take frame `index` of the piece from rank `source`. Values are in the output once `finish` returns.

        Raises FrameError if the frame is damaged.
        """
        if index == 0:
            elements = self.received.layout.segment(source)
            output = Window(self.received.output[elements])
            layout = self._layout(output.data.numel())
            scales = self._derived(self.heads[1][source], layout)
            self._decoders[source] = self.codec(CodedTensor(layout, output=output), scales)
        self._decoders[source].decode(0, index, frame)

    def finish(self) -> None:
        with frame_errors("a frame"):
            self.device.check()

    # ---------------------------------------------------------------- a piece

    @property
    def _dtype(self) -> torch.dtype:
        return self.source.data.dtype

    def _layout(self, length: int) -> Layout:
        """How both ends cut a piece."""
        return _layout_of_piece(length, *self._cut)

    def _measured(self, to: int) -> Tensor:
        """The head of the piece that goes to rank `to`."""
        source, quantizer = self.source[self.layout.segment(to)], self.config.quantizer
        if to == self._rank or not source.numel() or not self.quantizes:
            return self._empty_head(0)
        most = most_summable(quantizer, self._dtype, addends=1)
        with span("measure", source.nbytes, self.counters):
            return measure(self.device.backend, Window(source), self._layout(len(source)), range(1), quantizer, most)

    def _empty_head(self, length: int) -> Tensor:
        """Memory for the head of a piece of `length` elements."""
        dtype, quantizer = torch.bfloat16, self.config.quantizer
        if mode_of(quantizer, self._dtype) != "rms only":
            dtype = torch.float64 if self._dtype == torch.float64 else torch.float32
        nbytes = measured_bytes(self._layout(length), quantizer, self._dtype) if length and self.quantizes else 0
        return torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="cpu")

    def _derived(self, measured: Tensor, layout: Layout) -> Scales | None:
        """The quantization steps of a piece; None if its values are sent as they are. Both ends find the same."""
        if not self.quantizes:
            return None
        quantizer = self.config.quantizer
        derived = derive(measured, layout, quantizer, self._dtype, addends=1, backend=self.device.backend)
        return derived.scales if derived.is_worthwhile(self._dtype) else None


@lru_cache(maxsize=64)  # pieces are many, and often of one length
def _layout_of_piece(length: int, frame_elements: int, overlap: bool) -> Layout:
    return Layout.of((length,), frame_elements, overlap)
