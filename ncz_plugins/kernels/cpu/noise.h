// Random numbers for stochastic rounding. docs/reference/wire-format.md says which one belongs to an element.
#pragma once

#include "../common/format.h"

namespace {

class RandomWords {
  public:
    explicit RandomWords(const ncz::Noise& noise) : noise_(noise) {}

    // Of 32 elements from element number `first` of the call on.
    void of_block(int64_t first, uint32_t (&words)[ncz::BLOCK]) const {
        uint64_t element = noise_.first + uint64_t(first);
        uint32_t low = uint32_t(element), high = uint32_t(element >> 32);
        if (low + (ncz::BLOCK - 1) < low) {  // the upper half changes within the block
            for (uint32_t i = 0; i < ncz::BLOCK; ++i) words[i] = random_word(noise_, low + i, high + (low + i < low));
            return;
        }
        uint32_t start = hash_start(noise_, low, high);
        for (uint32_t i = 0; i < ncz::BLOCK; ++i) words[i] = hashed(noise_, start + i);
    }

  private:
    ncz::Noise noise_;
};

}  // namespace
