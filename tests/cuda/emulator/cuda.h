// CUDA C++ for g++: the subset that the kernels use, each CUDA thread a fibre (emulator.cpp).
//
// What a run here does not show:
// - Weak memory. Threads take turns on one processor, so a plain run sees every store at once. Under TSan a missing
//   __syncwarp, __syncthreads, __threadfence or acquire/release shows as a race, but not what a GPU would make of it.
// - Hangs for lack of occupancy. Blocks start in random order, a few at a time, and all threads that can run do run.
// - Speed, registers, shared memory banks, and code that only nvcc's own headers, types or optimizer see.
// - Use of what torch.empty left in global memory. (Shared memory starts as garbage, 0xA5 in every byte.)
// - Blocks larger than __launch_bounds__ says.
// - Under TSan, races between threads of the same number in two blocks that ran in the same place, one after the other:
//   with seed 0 that is all blocks, so other seeds are needed too.
//
// What it shows beyond a wrong result: lanes that meet in different operations or masks, or leave others waiting; waits
// and loops without an end; too much shared memory, and stores beside a shared array; wild addresses; and what ASan,
// UBSan (bad alignment, shifts, float to integer) and TSan report.
//
// Stricter than CUDA: a mask must not name lanes that have ended or do not exist, lanes that shuffle or vote together
// must do it at the same place in the source, and a value shuffled from a lane outside the mask is garbage.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "runtime.h"

#define NCZ_EMULATED

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __grid_constant__
#define NCZ_CALLED inline
#define __launch_bounds__(...)
// How many threads a block has that runs a kernel, from its launch bounds.
#define NCZ_KERNEL_OF(threads, blocks, name)  \
    constexpr int name##_threads = (threads); \
    extern "C" void name

#define __align__(bytes) __attribute__((aligned(bytes)))

#define threadIdx (emulator::thread->thread)
#define blockIdx (emulator::thread->block)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

#define NCZ_SHARED(type, name, count)                                                         \
    static emulator::Shared name##_array = {#name, sizeof(type[count]), alignof(type), 0};    \
    type(&name)[count] = *reinterpret_cast<type(*)[count]>(emulator::shared(name##_array))

// The place of a call, as default arguments.
#define NCZ_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define NCZ_PLACE \
    emulator::Place { file, line }

// ---- Meeting places

inline void __syncthreads(NCZ_CALLER) { emulator::barrier(NCZ_PLACE); }

inline void __syncwarp(unsigned mask = 0xFFFFFFFF, NCZ_CALLER) {
    emulator::meet({emulator::Meeting::SYNCWARP, mask, 0, 0, 32, NCZ_PLACE});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, NCZ_CALLER) {
    return unsigned(emulator::meet({emulator::Meeting::BALLOT, mask, predicate != 0, 0, 32, NCZ_PLACE}));
}

inline int __any_sync(unsigned mask, int predicate, NCZ_CALLER) {
    return int(emulator::meet({emulator::Meeting::ANY, mask, predicate != 0, 0, 32, NCZ_PLACE}));
}

inline int __all_sync(unsigned mask, int predicate, NCZ_CALLER) {
    return int(emulator::meet({emulator::Meeting::ALL, mask, predicate != 0, 0, 32, NCZ_PLACE}));
}

namespace emulator {

template <class T>
T shuffle(Meeting kind, unsigned mask, T value, int operand, int width, Place place) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = meet({kind, mask, bits, operand, width, place});
    memcpy(&value, &bits, sizeof(T));
    return value;
}

}  // namespace emulator

// CUDA has these for exactly these types; smaller integers are promoted.
#define NCZ_SHUFFLE(T)                                                                                \
    inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, NCZ_CALLER) {              \
        return emulator::shuffle(emulator::Meeting::SHFL, mask, value, lane, width, NCZ_PLACE);       \
    }                                                                                                 \
    inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, NCZ_CALLER) {     \
        return emulator::shuffle(emulator::Meeting::SHFL_UP, mask, value, delta, width, NCZ_PLACE);   \
    }                                                                                                 \
    inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, NCZ_CALLER) {   \
        return emulator::shuffle(emulator::Meeting::SHFL_DOWN, mask, value, delta, width, NCZ_PLACE); \
    }                                                                                                 \
    inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, NCZ_CALLER) {         \
        return emulator::shuffle(emulator::Meeting::SHFL_XOR, mask, value, lanes, width, NCZ_PLACE);  \
    }
NCZ_SHUFFLE(int)
NCZ_SHUFFLE(unsigned)
NCZ_SHUFFLE(long)
NCZ_SHUFFLE(unsigned long)
NCZ_SHUFFLE(long long)
NCZ_SHUFFLE(unsigned long long)
NCZ_SHUFFLE(float)
NCZ_SHUFFLE(double)
#undef NCZ_SHUFFLE

// ---- Memory that threads share

namespace emulator {

// No other CUDA thread runs between the load and the exchange. TSan sees relaxed atomic operations, as on a GPU.
template <class T, class Change>
T atomic(T* address, Change change, Place place) {
    before_atomic(address, sizeof(T), place);
    T old = __atomic_load_n(address, __ATOMIC_RELAXED);
    T value = change(old);
    __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
    after_atomic(value != old, place);
    return old;
}

}  // namespace emulator

#define NCZ_ATOMIC(T)                                                                            \
    inline T atomicAdd(T* address, T value, NCZ_CALLER) {                                        \
        return emulator::atomic(                                                                 \
            address, [=](T old) { return static_cast<T>((unsigned long long)old + value); }, NCZ_PLACE); \
    }                                                                                            \
    inline T atomicMax(T* address, T value, NCZ_CALLER) {                                        \
        return emulator::atomic(address, [=](T old) { return old > value ? old : value; }, NCZ_PLACE); \
    }                                                                                            \
    inline T atomicOr(T* address, T value, NCZ_CALLER) {                                         \
        return emulator::atomic(address, [=](T old) { return old | value; }, NCZ_PLACE);         \
    }                                                                                            \
    inline T atomicExch(T* address, T value, NCZ_CALLER) {                                       \
        return emulator::atomic(address, [=](T) { return value; }, NCZ_PLACE);                   \
    }                                                                                            \
    inline T atomicCAS(T* address, T expected, T value, NCZ_CALLER) {                            \
        return emulator::atomic(address, [=](T old) { return old == expected ? value : old; }, NCZ_PLACE); \
    }
NCZ_ATOMIC(int)
NCZ_ATOMIC(unsigned)
NCZ_ATOMIC(unsigned long long)
#undef NCZ_ATOMIC

inline void __threadfence() { emulator::fence(); }

// The kernels' own ways to wait for another block, on a GPU a few instructions of PTX. They must let other threads run
// between two looks.
inline unsigned long long load_relaxed(const unsigned long long* from, NCZ_CALLER) {
    emulator::require_aligned(from, sizeof *from, NCZ_PLACE);
    emulator::loaded(NCZ_PLACE);
    return __atomic_load_n(from, __ATOMIC_RELAXED);
}

inline void store_relaxed(unsigned long long* to, unsigned long long value) {
    __atomic_store_n(to, value, __ATOMIC_RELAXED);
    emulator::stored();
}

// The same with an order, of planted kernels alone.
inline unsigned long long load_acquire(const unsigned long long* from, NCZ_CALLER) {
    emulator::require_aligned(from, sizeof *from, NCZ_PLACE);
    emulator::loaded(NCZ_PLACE);
    return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}

inline void store_release(unsigned long long* to, unsigned long long value) {
    __atomic_store_n(to, value, __ATOMIC_RELEASE);
    emulator::stored();
}

// Copies arrive as late as they may.
inline void copy_async(uint32_t* shared, const uint32_t* from, NCZ_CALLER) {
    emulator::require_aligned(from, sizeof *from, NCZ_PLACE);
    *shared = 0xA5A5A5A5u;
    emulator::begin({shared, from});
}

inline void await_copies() {
    while (const emulator::Copy* copy = emulator::under_way()) *copy->to = *copy->from;
}

template <class T>
T __ldg(const T* address) {
    return *address;
}

// ---- Integers

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned((uint64_t(x) * y) >> 32); }

inline unsigned __brev(unsigned x) {
    x = (x & 0x55555555) << 1 | (x >> 1 & 0x55555555);
    x = (x & 0x33333333) << 2 | (x >> 2 & 0x33333333);
    x = (x & 0x0F0F0F0F) << 4 | (x >> 4 & 0x0F0F0F0F);
    return __builtin_bswap32(x);
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((uint64_t(high) << 32 | low) << (shift & 31)) >> 32);
}

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = uint64_t(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    std::common_type_t<A, B> x = a, y = b;
    return y < x ? y : x;
}

template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    std::common_type_t<A, B> x = a, y = b;
    return x < y ? y : x;
}

// ---- Floats

inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }

// Rounded down: what is next below a result that is more than the exact one.
inline double __dadd_rd(double x, double y) {
    double sum = x + y, of_y = sum - x, error = (x - (sum - of_y)) + (y - of_y);  // Knuth's; exact
    return error < 0 ? std::nextafter(sum, -INFINITY) : sum;
}
inline float __fmaf_rd(float x, float y, float z) {
    double product = double(x) * y, down = __dadd_rd(product, z);  // a product of two floats is exact
    float sum = float(down);
    return sum > down ? std::nextafter(sum, -INFINITY) : sum;
}

namespace emulator {

template <class To, class From>
To copied(From from) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

// As PTX converts: out of range to the nearest integer that there is, and NaN to `nan`.
template <class Float>
int saturated(Float integer, int nan) {
    constexpr int lowest = std::numeric_limits<int>::min(), highest = std::numeric_limits<int>::max();
    if (integer != integer) return nan;
    if (integer <= Float(lowest)) return lowest;
    if (integer >= -Float(lowest)) return highest;
    return int(integer);
}

}  // namespace emulator

inline int __float2int_rn(float x) { return emulator::saturated(rintf(x), 0); }
inline int __float2int_rd(float x) { return emulator::saturated(floorf(x), 0); }
inline int __float2int_rz(float x) { return emulator::saturated(truncf(x), 0); }
inline int __double2int_rn(double x) { return emulator::saturated(rint(x), std::numeric_limits<int>::min()); }
inline int __double2int_rd(double x) { return emulator::saturated(floor(x), std::numeric_limits<int>::min()); }
inline int __double2int_rz(double x) { return emulator::saturated(trunc(x), std::numeric_limits<int>::min()); }
inline float __int2float_rn(int x) { return float(x); }
inline double __int2double_rn(int x) { return double(x); }
inline float __double2float_rn(double x) { return float(x); }

inline float __uint_as_float(unsigned x) { return emulator::copied<float>(x); }
inline float __int_as_float(int x) { return emulator::copied<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator::copied<unsigned>(x); }
inline int __float_as_int(float x) { return emulator::copied<int>(x); }
inline double __longlong_as_double(long long x) { return emulator::copied<double>(x); }
inline long long __double_as_longlong(double x) { return emulator::copied<long long>(x); }

// ---- Vectors, for wide loads and stores

#define NCZ_VECTORS(T, two, four)                                                    \
    struct __align__(2 * sizeof(T)) two {                                            \
        T x, y;                                                                      \
    };                                                                               \
    struct __align__(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) four {                 \
        T x, y, z, w;                                                                \
    };                                                                               \
    inline two make_##two(T x, T y) { return {x, y}; }                               \
    inline four make_##four(T x, T y, T z, T w) { return {x, y, z, w}; }
NCZ_VECTORS(unsigned char, uchar2, uchar4)
NCZ_VECTORS(unsigned short, ushort2, ushort4)
NCZ_VECTORS(int, int2, int4)
NCZ_VECTORS(unsigned, uint2, uint4)
NCZ_VECTORS(float, float2, float4)
NCZ_VECTORS(double, double2, double4)
NCZ_VECTORS(unsigned long long, ulonglong2, ulonglong4)
#undef NCZ_VECTORS
