// Symbols to and from bits. An octet of 8 symbols is one little-endian bit string of `width` bytes.
//
// A block of 32 symbols stands in lanes of 8, 16 or 32 bits, the narrowest that hold `width`, side by side in 64-bit
// words. Moving the bits inside the words is left to the file that includes this.
//
// Loads and stores are of 8 bytes: they touch up to OCTETS * width + SLACK bytes for a block.
#pragma once

#include "../common/format.h"

namespace {

constexpr int SLACK = 8;

template <int lane>
struct Words {
    static constexpr int PER_OCTET = lane / 8;
    static constexpr int COUNT = ncz::OCTETS * PER_OCTET;
    uint64_t words[COUNT];
};

// In each word: the low `width` bits of every lane, moved together; and the inverse, which ignores higher bits.
template <int lane>
void squeeze(Words<lane>& block, unsigned width);
template <int lane>
void spread(Words<lane>& block, unsigned width);

// Extracts bits of `word`. Bits 0 to 7 of `place` hold the first bit, bits 8 to 15 the number of bits; both below 64.
uint64_t bits_at(unsigned place, uint64_t word);

inline uint64_t load64(const void* from) {
    uint64_t word;
    memcpy(&word, from, 8);
    return word;
}

inline void store64(void* to, uint64_t word) { memcpy(to, &word, 8); }

// The tables of sizes in a payload consist of these numbers.
inline uint16_t load16(const void* from) {
    uint16_t number;
    memcpy(&number, from, 2);
    return number;
}

inline void store16(void* to, uint16_t number) { memcpy(to, &number, 2); }

// Joins `words` of `bits` bits each, 32 < bits <= 64. (Shifts by 64 are made in two steps.)
template <int count>
inline void store_joined(const uint64_t* words, unsigned bits, uint8_t* out) {
    uint64_t joined = 0;
    unsigned filled = 0;
    for (int i = 0; i < count; ++i) {
        joined |= words[i] << filled;
        filled += bits;
        if (filled >= 64) {
            store64(out, joined);
            out += 8;
            filled -= 64;
            joined = words[i] >> (bits - filled - 1) >> 1;
        }
    }
    if (filled) store64(out, joined);
}

template <int lane>
inline void pack_words(Words<lane> block, unsigned width, uint8_t* out) {
    constexpr int n = Words<lane>::PER_OCTET;
    if (lane == 32 && width == 32) {
        memcpy(out, &block, sizeof block);
        return;
    }
    squeeze(block, width);
    for (int k = 0; k < ncz::OCTETS; ++k) {
        if (n == 1)
            store64(out + k * width, block.words[k]);
        else
            store_joined<n>(block.words + n * k, 64 / lane * width, out + k * width);
    }
}

template <int lane>
inline Words<lane> unpack_words(const uint8_t* in, unsigned width) {
    Words<lane> block;
    if (width == lane) {  // as in RAW, and in the output of HUFFMAN and RANS
        memcpy(&block, in, sizeof block);
        return block;
    }
    for (unsigned i = 0; i < block.COUNT; ++i) {
        unsigned first_bit = i * (64 / lane) * width;
        block.words[i] = load64(in + first_bit / 8) >> first_bit % 8;
    }
    spread(block, width);
    return block;
}

// 62 bits that begin 6 bits into a byte do not fit into one load: the second symbol is loaded by itself.
template <>
inline Words<32> unpack_words<32>(const uint8_t* in, unsigned width) {
    Words<32> block;
    if (width == 32) {
        memcpy(&block, in, sizeof block);
        return block;
    }
    uint64_t mask = (uint64_t(1) << width) - 1;
    auto symbol = [&](unsigned i) { return load64(in + i * width / 8) >> i * width % 8 & mask; };
    for (unsigned i = 0; i < 16; ++i) block.words[i] = symbol(2 * i) | symbol(2 * i + 1) << 32;
    return block;
}

}  // namespace
