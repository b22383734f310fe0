// Kernels that cannot end well, and must end with a message.
#pragma once

extern "C" __global__ void __launch_bounds__(64) not_in_own_mask() {
    __syncwarp(threadIdx.x == 9 ? 0xFF : 0xFFFFFFFF);
}

extern "C" __global__ void __launch_bounds__(64) ended_lane() {
    if (threadIdx.x == 40) return;
    __ballot_sync(ALL_LANES, 1);
}

extern "C" __global__ void __launch_bounds__(64) other_operation() {
    if (threadIdx.x % 2)
        __shfl_sync(ALL_LANES, 1, 0);
    else
        __syncwarp();
}

extern "C" __global__ void __launch_bounds__(64) deadlock() {
    if (threadIdx.x == 33)
        __syncthreads();
    else
        __syncwarp();
}

extern "C" __global__ void __launch_bounds__(64) ended_thread() {
    if (threadIdx.x == 40) return;
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(64) other_barrier() {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
}

extern "C" __global__ void __launch_bounds__(64) misaligned_atomic(unsigned* out) {
    atomicAdd(reinterpret_cast<unsigned*>(reinterpret_cast<char*>(out) + 2), 1u);
}

extern "C" __global__ void __launch_bounds__(64) never_stored(const unsigned long long* flag) {
    while (load_acquire(flag) == 0) continue;
}

extern "C" __global__ void __launch_bounds__(64) endless(const volatile unsigned* flag) {
    while (*flag == 0) continue;
}

extern "C" __global__ void __launch_bounds__(64) too_much_shared(unsigned* out) {
    NCZ_SHARED(unsigned, first, 12000);
    NCZ_SHARED(unsigned, second, 1000);
    first[threadIdx.x] = second[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = first[63 - threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(64) wild_address(unsigned* out, long long distance) {
    __syncthreads();
    if (threadIdx.x == 17) out[distance] = 1;
}

// A recursion without an end.
__device__ __attribute__((noinline)) unsigned deeper(volatile unsigned* out, unsigned depth) {
    volatile unsigned room[64];
    room[depth % 64] = depth;
    return out[0] == 0 ? deeper(out, depth + 1) + room[(depth + 1) % 64] : depth;
}

extern "C" __global__ void __launch_bounds__(64) stack_overflow(unsigned* out) { out[1] = deeper(out, 0); }

#define NCZ_REFUSED(X) \
    X(not_in_own_mask) X(ended_lane) X(other_operation) X(deadlock) X(ended_thread) X(other_barrier) X(misaligned_atomic) \
    X(never_stored) X(endless) X(too_much_shared) X(wild_address) X(stack_overflow)
