// The code of HUFFMAN32, which is HUFFMAN's for GPUs: canonical, of at most 11 bits for each letter, the same for a whole
// frame. Letters are the tokens of the selector's sample, and ESCAPE for all others. ../reference/huffman.py specifies
// it.
//
//     pass_code     in ncz_select    passes the code of the sample's counts on to the kernels that encode
//     open_pages    in ncz_open      reads the code of a frame, for the kernels that decode, and finds the pages
//
// huffman32.cuh has these kernels.
#pragma once

#include "huffman32.cuh"

// ------------------------------------------------------------------ the code

// Huffman's algorithm, in shared memory. Leaves are the letters that occur, in rising order of (count, letter). The nodes above
// them stand in the order in which they come to be. The last is the root.
struct HuffmanTree {
    uint32_t counts[LETTERS];  // given, by letter
    uint32_t leaf_weights[LETTERS + 2], node_weights[LETTERS + 1];  // NO_WEIGHT behind the last
    uint16_t parents[2 * LETTERS];  // of leaves, and from LETTERS on of nodes
    uint8_t letters[LETTERS];  // of leaves
    uint8_t lengths[LETTERS];  // what comes out, by letter: bits of its code, 0 for one that has none
    int leaves;
    int stored;      // letters that have a length in the table of a frame: up to the last one that has a code
    uint32_t kraft;  // sum
};
constexpr uint32_t NO_WEIGHT = 0xffffffffu;

// Where a letter stands among others: by what is counted, then by itself.
NCZ_DEVICE unsigned order_of(unsigned counted, unsigned letter) { return (counted << 8) + letter; }
static_assert(LETTERS <= 1 << 8, "letters have eight bits");

// Looks at the letters that may have a code: the first `stored` tokens, and ESCAPE. Few of all tokens occur.
template <class Look>
NCZ_DEVICE void look_at_letters(int stored, Look look) {
#pragma unroll 4
    for (int token = 0; token < stored; ++token) look(unsigned(token));
    look(ESCAPE);
}

// Prepares a tree for its counts, of which ESCAPE has one. By THREADS threads, a `letter` for each, as are those below without
// another word.
NCZ_DEVICE void clear_tree(HuffmanTree& tree, unsigned letter) {
    if (letter < LETTERS + 2) tree.leaf_weights[letter] = NO_WEIGHT;
    if (letter < LETTERS + 1) tree.node_weights[letter] = NO_WEIGHT;
    if (letter < LETTERS) tree.counts[letter] = letter == ESCAPE;
    if (letter < LETTERS) tree.lengths[letter] = 0;
    if (letter == 0) {
        tree.leaves = 0;
        tree.stored = 1;  // where nothing but ESCAPE occurs, token 0 has the other code
        tree.kraft = 0;
    }
}

NCZ_DEVICE void count_leaves(HuffmanTree& tree, unsigned letter) {
    bool occurs = letter < LETTERS && tree.counts[letter];
    unsigned leaves = __ballot_sync(ALL_LANES, occurs), tokens = __ballot_sync(ALL_LANES, occurs && letter < TOKENS);
    if (lane()) return;
    atomicAdd(&tree.leaves, __popc(leaves));
    if (tokens) atomicMax(&tree.stored, int(letter + bit_length(tokens)));
}

NCZ_DEVICE void sort_leaves(HuffmanTree& tree, unsigned letter) {
    uint32_t count = letter < LETTERS ? tree.counts[letter] : 0;
    if (!count) return;
    unsigned own = order_of(count, letter), lower = 0;
    look_at_letters(tree.stored, [&](unsigned other) { lower += order_of(tree.counts[other], other) < own; });
    int place = int(lower) - (tree.stored + 1 - tree.leaves);  // letters that don't occur are lower than all others
    tree.leaf_weights[place] = count;
    tree.letters[place] = uint8_t(letter);
}

// With two queues (van Leeuwen 1976). By one thread. The first two of each queue are loaded at once, and chosen from without
// branches.
NCZ_DEVICE void join_nodes(HuffmanTree& tree) {
    int leaf = 0, node = 0;
#pragma unroll 1
    for (int parent = 0; parent < tree.leaves - 1; ++parent) {
        uint32_t leaf_weight = tree.leaf_weights[leaf], next_leaf = tree.leaf_weights[leaf + 1];
        uint32_t node_weight = tree.node_weights[node], next_node = tree.node_weights[node + 1];
        bool is_leaf = leaf_weight <= node_weight;
        uint32_t weight = is_leaf ? leaf_weight : node_weight;
        tree.parents[is_leaf ? leaf : int(LETTERS) + node] = uint16_t(parent);
        leaf_weight = is_leaf ? next_leaf : leaf_weight;
        node_weight = is_leaf ? node_weight : next_node;
        leaf += is_leaf;
        node += !is_leaf;
        is_leaf = leaf_weight <= node_weight;
        tree.node_weights[parent] = weight + (is_leaf ? leaf_weight : node_weight);
        tree.parents[is_leaf ? leaf : int(LETTERS) + node] = uint16_t(parent);
        leaf += is_leaf;
        node += !is_leaf;
    }
}

// How deep the leaves are, cut off at the longest length allowed.
NCZ_DEVICE void read_lengths(HuffmanTree& tree, int leaf) {
    int n = tree.leaves, root = n - 2;
    if (leaf >= n) return;
    unsigned depth = 1;
    if (n > 1)
        for (int at = tree.parents[leaf]; at != root && depth < HUFFMAN_MAX_LENGTH; at = tree.parents[LETTERS + at]) ++depth;
    if (n == 1) tree.lengths[tree.letters[0] == 0] = uint8_t(depth);
    tree.lengths[tree.letters[leaf]] = uint8_t(depth);
    atomicAdd(&tree.kraft, (n == 1 ? 2 : 1) * (HUFFMAN_WHOLE >> depth));
}

// From lengths that were cut off to those of a complete code: leaf after leaf one bit more, until the sum is not too large, and
// then as many less as there is room for, from the last leaf on. By a warp, WARP leaves at a time.
NCZ_DEVICE void limit_lengths(HuffmanTree& tree) {
    uint32_t sum = tree.kraft;
    int n = tree.leaves;
    while (sum > HUFFMAN_WHOLE)
        for (int first = 0; first < n; first += WARP) {
            unsigned letter = first + lane() < n ? tree.letters[first + lane()] : 0, length = tree.lengths[letter];
            bool may_grow = first + lane() < n && length < HUFFMAN_MAX_LENGTH;
            uint32_t less = may_grow ? HUFFMAN_WHOLE >> (length + 1) : 0, before = warp_inclusive_sum(less) - less;
            bool grows = may_grow && sum > HUFFMAN_WHOLE + before;
            if (grows) tree.lengths[letter] = uint8_t(length + 1);
            sum -= warp_sum(grows ? less : 0);
        }
    while (sum < HUFFMAN_WHOLE)
        for (int first = (n - 1) / WARP * WARP; first >= 0; first -= WARP) {
            bool is_leaf = first + lane() < n;
            unsigned letter = is_leaf ? tree.letters[first + lane()] : 0, length = tree.lengths[letter];
            uint32_t share = HUFFMAN_WHOLE >> length;
            while (unsigned fitting = __ballot_sync(ALL_LANES, is_leaf && sum + share <= HUFFMAN_WHOLE)) {
                int last = int(bit_length(fitting)) - 1;
                sum += __shfl_sync(ALL_LANES, share, last);
                if (lane() == last) {
                    tree.lengths[letter] = uint8_t(--length);
                    share *= 2;
                }
            }
        }
}

// The lengths of the codes of a tree, from its counts, which a barrier must have made known. By THREADS threads for each tree of a
// block, at the same time. Ends with a barrier.
NCZ_DEVICE void make_lengths(HuffmanTree& tree, unsigned letter, bool is_wanted) {
    if (is_wanted) count_leaves(tree, letter);
    __syncthreads();
    if (is_wanted) sort_leaves(tree, letter);
    __syncthreads();
    if (is_wanted && letter == 0) join_nodes(tree);
    __syncthreads();
    if (is_wanted) read_lengths(tree, int(letter));
    __syncthreads();
    if (is_wanted && letter < WARP) limit_lengths(tree);
    __syncthreads();
}

// Where a letter's codes begin among the numbers of HUFFMAN_MAX_LENGTH bits: codes are counted up in order of (length,
// letter), so all before it take their share of these. `place` becomes the number of codes before it.
NCZ_DEVICE unsigned first_code(const uint8_t* lengths, int stored, unsigned letter, int& place) {
    unsigned own = order_of(lengths[letter] - 1u, letter), first = 0;
    place = 0;
    look_at_letters(stored, [&](unsigned other) {
        unsigned theirs = lengths[other];
        bool is_before = order_of(theirs - 1, other) < own;  // letters that have no code are the last
        first += is_before ? HUFFMAN_WHOLE >> theirs : 0;
        place += is_before;
    });
    return first;
}

// A number of HUFFMAN_MAX_LENGTH bits, the other way round: the first bit of a code is its highest, but stands lowest.
NCZ_DEVICE unsigned reversed(unsigned code) { return __brev(code) >> (32 - HUFFMAN_MAX_LENGTH); }

// ------------------------------------------------------------------ encoding

// Tells the kernels that encode of a tree's code, and whether its letters are those of gaps.
NCZ_DEVICE void pass_code(const HuffmanTree& tree, unsigned letter, bool is_gapped, HuffmanEncoding& encoding) {
    unsigned length = letter < LETTERS ? tree.lengths[letter] : 0;
    int place;
    if (letter < LETTERS)
        encoding.codes[letter] = length ? reversed(first_code(tree.lengths, tree.stored, letter, place)) | length << 16 : 0;
    if (letter) return;
    encoding.stored = tree.stored;
    encoding.width = is_gapped ? GAPPED : 0;
}

// ------------------------------------------------------------------ decoding

// Shared memory that a block reads a code with.
struct HuffmanOpening {
    uint16_t firsts[LETTERS], entries[LETTERS];  // of codes in rising order: where they begin, and what decoders are to find
    uint8_t lengths[LETTERS];
};

// Reads the code in front of a payload, of `stored` letters, of which there may be `most`, by a block. Gives what is wrong with
// it, the same to all threads: 0 if nothing.
NCZ_DEVICE int64_t read_code(const uint8_t* in, int64_t capacity, int stored, int most, uint8_t* lengths, uint32_t* scratch) {
    int place = int(threadIdx.x);
    if (stored > most || capacity < huffman_code_bytes(stored)) return damaged(HUFFMAN_TABLE, stored);
    bool is_stored = place <= stored, is_filling = place == stored + 1 && place % 2;
    unsigned length = is_stored || is_filling ? in[1 + place / 2] >> place % 2 * 4 & 15 : 0;
    if (place < int(LETTERS)) lengths[letter_at(place)] = uint8_t(length);
    bool is_wrong = length > (is_stored ? HUFFMAN_MAX_LENGTH : 0) || (place && place == stored && !length);
    uint32_t share = is_wrong ? 2 * HUFFMAN_WHOLE : length ? HUFFMAN_WHOLE >> length : 0;
    return block_sum(share, scratch) == HUFFMAN_WHOLE ? 0 : damaged(HUFFMAN_CODE);
}

// The last of `n` rising numbers that is not above `limit`; the first never is.
NCZ_DEVICE int last_not_above(const uint16_t* numbers, int n, unsigned limit) {
    int low = 0, high = n;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (numbers[middle] <= limit)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// The code and the letter that any HUFFMAN_MAX_LENGTH bits begin with. A thread finds the code of some numbers in a row by one search:
// each of them begins at most one other code.
NCZ_DEVICE void fill_entries(HuffmanOpening& shared, int stored, bool is_gapped, uint16_t* entries, int* scratch) {
    unsigned letter = threadIdx.x;
    bool has_code = letter < LETTERS && shared.lengths[letter];
    int codes = block_sum(int(has_code), scratch), place;
    if (has_code) {
        unsigned first = first_code(shared.lengths, stored, letter, place);
        shared.firsts[place] = uint16_t(first);
        shared.entries[place] = huffman_entry(shared.lengths[letter], is_gapped ? parts_of_gap(letter) : letter);
    }
    __syncthreads();
    constexpr unsigned EACH = HUFFMAN_WHOLE / THREADS;
    unsigned first = reversed(threadIdx.x);  // so that threads side by side write side by side
    int found = last_not_above(shared.firsts, codes, first);
#pragma unroll
    for (unsigned number = first; number < first + EACH; ++number) {
        found += found + 1 < codes && shared.firsts[found + 1] <= number;
        entries[reversed(number)] = shared.entries[found];
    }
}

// Leaves where each page begins in the payload, and the `entries` that decoders look codes up in. By the block of the first
// part of a frame; the others have nothing to do. `stored`: the first byte of the payload. Gives what is wrong, the same to all
// threads.
NCZ_DEVICE int64_t open_pages(const Input& input, const Header& header, int stored, int part, long long* offsets,
                              uint16_t* entries, HuffmanOpening& shared, int64_t* sums) {
    if (part) return 0;
    const uint8_t* payload = input.frame + HEADER_BYTES;
    int64_t bytes = header.payload_bytes, all;
    int pages = int(huffman_pages_of(input.count)), each = (pages + THREADS - 1) / THREADS;
    if (!bytes) stored = int(TOKENS) + 1;
    bool is_gapped = header.width == GAPPED;
    int most = int(is_gapped ? GAP_LETTERS : TOKENS);
    int code = huffman_code_bytes(stored), first_page = code + page_table_bytes(pages);
    int first = int(threadIdx.x) * each, last = first + each < pages ? first + each : pages;
    const uint16_t* table = reinterpret_cast<const uint16_t*>(payload + code);  // behind whole words
    // The table of pages is on its way while the code is looked at.
    int64_t own = 0;
    if (bytes >= first_page) {
#pragma unroll 8
        for (int page = first; page < last; ++page) own += 2 * table[page];
    }
    int64_t wrong = read_code(payload, bytes, stored, most, shared.lengths, reinterpret_cast<uint32_t*>(sums));
    if (wrong) return wrong;
    if (bytes < first_page) return damaged(PAGES_TABLE, bytes - code);
    int64_t at = first_page + block_exclusive_sum(own, sums, all);
    if (all != bytes - first_page) return damaged(PAGES_SUM, bytes - first_page);
#pragma unroll 8
    for (int page = first; page < last; ++page) {
        unsigned words = table[page];
        offsets[page] = place_page(at, words);
        at += 2 * words;
    }
    fill_entries(shared, stored, is_gapped, entries, reinterpret_cast<int*>(sums));
    return 0;
}
