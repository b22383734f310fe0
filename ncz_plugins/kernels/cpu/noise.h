// Random numbers for stochastic rounding. docs/reference/wire-format.md says which one belongs to an element.
#pragma once

#include "../common/format.h"

namespace {

// Of 32 elements from element number `first` of a call on, a multiple of 32: their upper 24 bits.
inline void random_numbers(const ncz::Noise& noise, int64_t first, uint32_t (&numbers)[ncz::BLOCK]) {
    uint64_t block = noise.first + uint64_t(first / ncz::SCALE_BLOCK);
    uint32_t four = uint32_t(first % ncz::SCALE_BLOCK / 4);
    for (uint32_t i = 0; i < ncz::BLOCK / 4; ++i) {
        uint32_t words[2];
        random_words(noise, random_start(noise, block, four + i), words[0], words[1]);
        for (uint32_t k = 0; k < 2; ++k) {
            numbers[4 * i + 2 * k] = words[k] & ~0xffu;
            numbers[4 * i + 2 * k + 1] = (words[k] << 16 | words[k] >> 16) & ~0xffu;
        }
    }
}

}  // namespace
