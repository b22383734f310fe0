"""Frames of one tensor, for one collective call."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ..kernels.backend import Backend
from ..kernels.format import Coder, DamagedFrame, Predictor, max_frame_bytes
from .config import Entropy
from .errors import FrameError
from .frame import Layout, Window
from .quantize import Scales
from .stats import Counters


class TensorCodec:
    """Encodes what this rank holds, and decodes into where the result belongs.

    Args:
        source: this rank's values.
        output: where decoded frames go; it may be the memory of `source`.
        counters: takes the seconds spent in coding.
    """

    def __init__(
        self,
        backend: Backend,
        layout: Layout,
        scales: Scales,
        entropy: Entropy,
        source: Window,
        output: Window,
        counters: Counters,
    ):
        self.layout = layout
        self._backend = backend
        self._scales = scales
        self._coder = Coder[entropy.coder.upper()]
        self._predictor = Predictor[entropy.predictor.upper()]
        self._source = source
        self._output = output
        self._counters = counters
        # Frames are written here and then copied out at their real size, which is much smaller.
        self._scratch = torch.empty(self.frame_capacity, dtype=torch.uint8)
        self._codes: Tensor | None = None

    @property
    def frame_capacity(self) -> int:
        """Bytes that no frame of this tensor can exceed."""
        return max_frame_bytes(self.layout.frame_elements)

    def encode(self, segment: int, index: int) -> Tensor:
        """The frame of this rank's own values."""
        started = time.perf_counter()
        x, inverse_steps = self._own(segment, index)
        size = self._backend.encode(x, inverse_steps, self._coder, self._predictor, self._scratch)
        return self._finished(size, started)

    def reduce(self, segment: int, index: int, frame: Tensor) -> Tensor:
        """The frame of `frame`'s codes plus this rank's own."""
        started = time.perf_counter()
        x, inverse_steps = self._own(segment, index)
        try:
            size = self._backend.reduce(frame, x, inverse_steps, self._coder, self._predictor, self._scratch)
        except DamagedFrame as damage:
            raise self._frame_error(segment, index, damage) from damage
        return self._finished(size, started)

    def sum(self, segment: int, index: int, frames: list[Tensor]) -> Tensor:
        """The frame of the codes of all `frames` plus this rank's own."""
        started = time.perf_counter()
        x, inverse_steps = self._own(segment, index)
        if self._codes is None:
            self._codes = torch.empty(self.layout.frame_elements, dtype=torch.int32)
        codes = self._codes[: x.numel()]
        self._backend.quantize(x, inverse_steps, codes)
        try:
            for frame in frames:
                self._backend.decode_codes(frame, codes, add=True)
        except DamagedFrame as damage:
            raise self._frame_error(segment, index, damage) from damage
        return self._finished(self._backend.encode_codes(codes, self._coder, self._predictor, self._scratch), started)

    def decode(self, segment: int, index: int, frame: Tensor) -> None:
        """Write the values of a finished frame to the output."""
        started = time.perf_counter()
        scales = self._scales.scales[self.layout.frame_chunks(segment, index)]
        try:
            self._backend.decode(frame, scales, self._output[self.layout.frame(segment, index)])
        except DamagedFrame as damage:
            raise self._frame_error(segment, index, damage) from damage
        self._counters.decode_seconds += time.perf_counter() - started

    def _own(self, segment: int, index: int) -> tuple[Tensor, Tensor]:
        return (
            self._source[self.layout.frame(segment, index)],
            self._scales.inverse_steps[self.layout.frame_chunks(segment, index)],
        )

    def _finished(self, size: int, started: float) -> Tensor:
        frame = self._scratch[:size].clone()
        self._counters.encode_seconds += time.perf_counter() - started
        return frame

    def _frame_error(self, segment: int, index: int, damage: DamagedFrame) -> FrameError:
        return FrameError(
            f"frame {index} of segment {segment} is damaged: {damage}. "
            "All ranks must run the same version of ncz_plugins; otherwise suspect the network or memory."
        )
