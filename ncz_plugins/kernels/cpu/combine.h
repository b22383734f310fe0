// What uncompressed reductions do with the values of several ranks, as in ../reference/combine.py: in the order of the
// ranks, so that all of them get the same bits. The half types are combined as float32. Included by codec.h.
#pragma once

namespace {

enum Combination : int32_t { ADD = 0, MULTIPLY = 1, LOWEST = 2, HIGHEST = 3 };              // as in ../format.py
enum OtherDtype : int32_t { INT64 = 4, INT32 = 5, INT8 = 6, UINT8 = 7, BOOL = 8 };  // the rest of COMBINED_DTYPES

struct Boolean {
    uint8_t byte;  // not 0: true
};

inline bool widen(Boolean x) { return x.byte != 0; }
inline int64_t widen(int64_t x) { return x; }
inline int32_t widen(int32_t x) { return x; }
inline int8_t widen(int8_t x) { return x; }
inline uint8_t widen(uint8_t x) { return x; }

inline void narrow(bool value, Boolean& out) { out.byte = value; }
template <class T>
void narrow(T value, T& out) {
    out = value;
}

// Integers wrap, which those with a sign must not do in C++. Short ones and bool are added and multiplied as int.
template <class T>
auto wrapping(T x) {
    if constexpr (std::is_integral<T>::value && sizeof(T) >= sizeof(int))
        return std::make_unsigned_t<T>(x);
    else
        return x;
}

// NaN is lower and higher than anything.
template <int32_t combination, class T>
T combined(T a, T b) {
    if constexpr (combination == ADD)
        return T(wrapping(a) + wrapping(b));
    else if constexpr (combination == MULTIPLY)
        return T(wrapping(a) * wrapping(b));
    else if constexpr (combination == LOWEST)
        return a < b || a != a ? a : b;
    else
        return a > b || a != a ? a : b;
}

// Functions of their own: a loop for each pair of a dtype and a combination would be a tenth of the library.
template <class T, class Wide>
[[gnu::noinline]] void widen_all(const T* values, int count, Wide* wide) {
    for (int i = 0; i < count; ++i) wide[i] = widen(values[i]);
}

template <class T, class Wide>
[[gnu::noinline]] void narrow_all(const Wide* wide, int count, T* values) {
    for (int i = 0; i < count; ++i) narrow(wide[i], values[i]);
}

template <int32_t combination, class T>
[[gnu::noinline]] void combine_all(const T* values, int count, T* total) {
    for (int i = 0; i < count; ++i) total[i] = combined<combination, T>(total[i], values[i]);
}

template <int32_t combination, class T>
void combine(const void* const* values, int32_t ranks, int64_t count, int32_t divisor, T* out) {
    typedef decltype(widen(T())) Wide;
    constexpr int TOGETHER = 1024;  // elements, which stay in the fastest cache
    Wide total[TOGETHER], wide[TOGETHER];
    auto of_rank = [&](int32_t rank) { return static_cast<const T*>(values[rank]); };
    for (int64_t first = 0; first < count; first += TOGETHER) {
        int elements = int(count - first < TOGETHER ? count - first : TOGETHER);
        widen_all(of_rank(0) + first, elements, total);
        for (int32_t rank = 1; rank < ranks; ++rank) {
            if constexpr (std::is_same<T, Wide>::value) {
                combine_all<combination>(of_rank(rank) + first, elements, total);
            } else {
                widen_all(of_rank(rank) + first, elements, wide);
                combine_all<combination>(wide, elements, total);
            }
        }
        if constexpr (std::is_floating_point<Wide>::value)
            if (divisor != 1)
                for (int i = 0; i < elements; ++i) total[i] /= Wide(divisor);
        narrow_all(total, elements, out + first);
    }
}

}  // namespace

// ------------------------------------------------------------------ the C function, with arguments as in ../backend.py

// `out` may be one of `values`: each block is read before it is written.
NCZ_EXPORT void NCZ_NAME(combine)(const void* const* values, int32_t ranks, int32_t dtype, int64_t count,
                                  int32_t combination, int32_t divisor, void* out) {
    auto with_values = [&](auto* out) {
        switch (combination) {
            case ADD: return combine<ADD>(values, ranks, count, divisor, out);
            case MULTIPLY: return combine<MULTIPLY>(values, ranks, count, divisor, out);
            case LOWEST: return combine<LOWEST>(values, ranks, count, divisor, out);
            default: return combine<HIGHEST>(values, ranks, count, divisor, out);
        }
    };
    switch (dtype) {
        case INT64: return with_values(static_cast<int64_t*>(out));
        case INT32: return with_values(static_cast<int32_t*>(out));
        case INT8: return with_values(static_cast<int8_t*>(out));
        case UINT8: return with_values(static_cast<uint8_t*>(out));
        case BOOL: return with_values(static_cast<Boolean*>(out));
        default: return with_types(out, nullptr, dtype, [&](auto* out, auto*) { return with_values(out); });
    }
}
