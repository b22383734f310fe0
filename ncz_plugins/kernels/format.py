"""Layout of a frame: constants and types that all kernels must agree on.

common/format.h holds the same for C++ and CUDA. docs/reference/wire-format.md explains the format. The package
`reference` is its executable specification.
"""

from __future__ import annotations

import functools
import struct
from enum import IntEnum
from typing import Any, NamedTuple

MAGIC = 0x465A434E  # "NCZF", little endian
VERSION = 1
# magic, version, coder, predictor, width, count, payload bytes, flags, checksum
HEADER = struct.Struct("<IBBBBIIII")
HEADER_BYTES = HEADER.size
FRONT_BYTES = 16  # in front of a padded frame, see GpuBackend.pad_frames; NCCL copies 16 bytes at a time

CHUNK = 4096  # elements that are coded together; the predictor DELTA starts again in each chunk
BLOCK = 32  # symbols that share one width byte in FIXED
OCTET = 8  # symbols that are packed together; a short last block is padded to whole octets
PIECE, SAMPLE_PIECES = 128, 64  # codes in a piece of the selector's sample, and pieces in the sample
SCALE_BLOCK = 128  # smallest number of elements that share a quantization step; divides CHUNK
LANES = 32  # partial sums of squares per SCALE_BLOCK, so that every backend adds in the same order
RATE_BLOCK = 256  # elements that share a magnitude at a fixed rate
MAX_CODE = 2**31 - 2**10  # largest sum of all ranks' codes; less than int32 holds, because products are rounded
BFLOAT16_ROUNDING = 1 + 2.0**-7  # a number is less than this times its value rounded down to bfloat16

_UINT64 = 2**64 - 1

CHECKSUM_KEY = 0x9E3779B1
HAS_CHECKSUM, SPOILED = 1, 2  # flags; a spoiled frame is a sum with a damaged frame

DIRECT = 128  # HUFFMAN and RANS: symbols below it are their own tokens
BITS_IN_TOKEN = 2  # bits of a larger symbol in its token, besides the exponent: below the leading one, and the lowest
TOKENS = DIRECT + (32 - 7 << BITS_IN_TOKEN)
HUFFMAN_MAX_LENGTH = 11  # bits of the longest code
HUFFMAN_LANES = 4  # bit strings per chunk
HUFFMAN32_PAGE, HUFFMAN32_ROW = 2 * CHUNK, 128  # codes in a page, and in a row that all lanes of a page share
HUFFMAN32_LANES = 32  # bit strings per page
HUFFMAN32_MOST_WORDS = 96  # most words of 16 bits in a lane
HUFFMAN32_MOST_BITS = 5  # most bits per code of the sample, which leaves room for lanes that need more
ESCAPE = TOKENS  # HUFFMAN32: stands in front of a letter that has no code
ESCAPED_BITS = 8  # bits of a letter behind ESCAPE
# HUFFMAN32 of mostly zeros: a letter stands for a gap, the zeros in front of another symbol of a lane, and that symbol.
GAPPED = 1  # the width in the header of such a frame; 0: letters are tokens
NO_MORE = 0  # letter: the rest of the lane is zero
GAP_LENGTHS = 9  # bit lengths of a gap: a lane has 256 symbols
GAP_SYMBOLS = 15  # symbols from this one on share a letter for each length, and have a token behind it
GAP_LETTERS = 1 + GAP_LENGTHS * GAP_SYMBOLS
PLANES_TILE, PLANES_ROW = 1024, 128  # codes in a tile, and in a row that all lanes of a tile share
PLANES_LANES = 32  # lanes per tile, each with its own number of bit planes
RANS_LANES = 4  # states per page
RANS_PAGE = 4 * CHUNK  # codes
RANS_BITS = 12  # bits of a frequency
RANS_LOWEST = 1 << 16  # lowest state

# Names of dtypes by their numbers in kernels. DTYPES and COMBINED_DTYPES are the same as dtypes of torch.
FLOATS = ("float32", "bfloat16", "float16", "float64")
COMBINED = (*FLOATS, "int64", "int32", "int8", "uint8", "bool")  # uncompressed sums


def __getattr__(name: str) -> Any:
    """DTYPES and COMBINED_DTYPES, which import torch when they are asked for: what codes files does without."""
    names = {"DTYPES": FLOATS, "COMBINED_DTYPES": COMBINED}.get(name)
    if names is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    return globals().setdefault(name, tuple(getattr(torch, each) for each in names))


class Coder(IntEnum):
    """Coder of a frame's symbols. AUTO asks the selector to choose, and never stands in a frame."""

    RAW = 0
    FIXED = 1
    HUFFMAN = 2
    RANS = 3
    SPLIT = 4  # floats, not codes: see lossless.py
    HUFFMAN32 = 5
    PLANES = 6
    SPARSE = 7  # changes of few elements: see sparse.py
    AUTO = 255


# Coders of GPUs for the coders that settings name. RANS has none. GPUs and CPUs never exchange frames.
ON_GPUS = {Coder.RAW: Coder.PLANES, Coder.FIXED: Coder.PLANES, Coder.HUFFMAN: Coder.HUFFMAN32}
ON_CPUS_ALONE = {*ON_GPUS, Coder.RANS}


def coder_of_gpus(coder: Coder) -> Coder:
    """The coder of GPUs for one that settings name. Raises ValueError for RANS."""
    if coder == Coder.RANS:
        raise ValueError("GPUs have no coder RANS: pass AUTO or HUFFMAN")
    return ON_GPUS.get(coder, coder)


class Combination(IntEnum):
    """Operation on the values of several ranks, see HostBackend.combination."""

    ADD = 0
    MULTIPLY = 1
    LOWEST = 2
    HIGHEST = 3


class Predictor(IntEnum):
    """Predictor, whose value is subtracted from each code before coding. AUTO never stands in a frame."""

    NONE = 0
    DELTA = 1
    AUTO = 255


class SelectorCosts(NamedTuple):
    """Prices of the selector in picoseconds. Prices per code are for encoding and decoding together."""

    link: int = 8000  # per byte: 1 Gbit/s
    raw: int = 600  # per code, like the next three
    fixed: int = 500
    huffman: int = 1800
    rans: int = 900
    rans_rest: int = 3000  # in addition, per code other than the most frequent one


class Coding(NamedTuple):
    """Coder and predictor of a frame. The selector chooses for each frame if one is AUTO."""

    coder: Coder = Coder.AUTO
    predictor: Predictor = Predictor.AUTO
    costs: SelectorCosts = SelectorCosts()


class Noise(NamedTuple):
    """Key of the random numbers that round a tensor's elements up or down."""

    seed: int  # below 2**64
    call: int  # below 2**32
    shift: int = 0  # below 2**32, different on each rank: random numbers move by this share of their range
    first: int = 0  # number of the first block of SCALE_BLOCK elements

    def from_block(self, number: int) -> Noise:
        """Noise of the blocks of SCALE_BLOCK elements from this number on."""
        return self._replace(first=self.first + number)

    @property
    def key(self) -> int:
        """Number below 2**64 that kernels take for seed and call.

        A hash, so that keys of different pairs are unrelated.
        """
        return _split_mix(_split_mix(self.seed) + self.call)


def _split_mix(state: int) -> int:
    """One step of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    z = state + 0x9E3779B97F4A7C15 & _UINT64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _UINT64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _UINT64
    return z ^ z >> 31


class Rows(NamedTuple):
    """Rows of a flat tensor, for the kernels of a fixed rate.

    All rows are equally long; the tensor may end within one.

    Blocks of RATE_BLOCK elements start again in every row. A call covers the same blocks of each row.
    """

    numel: int  # elements of the tensor
    count: int  # number of rows
    elements: int  # elements of a row
    first: int  # number of the first block that the call covers, within a row
    blocks: int  # blocks that the call covers in each row

    @classmethod
    def of(cls, numel: int, count: int, elements: int) -> Rows:
        """All blocks of `count` rows of `elements` elements each."""
        return cls(numel, count, elements, 0, rate_blocks_of(elements))


class StepRule(NamedTuple):
    """Rule for quantization steps: the numbers that all blocks of a call share.

    core/codec/quantize.py derives steps from them.
    """

    mode: int  # as in MODES
    value: float  # bound, relative to the measure that the mode names
    addends: float  # number of codes in a sum
    share: float  # addends / divisor: a result, if all addends are 1
    divisor: float  # divisor of a sum
    steps_per_bound: float  # 2 if codes are rounded to nearest, 1 if at random
    least: float  # smallest bound; smaller bounds count as this one
    reserved: float  # part of the largest result that is reserved for rounding in the arithmetic
    most: float  # largest finite result
    rounding: float  # relative rounding of a result to its dtype; 0 if it does not count
    tiny: float  # smallest normal number of the result's dtype
    cap: float  # largest step


# "rms only": ranks agree on root mean squares alone, in bfloat16.
MODES = ("abs", "rel", "rms", "range", "rms only")


class DamagedFrame(ValueError):
    """Error: the bytes are not a whole, valid frame of the expected number of codes."""


class WrongTensor(TypeError):
    """Error: a tensor does not fit the argument of a kernel. The kernel did not run.

    It is a mistake of this package. Public functions check their arguments first, and raise errors of their own.
    """


def checksum_term(word: int, number: int) -> int:
    """Term of a checksum for one 32-bit word. `number`: the word's number in the frame, from 0."""
    v = (word ^ word >> 16) * (2 * number + 1) * CHECKSUM_KEY & 0xFFFFFFFF
    return v ^ v >> 15


def chunks_of(count: int) -> int:
    """Number of chunks of `count` elements. The last chunk may be short."""
    return -(-count // CHUNK)


@functools.lru_cache(maxsize=256)  # every kernel that writes a frame calls it, with few different counts
def max_frame_bytes(count: int) -> int:
    """Upper bound of the bytes of a frame of `count` codes, on CPUs and GPUs."""
    octets, tiles = -(-count // OCTET), tiles_of(count)
    on_cpus = 2 * chunks_of(count) + -(-count // BLOCK) + 4 * OCTET * octets
    # PLANES: a whole tile has at most 32 planes of all lanes. The last tile may have masks of 32 planes in addition.
    in_last = min(PLANES_TILE, PLANES_LANES + 32 * min(PLANES_LANES, -(-(count % PLANES_TILE) // 4)))
    words = PLANES_TILE * (count // PLANES_TILE) + (in_last if count % PLANES_TILE else 0)
    on_gpus = 4 * (chunks_of(count) + 2 * tiles + words)
    return HEADER_BYTES + max(on_cpus, on_gpus)


def tiles_of(count: int) -> int:
    """Number of PLANES tiles of `count` codes. The last tile may be short."""
    return -(-count // PLANES_TILE)


def blocks_of(elements: int) -> int:
    """Number of blocks of SCALE_BLOCK elements. The last block may be short."""
    return -(-elements // SCALE_BLOCK)


def rate_blocks_of(elements: int) -> int:
    """Number of blocks of RATE_BLOCK elements. The last block may be short."""
    return -(-elements // RATE_BLOCK)


def packed_bytes(bits: int) -> int:
    """Bytes of a block's codes at a fixed rate of `bits` bits."""
    return RATE_BLOCK // 8 * bits
