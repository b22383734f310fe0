// Operations on floats that the kernels of all processors share: clamping, and converting the half types, as bits, to
// float32 (exact) and back (to nearest even). Branch-free, so that compilers vectorize loops over them.
#pragma once

#include "format.h"

#ifndef __CUDACC_RTC__
#include <cfloat>
static_assert(FLT_EVAL_METHOD == 0, "every product must be rounded to its own type, as the reference rounds it");
#endif

namespace {

NCZ_FUNCTION uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

NCZ_FUNCTION float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Like ?:, which gcc would compile to a branch if one side needs float arithmetic, and then vectorize nothing.
NCZ_FUNCTION uint32_t choose(bool condition, uint32_t yes, uint32_t no) {
    uint32_t mask = 0u - uint32_t(condition);
    return (yes & mask) | (no & ~mask);
}

// Clamps to the range of int32, before rounding. NaN becomes the upper limit.
NCZ_FUNCTION float clamped(float scaled) {
    constexpr float limit = 2147483520.0f;  // the largest float32 that int32 holds
    scaled = scaled < limit ? scaled : limit;
    return scaled > -limit ? scaled : -limit;
}

NCZ_FUNCTION double clamped(double scaled) {
    constexpr double limit = 2147483647.0;
    scaled = scaled < limit ? scaled : limit;
    return scaled > -limit ? scaled : -limit;
}

NCZ_FUNCTION double widen(double x) { return x; }
NCZ_FUNCTION float widen(float x) { return x; }
NCZ_FUNCTION float widen(ncz::bfloat16 x) { return float_of(uint32_t(x.bits) << 16); }

NCZ_FUNCTION float widen(ncz::float16 x) {
    uint32_t magnitude = x.bits & 0x7fffu;
    uint32_t normal = (magnitude << 13) + (112u << 23);  // 112: float32's exponent bias less float16's
    uint32_t subnormal = bits_of(float(int32_t(magnitude)) * 0x1p-24f);
    uint32_t special = (magnitude << 13) | 0x7f800000u;  // infinity or NaN
    uint32_t bits = choose(magnitude < 0x0400u, subnormal, magnitude < 0x7c00u ? normal : special);
    return float_of(bits | uint32_t(x.bits & 0x8000u) << 16);
}

NCZ_FUNCTION void narrow(double value, double& out) { out = value; }
NCZ_FUNCTION void narrow(float value, float& out) { out = value; }

NCZ_FUNCTION void narrow(float value, ncz::bfloat16& out) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet_nan = (bits >> 16) | 0x40u;
    out.bits = uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

NCZ_FUNCTION void narrow(float value, ncz::float16& out) {
    uint32_t bits = bits_of(value);
    uint32_t magnitude = bits & 0x7fffffffu;
    // Values from 65520 on become infinity without a special case.
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // 0.5f has float16's smallest subnormal, 2**-24, as its last bit: the addition rounds.
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t half = choose(magnitude < 0x38800000u, subnormal, magnitude < 0x47800000u ? normal : special);
    out.bits = uint16_t(half | (bits >> 16 & 0x8000u));
}

}  // namespace
