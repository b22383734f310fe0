// The checksum of a frame. docs/reference/wire-format.md specifies it.
#pragma once

#include "../common/format.h"

namespace {

// What the words of some bytes add to the checksum of what they are a part of; zeros fill up the last word. `first`: number of
// the first word. Compilers vectorize it.
inline uint32_t digest_of(const void* data, int64_t bytes, int64_t first = 0) {
    auto at = static_cast<const uint8_t*>(data);
    int64_t words = bytes / 4;
    uint32_t word, key = (2 * uint32_t(first) + 1) * ncz::CHECKSUM_KEY, sum = 0;
    for (int64_t i = 0; i < words; ++i, key += 2 * ncz::CHECKSUM_KEY) {
        memcpy(&word, at + 4 * i, 4);
        sum += checksum_term(word, key);
    }
    if (bytes % 4) {
        word = 0;
        memcpy(&word, at + 4 * words, size_t(bytes % 4));
        sum += checksum_term(word, key);
    }
    return sum;
}

// The same, and copies the bytes to `copy`, which is elsewhere: both in one pass take little more time than a copy.
[[gnu::noinline]] inline uint32_t copy_with_digest(const void* data, int64_t bytes, int64_t first, void* copy) {
    auto from = static_cast<const uint8_t* __restrict>(data);
    auto to = static_cast<uint8_t* __restrict>(copy);
    int64_t words = bytes / 4;
    uint32_t word, key = (2 * uint32_t(first) + 1) * ncz::CHECKSUM_KEY, sum = 0;
    for (int64_t i = 0; i < words; ++i, key += 2 * ncz::CHECKSUM_KEY) {
        memcpy(&word, from + 4 * i, 4);
        memcpy(to + 4 * i, &word, 4);
        sum += checksum_term(word, key);
    }
    memcpy(to + 4 * words, from + 4 * words, size_t(bytes % 4));
    return sum + digest_of(from + 4 * words, bytes % 4, first + words);
}

// The checksum of a whole frame, ignoring its checksum field.
inline uint32_t checksum_of(const uint8_t* frame, int64_t bytes) {
    constexpr int64_t field = offsetof(ncz::Header, checksum);
    return digest_of(frame, bytes) - digest_of(frame + field, 4, field / 4);
}

}  // namespace
