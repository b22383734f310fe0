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
    static constexpr int IN_WORD = 32 / GAP_BITS, WORDS = TILE_CODES / IN_WORD;
    uint32_t words[WORDS];
};

// The same as planes: bit i of each belongs to the same symbol.
struct PackedPlanes {
    uint32_t planes[GAP_BITS];

    NCZ_DEVICE explicit PackedPlanes(const PackedTile& packed) : planes() {
#pragma unroll
        for (int p = 0; p < GAP_BITS; ++p)
#pragma unroll
            for (int w = 0; w < PackedTile::WORDS; ++w) planes[p] |= (packed.words[w] >> p & 0x11111111u) << w;
    }
    NCZ_DEVICE static int place_of(int bit) { return bit % PackedTile::WORDS * PackedTile::IN_WORD + bit / GAP_BITS; }
    NCZ_DEVICE uint32_t where(unsigned symbol) const {
        uint32_t bits = 0xffffffffu;
#pragma unroll
        for (int p = 0; p < GAP_BITS; ++p) bits &= symbol >> p & 1 ? planes[p] : ~planes[p];
        return bits;
    }
};
static_assert(PackedTile::WORDS == GAP_BITS && TILE_CODES == 32, "a plane is a word, with a bit of each word in turn");

// What the warps know of the parts of each lane that they count: how many zeros it ends with, and whether there is anything else.
struct GapParts {
    uint8_t zeros[WARPS][WARP], has_others[WARPS][WARP];
};

// A half of the block for each predictor.
constexpr int SELECT_THREADS = PREDICTORS * THREADS;
NCZ_DEVICE int32_t its_predictor() { return int32_t(threadIdx.x) / THREADS; }
NCZ_DEVICE int its_tile() { return warp() % WARPS; }
NCZ_DEVICE int length_of_sampled(int n) {  // of that tile
    int left = n - its_tile() * TILE;
    return left < 0 ? 0 : left < TILE ? left : TILE;
}

static_assert(WARPS * TILE == MOST_SAMPLED && MOST_SAMPLED == PAGE && PIECE == ROW,
              "the sample is a page, of which a warp has a tile, and rows are pieces");

// How often each token but that of zero occurs in a tile of `n` codes, how many zeros there are, and the words that PLANES would
// take. Gives the symbols. Rows are pieces. Behind the last code anything may stand.
NCZ_DEVICE PackedTile count_tokens(const int32_t* codes, int n, int32_t predictor, uint32_t* counts, SampleSums& sums) {
    LaneRun<int32_t> runs[TILE_ROWS] = {};
#pragma unroll
    for (int r = 0; r < TILE_ROWS; ++r)
        if (run_of(r) < n) runs[r].load(codes + run_of(r));
    PackedTile packed = {};
    uint32_t all = 0;
#pragma unroll
    for (int r = 0; r < TILE_ROWS; ++r) {
        int32_t own[RUN];
        runs[r].get(own);
        int32_t of_lower_lane = __shfl_up_sync(ALL_LANES, own[RUN - 1], 1);
        int32_t before = lane() ? of_lower_lane : own[0];  // in front of a piece, as if the same code stood there
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            uint32_t symbol = run_of(r) + i < n ? zigzag(difference(own[i], predictor == DELTA ? before : 0)) : 0;
            before = own[i];
            all |= symbol;
            int at = r * RUN + i;
            packed.words[at / PackedTile::IN_WORD] |= (symbol < GAP_SYMBOLS ? symbol : GAP_SYMBOLS)
                                                      << at % PackedTile::IN_WORD * GAP_BITS;
        }
    }
    // Small symbols, which nearly all are, are their own tokens.
    PackedPlanes planes(packed);
#pragma unroll
    for (unsigned symbol = 1; symbol < GAP_SYMBOLS; ++symbol) {
        uint32_t occurs = warp_sum(uint32_t(__popc(planes.where(symbol))));
        if (lane() == 0 && occurs) atomicAdd(counts + symbol, occurs);
    }
    uint32_t large_bits = 0;
    for (uint32_t large = planes.where(GAP_SYMBOLS); large; large &= large - 1) {
        int at = PackedPlanes::place_of(__ffs(int(large)) - 1);
        const int32_t* code = codes + run_of(at / RUN) + at % RUN;
        unsigned token = token_of(zigzag(difference(code[0], predictor == DELTA ? code[-1] : 0)));
        atomicAdd(counts + token, 1u);
        large_bits += ESCAPED_BITS + extra_bits_of(token);
    }
    large_bits = warp_sum(large_bits);
    uint32_t zeros = warp_sum(uint32_t(length_of_lane(n) - __popc(~planes.where(0))));
    int width = int(bit_length(all)), least = warp_min(width), most = warp_max(width), words = most - least + warp_sum(width);
    if (lane()) return packed;
    atomicAdd(&sums.zeros, zeros);
    if (large_bits) atomicAdd(&sums.large_bits, large_bits);
    atomicAdd(&sums.plane_words, uint32_t(words));
    return packed;
}

// Whether HUFFMAN32's letters are those of gaps.
NCZ_DEVICE bool is_gapped(const SampleSums& sums, int n) { return n && 2 * sums.zeros >= uint32_t(n); }

// What other warps have to know of this one's tile.
NCZ_DEVICE void note_gaps(const PackedTile& packed, int n, GapParts& parts) {
    int own = length_of_lane(length_of_sampled(n)), behind = own;  // the last symbol that is not zero
#pragma unroll
    for (int w = 0; w < PackedTile::WORDS; ++w)
        if (packed.words[w]) behind = own - (w + 1) * PackedTile::IN_WORD + __clz(int(packed.words[w])) / GAP_BITS;
    parts.zeros[its_tile()][lane()] = uint8_t(behind);
    parts.has_others[its_tile()][lane()] = behind < own;
}

// How often the letters of gaps occur, as in a page of these symbols. `counts` are those of no letter at first.
NCZ_DEVICE void count_gaps(const PackedTile& packed, int n, uint32_t* counts, const GapParts& parts) {
    int own = length_of_lane(length_of_sampled(n)), all = length_of_lane(n);
    bool is_last = own && all <= (its_tile() + 1) * TILE_CODES;
    if (is_last && parts.zeros[its_tile()][lane()]) atomicAdd(counts + NO_MORE, 1u);
    int gap = 0;  // in front of this tile's symbols from `at` on
    for (int w = its_tile() - 1; w >= 0; --w) {
        gap += parts.zeros[w][lane()];
        if (parts.has_others[w][lane()]) break;
    }
#pragma unroll
    for (int w = 0; w < PackedTile::WORDS; ++w) {
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
NCZ_DEVICE void add_up_code(const HuffmanTree& tree, unsigned letter, bool is_gapped, SampleSums& sums) {
    unsigned count = letter < TOKENS ? tree.counts[letter] : 0;
    unsigned bits = count ? count * (tree.lengths[letter] + bits_behind(letter, is_gapped)) : 0;
    bits = warp_sum(bits);
    if (letter == 0 && is_gapped) bits += sums.large_bits;
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

// Makes the choice for each piece, a block for each; none if its frame was written already. Each half of it finds out about one
// predictor. `samples`: null where `coding` settles everything. The sample of a HUFFMAN32 frame makes its code.
//
// There is one block for each frame, which may have more registers than others.
NCZ_KERNEL_OF(SELECT_THREADS, 1, ncz_select)
(const __grid_constant__ Pieces pieces, const int32_t* samples, Coding coding, Written* written,
 HuffmanEncoding* encodings) {
    NCZ_SHARED(HuffmanTree, trees, PREDICTORS);
    NCZ_SHARED(SampleSums, all_sums, PREDICTORS);
    NCZ_SHARED(GapParts, all_parts, PREDICTORS);
    NCZ_SHARED(int64_t, costs, CODERS * PREDICTORS);
    int f = int(blockIdx.x), sampled = samples ? sampled_of(pieces.of[f].count) : 0, half = its_predictor();
    unsigned letter = threadIdx.x % THREADS;
    int64_t count = pieces.of[f].count;
    Choice& choice = written[f].choice;
    if (choice.coder == NO_CODER) return;
    // Nothing is found out about predictors and coders that can't be chosen, and no costs where there is no choice.
    bool is_settled = coding.coder != AUTO_CODER && coding.predictor != AUTO_PREDICTOR;
    auto is_allowed = [&](int32_t predictor) {
        return coding.predictor == AUTO_PREDICTOR || coding.predictor == predictor;
    };
    auto may_be = [&](int32_t coder) { return coding.coder == AUTO_CODER || coding.coder == coder; };
    bool is_wanted = is_allowed(half) && may_be(HUFFMAN32);
    HuffmanTree& tree = trees[half];
    SampleSums& sums = all_sums[half];
    clear_tree(tree, letter);
    if (letter == 0) sums = SampleSums();
    __syncthreads();
    PackedTile packed;
    const int32_t* codes = samples + f * MOST_SAMPLED + its_tile() * TILE;
    if (is_allowed(half)) packed = count_tokens(codes, length_of_sampled(sampled), half, tree.counts, sums);
    if (is_wanted) note_gaps(packed, sampled, all_parts[half]);
    __syncthreads();
    // Where most symbols are zero, letters are those of gaps.
    bool has_gaps = is_gapped(sums, sampled);
    if (has_gaps && letter < TOKENS) tree.counts[letter] = 0;
    if (letter == 0 && !has_gaps) tree.counts[0] = sums.zeros;
    __syncthreads();
    if (is_wanted && has_gaps) count_gaps(packed, sampled, tree.counts, all_parts[half]);
    __syncthreads();
    make_lengths(tree, letter, is_wanted);
    if (!is_settled && is_wanted) add_up_code(tree, letter, has_gaps, sums);
    __syncthreads();
    int place = int(threadIdx.x), coder_here = coder_at(place / PREDICTORS), predictor_here = place % PREDICTORS;
    if (!is_settled && place < CODERS * PREDICTORS && is_allowed(predictor_here) && may_be(coder_here))
        costs[place] = cost_of(coder_here, predictor_here, all_sums[predictor_here], sampled,
                               huffman_code_bytes(trees[predictor_here].stored), count, coding);
    __syncthreads();
    int best = -1;
    for (int i = 0; i < CODERS * PREDICTORS; ++i) {
        if (!is_allowed(i % PREDICTORS) || !may_be(coder_at(i / PREDICTORS))) continue;
        if (best < 0 || (!is_settled && costs[i] < costs[best])) best = i;
    }
    int32_t coder = coder_at(best / PREDICTORS), predictor = best % PREDICTORS;
    if (!count) coder = PLANES;
    if (coder == HUFFMAN32 && predictor == half) pass_code(tree, letter, has_gaps, encodings[f]);
    if (threadIdx.x) return;
    choice.coder = coder;
    choice.predictor = predictor;
}

#define NCZ_SELECT_KERNELS(X) X(ncz_select)
