// The selector: which coder and predictor AUTO means for a frame, from a sample of its codes, in integers, as
// ../cpu/select.h finds them. ../reference/select.py specifies it.
#pragma once

#include "huffman.cuh"

constexpr int PREDICTORS = 2;  // NONE and DELTA, which are numbered so

// What is measured of a sample with one predictor, in shared memory; zeros at first.
struct SampleSums {
    uint32_t zeros;         // symbols that are
    uint32_t large_bits;    // behind the letters of gaps: those of symbols that the letters don't say
    uint32_t huffman_bits;  // of all letters, with what is behind them
    uint32_t plane_words;   // of all tiles of PLANES
};

// Symbols of a lane's codes in a tile, of which it has `n`, GAP_BITS for each: those of WriteGaps.
struct PackedTile {
    static constexpr int IN_WORD = 32 / GAP_BITS;
    uint32_t words[TILE_CODES / IN_WORD];
};

// What the warps know of the parts of each lane that they count: how many zeros it ends with, and whether there is anything else.
struct GapParts {
    uint8_t zeros[WARPS][WARP], has_others[WARPS][WARP];
};

static_assert(WARPS * TILE == MOST_SAMPLED && MOST_SAMPLED == PAGE && PIECE == ROW,
              "the sample is a page, of which a warp has a tile, and rows are pieces");

// Of a sample of `n` codes, those of this warp's tile. Rows are pieces. Behind the last code anything may stand.
NCZ_DEVICE void load_sample(const int32_t* codes, int n, TileCodes& own) {
#pragma unroll
    for (int r = 0; r < TILE_ROWS; ++r) {
        int first = warp() * TILE + run_of(r);
        LaneRun<int32_t> run = {};
        if (first < n) run.load(codes + first);
        run.get(own[r]);
    }
}

// How often each token but that of zero occurs, how many zeros there are, and the words that PLANES would take. Gives the symbols.
NCZ_DEVICE PackedTile count_tokens(const TileCodes& codes, int n, int32_t predictor, uint32_t* counts, SampleSums& sums) {
    PackedTile packed = {};
    uint32_t all = 0, zeros = 0, large_bits = 0;
#pragma unroll
    for (int r = 0; r < TILE_ROWS; ++r) {
        int first = warp() * TILE + run_of(r);
        int32_t of_lower_lane = __shfl_up_sync(ALL_LANES, codes[r][RUN - 1], 1);
        int32_t before = lane() ? of_lower_lane : codes[r][0];  // in front of a piece, as if the same code stood there
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            int32_t code = codes[r][i];
            uint32_t symbol = first + i < n ? zigzag(predictor == DELTA ? difference(code, before) : code) : 0;
            before = code;
            zeros += first + i < n && !symbol;
            all |= symbol;
            int at = r * RUN + i;
            packed.words[at / PackedTile::IN_WORD] |= (symbol < GAP_SYMBOLS ? symbol : GAP_SYMBOLS)
                                                      << at % PackedTile::IN_WORD * GAP_BITS;
            if (!symbol) continue;
            unsigned token = token_of(symbol);
            atomicAdd(counts + token, 1u);
            if (symbol >= GAP_SYMBOLS) large_bits += ESCAPED_BITS + extra_bits_of(token);
        }
    }
    zeros = warp_sum(zeros);
    large_bits = warp_sum(large_bits);
    int width = int(bit_length(all)), least = warp_min(width), most = warp_max(width), words = most - least + warp_sum(width);
    if (lane()) return packed;
    atomicAdd(&sums.zeros, zeros);
    if (large_bits) atomicAdd(&sums.large_bits, large_bits);
    atomicAdd(&sums.plane_words, uint32_t(words));
    return packed;
}

// Whether HUFFMAN32's letters are those of gaps.
NCZ_DEVICE bool is_gapped(const SampleSums& sums, int n) { return n && 2 * sums.zeros >= uint32_t(n); }

// How often the letters of gaps occur, as in a page of these symbols. `counts` are those of no letter at first.
NCZ_DEVICE void count_gaps(const PackedTile& packed, int n, uint32_t* counts, GapParts& parts) {
    int start = warp() * TILE, in_tile = n - start < 0 ? 0 : n - start < TILE ? n - start : TILE;
    int own = length_of_lane(in_tile), all = length_of_lane(n), behind = own;  // the last symbol that is not zero
#pragma unroll
    for (int w = 0; w < int(sizeof packed / sizeof *packed.words); ++w)
        if (packed.words[w]) behind = own - (w + 1) * PackedTile::IN_WORD + __clz(int(packed.words[w])) / GAP_BITS;
    parts.zeros[warp()][lane()] = uint8_t(behind);
    parts.has_others[warp()][lane()] = behind < own;
    __syncthreads();
    bool is_last = own && all <= (warp() + 1) * TILE_CODES;
    if (is_last && behind) atomicAdd(counts + NO_MORE, 1u);
    int gap = 0;  // in front of this tile's symbols from `at` on
    for (int w = warp() - 1; w >= 0; --w) {
        gap += parts.zeros[w][lane()];
        if (parts.has_others[w][lane()]) break;
    }
#pragma unroll
    for (int w = 0; w < int(sizeof packed / sizeof *packed.words); ++w) {
        uint32_t left = packed.words[w];
        int at = 0;
#pragma unroll 1
        while (left) {
            unsigned zeros = unsigned(__ffs(int(left)) - 1) / GAP_BITS;
            left >>= GAP_BITS * zeros;
            atomicAdd(counts + letter_of_gap(unsigned(gap) + zeros, left & SMALL_BITS), 1u);
            left >>= GAP_BITS;
            at += int(zeros) + 1;
            gap = 0;
        }
        gap += PackedTile::IN_WORD - at;
    }
}

// The bits behind a letter, but for those of large symbols behind a gap.
NCZ_DEVICE unsigned bits_behind(unsigned letter, bool is_gapped) {
    if (!is_gapped) return extra_bits_of(letter);
    unsigned length = letter == NO_MORE ? 0 : (letter - 1) % GAP_LENGTHS;
    return length ? length - 1 : 0;
}

// What the letters take in the code of a tree, of which 32 bits hold the number of bits. A thread for each letter.
NCZ_DEVICE void add_up_code(const HuffmanTree& tree, bool is_gapped, SampleSums& sums) {
    unsigned letter = threadIdx.x, count = letter < TOKENS ? tree.counts[letter] : 0;
    unsigned bits = count ? count * (tree.lengths[letter] + bits_behind(letter, is_gapped)) : 0;
    bits = warp_sum(bits);
    if (threadIdx.x == 0 && is_gapped) bits += sums.large_bits;
    if (lane() == 0) atomicAdd(&sums.huffman_bits, bits);
}

constexpr int64_t NEVER = int64_t(1) << 62;  // more than anything costs: a coder that would give way

// Picoseconds for a frame of `count` codes, of which `n` were measured. By one thread.
NCZ_DEVICE int64_t cost_of(int32_t coder, int32_t predictor, const SampleSums& sums, int n, int code_bytes, int64_t count,
                           const Coding& coding) {
    const SelectorCosts& costs = coding.costs;
    bool is_free = coding.coder == AUTO_CODER;
    int64_t bits, bytes, picoseconds, of_all = n ? n : 1;
    if (coder == PLANES) {
        bits = 32 * int64_t(sums.plane_words);
        bytes = 4 * chunks_of(count) + (predictor == DELTA ? 8 : 4) * tiles_of(count);
        picoseconds = costs.fixed * count;
    } else {
        constexpr int BYTES = 2 + 2 * HUFFMAN32_LANES;  // of a page besides its codes: half of each lane's last word is empty
        bits = int64_t(sums.huffman_bits);
        if (is_free && bits > HUFFMAN32_MOST_BITS * int64_t(n)) return NEVER;
        bytes = BYTES * huffman_pages_of(count) + code_bytes;
        picoseconds = costs.huffman * count;
    }
    return costs.link * (bits * count / (8 * of_all) + bytes) + picoseconds;
}

// The first wins at a draw.
constexpr int CODERS = 2;
NCZ_DEVICE int32_t coder_at(int place) { return place == 0 ? PLANES : HUFFMAN32; }

// Makes the choice for each piece, a block for each; none if its frame was written already.
// `samples`: null where `coding` settles everything. The sample of a HUFFMAN32 frame makes its code.
//
// There is one block for each frame, which may have more registers than others.
NCZ_KERNEL_OF(THREADS, 2, ncz_select)
(const __grid_constant__ Pieces pieces, const int32_t* samples, Coding coding, Written* written,
 HuffmanEncoding* encodings) {
    NCZ_SHARED(HuffmanTree, trees, PREDICTORS);
    NCZ_SHARED(SampleSums, sums, PREDICTORS);
    NCZ_SHARED(GapParts, parts, PREDICTORS);
    NCZ_SHARED(int, scratch, WARPS);
    NCZ_SHARED(int64_t, costs, CODERS * PREDICTORS);
    int f = int(blockIdx.x), sampled = samples ? sampled_of(pieces.of[f].count) : 0;
    int64_t count = pieces.of[f].count;
    Choice& choice = written[f].choice;
    if (choice.coder == NO_CODER) return;
    // Nothing is found out about predictors and coders that can't be chosen, and no costs where there is no choice.
    bool is_settled = coding.coder != AUTO_CODER && coding.predictor != AUTO_PREDICTOR;
    auto is_allowed = [&](int32_t predictor) {
        return coding.predictor == AUTO_PREDICTOR || coding.predictor == predictor;
    };
    auto may_be = [&](int32_t coder) { return coding.coder == AUTO_CODER || coding.coder == coder; };
    auto is_wanted = [&](int32_t predictor) { return is_allowed(predictor) && may_be(HUFFMAN32); };
    for (int p = 0; p < PREDICTORS; ++p) {
        if (threadIdx.x < LETTERS) trees[p].counts[threadIdx.x] = threadIdx.x == ESCAPE;
        if (threadIdx.x == 0) sums[p] = SampleSums();
    }
    __syncthreads();
    TileCodes codes;
    load_sample(samples + f * MOST_SAMPLED, sampled, codes);
    PackedTile packed[PREDICTORS];
#pragma unroll
    for (int p = 0; p < PREDICTORS; ++p)
        if (is_allowed(p)) packed[p] = count_tokens(codes, sampled, p, trees[p].counts, sums[p]);
    __syncthreads();
    // Where most symbols are zero, letters are those of gaps.
    for (int p = 0; p < PREDICTORS; ++p) {
        unsigned letter = threadIdx.x;
        bool has_gaps = is_gapped(sums[p], sampled);
        if (letter == 0) trees[p].counts[letter] = has_gaps ? 0 : sums[p].zeros;
        if (letter && letter < ESCAPE && has_gaps) trees[p].counts[letter] = 0;
    }
    __syncthreads();
#pragma unroll
    for (int p = 0; p < PREDICTORS; ++p)
        if (is_wanted(p) && is_gapped(sums[p], sampled)) count_gaps(packed[p], sampled, trees[p].counts, parts[p]);
    __syncthreads();
    make_lengths(trees, PREDICTORS, is_wanted, scratch);
    for (int p = 0; p < PREDICTORS; ++p)
        if (!is_settled && is_wanted(p)) add_up_code(trees[p], is_gapped(sums[p], sampled), sums[p]);
    __syncthreads();
    int place = int(threadIdx.x), its_coder = coder_at(place / PREDICTORS), its_predictor = place % PREDICTORS;
    if (!is_settled && place < CODERS * PREDICTORS && is_allowed(its_predictor) && may_be(its_coder))
        costs[place] = cost_of(its_coder, its_predictor, sums[its_predictor], sampled,
                               huffman_code_bytes(trees[its_predictor].stored), count, coding);
    __syncthreads();
    int best = -1;
    for (int i = 0; i < CODERS * PREDICTORS; ++i) {
        if (!is_allowed(i % PREDICTORS) || !may_be(coder_at(i / PREDICTORS))) continue;
        if (best < 0 || (!is_settled && costs[i] < costs[best])) best = i;
    }
    int32_t coder = coder_at(best / PREDICTORS), predictor = best % PREDICTORS;
    if (!count) coder = PLANES;
    if (coder == HUFFMAN32) pass_code(trees[predictor], is_gapped(sums[predictor], sampled), encodings[f]);
    if (threadIdx.x) return;
    choice.coder = coder;
    choice.predictor = predictor;
}

#define NCZ_SELECT_KERNELS(X) X(ncz_select)
