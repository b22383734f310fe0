// The selector: which coder and predictor AUTO means for a frame, from a sample of its codes, in integers, as
// ../cpu/select.h finds them. ../reference/select.py specifies it.
#pragma once

#include "huffman.cuh"

constexpr int BYTE_VALUES = 256;
constexpr int PREDICTORS = 2;  // NONE and DELTA, which are numbered so

NCZ_DEVICE int64_t pages_of(int64_t count) { return (count + RANS_PAGE - 1) / RANS_PAGE; }

// log2 of a positive number, times 65536, rounded down: digit by digit (Knuth, TAOCP 1, 1.2.2, exercise 25).
NCZ_DEVICE uint32_t log2_of(uint32_t number) {
    uint32_t log = 31u - unsigned(__clz(int(number)));
    uint32_t x = number << (31 - log);  // in 1.31 bits, from 1 to 2
    for (int digit = 0; digit < 16; ++digit) {
        uint64_t square = uint64_t(x) * x >> 31;
        unsigned is_two = unsigned(square >> 32);
        log = 2 * log + is_two;
        x = uint32_t(square >> is_two);
    }
    return log;
}

// What is measured of a sample with one predictor, in shared memory; zeros at first.
struct SampleSums {
    unsigned long long mask_entropy, token_entropy;  // times 65536
    uint32_t huffman_bits, extra_bits;               // of all tokens
    uint32_t plane_words;                            // of all tiles of PLANES
    int mask_kinds, token_kinds;
    uint32_t mode;
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

// How often each of RANS's masks occurs.
NCZ_DEVICE void count_masks(const Sample& sample, int32_t predictor, uint32_t mode, uint32_t* counts) {
    for (int first = warp() * BLOCK; first < sample.n; first += WARPS * BLOCK) {
        int i = first + lane();
        unsigned differ = __ballot_sync(ALL_LANES, i < sample.n && sample.symbol(i, predictor) != mode);
        bool has_mask = lane() < OCTETS && first + lane() * OCTET < sample.n;
        if (has_mask) atomicAdd(counts + (differ >> 8 * lane() & 0xffu), 1u);
    }
}

// The most frequent of the symbols that are their own tokens, the lowest at a draw. Counts are at most MOST_SAMPLED.
NCZ_DEVICE uint32_t mode_of(const uint32_t* counts, uint32_t* scratch) {
    uint32_t token = threadIdx.x;
    uint32_t best = block_max(token < DIRECT ? counts[token] * DIRECT + (DIRECT - 1 - token) : 0u, scratch);
    return DIRECT - 1 - best % DIRECT;
}

// This thread's part of the entropy of a kind that occurs `count` times of `total`.
NCZ_DEVICE unsigned long long entropy_of(uint32_t count, uint32_t total) {
    return count ? (unsigned long long)count * (log2_of(total) - log2_of(count)) : 0;
}

// What the tokens take in the code of a tree, of which 32 bits hold the number of bits. A thread for each token.
NCZ_DEVICE void add_up_code(const HuffmanTree& tree, SampleSums& sums) {
    unsigned token = threadIdx.x, count = token < TOKENS ? tree.counts[token] : 0;
    unsigned bits = count ? count * (tree.lengths[token] + extra_bits_of(token)) : 0;
    bits = warp_sum(bits);
    if (lane() == 0) atomicAdd(&sums.huffman_bits, bits);
}

// What RANS would take for masks and for tokens that are not the mode. A thread for each value. The entropies need 64 bits, for
// which atomic additions to shared memory are loops.
NCZ_DEVICE void add_up_entropies(const uint32_t* counts, const uint32_t* masks, int n, SampleSums& sums,
                                 unsigned long long* scratch) {
    uint32_t value = threadIdx.x;
    uint32_t tokens = value < TOKENS ? counts[value] : 0, others = value == sums.mode ? 0 : tokens;
    uint32_t all_others = uint32_t(n) - counts[sums.mode];
    unsigned extra_bits = warp_sum(tokens * extra_bits_of(value));
    int mask_kinds = __popc(__ballot_sync(ALL_LANES, masks[value] > 0));
    int token_kinds = __popc(__ballot_sync(ALL_LANES, others > 0));
    unsigned long long mask_entropy = block_sum(entropy_of(masks[value], uint32_t(octets_of(n))), scratch);
    unsigned long long token_entropy = block_sum(entropy_of(others, all_others), scratch);
    if (threadIdx.x == 0) {
        sums.mask_entropy = mask_entropy;
        sums.token_entropy = token_entropy;
    }
    if (lane()) return;
    atomicAdd(&sums.extra_bits, extra_bits);
    atomicAdd(&sums.mask_kinds, mask_kinds);
    atomicAdd(&sums.token_kinds, token_kinds);
}

constexpr int64_t NEVER = int64_t(1) << 62;  // more than anything costs: a coder that would give way

// Picoseconds for a frame of `count` codes, of which `n` were measured. By one thread.
NCZ_DEVICE int64_t cost_of(int32_t coder, int32_t predictor, const SampleSums& sums, int n, uint32_t modes, int code_bytes,
                           int64_t count, const Coding& coding) {
    const SelectorCosts& costs = coding.costs;
    bool is_free = coding.coder == AUTO_CODER;
    int64_t bits, bytes, picoseconds, of_all = n ? n : 1;
    if (coder == PLANES) {
        bits = 32 * int64_t(sums.plane_words);
        bytes = 4 * chunks_of(count) + (predictor == DELTA ? 8 : 4) * tiles_of(count);
        picoseconds = costs.fixed * count;
    } else if (coder == HUFFMAN32) {
        constexpr int BYTES = 2 + 2 * HUFFMAN32_LANES;  // of a page besides its codes: half of each lane's last word is empty
        bits = int64_t(sums.huffman_bits);
        if (is_free && bits > HUFFMAN32_MOST_BITS * int64_t(n)) return NEVER;
        bytes = BYTES * huffman_pages_of(count) + code_bytes;
        picoseconds = costs.huffman * count;
    } else {
        // A small sample has less entropy than where it comes from.
        int missing = 3 * (sums.mask_kinds ? sums.mask_kinds - 1 : 0) / 4;
        bits = int64_t((sums.mask_entropy >> 16) + (sums.token_entropy >> 16) + sums.extra_bits) + missing;
        if (is_free && bits > 8 * int64_t(n)) return NEVER;
        bytes = 66 + 2 * (sums.mask_kinds + sums.token_kinds) + 20 * pages_of(count);
        picoseconds = costs.rans * count + costs.rans_rest * (count * (n - int64_t(modes)) / of_all);
    }
    return costs.link * (bits * count / (8 * of_all) + bytes) + picoseconds;
}

// The first wins at a draw.
constexpr int CODERS = 3;
NCZ_DEVICE int32_t coder_at(int place) { return place == 0 ? PLANES : place == 1 ? HUFFMAN32 : RANS; }

// Makes the choice for each piece, a block for each; none if its frame was written already.
// `samples`: null where `coding` settles everything, also RANS's mode, which then is 0. The sample of a HUFFMAN32 frame makes
// its code.
NCZ_KERNEL(ncz_select)
(const __grid_constant__ Pieces pieces, const int32_t* samples, Coding coding, Written* written,
 HuffmanEncoding* encodings) {
    NCZ_SHARED(HuffmanTree, trees, PREDICTORS);
    NCZ_SHARED(uint32_t, masks, PREDICTORS * BYTE_VALUES);
    NCZ_SHARED(SampleSums, sums, PREDICTORS);
    NCZ_SHARED(unsigned long long, scratch, WARPS);
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
        masks[p * BYTE_VALUES + threadIdx.x] = 0;
        if (threadIdx.x == 0) sums[p] = SampleSums();
    }
    __syncthreads();
    for (int p = 0; p < PREDICTORS; ++p)
        if (is_allowed(p)) count_tokens(sample, p, trees[p].counts, sums[p]);
    __syncthreads();
    for (int p = 0; p < PREDICTORS; ++p) {
        if (!is_allowed(p) || !may_be(RANS)) continue;
        uint32_t mode = mode_of(trees[p].counts, reinterpret_cast<uint32_t*>(scratch));
        if (threadIdx.x == 0) sums[p].mode = mode;
        if (!is_settled) count_masks(sample, p, mode, masks + p * BYTE_VALUES);
    }
    auto is_wanted = [&](int32_t predictor) { return is_allowed(predictor) && may_be(HUFFMAN32); };
    make_lengths(trees, PREDICTORS, is_wanted, reinterpret_cast<int*>(scratch));
    for (int p = 0; p < PREDICTORS && !is_settled; ++p) {
        if (!is_allowed(p)) continue;
        if (may_be(HUFFMAN32)) add_up_code(trees[p], sums[p]);
        if (may_be(RANS)) add_up_entropies(trees[p].counts, masks + p * BYTE_VALUES, sampled, sums[p], scratch);
        __syncthreads();
        int place = int(threadIdx.x);
        if (place < CODERS && may_be(coder_at(place)))
            costs[place * PREDICTORS + p] = cost_of(coder_at(place), p, sums[p], sampled, trees[p].counts[sums[p].mode],
                                                    huffman_code_bytes(trees[p].stored), count, coding);
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
    choice.mode = int32_t(sums[predictor].mode);
}

#define NCZ_SELECT_KERNELS(X) X(ncz_select)
