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

// Blocks of kernels that read codes, of which so many fit on a multiprocessor: they wait for memory. sm_75 has no threads
// for more than four.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int READER_BLOCKS = 4;
#else
constexpr int READER_BLOCKS = 6;
#endif

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

// Codes of an octet, of at most 8 bits each: as many bytes as a code has bits, in up to three words.
struct NarrowCodes {
    uint32_t low, middle, high;

    // This lane's, of a block that begins at `from`.
    NCZ_DEVICE static NarrowCodes load(const uint32_t* from, unsigned bits) {
        unsigned byte = bits * unsigned(lane()), first = byte / 4, last = (byte + bits - 1) / 4;
        return {from[first], first < last ? from[first + 1] : 0, bits == 7 && first + 1 < last ? from[first + 2] : 0};
    }

    NCZ_DEVICE void add_to(int32_t (&sums)[OCTET], unsigned bits) const {
        unsigned shift = 8 * (bits * unsigned(lane()) % 4);
        uint32_t front = __funnelshift_r(low, middle, shift), back = __funnelshift_r(middle, high, shift);
        back = uint32_t((uint64_t(back) << 32 | front) >> 4 * bits);
#pragma unroll
        for (int i = 0; i < OCTET / 2; ++i) {
            sums[i] = sum(sums[i], code(front, unsigned(i) * bits, bits));
            sums[OCTET / 2 + i] = sum(sums[OCTET / 2 + i], code(back, unsigned(i) * bits, bits));
        }
    }

  private:
    // unzigzag of the `bits` bits from bit `first` on. The lowest one is the sign.
    NCZ_DEVICE static int32_t code(uint32_t word, unsigned first, unsigned bits) {
        uint32_t magnitude = word >> (first + 1) & ((1u << (bits - 1)) - 1);
        return int32_t(magnitude) ^ int32_t(word << (31 - first)) >> 31;
    }
};

// Adds this lane's octet of codes of more than 8 bits, of a block that begins at `from`.
NCZ_DEVICE void add_wide_codes(const uint32_t* from, unsigned bits, int32_t (&sums)[OCTET]) {
    uint32_t mask = bits == 32 ? ~0u : (1u << bits) - 1;
    int number = OCTET * lane();
#pragma unroll
    for (int i = 0; i < OCTET; ++i) {
        unsigned bit = bits * unsigned(number + i), last = (bit + bits - 1) / 32;
        find_again(number);
        uint32_t low = from[bit / 32], high = bit / 32 < last ? from[last] : 0;
        sums[i] = sum(sums[i], unzigzag(__funnelshift_r(low, high, bit % 32) & mask));
    }
}

// ------------------------------------------------------------------ blocks

// Rows, and what finds the row of a block without a division: see rows_argument in arguments.py.
struct RowsOfBlocks {
    Rows rows;
    uint32_t multiplier, shift;

    NCZ_DEVICE int64_t blocks() const { return rows.count * rows.blocks; }

    NCZ_DEVICE ScaleBlock block(uint32_t number) const {
        uint32_t row = __umulhi(2 * number, multiplier) >> shift;
        return scale_block(rows, row, number - row * uint32_t(rows.blocks));
    }
};

// The number of this warp's block among those of the launch, fewer than 2^31.
NCZ_DEVICE uint32_t block_number() { return blockIdx.x * uint32_t(WARPS) + uint32_t(warp()); }

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

// Adds up this lane's octets of one block of several ranks: `apart` words lie between two of them.
NCZ_DEVICE void sum_octets(const uint32_t* from, int64_t apart, int addends, unsigned bits, int32_t (&sums)[OCTET]) {
#pragma unroll
    for (int i = 0; i < OCTET; ++i) sums[i] = 0;
    if (bits > 8) {
        for (int i = 0; i < addends; ++i, from += apart) add_wide_codes(from, bits, sums);
        return;
    }
    NarrowCodes next = NarrowCodes::load(from, bits);
#pragma unroll 1
    for (int i = 0; i < addends; ++i) {
        NarrowCodes codes = next;
        from += apart;
        if (i + 1 < addends) next = NarrowCodes::load(from, bits);  // on their way while these are added
        codes.add_to(sums, bits);
    }
}

NCZ_KERNEL(ncz_block_magnitudes)(const Element* x, RowsOfBlocks rows, uint16_t* magnitudes) {
    uint32_t number = block_number();
    if (number >= rows.blocks()) return;
    ScaleBlock block = rows.block(number);
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
NCZ_DEVICE void pack(const Element* x, const RowsOfBlocks& rows, const uint16_t* magnitudes, int bits, uint32_t* packed,
                     uint32_t* shared, Code code) {
    uint32_t number = block_number();
    if (number >= rows.blocks()) return;
    ScaleBlock block = rows.block(number);
    float inverse_step = inverse_step_of(magnitudes[block.scale], float((1 << (bits - 1)) - 1));
    int first = OCTET * lane();
    Element values[OCTET];
    load_octet(x + block.begin + first, octet_length(first, block.length), values);
    int32_t codes[OCTET];
    code(values, block.scale * RATE_BLOCK + first, inverse_step, codes);
    if (inverse_step == 0) {
#pragma unroll
        for (int i = 0; i < OCTET; ++i) codes[i] = 0;
    }
    store_packed(codes, unsigned(bits), of_warp(shared), packed + int64_t(number) * packed_words(unsigned(bits)));
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
#pragma unroll
        for (int half = 0; half < OCTET; half += RUN) {
            uint32_t random[RUN];
            random_numbers(noise, random_start(noise, element + half), random);
#pragma unroll
            for (int i = 0; i < RUN; ++i) codes[half + i] = code_of(values[half + i], inverse_step, random[i]);
        }
    }
};

NCZ_KERNEL(ncz_pack)(const Element* x, RowsOfBlocks rows, const uint16_t* magnitudes, int bits, uint32_t* packed) {
    NCZ_SHARED_OF_WARPS(shared);
    pack(x, rows, magnitudes, bits, packed, shared, ToNearest{});
}

NCZ_KERNEL(ncz_pack_at_random)
(const Element* x, Noise noise, RowsOfBlocks rows, const uint16_t* magnitudes, int bits, uint32_t* packed) {
    NCZ_SHARED_OF_WARPS(shared);
    pack(x, rows, magnitudes, bits, packed, shared, AtRandom{noise});
}

// `blocks`: of a row.
NCZ_KERNEL_OF(THREADS, READER_BLOCKS, ncz_add_packed)
(const uint32_t* packed, int addends, long long blocks, int bits, uint32_t* out, int out_bits) {
    NCZ_SHARED_OF_WARPS(shared);
    int64_t number = block_number();
    if (number >= blocks) return;
    int words = packed_words(unsigned(bits));
    int32_t sums[OCTET];
    sum_octets(packed + number * words, blocks * words, addends, unsigned(bits), sums);
    uint32_t* to = out + number * packed_words(unsigned(out_bits));
    store_packed(sums, unsigned(out_bits), of_warp(shared), to);
}

NCZ_KERNEL_OF(THREADS, READER_BLOCKS, ncz_unpack)
(const uint32_t* packed, int addends, int bits, RowsOfBlocks rows, const uint16_t* magnitudes, float denominator,
 Element* out) {
    uint32_t number = block_number();
    if (number >= rows.blocks()) return;
    ScaleBlock block = rows.block(number);
    uint16_t magnitude = magnitudes[block.scale];
    int64_t words = packed_words(unsigned(bits));
    int32_t codes[OCTET];
    sum_octets(packed + number * words, rows.blocks() * words, addends, unsigned(bits), codes);
    float scale = magnitude_as_float(magnitude) / denominator;
    uint32_t bits_of_nan = NOT_A_NUMBER;
    load_here(bits_of_nan);  // the compiler would write a NaN of other bits
    Element values[OCTET], nan;
    narrow(float_of(bits_of_nan), nan);
#pragma unroll
    for (int i = 0; i < OCTET; ++i) values[i] = magnitude == INFINITE_MAGNITUDE ? nan : value_of(codes[i], scale);
    int first = OCTET * lane();
    store_octet(out + block.begin + first, octet_length(first, block.length), values);
}

#define NCZ_FIXED_RATE_KERNELS(X) \
    X(ncz_block_magnitudes) X(ncz_pack) X(ncz_pack_at_random) X(ncz_add_packed) X(ncz_unpack)
