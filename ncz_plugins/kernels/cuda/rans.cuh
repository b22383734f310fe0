// The coder RANS: masks of eight symbols, tokens for those that differ from the mode, both by range asymmetric numeral
// systems. docs/reference/wire-format.md specifies it; ../cpu/rans.h is the same for host memory.
//
//     ncz_rans_collect   a block for each page   masks, tokens and extra bits, and their counts; the last block makes
//                                                all frequencies and writes them
//     ncz_rans_encode    a warp for each page    makes words of masks and tokens, then puts the page into its place
//     decode_rans        in ncz_open, page by page
//
// A page's words come from four states in turn, so four lanes of a warp work on them. All lanes share the rest of the
// work on a page, before and after.
#pragma once

#include "select.cuh"

constexpr uint32_t RANS_WHOLE = 1u << RANS_BITS;
constexpr int PAGE_MASKS = int(RANS_PAGE) / OCTET;
constexpr int STATE_BYTES = 4 * RANS_LANES;  // of a page
constexpr int PAGE_WORDS = int(RANS_PAGE) + PAGE_MASKS;  // one at most for each value
constexpr int MOST_EXTRA_BITS = 32 - 1 - BITS_IN_TOKEN;
constexpr int EXTRA_WORDS = int(RANS_PAGE) * MOST_EXTRA_BITS / 32;


NCZ_DEVICE int length_of_page(int64_t page, int64_t count) {
    int64_t left = count - page * RANS_PAGE;
    return int(left < RANS_PAGE ? left : RANS_PAGE);
}

// ------------------------------------------------------------------ frequencies

static_assert(THREADS == BYTE_VALUES, "a block has one thread for each value");

// The frequency in RANS_WHOLE of this thread's value, if it occurs `count` times; all 0 if there are no values.
NCZ_DEVICE uint32_t normalise(uint32_t count, uint64_t* scratch) {
    uint64_t total = block_sum(uint64_t(count), scratch);
    if (!total) return 0;
    uint32_t share = uint32_t(count * uint64_t(RANS_WHOLE) / total), frequency = share ? share : count > 0;
    auto sum_of = [scratch](uint32_t value) { return block_sum(value, reinterpret_cast<uint32_t*>(scratch)); };
    uint32_t sum = sum_of(frequency), value = threadIdx.x;
    if (sum <= RANS_WHOLE) {
        uint32_t key = frequency * BYTE_VALUES + (BYTE_VALUES - 1 - value);  // the lowest value wins a tie
        if (block_max(key, reinterpret_cast<uint32_t*>(scratch)) == key) frequency += RANS_WHOLE - sum;
        return frequency;
    }
    // Taking one by one from the highest brings all that are higher down to one level, and then some, the lowest values
    // first, by one more. So find the lowest level that does not take too much.
    uint32_t missing = sum - RANS_WHOLE, low = 0, high = RANS_WHOLE;  // levels that take too much, and do not
    while (high - low > 1) {
        uint32_t level = (low + high) / 2;
        if (sum_of(frequency > level ? frequency - level : 0) > missing)
            low = level;
        else
            high = level;
    }
    missing -= sum_of(frequency > high ? frequency - high : 0);
    uint32_t levelled = frequency < high ? frequency : high, all;
    uint32_t before = block_exclusive_sum(uint32_t(levelled == high), reinterpret_cast<uint32_t*>(scratch), all);
    return levelled - (levelled == high && before < missing);
}

// Bytes of the frequencies of as many kinds of values.
NCZ_DEVICE int frequency_bytes(int kinds) { return BYTE_VALUES / 8 + 2 * kinds; }

// By the block, from this thread's frequency on. `kind`: how many values that occur are lower.
NCZ_DEVICE void write_frequencies(uint8_t* out, uint32_t frequency, int kind) {
    unsigned occur = __ballot_sync(ALL_LANES, frequency > 0);
    if (lane() == 0) store32(out + 4 * warp(), occur);
    if (frequency) store16(out + frequency_bytes(kind), frequency);
}

// ------------------------------------------------------------------ encoding

// What encoding a value does to a state.
struct alignas(16) RansStep {
    uint64_t reciprocal;
    uint32_t frequency;
    uint16_t complement, start;

    // A state is below 2**20 times the frequency when it is divided. With that, x * reciprocal stays below 2**64, and
    // exceeds 2**44 * x / frequency by less than 2**44 / frequency: the quotient is exact.
    static constexpr int SHIFT = 44;

    NCZ_DEVICE uint32_t next(uint32_t state) const {
        uint32_t quotient = uint32_t(state * reciprocal >> SHIFT);
        return state + start + quotient * complement;
    }
};

// What the kernels of one frame tell each other. Zeroed before the first.
struct RansEncoding {
    RansStep mask_steps[BYTE_VALUES], token_steps[BYTE_VALUES];
    uint32_t mask_counts[BYTE_VALUES], token_counts[BYTE_VALUES];
    uint32_t table;  // where in the payload the pages' sizes are
    uint32_t unused[3];
};
static_assert(sizeof(RansEncoding) == 10256, "as frames.py has it");

// A page on its way to the frame.
struct alignas(16) RansPage {
    int32_t tokens, extra_bits;  // how many
    uint32_t masks[PAGE_MASKS / 4];
    uint8_t token[RANS_PAGE];
    uint32_t extra[EXTRA_WORDS];
    uint16_t words[PAGE_WORDS];  // filled from the end
};
static_assert(sizeof(RansPage) == 7 * RANS_PAGE + 16, "as frames.py has it");

// A piece's pages among those of all pieces: each has room for one more than the chunks before it fill.
NCZ_DEVICE RansPage* pages_for(const Piece& piece, int f, RansPage* pages) {
    return pages + piece.first_chunk / (RANS_PAGE / CHUNK) + f;
}

NCZ_DEVICE void make_step(uint32_t frequency, uint32_t start, RansStep& step) {
    if (!frequency) return;
    step.reciprocal = (uint64_t(1) << RansStep::SHIFT) / frequency + 1;
    step.frequency = frequency;
    step.complement = uint16_t(RANS_WHOLE - frequency);
    step.start = uint16_t(start);
}

// The frequencies of all pages, for the kernel that encodes and for the frame; or RAW, if that is smaller for certain.
NCZ_DEVICE void make_frequencies(RansEncoding& encoding, int64_t count, Choice& choice, uint8_t* frame,
                                 uint64_t* scratch) {
    int value = int(threadIdx.x), mask_kinds, token_kinds;
    uint32_t all, *sums = reinterpret_cast<uint32_t*>(scratch);
    uint32_t mask = normalise(encoding.mask_counts[value], scratch);
    uint32_t token = normalise(encoding.token_counts[value], scratch);
    make_step(mask, block_exclusive_sum(mask, sums, all), encoding.mask_steps[value]);
    make_step(token, block_exclusive_sum(token, sums, all), encoding.token_steps[value]);
    int mask_kind = block_exclusive_sum(int(mask > 0), reinterpret_cast<int*>(scratch), mask_kinds);
    int token_kind = block_exclusive_sum(int(token > 0), reinterpret_cast<int*>(scratch), token_kinds);

    int table = 1 + frequency_bytes(mask_kinds) + frequency_bytes(token_kinds);
    bool has_room = table + pages_of(count) * (4 + STATE_BYTES) <= count;
    uint8_t* payload = frame + HEADER_BYTES;
    if (has_room) {
        write_frequencies(payload + 1, mask, mask_kind);
        write_frequencies(payload + 1 + frequency_bytes(mask_kinds), token, token_kind);
    }
    if (value) return;
    if (has_room) {
        payload[0] = uint8_t(choice.mode);
        encoding.table = uint32_t(table);
    } else {
        choice.coder = PLANES;
    }
}

// Each warp takes so many elements of a page, row by row.
constexpr int COLLECTED = int(RANS_PAGE) / WARPS;
constexpr int COLLECTED_ROWS = COLLECTED / WARP;

// One row of a page of `n` codes: which symbol this lane has, and whether it differs from the mode.
struct RansRow {
    uint32_t symbol;
    bool differs;

    NCZ_DEVICE RansRow(const int32_t* codes, int i, int n, const Choice& choice) : symbol(0), differs(false) {
        if (i >= n) return;
        symbol = symbol_at(codes, i, i / CHUNK * CHUNK, choice.predictor);
        differs = symbol != uint32_t(choice.mode);
    }
};

// How many tokens and extra bits a warp's part of a page has; their counts, and masks for the page.
NCZ_DEVICE void count_part(const int32_t* codes, int n, const Choice& choice, RansPage& page, uint32_t* mask_counts,
                           uint32_t* token_counts, int& tokens, int& extra_bits) {
    unsigned own_masks[COLLECTED_ROWS / WARP];
    tokens = extra_bits = 0;
    int first = warp() * COLLECTED;
    for (int half = 0; half < COLLECTED_ROWS / WARP; ++half) {
        own_masks[half] = 0;
        for (int row = 0; row < WARP; ++row) {
            RansRow of(codes, first + (half * WARP + row) * WARP + lane(), n, choice);
            unsigned differ = __ballot_sync(ALL_LANES, of.differs);
            if (lane() == row) own_masks[half] = differ;
            tokens += __popc(differ);
            if (!of.differs) continue;
            unsigned token = token_of(of.symbol);
            atomicAdd(token_counts + token, 1u);
            extra_bits += int(extra_bits_of(token));
        }
        int own_row = first / WARP + half * WARP + lane();
        page.masks[own_row] = own_masks[half];
        for (int k = 0; k < OCTETS; ++k)
            if ((own_row * OCTETS + k) * OCTET < n) atomicAdd(mask_counts + (own_masks[half] >> 8 * k & 0xffu), 1u);
    }
    extra_bits = warp_sum(extra_bits);
}

// The tokens and the extra bits of a warp's part of a page, behind those of the parts before it.
NCZ_DEVICE void write_part(const int32_t* codes, int n, const Choice& choice, RansPage& page, int tokens,
                           int extra_bits, bool has_extra_bits) {
    int first = warp() * COLLECTED;
    for (int row = 0; row < COLLECTED_ROWS; ++row) {
        RansRow of(codes, first + row * WARP + lane(), n, choice);
        unsigned differ = __ballot_sync(ALL_LANES, of.differs), token = token_of(of.symbol);
        if (of.differs) page.token[tokens + __popc(differ & ((1u << lane()) - 1))] = uint8_t(token);
        tokens += __popc(differ);
        if (!has_extra_bits) continue;
        int own = of.differs ? int(extra_bits_of(token)) : 0, inclusive = warp_inclusive_sum(own);
        if (own) {
            BitWriter bits(page.extra, unsigned(extra_bits + inclusive - own));
            bits.put(extra_of(of.symbol, unsigned(own)), unsigned(own));
            bits.end();
        }
        extra_bits += __shfl_sync(ALL_LANES, inclusive, WARP - 1);
    }
}

NCZ_KERNEL(ncz_rans_collect)
(const __grid_constant__ Pieces pieces, Written* written, RansEncoding* encodings, RansPage* pages) {
    NCZ_SHARED(uint32_t, mask_counts, BYTE_VALUES);
    NCZ_SHARED(uint32_t, token_counts, BYTE_VALUES);
    NCZ_SHARED(uint64_t, scratch, WARPS);
    NCZ_SHARED(int, is_last, 1);
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    int64_t number = unit_number(pieces.n), count = piece.count, blocks = count ? pages_of(count) : 1;
    if (number >= blocks || written[f].choice.coder != RANS) return;
    Choice chosen = written[f].choice;
    RansEncoding& encoding = encodings[f];
    mask_counts[threadIdx.x] = token_counts[threadIdx.x] = 0;
    __syncthreads();
    int n = length_of_page(number, count), tokens, extra_bits, all_tokens, all_extra_bits;
    const int32_t* codes = piece.codes + number * RANS_PAGE;
    if (n > 0) {
        RansPage& page = pages_for(piece, f, pages)[number];
        count_part(codes, n, chosen, page, mask_counts, token_counts, tokens, extra_bits);
        int* sums = reinterpret_cast<int*>(scratch);
        int tokens_before = block_exclusive_sum(lane() ? 0 : tokens, sums, all_tokens);
        int extra_before = block_exclusive_sum(lane() ? 0 : extra_bits, sums, all_extra_bits);
        for (int i = int(threadIdx.x); 32 * i < all_extra_bits; i += THREADS) page.extra[i] = 0;
        if (threadIdx.x == 0) {
            page.tokens = all_tokens;
            page.extra_bits = all_extra_bits;
        }
        __syncthreads();
        tokens_before = __shfl_sync(ALL_LANES, tokens_before, 0);
        extra_before = __shfl_sync(ALL_LANES, extra_before, 0);
        write_part(codes, n, chosen, page, tokens_before, extra_before, all_extra_bits > 0);
    }
    if (mask_counts[threadIdx.x]) atomicAdd(encoding.mask_counts + threadIdx.x, mask_counts[threadIdx.x]);
    if (token_counts[threadIdx.x]) atomicAdd(encoding.token_counts + threadIdx.x, token_counts[threadIdx.x]);
    if (finished_last(&written[f].counted, blocks, is_last))
        make_frequencies(encoding, count, written[f].choice, piece.frame, scratch);
}

// Takes `n` values, four to a word, from the last to the first, by a warp whose lane l has the state of values l, l + 4
// and so on. Their words end at `words + at`; gives where they begin.
NCZ_DEVICE int put_values(const RansStep* steps, const uint32_t* values, int n, uint32_t& state, uint16_t* words,
                          int at) {
    int rounds = (n + RANS_LANES - 1) / RANS_LANES;
    for (int first = (rounds - 1) / WARP * WARP; first >= 0; first -= WARP) {
        int in_tile = rounds - first < WARP ? rounds - first : WARP;
        uint32_t fours = lane() < in_tile ? values[first + lane()] : 0;  // a round's in each lane
        for (int i = in_tile - 1; i >= 0; --i) {
            uint32_t four = __shfl_sync(ALL_LANES, fours, i);
            RansStep step = steps[four >> 8 * (lane() % RANS_LANES) & 0xffu];
            bool is_active = lane() < RANS_LANES && RANS_LANES * (first + i) + lane() < n;
            bool is_full = is_active && state >> (32 - RANS_BITS) >= step.frequency;
            unsigned full = __ballot_sync(ALL_LANES, is_full);
            if (is_full) {
                words[at - __popc(full >> lane())] = uint16_t(state);  // that of the last lane is last
                state >>= 16;
            }
            at -= __popc(full);
            if (is_active) state = step.next(state);
        }
    }
    return at;
}

constexpr int RANS_ENCODERS = WARP;  // threads of a block

NCZ_KERNEL_OF(RANS_ENCODERS, 16, ncz_rans_encode)
(const __grid_constant__ Pieces pieces, Written* written, const RansEncoding* encodings, RansPage* pages,
 unsigned long long* places, long long* sizes) {
    NCZ_SHARED(RansStep, mask_steps, BYTE_VALUES);
    NCZ_SHARED(RansStep, token_steps, BYTE_VALUES);
    NCZ_SHARED(int64_t, shared_number, 1);
    NCZ_SHARED(int, is_last, 1);
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    int64_t count = piece.count, blocks = pages_of(count);
    if (unit_number(pieces.n) >= blocks) return;
    Choice& choice = written[f].choice;
    if (choice.coder != RANS) return;
    const RansEncoding& encoding = encodings[f];
    for (int value = lane(); value < BYTE_VALUES; value += WARP) {
        mask_steps[value] = encoding.mask_steps[value];
        token_steps[value] = encoding.token_steps[value];
    }
    places += piece.first_chunk + f;
    int64_t number = take_number(&written[f].taken, shared_number);  // has a barrier
    RansPage& page = pages_for(piece, f, pages)[number];
    int masks = octets_of(length_of_page(number, count));
    uint32_t state = RANS_LOWEST;
    int first_word = put_values(token_steps, reinterpret_cast<const uint32_t*>(page.token), page.tokens, state,
                                page.words, PAGE_WORDS);
    first_word = put_values(mask_steps, page.masks, masks, state, page.words, first_word);
    int words = PAGE_WORDS - first_word, extra_bytes = (page.extra_bits + 7) / 8;

    int64_t bytes = STATE_BYTES + 2 * words + extra_bytes;
    if (lane() == 0) leave_own(places, number, bytes);
    int64_t before = look_back(places, number, bytes);
    int64_t first_page = encoding.table + 4 * blocks, end = first_page + before + bytes;
    bool has_room = end <= count;
    uint8_t *payload = piece.frame + HEADER_BYTES, *out = payload + end - bytes;
    __syncwarp(ALL_LANES);  // the words of all lanes are written
    if (has_room) {
        if (lane() < RANS_LANES) store32(out + 4 * lane(), state);
        copy_by_warp(out + STATE_BYTES, reinterpret_cast<const uint8_t*>(page.words + first_word), 2 * words);
        copy_by_warp(out + STATE_BYTES + 2 * words, reinterpret_cast<const uint8_t*>(page.extra), extra_bytes);
    }
    if (lane() == 0 && has_room) {
        store16(payload + encoding.table + 4 * number, unsigned(words));
        store16(payload + encoding.table + 4 * number + 2, unsigned(extra_bytes));
    }
    // The last block to come here, not that with the last page: then all others have read the choice. rans_collect counted
    // each page once.
    if (!finished_last(&written[f].counted, 2 * blocks, is_last) || lane()) return;
    end = first_page + int64_t(load_relaxed(places + blocks - 1) / KINDS);
    if (end <= count) {
        write_header(piece.frame, RANS, choice.predictor, 0, count, end);
        sizes[f] = HEADER_BYTES + end;
    } else {
        choice.coder = PLANES;
    }
}

// ------------------------------------------------------------------ decoding

// How many bytes there are from `at` on, below 0 behind the end; of very many, as many as nobody reads.
NCZ_DEVICE int bytes_left(const uint8_t* at, const uint8_t* end) {
    constexpr int64_t MANY = 1 << 30;
    return int(end - at < MANY ? end - at : MANY);
}

// The 4 bytes at a multiple of 4, as far as there are so many left, and zeros behind.
NCZ_DEVICE uint32_t load_word(const uint8_t* at, int left) {
    if (left >= 4) return *reinterpret_cast<const uint32_t*>(at);
    uint32_t word = 0;
    for (int i = 0; i < left; ++i) word |= uint32_t(at[i]) << 8 * i;
    return word;
}

struct alignas(16) FourCodes {
    int32_t of[4];
};

// `n` codes of a chunk, four for each lane of the warp, of which the last may be too many. With DELTA, adds to each all
// before it; `sum` is that of those before these, and then that of all.
NCZ_DEVICE void store_codes(FourCodes four, int n, int32_t predictor, uint32_t& sum, int32_t* codes) {
    if (predictor == DELTA) {
        uint32_t residuals[4], own = 0;
        for (int i = 0; i < 4; ++i) residuals[i] = own += uint32_t(four.of[i]);
        uint32_t inclusive = warp_inclusive_sum(own), before = sum + inclusive - own;
        for (int i = 0; i < 4; ++i) four.of[i] = int32_t(before + residuals[i]);
        sum += __shfl_sync(ALL_LANES, inclusive, WARP - 1);
    }
    bool is_aligned = reinterpret_cast<uintptr_t>(codes) % sizeof(FourCodes) == 0;
    if (n == 4 * WARP && is_aligned) {
        reinterpret_cast<FourCodes*>(codes)[lane()] = four;
        return;
    }
    for (int i = 0; i < 4; ++i)
        if (4 * lane() + i < n) codes[4 * lane() + i] = four.of[i];
}

// Reads this thread's frequency of those that begin at `in`, which it moves behind them. Gives what is wrong with them,
// the same to all threads: 0 if nothing. None at all are valid.
NCZ_DEVICE int64_t read_frequencies(const uint8_t*& in, const uint8_t* end, int values, uint32_t* scratch,
                                    uint32_t& frequency) {
    frequency = 0;
    if (end - in < BYTE_VALUES / 8) return damaged(RANS_TABLE);
    int value = int(threadIdx.x), kinds;
    bool occurs = in[value / 8] >> value % 8 & 1;
    int kind = block_exclusive_sum(int(occurs), reinterpret_cast<int*>(scratch), kinds);
    bool is_any_unknown = block_or(occurs && value >= values, scratch);
    if (is_any_unknown || end - in < frequency_bytes(kinds)) return damaged(RANS_TABLE);
    if (occurs) frequency = load16(in + frequency_bytes(kind));
    in += frequency_bytes(kinds);
    uint32_t sum = block_sum(occurs && !frequency ? 2 * RANS_WHOLE : frequency, scratch);
    return !kinds || sum == RANS_WHOLE ? 0 : damaged(RANS_FREQUENCIES);
}

// What a state becomes, by its slot, and the value: frequency - 1 in 12 bits, slot - start in 12, the value in 8. From this
// thread's frequency; gives whether there are any. All of it in shared memory.
NCZ_DEVICE bool fill_slots(uint32_t frequency, uint16_t* starts, uint16_t* frequencies, uint32_t* scratch,
                           uint32_t* slots) {
    uint32_t sum;
    starts[threadIdx.x] = uint16_t(block_exclusive_sum(frequency, scratch, sum));
    frequencies[threadIdx.x] = uint16_t(frequency);
    __syncthreads();
    for (unsigned slot = threadIdx.x; slot < sum; slot += THREADS) {
        unsigned value = unsigned(last_not_above(starts, BYTE_VALUES, slot));  // of several, only the last occurs
        slots[slot] = (frequencies[value] - 1u) << 20 | (slot - starts[value]) << 8 | value;
    }
    __syncthreads();
    return sum > 0;
}

NCZ_DEVICE int64_t page_bytes(const uint8_t* sizes) { return STATE_BYTES + 2 * load16(sizes) + load16(sizes + 2); }

// The words of a page, in a ring in shared memory that a warp keeps filled: loaded long before they are needed. Never
// reads at `end` or behind: there are zeros.
class PageWords {
  public:
    static constexpr int RING = 4 * WARP;  // numbers of 32 bits
    static constexpr int HALF = RING;      // words, which at most are taken between two calls of `refill`

    NCZ_DEVICE PageWords(uint32_t* ring, const uint8_t* begin, const uint8_t* end) : ring_(ring) {
        at_ = begin + 8 * lane();
        left_ = bytes_left(at_, end);
        load();
    }

    NCZ_DEVICE void refill() {
        __syncwarp(ALL_LANES);
        while (filled_ - taken_ < HALF) {
            uint32_t* to = ring_ + (filled_ / 2 + 2 * lane()) % RING;
            to[0] = uint32_t(next_);
            to[1] = uint32_t(next_ >> 32);
            filled_ += HALF;
            load();
        }
        __syncwarp(ALL_LANES);
    }

    // The next four words.
    NCZ_DEVICE void look(uint32_t& low, uint32_t& high) const {
        int at = taken_ / 2;
        uint32_t first = ring_[at % RING], second = ring_[(at + 1) % RING], third = ring_[(at + 2) % RING];
        low = __funnelshift_r(first, second, unsigned(taken_ % 2 * 16));
        high = __funnelshift_r(second, third, unsigned(taken_ % 2 * 16));
    }

    NCZ_DEVICE void take(int words) { taken_ += words; }
    NCZ_DEVICE int taken() const { return taken_; }

  private:
    NCZ_DEVICE void load() {
        unsigned phase = unsigned(reinterpret_cast<uintptr_t>(at_) % 4);
        const uint8_t* aligned = at_ - phase;
        int left = left_ + int(phase);
        uint32_t first = load_word(aligned, left), second = load_word(aligned + 4, left - 4);
        uint32_t third = load_word(aligned + 8, left - 8);
        next_ = __funnelshift_r(first, second, 8 * phase);
        next_ |= uint64_t(__funnelshift_r(second, third, 8 * phase)) << 32;
        at_ += 2 * HALF;
        left_ -= 2 * HALF;
    }

    uint32_t* ring_;
    const uint8_t* at_;
    int left_;
    uint64_t next_;
    int taken_ = 0, filled_ = 0;
};

// The next `n` values, by a warp whose lane l has the state of values l, l + 4 and so on.
NCZ_DEVICE void take_values(const uint32_t* slots, int n, uint32_t& state, PageWords& words, uint8_t* values) {
    for (int first = 0; first < n; first += RANS_LANES) {
        if (first % PageWords::HALF == 0) words.refill();
        uint32_t low, high;
        words.look(low, high);
        uint32_t slot = slots[state % RANS_WHOLE], whole = state / RANS_WHOLE;
        uint32_t x = whole * (slot >> 20) + whole + (slot >> 8) % RANS_WHOLE;
        bool is_active = lane() < RANS_LANES && first + lane() < n;
        unsigned empty = __ballot_sync(ALL_LANES, is_active && x < RANS_LOWEST);
        int before = __popc(empty & ((1u << lane()) - 1));  // words for the lanes before this
        uint32_t word = (before & 2 ? high : low) >> before % 2 * 16 & 0xffffu;
        words.take(__popc(empty));
        if (is_active) {
            state = x < RANS_LOWEST ? x << 16 | word : x;
            values[first + lane()] = uint8_t(slot);
        }
    }
}

// Up to 32 bits from `bit` on; those at `end` and behind are zeros.
NCZ_DEVICE uint32_t bits_before(const uint8_t* end, const uint8_t* from, int bit) {
    from += bit / 8;
    unsigned phase = unsigned(reinterpret_cast<uintptr_t>(from) % 4);
    int left = bytes_left(from - phase, end);
    uint32_t first = load_word(from - phase, left), second = load_word(from - phase + 4, left - 4);
    return __funnelshift_r(first, second, 8 * phase + unsigned(bit % 8));
}

constexpr int RANS_DECODER_WARPS = int(RANS_PAGE / CHUNK);  // each of which expands a chunk of the page
constexpr int CHUNK_MASK_WORDS = int(CHUNK) / 32;

// Numbers of the decoders' warps, added up: those before this warp's and all. `shared` must not be written again.
NCZ_DEVICE int add_up_warps(int own, int* shared, int& all) {
    if (lane() == 0 && warp() < RANS_DECODER_WARPS) shared[warp()] = own;
    __syncthreads();
    int before = 0;
    all = 0;
    for (int w = 0; w < RANS_DECODER_WARPS; ++w) {
        if (w == warp()) before = all;
        all += shared[w];
    }
    return before;
}

// Where a chunk's tokens and extra bits begin.
struct RansChunk {
    const uint32_t* masks;
    const uint8_t *tokens, *extra, *end;
    int extra_bit;
    uint32_t mode;
};

// The codes of a chunk of `n`, 128 at a time, four in each lane.
NCZ_DEVICE void expand_chunk(RansChunk chunk, int n, int32_t predictor, int32_t* codes) {
    uint32_t sum = 0;
    for (int first = 0; first < n; first += 4 * WARP) {
        unsigned differ = chunk.masks[first / 32 + lane() / 8] >> lane() % 8 * 4 & 0xfu;
        int inclusive = warp_inclusive_sum(__popc(differ));
        const uint8_t* token = chunk.tokens + inclusive - __popc(differ);
        unsigned tokens[4], extra_bits[4];
        int own_bits = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            tokens[i] = differ >> i & 1 ? *token++ : chunk.mode;
            own_bits += int(extra_bits[i] = extra_bits_of(tokens[i]));
        }
        FourCodes four;
        if (__any_sync(ALL_LANES, own_bits)) {
            int inclusive_bits = warp_inclusive_sum(own_bits), bit = chunk.extra_bit + inclusive_bits - own_bits;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t extra = 0;
                if (extra_bits[i]) extra = bits_before(chunk.end, chunk.extra, bit) & ((1u << extra_bits[i]) - 1);
                four.of[i] = unzigzag(base_of(tokens[i]) + (extra << 1));
                bit += int(extra_bits[i]);
            }
            chunk.extra_bit += __shfl_sync(ALL_LANES, inclusive_bits, WARP - 1);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) four.of[i] = unzigzag(tokens[i]);
        }
        chunk.tokens += __shfl_sync(ALL_LANES, inclusive, WARP - 1);
        store_codes(four, n - first < 4 * WARP ? n - first : 4 * WARP, predictor, sum, codes + first);
    }
}

// Shared memory that a block decodes with.
struct RansDecoding {
    uint32_t slots[RANS_WHOLE];
    uint32_t masks[PAGE_MASKS / 4];
    uint8_t tokens[RANS_PAGE];
    uint32_t ring[PageWords::RING];
    uint16_t starts[BYTE_VALUES], frequencies[BYTE_VALUES];
    int warp_tokens[RANS_DECODER_WARPS], warp_bits[RANS_DECODER_WARPS];
};

// Decodes one page of a frame, after it has checked the frequencies and all sizes, as every block does by itself. Gives
// what is wrong with these, the same to all threads, and records what is wrong with its own page.
NCZ_DEVICE int64_t decode_rans(const Input& input, const Header& header, int number, Status& status,
                               int32_t* codes, RansDecoding& shared, int64_t* sums) {
    int64_t bytes = header.payload_bytes, count = input.count;
    int pages = int(pages_of(count));
    if (number && number >= pages) return 0;
    const uint8_t *payload = input.frame + HEADER_BYTES, *in = payload + 1, *end = payload + bytes;
    uint32_t *scratch = reinterpret_cast<uint32_t*>(sums), mask, token;
    unsigned mode = bytes ? payload[0] : DIRECT;
    if (mode >= DIRECT) return damaged(RANS_MODE, mode);
    if (int64_t wrong = read_frequencies(in, end, BYTE_VALUES, scratch, mask)) return wrong;
    if (int64_t wrong = read_frequencies(in, end, TOKENS, scratch, token)) return wrong;
    if (end - in < 4 * pages) return damaged(RANS_NO_PAGES, end - in);
    int64_t first_page = in + 4 * pages - payload, all;
    int64_t before = add_up_sizes(pages, number, [in](int i) { return page_bytes(in + 4 * i); }, sums, all);
    if (all != bytes - first_page) return damaged(RANS_PAGE_SUM, end - in);
    if (!pages) return 0;

    const uint8_t *sizes = in + 4 * number, *page = payload + first_page + before;
    int n = length_of_page(number, count), octets = octets_of(n);
    int page_words = int(load16(sizes)), extra_bytes = int(load16(sizes + 2));
    const uint8_t* extra = page + STATE_BYTES + 2 * page_words;
    for (int i = int(threadIdx.x); i < PAGE_MASKS / 4; i += THREADS) shared.masks[i] = 0;
    bool has_masks = fill_slots(mask, shared.starts, shared.frequencies, scratch, shared.slots);

    uint8_t* mask_bytes = reinterpret_cast<uint8_t*>(shared.masks);
    PageWords words(shared.ring, page + STATE_BYTES, end);
    uint32_t state = lane() < RANS_LANES ? load32(page + 4 * lane()) : 0;
    if (warp() == 0 && has_masks) take_values(shared.slots, octets, state, words, mask_bytes);
    __syncthreads();
    bool is_decoder = warp() < RANS_DECODER_WARPS;
    int own_tokens = 0, all_tokens;
    for (int i = lane(); i < CHUNK_MASK_WORDS && is_decoder; i += WARP)
        own_tokens += __popc(shared.masks[warp() * CHUNK_MASK_WORDS + i]);
    own_tokens = warp_sum(own_tokens);
    int first_token = add_up_warps(own_tokens, shared.warp_tokens, all_tokens);
    bool has_tokens = fill_slots(token, shared.starts, shared.frequencies, scratch, shared.slots);
    bool has_extra_bits = block_or(token && threadIdx.x >= DIRECT, scratch);
    bool is_wrong = !has_masks || (n % OCTET && mask_bytes[octets - 1] >> n % OCTET) || (all_tokens && !has_tokens);
    if (warp() == 0 && !is_wrong) {
        take_values(shared.slots, all_tokens, state, words, shared.tokens);
        is_wrong = words.taken() != page_words || __any_sync(ALL_LANES, lane() < RANS_LANES && state != RANS_LOWEST);
    }
    __syncthreads();

    int own_bits = 0, all_bits;
    if (has_extra_bits && !is_wrong)
        for (int i = lane(); i < own_tokens; i += WARP) own_bits += int(extra_bits_of(shared.tokens[first_token + i]));
    own_bits = warp_sum(own_bits);
    int first_bit = add_up_warps(own_bits, shared.warp_bits, all_bits);
    is_wrong = is_wrong || (all_bits + 7) / 8 != extra_bytes;
    is_wrong = is_wrong || (all_bits % 8 && extra[all_bits / 8] >> all_bits % 8);
    if (is_wrong && lane() == 0) record(status, damaged(RANS_DAMAGED_PAGE));
    int64_t first = number * RANS_PAGE + warp() * CHUNK;
    if (is_wrong || !is_decoder || first >= count) return 0;
    RansChunk chunk = {shared.masks + warp() * CHUNK_MASK_WORDS, shared.tokens + first_token, extra, end, first_bit,
                       mode};
    int length = int(count - first < CHUNK ? count - first : CHUNK);
    expand_chunk(chunk, length, header.predictor, codes + first);
    return 0;
}

#define NCZ_RANS_KERNELS(X) X(ncz_rans_collect) X(ncz_rans_encode)
