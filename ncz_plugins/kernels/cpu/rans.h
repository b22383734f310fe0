// The coder RANS: masks of eight symbols, tokens for those that differ from the mode, both by range asymmetric numeral
// systems (Duda 2009; Giesen, "Interleaved entropy coders", 2014). docs/reference/wire-format.md specifies it.
//
// Needs bytes_of_mask, compact_bytes and expand_bytes of the file that includes this.
#pragma once

#include "bits.h"
#include "../common/format.h"
#include "symbols.h"
#include "tokens.h"

namespace {

using namespace ncz;

constexpr uint32_t RANS_WHOLE = 1 << RANS_BITS;
constexpr int64_t RANS_PAGE_MASKS = RANS_PAGE / OCTET;
constexpr int64_t RANS_STATE_BYTES = 4 * RANS_LANES;  // of a page
constexpr int64_t MOST_EXTRA_BITS = 32 - 1 - BITS_IN_TOKEN;
constexpr uint64_t ONES = 0x0101010101010101u;  // in each byte

inline int64_t masks_of(int64_t count) { return (count + OCTET - 1) / OCTET; }

// Whether any of eight tokens has.
inline bool has_extra_bits(uint64_t octet) { return octet & DIRECT * ONES; }

// ------------------------------------------------------------------ frequencies

// Of each value in RANS_WHOLE; all 0 if there are no values.
struct Frequencies {
    uint16_t of[BYTE_VALUES] = {};

    void normalise(const ByteCounts& counts) {
        uint64_t total = 0;
        for (int v = 0; v < BYTE_VALUES; ++v) total += counts.of(v);
        if (!total) return;
        uint32_t sum = 0;
        for (int v = 0; v < BYTE_VALUES; ++v) {
            uint64_t count = counts.of(v), share = count * RANS_WHOLE / total;
            of[v] = uint16_t(share ? share : count ? 1 : 0);
            sum += of[v];
        }
        if (sum < RANS_WHOLE) of[highest()] += uint16_t(RANS_WHOLE - sum);
        for (; sum > RANS_WHOLE; --sum) --of[highest()];
    }

    int64_t bytes() const {
        int64_t values = 0;
        for (uint16_t frequency : of) values += frequency != 0;
        return BYTE_VALUES / 8 + 2 * values;
    }

    uint8_t* write(uint8_t* out) const {
        uint8_t* occurs = out;
        memset(occurs, 0, BYTE_VALUES / 8);
        out += BYTE_VALUES / 8;
        for (int v = 0; v < BYTE_VALUES; ++v) {
            if (!of[v]) continue;
            occurs[v / 8] |= uint8_t(1 << v % 8);
            memcpy(out, of + v, 2);
            out += 2;
        }
        return out;
    }

    // 0, or what is wrong with those that begin at `in`, which it moves behind them. None at all are valid.
    int64_t read(const uint8_t*& in, const uint8_t* end, int values) {
        if (end - in < BYTE_VALUES / 8) return damaged(RANS_TABLE);
        const uint8_t* occurs = in;
        in += BYTE_VALUES / 8;
        uint32_t sum = 0;
        bool is_valid = true;
        for (int v = 0; v < BYTE_VALUES; ++v) {
            if (!(occurs[v / 8] >> v % 8 & 1)) continue;
            if (v >= values || end - in < 2) return damaged(RANS_TABLE);
            memcpy(of + v, in, 2);
            in += 2;
            sum += of[v];
            is_valid &= of[v] != 0;
        }
        bool is_empty = in - occurs == BYTE_VALUES / 8;
        return is_valid && (is_empty || sum == RANS_WHOLE) ? 0 : damaged(RANS_FREQUENCIES);
    }

  private:
    int highest() const {
        int best = 0;
        for (int v = 1; v < BYTE_VALUES; ++v)
            if (of[v] > of[best]) best = v;
        return best;
    }
};

// ------------------------------------------------------------------ encoding

// What encoding a value does to a state.
struct RansStep {
    uint64_t reciprocal;
    uint32_t frequency;
    uint16_t complement, start;

    // A state is below 2**20 times the frequency when it is divided. With that, x * reciprocal stays below 2**64, and
    // exceeds 2**44 * x / frequency by less than 2**44 / frequency: the quotient is exact.
    static constexpr int SHIFT = 44;

    void put(uint32_t& state, uint16_t*& words) const {
        bool full = state >> (32 - RANS_BITS) >= frequency;
        words[-1] = uint16_t(state);
        words -= full;
        uint32_t x = full ? state >> 16 : state;
        uint32_t quotient = uint32_t(x * reciprocal >> SHIFT);
        state = x + start + quotient * complement;
    }
};

struct RansSteps {
    RansStep of[BYTE_VALUES];

    explicit RansSteps(const Frequencies& frequencies) {
        uint32_t start = 0;
        for (int v = 0; v < BYTE_VALUES; ++v) {
            uint32_t frequency = frequencies.of[v];
            if (!frequency) continue;
            of[v].reciprocal = (uint64_t(1) << RansStep::SHIFT) / frequency + 1;
            of[v].frequency = frequency;
            of[v].complement = uint16_t(RANS_WHOLE - frequency);
            of[v].start = uint16_t(start);
            start += frequency;
        }
    }

    // Takes `values` from the last to the first, and writes downwards from `words`; gives the first word.
    uint16_t* put(const uint8_t* values, int64_t n, uint32_t (&states)[RANS_LANES], uint16_t* words) const {
        while (n % RANS_LANES) --n, of[values[n]].put(states[n % RANS_LANES], words);
        uint32_t x0 = states[0], x1 = states[1], x2 = states[2], x3 = states[3];
        for (; n; n -= RANS_LANES) {
            of[values[n - 1]].put(x3, words);
            of[values[n - 2]].put(x2, words);
            of[values[n - 3]].put(x1, words);
            of[values[n - 4]].put(x0, words);
        }
        states[0] = x0, states[1] = x1, states[2] = x2, states[3] = x3;
        return words;
    }
};

// In two steps, as frequencies are those of the whole frame: `add` for each page in order, then `write`.
class RansEncoder {
  public:
    static constexpr int64_t UNIT = RANS_PAGE;

    RansEncoder(KeptSymbols<UNIT>& kept, uint32_t mode) : kept_(kept), mode_(mode) {}

    // The symbols of a page.
    [[gnu::noinline]] void add(const uint32_t* symbols, int n) {
        uint8_t tokens[RANS_PAGE];
        uint32_t all = tokens_of(symbols, n, tokens);
        uint8_t page[PAGE_BYTES];
        int64_t masks = masks_of(n), differing;
        // A guess by the page before: whether to look for octets without a differing symbol, four at a time.
        differing = differing_before_ < n / 32 ? split<true>(tokens, n, page) : split<false>(tokens, n, page);
        differing_before_ = differing;
        mask_counts_.add(page, masks);
        token_counts_.add(page + masks, differing);
        int64_t p = kept_.added();
        unsigned width = all < DIRECT ? 8 : all < 1 << 16 ? 16 : 32;
        kept_.add(symbols, tokens, width, n);
        kept_.note(p) = int32_t(differing);
        // Behind symbols of 32 bits there is no room: `write` splits their tokens again.
        if (width != 32) memcpy(kept_.rest(p), page, size_t(masks + differing));
    }

    // The payload's bytes; -1, and something in `out`, if there are more than `capacity`.
    [[gnu::noinline]] int64_t write(uint8_t* out, int64_t capacity) const {
        Frequencies masks, tokens;
        masks.normalise(mask_counts_);
        tokens.normalise(token_counts_);
        int64_t pages = kept_.units();
        if (1 + masks.bytes() + tokens.bytes() + pages * (4 + RANS_STATE_BYTES) > capacity) return -1;
        const uint8_t *payload = out, *end = out + capacity;
        *out++ = uint8_t(mode_);
        uint8_t* table = tokens.write(masks.write(out));
        out = table + 4 * pages;

        RansSteps mask_steps(masks), token_steps(tokens);
        for (int64_t p = 0; p < pages; ++p, table += 4) {
            int64_t bytes = write_page(p, mask_steps, token_steps, table, out, end - out);
            if (bytes < 0) return -1;
            out += bytes;
        }
        return out - payload;
    }

  private:
    static constexpr int64_t PAGE_BYTES = RANS_PAGE_MASKS + RANS_PAGE + SLACK;  // what `split` writes at most

    static bool are_modes(const uint8_t* four_octets, uint64_t modes) {
        uint64_t differ = 0;
        for (int k = 0; k < 4; ++k) differ |= load64(four_octets + k * OCTET) ^ modes;
        return !differ;
    }

    // Splits the tokens of a page into masks and, behind them, those that differ from the mode; gives how many these
    // are. Fills up the last octet with the mode.
    template <bool few_differ>
    int split(uint8_t* tokens, int n, uint8_t* page) const {
        for (int i = n; i % OCTET; ++i) tokens[i] = uint8_t(mode_);
        uint8_t *next_mask = page, *differing = page + masks_of(n), *next = differing;
        uint64_t modes = mode_ * ONES;
        for (int i = 0; i < n; i += OCTET) {
            if (few_differ) {
                while (i + 4 * OCTET <= n && are_modes(tokens + i, modes)) {
                    memset(next_mask, 0, 4);
                    next_mask += 4;
                    i += 4 * OCTET;
                }
                if (i >= n) break;
            }
            uint64_t octet = load64(tokens + i), differs = octet ^ modes;
            uint64_t chosen = (((differs & 0x7f * ONES) + 0x7f * ONES) | differs) >> 7 & ONES;
            *next_mask++ = uint8_t(chosen * 0x0102040810204080u >> 56);  // the ones as bits
            store64(next, compact_bytes(octet, chosen));
            next += chosen * ONES >> 56;  // their number
        }
        return int(next - differing);
    }

    // Page `p`, and its sizes into the table. As `write` in what it gives.
    int64_t write_page(int64_t p, const RansSteps& mask_steps, const RansSteps& token_steps, uint8_t* table,
                       uint8_t* out, int64_t capacity) const {
        uint8_t again[PAGE_BYTES], extra[RANS_PAGE * MOST_EXTRA_BITS / 8 + SLACK];
        int n = kept_.length(p);
        const uint8_t* page = kept_.rest(p);
        int64_t masks = masks_of(n), differing = kept_.note(p), extra_bytes = 0;
        if (kept_.width(p) == 16) extra_bytes = write_extra_bits(kept_.symbols<uint16_t>(p), n, extra);
        if (kept_.width(p) == 32) {
            uint8_t tokens[RANS_PAGE];
            auto symbols = kept_.symbols<uint32_t>(p);
            tokens_of(symbols, n, tokens);
            page = again;
            split<false>(tokens, n, again);
            extra_bytes = write_extra_bits(symbols, n, extra);
        }

        uint16_t buffer[1 + RANS_PAGE + RANS_PAGE_MASKS];  // one word at most for each step
        uint16_t* last = buffer + sizeof buffer / sizeof *buffer;
        uint32_t states[RANS_LANES] = {RANS_LOWEST, RANS_LOWEST, RANS_LOWEST, RANS_LOWEST};
        uint16_t* words = token_steps.put(page + masks, differing, states, last);
        words = mask_steps.put(page, masks, states, words);

        int64_t word_bytes = 2 * (last - words), bytes = RANS_STATE_BYTES + word_bytes + extra_bytes;
        if (bytes > capacity) return -1;
        store16(table, uint16_t(last - words));
        store16(table + 2, uint16_t(extra_bytes));
        memcpy(out, states, sizeof states);
        memcpy(out + RANS_STATE_BYTES, words, size_t(word_bytes));
        memcpy(out + RANS_STATE_BYTES + word_bytes, extra, size_t(extra_bytes));
        return bytes;
    }

    // Whether none of eight symbols has extra bits.
    static bool are_direct(const uint16_t* octet) {
        return ((load64(octet) | load64(octet + 4)) & 0xff80ff80ff80ff80u) == 0;
    }
    static bool are_direct(const uint32_t* octet) {
        uint64_t all = load64(octet) | load64(octet + 2) | load64(octet + 4) | load64(octet + 6);
        return (all & 0xffffff80ffffff80u) == 0;
    }

    // The extra bits of a page; gives how many bytes they take.
    template <class Symbol>
    static int64_t write_extra_bits(const Symbol* symbols, int n, uint8_t* extra) {
        uint8_t* out = extra;
        uint64_t bits = 0;
        unsigned filled = 0;  // below 8
        for (int i = 0; i < n;) {
            if (i + OCTET <= n && are_direct(symbols + i)) {
                i += OCTET;
                continue;
            }
            for (int end = i + OCTET < n ? i + OCTET : n; i < end; ++i) {
                unsigned extra_bits = extra_bits_of_symbol(symbols[i]);
                bits |= uint64_t(symbols[i] >> 1 & ((1u << extra_bits) - 1)) << filled;
                filled += extra_bits;
                store64(out, bits);
                out += filled / 8;
                bits >>= filled / 8 * 8;
                filled %= 8;
            }
        }
        return out + (filled > 0) - extra;
    }

    KeptSymbols<UNIT>& kept_;
    uint32_t mode_;
    int64_t differing_before_ = RANS_PAGE;  // in the page before
    ByteCounts mask_counts_, token_counts_;
};

// ------------------------------------------------------------------ decoding

// What a state becomes, by its slot, and the value: frequency - 1 in 12 bits, slot - start in 12, the value in 8.
struct RansSlots {
    uint32_t of[RANS_WHOLE];
    bool is_empty;
    bool is_steady;  // whether value 0 is so frequent that states hardly ever take a word

    void fill(const Frequencies& frequencies) {
        uint32_t* slot = of;
        for (uint32_t v = 0; v < BYTE_VALUES; ++v)
            for (uint32_t i = 0; i < frequencies.of[v]; ++i)
                *slot++ = (frequencies.of[v] - 1u) << 20 | i << 8 | v;
        is_empty = slot == of;
        is_steady = frequencies.of[0] >= RANS_WHOLE / 16 * 15;
    }
};

// Too large to be copied. Never reads outside the payload, whatever stands there.
class RansDecoder {
  public:
    static constexpr int64_t UNIT = RANS_PAGE;

    RansDecoder() {}
    RansDecoder(const RansDecoder&) = delete;

    // 0, or what is wrong with frequencies or sizes; the pages must not be decoded then.
    int64_t open(const uint8_t* payload, int64_t bytes, int64_t count) {
        payload_ = payload;
        bytes_ = bytes;
        count_ = count;
        mode_ = bytes ? payload[0] : DIRECT;
        if (mode_ >= DIRECT) return damaged(RANS_MODE, mode_);
        const uint8_t *in = payload + 1, *end = payload + bytes;
        Frequencies masks, tokens;
        if (int64_t wrong = masks.read(in, end, BYTE_VALUES)) return wrong;
        if (int64_t wrong = tokens.read(in, end, TOKENS)) return wrong;
        int64_t pages = units_of<UNIT>(count), sum = 0;
        if (end - in < 4 * pages) return damaged(RANS_NO_PAGES, end - in);
        sizes_ = in;
        page_ = in + 4 * pages - payload;
        for (int64_t p = 0; p < pages; ++p) sum += size_of(p).bytes();
        if (sum != bytes - page_) return damaged(RANS_PAGE_SUM, end - in);
        mask_slots_.fill(masks);
        token_slots_.fill(tokens);
        is_direct_ = true;
        for (unsigned t = DIRECT; t < TOKENS; ++t) is_direct_ &= !tokens.of[t];
        return 0;
    }

    // Bits of what `decode` writes: 8 if all symbols are below DIRECT, else 32.
    unsigned width() const { return is_direct_ ? 8 : 32; }

    // The symbols of a page, filled up to a whole octet, as integers of width() bits; false if they are damaged. Pages
    // are decoded in order.
    bool decode(int64_t page, void* symbols) {
        int n = length_of_unit<UNIT>(page, count_), octets = int(masks_of(n));
        PageSize size = size_of(page);
        uint32_t states[RANS_LANES];
        memcpy(states, payload_ + page_, sizeof states);
        int64_t at = page_ + RANS_STATE_BYTES, extra = at + 2 * size.words;
        page_ += size.bytes();

        uint8_t masks[RANS_PAGE_MASKS], tokens[RANS_PAGE + SLACK];
        if (mask_slots_.is_empty) return false;
        if (mask_slots_.is_steady)
            take_steadily(mask_slots_, octets, states, at, masks);
        else
            take(mask_slots_, octets, states, at, masks);
        if (n % OCTET && masks[octets - 1] >> n % OCTET) return false;
        int differ = 0, i = 0;
        for (; i + OCTET <= octets; i += OCTET) differ += __builtin_popcountll(load64(masks + i));
        for (; i < octets; ++i) differ += __builtin_popcount(masks[i]);
        if (differ && token_slots_.is_empty) return false;
        take(token_slots_, differ, states, at, tokens);
        if (at != extra) return false;
        for (uint32_t state : states)
            if (state != RANS_LOWEST) return false;

        if (is_direct_) {
            expand(masks, octets, tokens, static_cast<uint8_t*>(symbols));
            return size.extra_bytes == 0;
        }
        uint8_t all[RANS_PAGE];
        expand(masks, octets, tokens, all);
        return add_extra_bits(all, OCTET * octets, extra, size.extra_bytes, static_cast<uint32_t*>(symbols));
    }

  private:
    struct PageSize {
        uint16_t words, extra_bytes;
        int64_t bytes() const { return RANS_STATE_BYTES + 2 * words + extra_bytes; }
    };

    PageSize size_of(int64_t page) const { return {load16(sizes_ + 4 * page), load16(sizes_ + 4 * page + 2)}; }

    // The 64 bits from a byte of the payload on; zeros behind its end. (It has more than 8 bytes.)
    uint64_t load_at(int64_t at) const {
        int64_t left = bytes_ - at;
        if (left >= 8) return load64(payload_ + at);
        return left > 0 ? load64(payload_ + bytes_ - 8) >> (64 - 8 * left) : 0;
    }

    // The next `n` values; moves `at` behind the words that took. Without branches: which state takes a word is as hard
    // to foretell as the values are.
    void take(const RansSlots& slots, int n, uint32_t (&states)[RANS_LANES], int64_t& at, uint8_t* values) const {
        auto step = [&slots](uint32_t& state, uint64_t& words, unsigned& taken) {
            uint32_t slot = slots.of[state % RANS_WHOLE], whole = state / RANS_WHOLE;
            uint32_t x = whole * (slot >> 20) + whole + (slot >> 8) % RANS_WHOLE;
            asm("" : "+r"(x));  // or gcc puts the states into vectors, and is slower for it
            unsigned bits = x < RANS_LOWEST ? 16 : 0;
            state = x << bits | (uint32_t(words) & ((1u << bits) - 1));
            words >>= bits;
            taken += bits;
            return uint8_t(slot);
        };
        uint32_t x0 = states[0], x1 = states[1], x2 = states[2], x3 = states[3];
        int64_t bytes = at;
        int i = 0;
        for (; i + RANS_LANES <= n; i += RANS_LANES) {
            uint64_t words = load_at(bytes);
            unsigned taken = 0;
            values[i] = step(x0, words, taken);
            values[i + 1] = step(x1, words, taken);
            values[i + 2] = step(x2, words, taken);
            values[i + 3] = step(x3, words, taken);
            bytes += taken / 8;
        }
        states[0] = x0, states[1] = x1, states[2] = x2, states[3] = x3;
        uint64_t words = load_at(bytes);
        unsigned taken = 0;
        for (; i < n; ++i) values[i] = step(states[i % RANS_LANES], words, taken);
        at = bytes + taken / 8;
    }

    // The same where few states take words: with a branch that is foretold.
    void take_steadily(const RansSlots& slots, int n, uint32_t (&states)[RANS_LANES], int64_t& at,
                       uint8_t* values) const {
        auto step = [&slots](uint32_t state, uint8_t& value) {
            uint32_t slot = slots.of[state % RANS_WHOLE], whole = state / RANS_WHOLE;
            value = uint8_t(slot);
            return whole * (slot >> 20) + whole + (slot >> 8) % RANS_WHOLE;
        };
        auto refill = [this, &at](uint32_t& state) {
            if (state >= RANS_LOWEST) return;
            state = state << 16 | (uint32_t(load_at(at)) & 0xffff);
            at += 2;
        };
        uint32_t x0 = states[0], x1 = states[1], x2 = states[2], x3 = states[3];
        int i = 0;
        for (; i + RANS_LANES <= n; i += RANS_LANES) {
            x0 = step(x0, values[i]);
            x1 = step(x1, values[i + 1]);
            x2 = step(x2, values[i + 2]);
            x3 = step(x3, values[i + 3]);
            if (__builtin_expect((x0 < RANS_LOWEST) | (x1 < RANS_LOWEST) | (x2 < RANS_LOWEST) | (x3 < RANS_LOWEST), 0))
                refill(x0), refill(x1), refill(x2), refill(x3);
        }
        states[0] = x0, states[1] = x1, states[2] = x2, states[3] = x3;
        for (; i < n; ++i) {
            states[i % RANS_LANES] = step(states[i % RANS_LANES], values[i]);
            refill(states[i % RANS_LANES]);
        }
    }

    // The mode where the masks have 0, the tokens one by one where they have 1.
    template <bool is_steady>
    void expand_as(const uint8_t* masks, int octets, const uint8_t* tokens, uint8_t* out) const {
        for (int i = 0; i < octets; ++i) {
            // Where few symbols differ, eight octets at a time.
            if (is_steady) {
                while (i + OCTET <= octets && !load64(masks + i)) {
                    memset(out + OCTET * i, int(mode_), OCTET * OCTET);
                    i += OCTET;
                }
                if (i == octets) break;
            }
            uint64_t chosen = bytes_of_mask(masks[i]);
            store64(out + OCTET * i, expand_bytes(load64(tokens), chosen) | (ONES - chosen) * mode_);
            tokens += chosen * ONES >> 56;
        }
    }

    void expand(const uint8_t* masks, int octets, const uint8_t* tokens, uint8_t* out) const {
        mask_slots_.is_steady ? expand_as<true>(masks, octets, tokens, out)
                              : expand_as<false>(masks, octets, tokens, out);
    }

    // Tokens to symbols; `n` is a multiple of OCTET. False unless the extra bits fill `extra_bytes`.
    bool add_extra_bits(const uint8_t* tokens, int n, int64_t at, int64_t extra_bytes, uint32_t* symbols) const {
        int64_t bit = 0;
        for (int i = 0; i < n; i += OCTET) {
            if (!has_extra_bits(load64(tokens + i))) {
                uint8_t octet[OCTET];
                uint32_t wide[OCTET];  // of its own memory, or compilers don't vectorize the conversion
                memcpy(octet, tokens + i, sizeof octet);
                for (int k = 0; k < OCTET; ++k) wide[k] = octet[k];
                memcpy(symbols + i, wide, sizeof wide);
                continue;
            }
            for (int k = i; k < i + OCTET; ++k) {
                unsigned extra_bits = extra_bits_of(tokens[k]);
                uint64_t low = load_at(at + bit / 8) >> bit % 8 & ((uint64_t(1) << extra_bits) - 1);
                symbols[k] = base_of(tokens[k]) + (uint32_t(low) << 1);
                bit += extra_bits;
            }
        }
        if ((bit + 7) / 8 != extra_bytes) return false;
        return bit % 8 == 0 || payload_[at + bit / 8] >> bit % 8 == 0;
    }

    const uint8_t *payload_ = nullptr, *sizes_ = nullptr;
    int64_t bytes_ = 0, count_ = 0, page_ = 0;  // page_: where in the payload the page to decode next begins
    uint32_t mode_ = 0;
    bool is_direct_ = false;
    RansSlots mask_slots_, token_slots_;
};

}  // namespace
