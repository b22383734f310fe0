"""A tensor as codes of equally many bits, so that all sizes are known before the data are.

There are no frames, and nothing has a header: what ranks exchange is as long as both sides know, as in an uncompressed
collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...kernels.backend import Backend
from ...kernels.format import RATE_BLOCK, Noise, Rows, packed_bytes, rate_blocks_of
from ..runtime.statistics import Counters
from ..runtime.trace import span
from .coded_tensor import Codec, CodedTensor
from .layout import Layout, Window


def equal_rows(numel: int, count: int, frame_elements: int, overlap: bool = True) -> Layout:
    """How a tensor that is summed is cut: into rows of equally many blocks, of which the last may end early."""
    length = -(-rate_blocks_of(numel) // count) * RATE_BLOCK
    starts = [min(row * length, numel) for row in range(count + 1)]
    return Layout.of([end - start for start, end in zip(starts, starts[1:])], frame_elements, overlap)


def levels_of(bits: int) -> int:
    """The largest code of so many bits: that of the largest magnitude of a block."""
    return 2 ** (bits - 1) - 1


def sum_bits(bits: int, addends: int) -> int:
    """Bits that hold any sum of so many codes."""
    return (2 * addends * levels_of(bits)).bit_length()


@dataclass
class FixedRateCodec(Codec):
    """Codes of equally many bits. Every segment is one row, and all are equally long but for the end of the tensor.

    A NaN or an infinity comes out as NaN, and anything else fits: there is no `bypass`. Nothing waits for a GPU but
    `finish`.

    Attributes:
        backend: the kernels for the device where all of these tensors live.
        bits: per value.
        counters: takes the seconds spent in coding.
        noise: what a stochastic quantizer rounds by; where it is said to begin is the start of the layout.
        divisor: what sums are divided by.
        synchronize: returns once the device has done all that was asked for; by default at once.
    """

    backend: Backend
    tensor: CodedTensor
    bits: int
    counters: Counters
    noise: Noise | None = None
    divisor: float = 1
    synchronize: Callable[[], None] = lambda: None
    _magnitudes: list[Tensor] = field(default_factory=list)  # shared with parts: what `remainder` needs of them

    def part(self, segments: range) -> FixedRateCodec:
        start = self.layout.elements(segments).start
        noise = self.noise and self.noise.from_element(start)
        return replace(self, tensor=self.tensor.part(segments), noise=noise)

    def finish(self) -> None:
        self.synchronize()

    @property
    def own_rows(self) -> Rows:
        """All blocks of the segments that this rank holds."""
        numel, elements = self.source.data.numel(), self.layout.lengths[0]
        return Rows.of(numel, -(-numel // elements) if elements else 0, elements)

    @property
    def all_rows(self) -> Rows:
        """All blocks of all segments."""
        return Rows.of(self.layout.numel, len(self.layout.lengths), self.layout.lengths[0])

    def magnitudes(self, rows: Rows) -> Tensor:
        """This rank's largest magnitude of each block: bfloat16, [blocks]. Ranks that agree change it in place."""
        with span("measure", self.source.data.nbytes, self.counters):
            magnitudes = self._memory(rows.count * rate_blocks_of(rows.elements), torch.bfloat16)
            self.backend.block_magnitudes(self.source.data, rows, magnitudes)
        self._magnitudes[:] = [magnitudes]
        return magnitudes

    def pack(self, rows: Rows, magnitudes: Tensor) -> Tensor:
        """The codes of what this rank holds of the blocks in `rows`: uint8, [bytes]."""
        of_row = max(1, rate_blocks_of(rows.elements))
        with span("encode", self.source.data.nbytes * rows.blocks // of_row, self.counters):
            packed = self._memory(rows.count * rows.blocks * packed_bytes(self.bits))
            noise = self.noise and self.noise.from_element(self.source.start)
            self.backend.pack(self.source.data, rows, magnitudes, self.bits, packed, noise)
        return packed

    def add(self, packed: Tensor, addends: int) -> Tensor:
        """The sums of the codes of so many ranks, which stand in `packed` one behind the other: uint8, [bytes]."""
        with span("encode", packed.nbytes, self.counters):
            sums = self._memory(packed.numel() // addends // self.bits * sum_bits(self.bits, addends))
            self.backend.add_packed(packed, addends, self.bits, sums, sum_bits(self.bits, addends))
        return sums

    def unpack(self, packed: Tensor, addends: int, rows: Rows, magnitudes: Tensor, segments: range) -> None:
        """Write the values of sums of so many codes to the blocks in `rows` of the output's `segments`."""
        out = self.output[self.layout.elements(segments)]
        denominator = levels_of(self.bits) * self.divisor
        with span("decode", packed.nbytes, self.counters):
            bits = sum_bits(self.bits, addends)
            self.backend.unpack(packed, bits, rows, magnitudes, denominator, out)

    def remainder(self, segments: range) -> Window:
        """This rank's own values of some segments less what their codes stand for, in place of these values."""
        part = self.part(segments)
        [magnitudes] = self._magnitudes or [None]
        if magnitudes is not None:
            x, rows = part.source.data, part.own_rows
            meant = torch.empty_like(x)
            packed = part.pack(rows, magnitudes)
            self.backend.unpack(packed, self.bits, rows, magnitudes, levels_of(self.bits), meant)
            x -= meant
        return self.source

    def _memory(self, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self.source.data.device)
