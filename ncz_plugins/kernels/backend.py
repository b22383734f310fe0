"""The interface of all backends, on contiguous 1-D torch tensors.

Shapes and dtypes that all methods share:

- `x`, `out`: floats, [count], of one of `format.DTYPES`.
- `inverse_steps`, `scales`: one number per block of `format.SCALE_BLOCK` elements, [blocks], float64 for
  float64 tensors and float32 for all others. `inverse_steps` holds 1 / (quantization step); `scales` holds what
  a code is multiplied by.
- `codes`: int32, [count].
- `frame` to write: uint8, at least `format.max_frame_bytes(count)` long; the method returns how many bytes it
  wrote. `frame` to read: uint8, exactly one frame.
- All tensors of a call are on one device. On a CUDA device calls return before the work is done; it
  follows the order of the current stream. Sizes are then `cuda.DeviceSize`: the host waits for one when it uses it
  as an integer. Those of several frames are a tensor.
- `base`: floats, [count], of the dtype of `x` or `out`: what all who hold the frame are known to have.
- For a fixed rate (`block_magnitudes` and below): `rows`: `format.Rows`, which blocks a call covers. `magnitudes`:
  bfloat16, one of each block of all rows, [rows, blocks of a row]. `packed`: uint8, [rows, blocks covered,
  `format.packed_bytes(bits)`]. Floats are of any of `format.DTYPES` but float64.
- `coding`: `format.Coding`, which coder and predictor to use.
- `noise`: `format.Noise` to round up or down at random, None to round to nearest even.

Compiled backends check dtype, device, contiguity and length of each tensor where its address leaves Python, see
addresses.py, and raise `format.WrongTensor`. They check everything that came over a network, and raise
`format.DamagedFrame`. Then nothing was written, except for a frame whose damage
shows only on decoding: what the output holds is then undefined. On a CUDA device only `check` raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import damage
from .format import (
    HAS_CHECKSUM,
    HEADER,
    HEADER_BYTES,
    Coding,
    Combination,
    Noise,
    Rows,
    SelectorCosts,
    StepRule,
    checksum_term,
)
from .scratch import Scratch

_scratch = Scratch()


class Sum(NamedTuple):
    """A frame to write, of the codes of values plus those of other frames.

    Attributes:
        x, inverse_steps: the values, and what turns them into codes.
        out: where the frame is written; it overlaps no other tensor of the call.
        frames: those whose codes are added, of as many codes.
        first: the number of the first value, counted from the noise's first element.
    """

    x: Tensor
    inverse_steps: Tensor
    out: Tensor
    frames: Sequence[Tensor] = ()
    first: int = 0


class Decoding(NamedTuple):
    """A frame to read, and what its codes become."""

    frame: Tensor
    scales: Tensor
    out: Tensor


class Backend(ABC):
    """Kernels for one kind of device. All produce the same numbers, and those for the same kind the same bytes."""

    name: str
    costs: SelectorCosts = SelectorCosts()  # of this backend; the caller sets the price of the link

    @abstractmethod
    def block_statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Lowest value, highest value and sum of squares of each block of SCALE_BLOCK: three float64 tensors, [blocks].

        A block that holds a NaN or an infinity has -inf, +inf and +inf.
        """

    @abstractmethod
    def quantize(self, x: Tensor, inverse_steps: Tensor, codes: Tensor, noise: Noise | None = None) -> None:
        """codes = x * inverse_step, clamped to the range of int32, then rounded."""

    @abstractmethod
    def dequantize(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """out = codes * scale, rounded to nearest even in the dtype of `out`."""

    @abstractmethod
    def encode_codes(self, codes: Tensor, coding: Coding, frame: Tensor) -> int:
        """Write `codes` as one frame."""

    @abstractmethod
    def decode_codes(self, frame: Tensor, codes: Tensor, add: bool = False) -> None:
        """Read one frame into `codes`; with `add`, add it to `codes` (modulo 2**32)."""

    @abstractmethod
    def encode(
        self, x: Tensor, inverse_steps: Tensor, coding: Coding, frame: Tensor, noise: Noise | None = None
    ) -> int:
        """`quantize` and `encode_codes` in one pass."""

    @abstractmethod
    def decode(self, frame: Tensor, scales: Tensor, out: Tensor) -> None:
        """`decode_codes` and `dequantize` in one pass."""

    @abstractmethod
    def reduce(
        self,
        frame: Tensor,
        x: Tensor,
        inverse_steps: Tensor,
        coding: Coding,
        out: Tensor,
        noise: Noise | None = None,
    ) -> int:
        """The ring's inner step in one pass: decode `frame`, add the codes of `x`, encode into `out`.

        `out` and `frame` must not overlap.
        """

    # ------------------------------------------------------------------ floats as differences from other floats

    @abstractmethod
    def differences(self, x: Tensor, base: Tensor, codes: Tensor) -> None:
        """codes = how many floats lie between `base` and `x`, with a sign: no rounding, whatever bits they have.

        Both are of one dtype, not float64. 0.0 and -0.0 are neighbours. Codes wrap, at 16 bits for the half types.
        """

    @abstractmethod
    def add_differences(self, codes: Tensor, base: Tensor, out: Tensor) -> None:
        """The inverse: the floats that are so far from `base`, to the bit. `out` may be `base`."""

    # ------------------------------------------------------------------ several frames at once
    #
    # A GPU needs as many launches for several frames as for one. All tensors of a call have the same dtypes.

    def statistics_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """`block_statistics` of one tensor behind the other: float64, [3, blocks of all]."""
        return torch.cat([torch.stack(self.block_statistics(x)) for x in tensors], 1)

    def encode_sums(
        self, sums: Sequence[Sum], coding: Coding, noise: Noise | None = None, sealed: bool = False
    ) -> Tensor | np.ndarray:
        """Write frames.

        Args:
            sealed: whether a frame that is added counts as damaged if it has no checksum.

        Returns the bytes of each, int64, [len(sums)]: a tensor on the GPU of the frames, else an array of numpy.
        """
        return np.array([self._encode_sum(each, coding, noise, sealed) for each in sums])

    def _encode_sum(self, sum: Sum, coding: Coding, noise: Noise | None, sealed: bool) -> int:
        x, inverse_steps, out, frames, first = sum
        if sealed:
            require_seals(frames)
        if len(frames) > 1:
            return self.encode_codes(self._added_up(sum, noise), coding, out)
        noise = noise and noise.from_element(first)
        if not frames:
            return self.encode(x, inverse_steps, coding, out, noise)
        return self.reduce(frames[0], x, inverse_steps, coding, out, noise)

    def decode_sum(self, sum: Sum, scales: Tensor, noise: Noise | None = None, sealed: bool = False) -> None:
        """Add up codes as `encode_sums` does, and write what they stand for to `sum.out`: floats, which may be `sum.x`.

        These may be of another dtype than `sum.x`, but not where just one of both is float64.

        Args:
            sealed: as above.
        """
        if sealed:
            require_seals(sum.frames)
        self.dequantize(self._added_up(sum, noise), scales, sum.out)

    def decode_sums(
        self, sums: Sequence[Sum], scales: Sequence[Tensor], noise: Noise | None = None, sealed: bool = False
    ) -> None:
        """`decode_sum` of each."""
        for each, to in zip(sums, scales, strict=True):
            self.decode_sum(each, to, noise, sealed)

    def _added_up(self, sum: Sum, noise: Noise | None) -> Tensor:
        """The codes of a sum, in memory that is valid until the next one is added up."""
        x, inverse_steps, _, frames, first = sum
        codes = _scratch.of("sum", x.numel(), torch.int32, x.device)
        self.quantize(x, inverse_steps, codes, noise and noise.from_element(first))
        for frame in frames:
            self.decode_codes(frame, codes, add=True)
        return codes

    def decode_frames(self, decodings: Sequence[Decoding], sealed: bool = False) -> None:
        """`decode` each frame. `sealed`: as above."""
        if sealed:
            require_seals([each.frame for each in decodings])
        for each in decodings:
            self.decode(*each)

    def seal_frames(self, sealed: Sequence[Tensor]) -> None:
        """`seal` each frame."""
        for each in sealed:
            self.seal(each)

    # ------------------------------------------------------------------ checksums and damage

    @abstractmethod
    def checksum(self, frame: Tensor) -> int:
        """The checksum of a whole frame, ignoring its checksum field."""

    def digest(self, data: Tensor) -> int:
        """32 bits that tell apart tensors which differ: the checksum of their bytes, none of them left out."""
        data = data.view(torch.uint8)
        if data.numel() < HEADER_BYTES:
            data = torch.cat([data, data.new_zeros(HEADER_BYTES - data.numel())])
        field = HEADER_BYTES // 4 - 1
        word = int.from_bytes(data[4 * field : HEADER_BYTES].cpu().numpy().tobytes(), "little")
        return (self.checksum(data) + checksum_term(word, field)) % 2**32

    def check(self, report: Tensor | None = None) -> None:  # noqa: B027 - most backends have nothing to do here
        """Raise DamagedFrame if a call since the last check met damage. CPU kernels raise at once instead.

        Args:
            report: see `GpuBackend.report`.
        """

    def seal(self, frame: Tensor) -> None:
        """Give a finished frame its checksum. The decoders verify it.

        Args:
            frame: begins with the frame, and may be longer, for frames whose size the host does not know yet.
        """
        header = HEADER.unpack_from(frame[:HEADER_BYTES].numpy())
        *_, payload_bytes, _, _ = header
        frame = frame[: HEADER_BYTES + payload_bytes]
        fields = [*header[:-2], HAS_CHECKSUM]
        HEADER.pack_into(frame[:HEADER_BYTES].numpy(), 0, *fields, 0)
        HEADER.pack_into(frame[:HEADER_BYTES].numpy(), 0, *fields, self.checksum(frame))

    # ------------------------------------------------------------------ a fixed rate, see reference/fixed_rate.py

    @abstractmethod
    def block_magnitudes(self, x: Tensor, rows: Rows, magnitudes: Tensor) -> None:
        """The largest magnitude of each block, rounded up to bfloat16; of very small ones 2**-100.

        A block that holds a NaN or an infinity has +inf. `rows` covers all blocks.
        """

    @abstractmethod
    def pack(
        self, x: Tensor, rows: Rows, magnitudes: Tensor, bits: int, packed: Tensor, noise: Noise | None = None
    ) -> None:
        """Codes of `bits` bits, from 2 to 8, whose largest stand for a block's magnitude. Zeros where that is +inf."""

    @abstractmethod
    def add_packed(self, packed: Tensor, count: int, bits: int, out: Tensor, out_bits: int) -> None:
        """Add up the codes of `count` rows; `out` is one row of sums, which `out_bits` bits must hold."""

    @abstractmethod
    def unpack(
        self, packed: Tensor, bits: int, rows: Rows, magnitudes: Tensor, denominator: float, out: Tensor
    ) -> None:
        """out = code * (magnitude / denominator), rounded in float32, then to the dtype of `out`; NaN for +inf."""


class HostBackend(Backend):
    """Kernels for host memory, which measure blocks of SCALE_BLOCK and find their steps in one pass each.

    core/codec/quantize.py does so for all other blocks, and says what the numbers mean.
    """

    @abstractmethod
    def combination(
        self, values: Sequence[Tensor], how: Combination, out: Tensor, divisor: int = 1
    ) -> Callable[[], None]:
        """A function that combines what several ranks have, element by element and in their order, into `out`.

        To prepare it takes as long as to combine some thousand values, and can be done before these are there.

        All tensors have one of `format.COMBINED_DTYPES`. Whoever calls this must keep them until the function has been
        called. The half types are combined as float32, integers wrap, and NaN is lower and higher than anything. `out`
        may be one of `values`.

        Args:
            divisor: of the result, if that is of floats.
        """

    @abstractmethod
    def root_mean_squares(self, x: Tensor, most: float, out: Tensor) -> None:
        """The root mean square of each block, rounded down to bfloat16: `out`, [blocks].

        Infinity for a block that holds a NaN, an infinity, or a magnitude larger than `most`. Not of float64.
        """

    @abstractmethod
    def steps_of(self, agreed: Tensor, rule: StepRule) -> tuple[Tensor, Tensor, float]:
        """The inverse steps and scales of blocks, float32, [blocks], by the largest root mean squares among the ranks.

        Args:
            agreed: bfloat16, [blocks].

        Returns besides over how many codes the usual values of a block spread, at most; 0 if a block has no step.
        """


class GpuBackend(Backend):
    """Kernels of a GPU, which meet damage while the host does something else, and derive quantization steps there."""

    @abstractmethod
    def report(self, device: torch.device) -> Tensor:
        """Where this thread's kernels on `device` leave the first damage that they meet: int64, zeros for none.

        `check` takes its values in host memory; without them it waits for those of all devices.
        """

    @abstractmethod
    def forget_report(self, device: torch.device) -> None:
        """Let kernels leave damage elsewhere from now on: what is still queued belongs to a call that has failed."""

    @abstractmethod
    def decode_sums(
        self,
        sums: Sequence[Sum],
        scales: Sequence[Tensor],
        noise: Noise | None = None,
        sealed: bool = False,
        padded: bool = False,
    ) -> None:
        """As `Backend.decode_sums`.

        Args:
            padded: the memory of a frame may go on behind it, or end before it, which is no damage. Of a frame that is
                cut off so, no sum is written; or anything, where sums have another dtype than values.
        """

    @abstractmethod
    def pad_frames(self, memory: Sequence[Tensor], sizes: Tensor) -> None:
        """Complete what is sent of frames of which the host does not know how long they are.

        Args:
            memory: of each, uint8: FRONT_BYTES for the length of the frame and zeros, the frame, and zeros to the end;
                less than all of the frame, if there is no room for it.
            sizes: how many bytes each frame has: int64, [len(memory)], on the device.
        """

    @abstractmethod
    def measure_blocks(
        self,
        tensors: Sequence[Tensor],
        lengths: Sequence[int],
        segments: range,
        block: int,
        mode: str,
        most: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """What `quantize.measure` in core/codec returns, on the device; sums of several blocks may differ by a bit.

        Args:
            tensors: the values of each of `segments`, of all those of `lengths` elements.
            block: elements that share a scale; 0: all.
            mode: one of `format.MODES`.
            most: in mode rms only: larger magnitudes count as infinite.
            dtype: that steps have: float64 for float64 values, float32 for all others.
        """

    @abstractmethod
    def derive_steps(
        self, agreed: Tensor, lengths: Sequence[int], block: int, rule: StepRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `quantize.derive` in core/codec finds of the maximum over ranks, on the device.

        Returns: the inverse steps and scales, one per SCALE_BLOCK elements, zeros where a block allows none; and int64,
        [3]: how many blocks hold what is not finite, and have codes that overflow, and 2**20 times the sum of the bits
        that a value takes with each step.
        """


def require_seals(frames: Sequence[Tensor]) -> None:
    """Raise DamagedFrame if one of these frames, in host memory, has no checksum."""
    for frame in frames:
        if frame.numel() >= HEADER_BYTES:
            *_, flags, _ = HEADER.unpack(frame[:HEADER_BYTES].numpy())
            if not flags:  # others that are unknown, kernels refuse
                raise damage.error(-damage.NO_CHECKSUM, b"", frame.numel(), 0)
