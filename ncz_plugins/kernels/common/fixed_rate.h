// What the kernels for a fixed rate share: where blocks lie, and the scale of a block. ../reference/fixed_rate.py
// specifies all of it.
#pragma once

#include "floats.h"

namespace ncz {

// format.Rows
struct Rows {
    int64_t numel, count, elements, first, blocks;
};

// Magnitudes as the upper 16 bits of a float32.
constexpr uint16_t LEAST_MAGNITUDE = 27 << 7;  // 2**-100
constexpr uint16_t INFINITE_MAGNITUDE = 255 << 7;
constexpr uint32_t NOT_A_NUMBER = 0x7fc00000;

}  // namespace ncz

namespace {

// A block of a call.
struct ScaleBlock {
    int64_t begin;  // its first element in the tensor
    int length;     // 0 behind the end of the tensor
    int64_t scale;  // the number of its magnitude
};

// Block `i` of those of a row that a call covers.
NCZ_FUNCTION ScaleBlock scale_block(const ncz::Rows& rows, int64_t row, int64_t i) {
    int64_t block = rows.first + i;
    int64_t begin = row * rows.elements + block * ncz::RATE_BLOCK, end = (row + 1) * rows.elements;
    int64_t left = (end < rows.numel ? end : rows.numel) - begin;
    int64_t of_row = int64_t(uint64_t(rows.elements + ncz::RATE_BLOCK - 1) / ncz::RATE_BLOCK);
    return {begin, int(left < 0 ? 0 : left < ncz::RATE_BLOCK ? left : ncz::RATE_BLOCK), row * of_row + block};
}

// From the bits of the largest magnitude of a block, as float32. NaN has the largest bits of all.
NCZ_FUNCTION uint16_t magnitude_of(uint32_t largest) {
    uint32_t up = (largest + 0xffffu) >> 16;
    up = up < ncz::INFINITE_MAGNITUDE ? up : ncz::INFINITE_MAGNITUDE;
    return uint16_t(up > ncz::LEAST_MAGNITUDE ? up : ncz::LEAST_MAGNITUDE);
}

NCZ_FUNCTION float magnitude_as_float(uint16_t magnitude) { return float_of(uint32_t(magnitude) << 16); }

// What turns values into codes from -levels to levels; 0 for a block that is not finite, whose codes are all 0. The next
// lower float, so that no product exceeds `levels`, however it is rounded.
NCZ_FUNCTION float inverse_step_of(uint16_t magnitude, float levels) {
    if (magnitude == ncz::INFINITE_MAGNITUDE) return 0;
    return float_of(bits_of(levels / magnitude_as_float(magnitude)) - 1);
}

}  // namespace
