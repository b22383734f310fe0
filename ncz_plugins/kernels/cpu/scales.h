// Quantization steps of blocks of which ranks know the root mean square only, as in ../reference/scales.py. Every
// operation is rounded as there, so the results are the same to the bit. Included by codec.h.

#pragma once

namespace ncz {

// ../format.h's StepRule, without the mode.
struct StepRule {
    double value, addends, share, divisor, steps_per_bound, least, reserved, most, rounding, tiny, cap;
};

}  // namespace ncz

namespace {

constexpr double ROOT_OF_BLOCK = 0x1.6a09e667f3bcdp+3;  // the square root of SCALE_BLOCK
constexpr double BFLOAT16_ROUNDING = 1 + 0x1p-7;        // what was rounded down was less than this times as large
constexpr double MAX_CODE = 2147483648.0 - 1024;
constexpr uint32_t INFINITE = 0x7f800000;  // the bits of infinity; those of NaNs are larger
constexpr int BLOCKS_AT_ONCE = 32;         // in loops so simple that compilers turn them into vectors

inline double larger(double a, double b) { return a > b ? a : b; }
inline double smaller(double a, double b) { return a < b ? a : b; }

// For positive numbers and infinity.
inline float rounded_down(double value) {
    float rounded = float(value);
    return float_of(bits_of(rounded) - uint32_t(double(rounded) > value));
}

// The bits of the largest magnitude of a whole block; INFINITE or more if something in it is not finite.
inline uint32_t largest_bits(const float* x) {
    typedef uint32_t Vector __attribute__((vector_size(VECTOR_BYTES)));
    constexpr int LENGTH = VECTOR_BYTES / 4, VECTORS = 4;
    Vector highest[VECTORS] = {}, bits;
    for (int i = 0; i < SCALE_BLOCK; i += VECTORS * LENGTH)
        for (int v = 0; v < VECTORS; ++v) {
            memcpy(&bits, x + i + v * LENGTH, sizeof bits);
            bits &= 0x7fffffff;
            highest[v] = bits > highest[v] ? bits : highest[v];
        }
    for (int v = 1; v < VECTORS; ++v) highest[0] = highest[v] > highest[0] ? highest[v] : highest[0];
    uint32_t most = 0;
    for (int j = 0; j < LENGTH; ++j) most = highest[0][j] > most ? highest[0][j] : most;
    return most;
}

// Of at most BLOCKS_AT_ONCE blocks of `n` elements each, from what `squares_of` and `largest_bits` return.
inline void root_mean_squares(const double* squares, const uint32_t* largest, int blocks, double n, double most,
                              uint16_t* out) {
    double usable[BLOCKS_AT_ONCE], highest[BLOCKS_AT_ONCE], root = __builtin_sqrt(n);
    for (int b = 0; b < blocks; ++b) {
        uint32_t bits = largest[b] < INFINITE ? largest[b] : INFINITE;
        highest[b] = float_of(bits);
        double mean = squares[b] / n * (1 - 65 * 0x1p-53);
        usable[b] = mean > 1e-290 ? mean : 0;
    }
    for (int b = 0; b < blocks; ++b) usable[b] = __builtin_sqrt(usable[b]);
    for (int b = 0; b < blocks; ++b) {
        double rms = larger(usable[b], highest[b] / root);
        out[b] = uint16_t(bits_of(rounded_down(highest[b] > most ? __builtin_inf() : rms)) >> 16);
    }
}

template <class T>
void root_mean_squares(const T* x, int64_t count, double most, uint16_t* out) {
    alignas(64) float padded[SCALE_BLOCK];
    double squares[BLOCKS_AT_ONCE];
    uint32_t largest[BLOCKS_AT_ONCE];
    int64_t whole = count / SCALE_BLOCK;
    for (int64_t first = 0; first < whole; first += BLOCKS_AT_ONCE) {
        int blocks = int(whole - first < BLOCKS_AT_ONCE ? whole - first : BLOCKS_AT_ONCE);
        for (int b = 0; b < blocks; ++b) {
            const T* from = x + (first + b) * SCALE_BLOCK;
            prefetch<READ>(from, SCALE_BLOCK);
            const float* block = widen_block(from, SCALE_BLOCK, padded);
            squares[b] = squares_of(block);
            largest[b] = largest_bits(block);
        }
        root_mean_squares(squares, largest, blocks, SCALE_BLOCK, most, out + first);
    }
    if (int left = int(count % SCALE_BLOCK)) {
        const float* block = widen_block(x + whole * SCALE_BLOCK, left, padded);
        *squares = squares_of(block);
        *largest = largest_bits(block);
        root_mean_squares(squares, largest, 1, left, most, out + whole);
    }
}

// Of at most BLOCKS_AT_ONCE blocks. `spreads`: see `steps_of`; 0 where a block has no step.
inline void steps_of(const uint16_t* agreed, int blocks, const StepRule& rule, float* inverse_steps, float* scales,
                     double* spreads) {
    double has_step[BLOCKS_AT_ONCE];
    float steps[BLOCKS_AT_ONCE], divisor = float(rule.divisor);
    // The part of the bound that steps keep at least. A product, not a choice per block: the loop stays in vectors.
    double kept = rule.rounding != 0 ? 0.5 : 1;
    for (int b = 0; b < blocks; ++b) {
        double rms = float_of(uint32_t(agreed[b]) << 16);
        double largest = rms * (ROOT_OF_BLOCK * BFLOAT16_ROUNDING), typical = smaller(largest, 4 * rms);
        double bound = larger(rule.value * rms, rule.least);
        double needed = rule.addends * (largest / (MAX_CODE - rule.addends)) / rule.steps_per_bound;
        double finest = larger(rule.reserved * largest / (0.75 - rule.reserved),
                               (rule.reserved * largest + needed) / (1 - rule.reserved));
        double usable = bound - rule.reserved * (largest + bound);
        double rounding = rule.rounding * larger(largest + bound, rule.tiny);
        usable = larger(usable - rounding, usable * kept);
        steps[b] = rounded_down(smaller(rule.steps_per_bound * usable, rule.cap));
        spreads[b] = 2 * typical / double(steps[b]) + 1;
        has_step[b] = (bound < finest) | !(rms < __builtin_inf()) ? 0 : 1;
    }
    for (int b = 0; b < blocks; ++b) spreads[b] = has_step[b] > 0 ? spreads[b] : 0;
    for (int b = 0; b < blocks; ++b) inverse_steps[b] = 1 / steps[b];
    for (int b = 0; b < blocks; ++b) scales[b] = steps[b] / divisor;
}

// Returns the largest number of codes that a block's usual values spread over; 0 where a block has no step.
inline double steps_of(const uint16_t* agreed, int64_t blocks, const StepRule& rule, float* inverse_steps,
                       float* scales) {
    double spreads[BLOCKS_AT_ONCE], most = 0;
    bool all = true;
    for (int64_t first = 0; first < blocks; first += BLOCKS_AT_ONCE) {
        int some = int(blocks - first < BLOCKS_AT_ONCE ? blocks - first : BLOCKS_AT_ONCE);
        steps_of(agreed + first, some, rule, inverse_steps + first, scales + first, spreads);
        for (int b = 0; b < some; ++b) {
            most = larger(most, spreads[b]);
            all &= spreads[b] != 0;
        }
    }
    return all ? most : 0;
}

}  // namespace

// ------------------------------------------------------------------ the C functions, with arguments as in ../backend.py

NCZ_EXPORT void NCZ_NAME(root_mean_squares)(const void* x, int32_t dtype, int64_t count, double most, uint16_t* out) {
    with_float32_and_halves(x, dtype, [&](auto* x) { root_mean_squares(x, count, most, out); });
}

NCZ_EXPORT double NCZ_NAME(steps_of)(const uint16_t* agreed, int64_t blocks, const StepRule* rule,
                                     float* inverse_steps, float* scales) {
    return steps_of(agreed, blocks, *rule, inverse_steps, scales);
}
