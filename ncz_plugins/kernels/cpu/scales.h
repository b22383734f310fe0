// Quantization steps of blocks of which ranks know the root mean square only, as in ../reference/scales.py. Every
// operation is rounded as there, so the results are the same to the bit. Included by codec.h.

#pragma once

namespace {

// ../format.h's StepRule, without the mode.
struct StepRule {
    double value, addends, share, divisor, steps_per_bound, least, reserved, most, rounding, tiny, cap;
};

constexpr double ROOT_OF_BLOCK = 0x1.6a09e667f3bcdp+3;  // the square root of SCALE_BLOCK
constexpr double BFLOAT16_ROUNDING = 1 + 0x1p-7;        // what was rounded down was less than this times as large
constexpr double MAX_CODE = 2147483648.0 - 1024;

inline double larger(double a, double b) { return a > b ? a : b; }
inline double smaller(double a, double b) { return a < b ? a : b; }

// For positive numbers and infinity.
inline float rounded_down(double value) {
    float rounded = float(value);
    return float_of(bits_of(rounded) - uint32_t(double(rounded) > value));
}

template <class T>
void root_mean_squares(const T* x, int64_t count, double most, uint16_t* out) {
    constexpr int AT_ONCE = 32;
    double lowest[AT_ONCE], highest[AT_ONCE], squares[AT_ONCE];
    for (int64_t b = 0; b < scale_blocks_of(count); ++b) {
        int at = int(b % AT_ONCE);
        if (at == 0) {
            int64_t left = count - b * SCALE_BLOCK, some = AT_ONCE * SCALE_BLOCK;
            block_statistics(x + b * SCALE_BLOCK, left < some ? left : some, lowest, highest, squares);
        }
        int64_t left = count - b * SCALE_BLOCK;
        double n = left < SCALE_BLOCK ? double(left) : SCALE_BLOCK;
        double largest = larger(highest[at], -lowest[at]);
        double mean = squares[at] / n * (1 - 65 * 0x1p-53);
        bool usable = mean > 1e-290 && mean < __builtin_inf();
        double rms = larger(__builtin_sqrt(usable ? mean : 0), largest / __builtin_sqrt(n));
        out[b] = uint16_t(bits_of(rounded_down(largest > most ? __builtin_inf() : rms)) >> 16);
    }
}

// Returns the largest number of codes that a block's usual values spread over; 0 where a block has no step.
inline double steps_of(const uint16_t* agreed, int64_t blocks, const StepRule& rule, float* inverse_steps,
                       float* scales) {
    double spread = 0;
    int64_t without = 0;
    float divisor = float(rule.divisor);
    for (int64_t b = 0; b < blocks; ++b) {
        float single = float_of(uint32_t(agreed[b]) << 16);
        double rms = single;
        double largest = rms * (ROOT_OF_BLOCK * BFLOAT16_ROUNDING), typical = smaller(largest, 4 * rms);
        double bound = larger(rule.value * rms, rule.least);
        double needed = rule.addends * (largest / (MAX_CODE - rule.addends)) / rule.steps_per_bound;
        double finest = larger(rule.reserved * largest / (0.75 - rule.reserved),
                               (rule.reserved * largest + needed) / (1 - rule.reserved));
        without += !(single < __builtin_inff()) | (bound < finest);
        double usable = bound - rule.reserved * (largest + bound);
        if (rule.rounding != 0) {
            double rounding = rule.rounding * larger(largest + bound, rule.tiny);
            usable = larger(usable - rounding, usable / 2);
        }
        float step = rounded_down(smaller(rule.steps_per_bound * usable, rule.cap));
        inverse_steps[b] = 1 / step;
        scales[b] = step / divisor;
        spread = larger(spread, 2 * typical / double(step) + 1);
    }
    return without ? 0 : spread;
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
