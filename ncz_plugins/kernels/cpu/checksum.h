// The checksum of a frame. docs/reference/wire-format.md specifies it.
#pragma once

#include "format.h"

namespace {

constexpr uint32_t CHECKSUM_KEY = 0x9E3779B1;  // times 2 i + 1, for word number i

inline uint32_t checksum_term(uint32_t word, uint32_t key) {
    uint32_t v = (word ^ word >> 16) * key;
    return v ^ v >> 15;
}

// Of a whole frame, whatever stands in its checksum field. Compilers vectorize it.
inline uint32_t checksum_of(const uint8_t* frame, int64_t bytes) {
    int64_t words = bytes / 4;
    uint32_t word, key = CHECKSUM_KEY, sum = 0;
    for (int64_t i = 0; i < words; ++i, key += 2 * CHECKSUM_KEY) {
        memcpy(&word, frame + 4 * i, 4);
        sum += checksum_term(word, key);
    }
    if (bytes % 4) {
        word = 0;
        memcpy(&word, frame + 4 * words, size_t(bytes % 4));
        sum += checksum_term(word, key);
    }
    constexpr uint32_t field = offsetof(ncz::Header, checksum);
    constexpr uint32_t field_key = (2 * (field / 4) + 1) * CHECKSUM_KEY;
    memcpy(&word, frame + field, 4);
    return sum - checksum_term(word, field_key);
}

}  // namespace
