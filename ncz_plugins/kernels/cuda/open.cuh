// What comes before any frame is read: the checks of headers and tables. Tiles of PLANES and pages of HUFFMAN32 are checked by
// the kernels that decode them.
//
// Blocks read headers and tables by themselves, so that one launch does for all frames, whatever their coders are. The last
// block of each frame judges what all of them have found.
#pragma once

#include "select.cuh"

constexpr int TILES_OF_BLOCK = 16 * THREADS;  // of a PLANES frame, that pay a block

// This block's share, of `units` blocks, in the words of a PLANES frame's tiles.
NCZ_DEVICE void add_tile_words(const Input& input, int unit, int units, Status& status, int64_t* scratch) {
    const uint32_t* sizes = payload_words(input.frame) + chunks_of(input.count);
    int64_t tiles = tiles_of(input.count), words = 0;
    for (int64_t tile = int64_t(unit) * THREADS + threadIdx.x; tile < tiles; tile += int64_t(units) * THREADS)
        words += sizes[tile] & 0xffffu;
    words = block_sum(words, scratch);
    if (threadIdx.x == 0) atomicAdd(&status.tile_words, (unsigned long long)words);
}

// What the header says about the payload, or 0.
NCZ_DEVICE int64_t payload_damage(const Header& header) {
    bool is_known = header.coder == PLANES || header.coder == HUFFMAN32;
    bool is_gapped = header.coder == HUFFMAN32 && header.width == GAPPED;
    if (!is_known || (header.width && !is_gapped)) return damaged(BAD_CODER);
    bool has_tables = header.payload_bytes >= 4 * table_words(header.count) && header.payload_bytes % 4 == 0;
    return header.coder == PLANES && !has_tables ? damaged(PLANES_TABLES) : 0;
}

// Of all damages, that which a decoder that goes from front to back would meet first.
NCZ_DEVICE int64_t verdict(const Input& input, const Header& header, int must_be_sealed, const Status& status) {
    if (int64_t wrong = header_damage(header, input.bytes, input.count)) return wrong;
    if (must_be_sealed && header.flags != HAS_CHECKSUM) return damaged(NO_CHECKSUM);
    if (header.flags == HAS_CHECKSUM && status.checksum != header.checksum)
        return damaged(OTHER_CHECKSUM, status.checksum);
    if (status.payload_damage) return int64_t(status.payload_damage);
    int64_t words = int64_t(status.tile_words);
    return header.coder == PLANES && words != header.payload_bytes / 4 - table_words(input.count) ? damaged(TILES_SUM, words) : 0;
}

// Whether a frame would be whole if there were more of it.
NCZ_DEVICE bool is_cut_off(const Input& input, const Header& header) {
    int64_t bytes = HEADER_BYTES + int64_t(header.payload_bytes);
    return bytes > input.bytes && !header_damage(header, bytes, input.count);
}

// How many of `units` blocks have something to do. All of them find the same.
NCZ_DEVICE int blocks_to_open(const Input& input, const Header& header, int units) {
    if (header.flags == HAS_CHECKSUM) return units;
    int parts = int((tiles_of(input.count) + TILES_OF_BLOCK - 1) / TILES_OF_BLOCK);
    return parts < 1 || header.coder != PLANES ? 1 : parts < units ? parts : units;
}

// Any number of blocks for each frame. `statuses`: zeros; `offsets` and `entries` have places for the chunks and the codes of
// HUFFMAN32 of all frames. `must_be_sealed`: whether a frame without a checksum counts as damaged.
// `is_padded`: whether there may be more bytes than a frame has. If there are fewer, it counts as damaged as well, but is
// not reported.
NCZ_KERNEL(ncz_open)
(const __grid_constant__ Inputs inputs, int must_be_sealed, int is_padded, Status* statuses, Status* report,
 long long* offsets, uint16_t* entries) {
    NCZ_SHARED(HuffmanOpening, opening, 1);
    NCZ_SHARED(Input, shared_input, 1);  // what it is about, which would take too many registers
    NCZ_SHARED(Header, shared_header, 1);
    NCZ_SHARED(int, first_byte, 1);  // of the payload
    NCZ_SHARED(int64_t, scratch, WARPS);
    NCZ_SHARED(int, is_last, 1);
    const Input& input = *shared_input;
    const Header& header = *shared_header;
    int f = frame_number(inputs.n), unit = int(unit_number(inputs.n)), units = int(gridDim.x / unsigned(inputs.n));
    Status& status = statuses[f];
    if (threadIdx.x == 0) {
        *shared_input = inputs.of[f];
        *shared_header = Header();
        if (input.bytes >= HEADER_BYTES) {
            uint32_t words[sizeof header / 4];
            for (int i = 0; i < int(sizeof header / 4); ++i) words[i] = reinterpret_cast<const uint32_t*>(input.frame)[i];
            *first_byte = input.bytes > HEADER_BYTES ? input.frame[HEADER_BYTES] : 0;
            memcpy(shared_header, words, sizeof header);
        }
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
        int coder = wrong ? int(NO_CODER) : int(header.coder);
        if (coder == PLANES)
            add_tile_words(input, unit, units, status, scratch);
        else if (coder == HUFFMAN32)
            wrong = open_pages(input, header, *first_byte, unit, offsets + input.first_chunk, entries + f * HUFFMAN_WHOLE,
                               *opening, scratch);
        if (threadIdx.x == 0) record(status, wrong);
    }
    if (units > 1 && !finished_last(&status.finished, units, is_last)) return;
    if (threadIdx.x) return;
    status.count = input.count;
    status.bytes = input.bytes;
    status.header = header;
    status.result = verdict(input, header, must_be_sealed, status);
    if (!is_padded || !is_cut_off(input, header)) report_damage(status.result, status, report);
}

#define NCZ_OPEN_KERNELS(X) X(ncz_open)
