"""What every backend offers: the kernels' one interface, on contiguous 1-D torch tensors.

Shapes and dtypes that all methods share:

- `x`, `out`: floats, [count], of one of `format.DTYPES`.
- `inverse_steps`, `scales`: one number per chunk of `format.CHUNK` elements, [chunks], float64 for
  float64 tensors and float32 for all others. `inverse_steps` holds 1/step; `scales` holds what a
  code is multiplied by.
- `codes`: int32, [count].
- `frame` to write: uint8 with room for at least `format.max_frame_bytes(count)`; the method returns
  how many bytes it wrote. `frame` to read: uint8, exactly one frame.
- All tensors of a call are on one device. On a CUDA device calls return before the work is done, which goes on
  in the order of the current stream; a size is a `cuda.DeviceSize` then, an integer that the host only waits for
  when it is used as one.
- `coding`: `format.Coding`, which coder and predictor to use.
- `noise`: `format.Noise` to round at random, None to round to the nearest.

Backends never check what a caller inside this package gets right by construction (dtype, device,
contiguity); they check everything that came over a network, and raise `format.DamagedFrame`. Nothing
is written then, unless the damage of a HUFFMAN or RANS frame shows only on decoding: what the output
holds is undefined in that case. On a CUDA device, damage does not show before `check` is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from .format import HAS_CHECKSUM, HEADER, HEADER_BYTES, Coding, Noise, SelectorCosts


class Backend(ABC):
    """Kernels for one kind of device. All backends produce the same bytes and the same numbers."""

    name: str
    costs: SelectorCosts = SelectorCosts()  # what coding costs here; the price of the link is the caller's to set

    @abstractmethod
    def chunk_statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Lowest value, highest value and sum of squares of each chunk: three float64 tensors, [chunks].

        They are -inf, +inf and +inf for a chunk that holds a NaN or an infinity.
        """

    @abstractmethod
    def quantize(self, x: Tensor, inverse_steps: Tensor, codes: Tensor, noise: Noise | None = None) -> None:
        """codes = x * inverse_step, rounded, clamped to what int32 holds."""

    @abstractmethod
    def dequantize(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """out = codes * scale, rounded to nearest even in the dtype of `out`."""

    @abstractmethod
    def encode_codes(self, codes: Tensor, coding: Coding, frame: Tensor) -> int:
        """Write `codes` as one frame."""

    @abstractmethod
    def decode_codes(self, frame: Tensor, codes: Tensor, add: bool = False) -> None:
        """Read one frame into `codes`; with `add`, add to what stands there (modulo 2**32)."""

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

    @abstractmethod
    def checksum(self, frame: Tensor) -> int:
        """The checksum of a whole frame, whatever stands in its checksum field."""

    def check(self) -> None:  # noqa: B027 - most backends have nothing to do here
        """Raise DamagedFrame for what calls since the last check found damaged. CPU kernels have raised at once."""

    def seal(self, frame: Tensor) -> None:
        """Give a finished frame its checksum. The decoders verify it.

        Args:
            frame: begins with the frame, and may go on behind it, so that a frame can be sealed whose size the host
                does not know yet.
        """
        header = HEADER.unpack_from(frame[:HEADER_BYTES].numpy())
        *_, payload_bytes, _, _ = header
        frame = frame[: HEADER_BYTES + payload_bytes]
        fields = [*header[:-2], HAS_CHECKSUM]
        HEADER.pack_into(frame[:HEADER_BYTES].numpy(), 0, *fields, 0)
        HEADER.pack_into(frame[:HEADER_BYTES].numpy(), 0, *fields, self.checksum(frame))
