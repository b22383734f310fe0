// A fixed rate: the magnitudes of blocks, codes of equally many bits, and their sums. ../common/fixed_rate.h has what all
// processors share.
//
// A warp has a block of RATE_BLOCK values to itself: each lane an octet of 8 neighbouring ones. Bits are put together in
// shared memory, from which a warp copies whole words, side by side.
#pragma once

#include "../common/fixed_rate.h"
#include "values.cuh"

static_assert(RATE_BLOCK == WARP * OCTET, "a lane has an octet");

constexpr int MOST_PACKED_WORDS = RATE_BLOCK;  // of a block, at 32 bits

NCZ_DEVICE int packed_words(unsigned bits) { return RATE_BLOCK / 32 * int(bits); }

// A warp's words in shared memory.
NCZ_DEVICE uint32_t* of_warp(uint32_t* words) { return words + warp() * MOST_PACKED_WORDS; }
#define NCZ_SHARED_OF_WARPS(name) NCZ_SHARED(uint32_t, name, WARPS* MOST_PACKED_WORDS)

// ------------------------------------------------------------------ octets

// How many of 8 elements from element `first` on there are among `length`: 0 to 8.
NCZ_DEVICE int octet_length(int first, int length) {
    int left = length - first;
    return left >= OCTET ? OCTET : left > 0 ? left : 0;
}

NCZ_DEVICE bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(Sixteen) == 0; }

// `n` of 8 numbers, zeros behind them.
template <class T>
NCZ_DEVICE void load_octet(const T* from, int n, T (&values)[OCTET]) {
    if (n == OCTET && is_aligned(from)) {
        Sixteen parts[sizeof values / sizeof(Sixteen)];
#pragma unroll
        for (int p = 0; p < int(sizeof values / sizeof(Sixteen)); ++p)
            parts[p] = reinterpret_cast<const Sixteen*>(from)[p];
        memcpy(values, parts, sizeof values);
    } else {
#pragma unroll
        for (int i = 0; i < OCTET; ++i) values[i] = i < n ? from[i] : T{};
    }
}

// By a whole warp, whose lanes have neighbouring octets: `to` and `n` are this lane's. Memory is written in sectors of 32
// bytes, and half a sector costs as much as a whole one. So where octets take more than one instruction, lanes first exchange
// their parts, as in transposing a matrix, and each instruction then writes whole sectors.
template <class T>
NCZ_DEVICE void store_octet(T* to, int n, const T (&values)[OCTET]) {
    constexpr int PARTS = sizeof values / sizeof(Sixteen);
    if (!__all_sync(ALL_LANES, n == OCTET && is_aligned(to))) {
#pragma unroll
        for (int i = 0; i < OCTET; ++i)
            if (i < n) to[i] = values[i];
        return;
    }
    Sixteen parts[PARTS];
    memcpy(parts, values, sizeof values);
#pragma unroll
    for (int distance = 1; distance < PARTS; distance *= 2) {
        bool is_upper = lane() & distance;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            if (p & distance) continue;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                uint32_t low = parts[p].words[w], high = parts[p + distance].words[w];
                uint32_t taken = __shfl_xor_sync(ALL_LANES, is_upper ? low : high, distance);
                parts[p].words[w] = is_upper ? taken : low;
                parts[p + distance].words[w] = is_upper ? high : taken;
            }
        }
    }
    // Part p is now one of the octet of lane p of PARTS neighbours: the one with this lane's number among them.
    int own = lane() % PARTS;
    Sixteen* of_first = reinterpret_cast<Sixteen*>(to) - own * PARTS + own;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) of_first[p * PARTS] = parts[p];
}

// 8 symbols of `width` bits. Narrow ones are first joined in registers, four or two to a word of at most 32 bits.
NCZ_DEVICE void pack_octet(const uint32_t (&symbols)[OCTET], unsigned width, uint32_t* words, unsigned first_byte) {
    if (!width) return;
    BitWriter writer(words, 8 * first_byte);
    if (width <= 8) {
#pragma unroll
        for (int i = 0; i < OCTET; i += 4) {
            uint32_t low = symbols[i] | symbols[i + 1] << width, high = symbols[i + 2] | symbols[i + 3] << width;
            writer.put(low | high << 2 * width, 4 * width);
        }
    } else if (width <= 16) {
#pragma unroll
        for (int i = 0; i < OCTET; i += 2) writer.put(symbols[i] | symbols[i + 1] << width, 2 * width);
    } else {
#pragma unroll
        for (int i = 0; i < OCTET; ++i) writer.put(symbols[i], width);
    }
    writer.end();
}

// Bits of so many words.
struct PackedBits {
    const uint32_t* words;
    unsigned n;

    NCZ_DEVICE uint32_t word(unsigned i) const { return i < n ? words[i] : 0; }

    // 32 bits from `bit` on.
    NCZ_DEVICE uint32_t bits(unsigned bit) const { return __funnelshift_r(word(bit / 32), word(bit / 32 + 1), bit % 32); }

    // 64 bits from a byte on, of which the first `n` matter.
    NCZ_DEVICE uint64_t long_bits(unsigned byte, unsigned n) const {
        unsigned first = byte / 4, shift = 8 * (byte % 4);
        n += shift;
        uint32_t low = word(first), middle = n > 32 ? word(first + 1) : 0, high = n > 64 ? word(first + 2) : 0;
        return uint64_t(__funnelshift_r(middle, high, shift)) << 32 | __funnelshift_r(low, middle, shift);
    }
};

// Inverse of pack_octet, from `width` bytes.
NCZ_DEVICE void unpack_octet(const PackedBits& bytes, unsigned first_byte, unsigned width, uint32_t (&symbols)[OCTET]) {
    uint32_t mask = width == 32 ? ~0u : (1u << width) - 1;
    if (width <= 8) {
        uint64_t all = width ? bytes.long_bits(first_byte, 8 * width) : 0;
        uint32_t low = uint32_t(all), high = uint32_t(all >> 4 * width);
#pragma unroll
        for (int i = 0; i < OCTET / 2; ++i) {
            symbols[i] = low >> (unsigned(i) * width) & mask;
            symbols[OCTET / 2 + i] = high >> (unsigned(i) * width) & mask;
        }
    } else {
#pragma unroll
        for (int i = 0; i < OCTET; ++i) symbols[i] = bytes.bits(8 * first_byte + unsigned(i) * width) & mask;
    }
}

// ------------------------------------------------------------------ blocks

// The number of this warp's block among those of the launch.
NCZ_DEVICE int64_t block_number() { return int64_t(blockIdx.x) * WARPS + warp(); }

// Writes a warp's octets, `bits` for each code.
NCZ_DEVICE void store_packed(const int32_t (&codes)[OCTET], unsigned bits, uint32_t* shared, uint32_t* to) {
    uint32_t symbols[OCTET];
#pragma unroll
    for (int i = 0; i < OCTET; ++i) symbols[i] = zigzag(codes[i]);
    int words = packed_words(bits);
    __syncwarp();  // what stood there before was read
    for (int i = lane(); i < words; i += WARP) shared[i] = 0;
    __syncwarp();
    pack_octet(symbols, bits, shared, bits * unsigned(lane()));
    __syncwarp();
    for (int i = lane(); i < words; i += WARP) to[i] = shared[i];
}

// Its inverse.
NCZ_DEVICE void load_packed(const uint32_t* from, unsigned bits, int32_t (&codes)[OCTET]) {
    PackedBits bytes = {from, unsigned(packed_words(bits))};
    uint32_t symbols[OCTET];
    unpack_octet(bytes, bits * unsigned(lane()), bits, symbols);
#pragma unroll
    for (int i = 0; i < OCTET; ++i) codes[i] = unzigzag(symbols[i]);
}

NCZ_KERNEL(ncz_block_magnitudes)(const Element* x, Rows rows, uint16_t* magnitudes) {
    int64_t number = block_number();
    if (number >= rows.count * rows.blocks) return;
    ScaleBlock block = scale_block(rows, number);
    int first = OCTET * lane();
    Element values[OCTET];
    load_octet(x + block.begin + first, octet_length(first, block.length), values);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < OCTET; ++i) {
        uint32_t bits = bits_of(widen(values[i])) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    for (int distance = WARP / 2; distance; distance /= 2) {
        uint32_t other = __shfl_xor_sync(ALL_LANES, largest, distance);
        largest = other > largest ? other : largest;
    }
    if (lane() == 0) magnitudes[block.scale] = magnitude_of(largest);
}

// `code`: of a value, the number of its element, and the inverse step.
template <class Code>
NCZ_DEVICE void pack(const Element* x, const Rows& rows, const uint16_t* magnitudes, int bits, uint32_t* packed,
                     uint32_t* shared, Code code) {
    int64_t number = block_number();
    if (number >= rows.count * rows.blocks) return;
    ScaleBlock block = scale_block(rows, number);
    float inverse_step = inverse_step_of(magnitudes[block.scale], float((1 << (bits - 1)) - 1));
    int first = OCTET * lane();
    Element values[OCTET];
    load_octet(x + block.begin + first, octet_length(first, block.length), values);
    int32_t codes[OCTET];
    code(values, block.begin + first, inverse_step, codes);
    if (inverse_step == 0) {
#pragma unroll
        for (int i = 0; i < OCTET; ++i) codes[i] = 0;
    }
    store_packed(codes, unsigned(bits), of_warp(shared), packed + number * packed_words(unsigned(bits)));
}

struct ToNearest {
    NCZ_DEVICE void operator()(const Element (&values)[OCTET], int64_t, float inverse_step,
                               int32_t (&codes)[OCTET]) const {
#pragma unroll
        for (int i = 0; i < OCTET; ++i) codes[i] = code_of(values[i], inverse_step);
    }
};

struct AtRandom {
    Noise noise;

    NCZ_DEVICE void operator()(const Element (&values)[OCTET], int64_t element, float inverse_step,
                               int32_t (&codes)[OCTET]) const {
        uint64_t number = noise.first + uint64_t(element);
#pragma unroll
        for (int i = 0; i < OCTET; ++i) codes[i] = code_of(values[i], inverse_step, random_word(noise, number + i));
    }
};

NCZ_KERNEL(ncz_pack)(const Element* x, Rows rows, const uint16_t* magnitudes, int bits, uint32_t* packed) {
    NCZ_SHARED_OF_WARPS(shared);
    pack(x, rows, magnitudes, bits, packed, shared, ToNearest{});
}

NCZ_KERNEL(ncz_pack_at_random)
(const Element* x, Noise noise, Rows rows, const uint16_t* magnitudes, int bits, uint32_t* packed) {
    NCZ_SHARED_OF_WARPS(shared);
    pack(x, rows, magnitudes, bits, packed, shared, AtRandom{noise});
}

// `blocks`: of a row.
NCZ_KERNEL(ncz_add_packed)
(const uint32_t* packed, long long count, long long blocks, int bits, uint32_t* out, int out_bits) {
    NCZ_SHARED_OF_WARPS(shared);
    int64_t number = block_number();
    if (number >= blocks) return;
    int words = packed_words(unsigned(bits));
    int32_t sums[OCTET] = {};
    for (int64_t row = 0; row < count; ++row) {
        int32_t codes[OCTET];
        load_packed(packed + (row * blocks + number) * words, unsigned(bits), codes);
#pragma unroll
        for (int i = 0; i < OCTET; ++i) sums[i] = sum(sums[i], codes[i]);
    }
    uint32_t* to = out + number * packed_words(unsigned(out_bits));
    store_packed(sums, unsigned(out_bits), of_warp(shared), to);
}

NCZ_KERNEL(ncz_unpack)
(const uint32_t* packed, int bits, Rows rows, const uint16_t* magnitudes, float denominator, Element* out) {
    int64_t number = block_number();
    if (number >= rows.count * rows.blocks) return;
    ScaleBlock block = scale_block(rows, number);
    int32_t codes[OCTET];
    load_packed(packed + number * packed_words(unsigned(bits)), unsigned(bits), codes);
    bool is_finite = magnitudes[block.scale] != INFINITE_MAGNITUDE;
    float scale = magnitude_as_float(magnitudes[block.scale]) / denominator;
    Element values[OCTET];
#pragma unroll
    for (int i = 0; i < OCTET; ++i) {
        values[i] = value_of(codes[i], scale);
        if (!is_finite) narrow(float_of(NOT_A_NUMBER), values[i]);
    }
    int first = OCTET * lane();
    store_octet(out + block.begin + first, octet_length(first, block.length), values);
}

#define NCZ_FIXED_RATE_KERNELS(X) \
    X(ncz_block_magnitudes) X(ncz_pack) X(ncz_pack_at_random) X(ncz_add_packed) X(ncz_unpack)
