// Floats to codes and back, random numbers, and what is measured beforehand.
//
// How a chunk lies in a block's threads: each thread has two octets of 8 consecutive elements, and a warp has 64
// consecutive octets, octet 64 * warp + lane and the one 32 behind it. So a block of 32 symbols is four neighbouring
// lanes, a whole octet is packed in one thread's registers, and a warp's threads load and store bytes side by side.
#pragma once

#include "symbols.cuh"

constexpr int OCTETS_PER_THREAD = int(CHUNK) / OCTET / THREADS;
constexpr int STEPS_PER_CHUNK = int(CHUNK) / SCALE_BLOCK;
static_assert(OCTETS_PER_THREAD == 2, "as octet_starts has 16 bits for each");

typedef int32_t ThreadCodes[OCTETS_PER_THREAD][OCTET];
typedef uint32_t ThreadSymbols[OCTETS_PER_THREAD][OCTET];

// The number of this thread's octet j in its chunk.
NCZ_DEVICE int octet_of(int j) { return warp() * (OCTETS_PER_THREAD * WARP) + j * WARP + lane(); }

// How many of 8 elements from element `first` on there are in a chunk of `length`: 0 to 8.
NCZ_DEVICE int octet_length(int first, int length) {
    int left = length - first;
    return left >= OCTET ? OCTET : left > 0 ? left : 0;
}

// ------------------------------------------------------------------ eight at once

// What one instruction loads or stores.
struct alignas(16) Sixteen {
    uint32_t words[4];
};

NCZ_DEVICE bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(Sixteen) == 0; }

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

// Consecutive numbers that a lane has, where those of neighbouring lanes lie side by side; as they lie in memory.
constexpr int RUN = 4;
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
};

template <class T>
NCZ_DEVICE void store_run(T* to, int n, const T (&values)[RUN]) {
    if (n >= RUN && LaneRun<T>::is_aligned(to)) {
        LaneRun<T> run;
        memcpy(run.parts, values, sizeof values);
#pragma unroll
        for (int p = 0; p < LaneRun<T>::PARTS; ++p)
            store_part(reinterpret_cast<typename LaneRun<T>::Part*>(to) + p, run.parts[p]);
    } else {
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            if (i < n) to[i] = values[i];
    }
}

// `n` of 8 numbers, zeros behind them.
template <class T>
NCZ_DEVICE void load_octet(const T* from, int n, T (&values)[OCTET]) {
    if (n == OCTET && is_aligned(from)) {
        Sixteen parts[sizeof values / sizeof(Sixteen)];
#pragma unroll
        for (int p = 0; p < int(sizeof values / sizeof(Sixteen)); ++p)
            parts[p] = reinterpret_cast<const Sixteen*>(from)[p];
        memcpy(values, parts, sizeof values);
    } else {
#pragma unroll
        for (int i = 0; i < OCTET; ++i) values[i] = i < n ? from[i] : T{};
    }
}

// By a whole warp, whose lanes have neighbouring octets: `to` and `n` are this lane's. Memory is written in sectors of 32
// bytes, and half a sector costs as much as a whole one. So where octets take more than one instruction, lanes first exchange
// their parts, as in transposing a matrix, and each instruction then writes whole sectors.
template <class T>
NCZ_DEVICE void store_octet(T* to, int n, const T (&values)[OCTET]) {
    constexpr int PARTS = sizeof values / sizeof(Sixteen);
    if (!__all_sync(ALL_LANES, n == OCTET && is_aligned(to))) {
#pragma unroll
        for (int i = 0; i < OCTET; ++i)
            if (i < n) to[i] = values[i];
        return;
    }
    Sixteen parts[PARTS];
    memcpy(parts, values, sizeof values);
#pragma unroll
    for (int distance = 1; distance < PARTS; distance *= 2) {
        bool is_upper = lane() & distance;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            if (p & distance) continue;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                uint32_t low = parts[p].words[w], high = parts[p + distance].words[w];
                uint32_t taken = __shfl_xor_sync(ALL_LANES, is_upper ? low : high, distance);
                parts[p].words[w] = is_upper ? taken : low;
                parts[p + distance].words[w] = is_upper ? high : taken;
            }
        }
    }
    // Part p is now one of the octet of lane p of PARTS neighbours: the one with this lane's number among them.
    int own = lane() % PARTS;
    Sixteen* of_first = reinterpret_cast<Sixteen*>(to) - own * PARTS + own;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) of_first[p * PARTS] = parts[p];
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

// Up with a probability of the fraction: if that is more than the upper 24 bits of `random`.
NCZ_DEVICE int32_t code_of(Element x, Scale inverse_step, uint32_t random) {
    Scale scaled = clamped(product(Scale(widen(x)), inverse_step));
    int32_t code = rounded_down(scaled);
    Scale floor, fraction;
    to_float(code, floor);
    to_float(int32_t(random >> 8), fraction);
    return code + (product(fraction, Scale(0x1p-24)) < scaled - floor);
}

NCZ_DEVICE Element value_of(int32_t code, Scale scale) {
    Scale value;
    Element out;
    to_float(code, value);
    narrow(product(value, scale), out);
    return out;
}

// ------------------------------------------------------------------ random numbers

NCZ_DEVICE uint32_t random_word(const Noise& noise, uint64_t element) {
    return random_word(noise, uint32_t(element), uint32_t(element >> 32));
}

// ------------------------------------------------------------------ codes of a chunk

// A run of floats, and the inverse of the step that they have in common.
struct FetchedFloats {
    LaneRun<Element> run;
    Scale inverse_step;

    FetchedFloats() = default;
    NCZ_DEVICE FetchedFloats(const Element* x, const Scale* inverse_steps, int64_t element)
        : inverse_step(inverse_steps[uint64_t(element) / SCALE_BLOCK]) {
        run.load(x + element);
    }
};

// Codes of floats, to the nearest.
struct Floats {
    const Element* x;
    const Scale* inverse_steps;

    NCZ_DEVICE int32_t code(int64_t element) const { return code_of(x[element], inverse_steps[element / SCALE_BLOCK]); }

    NCZ_DEVICE void octet(int64_t chunk, int first, int n, int32_t (&codes)[OCTET]) const {
        Scale inverse_step = inverse_steps[(chunk * CHUNK + first) / SCALE_BLOCK];
        Element values[OCTET];
        load_octet(x + chunk * CHUNK + first, n, values);
#pragma unroll
        for (int i = 0; i < OCTET; ++i) codes[i] = code_of(values[i], inverse_step);
    }

    // A run that is on its way from memory, and its codes. Only where memory is aligned for that.
    typedef FetchedFloats Fetched;
    NCZ_DEVICE bool has_runs() const { return LaneRun<Element>::is_aligned(x); }
    NCZ_DEVICE Fetched fetch(int64_t element) const { return {x, inverse_steps, element}; }
    NCZ_DEVICE void codes_of(const Fetched& fetched, int64_t, int32_t (&codes)[RUN]) const {
        Element values[RUN];
        fetched.run.get(values);
#pragma unroll
        for (int i = 0; i < RUN; ++i) codes[i] = code_of(values[i], fetched.inverse_step);
    }
};

// Codes of floats, up or down at random.
struct RandomFloats {
    const Element* x;
    const Scale* inverse_steps;
    Noise noise;

    NCZ_DEVICE int32_t code(int64_t element) const {
        uint32_t random = random_word(noise, noise.first + uint64_t(element));
        return code_of(x[element], inverse_steps[element / SCALE_BLOCK], random);
    }

    NCZ_DEVICE void octet(int64_t chunk, int first, int n, int32_t (&codes)[OCTET]) const {
        int64_t element = chunk * CHUNK + first;
        Scale inverse_step = inverse_steps[element / SCALE_BLOCK];
        uint64_t number = noise.first + uint64_t(element);
        Element values[OCTET];
        load_octet(x + element, n, values);
#pragma unroll
        for (int i = 0; i < OCTET; ++i) codes[i] = code_of(values[i], inverse_step, random_word(noise, number + i));
    }

    typedef FetchedFloats Fetched;
    NCZ_DEVICE bool has_runs() const { return LaneRun<Element>::is_aligned(x); }
    NCZ_DEVICE Fetched fetch(int64_t element) const { return {x, inverse_steps, element}; }
    NCZ_DEVICE void codes_of(const Fetched& fetched, int64_t element, int32_t (&codes)[RUN]) const {
        uint64_t number = noise.first + uint64_t(element);
        Element values[RUN];
        fetched.run.get(values);
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            codes[i] = code_of(values[i], fetched.inverse_step, random_word(noise, number + i));
    }
};

NCZ_DEVICE Floats floats_of(const Piece& piece) {
    return {static_cast<const Element*>(piece.values), static_cast<const Scale*>(piece.steps)};
}
NCZ_DEVICE RandomFloats random_floats_of(const Piece& piece, Noise noise) {
    noise.first += piece.first;
    return {static_cast<const Element*>(piece.values), static_cast<const Scale*>(piece.steps), noise};
}

// Codes that lie in memory.
struct PlainCodes {
    const int32_t* codes;

    NCZ_DEVICE int32_t code(int64_t element) const { return codes[element]; }
    NCZ_DEVICE void octet(int64_t chunk, int first, int n, int32_t (&octet)[OCTET]) const {
        load_octet(codes + chunk * CHUNK + first, n, octet);
    }
    typedef LaneRun<int32_t> Fetched;
    NCZ_DEVICE bool has_runs() const { return LaneRun<int32_t>::is_aligned(codes); }
    NCZ_DEVICE Fetched fetch(int64_t element) const {
        Fetched run;
        run.load(codes + element);
        return run;
    }
    NCZ_DEVICE void codes_of(const Fetched& fetched, int64_t, int32_t (&own)[RUN]) const { fetched.get(own); }
};

NCZ_DEVICE PlainCodes codes_of(const Piece& piece) { return {piece.codes}; }

// This thread's part of a chunk of `length`; anything behind the end.
template <class Source>
NCZ_DEVICE void load_chunk(const Source& source, int64_t chunk, int length, ThreadCodes& codes) {
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
        int first = OCTET * octet_of(j), n = octet_length(first, length);
        if (n) source.octet(chunk, first, n, codes[j]);
    }
}

// Adds this thread's part of a chunk, octet by octet, as that takes fewer registers.
template <class Source>
NCZ_DEVICE void add_chunk(const Source& source, int64_t chunk, int length, ThreadCodes& codes) {
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
        int first = OCTET * octet_of(j), n = octet_length(first, length);
        if (!n) continue;
        int32_t octet[OCTET];
        source.octet(chunk, first, n, octet);
#pragma unroll
        for (int i = 0; i < OCTET; ++i) codes[j][i] = sum(codes[j][i], octet[i]);
    }
}

// To memory; with `add`, onto what stands there.
NCZ_DEVICE void store_codes(int32_t* to, int length, const ThreadCodes& codes, bool add) {
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
        int first = OCTET * octet_of(j), n = octet_length(first, length);
        int32_t total[OCTET] = {};
        if (add) load_octet(to + first, n, total);
#pragma unroll
        for (int i = 0; i < OCTET; ++i) total[i] = sum(total[i], codes[j][i]);
        store_octet(to + first, n, total);
    }
}

// The scales of this thread's octets, from those of a chunk of `length`.
NCZ_DEVICE void load_scales(const Scale* scales, int length, Scale (&own)[OCTETS_PER_THREAD]) {
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
        int first = OCTET * octet_of(j);
        own[j] = first < length ? scales[first / SCALE_BLOCK] : Scale(0);
    }
}

NCZ_DEVICE void store_values(Element* to, int length, const ThreadCodes& codes,
                             const Scale (&scales)[OCTETS_PER_THREAD]) {
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
        int first = OCTET * octet_of(j);
        Element values[OCTET];
#pragma unroll
        for (int i = 0; i < OCTET; ++i) values[i] = value_of(codes[j][i], scales[j]);
        store_octet(to + first, octet_length(first, length), values);
    }
}

// Codes to symbols, zeros behind the end of the chunk. `scratch` is shared memory of WARPS numbers.
NCZ_DEVICE void predict(const ThreadCodes& codes, int length, int32_t predictor, int32_t* scratch,
                        ThreadSymbols& symbols) {
    int32_t before = 0;  // the code before this thread's octet
    if (predictor == DELTA) {
        constexpr int LAST = OCTETS_PER_THREAD - 1;
        if (lane() == WARP - 1) scratch[warp()] = codes[LAST][OCTET - 1];
        __syncthreads();
        if (lane() == 0 && warp()) before = scratch[warp() - 1];
        __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
        int n = octet_length(OCTET * octet_of(j), length);
        if (predictor == DELTA) {
            int32_t of_lower_lane = __shfl_up_sync(ALL_LANES, codes[j][OCTET - 1], 1);
            int32_t of_last_lane = __shfl_sync(ALL_LANES, codes[j][OCTET - 1], WARP - 1);
            int32_t previous = lane() ? of_lower_lane : before;
            before = of_last_lane;  // of the next octet of lane 0
#pragma unroll
            for (int i = 0; i < OCTET; ++i)
                symbols[j][i] = zigzag(difference(codes[j][i], i ? codes[j][i - 1] : previous));
        } else {
#pragma unroll
            for (int i = 0; i < OCTET; ++i) symbols[j][i] = zigzag(codes[j][i]);
        }
        if (n < OCTET) {
#pragma unroll
            for (int i = 0; i < OCTET; ++i) symbols[j][i] = i < n ? symbols[j][i] : 0;
        }
    }
}

// Inverse of `predict`.
NCZ_DEVICE void unpredict(const ThreadSymbols& symbols, int32_t predictor, uint32_t* scratch, ThreadCodes& codes) {
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j)
#pragma unroll
        for (int i = 0; i < OCTET; ++i) codes[j][i] = unzigzag(symbols[j][i]);
    if (predictor != DELTA) return;
    uint32_t base = 0;  // sum of all that is before this octet
    uint32_t bases[OCTETS_PER_THREAD];
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
#pragma unroll
        for (int i = 1; i < OCTET; ++i) codes[j][i] = sum(codes[j][i], codes[j][i - 1]);
        uint32_t total = uint32_t(codes[j][OCTET - 1]), inclusive = warp_inclusive_sum(total);
        bases[j] = base + inclusive - total;
        base += __shfl_sync(ALL_LANES, inclusive, WARP - 1);
    }
    if (lane() == 0) scratch[warp()] = base;
    __syncthreads();
    uint32_t of_warp = 0;
    for (int w = 0; w < warp(); ++w) of_warp += scratch[w];
    __syncthreads();
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j)
#pragma unroll
        for (int i = 0; i < OCTET; ++i) codes[j][i] = sum(codes[j][i], int32_t(bases[j] + of_warp));
}

// ------------------------------------------------------------------ kernels

template <class Source>
NCZ_DEVICE void quantize(const Source& source, int64_t c, int64_t count, int32_t* codes, ThreadCodes& own) {
    int length = length_of(c, count);
    load_chunk(source, c, length, own);
    store_codes(codes + c * CHUNK, length, own, false);
}

// codes = x * inverse_step, rounded. A block per chunk.
NCZ_KERNEL(ncz_quantize)(const Element* x, const Scale* inverse_steps, long long count, int32_t* codes) {
    ThreadCodes own = {};
    quantize(Floats{x, inverse_steps}, blockIdx.x, count, codes, own);
}

NCZ_KERNEL(ncz_quantize_at_random)
(const Element* x, const Scale* inverse_steps, Noise noise, long long count, int32_t* codes) {
    ThreadCodes own = {};
    quantize(RandomFloats{x, inverse_steps, noise}, blockIdx.x, count, codes, own);
}

// out = codes * scale. A block per chunk.
NCZ_KERNEL(ncz_dequantize)(const int32_t* codes, const Scale* scales, long long count, Element* out) {
    int64_t c = blockIdx.x;
    int length = length_of(c, count);
    Scale own_scales[OCTETS_PER_THREAD];
    ThreadCodes own = {};
    load_scales(scales + c * STEPS_PER_CHUNK, length, own_scales);
    load_chunk(PlainCodes{codes}, c, length, own);
    store_values(out + c * CHUNK, length, own, own_scales);
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

// The bits of all symbols, for RAW's width.
NCZ_DEVICE void collect_symbols(const ThreadCodes& codes, int length, Choice& choice, uint32_t* scratch) {
    ThreadSymbols symbols;
    predict(codes, length, choice.predictor, reinterpret_cast<int32_t*>(scratch), symbols);
    uint32_t all = 0;
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j)
#pragma unroll
        for (int i = 0; i < OCTET; ++i) all |= symbols[j][i];
    all = block_or(all, scratch);
    if (threadIdx.x == 0 && all) atomicOr(&choice.symbols, all);
}

// The codes of a piece's values, and the bits of their symbols.
template <class Source>
NCZ_DEVICE void stage(const Source& source, const Piece& piece, int64_t c, Choice& choice, uint32_t* scratch) {
    ThreadCodes own = {};
    quantize(source, c, piece.count, piece.codes, own);
    collect_symbols(own, length_of(c, piece.count), choice, scratch);
}

// Whether a block has to stage a chunk: there is one, and the coder that was chosen reads codes and not values.
NCZ_DEVICE bool is_to_stage(const Piece& piece, int64_t c, const Choice& choice) {
    return c < chunks_of(piece.count) && (choice.coder == RAW || choice.coder == RANS);
}

// A block per chunk, as the two below.
NCZ_KERNEL(ncz_stage)(const __grid_constant__ Pieces pieces, Written* written) {
    NCZ_SHARED(uint32_t, scratch, WARPS);
    int f = frame_number(pieces.n);
    int64_t c = unit_number(pieces.n);
    if (is_to_stage(pieces.of[f], c, written[f].choice))
        stage(floats_of(pieces.of[f]), pieces.of[f], c, written[f].choice, scratch);
}

NCZ_KERNEL(ncz_stage_at_random)(const __grid_constant__ Pieces pieces, Noise noise, Written* written) {
    NCZ_SHARED(uint32_t, scratch, WARPS);
    int f = frame_number(pieces.n);
    int64_t c = unit_number(pieces.n);
    if (is_to_stage(pieces.of[f], c, written[f].choice))
        stage(random_floats_of(pieces.of[f], noise), pieces.of[f], c, written[f].choice, scratch);
}

// Of codes that are there already.
NCZ_KERNEL(ncz_stage_codes)(const __grid_constant__ Pieces pieces, Written* written) {
    NCZ_SHARED(uint32_t, scratch, WARPS);
    int f = frame_number(pieces.n);
    int64_t c = unit_number(pieces.n);
    const Piece& piece = pieces.of[f];
    if (!is_to_stage(piece, c, written[f].choice)) return;
    int length = length_of(c, piece.count);
    ThreadCodes own = {};
    load_chunk(PlainCodes{piece.codes}, c, length, own);
    collect_symbols(own, length, written[f].choice, scratch);
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

#define NCZ_VALUE_KERNELS(X)                                                                                   \
    X(ncz_quantize) X(ncz_quantize_at_random) X(ncz_dequantize) X(ncz_sample) X(ncz_stage) X(ncz_stage_at_random) \
    X(ncz_stage_codes) X(ncz_block_statistics)
