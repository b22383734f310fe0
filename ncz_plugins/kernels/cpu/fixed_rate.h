// A fixed rate: the magnitudes of blocks, codes of equally many bits, and their sums. ../common/fixed_rate.h has what all
// processors share. Included by codec.h.
#pragma once

#include "../common/fixed_rate.h"

namespace {

// Packed bits of one block, with room for what loads and stores touch behind them.
struct PackedBlock {
    uint8_t bytes[RATE_BLOCK * 4 + SLACK];

    static size_t size(unsigned bits) { return size_t(RATE_BLOCK / 8) * bits; }
    uint8_t* at(int element, unsigned bits) { return bytes + element / 8 * int(bits); }
    void load(const uint8_t* from, unsigned bits) { memcpy(bytes, from, size(bits)); }
    void store(uint8_t* to, unsigned bits) const { memcpy(to, bytes, size(bits)); }
};

inline int in_block(int length, int first) {
    int left = length - first;
    return left < 0 ? 0 : left < BLOCK ? left : BLOCK;
}

// Calls `use` with each block of a call, and its number.
template <class Function>
void for_each_block(const Rows& rows, Function use) {
    for (int64_t row = 0; row < rows.count; ++row)
        for (int64_t i = 0; i < rows.blocks; ++i) use(scale_block(rows, row, i), row * rows.blocks + i);
}

template <class T>
void block_magnitudes(const T* x, const Rows& rows, uint16_t* magnitudes) {
    for_each_block(rows, [&](const ScaleBlock& block, int64_t) {
        uint32_t largest = 0;
        prefetch<READ>(x + block.begin, RATE_BLOCK);
        for (int k = 0; k < block.length; ++k) {
            uint32_t bits = bits_of(widen(x[block.begin + k])) & 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
        magnitudes[block.scale] = magnitude_of(largest);
    });
}

template <class T>
void pack(const T* x, const Rows& rows, const uint16_t* magnitudes, unsigned bits, const Noise* noise, uint8_t* out) {
    float levels = float((1 << (bits - 1)) - 1);
    PackedBlock packed;
    for_each_block(rows, [&](const ScaleBlock& block, int64_t number) {
        uint8_t* to = out + number * int64_t(PackedBlock::size(bits));
        float inverse_step = inverse_step_of(magnitudes[block.scale], levels);
        if (inverse_step == 0) {
            memset(to, 0, PackedBlock::size(bits));
            return;
        }
        for (int first = 0; first < RATE_BLOCK; first += BLOCK) {
            int n = in_block(block.length, first);
            Padded<T> padded;
            const T* from = x + block.begin + first;
            prefetch<READ>(from, BLOCK);
            if (n < BLOCK) {
                if (n) padded = Padded<T>(from, n);
                from = padded.values;
            }
            Block codes = noise ? quantize_block(from, inverse_step, random_block(*noise, block.scale * RATE_BLOCK + first))
                                : quantize_block(from, inverse_step);
            pack_block(zigzag(codes), bits, packed.at(first, bits));
        }
        packed.store(to, bits);
    });
}

// Codes of a block of each row of `packed`, added up; `row_bytes` lie between two rows.
struct BlockSums {
    Block of[RATE_BLOCK / BLOCK];

    BlockSums(const uint8_t* packed, int64_t rows, int64_t row_bytes, unsigned bits) {
        PackedBlock from;
        for (int64_t row = 0; row < rows; ++row) {
            from.load(packed + row * row_bytes, bits);
            for (int b = 0; b < RATE_BLOCK / BLOCK; ++b) {
                Block codes = unzigzag(unpack_block(from.at(b * BLOCK, bits), bits));
                of[b] = row ? add_blocks(of[b], codes) : codes;
            }
        }
    }
};

inline void add_packed(const uint8_t* packed, int64_t rows, int64_t blocks, unsigned bits, uint8_t* out,
                       unsigned out_bits) {
    int64_t row_bytes = blocks * int64_t(PackedBlock::size(bits));
    PackedBlock to;
    for (int64_t i = 0; i < blocks; ++i, packed += PackedBlock::size(bits), out += PackedBlock::size(out_bits)) {
        BlockSums sums(packed, rows, row_bytes, bits);
        for (int b = 0; b < RATE_BLOCK / BLOCK; ++b)
            pack_block(zigzag(sums.of[b]), out_bits, to.at(b * BLOCK, out_bits));
        to.store(out, out_bits);
    }
}

template <class T>
void unpack(const uint8_t* packed, int64_t addends, unsigned bits, const Rows& rows, const uint16_t* magnitudes,
            float denominator, T* out) {
    int64_t blocks = rows.count * rows.blocks, addend_bytes = blocks * int64_t(PackedBlock::size(bits));
    PackedBlock last;
    bool is_large = blocks * RATE_BLOCK * int64_t(sizeof(T)) >= STREAMED_BYTES;
    for_each_block(rows, [&](const ScaleBlock& block, int64_t number) {
        const uint8_t* from = packed + number * int64_t(PackedBlock::size(bits));
        T* to = out + block.begin;
        bool is_streamed = is_large && can_stream(to);  // rows may have any length
        if (magnitudes[block.scale] == INFINITE_MAGNITUDE) {
            for (int k = 0; k < block.length; ++k) narrow(float_of(NOT_A_NUMBER), to[k]);
            return;
        }
        float scale = magnitude_as_float(magnitudes[block.scale]) / denominator;
        BlockSums before(from, addends - 1, addend_bytes, bits);
        last.load(from + (addends - 1) * addend_bytes, bits);
        for (int first = 0; first < block.length; first += BLOCK) {
            Block codes = unzigzag(unpack_block(last.at(first, bits), bits));
            if (addends > 1) codes = add_blocks(before.of[first / BLOCK], codes);
            store_floats(codes, in_block(block.length, first), scale, is_streamed, to + first);
        }
    });
    if (is_large) end_streaming();
}

// As with_types, for the types that a fixed rate serves.
template <class Function>
void with_float32_and_halves(const void* x, int32_t dtype, Function function) {
    void* any = const_cast<void*>(x);
    switch (dtype) {
        case BFLOAT16: return function(static_cast<bfloat16*>(any));
        case FLOAT16: return function(static_cast<float16*>(any));
        default: return function(static_cast<float*>(any));
    }
}

}  // namespace

// ------------------------------------------------------------------ the C functions, with arguments as in ../backend.py

NCZ_EXPORT void NCZ_NAME(block_magnitudes)(const void* x, int32_t dtype, const Rows* rows, uint16_t* magnitudes) {
    with_float32_and_halves(x, dtype, [&](auto* x) { block_magnitudes(x, *rows, magnitudes); });
}

NCZ_EXPORT void NCZ_NAME(pack)(const void* x, int32_t dtype, const Rows* rows, const uint16_t* magnitudes,
                               int32_t bits, const Noise* noise, uint8_t* packed) {
    with_float32_and_halves(x, dtype, [&](auto* x) { pack(x, *rows, magnitudes, unsigned(bits), noise, packed); });
}

NCZ_EXPORT void NCZ_NAME(add_packed)(const uint8_t* packed, int64_t rows, int64_t blocks, int32_t bits, uint8_t* out,
                                     int32_t out_bits) {
    add_packed(packed, rows, blocks, unsigned(bits), out, unsigned(out_bits));
}

NCZ_EXPORT void NCZ_NAME(unpack)(const uint8_t* packed, int64_t addends, int32_t bits, const Rows* rows,
                                 const uint16_t* magnitudes, float denominator, void* out, int32_t dtype) {
    with_float32_and_halves(out, dtype, [&](auto* out) {
        unpack(packed, addends, unsigned(bits), *rows, magnitudes, denominator, out);
    });
}
