// What both fuzz targets share: the kernels' C functions, memory that ends exactly where it should, and `require`.
#pragma once

#include <sanitizer/asan_interface.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "common/format.h"

namespace ncz {
struct StepRule;  // eleven doubles: cpu/scales.h
}

#define NCZ_DECLARE(set)                                                                                              \
    extern "C" {                                                                                                      \
    int64_t ncz_scratch_bytes_##set(int64_t count);                                                                   \
    uint32_t ncz_checksum_##set(const uint8_t* frame, int64_t bytes);                                                 \
    uint32_t ncz_digest_##set(const void* data, int64_t bytes);                                                       \
    void ncz_block_statistics_##set(const void* x, int32_t dtype, int64_t count, double* lowest, double* highest,     \
                                    double* squares);                                                                 \
    void ncz_quantize_##set(const void* x, int32_t dtype, const void* inverse_steps, int64_t count, int32_t* codes,   \
                            const ncz::Noise* noise);                                                                 \
    void ncz_dequantize_##set(const int32_t* codes, const void* scales, int64_t count, void* out, int32_t dtype);     \
    int64_t ncz_encode_codes_##set(const int32_t* codes, int64_t count, const ncz::Coding* coding, uint8_t* frame,    \
                                   uint8_t* scratch);                                                                 \
    int64_t ncz_decode_codes_##set(const uint8_t* frame, int64_t bytes, int64_t count, int32_t* codes, int32_t add,   \
                                   uint8_t* scratch);                                                                 \
    int64_t ncz_encode_##set(const void* x, int32_t dtype, const void* inverse_steps, int64_t count,                  \
                             const ncz::Coding* coding, uint8_t* frame, const ncz::Noise* noise, uint8_t* scratch);   \
    int64_t ncz_decode_##set(const uint8_t* frame, int64_t bytes, const void* scales, int64_t count, void* out,       \
                             int32_t dtype, uint8_t* scratch);                                                        \
    int64_t ncz_reduce_##set(const uint8_t* frame, int64_t bytes, const void* x, int32_t dtype,                       \
                             const void* inverse_steps, int64_t count, const ncz::Coding* coding, uint8_t* out,       \
                             const ncz::Noise* noise, uint8_t* scratch);                                              \
    void ncz_differences_##set(const void* x, const void* base, int32_t dtype, int64_t count, int32_t* codes);        \
    int64_t ncz_rare_differences_##set(const void* x, const void* base, int32_t dtype, int64_t count, int64_t most,   \
                                       int32_t* gaps, int32_t* codes);                                                \
    void ncz_add_differences_##set(const int32_t* codes, const void* base, int64_t count, void* out, int32_t dtype);  \
    int32_t ncz_add_rare_differences_##set(const int32_t* gaps, const int32_t* codes, int64_t changes,                \
                                           const void* base, int64_t count, void* out, int32_t dtype);                \
    int32_t ncz_decode_changes_##set(const uint8_t* frame, int64_t bytes, const void* base, int64_t count, void* out, \
                                     int32_t dtype, uint32_t* digests, int32_t* codes, uint8_t* scratch);             \
    void ncz_root_mean_squares_##set(const void* x, int32_t dtype, int64_t count, double most, uint16_t* out);        \
    double ncz_steps_of_##set(const uint16_t* agreed, int64_t blocks, const ncz::StepRule* rule,                      \
                              float* inverse_steps, float* scales);                                                   \
    }

NCZ_DECLARE(portable)
#ifndef NCZ_PORTABLE_ONLY
NCZ_DECLARE(avx2)
#endif

struct Kernels {
    decltype(&ncz_scratch_bytes_portable) scratch_bytes;
    decltype(&ncz_checksum_portable) checksum;
    decltype(&ncz_digest_portable) digest;
    decltype(&ncz_block_statistics_portable) block_statistics;
    decltype(&ncz_quantize_portable) quantize;
    decltype(&ncz_dequantize_portable) dequantize;
    decltype(&ncz_encode_codes_portable) encode_codes;
    decltype(&ncz_decode_codes_portable) decode_codes;
    decltype(&ncz_encode_portable) encode;
    decltype(&ncz_decode_portable) decode;
    decltype(&ncz_reduce_portable) reduce;
    decltype(&ncz_differences_portable) differences;
    decltype(&ncz_rare_differences_portable) rare_differences;
    decltype(&ncz_add_differences_portable) add_differences;
    decltype(&ncz_add_rare_differences_portable) add_rare_differences;
    decltype(&ncz_decode_changes_portable) decode_changes;
    decltype(&ncz_root_mean_squares_portable) root_mean_squares;
    decltype(&ncz_steps_of_portable) steps_of;
    uint8_t fill;  // what stands in memory before they write to it; another for each of the two that are compared
};

#define NCZ_KERNELS(set)                                                                          \
    ncz_scratch_bytes_##set, ncz_checksum_##set, ncz_digest_##set, ncz_block_statistics_##set,    \
        ncz_quantize_##set, ncz_dequantize_##set, ncz_encode_codes_##set, ncz_decode_codes_##set, \
        ncz_encode_##set, ncz_decode_##set, ncz_reduce_##set, ncz_differences_##set,              \
        ncz_rare_differences_##set, ncz_add_differences_##set, ncz_add_rare_differences_##set,    \
        ncz_decode_changes_##set, ncz_root_mean_squares_##set, ncz_steps_of_##set

// Two that must agree on everything. Where AVX2 is missing, the portable ones are both; results must then still not
// depend on what stood in the memory.
inline const Kernels (&both_kernels())[2] {
    static Kernels both[2] = {{NCZ_KERNELS(portable), 0x5a}, {NCZ_KERNELS(portable), 0xa5}};
#ifndef NCZ_PORTABLE_ONLY
    static bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");  // then F16C, too
    if (has_avx2) both[1] = {NCZ_KERNELS(avx2), 0xa5};
#endif
    return both;
}

// Memory is used again soon: touching new pages would take most of the time.
extern "C" const char* __asan_default_options() { return "quarantine_size_mb=1:abort_on_error=1"; }
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1:abort_on_error=1"; }

constexpr uint16_t MOST_ELEMENTS = 20000;  // of an input: more than a page of RANS, and few enough to be fast
constexpr int DTYPES = 4;

// Ends the process, and with it the fuzzer, which then keeps the input.
inline void require(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "FAILED: %s\n", what);
    abort();
}

// `bytes` of memory, `offset` bytes behind an address that is aligned as PyTorch aligns. What lies before and behind is
// poisoned, so that AddressSanitizer sees one byte too far (but for up to 7 bytes before, as `offset` may be odd).
class Memory {
  public:
    Memory(int64_t bytes, uint8_t fill, int offset = 0) : bytes_(bytes) {
        void* start;
        if (posix_memalign(&start, MARGIN, size_t(MARGIN + offset + bytes))) abort();
        start_ = static_cast<uint8_t*>(start);
        data_ = start_ + MARGIN + offset;
        memset(data_, fill, size_t(bytes));
        ASAN_POISON_MEMORY_REGION(start_, size_t(MARGIN + offset));
    }
    Memory(const void* from, int64_t bytes, int offset = 0) : Memory(bytes, 0, offset) {
        if (bytes) memcpy(data_, from, size_t(bytes));
    }
    Memory(Memory&& other) : bytes_(other.bytes_), start_(std::exchange(other.start_, nullptr)), data_(other.data_) {}
    ~Memory() {
        if (start_) ASAN_UNPOISON_MEMORY_REGION(start_, size_t(data_ - start_));
        free(start_);
    }

    int64_t bytes() const { return bytes_; }
    uint8_t* data() const { return data_; }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data_);
    }
    bool operator==(const Memory& other) const {
        return bytes_ == other.bytes_ && memcmp(data_, other.data_, size_t(bytes_)) == 0;
    }

  private:
    static constexpr int MARGIN = 64;

    int64_t bytes_;
    uint8_t *start_, *data_;
};

// Control bytes at the front of an input, zeros where it is shorter; the rest of it then begins at `data`.
template <class Control>
Control take_control(const uint8_t*& data, size_t& size) {
    Control control = {};
    size_t n = size < sizeof control ? size : sizeof control;
    if (n) memcpy(&control, data, n);
    data += n;
    size -= n;
    return control;
}

inline int64_t max_frame_bytes(int64_t count) {
    int64_t octets = (count + ncz::OCTET - 1) / ncz::OCTET, blocks = (count + ncz::BLOCK - 1) / ncz::BLOCK;
    return ncz::HEADER_BYTES + 2 * chunks_of(count) + blocks + 4 * ncz::OCTET * octets;
}

inline int element_bytes(int32_t dtype) { return dtype == ncz::FLOAT64 ? 8 : dtype == ncz::FLOAT32 ? 4 : 2; }

inline Memory scratch_to_write(const Kernels& kernels, int64_t count) {
    return Memory(kernels.scratch_bytes(count), kernels.fill);
}

inline Memory scratch_to_read(const Kernels& kernels) { return scratch_to_write(kernels, 0); }

constexpr int32_t CODERS[] = {ncz::RAW, ncz::FIXED, ncz::HUFFMAN, ncz::RANS, ncz::AUTO_CODER};
constexpr int32_t PREDICTORS[] = {ncz::NONE, ncz::DELTA, ncz::AUTO_PREDICTOR};
