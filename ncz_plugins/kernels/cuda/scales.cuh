// From what SCALE_BLOCK elements are like, each, to the quantization steps that all ranks share, one for as many.
// core/codec/quantize.py specifies it: the same numbers, as long as a block has one step; with more, sums of squares may
// differ in their last bit.
//
// For each block of a scale `threads` work: one where it has one step, a warp, or, where it is long, a whole block of
// threads.
#pragma once

#include "values.cuh"

namespace ncz {

// format.StepRule
struct StepRule {
    long long mode;
    double value, addends, share, divisor, steps_per_bound, least, reserved, most, rounding, tiny, cap;
};
enum StepMode : int { ABS, REL, RMS, RANGE, RMS_ONLY };

// Neighbouring elements that are cut into blocks from their beginning on.
struct Run {
    long long elements;
    uint32_t first_step, steps, first_block, blocks;
};
struct Runs {
    int32_t n, unused;
    Run of[MOST_PIECES];
};

// What kernels find out about all blocks of a run together.
struct Outcome {
    unsigned long long infinite, too_fine;  // blocks with values or results that are not finite; whose codes overflow
    unsigned long long bits;                // roughly those of a value, times 2**20, summed over steps
    unsigned long long agreed;              // a checksum of the numbers that steps are derived from
};

}  // namespace ncz

namespace {

constexpr double LARGEST_CODE = 2147482624.0;  // MAX_CODE of format.py
constexpr double ONE_BIT = 1048576.0;

struct BlockOfScale {
    int64_t number, first_step;
    int steps;
    double elements;
    bool exists;
};

// That of this thread.
NCZ_DEVICE BlockOfScale block_of_scale(const Runs& runs, int64_t steps_per_block, int threads) {
    const Run& run = runs.of[frame_number(runs.n)];
    int64_t at = unit_number(runs.n) * (THREADS / threads) + int(threadIdx.x) / threads, first = at * steps_per_block;
    int64_t steps = run.steps - first, elements = run.elements - first * SCALE_BLOCK;
    bool exists = at < run.blocks;
    if (steps > steps_per_block) {
        steps = steps_per_block;
        elements = elements < steps * SCALE_BLOCK ? elements : steps * SCALE_BLOCK;
    }
    return {run.first_block + at, run.first_step + first, exists ? int(steps) : 0, double(elements), exists};
}

NCZ_DEVICE double larger(double a, double b) { return a >= b ? a : b; }
NCZ_DEVICE double smaller(double a, double b) { return a < b ? a : b; }
NCZ_DEVICE double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }

NCZ_DEVICE double warp_largest(double value) {
    for (int distance = WARP / 2; distance; distance /= 2)
        value = larger(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}

// The nearest number of the type of steps that is not lower; not higher, of a number that is not negative.
NCZ_DEVICE void round_up(double value, double& out) { out = value; }
NCZ_DEVICE void round_up(double value, float& out) {
    out = __double2float_rn(value);
    if (double(out) < value) out = float_of(out < 0 ? bits_of(out) - 1 : bits_of(out) + 1);
}
NCZ_DEVICE void round_down(double value, double& out) { out = value; }
NCZ_DEVICE void round_down(double value, float& out) {
    out = __double2float_rn(value);
    if (double(out) > value && out > 0) out = float_of(bits_of(out) - 1);
}
NCZ_DEVICE void round_down(double value, bfloat16& out) {  // of a value that is not negative
    float rounded;
    round_down(value, rounded);
    out.bits = uint16_t(bits_of(rounded) >> 16);
}

}  // namespace

// What this rank measured of each block, [numbers of a block, blocks], from the statistics of all steps' elements,
// [3, steps]. `most` is for mode RMS_ONLY: larger magnitudes count as infinite. `measured_numbers` are Scale, or bfloat16 in
// that mode.
NCZ_KERNEL(ncz_measure_blocks)
(const __grid_constant__ Runs runs, long long steps_per_block, int threads, int mode, double most,
 const double* statistics, long long steps, long long blocks, void* measured_numbers) {
    Scale* measured = static_cast<Scale*>(measured_numbers);
    NCZ_SHARED(double, scratch, 3 * WARPS);
    BlockOfScale block = block_of_scale(runs, steps_per_block, threads);
    int own = int(threadIdx.x) % threads;
    const double nothing = mode == RANGE ? -infinity() : 0;
    double highest = nothing, negated = nothing, squares = 0;
    for (int i = own; i < block.steps; i += threads) {
        int64_t at = block.first_step + i;
        negated = larger(negated, -statistics[at]);
        highest = larger(highest, statistics[steps + at]);
        squares = __dadd_rn(squares, statistics[2 * steps + at]);
    }
    if (threads > 1) {
        highest = warp_largest(highest);
        negated = warp_largest(negated);
        for (int distance = WARP / 2; distance; distance /= 2)
            squares = __dadd_rn(squares, __shfl_xor_sync(ALL_LANES, squares, distance));
    }
    if (threads > WARP) {
        if (lane() == 0) {
            scratch[warp()] = highest;
            scratch[WARPS + warp()] = negated;
            scratch[2 * WARPS + warp()] = squares;
        }
        __syncthreads();
        highest = negated = nothing;
        squares = 0;
        for (int w = 0; w < WARPS; ++w) {
            highest = larger(highest, scratch[w]);
            negated = larger(negated, scratch[WARPS + w]);
            squares = __dadd_rn(squares, scratch[2 * WARPS + w]);
        }
    }
    if (own || !block.exists) return;
    if (mode == RANGE) {
        round_up(highest, measured[block.number]);
        round_up(negated, measured[blocks + block.number]);
        return;
    }
    double largest = larger(highest, negated);
    if (mode != RMS_ONLY) round_up(largest, measured[block.number]);
    if (mode != RMS && mode != RMS_ONLY) return;
    double mean = __dmul_rn(squares / block.elements, 1 - (64 + block.steps) * 0x1p-53);
    bool usable = mean > 1e-290 && mean < infinity();
    double root = larger(usable ? sqrt(mean) : 0, largest / sqrt(block.elements));
    if (mode == RMS)
        round_up(root, measured[blocks + block.number]);
    else
        round_down(largest > most ? infinity() : root, static_cast<bfloat16*>(measured_numbers)[block.number]);
}

// All steps, from the maximum over ranks of what they measured. Where that allows none they are 0, and the outcome of the run
// says why.
NCZ_KERNEL(ncz_derive_steps)
(const __grid_constant__ Runs runs, long long steps_per_block, int threads, StepRule rule, const void* agreed_numbers,
 long long blocks, Scale* inverse_steps, Scale* scales, Outcome* outcomes) {
    NCZ_SHARED(unsigned long long, scratch, WARPS);
    Outcome* outcome = outcomes + frame_number(runs.n);
    BlockOfScale block = block_of_scale(runs, steps_per_block, threads);
    int own = int(threadIdx.x) % threads;
    bool first = own == 0;
    unsigned long long bits = 0, checksum = 0;
    double one = 0, two = 0;
    if (block.exists) {
        int64_t second = rule.mode == RMS || rule.mode == RANGE ? blocks : 0;
        auto agreed = [&](int64_t i) {
            return rule.mode == RMS_ONLY ? double(widen(static_cast<const bfloat16*>(agreed_numbers)[i]))
                                         : double(static_cast<const Scale*>(agreed_numbers)[i]);
        };
        one = agreed(block.number);
        two = agreed(second + block.number);
        if (first) checksum = uint64_t(__double_as_longlong(one)) + 3 * uint64_t(__double_as_longlong(two));
    }
    checksum = block_sum(checksum, scratch);
    if (threadIdx.x == 0 && checksum) atomicAdd(&outcome->agreed, checksum);
    if (block.exists) {
        bool infinite = one == infinity() || two == infinity();
        double relative_to = 1, largest = one, typical = one;
        if (rule.mode == REL) relative_to = one;
        if (rule.mode == RMS) {
            relative_to = two;
            typical = smaller(one, 4 * two);
        }
        if (rule.mode == RMS_ONLY) {
            relative_to = one;
            largest = one * (sqrt(double(steps_per_block * SCALE_BLOCK)) * (1 + 0x1p-7));
            typical = smaller(largest, 4 * one);
        }
        if (rule.mode == RANGE) {
            one = one == -infinity() ? 0 : one;
            two = two == -infinity() ? 0 : two;
            relative_to = typical = one + two;
            largest = larger(fabs(one), fabs(two));
        }
        double bound = rule.value * relative_to;
        infinite |= rule.mode != RMS_ONLY && (largest + bound) * rule.share > rule.most;
        bound = larger(bound, rule.least);
        double codes = rule.addends * (largest / (LARGEST_CODE - rule.addends)) / rule.steps_per_bound;
        double finest = larger(rule.reserved * largest / (0.75 - rule.reserved),
                               (rule.reserved * largest + codes) / (1 - rule.reserved));
        bool too_fine = bound < finest;
        double usable = bound - rule.reserved * (largest + bound);
        if (rule.rounding != 0)
            usable = larger(usable - rule.rounding * larger(largest + bound, rule.tiny), usable / 2);
        Scale step;
        round_down(smaller(rule.steps_per_bound * usable, rule.cap), step);
        if (too_fine && relative_to == 0 && rule.mode == RANGE && rule.steps_per_bound == 2) {
            step = Scale(largest);
            too_fine = false;
        }
        bool fits = !infinite && !too_fine;
        Scale inverse = fits ? 1 / step : 0, scale = fits ? step / Scale(rule.divisor) : 0;
        for (int i = own; i < block.steps; i += threads) {
            inverse_steps[block.first_step + i] = inverse;
            scales[block.first_step + i] = scale;
        }
        if (first && infinite) atomicAdd(&outcome->infinite, 1ull);
        if (first && too_fine) atomicAdd(&outcome->too_fine, 1ull);
        if (first && fits) {
            double of_value = log2(2 * typical / double(step) + 1) + 1;
            bits = (unsigned long long)(of_value * ONE_BIT) * (unsigned long long)(block.steps > 1 ? block.steps : 1);
        }
    }
    bits = block_sum(bits, scratch);
    if (threadIdx.x == 0 && bits) atomicAdd(&outcome->bits, bits);
}

#define NCZ_SCALE_KERNELS(X) X(ncz_measure_blocks) X(ncz_derive_steps)
