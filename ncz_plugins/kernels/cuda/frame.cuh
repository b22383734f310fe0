// Whole frames: the header, the checksum, and the checks before anything is decoded.
#pragma once

#include "values.cuh"

// Frames that are written or read begin where words do: frames.py sees to it.
NCZ_DEVICE uint32_t* payload_words(uint8_t* frame) { return reinterpret_cast<uint32_t*>(frame + HEADER_BYTES); }
NCZ_DEVICE const uint32_t* payload_words(const uint8_t* frame) { return payload_words(const_cast<uint8_t*>(frame)); }

constexpr int FLAGS_WORD = 4, CHECKSUM_WORD = 5;  // of the header

// ------------------------------------------------------------------ writing

// Writes the header for a payload of `bytes`, by one thread.
NCZ_DEVICE void write_header(uint8_t* frame, int32_t coder, int32_t predictor, unsigned width, int64_t count,
                             int64_t bytes) {
    uint32_t* words = reinterpret_cast<uint32_t*>(frame);
    words[0] = MAGIC;
    words[1] = VERSION | uint32_t(coder) << 8 | uint32_t(predictor) << 16 | width << 24;
    words[2] = uint32_t(count);
    words[3] = uint32_t(bytes);
    words[FLAGS_WORD] = words[CHECKSUM_WORD] = 0;
}

// Writes what a frame becomes if one that it is made of is damaged: a header that every reader refuses. So all ranks that
// get it learn of the damage. By one thread.
NCZ_DEVICE void write_spoiled(uint8_t* frame, int64_t count, long long* size) {
    write_header(frame, RAW, NONE, 8, count, 0);
    reinterpret_cast<uint32_t*>(frame)[FLAGS_WORD] = SPOILED;
    *size = HEADER_BYTES;
}

// Completes memory that begins with the length of a frame and holds the frame from FRONT_BYTES on: writes the length, and
// zeros where the frame is not. Any number of blocks.
NCZ_KERNEL(ncz_pad)(const __grid_constant__ Inputs inputs, const long long* sizes) {
    int f = frame_number(inputs.n);
    uint8_t* memory = const_cast<uint8_t*>(inputs.of[f].frame);
    int64_t size = sizes[f], i = unit_number(inputs.n) * THREADS + threadIdx.x;
    if (i < FRONT_BYTES) memory[i] = i < int64_t(sizeof size) ? uint8_t(size >> 8 * i) : 0;
    int64_t stride = gridDim.x / unsigned(inputs.n) * THREADS;
    for (i += FRONT_BYTES + size; i < inputs.of[f].bytes; i += stride) memory[i] = 0;
}

// ------------------------------------------------------------------ the checksum

// The share of one of `units` blocks in the checksum of `bytes` of a frame, in thread 0. Whatever stands in its checksum
// field does not count. With `seal`, its flags count as they will be.
NCZ_DEVICE uint32_t checksum_share(const uint8_t* frame, int64_t bytes, bool seal, int64_t unit, int64_t units,
                                   uint32_t* scratch) {
    bool aligned = reinterpret_cast<uintptr_t>(frame) % 4 == 0;
    int64_t words = (bytes + 3) / 4, stride = units * THREADS;
    uint32_t total = 0;
    for (int64_t i = unit * THREADS + threadIdx.x; i < words; i += stride) {
        const uint8_t* from = frame + 4 * i;
        uint32_t word = 0;
        if (4 * i + 4 > bytes)
            for (int k = 0; k < bytes - 4 * i; ++k) word |= uint32_t(from[k]) << (8 * k);
        else
            word = aligned ? *reinterpret_cast<const uint32_t*>(from) : load32(from);
        if (seal && i == FLAGS_WORD) word = HAS_CHECKSUM;
        if (i != CHECKSUM_WORD) total += checksum_term(word, (2 * uint32_t(i) + 1) * CHECKSUM_KEY);
    }
    return block_sum(total, scratch);
}

// Adds up the checksum of a frame of at least a header in `checksum`, which was 0. Any number of blocks.
NCZ_KERNEL(ncz_checksum)(const uint8_t* frame, long long bytes, uint32_t* checksum) {
    NCZ_SHARED(uint32_t, scratch, WARPS);
    uint32_t share = checksum_share(frame, bytes, false, blockIdx.x, gridDim.x, scratch);
    if (threadIdx.x == 0) atomicAdd(checksum, share);
}

// Writes the checksums of the frames that the memory of `inputs` begins with. `sums_and_blocks`: two zeros for each. Any
// number of blocks; the last of each frame to end writes the fields.
NCZ_KERNEL(ncz_seal)(const __grid_constant__ Inputs inputs, uint32_t* sums_and_blocks) {
    NCZ_SHARED(uint32_t, scratch, WARPS);
    NCZ_SHARED(int, is_last, 1);
    int f = frame_number(inputs.n);
    int64_t units = gridDim.x / unsigned(inputs.n), capacity = inputs.of[f].bytes;
    uint8_t* frame = const_cast<uint8_t*>(inputs.of[f].frame);
    sums_and_blocks += 2 * f;
    if (capacity < HEADER_BYTES || load32(frame + 4 * FLAGS_WORD) == SPOILED) return;
    int64_t bytes = HEADER_BYTES + int64_t(load32(frame + 12));
    bytes = bytes < capacity ? bytes : capacity;
    uint32_t share = checksum_share(frame, bytes, true, unit_number(inputs.n), units, scratch);
    if (threadIdx.x == 0) atomicAdd(sums_and_blocks, share);
    if (!finished_last(sums_and_blocks + 1, units, is_last) || threadIdx.x) return;
    store32(frame + 4 * FLAGS_WORD, HAS_CHECKSUM);
    store32(frame + 4 * CHECKSUM_WORD, atomicAdd(sums_and_blocks, 0u));
}

// ------------------------------------------------------------------ reading

// Copies a damage to where the host looks, unless there is one already.
NCZ_DEVICE void report_damage(int64_t damage, const Status& status, Status* report) {
    auto* result = reinterpret_cast<unsigned long long*>(&report->result);
    if (!damage || atomicCAS(result, 0ull, (unsigned long long)damage)) return;
    report->count = status.count;
    report->bytes = status.bytes;
    report->header = status.header;
}

// Whether kernels must not read some of a piece's frames.
NCZ_DEVICE bool is_any_damaged(const Piece& piece, const Status* statuses) {
    bool is_any = false;
    for (unsigned i = 0; i < piece.inputs; ++i) is_any |= is_damaged(statuses[piece.first_input + i]);
    return is_any;
}

#define NCZ_FRAME_KERNELS(X) X(ncz_pad) X(ncz_checksum) X(ncz_seal)
