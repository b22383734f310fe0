// The layout of a frame, as constants: the twin of ../format.py. docs/wire-format.md explains it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define NCZ_EXPORT extern "C" __attribute__((visibility("default")))

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the frame format is little endian, and these kernels read and write it by plain loads and stores"
#endif

namespace ncz {

constexpr int32_t ABI_VERSION = 1;  // of the C functions; ncz_plugins/kernels/cpu/__init__.py asks for the same

constexpr uint32_t MAGIC = 0x465A434E;
constexpr uint8_t VERSION = 1;

constexpr int64_t CHUNK = 4096;
constexpr int BLOCK = 32;
constexpr int OCTET = 8;
constexpr int OCTETS = BLOCK / OCTET;
constexpr int64_t SAMPLE_CHUNKS = 4;
constexpr int LANES = 128;

enum Coder : int32_t { RAW = 0, FIXED = 1, AUTO_CODER = 255 };
enum Predictor : int32_t { NONE = 0, DELTA = 1, AUTO_PREDICTOR = 255 };

// Element types, numbered by their position in format.DTYPES. The two half types are only bits here.
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

// Why a frame was refused. Functions return -(cause + 256 * value); Python words the message.
enum Damage : int64_t {
    NO_HEADER = 1,
    BAD_MAGIC = 2,
    BAD_VERSION = 3,
    RESERVED_SET = 4,
    BAD_PREDICTOR = 5,
    OTHER_COUNT = 6,
    OTHER_LENGTH = 7,
    RAW_LENGTH = 8,
    BAD_CODER = 9,
    NO_TABLE = 10,
    TABLE_SUM = 11,    // value: what the chunk sizes add up to
    BAD_WIDTH = 12,
    CHUNK_LENGTH = 13  // value: bytes of the chunk
};

}  // namespace ncz
