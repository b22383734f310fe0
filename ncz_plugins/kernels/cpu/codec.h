// The part of the codec that does not depend on the instruction set: frames, the selector, statistics and the C
// functions. Included by portable.cpp and avx2.cpp after their primitives, which work on one block of 32 numbers:
//
//     Block, load_block, store_block, add_blocks    32 codes, residuals or symbols; to and from int32
//     quantize_block, dequantize_block              floats and codes; streamed floats go past the caches
//     random_block                                  random numbers, their upper 24 bits, by which floats become codes
//     can_stream, stream_bytes, end_streaming       whether they, or any bytes, may go to an address; puts them before later stores
//     Delta                                         codes and residuals
//     zigzag, unzigzag                              residuals and symbols
//     width_of, pack_block, unpack_block            symbols and bits
//
// and NCZ_NAME(function), the name of a C function there.
//
// Every kernel is one loop (`run`) that takes blocks from a source and puts them into a sink, in registers. All names
// are local to the including file, so that nothing that was compiled for AVX2 is linked into the portable kernels.

#pragma once

#include <type_traits>

#include "checksum.h"
#include "../common/floats.h"
#include "../common/format.h"
#include "huffman_decoder.h"
#include "huffman_encoder.h"
#include "rans.h"
#include "select.h"
#include "symbols.h"

namespace {

using namespace ncz;

// The first `n` of the 32 numbers of a block, then zeros: the last block of a tensor may be short.
template <class T>
struct Padded {
    T values[BLOCK] = {};
    Padded() {}
    Padded(const T* from, int n) { memcpy(values, from, size_t(n) * sizeof(T)); }
    void copy_to(T* to, int n) const { memcpy(to, values, size_t(n) * sizeof(T)); }
};

inline Block load_short(const int32_t* from, int n) {
    return n == BLOCK ? load_block(from) : load_block(Padded<int32_t>(from, n).values);
}

inline void store_short(const Block& block, int n, int32_t* to) {
    if (n == BLOCK) return store_block(block, to);
    Padded<int32_t> padded;
    store_block(block, padded.values);
    padded.copy_to(to, n);
}

// ------------------------------------------------------------------ the loop

// A short last block, out of line, and once for all sinks and sources: every pair of them has its own loop below.
template <class Source>
[[gnu::noinline]] Block next_short(Source source, int n) {
    return source.next(n);
}

template <class Sink>
[[gnu::noinline]] Sink put_short(Sink sink, const Block& block, int n) {
    sink.put(block, n);
    return sink;
}

// Chunk `c` of `count` codes, which come in order. Source: begin(chunk, length), next(n), and where the selector looks
// at it, seek(element). Sink: begin(chunk, length), put(block, n), end().
// Works on copies of both, whose addresses are never taken, with everything inlined: so their state stays in registers.
template <class Source, class Sink>
[[gnu::flatten, gnu::noinline]] void run_chunk(Source& shared_source, Sink& shared_sink, int64_t c, int64_t count) {
    Source source = shared_source;
    Sink sink = shared_sink;
    int length = length_of(c, count);
    source.begin(c, length);
    sink.begin(c, length);
    int i = 0;
    for (; i + BLOCK <= length; i += BLOCK) sink.put(source.next(BLOCK), BLOCK);
    if (i < length) sink = put_short(sink, next_short(source, length - i), length - i);
    sink.end();
    shared_source = source;
    shared_sink = sink;
}

template <class Source, class Sink>
Sink run(Source source, Sink sink, int64_t count) {
    for (int64_t c = 0; c < chunks_of(count); ++c) run_chunk(source, sink, c, count);
    return sink;
}

// ------------------------------------------------------------------ codes and floats

enum Access { READ, WRITE };

// Brings the cache lines of what a loop reads or writes next: `length` numbers, 2 KiB behind `at`. Processors look ahead
// by themselves, but within a page of 4 KiB only, which leaves tensors beyond the caches at half of the memory's speed.
// There may be no memory at that place.
template <Access access, class T>
inline void prefetch(const T* at, int length) {
    auto ahead = reinterpret_cast<uintptr_t>(at) + 2048;
    for (uintptr_t byte = 0; byte < uintptr_t(length) * sizeof(T); byte += 64)
        __builtin_prefetch(reinterpret_cast<const void*>(ahead + byte), access);
}

class CodesSource {
  public:
    explicit CodesSource(const int32_t* codes) : codes_(codes) {}
    void seek(int64_t first) { at_ = codes_ + first; }
    void begin(int64_t c, int) { seek(c * CHUNK); }
    Block next(int n) {
        prefetch<READ>(at_, BLOCK);
        Block block = load_short(at_, n);
        at_ += n;
        return block;
    }

  private:
    const int32_t *codes_, *at_ = nullptr;
};

template <bool add>
class CodesSink {
  public:
    explicit CodesSink(int32_t* codes) : codes_(codes) {}
    void begin(int64_t c, int) { at_ = codes_ + c * CHUNK; }
    void put(const Block& codes, int n) {
        prefetch<WRITE>(at_, BLOCK);
        store_short(add ? add_blocks(codes, load_short(at_, n)) : codes, n, at_);
        at_ += n;
    }
    void end() {}

  private:
    int32_t *codes_, *at_ = nullptr;
};

template <class T, class Scale>
class FloatsSource {
  public:
    FloatsSource(const T* x, const Scale* inverse_steps) : x_(x), inverse_steps_(inverse_steps) {}
    void seek(int64_t first) { element_ = first; }
    void begin(int64_t c, int) { seek(c * CHUNK); }
    Block next(int n) {
        const T* from = x_ + element_;
        Scale inverse_step = inverse_steps_[element_ / SCALE_BLOCK];
        prefetch<READ>(from, BLOCK);
        element_ += n;
        return n == BLOCK ? quantize_block(from, inverse_step)
                          : quantize_block(Padded<T>(from, n).values, inverse_step);
    }

  private:
    const T* x_;
    const Scale* inverse_steps_;
    int64_t element_ = 0;
};

// As FloatsSource, but rounded up or down at random.
template <class T, class Scale>
class StochasticSource {
  public:
    StochasticSource(const T* x, const Scale* inverse_steps, const Noise& noise)
        : x_(x), inverse_steps_(inverse_steps), noise_(noise) {}
    void seek(int64_t first) { element_ = first; }
    void begin(int64_t c, int) { seek(c * CHUNK); }
    Block next(int n) {
        const T* from = x_ + element_;
        Scale inverse_step = inverse_steps_[element_ / SCALE_BLOCK];
        prefetch<READ>(from, BLOCK);
        Block random = random_block(noise_, element_);
        element_ += n;
        return n == BLOCK ? quantize_block(from, inverse_step, random)
                          : quantize_block(Padded<T>(from, n).values, inverse_step, random);
    }

  private:
    const T* x_;
    const Scale* inverse_steps_;
    int64_t element_ = 0;
    Noise noise_;
};

// From so many bytes on, decoded floats are streamed: through the caches, a processor reads memory before it writes there.
// Fewer stay in a core's own cache, for whoever reads them next.
constexpr int64_t STREAMED_BYTES = 1 << 20;

// The floats of a block of `n` codes.
template <class T, class Scale>
inline void store_floats(const Block& codes, int n, Scale scale, bool is_streamed, T* to) {
    if (n < BLOCK) {
        Padded<T> padded;
        dequantize_block<false>(codes, scale, padded.values);
        padded.copy_to(to, n);
    } else if (is_streamed) {
        dequantize_block<true>(codes, scale, to);
    } else {
        prefetch<WRITE>(to, BLOCK);
        dequantize_block<false>(codes, scale, to);
    }
}

template <class T, class Scale>
class FloatsSink {
  public:
    FloatsSink(T* out, const Scale* scales, bool is_streamed = false)
        : out_(out), scales_(scales), is_streamed_(is_streamed) {}
    void begin(int64_t c, int) { element_ = c * CHUNK; }
    void put(const Block& codes, int n) {
        store_floats(codes, n, scales_[element_ / SCALE_BLOCK], is_streamed_, out_ + element_);
        element_ += n;
    }
    void end() {}

  private:
    T* out_;
    const Scale* scales_;
    bool is_streamed_;
    int64_t element_ = 0;
};

template <class First, class Second>
class SumSource {
  public:
    SumSource(First first, Second second) : first_(first), second_(second) {}
    void begin(int64_t c, int length) {
        first_.begin(c, length);
        second_.begin(c, length);
    }
    Block next(int n) { return add_blocks(first_.next(n), second_.next(n)); }

  private:
    First first_;
    Second second_;
};

// ------------------------------------------------------------------ reading frames

// The most that HUFFMAN and RANS code together, and what is read and written beyond it. All that decoding takes.
constexpr int64_t UNIT_BYTES = 4 * RANS_PAGE + 4 * BLOCK;

constexpr int32_t FRAMES_TOGETHER = 4;  // that are added up in one pass; ../cpu/__init__.py expects the same

// What HUFFMAN and RANS decode, as integers of the same width, for FrameSource to read. Too large to be copied with it.
class DecodedSymbols {
  public:
    explicit DecodedSymbols(uint8_t* unit) : symbols_(reinterpret_cast<uint32_t*>(unit)) {}
    DecodedSymbols(const DecodedSymbols&) = delete;

    int64_t open(int32_t coder, const uint8_t* payload, int64_t bytes, int64_t count) {
        coder_ = coder;
        return coder == HUFFMAN ? huffman_.open(payload, bytes, count) : rans_.open(payload, bytes, count);
    }

    // Chunks must be read in order. A damaged chunk reads as zeros, and damage() reports it.
    [[gnu::noinline]] const uint8_t* chunk(int64_t c) {
        return coder_ == HUFFMAN ? chunk(huffman_, c, HUFFMAN_LANE) : chunk(rans_, c, RANS_DAMAGED_PAGE);
    }

    unsigned width() const { return coder_ == HUFFMAN ? huffman_.width() : rans_.width(); }
    const uint8_t* end() const { return bytes() + UNIT_BYTES; }
    int64_t damage() const { return damage_; }

  private:
    template <class Decoder>
    const uint8_t* chunk(Decoder& decoder, int64_t c, Damage cause) {
        constexpr int64_t chunks = Decoder::UNIT / CHUNK;
        if (c % chunks == 0 && !decoder.decode(c / chunks, symbols_)) {
            memset(symbols_, 0, size_t(UNIT_BYTES));
            damage_ = damaged(cause);
        }
        return bytes() + c % chunks * CHUNK * (decoder.width() / 8);
    }

    const uint8_t* bytes() const { return reinterpret_cast<const uint8_t*>(symbols_); }

    uint32_t* symbols_;
    int32_t coder_ = HUFFMAN;
    int64_t damage_ = 0;
    HuffmanDecoder huffman_;
    RansDecoder rans_;
};

// Symbols of one width for all, those of RAW or decoded ones, are read as FIXED is: an octet of 8, 16 or 32 bits is an
// array of integers.
class FrameSource {
  public:
    explicit FrameSource(DecodedSymbols& decoded) : decoded_(&decoded) {}

    // Returns the frame's damage, or 0; a damaged frame must not be read. Damage in HUFFMAN's chunks and RANS's pages
    // shows only on reading: `damage` reports it afterwards.
    int64_t open(const uint8_t* frame, int64_t bytes, int64_t count) {
        Header header = {};
        if (bytes >= HEADER_BYTES) memcpy(&header, frame, sizeof header);
        if (int64_t wrong = header_damage(header, bytes, count)) return wrong;
        if (header.flags == HAS_CHECKSUM) {
            uint32_t checksum = checksum_of(frame, bytes);
            if (checksum != header.checksum) return damaged(OTHER_CHECKSUM, checksum);
        }
        if (int64_t wrong = coder_damage(header)) return wrong;
        payload_ = frame + HEADER_BYTES;
        end_ = frame + bytes;
        is_delta_ = header.predictor == DELTA;
        coder_ = header.coder;
        width_ = header.width;
        in_ = payload_;
        if (coder_ == RAW) return 0;
        return coder_ == FIXED ? open_fixed(count) : open_coded(count);
    }

    int64_t damage() const { return decoded_->damage(); }

    // Chunks are read in order: one of RAW or FIXED begins where the one before it ended.
    void begin(int64_t c, int length) {
        delta_ = Delta();
        if (coder_ == FIXED) {
            widths_ = in_;
            in_ += blocks_of(length);
        } else if (coder_ != RAW) {
            in_ = decoded_->chunk(c);
        }
    }

    Block next(int n) {
        unsigned width = width_ ? width_ : *widths_++;
        unsigned bytes = width_ ? unsigned(n) * (width / 8) : unsigned(octets_of(n)) * width;
        Block symbols;
        if (end_ - in_ >= int64_t(OCTETS * width + SLACK)) {
            symbols = unpack_block(in_, width);
        } else {
            uint8_t local[OCTETS * 32 + SLACK] = {};
            memcpy(local, in_, bytes);
            symbols = unpack_block(local, width);
        }
        in_ += bytes;
        Block residuals = unzigzag(symbols);
        return is_delta_ ? delta_.sum(residuals) : residuals;
    }

  private:
    int64_t open_coded(int64_t count) {
        int64_t wrong = decoded_->open(coder_, payload_, end_ - payload_, count);
        width_ = decoded_->width();
        end_ = decoded_->end();
        return wrong;
    }

    int64_t open_fixed(int64_t count) {
        int64_t chunks = chunks_of(count), sum = 0;
        if (end_ - payload_ < 2 * chunks) return damaged(NO_TABLE);
        in_ = payload_ + 2 * chunks;
        for (int64_t c = 0; c < chunks; ++c) sum += load16(payload_ + 2 * c);
        if (sum != end_ - in_) return damaged(TABLE_SUM, sum);
        const uint8_t* chunk = in_;
        for (int64_t c = 0; c < chunks; ++c) {
            int bytes = load16(payload_ + 2 * c);
            if (int64_t wrong = check_chunk(chunk, bytes, length_of(c, count))) return wrong;
            chunk += bytes;
        }
        return 0;
    }

    static int64_t check_chunk(const uint8_t* chunk, int bytes, int length) {
        int blocks = blocks_of(length);
        if (bytes < blocks) return damaged(BAD_WIDTH);
        uint8_t widest = 0;
        int sum = 0;
        for (int b = 0; b < blocks; ++b) {
            widest = chunk[b] > widest ? chunk[b] : widest;
            sum += chunk[b];
        }
        if (widest > 32) return damaged(BAD_WIDTH);
        int missing_octets = OCTETS * blocks - octets_of(length);  // of the last block
        bool right = blocks + OCTETS * sum - missing_octets * chunk[blocks - 1] == bytes;
        return right ? 0 : damaged(CHUNK_LENGTH, bytes);
    }

    const uint8_t *payload_ = nullptr, *end_ = nullptr, *widths_ = nullptr, *in_ = nullptr;
    DecodedSymbols* decoded_;
    int32_t coder_ = FIXED;
    unsigned width_ = 0;  // of all symbols; 0: FIXED
    bool is_delta_ = false;
    Delta delta_;
};

// Returns the frame's damage, or 0. `scratch`: UNIT_BYTES.
template <bool add>
int64_t read_codes(const uint8_t* frame, int64_t bytes, int64_t count, int32_t* codes, uint8_t* scratch) {
    DecodedSymbols decoded(scratch);
    FrameSource source(decoded);
    if (int64_t wrong = source.open(frame, bytes, count)) return wrong;
    run(source, CodesSink<add>(codes), count);
    return source.damage();
}

// ------------------------------------------------------------------ writing frames

// Symbols of the codes of a chunk, block by block. Whatever stands behind the last code, the padding is zero.
template <bool is_delta>
class Symbols {
  public:
    Block of(const Block& codes, int n) {
        Block symbols = zigzag(is_delta ? delta_.difference(codes) : codes);
        if (n < BLOCK) {
            Padded<int32_t> all;
            store_block(symbols, all.values);
            symbols = load_short(all.values, n);
        }
        return symbols;
    }

  private:
    Delta delta_;
};

// Writes `bytes` of the bits of a block; directly to `out` if the bytes written beyond them stay below `capacity`.
inline void pack_short(const Block& symbols, unsigned width, unsigned bytes, unsigned capacity, uint8_t* out) {
    if (OCTETS * width + SLACK <= capacity) {
        pack_block(symbols, width, out);
    } else {
        uint8_t local[OCTETS * 32 + SLACK];
        pack_block(symbols, width, local);
        memcpy(out, local, bytes);
    }
}

// The bytes that max_frame_bytes counts for `n` symbols: a buffer for a frame holds at least these.
inline unsigned room_of(int n) { return unsigned(octets_of(n)) * 32; }

template <bool is_delta>
class FixedSink {
  public:
    FixedSink(uint8_t* payload, int64_t count) : table_(payload), out_(payload + 2 * chunks_of(count)) {}
    void begin(int64_t, int length) {
        symbols_ = {};
        widths_ = chunk_ = out_;
        out_ += blocks_of(length);
    }
    void put(const Block& codes, int n) {
        Block symbols = symbols_.of(codes, n);
        unsigned width = width_of(symbols);
        unsigned bytes = unsigned(octets_of(n)) * width;
        *widths_++ = uint8_t(width);
        pack_short(symbols, width, bytes, room_of(n), out_);
        out_ += bytes;
    }
    void end() {
        store16(table_, uint16_t(out_ - chunk_));
        table_ += 2;
    }
    uint8_t* out() const { return out_; }

  private:
    uint8_t *table_, *out_, *chunk_ = nullptr, *widths_ = nullptr;
    Symbols<is_delta> symbols_;
};

template <bool is_delta>
class RawSink {
  public:
    RawSink(uint8_t* payload, unsigned width) : out_(payload), width_(width) {}
    void begin(int64_t, int) { symbols_ = {}; }
    void put(const Block& codes, int n) {
        unsigned bytes = unsigned(n) * (width_ / 8);
        pack_short(symbols_.of(codes, n), width_, bytes, room_of(n), out_);
        out_ += bytes;
    }
    void end() {}
    uint8_t* out() const { return out_; }

  private:
    uint8_t* out_;
    unsigned width_;
    Symbols<is_delta> symbols_;
};

// Measures instead of writing.
template <bool is_delta>
class WidthSink {
  public:
    void begin(int64_t, int) { symbols_ = {}; }
    void put(const Block& codes, int n) {
        unsigned width = width_of(symbols_.of(codes, n));
        widest_ = width > widest_ ? width : widest_;
    }
    void end() {}
    unsigned raw_width() const { return raw_width_of(widest_); }

  private:
    unsigned widest_ = 0;
    Symbols<is_delta> symbols_;
};

// Collects symbols, chunk by chunk, until they are restarted.
template <bool is_delta>
class SymbolsSink {
  public:
    explicit SymbolsSink(uint8_t* symbols) : first_(reinterpret_cast<uint32_t*>(symbols)), at_(first_) {}
    void restart() { at_ = first_; }
    void begin(int64_t, int) { symbols_ = {}; }
    void put(const Block& codes, int n) {
        Block symbols = symbols_.of(codes, n);
        unsigned width = width_of(symbols);
        widest_ = width > widest_ ? width : widest_;
        store_block(symbols, at_);
        at_ += n;
    }
    void end() {}
    unsigned raw_width() const { return raw_width_of(widest_); }

  private:
    uint32_t *first_, *at_;
    unsigned widest_ = 0;
    Symbols<is_delta> symbols_;
};

template <class Source>
Choice select(Source source, int64_t count, const Coding& coding) {
    bool is_settled = coding.coder != AUTO_CODER && coding.predictor != AUTO_PREDICTOR;
    if (is_settled && coding.coder != RANS) return {coding.coder, coding.predictor, 0};
    int32_t codes[MOST_SAMPLED];
    int n = 0;
    for_each_piece(count, [&](int64_t first, int length) {
        source.seek(first);
        for (int left = length; left > 0; left -= BLOCK)
            store_block(source.next(left < BLOCK ? left : BLOCK), codes + n + length - left);
        n += length;
    });
    return choose(codes, n, count, coding);
}

// Parts of the working memory that the caller provides: UNIT_BYTES, and little more than 4 bytes for each code. Unused
// memory is not touched.
struct Scratch {
    static int64_t bytes(int64_t count) {
        static_assert(CHUNK <= RANS_PAGE, "fewer units take less");
        return UNIT_BYTES + KeptSymbols<CHUNK>::bytes(count);
    }

    explicit Scratch(uint8_t* scratch)
        : unit(scratch), kept(scratch + UNIT_BYTES), codes(reinterpret_cast<int32_t*>(kept)) {}

    uint8_t* unit;   // symbols that are decoded together and, when all are decoded, those that are encoded together
    uint8_t* kept;   // for KeptSymbols
    int32_t* codes;  // in the same place: symbols are kept where their codes have been read
};

// In front of a payload of `bytes`; gives the bytes of both.
inline int64_t write_header(uint8_t* frame, int32_t coder, int32_t predictor, unsigned width, int64_t count,
                            int64_t bytes) {
    Header header = {};
    header.magic = MAGIC;
    header.version = VERSION;
    header.coder = uint8_t(coder);
    header.predictor = uint8_t(predictor);
    header.width = uint8_t(width);
    header.count = uint32_t(count);
    header.payload_bytes = uint32_t(bytes);
    memcpy(frame, &header, sizeof header);
    return HEADER_BYTES + bytes;
}

template <bool is_delta, class Source>
int64_t write_fixed(Source source, int64_t count, uint8_t* frame) {
    uint8_t* payload = frame + HEADER_BYTES;
    int64_t bytes = run(source, FixedSink<is_delta>(payload, count), count).out() - payload;
    return write_header(frame, FIXED, is_delta, 0, count, bytes);
}

// All codes have to be read before the first can be written.
template <bool is_delta>
int64_t write_raw(CodesSource codes, int64_t count, uint8_t* frame) {
    uint8_t* payload = frame + HEADER_BYTES;
    unsigned width = run(codes, WidthSink<is_delta>(), count).raw_width();
    int64_t bytes = run(codes, RawSink<is_delta>(payload, width), count).out() - payload;
    return write_header(frame, RAW, is_delta, width, count, bytes);
}

// With HUFFMAN or RANS, unless RAW takes fewer bytes.
template <bool is_delta, class Encoder, class Source>
int64_t write_coded(Source source, Encoder& encoder, KeptSymbols<Encoder::UNIT>& kept, int32_t coder, uint8_t* frame,
                    uint8_t* unit) {
    SymbolsSink<is_delta> sink(unit);
    int64_t count = kept.count();
    for (int64_t u = 0; u < kept.units(); ++u) {
        int n = kept.length(u);
        sink.restart();
        for (int64_t c = u * (Encoder::UNIT / CHUNK), end = c + chunks_of(n); c < end; ++c)
            run_chunk(source, sink, c, count);
        encoder.add(reinterpret_cast<uint32_t*>(unit), n);
    }
    uint8_t* payload = frame + HEADER_BYTES;
    int64_t raw_bytes = count * (sink.raw_width() / 8), bytes = encoder.write(payload, raw_bytes);
    if (bytes >= 0) return write_header(frame, coder, is_delta, 0, count, bytes);
    kept.write_raw(payload, sink.raw_width());
    return write_header(frame, RAW, is_delta, sink.raw_width(), count, raw_bytes);
}

// The codes in memory.
template <class Source>
CodesSource kept_codes(Source source, int64_t count, const Scratch& scratch) {
    run(source, CodesSink<false>(scratch.codes), count);
    return CodesSource(scratch.codes);
}

inline CodesSource kept_codes(CodesSource codes, int64_t, const Scratch&) { return codes; }

template <bool is_delta, class Source>
int64_t write_frame(Source source, int64_t count, Choice choice, uint8_t* frame, const Scratch& scratch) {
    switch (choice.coder) {
        case FIXED: return write_fixed<is_delta>(source, count, frame);
        case HUFFMAN: {
            KeptSymbols<CHUNK> kept(count, scratch.kept);
            HuffmanEncoder encoder(kept);
            return write_coded<is_delta>(source, encoder, kept, HUFFMAN, frame, scratch.unit);
        }
        case RANS: {
            KeptSymbols<RANS_PAGE> kept(count, scratch.kept);
            RansEncoder encoder(kept, choice.mode);
            return write_coded<is_delta>(source, encoder, kept, RANS, frame, scratch.unit);
        }
        default: return write_raw<is_delta>(kept_codes(source, count, scratch), count, frame);
    }
}

template <class Source>
int64_t write_frame(Source source, int64_t count, const Coding& coding, uint8_t* frame, const Scratch& scratch) {
    Choice choice = select(source, count, coding);
    return choice.predictor == DELTA ? write_frame<true>(source, count, choice, frame, scratch)
                                     : write_frame<false>(source, count, choice, frame, scratch);
}

// ------------------------------------------------------------------ statistics

// The range of `n` numbers, if none of them is a NaN.
template <class Float>
void range_of(const Float* x, int n, double* lowest, double* highest) {
    typedef Float Vector __attribute__((vector_size(VECTOR_BYTES)));
    constexpr int LENGTH = VECTOR_BYTES / sizeof(Float), VECTORS = 4;
    Vector lows[VECTORS], highs[VECTORS], vector;
    for (int v = 0; v < VECTORS; ++v) lows[v] = highs[v] = Vector{} + x[0];
    int i = 0;
    for (; i + VECTORS * LENGTH <= n; i += VECTORS * LENGTH)
        for (int v = 0; v < VECTORS; ++v) {
            memcpy(&vector, x + i + v * LENGTH, sizeof vector);
            lows[v] = vector < lows[v] ? vector : lows[v];
            highs[v] = vector > highs[v] ? vector : highs[v];
        }
    Float low = x[0], high = x[0];
    auto take = [&](Float value) {
        low = value < low ? value : low;
        high = value > high ? value : high;
    };
    for (; i < n; ++i) take(x[i]);
    for (int v = 1; v < VECTORS; ++v) {
        lows[0] = lows[v] < lows[0] ? lows[v] : lows[0];
        highs[0] = highs[v] > highs[0] ? highs[v] : highs[0];
    }
    for (int j = 0; j < LENGTH; ++j) {
        take(lows[0][j]);
        take(highs[0][j]);
    }
    *lowest = double(low) + 0.0;  // not -0.0
    *highest = double(high) + 0.0;
}

template <class Float>
bool are_finite(const Float* x, int n) {
    bool all = true;
    for (int i = 0; i < n; ++i) all &= x[i] - x[i] == 0;
    return all;
}

inline Doubles doubles_at(const double* x) {
    Doubles some;
    memcpy(&some, x, sizeof some);
    return some;
}

// Sum of squares of a whole block.
template <class Float>
double squares_of(const Float* x) {
    constexpr int LENGTH = sizeof(Doubles) / sizeof(double), VECTORS = LANES / LENGTH;
    Doubles sums[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
        sums[v] = Doubles{};
        for (int i = v * LENGTH; i < SCALE_BLOCK; i += LANES) {
            Doubles some = doubles_at(x + i);
            sums[v] += some * some;
        }
    }
    for (int half = VECTORS / 2; half; half /= 2)
        for (int v = 0; v < half; ++v) sums[v] += sums[v + half];
    for (int half = LENGTH / 2; half; half /= 2)
        for (int j = 0; j < half; ++j) sums[0][j] += sums[0][j + half];
    return sums[0][0];
}

// The block as whole block of float or double, at best where it lies.
template <class T, class Float>
inline const Float* widen_block(const T* x, int n, Float* padded) {
    if constexpr (std::is_same_v<T, Float>)
        if (n == SCALE_BLOCK) return x;
    for (int i = 0; i < n; ++i) padded[i] = widen(x[i]);
    for (int i = n; i < SCALE_BLOCK; ++i) padded[i] = 0;
    return padded;
}

template <class T>
void block_statistics(const T* x, int64_t count, double* lowest, double* highest, double* squares) {
    alignas(64) decltype(widen(T())) padded[SCALE_BLOCK];
    for (int64_t b = 0; b < scale_blocks_of(count); ++b) {
        int64_t first = b * SCALE_BLOCK;
        int n = int(count - first < SCALE_BLOCK ? count - first : SCALE_BLOCK);
        prefetch<READ>(x + first, SCALE_BLOCK);
        auto block = widen_block(x + first, n, padded);
        range_of(block, n, lowest + b, highest + b);
        squares[b] = squares_of(block);
        // Anything that is not finite shows in the squares. So do float64 numbers that are very large.
        if (!(squares[b] < __builtin_inf()) && !are_finite(block, n)) {
            lowest[b] = -__builtin_inf();
            highest[b] = squares[b] = __builtin_inf();
        }
    }
}

// ------------------------------------------------------------------ element types

// Calls `function` with `x` as a pointer to its element type and `steps` as one to that type's steps.
// Drops the const of `x`: only `decode` and `dequantize`, which were given a writable pointer, write there.
template <class Function>
auto with_types(const void* x, const void* steps, int32_t dtype, Function function) {
    void* any = const_cast<void*>(x);
    const float* single = static_cast<const float*>(steps);
    switch (dtype) {
        case BFLOAT16: return function(static_cast<bfloat16*>(any), single);
        case FLOAT16: return function(static_cast<float16*>(any), single);
        case FLOAT64: return function(static_cast<double*>(any), static_cast<const double*>(steps));
        default: return function(static_cast<float*>(any), single);
    }
}

template <class T, class Scale>
FloatsSource<T, Scale> source_of(T* x, const Scale* inverse_steps) {
    return {x, inverse_steps};
}

template <class T, class Scale>
StochasticSource<T, Scale> random_source_of(T* x, const Scale* inverse_steps, const Noise& noise) {
    return {x, inverse_steps, noise};
}

// Calls `function` with the codes of `x`, rounded at random if there is `noise`.
template <class Function>
auto with_codes(const void* x, const void* inverse_steps, int32_t dtype, const Noise* noise, Function function) {
    return with_types(x, inverse_steps, dtype, [&](auto* x, auto* inverse_steps) {
        return noise ? function(random_source_of(x, inverse_steps, *noise)) : function(source_of(x, inverse_steps));
    });
}

// As with_codes, but what `x` is made of is asked for each block: for loops that are too long to have one for each type.
class AnySource {
  public:
    AnySource(const void* x, const void* inverse_steps, int32_t dtype, const Noise* noise)
        : x_(x), inverse_steps_(inverse_steps), noise_(noise), dtype_(dtype) {}
    void begin(int64_t c, int) { element_ = c * CHUNK; }
    Block next(int n) {
        int64_t first = element_;
        element_ += n;
        return with_codes(x_, inverse_steps_, dtype_, noise_, [=](auto own) {
            own.seek(first);
            return own.next(n);
        });
    }

  private:
    const void *x_, *inverse_steps_;
    const Noise* noise_;
    int32_t dtype_;
    int64_t element_ = 0;
};

}  // namespace

// ------------------------------------------------------------------ the C functions
//
// Arguments as in ../backend.py. `dtype` is a format.Dtype; `noise` may be null; `scratch` has scratch_bytes(count).
// Functions that read a frame give the bytes they wrote (0 where they write none), or a negative number if it is
// damaged. Nothing is written then, but for a HUFFMAN or RANS frame whose damage shows on decoding.

NCZ_EXPORT void NCZ_NAME(block_statistics)(const void* x, int32_t dtype, int64_t count, double* lowest,
                                           double* highest, double* squares) {
    with_types(x, nullptr, dtype, [&](auto* x, auto*) { block_statistics(x, count, lowest, highest, squares); });
}

NCZ_EXPORT void NCZ_NAME(quantize)(const void* x, int32_t dtype, const void* inverse_steps, int64_t count,
                                   int32_t* codes, const Noise* noise) {
    with_codes(x, inverse_steps, dtype, noise, [&](auto own) { run(own, CodesSink<false>(codes), count); });
}

NCZ_EXPORT void NCZ_NAME(dequantize)(const int32_t* codes, const void* scales, int64_t count, void* out,
                                     int32_t dtype) {
    with_types(out, scales, dtype,
               [&](auto* out, auto* scales) { run(CodesSource(codes), FloatsSink(out, scales), count); });
}

NCZ_EXPORT int64_t NCZ_NAME(scratch_bytes)(int64_t count) { return Scratch::bytes(count); }

NCZ_EXPORT uint32_t NCZ_NAME(checksum)(const uint8_t* frame, int64_t bytes) { return checksum_of(frame, bytes); }

NCZ_EXPORT uint32_t NCZ_NAME(digest)(const void* data, int64_t bytes) { return digest_of(data, bytes); }

NCZ_EXPORT int64_t NCZ_NAME(encode_codes)(const int32_t* codes, int64_t count, const Coding* coding, uint8_t* frame,
                                          uint8_t* scratch) {
    return write_frame(CodesSource(codes), count, *coding, frame, Scratch(scratch));
}

NCZ_EXPORT int64_t NCZ_NAME(decode_codes)(const uint8_t* frame, int64_t bytes, int64_t count, int32_t* codes,
                                          int32_t add, uint8_t* scratch) {
    return add ? read_codes<true>(frame, bytes, count, codes, scratch)
               : read_codes<false>(frame, bytes, count, codes, scratch);
}

NCZ_EXPORT int64_t NCZ_NAME(encode)(const void* x, int32_t dtype, const void* inverse_steps, int64_t count,
                                    const Coding* coding, uint8_t* frame, const Noise* noise, uint8_t* memory) {
    Scratch scratch(memory);
    return with_codes(x, inverse_steps, dtype, noise,
                      [&](auto own) { return write_frame(own, count, *coding, frame, scratch); });
}

NCZ_EXPORT int64_t NCZ_NAME(decode)(const uint8_t* frame, int64_t bytes, const void* scales, int64_t count, void* out,
                                    int32_t dtype, uint8_t* scratch) {
    DecodedSymbols decoded(scratch);
    FrameSource source(decoded);
    if (int64_t wrong = source.open(frame, bytes, count)) return wrong;
    with_types(out, scales, dtype, [&](auto* out, auto* scales) {
        bool is_streamed = count * int64_t(sizeof(*out)) >= STREAMED_BYTES && can_stream(out);
        run(source, FloatsSink(out, scales, is_streamed), count);
        if (is_streamed) end_streaming();
    });
    return source.damage();
}

// `out` may be `x`: each block is read before it is written.
NCZ_EXPORT int64_t NCZ_NAME(decode_sum)(const uint8_t* frame, int64_t bytes, const void* x, int32_t dtype,
                                        const void* inverse_steps, const void* scales, int64_t count, void* out,
                                        const Noise* noise, uint8_t* scratch) {
    DecodedSymbols decoded(scratch);
    FrameSource source(decoded);
    if (int64_t wrong = source.open(frame, bytes, count)) return wrong;
    with_types(x, inverse_steps, dtype, [&](auto* x, auto* inverse_steps) {
        FloatsSink sink(static_cast<decltype(x)>(out), static_cast<decltype(inverse_steps)>(scales));
        auto write = [&](auto own) { run(SumSource<FrameSource, decltype(own)>(source, own), sink, count); };
        noise ? write(random_source_of(x, inverse_steps, *noise)) : write(source_of(x, inverse_steps));
    });
    return source.damage();
}

// The codes in `frame_count` frames, at most FRAMES_TOGETHER, plus those of `x`; without `x` plus those that are there.
// Frame by frame within each chunk, whose codes stay in the fastest cache meanwhile.
NCZ_EXPORT int64_t NCZ_NAME(add_up)(const uint8_t* const* frames, const int64_t* bytes, int32_t frame_count,
                                    const void* x, int32_t dtype, const void* inverse_steps, int64_t count,
                                    int32_t* codes, const Noise* noise, uint8_t* scratch) {
    DecodedSymbols decoded[] = {DecodedSymbols(scratch), DecodedSymbols(scratch + UNIT_BYTES),
                                DecodedSymbols(scratch + 2 * UNIT_BYTES), DecodedSymbols(scratch + 3 * UNIT_BYTES)};
    FrameSource sources[] = {FrameSource(decoded[0]), FrameSource(decoded[1]), FrameSource(decoded[2]),
                             FrameSource(decoded[3])};
    static_assert(sizeof sources == FRAMES_TOGETHER * sizeof(FrameSource), "one for each frame");
    for (int32_t i = 0; i < frame_count; ++i)
        if (int64_t wrong = sources[i].open(frames[i], bytes[i], count)) return wrong;
    auto add = [&](auto begin_chunk) {
        CodesSink<true> sum(codes);
        for (int64_t c = 0; c < chunks_of(count); ++c) {
            begin_chunk(c);
            for (int32_t i = 0; i < frame_count; ++i) run_chunk(sources[i], sum, c, count);
        }
    };
    auto add_to = [&](auto own) {
        CodesSink<false> first(codes);
        add([&](int64_t c) { run_chunk(own, first, c, count); });
    };
    if (x)
        with_codes(x, inverse_steps, dtype, noise, add_to);
    else
        add([](int64_t) {});
    for (int32_t i = 0; i < frame_count; ++i)
        if (int64_t wrong = sources[i].damage()) return wrong;
    return 0;
}

// Only FIXED is written while the sum is made: all others, and the selector, need it more than once.
NCZ_EXPORT int64_t NCZ_NAME(reduce)(const uint8_t* frame, int64_t bytes, const void* x, int32_t dtype,
                                    const void* inverse_steps, int64_t count, const Coding* coding, uint8_t* out,
                                    const Noise* noise, uint8_t* memory) {
    Scratch scratch(memory);
    DecodedSymbols decoded(scratch.unit);
    FrameSource source(decoded);
    if (int64_t wrong = source.open(frame, bytes, count)) return wrong;
    SumSource<FrameSource, AnySource> sum(source, AnySource(x, inverse_steps, dtype, noise));
    if (coding->coder == FIXED && coding->predictor != AUTO_PREDICTOR) {
        int64_t written = coding->predictor == DELTA ? write_fixed<true>(sum, count, out)
                                                     : write_fixed<false>(sum, count, out);
        return decoded.damage() ? decoded.damage() : written;
    }
    CodesSource codes = kept_codes(sum, count, scratch);
    if (int64_t wrong = decoded.damage()) return wrong;
    return write_frame(codes, count, *coding, out, scratch);
}

#include "combine.h"
#include "fixed_rate.h"
#include "differences.h"
#include "scales.h"
