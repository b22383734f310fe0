"""Frames of one tensor, for one collective call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
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

CODED_TOGETHER = 1 << 24  # elements, on a GPU: more take further launches anyway, and others are under way meanwhile
_CODER_NAMES = {coder.value: coder.name.lower() for coder in Coder}


class FrameSum(NamedTuple):
    """A frame to make: of this rank's values of frame `index` of a segment, and of other ranks' in `frames`."""

    segment: int
    index: int
    frames: list[Tensor]


def coding_for(config: Config, backend: Backend, link_gbps: float | None = None, carried_gbps: float = 0.0) -> Coding:
    """How `config` wants codes to be written.

    Args:
        link_gbps: what is known of the link, in Gbit/s, for where `config` leaves that open.
        carried_gbps: what calls tell of it, if that is more; see `Transport.learn`.
    """
    gbps = max(config.transport.link_gbps or link_gbps or 1, carried_gbps)
    costs = backend.costs._replace(link=max(1, round(8000 / gbps)))
    if config.entropy.costs is not None and backend.name != "cuda":
        costs = costs._replace(**config.entropy.costs.model_dump())
    return Coding(Coder[config.entropy.coder.upper()], Predictor[config.entropy.predictor.upper()], costs)


@dataclass
class TensorCodec(Codec):
    """Encodes into frames, and decodes them.

    FrameError says what is damaged. On a GPU that shows when a call is over: see `finish`.

    Attributes:
        device: where all of these tensors live.
        coding: how codes are written.
        checksum: whether frames get a checksum, and must come with one.
        counters: takes the seconds spent in coding.
        sums_to_output: whether it has `decode_sum`.
        encodes_ahead: whether it has `encode_ahead`, as on a GPU.
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
        """Bytes that no frame of this tensor can exceed."""

    def encode(self, segment: int, index: int) -> Tensor:
        """The frame of this rank's own values."""
        return self.sum(segment, index, [])

    def reduce(self, segment: int, index: int, frame: Tensor) -> Tensor:
        """The frame of the values in `frame` plus this rank's own."""
        return self.sum(segment, index, [frame])

    def sum(self, segment: int, index: int, frames: list[Tensor]) -> Tensor:
        """The frame of the values in all `frames` plus this rank's own.

        Args:
            frames: if there are several, those of all other ranks, the rank after this one first.
        """
        [frame] = self._sums([FrameSum(segment, index, frames)])
        return frame

    def encode_each(self, places: Iterable[tuple[int, int]]) -> Iterator[Tensor]:
        """As `encode` of each (segment, index).

        On a GPU all `places` are taken before the first frame is there, as they are encoded together; on a CPU one at
        a time, as its frame is asked for. So it is with `sum_each`.
        """
        return self._sums_in_batches(FrameSum(segment, index, []) for segment, index in places)

    def sum_each(self, segment: int, frames: Iterable[list[Tensor]]) -> Iterator[Tensor]:
        """As `sum`, for one frame of a segment after the other."""
        return self._sums_in_batches(FrameSum(segment, index, each) for index, each in enumerate(frames))

    def decode(self, segment: int, index: int, frame: Tensor) -> None:
        """Write the values of a finished frame to the output, where they stand once `finish` returns."""
        self.device.submit(partial(self._decode, segment, index, frame))

    def finish(self) -> None:
        """Return once all that was asked for is done. Raises FrameError for damage that did not show before."""
        self.check()

    def check(self, *tensors: Tensor) -> list[Tensor]:
        """`finish`, and see tensors on the device with the same wait."""
        with _naming("a frame"):
            return self.device.check(*tensors)

    def seen(self, sizes: Tensor | np.ndarray) -> list[int]:
        """Sizes of frames, as the host knows them."""
        return self.device.seen(sizes).tolist()

    def _sums_in_batches(self, wanted: Iterable[FrameSum]) -> Iterator[Tensor]:
        batches = [list(wanted)] if self.device.in_batches else ([each] for each in wanted)
        for batch in filter(None, batches):
            yield from self._sums(batch)

    def _sums(self, batch: list[FrameSum]) -> list[Tensor]:
        with span("encode", self._nbytes(batch), self.counters), _naming(_name(batch)):
            buffers = [self.device.buffer(self.frame_capacity) for _ in batch]
            frames = self.device.trimmed(buffers, self.seen(self._written(batch, buffers)))
        for frame in frames:
            self._count(frame)
        return frames

    def _written(self, batch: list[FrameSum], buffers: list[Tensor]) -> Tensor | np.ndarray:
        """Write finished frames to buffers. Returns their sizes."""
        sizes = self._write_sums(batch, buffers)
        if self.checksum:
            self.backend.seal_frames(buffers)
        return sizes

    def _nbytes(self, batch: list[FrameSum]) -> int:
        """Of the values that a batch is made of."""
        elements = [self.layout.frame(each.segment, each.index) for each in batch]
        return sum(each.stop - each.start for each in elements) * self.source.data.itemsize

    def _await(self, frame: Tensor) -> None:
        """Wait for a frame within the time-out, before it is decoded by what waits without one; and check its seal."""
        header = self.device.seen(frame[:HEADER_BYTES])
        if self.checksum:
            require_seals([header])

    def _decode(self, segment: int, index: int, frame: Tensor) -> None:
        with span("decode", frame.nbytes, self.counters), _naming(f"frame {index} of segment {segment}"):
            self._read(segment, index, frame)

    def part(self, segments: range) -> TensorCodec:
        return replace(self, tensor=self.tensor.part(segments))

    @abstractmethod
    def _write_sums(self, batch: list[FrameSum], buffers: list[Tensor]) -> Tensor | np.ndarray:
        """As `sum`, each written to a buffer. Returns the bytes of each, as `Backend.encode_sums` does.

        Raises DamagedFrame.
        """

    @abstractmethod
    def _read(self, segment: int, index: int, frame: Tensor) -> None:
        """As `decode`. Raises DamagedFrame."""

    def _count(self, frame: Tensor) -> None:
        """Count a frame by its coder, in host memory only: to look at one on a GPU is to wait for it."""
        if frame.is_cpu:
            _, _, coder, *_ = HEADER.unpack_from(frame.numpy())
            name = _CODER_NAMES[coder]
            self.counters.coders[name] = self.counters.coders.get(name, 0) + 1


@dataclass
class Outcome:
    """Whether there are quantization steps for a tensor on a GPU, which the host learns when it next waits for it.

    Attributes:
        unseen: int64, on the device, as `derive_on_gpu` returns it; None once the host has seen it.
        judge: takes the values of `unseen`. Returns the reason to go plain, or None.
        bypass: that reason.
    """

    unseen: Tensor | None
    judge: Callable[[list[int]], object | None]
    bypass: object | None = None

    def learn(self, seen: list[int]) -> None:
        """Take the values of `unseen`."""
        self.unseen, self.bypass = None, self.judge(seen)


@dataclass
class QuantizingCodec(TensorCodec):
    """Adds codes, as integers.

    On a GPU frames may travel before the host learns that the call must go plain. From then on this codec writes empty
    frames and reads none. So the schedule comes to its end on all ranks alike, and the output stays as it was.

    Attributes:
        scales: the quantization steps that all ranks share.
        noise: for the stochastic quantizer; where it is said to begin is the start of the layout.
        outcome: on a GPU, whether `scales` can be used. None on a CPU, where that is known before.
        kind: what its call has in common with those that are expected to go alike.
    """

    sums_to_output = True

    scales: Scales
    noise: Noise | None = None
    outcome: Outcome | None = None
    kind: str = ""

    def __post_init__(self):
        # What waits for others, to be decoded together.
        self._decodings: list[Decoding] = []
        self._sums_to_decode: list[tuple[Sum, Tensor]] = []
        self._waiting = 0  # elements of these
        self._seeing: Callable[[], Tensor] | None = None  # gives the host's copy of the outcome, which is on its way
        self._is_checked = False  # all that was asked for
        self._is_padded = False  # what waits to be added up

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
            self._decodings.append(self._decoding(segment, index, frame))
            self._decode_if_enough(self._decodings[-1].out)
        else:
            super().decode(segment, index, frame)

    def finish(self) -> None:
        if not self._is_checked:
            self.check()

    def check(self, *tensors: Tensor) -> list[Tensor]:
        self._decode_batch()
        seen = super().check(*tensors)
        self._is_checked = True
        return seen

    def encode_ahead(self, places: list[tuple[int, int]], buffers: list[Tensor], tell_outcome: bool) -> Tensor:
        """Write frames of this rank's own values, on a GPU, whose sizes the host does not wait for.

        Args:
            places: (segment, index) of each.
            buffers: memory for each, of at least `frame_capacity`.
            tell_outcome: then begin to copy the outcome to the host.

        Returns the bytes of each: int64, [len(places)], on the device.
        """
        batch = [FrameSum(*place, []) for place in places]
        with span("encode", self._nbytes(batch), self.counters), _naming(_name(batch)):
            sizes = self._written(batch, buffers)
        if tell_outcome and self._unseen is not None and self._seeing is None:
            self._seeing = self.device.start_seeing(self._unseen)
        return sizes

    def _decode_if_enough(self, last: Tensor) -> None:
        self._waiting += last.numel()
        if self._waiting >= CODED_TOGETHER:
            self._decode_batch()

    def _decode_batch(self) -> None:
        """Decode what waits for others."""
        self._waiting = 0
        if self._unseen is not None:
            seeing = self._seeing or self.device.start_seeing(self._unseen)
            self.outcome.learn(seeing().tolist())
        decodings, self._decodings = self._decodings, []
        if decodings and not self.bypass:
            with span("decode", sum(each.frame.nbytes for each in decodings), self.counters):
                self.backend.decode_frames(decodings, self.checksum)
        sums, self._sums_to_decode = self._sums_to_decode, []
        if sums and not self.bypass:
            with span("decode", sum(frame.nbytes for each, _ in sums for frame in each.frames), self.counters):
                self.backend.decode_sums(*zip(*sums), self.noise, self.checksum, padded=self._is_padded)

    def part(self, segments: range) -> QuantizingCodec:
        start = self.layout.elements(segments).start
        noise = self.noise and self.noise.from_element(start)
        return replace(super().part(segments), scales=self.scales[self.layout.steps_of(segments)], noise=noise)

    def decode_sum(self, segment: int, index: int, frames: list[Tensor], padded: bool = False) -> None:
        """Write the values of all `frames` plus this rank's own to the output, where they stand once `finish` returns.

        Its own frames must have been encoded: the output may be the memory that they come from.

        Args:
            padded: for all calls on a GPU alike: whether `frames` are memory that begins with each. The sum of one that
                does not fit must be asked for again.
        """
        self._is_checked = False
        self._is_padded = padded
        if self.bypass:
            return
        scales = self.scales.scales[self.layout.frame_steps(segment, index)]
        wanted = self._sum_of(FrameSum(segment, index, frames), self.output[self.layout.frame(segment, index)])
        if self.device.in_batches:
            self._sums_to_decode.append((wanted, scales))
            self._decode_if_enough(wanted.out)
        else:
            self.device.submit(partial(self._decode_sum, wanted, scales, f"frame {index} of segment {segment}"))

    def _decode_sum(self, wanted: Sum, scales: Tensor, name: str) -> None:
        nbytes = sum(frame.nbytes for frame in wanted.frames)
        with span("decode", nbytes, self.counters), _naming(name):
            self.backend.decode_sum(wanted, scales, self.noise, self.checksum)

    def remainder(self, segments: range) -> Window:
        """This rank's own values of some segments less what their codes stand for, in place of these values."""
        count = self.layout.frame_elements
        codes = torch.empty(count, dtype=torch.int32, device=self.source.data.device)
        meant = torch.empty(count, dtype=self.source.data.dtype, device=codes.device)
        for segment in segments:
            for index in range(self.layout.frames):
                x, inverse_steps = self._own(segment, index)
                first = self.layout.frame(segment, index).start
                noise = self.noise and self.noise.from_element(first)
                if x.numel():
                    self.backend.quantize(x, inverse_steps, codes[: x.numel()], noise)
                    self.backend.dequantize(codes[: x.numel()], 1 / inverse_steps, meant[: x.numel()])
                    x -= meant[: x.numel()]
        return self.source

    def _own(self, segment: int, index: int) -> tuple[Tensor, Tensor]:
        """This rank's values of one frame, and what turns them into codes."""
        inverse_steps = self.scales.inverse_steps[self.layout.frame_steps(segment, index)]
        return self.source[self.layout.frame(segment, index)], inverse_steps

    def _sum_of(self, wanted: FrameSum, out: Tensor) -> Sum:
        """What the kernels add up for a frame."""
        first = self.layout.frame(wanted.segment, wanted.index).start
        return Sum(*self._own(wanted.segment, wanted.index), out, wanted.frames, first)

    @property
    def _unseen(self) -> Tensor | None:
        """The outcome, if the host has yet to see it."""
        return self.outcome and self.outcome.unseen

    def _sums(self, batch: list[FrameSum]) -> list[Tensor]:
        bypass = self.bypass
        frames = super()._sums(batch)
        # The host may have learned only now that the call must go plain.
        return frames if self.bypass is bypass else super()._sums(batch)

    def seen(self, sizes: Tensor) -> list[int]:
        if self._unseen is None:
            return super().seen(sizes)
        seen = self.device.seen(torch.cat([sizes, self._unseen])).tolist()  # with one wait
        self.outcome.learn(seen[sizes.numel() :])
        return seen[: sizes.numel()]

    def _write_sums(self, batch, buffers):
        if self.bypass:
            nothing = self.source.data[:0]
            empty = [Sum(nothing, self.scales.inverse_steps[:0], buffer) for buffer in buffers]
            return self.backend.encode_sums(empty, self.coding)
        sums = [self._sum_of(each, buffer) for each, buffer in zip(batch, buffers)]
        return self.backend.encode_sums(sums, self.coding, self.noise, self.checksum)

    def _read(self, segment, index, frame):
        self.backend.decode_frames([self._decoding(segment, index, frame)], self.checksum)

    def _decoding(self, segment: int, index: int, frame: Tensor) -> Decoding:
        scales = self.scales.scales[self.layout.frame_steps(segment, index)]
        return Decoding(frame, scales, self.output[self.layout.frame(segment, index)])


@dataclass
class LosslessCodec(TensorCodec):
    """Adds floats, as a plain collective does: several frames in rank order, else in the order in which they come.

    Attributes:
        divisor: what the sum is divided by.
    """

    divisor: float = 1

    @property
    def frame_capacity(self) -> int:
        window = self.source or self.output
        return max_lossless_bytes(self.layout.frame_elements, window.data.element_size())

    def _write_sums(self, batch, buffers):
        sizes = [self._write_sum(*each, buffer) for each, buffer in zip(batch, buffers)]
        return torch.tensor(sizes, dtype=torch.int64, device="cpu")

    def _write_sum(self, segment: int, index: int, frames: list[Tensor], buffer: Tensor) -> int:
        own = self.source[self.layout.frame(segment, index)]
        if not frames:
            return encode_floats(self.backend, own, self.coding, buffer)
        # Several frames are summed by the owner of the segment, whose rank is the segment's number.
        before = max(0, len(frames) - segment)
        total = None
        for frame in [*frames[before:], None, *frames[:before]]:
            values = own if frame is None else self._floats(frame, own)
            if total is None:  # half types are added in float32 and rounded once
                total = values.to(torch.promote_types(own.dtype, torch.float32), copy=True)
            else:
                total += values
        return encode_floats(self.backend, total.to(own.dtype), self.coding, buffer)

    def _read(self, segment, index, frame):
        out = self.output[self.layout.frame(segment, index)]
        self._decode_floats(frame, out)
        if self.divisor != 1:
            out /= self.divisor

    def _floats(self, frame: Tensor, like: Tensor) -> Tensor:
        values = torch.empty_like(like)
        self._decode_floats(frame, values)
        return values

    def _decode_floats(self, frame: Tensor, out: Tensor) -> None:
        self._await(frame)
        decode_floats(self.backend, frame, out)


@dataclass
class UpdatingCodec(TensorCodec):
    """Encodes floats without loss, as what has changed since a version that other ranks hold.

    That version is overwritten where frames are decoded.

    Attributes:
        base: the version of this rank's own values, like `source`.
        own: segments of this rank, which it does not decode.
        whole: segments of which ranks hold different versions, and which are sent as they are.
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

    def _write_sums(self, batch, buffers):
        sizes = [self._write(each.segment, each.index, buffer) for each, buffer in zip(batch, buffers)]
        return torch.tensor(sizes, dtype=torch.int64, device="cpu")

    def _write(self, segment: int, index: int, buffer: Tensor) -> int:
        elements = self.layout.frame(segment, index)
        base = None if segment in self.whole else self.base[elements]
        return encode_update(self.backend, self.source[elements], base, self.coding, buffer)

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
    kind: str = "",
    outcome: Outcome | None = None,
) -> TensorCodec:
    """The codec of one tensor, as `config` wants it.

    Args:
        scales: the quantization steps; None for a codec that keeps floats as they are.
        link_gbps, carried_gbps: see `coding_for`.
        noise: what a stochastic quantizer rounds by, see `noise_for`; None: the numbers of call 0, unshifted.
        divisor: see LosslessCodec; `scales` are divided already.
        kind, outcome: see QuantizingCodec.
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
    return QuantizingCodec(*common, scales, noise, outcome, kind)


def noise_for(config: Config, call: int, addend: int, addends: int) -> Noise | None:
    """The random numbers that a stochastic quantizer rounds by, other ones in each call. None for other quantizers.

    Ranks whose codes are added have the same numbers, shifted by equal parts of their range. So where one of them
    rounds up another one rounds down, and errors of values that are alike cancel in the sum: stratified sampling.

    Args:
        call: its number.
        addend: the number of this rank's values among the `addends` that are summed.
    """
    if config.quantizer.kind_in_effect != "stochastic":
        return None
    return Noise(config.quantizer.seed, call % 2**32, (addend << 32) // addends % 2**32)


def _name(batch: list[FrameSum]) -> str:
    return f"frame {batch[0].index} of segment {batch[0].segment}" if len(batch) == 1 else "a frame"


class _naming(ErrorTranslation):
    """Turns DamagedFrame into FrameError. Its subject is the frame that is damaged."""

    __slots__ = ()

    def translated(self, error):
        if not isinstance(error, DamagedFrame):
            return None
        return FrameError(
            f"{self.subject} is damaged: {error}. "
            "All ranks must run the same version of ncz_plugins; otherwise suspect the network, the disk or memory."
        )
