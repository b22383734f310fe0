// What the kernels' side (cuda.h) asks of the run-time (emulator.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

struct Index {
    unsigned x, y, z;
};

// One CUDA thread as its kernel sees it.
struct Thread {
    Index thread, block;
};

struct Place {  // in the kernels' source
    const char* file;
    int line;
};

// Operations in which the lanes of a warp meet.
enum class Meeting { SYNCWARP, SHFL, SHFL_UP, SHFL_DOWN, SHFL_XOR, BALLOT, ANY, ALL };

struct Offer {  // what one lane brings to a meeting
    Meeting kind;
    unsigned mask;
    uint64_t value;
    int operand, width;  // of a shuffle
    Place place;
};

struct Copy {  // of a word to shared memory, under way
    uint32_t* to;
    const uint32_t* from;
};

// A shared array of the source; the run-time numbers those that are used.
struct Shared {
    const char* name;
    size_t bytes, alignment;
    unsigned number;  // from 1; 0: not used yet
};

struct Kernel {
    const char* name;
    void (*run)(void** arguments);  // as one CUDA thread
    const char* parameters;         // a letter and a size for each: p8 i4 u8 f4 s24; pointer, integer, ..., structure
    int threads;                    // of a block, by its launch bounds; 0: not known
};

extern Thread* thread;  // that runs now
extern Index block_size, grid_size;

extern const Kernel kernels[];  // defined beside the kernels (unit.cpp)
extern const int kernel_count;

uint64_t meet(const Offer& offer);  // waits for all lanes of the mask; what this lane gets
void barrier(Place place);          // waits for all live threads of the block
void* shared(Shared& array);        // this block's copy
void fence();
void before_atomic(void* address, size_t bytes, Place place);
void require_aligned(const void* address, size_t bytes, Place place);  // for a load, a store or an atomic operation
void after_atomic(bool changed, Place place);  // others may run
void loaded(Place place);                      // a look at a flag: others may run
void stored();                                 // to a flag: others may run
void begin(Copy copy);                         // it is carried out by who asks for `under_way`
const Copy* under_way();                       // takes the next copy that this thread began; null: there is none

}  // namespace emulator

extern "C" {
// Runs a kernel, one at a time in a process; `arguments` points to the values, as for cuLaunchKernel. 0, or 1 if
// emulator_error() says why not. Seed 0: whole blocks and lanes in order. Others: several blocks at once, randomly.
int emulate(const char* kernel, int grid, int block, unsigned long long seed, void** arguments);
const char* emulator_error();
void emulator_limit(int seconds);  // of processor time that a launch may take; 60 at first
const char* emulator_kernels();  // lines of a kernel's name and its parameters
}
