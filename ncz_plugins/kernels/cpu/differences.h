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

// 4096 elements are copied before those of them that change do, so that they are still in the fastest cache.
constexpr int64_t ELEMENTS_TOGETHER = 4096;

// As add_differences, of `changes` elements and with a copy of all others. `gaps`: elements that stay, between a change and the
// one before it. False, and nothing is written, unless all changes lie in `count` elements, and none is 0.
template <class T>
bool add_rare_differences(const int32_t* gaps, const int32_t* codes, int64_t changes, const T* base, int64_t count,
                          T* out) {
    int64_t needed = changes;
    bool has_zero = changes == 0;
    for (int64_t i = 0; i < changes; ++i) {
        needed += uint32_t(gaps[i]);  // without a sign, a gap below 0 is too large as well
        has_zero |= codes[i] == 0;
    }
    if (has_zero || needed > count) return false;
    int64_t i = 0, place = gaps[0];
    for (int64_t first = 0; first < count; first += ELEMENTS_TOGETHER) {
        int64_t end = first + ELEMENTS_TOGETHER < count ? first + ELEMENTS_TOGETHER : count;
        if (out != base) memcpy(out + first, base + first, size_t(end - first) * sizeof(T));
        while (place < end) {
            add_differences(codes + i, out + place, 1, out + place);
            place = ++i < changes ? place + 1 + gaps[i] : count;
        }
    }
    return true;
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

NCZ_EXPORT int32_t NCZ_NAME(add_rare_differences)(const int32_t* gaps, const int32_t* codes, int64_t changes,
                                                  const void* base, int64_t count, void* out, int32_t dtype) {
    int32_t are_inside = 0;
    with_float32_and_halves(out, dtype, [&](auto* out) {
        auto from = static_cast<decltype(out)>(const_cast<void*>(base));
        are_inside = add_rare_differences(gaps, codes, changes, from, count, out);
    });
    return are_inside;
}
