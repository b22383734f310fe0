// The kernels' primitives for x86-64 with AVX2, BMI2 and F16C: 8 codes in a register, one pext or pdep for up to
// 8 symbols.

#include <immintrin.h>

#include "bits.h"
#include "../common/floats.h"
#include "../common/format.h"

namespace {

constexpr int VECTOR_BYTES = 32;
typedef __m256d Doubles;

// The low `width` bits of every lane. (1 << width) - 1 in all lanes is a multiplication by ones at the lanes' ends.
template <int lane>
inline uint64_t lanes_mask(unsigned width) {
    constexpr uint64_t ones = lane == 8 ? 0x0101010101010101u : lane == 16 ? 0x0001000100010001u : 0x0000000100000001u;
    return ones * ((uint64_t(1) << width) - 1);
}

template <int lane>
inline void squeeze(Words<lane>& block, unsigned width) {
    for (uint64_t& word : block.words) word = _pext_u64(word, lanes_mask<lane>(width));
}

template <int lane>
inline void spread(Words<lane>& block, unsigned width) {
    for (uint64_t& word : block.words) word = _pdep_u64(word, lanes_mask<lane>(width));
}

inline uint64_t bits_at(unsigned place, uint64_t word) { return __builtin_ia32_bextr_u64(word, place); }

// ------------------------------------------------------------------ floats and codes

inline __m256 load8(const float* x) { return _mm256_loadu_ps(x); }

inline __m256 load8(const ncz::bfloat16* x) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

inline __m256 load8(const ncz::float16* x) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

// Past the caches, to a multiple of the vector's size.
inline void stream(__m256i vector, void* to) { _mm256_stream_si256(static_cast<__m256i*>(to), vector); }
inline void stream(__m128i vector, void* to) { _mm_stream_si128(static_cast<__m128i*>(to), vector); }

template <bool is_streamed = false, class Vector>
inline void store_eight(Vector eight, void* to) {
    if constexpr (is_streamed)
        stream(eight, to);
    else
        memcpy(to, &eight, sizeof eight);
}

template <bool is_streamed>
inline void store8(__m256 values, float* out) {
    store_eight<is_streamed>(_mm256_castps_si256(values), out);
}

template <bool is_streamed>
inline void store8(__m256 values, ncz::bfloat16* out) {
    __m256i bits = _mm256_castps_si256(values);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet_nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
    __m256i chosen = _mm256_blendv_epi8(rounded, quiet_nan, _mm256_castps_si256(is_nan));
    __m256i high = _mm256_srli_epi32(chosen, 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    store_eight<is_streamed>(_mm256_castsi256_si128(packed), out);
}

template <bool is_streamed>
inline void store8(__m256 values, ncz::float16* out) {
    store_eight<is_streamed>(_mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), out);
}

inline Doubles doubles_at(const float* x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }

// min and max give their second operand where the first is NaN, as the reference does.
template <class T>
inline __m256 clamped8(const T* x, float inverse_step) {
    __m256 scaled = _mm256_mul_ps(load8(x), _mm256_set1_ps(inverse_step));
    scaled = _mm256_min_ps(scaled, _mm256_set1_ps(2147483520.0f));
    return _mm256_max_ps(scaled, _mm256_set1_ps(-2147483520.0f));
}

inline __m256d clamped4(const double* x, double inverse_step) {
    __m256d scaled = _mm256_mul_pd(_mm256_loadu_pd(x), _mm256_set1_pd(inverse_step));
    scaled = _mm256_min_pd(scaled, _mm256_set1_pd(2147483647.0));
    return _mm256_max_pd(scaled, _mm256_set1_pd(-2147483647.0));
}

template <class T>
inline __m256i quantize8(const T* x, float inverse_step) {
    return _mm256_cvtps_epi32(clamped8(x, inverse_step));
}

inline __m256i quantize8(const double* x, double inverse_step) {
    return _mm256_set_m128i(_mm256_cvtpd_epi32(clamped4(x + 4, inverse_step)),
                            _mm256_cvtpd_epi32(clamped4(x, inverse_step)));
}

template <bool is_streamed, class T>
inline void dequantize8(__m256i codes, float scale, T* out) {
    store8<is_streamed>(_mm256_mul_ps(_mm256_cvtepi32_ps(codes), _mm256_set1_ps(scale)), out);
}

template <bool is_streamed>
inline void dequantize8(__m256i codes, double scale, double* out) {
    auto four = [scale](__m128i codes, double* out) {
        __m256d values = _mm256_mul_pd(_mm256_cvtepi32_pd(codes), _mm256_set1_pd(scale));
        store_eight<is_streamed>(_mm256_castpd_si256(values), out);
    };
    four(_mm256_castsi256_si128(codes), out);
    four(_mm256_extracti128_si256(codes, 1), out + 4);
}

// floor(scaled + u), the sum not rounded. `random`: u for each, a number from 0 to 1, times 2**32; as integers with a sign they
// are from -1/2 to 1/2, and 1 less where they are negative. What rounding to nearest leaves of a number is exact, and has that
// range, too: so it is compared once.
template <class T>
inline __m256i quantize8(const T* x, float inverse_step, __m256i random) {
    __m256 scaled = clamped8(x, inverse_step);
    __m256i code = _mm256_cvtps_epi32(scaled);
    __m256 rest = _mm256_sub_ps(scaled, _mm256_cvtepi32_ps(code));
    __m256 less_u = _mm256_mul_ps(_mm256_cvtepi32_ps(random), _mm256_set1_ps(-0x1p-32f));
    __m256i is_down = _mm256_castps_si256(_mm256_cmp_ps(rest, less_u, _CMP_LT_OQ));
    return _mm256_add_epi32(_mm256_sub_epi32(code, _mm256_srai_epi32(random, 31)), is_down);
}

inline __m256i quantize8(const double* x, double inverse_step, __m256i random) {
    auto four = [inverse_step](const double* x, __m128i random) {
        __m256d scaled = clamped4(x, inverse_step);
        __m256d code = _mm256_round_pd(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        __m256d less_u = _mm256_mul_pd(_mm256_cvtepi32_pd(random), _mm256_set1_pd(-0x1p-32));
        __m256d is_down = _mm256_cmp_pd(_mm256_sub_pd(scaled, code), less_u, _CMP_LT_OQ);
        __m256d lower = _mm256_sub_pd(code, _mm256_and_pd(is_down, _mm256_set1_pd(1)));
        return _mm256_cvttpd_epi32(lower);
    };
    __m256i codes = _mm256_set_m128i(four(x + 4, _mm256_extracti128_si256(random, 1)), four(x, _mm256_castsi256_si128(random)));
    return _mm256_sub_epi32(codes, _mm256_srai_epi32(random, 31));
}

// ------------------------------------------------------------------ blocks

struct Block {
    __m256i eights[4];
};

// A block of function(k), 8 numbers each.
template <class Function>
inline Block block_of(Function function) {
    return {{function(0), function(1), function(2), function(3)}};
}

// The same 16 bytes in both halves of a register.
template <class... Byte>
inline __m256i twice(Byte... bytes) {
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(char(bytes)...));
}

inline __m256i load_eight(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

inline Block load_block(const int32_t* from) {
    return block_of([&](int k) { return load_eight(from + 8 * k); });
}

inline void store_block(const Block& block, void* to) {
    for (int k = 0; k < 4; ++k) store_eight(block.eights[k], static_cast<__m256i*>(to) + k);
}

inline Block add_blocks(const Block& a, const Block& b) {
    return block_of([&](int k) { return _mm256_add_epi32(a.eights[k], b.eights[k]); });
}

template <class T, class Scale>
inline Block quantize_block(const T* x, Scale inverse_step) {
    return block_of([&](int k) { return quantize8(x + 8 * k, inverse_step); });
}

// Random numbers, in the upper 24 bits, of 32 elements from element number `first` on, a multiple of 32. Eight hashes are for four each. The
// even ones are in the lower half of a register: so their words, side by side, lie where their elements are.
inline Block random_block(const ncz::Noise& noise, int64_t first) {
    auto times = [](__m256i x, uint32_t y) { return _mm256_mullo_epi32(x, _mm256_set1_epi32(int32_t(y))); };
    auto plus = [](__m256i x, uint32_t y) { return _mm256_add_epi32(x, _mm256_set1_epi32(int32_t(y))); };
    uint64_t block = noise.first + uint64_t(first / ncz::SCALE_BLOCK);
    uint32_t start = random_start(noise, block, uint32_t(first % ncz::SCALE_BLOCK / 4));
    __m256i x = plus(times(_mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7), ncz::RANDOM_OF_FOUR), start);
    x = times(_mm256_xor_si256(x, _mm256_srli_epi32(x, 16)), ncz::RANDOM_FIRST);
    __m256i key = _mm256_set1_epi32(int32_t(noise.key >> 32));
    x = times(_mm256_xor_si256(key, _mm256_xor_si256(x, _mm256_srli_epi32(x, 15))), ncz::RANDOM_SECOND);
    __m256i rotated = _mm256_shuffle_epi8(x, twice(3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14));
    uint32_t shift = (noise.shift >> 16) * 0x10001u;  // of both halves
    __m256i words = plus(x, shift), others = plus(times(rotated, ncz::RANDOM_THIRD), shift);
    __m256i lower = _mm256_unpacklo_epi32(words, others), upper = _mm256_unpackhi_epi32(words, others);
    // The upper 24 bits of a word, and of one with its halves exchanged.
    __m256i of_first = twice(-1, 1, 2, 3, -1, 3, 0, 1, -1, 5, 6, 7, -1, 7, 4, 5);
    __m256i of_second = twice(-1, 9, 10, 11, -1, 11, 8, 9, -1, 13, 14, 15, -1, 15, 12, 13);
    return {{_mm256_shuffle_epi8(lower, of_first), _mm256_shuffle_epi8(lower, of_second),
             _mm256_shuffle_epi8(upper, of_first), _mm256_shuffle_epi8(upper, of_second)}};
}

template <class T, class Scale>
inline Block quantize_block(const T* x, Scale inverse_step, const Block& random) {
    return block_of([&](int k) { return quantize8(x + 8 * k, inverse_step, random.eights[k]); });
}

template <bool is_streamed, class T, class Scale>
inline void dequantize_block(const Block& codes, Scale scale, T* out) {
    for (int k = 0; k < 4; ++k) dequantize8<is_streamed>(codes.eights[k], scale, out + 8 * k);
}

// Whether blocks may be streamed there: cache lines should be written as a whole.
inline bool can_stream(const void* out) { return reinterpret_cast<uintptr_t>(out) % 64 == 0; }

// Copies past the caches, to where blocks may be streamed.
inline void stream_bytes(const void* from, int64_t bytes, void* to) {
    auto source = static_cast<const uint8_t*>(from);
    auto target = static_cast<uint8_t*>(to);
    int64_t i = 0;
    for (; i + VECTOR_BYTES <= bytes; i += VECTOR_BYTES) stream(load_eight(source + i), target + i);
    memcpy(target + i, source + i, size_t(bytes - i));
}

// Whatever is stored from now on, others see after what was streamed.
inline void end_streaming() { _mm_sfence(); }

inline Block zigzag(const Block& residuals) {
    return block_of([&](int k) {
        __m256i residual = residuals.eights[k];
        return _mm256_xor_si256(_mm256_slli_epi32(residual, 1), _mm256_srai_epi32(residual, 31));
    });
}

inline Block unzigzag(const Block& symbols) {
    return block_of([&](int k) {
        __m256i symbol = symbols.eights[k];
        __m256i odd = _mm256_and_si256(symbol, _mm256_set1_epi32(1));
        return _mm256_xor_si256(_mm256_srli_epi32(symbol, 1), _mm256_sub_epi32(_mm256_setzero_si256(), odd));
    });
}

// Codes to differences between neighbours and back, through the blocks of one chunk.
class Delta {
  public:
    Block difference(const Block& codes) {
        return block_of([&](int k) {
            // Moved up by one number, with the last of the eight before moved in.
            __m256i across = _mm256_permute2x128_si256(previous_, codes.eights[k], 0x21);
            __m256i shifted = _mm256_alignr_epi8(codes.eights[k], across, 12);
            previous_ = codes.eights[k];
            return _mm256_sub_epi32(codes.eights[k], shifted);
        });
    }

    Block sum(const Block& residuals) {
        return block_of([&](int k) {
            // Within fours, then the lower four's total onto the upper four, then what stood before onto all.
            __m256i sums = residuals.eights[k];
            sums = _mm256_add_epi32(sums, _mm256_slli_si256(sums, 4));
            sums = _mm256_add_epi32(sums, _mm256_slli_si256(sums, 8));
            __m256i lower = _mm256_permute2x128_si256(sums, sums, 0x08);
            sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(lower, 0xff));
            __m256i codes = _mm256_add_epi32(sums, previous_);
            previous_ = _mm256_add_epi32(previous_, _mm256_permutevar8x32_epi32(sums, _mm256_set1_epi32(7)));
            return codes;
        });
    }

  private:
    __m256i previous_ = _mm256_setzero_si256();  // difference: the eight before; sum: the last code, 8 times
};

// ------------------------------------------------------------------ packed bits

inline unsigned width_of(const Block& symbols) {
    const __m256i* s = symbols.eights;
    __m256i eight = _mm256_or_si256(_mm256_or_si256(s[0], s[1]), _mm256_or_si256(s[2], s[3]));
    __m128i four = _mm_or_si128(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    uint64_t two = uint64_t(_mm_cvtsi128_si64(_mm_or_si128(four, _mm_unpackhi_epi64(four, four))));
    return 32 - unsigned(_lzcnt_u32(uint32_t(two | two >> 32)));
}

inline void pack_block(const Block& symbols, unsigned width, uint8_t* out) {
    const __m256i* s = symbols.eights;
    if (width > 16) {
        Words<32> words;
        store_block(symbols, &words);
        return pack_words(words, width, out);
    }
    // packus interleaves the halves of its operands; the permutes bring the symbols back into order.
    __m256i low = _mm256_packus_epi32(s[0], s[1]);
    __m256i high = _mm256_packus_epi32(s[2], s[3]);
    if (width > 8) {
        Words<16> words;
        store_eight(_mm256_permute4x64_epi64(low, 0xd8), words.words);
        store_eight(_mm256_permute4x64_epi64(high, 0xd8), words.words + 4);
        return pack_words(words, width, out);
    }
    Words<8> words;
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    store_eight(_mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order), words.words);
    pack_words(words, width, out);
}

inline Block unpack_block(const uint8_t* in, unsigned width) {
    if (width <= 8) {
        Words<8> octets = unpack_words<8>(in, width);
        return block_of([&](int k) { return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(octets.words[k]))); });
    }
    if (width <= 16) {
        Words<16> octets = unpack_words<16>(in, width);
        return block_of([&](int k) {
            const uint64_t* word = octets.words + 2 * k;
            return _mm256_cvtepu16_epi32(_mm_set_epi64x(int64_t(word[1]), int64_t(word[0])));
        });
    }
    Words<32> octets = unpack_words<32>(in, width);
    return block_of([&](int k) { return load_eight(octets.words + 4 * k); });
}

// ------------------------------------------------------------------ some of eight bytes

// Bit k of `mask` as the lowest bit of byte k.
inline uint64_t bytes_of_mask(unsigned mask) { return _pdep_u64(mask, lanes_mask<8>(1)); }

// The bytes where `chosen` has 1 side by side, zeros behind them; and the inverse. The others of `chosen` are 0.
inline uint64_t compact_bytes(uint64_t bytes, uint64_t chosen) { return _pext_u64(bytes, chosen * 0xff); }
inline uint64_t expand_bytes(uint64_t bytes, uint64_t chosen) { return _pdep_u64(bytes, chosen * 0xff); }

}  // namespace

#define NCZ_NAME(function) ncz_##function##_avx2
#include "codec.h"
