// Keeps the symbols of a frame while HUFFMAN or RANS count their tokens: both need the counts of the whole frame before
// they can write the first symbol.
#pragma once

#include "bits.h"
#include "../common/format.h"
#include "tokens.h"

namespace {

using namespace ncz;

// Frames are coded in units of UNIT symbols; the last may be short.
template <int64_t UNIT>
int64_t units_of(int64_t count) {
    return (count + UNIT - 1) / UNIT;
}

template <int64_t UNIT>
int length_of_unit(int64_t unit, int64_t count) {
    int64_t left = count - unit * UNIT;
    return int(left < UNIT ? left : UNIT);
}

// Each unit has 4 bytes of memory per symbol and uses the front of it, with 8, 16 or 32 bits per symbol. So the memory
// may be that of the codes: a unit overwrites its own codes, which have been read.
template <int64_t UNIT>
class KeptSymbols {
  public:
    static int64_t bytes(int64_t count) { return 4 * count + 5 * units_of<UNIT>(count); }

    KeptSymbols(int64_t count, uint8_t* memory)
        : count_(count),
          memory_(memory),
          notes_(reinterpret_cast<int32_t*>(memory + 4 * count)),
          widths_(memory + 4 * count + 4 * units()) {}

    // The symbols of the next unit and their tokens, which must be the same if the width is 8.
    void add(const uint32_t* symbols, const uint8_t* tokens, unsigned width, int n) {
        uint8_t* to = unit(added_);
        widths_[added_++] = uint8_t(width);
        if (width == 8)
            memcpy(to, tokens, size_t(n));
        else if (width == 16)
            write_integers<uint16_t>(symbols, n, to);
        else
            memcpy(to, symbols, 4 * size_t(n));
    }

    int64_t count() const { return count_; }
    int64_t units() const { return units_of<UNIT>(count_); }
    int64_t added() const { return added_; }
    int length(int64_t u) const { return length_of_unit<UNIT>(u, count_); }
    unsigned width(int64_t u) const { return widths_[u]; }

    template <class Integer>  // of width(u)
    const Integer* symbols(int64_t u) const {
        return reinterpret_cast<const Integer*>(unit(u));
    }

    // What else an encoder may keep for a unit: a number, and what fits behind symbols of 8 or 16 bits.
    int32_t& note(int64_t u) const { return notes_[u]; }
    uint8_t* rest(int64_t u) const { return unit(u) + length(u) * (width(u) / 8); }

    // All symbols as the payload of a RAW frame of `width` bits.
    [[gnu::noinline]] void write_raw(uint8_t* out, unsigned width) const {
        if (width == 8) return write_all<uint8_t>(out);
        if (width == 16) return write_all<uint16_t>(out);
        write_all<uint32_t>(out);
    }

  private:
    uint8_t* unit(int64_t u) const { return memory_ + 4 * UNIT * u; }

    template <class Integer>
    void write_all(uint8_t* out) const {
        for (int64_t u = 0; u < units(); ++u) {
            int n = length(u);
            switch (width(u)) {
                case 8: write_integers<Integer>(symbols<uint8_t>(u), n, out); break;
                case 16: write_integers<Integer>(symbols<uint16_t>(u), n, out); break;
                default: write_integers<Integer>(symbols<uint32_t>(u), n, out);
            }
            out += n * int(sizeof(Integer));
        }
    }

    template <class Integer, class Symbol>
    static void write_integers(const Symbol* symbols, int n, uint8_t* out) {
        typedef Integer Anywhere __attribute__((aligned(1), may_alias));  // memcpy of each would not be vectorized
        auto integers = reinterpret_cast<Anywhere*>(out);
        for (int i = 0; i < n; ++i) integers[i] = Integer(symbols[i]);
    }

    int64_t count_, added_ = 0;
    uint8_t* memory_;
    int32_t* notes_;
    uint8_t* widths_;
};

}  // namespace
