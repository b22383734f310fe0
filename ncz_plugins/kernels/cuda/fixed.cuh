// The coders FIXED and RAW. A RAW chunk is packed as a FIXED one whose blocks all have the same width.
#pragma once

#include "frame.cuh"

constexpr int MAX_CHUNK_BYTES = int(CHUNK) / BLOCK + 4 * int(CHUNK);

// Words of so many packed bytes, with one behind them that is read but not used; and the most of a chunk.
NCZ_DEVICE constexpr int words_of(int bytes) { return bytes / 4 + 2; }
constexpr int CHUNK_WORDS = int(CHUNK) + 2;

// ------------------------------------------------------------------ octets and bits

// Numbers of this thread's octets, 16 bits each.
NCZ_DEVICE unsigned of_octet(uint32_t numbers, int j) { return numbers >> 16 * j & 0xffffu; }

// Where each of this thread's octets begins, if octet after octet takes as many bytes as `widths` says; `total`: all.
NCZ_DEVICE uint32_t octet_starts(uint32_t widths, uint32_t* scratch, unsigned& total) {
    // Both octets' sums in one number: those of a chunk stay below 16 bits.
    uint32_t inclusive = warp_inclusive_sum(widths), of_warp = __shfl_sync(ALL_LANES, inclusive, WARP - 1);
    unsigned first_half = of_octet(of_warp, 0);
    if (lane() == 0) scratch[warp()] = first_half + of_octet(of_warp, 1);
    __syncthreads();
    unsigned before = 0;
    total = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w == warp()) before = total;
        total += scratch[w];
    }
    __syncthreads();
    return inclusive - widths + before + ((before + first_half) << 16);
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

// Bytes at any address of global memory, read in the whole words that they lie in, and nothing at `end` or behind: there
// are zeros.
class Bytes {
  public:
    NCZ_DEVICE Bytes(const uint8_t* from, const uint8_t* end)
        : words_(reinterpret_cast<const uint32_t*>(from - phase_of(from))), phase_(phase_of(from)), rest_(0) {
        int64_t bytes = end - from + phase_;
        whole_ = bytes < MANY ? int(bytes / 4) : MANY / 4;
        for (int i = 4 * whole_; i < bytes && bytes < MANY; ++i)
            rest_ |= uint32_t(from[i - int(phase_)]) << 8 * (i % 4);
    }

    // 32 bits from `bit` on.
    NCZ_DEVICE uint32_t bits(unsigned bit) const {
        bit += 8 * phase_;
        return __funnelshift_r(word(bit / 32), word(bit / 32 + 1), bit % 32);
    }

    // 64 bits from a byte on, of which the first `n` matter.
    NCZ_DEVICE uint64_t long_bits(unsigned byte, unsigned n) const {
        byte += phase_;
        unsigned first = byte / 4, shift = 8 * (byte % 4);
        n += shift;
        uint32_t low = word(first), middle = n > 32 ? word(first + 1) : 0, high = n > 64 ? word(first + 2) : 0;
        return uint64_t(__funnelshift_r(middle, high, shift)) << 32 | __funnelshift_r(low, middle, shift);
    }

  private:
    static constexpr int MANY = 4 * MAX_CHUNK_BYTES;  // more than anyone reads from here on

    NCZ_DEVICE static unsigned phase_of(const uint8_t* from) { return unsigned(reinterpret_cast<uintptr_t>(from) % 4); }
    NCZ_DEVICE uint32_t word(unsigned i) const {
        return int(i) < whole_ ? words_[i] : int(i) == whole_ ? rest_ : 0;
    }

    const uint32_t* words_;
    unsigned phase_;
    int whole_;      // words before the end
    uint32_t rest_;  // the bytes behind these
};

// Inverse of pack_octet, from `width` bytes.
NCZ_DEVICE void unpack_octet(const Bytes& bytes, unsigned first_byte, unsigned width, uint32_t (&symbols)[OCTET]) {
    uint32_t mask = width == 32 ? ~0u : (1u << width) - 1;
    if (width <= 8) {
        uint64_t all = width ? bytes.long_bits(first_byte, 8 * width) : 0;
        uint32_t low = uint32_t(all), high = uint32_t(all >> 4 * width);
#pragma unroll
        for (int i = 0; i < OCTET / 2; ++i) {
            symbols[i] = low >> (unsigned(i) * width) & mask;
            symbols[OCTET / 2 + i] = high >> (unsigned(i) * width) & mask;
        }
    } else {
#pragma unroll
        for (int i = 0; i < OCTET; ++i) symbols[i] = bytes.bits(8 * first_byte + unsigned(i) * width) & mask;
    }
}

NCZ_DEVICE void clear(uint32_t* words, int n) {
    for (int i = int(threadIdx.x); i < n; i += THREADS) words[i] = 0;
}

// ------------------------------------------------------------------ writing

// What a block has in hand: the chunk that it has packed last, to so many bytes besides its widths, and where that begins;
// and the number of the next one.
struct InHand {
    int chunk, packed;
    int64_t before;
    int next;
};

// Shared memory that a block packs a chunk in.
struct Packing {
    uint32_t* words;    // CHUNK_WORDS
    uint8_t* widths;    // CHUNK / BLOCK
    uint32_t* scratch;  // WARPS
    InHand* in_hand;    // 1
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

// Puts the chunk that was packed where it belongs in its frame, behind all before it.
NCZ_DEVICE void write_packed(int f, const Piece& piece, int32_t predictor, const Writing& writing,
                             const Packing& shared) {
    int c = shared.in_hand->chunk, packed = shared.in_hand->packed;
    int chunks = int(chunks_of(piece.count)), blocks = blocks_of(length_of(c, piece.count)), bytes = blocks + packed;
    if (warp() == 0) {
        int64_t before = look_back(writing.places_of(piece, f), c, bytes);
        if (lane() == 0) shared.in_hand->before = before;
    }
    __syncthreads();
    uint8_t* table = piece.frame + HEADER_BYTES;
    uint8_t* to = table + 2 * chunks + shared.in_hand->before;
    for (int b = int(threadIdx.x); b < blocks; b += THREADS) to[b] = shared.widths[b];
    copy_to_global(to + blocks, shared.words, packed);
    if (threadIdx.x) return;
    if (c < chunks) store16(table + 2 * c, unsigned(bytes));
    if (c + 1 < chunks) return;
    int64_t payload_bytes = to + bytes - table;
    writing.sizes[f] = HEADER_BYTES + payload_bytes;
    write_header(piece.frame, FIXED, predictor, 0, piece.count, payload_bytes);
}

// Writes a FIXED frame: all chunks that this block gets hold of. `codes_of` gives the codes of one.
//
// When the bytes of a chunk are known, other blocks may still be at work on those before it. To hardly ever wait for them, a
// chunk stays in shared memory until the block has loaded the next one.
template <class CodesOf>
NCZ_DEVICE void write_chunks(CodesOf codes_of, const Pieces& pieces, int32_t predictor, const Writing& writing,
                             const Packing& shared) {
    int f = frame_number(pieces.n);
    InHand& in_hand = *shared.in_hand;
    if (threadIdx.x == 0) {
        in_hand.chunk = -1;
        in_hand.next = int(atomicAdd(&writing.written[f].taken, 1u));
    }
    __syncthreads();
    for (int c = in_hand.next; c < int(written_chunks(pieces.of[f])); c = in_hand.next) {
        f = looked_up_again(f);
        const Piece& piece = pieces.of[f];
        ThreadCodes codes = {};
        codes_of(piece, c, codes);
        int length = length_of(c, piece.count), octets = octets_of(length);
        ThreadSymbols symbols;
        predict(codes, length, predictor, reinterpret_cast<int32_t*>(shared.scratch), symbols);
        uint32_t widths = 0;
#pragma unroll
        for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
            uint32_t all = 0;
#pragma unroll
            for (int i = 0; i < OCTET; ++i) all |= symbols[j][i];
            for (int distance = 1; distance < OCTETS; distance *= 2) all |= __shfl_xor_sync(ALL_LANES, all, distance);
            if (octet_of(j) < octets) widths |= bit_length(all) << 16 * j;
        }
        unsigned packed;
        uint32_t starts = octet_starts(widths, shared.scratch, packed);
        int next = 0;  // of the first thread: asked for before it is needed
        if (threadIdx.x == 0) {
            leave_own(writing.places_of(piece, f), c, blocks_of(length) + packed);
            next = int(atomicAdd(&writing.written[f].taken, 1u));
        }
        if (in_hand.chunk >= 0) write_packed(f, piece, predictor, writing, shared);
        __syncthreads();
        clear(shared.words, words_of(int(packed)));
        if (threadIdx.x == 0) {
            in_hand.chunk = c;
            in_hand.packed = int(packed);
            in_hand.next = next;
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
            int octet = octet_of(j);
            if (octet % OCTETS == 0 && octet < octets) shared.widths[octet / OCTETS] = uint8_t(of_octet(widths, j));
            pack_octet(symbols[j], of_octet(widths, j), shared.words, of_octet(starts, j));
        }
    }
    __syncthreads();
    if (in_hand.chunk >= 0) write_packed(f, pieces.of[f], predictor, writing, shared);
}

#define NCZ_SHARED_PACKING(name)                   \
    NCZ_SHARED(uint32_t, name##_words, CHUNK_WORDS); \
    NCZ_SHARED(uint8_t, name##_widths, CHUNK / BLOCK); \
    NCZ_SHARED(uint32_t, name##_scratch, WARPS);   \
    NCZ_SHARED(InHand, name##_in_hand, 1);         \
    const Packing name = {name##_words, name##_widths, name##_scratch, name##_in_hand}

// A FIXED frame of what `source_of` gives, with this predictor; or with that of `choice`, if FIXED is what it says.
template <class SourceOf>
NCZ_DEVICE void encode_fixed(SourceOf source_of, const Pieces& pieces, int32_t predictor, int is_chosen,
                             const Writing& writing, const Packing& shared) {
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    const Choice& choice = writing.written[f].choice;
    if (unit_number(pieces.n) >= written_chunks(piece) || (is_chosen && choice.coder != FIXED)) return;
    auto codes_of = [&](const Piece& of, int c, ThreadCodes& codes) {
        load_chunk(source_of(of), c, length_of(c, of.count), codes);
    };
    write_chunks(codes_of, pieces, is_chosen ? choice.predictor : predictor, writing, shared);
}

// ------------------------------------------------------------------ reading

// Frames that were opened: how they are, for each chunk of a FIXED frame how far behind the table it begins, and the
// codes of HUFFMAN32 and RANS frames.
struct Opened {
    const Status* statuses;
    const long long* offsets;
    const int32_t* decoded;
};

// Where this thread's octets lie among those of a FIXED chunk, in bytes, and the widths of their symbols; 0 behind the
// end. Each warp looks at all widths by itself, so that none waits for another.
NCZ_DEVICE void find_octets(const uint8_t* widths_of_blocks, int blocks, unsigned (&starts)[OCTETS_PER_THREAD],
                            unsigned (&widths)[OCTETS_PER_THREAD]) {
    constexpr int EACH = int(CHUNK) / BLOCK / WARP;  // widths of a lane
    static_assert(EACH == 4, "as they are one word");
    uint32_t of_lane = 0, sum_of_lane = 0;
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        int b = EACH * lane() + k;
        uint32_t width = b < blocks ? widths_of_blocks[b] : 0;
        of_lane |= width << 8 * k;
        sum_of_lane += width;
    }
    uint32_t before_lane = warp_inclusive_sum(sum_of_lane) - sum_of_lane;
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
        int b = octet_of(j) / OCTETS, in_lane = b % EACH;
        uint32_t four = __shfl_sync(ALL_LANES, of_lane, b / EACH);
        uint32_t before = __shfl_sync(ALL_LANES, before_lane, b / EACH);
        // The sum of the lower bytes of `four`, none of which exceeds 32: in the highest byte of the product.
        if (in_lane) before += ((four << (32 - 8 * in_lane)) * 0x01010101u) >> 24;
        widths[j] = four >> (8 * in_lane) & 0xffu;
        starts[j] = unsigned(OCTETS) * before + unsigned(octet_of(j) % OCTETS) * widths[j];
    }
}

// The codes of chunk c of a frame without damage. `scratch` is shared memory of WARPS numbers. Behind the end of the chunk
// is anything.
NCZ_DEVICE void read_chunk(const Input& input, const Status& status, const Opened& opened, int64_t c, uint32_t* scratch,
                           ThreadCodes& codes) {
    int length = length_of(c, input.count);
    int32_t coder = status.header.coder;
    if (length <= 0) return;  // a frame of nothing, which has no chunk
    if (coder != FIXED && coder != RAW)
        return load_chunk(PlainCodes{opened.decoded}, input.first_chunk + c, length, codes);
    const uint8_t* from = input.frame + HEADER_BYTES;
    const uint8_t* end = from + status.header.payload_bytes;
    int octets = octets_of(length);
    unsigned widths[OCTETS_PER_THREAD], starts[OCTETS_PER_THREAD];
    if (coder == RAW) {
        unsigned width = status.header.width;
        from += c * CHUNK * (width / 8);
#pragma unroll
        for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
            widths[j] = width;
            starts[j] = width * unsigned(octet_of(j));
        }
    } else {
        int blocks = blocks_of(length);
        from += 2 * chunks_of(input.count) + opened.offsets[input.first_chunk + c];
        find_octets(from, blocks, starts, widths);
        from += blocks;
    }
    Bytes bytes(from, end);
    ThreadSymbols symbols = {};
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j)
        if (octet_of(j) < octets) unpack_octet(bytes, starts[j], widths[j], symbols[j]);
    unpredict(symbols, status.header.predictor, scratch, codes);
}

// The sum of the codes of chunk c of all frames of a piece.
NCZ_DEVICE void add_up_inputs(const Piece& piece, const Inputs& inputs, const Opened& opened, int64_t c,
                              uint32_t* scratch, ThreadCodes& codes) {
    for (unsigned i = piece.first_input; i < piece.first_input + piece.inputs; ++i) {
        ThreadCodes own = {};
        read_chunk(inputs.of[i], opened.statuses[i], opened, c, scratch, own);
#pragma unroll
        for (int j = 0; j < OCTETS_PER_THREAD; ++j)
#pragma unroll
            for (int k = 0; k < OCTET; ++k) codes[j][k] = sum(codes[j][k], own[j][k]);
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
    int64_t unit = unit_number(pieces.n);
    if (unit >= written_chunks(piece) || is_spoiled(piece, f, unit, opened, writing)) return;
    auto codes_of = [&](const Piece& of, int c, ThreadCodes& codes) {
        add_up_inputs(of, inputs, opened, c, shared.scratch, codes);
        add_chunk(source_of(of), c, length_of(c, of.count), codes);
    };
    write_chunks(codes_of, pieces, predictor, writing, shared);
}

// The same to a piece's codes in memory, for the other coders.
template <class SourceOf>
NCZ_DEVICE void sum_codes(SourceOf source_of, bool adds, const Pieces& pieces, const Inputs& inputs,
                          const Opened& opened, const Writing& writing, uint32_t* scratch) {
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    int64_t c = unit_number(pieces.n);
    if (is_spoiled(piece, f, c, opened, writing)) return;
    int length = length_of(c, piece.count);
    if (length <= 0) return;
    ThreadCodes codes = {};
    add_up_inputs(piece, inputs, opened, c, scratch, codes);
    if (adds) add_chunk(source_of(piece), c, length, codes);
    store_codes(piece.codes + c * CHUNK, length, codes, false);
}

// ------------------------------------------------------------------ kernels
//
// With a block per chunk, but for those that write FIXED frames: these have as many blocks as fit on the device.
//
// Kernels that read frames follow ncz_open. They write nothing if a frame is damaged, or a frame that says so.

// FIXED frames of values: with this predictor; if `is_chosen`, those for which that coder was chosen, with theirs.
NCZ_KERNEL(ncz_encode_fixed)
(const __grid_constant__ Pieces pieces, int predictor, int is_chosen, Written* written, unsigned long long* places,
 long long* sizes) {
    NCZ_SHARED_PACKING(shared);
    encode_fixed(floats_of, pieces, predictor, is_chosen, Writing{written, places, sizes}, shared);
}

NCZ_KERNEL(ncz_encode_fixed_at_random)
(const __grid_constant__ Pieces pieces, Noise noise, int predictor, int is_chosen, Written* written,
 unsigned long long* places, long long* sizes) {
    NCZ_SHARED_PACKING(shared);
    auto source_of = [&noise](const Piece& piece) { return random_floats_of(piece, noise); };
    encode_fixed(source_of, pieces, predictor, is_chosen, Writing{written, places, sizes}, shared);
}

NCZ_KERNEL(ncz_encode_fixed_codes)
(const __grid_constant__ Pieces pieces, int predictor, int is_chosen, Written* written, unsigned long long* places,
 long long* sizes) {
    NCZ_SHARED_PACKING(shared);
    encode_fixed(codes_of, pieces, predictor, is_chosen, Writing{written, places, sizes}, shared);
}

// Of the blocks that read and write frames, so many must fit on a multiprocessor.
#if NCZ_DTYPE == 3 || __CUDA_ARCH__ < 800
constexpr int SUM_BLOCKS = 3;  // four would spill
#else
constexpr int SUM_BLOCKS = 4;
#endif

// Of each piece the sum of its values' codes and of its frames, as FIXED frame.
NCZ_KERNEL_OF(THREADS, SUM_BLOCKS, ncz_sum_fixed)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Inputs inputs, const Status* statuses,
 const long long* offsets, const int32_t* decoded, int predictor, Written* written, unsigned long long* places,
 long long* sizes) {
    NCZ_SHARED_PACKING(shared);
    sum_fixed(floats_of, pieces, inputs, Opened{statuses, offsets, decoded}, predictor, Writing{written, places, sizes},
              shared);
}

NCZ_KERNEL_OF(THREADS, SUM_BLOCKS, ncz_sum_fixed_at_random)
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
    NCZ_SHARED(uint32_t, scratch, WARPS);
    sum_codes(floats_of, true, pieces, inputs, Opened{statuses, offsets, decoded}, Writing{written, nullptr, sizes}, scratch);
}

NCZ_KERNEL(ncz_sum_codes_at_random)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Noise noise, const __grid_constant__ Inputs inputs, const Status* statuses,
 const long long* offsets, const int32_t* decoded, Written* written, long long* sizes) {
    NCZ_SHARED(uint32_t, scratch, WARPS);
    auto source_of = [&noise](const Piece& piece) { return random_floats_of(piece, noise); };
    sum_codes(source_of, true, pieces, inputs, Opened{statuses, offsets, decoded}, Writing{written, nullptr, sizes}, scratch);
}

// Of each piece the sum of its frames' codes; with `add`, onto the codes that stand there.
NCZ_KERNEL(ncz_decode_codes)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Inputs inputs, const Status* statuses,
 const long long* offsets, const int32_t* decoded, Written* written, long long* sizes, int add) {
    NCZ_SHARED(uint32_t, scratch, WARPS);
    sum_codes(codes_of, add != 0, pieces, inputs, Opened{statuses, offsets, decoded}, Writing{written, nullptr, sizes}, scratch);
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

// Of each piece the values of its only frame, which has its number. ncz_decode_pages does it for HUFFMAN32.
NCZ_KERNEL(ncz_decode)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Inputs inputs, const Status* statuses,
 const long long* offsets, const int32_t* decoded) {
    NCZ_SHARED(uint32_t, scratch, WARPS);
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    int64_t c = unit_number(pieces.n);
    int length = length_of(c, piece.count);
    if (length <= 0 || is_damaged(statuses[f]) || statuses[f].header.coder == HUFFMAN32) return;
    Scale scales[OCTETS_PER_THREAD];  // asked for before the frame, so that they travel together
    load_scales(static_cast<const Scale*>(piece.steps) + c * STEPS_PER_CHUNK, length, scales);
    ThreadCodes codes = {};
    read_chunk(inputs.of[f], statuses[f], Opened{statuses, offsets, decoded}, c, scratch, codes);
    store_values(static_cast<Element*>(piece.values) + c * CHUNK, length, codes, scales);
}

// The values that the sum of a piece's own codes and those of its frames stands for. They may stand where its values do.
template <class SourceOf>
NCZ_DEVICE void decode_sum(SourceOf source_of, const Pieces& pieces, const Inputs& inputs, const Opened& opened,
                           uint32_t* scratch) {
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    int64_t c = unit_number(pieces.n);
    int length = length_of(c, piece.count);
    if (length <= 0 || is_any_damaged(piece, opened.statuses)) return;
    ThreadCodes codes = {};
    add_up_inputs(piece, inputs, opened, c, scratch, codes);
    add_chunk(source_of(piece), c, length, codes);
    Scale scales[OCTETS_PER_THREAD];
    load_scales(static_cast<const Scale*>(piece.scales) + c * STEPS_PER_CHUNK, length, scales);
    __syncwarp();  // where a lane stores, another one may have loaded
    store_values(static_cast<Element*>(piece.sum) + c * CHUNK, length, codes, scales);
}

NCZ_KERNEL(ncz_decode_sum)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Inputs inputs, const Status* statuses,
 const long long* offsets, const int32_t* decoded) {
    NCZ_SHARED(uint32_t, scratch, WARPS);
    decode_sum(floats_of, pieces, inputs, Opened{statuses, offsets, decoded}, scratch);
}

NCZ_KERNEL(ncz_decode_sum_at_random)
(const __grid_constant__ Pieces pieces, const __grid_constant__ Noise noise, const __grid_constant__ Inputs inputs,
 const Status* statuses, const long long* offsets, const int32_t* decoded) {
    NCZ_SHARED(uint32_t, scratch, WARPS);
    auto source_of = [&noise](const Piece& piece) { return random_floats_of(piece, noise); };
    decode_sum(source_of, pieces, inputs, Opened{statuses, offsets, decoded}, scratch);
}

#define NCZ_FIXED_KERNELS(X)                                                                                     \
    X(ncz_encode_fixed) X(ncz_encode_fixed_at_random) X(ncz_encode_fixed_codes) X(ncz_sum_fixed) \
    X(ncz_sum_fixed_at_random) X(ncz_sum_codes) X(ncz_sum_codes_at_random) X(ncz_encode_raw) X(ncz_decode)   \
    X(ncz_decode_codes) X(ncz_decode_sum) X(ncz_decode_sum_at_random)
