// Shared by all CUDA kernels: the element type of this module, and structures through which kernels pass results on.
//
// kernels.cu is compiled once for each element type, with -DNCZ_DTYPE=0 to 3: its position in format.DTYPES.
#pragma once

#include "../common/floats.h"
#include "../common/format.h"

// Declares shared memory. The emulator of the tests replaces this macro.
#ifndef NCZ_SHARED
#define NCZ_SHARED(type, name, count) __shared__ type name[count]
#endif

// How a kernel is declared: NCZ_KERNEL(ncz_name)(arguments), for blocks of THREADS threads. Four of them must fit on a
// multiprocessor, so each thread has at most 64 registers, and the compiler has no reason to spill to save more.
// NCZ_KERNEL_OF is for blocks of other sizes.
#define NCZ_KERNEL(name) NCZ_KERNEL_OF(THREADS, 4, name)
#define NCZ_KERNEL_OF(threads, blocks, name) extern "C" __global__ void __launch_bounds__(threads, blocks) name

#define NCZ_DEVICE __device__ __forceinline__

using namespace ncz;

constexpr int THREADS = 256;
constexpr int WARP = 32;
constexpr int WARPS = THREADS / WARP;
constexpr unsigned ALL_LANES = 0xffffffffu;

#if NCZ_DTYPE == 0
typedef float Element;
typedef float Scale;
#elif NCZ_DTYPE == 1
typedef bfloat16 Element;
typedef float Scale;
#elif NCZ_DTYPE == 2
typedef float16 Element;
typedef float Scale;
#elif NCZ_DTYPE == 3
typedef double Element;
typedef double Scale;
#else
#error "NCZ_DTYPE must be 0 to 3"
#endif

namespace ncz {

// What the selector chose for a frame that is being written. Zeroed before the first kernel.
struct Choice {
    int32_t coder, predictor;
    int32_t mode;      // for RANS
    uint32_t symbols;  // the bits of all symbols of the frame, or-ed together by ncz_stage
};

// How a frame that is being read is. Zeroed before the first kernel; kernels return at once if it is damaged. The host
// words the damage from a copy of this.
struct Status {
    long long result;                 // 0, or -(cause + 256 * value) as in format.h
    unsigned long long chunk_damage;  // of the first damaged chunk of a FIXED frame, see ncz_check; 0: none
    long long count, bytes;           // that the caller expects, and that the frame has
    Header header;                    // of the frame; valid if there is no damage
};
static_assert(sizeof(Status) == 56, "as the host reads it");

}  // namespace ncz

// RAW's bits per symbol for the frame that is being written.
NCZ_DEVICE unsigned raw_width_of(const Choice& choice) {
    return raw_width_of(choice.symbols ? 32u - unsigned(__clz(int(choice.symbols))) : 0u);
}

NCZ_DEVICE bool is_damaged(const Status* status) { return status->result || status->chunk_damage; }

// Records a damage; the first one stays.
NCZ_DEVICE void record(Status* status, Damage cause, int64_t value = 0) {
    unsigned long long result = (unsigned long long)damaged(cause, value);
    atomicCAS(reinterpret_cast<unsigned long long*>(&status->result), 0ull, result);
}
