// The coder HUFFMAN: a canonical code of at most 11 bits for each token, the same for a whole frame.
// docs/wire-format.md specifies it.
#pragma once

#include "bits.h"
#include "format.h"
#include "symbols.h"
#include "tokens.h"

namespace {

using namespace ncz;

constexpr unsigned HUFFMAN_WHOLE = 1 << HUFFMAN_MAX_LENGTH;  // the Kraft sum of a complete code
constexpr int LANE_SYMBOLS = CHUNK / HUFFMAN_LANES;
constexpr unsigned MOST_TOKEN_BITS = HUFFMAN_MAX_LENGTH + 32 - 1 - TOLD_BITS;
constexpr int MOST_LANE_BYTES = LANE_SYMBOLS * MOST_TOKEN_BITS / 8;

// ------------------------------------------------------------------ the code

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

        // Leaves and behind them the nodes above them, in the order in which they come to be; the last is the root.
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

    // 0, or what is wrong with a code that begins at `in`.
    int64_t read(const uint8_t* in, int64_t room) {
        unsigned n = room ? in[0] : TOKENS + 1;
        if (n > TOKENS || room < 1 + (n + 1) / 2) return damaged(HUFFMAN_TABLE, n);
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

    // From lengths that were cut off to those of a complete code.
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

// ------------------------------------------------------------------ encoding

// In two steps, as the code is that of the whole frame: `add` for each chunk in order, then `write`.
class HuffmanEncoder {
  public:
    static constexpr int64_t UNIT = CHUNK;

    explicit HuffmanEncoder(KeptSymbols<UNIT>& kept) : kept_(kept) {}

    // The symbols of a chunk.
    [[gnu::noinline]] void add(const uint32_t* symbols, int n) {
        uint8_t tokens[CHUNK];
        bool is_direct = tokens_of(symbols, n, tokens) < DIRECT;
        counts_.add(tokens, n);
        kept_.add(symbols, tokens, is_direct ? 8 : 32, n);
    }

    // The payload's bytes; -1, and something in `out`, if there are more than `room`.
    int64_t write(uint8_t* out, int64_t room) const {
        uint32_t counts[TOKENS];
        for (unsigned t = 0; t < TOKENS; ++t) counts[t] = uint32_t(counts_.of(t));
        HuffmanCode code;
        code.make(counts);
        Entry entries[TOKENS];
        uint64_t bits = 0;
        unsigned most = fill(code, counts, entries, bits);
        int64_t chunks = kept_.units(), table_bytes = 2 * HUFFMAN_LANES * chunks;
        if (code.bytes() + table_bytes + int64_t(bits / 8) > room) return -1;

        const uint8_t *payload = out, *end = out + room;
        uint8_t* table = code.write(out);
        out = table + table_bytes;
        for (int64_t c = 0; c < chunks; ++c) {
            Lanes lanes;
            encode_chunk(entries, most, c, lanes);
            for (int l = 0; l < HUFFMAN_LANES; ++l) {
                int size = lanes.sizes[l];
                if (size > end - out) return -1;
                store16(table, uint16_t(size));
                memcpy(out, lanes.bytes[l], size_t(size));
                table += 2;
                out += size;
            }
        }
        return out - payload;
    }

  private:
    struct Entry {  // of a token
        uint16_t code;
        uint8_t length, bits;  // bits: with the extra bits
        uint32_t extra_mask;
    };

    struct Lanes {
        int sizes[HUFFMAN_LANES];
        uint8_t bytes[HUFFMAN_LANES][MOST_LANE_BYTES + SLACK];
    };

    // A bit string that grows, by 56 bits at most between two flushes.
    struct Writer {
        uint8_t* out;
        uint64_t bits;
        unsigned filled;

        void add(uint64_t value, unsigned n) {
            bits |= value << filled;
            filled += n;
        }
        void flush() {
            store64(out, bits);
            out += filled / 8;
            bits >>= filled / 8 * 8;
            filled %= 8;
        }
    };

    // Gives the bits of the longest token that occurs, and adds up those of all.
    static unsigned fill(const HuffmanCode& code, const uint32_t* counts, Entry* entries, uint64_t& bits) {
        uint16_t codes[TOKENS];
        code.codes(codes);
        unsigned most = 0;
        for (unsigned t = 0; t < TOKENS; ++t) {
            if (!counts[t]) continue;
            unsigned length = code.length(t), extra = extra_bits_of(t);
            entries[t] = {codes[t], uint8_t(length), uint8_t(length + extra), (1u << extra) - 1};
            bits += uint64_t(counts[t]) * (length + extra);
            most = length + extra > most ? length + extra : most;
        }
        return most;
    }

    void encode_chunk(const Entry* entries, unsigned most, int64_t c, Lanes& lanes) const {
        int n = kept_.length(c);
        if (kept_.width(c) == 8) return encode_lanes<4>(entries, kept_.symbols<uint8_t>(c), nullptr, n, lanes);
        uint8_t tokens[CHUNK];
        auto symbols = kept_.symbols<uint32_t>(c);
        tokens_of(symbols, n, tokens);
        if (most <= 14) return encode_lanes<4>(entries, tokens, symbols, n, lanes);
        if (most <= 28) return encode_lanes<2>(entries, tokens, symbols, n, lanes);
        encode_lanes<1>(entries, tokens, symbols, n, lanes);
    }

    // per_flush: tokens that 56 bits hold for certain. Four without extra bits always fit, and a chunk with a few
    // outliers mostly consists of such. Symbols are only looked at for extra bits.
    template <int per_flush>
    [[gnu::noinline]] static void encode_lanes(const Entry* entries, const uint8_t* tokens, const uint32_t* symbols,
                                               int n, Lanes& lanes) {
        auto add_direct = [&](Writer& lane, int i) {
            const Entry& entry = entries[tokens[i]];
            lane.add(entry.code, entry.length);
        };
        auto add = [&](Writer& lane, int i) {
            const Entry& entry = entries[tokens[i]];
            lane.add(entry.code | uint64_t(symbols[i] >> 1 & entry.extra_mask) << entry.length, entry.bits);
        };
        constexpr int GROUP = 4 * HUFFMAN_LANES;
        Writer writers[HUFFMAN_LANES];
        for (int l = 0; l < HUFFMAN_LANES; ++l) writers[l] = {lanes.bytes[l], 0, 0};
        int i = 0;
        for (; i + GROUP <= n; i += GROUP) {
            bool is_direct = ((load64(tokens + i) | load64(tokens + i + 8)) & 0x8080808080808080u) == 0;
            if (is_direct) {
                for (int l = 0; l < HUFFMAN_LANES; ++l) {
                    for (int k = 0; k < 4; ++k) add_direct(writers[l], i + k * HUFFMAN_LANES + l);
                    writers[l].flush();
                }
                continue;
            }
            for (int first = i; first < i + GROUP; first += per_flush * HUFFMAN_LANES)
                for (int l = 0; l < HUFFMAN_LANES; ++l) {
                    for (int k = 0; k < per_flush; ++k) add(writers[l], first + k * HUFFMAN_LANES + l);
                    writers[l].flush();
                }
        }
        for (; i < n; ++i) {
            Writer& lane = writers[i % HUFFMAN_LANES];
            if (tokens[i] < DIRECT)
                add_direct(lane, i);
            else
                add(lane, i);
            lane.flush();
        }
        for (int l = 0; l < HUFFMAN_LANES; ++l)
            lanes.sizes[l] = int(writers[l].out - lanes.bytes[l]) + (writers[l].filled > 0);
    }

    KeptSymbols<UNIT>& kept_;
    ByteCounts counts_;
};

// ------------------------------------------------------------------ decoding

// Too large to be copied.
class HuffmanDecoder {
  public:
    static constexpr int64_t UNIT = CHUNK;

    HuffmanDecoder() {}
    HuffmanDecoder(const HuffmanDecoder&) = delete;

    // 0, or what is wrong with the code or the sizes; the chunks must not be decoded then.
    int64_t open(const uint8_t* payload, int64_t bytes, int64_t count) {
        HuffmanCode code;
        if (int64_t wrong = code.read(payload, bytes)) return wrong;
        count_ = count;
        sizes_ = payload + code.bytes();
        end_ = payload + bytes;
        int64_t lanes = HUFFMAN_LANES * chunks_of(count), sum = 0;
        if (end_ - sizes_ < 2 * lanes) return damaged(HUFFMAN_NO_LANES, end_ - sizes_);
        chunk_ = sizes_ + 2 * lanes;
        for (int64_t l = 0; l < lanes; ++l) sum += size_of(l);
        if (sum != end_ - chunk_) return damaged(HUFFMAN_LANE_SUM, end_ - sizes_);
        fill(code);
        return 0;
    }

    // Bits of what `decode` writes: 8 if all symbols are below DIRECT, else 32.
    unsigned width() const { return is_direct_ ? 8 : 32; }

    // The symbols of a chunk, as integers of width() bits; false if they are damaged. Chunks are decoded in order.
    bool decode(int64_t c, void* symbols) {
        int n = length_of(c, count_);
        Lanes lanes;
        uint64_t end = 0;
        for (int l = 0; l < HUFFMAN_LANES; ++l) {
            lanes.bits[l] = 8 * end;
            lanes.ends[l] = end += size_of(HUFFMAN_LANES * c + l);
        }
        lanes.in = chunk_;
        chunk_ += end;
        // Lanes are read without a look at their ends, as far as symbols of `most_bits_` would take. What may lie
        // outside the payload is decoded from a copy.
        uint8_t copy[HUFFMAN_LANES * MOST_LANE_BYTES + MOST_LANE_BYTES + SLACK];
        int64_t reach = int64_t(lanes.bits[HUFFMAN_LANES - 1] / 8) + LANE_SYMBOLS * most_bits_ / 8 + SLACK;
        if (reach > end_ - lanes.in) {
            if (end > HUFFMAN_LANES * MOST_LANE_BYTES) return false;
            memcpy(copy, lanes.in, end);
            memset(copy + end, 0, sizeof copy - end);
            lanes.in = copy;
        }
        if (is_direct_)
            decode_lanes<4>(lanes, n, static_cast<uint8_t*>(symbols));
        else if (most_bits_ <= 14)
            decode_lanes<4>(lanes, n, static_cast<uint32_t*>(symbols));
        else if (most_bits_ <= 28)
            decode_lanes<2>(lanes, n, static_cast<uint32_t*>(symbols));
        else
            decode_lanes<1>(lanes, n, static_cast<uint32_t*>(symbols));
        return lanes.end();
    }

  private:
    struct Lanes {
        const uint8_t* in;
        uint64_t bits[HUFFMAN_LANES];  // where each lane goes on
        uint64_t ends[HUFFMAN_LANES];  // bytes

        // Whether each lane has been read up to its last byte, and what is left of that is zero.
        bool end() const {
            for (int l = 0; l < HUFFMAN_LANES; ++l) {
                if ((bits[l] + 7) / 8 != ends[l]) return false;
                if (bits[l] % 8 && in[bits[l] / 8] >> bits[l] % 8) return false;
            }
            return true;
        }
    };

    unsigned size_of(int64_t lane) const { return load16(sizes_ + 2 * lane); }

    // An entry: bits with the extra bits, bits of the code, token, 8 bits each.
    void fill(const HuffmanCode& code) {
        uint16_t codes[TOKENS];
        code.codes(codes);
        most_bits_ = 0;
        is_direct_ = true;
        for (unsigned t = 0; t < TOKENS; ++t) {
            unsigned length = code.length(t), bits = length + extra_bits_of(t);
            if (!length) continue;
            for (unsigned i = codes[t]; i < HUFFMAN_WHOLE; i += 1u << length)
                entries_[i] = bits | length << 8 | t << 16;
            symbols_[t] = {base_of(t), (1u << extra_bits_of(t)) - 1};
            most_bits_ = bits > most_bits_ ? bits : most_bits_;
            is_direct_ &= t < DIRECT;
        }
    }

    // per_load: symbols that 57 bits, which every load has, hold for certain.
    template <int per_load, class T>
    [[gnu::noinline]] void decode_lanes(Lanes& lanes, int n, T* symbols) const {
        auto next = [this](uint64_t& word, uint64_t& bit) {
            uint32_t entry = entries_[word % HUFFMAN_WHOLE];
            unsigned bits = entry & 0xff, length = entry >> 8 & 0xff, token = entry >> 16;
            uint32_t symbol = token;
            if (sizeof(T) > 1) {
                uint32_t extra = uint32_t(word >> length) & symbols_[token].extra_mask;
                symbol = symbols_[token].base + (extra << 1);
            }
            word >>= bits;
            bit += bits;
            if (per_load == 1) asm("" : "+r"(bit));  // keeps gcc from gathering the lanes' bits into vectors
            return T(symbol);
        };
        const uint8_t* in = lanes.in;
        auto load = [in](uint64_t bit) { return load64(in + bit / 8) >> bit % 8; };
        uint64_t bits[HUFFMAN_LANES];
        memcpy(bits, lanes.bits, sizeof bits);
        int i = 0;
        for (; i + per_load * HUFFMAN_LANES <= n; i += per_load * HUFFMAN_LANES)
            for (int l = 0; l < HUFFMAN_LANES; ++l) {
                uint64_t bit = bits[l], word = load(bit);
                for (int k = 0; k < per_load; ++k) symbols[i + k * HUFFMAN_LANES + l] = next(word, bit);
                bits[l] = bit;
            }
        for (; i < n; ++i) {
            uint64_t word = load(bits[i % HUFFMAN_LANES]);
            symbols[i] = next(word, bits[i % HUFFMAN_LANES]);
        }
        memcpy(lanes.bits, bits, sizeof bits);
    }

    const uint8_t *sizes_ = nullptr, *chunk_ = nullptr, *end_ = nullptr;  // chunk_: the one to decode next
    int64_t count_ = 0;
    unsigned most_bits_ = 0;  // of the longest token that has a code
    bool is_direct_ = false;
    uint32_t entries_[HUFFMAN_WHOLE];
    struct {
        uint32_t base, extra_mask;
    } symbols_[TOKENS];  // of each token
};

}  // namespace
