"""Codec of pieces that ranks send each other without a sum, for GPUs: all pieces at once.

Pieces are cut, measured and quantized as in pieces.py, with the same results. What differs is how often kernels are
launched, and how often the host waits:

1. Each kernel is launched once for all pieces: to measure them, to derive their steps, to write their frames.
2. The host waits once before frames travel. It learns which pieces could be quantized, the bytes of each frame, and the
   same of the pieces that will come.
3. A message has what was measured of a piece, as it is, and the frames of the piece. Or the values themselves, if they
   can't be quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.format import SCALE_BLOCK, blocks_of, max_frame_bytes
from ...kernels.lossless import max_lossless_bytes
from ..errors import FrameError
from ..runtime.trace import span
from .coded_tensor import CodedTensor
from .layout import Layout
from .pieces import FramedPieces
from .quantize import (
    OUTCOME_NUMBERS,
    Scales,
    derive_on_gpu,
    derived_on_gpu,
    measure_on_gpu,
    mode_of,
    most_summable,
    step_rule,
)
from .tensor_codec import FrameId, TensorCodec

_ALIGNMENT_BYTES = 16  # of all parts of a message; kernels read whole words


class _Message(NamedTuple):
    """Message with the piece for one rank. Nothing is sent for an empty piece.

    Attributes:
        outcome: numbers that say whether the piece is quantized, see `derived_on_gpu`.
        measured: bytes of what was measured.
        frames: bytes of each frame; none if the values are sent.
        values: bytes of the values, if they are sent.
    """

    outcome: list[int] = []
    measured: int = 0
    frames: list[int] = []
    values: int = 0

    @property
    def parts(self) -> list[int]:
        """Bytes of each part, in the order in which they travel."""
        return [self.measured, *self.frames, self.values]

    @property
    def nbytes(self) -> int:
        """Bytes of the message: each part begins at a multiple of 16 bytes."""
        return sum(map(_aligned, self.parts))


class GpuPiecesCodec(FramedPieces):
    """Codec of pieces that are coded all at once.

    Args:
        rank: this rank. What it keeps is copied; it is measured with the rest, as one launch is faster than two.
        given: see FramedPieces.
    """

    def __init__(self, rank: int, *given):
        super().__init__(rank, *given)
        # What is measured of a piece travels with it, so the numbers of a block lie side by side.
        mode = mode_of(self.config.quantizer, self.source.data.dtype)
        self._numbers_of_block = 0 if not self.quantizes else 2 if mode in ("rms", "range") else 1
        self._measured = self.source.data[:0]  # of what is sent: [blocks * numbers of a block]
        self._frames: dict[FrameId, Tensor] = {}  # that this rank has written, in memory that may be longer
        self._coming: list[_Message] = []
        self._outcomes: Tensor | None = None  # of deriving steps from what the other ranks measured
        self._decoder: TensorCodec | None = None

    # ---------------------------------------------------------------- 1. frames, without a wait

    @property
    def numbers_to(self) -> list[int]:
        """How many numbers of `encode` go to each rank."""
        return [OUTCOME_NUMBERS + count if count else 0 for count in self.frame_counts(self.layout)]

    @property
    def numbers_from(self) -> list[int]:
        """How many numbers of its `encode` each rank has for this one."""
        return [OUTCOME_NUMBERS + count if count else 0 for count in self.frame_counts(self.received.layout)]

    def encode(self) -> Tensor:
        """Write the frames of all pieces.

        Returns what must be known before frames travel: int64, on the GPU. For each rank that gets a piece, the outcome
        of deriving steps, then the bytes of each frame. With kind lossless the host has waited.
        """
        counts = self.frame_counts(self.layout)
        frame_ids = [(to, index) for to, count in enumerate(counts) for index in range(count)]
        if self.quantizes:
            frames, sizes, outcomes = self._quantized(frame_ids)
        else:
            frames = list(self.codec(CodedTensor(self.layout, self.source)).encode_each(frame_ids))
            sizes = self._numbers([frame.numel() for frame in frames])
            outcomes = self._numbers([0] * OUTCOME_NUMBERS * len(counts))
        self._frames = dict(zip(frame_ids, frames))
        of_each = zip(outcomes.split(OUTCOME_NUMBERS), sizes.split(counts))
        numbers = [part for its_outcome, its_sizes in of_each if len(its_sizes) for part in (its_outcome, its_sizes)]
        return torch.cat([sizes[:0], *numbers])

    def _quantized(self, frame_ids: list[FrameId]) -> tuple[list[Tensor], Tensor, Tensor]:
        """Measure and quantize. Returns memory with the frames, their bytes, and outcomes: both int64, on the GPU."""
        quantizer, layout = self.config.quantizer, self.layout
        with span("measure", self.source.data.nbytes, self.counters):
            most, everything = most_summable(quantizer, self.source.data.dtype, addends=1), range(len(layout.lengths))
            given = self.device.backend, self.source, layout, everything, quantizer, most
            measured = measure_on_gpu(*given, self._block(layout))
        self._measured = self._transposed(measured, self._numbers_of_block, -1)
        scales, outcomes = self._steps(layout, self._measured)
        if not frame_ids:
            return [], outcomes[:0], outcomes
        elements = [layout.frame(*frame_id) for frame_id in frame_ids]
        memory = [self.device.buffer(max_frame_bytes(each.stop - each.start)) for each in elements]
        codec = self.codec(CodedTensor(layout, self.source), scales)
        return memory, codec.encode_ahead(frame_ids, memory), outcomes

    # ---------------------------------------------------------------- 2. messages

    def messages(self, own: Tensor, others: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Wait for what `encode` returned, here and on the other ranks.

        Args:
            own: what `encode` returned here.
            others: what `encode` of each rank returned for this one, in rank order.

        Returns the messages to all ranks behind each other: uint8, [bytes]; the bytes of the message to each rank, and
        from each rank. Raises FrameError if a length can't be.
        """
        with span("wait", 0, self.counters):
            numbers = self.device.copy_to_host(torch.cat([own, others])).tolist()
        going = self._described(self.layout, self.numbers_to, numbers[: len(own)])
        self._coming = self._described(self.received.layout, self.numbers_from, numbers[len(own) :])
        parts = []
        for to, message in enumerate(going):
            frames = [self._frames[to, index][:nbytes] for index, nbytes in enumerate(message.frames)]
            values = self.source[self.layout.segment(to)]
            measured = self._measured_for(to)
            parts += [_as_bytes(measured)[: message.measured], *frames, _as_bytes(values)[: message.values]]
        self._frames.clear()
        return _joined(parts), [each.nbytes for each in going], [each.nbytes for each in self._coming]

    def _described(self, layout: Layout, counts: list[int], numbers: list[int]) -> list[_Message]:
        """The message to or from each rank, from the numbers that `encode` has for it."""
        ends, itemsize = list(accumulate(counts, initial=0)), self.source.data.itemsize
        frame_elements = layout.frame_elements
        most = max_frame_bytes(frame_elements) if self.quantizes else max_lossless_bytes(frame_elements, itemsize)
        messages = []
        for rank, length in enumerate(layout.lengths):
            its_numbers = numbers[ends[rank] : ends[rank + 1]]
            outcome, frames = its_numbers[:OUTCOME_NUMBERS], its_numbers[OUTCOME_NUMBERS:]
            for nbytes in frames:
                if not 0 < nbytes <= most:
                    raise FrameError(
                        f"a frame between ranks {self.rank} and {rank} is said to have {nbytes} bytes; 1 to {most} "
                        "are possible. Suspect the network or memory."
                    )
            measured = self._measured_numbers(length) * self._measured.itemsize
            if not frames:
                messages.append(_Message())
            elif self._is_quantized(outcome, length):
                messages.append(_Message(outcome, measured, frames))
            else:
                messages.append(_Message(outcome, measured, values=length * itemsize))
        return messages

    def _is_quantized(self, outcome: list[int], length: int) -> bool:
        """Whether a piece of this length travels as frames. With kind lossless all do."""
        infinite, too_fine, *_ = outcome
        derived = derived_on_gpu(None, outcome, blocks_of(length))
        return not infinite and not too_fine and derived.is_worthwhile(self.source.data.dtype)

    # ---------------------------------------------------------------- 3. values

    def decode(self, messages: Sequence[Tensor]) -> None:
        """Take the messages of all ranks, in rank order. Their pieces are in the output once `finish` returns."""
        layout, output = self.received.layout, self.received.output
        parts = [_parts(message, each.parts) for message, each in zip(messages, self._coming)]
        scales = None
        if self.quantizes:
            measured = [of_rank.view(self._measured.dtype) for of_rank, *_ in parts]
            measured[self.rank] = self._measured_for(self.rank)
            scales, self._outcomes = self._steps(layout, torch.cat(measured))
        self._decoder = self.codec(CodedTensor(layout, output=output), scales)
        for source, (_, *frames, values) in enumerate(parts):
            for index, frame in enumerate(frames):
                self._decoder.decode(source, index, frame)
            if values.numel():
                output[layout.segment(source)].copy_(values.view(output.data.dtype))
        self.copy_own(self.rank)

    def finish(self) -> None:
        if not self.quantizes:
            return self._decoder.finish()
        [outcomes] = self._decoder.check(self._outcomes)
        outcomes = outcomes.view(np.int64).reshape(-1, OUTCOME_NUMBERS).tolist()
        for source, (message, outcome) in enumerate(zip(self._coming, outcomes)):
            if message.measured and message.outcome != outcome:
                raise FrameError(
                    f"what rank {source} measured of its values is damaged: it is something else here. "
                    "All ranks must run the same version of ncz_plugins; otherwise suspect the network or memory."
                )

    # ---------------------------------------------------------------- pieces

    def _block(self, layout: Layout) -> int:
        """Elements of a block that shares a scale. A block never reaches into the next piece."""
        return self.config.quantizer.block_in_effect or SCALE_BLOCK * max(1, blocks_of(max(layout.lengths)))

    def _measured_numbers(self, length: int) -> int:
        """How many numbers are measured of a piece."""
        return self._numbers_of_block * -(-length // (self.config.quantizer.block_in_effect or max(1, length)))

    def _measured_for(self, rank: int) -> Tensor:
        """What was measured of the piece for a rank."""
        first = sum(map(self._measured_numbers, self.layout.lengths[:rank]))
        return self._measured[first : first + self._measured_numbers(self.layout.lengths[rank])]

    def _transposed(self, measured: Tensor, *shape: int) -> Tensor:
        """Numbers that lie side by side in `shape`, with those of a column side by side."""
        return measured if self._numbers_of_block == 1 else measured.view(shape).t().reshape(-1)

    def _steps(self, layout: Layout, measured: Tensor) -> tuple[Scales, Tensor]:
        """Quantization steps of all pieces, and an outcome of each: int64, [numbers], on the GPU."""
        quantizer, backend = self.config.quantizer, self.device.backend
        agreed = self._transposed(measured, -1, self._numbers_of_block)
        rule = step_rule(quantizer, self.source.data.dtype, addends=1)
        return derive_on_gpu(backend, agreed, layout, quantizer, rule, self._block(layout))

    def _numbers(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.source.data.device)


# ------------------------------------------------------------------ messages of aligned parts


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _joined(parts: list[Tensor]) -> Tensor:
    """Parts of messages behind each other, with zeros up to where the next one begins."""
    zeros = parts[0].new_zeros(_ALIGNMENT_BYTES)
    return torch.cat([each for part in parts for each in (part, zeros[: _aligned(len(part)) - len(part)])])


def _parts(message: Tensor, sizes: list[int]) -> list[Tensor]:
    """The parts of a message, of these sizes in bytes."""
    return [part[:size] for part, size in zip(message.split(list(map(_aligned, sizes))), sizes)]
