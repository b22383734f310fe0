"""Launches of the kernels that write and read frames, each for all frames of a batch.

Nothing here waits for the device. Grids depend only on the numbers of codes: the kernels of a coder are launched even
if another coder was chosen or wrote the frame, and then return at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..backend import Decoding, Sum
from ..format import (
    CHUNK,
    HUFFMAN32_PAGE,
    HUFFMAN_MAX_LENGTH,
    PIECE,
    SAMPLE_PIECES,
    Coder,
    Coding,
    Noise,
    Predictor,
    chunks_of,
)
from .arguments import (
    MOST_INPUTS,
    MOST_PIECES,
    OF_CODES,
    Table,
    coding_argument,
    inputs_table,
    integer,
    noise_argument,
    pieces_table,
)
from .recorded import Recorder

THREADS = 256  # of a thread block, except for those below; as in types.cuh
_MOST_OPENING_BLOCKS = 384  # three for each multiprocessor of a large GPU; more could not run at once
_ELEMENTS_TO_OPEN = 4 * CHUNK  # of a frame, that pay a block which adds up checksums and tables
_SELECT_THREADS = 2 * THREADS  # a half for each predictor
CHUNK_THREADS = 128  # of a thread block for a chunk, or for four pages of HUFFMAN32
_FOUR_PAGES_A_BLOCK = {"elements": 4 * HUFFMAN32_PAGE}

# A larger batch is split, so that working memory stays bounded: 6 bytes for each element where frames are added up. A
# sum is never split.
MOST_ELEMENTS = 1 << 24

# Sizes of the C++ structures of the same name.
_WRITTEN_BYTES, _STATUS_BYTES = 32, 72
_HUFFMAN_ENCODING_BYTES = 928
_HUFFMAN_ENTRIES_BYTES = 2 << HUFFMAN_MAX_LENGTH

_CODES, _VALUES, _VALUES_AT_RANDOM = map(integer, range(3))  # what ncz_sample samples


def new_report(device: torch.device) -> Tensor:
    """Memory where kernels report the first damage that they find: ncz::Status: uint8."""
    return torch.zeros(_STATUS_BYTES, dtype=torch.uint8, device=device)


# ------------------------------------------------------------------ several frames


class Reader(NamedTuple):
    """Context of all launches that read frames.

    Attributes:
        report: where kernels report the first damage, see `new_report`.
        sealed: whether frames must have a checksum.
        padded: whether a frame's memory may be longer or shorter than the frame. A frame that is cut off is neither
            read nor reported then.
    """

    launcher: Recorder
    report: Tensor
    sealed: bool = False
    padded: bool = False

    def opened(self, frames: list[tuple[Tensor, int]]) -> tuple:
        """Launch the kernel that verifies frames.

        Args:
            frames: each frame with the number of its codes.

        Returns: the arguments about frames that every kernel takes that reads frames.
        """
        frames = [(_where_words_are(frame), count) for frame, count in frames]
        first_chunks = list(accumulate((chunks_of(count) for _, count in frames), initial=0))
        inputs = inputs_table([(frame, frame.numel(), count, at) for (frame, count), at in zip(frames, first_chunks)])
        device, n, chunks = self.report.device, len(frames), first_chunks[-1]
        (statuses,) = _sections(self.launcher, device, _STATUS_BYTES * n, zeros=True)
        offsets, entries = _sections(self.launcher, device, 8 * chunks, _HUFFMAN_ENTRIES_BYTES * n)
        most = max(count for _, count in frames)
        blocks = min(max(1, -(-most // _ELEMENTS_TO_OPEN)), max(1, _MOST_OPENING_BLOCKS // n))
        how = integer(self.sealed), integer(self.padded)
        arguments = inputs, *how, statuses, self.report, offsets, entries
        self.launcher.launch("ncz_open", OF_CODES, n * blocks, THREADS, *arguments)
        return inputs, statuses, self.report, offsets, entries


def encode_sums(reader: Reader, sums: Sequence[Sum], coding: Coding, noise: Noise | None) -> Tensor:
    """See `Backend.encode_sums`."""
    sizes = reader.launcher.empty(len(sums), torch.int64, reader.report.device)
    inputs = [len(each.frames) for each in sums]
    written = [each._replace(out=_where_words_are(each.out)) for each in sums]
    for part in _parts([each.x.numel() for each in sums], inputs):
        _write_sums(reader, written[part], coding, noise, sizes[part])
    for each, its in zip(sums, written):
        if its.out is not each.out:
            each.out.copy_(its.out)
    return sizes


def decode(reader: Reader, frames: Sequence[Decoding]) -> None:
    """See `Backend.decode_frames`."""
    for part in _parts([each.out.numel() for each in frames], [1] * len(frames)):
        batch = _Batch(reader.launcher, [each.out.numel() for each in frames[part]], reader.report.device)
        rows = [(each.out, each.scales, None, None, 0) for each in frames[part]]
        inputs = [(each.frame, each.out.numel()) for each in frames[part]]
        pieces = batch.pieces(rows, [1] * len(rows))
        batch.launch("decode", frames[0].out.dtype, pieces, *reader.opened(inputs))


def decode_sums(reader: Reader, sums: Sequence[Sum], scales: Sequence[Tensor], noise: Noise | None) -> None:
    """See `Backend.decode_sums`. The values have the dtype of the sums, and each sum has at most MOST_INPUTS frames."""
    results = [(None, each.out, to) for each, to in zip(sums, scales, strict=True)]
    _add_up(reader, sums, results, "decode_sum", noise)


def added_up(reader: Reader, sums: Sequence[Sum], noise: Noise | None) -> list[Tensor]:
    """Codes of each sum, in new memory. Undefined if a frame is damaged.

    A sum of more than MOST_INPUTS frames takes one more launch for each frame beyond that.
    """
    codes = [reader.launcher.empty(each.x.numel(), torch.int32, each.x.device) for each in sums]
    first = [each._replace(frames=each.frames[:MOST_INPUTS]) for each in sums]
    _add_up(reader, first, [(each, None, None) for each in codes], "sum_codes", noise, None, None)
    for each, its_codes in zip(sums, codes):
        for frame in each.frames[MOST_INPUTS:]:
            decode_codes(reader, frame, its_codes, add=True)
    return codes


def _add_up(
    reader: Reader, sums: Sequence[Sum], results: list[tuple], kernel: str, noise: Noise | None, *arguments
) -> None:
    """Launch a kernel for sums whose results are not frames.

    Args:
        results: (codes, values, scales) of each sum. Codes are None where only values are wanted.
    """
    inputs = [len(each.frames) for each in sums]
    for part in _parts([each.x.numel() for each in sums], inputs):
        batch = _Batch(reader.launcher, [each.x.numel() for each in sums[part]], reader.report.device)
        codes = [each_codes for each_codes, *_ in results[part]]
        if codes[0] is None and max(inputs[part]) > 1:
            codes = batch.room_for_codes()  # of sums of frames of different coders
        rows = [(each.x, each.inverse_steps, c, None, each.first) for each, c in zip(sums[part], codes)]
        pieces = batch.pieces(rows, inputs[part], [values for _, *values in results[part]])
        frames = [(frame, each.x.numel()) for each in sums[part] for frame in each.frames]
        batch.add_up(kernel, sums[0].x.dtype, pieces, max(inputs[part]), noise, reader.opened(frames), *arguments)


def _write_sums(reader: Reader, sums: Sequence[Sum], coding: Coding, noise: Noise | None, sizes: Tensor) -> None:
    """Write sums as frames, and their sizes in bytes to `sizes`."""
    writer = _Writer(reader.launcher, coding, [each.x.numel() for each in sums], sizes)
    inputs = [(frame, each.x.numel()) for each in sums for frame in each.frames]
    dtype, values = sums[0].x.dtype, [(each.x, each.inverse_steps) for each in sums]
    outs = [(each.out, each.first) for each in sums]
    # Values become codes while they are written, unless frames are added to them.
    codes = writer.room_for_codes() if inputs else [None] * len(sums)
    rows = [(*v, c, *o) for v, c, o in zip(values, codes, outs)]
    shares = [len(each.frames) for each in sums]
    if is_one_pass(coding) and len(inputs) <= MOST_INPUTS:
        pieces, predictor = writer.pieces(rows, shares), integer(coding.predictor)
        if inputs:
            opened = reader.opened(inputs)
            how = predictor, *writer.noted
            writer.add_up("sum_planes", dtype, pieces, max(shares), noise, opened, *how, adds=False)
        else:
            writer.launch_values("encode_planes", dtype, pieces, noise, predictor, *writer.unchosen)
        return
    if not inputs:
        writer.encode(writer.pieces(rows), dtype, noise)
        return
    # Several launches are needed only for a sum of more frames than one launch takes. It is the only sum then.
    shares = shares if len(inputs) <= MOST_INPUTS else [MOST_INPUTS]
    pieces, opened = writer.pieces(rows, shares), reader.opened(inputs[:MOST_INPUTS])
    writer.add_up("sum_codes", dtype, pieces, max(shares), noise, opened, *writer.noted)
    codes_alone = [(None, None, *row[2:]) for row in rows]
    for start in range(MOST_INPUTS, len(inputs), MOST_INPUTS):
        more = inputs[start : start + MOST_INPUTS]
        pieces, opened = writer.pieces(codes_alone, [len(more)]), reader.opened(more)
        writer.add_up("decode_codes", OF_CODES, pieces, len(more), None, opened, *writer.noted, integer(True))
    writer.encode(writer.pieces(rows))


# ------------------------------------------------------------------ codes


def encode_codes(launcher: Recorder, codes: Tensor, coding: Coding, frame: Tensor) -> Tensor:
    """Write `codes` as one frame. Returns its bytes: int64, [1]."""
    size = torch.empty(1, dtype=torch.int64, device=codes.device)
    writer = _Writer(launcher, coding, [codes.numel()], size)
    written = _where_words_are(frame)
    pieces = writer.pieces([(None, None, codes, written, 0)])
    if is_one_pass(coding):
        writer.launch("encode_planes_of_codes", OF_CODES, pieces, integer(coding.predictor), *writer.unchosen)
    else:
        writer.encode(pieces)
    if written is not frame:
        frame.copy_(written)
    return size


def decode_codes(reader: Reader, frame: Tensor, codes: Tensor, add: bool) -> None:
    """See `Backend.decode_codes`."""
    batch = _Batch(reader.launcher, [codes.numel()], codes.device)
    pieces = batch.pieces([(None, None, codes, None, 0)], [1])
    opened = reader.opened([(frame, codes.numel())])
    batch.add_up("decode_codes", OF_CODES, pieces, 1, None, opened, None, None, integer(add), adds=add)


# ------------------------------------------------------------------ parts


def _parts(elements: list[int], inputs: list[int]) -> Iterator[slice]:
    """Slices of neighbouring frames that are launched together."""
    start = 0
    while start < len(elements):
        end, all_elements, all_inputs = start + 1, elements[start], inputs[start]
        while end < len(elements) and end - start < MOST_PIECES:
            all_elements, all_inputs = all_elements + elements[end], all_inputs + inputs[end]
            if all_elements > MOST_ELEMENTS or all_inputs > MOST_INPUTS:
                break
            end += 1
        yield slice(start, end)
        start = end


def parts_of_tensors(count: int) -> Iterator[slice]:
    """Slices of `count` tensors for kernels that only read them."""
    return (slice(start, start + MOST_PIECES) for start in range(0, count, MOST_PIECES))


class _Batch:
    """Launches for several frames. Each frame gets as many thread blocks as the largest needs."""

    def __init__(self, launcher: Recorder, counts: list[int], device: torch.device):
        self._launcher = launcher
        self._counts = counts
        self._device = device
        self._first_chunks = [0, *accumulate(map(chunks_of, counts))]

    def pieces(self, rows: list[tuple], inputs: list[int] | None = None, sums: list[tuple] | None = None) -> Table:
        """Table ncz::Pieces, with a piece for each frame.

        Args:
            rows: (values, steps, codes, frame, first scale block) of each frame.
            inputs: number of frames that are read for each.
            sums: (sum, scales) of each.
        """
        shares = inputs or [0] * len(rows)
        firsts = accumulate(shares, initial=0)
        more = zip(self._counts, self._first_chunks, firsts, shares)
        results = sums or [(None, None)] * len(rows)
        return pieces_table([(*row, *of, first, *rest) for (*row, first), of, rest in zip(rows, results, more)])

    def launch(
        self, kernel: str, dtype: torch.dtype, pieces: Table, *arguments, elements=CHUNK, threads=CHUNK_THREADS
    ) -> None:
        """Launch a kernel with a thread block for each `elements` elements of a frame."""
        blocks = max(1, -(-max(self._counts) // elements))
        self._launcher.launch(f"ncz_{kernel}", dtype, len(self._counts) * blocks, threads, pieces, *arguments)

    def launch_values(
        self, kernel: str, dtype: torch.dtype, pieces: Table, noise: Noise | None, *arguments, **how
    ) -> None:
        """Launch a kernel that quantizes. With noise, launch its variant that rounds at random."""
        if noise is None:
            self.launch(kernel, dtype, pieces, *arguments, **how)
        else:
            self.launch(f"{kernel}_at_random", dtype, pieces, noise_argument(noise), *arguments, **how)

    def add_up(
        self,
        kernel: str,
        dtype: torch.dtype,
        pieces: Table,
        most: int,
        noise: Noise | None,
        opened: tuple,
        *arguments,
        adds: bool = True,
    ) -> None:
        """Launch a kernel that adds up to `most` frames to each piece, and before it the one for HUFFMAN32's pages.

        Args:
            opened: arguments about these frames.
            arguments: more of the kernel.
            adds: whether the first of these kernels adds own values or codes, too.
        """
        if kernel != "decode_sum" or most > 1:  # which adds the only frame of a piece by itself
            sums = self._launcher.empty((most > 1) * CHUNK * self._first_chunks[-1], torch.int16, self._device)
            how = *opened, sums, integer(adds)
            self.launch_values("sum_pages", dtype, pieces, noise, *how, **_FOUR_PAGES_A_BLOCK)
        self.launch_values(kernel, dtype, pieces, noise, *opened, *arguments)

    def room_for_codes(self) -> list[Tensor]:
        """Working memory for the codes of each frame."""
        room = self._launcher.empty(self._first_chunks[-1] * CHUNK, torch.int32, self._device)
        return [room[first * CHUNK :][:count] for first, count in zip(self._first_chunks, self._counts)]


class _Writer(_Batch):
    """Launches that write frames, and the working memory that they share.

    Args:
        coding: coder and predictor of all frames.
        counts: number of codes of each frame.
        sizes: where kernels write the bytes of each frame: int64.

    Attributes:
        noted: arguments of kernels that read what was chosen, and write sizes.
        unchosen: the same arguments for such a kernel if there was no choice.
    """

    def __init__(self, launcher: Recorder, coding: Coding, counts: list[int], sizes: Tensor):
        super().__init__(launcher, counts, sizes.device)
        n, chunks = len(counts), self._first_chunks[-1]
        huffman = coding.coder in (Coder.HUFFMAN, Coder.AUTO)  # PLANES needs none of its memory
        lengths = _WRITTEN_BYTES * n, huffman * 8 * (chunks + n), huffman * _HUFFMAN_ENCODING_BYTES * n
        written, self._places, self._huffman = _sections(launcher, sizes.device, *lengths, zeros=True)
        self._coding = coding
        self.noted = written, sizes
        self.unchosen = integer(False), *self.noted

    def encode(self, pieces: Table, dtype: torch.dtype | None = None, noise: Noise | None = None) -> None:
        """Choose what is still open, then launch all coders that may have been chosen.

        Args:
            pieces: a table with codes or values.
            dtype: of the values; None: the codes are there.
        """
        written, sizes = self.noted
        coder = self._coding.coder
        self._select(pieces, dtype, noise)
        if coder in (Coder.HUFFMAN, Coder.AUTO):
            shared = written, self._huffman, self._places, sizes
            if dtype is None:
                self.launch("encode_pages_of_codes", OF_CODES, pieces, *shared, **_FOUR_PAGES_A_BLOCK)
            else:
                self.launch_values("encode_pages", dtype, pieces, noise, *shared, **_FOUR_PAGES_A_BLOCK)
        # PLANES replaces a coder whose frame turned out larger.
        chosen = integer(self._coding.predictor), integer(True), *self.noted
        if dtype is None:
            self.launch("encode_planes_of_codes", OF_CODES, pieces, *chosen)
        else:
            self.launch_values("encode_planes", dtype, pieces, noise, *chosen)

    def _select(self, pieces: Table, dtype: torch.dtype | None, noise: Noise | None) -> None:
        written, _ = self.noted
        coding, n, sampled = self._coding, len(self._counts), PIECE * SAMPLE_PIECES
        samples = None
        if coding.predictor == Predictor.AUTO or coding.coder in (Coder.HUFFMAN, Coder.AUTO):
            samples = self._launcher.empty(n * sampled, torch.int32, self._device)
            source = _CODES if dtype is None else _VALUES if noise is None else _VALUES_AT_RANDOM
            arguments = pieces, noise_argument(noise), source, samples
            self._launcher.launch("ncz_sample", dtype or OF_CODES, n * sampled // THREADS, THREADS, *arguments)
        # Without a sample nothing is left to choose: no coder, no code of HUFFMAN32.
        arguments = pieces, samples, coding_argument(coding), written, self._huffman
        self._launcher.launch("ncz_select", OF_CODES, n, _SELECT_THREADS, *arguments)


def is_one_pass(coding: Coding) -> bool:
    """Whether codes can be encoded in one pass, because coder and predictor are known and no statistics are needed."""
    return coding.coder in (Coder.RAW, Coder.FIXED) and coding.predictor != Predictor.AUTO


def _where_words_are(memory: Tensor) -> Tensor:
    """`memory`, or a copy of it at an address from which kernels can read and write whole words of 4 bytes."""
    return memory.clone() if memory.data_ptr() % 4 else memory


def _sections(launcher: Recorder, device: torch.device, *lengths: int, zeros: bool = False) -> list[Tensor]:
    """Sections of one allocation, with these lengths in bytes. Each is aligned for any structure."""
    starts = list(accumulate((-(-length // 16) * 16 for length in lengths), initial=0))
    memory = (launcher.zeros if zeros else launcher.empty)(starts[-1], torch.uint8, device)
    return [memory[start : start + length] for start, length in zip(starts, lengths)]
