// The coder RANS: masks of eight symbols, tokens for those that differ from the mode, both by range asymmetric numeral
// systems (Duda 2009; Giesen, "Interleaved entropy coders", 2014). docs/wire-format.md specifies it.
//
// Needs bytes_of_mask, compact_bytes and expand_bytes of the file that includes this.
#pragma once

#include "bits.h"
#include "format.h"
#include "tokens.h"

namespace {

using namespace ncz;

constexpr uint32_t RANS_WHOLE = 1 << RANS_BITS;
constexpr int64_t RANS_PAGE_MASKS = RANS_PAGE / OCTET;
constexpr int64_t RANS_STATE_BYTES = 4 * RANS_LANES;  // of a page
constexpr int64_t MOST_EXTRA_BITS = 32 - 1 - TOLD_BITS;
constexpr uint64_t ONES = 0x0101010101010101u;  // in each byte

inline int64_t pages_of(int64_t count) { return (count + RANS_PAGE - 1) / RANS_PAGE; }
inline int64_t masks_of(int64_t count) { return (count + OCTET - 1) / OCTET; }

inline int length_of_page(int64_t page, int64_t count) {
    int64_t left = count - page * RANS_PAGE;
    return int(left < RANS_PAGE ? left : RANS_PAGE);
}

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

    // Room for the masks, tokens and extra bits of all pages, and for what is stored behind them in whole words.
    static int64_t scratch_bytes(int64_t count) {
        int64_t extra = count * MOST_EXTRA_BITS / 8 + pages_of(count);
        return pages_of(count) * int64_t(sizeof(Page)) + masks_of(count) + count + SLACK + extra + SLACK;
    }

    RansEncoder(int64_t count, uint32_t mode, uint8_t* scratch) : count_(count), mode_(mode) {
        pages_ = scratch;
        masks_ = masks_end_ = pages_ + pages_of(count) * int64_t(sizeof(Page));
        tokens_ = tokens_end_ = masks_ + masks_of(count);
        extra_ = extra_end_ = tokens_ + count + SLACK;
    }

    // The symbols of a page.
    [[gnu::noinline]] void add(const uint32_t* symbols, int n) {
        uint8_t tokens[RANS_PAGE];
        bool is_direct = tokens_of(symbols, n, tokens);
        for (int i = n; i % OCTET; ++i) tokens[i] = uint8_t(mode_);
        const uint8_t *first_mask = masks_end_, *first_token = tokens_end_, *first_extra = extra_end_;
        for (int i = 0; i < n; i += OCTET) {
            uint64_t octet = load64(tokens + i), differing = octet ^ mode_ * ONES;
            uint64_t chosen = (((differing & 0x7f * ONES) + 0x7f * ONES) | differing) >> 7 & ONES;
            *masks_end_++ = uint8_t(chosen * 0x0102040810204080u >> 56);  // the ones as bits
            store64(tokens_end_, compact_bytes(octet, chosen));
            tokens_end_ += chosen * ONES >> 56;  // their number
        }
        if (!is_direct) add_extra_bits(symbols, tokens, n);
        mask_counts_.add(first_mask, masks_end_ - first_mask);
        token_counts_.add(first_token, tokens_end_ - first_token);
        Page page = {uint32_t(tokens_end_ - first_token), uint32_t(extra_end_ - first_extra)};
        memcpy(pages_ + added_++ * int64_t(sizeof page), &page, sizeof page);
    }

    // The payload's bytes; -1, and something in `out`, if there are more than `room`.
    int64_t write(uint8_t* out, int64_t room) const {
        Frequencies masks, tokens;
        masks.normalise(mask_counts_);
        tokens.normalise(token_counts_);
        if (1 + masks.bytes() + tokens.bytes() + added_ * (4 + RANS_STATE_BYTES) > room) return -1;
        const uint8_t *payload = out, *end = out + room;
        *out++ = uint8_t(mode_);
        uint8_t* table = tokens.write(masks.write(out));
        out = table + 4 * added_;

        RansSteps mask_steps(masks), token_steps(tokens);
        const uint8_t *next_mask = masks_, *next_token = tokens_, *next_extra = extra_;
        for (int64_t p = 0; p < added_; ++p) {
            Page page;
            memcpy(&page, pages_ + p * int64_t(sizeof page), sizeof page);
            int64_t page_masks = masks_of(length_of_page(p, count_));
            uint16_t buffer[1 + RANS_PAGE + RANS_PAGE_MASKS];  // one word at most for each step
            uint16_t* last = buffer + sizeof buffer / sizeof *buffer;
            uint32_t states[RANS_LANES] = {RANS_LOWEST, RANS_LOWEST, RANS_LOWEST, RANS_LOWEST};
            uint16_t* words = token_steps.put(next_token, page.tokens, states, last);
            words = mask_steps.put(next_mask, page_masks, states, words);

            int64_t word_bytes = 2 * (last - words);
            if (RANS_STATE_BYTES + word_bytes + page.extra_bytes > end - out) return -1;
            uint16_t sizes[2] = {uint16_t(last - words), uint16_t(page.extra_bytes)};
            memcpy(table + 4 * p, sizes, sizeof sizes);
            memcpy(out, states, sizeof states);
            memcpy(out + RANS_STATE_BYTES, words, size_t(word_bytes));
            memcpy(out + RANS_STATE_BYTES + word_bytes, next_extra, page.extra_bytes);
            out += RANS_STATE_BYTES + word_bytes + page.extra_bytes;
            next_mask += page_masks;
            next_token += page.tokens;
            next_extra += page.extra_bytes;
        }
        return out - payload;
    }

  private:
    struct Page {
        uint32_t tokens, extra_bytes;
    };

    void add_extra_bits(const uint32_t* symbols, const uint8_t* tokens, int n) {
        uint64_t bits = 0;
        unsigned filled = 0;  // below 8
        for (int i = 0; i < n; i += OCTET) {
            if (!has_extra_bits(load64(tokens + i))) continue;
            for (int k = i; k < i + OCTET && k < n; ++k) {
                unsigned extra_bits = extra_bits_of(tokens[k]);
                bits |= uint64_t(symbols[k] >> 1 & ((1u << extra_bits) - 1)) << filled;
                filled += extra_bits;
                store64(extra_end_, bits);
                extra_end_ += filled / 8;
                bits >>= filled / 8 * 8;
                filled %= 8;
            }
        }
        extra_end_ += filled > 0;
    }

    int64_t count_, added_ = 0;
    uint32_t mode_;
    uint8_t *pages_, *masks_, *masks_end_, *tokens_, *tokens_end_, *extra_, *extra_end_;
    ByteCounts mask_counts_, token_counts_;
};

// ------------------------------------------------------------------ decoding

// What a state becomes, by its slot, and the value: frequency - 1 in 12 bits, slot - start in 12, the value in 8.
struct RansSlots {
    uint32_t of[RANS_WHOLE];
    bool is_empty;

    void fill(const Frequencies& frequencies) {
        uint32_t* slot = of;
        for (uint32_t v = 0; v < BYTE_VALUES; ++v)
            for (uint32_t i = 0; i < frequencies.of[v]; ++i)
                *slot++ = (frequencies.of[v] - 1u) << 20 | i << 8 | v;
        is_empty = slot == of;
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
        int64_t pages = pages_of(count), sum = 0;
        if (end - in < 4 * pages) return damaged(RANS_NO_PAGES, end - in);
        sizes_ = in;
        page_ = first_page_ = in + 4 * pages - payload;
        at_ = 0;
        for (int64_t p = 0; p < pages; ++p) sum += size_of(p).bytes();
        if (sum != bytes - first_page_) return damaged(RANS_PAGE_SUM, end - in);
        mask_slots_.fill(masks);
        token_slots_.fill(tokens);
        is_direct_ = true;
        for (unsigned t = DIRECT; t < TOKENS; ++t) is_direct_ &= !tokens.of[t];
        return 0;
    }

    // Bits of what `decode` writes: 8 if all symbols are below DIRECT, else 32.
    unsigned width() const { return is_direct_ ? 8 : 32; }

    // The symbols of a page, filled up to a whole octet, as integers of width() bits; false if they are damaged. Pages
    // are found fastest in order.
    bool decode(int64_t page, void* symbols) {
        seek(page);
        int n = length_of_page(page, count_), octets = int(masks_of(n));
        PageSize size = size_of(page);
        uint32_t states[RANS_LANES];
        memcpy(states, payload_ + page_, sizeof states);
        int64_t at = page_ + RANS_STATE_BYTES, extra = at + 2 * size.words;

        uint8_t masks[RANS_PAGE_MASKS], tokens[RANS_PAGE + SLACK];
        if (mask_slots_.is_empty) return false;
        take(mask_slots_, octets, states, at, masks);
        if (n % OCTET && masks[octets - 1] >> n % OCTET) return false;
        int differ = 0;
        for (int i = 0; i < octets; ++i) differ += int(bytes_of_mask(masks[i]) * ONES >> 56);
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

    PageSize size_of(int64_t page) const {
        PageSize size;
        memcpy(&size, sizes_ + 4 * page, sizeof size);
        return size;
    }

    void seek(int64_t page) {
        if (page < at_) {
            at_ = 0;
            page_ = first_page_;
        }
        while (at_ < page) page_ += size_of(at_++).bytes();
    }

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

    // The mode where the masks have 0, the tokens one by one where they have 1.
    void expand(const uint8_t* masks, int octets, const uint8_t* tokens, uint8_t* out) const {
        for (int i = 0; i < octets; ++i) {
            uint64_t chosen = bytes_of_mask(masks[i]);
            store64(out + OCTET * i, expand_bytes(load64(tokens), chosen) | (ONES - chosen) * mode_);
            tokens += chosen * ONES >> 56;
        }
    }

    // Tokens to symbols; `n` is a multiple of OCTET. False unless the extra bits fill `extra_bytes`.
    bool add_extra_bits(const uint8_t* tokens, int n, int64_t at, int64_t extra_bytes, uint32_t* symbols) const {
        int64_t bit = 0;
        for (int i = 0; i < n; i += OCTET) {
            if (!has_extra_bits(load64(tokens + i))) {
                for (int k = i; k < i + OCTET; ++k) symbols[k] = tokens[k];
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
    int64_t bytes_ = 0, count_ = 0, first_page_ = 0;
    uint32_t mode_ = 0;
    bool is_direct_ = false;
    RansSlots mask_slots_, token_slots_;

    int64_t at_ = 0, page_ = 0;  // the page that lies at payload_ + page_
};

}  // namespace
