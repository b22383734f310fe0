// Differences between floats. ../common/differences.h has what all processors share.
#pragma once

#include "../common/differences.h"
#include "values.cuh"

NCZ_DEVICE UnsignedBits<Element> bits_of_element(Element value) {
    UnsignedBits<Element> bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// A thread has octets of 8 neighbouring elements, THREADS octets apart. A block per chunk.
NCZ_KERNEL(ncz_differences)(const Element* x, const Element* base, long long count, int32_t* codes) {
    int64_t begin = int64_t(blockIdx.x) * CHUNK;
    int length = length_of(blockIdx.x, count);
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
        int first = OCTET * (j * THREADS + int(threadIdx.x)), n = octet_length(first, length);
        Element own[OCTET], before[OCTET];
        load_octet(x + begin + first, n, own);
        load_octet(base + begin + first, n, before);
        int32_t found[OCTET];
#pragma unroll
        for (int i = 0; i < OCTET; ++i) found[i] = difference<Element>(bits_of_element(own[i]), bits_of_element(before[i]));
        store_octet(codes + begin + first, n, found);
    }
}

// `out` may be `base`.
NCZ_KERNEL(ncz_add_differences)(const int32_t* codes, const Element* base, long long count, Element* out) {
    int64_t begin = int64_t(blockIdx.x) * CHUNK;
    int length = length_of(blockIdx.x, count);
#pragma unroll
    for (int j = 0; j < OCTETS_PER_THREAD; ++j) {
        int first = OCTET * (j * THREADS + int(threadIdx.x)), n = octet_length(first, length);
        int32_t given[OCTET];
        Element values[OCTET];
        load_octet(codes + begin + first, n, given);
        load_octet(base + begin + first, n, values);
#pragma unroll
        for (int i = 0; i < OCTET; ++i) {
            UnsignedBits<Element> bits = restored<Element>(given[i], bits_of_element(values[i]));
            memcpy(&values[i], &bits, sizeof bits);
        }
        store_octet(out + begin + first, n, values);
    }
}

#define NCZ_DIFFERENCE_KERNELS(X) X(ncz_differences) X(ncz_add_differences)
