"""Codec with a fixed number of bits for each value, so that all sizes are known before the data are.

There are no frames and no headers. As in an uncompressed collective, both sides know the length of each message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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


class _Run(NamedTuple):
    """Neighbouring pieces, none of them empty, that one call of a kernel codes.

    Attributes:
        lengths: elements of each.
        start: number of the first element among the values.
        first: number of the first block among those that travel.
    """

    lengths: list[int]
    start: int
    first: int

    @property
    def elements(self) -> slice:
        """The values of these pieces, as an index."""
        return slice(self.start, self.start + sum(self.lengths))

    @property
    def blocks(self) -> slice:
        """The blocks of these pieces, as an index into those that travel."""
        return slice(self.first, self.first + sum(map(rate_blocks_of, self.lengths)))

    @property
    def is_padded(self) -> bool:
        """Whether the pieces are neither equal rows nor, all together, one row of whole blocks."""
        return len(set(self.lengths)) > 1 and any(length % RATE_BLOCK for length in self.lengths[:-1])

    @property
    def rows(self) -> Rows:
        """What kernels take the pieces for, with zeros behind each if they are padded."""
        if len(set(self.lengths)) == 1:
            return Rows.of(sum(self.lengths), len(self.lengths), self.lengths[0])
        count = self.blocks.stop - self.blocks.start
        numel = RATE_BLOCK * count if self.is_padded else sum(self.lengths)
        return Rows.of(numel, 1, numel)

    def padded(self, x: Tensor) -> Tensor:
        """The values of these pieces, from those of all. Codes are the same with and without zeros."""
        x = x[self.elements]
        if not self.is_padded:
            return x
        zeros = x.new_zeros(RATE_BLOCK)
        return torch.cat(
            [each for piece in x.split(self.lengths) for each in (piece, zeros[: -len(piece) % RATE_BLOCK])]
        )

    def unpadded(self, x: Tensor, out: Tensor) -> None:
        """Write the values of these pieces without zeros to `out`."""
        whole_blocks = [RATE_BLOCK * rate_blocks_of(length) for length in self.lengths]
        torch.cat([piece[:length] for piece, length in zip(x.split(whole_blocks), self.lengths)], out=out)


@dataclass
class FixedRatePieces(ExchangingCodec):
    """Codec of pieces that ranks send each other, with `bits` bits for each value. Each piece begins a new block.

    Attributes:
        backend, tensor, received, bits, counters, synchronize: see FixedRateCodec and ExchangingCodec.
        rank: this rank. What it keeps is copied, and is none of the blocks.
        noise: random numbers of a stochastic quantizer, beginning at the first block; None: round to nearest.
    """

    backend: Backend
    tensor: CodedTensor
    received: CodedTensor
    rank: int
    bits: int
    counters: Counters
    noise: Noise | None = None
    synchronize: Callable[[], None] = lambda: None

    def finish(self) -> None:
        self.synchronize()

    @property
    def sent_blocks(self) -> list[int]:
        """Blocks that go to each rank."""
        return self._blocks(self.layout)

    @property
    def received_blocks(self) -> list[int]:
        """Blocks that come from each rank."""
        return self._blocks(self.received.layout)

    def encode(self) -> Iterator[Tensor]:
        """Yield the magnitudes of all blocks, then their codes: each uint8, [blocks, bytes of a block]."""
        x, blocks = self.source.data, sum(self.sent_blocks)
        coded = [(run, run.padded(x)) for run in self._runs(self.layout)]
        with span("measure", x.nbytes, self.counters):
            magnitudes = torch.empty(blocks, dtype=torch.bfloat16, device=x.device)
            for run, values in coded:
                self.backend.block_magnitudes(values, run.rows, magnitudes[run.blocks])
        yield magnitudes.view(torch.uint8).view(blocks, magnitudes.itemsize)

        with span("encode", x.nbytes, self.counters):
            packed = torch.empty(blocks, packed_bytes(self.bits), dtype=torch.uint8, device=x.device)
            for run, values in coded:
                noise = self.noise and self.noise.from_block(run.first * (RATE_BLOCK // SCALE_BLOCK))
                codes = packed[run.blocks].view(-1)
                self.backend.pack(values, run.rows, magnitudes[run.blocks], self.bits, codes, noise)
        yield packed

    def decode(self, magnitudes: Tensor, packed: Tensor) -> None:
        """Write the pieces of all ranks to the output.

        Args:
            magnitudes, packed: what `encode` of each rank yielded for this one, in rank order.
        """
        magnitudes, denominator = magnitudes.view(-1).view(torch.bfloat16), levels_of(self.bits)
        with span("decode", packed.nbytes, self.counters):
            for run in self._runs(self.received.layout):
                codes, rows, out = packed[run.blocks].view(-1), run.rows, self.received.output.data[run.elements]
                decoded = out.new_empty(rows.numel) if run.is_padded else out
                self.backend.unpack(codes, 1, self.bits, rows, magnitudes[run.blocks], denominator, decoded)
                if run.is_padded:
                    run.unpadded(decoded, out)
        self.copy_own(self.rank)

    def _blocks(self, layout: Layout) -> list[int]:
        """Blocks of each piece that travels."""
        return [rate_blocks_of(length) if rank != self.rank else 0 for rank, length in enumerate(layout.lengths)]

    def _runs(self, layout: Layout) -> list[_Run]:
        """The pieces of the ranks before this one, and of those after it."""
        lengths, rank = layout.lengths, self.rank
        before, after = ([length for length in each if length] for each in (lengths[:rank], lengths[rank + 1 :]))
        runs = _Run(before, 0, 0), _Run(after, sum(lengths[: rank + 1]), sum(map(rate_blocks_of, before)))
        return [run for run in runs if run.lengths]
