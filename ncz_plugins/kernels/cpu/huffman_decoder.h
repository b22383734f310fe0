// Decoding HUFFMAN: several symbols with one look into a table where none has extra bits, else one.
// docs/reference/wire-format.md specifies the coder.
#pragma once

#include "bits.h"
#include "../common/format.h"
#include "huffman_code.h"

namespace {

using namespace ncz;

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
        mean_bits_ = count ? 8 * sum / count : 0;
        return 0;
    }

    // Bits of what `decode` writes for each symbol: 8 if all are below DIRECT.
    unsigned width() const { return width_; }

    // The symbols of a chunk, as integers of width() bits; false if they are damaged. Chunks are decoded in order. What
    // stands in the few bytes behind the last symbol may change.
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
        if (width_ == 8)
            decode_runs(lanes, n, static_cast<uint8_t*>(symbols));
        else if (width_ == 16)
            decode_symbols(lanes, n, static_cast<uint16_t*>(symbols));
        else
            decode_symbols(lanes, n, static_cast<uint32_t*>(symbols));
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

    // The bits of a lane from `bit` on, at least SURE_BITS. Above them stands a one, so that the zeros above that tell
    // how many were taken.
    class Bits {
      public:
        Bits() {}
        Bits(const uint8_t* in, uint64_t bit) { word_ = (load64(in + bit / 8) | uint64_t(1) << 63) >> bit % 8; }
        uint64_t word() const { return word_; }
        void take(uint64_t n) { word_ >>= n % 64; }
        bool are_left() const { return word_ != 0; }  // else more were taken than there were
        uint64_t end(uint64_t bit) const { return bit / 8 * 8 + unsigned(__builtin_clzll(word_)); }  // where it goes on

      private:
        uint64_t word_;
    };
    static constexpr unsigned SURE_BITS = 56;

    // What the next bits of a lane mean if no token has extra bits: a byte each for their total bits, up to RUN tokens
    // and the number of tokens.
    typedef uint64_t Run;
    static constexpr unsigned RUN = 6;
    static Run run_of(unsigned token, unsigned length) { return Run(1) << 56 | token << 8 | length; }
    static unsigned length_of_run(Run run) { return unsigned(run >> 56); }
    static uint64_t tokens_of_run(Run run) { return run >> 8; }

    struct Symbol {
        uint32_t bits;  // in all in the low byte, above it the place of the extra bits as in bits_at
        uint32_t base;  // the symbol less its extra bits
    };

    unsigned size_of(int64_t lane) const { return load16(sizes_ + 2 * lane); }

    void fill(const HuffmanCode& code) {
        uint16_t codes[TOKENS];
        code.codes(codes);
        most_bits_ = 0;
        unsigned last = 0;
        for (unsigned t = 0; t < TOKENS; ++t) {
            unsigned bits = code.length(t) + extra_bits_of(t);
            if (!code.length(t)) continue;
            most_bits_ = bits > most_bits_ ? bits : most_bits_;
            last = t;
        }
        width_ = last < DIRECT ? 8 : base_of(last) < 1 << 16 ? 16 : 32;
        if (width_ == 8) return fill_runs(code, codes);
        for (unsigned t = 0; t <= last; ++t) {
            unsigned length = code.length(t), bits = length + extra_bits_of(t);
            if (!length) continue;
            for (unsigned i = codes[t]; i < HUFFMAN_WHOLE; i += 1u << length)
                symbols_[i] = {bits | length << 8 | extra_bits_of(t) << 16, base_of(t)};
        }
    }

    // Of the runs that `n` bits hold, those of n = 0, 1, 2 ... one behind the other: a token, and the run that
    // the bits behind it hold.
    void fill_runs(const HuffmanCode& code, const uint16_t* codes) {
        for (unsigned t = 0; t < DIRECT; ++t) lengths_[t] = uint8_t(code.length(t));
        for (unsigned n = 0; n <= HUFFMAN_MAX_LENGTH; ++n) {
            Run* runs = runs_ + (1u << n);
            memset(runs, 0, sizeof(Run) << n);
            for (unsigned t = 0; t < DIRECT; ++t) {
                unsigned length = code.length(t);
                if (!length || length > n) continue;
                const Run* rests = runs_ + (1u << (n - length));
                for (unsigned i = 0; i < 1u << (n - length); ++i) {
                    Run rest = rests[i];
                    if (length_of_run(rest) == RUN) rest = shortened(rest, code);
                    runs[codes[t] | i << length] = joined(t, length, rest);
                }
            }
        }
    }

    static Run joined(unsigned token, unsigned length, Run rest) {
        constexpr Run tokens = 0x0000ffffffffff00u, counts = 0xff000000000000ffu;
        return run_of(token, length) + (rest & counts) + ((rest & tokens) << 8);
    }

    // Without the last token.
    static Run shortened(Run run, const HuffmanCode& code) {
        constexpr unsigned last = 8 * RUN;
        unsigned length = code.length(run >> last & 0xff);
        return (run & ~(Run(0xff) << last)) - (Run(1) << 56) - length;
    }

    // Each lane by itself first, as runs end in different places.
    [[gnu::noinline]] void decode_runs(Lanes& lanes, int n, uint8_t* symbols) const {
        constexpr int AT_ONCE = SURE_BITS / HUFFMAN_MAX_LENGTH, MOST = AT_ONCE * RUN;
        const Run* runs = runs_ + HUFFMAN_WHOLE;
        const uint8_t* in = lanes.in;
        uint8_t bytes[HUFFMAN_LANES][LANE_SYMBOLS + SLACK], *outs[HUFFMAN_LANES], *ends[HUFFMAN_LANES];
        for (int l = 0; l < HUFFMAN_LANES; ++l) {
            outs[l] = bytes[l];
            ends[l] = bytes[l] + (n + HUFFMAN_LANES - 1 - l) / HUFFMAN_LANES;
        }
        auto take = [runs](Bits& next, uint8_t*& out) {
            Run run = runs[next.word() % HUFFMAN_WHOLE];
            store64(out, tokens_of_run(run));
            out += length_of_run(run);
            next.take(run);
        };
        auto have_room = [&] {
            bool all = true;
            for (int l = 0; l < HUFFMAN_LANES; ++l) all &= ends[l] - outs[l] >= MOST;
            return all;
        };
        Bits next[HUFFMAN_LANES];
        while (have_room()) {
            for_lanes([&](int l) { next[l] = Bits(in, lanes.bits[l]); });
#pragma GCC unroll 5
            for (int k = 0; k < AT_ONCE; ++k) for_lanes([&](int l) { take(next[l], outs[l]); });
            for_lanes([&](int l) { lanes.bits[l] = next[l].end(lanes.bits[l]); });
        }
        for (int l = 0; l < HUFFMAN_LANES; ++l) {
            uint8_t* out = outs[l];
            uint64_t bit = lanes.bits[l];
            while (ends[l] - out >= int(RUN)) {
                Bits next(in, bit);
                take(next, out);
                bit = next.end(bit);
            }
            while (out < ends[l]) {
                uint8_t token = uint8_t(tokens_of_run(runs[Bits(in, bit).word() % HUFFMAN_WHOLE]));
                *out++ = token;
                bit += lengths_[token];
            }
            lanes.bits[l] = bit;
        }
        for (int i = 0; i < (n + HUFFMAN_LANES - 1) / HUFFMAN_LANES; ++i)
            for (int l = 0; l < HUFFMAN_LANES; ++l) symbols[HUFFMAN_LANES * i + l] = bytes[l][i];
    }

    // As many with one load as should fit.
    template <class T>
    void decode_symbols(Lanes& lanes, int n, T* symbols) const {
        if (mean_bits_ <= 12) return decode_symbols<4>(lanes, n, symbols);
        if (mean_bits_ <= 24) return decode_symbols<2>(lanes, n, symbols);
        decode_symbols<1>(lanes, n, symbols);
    }

    template <int per_load, class T>
    [[gnu::noinline]] void decode_symbols(Lanes& lanes, int n, T* symbols) const {
        constexpr int STEP = per_load * HUFFMAN_LANES;
        const Symbol* table = symbols_;
        const uint8_t* in = lanes.in;
        Bits next[HUFFMAN_LANES];
        int i = 0;
        for (; i + STEP <= n; i += STEP) {
            for_lanes([&](int l) { next[l] = Bits(in, lanes.bits[l]); });
#pragma GCC unroll 4
            for (int k = 0; k < STEP; k += HUFFMAN_LANES)
                for_lanes([&](int l) { symbols[i + k + l] = take<T>(table, next[l]); });
            for_lanes([&](int l) {
                if (__builtin_expect(next[l].are_left(), 1))
                    lanes.bits[l] = next[l].end(lanes.bits[l]);
                else
                    lanes.bits[l] = one_by_one(per_load, in, lanes.bits[l], symbols + i + l);
            });
        }
        for (; i < n; ++i) {
            uint64_t& bit = lanes.bits[i % HUFFMAN_LANES];
            bit = one_by_one(1, in, bit, symbols + i);
        }
    }

    template <class T>
    static T take(const Symbol* symbols, Bits& next) {
        uint64_t word = next.word();
        Symbol symbol = symbols[word % HUFFMAN_WHOLE];
        next.take(symbol.bits);
        uint32_t value = symbol.base + uint32_t(bits_at(symbol.bits >> 8, word)) * 2;
        asm("" : "+r"(value));  // keeps gcc from gathering the lanes' symbols into vectors, which takes longer
        return T(value);
    }

    // The next `n` symbols of a lane; gives where it goes on.
    template <class T>
    [[gnu::noinline]] uint64_t one_by_one(int n, const uint8_t* in, uint64_t bit, T* symbols) const {
        for (int i = 0; i < n; ++i) {
            Bits next(in, bit);
            symbols[i * HUFFMAN_LANES] = take<T>(symbols_, next);
            bit = next.end(bit);
        }
        return bit;
    }

    const uint8_t *sizes_ = nullptr, *chunk_ = nullptr, *end_ = nullptr;  // chunk_: the one to decode next
    int64_t count_ = 0, mean_bits_ = 0;
    unsigned most_bits_ = 0;  // of the longest token that has a code
    unsigned width_ = 8;
    uint8_t lengths_[DIRECT];
    union {  // by the next bits
        Run runs_[2 * HUFFMAN_WHOLE];  // from HUFFMAN_WHOLE on
        Symbol symbols_[HUFFMAN_WHOLE];
    };
};

}  // namespace
