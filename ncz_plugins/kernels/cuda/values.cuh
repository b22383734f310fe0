// Floats to codes and back, random numbers, and what is measured beforehand.
//
// How codes lie in a block's threads: a block has a chunk, and each of its four warps a tile of 1,024 codes, eight rows of 128. A
// lane has four consecutive codes of each row, a run. So a warp loads and stores 512 bytes side by side, and a row has one step.
#pragma once

#include "symbols.cuh"

constexpr int TILE = int(PLANES_TILE), ROW = PLANES_ROW, TILE_ROWS = TILE / ROW;
constexpr int RUN = 4;  // consecutive codes of a lane
constexpr int CHUNK_ROWS = int(CHUNK) / ROW, TILES_OF_CHUNK = int(CHUNK) / TILE;
constexpr int TILE_CODES = TILE_ROWS * RUN;  // of a lane
static_assert(PLANES_LANES == WARP && ROW == WARP * RUN, "a row has a run for each lane");
static_assert(ROW == SCALE_BLOCK, "a row has one step");
static_assert(RUN == 4 && FOURS == WARP, "the elements of a run share a random start");

// Kernels that work on chunks: NCZ_CHUNK_KERNEL(ncz_name)(arguments). So many blocks must fit on a multiprocessor; with more, the
// kernels would spill.
constexpr int CHUNK_THREADS = TILES_OF_CHUNK * WARP;
constexpr int CHUNK_BLOCKS = sizeof(Element) == 8 ? 3 : 8;
#define NCZ_CHUNK_KERNEL(name) NCZ_KERNEL_OF(CHUNK_THREADS, CHUNK_BLOCKS, name)

typedef int32_t TileCodes[TILE_ROWS][RUN];

// The tile of this warp, of a block that has chunk `chunk`, and how many of `count` codes are in it.
NCZ_DEVICE int64_t tile_of(int64_t chunk) { return chunk * TILES_OF_CHUNK + warp(); }
NCZ_DEVICE int length_of_tile(int64_t tile, int64_t count) {
    int64_t left = count - tile * TILE;
    return int(left < 0 ? 0 : left < TILE ? left : TILE);
}

// Where this lane's run of a row begins in a tile.
NCZ_DEVICE int run_of(int row) { return row * ROW + lane() * RUN; }

// ------------------------------------------------------------------ four at once

// What one instruction loads or stores.
struct alignas(16) Sixteen {
    uint32_t words[4];
};

struct alignas(8) Eight {
    uint32_t words[2];
};

// The largest of these that so many bytes are made of.
template <int bytes>
struct Unit {
    typedef Sixteen Type;
};
template <>
struct Unit<sizeof(Eight)> {
    typedef Eight Type;
};

// As one instruction. Compilers split stores of these structures where another branch stores their members.
#ifdef NCZ_EMULATED
template <class Part>
NCZ_DEVICE void store_part(Part* to, const Part& part) {
    *to = part;
}
#else
NCZ_DEVICE void store_part(Sixteen* to, const Sixteen& part) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(part.words[0]), "r"(part.words[1]),
                 "r"(part.words[2]), "r"(part.words[3])
                 : "memory");
}
NCZ_DEVICE void store_part(Eight* to, const Eight& part) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(part.words[0]), "r"(part.words[1]) : "memory");
}
#endif

// A run, as it lies in memory.
template <class T>
struct LaneRun {
    typedef typename Unit<RUN * int(sizeof(T))>::Type Part;
    static constexpr int PARTS = RUN * int(sizeof(T)) / int(sizeof(Part));
    Part parts[PARTS];

    NCZ_DEVICE static bool is_aligned(const void* pointer) {
        return reinterpret_cast<uintptr_t>(pointer) % sizeof(Part) == 0;
    }
    NCZ_DEVICE void load(const T* from) {  // aligned
#pragma unroll
        for (int p = 0; p < PARTS; ++p) parts[p] = reinterpret_cast<const Part*>(from)[p];
    }
    NCZ_DEVICE void get(T (&values)[RUN]) const { memcpy(values, parts, sizeof values); }
    NCZ_DEVICE static LaneRun of(const T (&values)[RUN]) {
        LaneRun run;
        memcpy(run.parts, values, sizeof values);
        return run;
    }
    NCZ_DEVICE void store(T* to) const {  // aligned
#pragma unroll
        for (int p = 0; p < PARTS; ++p) store_part(reinterpret_cast<Part*>(to) + p, parts[p]);
    }
};

template <class T>
NCZ_DEVICE void store_run(T* to, int n, const T (&values)[RUN]) {
    if (n >= RUN && LaneRun<T>::is_aligned(to)) {
        LaneRun<T>::of(values).store(to);
    } else {
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            if (i < n) to[i] = values[i];
    }
}

// Zeros behind the first `n`.
template <class T>
NCZ_DEVICE void load_run(const T* from, int n, T (&values)[RUN]) {
    if (n >= RUN && LaneRun<T>::is_aligned(from)) {
        LaneRun<T> run;
        run.load(from);
        run.get(values);
    } else {
#pragma unroll
        for (int i = 0; i < RUN; ++i) values[i] = i < n ? from[i] : T{};
    }
}

// ------------------------------------------------------------------ one number

NCZ_DEVICE float product(float a, float b) { return __fmul_rn(a, b); }
NCZ_DEVICE double product(double a, double b) { return __dmul_rn(a, b); }

NCZ_DEVICE int32_t to_nearest(float clamped) { return __float2int_rn(clamped); }
NCZ_DEVICE int32_t to_nearest(double clamped) { return __double2int_rn(clamped); }

NCZ_DEVICE int32_t rounded_down(float clamped) { return __float2int_rd(clamped); }
NCZ_DEVICE int32_t rounded_down(double clamped) { return __double2int_rd(clamped); }

NCZ_DEVICE void to_float(int32_t code, float& out) { out = __int2float_rn(code); }
NCZ_DEVICE void to_float(int32_t code, double& out) { out = __int2double_rn(code); }

NCZ_DEVICE int32_t code_of(Element x, Scale inverse_step) {
    return to_nearest(clamped(product(Scale(widen(x)), inverse_step)));
}

// The sum of a number and a random one of 24 bits, which stand for less than 1, rounded down. It is no larger than the exact
// sum, and no smaller than its floor. As float32 such a number's bits are that many times 2**-149, without being converted.
NCZ_DEVICE float with_random(float scaled, uint32_t random) { return __fmaf_rd(__uint_as_float(random), 0x1p125f, scaled); }
NCZ_DEVICE double with_random(double scaled, uint32_t random) {
    return __dadd_rd(scaled, product(__int2double_rn(int32_t(random)), 0x1p-24));
}

// Up or down at random, up with a probability of the fraction.
NCZ_DEVICE int32_t code_of(Element x, Scale inverse_step, uint32_t random) {
    return rounded_down(with_random(clamped(product(Scale(widen(x)), inverse_step)), random));
}

NCZ_DEVICE Element value_of(int32_t code, Scale scale) {
    Scale value;
    Element out;
    to_float(code, value);
    narrow(product(value, scale), out);
    return out;
}

// ------------------------------------------------------------------ random numbers

// Where the hash of a run begins, whose first element is counted from the noise's first block.
NCZ_DEVICE uint32_t random_start(const Noise& noise, int64_t element) {
    return random_start(noise, noise.first + uint64_t(element) / SCALE_BLOCK, uint32_t(element) / RUN % FOURS);
}

// The numbers of a run's elements.
NCZ_DEVICE void random_numbers(const Noise& noise, uint32_t start, uint32_t (&numbers)[RUN]) {
    uint32_t first, second;
    random_words(noise, start, first, second);
    // The upper 24 bits of a word, and of one with its halves exchanged.
    numbers[0] = __byte_perm(first, 0, 0x4321);
    numbers[1] = __byte_perm(first, 0, 0x4103);
    numbers[2] = __byte_perm(second, 0, 0x4321);
    numbers[3] = __byte_perm(second, 0, 0x4103);
}

// ------------------------------------------------------------------ codes of a tile

// A run of floats, and the inverse of the step that they have in common.
struct FetchedFloats {
    LaneRun<Element> run;
    Scale inverse_step;
};

// Where the runs of a lane begin, those of its first row, so that others are a fixed distance away.
struct FloatRows {
    const Element* x;
    const Scale* inverse_steps;

    NCZ_DEVICE FetchedFloats fetch(int row) const {
        FetchedFloats fetched;
        fetched.inverse_step = inverse_steps[row];
        fetched.run.load(x + row * ROW);
        return fetched;
    }
    // The first `n` of a run, at any address.
    NCZ_DEVICE FetchedFloats fetch(int row, int n) const {
        if (n >= RUN && LaneRun<Element>::is_aligned(x)) return fetch(row);
        Element values[RUN];
#pragma unroll
        for (int i = 0; i < RUN; ++i) values[i] = i < n ? x[row * ROW + i] : Element{};
        return {LaneRun<Element>::of(values), inverse_steps[row]};
    }
    NCZ_DEVICE void codes_of(const FetchedFloats& fetched, int, int32_t (&codes)[RUN]) const {
        Element values[RUN];
        fetched.run.get(values);
#pragma unroll
        for (int i = 0; i < RUN; ++i) codes[i] = code_of(values[i], fetched.inverse_step);
    }
};

// The same, where codes are rounded at random.
struct RandomRows : FloatRows {
    Noise noise;
    uint32_t start;  // of the hash, for the run of the first row

    NCZ_DEVICE void codes_of(const FetchedFloats& fetched, int row, int32_t (&codes)[RUN]) const {
        Element values[RUN];
        uint32_t random[RUN];
        fetched.run.get(values);
        random_numbers(noise, start + uint32_t(row) * RANDOM_OF_BLOCK, random);
#pragma unroll
        for (int i = 0; i < RUN; ++i) codes[i] = code_of(values[i], fetched.inverse_step, random[i]);
    }
};

// Codes of floats, to the nearest.
struct Floats {
    const Element* x;
    const Scale* inverse_steps;

    NCZ_DEVICE int32_t code(int64_t element) const { return code_of(x[element], inverse_steps[element / SCALE_BLOCK]); }

    // Runs that are on their way from memory, and their codes: only where memory is aligned for that. `element` begins a run.
    typedef FetchedFloats Fetched;
    typedef FloatRows Rows;
    NCZ_DEVICE bool has_runs() const { return LaneRun<Element>::is_aligned(x); }
    NCZ_DEVICE Rows rows(int64_t element) const { return {x + element, inverse_steps + element / SCALE_BLOCK}; }
};

// Codes of floats, up or down at random.
struct RandomFloats : Floats {
    Noise noise;

    NCZ_DEVICE int32_t code(int64_t element) const {
        uint32_t random[RUN];
        random_numbers(noise, random_start(noise, element), random);
        int at = int(element % RUN);
        uint32_t own = at & 2 ? (at & 1 ? random[3] : random[2]) : at & 1 ? random[1] : random[0];
        return code_of(x[element], inverse_steps[element / SCALE_BLOCK], own);
    }
    typedef RandomRows Rows;
    NCZ_DEVICE Rows rows(int64_t element) const {
        return {Floats::rows(element), noise, random_start(noise, element)};
    }
};

NCZ_DEVICE Floats floats_of(const Piece& piece) {
    return {static_cast<const Element*>(piece.values), static_cast<const Scale*>(piece.steps)};
}
NCZ_DEVICE RandomFloats random_floats_of(const Piece& piece, Noise noise) {
    noise.first += piece.first;
    return {floats_of(piece), noise};
}

// Codes that lie in memory.
struct PlainCodes {
    const int32_t* codes;

    NCZ_DEVICE int32_t code(int64_t element) const { return codes[element]; }
    typedef LaneRun<int32_t> Fetched;
    struct Rows {
        const int32_t* codes;

        NCZ_DEVICE Fetched fetch(int row) const {
            Fetched run;
            run.load(codes + row * ROW);
            return run;
        }
        // The first `n` of a run, at any address.
        NCZ_DEVICE Fetched fetch(int row, int n) const {
            int32_t own[RUN];
            load_run(codes + row * ROW, n, own);
            return Fetched::of(own);
        }
        NCZ_DEVICE void codes_of(const Fetched& fetched, int, int32_t (&own)[RUN]) const { fetched.get(own); }
    };
    NCZ_DEVICE bool has_runs() const { return LaneRun<int32_t>::is_aligned(codes); }
    NCZ_DEVICE Rows rows(int64_t element) const { return {codes + element}; }
};

NCZ_DEVICE PlainCodes codes_of(const Piece& piece) { return {piece.codes}; }

constexpr int ROWS_AT_ONCE = sizeof(Element) == 8 ? 2 : 4;

// Adds the codes of a tile of `length`, which begins at element `first`; AT_ONCE rows of it are on their way together.
template <int AT_ONCE = ROWS_AT_ONCE, class Source>
NCZ_DEVICE void add_tile(const Source& source, int64_t first, int length, TileCodes& codes) {
    if (length == TILE && source.has_runs()) {
        auto rows = source.rows(first + run_of(0));
#pragma unroll
        for (int start = 0; start < TILE_ROWS; start += AT_ONCE) {
            typename Source::Fetched fetched[AT_ONCE];
#pragma unroll
            for (int r = 0; r < AT_ONCE; ++r) fetched[r] = rows.fetch(start + r);
#pragma unroll
            for (int r = 0; r < AT_ONCE; ++r) {
                int32_t own[RUN];
                rows.codes_of(fetched[r], start + r, own);
#pragma unroll
                for (int i = 0; i < RUN; ++i) codes[start + r][i] = sum(codes[start + r][i], own[i]);
            }
        }
    } else {
#pragma unroll 1
        for (int r = 0; r < TILE_ROWS; ++r) {  // a loop, so that the code is short: rows move up, so that they stay in registers
            int32_t own[RUN];
            memcpy(own, codes[0], sizeof own);
#pragma unroll
            for (int k = 1; k < TILE_ROWS; ++k) memcpy(codes[k - 1], codes[k], sizeof own);
#pragma unroll
            for (int i = 0; i < RUN; ++i)
                if (run_of(r) + i < length) own[i] = sum(own[i], source.code(first + run_of(r) + i));
            memcpy(codes[TILE_ROWS - 1], own, sizeof own);
        }
    }
}

// Stores a tile row by row; `row_of` gives what stands in the run of one.
template <class T, class RowOf>
NCZ_DEVICE void store_rows(T* to, int length, RowOf row_of) {
    to += run_of(0);
    if (length == TILE && LaneRun<T>::is_aligned(to)) {
#pragma unroll
        for (int r = 0; r < TILE_ROWS; ++r) {
            T values[RUN];
            row_of(r, values);
            LaneRun<T>::of(values).store(to + r * ROW);
        }
    } else {
#pragma unroll
        for (int r = 0; r < TILE_ROWS; ++r) {
            T values[RUN];
            row_of(r, values);
#pragma unroll
            for (int i = 0; i < RUN; ++i)
                if (run_of(r) + i < length) to[r * ROW + i] = values[i];
        }
    }
}

NCZ_DEVICE void store_tile(int32_t* to, int length, const TileCodes& codes) {
    store_rows(to, length, [&](int r, int32_t (&row)[RUN]) { memcpy(row, codes[r], sizeof row); });
}

typedef Scale TileScales[TILE_ROWS];  // one for each row

NCZ_DEVICE void load_scales(const Scale* scales, int length, TileScales& own) {
#pragma unroll
    for (int r = 0; r < TILE_ROWS; ++r) own[r] = r * ROW < length ? scales[r] : Scale(0);
}

NCZ_DEVICE void store_values(Element* to, int length, const TileCodes& codes, const TileScales& scales) {
    store_rows(to, length, [&](int r, Element (&row)[RUN]) {
#pragma unroll
        for (int i = 0; i < RUN; ++i) row[i] = value_of(codes[r][i], scales[r]);
    });
}

// ------------------------------------------------------------------ kernels

template <class Source>
NCZ_DEVICE void quantize(const Source& source, int64_t chunk, int64_t count, int32_t* codes) {
    int64_t tile = tile_of(chunk);
    int length = length_of_tile(tile, count);
    TileCodes own = {};
    add_tile(source, tile * TILE, length, own);
    store_tile(codes + tile * TILE, length, own);
}

// codes = x * inverse_step, rounded.
NCZ_CHUNK_KERNEL(ncz_quantize)(const Element* x, const Scale* inverse_steps, long long count, int32_t* codes) {
    quantize(Floats{x, inverse_steps}, blockIdx.x, count, codes);
}

NCZ_CHUNK_KERNEL(ncz_quantize_at_random)
(const Element* x, const Scale* inverse_steps, Noise noise, long long count, int32_t* codes) {
    quantize(RandomFloats{{x, inverse_steps}, noise}, blockIdx.x, count, codes);
}

// out = codes * scale.
NCZ_CHUNK_KERNEL(ncz_dequantize)(const int32_t* codes, const Scale* scales, long long count, Element* out) {
    int64_t tile = tile_of(blockIdx.x);
    int length = length_of_tile(tile, count);
    TileScales own_scales;
    TileCodes own = {};
    load_scales(scales + tile * TILE_ROWS, length, own_scales);
    add_tile(PlainCodes{codes}, tile * TILE, length, own);
    store_values(out + tile * TILE, length, own, own_scales);
}

// How many codes of a frame the selector looks at. The last piece of PIECE, which may be short, is always among them.
NCZ_DEVICE int sampled_of(int64_t count) {
    int64_t pieces = (count + PIECE - 1) / PIECE, missing = PIECE * pieces - count;
    return int(PIECE * (pieces < SAMPLE_PIECES ? pieces : SAMPLE_PIECES) - missing);
}
constexpr int MOST_SAMPLED = int(PIECE * SAMPLE_PIECES);

// What the selector looks at, piece behind piece: of the pieces' codes, or of what their values become. A thread per code.
enum Sampled : int { CODES, VALUES, VALUES_AT_RANDOM };
NCZ_KERNEL(ncz_sample)(const __grid_constant__ Pieces pieces, Noise noise, int sampled, int32_t* samples) {
    const Piece& of = pieces.of[frame_number(pieces.n)];
    int64_t i = unit_number(pieces.n) * THREADS + threadIdx.x, count = of.count;
    if (i >= sampled_of(count)) return;
    int64_t all = (count + PIECE - 1) / PIECE, piece = i / PIECE;
    if (all > SAMPLE_PIECES) piece = piece * (all - 1) / (SAMPLE_PIECES - 1);
    int64_t element = PIECE * piece + i % PIECE;
    samples[frame_number(pieces.n) * MOST_SAMPLED + i] = sampled == CODES    ? of.codes[element]
                                                        : sampled == VALUES ? floats_of(of).code(element)
                                                                            : random_floats_of(of, noise).code(element);
}

// Of `values` the one with number lane() / 8, combined over all lanes as a butterfly does whose distances begin with 16. The
// lanes first share the values out among them, which takes 6 shuffles instead of 20.
constexpr int REDUCED_TOGETHER = 4;
template <class T, class Combine>
NCZ_DEVICE T warp_combined(const T (&values)[REDUCED_TOGETHER], Combine combine) {
    bool upper = lane() & 16, odd = lane() & 8;
    T first = combine(upper ? values[2] : values[0], __shfl_xor_sync(ALL_LANES, upper ? values[0] : values[2], 16));
    T second = combine(upper ? values[3] : values[1], __shfl_xor_sync(ALL_LANES, upper ? values[1] : values[3], 16));
    T own = combine(odd ? second : first, __shfl_xor_sync(ALL_LANES, odd ? first : second, 8));
    for (int distance = 4; distance; distance /= 2) own = combine(own, __shfl_xor_sync(ALL_LANES, own, distance));
    return own;
}

// Lowest and highest value and sum of squares of each block of SCALE_BLOCK: -inf, inf and inf if it holds a NaN or an
// infinity. Lane i of a warp adds up elements i, i + LANES, ... of a block, as every backend does. A warp works for
// several blocks, so that their elements are on their way together. The first "chunk" of a piece is the number of its
// first block here.
NCZ_KERNEL(ncz_block_statistics)
(const __grid_constant__ Pieces pieces, double* lowest, double* highest, double* squares) {
    static_assert(LANES == WARP, "one lane of a sum for each of a warp");
    constexpr int EACH = int(SCALE_BLOCK) / LANES;
    const Piece& piece = pieces.of[frame_number(pieces.n)];
    int64_t first = (unit_number(pieces.n) * WARPS + warp()) * REDUCED_TOGETHER, left = piece.count - first * SCALE_BLOCK;
    if (left <= 0) return;
    const Element* x = static_cast<const Element*>(piece.values) + first * SCALE_BLOCK + lane();
    Element elements[REDUCED_TOGETHER][EACH];
#pragma unroll
    for (int b = 0; b < REDUCED_TOGETHER; ++b)
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            int at = b * int(SCALE_BLOCK) + e * LANES;
            elements[b][e] = at + lane() < left ? x[at] : Element{};
        }
    const Scale infinity = Scale(__longlong_as_double(0x7ff0000000000000ll));
    double square[REDUCED_TOGETHER];
    Scale low[REDUCED_TOGETHER], high[REDUCED_TOGETHER];
    bool is_special = false;  // whether the block is whose results this lane writes
#pragma unroll
    for (int b = 0; b < REDUCED_TOGETHER; ++b) {
        square[b] = 0;
        low[b] = infinity;
        high[b] = -infinity;
        bool special = false;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            if (b * int(SCALE_BLOCK) + e * LANES + lane() >= left) continue;
            Scale value = Scale(widen(elements[b][e]));
            square[b] = __dadd_rn(square[b], __dmul_rn(double(value), double(value)));
            low[b] = value < low[b] ? value : low[b];
            high[b] = value > high[b] ? value : high[b];
            special |= !(value - value == 0);
        }
        special = __any_sync(ALL_LANES, special);
        is_special |= special && lane() / 8 == b;
    }
    double sum = warp_combined(square, [](double a, double b) { return __dadd_rn(a, b); });
    Scale least = warp_combined(low, [](Scale a, Scale b) { return b < a ? b : a; });
    Scale most = warp_combined(high, [](Scale a, Scale b) { return b > a ? b : a; });
    int64_t at = piece.first_chunk + first + lane() / 8;
    if (lane() % 8 || left <= lane() / 8 * SCALE_BLOCK) return;
    lowest[at] = is_special ? -double(infinity) : __dadd_rn(double(least), 0.0);  // not -0.0
    highest[at] = is_special ? double(infinity) : __dadd_rn(double(most), 0.0);
    squares[at] = is_special ? double(infinity) : sum;
}

#define NCZ_VALUE_KERNELS(X) \
    X(ncz_quantize) X(ncz_quantize_at_random) X(ncz_dequantize) X(ncz_sample) X(ncz_block_statistics)
