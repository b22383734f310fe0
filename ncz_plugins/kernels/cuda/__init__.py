"""The kernels for tensors on NVIDIA GPUs: CUDA C++, compiled on first use.

    values.cuh    floats to codes and back, random numbers, statistics
    frame.cuh     headers, checksums, and the checks before anything is decoded
    fixed_rate.cuh    codes of equally many bits, without frames
    fixed.cuh     the coders FIXED and RAW, and all that works in one pass
    select.cuh, huffman.cuh, rans.cuh    the selector and the other coders; coders.py launches them
    types.cuh, block.cuh, symbols.cuh    shared by these; ../common is shared with the CPU kernels
    nvrtc.py      compiles and launches

Only reading a `DeviceSize`, `checksum` and `check` wait for the device. Sizes and choices stay on the device, and
scratch memory is freed in the order of the stream. So a CUDA graph can capture everything else.
"""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .. import damage
from ..backend import Backend
from ..format import (
    PIECE,
    SAMPLE_PIECES,
    Coder,
    Coding,
    Noise,
    Predictor,
    SelectorCosts,
    chunks_of,
    packed_bytes,
)
from . import coders
from .arguments import RowsArgument, noise_argument

THREADS = 256  # of a block, as in types.cuh
_STATUS = 7  # int64 numbers in ncz::Status
_WORDS_PER_CHECKSUM_BLOCK = 16 * THREADS
_MOST_CHECKSUM_BLOCKS = 1024


class Launcher(Protocol):
    """Runs kernels: `nvrtc.CupyLauncher` on a GPU, an emulator in the tests."""

    def launch(self, kernel: str, dtype: torch.dtype, grid: int, block: int, *arguments) -> None:
        """Queue `kernel` of the module for `dtype`.

        Arguments: tensors on one device, numpy scalars and ctypes structures of the size that the kernel's parameters
        have, None for a null pointer.
        """


class DeviceSize:
    """How many bytes a kernel wrote. The number is on the device; using it waits for the kernel.

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


class _Output:
    """What the kernels that write a frame of `count` codes share about it; zeros at first."""

    def __init__(self, count: int, device: torch.device):
        memory = torch.zeros(4 + max(1, chunks_of(count)), dtype=torch.int64, device=device)
        self.size = memory[:1]
        self.choice = memory[1:3]  # ncz::Choice
        self.places = memory[3:]  # a counter, then one number for each chunk; an empty frame counts as one chunk


class _Input:
    """What kernels need to read a frame of `count` codes, in the order of their parameters."""

    def __init__(self, frame: Tensor, count: int):
        memory = torch.zeros(_STATUS + 1, dtype=torch.int64, device=frame.device)
        self.frame = frame
        self.status = memory[:_STATUS]
        self.checksum = memory[_STATUS:]
        self.offsets = torch.empty(chunks_of(count), dtype=torch.int64, device=frame.device)


class _Found(threading.local):
    """The damage that this thread's kernels met, by device. All communicators share the backend; each has a thread."""

    def __init__(self):
        self.reports: dict[torch.device, Tensor] = {}


class CudaBackend(Backend):
    """The CUDA kernels, for tensors on any CUDA device.

    `encode`, `encode_codes` and `reduce` return a `DeviceSize`. `check` raises for damage that this thread's calls met,
    as far as the current stream has run. A damaged RAW or FIXED frame, or a damaged header, writes nothing; other
    damaged frames write undefined values. `reduce` makes a spoiled frame of a damaged one, which every reader refuses,
    and so does `encode_codes` after any damage of this thread that `check` has not raised yet.
    """

    name = "cuda"
    # From published figures for an A100 (cuSZp2 and DietGPU), not measured on this device.
    costs = SelectorCosts(raw=20, fixed=20, huffman=60, rans=40, rans_rest=60)

    def __init__(self, launcher: Launcher):
        self._launcher = launcher
        self._found = _Found()

    # ------------------------------------------------------------------ numbers

    def chunk_statistics(self, x):
        results = torch.empty(3, chunks_of(x.numel()), dtype=torch.float64, device=x.device).unbind()
        chunks_per_block = THREADS // 128
        grid = -(-chunks_of(x.numel()) // chunks_per_block)
        self._launch("chunk_statistics", x.dtype, grid, x, np.int64(x.numel()), *results)
        return results

    def quantize(self, x, inverse_steps, codes, noise=None):
        self._launch_floats("quantize", (), x, inverse_steps, noise, np.int64(x.numel()), codes)

    def dequantize(self, codes, scales, out):
        count = out.numel()
        self._launch("dequantize", out.dtype, chunks_of(count), codes, scales, np.int64(count), out)

    # ------------------------------------------------------------------ frames

    def encode(self, x, inverse_steps, coding, frame, noise=None):
        count = x.numel()
        output = _Output(count, x.device)
        choice = self._chosen(coding, count, output, x, inverse_steps, noise)
        if coding.coder in (Coder.FIXED, Coder.AUTO):
            fixed = _fixed_arguments(count, coding, choice, frame, output)
            self._launch_floats("encode_fixed", (), x, inverse_steps, noise, *fixed)
        if coding.coder != Coder.FIXED:
            codes = torch.empty(count, dtype=torch.int32, device=x.device)
            self._launch_floats("stage", (), x, inverse_steps, noise, np.int64(count), codes, output.choice)
            self._encode_staged(codes, coding, frame, output)
        return DeviceSize(output.size)

    def encode_codes(self, codes, coding, frame):
        count = codes.numel()
        output = _Output(count, codes.device)
        choice = self._chosen(coding, count, output, codes=codes)
        if coding.coder in (Coder.FIXED, Coder.AUTO):
            fixed = _fixed_arguments(count, coding, choice, frame, output)
            self._launch_codes("encode_fixed_codes", count, codes, *fixed)
        if coding.coder != Coder.FIXED:
            self._launch_codes("stage_codes", count, codes, np.int64(count), output.choice)
            self._encode_staged(codes, coding, frame, output)
        self._launch("spoil", torch.float32, 1, self._report(codes.device), np.int64(count), frame, output.size)
        return DeviceSize(output.size)

    def decode_codes(self, frame, codes, add=False):
        decoded = torch.empty_like(codes) if add else codes
        opened = self._opened(frame, decoded)
        self._launch_codes("decode_codes", codes.numel(), *opened, codes, np.int32(add))

    def decode(self, frame, scales, out):
        decoded = torch.empty(out.numel(), dtype=torch.int32, device=out.device)
        opened = self._opened(frame, decoded)
        self._launch("decode", out.dtype, chunks_of(out.numel()), *opened, scales, out)

    def reduce(self, frame, x, inverse_steps, coding, out, noise=None):
        if not _is_one_pass(coding):
            codes = torch.empty(x.numel(), dtype=torch.int32, device=x.device)
            self.quantize(x, inverse_steps, codes, noise)
            self.decode_codes(frame, codes, add=True)
            return self.encode_codes(codes, coding, out)
        opened = self._opened(frame, torch.empty(x.numel(), dtype=torch.int32, device=x.device))
        output = _Output(x.numel(), x.device)
        predictor = np.int32(coding.predictor)
        self._launch_floats("reduce_fixed", opened, x, inverse_steps, noise, predictor, out, output.size, output.places)
        return DeviceSize(output.size)

    def checksum(self, frame):
        total = torch.zeros(1, dtype=torch.int64, device=frame.device)
        self._launch_checksum("checksum", frame, np.int32(True), total)
        return int(total)

    def seal(self, frame):
        self._launch_checksum("seal", frame, torch.zeros(1, dtype=torch.int64, device=frame.device))

    def check(self):
        for report in self._found.reports.values():
            result, _, count, frame_bytes, *header = report.tolist()
            if result:
                report.zero_()
                header = np.array(header, dtype="<i8").tobytes()
                raise damage.error(result, header, frame_bytes, count)

    # ------------------------------------------------------------------ a fixed rate: nothing waits for the device

    def block_magnitudes(self, x, rows, magnitudes):
        self._launch_blocks("block_magnitudes", x.dtype, rows.count * rows.blocks, x, RowsArgument(*rows), magnitudes)

    def pack(self, x, rows, magnitudes, bits, packed, noise=None):
        floats = (x,) if noise is None else (x, noise_argument(noise))
        name = "pack" if noise is None else "pack_at_random"
        scales = RowsArgument(*rows), magnitudes, np.int32(bits)
        self._launch_blocks(name, x.dtype, rows.count * rows.blocks, *floats, *scales, packed)

    def add_packed(self, packed, count, bits, out, out_bits):
        blocks = out.numel() // packed_bytes(out_bits)
        sizes = np.int64(count), np.int64(blocks), np.int32(bits)
        self._launch_blocks("add_packed", torch.float32, blocks, packed, *sizes, out, np.int32(out_bits))

    def unpack(self, packed, bits, rows, magnitudes, denominator, out):
        scales = RowsArgument(*rows), magnitudes, np.float32(denominator)
        self._launch_blocks("unpack", out.dtype, rows.count * rows.blocks, packed, np.int32(bits), *scales, out)

    # ------------------------------------------------------------------ launching

    def _chosen(self, coding: Coding, count: int, output: _Output, x=None, inverse_steps=None, noise=None, codes=None):
        """Launch what chooses coder and predictor of the codes, or of `x`, and return where they will be.

        None if the kernels for FIXED need not look there.
        """
        if _is_one_pass(coding):
            return None
        if coding.predictor != Predictor.AUTO and coding.coder in (Coder.RAW, Coder.HUFFMAN):
            sample, sampled = None, 0  # nothing is left to choose, not even a mode for RANS
        else:
            sample, sampled = self._sample(count, x, inverse_steps, noise, codes, output.size.device), _sampled(count)
        coders.select(self._launcher, sample, sampled, count, coding, output.choice)
        return output.choice

    def _sample(self, count: int, x, inverse_steps, noise, codes, device: torch.device) -> Tensor:
        sample = torch.empty(PIECE * SAMPLE_PIECES, dtype=torch.int32, device=device)
        floats = x, inverse_steps, noise_argument(noise), np.int32(noise is not None)
        dtype = torch.float32 if x is None else x.dtype
        self._launch("sample", dtype, -(-sample.numel() // THREADS), *floats, codes, np.int64(count), sample)
        return sample

    def _encode_staged(self, codes: Tensor, coding: Coding, frame: Tensor, output: _Output) -> None:
        """Launch all coders but FIXED; each kernel checks whether its coder was chosen."""
        if coding.coder != Coder.RAW:
            coders.encode(self._launcher, codes, coding, output.choice, frame, output.size)
        count = codes.numel()
        self._launch_codes("encode_raw", count, codes, np.int64(count), output.choice, frame, output.size)

    def _opened(self, frame: Tensor, decoded: Tensor) -> tuple:
        """Launch what verifies `frame` and what decodes HUFFMAN and RANS to `decoded` (int32, [count]).

        Returns the arguments with which all kernels that read a frame begin.
        """
        count = decoded.numel()
        opened = _Input(frame, count)
        self._launch_checksum("checksum", frame, np.int32(False), opened.checksum)
        sizes = np.int64(frame.numel()), np.int64(count)
        self._launch("open", torch.float32, 1, frame, *sizes, opened.checksum, opened.status, opened.offsets)
        chunks_per_block = THREADS // 32
        grid = -(-chunks_of(count) // chunks_per_block)
        self._launch("check", torch.float32, grid, frame, np.int64(count), opened.offsets, opened.status)
        coders.decode(self._launcher, frame, opened.status, decoded)
        return frame, opened.status, self._report(frame.device), opened.offsets, decoded

    def _report(self, device: torch.device) -> Tensor:
        """Where kernels leave the first damage that they find: ncz::Status."""
        if device not in self._found.reports:
            self._found.reports[device] = torch.zeros(_STATUS, dtype=torch.int64, device=device)
        return self._found.reports[device]

    def _launch_checksum(self, kernel: str, frame: Tensor, *arguments) -> None:
        blocks = min(_MOST_CHECKSUM_BLOCKS, -(-frame.numel() // (4 * _WORDS_PER_CHECKSUM_BLOCK)))
        self._launch(kernel, torch.float32, blocks, frame, np.int64(frame.numel()), *arguments)

    def _launch_floats(
        self, kernel: str, before: tuple, x: Tensor, inverse_steps: Tensor, noise: Noise | None, *behind
    ) -> None:
        """Launch a kernel that quantizes, a block per chunk, or its twin that rounds at random."""
        floats = (x, inverse_steps) if noise is None else (x, inverse_steps, noise_argument(noise))
        name = kernel if noise is None else f"{kernel}_at_random"
        self._launch(name, x.dtype, chunks_of(x.numel()), *before, *floats, *behind)

    def _launch_codes(self, kernel: str, count: int, *arguments) -> None:
        """Launch a kernel that works on codes, a block per chunk."""
        self._launch(kernel, torch.float32, chunks_of(count), *arguments)

    def _launch_blocks(self, kernel: str, dtype: torch.dtype, blocks: int, *arguments) -> None:
        """Launch a kernel for a fixed rate: a warp per block of values, if there are any."""
        if blocks:
            self._launch(kernel, dtype, -(-blocks // (THREADS // 32)), *arguments)

    def _launch(self, kernel: str, dtype: torch.dtype, grid: int, *arguments) -> None:
        self._launcher.launch(f"ncz_{kernel}", dtype, max(1, grid), THREADS, *arguments)


def _is_one_pass(coding: Coding) -> bool:
    """Whether codes can be encoded in one pass, because nothing about all of them must be known first."""
    return coding.coder == Coder.FIXED and coding.predictor != Predictor.AUTO


def _fixed_arguments(count: int, coding: Coding, choice: Tensor | None, frame: Tensor, output: _Output) -> tuple:
    """The arguments of the kernels that write FIXED frames, after the codes."""
    return np.int64(count), np.int32(coding.predictor), choice, frame, output.size, output.places


def _sampled(count: int) -> int:
    """How many codes the selector looks at. The last piece, which may be short, is always among them."""
    pieces = -(-count // PIECE)
    missing = PIECE * pieces - count
    return PIECE * min(pieces, SAMPLE_PIECES) - missing
