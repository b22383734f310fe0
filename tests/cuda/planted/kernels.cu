// What test_emulator.py runs: the primitives, and pairs of kernels, one right and one with a planted bug.
#define NCZ_PLANTED  // for unit.cpp
constexpr unsigned ALL_LANES = 0xFFFFFFFF;

// NAME, and NAME_planted, which does something wrong.
#define NCZ_PAIR(name, parameters, arguments)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) name parameters { name##_kernel<false> arguments; } \
    extern "C" __global__ void __launch_bounds__(THREADS) name##_planted parameters { name##_kernel<true> arguments; }
#define NCZ_BOTH(X, name) X(name) X(name##_planted)

constexpr int THREADS = 64;  // of the pairs
constexpr int WARPS = THREADS / 32;

#include "memory.cuh"
#include "primitives.cuh"
#include "refused.cuh"
#include "synchronization.cuh"

#define NCZ_KERNELS(X) NCZ_PRIMITIVES(X) NCZ_SYNCHRONIZATION_PAIRS(X) NCZ_MEMORY_PAIRS(X) NCZ_REFUSED(X)
