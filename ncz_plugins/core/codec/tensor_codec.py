"""Codecs that write a tensor as frames, and read frames back: quantized or lossless.

Encoding a batch of frames, in `TensorCodec._encode`:

1. Take memory for the largest possible frame.
2. Write each frame: this rank's own values, plus what other ranks' frames hold (`_write`, which each codec has).
3. Add checksums, if asked for.
4. Keep the bytes that were written.

Decoding is one frame at a time, on a second thread if there is a core for it: `TensorCodec.decode`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.backend import Backend, Decoding, Sum, require_seals
from ...kernels.format import HEADER, HEADER_BYTES, Coder, Coding, DamagedFrame, Noise, max_frame_bytes
from ...kernels.lossless import max_lossless_bytes
from ...kernels.updates import decode_update, encode_update, max_update_bytes
from ..errors import ErrorTranslation, FrameError
from ..runtime.device import Device
from ..runtime.statistics import Counters
from ..runtime.trace import span
from .coded_tensor import Codec, CodedTensor
from .layout import Window
from .quantize import Scales

_CODER_NAMES = {coder.value: coder.name.lower() for coder in Coder}

FrameId = tuple[int, int]  # the number of a segment, and the number of a frame in that segment


class FrameSum(NamedTuple):
    """Frame to write: the sum of this rank's own values and of other ranks' frames.

    Attributes:
        segment, index: the frame's segment, and its number in that segment.
        frames: frames of other ranks to add; empty: this rank's values alone. In the schedule `direct` they are one of
            each other rank, beginning with the rank after this one.
    """

    segment: int
    index: int
    frames: Sequence[Tensor] = ()


def name_of(batch: list[FrameSum]) -> str:
    """The name of the frame in a batch, for error messages."""
    return f"frame {batch[0].index} of segment {batch[0].segment}" if len(batch) == 1 else "a frame"


class frame_errors(ErrorTranslation):
    """Context in which DamagedFrame becomes FrameError. Its subject names the frame."""

    __slots__ = ()

    def translated(self, error):
        if not isinstance(error, DamagedFrame):
            return None
        return FrameError(
            f"{self.subject} is damaged: {error}. "
            "All ranks must run the same version of ncz_plugins; otherwise suspect the network, the disk or memory."
        )


@dataclass
class TensorCodec(Codec):
    """Base class of the codecs that write frames.

    All methods raise FrameError for a damaged frame. On a GPU damage is found when the call ends, in `finish`.

    Attributes:
        device: where the tensors live.
        tensor: the tensors to encode and to decode into.
        coding: the coder, predictor and costs for frames that are written.
        checksum: write a checksum into each frame, and refuse frames without one.
        counters: receive the seconds spent on coding, and the number of frames by coder.
        sums_to_output: True if this codec has `decode_sum`.
        encodes_ahead: True if this codec has `encode_ahead`, as on a GPU.
    """

    sums_to_output = False
    encodes_ahead = False

    device: Device
    tensor: CodedTensor
    coding: Coding
    checksum: bool
    counters: Counters

    @property
    def backend(self) -> Backend:
        return self.device.backend

    @property
    @abstractmethod
    def frame_capacity(self) -> int:
        """Upper limit of a frame's bytes, whatever its values are."""

    def encode(self, segment: int, index: int, frames: Sequence[Tensor] = ()) -> Tensor:
        """Encode this rank's own values, plus those in the `frames` of other ranks, see `FrameSum`.

        Returns the frame: uint8, [bytes], as all methods that make frames do.
        """
        [frame] = self._encode([FrameSum(segment, index, frames)])
        return frame

    def encode_each(self, frame_ids: Iterable[FrameId]) -> Iterator[Tensor]:
        """Encode several frames of this rank's own values.

        On a GPU all frames are encoded together when the first one is asked for. On a CPU each frame is encoded when it
        is asked for.
        """
        return self._encode_each(FrameSum(segment, index) for segment, index in frame_ids)

    def sum_each(self, segment: int, frames: Iterable[list[Tensor]]) -> Iterator[Tensor]:
        """Add this rank's own values to all frames of a segment.

        On a GPU all of `frames` are taken before the first sum is returned. On a CPU they are taken one by one.

        Args:
            frames: for each frame of the segment, in order, the frames of other ranks to add, see `FrameSum`.
        """
        return self._encode_each(FrameSum(segment, index, each) for index, each in enumerate(frames))

    def _encode_each(self, wanted: Iterable[FrameSum]) -> Iterator[Tensor]:
        batches = [list(wanted)] if self.device.in_batches else ([each] for each in wanted)
        for batch in filter(None, batches):
            yield from self._encode(batch)

    def _encode(self, batch: list[FrameSum]) -> list[Tensor]:
        """Write the frames of a batch. Returns each one: uint8, [bytes]."""
        with span("encode", self._plain_bytes(batch), self.counters), frame_errors(name_of(batch)):
            # Sizes follow from the values, so each frame is written to memory for the largest possible one.
            buffers = [self.device.buffer(self.frame_capacity) for _ in batch]
            sizes = self._write(batch, buffers)
            if self.checksum:
                self.backend.seal_frames(buffers)
            frames = self.device.trimmed(buffers, self.sizes_on_host(sizes))

        # Count frames by coder. Only in host memory: to read a header on a GPU is to wait for it.
        for frame in frames:
            if frame.is_cpu:
                _, _, coder, *_ = HEADER.unpack_from(frame.numpy())
                name = _CODER_NAMES[coder]
                self.counters.coders[name] = self.counters.coders.get(name, 0) + 1
        return frames

    def decode(self, segment: int, index: int, frame: Tensor) -> None:
        """Write the values of `frame` to the output. They are there once `finish` returns."""

        def job() -> None:
            with span("decode", frame.nbytes, self.counters), frame_errors(f"frame {index} of segment {segment}"):
                self.read(segment, index, frame)

        self.device.submit(job)

    def finish(self) -> None:
        """Return once all encoding and decoding is done. Raises FrameError if a frame was damaged."""
        with frame_errors("a frame"):
            self.device.check()

    def sizes_on_host(self, sizes: Tensor | np.ndarray) -> list[int]:
        """Copy sizes of frames to the host, which waits for them."""
        return self.device.copy_to_host(sizes).tolist()

    def for_segments(self, segments: range) -> TensorCodec:
        return replace(self, tensor=self.tensor.for_segments(segments))

    def _plain_bytes(self, batch: list[FrameSum]) -> int:
        """Bytes of the values that a batch encodes."""
        elements = [self.layout.frame(each.segment, each.index) for each in batch]
        return sum(each.stop - each.start for each in elements) * self.source.data.itemsize

    def _await(self, frame: Tensor) -> None:
        """Wait for a received frame, and check its seal.

        For decoders that wait for the GPU themselves, without a time-out.
        """
        header = self.device.copy_to_host(frame[:HEADER_BYTES])
        if self.checksum:
            require_seals([header])

    @abstractmethod
    def _write(self, batch: list[FrameSum], buffers: list[Tensor]) -> Tensor | np.ndarray:
        """Write each frame of a batch to its buffer, without a checksum.

        Returns the bytes of each: int64, [len(batch)], on the device. Raises DamagedFrame.
        """

    @abstractmethod
    def read(self, segment: int, index: int, frame: Tensor) -> None:
        """Write the values of `frame` to the output, on this thread. Raises DamagedFrame."""


@dataclass
class QuantizingCodec(TensorCodec):
    """Codec that quantizes values, and adds their codes as integers.

    Attributes:
        scales: the quantization steps that all ranks share.
        noise: random numbers of a stochastic quantizer, beginning at the layout's first step; None: round to nearest.
    """

    sums_to_output = True

    scales: Scales
    noise: Noise | None = None

    @property
    def frame_capacity(self) -> int:
        return max_frame_bytes(self.layout.frame_elements)

    def decode_sum(self, segment: int, index: int, frames: list[Tensor]) -> None:
        """Add this rank's own values to those in all `frames`, and write the sum to the output.

        The sum is there once `finish` returns. This rank's frame must have been encoded before, as the output may share
        memory with the values.

        Args:
            frames: the frames of all other ranks.
        """

        def job() -> None:
            nbytes = sum(frame.nbytes for frame in frames)
            with span("decode", nbytes, self.counters), frame_errors(f"frame {index} of segment {segment}"):
                self.backend.decode_sum(*self._sum_to_decode(segment, index, frames), self.noise, self.checksum)

        self.device.submit(job)

    def for_segments(self, segments: range) -> QuantizingCodec:
        steps = self.layout.steps_of(segments)
        noise = self.noise and self.noise.from_block(steps.start)
        return replace(super().for_segments(segments), scales=self.scales[steps], noise=noise)

    def remainder(self, segments: range) -> Window:
        """Replace this rank's values by what quantization loses: each value minus the value of its code.

        Args:
            segments: the segments to replace.

        Returns `source`.
        """
        count = self.layout.frame_elements
        codes = torch.empty(count, dtype=torch.int32, device=self.source.data.device)
        decoded = torch.empty(count, dtype=self.source.data.dtype, device=codes.device)
        for segment in segments:
            for index in range(self.layout.frames):
                elements = self.layout.frame(segment, index)
                x, n = self.source[elements], elements.stop - elements.start
                steps = self.layout.frame_steps(segment, index)
                inverse_steps = self.scales.inverse_steps[steps]
                noise = self.noise and self.noise.from_block(steps.start)
                if n:
                    self.backend.quantize(x, inverse_steps, codes[:n], noise)
                    self.backend.dequantize(codes[:n], 1 / inverse_steps, decoded[:n])
                    x -= decoded[:n]
        return self.source

    def _write(self, batch, buffers):
        sums = []
        for (segment, index, frames), buffer in zip(batch, buffers):
            elements, steps = self.layout.frame(segment, index), self.layout.frame_steps(segment, index)
            sums.append(Sum(self.source[elements], self.scales.inverse_steps[steps], buffer, frames, steps.start))
        return self.backend.encode_sums(sums, self.coding, self.noise, self.checksum)

    def read(self, segment, index, frame):
        self.backend.decode_frames([self._frame_to_decode(segment, index, frame)], self.checksum)

    def _frame_to_decode(self, segment: int, index: int, frame: Tensor) -> Decoding:
        """What the kernels are told about a frame that is decoded to the output."""
        scales = self.scales.scales[self.layout.frame_steps(segment, index)]
        return Decoding(frame, scales, self.output[self.layout.frame(segment, index)])

    def _sum_to_decode(self, segment: int, index: int, frames: list[Tensor]) -> tuple[Sum, Tensor]:
        """What the kernels are told about a sum that is decoded to the output: the sum, and its scales."""
        elements, steps = self.layout.frame(segment, index), self.layout.frame_steps(segment, index)
        x, inverse_steps = self.source[elements], self.scales.inverse_steps[steps]
        return Sum(x, inverse_steps, self.output[elements], frames, steps.start), self.scales.scales[steps]


@dataclass
class LosslessCodec(TensorCodec):
    """Codec that keeps every bit.

    It adds floats as a plain collective does: one frame of each other rank in rank order, a single one when it comes.

    With a `base`, it sends only what has changed since a version that all ranks hold. The output holds that version,
    and decoding overwrites it with the new values.

    Attributes:
        divisor: the sum is divided by it.
        base: the version of this rank's own values, with the elements of `source`; None: all values are sent.
        own: with a base, segments of this rank. They are copied to the output, not decoded.
        whole: with a base, segments of which ranks hold different versions. All their values are sent.
    """

    divisor: float = 1
    base: Window | None = None
    own: range = range(0)
    whole: frozenset[int] = frozenset()

    @property
    def frame_capacity(self) -> int:
        itemsize = (self.source or self.output).data.element_size()
        count = self.layout.frame_elements
        return max_lossless_bytes(count, itemsize) if self.base is None else max_update_bytes(count, itemsize)

    def decode(self, segment: int, index: int, frame: Tensor) -> None:
        if segment not in self.own:
            return super().decode(segment, index, frame)
        elements = self.layout.frame(segment, index)
        if self.output[elements].data_ptr() != self.source[elements].data_ptr():
            self.output[elements].copy_(self.source[elements])

    def _write(self, batch, buffers):
        sizes = []
        for (segment, index, frames), buffer in zip(batch, buffers):
            elements = self.layout.frame(segment, index)
            values = self.source[elements]
            if frames:
                values = self._add(segment, frames, values)
            base = self.base[elements] if self._sends_changes(segment) else None
            sizes.append(encode_update(self.backend, values, base, self.coding, buffer))
        return torch.tensor(sizes, dtype=torch.int64, device="cpu")

    def _add(self, segment: int, frames: list[Tensor], own: Tensor) -> Tensor:
        """Add `own` and the values in `frames`. Half types are added in float32 and rounded once."""
        # With one frame of each other rank, this is the owner of the segment. Its rank is the segment's number, so
        # `before` is the first of `frames` that comes from a lower rank. For other frames any order does, as one rank
        # alone adds them.
        before = max(0, len(frames) - segment)
        total = None
        for frame in [*frames[before:], None, *frames[:before]]:
            values = own
            if frame is not None:
                values = torch.empty_like(own)
                self._await(frame)
                decode_update(self.backend, frame, None, values)
            if total is None:
                total = values.to(torch.promote_types(own.dtype, torch.float32), copy=True)
            else:
                total += values
        return total.to(own.dtype)

    def read(self, segment, index, frame):
        self._await(frame)
        out = self.output[self.layout.frame(segment, index)]
        decode_update(self.backend, frame, out if self._sends_changes(segment) else None, out)
        if self.divisor != 1:
            out /= self.divisor

    def _sends_changes(self, segment: int) -> bool:
        """Whether frames of a segment hold changes, rather than the values themselves."""
        return self.base is not None and segment not in self.whole
