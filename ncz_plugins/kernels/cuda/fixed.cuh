// The coders FIXED and RAW. A RAW chunk is packed as a FIXED one whose blocks all have the same width.
#pragma once

#include "frame.cuh"

constexpr int MAX_CHUNK_BYTES = int(CHUNK) / BLOCK + 4 * int(CHUNK);
// With up to 3 bytes before it, and a word behind it that is read but not used.
constexpr int CHUNK_WORDS = (MAX_CHUNK_BYTES + 3 + 3) / 4 + 1;

// ------------------------------------------------------------------ octets and bits

// Where each of this thread's octets begins, if octet after octet takes as many bytes as `widths` says; `total`: all.
NCZ_DEVICE void octet_starts(const unsigned (&widths)[OCTETS_PER_THREAD], uint32_t* scratch,
                             unsigned (&starts)[OCTETS_PER_THREAD], unsigned& total) {
    // Both octets' sums in one number: 32 lanes of up to 32 bytes stay below 16 bits.
    uint32_t both = widths[0] | widths[1] << 16;
    uint32_t inclusive = warp_inclusive_sum(both), of_warp = __shfl_sync(ALL_LANES, inclusive, WARP - 1);
    unsigned first_half = of_warp & 0xffffu;
    if (lane() == 0) scratch[warp()] = first_half + (of_warp >> 16);
    __syncthreads();
    unsigned before = 0;
    total = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w == warp()) before = total;
        total += scratch[w];
    }
    __syncthreads();
    uint32_t exclusive = inclusive - both;
    starts[0] = before + (exclusive & 0xffffu);
    starts[1] = before + first_half + (exclusive >> 16);
}

// Appends bits to zeroed words of shared memory, of which other threads write the bits beside.
class BitWriter {
  public:
    NCZ_DEVICE BitWriter(uint32_t* words, unsigned first_bit) : at_(words + first_bit / 32), filled_(first_bit % 32) {}

    // The low `n` bits of `bits`, up to 32; the higher ones must be 0.
    NCZ_DEVICE void put(uint32_t bits, unsigned n) {
        pending_ |= uint64_t(bits) << filled_;
        filled_ += n;
        if (filled_ < 32) return;
        atomicOr(at_++, uint32_t(pending_));
        pending_ >>= 32;
        filled_ -= 32;
    }

    NCZ_DEVICE void end() {
        if (filled_) atomicOr(at_, uint32_t(pending_));
    }

  private:
    uint32_t* at_;
    unsigned filled_;
    uint64_t pending_ = 0;
};

// 8 symbols of `width` bits. Narrow ones are first joined in registers, four or two to a word of at most 32 bits.
NCZ_DEVICE void pack_octet(const uint32_t (&symbols)[OCTET], unsigned width, uint32_t* words, unsigned first_byte) {
    if (!width) return;
    BitWriter writer(words, 8 * first_byte);
    if (width <= 8) {
#pragma unroll
        for (int i = 0; i < OCTET; i += 4) {
            uint32_t low = symbols[i] | symbols[i + 1] << width, high = symbols[i + 2] | symbols[i + 3] << width;
            writer.put(low | high << 2 * width, 4 * width);
        }
    } else if (width <= 16) {
#pragma unroll
        for (int i = 0; i < OCTET; i += 2) writer.put(symbols[i] | symbols[i + 1] << width, 2 * width);
    } else {
#pragma unroll
        for (int i = 0; i < OCTET; ++i) writer.put(symbols[i], width);
    }
    writer.end();
}

// 32 bits from `bit` on. Touches the word behind.
NCZ_DEVICE uint32_t bits_at(const uint32_t* words, unsigned bit) {
    return __funnelshift_r(words[bit / 32], words[bit / 32 + 1], bit % 32);
}

// Inverse of pack_octet.
NCZ_DEVICE void unpack_octet(const uint32_t* words, unsigned first_byte, unsigned width, uint32_t (&symbols)[OCTET]) {
    unsigned bit = 8 * first_byte;
    uint32_t mask = width == 32 ? ~0u : (1u << width) - 1;
    if (width <= 8) {
#pragma unroll
        for (int i = 0; i < OCTET; i += 4) {
            uint32_t four = bits_at(words, bit + unsigned(i) * width);
#pragma unroll
            for (int k = 0; k < 4; ++k) symbols[i + k] = four >> (unsigned(k) * width) & mask;
        }
    } else if (width <= 16) {
#pragma unroll
        for (int i = 0; i < OCTET; i += 2) {
            uint32_t two = bits_at(words, bit + unsigned(i) * width);
            symbols[i] = two & mask;
            symbols[i + 1] = two >> width & mask;
        }
    } else {
#pragma unroll
        for (int i = 0; i < OCTET; ++i) symbols[i] = bits_at(words, bit + unsigned(i) * width) & mask;
    }
}

NCZ_DEVICE void clear(uint32_t* words, int n) {
    for (int i = int(threadIdx.x); i < n; i += THREADS) words[i] = 0;
}

// ------------------------------------------------------------------ writing

// Shared memory that a block packs a chunk in.
struct Packing {
    uint32_t* words;    // CHUNK_WORDS
    uint8_t* widths;    // CHUNK / BLOCK
    uint32_t* scratch;  // WARPS
    int64_t* number;    // 1
};

// Where the chunks of a FIXED frame go, for find_place: device memory, zeros.
struct Places {
    unsigned long long* memory;  // a number more than there are blocks
    NCZ_DEVICE uint32_t* counter() const { return reinterpret_cast<uint32_t*>(memory); }
    NCZ_DEVICE unsigned long long* of_chunks() const { return memory + 1; }
};

// Packs and writes chunk c of a FIXED frame. The block of the last chunk writes header and size of the frame, too.
NCZ_DEVICE void write_fixed(const ThreadCodes& codes, int64_t c, int64_t count, int32_t predictor, uint8_t* frame,
                            long long* size, const Places& places, const Packing& shared) {
    int length = length_of(c, count), blocks = blocks_of(length), octets = octets_of(length);
    ThreadSymbols symbols;
    clear(shared.words, CHUNK_WORDS);
    predict(codes, length, predictor, reinterpret_cast<int32_t*>(shared.scratch), symbols);
    unsigned widths[OCTETS_PER_THREAD], starts[OCTETS_PER_THREAD], packed;
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
        uint32_t all = 0;
#pragma unroll
        for (int i = 0; i < OCTET; ++i) all |= symbols[j][i];
        for (int distance = 1; distance < OCTETS; distance *= 2) all |= __shfl_xor_sync(ALL_LANES, all, distance);
        int octet = octet_of(j);
        widths[j] = octet < octets ? bit_length(all) : 0;
        if (octet % OCTETS == 0 && octet < octets) shared.widths[octet / OCTETS] = uint8_t(widths[j]);
    }
    octet_starts(widths, shared.scratch, starts, packed);  // its barriers also end the clearing
    unsigned bytes = unsigned(blocks) + packed;
    if (threadIdx.x == 0) leave_own(places.of_chunks(), c, bytes);
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j) pack_octet(symbols[j], widths[j], shared.words, starts[j]);
    if (warp() == 0) {
        int64_t before = look_back(places.of_chunks(), c, bytes);
        if (lane() == 0) shared.number[0] = before;
    }
    __syncthreads();
    int64_t chunks = chunks_of(count), offset = HEADER_BYTES + 2 * chunks + shared.number[0];
    for (int b = int(threadIdx.x); b < blocks; b += THREADS) frame[offset + b] = shared.widths[b];
    copy_to_global(frame + offset + blocks, shared.words, int(packed));
    if (threadIdx.x) return;
    if (c < chunks) store16(frame + HEADER_BYTES + 2 * c, bytes);
    if (c + 1 < chunks) return;
    *size = offset + bytes;
    write_header(frame, FIXED, predictor, 0, count, *size - HEADER_BYTES);
}

#define NCZ_SHARED_PACKING(name)                   \
    NCZ_SHARED(uint32_t, name##_words, CHUNK_WORDS); \
    NCZ_SHARED(uint8_t, name##_widths, CHUNK / BLOCK); \
    NCZ_SHARED(uint32_t, name##_scratch, WARPS);   \
    NCZ_SHARED(int64_t, name##_number, 1);         \
    const Packing name = {name##_words, name##_widths, name##_scratch, name##_number}

// A FIXED frame of `source`: unless `choice` is null, only if it says so, and with its predictor.
template <class Source>
NCZ_DEVICE void encode_fixed(const Source& source, int64_t count, int32_t predictor, const Choice* choice,
                             uint8_t* frame, long long* size, const Places& places, const Packing& shared) {
    if (choice && choice->coder != FIXED) return;
    int64_t c = take_number(places.counter(), shared.number);
    ThreadCodes codes = {};
    load_chunk(source, c, length_of(c, count), codes);
    write_fixed(codes, c, count, choice ? choice->predictor : predictor, frame, size, places, shared);
}

// ------------------------------------------------------------------ reading

// The codes of chunk c of a frame that was opened; `decoded` are those of a HUFFMAN or RANS frame. `words`
// (CHUNK_WORDS) and `scratch` (WARPS) are shared memory, free for other use after a barrier. Behind the end of the
// chunk is anything.
NCZ_DEVICE void read_chunk(const uint8_t* frame, const Status* status, const long long* offsets, const int32_t* decoded,
                           int64_t c, uint32_t* words, uint32_t* scratch, ThreadCodes& codes) {
    int64_t count = status->count;
    int length = length_of(c, count);
    int32_t coder = status->header.coder;
    if (length <= 0) return;  // a frame of nothing, which has no chunk
    if (coder != FIXED && coder != RAW) return load_chunk(PlainCodes{decoded}, c, length, codes);
    unsigned raw_width = status->header.width;
    int octets = octets_of(length), first;
    unsigned widths[OCTETS_PER_THREAD] = {}, starts[OCTETS_PER_THREAD] = {};
    if (coder == RAW) {
        int64_t begin = HEADER_BYTES + c * CHUNK * (raw_width / 8);
        first = copy_to_shared(words, frame + begin, length * int(raw_width / 8));
        __syncthreads();
#pragma unroll
        for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
            widths[j] = raw_width;
            starts[j] = raw_width * unsigned(octet_of(j));
        }
    } else {
        FixedChunk chunk(frame, c, count, offsets);
        int phase = copy_to_shared(words, chunk.at, chunk.bytes);
        __syncthreads();
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(words) + phase;
#pragma unroll
        for (int j = 0; j < OCTETS_PER_THREAD; ++j)
            if (octet_of(j) < octets) widths[j] = bytes[octet_of(j) / OCTETS];
        unsigned total;
        octet_starts(widths, scratch, starts, total);
        first = phase + blocks_of(length);
    }
    ThreadSymbols symbols = {};
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j)
        if (octet_of(j) < octets) unpack_octet(words, unsigned(first) + starts[j], widths[j], symbols[j]);
    __syncthreads();
    unpredict(symbols, status->header.predictor, scratch, codes);
}

// A frame that was opened, and the sum of its codes and those of `source` as a FIXED frame. Of a damaged one, a spoiled
// one.
template <class Source>
NCZ_DEVICE void reduce_fixed(const uint8_t* frame, const Status* status, Status* report, const long long* offsets,
                             const int32_t* decoded, const Source& source, int32_t predictor, uint8_t* out,
                             long long* size, const Places& places, const Packing& shared) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        report_damage(status, report);
        if (is_damaged(status)) write_spoiled(out, status->count, size);
    }
    if (is_damaged(status)) return;
    int64_t c = take_number(places.counter(), shared.number), count = status->count;
    ThreadCodes codes = {};
    read_chunk(frame, status, offsets, decoded, c, shared.words, shared.scratch, codes);
    add_chunk(source, c, length_of(c, count), codes);
    __syncthreads();  // before the same shared memory is used for packing
    write_fixed(codes, c, count, predictor, out, size, places, shared);
}

// ------------------------------------------------------------------ kernels, all with a block per chunk
//
// `places`: zeros, a number more than there are blocks. Kernels that read a frame follow ncz_open, ncz_check and, for
// HUFFMAN and RANS, the kernels that fill `decoded`; they write nothing if the frame is damaged, and report that.

// A FIXED frame of `x`: unless `choice` is null, only if it says so, and with its predictor.
NCZ_KERNEL(ncz_encode_fixed)
(const Element* x, const Scale* inverse_steps, long long count, int predictor, const Choice* choice, uint8_t* frame,
 long long* size, unsigned long long* places) {
    NCZ_SHARED_PACKING(shared);
    encode_fixed(Floats{x, inverse_steps}, count, predictor, choice, frame, size, Places{places}, shared);
}

NCZ_KERNEL(ncz_encode_fixed_at_random)
(const Element* x, const Scale* inverse_steps, Noise noise, long long count, int predictor, const Choice* choice,
 uint8_t* frame, long long* size, unsigned long long* places) {
    NCZ_SHARED_PACKING(shared);
    RandomFloats source = {x, inverse_steps, noise};
    encode_fixed(source, count, predictor, choice, frame, size, Places{places}, shared);
}

NCZ_KERNEL(ncz_encode_fixed_codes)
(const int32_t* codes, long long count, int predictor, const Choice* choice, uint8_t* frame, long long* size,
 unsigned long long* places) {
    NCZ_SHARED_PACKING(shared);
    encode_fixed(PlainCodes{codes}, count, predictor, choice, frame, size, Places{places}, shared);
}

// The inner step of a ring: decodes `frame`, adds the codes of `x`, and writes the sum as FIXED frame to `out`.
NCZ_KERNEL(ncz_reduce_fixed)
(const uint8_t* frame, const Status* status, Status* report, const long long* offsets, const int32_t* decoded,
 const Element* x, const Scale* inverse_steps, int predictor, uint8_t* out, long long* size,
 unsigned long long* places) {
    NCZ_SHARED_PACKING(shared);
    reduce_fixed(frame, status, report, offsets, decoded, Floats{x, inverse_steps}, predictor, out, size,
                 Places{places}, shared);
}

NCZ_KERNEL(ncz_reduce_fixed_at_random)
(const uint8_t* frame, const Status* status, Status* report, const long long* offsets, const int32_t* decoded,
 const Element* x, const Scale* inverse_steps, Noise noise, int predictor, uint8_t* out, long long* size,
 unsigned long long* places) {
    NCZ_SHARED_PACKING(shared);
    RandomFloats source = {x, inverse_steps, noise};
    reduce_fixed(frame, status, report, offsets, decoded, source, predictor, out, size, Places{places}, shared);
}

// If RAW was chosen, by the selector or as a way out.
NCZ_KERNEL(ncz_encode_raw)
(const int32_t* codes, long long count, const Choice* choice, uint8_t* frame, long long* size) {
    NCZ_SHARED_PACKING(shared);
    if (choice->coder != RAW) return;
    int64_t c = blockIdx.x;
    int length = length_of(c, count);
    unsigned width = raw_width_of(*choice);
    ThreadCodes own = {};
    ThreadSymbols symbols;
    clear(shared.words, CHUNK_WORDS);
    load_chunk(PlainCodes{codes}, c, length, own);
    predict(own, length, choice->predictor, reinterpret_cast<int32_t*>(shared.scratch), symbols);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j)
        pack_octet(symbols[j], width, shared.words, width * unsigned(octet_of(j)));
    __syncthreads();
    copy_to_global(frame + HEADER_BYTES + c * CHUNK * (width / 8), shared.words, length * int(width / 8));
    if (blockIdx.x || threadIdx.x) return;
    int64_t bytes = count * (width / 8);
    write_header(frame, RAW, choice->predictor, width, count, bytes);
    *size = HEADER_BYTES + bytes;
}

NCZ_KERNEL(ncz_decode)
(const uint8_t* frame, const Status* status, Status* report, const long long* offsets, const int32_t* decoded,
 const Scale* scales, Element* out) {
    NCZ_SHARED(uint32_t, words, CHUNK_WORDS);
    NCZ_SHARED(uint32_t, scratch, WARPS);
    int64_t c = blockIdx.x;
    if (c == 0 && threadIdx.x == 0) report_damage(status, report);
    if (is_damaged(status)) return;
    ThreadCodes codes = {};
    read_chunk(frame, status, offsets, decoded, c, words, scratch, codes);
    int length = length_of(c, status->count);
    if (length > 0) store_values(out + c * CHUNK, length, codes, scales[c]);
}

// To codes; with `add`, onto those that stand there.
NCZ_KERNEL(ncz_decode_codes)
(const uint8_t* frame, const Status* status, Status* report, const long long* offsets, const int32_t* decoded,
 int32_t* codes, int add) {
    NCZ_SHARED(uint32_t, words, CHUNK_WORDS);
    NCZ_SHARED(uint32_t, scratch, WARPS);
    int64_t c = blockIdx.x;
    if (c == 0 && threadIdx.x == 0) report_damage(status, report);
    bool is_there = codes == decoded && !add && status->header.coder != FIXED && status->header.coder != RAW;
    if (is_damaged(status) || is_there) return;
    ThreadCodes own = {};
    read_chunk(frame, status, offsets, decoded, c, words, scratch, own);
    store_codes(codes + c * CHUNK, length_of(c, status->count), own, add);
}

#define NCZ_FIXED_KERNELS(X)                                                                                      \
    X(ncz_encode_fixed) X(ncz_encode_fixed_at_random) X(ncz_encode_fixed_codes) X(ncz_reduce_fixed) \
    X(ncz_reduce_fixed_at_random) X(ncz_encode_raw) X(ncz_decode) X(ncz_decode_codes)
