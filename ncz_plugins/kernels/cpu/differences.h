// Differences between floats, which compilers vectorize. Included by codec.h, whose names it uses.
#pragma once

#include "../common/differences.h"

namespace {

// Bits are loaded and stored by memcpy: the tensors are floats, and this reads integers.
template <class T>
void differences(const T* x, const T* base, int64_t count, int32_t* codes) {
    for (int64_t i = 0; i < count; ++i) {
        UnsignedBits<T> a, b;
        memcpy(&a, x + i, sizeof a);
        memcpy(&b, base + i, sizeof b);
        codes[i] = difference<T>(a, b);
    }
}

// `out` may be `base`.
template <class T>
void add_differences(const int32_t* codes, const T* base, int64_t count, T* out) {
    for (int64_t i = 0; i < count; ++i) {
        UnsignedBits<T> bits;
        memcpy(&bits, base + i, sizeof bits);
        bits = restored<T>(codes[i], bits);
        memcpy(out + i, &bits, sizeof bits);
    }
}

}  // namespace

// ------------------------------------------------------------------ the C functions, with arguments as in ../backend.py

NCZ_EXPORT void NCZ_NAME(differences)(const void* x, const void* base, int32_t dtype, int64_t count, int32_t* codes) {
    with_float32_and_halves(x, dtype, [&](auto* x) {
        differences(x, static_cast<decltype(x)>(const_cast<void*>(base)), count, codes);
    });
}

NCZ_EXPORT void NCZ_NAME(add_differences)(const int32_t* codes, const void* base, int64_t count, void* out,
                                          int32_t dtype) {
    with_float32_and_halves(out, dtype, [&](auto* out) {
        add_differences(codes, static_cast<decltype(out)>(const_cast<void*>(base)), count, out);
    });
}
