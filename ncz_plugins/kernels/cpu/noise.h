// Random numbers for stochastic rounding: Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
// (2011). docs/reference/wire-format.md says which of them belong to an element.
//
// Needs Wide, one 64-bit number or a vector of them, and multiply_low_halves of the file that includes this.
#pragma once

#include "../common/format.h"

namespace {

class RandomWords {
  public:
    explicit RandomWords(const ncz::Noise& noise)
        : first_(noise.first), shift_(noise.shift), call_(Wide{} + noise.call) {
        uint32_t key[2] = {uint32_t(noise.seed), uint32_t(noise.seed >> 32)};
        for (auto& round : keys_) {
            round[0] = Wide{} + key[0];
            round[1] = Wide{} + key[1];
            key[0] += 0x9E3779B9;
            key[1] += 0xBB67AE85;
        }
    }

    // Of 32 elements from element number `first` of the call on.
    void of_block(int64_t first, uint32_t (&words)[ncz::BLOCK]) const {
        uint64_t element = first_ + uint64_t(first);
        if (element % 4 == 0) return philox(element / 4, words);
        uint32_t all[2 * ncz::BLOCK];
        philox(element / 4, all);
        philox(element / 4 + COUNTERS, all + ncz::BLOCK);
        memcpy(words, all + element % 4, sizeof words);
    }

  private:
    static constexpr int COUNTERS = ncz::BLOCK / 4, WIDES = COUNTERS * 8 / sizeof(Wide);

    // The four words of each of some counters.
    void philox(uint64_t counter, uint32_t* words) const {
        uint64_t counters[COUNTERS], pairs[COUNTERS][2];
        for (int i = 0; i < COUNTERS; ++i) counters[i] = counter + uint64_t(i);
        // In the low halves of 64 bits; what is in the high ones does not matter.
        Wide a[WIDES], b[WIDES], c[WIDES], d[WIDES];
        memcpy(a, counters, sizeof a);
        for (int i = 0; i < WIDES; ++i) {
            b[i] = a[i] >> 32;
            c[i] = call_;
            d[i] = Wide{};
        }
        for (auto& key : keys_)
            for (int i = 0; i < WIDES; ++i) {
                Wide first = multiply_low_halves(a[i], 0xD2511F53), second = multiply_low_halves(c[i], 0xCD9E8D57);
                a[i] = second >> 32 ^ (b[i] ^ key[0]);
                b[i] = second;
                c[i] = first >> 32 ^ (d[i] ^ key[1]);
                d[i] = first;
            }
        for (int i = 0; i < WIDES; ++i) {
            a[i] = (a[i] & 0xffffffffu) | b[i] << 32;
            c[i] = (c[i] & 0xffffffffu) | d[i] << 32;
        }
        uint64_t ab[COUNTERS], cd[COUNTERS];
        memcpy(ab, a, sizeof ab);
        memcpy(cd, c, sizeof cd);
        for (int i = 0; i < COUNTERS; ++i) {
            pairs[i][0] = ab[i];
            pairs[i][1] = cd[i];
        }
        memcpy(words, pairs, sizeof pairs);
        for (int i = 0; i < ncz::BLOCK; ++i) words[i] += shift_;
    }

    uint64_t first_;
    uint32_t shift_;
    Wide call_, keys_[10][2];
};

}  // namespace
