// Encoding HUFFMAN: what a symbol is written as is looked up, where that pays of two at once.
// docs/reference/wire-format.md specifies the coder.
#pragma once

#include "bits.h"
#include "../common/format.h"
#include "huffman_code.h"
#include "symbols.h"
#include "tokens.h"

namespace {

using namespace ncz;

// In two steps, as the code is that of the whole frame: `add` for each chunk in order, then `write`.
class HuffmanEncoder {
  public:
    static constexpr int64_t UNIT = CHUNK;

    explicit HuffmanEncoder(KeptSymbols<UNIT>& kept) : kept_(kept) {}

    // The symbols of a chunk.
    [[gnu::noinline]] void add(const uint32_t* symbols, int n) {
        uint8_t tokens[CHUNK];
        uint32_t all = tokens_of(symbols, n, tokens);
        if (all < FEW)
            counts_.add_few(tokens, n);
        else
            counts_.add(tokens, n);
        kept_.note(kept_.added()) = int32_t(all);
        kept_.add(symbols, tokens, all < DIRECT ? 8 : all < 1 << 16 ? 16 : 32, n);
        all_ |= all;
    }

    // The payload's bytes; -1, and something in `out`, if there are more than `capacity`.
    [[gnu::noinline]] int64_t write(uint8_t* out, int64_t capacity) const {
        uint32_t counts[TOKENS];
        for (unsigned t = 0; t < TOKENS; ++t) counts[t] = uint32_t(counts_.of(t));
        HuffmanCode code;
        code.make(counts);
        Tables tables;
        int64_t chunks = kept_.units(), table_bytes = 2 * HUFFMAN_LANES * chunks;
        int64_t bits = tables.fill(code, counts, all_);
        if (code.bytes() + table_bytes + bits / 8 > capacity) return -1;
        bool fit_four = bits <= (MOST_BITS - 7) / 4 * kept_.count();  // mostly

        const uint8_t *payload = out, *end = out + capacity;
        uint8_t* table = code.write(out);
        out = table + table_bytes;
        for (int64_t c = 0; c < chunks; ++c) {
            Lanes lanes;
            encode_chunk(tables, fit_four, c, lanes);
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
    static constexpr uint32_t FEW = 32;  // symbols below are counted one after the other
    static constexpr unsigned PAIRED_BITS = 6, PAIRED = 1 << PAIRED_BITS;  // those below are looked up in pairs
    static constexpr uint32_t LISTED = 1 << 12;  // those below are looked up, with their extra bits

    // Some bits, the last at the very top, and their number in the lowest six. What they follow is moved down by that
    // number, which is all that a symbol has to wait for.
    typedef uint64_t Bits;
    static constexpr unsigned MOST_BITS = 64 - 6;
    static Bits bits_of(uint64_t value, unsigned n) { return value << (64 - n) | n; }  // n > 0
    static Bits joined(Bits first, Bits second) { return ((first & ~Bits(63)) >> second % 64) + second + first % 64; }

    // What symbols are written as.
    struct Tables {
        struct Token {
            uint16_t code;
            uint8_t length, bits;  // bits: with the extra bits
            uint32_t extra_mask;
        } tokens[TOKENS];
        Bits symbols[LISTED];
        Bits pairs[PAIRED * PAIRED];  // by the second symbol and, in the low bits of the index, the first
        bool are_mostly_listed;

        // For symbols with no bits but those of `all`; gives how many bits all tokens together take.
        int64_t fill(const HuffmanCode& code, const uint32_t* counts, uint32_t all) {
            uint16_t codes[TOKENS];
            code.codes(codes);
            int64_t sum = 0, others = 0, total = 0;
            for (unsigned t = 0; t < TOKENS; ++t) {
                if (!counts[t]) continue;
                unsigned length = code.length(t), extra = extra_bits_of(t);
                tokens[t] = {codes[t], uint8_t(length), uint8_t(length + extra), (1u << extra) - 1};
                sum += int64_t(counts[t]) * (length + extra);
                total += counts[t];
                others += base_of(t) < LISTED ? 0 : counts[t];
                for (uint32_t i = 0, s = base_of(t); i < 1u << extra && s < LISTED; ++i, s += 2)
                    symbols[s] = bits_of(codes[t] | i << length, length + extra);
            }
            for (unsigned second = 0; second < PAIRED && second <= all; ++second)
                for (unsigned first = 0; first < PAIRED && first <= all; ++first)
                    if (counts[first] && counts[second])
                        pairs[second << PAIRED_BITS | first] = joined(symbols[first], symbols[second]);
            are_mostly_listed = others <= total / 64;
            return sum;
        }

        // For where few are.
        [[gnu::noinline]] Bits of_unlisted(uint32_t symbol) const { return of(symbol, token_of(symbol)); }

        Bits of(uint32_t symbol, unsigned token) const {
            const Token& t = tokens[token];
            return bits_of(t.code | uint64_t(symbol >> 1 & t.extra_mask) << t.length, t.bits);
        }
    };

    struct Lanes {
        int sizes[HUFFMAN_LANES];
        uint8_t bytes[HUFFMAN_LANES][MOST_LANE_BYTES + SLACK];
    };

    // A bit string that grows. MOST_BITS at most, 7 of them from before, may be there when it is flushed.
    struct Writer {
        uint8_t* out;
        uint64_t bits = 0;    // those that are not written yet, at the top
        uint64_t filled = 0;  // how many these are, in its low byte

        void add(Bits more) {
            bits = bits >> more % 64 | more;
            filled += more;
        }
        bool is_overfull() const { return uint8_t(filled) > MOST_BITS; }
        void flush() {
            store64(out, bits >> (-filled % 64));
            out += uint8_t(filled) / 8;
            filled %= 8;
        }
    };

    void encode_chunk(const Tables& tables, bool fit_four, int64_t c, Lanes& lanes) const {
        int n = kept_.length(c);
        uint32_t all = uint32_t(kept_.note(c));
        auto from_list = [&](auto* symbols) {
            encode([&tables, symbols](int i) { return tables.symbols[symbols[i]]; }, fit_four, n, lanes);
        };
        auto of_any = [&](auto* symbols) {
            if (tables.are_mostly_listed) {
                auto bits_of = [&tables, symbols](int i) {
                    uint32_t symbol = symbols[i];
                    return __builtin_expect(symbol < LISTED, 1) ? tables.symbols[symbol] : tables.of_unlisted(symbol);
                };
                return encode(bits_of, fit_four, n, lanes);
            }
            uint8_t tokens[CHUNK];
            tokens_of(symbols, n, tokens);
            encode([&, symbols](int i) { return tables.of(symbols[i], tokens[i]); }, fit_four, n, lanes);
        };
        if (all < PAIRED) return encode_pairs(tables, kept_.symbols<uint8_t>(c), n, lanes);
        if (all < DIRECT) return from_list(kept_.symbols<uint8_t>(c));
        if (all < LISTED) return from_list(kept_.symbols<uint16_t>(c));
        if (all < 1 << 16) return of_any(kept_.symbols<uint16_t>(c));
        of_any(kept_.symbols<uint32_t>(c));
    }

    template <class Function>
    static void encode(Function bits_of, bool fit_four, int n, Lanes& lanes) {
        fit_four ? encode<4>(bits_of, n, lanes) : encode<1>(bits_of, n, lanes);
    }

    // bits_of(i): those of symbol i. As many as mostly fit are added before a flush.
    template <int per_flush, class Function>
    [[gnu::noinline]] static void encode(Function bits_of, int n, Lanes& lanes) {
        constexpr int STEP = per_flush * HUFFMAN_LANES;
        Writer writers[HUFFMAN_LANES];
        for_lanes([&](int l) { writers[l].out = lanes.bytes[l]; });
        int i = 0;
        for (; i + STEP <= n; i += STEP)
            for_lanes([&](int l) {
                Writer next = writers[l];
                for (int k = 0; k < STEP; k += HUFFMAN_LANES) next.add(bits_of(i + k + l));
                if (__builtin_expect(next.is_overfull(), 0)) {
                    next = writers[l];
                    for (int k = 0; k < STEP; k += HUFFMAN_LANES) {
                        next.add(bits_of(i + k + l));
                        next.flush();
                    }
                }
                next.flush();
                writers[l] = next;
            });
        finish(bits_of, i, n, writers, lanes);
    }

    [[gnu::noinline]] static void encode_pairs(const Tables& tables, const uint8_t* symbols, int n, Lanes& lanes) {
        constexpr int STEP = 4 * HUFFMAN_LANES;
        uint64_t pairs[CHUNK / 8];
        for (int i = 0; i < n / 8; ++i) pairs[i] = pairs_of(load64(symbols + 8 * i));
        Writer writers[HUFFMAN_LANES];
        for_lanes([&](int l) { writers[l].out = lanes.bytes[l]; });
        int i = 0;
        for (; i + STEP <= n; i += STEP) {
            auto places = reinterpret_cast<const uint8_t*>(pairs + i / 8);
            for_lanes([&](int l) { writers[l].add(tables.pairs[load16(places + place_of_pair(l))]); });
            for_lanes([&](int l) { writers[l].add(tables.pairs[load16(places + 8 + place_of_pair(l))]); });
            for_lanes([&](int l) { writers[l].flush(); });
        }
        finish([&](int i) { return tables.symbols[symbols[i]]; }, i, n, writers, lanes);
    }

    // Of eight symbols, where in the table of pairs those of lanes 0, 2, 1 and 3 stand, 16 bits each.
    static uint64_t pairs_of(uint64_t eight) {
        constexpr uint64_t even_bytes = 0x00ff00ff00ff00ffu, low = 0xffffffffu;
        uint64_t even = eight & even_bytes, odd = eight >> 8 & even_bytes;
        return ((even | even >> (32 - PAIRED_BITS)) & low) | (odd << 32 | (odd << PAIRED_BITS & ~low));
    }

    static constexpr int place_of_pair(int lane) { return lane % 2 * 4 + lane / 2 * 2; }  // in bytes

    // The symbols from `i` on.
    template <class Function>
    static void finish(Function bits_of, int i, int n, Writer* writers, Lanes& lanes) {
        for (; i < n; ++i) {
            writers[i % HUFFMAN_LANES].add(bits_of(i));
            writers[i % HUFFMAN_LANES].flush();
        }
        for (int l = 0; l < HUFFMAN_LANES; ++l) {
            store64(writers[l].out, writers[l].bits >> (-writers[l].filled % 64));
            lanes.sizes[l] = int(writers[l].out - lanes.bytes[l]) + (writers[l].filled > 0);
        }
    }

    KeptSymbols<UNIT>& kept_;
    ByteCounts counts_;
    uint32_t all_ = 0;  // the bits that any symbol has
};

}  // namespace
