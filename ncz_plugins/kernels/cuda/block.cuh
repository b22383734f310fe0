// What the threads of a warp or a block do together, and memory access.
//
// Block-wide functions must be called by all THREADS threads. Their `scratch` is shared memory of WARPS numbers, which
// may be used again as soon as they return.
#pragma once

#include "types.cuh"

NCZ_DEVICE int lane() { return int(threadIdx.x) % WARP; }
NCZ_DEVICE int warp() { return int(threadIdx.x) / WARP; }

// ------------------------------------------------------------------ sums

// Sum of this lane's and all lower lanes' values.
template <class T>
NCZ_DEVICE T warp_inclusive_sum(T value) {
    for (int distance = 1; distance < WARP; distance *= 2) {
        T lower = __shfl_up_sync(ALL_LANES, value, distance);
        if (lane() >= distance) value += lower;
    }
    return value;
}

template <class T>
NCZ_DEVICE T warp_sum(T value) {
    for (int distance = WARP / 2; distance; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

// These are one instruction on cards that have it. The emulator is an older card.
#if __CUDA_ARCH__ >= 800
NCZ_DEVICE int warp_sum(int value) { return __reduce_add_sync(ALL_LANES, value); }
NCZ_DEVICE uint32_t warp_sum(uint32_t value) { return __reduce_add_sync(ALL_LANES, value); }
NCZ_DEVICE int warp_min(int value) { return __reduce_min_sync(ALL_LANES, value); }
#else
NCZ_DEVICE int warp_min(int value) {
    for (int distance = WARP / 2; distance; distance /= 2) {
        int other = __shfl_xor_sync(ALL_LANES, value, distance);
        value = other < value ? other : value;
    }
    return value;
}
#endif
NCZ_DEVICE int warp_max(int value) { return -warp_min(-value); }

// Sum of all lower threads' values; `total` becomes that of all.
template <class T>
NCZ_DEVICE T block_exclusive_sum(T value, T* scratch, T& total) {
    T inclusive = warp_inclusive_sum(value);
    if (lane() == WARP - 1) scratch[warp()] = inclusive;
    __syncthreads();
    T before = 0;
    total = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w == warp()) before = total;
        total += scratch[w];
    }
    __syncthreads();
    return before + inclusive - value;
}

template <class T>
NCZ_DEVICE T block_sum(T value, T* scratch) {
    value = warp_sum(value);
    if (lane() == 0) scratch[warp()] = value;
    __syncthreads();
    T total = 0;
    for (int w = 0; w < WARPS; ++w) total += scratch[w];
    __syncthreads();
    return total;
}

// ------------------------------------------------------------------ between blocks

// The emulator has its own of these. It must let other threads run between two looks.
#ifndef NCZ_EMULATED
NCZ_DEVICE unsigned long long load_relaxed(const unsigned long long* from) {
    unsigned long long value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

NCZ_DEVICE void store_relaxed(unsigned long long* to, unsigned long long value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// Starts to copy a word to shared memory, which the same thread may read after `await_copies`. Older cards copy at once.
NCZ_DEVICE void copy_async(uint32_t* shared, const uint32_t* from) {
#if __CUDA_ARCH__ >= 800
    unsigned to = unsigned(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
#else
    *shared = *from;
#endif
}

NCZ_DEVICE void await_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
#endif

// The next number from 0 on, for the whole block. Blocks that wait for others take theirs so, as a lower number then
// means that the other block has begun. `shared` may be written again after a barrier.
NCZ_DEVICE int64_t take_number(uint32_t* counter, int64_t* shared) {
    if (threadIdx.x == 0) *shared = atomicAdd(counter, 1u);
    __syncthreads();
    return *shared;
}

// Whether this block is the last of `blocks` that come here. It sees what all others wrote.
NCZ_DEVICE bool finished_last(uint32_t* counter, int64_t blocks, int* shared) {
    __syncthreads();
    if (threadIdx.x == 0) {  // its fences count for the whole block, as they lie between the barriers
        __threadfence();
        *shared = atomicAdd(counter, 1u) + 1 == blocks;
        __threadfence();
    }
    __syncthreads();
    return *shared;
}

// Where a block's output begins, behind that of all lower numbers: "decoupled look-back" (Merrill and Garland,
// "Single-pass parallel prefix scan with decoupled look-back", 2016). Each block leaves at its place how much is its
// own as soon as it knows, and then what all up to it have, which spares others to look back any further. `places` are
// zero at first.
constexpr unsigned long long OWN = 1, ALL = 2, KINDS = 4;  // what is at a place, in its lowest bits; 0: nothing yet
constexpr int PLACES_AT_ONCE = 4;  // that a lane looks at; no wider, as others do the same meanwhile

// The first lane of those that found an end; the last lane if none did.
NCZ_DEVICE int nearest_end(unsigned ends) { return ends ? __ffs(int(ends)) - 1 : WARP - 1; }

// By one thread.
NCZ_DEVICE void leave_own(unsigned long long* places, int64_t number, int64_t own) {
    store_relaxed(places + number, KINDS * (unsigned long long)own + (number ? OWN : ALL));
}

// Sum of what is the own of all lower numbers, by a warp. After leave_own.
NCZ_DEVICE int64_t look_back(unsigned long long* places, int64_t number, int64_t own) {
    unsigned long long before = 0;
    for (int64_t last = number - 1; last >= 0; last -= PLACES_AT_ONCE * WARP) {
        int64_t nearest = last - PLACES_AT_ONCE * lane();
        unsigned long long of_lane;
        unsigned ends;
        bool is_missing;  // a place of this lane, up to that where it ends
        do {
            unsigned long long found[PLACES_AT_ONCE];
#pragma unroll
            for (int i = 0; i < PLACES_AT_ONCE; ++i)
                found[i] = nearest - i >= 0 ? load_relaxed(places + nearest - i) : (unsigned long long)ALL;
            bool is_end = is_missing = false;
            of_lane = 0;
#pragma unroll
            for (int i = 0; i < PLACES_AT_ONCE; ++i) {
                is_missing |= !is_end && found[i] == 0;
                of_lane += is_end ? 0 : found[i] / KINDS;
                is_end |= found[i] % KINDS == ALL;
            }
            ends = __ballot_sync(ALL_LANES, is_end);
        } while (__any_sync(ALL_LANES, is_missing && lane() <= nearest_end(ends)));
        before += warp_sum(lane() <= nearest_end(ends) ? of_lane : 0ull);
        if (ends) break;
    }
    if (lane() == 0 && number) store_relaxed(places + number, KINDS * (before + (unsigned long long)own) + ALL);
    return int64_t(before);
}

// Numbers of 16 bits in shared memory that a thread stores one by one. Their address is found once: the compiler would do so
// for every store.
class SharedHalves {
  public:
#ifdef NCZ_EMULATED
    NCZ_DEVICE explicit SharedHalves(uint16_t* first) : first_(first) {}
    NCZ_DEVICE void store(int i, uint32_t value) const { first_[i] = uint16_t(value); }

  private:
    uint16_t* first_;
#else
    NCZ_DEVICE explicit SharedHalves(uint16_t* first) : first_(unsigned(__cvta_generic_to_shared(first))) {
        asm volatile("" : "+r"(first_));
    }
    NCZ_DEVICE void store(int i, uint32_t value) const {
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(first_ + 2 * i), "h"(uint16_t(value)) : "memory");
    }

  private:
    unsigned first_;
#endif
};

// ------------------------------------------------------------------ bits

// Appends bits to zeroed words of shared memory, of which other threads write the bits beside.
class BitWriter {
  public:
    NCZ_DEVICE BitWriter(uint32_t* words, unsigned first_bit) : at_(words + first_bit / 32), filled_(first_bit % 32) {}

    // The low `n` bits of `bits`, up to 32; the higher ones must be 0.
    NCZ_DEVICE void put(uint32_t bits, unsigned n) {
        pending_ |= uint64_t(bits) << filled_;
        filled_ += n;
        if (filled_ < 32) return;
        atomicOr(at_++, uint32_t(pending_));
        pending_ >>= 32;
        filled_ -= 32;
    }

    NCZ_DEVICE void end() {
        if (filled_) atomicOr(at_, uint32_t(pending_));
    }

  private:
    uint32_t* at_;
    unsigned filled_;
    uint64_t pending_ = 0;
};

// ------------------------------------------------------------------ memory

// That a number is loaded here. Else the compiler may do so where the number is used, behind what it must not wait for.
NCZ_DEVICE void load_here(uint32_t& loaded) { asm volatile("" : "+r"(loaded)); }

// That what follows from a number is found again from here on. Else the compiler may keep it, and spill.
NCZ_DEVICE void find_again(int& number) { asm volatile("" : "+r"(number)); }

NCZ_DEVICE unsigned load16(const uint8_t* from) { return unsigned(from[0]) | unsigned(from[1]) << 8; }

NCZ_DEVICE uint32_t load32(const uint8_t* from) { return load16(from) | load16(from + 2) << 16; }

NCZ_DEVICE void store16(uint8_t* to, unsigned value) {
    to[0] = uint8_t(value);
    to[1] = uint8_t(value >> 8);
}

NCZ_DEVICE void store32(uint8_t* to, uint32_t value) {
    store16(to, value & 0xffffu);
    store16(to + 2, value >> 16);
}

// Copies by a warp, from and to any address. Reads no word of 4 bytes without a byte that is copied.
NCZ_DEVICE void copy_by_warp(uint8_t* to, const uint8_t* from, int bytes) {
    int head = int(-reinterpret_cast<uintptr_t>(to) & 3);
    head = head < bytes ? head : bytes;
    int inner = (bytes - head) / 4, tail = head + 4 * inner;
    int phase = int(reinterpret_cast<uintptr_t>(from + head) & 3);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(from + head - phase);
    for (int i = lane(); i < inner; i += WARP)
        reinterpret_cast<uint32_t*>(to + head)[i] =
            phase ? __funnelshift_r(words[i], words[i + 1], unsigned(8 * phase)) : words[i];
    int i = lane() < head ? lane() : tail + lane() - head;  // the bytes before and behind the whole words
    if (i < bytes) to[i] = from[i];
}
