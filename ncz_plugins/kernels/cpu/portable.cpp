// The kernels' primitives in plain C++, for any little-endian processor: bits are moved inside 64-bit words,
// and the loops are written so that compilers vectorize them.

#include <cmath>

#include "bits.h"
#include "../common/floats.h"
#include "../common/format.h"

namespace {

// Vectors as gcc and clang have them on every processor, in registers or not.
constexpr int VECTOR_BYTES = 16;
typedef uint64_t Pair __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Four __attribute__((vector_size(VECTOR_BYTES)));
typedef double Doubles __attribute__((vector_size(VECTOR_BYTES)));

inline Doubles doubles_at(const float* x) { return Doubles{x[0], x[1]}; }

// Numbers picked out of `a` (0 to 3) and `b` (4 to 7).
#if defined(__clang__) || __GNUC__ >= 12
#define NCZ_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define NCZ_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Four){__VA_ARGS__})
#endif

template <int lane, class Function>
inline void map_pairs(Words<lane>& block, Function function) {
    for (int i = 0; i < block.COUNT; i += 2) {
        Pair pair = function(Pair{block.words[i], block.words[i + 1]});
        memcpy(block.words + i, &pair, sizeof pair);
    }
}

// Merges neighbouring lanes of 8, 16 and 32 bits, until one number is left.
template <int lane>
inline void squeeze(Words<lane>& block, unsigned lane_width) {
    map_pairs(block, [lane_width](Pair word) {
        uint64_t width = lane_width;
        if constexpr (lane <= 8) {
            word = (word & 0x00ff00ff00ff00ffu) | (word & 0xff00ff00ff00ff00u) >> (8 - width);
            width *= 2;
        }
        if constexpr (lane <= 16) {
            word = (word & 0x0000ffff0000ffffu) | (word & 0xffff0000ffff0000u) >> (16 - width);
            width *= 2;
        }
        return (word & 0xffffffffu) | (word >> 32) << width;
    });
}

// The same steps backwards: halves until the lanes are as narrow as they should be.
template <int lane>
inline void spread(Words<lane>& block, unsigned lane_width) {
    auto mask = [](uint64_t kept) { return (uint64_t(1) << kept) - 1; };
    map_pairs(block, [lane_width, mask](Pair bits) {
        uint64_t kept = lane_width * (32 / lane), low = mask(kept);
        Pair word = (bits & low) | ((bits >> kept) & low) << 32;
        if constexpr (lane <= 16) {
            kept /= 2;
            low = mask(kept) * 0x0000000100000001u;
            word = (word & low) | ((word >> kept) & low) << 16;
        }
        if constexpr (lane <= 8) {
            kept /= 2;
            low = mask(kept) * 0x0001000100010001u;
            word = (word & low) | ((word >> kept) & low) << 8;
        }
        return word;
    });
}

inline uint64_t bits_at(unsigned place, uint64_t word) {
    return word >> place % 64 & ((uint64_t(1) << (place >> 8)) - 1);
}

inline int32_t round_to_code(float scaled) { return int32_t(lrintf(clamped(scaled))); }
inline int32_t round_to_code(double scaled) { return int32_t(lrint(clamped(scaled))); }

// floor(scaled + u), the sum not rounded. `random`: u, a number from 0 to 1, times 2**32.
template <class Float>
inline int32_t round_at_random(Float scaled, uint32_t random) {
    scaled = clamped(scaled);
    int32_t code = int32_t(scaled);  // towards zero, so that the difference is exact
    Float rest = scaled - Float(code), less_u = Float(int32_t(random >> 8)) * Float(-0x1p-24);
    return code + (rest >= 1 + less_u) - (rest < less_u);
}

struct Block {
    int32_t values[ncz::BLOCK];
};

// A block of function(i).
template <class Function>
inline Block block_of(Function function) {
    Block block;
    for (int i = 0; i < ncz::BLOCK; ++i) block.values[i] = int32_t(function(i));
    return block;
}

inline Block load_block(const int32_t* from) {
    Block block;
    memcpy(&block, from, sizeof block);
    return block;
}

inline void store_block(const Block& block, void* to) { memcpy(to, &block, sizeof block); }

inline Block add_blocks(const Block& a, const Block& b) {
    return block_of([&](int i) { return uint32_t(a.values[i]) + uint32_t(b.values[i]); });
}

// 1.5 * 2**23 has 1 as its last bit: adding it rounds to even, and leaves the code in the low bits. Right while all codes
// have less than 23 bits; clamps and conversions, which not all compilers vectorize, are for the others.
constexpr float magic = 12582912.0f;

inline bool are_small(const Block& codes) {
    int32_t all = 0;
    for (int32_t code : codes.values) all |= code ^ code >> 31;
    return all < 1 << 22;
}

// Apart, so that it is in the library once for each type.
template <class T, class Scale>
[[gnu::noinline]] Block round_large(const T* x, Scale inverse_step) {
    return block_of([&](int i) { return round_to_code(widen(x[i]) * inverse_step); });
}

template <class T, class Scale>
inline Block quantize_block(const T* x, Scale inverse_step) {
    if constexpr (sizeof(Scale) == 4) {
        Block codes = block_of([&](int i) { return bits_of(widen(x[i]) * inverse_step + magic) - bits_of(magic); });
        if (are_small(codes)) return codes;
    }
    return round_large(x, inverse_step);
}

// Of 32 elements from element number `first` of a call on, a multiple of 32: random numbers, in their upper 24 bits.
// docs/reference/wire-format.md says which one belongs to an element.
[[gnu::noinline]] Block random_block(const ncz::Noise& noise, int64_t first) {
    uint64_t block = noise.first + uint64_t(first / ncz::SCALE_BLOCK);
    uint32_t start = random_start(noise, block, uint32_t(first % ncz::SCALE_BLOCK / 4));
    const Four numbers{0, 1, 2, 3};
    Four fours[ncz::BLOCK / 4];
    for (uint32_t i = 0; i < ncz::BLOCK / 4; i += 4) {
        Four a, b;
        random_words(noise, (numbers + i) * ncz::RANDOM_OF_FOUR + start, a, b);
        Four swapped_a = (a << 16 | a >> 16) & ~0xffu, swapped_b = (b << 16 | b >> 16) & ~0xffu;
        a &= ~0xffu;
        b &= ~0xffu;
        Four low_a = NCZ_SHUFFLE(a, swapped_a, 0, 4, 1, 5), low_b = NCZ_SHUFFLE(b, swapped_b, 0, 4, 1, 5);
        Four high_a = NCZ_SHUFFLE(a, swapped_a, 2, 6, 3, 7), high_b = NCZ_SHUFFLE(b, swapped_b, 2, 6, 3, 7);
        fours[i] = NCZ_SHUFFLE(low_a, low_b, 0, 1, 4, 5);
        fours[i + 1] = NCZ_SHUFFLE(low_a, low_b, 2, 3, 6, 7);
        fours[i + 2] = NCZ_SHUFFLE(high_a, high_b, 0, 1, 4, 5);
        fours[i + 3] = NCZ_SHUFFLE(high_a, high_b, 2, 3, 6, 7);
    }
    Block result;
    memcpy(&result, fours, sizeof result);
    return result;
}

template <class T, class Scale>
[[gnu::noinline]] Block round_large(const T* x, Scale inverse_step, const Block& random) {
    return block_of([&](int i) { return round_at_random(widen(x[i]) * inverse_step, uint32_t(random.values[i])); });
}

template <class T, class Scale>
inline Block quantize_block(const T* x, Scale inverse_step, const Block& random) {
    if constexpr (sizeof(Scale) == 4) {
        // As round_at_random, from the nearest integer instead of the one towards zero.
        float rounded[ncz::BLOCK], rest[ncz::BLOCK];
        for (int i = 0; i < ncz::BLOCK; ++i) {
            float scaled = widen(x[i]) * inverse_step;
            rounded[i] = scaled + magic;
            rest[i] = scaled - (rounded[i] - magic);
        }
        Block codes = block_of([&](int i) { return bits_of(rounded[i]) - bits_of(magic); });
        if (are_small(codes)) {
            return block_of([&](int i) {
                float less_u = float(int32_t(uint32_t(random.values[i]) >> 8)) * -0x1p-24f;
                return codes.values[i] + (rest[i] >= 1 + less_u) - (rest[i] < less_u);
            });
        }
    }
    return round_large(x, inverse_step, random);
}

template <bool is_streamed, class T, class Scale>
inline void dequantize_block(const Block& codes, Scale scale, T* out) {
    for (int i = 0; i < ncz::BLOCK; ++i) narrow(Scale(codes.values[i]) * scale, out[i]);
}

inline bool can_stream(const void*) { return false; }
inline void stream_bytes(const void* from, int64_t bytes, void* to) { memcpy(to, from, size_t(bytes)); }
inline void end_streaming() {}

inline Block zigzag(const Block& residuals) {
    return block_of([&](int i) { return uint32_t(residuals.values[i]) << 1 ^ uint32_t(residuals.values[i] >> 31); });
}

inline Block unzigzag(const Block& symbols) {
    return block_of([&](int i) {
        uint32_t symbol = uint32_t(symbols.values[i]);
        return symbol >> 1 ^ (0u - (symbol & 1u));
    });
}

// Calls function on each four of a block.
template <class Function>
inline Block map_fours(const Block& block, Function function) {
    Four fours[ncz::BLOCK / 4];
    Block result;
    memcpy(fours, &block, sizeof fours);
    for (Four& four : fours) four = function(four);
    memcpy(&result, fours, sizeof fours);
    return result;
}

// Codes to differences between neighbours and back, through the blocks of one chunk.
class Delta {
  public:
    Block difference(const Block& codes) {
        return map_fours(codes, [&](Four four) {
            Four shifted = NCZ_SHUFFLE(previous_, four, 3, 4, 5, 6);
            previous_ = four;
            return four - shifted;
        });
    }

    Block sum(const Block& residuals) {
        return map_fours(residuals, [&](Four four) {
            Four zero = {};
            four += NCZ_SHUFFLE(zero, four, 3, 4, 5, 6);
            four += NCZ_SHUFFLE(zero, four, 2, 3, 4, 5);
            four += NCZ_SHUFFLE(previous_, previous_, 3, 3, 3, 3);
            previous_ = four;
            return four;
        });
    }

  private:
    Four previous_ = {};  // four codes
};

inline unsigned width_of(const Block& symbols) {
    uint32_t all = 0;
    for (int32_t symbol : symbols.values) all |= uint32_t(symbol);
    return all ? 32 - unsigned(__builtin_clz(all)) : 0;
}

// The symbols in lanes of their own width, and back.
template <class Lane>
inline void pack_lanes(const Block& symbols, unsigned width, uint8_t* out) {
    Lane lanes[ncz::BLOCK];
    Words<8 * sizeof(Lane)> words;
    for (int i = 0; i < ncz::BLOCK; ++i) lanes[i] = Lane(symbols.values[i]);
    memcpy(&words, lanes, sizeof words);
    pack_words(words, width, out);
}

template <class Lane>
inline Block unpack_lanes(const uint8_t* in, unsigned width) {
    Lane lanes[ncz::BLOCK];
    auto words = unpack_words<8 * sizeof(Lane)>(in, width);
    memcpy(lanes, &words, sizeof lanes);
    return block_of([&](int i) { return lanes[i]; });
}

inline void pack_block(const Block& symbols, unsigned width, uint8_t* out) {
    if (width <= 8) return pack_lanes<uint8_t>(symbols, width, out);
    if (width <= 16) return pack_lanes<uint16_t>(symbols, width, out);
    pack_lanes<uint32_t>(symbols, width, out);
}

inline Block unpack_block(const uint8_t* in, unsigned width) {
    if (width <= 8) return unpack_lanes<uint8_t>(in, width);
    if (width <= 16) return unpack_lanes<uint16_t>(in, width);
    return unpack_lanes<uint32_t>(in, width);
}

// Bit k of `mask` as the lowest bit of byte k.
inline uint64_t bytes_of_mask(unsigned mask) {
    uint64_t bits = mask * 0x0101010101010101u & 0x8040201008040201u;
    return (bits + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}

// The bytes where `chosen` has 1 side by side, zeros behind them; and the inverse. The others of `chosen` are 0.
inline uint64_t compact_bytes(uint64_t bytes, uint64_t chosen) {
    uint64_t result = 0;
    bytes &= chosen * 0xff;
    for (unsigned k = 0, to = 0; k < 8; ++k) {
        result |= (bytes >> 8 * k & 0xff) << to;
        to += unsigned(chosen >> 8 * k & 1) * 8;
    }
    return result;
}

inline uint64_t expand_bytes(uint64_t bytes, uint64_t chosen) {
    uint64_t result = 0;
    for (unsigned k = 0; k < 8; ++k) {
        result |= (bytes & 0xff) << 8 * k;
        bytes >>= (chosen >> 8 * k & 1) * 8;
    }
    return result & chosen * 0xff;
}

}  // namespace

#define NCZ_NAME(function) ncz_##function##_portable
#include "codec.h"
