// Whole frames: the header, the checksum, and the checks before anything is decoded.
#pragma once

#include "values.cuh"

// ------------------------------------------------------------------ writing

// Writes the header for a payload of `bytes`, by one thread.
NCZ_DEVICE void write_header(uint8_t* frame, int32_t coder, int32_t predictor, unsigned width, int64_t count,
                             int64_t bytes) {
    store32(frame, MAGIC);
    frame[4] = VERSION;
    frame[5] = uint8_t(coder);
    frame[6] = uint8_t(predictor);
    frame[7] = uint8_t(width);
    store32(frame + 8, uint32_t(count));
    store32(frame + 12, uint32_t(bytes));
    store32(frame + 16, 0);
    store32(frame + 20, 0);
}

// Writes what a frame becomes if one that it is made of is damaged: a header that every reader refuses. So all ranks that
// get it learn of the damage. By one thread.
NCZ_DEVICE void write_spoiled(uint8_t* frame, int64_t count, long long* size) {
    write_header(frame, RAW, NONE, 8, count, 0);
    store32(frame + 16, SPOILED);
    *size = HEADER_BYTES;
}

// Spoils a frame that was just written if `report` tells of damage. One thread.
NCZ_KERNEL(ncz_spoil)(const Status* report, long long count, uint8_t* frame, long long* size) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && report->result) write_spoiled(frame, count, size);
}

// ------------------------------------------------------------------ the checksum

constexpr int64_t FLAGS_WORD = 4, CHECKSUM_WORD = 5;

// This block's share of the checksum of `bytes` of a frame, in thread 0. Whatever stands in its checksum field does not
// count. With `seal`, its flags count as they will be.
NCZ_DEVICE uint32_t checksum_share(const uint8_t* frame, int64_t bytes, bool seal, uint32_t* scratch) {
    bool aligned = reinterpret_cast<uintptr_t>(frame) % 4 == 0;
    int64_t words = (bytes + 3) / 4, stride = int64_t(gridDim.x) * THREADS;
    uint32_t total = 0;
    for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < words; i += stride) {
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

// Adds up the checksum of a frame in `checksum`, which was 0; unless `always`, only if the header says that it has one.
// Any number of blocks.
NCZ_KERNEL(ncz_checksum)(const uint8_t* frame, long long bytes, int always, uint32_t* checksum) {
    NCZ_SHARED(uint32_t, scratch, WARPS);
    if (bytes < HEADER_BYTES || (!always && load32(frame + 4 * FLAGS_WORD) != HAS_CHECKSUM)) return;
    uint32_t share = checksum_share(frame, bytes, false, scratch);
    if (threadIdx.x == 0) atomicAdd(checksum, share);
}

// Writes the checksum of the frame that `frame` begins with; `frame` has `capacity` bytes. `sum_and_blocks`: two zeros.
// Any number of blocks; the last to end writes the fields.
NCZ_KERNEL(ncz_seal)(uint8_t* frame, long long capacity, uint32_t* sum_and_blocks) {
    NCZ_SHARED(uint32_t, scratch, WARPS);
    NCZ_SHARED(int, is_last, 1);
    if (capacity < HEADER_BYTES || load32(frame + 4 * FLAGS_WORD) == SPOILED) return;
    int64_t bytes = HEADER_BYTES + int64_t(load32(frame + 12));
    uint32_t share = checksum_share(frame, bytes < capacity ? bytes : capacity, true, scratch);
    if (threadIdx.x == 0) atomicAdd(sum_and_blocks, share);
    if (!finished_last(sum_and_blocks + 1, is_last) || threadIdx.x) return;
    store32(frame + 4 * FLAGS_WORD, HAS_CHECKSUM);
    store32(frame + 4 * CHECKSUM_WORD, atomicAdd(sum_and_blocks, 0u));
}

// ------------------------------------------------------------------ reading

// The damage that shows in the header and the checksum, or 0.
NCZ_DEVICE int64_t opening_damage(const Header& header, int64_t bytes, int64_t count, uint32_t checksum) {
    if (int64_t wrong = header_damage(header, bytes, count)) return wrong;
    if (header.flags == HAS_CHECKSUM && checksum != header.checksum) return damaged(OTHER_CHECKSUM, checksum);
    if (int64_t wrong = coder_damage(header)) return wrong;
    return header.coder == FIXED && bytes - HEADER_BYTES < 2 * chunks_of(count) ? damaged(NO_TABLE) : 0;
}

// Verifies the header and FIXED's table, whose prefix sums become `offsets` (from the first chunk on). One block.
NCZ_KERNEL(ncz_open)
(const uint8_t* frame, long long bytes, long long count, const uint32_t* checksum, Status* status, long long* offsets) {
    NCZ_SHARED(long long, scratch, WARPS);
    NCZ_SHARED(bool, has_table, 1);
    if (threadIdx.x == 0) {
        Header header = {};
        if (bytes >= HEADER_BYTES) memcpy(&header, frame, sizeof header);
        status->header = header;
        status->count = count;
        status->bytes = bytes;
        status->result = opening_damage(header, bytes, count, *checksum);
        has_table[0] = !status->result && header.coder == FIXED;
    }
    __syncthreads();
    if (!has_table[0]) return;
    int64_t chunks = chunks_of(count);
    long long end = 0;
    for (int64_t first = 0; first < chunks; first += THREADS) {
        int64_t c = first + threadIdx.x;
        long long size = c < chunks ? load16(frame + HEADER_BYTES + 2 * c) : 0, total;
        long long before = block_exclusive_sum(size, scratch, total);
        if (c < chunks) offsets[c] = end + before;
        end += total;
    }
    if (threadIdx.x == 0 && end != bytes - HEADER_BYTES - 2 * chunks) record(status, TABLE_SUM, end);
}

// Chunk c of a FIXED frame that was opened.
struct FixedChunk {
    const uint8_t* at;
    int bytes;

    NCZ_DEVICE FixedChunk(const uint8_t* frame, int64_t c, int64_t count, const long long* offsets)
        : at(frame + HEADER_BYTES + 2 * chunks_of(count) + offsets[c]),
          bytes(int(load16(frame + HEADER_BYTES + 2 * c))) {}
};

// Verifies the widths in all chunks of a FIXED frame, so that no decoder needs to. A warp per chunk.
NCZ_KERNEL(ncz_check)(const uint8_t* frame, long long count, const long long* offsets, Status* status) {
    int64_t c = int64_t(blockIdx.x) * WARPS + warp();
    if (status->result || status->header.coder != FIXED || c >= chunks_of(count)) return;
    FixedChunk chunk(frame, c, count, offsets);
    int length = length_of(c, count), blocks = blocks_of(length);
    int missing_octets = OCTETS * blocks - octets_of(length);  // of the last block
    bool is_wrong = chunk.bytes < blocks;
    int taken = 0;
    for (int b = lane(); b < blocks && !is_wrong; b += WARP) {
        int width = chunk.at[b];
        is_wrong = width > 32;
        taken += 1 + width * (b == blocks - 1 ? OCTETS - missing_octets : OCTETS);
    }
    is_wrong = __any_sync(ALL_LANES, is_wrong);
    taken = warp_sum(taken);
    if (lane() || (!is_wrong && taken == chunk.bytes)) return;
    // Of several damages, the first chunk's stays.
    unsigned cause = is_wrong ? BAD_WIDTH : CHUNK_LENGTH, value = is_wrong ? 0 : unsigned(chunk.bytes);
    atomicMax(&status->chunk_damage, (unsigned long long)~uint32_t(c) << 32 | value << 8 | cause);
}

// Copies a damage to where the host looks, unless there is one already. By one thread, in the last kernel of those that
// read the frame.
NCZ_DEVICE void report_damage(const Status* status, Status* report) {
    Status copy = *status;
    if (!copy.result && !copy.chunk_damage) return;
    if (!copy.result)
        copy.result = damaged(Damage(copy.chunk_damage & 0xff), int64_t(copy.chunk_damage >> 8 & 0xffff));
    auto* result = reinterpret_cast<unsigned long long*>(&report->result);
    if (atomicCAS(result, 0ull, (unsigned long long)copy.result)) return;
    report->count = copy.count;
    report->bytes = copy.bytes;
    report->header = copy.header;
}

#define NCZ_FRAME_KERNELS(X) X(ncz_spoil) X(ncz_checksum) X(ncz_seal) X(ncz_open) X(ncz_check)
