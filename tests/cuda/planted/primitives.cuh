// One kernel for each thing that the emulator offers; test_emulator.py knows what must come out.
#pragma once

extern "C" __global__ void __launch_bounds__(64) shuffles(const int* in, int* out, int width) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x, lane = threadIdx.x % 32;
    int x = in[i];
    out[i] = __shfl_sync(0xFFFFFFFF, x, (lane * 7 + 3) % 40, width);
    out[n + i] = __shfl_up_sync(0xFFFFFFFF, x, 3, width);
    out[2 * n + i] = __shfl_down_sync(0xFFFFFFFF, x, 3, width);
    out[3 * n + i] = __shfl_xor_sync(0xFFFFFFFF, x, 5, width);
}

extern "C" __global__ void __launch_bounds__(64) votes(const int* in, unsigned* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
    unsigned half = threadIdx.x % 32 < 16 ? 0xFFFF : 0xFFFF0000;
    out[i] = __ballot_sync(half, in[i] & 1);
    out[n + i] = __any_sync(half, in[i] > 90);
    out[2 * n + i] = __all_sync(half, in[i] > 5);
}

// Inclusive sums of each block: of warps by shuffles, of warp totals through shared memory, by double.
extern "C" __global__ void __launch_bounds__(256) scan(const double* in, double* out) {
    NCZ_SHARED(double, totals, 8);
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double sum = in[i];
    for (int d = 1; d < 32; d *= 2) {
        double other = __shfl_up_sync(0xFFFFFFFF, sum, d);
        if (lane >= d) sum += other;
    }
    if (lane == 31) totals[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; w++) sum += totals[w];
    out[i] = sum;
}

extern "C" __global__ void __launch_bounds__(64) atomics(const unsigned* in, unsigned* out, unsigned long long* wide) {
    unsigned x = in[blockIdx.x * blockDim.x + threadIdx.x];
    atomicAdd(&out[0], x);
    atomicMax(&out[1], x);
    atomicOr(&out[2], 1u << (x & 31));
    atomicAdd(&wide[0], (unsigned long long)x << 32);
    atomicMax(&wide[1], (unsigned long long)x << 40);
    while (atomicCAS(&out[3], 0u, 1u)) continue;  // a lock
    __threadfence();
    out[4] = out[4] * 3 % 1000003 + 1;
    __threadfence();
    atomicExch(&out[3], 0u);
}

// The exclusive sum of all blocks' sums, each block looking back at those before it. state: 0, or 1 + sum so far.
extern "C" __global__ void __launch_bounds__(64)
    look_back(const unsigned* in, unsigned long long* before, unsigned long long* state, unsigned* ticket) {
    NCZ_SHARED(unsigned, chunk, 1);
    NCZ_SHARED(unsigned long long, sum, 1);
    if (threadIdx.x == 0) {
        chunk[0] = atomicAdd(ticket, 1u);
        sum[0] = 0;
    }
    __syncthreads();
    unsigned own = chunk[0];
    atomicAdd(&sum[0], (unsigned long long)in[own * blockDim.x + threadIdx.x]);
    __syncthreads();
    if (threadIdx.x != 0) return;
    unsigned long long found = 1;
    if (own > 0)
        while ((found = load_acquire(&state[own - 1])) == 0) continue;
    before[own] = found - 1;
    store_release(&state[own], found + sum[0]);
}

// In which order the threads come here.
extern "C" __global__ void __launch_bounds__(64) arrivals(unsigned* places, unsigned* arrived) {
    places[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(arrived, 1u);
}

struct Factors {
    int a;
    long long b;
    float c;
};

extern "C" __global__ void __launch_bounds__(32)
    arguments(const float* in, double* out, int count, unsigned char add, Factors factors, double scale) {
    for (int i = threadIdx.x; i < count; i += 32)
        out[i] = in ? (in[i] * factors.a + factors.b + factors.c + add) * scale : -1;
}

// float and double in, integers out; then integers in, integers out.
extern "C" __global__ void __launch_bounds__(32) conversions(const double* in, int* out, int count) {
    for (int i = threadIdx.x; i < count; i += 32) {
        out[i] = __float2int_rn(float(in[i]));
        out[count + i] = __float2int_rd(float(in[i]));
        out[2 * count + i] = __double2int_rn(in[i]);
        out[3 * count + i] = __double2int_rd(in[i]);
    }
}

extern "C" __global__ void __launch_bounds__(32) bits(const unsigned* in, unsigned* out, int count) {
    for (int i = threadIdx.x; i < count; i += 32) {
        unsigned x = in[i], y = ~x * 2654435761u;
        unsigned long long wide = (unsigned long long)x << 32 | y;
        unsigned* row = out + 12 * i;
        row[0] = __popc(x);
        row[1] = __popcll(wide);
        row[2] = __clz(x);
        row[3] = __clzll(wide >> 20);
        row[4] = __ffs(x);
        row[5] = __brev(x);
        row[6] = __funnelshift_l(x, y, x);
        row[7] = __funnelshift_r(x, y, x);
        row[8] = __byte_perm(x, y, 0x7250);
        row[9] = __umulhi(x, y);
        row[10] = __float_as_uint(__uint_as_float(x & 0x7F7FFFFF) * 0.5f);
        row[11] = max(x, y) - min(x, y);
    }
}

#define NCZ_PRIMITIVES(X) \
    X(shuffles) X(votes) X(scan) X(atomics) X(look_back) X(arrivals) X(arguments) X(conversions) X(bits)
