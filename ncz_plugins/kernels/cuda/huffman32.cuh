// The coder HUFFMAN32: pages of 64 rows of 128 codes. A warp writes or reads a page, and each of its lanes a bit string of its
// own, of four consecutive codes in each row. docs/reference/wire-format.md specifies it; huffman.cuh makes the code.
//
//     ncz_encode_pages   pages from values or codes, in one pass: each in shared memory, then to its place
//     decode_pages       in ncz_decode, ncz_decode_sum     from pages to values, or to sums
//     ncz_sum_pages      sums of the pages of several frames, to values or to codes
//
// The rows of a page's 16-bit words alternate between lanes, so that a warp copies a page side by side and its lanes read words
// from different banks of shared memory.
#pragma once

#include "planes.cuh"

constexpr int64_t PAGE = HUFFMAN32_PAGE;
constexpr int PAGE_ROWS = int(PAGE) / ROW;
constexpr int MOST_WORDS = HUFFMAN32_MOST_WORDS;
constexpr int SIZES_WORDS = WARP / 2;  // at the beginning of a page, a byte for each lane
static_assert(HUFFMAN32_LANES == WARP && HUFFMAN32_ROW == ROW, "a lane of the warp has a bit string, of a run in each row");

constexpr int PAGE_WARPS = 4;  // of a block, each with a page at a time
constexpr int PAGE_THREADS = PAGE_WARPS * WARP;

// Of these, so many must fit on a multiprocessor: as many as have room for their pages on an H100.
#if NCZ_DTYPE == 3 || __CUDA_ARCH__ < 800
constexpr int PAGE_BLOCKS = 4;  // more would spill
#else
constexpr int PAGE_BLOCKS = 7;
#endif

constexpr int PAGE_SUM_BLOCKS = PAGE_BLOCKS == 7 ? 6 : PAGE_BLOCKS;  // of blocks that add up pages

constexpr unsigned LETTERS = TOKENS + 1;  // with ESCAPE; those of gaps are fewer
constexpr unsigned HUFFMAN_WHOLE = 1u << HUFFMAN_MAX_LENGTH;  // the Kraft sum of a complete code

NCZ_DEVICE int64_t huffman_pages_of(int64_t count) { return (count + PAGE - 1) / PAGE; }

// Blocks that a frame of so many codes takes.
NCZ_DEVICE int64_t page_blocks_of(int64_t count) { return (huffman_pages_of(count) + PAGE_WARPS - 1) / PAGE_WARPS; }

NCZ_DEVICE int length_of_huffman_page(int64_t page, int64_t count) {
    int64_t left = count - page * PAGE;
    return int(left < 0 ? 0 : left < PAGE ? left : PAGE);
}

// What is in front of the pages, in bytes: a code with the lengths of so many letters, and the table of pages.
NCZ_DEVICE int huffman_code_bytes(int stored) { return (1 + stored / 2 + 1 + 3) / 4 * 4; }

// The letter at a place in the table of lengths: ESCAPE is the first.
NCZ_DEVICE unsigned letter_at(int place) { return place ? unsigned(place) - 1 : ESCAPE; }

NCZ_DEVICE int page_table_bytes(int pages) { return (pages + 1) / 2 * 4; }

// Of a page whose lanes have so many words in all.
NCZ_DEVICE int page_words_of(int words) { return (SIZES_WORDS + words + 1) / 2 * 2; }

// ------------------------------------------------------------------ encoding

// What ncz_select tells the kernels that encode a frame.
struct HuffmanEncoding {
    uint32_t codes[LETTERS];  // with the length from bit 16 on; 0 for a letter that has none
    int32_t stored;           // letters with a length in the frame
    uint32_t width;           // in the header: GAPPED if letters are those of gaps
    uint32_t unused;
};
static_assert(sizeof(HuffmanEncoding) == 928, "as frames.py has it");

// The codes of letters, with the length from bit 16 on; 0 for a letter that has none.
struct LetterCodes {
    uint32_t direct[DIRECT + 1];  // of symbols that are their own tokens, and 0 for all others
    uint32_t of[LETTERS];
};

// A page that a warp writes or reads, in shared memory. Lanes look at the limit now and then, so there is room behind it.
constexpr int SPARE_ROWS = 8;
struct alignas(16) PageMemory {
    uint32_t sizes[SIZES_WORDS / 2];
    uint16_t rows[MOST_WORDS + SPARE_ROWS][WARP];
};

// Appends to the bit string of a lane: to its words, one in each row.
class LaneWriter {
  public:
    NCZ_DEVICE explicit LaneWriter(uint16_t* column) : column_(column) {}

    NCZ_DEVICE void put(uint32_t bits, unsigned n) {  // at most 16
        pending_ |= bits << filled_;
        filled_ += n;
        if (filled_ < 16) return;
        store();
        pending_ >>= 16;
        filled_ -= 16;
    }
    NCZ_DEVICE void put_long(uint32_t bits, unsigned n) {
        put(bits & 0xffffu, n < 16 ? n : 16);
        if (n > 16) put(bits >> 16, n - 16);
    }
    NCZ_DEVICE void end() {
        stay_in_page();
        if (filled_) store();
    }
    // That there is room for six words more. Of too many words there are more than MOST_WORDS from then on.
    NCZ_DEVICE void stay_in_page() {
        constexpr int LAST = (MOST_WORDS + 1) * WARP;
        at_ = at_ < LAST ? at_ : LAST;
    }
    NCZ_DEVICE int words() const { return at_ / WARP; }

  private:
    NCZ_DEVICE void store() {
        column_.store(at_, pending_);
        at_ += WARP;
    }

    SharedHalves column_;
    uint32_t pending_ = 0;
    unsigned filled_ = 0;  // below 16 between calls
    int at_ = 0;
};

// The code of a letter, or the escape. There must be room for two words.
NCZ_DEVICE void put_code(LaneWriter& writer, const LetterCodes& codes, unsigned letter) {
    uint32_t code = codes.of[letter];
    if (code) {
        writer.put(code & 0xffffu, code >> 16);
    } else {
        writer.put(codes.of[ESCAPE] & 0xffffu, codes.of[ESCAPE] >> 16);
        writer.put(letter, ESCAPED_BITS);
    }
}

NCZ_DEVICE void put_extra(LaneWriter& writer, uint32_t symbol, unsigned token) {
    unsigned extra_bits = extra_bits_of(token);
    if (extra_bits) writer.put_long(extra_of(symbol, extra_bits), extra_bits);
}

NCZ_DEVICE void put_symbol(LaneWriter& writer, const LetterCodes& codes, uint32_t symbol) {
    unsigned token = token_of(symbol);
    writer.stay_in_page();
    put_code(writer, codes, token);
    writer.stay_in_page();
    put_extra(writer, symbol, token);
}

// The first `n` of a run. Nearly always all of them have a code, and no extra bits.
NCZ_DEVICE void put_run(LaneWriter& writer, const LetterCodes& codes, const uint32_t (&symbols)[RUN], int n) {
    uint32_t own[RUN];
    bool is_rare = n < RUN;
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
        own[i] = codes.direct[symbols[i] < DIRECT ? symbols[i] : DIRECT];
        is_rare |= own[i] == 0;
    }
    if (!is_rare) {
        writer.stay_in_page();
#pragma unroll
        for (int i = 0; i < RUN; ++i) writer.put(own[i] & 0xffffu, own[i] >> 16);
        return;
    }
    uint32_t left[RUN];
    memcpy(left, symbols, sizeof left);
#pragma unroll 1
    for (int i = 0; i < n; ++i) {  // a loop, so that the code is short; what is left moves up, so that it stays in registers
        put_symbol(writer, codes, left[0]);
#pragma unroll
        for (int k = 1; k < RUN; ++k) left[k - 1] = left[k];
    }
}

// The letter of a symbol that is not zero, behind so many that are.
NCZ_DEVICE unsigned letter_of_gap(unsigned gap, uint32_t symbol) {
    return 1 + GAP_LENGTHS * ((symbol < GAP_SYMBOLS ? symbol : GAP_SYMBOLS) - 1) + bit_length(gap);
}

// The bits behind that letter: those of the gap below its leading one.
NCZ_DEVICE unsigned gap_bits_of(unsigned gap) { return gap ? bit_length(gap) - 1 : 0; }

// `symbol_of` gives the symbol if it is a large one, which has a token behind its letter.
template <class SymbolOf>
NCZ_DEVICE void put_gap(LaneWriter& writer, const LetterCodes& codes, unsigned gap, unsigned symbol, SymbolOf symbol_of) {
    unsigned letter = letter_of_gap(gap, symbol), gap_bits = gap_bits_of(gap), below = gap & ((1u << gap_bits) - 1);
    uint32_t code = codes.of[letter];
    unsigned length = code >> 16;
    writer.stay_in_page();
    if (code && length + gap_bits <= 16) {
        writer.put((code & 0xffffu) | below << length, length + gap_bits);
    } else {
        put_code(writer, codes, letter);
        writer.put(below, gap_bits);
    }
    if (symbol < GAP_SYMBOLS) return;
    uint32_t large = symbol_of();
    unsigned token = token_of(large);
    writer.put(token, ESCAPED_BITS);
    put_extra(writer, large, token);
}

constexpr int GAP_BITS = 4, SMALL_BITS = (1 << GAP_BITS) - 1;  // of a symbol that is packed, if it is below GAP_SYMBOLS
static_assert(GAP_SYMBOLS == SMALL_BITS, "a packed symbol that is larger");

// How a lane's symbols are written, runs of ROWS rows at a time, of which it has `n`: by letters that are their tokens, or by
// those of gaps.
struct WriteTokens {
    static constexpr int ROWS = 1;
    const LetterCodes& codes;

    NCZ_DEVICE void run(LaneWriter& writer, const uint32_t (&symbols)[ROWS][RUN], int n) {
        put_run(writer, codes, symbols[0], n);
    }
    NCZ_DEVICE void end(LaneWriter&) {}
};
struct WriteGaps {
    static constexpr int ROWS = 2;
    const LetterCodes& codes;
    int gap;  // zeros before the next run

    NCZ_DEVICE void run(LaneWriter& writer, const uint32_t (&symbols)[ROWS][RUN], int n) {
        uint32_t left = 0;
#pragma unroll
        for (int i = 0; i < ROWS * RUN; ++i) {
            uint32_t symbol = symbols[i / RUN][i % RUN];
            left |= (symbol < GAP_SYMBOLS ? symbol : GAP_SYMBOLS) << GAP_BITS * i;
        }
        if (n < ROWS * RUN) left &= (1u << GAP_BITS * n) - 1;
        int at = 0;
#pragma unroll 1
        while (left) {  // as often as the lane with most symbols that are not zero needs
            unsigned zeros = unsigned(__ffs(int(left)) - 1) / GAP_BITS;
            left >>= GAP_BITS * zeros;
            at += int(zeros);
            auto symbol_of = [&symbols, at] {
                uint32_t symbol = 0;
#pragma unroll
                for (int i = 0; i < ROWS * RUN; ++i) symbol = at == i ? symbols[i / RUN][i % RUN] : symbol;
                return symbol;
            };
            put_gap(writer, codes, unsigned(gap) + zeros, left & SMALL_BITS, symbol_of);
            left >>= GAP_BITS;
            ++at;
            gap = 0;
        }
        gap += n - at;
    }
    NCZ_DEVICE void end(LaneWriter& writer) {
        writer.stay_in_page();
        if (gap) put_code(writer, codes, NO_MORE);
    }
};

// Closes up the rows in which only some lanes have a word, of which this one has `words`. Then the page is as in the frame.
NCZ_DEVICE void close_rows(PageMemory& page, int words, int all_words) {
    uint16_t* to = page.rows[0];
    int first = warp_min(words), last = warp_max(words), at = first * WARP;
    unsigned lower = (1u << lane()) - 1;
    for (int row = first; row < last; ++row) {
        unsigned having = __ballot_sync(ALL_LANES, words > row);
        uint16_t word = page.rows[row][lane()];
        __syncwarp(ALL_LANES);  // what is written stands at or before what was read
        if (words > row) to[at + __popc(having & lower)] = word;
        at += __popc(having);
    }
    __syncwarp(ALL_LANES);
    if (lane() == 0 && all_words % 2) to[all_words] = 0;
    reinterpret_cast<uint8_t*>(page.sizes)[lane()] = uint8_t(words);
    __syncwarp(ALL_LANES);
}

// Writes the code to a frame.
NCZ_DEVICE void write_code(const LetterCodes& codes, int stored, uint8_t* payload) {
    auto length_at = [&codes, stored](int place) { return place <= stored ? codes.of[letter_at(place)] >> 16 : 0u; };
    for (int i = int(threadIdx.x); i < huffman_code_bytes(stored); i += PAGE_THREADS)
        payload[i] = uint8_t(i ? length_at(2 * i - 2) | length_at(2 * i - 1) << 4 : unsigned(stored));
}

// Shared memory of a block that writes pages.
struct PagesInHand {
    PageMemory pages[PAGE_WARPS];
    LetterCodes codes;
    int words[PAGE_WARPS];  // of each page
    int64_t number;
    int is_last;
};

// Codes to symbols, a row for each call. By a warp.
class RowPredictor {
  public:
    NCZ_DEVICE explicit RowPredictor(int32_t predictor) : is_delta_(predictor == DELTA) {}

    NCZ_DEVICE void symbols_of(const int32_t (&codes)[RUN], int row, uint32_t (&symbols)[RUN]) {
        int32_t previous = 0;
        if (is_delta_) {
            int32_t of_lower_lane = __shfl_up_sync(ALL_LANES, codes[RUN - 1], 1);
            previous = lane() ? of_lower_lane : row % CHUNK_ROWS ? last_ : 0;
            last_ = __shfl_sync(ALL_LANES, codes[RUN - 1], WARP - 1);
        }
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            symbols[i] = zigzag(difference(codes[i], previous));
            previous = is_delta_ ? codes[i] : 0;
        }
    }

  private:
    bool is_delta_;
    int32_t last_ = 0;  // code of the row before
};

// A page whose values lie in memory as they may be loaded: some rows are on their way while those before are coded.
template <class Source, class Write>
NCZ_DEVICE void encode_page(const Source& source, int64_t first, RowPredictor predictor, Write& write, LaneWriter& writer) {
    constexpr int AT_ONCE = 4;
    typename Source::Fetched fetched[AT_ONCE];
    auto rows = source.rows(first + run_of(0));
#pragma unroll
    for (int r = 0; r < AT_ONCE; ++r) fetched[r] = rows.fetch(r);
#pragma unroll 1
    for (int row = 0; row < PAGE_ROWS; row += AT_ONCE) {
        int32_t own[AT_ONCE][RUN];
#pragma unroll
        for (int r = 0; r < AT_ONCE; ++r) rows.codes_of(fetched[r], row + r, own[r]);
        int next = row + AT_ONCE < PAGE_ROWS ? row + AT_ONCE : row;
#pragma unroll
        for (int r = 0; r < AT_ONCE; ++r) fetched[r] = rows.fetch(next + r);
#pragma unroll
        for (int r = 0; r < AT_ONCE; r += Write::ROWS) {
            uint32_t symbols[Write::ROWS][RUN];
#pragma unroll
            for (int i = 0; i < Write::ROWS; ++i) predictor.symbols_of(own[r + i], row + r + i, symbols[i]);
            write.run(writer, symbols, Write::ROWS * RUN);
        }
    }
}

// Any other page, of `length` values.
template <class Source, class Write>
NCZ_DEVICE void encode_part(const Source& source, int64_t first, int length, RowPredictor predictor, Write& write,
                            LaneWriter& writer) {
#pragma unroll 1
    for (int row = 0; row * ROW < length; row += Write::ROWS) {
        uint32_t symbols[Write::ROWS][RUN];
        int all = 0;
#pragma unroll
        for (int r = 0; r < Write::ROWS; ++r) {
            int at = (row + r) * ROW + lane() * RUN, n = length - at < 0 ? 0 : length - at < RUN ? length - at : RUN;
            int32_t own[RUN] = {};
#pragma unroll
            for (int i = 0; i < RUN; ++i)
                if (i < n) own[i] = source.code(first + at + i);
            predictor.symbols_of(own, row + r, symbols[r]);
            all += n;
        }
        write.run(writer, symbols, all);
    }
}

// The bit strings of a page.
template <class Source, class Write>
NCZ_DEVICE void encode_lanes(const Source& source, int64_t page, int length, int32_t predictor, Write write, LaneWriter& writer) {
    if (length == PAGE && source.has_runs())
        encode_page(source, page * PAGE, RowPredictor(predictor), write, writer);
    else
        encode_part(source, page * PAGE, length, RowPredictor(predictor), write, writer);
    write.end(writer);
    writer.end();
}

// HUFFMAN32 frames of what `source_of` gives, where that coder was chosen; PLANES becomes the choice for those that would be
// too large.
template <class SourceOf>
NCZ_DEVICE void encode_pages(SourceOf source_of, const Pieces& pieces, Written* written, const HuffmanEncoding* encodings,
                             unsigned long long* places, long long* sizes, PagesInHand& shared) {
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    Choice& choice = written[f].choice;
    int64_t count = piece.count, blocks = page_blocks_of(count);
    if (unit_number(pieces.n) >= blocks || choice.coder != HUFFMAN32) return;
    places += piece.first_chunk + f;
    for (int i = int(threadIdx.x); i < int(LETTERS); i += PAGE_THREADS) {
        uint32_t code = encodings[f].codes[i];
        shared.codes.of[i] = code;
        if (i <= int(DIRECT)) shared.codes.direct[i] = i < int(DIRECT) ? code : 0;
    }
    int64_t number = take_number(&written[f].taken, &shared.number), page = number * PAGE_WARPS + warp();
    int length = length_of_huffman_page(page, count);
    PageMemory& memory = shared.pages[warp()];
    auto source = source_of(piece);
    LaneWriter writer(memory.rows[0] + lane());
    if (encodings[f].width == GAPPED)
        encode_lanes(source, page, length, choice.predictor, WriteGaps{shared.codes, 0}, writer);
    else
        encode_lanes(source, page, length, choice.predictor, WriteTokens{shared.codes}, writer);
    int words = writer.words();
    bool fits = !__any_sync(ALL_LANES, words > MOST_WORDS);
    if (!fits) words = 0;
    int all_words = warp_sum(words), page_words = length ? page_words_of(all_words) : 0;
    if (lane() == 0) shared.words[warp()] = page_words;
    __syncthreads();
    int before_in_block = 0, of_block = 0;
    for (int w = 0; w < PAGE_WARPS; ++w) {
        before_in_block += w < warp() ? shared.words[w] : 0;
        of_block += shared.words[w];
    }
    if (threadIdx.x == 0) leave_own(places, number, of_block);
    close_rows(memory, words, all_words);
    if (warp() == 0) {
        int64_t before = look_back(places, number, of_block);
        if (lane() == 0) shared.number = before;
    }
    __syncthreads();
    int stored = encodings[f].stored, code_bytes = huffman_code_bytes(stored), pages_of_frame = int(huffman_pages_of(count));
    int64_t first_page = code_bytes + page_table_bytes(pages_of_frame);
    int64_t begin = first_page + 2 * (shared.number + before_in_block);
    uint8_t* payload = piece.frame + HEADER_BYTES;
    fits &= begin + 2 * page_words <= count;  // a byte for each code
    if (number == 0 && first_page <= count) write_code(shared.codes, stored, payload);
    if (length && fits) {
        uint8_t* table = payload + code_bytes;
        if (lane() == 0) store16(table + 2 * page, unsigned(page_words));
        if (lane() == 0 && page + 1 == pages_of_frame && pages_of_frame % 2) store16(table + 2 * page + 2, 0);
        copy_by_warp(payload + begin, reinterpret_cast<const uint8_t*>(&memory), 2 * page_words);
    }
    if (lane() == 0 && !fits) atomicOr(&written[f].misfits, 1u);
    if (!finished_last(&written[f].counted, blocks, &shared.is_last)) return;
    if (threadIdx.x) return;
    if (atomicExch(&written[f].misfits, 0u)) {
        choice.coder = PLANES;
    } else {
        int64_t bytes = first_page + 2 * int64_t(load_relaxed(places + blocks - 1) / KINDS);
        write_header(piece.frame, HUFFMAN32, choice.predictor, encodings[f].width, count, bytes);
        sizes[f] = HEADER_BYTES + bytes;
    }
}

NCZ_KERNEL_OF(PAGE_THREADS, PAGE_BLOCKS, ncz_encode_pages)
(const __grid_constant__ Pieces pieces, Written* written, const HuffmanEncoding* encodings, unsigned long long* places,
 long long* sizes) {
    NCZ_SHARED(PagesInHand, shared, 1);
    encode_pages(floats_of, pieces, written, encodings, places, sizes, *shared);
}

NCZ_KERNEL_OF(PAGE_THREADS, PAGE_BLOCKS, ncz_encode_pages_at_random)
(const __grid_constant__ Pieces pieces, Noise noise, Written* written, const HuffmanEncoding* encodings,
 unsigned long long* places, long long* sizes) {
    NCZ_SHARED(PagesInHand, shared, 1);
    auto source_of = [&noise](const Piece& piece) { return random_floats_of(piece, noise); };
    encode_pages(source_of, pieces, written, encodings, places, sizes, *shared);
}

NCZ_KERNEL_OF(PAGE_THREADS, PAGE_BLOCKS, ncz_encode_pages_of_codes)
(const __grid_constant__ Pieces pieces, Written* written, const HuffmanEncoding* encodings, unsigned long long* places,
 long long* sizes) {
    NCZ_SHARED(PagesInHand, shared, 1);
    encode_pages(codes_of, pieces, written, encodings, places, sizes, *shared);
}

// ------------------------------------------------------------------ decoding

// Where a page begins in the payload, and the 16-bit words that it has: one number, as ncz_open leaves it.
struct PlacedPage {
    int64_t offset;
    int words;
};
NCZ_DEVICE long long place_page(int64_t offset, unsigned words) { return offset << 16 | words; }
NCZ_DEVICE PlacedPage placed_page(long long placed) { return {placed >> 16, int(placed & 0xffff)}; }

// What decoders look the next bits up in, HUFFMAN_WHOLE for each frame: bits of the code, and the letter.
NCZ_DEVICE uint16_t huffman_entry(unsigned length, unsigned letter) { return uint16_t(length | letter << 4); }

// Letters of gaps stand there in parts: the bit length of the gap, and from bit 4 on the symbol. No symbol is as large as what
// stands in its place for NO_MORE and ESCAPE.
constexpr unsigned GAP_ENDS = (GAP_SYMBOLS + 1) << 4, GAP_ESCAPES = (GAP_SYMBOLS + 2) << 4;
NCZ_DEVICE unsigned parts_of_gap(unsigned letter) {
    if (letter == NO_MORE) return GAP_ENDS;
    if (letter == ESCAPE) return GAP_ESCAPES;
    return (letter - 1) % GAP_LENGTHS | ((letter - 1) / GAP_LENGTHS + 1) << 4;
}

// Reads the bit string of a lane.
class LaneReader {
  public:
    NCZ_DEVICE explicit LaneReader(const uint16_t* column)
        : column_(column), bits_(column[0] | uint32_t(column[WARP]) << 16), next_(column[2 * WARP]) {}

    NCZ_DEVICE uint32_t bits() const { return bits_; }  // of which 17 are there at least
    NCZ_DEVICE void skip(unsigned n) {                  // at most 16
        bits_ >>= n;
        filled_ -= int(n);
        if (filled_ > 16) return;
        bits_ |= next_ << filled_;
        filled_ += 16;
        at_ += WARP;
        next_ = column_[at_];
    }
    NCZ_DEVICE uint32_t take_few(unsigned n) {          // at most 16
        uint32_t low = bits_ & ((1u << n) - 1);
        skip(n);
        return low;
    }
    NCZ_DEVICE uint32_t take(unsigned n) {
        uint32_t low = take_few(n < 16 ? n : 16);
        return n <= 16 ? low : low | take_few(n - 16) << 16;
    }
    // That five words more may be read. Whether too many were, which happens in damaged frames alone.
    NCZ_DEVICE bool stay_in_page() {
        constexpr int LAST = (MOST_WORDS + 2) * WARP;  // two words have been read ahead where all are taken
        bool is_behind = at_ > LAST;
        at_ = is_behind ? LAST : at_;
        return is_behind;
    }
    NCZ_DEVICE int read() const { return at_ / (WARP / 16) - filled_; }  // how many bits were

  private:
    const uint16_t* column_;
    int at_ = 2 * WARP;  // of the next word
    uint32_t bits_, next_;
    int filled_ = 32;
};
static_assert(SPARE_ROWS >= 2 + 5 + 1, "as readers say");

// The symbol with a token, whose extra bits are next. `is_wrong` becomes true where there is no such token.
NCZ_DEVICE uint32_t symbol_of(unsigned token, LaneReader& reader, bool& is_wrong) {
    if (token >= TOKENS) {
        is_wrong = true;
        token = 0;
    }
    return base_of(token) + (reader.take(extra_bits_of(token)) << 1);
}

// `is_wrong` becomes true where there is no such token, or the lane is behind its end.
NCZ_DEVICE uint32_t next_symbol(LaneReader& reader, const uint16_t* entries, bool& is_wrong) {
    unsigned entry = entries[reader.bits() % HUFFMAN_WHOLE], token = entry >> 4;
    reader.skip(entry & 15u);
    if (token < DIRECT) return token;
    is_wrong |= reader.stay_in_page();
    if (token == ESCAPE) token = reader.take(ESCAPED_BITS);
    return symbol_of(token, reader, is_wrong);
}

// How a lane's symbols are read, runs of ROWS rows at a time, of which it has `n`: those of letters that are tokens, or those of
// gaps. Both are told how many the lane has in all. `is_wrong` becomes true where something can't be.
struct ReadTokens {
    static constexpr int ROWS = 1;
    LaneReader& reader;
    const uint16_t* entries;
    bool is_wrong;

    NCZ_DEVICE ReadTokens(LaneReader& its_reader, const uint16_t* its_entries, int)
        : reader(its_reader), entries(its_entries), is_wrong(false) {}
    NCZ_DEVICE void run(int n, uint32_t (&symbols)[ROWS][RUN]) {
        is_wrong |= reader.stay_in_page();
#pragma unroll
        for (int i = 0; i < RUN; ++i) symbols[0][i] = i < n ? next_symbol(reader, entries, is_wrong) : 0;
    }
    NCZ_DEVICE void end() {}
};
struct ReadGaps {
    static constexpr int ROWS = 2;
    LaneReader& reader;
    const uint16_t* entries;
    bool is_wrong;
    int left;         // symbols from the next run on
    int gap;          // of these, before the next that is not zero
    unsigned symbol;  // that one; GAP_SYMBOLS: it is large
    uint32_t large;   // then it is this

    static constexpr int NONE_LEFT = 1 << 30;

    NCZ_DEVICE ReadGaps(LaneReader& its_reader, const uint16_t* its_entries, int count)
        : reader(its_reader), entries(its_entries), is_wrong(false), left(count), gap(-1), symbol(0), large(0) {
        find_next();
    }
    NCZ_DEVICE void run(int n, uint32_t (&symbols)[ROWS][RUN]) {
        uint32_t packed = 0;
#pragma unroll
        for (int i = 0; i < ROWS * RUN; ++i) symbols[i / RUN][i % RUN] = 0;
#pragma unroll 1
        while (gap < n) {  // as often as the lane with most symbols that are not zero needs
            if (symbol < GAP_SYMBOLS) {
                packed |= symbol << GAP_BITS * gap;
            } else {
#pragma unroll
                for (int i = 0; i < ROWS * RUN; ++i) symbols[i / RUN][i % RUN] = gap == i ? large : symbols[i / RUN][i % RUN];
            }
            find_next();
        }
#pragma unroll
        for (int i = 0; i < ROWS * RUN; ++i) symbols[i / RUN][i % RUN] |= packed >> GAP_BITS * i & SMALL_BITS;
        gap -= n;
        left -= n;
    }
    NCZ_DEVICE void end() { is_wrong |= gap < NONE_LEFT / 2; }  // it lies behind the lane's end

  private:
    // Reads the letter behind the symbol that is known, unless that is the last.
    NCZ_DEVICE void find_next() {
        if (gap + 1 >= left) {
            gap = NONE_LEFT;
            return;
        }
        is_wrong |= reader.stay_in_page();
        unsigned entry = entries[reader.bits() % HUFFMAN_WHOLE], parts = entry >> 4;
        reader.skip(entry & 15u);
        if (parts >= GAP_ENDS) {
            unsigned letter = parts == GAP_ESCAPES ? reader.take_few(ESCAPED_BITS) : NO_MORE;
            is_wrong |= letter >= GAP_LETTERS;
            parts = letter < GAP_LETTERS ? parts_of_gap(letter) : GAP_ENDS;
            if (parts == GAP_ENDS) {
                gap = NONE_LEFT;
                return;
            }
        }
        unsigned length = parts & 15u, bits = length ? length - 1 : 0;
        gap += 1 + int((length ? 1u << bits : 0) | reader.take_few(bits));
        symbol = parts >> 4;
        if (symbol == GAP_SYMBOLS) large = symbol_of(reader.take_few(ESCAPED_BITS), reader, is_wrong);
    }
};

// Shared memory of a block that reads pages.
struct PagesToRead {
    PageMemory pages[PAGE_WARPS];
    uint16_t entries[HUFFMAN_WHOLE];
};

// Brings a page to shared memory, all rows as wide as the warp; `words` becomes how many this lane has. Whether its sizes are
// possible: only then anything is there.
NCZ_DEVICE bool load_page(const uint32_t* from, int page_words, PageMemory& page, int& words) {
    words = 0;
    if (page_words % 2 || page_words < SIZES_WORDS || page_words > SIZES_WORDS + MOST_WORDS * WARP) return false;
    uint32_t* to = reinterpret_cast<uint32_t*>(&page);
    for (int i = lane(); 2 * i < page_words; i += WARP) copy_async(to + i, from + i);
    await_copies();
    __syncwarp(ALL_LANES);
    words = reinterpret_cast<const uint8_t*>(page.sizes)[lane()];
    int at = warp_sum(words);
    if (!__all_sync(ALL_LANES, words <= MOST_WORDS) || page_words_of(at) != page_words) return false;
    // Rows in which only some lanes have a word are closed up. From the last one on, each moves back to its place, which
    // is at or behind where it stood.
    int first = warp_min(words);
    const uint16_t* closed = page.rows[0];
    unsigned lower = (1u << lane()) - 1;
    for (int row = warp_max(words) - 1; row >= first; --row) {
        unsigned having = __ballot_sync(ALL_LANES, words > row);
        at -= __popc(having);
        uint16_t word = closed[at + __popc(having & lower)];
        __syncwarp(ALL_LANES);
        if (words > row) page.rows[row][lane()] = word;
    }
    __syncwarp(ALL_LANES);
    return true;
}

// How many codes this lane has in a page of `length`.
NCZ_DEVICE int length_of_lane(int length) {
    int rest = length % ROW - lane() * RUN;
    return length / ROW * RUN + (rest < 0 ? 0 : rest < RUN ? rest : RUN);
}

// Decodes a page that was loaded, of `length` codes; if IS_WHOLE, of PAGE. `put` takes each row's run of this lane. Whether
// every lane ended where it should.
template <class Read, bool IS_WHOLE, class Put>
NCZ_DEVICE bool decode_lanes(const PageMemory& page, int words, int length, int32_t predictor, const uint16_t* entries,
                             Put& put) {
    if (IS_WHOLE) length = int(PAGE);
    LaneReader reader(page.rows[0] + lane());
    Read read(reader, entries, length_of_lane(length));
    uint32_t before = 0;  // with DELTA, the last code of the row before
#pragma unroll 1
    for (int row = 0; row * ROW < length; row += Read::ROWS) {
        int n[Read::ROWS], all = 0;
        typename Put::Ahead ahead[Read::ROWS];  // asked for before it is needed
#pragma unroll
        for (int r = 0; r < Read::ROWS; ++r) {
            int left = length - (row + r) * ROW - lane() * RUN;
            n[r] = IS_WHOLE || left > RUN ? RUN : left > 0 ? left : 0;
            all += n[r];
            ahead[r] = put.ahead((row + r) * ROW < length ? row + r : row, n[r]);
        }
        uint32_t symbols[Read::ROWS][RUN];
        read.run(all, symbols);
#pragma unroll
        for (int r = 0; r < Read::ROWS; ++r) {
            int32_t codes[RUN];
#pragma unroll
            for (int i = 0; i < RUN; ++i) codes[i] = unzigzag(symbols[r][i]);
            if (predictor == DELTA) {
#pragma unroll
                for (int i = 1; i < RUN; ++i) codes[i] = sum(codes[i], codes[i - 1]);
                uint32_t own = uint32_t(codes[RUN - 1]), inclusive = warp_inclusive_sum(own);
                if ((row + r) % CHUNK_ROWS == 0) before = 0;
#pragma unroll
                for (int i = 0; i < RUN; ++i) codes[i] = sum(codes[i], int32_t(before + inclusive - own));
                before += __shfl_sync(ALL_LANES, inclusive, WARP - 1);
            }
            put.run(row + r, n[r], codes, ahead[r]);
        }
    }
    read.end();
    int left = 16 * words - reader.read();
    bool is_wrong = read.is_wrong || left < 0 || left > 15 || (reader.bits() & ((1u << left) - 1));
    return !__any_sync(ALL_LANES, is_wrong);
}

// What becomes of a page's codes, each lane's runs: values, or sums with own ones.
struct PutValues {
    Element* to;
    const Scale* scales;

    typedef Scale Ahead;
    NCZ_DEVICE Ahead ahead(int row, int) const { return scales[row]; }
    NCZ_DEVICE void run(int row, int n, const int32_t (&codes)[RUN], Scale scale) const {
        Element values[RUN];
#pragma unroll
        for (int i = 0; i < RUN; ++i) values[i] = value_of(codes[i], scale);
        store_run(to + row * ROW, n, values);
    }
};
// The values that the sums of the codes and of own values' codes stand for. They may stand where the own values do.
template <class Rows>
struct PutSums {
    Rows rows;  // from this lane's first run on
    Element* to;
    const Scale* scales;

    struct Ahead {
        FetchedFloats own;
        Scale scale;
    };
    NCZ_DEVICE Ahead ahead(int row, int n) const { return {rows.fetch(row, n), scales[row]}; }
    NCZ_DEVICE void run(int row, int n, const int32_t (&codes)[RUN], const Ahead& ahead) const {
        int32_t own[RUN];
        Element values[RUN];
        rows.codes_of(ahead.own, row, own);
#pragma unroll
        for (int i = 0; i < RUN; ++i) values[i] = value_of(sum(codes[i], own[i]), ahead.scale);
        store_run(to + row * ROW, n, values);
    }
};

// Starts to copy what decoders of input `i` look codes up in. By the whole block.
NCZ_DEVICE void fetch_entries(const Opened& opened, int i, PagesToRead& shared) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(opened.entries + i * HUFFMAN_WHOLE);
    for (int at = int(threadIdx.x); at < int(HUFFMAN_WHOLE) / 2; at += PAGE_THREADS)
        copy_async(reinterpret_cast<uint32_t*>(shared.entries) + at, from + at);
}

// Decodes this warp's `page` of input `i`, of `length` codes. A page that is damaged is told of in the input's status, but not in
// `result`, which other blocks look at meanwhile. By the whole block.
template <class Put>
NCZ_DEVICE void decode_page(const Opened& opened, int i, int64_t page, int length, PagesToRead& shared, Put& put) {
    fetch_entries(opened, i, shared);
    Status& status = opened.statuses[i];
    const Input& input = opened.inputs.of[i];
    PageMemory& memory = shared.pages[warp()];
    bool is_whole = true;
    int words = 0;
    if (length) {
        PlacedPage placed = placed_page(opened.offsets[input.first_chunk + page]);
        is_whole = load_page(payload_words(input.frame) + placed.offset / 4, placed.words, memory, words);
    }
    await_copies();
    __syncthreads();
    int32_t predictor = status.header.predictor;
    bool is_gapped = status.header.width == GAPPED;
    if (length && is_whole && is_gapped)
        is_whole = decode_lanes<ReadGaps, false>(memory, words, length, predictor, shared.entries, put);
    else if (length == PAGE && is_whole)
        is_whole = decode_lanes<ReadTokens, true>(memory, words, length, predictor, shared.entries, put);
    else if (length && is_whole)
        is_whole = decode_lanes<ReadTokens, false>(memory, words, length, predictor, shared.entries, put);
    if (!is_whole && lane() == 0 && record(status, damaged(DAMAGED_PAGE)))
        report_damage(damaged(DAMAGED_PAGE), status, opened.report);
}

// Decodes the pages of block `number` of input `i`, if it is a HUFFMAN32 frame without other damage. `put_of` gives what takes the
// rows of a page.
template <class PutOf>
NCZ_DEVICE void decode_pages(PutOf put_of, int i, int64_t number, const Opened& opened, PagesToRead& shared) {
    const Status& status = opened.statuses[i];
    int64_t count = opened.inputs.of[i].count, page = number * PAGE_WARPS + warp();
    if (number >= page_blocks_of(count) || status.result || status.header.coder != HUFFMAN32) return;
    auto put = put_of(page);
    decode_page(opened, i, page, length_of_huffman_page(page, count), shared, put);
}

// ------------------------------------------------------------------ sums of several frames

// What the codes of a frame are added to.
enum class Onto { NOTHING, VALUES, CODES, NARROW };

// Takes the rows of a page of one frame after the other, and adds them up: the first to own values, the others to what those before
// have left. That has 16 bits for each code, unless some don't fit. The last gives codes or values.
template <class Rows>
struct PutShares {
    Rows own;  // this and the following begin with this lane's first run
    int16_t* narrow;
    int32_t* codes;
    Element* values;  // null: codes are wanted
    const Scale* scales;
    Onto onto;
    bool is_last;
    bool is_wide;  // whether what is left has 32 bits, and stands in `codes`
    int over;      // not 0 if some code didn't fit in 16 bits

    // A run that is added to, and the inverse step of values, or the scale of what they become: never both.
    struct Ahead {
        uint32_t run[sizeof(Element) == 8 ? 8 : 4];
        Scale step;
    };
    template <class Run>
    NCZ_DEVICE static void keep(const Run& run, Ahead& ahead) {
        memcpy(ahead.run, &run, sizeof run);
    }
    template <class Run>
    NCZ_DEVICE static Run kept(const Ahead& ahead) {
        Run run;
        memcpy(&run, ahead.run, sizeof run);
        return run;
    }
    NCZ_DEVICE Ahead ahead(int row, int n) const {
        Ahead ahead;
        if (onto == Onto::VALUES) {
            FetchedFloats fetched = own.fetch(row, n);
            ahead.step = fetched.inverse_step;
            keep(fetched.run, ahead);
        } else if (onto == Onto::CODES) {
            keep(PlainCodes::Rows{codes}.fetch(row, n), ahead);
        } else if (onto == Onto::NARROW) {
            LaneRun<int16_t> left;
            left.load(narrow + row * ROW);
            keep(left, ahead);
        }
        if (is_last && values) ahead.step = scales[row];
        return ahead;
    }
    NCZ_DEVICE void run(int row, int n, const int32_t (&codes_of_frame)[RUN], const Ahead& ahead) {
        int32_t total[RUN] = {};
        if (onto == Onto::VALUES) {
            own.codes_of(FetchedFloats{kept<LaneRun<Element>>(ahead), ahead.step}, row, total);
        } else if (onto == Onto::CODES) {
            kept<LaneRun<int32_t>>(ahead).get(total);
        } else if (onto == Onto::NARROW) {
            int16_t left[RUN];
            kept<LaneRun<int16_t>>(ahead).get(left);
#pragma unroll
            for (int i = 0; i < RUN; ++i) total[i] = left[i];
        }
#pragma unroll
        for (int i = 0; i < RUN; ++i) total[i] = sum(total[i], codes_of_frame[i]);
        if (is_last && values) {
            Element sums[RUN];
#pragma unroll
            for (int i = 0; i < RUN; ++i) sums[i] = value_of(total[i], ahead.step);
            store_run(values + row * ROW, n, sums);
        } else if (is_last || is_wide) {
            store_run(codes + row * ROW, n, total);
        } else {
            int16_t left[RUN];
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                left[i] = int16_t(total[i]);
                over |= left[i] ^ total[i];
            }
            LaneRun<int16_t>::of(left).store(narrow + row * ROW);
        }
    }
};

// Shared memory of a block.
struct PagesToAdd {
    PagesToRead reading;
    uint32_t is_over;  // whether 16 bits were too few for some code
};

// Adds the HUFFMAN32 frames of each piece, unless ncz_decode_sum does so by itself, to the codes of its own values or, if it has
// none, to those that stand there; without `adds`, to nothing. The sum becomes what is wanted, or codes if the piece has frames of
// other coders, which other kernels add. A warp has one page, of all frames.
template <class SourceOf>
NCZ_DEVICE void sum_pages(SourceOf source_of, const Pieces& pieces, const Opened& opened, int16_t* sums, int adds,
                          PagesToAdd& shared) {
    const Piece& piece = pieces.of[frame_number(pieces.n)];
    int64_t number = unit_number(pieces.n), page = number * PAGE_WARPS + warp();
    int frames = frames_of_pages(piece, opened.statuses);
    bool is_all = is_sum_of_pages(piece, opened.statuses);
    if (number >= page_blocks_of(piece.count) || !frames || is_added_by_reader(piece)) return;
    if (threadIdx.x == 0) shared.is_over = 0;
    int64_t at = page * PAGE + lane() * RUN;
    auto own = source_of(piece).rows(at);
    PutShares<decltype(own)> put = {own, sums + int64_t(piece.first_chunk) * CHUNK + at, piece.codes + at};
    put.values = piece.sum && is_all ? static_cast<Element*>(piece.sum) + at : nullptr;
    put.scales = static_cast<const Scale*>(piece.scales) + page * PAGE_ROWS;
    put.is_wide = !piece.values;
    Onto first = !piece.values ? (adds ? Onto::CODES : Onto::NOTHING) : is_all && adds ? Onto::VALUES : Onto::NOTHING;
    int length = length_of_huffman_page(page, piece.count);
    unsigned input = piece.first_input;
#pragma unroll 1
    for (int done = 0; done < frames; ++input) {
        if (opened.statuses[input].header.coder != HUFFMAN32) continue;
        put.onto = done == 0 ? first : put.is_wide ? Onto::CODES : Onto::NARROW;
        put.is_last = ++done == frames;
        put.over = 0;
        decode_page(opened, int(input), page, length, shared.reading, put);
        if (put.over) atomicOr(&shared.is_over, 1u);
        __syncthreads();  // also because the next frame's code comes to where this one's was
        if (shared.is_over && !put.is_wide) {  // once more, with room for any code
            put.is_wide = true;
            done = 0;
            input = piece.first_input - 1;
        }
    }
}

NCZ_KERNEL_OF(PAGE_THREADS, PAGE_SUM_BLOCKS, ncz_sum_pages)
(const __grid_constant__ Pieces pieces, NCZ_OPENED, int16_t* sums, int adds) {
    NCZ_SHARED(PagesToAdd, shared, 1);
    sum_pages(floats_of, pieces, {inputs, statuses, report, offsets, entries}, sums, adds, *shared);
}

NCZ_KERNEL_OF(PAGE_THREADS, PAGE_SUM_BLOCKS, ncz_sum_pages_at_random)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Noise noise, NCZ_OPENED, int16_t* sums, int adds) {
    NCZ_SHARED(PagesToAdd, shared, 1);
    auto source_of = [&noise](const Piece& piece) { return random_floats_of(piece, noise); };
    sum_pages(source_of, pieces, {inputs, statuses, report, offsets, entries}, sums, adds, *shared);
}

#define NCZ_HUFFMAN32_KERNELS(X)                                                                                      \
    X(ncz_encode_pages) X(ncz_encode_pages_at_random) X(ncz_encode_pages_of_codes) X(ncz_sum_pages) X(ncz_sum_pages_at_random)
