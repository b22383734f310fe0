// Accesses beside what they are meant for.
#pragma once

// The sum of a warp's words and those of the warp before. Planted: the array has no room for the last sum.
template <bool PLANTED>
__device__ void shared_overrun_kernel(const unsigned* in, unsigned* out) {
    NCZ_SHARED(unsigned, starts, PLANTED ? WARPS : WARPS + 1);
    int i = blockIdx.x * THREADS + threadIdx.x, warp = threadIdx.x / 32;
    unsigned sum = in[i];
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, d);
    unsigned* next = &starts[0] + warp + 1;
    if (threadIdx.x == 0) starts[0] = 0;
    if (threadIdx.x % 32 == 31) *next = sum;
    __syncthreads();
    out[i] = sum + starts[warp];
}
NCZ_PAIR(shared_overrun, (const unsigned* in, unsigned* out), (in, out))

// Shifts by a number of bits that happens to be 0. Planted: there is no word behind the last one to read.
template <bool PLANTED>
__device__ void shared_overread_kernel(const unsigned* in, unsigned* out, int shift) {
    NCZ_SHARED(unsigned, words, PLANTED ? THREADS : THREADS + 1);
    int i = blockIdx.x * THREADS + threadIdx.x;
    const unsigned* own = &words[0] + threadIdx.x;
    words[threadIdx.x] = in[i];
    __syncthreads();
    out[i] = __funnelshift_r(own[0], own[1], shift);
}
NCZ_PAIR(shared_overread, (const unsigned* in, unsigned* out, int shift), (in, out, shift))

// Zigzag. Planted: one element too many.
template <bool PLANTED>
__device__ void tail_kernel(const int* in, unsigned* out, long long count) {
    long long i = blockIdx.x * (long long)THREADS + threadIdx.x;
    if (PLANTED ? i <= count : i < count) out[i] = unsigned(in[i]) << 1 ^ unsigned(in[i] >> 31);
}
NCZ_PAIR(tail, (const int* in, unsigned* out, long long count), (in, out, count))

// Copies of 16 bytes. Planted: to an address that is only a multiple of 4.
template <bool PLANTED>
__device__ void misaligned_kernel(const unsigned* in, unsigned* out) {
    int i = 4 * threadIdx.x;
    uint4 four = *reinterpret_cast<const uint4*>(in + i);
    if (PLANTED)
        *reinterpret_cast<uint4*>(out + i + 1) = four;
    else
        for (int k = 0; k < 4; k++) out[i + 1 + k] = k == 0 ? four.x : k == 1 ? four.y : k == 2 ? four.z : four.w;
}
NCZ_PAIR(misaligned, (const unsigned* in, unsigned* out), (in, out))

// A histogram. Planted: of whatever shared memory held before.
template <bool PLANTED>
__device__ void uninitialized_kernel(const unsigned* in, unsigned* out) {
    NCZ_SHARED(unsigned, counts, THREADS);
    if (!PLANTED) counts[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(&counts[in[blockIdx.x * THREADS + threadIdx.x] % THREADS], 1u);
    __syncthreads();
    out[blockIdx.x * THREADS + threadIdx.x] = counts[threadIdx.x];
}
NCZ_PAIR(uninitialized, (const unsigned* in, unsigned* out), (in, out))

// Two's powers. Planted: shifts that C++ leaves open, and that a GPU does otherwise than a CPU.
template <bool PLANTED>
__device__ void wide_shift_kernel(const unsigned* in, unsigned* out) {
    int i = blockIdx.x * THREADS + threadIdx.x;
    unsigned bits = in[i] % 64;
    out[i] = PLANTED || bits < 32 ? 1u << bits : 0;
}
NCZ_PAIR(wide_shift, (const unsigned* in, unsigned* out), (in, out))

#define NCZ_MEMORY_PAIRS(X) \
    NCZ_BOTH(X, shared_overrun) NCZ_BOTH(X, shared_overread) NCZ_BOTH(X, tail) NCZ_BOTH(X, misaligned) \
    NCZ_BOTH(X, uninitialized) NCZ_BOTH(X, wide_shift)
