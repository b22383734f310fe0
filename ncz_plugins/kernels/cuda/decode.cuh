// From frames of all coders to values.
#pragma once

#include "huffman32.cuh"

static_assert(PAGE_THREADS == CHUNK_THREADS, "a block has a chunk, or four pages");

// Shared memory of a block.
union ToDecode {
    PagesToRead pages;
    TileWords tiles[TILES_OF_CHUNK];
};

// Of each piece the values of its only frame, which has its number. With a block per chunk, after ncz_open. Of a frame without
// damage all are written, of one whose tiles or pages are damaged perhaps some.
NCZ_KERNEL_OF(PAGE_THREADS, PAGE_BLOCKS, ncz_decode)(const __grid_constant__ Pieces pieces, NCZ_OPENED) {
    NCZ_SHARED(ToDecode, shared, 1);
    Opened opened = {inputs, statuses, report, offsets, entries, decoded};
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    const Input& input = inputs.of[f];
    const Status& status = statuses[f];
    Element* values = static_cast<Element*>(piece.values);
    const Scale* steps = static_cast<const Scale*>(piece.steps);
    int64_t chunk = unit_number(pieces.n), tile = tile_of(chunk);
    int length = length_of_tile(tile, piece.count);
    uint32_t entry = fetch_entry(input, int(chunk));
    if (status.header.coder == HUFFMAN32) {
        auto put_of = [&](int64_t page) {
            return PutValues{values + page * PAGE + lane() * RUN, steps + page * PAGE_ROWS};
        };
        decode_pages(put_of, opened, shared->pages);
        return;
    }
    if (length == 0 || is_damaged(status)) return;
    TileCodes codes = {};
    if (status.header.coder == PLANES) {
        int32_t first = 0;
        uint32_t word = fetch_tile(input, status, entry, shared->tiles[warp()]);
        if (!add_fetched(word, status.header.predictor, shared->tiles[warp()], codes, first)) return report_tile(status, report);
        if (status.header.predictor == DELTA) from_residuals(codes, first);
    } else {
        add_tile(PlainCodes{decoded}, int64_t(input.first_chunk) * CHUNK + tile * TILE, length, codes);
    }
    TileScales scales;
    load_scales(steps + tile * TILE_ROWS, length, scales);
    store_values(values + tile * TILE, length, codes, scales);
}

#define NCZ_DECODE_KERNELS(X) X(ncz_decode)
