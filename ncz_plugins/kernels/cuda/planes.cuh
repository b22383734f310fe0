// The coder PLANES, in which GPUs write what CPUs write as RAW or FIXED, and sums of frames. A tile of 1,024 codes is written and
// read by a warp. Each lane has 32 of them, as words of which each holds one bit of all: bit planes. It writes as many planes as
// its codes need. docs/reference/wire-format.md specifies it.
//
//     ncz_encode_planes   frames from values or codes, in one pass
//     ncz_sum_planes      frames of values and of frames, in one pass
//     ncz_sum_codes, ncz_decode_codes   the codes of such sums, for the other coders
//
// A tile lies in the frame where its chunk got a place, in no certain order: so no block waits for another one.
#pragma once

#include "frame.cuh"

constexpr unsigned PLANES_OF_BYTE = 8;  // that are put together at a time

NCZ_DEVICE int64_t tiles_of(int64_t count) { return (count + TILE - 1) / TILE; }

// Words in front of the tiles: where each chunk begins, and how each tile is.
NCZ_DEVICE int64_t table_words(int64_t count) { return chunks_of(count) + tiles_of(count); }

// ------------------------------------------------------------------ a tile

// Bits of the codes of this lane, in two's complement; the least and the most that a lane has; words of the tile.
struct TileSize {
    int width, least, most, words;
};

NCZ_DEVICE TileSize size_of(const TileCodes& codes, int32_t predictor) {
    int32_t high = 0, low = 0;
#pragma unroll
    for (int r = 0; r < TILE_ROWS; ++r)
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            high = codes[r][i] > high ? codes[r][i] : high;
            low = codes[r][i] < low ? codes[r][i] : low;
        }
    TileSize size;
    size.width = high | low ? 33 - __clz(high > ~low ? high : ~low) : 0;
    size.least = warp_min(size.width);
    size.most = warp_max(size.width);
    size.words = (predictor == DELTA) + size.most - size.least + warp_sum(size.width);
    return size;
}

// Of a tile that is read, as its word in the frame's table says.
NCZ_DEVICE TileSize size_in_table(uint32_t word) {
    return {0, int(word >> 16 & 0xffu), int(word >> 24), int(word & 0xffffu)};
}

// To what each code is more than the one before it, and the first one, which every lane gets.
NCZ_DEVICE int32_t to_residuals(TileCodes& codes) {
    int32_t first = __shfl_sync(ALL_LANES, codes[0][0], 0), before = first;  // before the row
#pragma unroll
    for (int r = 0; r < TILE_ROWS; ++r) {
        int32_t of_lower_lane = __shfl_up_sync(ALL_LANES, codes[r][RUN - 1], 1), previous = lane() ? of_lower_lane : before;
        before = __shfl_sync(ALL_LANES, codes[r][RUN - 1], WARP - 1);
#pragma unroll
        for (int i = RUN - 1; i; --i) codes[r][i] = difference(codes[r][i], codes[r][i - 1]);
        codes[r][0] = difference(codes[r][0], previous);
    }
    return first;
}

// Its inverse.
NCZ_DEVICE void from_residuals(TileCodes& codes, int32_t first) {
    uint32_t before = uint32_t(first);
#pragma unroll
    for (int r = 0; r < TILE_ROWS; ++r) {
#pragma unroll
        for (int i = 1; i < RUN; ++i) codes[r][i] = sum(codes[r][i], codes[r][i - 1]);
        uint32_t own = uint32_t(codes[r][RUN - 1]), inclusive = warp_inclusive_sum(own);
#pragma unroll
        for (int i = 0; i < RUN; ++i) codes[r][i] = sum(codes[r][i], int32_t(before + inclusive - own));
        before += __shfl_sync(ALL_LANES, inclusive, WARP - 1);
    }
}

NCZ_DEVICE void clear_behind(TileCodes& codes, int length) {
#pragma unroll
    for (int r = 0; r < TILE_ROWS; ++r)
#pragma unroll
        for (int i = 0; i < RUN; ++i) codes[r][i] = run_of(r) + i < length ? codes[r][i] : 0;
}

// A step of transposing a matrix of 8 x 8 bits in each byte of eight words (Warren, "Hacker's Delight", 7-3).
NCZ_DEVICE void exchange_bits(uint32_t& low, uint32_t& high, int distance, uint32_t kept_of_low) {
    uint32_t former = low;
    low = (former & kept_of_low) | (high << distance & ~kept_of_low);
    high = (former >> distance & kept_of_low) | (high & ~kept_of_low);
}

// From byte b of words q to bits q of byte b, or back.
NCZ_DEVICE void transpose(uint32_t (&words)[PLANES_OF_BYTE]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) exchange_bits(words[i], words[i + 4], 4, 0x0f0f0f0fu);
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (!(i & 2)) exchange_bits(words[i], words[i + 2], 2, 0x33333333u);
#pragma unroll
    for (int i = 0; i < 8; i += 2) exchange_bits(words[i], words[i + 1], 1, 0x55555555u);
}

// The planes that byte number `byte` of this lane's codes has: bit i of a plane is that of the i-th code.
NCZ_DEVICE void planes_of(const TileCodes& codes, int byte, uint32_t (&planes)[PLANES_OF_BYTE]) {
    unsigned two_bytes = unsigned(byte | (byte + 4) << 4);
#pragma unroll
    for (int q = 0; q < 8; ++q) {
        // Codes q, q + 8, q + 16 and q + 24.
        const int32_t(&of)[TILE_ROWS][RUN] = codes;
        uint32_t lower = __byte_perm(uint32_t(of[q / RUN][q % RUN]), uint32_t(of[2 + q / RUN][q % RUN]), two_bytes);
        uint32_t upper = __byte_perm(uint32_t(of[4 + q / RUN][q % RUN]), uint32_t(of[6 + q / RUN][q % RUN]), two_bytes);
        planes[q] = __byte_perm(lower, upper, 0x5410);
    }
    transpose(planes);
}

// Writes a tile's residuals, if there is a predictor, else its codes.
NCZ_DEVICE void write_tile(const TileCodes& codes, const TileSize& size, int32_t predictor, int32_t first, uint32_t* to) {
    unsigned lower = (1u << lane()) - 1;
    int base = predictor == DELTA, at = base + size.most - size.least;  // words of the first code, and with the masks
    uint32_t mask = 0;  // of the plane with this lane's number among those that not all lanes have
#pragma unroll 1
    for (int byte = 0; byte * int(PLANES_OF_BYTE) < size.most; ++byte) {
        uint32_t planes[PLANES_OF_BYTE];
        planes_of(codes, byte, planes);
#pragma unroll
        for (int q = 0; q < int(PLANES_OF_BYTE); ++q) {
            int plane = byte * int(PLANES_OF_BYTE) + q;
            if (plane < size.least) {
                to[at + lane()] = planes[q];
                at += WARP;
            } else if (plane < size.most) {
                bool has = plane < size.width;
                unsigned having = __ballot_sync(ALL_LANES, has);
                if (lane() == plane - size.least) mask = having;
                if (has) to[at + __popc(having & lower)] = planes[q];
                at += __popc(having);
            }
        }
    }
    if (lane() < size.most - size.least) to[base + lane()] = mask;
    if (base && lane() == 0) to[0] = uint32_t(first);
}

// Adds what stands in a tile to codes, or to residuals. Gives whether its masks and its size go together; only then
// anything was added.
NCZ_DEVICE bool add_planes(const uint32_t* from, const TileSize& size, int32_t predictor, TileCodes& codes) {
    unsigned lower = (1u << lane()) - 1;
    int base = predictor == DELTA, partial = size.most - size.least, at = base + partial;
    if (size.words < at) return false;
    uint32_t mask = lane() < partial ? from[base + lane()] : 0;
    uint32_t below = __shfl_up_sync(ALL_LANES, mask, 1);
    bool has_gap = lane() && (mask & ~below);  // a plane above one that is missing
    int words = at + size.least * WARP + warp_sum(__popc(mask));
    if (__any_sync(ALL_LANES, has_gap) || words != size.words) return false;
    uint32_t sign = 0;
#pragma unroll 1
    for (int byte = 0; byte * int(PLANES_OF_BYTE) < size.most; ++byte) {
        uint32_t planes[PLANES_OF_BYTE];
#pragma unroll
        for (int q = 0; q < int(PLANES_OF_BYTE); ++q) {
            int plane = byte * int(PLANES_OF_BYTE) + q;
            planes[q] = q ? planes[q - 1] : sign;  // behind a lane's last plane its sign goes on
            if (plane < size.least) {
                planes[q] = from[at + lane()];
                at += WARP;
            } else if (plane < size.most) {
                unsigned having = __shfl_sync(ALL_LANES, mask, plane - size.least);
                if (having >> lane() & 1) planes[q] = from[at + __popc(having & lower)];
                at += __popc(having);
            }
        }
        sign = planes[PLANES_OF_BYTE - 1];
        transpose(planes);
        bool is_last = (byte + 1) * int(PLANES_OF_BYTE) >= size.most;
        if (byte == 0 && is_last) {  // as nearly always, and then it is simpler
#pragma unroll
            for (int i = 0; i < TILE_CODES; ++i) {
                int32_t code = int32_t(planes[i % 8] << (24 - 8 * (i / 8))) >> 24;
                codes[i / RUN][i % RUN] = sum(codes[i / RUN][i % RUN], code);
            }
            break;
        }
#pragma unroll
        for (int i = 0; i < TILE_CODES; ++i) {
            uint32_t part = planes[i % 8] >> 8 * (i / 8) & 0xffu;
            if (is_last) part = uint32_t(int32_t(part << 24) >> 24);
            codes[i / RUN][i % RUN] = sum(codes[i / RUN][i % RUN], int32_t(part << 8 * byte));
        }
    }
    return true;
}

// ------------------------------------------------------------------ writing

// What the kernels that write frames share: device memory for each frame.
struct Writing {
    Written* written;
    long long* sizes;
};

// Shared memory of a block that writes a chunk.
struct Placing {
    int words[TILES_OF_CHUNK];  // of each tile
    unsigned long long placed;  // what Written.placed was
};

constexpr int SPOILED_TILE = -1;  // in place of its words: it is made of a damaged one
constexpr int64_t PLACED_CHUNK = int64_t(1) << 40;  // of Written.placed, whose lower bits count words

// Blocks that write a frame; an empty frame counts as one chunk.
NCZ_DEVICE int64_t written_chunks(const Piece& piece) { return piece.count ? chunks_of(piece.count) : 1; }

// Writes this block's chunk, and completes the frame once it is the last of them. By a warp with its tile, of which
// `is_whole` says whether it may be written.
NCZ_DEVICE void write_chunk(TileCodes& codes, int64_t chunk, int length, bool is_whole, int32_t predictor, int f,
                            const Piece& piece, const Writing& writing, Placing& shared) {
    int64_t count = piece.count, tile = tile_of(chunk), chunks = chunks_of(count);
    int32_t first = 0;
    if (predictor == DELTA) first = to_residuals(codes);
    if (length < TILE) clear_behind(codes, length);
    TileSize size = size_of(codes, predictor);
    if (length == 0) size.words = 0;
    if (lane() == 0) shared.words[warp()] = is_whole ? size.words : SPOILED_TILE;
    __syncthreads();
    uint32_t before_in_chunk = 0, of_chunk = 0;
    bool is_spoiled = false;
    for (int w = 0; w < TILES_OF_CHUNK; ++w) {
        is_spoiled |= shared.words[w] == SPOILED_TILE;
        before_in_chunk += w < warp() ? uint32_t(shared.words[w]) : 0;
        of_chunk += uint32_t(shared.words[w]);
    }
    if (is_spoiled) of_chunk = 0;
    uint32_t* payload = payload_words(piece.frame);
    if (threadIdx.x == 0) {
        Written& written = writing.written[f];
        if (is_spoiled) {
            atomicOr(&written.misfits, 1u);
            __threadfence();
        }
        shared.placed = atomicAdd(&written.placed, (unsigned long long)(PLACED_CHUNK + of_chunk));
    }
    __syncthreads();
    if (threadIdx.x == 0 && int64_t(shared.placed / PLACED_CHUNK) + 1 == written_chunks(piece)) {
        __threadfence();
        if (atomicOr(&writing.written[f].misfits, 0u)) {
            write_spoiled(piece.frame, count, writing.sizes + f);
        } else {
            int64_t bytes = 4 * (table_words(count) + int64_t(shared.placed % PLACED_CHUNK) + of_chunk);
            write_header(piece.frame, PLANES, predictor, 0, count, bytes);
            writing.sizes[f] = HEADER_BYTES + bytes;
        }
    }
    if (length == 0 || is_spoiled) return;
    uint32_t place = uint32_t(shared.placed % PLACED_CHUNK);
    if (threadIdx.x == 0) payload[chunk] = place;
    if (lane() == 0) payload[chunks + tile] = uint32_t(size.words | size.least << 16) | uint32_t(size.most) << 24;
    write_tile(codes, size, predictor, first, payload + table_words(count) + place + before_in_chunk);
}

// PLANES frames of what `source_of` gives, with this predictor; or with that of `choice`, if PLANES is what it says.
template <class SourceOf>
NCZ_DEVICE void encode_planes(SourceOf source_of, const Pieces& pieces, int32_t predictor, int is_chosen,
                              const Writing& writing, Placing& shared) {
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    const Choice& choice = writing.written[f].choice;
    int64_t chunk = unit_number(pieces.n), tile = tile_of(chunk);
    if (chunk >= written_chunks(piece) || (is_chosen && choice.coder != PLANES)) return;
    int length = length_of_tile(tile, piece.count);
    TileCodes codes = {};
    add_tile(source_of(piece), tile * TILE, length, codes);
    write_chunk(codes, chunk, length, true, is_chosen ? choice.predictor : predictor, f, piece, writing, shared);
}

NCZ_CHUNK_KERNEL(ncz_encode_planes)
(const __grid_constant__ Pieces pieces, int predictor, int is_chosen, Written* written, long long* sizes) {
    NCZ_SHARED(Placing, shared, 1);
    encode_planes(floats_of, pieces, predictor, is_chosen, Writing{written, sizes}, *shared);
}

NCZ_CHUNK_KERNEL(ncz_encode_planes_at_random)
(const __grid_constant__ Pieces pieces, Noise noise, int predictor, int is_chosen, Written* written, long long* sizes) {
    NCZ_SHARED(Placing, shared, 1);
    auto source_of = [&noise](const Piece& piece) { return random_floats_of(piece, noise); };
    encode_planes(source_of, pieces, predictor, is_chosen, Writing{written, sizes}, *shared);
}

NCZ_CHUNK_KERNEL(ncz_encode_planes_of_codes)
(const __grid_constant__ Pieces pieces, int predictor, int is_chosen, Written* written, long long* sizes) {
    NCZ_SHARED(Placing, shared, 1);
    encode_planes(codes_of, pieces, predictor, is_chosen, Writing{written, sizes}, *shared);
}

// ------------------------------------------------------------------ reading

// Frames that were opened, as all kernels that read some get them: how they are, where kernels leave damage, and what they
// know of the pages of HUFFMAN32 (huffman32.cuh).
struct Opened {
    const Inputs& inputs;
    Status* statuses;
    Status* report;
    const long long* offsets;
    const uint16_t* entries;
};
#define NCZ_OPENED \
    const __grid_constant__ Inputs inputs, Status *statuses, Status *report, const long long *offsets, const uint16_t *entries

// Shared memory for a warp's tile while it is read, so that all its words are on their way together.
struct TileWords {
    uint32_t words[1 + 32 + 32 * WARP];  // the first code, all masks and all planes
};

// Asks for what the tables of a PLANES frame say about a chunk: a word for each tile, by a lane each, and by the lane behind
// them where the chunk begins. The answer takes long, so this comes before it is known whether the frame is one of PLANES, and
// whole. Nothing behind the frame's memory is read: there it is 0.
NCZ_DEVICE uint32_t fetch_entry(const Input& input, int chunk) {
    int chunks = int(chunks_of(input.count)), tile = chunk * TILES_OF_CHUNK + lane();
    bool is_tile = lane() < TILES_OF_CHUNK && tile < tiles_of(input.count), is_chunk = lane() == TILES_OF_CHUNK && chunk < chunks;
    bool has_tables = input.bytes >= HEADER_BYTES + 4 * table_words(input.count);
    uint32_t entry = 0;
    if (has_tables && (is_tile || is_chunk)) entry = payload_words(input.frame)[is_chunk ? chunk : chunks + tile];
    load_here(entry);
    return entry;
}

constexpr uint32_t NO_TILE = 0xffffffffu;  // no tile's word in a table: a code has no 255 planes

// Starts to copy this warp's tile of a PLANES frame without other damage to shared memory. Gives the tile's word in the table;
// of a tile that can't be, NO_TILE.
NCZ_DEVICE uint32_t fetch_tile(const Input& input, const Status& status, uint32_t entry, TileWords& room) {
    uint32_t own = __shfl_sync(ALL_LANES, entry, warp());
    int64_t begin = __shfl_sync(ALL_LANES, entry, TILES_OF_CHUNK);
#pragma unroll
    for (int t = 0; t < TILES_OF_CHUNK - 1; ++t) {
        uint32_t other = __shfl_sync(ALL_LANES, entry, t);
        begin += t < warp() ? other & 0xffffu : 0;
    }
    TileSize size = size_in_table(own);
    int64_t tables = table_words(input.count), words = status.header.payload_bytes / 4 - tables;
    if (size.most > 32 || size.least > size.most || begin + size.words > words) return NO_TILE;
    if (size.words > int(sizeof room / sizeof *room.words)) return NO_TILE;
    const uint32_t* from = payload_words(input.frame) + tables + begin;
    __syncwarp(ALL_LANES);  // what was there before was read
    for (int i = lane(); i < size.words; i += WARP) copy_async(room.words + i, from + i);
    return own;
}

// Adds the tile that fetch_tile gave `word` for: its codes, or with DELTA its residuals, of which `first` becomes the first
// code. Whether all is as it must be.
NCZ_DEVICE bool add_fetched(uint32_t word, int32_t predictor, const TileWords& room, TileCodes& codes, int32_t& first) {
    if (word == NO_TILE) return false;
    await_copies();
    __syncwarp(ALL_LANES);
    if (!add_planes(room.words, size_in_table(word), predictor, codes)) return false;
    if (predictor == DELTA) first = int32_t(room.words[0]);
    return true;
}

// Tells of a damaged tile, by one lane.
NCZ_DEVICE void report_tile(const Status& status, Status* report) {
    if (lane() == 0) report_damage(damaged(DAMAGED_TILE), status, report);
}

NCZ_DEVICE bool has_residuals(const Status& status) {
    return status.header.coder == PLANES && status.header.predictor == DELTA;
}

NCZ_DEVICE bool has_any_residuals(const Piece& piece, const Status* statuses) {
    bool has_any = false;
    for (unsigned i = 0; i < piece.inputs; ++i) has_any |= has_residuals(statuses[piece.first_input + i]);
    return has_any;
}

// How many of a piece's frames are HUFFMAN32; 0 if ncz_open found damage in one.
NCZ_DEVICE int frames_of_pages(const Piece& piece, const Status* statuses) {
    int found = 0;
    for (unsigned i = 0; i < piece.inputs; ++i) {
        const Status& status = statuses[piece.first_input + i];
        if (status.result) return 0;
        found += status.header.coder == HUFFMAN32;
    }
    return found;
}

// Whether ncz_decode_sum adds the only frame of a piece, whatever its coder is. Else ncz_sum_pages adds those that are HUFFMAN32.
NCZ_DEVICE bool is_added_by_reader(const Piece& piece) { return piece.sum && piece.inputs == 1; }

// Whether ncz_sum_pages makes all of a piece's sum.
NCZ_DEVICE bool is_sum_of_pages(const Piece& piece, const Status* statuses) {
    int frames = frames_of_pages(piece, statuses);
    return frames && frames == int(piece.inputs);
}

// What a sum asks for before it reads the values that are added, as it takes longest to come.
NCZ_DEVICE uint32_t fetch_first_entry(const Piece& piece, const Opened& opened, int chunk) {
    return piece.inputs ? fetch_entry(opened.inputs.of[piece.first_input], chunk) : 0;
}

// The tile of a piece's first frame, if add_inputs begins with it; else NO_TILE.
NCZ_DEVICE uint32_t fetch_first_tile(const Piece& piece, const Opened& opened, uint32_t entry, TileWords& room) {
    if (!piece.inputs) return NO_TILE;
    const Status& status = opened.statuses[piece.first_input];
    bool is_first = has_residuals(status) == has_any_residuals(piece, opened.statuses);
    if (status.header.coder != PLANES || !is_first) return NO_TILE;
    return fetch_tile(opened.inputs.of[piece.first_input], status, entry, room);
}

// Adds the codes of this warp's tile of all frames of a piece, of which `ahead` is what fetch_first_tile gave: of HUFFMAN32 frames
// what ncz_sum_pages left. Whether all of them are as they must be.
NCZ_DEVICE bool add_inputs(const Piece& piece, const Opened& opened, int chunk, int length, uint32_t ahead,
                           TileWords& room, TileCodes& codes) {
    if (length == 0) return true;
    if (piece.values && frames_of_pages(piece, opened.statuses))
        add_tile<1>(codes_of(piece), tile_of(chunk) * TILE, length, codes);
    int begin = int(piece.first_input), end = begin + int(piece.inputs);
    bool has_any = has_any_residuals(piece, opened.statuses), is_whole = true;
    // Sums of residuals are residuals of sums, so that one pass makes codes of all.
    int32_t all_first = has_any ? to_residuals(codes) : 0;
#pragma unroll 1
    for (int pass = has_any ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
        for (int i = begin; i < end; ++i) {
            const Input& input = opened.inputs.of[i];
            const Status& status = opened.statuses[i];
            if (status.header.coder != PLANES || has_residuals(status) != (pass == 0)) continue;
            uint32_t word = i == begin ? ahead : NO_TILE;
            if (word == NO_TILE) word = fetch_tile(input, status, fetch_entry(input, chunk), room);
            int32_t first = 0;
            if (!add_fetched(word, status.header.predictor, room, codes, first)) {
                report_tile(status, opened.report);
                is_whole = false;
            }
            all_first = sum(all_first, first);
        }
        if (pass == 0) from_residuals(codes, all_first);
    }
    return is_whole;
}

// Writes a frame that tells of damage, and that it was written, by one thread.
NCZ_DEVICE void spoil(const Piece& piece, int f, const Writing& writing) {
    write_spoiled(piece.frame, piece.count, writing.sizes + f);
    writing.written[f].choice.coder = NO_CODER;
}

// Whether a frame that a piece is made of was found damaged by kernels before. If so, what is made of it is spoiled.
NCZ_DEVICE bool is_spoiled(const Piece& piece, int f, int64_t chunk, const Opened& opened, const Writing& writing) {
    if (!is_any_damaged(piece, opened.statuses)) return false;
    if (piece.frame && chunk == 0 && threadIdx.x == 0) spoil(piece, f, writing);
    return true;
}

// The sum of the codes of frames that were opened and those of a piece's own as a PLANES frame. Of a damaged one, a spoiled
// one.
template <class SourceOf>
NCZ_DEVICE void sum_planes(SourceOf source_of, const Pieces& pieces, const Opened& opened, int32_t predictor,
                           const Writing& writing, TileWords* rooms, Placing& shared) {
    int f = frame_number(pieces.n), chunk = int(unit_number(pieces.n));
    const Piece& piece = pieces.of[f];
    int64_t tile = tile_of(chunk);
    uint32_t entry = fetch_first_entry(piece, opened, chunk);
    if (chunk >= written_chunks(piece) || is_spoiled(piece, f, chunk, opened, writing)) return;
    int length = length_of_tile(tile, piece.count);
    uint32_t ahead = fetch_first_tile(piece, opened, entry, rooms[warp()]);
    TileCodes codes = {};
    add_tile(source_of(piece), tile * TILE, length, codes);
    bool is_whole = add_inputs(piece, opened, chunk, length, ahead, rooms[warp()], codes);
    find_again(chunk);
    f = int(blockIdx.x) - chunk * pieces.n;
    const Piece& same = pieces.of[f];
    length = length_of_tile(tile_of(chunk), same.count);
    write_chunk(codes, chunk, length, is_whole, predictor, f, same, writing, shared);
}

// The same to a piece's codes in memory, for the other coders; without `adds`, of the frames alone.
template <class SourceOf>
NCZ_DEVICE void sum_codes(SourceOf source_of, bool adds, const Pieces& pieces, const Opened& opened,
                          const Writing& writing, TileWords* rooms) {
    int f = frame_number(pieces.n), chunk = int(unit_number(pieces.n));
    const Piece& piece = pieces.of[f];
    int64_t tile = tile_of(chunk);
    uint32_t entry = fetch_first_entry(piece, opened, chunk);
    if (is_spoiled(piece, f, chunk, opened, writing)) return;
    if (is_sum_of_pages(piece, opened.statuses)) return;
    int length = length_of_tile(tile, piece.count);
    uint32_t ahead = fetch_first_tile(piece, opened, entry, rooms[warp()]);
    TileCodes codes = {};
    if (adds) add_tile(source_of(piece), tile * TILE, length, codes);
    bool is_whole = add_inputs(piece, opened, chunk, length, ahead, rooms[warp()], codes);
    find_again(chunk);
    f = int(blockIdx.x) - chunk * pieces.n;
    const Piece& same = pieces.of[f];
    store_tile(same.codes + tile_of(chunk) * TILE, length_of_tile(tile_of(chunk), same.count), codes);
    if (is_whole || lane() || !same.frame) return;
    if (!atomicOr(&writing.written[f].misfits, 1u)) spoil(same, f, writing);
}

// Kernels that add frames up have more to hold, so that fewer blocks fit on a multiprocessor; with more, they would spill.
#if NCZ_DTYPE == 3
constexpr int SUM_BLOCKS = 3;
#elif __CUDA_ARCH__ < 900
constexpr int SUM_BLOCKS = 5;
#else
constexpr int SUM_BLOCKS = 6;
#endif
#define NCZ_SUM_KERNEL(name) NCZ_KERNEL_OF(CHUNK_THREADS, SUM_BLOCKS, name)

// Of each piece the sum of its values' codes and of its frames, as PLANES frame.
NCZ_SUM_KERNEL(ncz_sum_planes)
(const __grid_constant__ Pieces pieces, NCZ_OPENED, int predictor, Written* written, long long* sizes) {
    NCZ_SHARED(TileWords, rooms, TILES_OF_CHUNK);
    NCZ_SHARED(Placing, shared, 1);
    Opened opened = {inputs, statuses, report, offsets, entries};
    sum_planes(floats_of, pieces, opened, predictor, Writing{written, sizes}, rooms, *shared);
}

NCZ_SUM_KERNEL(ncz_sum_planes_at_random)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Noise noise, NCZ_OPENED, int predictor, Written* written,
 long long* sizes) {
    NCZ_SHARED(TileWords, rooms, TILES_OF_CHUNK);
    NCZ_SHARED(Placing, shared, 1);
    Opened opened = {inputs, statuses, report, offsets, entries};
    auto source_of = [&noise](const Piece& piece) { return random_floats_of(piece, noise); };
    sum_planes(source_of, pieces, opened, predictor, Writing{written, sizes}, rooms, *shared);
}

// The same sums as codes.
NCZ_SUM_KERNEL(ncz_sum_codes)
(const __grid_constant__ Pieces pieces, NCZ_OPENED, Written* written, long long* sizes) {
    NCZ_SHARED(TileWords, rooms, TILES_OF_CHUNK);
    Opened opened = {inputs, statuses, report, offsets, entries};
    sum_codes(floats_of, true, pieces, opened, Writing{written, sizes}, rooms);
}

NCZ_SUM_KERNEL(ncz_sum_codes_at_random)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Noise noise, NCZ_OPENED, Written* written,
 long long* sizes) {
    NCZ_SHARED(TileWords, rooms, TILES_OF_CHUNK);
    Opened opened = {inputs, statuses, report, offsets, entries};
    auto source_of = [&noise](const Piece& piece) { return random_floats_of(piece, noise); };
    sum_codes(source_of, true, pieces, opened, Writing{written, sizes}, rooms);
}

// Of each piece the sum of its frames' codes; with `add`, onto the codes that stand there.
NCZ_SUM_KERNEL(ncz_decode_codes)
(const __grid_constant__ Pieces pieces, NCZ_OPENED, Written* written, long long* sizes, int add) {
    NCZ_SHARED(TileWords, rooms, TILES_OF_CHUNK);
    Opened opened = {inputs, statuses, report, offsets, entries};
    sum_codes(codes_of, add != 0, pieces, opened, Writing{written, sizes}, rooms);
}

#define NCZ_PLANES_KERNELS(X)                                                                                         \
    X(ncz_encode_planes) X(ncz_encode_planes_at_random) X(ncz_encode_planes_of_codes) X(ncz_sum_planes)               \
    X(ncz_sum_planes_at_random) X(ncz_sum_codes) X(ncz_sum_codes_at_random) X(ncz_decode_codes)
