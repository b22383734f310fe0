"""Kernels for tensors on NVIDIA GPUs: CUDA C++, compiled on first use.

    values.cuh    floats to codes and back, random numbers, statistics
    frame.cuh     headers, checksums, and the checks before anything is decoded
    differences.cuh    differences between floats, as integers of their bits
    fixed_rate.cuh    codes of equally many bits, without frames
    planes.cuh    the coder PLANES, and sums of frames
    huffman32.cuh    the coder HUFFMAN32
    decode.cuh    from frames to values
    select.cuh, huffman.cuh    the selector, and the Huffman code of its sample
    open.cuh      the first pass over frames that are read
    scales.cuh    quantization steps from statistics of chunks
    types.cuh, block.cuh, symbols.cuh    shared by these; ../common is shared with the CPU kernels
    arguments.py  arguments of a launch: structures, tables, and how they are packed
    frames.py     launches that write and read frames, for a batch of them
    scales.py     launches that measure blocks and derive quantization steps
    recorded.py   launches that are recorded and replayed, and their working memory
    nvrtc.py      compiler and launcher

Only reading a `DeviceSize`, `checksum` and `check` wait for the device. Sizes and choices stay on the device, and
working memory is freed in the order of the stream. So a CUDA graph can capture everything else.
"""

from __future__ import annotations

import threading
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from .. import damage
from ..addresses import require
from ..backend import Decoding, GpuBackend, Sum
from ..format import (
    DTYPES,
    HEADER_BYTES,
    LANES,
    SCALE_BLOCK,
    Rows,
    SelectorCosts,
    blocks_of,
    chunks_of,
    packed_bytes,
    rate_blocks_of,
)
from . import frames, scales
from .arguments import MOST_INPUTS, inputs_table, noise_argument, pieces_table, rows_argument
from .frames import CHUNK_THREADS, THREADS
from .recorded import Arena, Launcher, Recorder

_REPORT_NUMBERS = 3 + HEADER_BYTES // 8  # int64 numbers of ncz::Status that describe a damage
_WORDS_PER_CHECKSUM_BLOCK = 16 * THREADS
_MOST_CHECKSUM_BLOCKS = 1024
_BLOCKS_THAT_PAD = 32  # thread blocks for each frame
_MOST_MEASURED_ELEMENTS = 1 << 31  # ncz::Piece.count has 32 bits
_BLOCKS_PER_WARP = 4  # blocks of values that a warp of ncz_block_statistics reads: REDUCED_TOGETHER in values.cuh


class DeviceSize:
    """Number of bytes that a kernel wrote. The number is on the device; using it as an integer waits for the kernel.

    Attributes:
        tensor: int64, [1].
    """

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def __index__(self) -> int:
        return int(self.tensor)

    __int__ = __index__

    def __eq__(self, other) -> bool:
        return int(self) == other

    __hash__ = None

    def __repr__(self) -> str:
        return f"DeviceSize({int(self)})"


class _PerThread(threading.local):
    """Reports of the damage that this thread's kernels met, by device. All communicators share the backend."""

    def __init__(self):
        self.reports: dict[torch.device, Tensor] = {}


class CudaBackend(GpuBackend):
    """CUDA kernels, for tensors on any CUDA device.

    `encode`, `encode_codes` and `reduce` return a `DeviceSize`. `check` raises for damage that this thread's calls met,
    as far as the current stream has run. A frame with a damaged header or table writes nothing. A frame that is damaged
    elsewhere may write some values before the damage shows. `reduce` and `encode_sums` then make a spoiled frame, which
    every reader refuses.

    A call for several frames launches its kernels once for at most 32 frames of at most 2**24 elements together.
    """

    name = "cuda"
    # Measured on an H100 with gradients, and with values that are nearly all zero, in frames of 64 MiB. HUFFMAN's price
    # is a guess: half the time of its kernels before they had 32 lanes, twice the time of other programs of that
    # design.
    costs = SelectorCosts(raw=8, fixed=6, huffman=12)

    def __init__(self, launcher: Launcher):
        self._launcher = Recorder(launcher)
        self._per_thread = _PerThread()

    # ------------------------------------------------------------------ numbers

    def block_statistics(self, x):
        return self.statistics_of([x]).unbind()

    def statistics_of(self, tensors):
        tensors = [part for x in tensors for part in x.split(_MOST_MEASURED_ELEMENTS)]
        first_blocks = list(accumulate((blocks_of(x.numel()) for x in tensors), initial=0))
        device, dtype = tensors[0].device, tensors[0].dtype
        results = self._launcher.empty((3, first_blocks[-1]), torch.float64, device)
        rows = [(x, *[None] * 5, 0, x.numel(), block, 0, 0) for x, block in zip(tensors, first_blocks)]
        for part in frames.parts_of_tensors(len(rows)):
            most = max(x.numel() for x in tensors[part])
            grid = len(rows[part]) * max(1, -(-most // (SCALE_BLOCK * _BLOCKS_PER_WARP * (THREADS // LANES))))
            self._launch("block_statistics", dtype, grid, pieces_table(rows[part]), *results.unbind())
        return results

    def measure_blocks(self, tensors, lengths, segments, block, mode, most, dtype, device):
        statistics = self.statistics_of(tensors) if tensors else None
        blocks = scales.Blocks(lengths, block)
        return scales.measure(self._launcher, statistics, blocks, segments, mode, most, dtype, device)

    def derive_steps(self, agreed, lengths, block, rule):
        return scales.derive(self._launcher, agreed, scales.Blocks(lengths, block), rule)

    def quantize(self, x, inverse_steps, codes, noise=None):
        count = x.numel()
        floats = _floats(x, "x"), _per_block(inverse_steps, "inverse_steps", x.dtype, count)
        floats = floats if noise is None else (*floats, noise_argument(noise))
        name = "quantize" if noise is None else "quantize_at_random"
        codes = require(codes, "codes", torch.int32, count)
        self._launch_chunks(name, x.dtype, count, *floats, np.int64(count), codes)

    def dequantize(self, codes, scales, out):
        count = out.numel()
        numbers = require(codes, "codes", torch.int32, count), _per_block(scales, "scales", out.dtype, count)
        self._launch_chunks("dequantize", out.dtype, count, *numbers, np.int64(count), _floats(out, "out"))

    def differences(self, x, base, codes):
        count = x.numel()
        base, codes = require(base, "base", x.dtype, count), require(codes, "codes", torch.int32, count)
        self._launch_chunks("differences", x.dtype, count, _floats(x, "x"), base, np.int64(count), codes)

    def add_differences(self, codes, base, out):
        count = out.numel()
        codes, base = require(codes, "codes", torch.int32, count), require(base, "base", out.dtype, count)
        sums = _floats(out, "out")
        self._launch_chunks("add_differences", out.dtype, count, codes, base, np.int64(count), sums)

    # ------------------------------------------------------------------ frames

    def encode(self, x, inverse_steps, coding, frame, noise=None):
        return DeviceSize(self.encode_sums([Sum(x, inverse_steps, frame)], coding, noise))

    def encode_codes(self, codes, coding, frame):
        return DeviceSize(frames.encode_codes(self._launcher, codes, coding, frame))

    def decode_codes(self, frame, codes, add=False):
        frames.decode_codes(self._reader(codes.device), frame, codes, add)

    def decode(self, frame, scales, out):
        self.decode_frames([Decoding(frame, scales, out)])

    def reduce(self, frame, x, inverse_steps, coding, out, noise=None):
        return DeviceSize(self.encode_sums([Sum(x, inverse_steps, out, [frame])], coding, noise))

    def encode_sums(self, sums, coding, noise=None, sealed=False):
        return frames.encode_sums(self._reader(sums[0].x.device, sealed), sums, coding, noise)

    def decode_sum(self, sum, scales, noise=None, sealed=False):
        self.decode_sums([sum], [scales], noise, sealed)

    def decode_sums(self, sums, scales, noise=None, sealed=False, padded=False):
        reader = self._reader(sums[0].x.device, sealed, padded)
        fits = all(len(each.frames) <= MOST_INPUTS for each in sums)
        if fits and sums[0].out.dtype == sums[0].x.dtype:
            frames.decode_sums(reader, sums, scales, noise)
        else:  # too many frames for one launch, or float32 of error feedback beside half types
            for each, to, codes in zip(sums, scales, frames.added_up(reader, sums, noise), strict=True):
                self.dequantize(codes, to, each.out)

    def decode_frames(self, decodings, sealed=False):
        frames.decode(self._reader(decodings[0].out.device, sealed), decodings)

    def checksum(self, frame):
        require(frame, "frame", torch.uint8, HEADER_BYTES)
        total = torch.zeros(1, dtype=torch.int64, device=frame.device)
        self._launch("checksum", torch.float32, _checksum_blocks(frame), frame, np.int64(frame.numel()), total)
        return int(total)

    def seal(self, frame):
        self.seal_frames([frame])

    def seal_frames(self, sealed):
        sums = self._launcher.zeros(len(sealed), torch.int64, sealed[0].device)
        for part in frames.parts_of_tensors(len(sealed)):
            table = inputs_table([(frame, frame.numel(), 0, 0) for frame in sealed[part]])
            blocks = max(map(_checksum_blocks, sealed[part]))
            self._launch("seal", torch.float32, len(table) * blocks, table, sums[part])

    def pad_frames(self, memory, sizes):
        for part in frames.parts_of_tensors(len(memory)):
            table = inputs_table([(each, each.numel(), 0, 0) for each in memory[part]])
            self._launch("pad", torch.float32, len(table) * _BLOCKS_THAT_PAD, table, sizes[part])

    def report(self, device):
        if device not in self._per_thread.reports:
            self._per_thread.reports[device] = frames.new_report(device)
        return self._per_thread.reports[device]

    def forget_report(self, device):
        report = self._per_thread.reports.pop(device, None)
        if report is not None and report.is_cuda:  # don't free its memory before the queued kernels are done
            report.record_stream(torch.cuda.current_stream(device))

    def check(self, report=None):
        if report is None:
            for found in self._per_thread.reports.values():
                self.check(found.cpu().numpy())
            return
        numbers = report.view(np.int64)
        if numbers[0]:
            result, count, frame_bytes, *header = numbers[:_REPORT_NUMBERS].tolist()
            for found in self._per_thread.reports.values():
                found.zero_()
            raise damage.error(result, np.array(header, dtype="<i8").tobytes(), frame_bytes, count)

    # ------------------------------------------------------------------ a fixed rate: nothing waits for the device

    def block_magnitudes(self, x, rows, magnitudes):
        arguments = _floats(x, "x", rows.numel), rows_argument(rows), _magnitudes(magnitudes, rows)
        self._launch_blocks("block_magnitudes", x.dtype, rows.count * rows.blocks, *arguments)

    def pack(self, x, rows, magnitudes, bits, packed, noise=None):
        floats = (
            (_floats(x, "x", rows.numel),) if noise is None else (_floats(x, "x", rows.numel), noise_argument(noise))
        )
        name, blocks = "pack" if noise is None else "pack_at_random", rows.count * rows.blocks
        scales = rows_argument(rows), _magnitudes(magnitudes, rows), np.int32(bits)
        require(packed, "packed", torch.uint8, blocks * packed_bytes(bits))
        self._launch_blocks(name, x.dtype, blocks, *floats, *scales, packed)

    def add_packed(self, packed, count, bits, out, out_bits):
        blocks = out.numel() // packed_bytes(out_bits)
        sizes = np.int32(count), np.int64(blocks), np.int32(bits)
        require(packed, "packed", torch.uint8, count * blocks * packed_bytes(bits))
        require(out, "out", torch.uint8, 0)
        self._launch_blocks("add_packed", torch.float32, blocks, packed, *sizes, out, np.int32(out_bits))

    def unpack(self, packed, addends, bits, rows, magnitudes, denominator, out):
        blocks = rows.count * rows.blocks
        scales = rows_argument(rows), _magnitudes(magnitudes, rows), np.float32(denominator)
        require(packed, "packed", torch.uint8, addends * blocks * packed_bytes(bits))
        codes = packed, np.int32(addends), np.int32(bits)
        self._launch_blocks("unpack", out.dtype, blocks, *codes, *scales, _floats(out, "out", rows.numel))

    # ------------------------------------------------------------------ launching

    def empty(self, nbytes, device):
        return self._launcher.empty(nbytes, torch.uint8, device)

    def arena(self, device):
        return Arena(device)

    def recording(self, arena):
        return self._launcher.recording(arena)

    def _reader(self, device: torch.device, sealed: bool = False, padded: bool = False) -> frames.Reader:
        return frames.Reader(self._launcher, self.report(device), sealed, padded)

    def _launch_blocks(self, kernel: str, dtype: torch.dtype, blocks: int, *arguments) -> None:
        """Launch a kernel of a fixed rate with a warp for each block of values. Nothing is launched without blocks."""
        if blocks:
            self._launch(kernel, dtype, -(-blocks // (THREADS // 32)), *arguments)

    def _launch_chunks(self, kernel: str, dtype: torch.dtype, count: int, *arguments) -> None:
        """Launch a kernel with a thread block for each chunk of `count` elements."""
        self._launch(kernel, dtype, chunks_of(count), *arguments, threads=CHUNK_THREADS)

    def _launch(self, kernel: str, dtype: torch.dtype, grid: int, *arguments, threads: int = THREADS) -> None:
        """Launch a kernel with `grid` blocks of `threads` threads."""
        self._launcher.launch(f"ncz_{kernel}", dtype, max(1, grid), threads, *arguments)


def _per_block(numbers: Tensor, name: str, dtype: torch.dtype, count: int) -> Tensor:
    """One number for each block of `count` values of `dtype`, checked."""
    return require(numbers, name, torch.float64 if dtype is torch.float64 else torch.float32, blocks_of(count))


def _floats(floats: Tensor, name: str, length: int = 0) -> Tensor:
    """Floats of one of DTYPES and at least `length` elements, checked."""
    return require(floats, name, floats.dtype if floats.dtype in DTYPES else torch.float32, length)


def _magnitudes(magnitudes: Tensor, rows: Rows) -> Tensor:
    """Magnitudes of all rows, checked."""
    return require(magnitudes, "magnitudes", torch.bfloat16, rows.count * rate_blocks_of(rows.elements))


def _checksum_blocks(frame: Tensor) -> int:
    """Number of thread blocks that add up a frame's checksum."""
    return max(1, min(_MOST_CHECKSUM_BLOCKS, -(-frame.numel() // (4 * _WORDS_PER_CHECKSUM_BLOCK))))
