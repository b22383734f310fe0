// Makes right what random bytes never are, so that mutations get past the first checks: the header, and the tables
// whose numbers must add up. All else of the frame is left as it is.
#pragma once

#include "kernels.h"

namespace {

inline uint16_t load16(const uint8_t* from) {
    uint16_t value;
    memcpy(&value, from, 2);
    return value;
}

inline void store16(uint8_t* to, int64_t value) {
    uint16_t low = uint16_t(value);
    memcpy(to, &low, 2);
}

// Sizes of 16 bits each that take no more than `left` together, and the last one what the others leave.
inline void repair_sizes(uint8_t* table, int64_t n, int64_t left) {
    for (int64_t i = 0; i < n; ++i) {
        int64_t size = load16(table + 2 * i);
        if (size > left || i == n - 1) size = left;
        store16(table + 2 * i, size);
        left -= size;
    }
}

// Lengths that make a code complete: longer where the code is full, and tokens added where it is not.
inline void repair_huffman_code(uint8_t* nibbles, int tokens) {
    constexpr unsigned longest = ncz::HUFFMAN_MAX_LENGTH;
    unsigned left = 1u << longest;
    auto set = [&](int t, unsigned length) {
        unsigned shift = t % 2 * 4;
        nibbles[t / 2] = uint8_t((nibbles[t / 2] & ~(15u << shift)) | length << shift);
        if (length) left -= 1u << (longest - length);
    };
    auto get = [&](int t) { return nibbles[t / 2] >> t % 2 * 4 & 15u; };
    for (int t = 0; t < tokens; ++t) {
        unsigned length = get(t) > longest ? longest : get(t);
        while (length && length < longest && 1u << (longest - length) > left) ++length;
        set(t, left ? length : 0);
    }
    for (int t = 0; t < tokens && left; ++t) {
        unsigned length = 1;
        while (1u << (longest - length) > left) ++length;
        if (!get(t)) set(t, length);
    }
    if (tokens % 2) nibbles[tokens / 2] &= 15;
}

inline uint8_t* repair_huffman(uint8_t* in, uint8_t* end) {
    if (in == end) return nullptr;
    if (*in > ncz::TOKENS) *in = ncz::TOKENS;
    int tokens = *in++;
    if (end - in < (tokens + 1) / 2) return nullptr;
    repair_huffman_code(in, tokens);
    return in + (tokens + 1) / 2;
}

// Frequencies that add up to the whole.
inline uint8_t* repair_frequencies(uint8_t* in, uint8_t* end, int values) {
    if (!in || end - in < 32) return nullptr;
    uint8_t* occurs = in;
    in += 32;
    int n = 0;
    for (int v = 0; v < 256; ++v) {
        if (v >= values) occurs[v / 8] &= uint8_t(~(1 << v % 8));
        n += occurs[v / 8] >> v % 8 & 1;
    }
    if (end - in < 2 * n) return nullptr;
    int left = 1 << ncz::RANS_BITS;
    for (int i = 0; i < n; ++i) {
        int most = left - (n - 1 - i), frequency = load16(in + 2 * i);
        frequency = i == n - 1 || frequency > most ? most : frequency < 1 ? 1 : frequency;
        store16(in + 2 * i, frequency);
        left -= frequency;
    }
    return in + 2 * n;
}

inline void repair_pages(uint8_t* in, uint8_t* end, int64_t pages) {
    if (!in || end - in < 4 * pages) return;
    int64_t left = end - in - 4 * pages - pages * 4 * ncz::RANS_LANES;
    for (int64_t p = 0; p < pages && left >= 0; ++p) {
        int64_t words = load16(in + 4 * p), extra = load16(in + 4 * p + 2);
        if (2 * words > left) words = left / 2;
        left -= 2 * words;
        if (extra > left || p == pages - 1) extra = left;
        left -= extra;
        store16(in + 4 * p, words);
        store16(in + 4 * p + 2, extra);
    }
}

inline void repair_payload(uint8_t* frame, int64_t bytes, int64_t count) {
    if (bytes < ncz::HEADER_BYTES) return;
    uint8_t *in = frame + ncz::HEADER_BYTES, *end = frame + bytes;
    int64_t chunks = chunks_of(count), lanes = ncz::HUFFMAN_LANES * chunks;
    uint8_t coder = frame[offsetof(ncz::Header, coder)];
    if (coder == ncz::FIXED && end - in >= 2 * chunks) repair_sizes(in, chunks, end - in - 2 * chunks);
    if (coder == ncz::HUFFMAN) {
        in = repair_huffman(in, end);
        if (in && end - in >= 2 * lanes) repair_sizes(in, lanes, end - in - 2 * lanes);
    }
    if (coder == ncz::RANS && in < end) {
        *in &= ncz::DIRECT - 1;
        in = repair_frequencies(in + 1, end, 256);
        in = repair_frequencies(in, end, ncz::TOKENS);
        repair_pages(in, end, (count + ncz::RANS_PAGE - 1) / ncz::RANS_PAGE);
    }
}

inline void repair_header(uint8_t* frame, int64_t bytes, int64_t count,
                          uint32_t (*checksum)(const uint8_t* frame, int64_t bytes)) {
    if (bytes < ncz::HEADER_BYTES) return;
    ncz::Header header;
    memcpy(&header, frame, sizeof header);
    header.magic = ncz::MAGIC;
    header.version = ncz::VERSION;
    header.predictor &= 1;
    if (header.coder != ncz::RAW) header.width = 0;
    header.count = uint32_t(count);
    header.payload_bytes = uint32_t(bytes - ncz::HEADER_BYTES);
    header.flags &= ncz::HAS_CHECKSUM;
    header.checksum = 0;
    memcpy(frame, &header, sizeof header);
    if (!header.flags) return;
    header.checksum = checksum(frame, bytes);
    memcpy(frame, &header, sizeof header);
}

}  // namespace
