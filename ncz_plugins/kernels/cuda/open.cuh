// What comes before any frame is read: the checks of all its bytes but the pages of HUFFMAN32, and the decoding of RANS.
//
// Blocks read headers and tables by themselves, so that one launch does for all frames, whatever their coders are. The last
// block of each frame judges what all of them have found.
#pragma once

#include "rans.cuh"

// Verifies sizes and widths of one part of a FIXED frame, of as many chunks as a warp has lanes, and leaves where they
// begin. Gives what is wrong with the sizes, the same to all threads, and records what is wrong with its own chunks.
NCZ_DEVICE int64_t check_fixed(const Input& input, const Header& header, int part, Status& status,
                               long long* offsets, int64_t* scratch) {
    int64_t count = input.count, all;
    int chunks = int(chunks_of(count)), first = part * WARP;
    if (part && first >= chunks) return 0;
    const uint8_t* sizes = input.frame + HEADER_BYTES;
    auto size_of = [sizes](int c) { return int64_t(load16(sizes + 2 * c)); };
    int64_t before = add_up_sizes(chunks, first, size_of, scratch, all);
    if (all != header.payload_bytes - 2 * chunks) return damaged(TABLE_SUM, all);
    int64_t own = first + lane() < chunks ? size_of(first + lane()) : 0;
    int64_t own_offset = before + warp_inclusive_sum(own) - own;
    if (warp() == 0 && first + lane() < chunks) offsets[first + lane()] = own_offset;
    // All of a warp's widths are on their way together.
    constexpr int EACH = WARP / WARPS, WIDTHS = int(CHUNK) / BLOCK / WARP;
    int chunk_bytes[EACH], is_wrong[EACH], taken[EACH] = {};
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        int i = warp() + k * WARPS;
        int length = length_of(first + i, count), blocks = blocks_of(length);
        int missing_octets = OCTETS * blocks - octets_of(length);  // of the last block
        const uint8_t* at = sizes + 2 * chunks + __shfl_sync(ALL_LANES, own_offset, i);
        chunk_bytes[k] = int(__shfl_sync(ALL_LANES, own, i));
        is_wrong[k] = chunk_bytes[k] < blocks;
#pragma unroll
        for (int w = 0; w < WIDTHS; ++w) {
            int b = w * WARP + lane(), width = b < blocks && b < chunk_bytes[k] ? at[b] : 0;
            is_wrong[k] |= width > 32;
            if (b < blocks) taken[k] += 1 + width * (b == blocks - 1 ? OCTETS - missing_octets : OCTETS);
        }
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        int c = first + warp() + k * WARPS;
        is_wrong[k] = __any_sync(ALL_LANES, is_wrong[k]);
        taken[k] = warp_sum(taken[k]);
        if (lane() || c >= chunks || (!is_wrong[k] && taken[k] == chunk_bytes[k])) continue;
        // Of several damages, the first chunk's stays.
        unsigned cause = is_wrong[k] ? BAD_WIDTH : CHUNK_LENGTH, value = is_wrong[k] ? 0 : unsigned(chunk_bytes[k]);
        atomicMax(&status.chunk_damage, (unsigned long long)~uint32_t(c) << 32 | value << 8 | cause);
    }
    return 0;
}

// What the header says about the payload, or 0.
NCZ_DEVICE int64_t payload_damage(const Header& header) {
    if (int64_t wrong = coder_damage(header, HUFFMAN32)) return wrong;
    return header.coder == FIXED && header.payload_bytes < 2 * chunks_of(header.count) ? damaged(NO_TABLE) : 0;
}

// Of all damages, that which a decoder that goes from front to back would meet first.
NCZ_DEVICE int64_t verdict(const Input& input, const Header& header, int must_be_sealed, const Status& status) {
    if (int64_t wrong = header_damage(header, input.bytes, input.count)) return wrong;
    if (must_be_sealed && header.flags != HAS_CHECKSUM) return damaged(NO_CHECKSUM);
    if (header.flags == HAS_CHECKSUM && status.checksum != header.checksum)
        return damaged(OTHER_CHECKSUM, status.checksum);
    if (status.payload_damage) return int64_t(status.payload_damage);
    unsigned long long of_chunk = status.chunk_damage;
    return of_chunk ? damaged(Damage(of_chunk & 0xff), int64_t(of_chunk >> 8 & 0xffff)) : 0;
}

union OpeningMemory {
    HuffmanOpening huffman;
    RansDecoding rans;
};

// Whether a frame would be whole if there were more of it.
NCZ_DEVICE bool is_cut_off(const Input& input, const Header& header) {
    int64_t bytes = HEADER_BYTES + int64_t(header.payload_bytes);
    return bytes > input.bytes && !header_damage(header, bytes, input.count);
}

// How many of `units` blocks have something to do. All of them find the same.
NCZ_DEVICE int blocks_to_open(const Input& input, const Header& header, int units) {
    if (header.flags == HAS_CHECKSUM || header.coder == RANS) return units;
    int parts = int((chunks_of(input.count) + WARP - 1) / WARP);
    return parts < 1 || header.coder != FIXED ? 1 : parts < units ? parts : units;
}

// Any number of blocks for each frame, at least one for each page. `statuses`: zeros; `offsets`, `entries` and `decoded` have
// places for the chunks, the codes of HUFFMAN32, and the codes of all frames. `must_be_sealed`: whether a frame without a checksum counts as damaged.
// `is_padded`: whether there may be more bytes than a frame has. If there are fewer, it counts as damaged as well, but is
// not reported.
//
// Of three blocks on a multiprocessor, not four: with 64 registers the decoders would spill.
NCZ_KERNEL_OF(THREADS, 3, ncz_open)
(const __grid_constant__ Inputs inputs, int must_be_sealed, int is_padded, Status* statuses, Status* report,
 long long* offsets, uint16_t* entries, int32_t* decoded) {
    NCZ_SHARED(OpeningMemory, memory, 1);
    NCZ_SHARED(Input, shared_input, 1);  // what it is about, which would take too many registers
    NCZ_SHARED(Header, shared_header, 1);
    NCZ_SHARED(int64_t, scratch, WARPS);
    NCZ_SHARED(int, is_last, 1);
    const Input& input = *shared_input;
    const Header& header = *shared_header;
    int f = frame_number(inputs.n), unit = int(unit_number(inputs.n)), units = int(gridDim.x / unsigned(inputs.n));
    Status& status = statuses[f];
    if (threadIdx.x == 0) {
        *shared_input = inputs.of[f];
        *shared_header = Header();
        if (input.bytes >= HEADER_BYTES) memcpy(shared_header, input.frame, sizeof header);
        int64_t padding = input.bytes - HEADER_BYTES - int64_t(header.payload_bytes);
        if (is_padded && padding > 0) shared_input->bytes -= padding;
    }
    __syncthreads();
    units = blocks_to_open(input, header, units);
    if (unit >= units) return;
    if (!header_damage(header, input.bytes, input.count)) {
        if (header.flags == HAS_CHECKSUM) {
            uint32_t share = checksum_share(input.frame, input.bytes, false, unit, units,
                                            reinterpret_cast<uint32_t*>(scratch));
            if (threadIdx.x == 0) atomicAdd(&status.checksum, share);
        }
        int64_t wrong = payload_damage(header);
        int coder = wrong ? RAW : header.coder;  // RAW needs no more checks
        if (coder == FIXED)
            wrong = check_fixed(input, header, unit, status, offsets + input.first_chunk, scratch);
        else if (coder == HUFFMAN32)
            wrong = open_pages(input, header, unit, offsets + input.first_chunk, entries + f * HUFFMAN_WHOLE,
                               memory->huffman, scratch);
        else if (coder == RANS)
            wrong = decode_rans(input, header, unit, status, decoded + input.first_chunk * CHUNK, memory->rans, scratch);
        if (threadIdx.x == 0) record(status, wrong);
    }
    if (!finished_last(&status.finished, units, is_last) || threadIdx.x) return;
    status.count = input.count;
    status.bytes = input.bytes;
    status.header = header;
    status.result = verdict(input, header, must_be_sealed, status);
    if (!is_padded || !is_cut_off(input, header)) report_damage(status.result, status, report);
}

#define NCZ_OPEN_KERNELS(X) X(ncz_open)
