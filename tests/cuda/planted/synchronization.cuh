// Threads that do not wait for each other, or wait wrongly.
#pragma once

// Sums of sums of sums within each block. Planted: the next round overwrites totals that others still read.
template <bool PLANTED>
__device__ void missing_syncthreads_kernel(const unsigned* in, unsigned* out) {
    NCZ_SHARED(unsigned, totals, WARPS);
    int i = blockIdx.x * THREADS + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned sum = in[i];
    for (int round = 0; round < 3; round++) {
        for (int d = 1; d < 32; d *= 2) {
            unsigned lower = __shfl_up_sync(ALL_LANES, sum, d);
            if (lane >= d) sum += lower;
        }
        if (lane == 31) totals[warp] = sum;
        __syncthreads();
        for (int w = 0; w < warp; w++) sum += totals[w];
        if (!PLANTED) __syncthreads();
    }
    out[i] = sum;
}
NCZ_PAIR(missing_syncthreads, (const unsigned* in, unsigned* out), (in, out))

// Each lane reads what another has put into shared memory. Planted: a vote lies between, that orders no memory.
template <bool PLANTED>
__device__ void missing_syncwarp_kernel(const unsigned* in, unsigned* out) {
    NCZ_SHARED(unsigned, words, THREADS);
    int i = blockIdx.x * THREADS + threadIdx.x;
    words[threadIdx.x] = in[i] * 3;
    unsigned wide = __ballot_sync(ALL_LANES, in[i] > 127);
    if (!PLANTED) __syncwarp();
    out[i] = words[threadIdx.x ^ 5] + __popc(wide);
}
NCZ_PAIR(missing_syncwarp, (const unsigned* in, unsigned* out), (in, out))

// Ranks of wide symbols within their warp, 0 for others. Planted: only the lanes that have one vote.
template <bool PLANTED>
__device__ void divergent_ballot_kernel(const unsigned* in, unsigned* out) {
    int i = blockIdx.x * THREADS + threadIdx.x;
    bool wide = in[i] > 127;
    unsigned lower = (1u << threadIdx.x % 32) - 1, rank = 0;
    if (PLANTED) {
        if (wide) rank = __popc(__ballot_sync(ALL_LANES, 1) & lower) + 1;
        __syncwarp();
    } else {
        unsigned all = __ballot_sync(ALL_LANES, wide);
        if (wide) rank = __popc(all & lower) + 1;
    }
    out[i] = rank;
}
NCZ_PAIR(divergent_ballot, (const unsigned* in, unsigned* out), (in, out))

// The block that ends last adds up what all have found. Planted: nothing orders the numbers before the count of blocks.
template <bool PLANTED>
__device__ void missing_fence_kernel(const unsigned* in, unsigned* found, unsigned* done, unsigned* out) {
    NCZ_SHARED(unsigned, sum, 1);
    if (threadIdx.x == 0) sum[0] = 0;
    __syncthreads();
    atomicAdd(&sum[0], in[blockIdx.x * THREADS + threadIdx.x]);
    __syncthreads();
    if (threadIdx.x) return;
    found[blockIdx.x] = sum[0];
    if (!PLANTED) __threadfence();
    if (atomicAdd(done, 1u) + 1 < gridDim.x) return;
    __threadfence();
    unsigned total = 0;
    for (unsigned b = 0; b < gridDim.x; b++) total += found[b];
    *out = total;
}
NCZ_PAIR(missing_fence, (const unsigned* in, unsigned* found, unsigned* done, unsigned* out), (in, found, done, out))

// As before. Planted: the fence comes before the store that it is to order.
template <bool PLANTED>
__device__ void early_fence_kernel(const unsigned* in, unsigned* found, unsigned* done, unsigned* out) {
    if (threadIdx.x) return;
    if (PLANTED) __threadfence();
    found[blockIdx.x] = in[blockIdx.x * THREADS] * 5;
    if (!PLANTED) __threadfence();
    if (atomicAdd(done, 1u) + 1 < gridDim.x) return;
    __threadfence();
    unsigned total = 0;
    for (unsigned b = 0; b < gridDim.x; b++) total += found[b];
    *out = total;
}
NCZ_PAIR(early_fence, (const unsigned* in, unsigned* found, unsigned* done, unsigned* out), (in, found, done, out))

// As before, of what all threads have found. Planted: each fences its own stores, but no fence lies between the barrier
// and the count, to order those of the others.
template <bool PLANTED>
__device__ void fence_before_barrier_kernel(const unsigned* in, unsigned* found, unsigned* done, unsigned* out) {
    NCZ_SHARED(int, is_last, 1);
    found[blockIdx.x * THREADS + threadIdx.x] = in[blockIdx.x * THREADS + threadIdx.x] * 7;
    if (PLANTED) __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        if (!PLANTED) __threadfence();
        is_last[0] = atomicAdd(done, 1u) + 1 == gridDim.x;
        __threadfence();
    }
    __syncthreads();
    if (!is_last[0]) return;
    for (unsigned i = threadIdx.x; i < gridDim.x * THREADS; i += THREADS) atomicAdd(out, found[i]);
}
NCZ_PAIR(fence_before_barrier, (const unsigned* in, unsigned* found, unsigned* done, unsigned* out),
         (in, found, done, out))

// Each block waits for the one before it. Planted: for the one of the next lower number, that perhaps starts later.
template <bool PLANTED>
__device__ void missing_ticket_kernel(unsigned long long* state, unsigned* ticket) {
    if (threadIdx.x) return;
    unsigned own = PLANTED ? blockIdx.x : atomicAdd(ticket, 1u);
    unsigned long long found = 1;
    if (own > 0)
        while ((found = load_acquire(&state[own - 1])) == 0) continue;
    store_release(&state[own], found * 3 + own);
}
NCZ_PAIR(missing_ticket, (unsigned long long* state, unsigned* ticket), (state, ticket))

// As before. Planted: the value is stored and looked at by plain atomic operations, that order nothing else.
template <bool PLANTED>
__device__ void relaxed_flag_kernel(unsigned long long* state, unsigned* values, unsigned* ticket) {
    if (threadIdx.x) return;
    unsigned own = atomicAdd(ticket, 1u);
    if (own > 0) {
        if (PLANTED)
            while (atomicAdd(&state[own - 1], 0ull) == 0) continue;
        else
            while (load_acquire(&state[own - 1]) == 0) continue;
    }
    values[own] = own > 0 ? values[own - 1] * 3 + own : 1;
    if (PLANTED)
        atomicExch(&state[own], 1ull);
    else
        store_release(&state[own], 1ull);
}
NCZ_PAIR(relaxed_flag, (unsigned long long* state, unsigned* values, unsigned* ticket), (state, values, ticket))

// Words by way of shared memory. Planted: they are read while they are on their way.
template <bool PLANTED>
__device__ void missing_await_kernel(const unsigned* in, unsigned* out) {
    NCZ_SHARED(unsigned, words, THREADS);
    int i = blockIdx.x * THREADS + threadIdx.x;
    copy_async(words + threadIdx.x, in + i);
    if (!PLANTED) await_copies();
    out[i] = words[threadIdx.x];
    if (PLANTED) await_copies();
}
NCZ_PAIR(missing_await, (const unsigned* in, unsigned* out), (in, out))

#define NCZ_SYNCHRONIZATION_PAIRS(X)                                                              \
    NCZ_BOTH(X, missing_syncthreads) NCZ_BOTH(X, missing_syncwarp) NCZ_BOTH(X, divergent_ballot)  \
    NCZ_BOTH(X, missing_fence) NCZ_BOTH(X, early_fence) NCZ_BOTH(X, fence_before_barrier)         \
    NCZ_BOTH(X, missing_ticket) NCZ_BOTH(X, relaxed_flag) NCZ_BOTH(X, missing_await)
