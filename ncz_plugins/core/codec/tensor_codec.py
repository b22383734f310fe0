"""Codecs that write a tensor as frames, and read frames back: quantized, lossless, or changes since a version."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.backend import Backend, Decoding, Sum, require_seals
from ...kernels.format import (
    HEADER,
    HEADER_BYTES,
    Coder,
    Coding,
    DamagedFrame,
    Noise,
    Predictor,
    max_frame_bytes,
)
from ...kernels.lossless import decode_floats, encode_floats, max_lossless_bytes
from ...kernels.updates import decode_update, encode_update, max_update_bytes
from ..config import Config
from ..errors import ErrorTranslation, FrameError
from ..runtime.device import Device
from ..runtime.statistics import Counters
from ..runtime.trace import span
from .coded_tensor import Codec, CodedTensor
from .layout import Window
from .quantize import Scales

# On a GPU, elements that are coded together. A larger batch would take several launches anyway.
BATCH_ELEMENTS = 1 << 24
_CODER_NAMES = {coder.value: coder.name.lower() for coder in Coder}

FrameId = tuple[int, int]  # the number of a segment, and the number of a frame in that segment


class FrameSum(NamedTuple):
    """Frame to write: the sum of this rank's own values and of other ranks' frames.

    Attributes:
        segment, index: the frame's segment, and its number in that segment.
        frames: frames of other ranks to add; empty: this rank's values alone.
    """

    segment: int
    index: int
    frames: list[Tensor]


def coding_for(config: Config, backend: Backend, link_gbps: float | None = None, carried_gbps: float = 0.0) -> Coding:
    """The coder, predictor and costs that `config` asks for.

    Args:
        link_gbps: the speed of the link in Gbit/s, used if `config` states none; None: unknown, 1 Gbit/s is assumed.
        carried_gbps: what calls have shown the link to carry, in Gbit/s, used if it is more; see `Transport.learn`.
    """
    gbps = max(config.transport.link_gbps or link_gbps or 1, carried_gbps)
    costs = backend.costs._replace(link=max(1, round(8000 / gbps)))
    if config.entropy.costs is not None and backend.name != "cuda":
        costs = costs._replace(**config.entropy.costs.model_dump())
    return Coding(Coder[config.entropy.coder.upper()], Predictor[config.entropy.predictor.upper()], costs)


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

    def encode(self, segment: int, index: int) -> Tensor:
        """Encode one frame of this rank's own values. Returns uint8, [bytes], as all methods that make frames do."""
        return self.sum(segment, index, [])

    def reduce(self, segment: int, index: int, frame: Tensor) -> Tensor:
        """Add this rank's own values to those in `frame`. Returns the frame of the sum."""
        return self.sum(segment, index, [frame])

    def sum(self, segment: int, index: int, frames: list[Tensor]) -> Tensor:
        """Add this rank's own values to those in all `frames`. Returns the frame of the sum.

        Args:
            frames: if there are several, one of each other rank, beginning with the rank after this one.
        """
        [frame] = self._encode([FrameSum(segment, index, frames)])
        return frame

    def encode_each(self, frame_ids: Iterable[FrameId]) -> Iterator[Tensor]:
        """Encode several frames of this rank's own values, see `encode`.

        On a GPU all frames are encoded together when the first one is asked for. On a CPU each frame is encoded when it
        is asked for.
        """
        return self._encode_each(FrameSum(segment, index, []) for segment, index in frame_ids)

    def sum_each(self, segment: int, frames: Iterable[list[Tensor]]) -> Iterator[Tensor]:
        """Add up all frames of a segment, see `sum`.

        On a GPU all of `frames` are taken before the first sum is returned. On a CPU they are taken one by one.

        Args:
            frames: for each frame of the segment, in order, the frames of other ranks to add.
        """
        return self._encode_each(FrameSum(segment, index, each) for index, each in enumerate(frames))

    def decode(self, segment: int, index: int, frame: Tensor) -> None:
        """Write the values of `frame` to the output. They are there once `finish` returns."""

        def job() -> None:
            with span("decode", frame.nbytes, self.counters), _frame_errors(f"frame {index} of segment {segment}"):
                self._read(segment, index, frame)

        self.device.submit(job)

    def finish(self) -> None:
        """Return once all encoding and decoding is done. Raises FrameError if a frame was damaged."""
        self.check()

    def check(self, *tensors: Tensor) -> list[Tensor]:
        """Do what `finish` does, and copy `tensors` to host memory with the same wait. Returns the copies."""
        with _frame_errors("a frame"):
            return self.device.check(*tensors)

    def sizes_on_host(self, sizes: Tensor | np.ndarray) -> list[int]:
        """Copy sizes of frames to the host, which waits for them."""
        return self.device.copy_to_host(sizes).tolist()

    def for_segments(self, segments: range) -> TensorCodec:
        return replace(self, tensor=self.tensor.for_segments(segments))

    def _encode_each(self, wanted: Iterable[FrameSum]) -> Iterator[Tensor]:
        batches = [list(wanted)] if self.device.in_batches else ([each] for each in wanted)
        for batch in filter(None, batches):
            yield from self._encode(batch)

    def _encode(self, batch: list[FrameSum]) -> list[Tensor]:
        """Write the frames of a batch. Returns each one: uint8, [bytes]."""
        with span("encode", self._plain_bytes(batch), self.counters), _frame_errors(_name_of(batch)):
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
    def _read(self, segment: int, index: int, frame: Tensor) -> None:
        """Write the values of `frame` to the output. Raises DamagedFrame."""


@dataclass
class Outcome:
    """Result of deriving quantization steps on a GPU, which the host learns when it next waits for the GPU.

    Attributes:
        on_device: the result as `derive_on_gpu` returns it: int64, on the GPU; None once the host has learned it.
        judge: takes the values of `on_device`. Returns the reason to go plain, or None.
        bypass: what `judge` returned; None before.
    """

    on_device: Tensor | None
    judge: Callable[[list[int]], object | None]
    bypass: object | None = None

    def learn(self, values: list[int]) -> None:
        """Take the values of `on_device`, now in host memory."""
        self.on_device, self.bypass = None, self.judge(values)


@dataclass
class QuantizingCodec(TensorCodec):
    """Codec that quantizes values, and adds their codes as integers.

    On a GPU frames may travel before the host learns that the call must go plain. From then on this codec writes empty
    frames and reads none. So all ranks finish the schedule alike, and the output does not change.

    Attributes:
        scales: the quantization steps that all ranks share.
        noise: random numbers of a stochastic quantizer, beginning at element 0 of the layout; None: round to nearest.
        outcome: on a GPU, whether `scales` can be used. None on a CPU, where that is known before.
        forecast_key: calls with the same key are expected to write frames of similar sizes.
    """

    sums_to_output = True

    scales: Scales
    noise: Noise | None = None
    outcome: Outcome | None = None
    forecast_key: str = ""

    def __post_init__(self):
        # On a GPU, frames and sums wait here until there are enough to decode together.
        self._frames_to_decode: list[Decoding] = []
        self._sums_to_decode: list[tuple[Sum, Tensor]] = []
        self._waiting_elements = 0
        self._sums_are_padded = False
        self._outcome_copy: Callable[[], Tensor] | None = None  # waits for a copy to the host that has begun
        self._is_checked = False  # whether all frames that were decoded are known to be undamaged

    @property
    def encodes_ahead(self) -> bool:
        return self.device.in_batches

    @property
    def frame_capacity(self) -> int:
        return max_frame_bytes(self.layout.frame_elements)

    @property
    def bypass(self) -> object | None:
        return self.outcome and self.outcome.bypass

    def decode(self, segment: int, index: int, frame: Tensor) -> None:
        self._is_checked = False
        if self.bypass:
            return
        if self.device.in_batches:
            self._frames_to_decode.append(self._decoding(segment, index, frame))
            self._decode_if_enough(self._frames_to_decode[-1].out)
        else:
            super().decode(segment, index, frame)

    def decode_sum(self, segment: int, index: int, frames: list[Tensor], padded: bool = False) -> None:
        """Add this rank's own values to those in all `frames`, and write the sum to the output.

        The sum is there once `finish` returns. This rank's frame must have been encoded before, as the output may share
        memory with the values.

        Args:
            frames: the frames of all other ranks.
            padded: True if each of `frames` is followed by other bytes, or cut off. A sum with a frame that was cut off
                must be asked for again. Either all or no sums of a call on a GPU are padded.
        """
        self._is_checked = False
        self._sums_are_padded = padded
        if self.bypass:
            return
        out = self.output[self.layout.frame(segment, index)]
        scales = self.scales.scales[self.layout.frame_steps(segment, index)]
        wanted = self._sum_of(FrameSum(segment, index, frames), out)
        if self.device.in_batches:
            self._sums_to_decode.append((wanted, scales))
            self._decode_if_enough(out)
            return

        def job() -> None:
            nbytes = sum(frame.nbytes for frame in frames)
            with span("decode", nbytes, self.counters), _frame_errors(f"frame {index} of segment {segment}"):
                self.backend.decode_sum(wanted, scales, self.noise, self.checksum)

        self.device.submit(job)

    def finish(self) -> None:
        if not self._is_checked:
            self.check()

    def check(self, *tensors: Tensor) -> list[Tensor]:
        self._decode_waiting()
        copies = super().check(*tensors)
        self._is_checked = True
        return copies

    def encode_ahead(self, frame_ids: list[FrameId], buffers: list[Tensor], tell_outcome: bool) -> Tensor:
        """Encode frames of this rank's own values on a GPU, without a wait of the host.

        Args:
            buffers: memory for each frame, uint8, of at least `frame_capacity` bytes.
            tell_outcome: begin to copy the outcome to the host, once the frames are queued.

        Returns the bytes of each frame: int64, [len(frame_ids)], on the GPU.
        """
        batch = [FrameSum(*frame_id, []) for frame_id in frame_ids]
        with span("encode", self._plain_bytes(batch), self.counters), _frame_errors(_name_of(batch)):
            sizes = self._write(batch, buffers)
            if self.checksum:
                self.backend.seal_frames(buffers)
        if tell_outcome and self._unlearned is not None and self._outcome_copy is None:
            self._outcome_copy = self.device.start_copy_to_host(self._unlearned)
        return sizes

    def sizes_on_host(self, sizes: Tensor) -> list[int]:
        if self._unlearned is None:
            return super().sizes_on_host(sizes)
        # One wait for both the sizes and the outcome.
        values = self.device.copy_to_host(torch.cat([sizes, self._unlearned])).tolist()
        self.outcome.learn(values[sizes.numel() :])
        return values[: sizes.numel()]

    def for_segments(self, segments: range) -> QuantizingCodec:
        start = self.layout.elements(segments).start
        noise = self.noise and self.noise.from_element(start)
        return replace(super().for_segments(segments), scales=self.scales[self.layout.steps_of(segments)], noise=noise)

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
                inverse_steps = self.scales.inverse_steps[self.layout.frame_steps(segment, index)]
                noise = self.noise and self.noise.from_element(elements.start)
                if n:
                    self.backend.quantize(x, inverse_steps, codes[:n], noise)
                    self.backend.dequantize(codes[:n], 1 / inverse_steps, decoded[:n])
                    x -= decoded[:n]
        return self.source

    @property
    def _unlearned(self) -> Tensor | None:
        """The outcome on the GPU, if the host has yet to learn it."""
        return self.outcome and self.outcome.on_device

    def _decode_if_enough(self, out: Tensor) -> None:
        self._waiting_elements += out.numel()
        if self._waiting_elements >= BATCH_ELEMENTS:
            self._decode_waiting()

    def _decode_waiting(self) -> None:
        """On a GPU, decode the frames and sums that wait, unless the call must go plain."""
        self._waiting_elements = 0
        if self._unlearned is not None:
            outcome = self._outcome_copy or self.device.start_copy_to_host(self._unlearned)
            self.outcome.learn(outcome().tolist())
        decodings, self._frames_to_decode = self._frames_to_decode, []
        if decodings and not self.bypass:
            with span("decode", sum(each.frame.nbytes for each in decodings), self.counters):
                self.backend.decode_frames(decodings, self.checksum)
        sums, self._sums_to_decode = self._sums_to_decode, []
        if sums and not self.bypass:
            with span("decode", sum(frame.nbytes for each, _ in sums for frame in each.frames), self.counters):
                self.backend.decode_sums(*zip(*sums), self.noise, self.checksum, padded=self._sums_are_padded)

    def _encode(self, batch: list[FrameSum]) -> list[Tensor]:
        # If the host learns meanwhile that the call must go plain, all frames are written again, and are empty.
        bypass = self.bypass
        frames = super()._encode(batch)
        return frames if self.bypass is bypass else super()._encode(batch)

    def _write(self, batch, buffers):
        if self.bypass:
            nothing = self.source.data[:0]
            empty = [Sum(nothing, self.scales.inverse_steps[:0], buffer) for buffer in buffers]
            return self.backend.encode_sums(empty, self.coding)
        sums = [self._sum_of(each, buffer) for each, buffer in zip(batch, buffers)]
        return self.backend.encode_sums(sums, self.coding, self.noise, self.checksum)

    def _read(self, segment, index, frame):
        self.backend.decode_frames([self._decoding(segment, index, frame)], self.checksum)

    def _sum_of(self, wanted: FrameSum, out: Tensor) -> Sum:
        """The kernels' description of a sum that is written to `out`."""
        elements = self.layout.frame(wanted.segment, wanted.index)
        inverse_steps = self.scales.inverse_steps[self.layout.frame_steps(wanted.segment, wanted.index)]
        return Sum(self.source[elements], inverse_steps, out, wanted.frames, elements.start)

    def _decoding(self, segment: int, index: int, frame: Tensor) -> Decoding:
        """The kernels' description of a frame that is decoded to the output."""
        scales = self.scales.scales[self.layout.frame_steps(segment, index)]
        return Decoding(frame, scales, self.output[self.layout.frame(segment, index)])


@dataclass
class LosslessCodec(TensorCodec):
    """Codec that keeps floats as they are, and adds floats as a plain collective does.

    Several frames are added in rank order, a single one when it comes.

    Attributes:
        divisor: the sum is divided by it.
    """

    divisor: float = 1

    @property
    def frame_capacity(self) -> int:
        window = self.source or self.output
        return max_lossless_bytes(self.layout.frame_elements, window.data.element_size())

    def _write(self, batch, buffers):
        sizes = []
        for (segment, index, frames), buffer in zip(batch, buffers):
            own = self.source[self.layout.frame(segment, index)]
            values = self._add(segment, frames, own) if frames else own
            sizes.append(encode_floats(self.backend, values, self.coding, buffer))
        return torch.tensor(sizes, dtype=torch.int64, device="cpu")

    def _add(self, segment: int, frames: list[Tensor], own: Tensor) -> Tensor:
        """Add `own` and the values in `frames`. Half types are added in float32 and rounded once."""
        # Only the owner of a segment adds several frames. Its rank is the segment's number, so `before` is the first
        # of `frames` that comes from a lower rank. For a single frame the order makes no difference.
        before = max(0, len(frames) - segment)
        total = None
        for frame in [*frames[before:], None, *frames[:before]]:
            values = own
            if frame is not None:
                values = torch.empty_like(own)
                self._decode_floats(frame, values)
            if total is None:
                total = values.to(torch.promote_types(own.dtype, torch.float32), copy=True)
            else:
                total += values
        return total.to(own.dtype)

    def _read(self, segment, index, frame):
        out = self.output[self.layout.frame(segment, index)]
        self._decode_floats(frame, out)
        if self.divisor != 1:
            out /= self.divisor

    def _decode_floats(self, frame: Tensor, out: Tensor) -> None:
        self._await(frame)
        decode_floats(self.backend, frame, out)


@dataclass
class UpdatingCodec(TensorCodec):
    """Codec that sends what has changed, without loss, since a version that all ranks hold.

    The output holds that version, and decoding overwrites it with the new values.

    Attributes:
        base: the version of this rank's own values, with the elements of `source`.
        own: segments of this rank. They are copied to the output, not decoded.
        whole: segments of which ranks hold different versions. They are sent as they are.
    """

    base: Window
    own: range
    whole: frozenset[int]

    @property
    def frame_capacity(self) -> int:
        return max_update_bytes(self.layout.frame_elements, self.output.data.element_size())

    def decode(self, segment: int, index: int, frame: Tensor) -> None:
        if segment not in self.own:
            return super().decode(segment, index, frame)
        elements = self.layout.frame(segment, index)
        if self.output[elements].data_ptr() != self.source[elements].data_ptr():
            self.output[elements].copy_(self.source[elements])

    def _write(self, batch, buffers):
        sizes = []
        for each, buffer in zip(batch, buffers):
            elements = self.layout.frame(each.segment, each.index)
            base = None if each.segment in self.whole else self.base[elements]
            sizes.append(encode_update(self.backend, self.source[elements], base, self.coding, buffer))
        return torch.tensor(sizes, dtype=torch.int64, device="cpu")

    def _read(self, segment, index, frame):
        self._await(frame)
        out = self.output[self.layout.frame(segment, index)]
        decode_update(self.backend, frame, None if segment in self.whole else out, out)


def codec_for(
    config: Config,
    device: Device,
    tensor: CodedTensor,
    scales: Scales | None,
    *,
    counters: Counters | None = None,
    link_gbps: float | None = None,
    carried_gbps: float = 0.0,
    noise: Noise | None = None,
    divisor: float = 1,
    forecast_key: str = "",
    outcome: Outcome | None = None,
) -> TensorCodec:
    """The codec that `config` asks for: QuantizingCodec or LosslessCodec.

    Args:
        scales: the quantization steps, already divided by `divisor`; None: LosslessCodec.
        counters: see TensorCodec; None: nobody reads them.
        link_gbps, carried_gbps: see `coding_for`.
        noise: random numbers of a stochastic quantizer, see `noise_for`; None: those of call 0, unshifted.
        divisor: see LosslessCodec.
        forecast_key, outcome: see QuantizingCodec.
    """
    counters = Counters() if counters is None else counters
    common = (
        device,
        tensor,
        coding_for(config, device.backend, link_gbps, carried_gbps),
        config.entropy.checksum,
        counters,
    )
    if scales is None:
        return LosslessCodec(*common, divisor)
    noise = noise_for(config, call=0, addend=0, addends=1) if noise is None else noise
    return QuantizingCodec(*common, scales, noise, outcome, forecast_key)


def noise_for(config: Config, call: int, addend: int, addends: int) -> Noise | None:
    """Random numbers by which a stochastic quantizer rounds, different in each call. None for other quantizers.

    Ranks whose codes are added use the same numbers, shifted by equal parts of their range (stratified sampling). Where
    one rank rounds up another one rounds down, so errors of similar values cancel in the sum.

    Args:
        call: number of the call.
        addend: number of this rank's values among the `addends` that are summed, from 0.
    """
    if config.quantizer.kind_in_effect != "stochastic":
        return None
    return Noise(config.quantizer.seed, call % 2**32, (addend << 32) // addends % 2**32)


def _name_of(batch: list[FrameSum]) -> str:
    """The name of the frame in a batch, for error messages."""
    return f"frame {batch[0].index} of segment {batch[0].segment}" if len(batch) == 1 else "a frame"


class _frame_errors(ErrorTranslation):
    """Context in which DamagedFrame becomes FrameError. Its subject names the frame."""

    __slots__ = ()

    def translated(self, error):
        if not isinstance(error, DamagedFrame):
            return None
        return FrameError(
            f"{self.subject} is damaged: {error}. "
            "All ranks must run the same version of ncz_plugins; otherwise suspect the network, the disk or memory."
        )
