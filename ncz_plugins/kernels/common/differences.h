// Differences between floats, as integers: what the kernels of all processors share. Nothing is rounded.
#pragma once

#include "format.h"

namespace {

// The integers that hold a float's bits, by its bytes.
template <int bytes>
struct Bits;
template <>
struct Bits<2> {
    typedef uint16_t Unsigned;
    typedef short Signed;
};
template <>
struct Bits<4> {
    typedef uint32_t Unsigned;
    typedef int32_t Signed;
};

template <class T>
using UnsignedBits = typename Bits<int(sizeof(T))>::Unsigned;
template <class T>
using SignedBits = typename Bits<int(sizeof(T))>::Signed;

// Bits of floats to integers in the same order, and back: below zero all bits but the sign are flipped.
template <class Unsigned>
NCZ_FUNCTION Unsigned ordered(Unsigned bits) {
    Unsigned is_negative = Unsigned(0) - Unsigned(bits >> (8 * sizeof bits - 1));
    return Unsigned(bits ^ Unsigned(is_negative >> 1));
}

// How many floats lie between two, as a number with a sign. It wraps, as does its inverse.
template <class T>
NCZ_FUNCTION int32_t difference(UnsignedBits<T> x, UnsignedBits<T> base) {
    return SignedBits<T>(UnsignedBits<T>(ordered(x) - ordered(base)));
}

template <class T>
NCZ_FUNCTION UnsignedBits<T> restored(int32_t difference, UnsignedBits<T> base) {
    return ordered(UnsignedBits<T>(ordered(base) + UnsignedBits<T>(difference)));
}

}  // namespace
