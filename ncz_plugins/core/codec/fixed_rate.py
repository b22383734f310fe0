"""Codec with a fixed number of bits for each value, so that all sizes are known before the data are.

There are no frames and no headers. As in an uncompressed collective, both sides know the length of each message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.backend import Backend
from ...kernels.format import RATE_BLOCK, SCALE_BLOCK, Noise, Rows, packed_bytes, rate_blocks_of
from ..runtime.statistics import Counters
from ..runtime.trace import span
from .coded_tensor import Codec, CodedTensor, ExchangingCodec
from .layout import Layout, Window


def equal_rows(numel: int, count: int, frame_elements: int, overlap: bool = True) -> Layout:
    """Layout of a tensor that is summed: `count` rows with the same number of blocks. The last row may be shorter.

    Args:
        numel: elements of the tensor.
        frame_elements, overlap: see `Layout.of`.
    """
    length = -(-rate_blocks_of(numel) // count) * RATE_BLOCK
    starts = [min(row * length, numel) for row in range(count + 1)]
    return Layout.of([end - start for start, end in zip(starts, starts[1:])], frame_elements, overlap)


def levels_of(bits: int) -> int:
    """The largest code of `bits` bits. It stands for the largest magnitude of a block."""
    return 2 ** (bits - 1) - 1


def sum_bits(bits: int, addends: int) -> int:
    """Bits that hold any sum of `addends` codes."""
    return (2 * addends * levels_of(bits)).bit_length()


@dataclass
class FixedRateCodec(Codec):
    """Codec with `bits` bits for each value. Each segment is one row; only the last one may be shorter.

    NaN and infinity decode to NaN. All other values can be coded, so there is never a `bypass`. Only `finish` waits for
    a GPU.

    Attributes:
        backend: kernels for the device of the tensors.
        tensor: the tensors to encode and to decode into.
        bits: bits of a code.
        counters: receive the seconds spent on coding.
        noise: random numbers of a stochastic quantizer, beginning at the layout's first block; None: round to nearest.
        divisor: sums are divided by it.
        synchronize: returns once the device has finished all work; the default returns at once.
    """

    backend: Backend
    tensor: CodedTensor
    bits: int
    counters: Counters
    noise: Noise | None = None
    divisor: float = 1
    synchronize: Callable[[], None] = lambda: None
    _magnitudes: list[Tensor] = field(default_factory=list)  # at most one, for `remainder`; shared with `for_segments`

    def for_segments(self, segments: range) -> FixedRateCodec:
        return replace(self, tensor=self.tensor.for_segments(segments), noise=self._noise_from(segments.start))

    def _noise_from(self, segment: int) -> Noise | None:
        """Random numbers of the segments from this one on. Each begins a new block."""
        blocks = segment * rate_blocks_of(self.layout.lengths[0])
        return self.noise and self.noise.from_block(blocks * (RATE_BLOCK // SCALE_BLOCK))

    def finish(self) -> None:
        self.synchronize()

    @property
    def own_rows(self) -> Rows:
        """All blocks of the segments in `source`."""
        numel, elements = self.source.data.numel(), self.layout.lengths[0]
        return Rows.of(numel, -(-numel // elements) if elements else 0, elements)

    @property
    def all_rows(self) -> Rows:
        """All blocks of all segments."""
        return Rows.of(self.layout.numel, len(self.layout.lengths), self.layout.lengths[0])

    def magnitudes(self, rows: Rows) -> Tensor:
        """Measure the largest magnitude of each block: bfloat16, [blocks].

        Ranks then agree on the maximum by changing the result in place.
        """
        with span("measure", self.source.data.nbytes, self.counters):
            blocks = rows.count * rate_blocks_of(rows.elements)
            magnitudes = torch.empty(blocks, dtype=torch.bfloat16, device=self.source.data.device)
            self.backend.block_magnitudes(self.source.data, rows, magnitudes)
        self._magnitudes[:] = [magnitudes]
        return magnitudes

    def pack(self, rows: Rows, magnitudes: Tensor) -> Tensor:
        """Encode this rank's values of the blocks in `rows`. Returns codes: uint8, [bytes].

        Args:
            magnitudes: the largest magnitude of each block over ranks: bfloat16, [blocks].
        """
        blocks_of_row = max(1, rate_blocks_of(rows.elements))
        with span("encode", self.source.data.nbytes * rows.blocks // blocks_of_row, self.counters):
            packed = self._new_bytes(rows.count * rows.blocks * packed_bytes(self.bits))
            noise = self._noise_from(self.source.start // max(1, self.layout.lengths[0]))
            self.backend.pack(self.source.data, rows, magnitudes, self.bits, packed, noise)
        return packed

    def add(self, packed: Tensor, addends: int) -> Tensor:
        """Add up the codes of `addends` ranks, which follow each other in `packed`. Returns sums: uint8, [bytes]."""
        with span("encode", packed.nbytes, self.counters):
            sums = self._new_bytes(packed.numel() // addends // self.bits * sum_bits(self.bits, addends))
            self.backend.add_packed(packed, addends, self.bits, sums, sum_bits(self.bits, addends))
        return sums

    def unpack(self, packed: Tensor, addends: int, rows: Rows, magnitudes: Tensor, segments: range) -> None:
        """Decode sums of codes to the output.

        Args:
            packed: sums of `addends` codes: uint8, [bytes].
            rows: the blocks that `packed` holds, within `segments`.
            magnitudes: the largest magnitude of each block over ranks: bfloat16, [blocks].
            segments: the segments of the output to write to.
        """
        self._unpack(packed, 1, sum_bits(self.bits, addends), rows, magnitudes, segments)

    def unpack_sum(self, packed: Tensor, addends: int, rows: Rows, magnitudes: Tensor, segments: range) -> None:
        """Add up the codes of `addends` ranks, which follow each other in `packed`, and decode to the output.

        For the rest see `unpack`.
        """
        self._unpack(packed, addends, self.bits, rows, magnitudes, segments)

    def _unpack(self, packed: Tensor, addends: int, bits: int, rows: Rows, magnitudes: Tensor, segments: range) -> None:
        out = self.output[self.layout.elements(segments)]
        denominator = levels_of(self.bits) * self.divisor
        with span("decode", packed.nbytes, self.counters):
            self.backend.unpack(packed, addends, bits, rows, magnitudes, denominator, out)

    def remainder(self, segments: range) -> Window:
        """Replace this rank's values by what quantization loses: each value minus the value of its code.

        Args:
            segments: the segments that `source` holds.

        Returns `source`.
        """
        codec = self.for_segments(segments)
        [magnitudes] = self._magnitudes or [None]
        if magnitudes is not None:
            x, rows = codec.source.data, codec.own_rows
            decoded = torch.empty_like(x)
            packed = codec.pack(rows, magnitudes)
            self.backend.unpack(packed, 1, self.bits, rows, magnitudes, levels_of(self.bits), decoded)
            x -= decoded
        return self.source

    def _new_bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.source.data.device)


class _Coded(NamedTuple):
    """Neighbouring pieces that one call of a kernel codes.

    Attributes:
        elements: theirs, as an index into the values.
        rows: their blocks.
        blocks: the same blocks among those of all pieces.
    """

    elements: slice
    rows: Rows
    blocks: slice


@dataclass
class FixedRatePieces(ExchangingCodec):
    """Codec of pieces that ranks send each other, with `bits` bits for each value. Each piece begins a new block.

    Attributes:
        backend, tensor, received, bits, counters, synchronize: see FixedRateCodec and ExchangingCodec.
        rank: this rank. What it keeps is copied, but has its place among blocks.
        at_once: code all pieces by one launch of each kernel, and what this rank keeps with them. False: one by one.
        noise: random numbers of a stochastic quantizer, beginning at the first block; None: round to nearest.
    """

    backend: Backend
    tensor: CodedTensor
    received: CodedTensor
    rank: int
    bits: int
    counters: Counters
    at_once: bool = False
    noise: Noise | None = None
    synchronize: Callable[[], None] = lambda: None

    def finish(self) -> None:
        self.synchronize()

    @property
    def sent_blocks(self) -> list[int]:
        """Blocks that go to each rank."""
        return list(map(rate_blocks_of, self.layout.lengths))

    @property
    def received_blocks(self) -> list[int]:
        """Blocks that come from each rank."""
        return list(map(rate_blocks_of, self.received.layout.lengths))

    def encode(self) -> Iterator[Tensor]:
        """Yield the magnitudes of all blocks, then their codes: each uint8, [blocks, bytes of a block]."""
        x, blocks, lengths = self.source.data, sum(self.sent_blocks), self.layout.lengths
        if self._is_padded(lengths):
            x = _padded(x, lengths)
        with span("measure", x.nbytes, self.counters):
            magnitudes = torch.empty(blocks, dtype=torch.bfloat16, device=x.device)
            for each in self._coded(lengths):
                self.backend.block_magnitudes(x[each.elements], each.rows, magnitudes[each.blocks])
        yield magnitudes.view(torch.uint8).view(blocks, magnitudes.itemsize)

        with span("encode", x.nbytes, self.counters):
            packed = torch.empty(blocks, packed_bytes(self.bits), dtype=torch.uint8, device=x.device)
            for each in self._coded(lengths):
                noise = self.noise and self.noise.from_block(each.blocks.start * (RATE_BLOCK // SCALE_BLOCK))
                codes = packed[each.blocks].view(-1)
                self.backend.pack(x[each.elements], each.rows, magnitudes[each.blocks], self.bits, codes, noise)
        yield packed

    def decode(self, magnitudes: Tensor, packed: Tensor) -> None:
        """Write the pieces of all ranks to the output.

        Args:
            magnitudes, packed: what `encode` of each rank yielded for this one, in rank order.
        """
        output, lengths = self.received.output.data, self.received.layout.lengths
        magnitudes = magnitudes.view(-1).view(torch.bfloat16)
        is_padded = self._is_padded(lengths)
        with span("decode", packed.nbytes, self.counters):
            out = output.new_empty(RATE_BLOCK * len(packed)) if is_padded else output
            for each in self._coded(lengths):
                codes, of_each = packed[each.blocks].view(-1), magnitudes[each.blocks]
                denominator = levels_of(self.bits)
                self.backend.unpack(codes, 1, self.bits, each.rows, of_each, denominator, out[each.elements])
            if is_padded:
                padded = out.split([RATE_BLOCK * blocks for blocks in self.received_blocks])
                torch.cat([piece[:length] for piece, length in zip(padded, lengths)], out=output)
        self.copy_own(self.rank)

    def _is_padded(self, lengths: Sequence[int]) -> bool:
        """Whether pieces are coded at once, but are neither equal rows nor, all together, one row of whole blocks."""
        return self.at_once and len(set(lengths)) > 1 and any(length % RATE_BLOCK for length in lengths[:-1])

    def _coded(self, lengths: Sequence[int]) -> list[_Coded]:
        """What each call of a kernel codes, of pieces of these lengths."""
        blocks = list(map(rate_blocks_of, lengths))
        if self.at_once:
            is_one_row = len(set(lengths)) > 1
            numel = RATE_BLOCK * sum(blocks) if self._is_padded(lengths) else sum(lengths)
            rows = Rows.of(numel, 1, numel) if is_one_row else Rows.of(numel, len(lengths), lengths[0])
            return [_Coded(slice(0, numel), rows, slice(0, sum(blocks)))]
        begin, first = (list(accumulate(each, initial=0)) for each in (lengths, blocks))
        return [
            _Coded(slice(begin[i], begin[i + 1]), Rows.of(length, 1, length), slice(first[i], first[i + 1]))
            for i, length in enumerate(lengths)
            if i != self.rank
        ]


def _padded(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The pieces with zeros behind each, so that all begin at a multiple of RATE_BLOCK. Codes are the same."""
    zeros = x.new_zeros(RATE_BLOCK)
    return torch.cat([part for piece in x.split(list(lengths)) for part in (piece, zeros[: -len(piece) % RATE_BLOCK])])
