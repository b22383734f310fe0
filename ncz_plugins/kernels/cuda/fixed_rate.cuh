// A fixed rate: the magnitudes of blocks, codes of equally many bits, and their sums. ../common/fixed_rate.h has what all
// processors share.
//
// A warp has a block of RATE_BLOCK values to itself: each lane an octet of 8 neighbouring ones. Bits are put together in
// shared memory, from which a warp copies whole words, side by side.
#pragma once

#include "../common/fixed_rate.h"
#include "fixed.cuh"

static_assert(RATE_BLOCK == WARP * OCTET, "a lane has an octet");

constexpr int MOST_PACKED_WORDS = RATE_BLOCK;  // of a block, at 32 bits

NCZ_DEVICE int packed_words(unsigned bits) { return RATE_BLOCK / 32 * int(bits); }

// A warp's words in shared memory.
NCZ_DEVICE uint32_t* of_warp(uint32_t* words) { return words + warp() * MOST_PACKED_WORDS; }
#define NCZ_SHARED_OF_WARPS(name) NCZ_SHARED(uint32_t, name, WARPS* MOST_PACKED_WORDS)

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
    Bytes bytes(reinterpret_cast<const uint8_t*>(from), reinterpret_cast<const uint8_t*>(from + packed_words(bits)));
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
