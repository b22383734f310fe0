// Differences between floats, which compilers vectorize. Included by codec.h, whose names it uses.
#pragma once

#include "../common/differences.h"

namespace {

// Calls a function with `x` as integers that have the bits of the floats there, of which float16 and bfloat16 have alike.
template <class Function>
void with_bits(const void* x, int32_t dtype, Function function) {
    with_float32_and_halves(x, dtype, [&](auto* x) { function(reinterpret_cast<UnsignedBits<std::remove_pointer_t<decltype(x)>>*>(x)); });
}

// Bits are loaded and stored by memcpy: the tensors are floats, and this reads integers.
template <class T>
void differences(const T* x, const T* base, int64_t count, int32_t* codes) {
    for (int64_t i = 0; i < count; ++i) {
        UnsignedBits<T> a, b;
        memcpy(&a, x + i, sizeof a);
        memcpy(&b, base + i, sizeof b);
        codes[i] = difference<T>(a, b);
    }
}

template <class T>
inline void change(int32_t code, T* element) {
    UnsignedBits<T> bits;
    memcpy(&bits, element, sizeof bits);
    bits = restored<T>(code, bits);
    memcpy(element, &bits, sizeof bits);
}

// So many elements are copied, changed and added up to checksums while they are in the fastest cache.
constexpr int64_t ELEMENTS_TOGETHER = 4096;

// Checksum of the elements from `first` to `end`, which lie at `chunk`, as a part of all.
template <class T>
[[gnu::noinline]] uint32_t digest_of_elements(const T* chunk, int64_t first, int64_t end) {
    return digest_of(chunk, (end - first) * int64_t(sizeof(T)), first * int64_t(sizeof(T)) / 4);
}

// Copies `base` to `out`, which may be the same. change_from(first, end, chunk, digest) changes the elements from `first` to `end`,
// which lie at `chunk` then. It gives their checksum, which was `digest` before. `digests`: of base and out; null: nobody asks.
template <class T, class Change>
void change_together(const T* base, int64_t count, T* out, uint32_t* digests, Change change_from) {
    alignas(64) T buffer[ELEMENTS_TOGETHER];
    bool is_streamed = out != base && count * int64_t(sizeof(T)) >= STREAMED_BYTES && can_stream(out);
    uint32_t before = 0, after = 0;
    for (int64_t first = 0; first < count; first += ELEMENTS_TOGETHER) {
        int64_t end = first + ELEMENTS_TOGETHER < count ? first + ELEMENTS_TOGETHER : count;
        int64_t bytes = (end - first) * int64_t(sizeof(T)), word = first * int64_t(sizeof(T)) / 4;
        T* chunk = is_streamed ? buffer : out + first;
        uint32_t digest = 0;
        if (chunk == base + first)
            digest = digests ? digest_of_elements(chunk, first, end) : 0;
        else if (digests)
            digest = copy_with_digest(base + first, bytes, word, chunk);
        else
            memcpy(chunk, base + first, size_t(bytes));
        before += digest;
        after += change_from(first, end, chunk, digest);
        if (is_streamed) stream_bytes(buffer, bytes, out + first);
    }
    if (is_streamed) end_streaming();
    if (digests) digests[0] = before, digests[1] = after;
}

template <class T>
bool add_differences(const int32_t* codes, const T* base, int64_t count, T* out, uint32_t* digests = nullptr) {
    change_together(base, count, out, digests, [&](int64_t first, int64_t end, T* chunk, uint32_t) {
        const int32_t* from = codes + first;
        for (int64_t i = 0; i < end - first; ++i) change(from[i], chunk + i);
        return digests ? digest_of_elements(chunk, first, end) : 0;
    });
    return true;
}

// As add_differences, of `changes` elements and with a copy of all others. `gaps`: elements that stay, between a change and the
// one before it. False, and nothing is written, unless all changes lie in `count` elements, and none is 0.
template <class T>
bool add_rare_differences(const int32_t* gaps, const int32_t* codes, int64_t changes, const T* base, int64_t count,
                          T* out, uint32_t* digests = nullptr) {
    int64_t needed = changes, zeros = 0;
    // In two loops, which compilers vectorize. Without a sign, a gap below 0 is too large as well.
    for (int64_t i = 0; i < changes; ++i) needed += uint32_t(gaps[i]);
    for (int64_t i = 0; i < changes; ++i) zeros += codes[i] == 0;
    if (!changes || zeros || needed > count) return false;
    int64_t done = 0, next = gaps[0];  // changes, and where the next one is
    bool are_few = digests && 256 * changes <= count;
    change_together(base, count, out, digests, [&](int64_t first, int64_t end, T* chunk, uint32_t digest) {
        int64_t i = done, place = next;  // in registers: what is captured would be stored and loaded for each change
        // The checksum changes by what the words that hold changes add to it. The last word of all may be short.
        bool is_followed = are_few && end - first == ELEMENTS_TOGETHER;
        auto change_all = [&](auto change_at) {
            while (place < end) {
                change_at(chunk + (place - first));
                place = ++i < changes ? place + 1 + gaps[i] : count;
            }
        };
        if (is_followed)
            change_all([&](T* at) {
                int64_t word = place * int64_t(sizeof(T)) / 4;
                T* start = chunk + (word * 4 / int64_t(sizeof(T)) - first);
                digest -= digest_of(start, 4, word);
                change(codes[i], at);
                digest += digest_of(start, 4, word);
            });
        else
            change_all([&](T* at) { change(codes[i], at); });
        done = i, next = place;
        return is_followed || !digests ? digest : digest_of_elements(chunk, first, end);
    });
    return true;
}

// Which of up to CHUNK elements differ: 1 or 0 in a byte for each. Returns how many do. Compilers vectorize it.
template <class T>
int mark_differences(const T* x, const T* base, int n, uint8_t* differ) {
    UnsignedBits<T> sum = 0;
    for (int i = 0; i < n; ++i) {
        UnsignedBits<T> a, b;
        memcpy(&a, x + i, sizeof a);
        memcpy(&b, base + i, sizeof b);
        differ[i] = a != b;
        sum += a != b;
    }
    return int(sum);
}

// The inverse of add_rare_differences. Returns how many elements differ; above `most` a number that may be too low, and nothing of
// use is written. `gaps`: room for `count` and OCTET more. `codes`: room for `most`.
template <class T>
int64_t rare_differences(const T* x, const T* base, int64_t count, int64_t most, int32_t* gaps, int32_t* codes) {
    constexpr uint64_t eight = 0x0706050403020100u;
    constexpr int64_t looked_at = 8;  // chunks
    uint8_t differ[CHUNK], places[OCTET];
    int64_t changes = 0, previous = -1, sum = 0;
    // Where too many seem to differ, they are counted, which takes less time than listing `most` of them.
    for (int64_t c = 0; c < chunks_of(count); ++c) {
        sum += mark_differences(x + c * CHUNK, base + c * CHUNK, length_of(c, count), differ);
        if (sum > most) return sum;
        if (c + 1 == looked_at && sum * count <= most * looked_at * CHUNK) break;
    }
    for (int64_t first = 0; first < count; first += CHUNK) {
        int n = length_of(first / CHUNK, count);
        if (n % OCTET) store64(differ + n / OCTET * OCTET, 0);
        mark_differences(x + first, base + first, n, differ);
        // Where they are, eight elements at a time, without a branch for each.
        int64_t end = changes;
        for (int i = 0; i < n; i += OCTET) {
            uint64_t chosen = load64(differ + i);
            if (!chosen) continue;
            store64(places, compact_bytes(eight, chosen));
            for (int k = 0; k < OCTET; ++k) gaps[end + k] = int32_t(first + i + places[k]);
            end += __builtin_popcountll(chosen);
        }
        if (end > most) return end;
        // From there to gaps and codes, while the elements are in the fastest cache.
        for (; changes < end; ++changes) {
            int64_t place = gaps[changes];
            differences(x + place, base + place, 1, codes + changes);
            gaps[changes] = int32_t(place - previous - 1);
            previous = place;
        }
    }
    return changes;
}

// Bytes of the frame that a SPARSE one goes on with; 0 if it is none.
inline int64_t inner_bytes(const uint8_t* at, const uint8_t* end, Header& header) {
    if (end - at < HEADER_BYTES) return 0;
    memcpy(&header, at, sizeof header);
    int64_t bytes = HEADER_BYTES + int64_t(header.payload_bytes);
    return header.flags || bytes > end - at ? 0 : bytes;
}

// The gaps of a SPARSE frame and then its changes, `codes`, which hold `count`. Returns the number of changes; 0 if the frame is
// damaged, or has more than half as many changes as elements.
inline int64_t read_sparse(const uint8_t* frame, int64_t bytes, int64_t count, int32_t* codes, uint8_t* scratch) {
    Header header, of_gaps = {}, of_changes = {};
    memcpy(&header, frame, sizeof header);
    if (header_damage(header, bytes, count) || header.predictor != NONE || header.width) return 0;
    if (header.flags && header.checksum != checksum_of(frame, bytes)) return 0;
    const uint8_t *gaps = frame + HEADER_BYTES, *end = frame + bytes;
    int64_t gaps_bytes = inner_bytes(gaps, end, of_gaps);
    int64_t changes_bytes = gaps_bytes ? inner_bytes(gaps + gaps_bytes, end, of_changes) : 0;
    int64_t changes = of_gaps.count;
    if (!changes_bytes || gaps + gaps_bytes + changes_bytes != end || 2 * changes > count) return 0;
    bool is_damaged = read_codes<false>(gaps, gaps_bytes, changes, codes, scratch) ||
                      read_codes<false>(gaps + gaps_bytes, changes_bytes, changes, codes + changes, scratch);
    return is_damaged ? 0 : changes;
}

}  // namespace

// ------------------------------------------------------------------ the C functions, with arguments as in ../backend.py

NCZ_EXPORT void NCZ_NAME(differences)(const void* x, const void* base, int32_t dtype, int64_t count, int32_t* codes) {
    with_bits(x, dtype, [&](auto* x) {
        differences(x, static_cast<decltype(x)>(const_cast<void*>(base)), count, codes);
    });
}

NCZ_EXPORT int64_t NCZ_NAME(rare_differences)(const void* x, const void* base, int32_t dtype, int64_t count, int64_t most,
                                              int32_t* gaps, int32_t* codes) {
    int64_t changes = 0;
    with_bits(x, dtype, [&](auto* x) {
        changes = rare_differences(x, static_cast<decltype(x)>(const_cast<void*>(base)), count, most, gaps, codes);
    });
    return changes;
}

NCZ_EXPORT void NCZ_NAME(add_differences)(const int32_t* codes, const void* base, int64_t count, void* out,
                                          int32_t dtype) {
    with_bits(out, dtype, [&](auto* out) {
        add_differences(codes, static_cast<decltype(out)>(const_cast<void*>(base)), count, out);
    });
}

NCZ_EXPORT int32_t NCZ_NAME(add_rare_differences)(const int32_t* gaps, const int32_t* codes, int64_t changes,
                                                  const void* base, int64_t count, void* out, int32_t dtype) {
    int32_t are_inside = 0;
    with_bits(out, dtype, [&](auto* out) {
        auto from = static_cast<decltype(out)>(const_cast<void*>(base));
        are_inside = add_rare_differences(gaps, codes, changes, from, count, out);
    });
    return are_inside;
}

// `codes`: room for `count`. `scratch`: as for decode_codes. 0, and nothing is written, if the frame is damaged or of a kind that
// has to be read in another way.
NCZ_EXPORT int32_t NCZ_NAME(decode_changes)(const uint8_t* frame, int64_t bytes, const void* base, int64_t count, void* out,
                                            int32_t dtype, uint32_t* digests, int32_t* codes, uint8_t* scratch) {
    if (bytes < HEADER_BYTES) return 0;
    bool is_sparse = frame[offsetof(Header, coder)] == SPARSE;
    int64_t changes = is_sparse ? read_sparse(frame, bytes, count, codes, scratch) : 0;
    if (is_sparse ? !changes : read_codes<false>(frame, bytes, count, codes, scratch) != 0) return 0;
    int32_t are_inside = 0;
    with_bits(out, dtype, [&](auto* out) {
        auto from = static_cast<decltype(out)>(const_cast<void*>(base));
        if (is_sparse)
            are_inside = add_rare_differences(codes, codes + changes, changes, from, count, out, digests);
        else
            are_inside = add_differences(codes, from, count, out, digests);
    });
    return are_inside;
}
