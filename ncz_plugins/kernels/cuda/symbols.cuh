// Codes to symbols (zigzag) to tokens, and back. docs/reference/wire-format.md specifies them.
#pragma once

#include "block.cuh"

NCZ_DEVICE uint32_t zigzag(int32_t residual) { return uint32_t(residual) << 1 ^ uint32_t(residual >> 31); }

NCZ_DEVICE int32_t unzigzag(uint32_t symbol) { return int32_t(symbol >> 1 ^ (0u - (symbol & 1u))); }

// `a` - `b` and `a` + `b`, modulo 2**32.
NCZ_DEVICE int32_t difference(int32_t a, int32_t b) { return int32_t(uint32_t(a) - uint32_t(b)); }
NCZ_DEVICE int32_t sum(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }

NCZ_DEVICE unsigned bit_length(uint32_t symbol) { return 32u - unsigned(__clz(int(symbol))); }  // __clz(0) is 32

// The symbol of code i (of a frame or a chunk that begins at `codes`), whose chunk begins at `chunk_begin`.
NCZ_DEVICE uint32_t symbol_at(const int32_t* codes, int64_t i, int64_t chunk_begin, int32_t predictor) {
    int32_t before = predictor == DELTA && i > chunk_begin ? codes[i - 1] : 0;
    return zigzag(difference(codes[i], before));
}

NCZ_DEVICE unsigned token_of(uint32_t symbol) {
    if (symbol < DIRECT) return symbol;
    unsigned exponent = 31u - unsigned(__clz(int(symbol)));
    return DIRECT + ((exponent - 7) << BITS_IN_TOKEN) + 2 * (symbol >> (exponent - 1) & 1) + (symbol & 1);
}

// The extra bits of a symbol; `extra_bits` is their number.
NCZ_DEVICE uint32_t extra_of(uint32_t symbol, unsigned extra_bits) { return symbol >> 1 & ((1u << extra_bits) - 1); }
