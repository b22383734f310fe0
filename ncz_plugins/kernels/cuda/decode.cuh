// From frames of all coders to values, and to the values of sums.
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
    Opened opened = {inputs, statuses, report, offsets, entries};
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
        decode_pages(put_of, f, chunk, opened, shared->pages);
        return;
    }
    if (length == 0 || is_damaged(status)) return;
    TileCodes codes = {};
    int32_t first = 0;
    uint32_t word = fetch_tile(input, status, entry, shared->tiles[warp()]);
    if (!add_fetched(word, status.header.predictor, shared->tiles[warp()], codes, first)) return report_tile(status, report);
    if (status.header.predictor == DELTA) from_residuals(codes, first);
    TileScales scales;
    load_scales(steps + tile * TILE_ROWS, length, scales);
    store_values(values + tile * TILE, length, codes, scales);
}

// Stores this warp's tile of a sum's codes as values.
NCZ_DEVICE void store_sum(const Piece& piece, int chunk, const TileCodes& codes) {
    int64_t tile = tile_of(chunk);
    int length = length_of_tile(tile, piece.count);
    TileScales scales;
    load_scales(static_cast<const Scale*>(piece.scales) + tile * TILE_ROWS, length, scales);
    store_values(static_cast<Element*>(piece.sum) + tile * TILE, length, codes, scales);
}

// The values that the sum of a piece's own codes and those of its frames stands for. They may stand where its values do. With a
// block per chunk; of a piece with one HUFFMAN32 frame a block adds four pages. Several were added by ncz_sum_pages. Of damaged
// frames as ncz_decode.
template <class SourceOf>
NCZ_DEVICE void decode_sum(SourceOf source_of, const Pieces& pieces, const Opened& opened, ToDecode& shared) {
    const Piece& piece = pieces.of[frame_number(pieces.n)];
    int chunk = int(unit_number(pieces.n));
    uint32_t entry = fetch_first_entry(piece, opened, chunk);
    if (is_added_by_reader(piece) && opened.statuses[piece.first_input].header.coder == HUFFMAN32) {
        auto put_of = [&](int64_t page) {
            int64_t at = page * PAGE + lane() * RUN;
            auto rows = source_of(piece).rows(at);
            return PutSums<decltype(rows)>{rows, static_cast<Element*>(piece.sum) + at,
                                           static_cast<const Scale*>(piece.scales) + page * PAGE_ROWS};
        };
        decode_pages(put_of, int(piece.first_input), chunk, opened, shared.pages);
        return;
    }
    int64_t tile = tile_of(chunk);
    int length = length_of_tile(tile, piece.count);
    if (length == 0 || is_any_damaged(piece, opened.statuses)) return;
    if (is_sum_of_pages(piece, opened.statuses)) return;
    TileWords& room = shared.tiles[warp()];
    uint32_t ahead = fetch_first_tile(piece, opened, entry, room);
    TileCodes codes = {};
    add_tile(source_of(piece), tile * TILE, length, codes);
    if (!add_inputs(piece, opened, chunk, length, ahead, room, codes)) return;
    find_again(chunk);
    store_sum(pieces.of[int(blockIdx.x) - chunk * pieces.n], chunk, codes);
}

NCZ_SUM_KERNEL(ncz_decode_sum)(const __grid_constant__ Pieces pieces, NCZ_OPENED) {
    NCZ_SHARED(ToDecode, shared, 1);
    decode_sum(floats_of, pieces, {inputs, statuses, report, offsets, entries}, *shared);
}

NCZ_SUM_KERNEL(ncz_decode_sum_at_random)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Noise noise, NCZ_OPENED) {
    NCZ_SHARED(ToDecode, shared, 1);
    auto source_of = [&noise](const Piece& piece) { return random_floats_of(piece, noise); };
    decode_sum(source_of, pieces, {inputs, statuses, report, offsets, entries}, *shared);
}

#define NCZ_DECODE_KERNELS(X) X(ncz_decode) X(ncz_decode_sum) X(ncz_decode_sum_at_random)
