// The layout of a frame: its constants, and what follows from them. ../format.py holds the same for Python, and
// docs/reference/wire-format.md explains it. The kernels of all processors include this file.
#pragma once

#ifdef __CUDACC_RTC__  // NVRTC has no headers; it knows size_t and memcpy without
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
#else
#include <cstddef>
#include <cstdint>
#include <cstring>

#define NCZ_EXPORT extern "C" __attribute__((visibility("default")))

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the frame format is little endian, and these kernels read and write it by plain loads and stores"
#endif
#endif

// Declares a function for every kind of processor.
#ifdef __CUDACC__
#define NCZ_FUNCTION __host__ __device__ __forceinline__
#else
#define NCZ_FUNCTION inline
#endif

namespace ncz {

constexpr int32_t ABI_VERSION = 10;  // of the C functions; ../cpu/__init__.py expects the same

constexpr uint32_t MAGIC = 0x465A434E;
constexpr uint8_t VERSION = 1;

constexpr int64_t CHUNK = 4096;
constexpr int BLOCK = 32;
constexpr int OCTET = 8;
constexpr int OCTETS = BLOCK / OCTET;
constexpr int64_t PIECE = 128, SAMPLE_PIECES = 64;
constexpr int SCALE_BLOCK = 128;
constexpr int LANES = 32;
constexpr int RATE_BLOCK = 256;

constexpr uint32_t HAS_CHECKSUM = 1, SPOILED = 2;
constexpr uint32_t CHECKSUM_KEY = 0x9E3779B1;
constexpr uint32_t RANDOM_OF_BLOCK = 0x9E3779B9, RANDOM_OF_FOUR = 0x2C1B3C6D;  // numbers that are hashed
constexpr uint32_t RANDOM_FIRST = 0x7FEB352D, RANDOM_SECOND = 0x846CA68B, RANDOM_THIRD = 0xC2B2AE35;  // multipliers
constexpr int FOURS = 32;  // of four elements each in a block that has one step

constexpr unsigned DIRECT = 128;
constexpr unsigned BITS_IN_TOKEN = 2;
constexpr unsigned LEAST_EXTRA_BITS = 7 - BITS_IN_TOKEN;  // of tokens that have any
constexpr unsigned TOKENS = DIRECT + ((32 - 7) << BITS_IN_TOKEN);
constexpr unsigned HUFFMAN_MAX_LENGTH = 11;
constexpr int HUFFMAN_LANES = 4;
constexpr int64_t HUFFMAN32_PAGE = 2 * CHUNK;
constexpr int HUFFMAN32_ROW = 128, HUFFMAN32_LANES = 32, HUFFMAN32_MOST_WORDS = 96, HUFFMAN32_MOST_BITS = 5;
constexpr unsigned ESCAPE = TOKENS, ESCAPED_BITS = 8;
constexpr unsigned GAPPED = 1, NO_MORE = 0, GAP_LENGTHS = 9, GAP_SYMBOLS = 15, GAP_LETTERS = 1 + GAP_LENGTHS * GAP_SYMBOLS;
constexpr int RANS_LANES = 4;
constexpr int64_t RANS_PAGE = 4 * CHUNK;
constexpr unsigned RANS_BITS = 12;
constexpr uint32_t RANS_LOWEST = 1 << 16;
constexpr int64_t PLANES_TILE = 1024;
constexpr int PLANES_ROW = 128, PLANES_LANES = 32;

enum Coder : int32_t { RAW = 0, FIXED = 1, HUFFMAN = 2, RANS = 3, HUFFMAN32 = 5, PLANES = 6, SPARSE = 7, AUTO_CODER = 255 };
enum Predictor : int32_t { NONE = 0, DELTA = 1, AUTO_PREDICTOR = 255 };

// Element types, numbered as in format.DTYPES. The two half types are handled as bits.
enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT64 = 3 };
struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

struct Header {
    uint32_t magic;
    uint8_t version, coder, predictor, width;
    uint32_t count, payload_bytes, flags, checksum;
};
constexpr int64_t HEADER_BYTES = sizeof(Header);
static_assert(HEADER_BYTES == 24, "the header has no padding");
constexpr int64_t FRONT_BYTES = 16;  // before a frame that is padded: its length, and zeros

// The selector's prices in picoseconds, as in format.py.
struct SelectorCosts {
    int64_t link, raw, fixed, huffman, rans, rans_rest;
};
struct Coding {
    int32_t coder, predictor;
    SelectorCosts costs;
};
struct Noise {  // format.Noise
    uint64_t key, first;
    uint32_t shift;
};

// Why a frame was refused. Functions return -(cause + 256 * value); ../damage.py makes the message.
enum Damage : int64_t {
    NO_HEADER = 1,
    BAD_MAGIC = 2,
    BAD_VERSION = 3,
    BAD_FLAGS = 4,
    BAD_PREDICTOR = 5,
    OTHER_COUNT = 6,
    OTHER_LENGTH = 7,
    RAW_LENGTH = 8,
    BAD_CODER = 9,
    NO_TABLE = 10,
    TABLE_SUM = 11,  // value: what the chunk sizes add up to
    BAD_WIDTH = 12,
    CHUNK_LENGTH = 13,    // value: bytes of the chunk
    OTHER_CHECKSUM = 14,  // value: what it is
    HUFFMAN_TABLE = 15,   // value: lengths that it should have
    HUFFMAN_CODE = 16,
    HUFFMAN_NO_LANES = 17,  // value: bytes behind the code
    HUFFMAN_LANE_SUM = 18,  // value: as before
    HUFFMAN_LANE = 19,
    RANS_MODE = 20,  // value: the mode
    RANS_TABLE = 21,
    RANS_FREQUENCIES = 22,
    RANS_NO_PAGES = 23,  // value: bytes behind the frequencies
    RANS_PAGE_SUM = 24,  // value: as before
    RANS_DAMAGED_PAGE = 25,
    MADE_OF_DAMAGE = 26,
    NO_CHECKSUM = 27,
    PAGES_TABLE = 28,  // value: bytes behind the code
    PAGES_SUM = 29,    // value: bytes behind the table
    DAMAGED_PAGE = 30,
    PLANES_TABLES = 31,
    TILES_SUM = 32,  // value: words of all tiles
    DAMAGED_TILE = 33
};

}  // namespace ncz

// Functions are local to each file, so that nothing that was compiled for AVX2 is linked into the portable kernels.
namespace {

NCZ_FUNCTION int64_t damaged(ncz::Damage cause, int64_t value = 0) { return -(int64_t(cause) + 256 * value); }

NCZ_FUNCTION int64_t chunks_of(int64_t count) { return (count + ncz::CHUNK - 1) / ncz::CHUNK; }

// Blocks that have a quantization step each.
NCZ_FUNCTION int64_t scale_blocks_of(int64_t count) { return (count + ncz::SCALE_BLOCK - 1) / ncz::SCALE_BLOCK; }

// Random numbers of four neighbouring elements, as ../reference/values.py specifies them: those with number `four` in the
// block of SCALE_BLOCK elements with number `block`, of which the lower 32 bits count.
NCZ_FUNCTION uint32_t random_start(const ncz::Noise& noise, uint64_t block, uint32_t four) {
    return uint32_t(block) * ncz::RANDOM_OF_BLOCK + four * ncz::RANDOM_OF_FOUR + uint32_t(noise.key);
}

// From there to the words that two of them have each.
template <class Word>  // uint32_t, or several in a vector
NCZ_FUNCTION void random_words(const ncz::Noise& noise, Word start, Word& first, Word& second) {
    Word x = (start ^ start >> 16) * ncz::RANDOM_FIRST;
    x = (x ^ x >> 15 ^ uint32_t(noise.key >> 32)) * ncz::RANDOM_SECOND;
    uint32_t shift = (noise.shift >> 16) * 0x10001u;  // of both halves
    first = x + shift;
    second = (x << 8 | x >> 24) * ncz::RANDOM_THIRD + shift;
}

// Bits per symbol of a RAW frame whose largest symbol has `bits`.
NCZ_FUNCTION unsigned raw_width_of(unsigned bits) { return bits <= 8 ? 8 : bits <= 16 ? 16 : 32; }

// Elements in chunk `chunk` of `count` elements; below 1 behind the last.
NCZ_FUNCTION int length_of(int64_t chunk, int64_t count) {
    int64_t left = count - chunk * ncz::CHUNK;
    return int(left < ncz::CHUNK ? left : ncz::CHUNK);
}

NCZ_FUNCTION int blocks_of(int n) { return (n + ncz::BLOCK - 1) / ncz::BLOCK; }
NCZ_FUNCTION int octets_of(int n) { return (n + ncz::OCTET - 1) / ncz::OCTET; }

// How many extra bits a symbol with this token has: the bits that the token does not determine.
NCZ_FUNCTION unsigned extra_bits_of(unsigned token) {
    return token < ncz::DIRECT ? 0 : ((token - ncz::DIRECT) >> ncz::BITS_IN_TOKEN) + ncz::LEAST_EXTRA_BITS;
}

// The lowest symbol with this token, whose extra bits are zero. A symbol is that plus twice its extra bits.
NCZ_FUNCTION uint32_t base_of(unsigned token) {
    return token < ncz::DIRECT ? token : (2 + (token >> 1 & 1)) << (extra_bits_of(token) + 1) | (token & 1);
}

// The damage in the header of a frame of `bytes` that must hold `count` codes; 0 if there is none. Callers then check
// the checksum, then coder_damage. The order decides which of several damages is reported.
NCZ_FUNCTION int64_t header_damage(const ncz::Header& header, int64_t bytes, int64_t count) {
    if (bytes < ncz::HEADER_BYTES) return damaged(ncz::NO_HEADER);
    if (header.magic != ncz::MAGIC) return damaged(ncz::BAD_MAGIC);
    if (header.version != ncz::VERSION) return damaged(ncz::BAD_VERSION);
    if (header.flags == ncz::SPOILED) return damaged(ncz::MADE_OF_DAMAGE);
    if (header.flags != ncz::HAS_CHECKSUM && (header.flags || header.checksum)) return damaged(ncz::BAD_FLAGS);
    if (header.predictor != ncz::NONE && header.predictor != ncz::DELTA) return damaged(ncz::BAD_PREDICTOR);
    if (header.count != count) return damaged(ncz::OTHER_COUNT);
    if (header.payload_bytes != bytes - ncz::HEADER_BYTES) return damaged(ncz::OTHER_LENGTH);
    return 0;
}

// Of coders of CPUs.
NCZ_FUNCTION int64_t coder_damage(const ncz::Header& header) {
    unsigned width = header.width;
    if (header.coder == ncz::RAW && (width == 8 || width == 16 || width == 32))
        return header.payload_bytes == int64_t(header.count) * (width / 8) ? 0 : damaged(ncz::RAW_LENGTH);
    bool is_known = header.coder == ncz::FIXED || header.coder == ncz::HUFFMAN || header.coder == ncz::RANS;
    return is_known && !width ? 0 : damaged(ncz::BAD_CODER);
}

// What one word of a frame adds to its checksum. `key`: CHECKSUM_KEY times (2 i + 1) for word i.
NCZ_FUNCTION uint32_t checksum_term(uint32_t word, uint32_t key) {
    uint32_t v = (word ^ word >> 16) * key;
    return v ^ v >> 15;
}

}  // namespace
