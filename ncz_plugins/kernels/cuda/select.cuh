// The selector: which coder and predictor AUTO means for a frame, from a sample of its codes, in integers, as
// ../cpu/select.h finds them. ../reference/select.py specifies it.
#pragma once

#include "huffman.cuh"

constexpr int PREDICTORS = 2;  // NONE and DELTA, which are numbered so

// What is measured of a sample with one predictor, in shared memory; zeros at first.
struct SampleSums {
    uint32_t huffman_bits;  // of all tokens
    uint32_t plane_words;   // of all tiles of PLANES
};

// Codes one behind the other, in pieces.
struct Sample {
    const int32_t* codes;
    int n;

    // Zero behind the last.
    NCZ_DEVICE uint32_t symbol(int i, int32_t predictor) const {
        if (i >= n) return 0;
        int first = i / int(PIECE) * int(PIECE);
        if (predictor == DELTA && i == first) return 0;  // as if the same code stood before it
        return symbol_at(codes, i, first, predictor);
    }
};

// How often each token occurs, and the words that PLANES would take. Each warp looks at a tile, of pieces one behind the other.
NCZ_DEVICE void count_tokens(const Sample& sample, int32_t predictor, uint32_t* counts, SampleSums& sums) {
    for (int start = warp() * TILE; start < sample.n; start += WARPS * TILE) {
        constexpr int AT_ONCE = 4;  // rows that are on their way together
        uint32_t of_lane = 0;
#pragma unroll 1
        for (int row = 0; row < TILE_ROWS; row += AT_ONCE) {
            int first = start + run_of(row);
            uint32_t symbols[AT_ONCE][RUN];
#pragma unroll
            for (int r = 0; r < AT_ONCE; ++r)
#pragma unroll
                for (int i = 0; i < RUN; ++i) symbols[r][i] = sample.symbol(first + r * ROW + i, predictor);
#pragma unroll
            for (int r = 0; r < AT_ONCE; ++r)
#pragma unroll
                for (int i = 0; i < RUN; ++i) {
                    if (first + r * ROW + i < sample.n) atomicAdd(counts + token_of(symbols[r][i]), 1u);
                    of_lane |= symbols[r][i];
                }
        }
        int width = int(bit_length(of_lane)), least = warp_min(width), most = warp_max(width), all = warp_sum(width);
        if (lane() == 0) atomicAdd(&sums.plane_words, uint32_t(most - least + all));
    }
}

// What the tokens take in the code of a tree, of which 32 bits hold the number of bits. A thread for each token.
NCZ_DEVICE void add_up_code(const HuffmanTree& tree, SampleSums& sums) {
    unsigned token = threadIdx.x, count = token < TOKENS ? tree.counts[token] : 0;
    unsigned bits = count ? count * (tree.lengths[token] + extra_bits_of(token)) : 0;
    bits = warp_sum(bits);
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
NCZ_KERNEL(ncz_select)
(const __grid_constant__ Pieces pieces, const int32_t* samples, Coding coding, Written* written,
 HuffmanEncoding* encodings) {
    NCZ_SHARED(HuffmanTree, trees, PREDICTORS);
    NCZ_SHARED(SampleSums, sums, PREDICTORS);
    NCZ_SHARED(int, scratch, WARPS);
    NCZ_SHARED(int64_t, costs, CODERS * PREDICTORS);
    int f = int(blockIdx.x), sampled = samples ? sampled_of(pieces.of[f].count) : 0;
    int64_t count = pieces.of[f].count;
    Choice& choice = written[f].choice;
    if (choice.coder == NO_CODER) return;
    Sample sample = {samples ? samples + f * MOST_SAMPLED : nullptr, sampled};
    // Nothing is found out about predictors and coders that can't be chosen, and no costs where there is no choice.
    bool is_settled = coding.coder != AUTO_CODER && coding.predictor != AUTO_PREDICTOR;
    auto is_allowed = [&](int32_t predictor) {
        return coding.predictor == AUTO_PREDICTOR || coding.predictor == predictor;
    };
    auto may_be = [&](int32_t coder) { return coding.coder == AUTO_CODER || coding.coder == coder; };
    for (int p = 0; p < PREDICTORS; ++p) {
        if (threadIdx.x < LETTERS) trees[p].counts[threadIdx.x] = threadIdx.x == ESCAPE;
        if (threadIdx.x == 0) sums[p] = SampleSums();
    }
    __syncthreads();
    for (int p = 0; p < PREDICTORS; ++p)
        if (is_allowed(p)) count_tokens(sample, p, trees[p].counts, sums[p]);
    __syncthreads();
    auto is_wanted = [&](int32_t predictor) { return is_allowed(predictor) && may_be(HUFFMAN32); };
    make_lengths(trees, PREDICTORS, is_wanted, scratch);
    for (int p = 0; p < PREDICTORS && !is_settled; ++p) {
        if (!is_allowed(p)) continue;
        if (may_be(HUFFMAN32)) add_up_code(trees[p], sums[p]);
        __syncthreads();
        int place = int(threadIdx.x);
        if (place < CODERS && may_be(coder_at(place)))
            costs[place * PREDICTORS + p] = cost_of(coder_at(place), p, sums[p], sampled, huffman_code_bytes(trees[p].stored),
                                                    count, coding);
    }
    __syncthreads();
    int best = -1;
    for (int i = 0; i < CODERS * PREDICTORS; ++i) {
        if (!is_allowed(i % PREDICTORS) || !may_be(coder_at(i / PREDICTORS))) continue;
        if (best < 0 || (!is_settled && costs[i] < costs[best])) best = i;
    }
    int32_t coder = coder_at(best / PREDICTORS), predictor = best % PREDICTORS;
    if (!count) coder = PLANES;
    if (coder == HUFFMAN32) pass_code(trees[predictor], encodings[f]);
    if (threadIdx.x) return;
    choice.coder = coder;
    choice.predictor = predictor;
}

#define NCZ_SELECT_KERNELS(X) X(ncz_select)
