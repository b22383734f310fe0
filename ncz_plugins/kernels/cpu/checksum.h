// The checksum of a frame. docs/reference/wire-format.md specifies it.
#pragma once

#include "../common/format.h"

namespace {

// The checksum of a whole frame, ignoring its checksum field. Compilers vectorize it.
inline uint32_t checksum_of(const uint8_t* frame, int64_t bytes) {
    int64_t words = bytes / 4;
    uint32_t word, key = ncz::CHECKSUM_KEY, sum = 0;
    for (int64_t i = 0; i < words; ++i, key += 2 * ncz::CHECKSUM_KEY) {
        memcpy(&word, frame + 4 * i, 4);
        sum += checksum_term(word, key);
    }
    if (bytes % 4) {
        word = 0;
        memcpy(&word, frame + 4 * words, size_t(bytes % 4));
        sum += checksum_term(word, key);
    }
    constexpr uint32_t field = offsetof(ncz::Header, checksum);
    constexpr uint32_t field_key = (2 * (field / 4) + 1) * ncz::CHECKSUM_KEY;
    memcpy(&word, frame + field, 4);
    return sum - checksum_term(word, field_key);
}

}  // namespace
