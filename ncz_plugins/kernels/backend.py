"""Interface of all backends, on contiguous 1-D torch tensors.

On CPUs lossless coding (`differences`, `encode_codes`, their inverses, `checksum`, `seal`) takes numpy arrays as well,
see arrays.py.

Shapes and dtypes that all methods share:

- `x`, `out`: floats, [count], of one of `format.DTYPES`.
- `inverse_steps`, `scales`: one number for each block of `format.SCALE_BLOCK` elements, [blocks]: float64 for float64
  tensors, float32 for all others. `inverse_steps` holds 1 / (quantization step), `scales` the factors that turn codes
  into floats.
- `codes`: int32, [count].
- `frame` to write: uint8, at least `format.max_frame_bytes(count)` long. The method returns the number of bytes it
  wrote. `frame` to read: uint8, exactly one frame.
- All tensors of a call are on one device. On a CUDA device calls return before the work is done, and follow the order
  of the current stream. The size of a frame is then a `cuda.DeviceSize`: the host waits for it when it uses it as an
  integer. The sizes of several frames are a tensor.
- `base`: floats, [count], of the dtype of `x` or `out`: an older version that every reader of the frame has.
- For a fixed rate (`block_magnitudes` and below): `rows`: `format.Rows`, the blocks that a call covers. `magnitudes`:
  bfloat16, [rows, blocks of a row], for all blocks of all rows. `packed`: uint8, [rows, blocks covered,
  `format.packed_bytes(bits)`]. Floats are of any of `format.DTYPES` but float64.
- `coding`: `format.Coding`, the coder and the predictor to use.
- `noise`: `format.Noise` to round up or down at random, None to round to nearest even.

Compiled backends check dtype, device, contiguity and length of each tensor before they take its address, see
addresses.py, and raise `format.WrongTensor`. They check every byte that came over a network, and raise
`format.DamagedFrame`. The output is unchanged after an error, unless a frame's damage shows only on decoding: then its
contents are undefined. On a CUDA device only `check` raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from . import damage
from .arrays import bytes_of, device_of, namespace, numpy_of, viewed
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

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .arrays import Array

_scratch = Scratch()


class Sum(NamedTuple):
    """Frame to write, of the codes of values plus the codes of other frames.

    Attributes:
        x, inverse_steps: the values, and the factors that turn them into codes.
        out: memory for the frame. It overlaps no other tensor of the call.
        frames: frames whose codes are added. Each has as many codes as `x` has elements.
        first: number of the first block of SCALE_BLOCK values, counted from the noise's first block.
    """

    x: Tensor
    inverse_steps: Tensor
    out: Tensor
    frames: Sequence[Tensor] = ()
    first: int = 0


class Decoding(NamedTuple):
    """Frame to read, with the scales of its codes and the memory for the floats."""

    frame: Tensor
    scales: Tensor
    out: Tensor


class Backend(ABC):
    """Kernels for one type of device.

    All backends compute the same numbers; those for the same type write the same bytes.
    """

    name: str
    costs: SelectorCosts = SelectorCosts()  # prices of this backend's coders; the caller sets the price of the link

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
    def encode_codes(self, codes: Array, coding: Coding, frame: Array) -> int:
        """Write `codes` as one frame. Returns its bytes."""

    @abstractmethod
    def decode_codes(self, frame: Array, codes: Array, add: bool = False) -> None:
        """Read one frame into `codes`. With `add`, add its codes to `codes`, modulo 2**32. Raises DamagedFrame."""

    @abstractmethod
    def encode(
        self, x: Tensor, inverse_steps: Tensor, coding: Coding, frame: Tensor, noise: Noise | None = None
    ) -> int:
        """`quantize` and `encode_codes` in one pass. Returns the bytes of the frame."""

    @abstractmethod
    def decode(self, frame: Tensor, scales: Tensor, out: Tensor) -> None:
        """`decode_codes` and `dequantize` in one pass. Raises DamagedFrame."""

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

        `out` and `frame` must not overlap. Returns the bytes of the new frame. Raises DamagedFrame.
        """

    # ------------------------------------------------------------------ differences between floats

    @abstractmethod
    def differences(self, x: Array, base: Array, codes: Array) -> None:
        """codes = the number of floats from `base` to `x`, with a sign. Exact for any bits, also NaN.

        Both are of one dtype, not float64. 0.0 and -0.0 are neighbours. Codes wrap, at 16 bits for the half types.
        """

    @abstractmethod
    def add_differences(self, codes: Array, base: Array, out: Array) -> None:
        """Inverse of `differences`, exact to the bit. `out` may be `base`."""

    # ------------------------------------------------------------------ several frames at once
    # On a GPU a call for several frames takes as many launches as a call for one. All tensors of a call have the same
    # dtypes.

    def statistics_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """`block_statistics` of several tensors in a row: float64, [3, blocks of all tensors]."""
        xp = namespace(tensors[0])
        return xp.cat([xp.stack(self.block_statistics(x)) for x in tensors], 1)

    def encode_sums(
        self, sums: Sequence[Sum], coding: Coding, noise: Noise | None = None, sealed: bool = False
    ) -> Tensor | np.ndarray:
        """Write several frames.

        Args:
            sealed: whether an added frame without a checksum counts as damaged.

        Returns: the bytes of each frame, int64, [len(sums)]: a tensor on the GPU of the frames, or a numpy array.

        Raises DamagedFrame for a damaged frame among those that are added.
        """
        nbytes = []
        for each in sums:
            x, inverse_steps, out, frames, first = each
            if sealed:
                require_seals(frames)
            noise_here = noise and noise.from_block(first)
            if len(frames) > 1:
                nbytes.append(self.encode_codes(self._added_up(each, noise), coding, out))
            elif frames:
                nbytes.append(self.reduce(frames[0], x, inverse_steps, coding, out, noise_here))
            else:
                nbytes.append(self.encode(x, inverse_steps, coding, out, noise_here))
        return np.array(nbytes)

    def decode_sum(self, sum: Sum, scales: Tensor, noise: Noise | None = None, sealed: bool = False) -> None:
        """Add up codes like `encode_sums`, and write their values as floats to `sum.out`, which may be `sum.x`.

        `sum.out` may have another dtype than `sum.x`, unless exactly one of them is float64.

        Args:
            sealed: see `encode_sums`.

        Raises DamagedFrame for a damaged frame among those that are added.
        """
        if sealed:
            require_seals(sum.frames)
        self.dequantize(self._added_up(sum, noise), scales, sum.out)

    def decode_sums(
        self, sums: Sequence[Sum], scales: Sequence[Tensor], noise: Noise | None = None, sealed: bool = False
    ) -> None:
        """`decode_sum` of each sum."""
        for each, to in zip(sums, scales, strict=True):
            self.decode_sum(each, to, noise, sealed)

    def _added_up(self, sum: Sum, noise: Noise | None) -> Tensor:
        """Codes of a sum, in memory that the next call overwrites."""
        x, inverse_steps, _, frames, first = sum
        codes = _scratch.of("sum", x.numel(), "int32", device_of(x))
        self.quantize(x, inverse_steps, codes, noise and noise.from_block(first))
        for frame in frames:
            self.decode_codes(frame, codes, add=True)
        return codes

    def decode_frames(self, decodings: Sequence[Decoding], sealed: bool = False) -> None:
        """`decode` each frame. `sealed`: see `encode_sums`."""
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
    def checksum(self, frame: Array) -> int:
        """Checksum of a whole frame, without its checksum field."""

    def digest(self, data: Array) -> int:
        """Checksum of all bytes of an array: 32 bits that differ if arrays differ, but for chance."""
        data = viewed(data, "uint8")
        if len(data) < HEADER_BYTES:
            short, data = data, _scratch.of("short", HEADER_BYTES, "uint8", device_of(data))
            data[len(short) :] = 0
            data[: len(short)] = short
        field = HEADER_BYTES // 4 - 1
        word = int.from_bytes(bytes_of(data[4 * field : HEADER_BYTES]), "little")
        return (self.checksum(data) + checksum_term(word, field)) % 2**32

    def check(self, report: Array | None = None) -> None:  # noqa: B027 - most backends have nothing to do here
        """Raise DamagedFrame if a call since the last check met damage. CPU kernels raise at once instead.

        Args:
            report: see `GpuBackend.report`.
        """

    def seal(self, frame: Array) -> None:
        """Write the checksum into a finished frame. Decoders verify it.

        Args:
            frame: memory that starts with the frame. It may be longer, for frames whose size the host does not know
                yet.
        """
        head = numpy_of(frame[:HEADER_BYTES])
        *fields, payload_bytes, _, _ = HEADER.unpack_from(head)
        fields += [payload_bytes, HAS_CHECKSUM]
        HEADER.pack_into(head, 0, *fields, 0)
        HEADER.pack_into(head, 0, *fields, self.checksum(frame[: HEADER_BYTES + payload_bytes]))

    # ------------------------------------------------------------------ a fixed rate, see reference/fixed_rate.py

    @abstractmethod
    def block_magnitudes(self, x: Tensor, rows: Rows, magnitudes: Tensor) -> None:
        """Largest magnitude of each block, rounded up to bfloat16, at least 2**-100.

        A block that holds a NaN or an infinity has +inf. `rows` covers all blocks.
        """

    @abstractmethod
    def pack(
        self, x: Tensor, rows: Rows, magnitudes: Tensor, bits: int, packed: Tensor, noise: Noise | None = None
    ) -> None:
        """Write codes of `bits` bits, 2 to 8.

        The largest code stands for the block's magnitude; all codes are 0 if that is +inf.
        """

    @abstractmethod
    def add_packed(self, packed: Tensor, count: int, bits: int, out: Tensor, out_bits: int) -> None:
        """Add up the codes of `count` rows into `out`, one row of sums. `out_bits` bits must hold each sum."""

    @abstractmethod
    def unpack(
        self, packed: Tensor, addends: int, bits: int, rows: Rows, magnitudes: Tensor, denominator: float, out: Tensor
    ) -> None:
        """out = sum of codes * (magnitude / denominator), rounded in float32, then to the dtype of `out`.

        The codes of `addends` ranks follow each other in `packed`. NaN for a magnitude of +inf.
        """


class HostBackend(Backend):
    """Kernels for host memory. They also measure blocks of SCALE_BLOCK and derive their steps in one pass each.

    core/codec/quantize.py does so for all other sizes of blocks, and explains the numbers.
    """

    @abstractmethod
    def rare_differences(self, x: Array, base: Array, most: int, gaps: Array, codes: Array) -> int:
        """Inverse of `add_rare_differences`, where up to `most` elements differ: writes `gaps` and `codes`.

        Args:
            gaps: room for `len(x) + OCTET` of them, int32.
            codes: room for `most`, int32.

        Returns the number of changes. If there are more than `most`, it may be too low, but not that low, and `gaps`
        and `codes` are undefined.
        """

    @abstractmethod
    def add_rare_differences(self, gaps: Array, codes: Array, base: Array, out: Array) -> bool:
        """`add_differences` of few elements; all others are those of `base`. `out` may be `base`.

        Args:
            gaps: elements that stay, between each change and the one before it: int32, [changes].
            codes: the changes: int32, [changes].

        Returns False, and leaves `out` as it is, unless there are changes, all in `base`, and none is 0.
        """

    def decode_changes(self, frame: Array, base: Array, out: Array, digests: np.ndarray | None = None) -> bool:
        """Read a frame of changes of `base`, floats of 16 or 32 bits, into `out`, which may be `base`, in one pass.

        Args:
            digests: room for the `digest` of `base` and that of `out`: uint32, [2].

        Returns False, and leaves `out` as it is, if the frame is damaged or this can't read it.
        """
        return False

    @abstractmethod
    def combination(
        self, values: Sequence[Tensor], how: Combination, out: Tensor, divisor: int = 1
    ) -> Callable[[], None]:
        """Function that combines the values of several ranks, element by element and in their order, into `out`.

        Preparing it takes as long as combining some thousand values, and can be done before the values arrive.

        All tensors have the same dtype, one of `format.COMBINED_DTYPES`. The caller must keep them until it has called
        the function. Half types are combined as float32, and integers wrap. NaN is both lower and higher than anything.
        `out` may be one of `values`.

        Args:
            divisor: of the result. Only floats are divided.
        """

    @abstractmethod
    def root_mean_squares(self, x: Tensor, most: float, out: Tensor) -> None:
        """Root mean square of each block, rounded down to bfloat16: `out`, [blocks].

        Infinity for a block that holds a NaN, an infinity, or a magnitude larger than `most`. Not for float64.
        """

    @abstractmethod
    def steps_of(self, agreed: Tensor, rule: StepRule) -> tuple[Tensor, Tensor, float]:
        """Inverse steps and scales of blocks, float32, [blocks], from the largest root mean squares among the ranks.

        Args:
            agreed: bfloat16, [blocks].

        Returns: inverse steps, scales, and the number of codes that the usual values of a block spread over, in the
        block where that is largest; 0 if a block has no step.
        """


class Recording(Protocol):
    """Launches that were recorded."""

    def replay(self, noise: Noise | None) -> None:
        """Make all launches again, with other random numbers. All other arguments are those of the recording."""


class GpuBackend(Backend):
    """Kernels of a GPU. They report damage later, and derive quantization steps on the device."""

    @abstractmethod
    def report(self, device: torch.device) -> Tensor:
        """Memory where this thread's kernels on `device` report the first damage: uint8, all zeros if there is none.

        `check` takes a copy of it in host memory. Without a copy, `check` waits for the reports of all devices.
        """

    @abstractmethod
    def forget_report(self, device: torch.device) -> None:
        """Give the next kernels a new report. Kernels that are still queued belong to a call that has failed."""

    @abstractmethod
    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory on `device`, from the arena inside of `recording`: uint8, [nbytes]."""

    @abstractmethod
    def arena(self, device: torch.device) -> object:
        """Working memory for `recording`. Its `restart` begins a call, whose launches may use all of it again."""

    @abstractmethod
    def recording(self, arena: object) -> AbstractContextManager[Recording]:
        """A context that records the launches of this thread's calls, which take their working memory from `arena`."""

    @abstractmethod
    def decode_sums(
        self,
        sums: Sequence[Sum],
        scales: Sequence[Tensor],
        noise: Noise | None = None,
        sealed: bool = False,
        padded: bool = False,
    ) -> None:
        """`decode_sum` of each sum.

        Args:
            padded: True if a frame's memory may be longer or shorter than the frame, which is then no damage. A sum
                with a frame that is cut off is not written; if `out` and `x` have different dtypes, its contents are
                undefined.
        """

    @abstractmethod
    def pad_frames(self, memory: Sequence[Tensor], sizes: Tensor) -> None:
        """Write the length in front of each frame and zeros behind it, for frames whose size the host does not know.

        Args:
            memory: for each frame uint8: FRONT_BYTES for its length and zeros, the frame, zeros to the end. A frame
                that does not fit is cut off.
            sizes: bytes of each frame: int64, [len(memory)], on the device.
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
        """Result of `quantize.measure` in core/codec, on the device.

        Sums over several blocks may differ in the last bit.

        Args:
            tensors: values of each of `segments`.
            lengths: elements of all segments of the tensor.
            segments: numbers of the segments to measure.
            block: elements that share a scale; 0: all.
            mode: one of `format.MODES`.
            most: magnitudes above it count as infinite, in mode rms only.
            dtype: dtype of the steps: float64 for float64 values, float32 for all others.
        """

    @abstractmethod
    def derive_steps(
        self, agreed: Tensor, lengths: Sequence[int], block: int, rule: StepRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Result of `quantize.derive` in core/codec, on the device, from the maximum over ranks.

        Returns: inverse steps and scales, one per SCALE_BLOCK elements, zeros where a block allows none; and int64,
        [segments, 4], or [1, 4] where `block` is 0: the number of blocks with values that are not finite, the number of
        blocks whose codes overflow, 2**20 times the sum of the bits that a value takes with each step, and a
        checksum of `agreed`.
        """


def require_seals(frames: Sequence[Array]) -> None:
    """Raise DamagedFrame if a frame in host memory has no checksum."""
    for frame in frames:
        if len(frame) >= HEADER_BYTES:
            *_, flags, _ = HEADER.unpack(numpy_of(frame[:HEADER_BYTES]))
            if not flags:  # the kernels refuse unknown flags
                raise damage.error(-damage.NO_CHECKSUM, b"", len(frame), 0)
