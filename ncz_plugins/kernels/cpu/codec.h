// Everything of the codec that does not depend on the instruction set: frames, the selector, statistics and the C
// functions. Included by portable.cpp and avx2.cpp after their primitives, which work on one block of 32 numbers:
//
//     Block, load_block, store_block, add_blocks    32 codes, residuals or symbols; to and from int32
//     quantize_block, dequantize_block              floats and codes
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

#include "floats.h"
#include "format.h"

namespace {

using namespace ncz;

inline int64_t chunks_of(int64_t count) { return (count + CHUNK - 1) / CHUNK; }
inline int blocks_of(int n) { return (n + BLOCK - 1) / BLOCK; }
inline int octets_of(int n) { return (n + OCTET - 1) / OCTET; }

inline int length_of(int64_t chunk, int64_t count) {
    int64_t left = count - chunk * CHUNK;
    return int(left < CHUNK ? left : CHUNK);
}

// `n` of the 32 numbers of a block, zeros behind them: the last block of a tensor is short.
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

// A short last block, out of line.
template <class Source, class Sink>
[[gnu::noinline]] Sink put_short(Source source, Sink sink, int n) {
    sink.put(source.next(n), n);
    return sink;
}

// Chunk `c` of `count` codes. Source: begin(chunk, length), next(n). Sink: begin(chunk, length), put(block, n), end().
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
    if (i < length) sink = put_short(source, sink, length - i);
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

class CodesSource {
  public:
    explicit CodesSource(const int32_t* codes) : codes_(codes) {}
    void begin(int64_t c, int) { at_ = codes_ + c * CHUNK; }
    Block next(int n) {
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
    void begin(int64_t c, int) {
        at_ = x_ + c * CHUNK;
        inverse_step_ = inverse_steps_[c];
    }
    Block next(int n) {
        const T* from = at_;
        at_ += n;
        return n == BLOCK ? quantize_block(from, inverse_step_)
                          : quantize_block(Padded<T>(from, n).values, inverse_step_);
    }

  private:
    const T *x_, *at_ = nullptr;
    const Scale* inverse_steps_;
    Scale inverse_step_ = 0;
};

template <class T, class Scale>
class FloatsSink {
  public:
    FloatsSink(T* out, const Scale* scales) : out_(out), scales_(scales) {}
    void begin(int64_t c, int) {
        at_ = out_ + c * CHUNK;
        scale_ = scales_[c];
    }
    void put(const Block& codes, int n) {
        if (n == BLOCK) {
            dequantize_block(codes, scale_, at_);
        } else {
            Padded<T> padded;
            dequantize_block(codes, scale_, padded.values);
            padded.copy_to(at_, n);
        }
        at_ += n;
    }
    void end() {}

  private:
    T *out_, *at_ = nullptr;
    const Scale* scales_;
    Scale scale_ = 0;
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

inline int64_t damaged(Damage cause, int64_t value = 0) { return -(int64_t(cause) + 256 * value); }

// RAW is read and written as FIXED with one width for all: an octet of 8, 16 or 32 bits is an array of integers.
class FrameSource {
  public:
    // 0, or what is wrong with the frame, which then must not be read.
    int64_t open(const uint8_t* frame, int64_t bytes, int64_t count) {
        Header header;
        if (bytes < HEADER_BYTES) return damaged(NO_HEADER);
        memcpy(&header, frame, sizeof header);
        if (header.magic != MAGIC) return damaged(BAD_MAGIC);
        if (header.version != VERSION) return damaged(BAD_VERSION);
        if (header.flags || header.checksum) return damaged(RESERVED_SET);
        if (header.predictor != NONE && header.predictor != DELTA) return damaged(BAD_PREDICTOR);
        if (header.count != count) return damaged(OTHER_COUNT);
        if (header.payload_bytes != bytes - HEADER_BYTES) return damaged(OTHER_LENGTH);
        payload_ = frame + HEADER_BYTES;
        end_ = frame + bytes;
        is_delta_ = header.predictor == DELTA;
        raw_width_ = header.width;
        if (header.coder == RAW && (raw_width_ == 8 || raw_width_ == 16 || raw_width_ == 32))
            return end_ - payload_ == count * (raw_width_ / 8) ? 0 : damaged(RAW_LENGTH);
        if (header.coder == FIXED && raw_width_ == 0) return open_fixed(count);
        return damaged(BAD_CODER);
    }

    // Chunks are found fastest in rising order.
    void begin(int64_t c, int length) {
        delta_ = Delta();
        if (raw_width_) {
            in_ = payload_ + c * CHUNK * (raw_width_ / 8);
            return;
        }
        seek(c);
        widths_ = chunk_;
        in_ = chunk_ + blocks_of(length);
    }

    Block next(int n) {
        unsigned width = raw_width_ ? raw_width_ : *widths_++;
        unsigned bytes = raw_width_ ? unsigned(n) * (width / 8) : unsigned(octets_of(n)) * width;
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
    int64_t open_fixed(int64_t count) {
        int64_t chunks = chunks_of(count), sum = 0;
        first_chunk_ = payload_ + 2 * chunks;
        if (end_ - payload_ < 2 * chunks) return damaged(NO_TABLE);
        for (int64_t c = 0; c < chunks; ++c) sum += size_of(c);
        if (sum != end_ - first_chunk_) return damaged(TABLE_SUM, sum);
        for (int64_t c = 0; c < chunks; ++c) {
            seek(c);
            if (int64_t wrong = check_chunk(size_of(c), length_of(c, count))) return wrong;
        }
        return 0;
    }

    int64_t check_chunk(int bytes, int length) const {
        int blocks = blocks_of(length);
        if (bytes < blocks) return damaged(BAD_WIDTH);
        uint8_t widest = 0;
        int sum = 0;
        for (int b = 0; b < blocks; ++b) {
            widest = chunk_[b] > widest ? chunk_[b] : widest;
            sum += chunk_[b];
        }
        if (widest > 32) return damaged(BAD_WIDTH);
        int missing_octets = OCTETS * blocks - octets_of(length);  // of the last block
        bool right = blocks + OCTETS * sum - missing_octets * chunk_[blocks - 1] == bytes;
        return right ? 0 : damaged(CHUNK_LENGTH, bytes);
    }

    int size_of(int64_t c) const {
        uint16_t size;
        memcpy(&size, payload_ + 2 * c, sizeof size);
        return size;
    }

    void seek(int64_t c) {
        if (c < at_ || !chunk_) {
            at_ = 0;
            chunk_ = first_chunk_;
        }
        while (at_ < c) chunk_ += size_of(at_++);
    }

    const uint8_t *payload_ = nullptr, *end_ = nullptr, *first_chunk_ = nullptr;
    unsigned raw_width_ = 0;  // 0: FIXED
    bool is_delta_ = false;

    int64_t at_ = 0;  // the chunk that lies at chunk_
    const uint8_t *chunk_ = nullptr, *widths_ = nullptr, *in_ = nullptr;
    Delta delta_;
};

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

// `bytes` of the bits of a block: in place where what is written beyond them stays within the room for this block.
inline void pack_short(const Block& symbols, unsigned width, unsigned bytes, unsigned room, uint8_t* out) {
    if (OCTETS * width + SLACK <= room) {
        pack_block(symbols, width, out);
    } else {
        uint8_t local[OCTETS * 32 + SLACK];
        pack_block(symbols, width, local);
        memcpy(out, local, bytes);
    }
}

// What max_frame_bytes leaves room for, for `n` symbols: a buffer for a frame never ends before that.
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
        uint16_t size = uint16_t(out_ - chunk_);
        memcpy(table_, &size, sizeof size);
        table_ += sizeof size;
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
class CostSink {
  public:
    void begin(int64_t, int) { symbols_ = {}; }
    void put(const Block& codes, int n) {
        unsigned width = width_of(symbols_.of(codes, n));
        widest_ = width > widest_ ? width : widest_;
        fixed_bytes_ += 1 + int64_t(unsigned(octets_of(n)) * width);
        elements_ += n;
    }
    void end() {}
    unsigned raw_width() const { return widest_ <= 8 ? 8 : widest_ <= 16 ? 16 : 32; }
    int64_t bytes(int32_t coder) const { return coder == FIXED ? fixed_bytes_ : elements_ * (raw_width() / 8); }

  private:
    unsigned widest_ = 0;
    int64_t fixed_bytes_ = 0, elements_ = 0;
    Symbols<is_delta> symbols_;
};

template <bool is_delta, class Source>
CostSink<is_delta> cost_of_sample(Source source, int64_t count) {
    CostSink<is_delta> cost;
    int64_t chunks = chunks_of(count);
    int64_t samples = chunks < SAMPLE_CHUNKS ? chunks : SAMPLE_CHUNKS;
    for (int64_t s = 0; s < samples; ++s) {
        int64_t c = chunks <= SAMPLE_CHUNKS ? s : s * (chunks - 1) / (SAMPLE_CHUNKS - 1);
        run_chunk(source, cost, c, count);
    }
    return cost;
}

// Resolve AUTO: the pair of the allowed ones that takes fewest bytes on a sample, the earliest at a draw.
template <class Source>
void select(Source source, int64_t count, int32_t& coder, int32_t& predictor) {
    if (coder != AUTO_CODER && predictor != AUTO_PREDICTOR) return;
    auto none = cost_of_sample<false>(source, count);
    auto delta = cost_of_sample<true>(source, count);
    struct Candidate {
        int32_t coder, predictor;
        int64_t bytes;
    };
    const Candidate candidates[] = {
        {FIXED, NONE, none.bytes(FIXED)},
        {FIXED, DELTA, delta.bytes(FIXED)},
        {RAW, NONE, none.bytes(RAW)},
        {RAW, DELTA, delta.bytes(RAW)},
    };
    const Candidate* best = nullptr;
    for (const Candidate& candidate : candidates) {
        bool allowed = (coder == AUTO_CODER || coder == candidate.coder) &&
                       (predictor == AUTO_PREDICTOR || predictor == candidate.predictor);
        if (allowed && (!best || candidate.bytes < best->bytes)) best = &candidate;
    }
    coder = best->coder;
    predictor = best->predictor;
}

template <bool is_delta, class Source>
int64_t write_frame(Source source, int64_t count, int32_t coder, uint8_t* frame) {
    uint8_t* payload = frame + HEADER_BYTES;
    const uint8_t* end;
    unsigned width = 0;
    if (coder == RAW) {
        width = run(source, CostSink<is_delta>(), count).raw_width();
        end = run(source, RawSink<is_delta>(payload, width), count).out();
    } else {
        end = run(source, FixedSink<is_delta>(payload, count), count).out();
    }
    Header header = {};
    header.magic = MAGIC;
    header.version = VERSION;
    header.coder = uint8_t(coder);
    header.predictor = is_delta ? DELTA : NONE;
    header.width = uint8_t(width);
    header.count = uint32_t(count);
    header.payload_bytes = uint32_t(end - payload);
    memcpy(frame, &header, sizeof header);
    return end - frame;
}

template <class Source>
int64_t write_frame(Source source, int64_t count, int32_t coder, int32_t predictor, uint8_t* frame) {
    select(source, count, coder, predictor);
    return predictor == DELTA ? write_frame<true>(source, count, coder, frame)
                              : write_frame<false>(source, count, coder, frame);
}

// ------------------------------------------------------------------ statistics

template <class Float>
struct Bits;
template <>
struct Bits<float> {
    using type = int32_t;
    static constexpr type magnitude = 0x7fffffff, infinity = 0x7f800000;
};
template <>
struct Bits<double> {
    using type = int64_t;
    static constexpr type magnitude = 0x7fffffffffffffff, infinity = 0x7ff0000000000000;
};

template <class Float>
void statistics_of_chunk(const Float* x, double* absmax, double* squares) {
    using Int = typename Bits<Float>::type;
    // Magnitudes compare like their bits, and those of an infinity and of every NaN are the largest.
    Int largest = 0;
    for (int i = 0; i < CHUNK; ++i) {
        Int bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= Bits<Float>::magnitude;
        largest = bits > largest ? bits : largest;
    }
    if (largest >= Bits<Float>::infinity) {
        *absmax = *squares = __builtin_inf();
        return;
    }
    Float magnitude;
    memcpy(&magnitude, &largest, sizeof largest);
    *absmax = double(magnitude);

    constexpr int GROUP = 16;  // sums that stay in registers
    double sums[LANES];
    for (int first = 0; first < LANES; first += GROUP) {
        double group[GROUP] = {};
        for (int i = first; i < CHUNK; i += LANES)
            for (int j = 0; j < GROUP; ++j) group[j] += double(x[i + j]) * double(x[i + j]);
        memcpy(sums + first, group, sizeof group);
    }
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
    *squares = sums[0];
}

// The chunk as whole chunk of float or double, at best where it lies.
template <class T, class Float>
inline const Float* widen_chunk(const T* x, int n, Float* padded) {
    if constexpr (std::is_same_v<T, Float>)
        if (n == CHUNK) return x;
    for (int i = 0; i < n; ++i) padded[i] = widen(x[i]);
    for (int i = n; i < CHUNK; ++i) padded[i] = 0;
    return padded;
}

template <class T>
void chunk_statistics(const T* x, int64_t count, double* absmax, double* squares) {
    alignas(64) decltype(widen(T())) padded[CHUNK];
    for (int64_t c = 0; c < chunks_of(count); ++c)
        statistics_of_chunk(widen_chunk(x + c * CHUNK, length_of(c, count), padded), absmax + c, squares + c);
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
FloatsSink<T, Scale> sink_of(T* out, const Scale* scales) {
    return {out, scales};
}

}  // namespace

// ------------------------------------------------------------------ the C functions
//
// Arguments as in ../backend.py. `dtype` is a format.Dtype. Functions that return int64_t give the bytes they wrote
// (0 where they write none), or a negative number when `frame` is damaged; nothing is written then.

NCZ_EXPORT void NCZ_NAME(chunk_statistics)(const void* x, int32_t dtype, int64_t count, double* absmax,
                                           double* squares) {
    with_types(x, nullptr, dtype, [&](auto* x, auto*) { chunk_statistics(x, count, absmax, squares); });
}

NCZ_EXPORT void NCZ_NAME(quantize)(const void* x, int32_t dtype, const void* inverse_steps, int64_t count,
                                   int32_t* codes) {
    with_types(x, inverse_steps, dtype, [&](auto* x, auto* inverse_steps) {
        run(source_of(x, inverse_steps), CodesSink<false>(codes), count);
    });
}

NCZ_EXPORT void NCZ_NAME(dequantize)(const int32_t* codes, const void* scales, int64_t count, void* out,
                                     int32_t dtype) {
    with_types(out, scales, dtype,
               [&](auto* out, auto* scales) { run(CodesSource(codes), sink_of(out, scales), count); });
}

NCZ_EXPORT int64_t NCZ_NAME(encode_codes)(const int32_t* codes, int64_t count, int32_t coder, int32_t predictor,
                                          uint8_t* frame) {
    return write_frame(CodesSource(codes), count, coder, predictor, frame);
}

NCZ_EXPORT int64_t NCZ_NAME(decode_codes)(const uint8_t* frame, int64_t bytes, int64_t count, int32_t* codes,
                                          int32_t add) {
    FrameSource source;
    if (int64_t wrong = source.open(frame, bytes, count)) return wrong;
    if (add)
        run(source, CodesSink<true>(codes), count);
    else
        run(source, CodesSink<false>(codes), count);
    return 0;
}

NCZ_EXPORT int64_t NCZ_NAME(encode)(const void* x, int32_t dtype, const void* inverse_steps, int64_t count,
                                    int32_t coder, int32_t predictor, uint8_t* frame) {
    return with_types(x, inverse_steps, dtype, [&](auto* x, auto* inverse_steps) {
        return write_frame(source_of(x, inverse_steps), count, coder, predictor, frame);
    });
}

NCZ_EXPORT int64_t NCZ_NAME(decode)(const uint8_t* frame, int64_t bytes, const void* scales, int64_t count, void* out,
                                    int32_t dtype) {
    FrameSource source;
    if (int64_t wrong = source.open(frame, bytes, count)) return wrong;
    with_types(out, scales, dtype, [&](auto* out, auto* scales) { run(source, sink_of(out, scales), count); });
    return 0;
}

NCZ_EXPORT int64_t NCZ_NAME(reduce)(const uint8_t* frame, int64_t bytes, const void* x, int32_t dtype,
                                    const void* inverse_steps, int64_t count, int32_t coder, int32_t predictor,
                                    uint8_t* out) {
    FrameSource source;
    if (int64_t wrong = source.open(frame, bytes, count)) return wrong;
    return with_types(x, inverse_steps, dtype, [&](auto* x, auto* inverse_steps) {
        auto own = source_of(x, inverse_steps);
        return write_frame(SumSource<FrameSource, decltype(own)>(source, own), count, coder, predictor, out);
    });
}
