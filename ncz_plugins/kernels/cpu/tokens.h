// The alphabet of HUFFMAN and RANS: a symbol is a token and, if it is not below DIRECT, extra bits.
#pragma once

#include "../common/floats.h"
#include "../common/format.h"

namespace {

// A token of DIRECT or more holds the position of the symbol's leading bit and the bit below it, as the bits of a float
// do, and the lowest bit, which is the code's sign. The symbol is halved, because compilers vectorize the conversion of
// an int32. Bits that don't fit into a float are cleared first, because the conversion could round them up.
inline unsigned token_of(uint32_t symbol) {
    uint32_t bits = bits_of(float(int32_t((symbol & ~(symbol >> 8)) >> 1)));
    constexpr uint32_t first = (127 - 1 + 7) << 1;  // of DIRECT, halved
    uint32_t large = ncz::DIRECT + (((bits >> 22) - first) << 1 | (symbol & 1));
    return symbol < large ? symbol : large;  // for symbols below DIRECT, `large` is larger than they are
}

// As extra_bits_of its token.
inline unsigned extra_bits_of_symbol(uint32_t symbol) {
    return symbol < ncz::DIRECT ? 0 : 31 - ncz::BITS_IN_TOKEN - unsigned(__builtin_clz(symbol));
}

// Gives the bits that any of the symbols has: if that is below DIRECT, the tokens are the symbols themselves.
template <class Symbol>
uint32_t tokens_of(const Symbol* symbols, int n, uint8_t* tokens) {
    uint32_t all = 0;
    for (int i = 0; i < n; ++i) all |= symbols[i];
    if (all < ncz::DIRECT)
        for (int i = 0; i < n; ++i) tokens[i] = uint8_t(symbols[i]);
    else
        for (int i = 0; i < n; ++i) tokens[i] = uint8_t(token_of(symbols[i]));
    return all;
}

constexpr int BYTE_VALUES = 256;

// How often each byte occurs. Four tables, because an increment would wait for the previous one of the same byte.
class ByteCounts {
  public:
    void add(const uint8_t* bytes, int64_t n) {
        int64_t i = 0;
        for (; i + TABLES <= n; i += TABLES)
            for (int k = 0; k < TABLES; ++k) ++counts_[k][bytes[i + k]];
        for (; i < n; ++i) ++counts_[0][bytes[i]];
    }
    // The same for few different values, from 0 on: counts one value after the other. At most CHUNK bytes.
    void add_few(const uint8_t* bytes, int n) {
        typedef uint8_t Vector __attribute__((vector_size(VECTOR_BYTES)));
        constexpr int GROUP = 2 * VECTOR_BYTES;  // so that no byte of `equal` counts more than 255
        static_assert(ncz::CHUNK / GROUP <= 255, "sums of bytes");
        int whole = n - n % GROUP, left = whole;
        for (int value = 0; left > 0; ++value) {
            Vector equal[2] = {};
            for (int i = 0; i < whole; i += GROUP)
                for (int k = 0; k < 2; ++k) {
                    Vector vector;
                    memcpy(&vector, bytes + i + k * VECTOR_BYTES, VECTOR_BYTES);
                    equal[k] -= Vector(vector == uint8_t(value));
                }
            uint64_t sums = 0, words[GROUP / 8];  // four sums of 16 bits
            memcpy(words, equal, sizeof words);
            for (uint64_t word : words) sums += (word & 0x00ff00ff00ff00ffu) + (word >> 8 & 0x00ff00ff00ff00ffu);
            uint32_t sum = sums * 0x0001000100010001u >> 48;
            counts_[0][value] += sum;
            left -= int(sum);
        }
        add(bytes + whole, n - whole);
    }
    uint64_t of(int value) const {
        uint64_t sum = 0;
        for (const uint32_t* table : counts_) sum += table[value];
        return sum;
    }

  private:
    static constexpr int TABLES = 4;
    uint32_t counts_[TABLES][BYTE_VALUES] = {};
};

}  // namespace
