// The selector: which coder and predictor AUTO means for a frame, from a sample of its codes, in integers.
// ../reference/select.py specifies it.
#pragma once

#include "../common/format.h"
#include "huffman_code.h"
#include "tokens.h"

namespace {

using namespace ncz;

constexpr int64_t MOST_SAMPLED = PIECE * SAMPLE_PIECES;

struct Choice {
    int32_t coder, predictor;
    uint32_t mode;  // for RANS
};

// Calls function(first element, length) for each piece of `count` elements that the selector looks at.
template <class Function>
void for_each_piece(int64_t count, Function function) {
    int64_t pieces = (count + PIECE - 1) / PIECE, taken = pieces < SAMPLE_PIECES ? pieces : SAMPLE_PIECES;
    for (int64_t i = 0; i < taken; ++i) {
        int64_t first = PIECE * (pieces <= SAMPLE_PIECES ? i : i * (pieces - 1) / (SAMPLE_PIECES - 1));
        function(first, int(count - first < PIECE ? count - first : PIECE));
    }
}

// log2 of positive numbers, times 65536, rounded down: digit by digit (Knuth, TAOCP 1, 1.2.2, exercise 25), of all at
// once, as one digit waits for the other.
inline void log2_of(const uint32_t* numbers, int n, uint32_t* logs) {
    uint32_t x[BYTE_VALUES + 1];  // in 1.31 bits, from 1 to 2
    for (int i = 0; i < n; ++i) {
        logs[i] = 31 - unsigned(__builtin_clz(numbers[i]));
        x[i] = numbers[i] << (31 - logs[i]);
    }
    for (int digit = 0; digit < 16; ++digit)
        for (int i = 0; i < n; ++i) {
            uint64_t square = uint64_t(x[i]) * x[i] >> 31;
            bool is_two = square >> 32;
            logs[i] = 2 * logs[i] + is_two;
            x[i] = uint32_t(is_two ? square >> 1 : square);
        }
}

// The costs of a sample of codes with one predictor.
class Sample {
  public:
    // `codes`: pieces in a row; only the last may be short.
    Sample(const int32_t* codes, int n, int32_t predictor) : n_(n) {
        auto zigzag = [](uint32_t code) { return code << 1 ^ uint32_t(int32_t(code) >> 31); };
        for (int i = 1; i < n; ++i)
            symbols_[i] = zigzag(uint32_t(codes[i]) - (predictor == DELTA ? uint32_t(codes[i - 1]) : 0));
        for (int i = 0; i < n; i += PIECE) symbols_[i] = predictor == DELTA ? 0 : zigzag(uint32_t(codes[i]));
        tokens_of(symbols_, n, tokens_);
        ByteCounts counts;
        counts.add(tokens_, n);
        for (unsigned t = 0; t < TOKENS; ++t) counts_[t] = uint32_t(counts.of(t));
        for (uint32_t t = 1; t < DIRECT; ++t)
            if (counts_[t] > counts_[mode_]) mode_ = t;
        memset(tokens_ + n, int(mode_), OCTET);
    }

    uint32_t mode() const { return mode_; }

    // Picoseconds for a frame of `count` codes.
    int64_t cost(int32_t coder, int64_t count, const SelectorCosts& costs) const {
        int64_t chunks = chunks_of(count), pages = (count + RANS_PAGE - 1) / RANS_PAGE, n = n_ ? n_ : 1;
        auto sum = [&](int64_t bits, int64_t bytes, int64_t picoseconds) {
            return costs.link * (bits * count / (8 * n) + bytes) + picoseconds;
        };
        switch (coder) {
            case FIXED: return sum(fixed_bits(), 2 * chunks, costs.fixed * count);
            case RAW: return sum(int64_t(raw_width()) * n_, 0, costs.raw * count);
            case HUFFMAN: {
                HuffmanCode code;
                code.make(counts_);
                int64_t bits = 0;
                for (unsigned t = 0; t < TOKENS; ++t) bits += int64_t(counts_[t]) * (code.length(t) + extra_bits_of(t));
                return sum(bits, 10 * chunks + code.bytes(), costs.huffman * count);
            }
            default: {
                int64_t kinds = 0, bits = rans_bits(kinds), rest = n_ - int64_t(counts_[mode_]);
                int64_t picoseconds = costs.rans * count + costs.rans_rest * (count * rest / n);
                return sum(bits, 66 + 2 * kinds + 20 * pages, picoseconds);
            }
        }
    }

  private:
    int64_t fixed_bits() const {
        int64_t bits = 0;
        for (int first = 0; first < n_; first += BLOCK) {
            int n = n_ - first < BLOCK ? n_ - first : BLOCK;
            uint32_t all = 0;
            for (int i = first; i < first + n; ++i) all |= symbols_[i];
            bits += 8 * (1 + (n + OCTET - 1) / OCTET * bit_length(all));
        }
        return bits;
    }

    unsigned raw_width() const {
        uint32_t all = 0;
        for (int i = 0; i < n_; ++i) all |= symbols_[i];
        return raw_width_of(unsigned(bit_length(all)));
    }

    // Of masks and tokens; adds how many kinds there are of both.
    int64_t rans_bits(int64_t& kinds) const {
        constexpr uint64_t ones = 0x0101010101010101u;
        uint32_t masks[BYTE_VALUES] = {}, others[TOKENS];
        for (int i = 0; i < n_; i += OCTET) {
            uint64_t octet = load64(tokens_ + i) ^ ones * mode_;
            uint64_t differs = (((octet & ones * 0x7f) + ones * 0x7f) | octet) >> 7 & ones;
            ++masks[differs * 0x0102040810204080u >> 56];
        }
        memcpy(others, counts_, sizeof others);
        others[mode_] = 0;
        int64_t extra = 0, mask_kinds = 0;
        for (unsigned t = 0; t < TOKENS; ++t) extra += int64_t(others[t]) * extra_bits_of(t);
        int64_t mask_bits = entropy(masks, BYTE_VALUES, mask_kinds);
        kinds += mask_kinds;
        // A small sample has less entropy than the data it is taken from.
        return mask_bits + 3 * (mask_kinds ? mask_kinds - 1 : 0) / 4 + entropy(others, TOKENS, kinds) + extra;
    }

    // Bits of all that was counted; adds how many kinds there are.
    static int64_t entropy(const uint32_t* counts, int values, int64_t& kinds) {
        uint32_t numbers[BYTE_VALUES + 1], logs[BYTE_VALUES + 1], total = 0;
        int n = 0;
        for (int v = 0; v < values; ++v) {
            numbers[n] = counts[v];
            n += counts[v] > 0;
            total += counts[v];
        }
        if (!n) return 0;
        numbers[n] = total;
        log2_of(numbers, n + 1, logs);
        int64_t bits = 0;
        for (int i = 0; i < n; ++i) bits += int64_t(numbers[i]) * (logs[n] - logs[i]);
        kinds += n;
        return bits >> 16;
    }

    static int bit_length(uint32_t symbol) { return symbol ? 32 - __builtin_clz(symbol) : 0; }

    int n_;
    uint32_t mode_ = 0, symbols_[MOST_SAMPLED], counts_[TOKENS];
    uint8_t tokens_[MOST_SAMPLED + OCTET];
};

// What `coding` means for a frame of `count` codes, of which `codes` are the `n` of its pieces.
inline Choice choose(const int32_t* codes, int n, int64_t count, const Coding& coding) {
    const int32_t coders[] = {FIXED, RAW, HUFFMAN, RANS}, predictors[] = {NONE, DELTA};  // the first wins a tie
    bool is_settled = coding.coder != AUTO_CODER && coding.predictor != AUTO_PREDICTOR;
    Choice best = {};
    int64_t lowest_cost = INT64_MAX;
    int best_place = 0;
    for (int32_t predictor : predictors) {
        if (coding.predictor != AUTO_PREDICTOR && coding.predictor != predictor) continue;
        Sample sample(codes, n, predictor);
        for (int place = 0; place < 4; ++place) {
            int32_t coder = coders[place];
            if (coding.coder != AUTO_CODER && coding.coder != coder) continue;
            int64_t cost = is_settled ? 0 : sample.cost(coder, count, coding.costs);
            if (cost > lowest_cost || (cost == lowest_cost && place >= best_place)) continue;
            best = {coder, predictor, sample.mode()};
            lowest_cost = cost;
            best_place = place;
        }
    }
    return best;
}

}  // namespace
