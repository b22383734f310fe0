"""Codec of pieces that ranks send each other where nothing is summed, such as those of an all-to-all.

Nobody has to agree on quantization steps: a sender's own travel with its piece. A piece is a row of frames:

1. What `quantize.measure` returned for the piece, without loss. From these numbers sender and receiver derive the same
   quantization steps, or the same decision to send the values themselves. With kind lossless there is no such frame.
2. The values, in one or several frames, whose number follows from the elements of the piece.

An empty piece has no frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.format import CHUNK, Noise, chunks_of
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
        given: see FramedPieces.
    """

    def __init__(self, cut: tuple[int, bool], *given):
        super().__init__(*given)
        self._cut = cut
        self._heads = 1 if self.quantizes else 0  # frames of a piece before its values
        self._decoders: dict[int, TensorCodec] = {}  # by the rank that a piece comes from

    @property
    def frame_capacity(self) -> int:
        """Upper limit of a frame's bytes, whatever its values are."""
        values = max((self._layout(length).frame_elements for length in self._lengths), default=0)
        measured = max(map(self._measured_elements, self._lengths), default=0)
        return max(
            max_update_bytes(values, self._dtype.itemsize), max_update_bytes(measured, self._measured_dtype.itemsize)
        )

    def frames_from(self, rank: int) -> int:
        """How many frames this rank gets from `rank`."""
        length = self.received.layout.lengths[rank]
        return self._heads + self._layout(length).frames if length else 0

    def encode(self, to: int) -> Iterator[Tensor]:
        """The frames of the piece that goes to rank `to`, in order: each uint8, [bytes]."""
        elements = self.layout.segment(to)
        layout = self._layout(elements.stop - elements.start)
        if not layout.numel:
            return
        source, scales = Window(self.source[elements]), None
        if self._heads:
            with span("measure", source.data.nbytes, self.counters):
                most = most_summable(self.config.quantizer, self._dtype, addends=1)
                measured = measure(self.device.backend, source, layout, range(1), self.config.quantizer, most)
            yield self.codec(CodedTensor(_whole(measured), source=Window(measured))).encode(0, 0)
            scales = self._derived(measured, layout)
        first = self.layout.steps_of(range(to, to + 1)).start
        codec = self.codec(CodedTensor(layout, source=source), scales, first)
        yield from codec.encode_each((0, index) for index in range(layout.frames))

    def decode(self, source: int, index: int, frame: Tensor) -> None:
        """Take frame `index` of the piece from rank `source`. Values are in the output once `finish` returns.

        Raises FrameError if the frame is damaged.
        """
        elements = self.received.layout.segment(source)
        output = Window(self.received.output[elements])
        layout = self._layout(output.data.numel())
        if index == 0:
            scales = self._derived(self._read_head(source, layout, frame), layout) if self._heads else None
            self._decoders[source] = self.codec(CodedTensor(layout, output=output), scales)
        if index >= self._heads:
            self._decoders[source].decode(0, index - self._heads, frame)

    def finish(self) -> None:
        with frame_errors("a frame"):
            self.device.check()

    # ---------------------------------------------------------------- a piece

    @property
    def _dtype(self) -> torch.dtype:
        return self.source.data.dtype

    @property
    def _lengths(self) -> set[int]:
        """Elements of the pieces that there are."""
        return {*self.layout.lengths, *self.received.layout.lengths} - {0}

    def _layout(self, length: int) -> Layout:
        """How both ends cut a piece."""
        return Layout.of([length], *self._cut)

    def _measured_elements(self, length: int) -> int:
        """How many numbers are measured of a piece."""
        if not self._heads:
            return 0
        nbytes = measured_bytes(self._layout(length), self.config.quantizer, self._dtype)
        return nbytes // self._measured_dtype.itemsize

    @property
    def _measured_dtype(self) -> torch.dtype:
        if mode_of(self.config.quantizer, self._dtype) == "rms only":
            return torch.bfloat16
        return torch.float64 if self._dtype == torch.float64 else torch.float32

    def _derived(self, measured: Tensor, layout: Layout) -> Scales | None:
        """The quantization steps of a piece; None if its values are sent as they are. Both ends find the same."""
        quantizer = self.config.quantizer
        derived = derive(measured, layout, quantizer, self._dtype, addends=1, backend=self.device.backend)
        return derived.scales if derived.is_worthwhile(self._dtype) else None

    def _read_head(self, source: int, layout: Layout, frame: Tensor) -> Tensor:
        """What the sender measured of a piece. The next frame can't be decoded without it, so it is read at once."""
        count = self._measured_elements(layout.numel)
        measured = torch.empty(count, dtype=self._measured_dtype, device="cpu")
        with span("decode", frame.nbytes, self.counters), frame_errors(f"the first frame from rank {source}"):
            self.codec(CodedTensor(_whole(measured), output=Window(measured))).read(0, 0, frame)
        return measured


def _whole(tensor: Tensor) -> Layout:
    """The layout of a tensor that is one frame."""
    return Layout((tensor.numel(),), chunks_of(tensor.numel()) * CHUNK)
