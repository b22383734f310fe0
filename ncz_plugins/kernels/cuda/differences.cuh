// Differences between floats. ../common/differences.h has what all processors share.
#pragma once

#include "../common/differences.h"
#include "values.cuh"

NCZ_DEVICE UnsignedBits<Element> bits_of_element(Element value) {
    UnsignedBits<Element> bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

NCZ_CHUNK_KERNEL(ncz_differences)(const Element* x, const Element* base, long long count, int32_t* codes) {
    int64_t tile = tile_of(blockIdx.x);
    int length = length_of_tile(tile, count);
#pragma unroll
    for (int r = 0; r < TILE_ROWS; ++r) {
        int64_t first = tile * TILE + run_of(r);
        int n = length - run_of(r);
        Element own[RUN], before[RUN];
        load_run(x + first, n, own);
        load_run(base + first, n, before);
        int32_t found[RUN];
#pragma unroll
        for (int i = 0; i < RUN; ++i) found[i] = difference<Element>(bits_of_element(own[i]), bits_of_element(before[i]));
        store_run(codes + first, n, found);
    }
}

// `out` may be `base`.
NCZ_CHUNK_KERNEL(ncz_add_differences)(const int32_t* codes, const Element* base, long long count, Element* out) {
    int64_t tile = tile_of(blockIdx.x);
    int length = length_of_tile(tile, count);
#pragma unroll
    for (int r = 0; r < TILE_ROWS; ++r) {
        int64_t first = tile * TILE + run_of(r);
        int n = length - run_of(r);
        int32_t given[RUN];
        Element values[RUN];
        load_run(codes + first, n, given);
        load_run(base + first, n, values);
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            UnsignedBits<Element> bits = restored<Element>(given[i], bits_of_element(values[i]));
            memcpy(&values[i], &bits, sizeof bits);
        }
        store_run(out + first, n, values);
    }
}

#define NCZ_DIFFERENCE_KERNELS(X) X(ncz_differences) X(ncz_add_differences)
