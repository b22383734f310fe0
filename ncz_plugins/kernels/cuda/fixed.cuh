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

// What the kernels that write frames share: device memory for each frame, and for each chunk the place that look_back
// needs, zeros at first; an empty frame counts as one chunk.
struct Writing {
    Written* written;
    unsigned long long* places;
    long long* sizes;

    NCZ_DEVICE unsigned long long* places_of(const Piece& piece, int f) const {
        return places + piece.first_chunk + f;
    }
};

// Chunks that are written for a piece.
NCZ_DEVICE int64_t written_chunks(const Piece& piece) { return piece.count ? chunks_of(piece.count) : 1; }

// Packs and writes chunk c of a FIXED frame. The block of the last chunk writes header and size of the frame, too.
NCZ_DEVICE void write_fixed(const ThreadCodes& codes, int64_t c, int64_t count, int32_t predictor, uint8_t* frame,
                            long long* size, unsigned long long* places, const Packing& shared) {
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
    if (threadIdx.x == 0) leave_own(places, c, bytes);
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j) pack_octet(symbols[j], widths[j], shared.words, starts[j]);
    if (warp() == 0) {
        int64_t before = look_back(places, c, bytes);
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

// A FIXED frame of `source`, with this predictor; or with that of `choice`, if FIXED is what it says.
template <class Source>
NCZ_DEVICE void encode_fixed(const Source& source, const Pieces& pieces, int32_t predictor, int is_chosen,
                             const Writing& writing, const Packing& shared) {
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    const Choice& choice = writing.written[f].choice;
    if (unit_number(pieces.n) >= written_chunks(piece) || (is_chosen && choice.coder != FIXED)) return;
    int64_t c = take_number(&writing.written[f].taken, shared.number), count = piece.count;
    ThreadCodes codes = {};
    load_chunk(source, c, length_of(c, count), codes);
    write_fixed(codes, c, count, is_chosen ? choice.predictor : predictor, piece.frame, writing.sizes + f,
                writing.places_of(piece, f), shared);
}

// ------------------------------------------------------------------ reading

// Frames that were opened: how they are, for each chunk of a FIXED frame how far behind the table it begins, and the
// codes of HUFFMAN and RANS frames.
struct Opened {
    const Status* statuses;
    const long long* offsets;
    const int32_t* decoded;
};

// The codes of chunk c of a frame without damage. `words` (CHUNK_WORDS) and `scratch` (WARPS) are shared memory, free for
// other use after a barrier. Behind the end of the chunk is anything.
NCZ_DEVICE void read_chunk(const Input& input, const Status& status, const Opened& opened, int64_t c, uint32_t* words,
                           uint32_t* scratch, ThreadCodes& codes) {
    int length = length_of(c, input.count);
    int32_t coder = status.header.coder;
    if (length <= 0) return;  // a frame of nothing, which has no chunk
    if (coder != FIXED && coder != RAW)
        return load_chunk(PlainCodes{opened.decoded}, input.first_chunk + c, length, codes);
    unsigned raw_width = status.header.width;
    int octets = octets_of(length), first;
    unsigned widths[OCTETS_PER_THREAD] = {}, starts[OCTETS_PER_THREAD] = {};
    if (coder == RAW) {
        int64_t begin = HEADER_BYTES + c * CHUNK * (raw_width / 8);
        first = copy_to_shared(words, input.frame + begin, length * int(raw_width / 8));
        __syncthreads();
#pragma unroll
        for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
            widths[j] = raw_width;
            starts[j] = raw_width * unsigned(octet_of(j));
        }
    } else {
        FixedChunk chunk(input.frame, c, input.count, opened.offsets[input.first_chunk + c]);
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
    unpredict(symbols, status.header.predictor, scratch, codes);
}

// The sum of the codes of chunk c of all frames of a piece. Ends with a barrier.
NCZ_DEVICE void add_up_inputs(const Piece& piece, const Inputs& inputs, const Opened& opened, int64_t c,
                              uint32_t* words, uint32_t* scratch, ThreadCodes& codes) {
    for (unsigned i = piece.first_input; i < piece.first_input + piece.inputs; ++i) {
        ThreadCodes own = {};
        read_chunk(inputs.of[i], opened.statuses[i], opened, c, words, scratch, own);
#pragma unroll
        for (int j = 0; j < OCTETS_PER_THREAD; ++j)
#pragma unroll
            for (int k = 0; k < OCTET; ++k) codes[j][k] = sum(codes[j][k], own[j][k]);
        __syncthreads();  // before the same shared memory is used again
    }
}

// Whether a frame that a piece is made of is damaged. If so, what is made of it is spoiled, which one thread writes.
NCZ_DEVICE bool is_spoiled(const Piece& piece, int f, int64_t unit, const Opened& opened, const Writing& writing) {
    if (!is_any_damaged(piece, opened.statuses)) return false;
    if (piece.frame && unit == 0 && threadIdx.x == 0) {
        write_spoiled(piece.frame, piece.count, writing.sizes + f);
        writing.written[f].choice.coder = NO_CODER;
    }
    return true;
}

// The sum of the codes of frames that were opened and those of a piece's own as a FIXED frame. Of a damaged one, a spoiled
// one. `source_of` gives the own codes: only then, as until then registers are short.
template <class SourceOf>
NCZ_DEVICE void sum_fixed(SourceOf source_of, const Pieces& pieces, const Inputs& inputs, const Opened& opened,
                          int32_t predictor, const Writing& writing, const Packing& shared) {
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    int64_t unit = unit_number(pieces.n), count = piece.count;
    if (unit >= written_chunks(piece) || is_spoiled(piece, f, unit, opened, writing)) return;
    int64_t c = take_number(&writing.written[f].taken, shared.number);
    ThreadCodes codes = {};
    add_up_inputs(piece, inputs, opened, c, shared.words, shared.scratch, codes);
    add_chunk(source_of(piece), c, length_of(c, count), codes);
    write_fixed(codes, c, count, predictor, piece.frame, writing.sizes + f, writing.places_of(piece, f), shared);
}

// The same to a piece's codes in memory, for the other coders.
template <class SourceOf>
NCZ_DEVICE void sum_codes(SourceOf source_of, bool adds, const Pieces& pieces, const Inputs& inputs,
                          const Opened& opened, const Writing& writing, uint32_t* words, uint32_t* scratch) {
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    int64_t c = unit_number(pieces.n);
    if (is_spoiled(piece, f, c, opened, writing)) return;
    int length = length_of(c, piece.count);
    if (length <= 0) return;
    ThreadCodes codes = {};
    add_up_inputs(piece, inputs, opened, c, words, scratch, codes);
    if (adds) add_chunk(source_of(piece), c, length, codes);
    store_codes(piece.codes + c * CHUNK, length, codes, false);
}

// ------------------------------------------------------------------ kernels, all with a block per chunk
//
// Kernels that read frames follow ncz_open. They write nothing if a frame is damaged, or a frame that says so.

// FIXED frames of values: with this predictor; if `is_chosen`, those for which that coder was chosen, with theirs.
NCZ_KERNEL(ncz_encode_fixed)
(const __grid_constant__ Pieces pieces, int predictor, int is_chosen, Written* written, unsigned long long* places,
 long long* sizes) {
    NCZ_SHARED_PACKING(shared);
    Floats source = floats_of(pieces.of[frame_number(pieces.n)]);
    encode_fixed(source, pieces, predictor, is_chosen, Writing{written, places, sizes}, shared);
}

NCZ_KERNEL(ncz_encode_fixed_at_random)
(const __grid_constant__ Pieces pieces, Noise noise, int predictor, int is_chosen, Written* written,
 unsigned long long* places, long long* sizes) {
    NCZ_SHARED_PACKING(shared);
    RandomFloats source = random_floats_of(pieces.of[frame_number(pieces.n)], noise);
    encode_fixed(source, pieces, predictor, is_chosen, Writing{written, places, sizes}, shared);
}

NCZ_KERNEL(ncz_encode_fixed_codes)
(const __grid_constant__ Pieces pieces, int predictor, int is_chosen, Written* written, unsigned long long* places,
 long long* sizes) {
    NCZ_SHARED_PACKING(shared);
    PlainCodes source = {pieces.of[frame_number(pieces.n)].codes};
    encode_fixed(source, pieces, predictor, is_chosen, Writing{written, places, sizes}, shared);
}

// Of each piece the sum of its values' codes and of its frames, as FIXED frame.
NCZ_KERNEL(ncz_sum_fixed)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Inputs inputs, const Status* statuses,
 const long long* offsets, const int32_t* decoded, int predictor, Written* written, unsigned long long* places,
 long long* sizes) {
    NCZ_SHARED_PACKING(shared);
    sum_fixed(floats_of, pieces, inputs, Opened{statuses, offsets, decoded}, predictor, Writing{written, places, sizes},
              shared);
}

NCZ_KERNEL(ncz_sum_fixed_at_random)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Noise noise, const __grid_constant__ Inputs inputs, const Status* statuses,
 const long long* offsets, const int32_t* decoded, int predictor, Written* written, unsigned long long* places,
 long long* sizes) {
    NCZ_SHARED_PACKING(shared);
    auto source_of = [&noise](const Piece& piece) { return random_floats_of(piece, noise); };
    sum_fixed(source_of, pieces, inputs, Opened{statuses, offsets, decoded}, predictor, Writing{written, places, sizes},
              shared);
}

// The same sums as codes.
NCZ_KERNEL(ncz_sum_codes)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Inputs inputs, const Status* statuses,
 const long long* offsets, const int32_t* decoded, Written* written, long long* sizes) {
    NCZ_SHARED(uint32_t, words, CHUNK_WORDS);
    NCZ_SHARED(uint32_t, scratch, WARPS);
    sum_codes(floats_of, true, pieces, inputs, Opened{statuses, offsets, decoded}, Writing{written, nullptr, sizes}, words,
              scratch);
}

NCZ_KERNEL(ncz_sum_codes_at_random)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Noise noise, const __grid_constant__ Inputs inputs, const Status* statuses,
 const long long* offsets, const int32_t* decoded, Written* written, long long* sizes) {
    NCZ_SHARED(uint32_t, words, CHUNK_WORDS);
    NCZ_SHARED(uint32_t, scratch, WARPS);
    auto source_of = [&noise](const Piece& piece) { return random_floats_of(piece, noise); };
    sum_codes(source_of, true, pieces, inputs, Opened{statuses, offsets, decoded}, Writing{written, nullptr, sizes}, words,
              scratch);
}

// Of each piece the sum of its frames' codes; with `add`, onto the codes that stand there.
NCZ_KERNEL(ncz_decode_codes)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Inputs inputs, const Status* statuses,
 const long long* offsets, const int32_t* decoded, Written* written, long long* sizes, int add) {
    NCZ_SHARED(uint32_t, words, CHUNK_WORDS);
    NCZ_SHARED(uint32_t, scratch, WARPS);
    auto source_of = [](const Piece& piece) { return PlainCodes{piece.codes}; };
    sum_codes(source_of, add != 0, pieces, inputs, Opened{statuses, offsets, decoded}, Writing{written, nullptr, sizes},
              words, scratch);
}

// RAW frames of codes, where RAW was chosen, by the selector or as a way out.
NCZ_KERNEL(ncz_encode_raw)(const __grid_constant__ Pieces pieces, const Written* written, long long* sizes) {
    NCZ_SHARED_PACKING(shared);
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    const Choice& choice = written[f].choice;
    int64_t c = unit_number(pieces.n), count = piece.count;
    if (c >= written_chunks(piece) || choice.coder != RAW) return;
    int length = length_of(c, count);
    unsigned width = raw_width_of(choice);
    ThreadCodes own = {};
    ThreadSymbols symbols;
    clear(shared.words, CHUNK_WORDS);
    load_chunk(PlainCodes{piece.codes}, c, length, own);
    predict(own, length, choice.predictor, reinterpret_cast<int32_t*>(shared.scratch), symbols);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j)
        pack_octet(symbols[j], width, shared.words, width * unsigned(octet_of(j)));
    __syncthreads();
    copy_to_global(piece.frame + HEADER_BYTES + c * CHUNK * (width / 8), shared.words, length * int(width / 8));
    if (c || threadIdx.x) return;
    int64_t bytes = count * (width / 8);
    write_header(piece.frame, RAW, choice.predictor, width, count, bytes);
    sizes[f] = HEADER_BYTES + bytes;
}

// Of each piece the values of its only frame, which has its number.
NCZ_KERNEL(ncz_decode)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Inputs inputs, const Status* statuses,
 const long long* offsets, const int32_t* decoded) {
    NCZ_SHARED(uint32_t, words, CHUNK_WORDS);
    NCZ_SHARED(uint32_t, scratch, WARPS);
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    int64_t c = unit_number(pieces.n);
    int length = length_of(c, piece.count);
    if (length <= 0 || statuses[f].result) return;
    Scale scales[OCTETS_PER_THREAD];  // asked for before the frame, so that they travel together
    load_scales(static_cast<const Scale*>(piece.steps) + c * STEPS_PER_CHUNK, length, scales);
    ThreadCodes codes = {};
    read_chunk(inputs.of[f], statuses[f], Opened{statuses, offsets, decoded}, c, words, scratch, codes);
    store_values(static_cast<Element*>(piece.values) + c * CHUNK, length, codes, scales);
}

// The values that the sum of a piece's own codes and those of its frames stands for. They may stand where its values do.
template <class SourceOf>
NCZ_DEVICE void decode_sum(SourceOf source_of, const Pieces& pieces, const Inputs& inputs, const Opened& opened,
                           uint32_t* words, uint32_t* scratch) {
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    int64_t c = unit_number(pieces.n);
    int length = length_of(c, piece.count);
    if (length <= 0 || is_any_damaged(piece, opened.statuses)) return;
    ThreadCodes codes = {};
    add_up_inputs(piece, inputs, opened, c, words, scratch, codes);
    add_chunk(source_of(piece), c, length, codes);
    Scale scales[OCTETS_PER_THREAD];
    load_scales(static_cast<const Scale*>(piece.scales) + c * STEPS_PER_CHUNK, length, scales);
    __syncwarp();  // where a lane stores, another one may have loaded
    store_values(static_cast<Element*>(piece.sum) + c * CHUNK, length, codes, scales);
}

NCZ_KERNEL(ncz_decode_sum)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Inputs inputs, const Status* statuses,
 const long long* offsets, const int32_t* decoded) {
    NCZ_SHARED(uint32_t, words, CHUNK_WORDS);
    NCZ_SHARED(uint32_t, scratch, WARPS);
    decode_sum(floats_of, pieces, inputs, Opened{statuses, offsets, decoded}, words, scratch);
}

NCZ_KERNEL(ncz_decode_sum_at_random)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Noise noise, const __grid_constant__ Inputs inputs,
 const Status* statuses, const long long* offsets, const int32_t* decoded) {
    NCZ_SHARED(uint32_t, words, CHUNK_WORDS);
    NCZ_SHARED(uint32_t, scratch, WARPS);
    auto source_of = [&noise](const Piece& piece) { return random_floats_of(piece, noise); };
    decode_sum(source_of, pieces, inputs, Opened{statuses, offsets, decoded}, words, scratch);
}

#define NCZ_FIXED_KERNELS(X)                                                                                     \
    X(ncz_encode_fixed) X(ncz_encode_fixed_at_random) X(ncz_encode_fixed_codes) X(ncz_sum_fixed) \
    X(ncz_sum_fixed_at_random) X(ncz_sum_codes) X(ncz_sum_codes_at_random) X(ncz_encode_raw) X(ncz_decode)   \
    X(ncz_decode_codes) X(ncz_decode_sum) X(ncz_decode_sum_at_random)
