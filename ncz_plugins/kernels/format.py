"""The layout of a frame: constants and types that all kernels must agree on.

common/format.h holds the same for C++ and CUDA. docs/reference/wire-format.md explains the format; the package
`reference` is its executable specification.
"""

from __future__ import annotations

import functools
import struct
from enum import IntEnum
from typing import NamedTuple

import torch

MAGIC = 0x465A434E  # "NCZF", little endian
VERSION = 1
# magic, version, coder, predictor, width, count, payload bytes, flags, checksum
HEADER = struct.Struct("<IBBBBIIII")
HEADER_BYTES = HEADER.size
FRONT_BYTES = 16  # before a frame that is padded, see GpuBackend.pad_frames: NCCL copies so many at a time

CHUNK = 4096  # elements that are coded together: delta restarts
BLOCK = 32  # symbols that share one width byte in FIXED
OCTET = 8  # symbols that are packed together; a short last block is padded to whole octets
PIECE, SAMPLE_PIECES = 128, 64  # codes in a piece; pieces that the selector looks at
SCALE_BLOCK = 128  # elements that share a quantization step, or more of them; a chunk has whole blocks of these
LANES = 32  # partial sums per such block, so that every backend adds squares in the same order
RATE_BLOCK = 256  # elements that share a magnitude at a fixed rate

_UINT64 = 2**64 - 1

CHECKSUM_KEY = 0x9E3779B1
HAS_CHECKSUM, SPOILED = 1, 2  # in the flags; a spoiled frame was made of a damaged one

DIRECT = 128  # HUFFMAN and RANS: smaller symbols are their own tokens
BITS_IN_TOKEN = 2  # of a larger symbol, besides its exponent: the bit below the leading one, and the lowest
TOKENS = DIRECT + (32 - 7 << BITS_IN_TOKEN)
HUFFMAN_MAX_LENGTH = 11  # bits
HUFFMAN_LANES = 4  # bit strings per chunk
HUFFMAN32_PAGE, HUFFMAN32_ROW = 2 * CHUNK, 128  # codes that are written together, and those of all its lanes in turn
HUFFMAN32_LANES = 32  # bit strings per page
HUFFMAN32_MOST_WORDS = 96  # of 16 bits, of a lane
HUFFMAN32_MOST_BITS = 5  # of a code in the sample, so that a lane with somewhat more finds room
ESCAPE = TOKENS  # stands in front of a token that has no code, in HUFFMAN32
ESCAPED_BITS = 8  # of such a token
PLANES_TILE, PLANES_ROW = 1024, 128  # codes that are written together, and those of all its lanes in turn
PLANES_LANES = 32  # per tile, each with planes of its own
RANS_LANES = 4  # states per page
RANS_PAGE = 4 * CHUNK
RANS_BITS = 12  # of a probability
RANS_LOWEST = 1 << 16  # state

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COMBINED_DTYPES = (*DTYPES, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)  # of uncompressed sums


class Coder(IntEnum):
    """How the symbols of a frame are written. AUTO asks the selector to choose and never stands in a frame."""

    RAW = 0
    FIXED = 1
    HUFFMAN = 2
    RANS = 3
    SPLIT = 4  # floats, not codes: see lossless.py
    HUFFMAN32 = 5
    PLANES = 6
    AUTO = 255


# What coders mean on GPUs, if something else than on CPUs. No frame passes from one to the other.
ON_GPUS = {Coder.RAW: Coder.PLANES, Coder.FIXED: Coder.PLANES, Coder.HUFFMAN: Coder.HUFFMAN32}


class Combination(IntEnum):
    """What becomes of the values of several ranks, see HostBackend.combination."""

    ADD = 0
    MULTIPLY = 1
    LOWEST = 2
    HIGHEST = 3


class Predictor(IntEnum):
    """What is subtracted from each code before coding; AUTO never stands in a frame."""

    NONE = 0
    DELTA = 1
    AUTO = 255


class SelectorCosts(NamedTuple):
    """The selector's prices, in picoseconds. Those per code are for encoding and decoding together."""

    link: int = 8000  # per byte: 1 Gbit/s
    raw: int = 600  # per code
    fixed: int = 500
    huffman: int = 1800
    rans: int = 900
    rans_rest: int = 3000  # per code other than the most frequent one


class Coding(NamedTuple):
    """How to write codes. The selector chooses for each frame what is AUTO."""

    coder: Coder = Coder.AUTO
    predictor: Predictor = Predictor.AUTO
    costs: SelectorCosts = SelectorCosts()


class Noise(NamedTuple):
    """Names the random numbers that decide how a tensor's elements are rounded."""

    seed: int  # below 2**64
    call: int  # below 2**32
    shift: int = 0  # below 2**32; added to each number, modulo 2**32: what ranks differ in
    first: int = 0  # number of the first element

    def from_element(self, number: int) -> Noise:
        """That of the elements from this one on."""
        return self._replace(first=self.first + number)

    @property
    def key(self) -> int:
        """What kernels take in place of seed and call, below 2**64. No two pairs of them should be related."""
        return _split_mix(_split_mix(self.seed) + self.call)


def _split_mix(state: int) -> int:
    """A step of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    z = state + 0x9E3779B97F4A7C15 & _UINT64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _UINT64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _UINT64
    return z ^ z >> 31


class Rows(NamedTuple):
    """Runs of a flat tensor, equally long but for the end of the tensor, as the kernels for a fixed rate see them.

    Blocks of RATE_BLOCK elements start afresh in every row. A call covers the same blocks of each row.
    """

    numel: int  # of the tensor
    count: int  # rows
    elements: int  # from the beginning of a row to that of the next
    first: int  # of the blocks that the call covers, counted within a row
    blocks: int  # that the call covers, of each row

    @classmethod
    def of(cls, numel: int, count: int, elements: int) -> Rows:
        """All blocks of rows of so many elements."""
        return cls(numel, count, elements, 0, rate_blocks_of(elements))


class StepRule(NamedTuple):
    """How quantization steps follow from what ranks measured: the numbers that all blocks of a call share.

    core/codec/quantize.py says what follows from them.
    """

    mode: int  # as in MODES
    value: float  # the bound, relative to what the mode says
    addends: float  # codes that are summed
    share: float  # of a sum of equal addends, in the result
    divisor: float  # of a sum
    steps_per_bound: float  # 2 where codes are rounded to nearest, 1 at random
    least: float  # smaller bounds count as this one
    reserved: float  # for the arithmetic, as a part of the largest result
    most: float  # larger results are not finite
    rounding: float  # of a result to its dtype, relative to it; 0 where that does not count
    tiny: float  # the smallest normal number of that dtype
    cap: float  # no step is larger


# The last one is rms where ranks agree on the root mean squares only, in bfloat16.
MODES = ("abs", "rel", "rms", "range", "rms only")


class DamagedFrame(ValueError):
    """The bytes are not a whole, valid frame of the expected number of codes."""


class WrongTensor(TypeError):
    """A tensor does not fit the argument of a kernel that it was passed as. The kernel did not run.

    A mistake of this package: public functions check what they are given, and say so in words of their own.
    """


def checksum_term(word: int, number: int) -> int:
    """What a 32-bit word adds to a checksum. `number`: of the word, from 0."""
    v = (word ^ word >> 16) * (2 * number + 1) * CHECKSUM_KEY & 0xFFFFFFFF
    return v ^ v >> 15


def chunks_of(count: int) -> int:
    """Number of chunks of `count` elements; the last may be short."""
    return -(-count // CHUNK)


@functools.lru_cache(maxsize=256)  # every call of a kernel that writes a frame asks, for few different counts
def max_frame_bytes(count: int) -> int:
    """An upper bound of the bytes of a frame of `count` codes, on any kind of processor."""
    octets, tiles = -(-count // OCTET), tiles_of(count)
    on_cpus = 2 * chunks_of(count) + -(-count // BLOCK) + 4 * OCTET * octets
    # In PLANES a tile has no more than 32 planes of all lanes. The last one may have masks of 32 planes besides.
    in_last = min(PLANES_TILE, PLANES_LANES + 32 * min(PLANES_LANES, -(-(count % PLANES_TILE) // 4)))
    words = PLANES_TILE * (count // PLANES_TILE) + (in_last if count % PLANES_TILE else 0)
    on_gpus = 4 * (chunks_of(count) + 2 * tiles + words)
    return HEADER_BYTES + max(on_cpus, on_gpus)


def tiles_of(count: int) -> int:
    """Number of tiles of `count` codes in PLANES; the last may be short."""
    return -(-count // PLANES_TILE)


def blocks_of(elements: int) -> int:
    """Number of blocks of so many elements that share a scale; the last may be short."""
    return -(-elements // SCALE_BLOCK)


def rate_blocks_of(elements: int) -> int:
    """Likewise at a fixed rate."""
    return -(-elements // RATE_BLOCK)


def packed_bytes(bits: int) -> int:
    """Bytes of a block's codes at a fixed rate of so many bits."""
    return RATE_BLOCK // 8 * bits
