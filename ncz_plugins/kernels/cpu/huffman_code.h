// The code of HUFFMAN: canonical, of at most 11 bits for each token, the same for a whole frame.
// ../reference/huffman.py specifies it.
#pragma once

#include "../common/format.h"

namespace {

using namespace ncz;

constexpr unsigned HUFFMAN_WHOLE = 1 << HUFFMAN_MAX_LENGTH;  // the Kraft sum of a complete code
constexpr int LANE_SYMBOLS = CHUNK / HUFFMAN_LANES;
constexpr unsigned MOST_TOKEN_BITS = HUFFMAN_MAX_LENGTH + 32 - 1 - BITS_IN_TOKEN;
constexpr int MOST_LANE_BYTES = LANE_SYMBOLS * MOST_TOKEN_BITS / 8;

// Calls function(l) for all lanes, written out, so that each lane's state can stay in registers. Interleaving the lanes
// helps because a processor looks ahead by no more than some dozens of instructions.
template <class Function>
inline void for_lanes(Function function) {
    static_assert(HUFFMAN_LANES == 4, "all are written out");
    function(0), function(1), function(2), function(3);
}

// Bits of the code of each token, 0 for one that has none.
class HuffmanCode {
  public:
    unsigned length(unsigned token) const { return lengths_[token]; }

    // Huffman's algorithm with two queues (van Leeuwen 1976).
    void make(const uint32_t* counts) {
        int n = 0;
        Leaf leaves[TOKENS];
        for (unsigned t = 0; t < TOKENS; ++t) {
            lengths_[t] = 0;
            if (counts[t]) leaves[n++] = Leaf(counts[t]) << 8 | t;
        }
        if (n == 1) lengths_[token_of_leaf(leaves[0])] = lengths_[token_of_leaf(leaves[0]) == 0] = 1;
        if (n < 2) return;
        sort(leaves, n);

        // The leaves, then the inner nodes in the order in which they are made; the last is the root.
        uint64_t weights[2 * TOKENS];
        int parents[2 * TOKENS], depths[2 * TOKENS];
        for (int i = 0; i < n; ++i) weights[i] = leaves[i] >> 8;
        int leaf = 0, node = n, root = 2 * n - 2;
        for (int parent = n; parent <= root; ++parent) {
            weights[parent] = 0;
            for (int child = 0; child < 2; ++child) {
                bool leaf_first = leaf < n && (node == parent || weights[leaf] <= weights[node]);
                int lightest = leaf_first ? leaf++ : node++;
                weights[parent] += weights[lightest];
                parents[lightest] = parent;
            }
        }
        depths[root] = 0;
        for (int i = root - 1; i >= 0; --i) depths[i] = depths[parents[i]] + 1;
        for (int i = 0; i < n; ++i)
            lengths_[token_of_leaf(leaves[i])] =
                uint8_t(depths[i] < int(HUFFMAN_MAX_LENGTH) ? depths[i] : HUFFMAN_MAX_LENGTH);
        limit(leaves, n);
    }

    // The code of each token, its first bit lowest.
    void codes(uint16_t* codes) const {
        unsigned of_length[HUFFMAN_MAX_LENGTH + 1] = {}, next[HUFFMAN_MAX_LENGTH + 1], code = 0;
        for (unsigned t = 0; t < TOKENS; ++t) ++of_length[lengths_[t]];
        for (unsigned length = 1; length <= HUFFMAN_MAX_LENGTH; ++length) {
            next[length] = code;
            code = (code + of_length[length]) << 1;
        }
        for (unsigned t = 0; t < TOKENS; ++t)
            if (unsigned length = lengths_[t]) codes[t] = reversed(next[length]++, length);
    }

    int64_t bytes() const { return 1 + (stored() + 1) / 2; }

    uint8_t* write(uint8_t* out) const {
        unsigned n = stored();
        *out++ = uint8_t(n);
        for (unsigned t = 0; t < n; t += 2) *out++ = uint8_t(lengths_[t] | (t + 1 < n ? lengths_[t + 1] << 4 : 0));
        return out;
    }

    // Reads the code that begins at `in`. Returns its damage, or 0.
    int64_t read(const uint8_t* in, int64_t capacity) {
        unsigned n = capacity ? in[0] : TOKENS + 1;
        if (n > TOKENS || capacity < 1 + (n + 1) / 2) return damaged(HUFFMAN_TABLE, n);
        unsigned sum = 0;
        for (unsigned t = 0; t < TOKENS; ++t) {
            unsigned length = t < n ? in[1 + t / 2] >> t % 2 * 4 & 15 : 0;
            if (length > HUFFMAN_MAX_LENGTH) return damaged(HUFFMAN_CODE);
            lengths_[t] = uint8_t(length);
            sum += length ? HUFFMAN_WHOLE >> length : 0;
        }
        bool is_filling_zero = n % 2 == 0 || in[1 + n / 2] >> 4 == 0;
        return sum == HUFFMAN_WHOLE && is_filling_zero && n == stored() ? 0 : damaged(HUFFMAN_CODE);
    }

  private:
    using Leaf = uint64_t;  // count and token, so that leaves are in order of both
    static unsigned token_of_leaf(Leaf leaf) { return leaf & 0xff; }

    static void sort(Leaf* leaves, int n) {  // Shell's, with the gaps of Knuth
        for (int gap = 121; gap; gap /= 3)
            for (int i = gap; i < n; ++i) {
                Leaf leaf = leaves[i];
                int to = i;
                for (; to >= gap && leaves[to - gap] > leaf; to -= gap) leaves[to] = leaves[to - gap];
                leaves[to] = leaf;
            }
    }

    // Adjusts lengths that were cut off until they make a complete code.
    void limit(const Leaf* leaves, int n) {
        unsigned sum = 0;
        for (int i = 0; i < n; ++i) sum += HUFFMAN_WHOLE >> lengths_[token_of_leaf(leaves[i])];
        while (sum > HUFFMAN_WHOLE)
            for (int i = 0; i < n && sum > HUFFMAN_WHOLE; ++i) {
                uint8_t& length = lengths_[token_of_leaf(leaves[i])];
                if (length < HUFFMAN_MAX_LENGTH) sum -= HUFFMAN_WHOLE >> ++length;
            }
        while (sum < HUFFMAN_WHOLE)
            for (int i = n - 1; i >= 0; --i)
                for (uint8_t& length = lengths_[token_of_leaf(leaves[i])];
                     sum + (HUFFMAN_WHOLE >> length) <= HUFFMAN_WHOLE; --length)
                    sum += HUFFMAN_WHOLE >> length;
    }

    static uint16_t reversed(unsigned code, unsigned length) {
        unsigned bits = 0;
        for (; length; --length, code >>= 1) bits = bits << 1 | (code & 1);
        return uint16_t(bits);
    }

    unsigned stored() const {
        unsigned n = TOKENS;
        while (n && !lengths_[n - 1]) --n;
        return n;
    }

    uint8_t lengths_[TOKENS] = {};
};

}  // namespace
