"""Codec for tensors on a GPU, where the host should wait as rarely as possible.

Three things differ from `QuantizingCodec`, whose frames these are:

- Frames that arrive wait here until there are enough to decode in one launch.
- The host learns late whether the quantization steps can be used: see `Outcome`.
- Frames can be encoded ahead, without a wait for their sizes: see `encode_ahead`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.backend import Sum
from ..runtime.forecast import Forecast
from ..runtime.recorded import NEVER, RecordedCall
from ..runtime.trace import span
from .tensor_codec import FrameId, FrameSum, QuantizingCodec, frame_errors, name_of

BATCH_ELEMENTS = 1 << 24  # elements that are coded together: a larger batch would take several launches anyway


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
class GpuCodec(QuantizingCodec):
    """Quantizing codec for a GPU.

    Frames may travel before the host learns that the call must go plain. From then on this codec writes empty frames
    and reads none. So all ranks finish the schedule alike, and the output does not change.

    Attributes:
        outcome: whether `scales` can be used; None: they can.
        forecast: of the lengths of its frames; None: the schedule needs none.
        recorded: the launches of the call, if they are recorded or replayed.
    """

    encodes_ahead = True

    outcome: Outcome | None = None
    forecast: Forecast | None = None
    recorded: RecordedCall = NEVER

    def __post_init__(self):
        # Frames and sums wait here until there are enough to decode together.
        self._frames_to_decode: list[tuple[int, int, Tensor]] = []
        self._sums_to_decode: list[tuple[int, int, list[Tensor]]] = []
        self._waiting_elements = 0
        self._decoded_batches = 0
        self._sums_are_padded = False
        self._outcome_copy: Callable[[], Tensor] | None = None  # waits for a copy to the host that has begun
        self._is_checked = False  # whether all frames that were decoded are known to be undamaged

    @property
    def bypass(self) -> object | None:
        return self.outcome and self.outcome.bypass

    def decode(self, segment: int, index: int, frame: Tensor) -> None:
        self._is_checked = False
        if not self.bypass:
            self._frames_to_decode.append((segment, index, frame))
            self._decode_if_enough(segment, index)

    def decode_sum(self, segment: int, index: int, frames: list[Tensor], padded: bool = False) -> None:
        """See `QuantizingCodec.decode_sum`.

        Args:
            frames: the frames of all other ranks.
            padded: True if each of `frames` is followed by other bytes, or cut off. A sum with a frame that was cut off
                must be asked for again. Either all or no sums of a call are padded.
        """
        self._is_checked = False
        self._sums_are_padded = padded
        if not self.bypass:
            self._sums_to_decode.append((segment, index, frames))
            self._decode_if_enough(segment, index)

    def finish(self) -> None:
        if not self._is_checked:
            self.check()

    def check(self, *tensors: Tensor) -> list[np.ndarray]:
        """Do what `finish` does, and copy `tensors` to host memory with the same wait: see `Device.check`."""
        self._decode_waiting()
        with frame_errors("a frame"):
            copies = self.device.check(*tensors)
        self._is_checked = True
        return copies

    def tell_outcome(self) -> None:
        """Begin to copy the outcome to the host, unless that has begun."""
        if self._unlearned is not None and self._outcome_copy is None:
            self._outcome_copy = self.device.start_copy_to_host(self._unlearned)

    def encode_ahead(self, frame_ids: list[FrameId], buffers: list[Tensor]) -> Tensor:
        """Encode frames of this rank's own values, without a wait of the host.

        Args:
            buffers: memory for each frame, uint8, of at least `frame_capacity` bytes.

        Returns the bytes of each frame: int64, [len(frame_ids)], on the GPU.
        """
        batch = [FrameSum(segment, index) for segment, index in frame_ids]
        with span("encode", self._plain_bytes(batch), self.counters), frame_errors(name_of(batch)):
            sizes = self._write(batch, buffers)
            if self.checksum:
                self.backend.seal_frames(buffers)
        return sizes

    def sizes_on_host(self, sizes: Tensor) -> list[int]:
        if self._unlearned is None:
            return super().sizes_on_host(sizes)
        # One wait for both the sizes and the outcome.
        values = self.device.copy_to_host(torch.cat([sizes, self._unlearned])).tolist()
        self.outcome.learn(values[sizes.numel() :])
        return values[: sizes.numel()]

    @property
    def _unlearned(self) -> Tensor | None:
        """The outcome on the GPU, if the host has yet to learn it."""
        return self.outcome and self.outcome.on_device

    def _encode(self, batch: list[FrameSum]) -> list[Tensor]:
        # If the host learns meanwhile that the call must go plain, all frames are written again, and are empty.
        bypass = self.bypass
        frames = super()._encode(batch)
        return frames if self.bypass is bypass else super()._encode(batch)

    def _write(self, batch, buffers):
        if not self.bypass:
            return super()._write(batch, buffers)
        nothing = self.source.data[:0]
        empty = [Sum(nothing, self.scales.inverse_steps[:0], buffer) for buffer in buffers]
        return self.backend.encode_sums(empty, self.coding)

    def _decode_if_enough(self, segment: int, index: int) -> None:
        elements = self.layout.frame(segment, index)
        self._waiting_elements += elements.stop - elements.start
        if self._waiting_elements >= BATCH_ELEMENTS:
            self._decode_waiting()

    def _decode_waiting(self) -> None:
        """Decode the frames and sums that wait, unless the call must go plain."""
        self._waiting_elements = 0
        if self._unlearned is not None:
            outcome = self._outcome_copy or self.device.start_copy_to_host(self._unlearned)
            self.outcome.learn(outcome().tolist())
        frames, self._frames_to_decode = self._frames_to_decode, []
        if frames and not self.bypass:
            with span("decode", sum([frame.nbytes for *_, frame in frames]), self.counters):
                self.backend.decode_frames([self._frame_to_decode(*each) for each in frames], self.checksum)
        sums, self._sums_to_decode = self._sums_to_decode, []
        if sums and not self.bypass:
            stage, self._decoded_batches = ("decode", self._decoded_batches), self._decoded_batches + 1
            with span("decode", sum([frame.nbytes for *_, frames in sums for frame in frames]), self.counters):
                self.recorded.queue(stage, lambda: self._add_up(sums), self.noise)

    def _add_up(self, sums: list[tuple[int, int, list[Tensor]]]) -> None:
        what_and_scales = zip(*(self._sum_to_decode(*each) for each in sums))
        self.backend.decode_sums(*what_and_scales, self.noise, self.checksum, self._sums_are_padded)
