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
// NCZ_KERNEL_OF is for blocks of other sizes; the emulator has its own.
#define NCZ_KERNEL(name) NCZ_KERNEL_OF(THREADS, 4, name)
#ifndef NCZ_KERNEL_OF
#define NCZ_KERNEL_OF(threads, blocks, name) extern "C" __global__ void __launch_bounds__(threads, blocks) name
#endif

#define NCZ_DEVICE __device__ __forceinline__

// Declares a function that is called and not inlined, so that the registers of its caller suffice. The emulator has its
// own.
#ifndef NCZ_CALLED
#define NCZ_CALLED __device__ __noinline__
#endif

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

// A launch works on several frames: what it must know of each lies in a table that it takes by value. These are the
// rows, and their numbers are limited so that two tables fit into the 4 KiB that arguments of a kernel may take.
constexpr int MOST_PIECES = 32, MOST_INPUTS = 64;  // as in arguments.py

// A frame that is read.
struct Input {
    const uint8_t* frame;
    long long bytes;
    uint32_t count;        // codes that it must hold
    uint32_t first_chunk;  // the number of its first chunk among those of all inputs
};
struct Inputs {
    int32_t n, unused;
    Input of[MOST_INPUTS];
};

// Values or codes that become a frame or come from frames. What a kernel does not need is null.
struct Piece {
    void* values;             // Element
    const void* steps;        // Scale: inverse steps or scales
    int32_t* codes;
    uint8_t* frame;           // that is written
    void* sum;                // Element: the values that a sum of codes stands for
    const void* scales;       // Scale: of these
    unsigned long long first;  // the number of its first block that has a step, counted from that of the noise
    uint32_t count;
    uint32_t first_chunk;          // the number of its first chunk among those of all pieces
    uint32_t first_input, inputs;  // the frames that belong to it
};
struct Pieces {
    int32_t n, unused;
    Piece of[MOST_PIECES];
};
static_assert(sizeof(Input) == 24 && sizeof(Piece) == 72, "as arguments.py has it");

// What the selector chose for a frame that is being written.
struct Choice {
    int32_t coder, predictor;
};
constexpr int32_t NO_CODER = -1;  // the frame was written already

// What the kernels of one frame that is being written tell each other. Zeroed before the first.
struct Written {
    Choice choice;
    uint32_t misfits;         // not 0 if some of the frame's pages don't fit, or it is made of damaged ones
    uint32_t counted, taken;  // blocks that have done their part, and the next number to take
    unsigned long long placed;  // of PLANES: chunks that have their place, and the words of these
};
static_assert(sizeof(Written) == 32, "as frames.py has it");

// How a frame that is being read is. Zeroed before the first kernel, and complete behind ncz_open. The host words the
// damage from a copy of its first part.
struct Status {
    long long result;  // 0, or -(cause + 256 * value) as in format.h
    long long count, bytes;  // that the caller expects, and that the frame has
    Header header;           // of the frame; valid if there is no damage
    // What the blocks of ncz_open find, for the last of them to judge. The first also tells of pages that were decoded later.
    unsigned long long payload_damage;  // as `result`: of the first block to find one
    unsigned long long tile_words;      // of PLANES, by its table
    uint32_t checksum, finished;        // blocks that have finished
};
static_assert(sizeof(Status) == 72, "as frames.py has it");

}  // namespace ncz

// The blocks of a launch serve its `n` frames in turns, so that they don't wait for each other at one place: which frame
// this block serves, and its number among those that do.
NCZ_DEVICE int frame_number(int n) { return int(blockIdx.x % unsigned(n)); }
NCZ_DEVICE int64_t unit_number(int n) { return blockIdx.x / unsigned(n); }

// Records what is wrong with a payload; the first one stays. Whether this is it.
NCZ_DEVICE bool record(Status& status, int64_t damage) {
    return damage && !atomicCAS(&status.payload_damage, 0ull, (unsigned long long)damage);
}

// As found by the kernels before this one.
NCZ_DEVICE bool is_damaged(const Status& status) {
    return (unsigned long long)status.result | status.payload_damage;  // which are on their way together
}
