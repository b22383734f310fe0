// The coder HUFFMAN: a canonical code of at most 11 bits for each token, the same for a whole frame.
// docs/reference/wire-format.md specifies it; ../cpu/huffman_*.h are the same for host memory.
//
//     ncz_huffman_count     a block for each chunk   counts tokens; the last block makes the code and writes it
//     ncz_huffman_encode    a block for each chunk   makes a chunk's lanes in shared memory and finds their place
//     decode_huffman        in ncz_open, a block for some chunks, a thread for each lane
#pragma once

#include "fixed.cuh"

constexpr unsigned HUFFMAN_WHOLE = 1u << HUFFMAN_MAX_LENGTH;  // the Kraft sum of a complete code
constexpr int LANE_SYMBOLS = CHUNK / HUFFMAN_LANES;
constexpr int MOST_TOKEN_BITS = HUFFMAN_MAX_LENGTH + 32 - 1 - BITS_IN_TOKEN;
constexpr int MOST_LANE_BYTES = LANE_SYMBOLS * MOST_TOKEN_BITS / 8;

// ------------------------------------------------------------------ the code

// Huffman's algorithm, in shared memory. Leaves are the tokens that occur, in rising order of (count, token); behind
// them are the nodes above them, in the order in which they come to be. The last is the root.
struct HuffmanTree {
    uint32_t counts[TOKENS];  // given, by token
    uint32_t weights[2 * TOKENS];
    uint16_t parents[2 * TOKENS];
    uint8_t tokens[TOKENS];   // of leaves
    uint8_t lengths[TOKENS];  // what comes out, by token: bits of its code, 0 for one that has none
    int leaves;
    uint32_t kraft;  // sum
};

// By a block of at least TOKENS threads, as are those below without another word.
NCZ_DEVICE void sort_leaves(HuffmanTree& tree) {
    unsigned token = threadIdx.x;
    uint32_t count = token < TOKENS ? tree.counts[token] : 0;
    int leaves = 0, place = 0;
    for (unsigned other = 0; other < TOKENS; ++other) {
        uint32_t theirs = tree.counts[other];
        leaves += theirs > 0;
        place += theirs > 0 && (theirs < count || (theirs == count && other < token));
    }
    if (count) {
        tree.weights[place] = count;
        tree.tokens[place] = uint8_t(token);
    }
    if (token < TOKENS) tree.lengths[token] = 0;
    if (token == 0) {
        tree.leaves = leaves;
        tree.kraft = 0;
    }
}

// With two queues (van Leeuwen 1976). By one thread.
NCZ_DEVICE void join_nodes(HuffmanTree& tree) {
    constexpr uint32_t NONE_LEFT = 0xffffffffu;  // no weight but the root's is as large
    int n = tree.leaves, leaf = 0, node = n;
    uint32_t leaf_weight = n ? tree.weights[0] : NONE_LEFT, node_weight = NONE_LEFT;
    for (int parent = n; parent < 2 * n - 1; ++parent) {
        uint32_t weight = 0;
        for (int child = 0; child < 2; ++child) {
            if (leaf_weight <= node_weight) {
                weight += leaf_weight;
                tree.parents[leaf++] = uint16_t(parent);
                leaf_weight = leaf < n ? tree.weights[leaf] : NONE_LEFT;
            } else {
                weight += node_weight;
                tree.parents[node++] = uint16_t(parent);
                node_weight = node < parent ? tree.weights[node] : NONE_LEFT;
            }
        }
        tree.weights[parent] = weight;
        if (node == parent) node_weight = weight;
    }
}

// How deep the leaves are, cut off at the longest length allowed.
NCZ_DEVICE void read_lengths(HuffmanTree& tree) {
    int n = tree.leaves, leaf = int(threadIdx.x);
    if (leaf >= n) return;
    unsigned depth = 0;
    for (int at = leaf; at != 2 * n - 2 && depth < HUFFMAN_MAX_LENGTH; at = tree.parents[at]) ++depth;
    if (n == 1) tree.lengths[tree.tokens[0] == 0] = uint8_t(depth = 1);
    tree.lengths[tree.tokens[leaf]] = uint8_t(depth);
    atomicAdd(&tree.kraft, (n == 1 ? 2 : 1) * (HUFFMAN_WHOLE >> depth));
}

// From lengths that were cut off to those of a complete code. By one thread.
NCZ_DEVICE void limit_lengths(HuffmanTree& tree) {
    uint32_t sum = tree.kraft;
    while (sum > HUFFMAN_WHOLE)
        for (int leaf = 0; leaf < tree.leaves && sum > HUFFMAN_WHOLE; ++leaf) {
            uint8_t& length = tree.lengths[tree.tokens[leaf]];
            if (length < HUFFMAN_MAX_LENGTH) sum -= HUFFMAN_WHOLE >> ++length;
        }
    while (sum < HUFFMAN_WHOLE)
        for (int leaf = tree.leaves - 1; leaf >= 0; --leaf) {
            uint8_t& length = tree.lengths[tree.tokens[leaf]];
            for (; sum + (HUFFMAN_WHOLE >> length) <= HUFFMAN_WHOLE; --length) sum += HUFFMAN_WHOLE >> length;
        }
}

// The lengths of `n` trees' codes from their counts, which a barrier must have made known. Ends with a barrier.
NCZ_DEVICE void make_lengths(HuffmanTree* trees, int n) {
    for (int i = 0; i < n; ++i) sort_leaves(trees[i]);
    __syncthreads();
    if (lane() == 0 && warp() < n) join_nodes(trees[warp()]);
    __syncthreads();
    for (int i = 0; i < n; ++i) read_lengths(trees[i]);
    __syncthreads();
    if (lane() == 0 && warp() < n && trees[warp()].leaves) limit_lengths(trees[warp()]);
    __syncthreads();
}

// Tokens that have a length in the table of a frame: up to the last one that occurs. By all threads of a block.
NCZ_DEVICE int stored_lengths(const uint8_t* lengths, int* scratch) {
    int token = int(threadIdx.x);
    return block_max(token < int(TOKENS) && lengths[token] ? token + 1 : 0, scratch);
}

NCZ_DEVICE int code_bytes(int stored) { return 1 + (stored + 1) / 2; }

// Where a token's codes begin among the numbers of HUFFMAN_MAX_LENGTH bits: codes are counted up in order of (length,
// token), so all before it take their share of these. `place` becomes the number of codes before it.
NCZ_DEVICE unsigned first_code(const uint8_t* lengths, unsigned token, int& place) {
    unsigned length = lengths[token], first = 0;
    place = 0;
    for (unsigned other = 0; other < TOKENS; ++other) {
        unsigned theirs = lengths[other];
        if (!theirs || theirs > length || (theirs == length && other >= token)) continue;
        first += HUFFMAN_WHOLE >> theirs;
        ++place;
    }
    return first;
}

// A number of HUFFMAN_MAX_LENGTH bits, the other way round: the first bit of a code is its highest, but stands lowest.
NCZ_DEVICE unsigned reversed(unsigned code) { return __brev(code) >> (32 - HUFFMAN_MAX_LENGTH); }

// ------------------------------------------------------------------ encoding

// What the kernels of one frame tell each other. Zeroed before the first.
struct HuffmanEncoding {
    uint32_t counts[TOKENS];
    uint32_t codes[TOKENS];  // of tokens, with the length from bit 16 on
    uint32_t code_bytes;
    uint32_t unused[3];
};
static_assert(sizeof(HuffmanEncoding) == 1840, "as frames.py has it");

NCZ_DEVICE int64_t raw_bytes(int64_t count, const Choice& choice) { return count * (raw_width_of(choice) / 8); }

// The code of all counts, for the kernel that encodes and for the frame; or RAW, if that is smaller for certain.
NCZ_DEVICE void make_code(HuffmanEncoding& encoding, HuffmanTree& tree, int64_t count, Choice& choice, uint8_t* frame,
                          uint64_t* scratch) {
    unsigned token = threadIdx.x;
    if (token < TOKENS) tree.counts[token] = encoding.counts[token];
    __syncthreads();
    make_lengths(&tree, 1);

    bool has_code = token < TOKENS && tree.lengths[token];
    unsigned length = has_code ? tree.lengths[token] : 0;
    uint64_t bits = has_code ? uint64_t(tree.counts[token]) * (length + extra_bits_of(token)) : 0;
    bits = block_sum(bits, scratch);
    int stored = stored_lengths(tree.lengths, reinterpret_cast<int*>(scratch));
    int64_t bytes = code_bytes(stored) + 2 * HUFFMAN_LANES * chunks_of(count) + int64_t(bits / 8);
    if (bytes > raw_bytes(count, choice)) {
        if (token == 0) choice.coder = RAW;
        return;
    }
    int place;
    if (has_code) encoding.codes[token] = reversed(first_code(tree.lengths, token, place)) | length << 16;
    if (token == 0) {
        encoding.code_bytes = uint32_t(code_bytes(stored));
        frame[HEADER_BYTES] = uint8_t(stored);
    }
    if (token < unsigned(stored) && token % 2 == 0) {
        unsigned next = token + 1 < TOKENS ? tree.lengths[token + 1] : 0;
        frame[HEADER_BYTES + 1 + token / 2] = uint8_t(length | next << 4);
    }
}

NCZ_KERNEL(ncz_huffman_count)
(const __grid_constant__ Pieces pieces, Written* written, HuffmanEncoding* encodings) {
    NCZ_SHARED(HuffmanTree, tree, 1);
    NCZ_SHARED(uint64_t, scratch, WARPS);
    NCZ_SHARED(int, is_last, 1);
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    int64_t chunk = unit_number(pieces.n), count = piece.count;
    if (chunk >= written_chunks(piece)) return;
    Choice& choice = written[f].choice;
    HuffmanEncoding& encoding = encodings[f];
    if (choice.coder != HUFFMAN) return;
    uint32_t* counts = tree[0].counts;
    if (threadIdx.x < TOKENS) counts[threadIdx.x] = 0;
    __syncthreads();
    int n = length_of(chunk, count);
    for (int i = int(threadIdx.x); i < n; i += THREADS)
        atomicAdd(counts + token_of(symbol_at(piece.codes + chunk * CHUNK, i, 0, choice.predictor)), 1u);
    __syncthreads();
    if (threadIdx.x < TOKENS && counts[threadIdx.x]) atomicAdd(encoding.counts + threadIdx.x, counts[threadIdx.x]);
    if (finished_last(&written[f].counted, written_chunks(piece), is_last))
        make_code(encoding, tree[0], count, choice, piece.frame, scratch);
}

// What one thread encodes: so many consecutive symbols, of which every HUFFMAN_LANES-th is in the same lane.
constexpr int OWN_SYMBOLS = CHUNK / THREADS;
constexpr int WARP_SYMBOLS = WARP * OWN_SYMBOLS;

// The symbols of each thread, of a chunk of `n` codes. Read side by side, and passed on through `stage`, where each
// thread's begin in another bank.
NCZ_DEVICE void load_symbols(const int32_t* codes, int n, int32_t predictor, uint32_t* stage,
                             uint32_t (&symbols)[OWN_SYMBOLS]) {
    constexpr int STRIDE = OWN_SYMBOLS + 1;
    stage += warp() * WARP * STRIDE;
    for (int row = 0; row < OWN_SYMBOLS; ++row) {
        int in_warp = row * WARP + lane(), i = warp() * WARP_SYMBOLS + in_warp;
        stage[in_warp / OWN_SYMBOLS * STRIDE + in_warp % OWN_SYMBOLS] =
            i < n ? symbol_at(codes, i, 0, predictor) : 0;
    }
    __syncwarp(ALL_LANES);
    for (int i = 0; i < OWN_SYMBOLS; ++i) symbols[i] = stage[lane() * STRIDE + i];
}

// Numbers of 16 bits, one for each lane of a chunk.
NCZ_DEVICE unsigned of_lane(uint64_t numbers, int lane) { return unsigned(numbers >> 16 * lane) & 0xffffu; }

NCZ_KERNEL(ncz_huffman_encode)
(const __grid_constant__ Pieces pieces, Written* written, const HuffmanEncoding* encodings, unsigned long long* places,
 long long* sizes) {
    NCZ_SHARED(uint32_t, words, HUFFMAN_LANES * MOST_LANE_BYTES / 4 + 1);
    NCZ_SHARED(uint32_t, token_codes, TOKENS);
    NCZ_SHARED(uint64_t, sums, WARPS);
    NCZ_SHARED(int64_t, shared_number, 1);
    int f = frame_number(pieces.n);
    const Piece& piece = pieces.of[f];
    int64_t count = piece.count;
    if (unit_number(pieces.n) >= chunks_of(count)) return;
    Choice& choice = written[f].choice;
    if (choice.coder != HUFFMAN) return;
    places += piece.first_chunk + f;
    if (threadIdx.x < TOKENS) token_codes[threadIdx.x] = encodings[f].codes[threadIdx.x];
    int64_t chunk = take_number(&written[f].taken, shared_number);
    int n = length_of(chunk, count);

    uint32_t symbols[OWN_SYMBOLS];
    load_symbols(piece.codes + chunk * CHUNK, n, choice.predictor, words, symbols);
    int own = n - int(threadIdx.x) * OWN_SYMBOLS;  // may be less than none, or more than there is room for
    uint64_t bits = 0, all_bits;
    for (int i = 0; i < OWN_SYMBOLS; ++i) {
        unsigned token = token_of(symbols[i]);
        if (i < own) bits += uint64_t((token_codes[token] >> 16) + extra_bits_of(token)) << 16 * (i % HUFFMAN_LANES);
    }
    uint64_t bits_before = block_exclusive_sum(bits, sums, all_bits);
    int bytes = 0, lane_bytes[HUFFMAN_LANES];
    for (int l = 0; l < HUFFMAN_LANES; ++l) bytes += lane_bytes[l] = int(of_lane(all_bits, l) + 7) / 8;
    if (threadIdx.x == 0) leave_own(places, chunk, bytes);

    for (int i = int(threadIdx.x); 4 * i < bytes; i += THREADS) words[i] = 0;
    __syncthreads();
    int first_byte = 0;
    for (int l = 0; l < HUFFMAN_LANES; ++l) {
        BitWriter writer(words, unsigned(8 * first_byte) + of_lane(bits_before, l));
        for (int i = l; i < OWN_SYMBOLS; i += HUFFMAN_LANES) {
            if (i >= own) continue;
            unsigned token = token_of(symbols[i]), code = token_codes[token], extra_bits = extra_bits_of(token);
            writer.put(code & 0xffffu, code >> 16);
            if (extra_bits) writer.put(extra_of(symbols[i], extra_bits), extra_bits);
        }
        writer.end();
        first_byte += lane_bytes[l];
    }

    int64_t table = encodings[f].code_bytes, lanes = table + 2 * HUFFMAN_LANES * chunks_of(count);
    if (warp() == 0) {
        int64_t before = look_back(places, chunk, bytes);
        if (lane() == 0) *shared_number = before;
    }
    __syncthreads();
    int64_t end = lanes + *shared_number + bytes;
    bool has_room = end <= raw_bytes(count, choice);
    uint8_t* payload = piece.frame + HEADER_BYTES;
    if (has_room) {
        if (threadIdx.x < HUFFMAN_LANES)
            store16(payload + table + 2 * (HUFFMAN_LANES * chunk + threadIdx.x),
                    unsigned(of_lane(all_bits, int(threadIdx.x)) + 7) / 8);
        copy_to_global(payload + end - bytes, words, bytes);
    }
    if (chunk + 1 < chunks_of(count) || threadIdx.x) return;
    if (has_room) {
        write_header(piece.frame, HUFFMAN, choice.predictor, 0, count, end);
        sizes[f] = HEADER_BYTES + end;
    } else {
        choice.coder = RAW;
    }
}

// ------------------------------------------------------------------ decoding

// Reads the code in front of a payload, by a block. Gives what is wrong with it, the same to all threads: 0 if nothing.
NCZ_DEVICE int64_t read_code(const uint8_t* in, int64_t capacity, uint8_t* lengths, uint32_t* scratch) {
    int stored = capacity ? in[0] : int(TOKENS) + 1, token = int(threadIdx.x);
    if (stored > int(TOKENS) || capacity < code_bytes(stored)) return damaged(HUFFMAN_TABLE, stored);
    bool is_stored = token < stored, is_filling = token == stored && stored % 2;
    unsigned length = is_stored || is_filling ? in[1 + token / 2] >> token % 2 * 4 & 15 : 0;
    if (token < int(TOKENS)) lengths[token] = uint8_t(length);
    bool is_wrong = length > (is_stored ? HUFFMAN_MAX_LENGTH : 0) || (token + 1 == stored && !length);
    uint32_t share = is_wrong ? 2 * HUFFMAN_WHOLE : length ? HUFFMAN_WHOLE >> length : 0;
    return block_sum(share, scratch) == HUFFMAN_WHOLE ? 0 : damaged(HUFFMAN_CODE);
}

// The last of `n` rising numbers that is not above `limit`; the first never is.
NCZ_DEVICE int last_not_above(const uint16_t* numbers, int n, unsigned limit) {
    int low = 0, high = n;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (numbers[middle] <= limit)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// The code and the token that any HUFFMAN_MAX_LENGTH bits begin with. `firsts` and `tokens`: shared memory for TOKENS.
NCZ_DEVICE void fill_entries(const uint8_t* lengths, uint16_t* firsts, uint8_t* tokens, uint32_t* entries,
                             int* scratch) {
    unsigned token = threadIdx.x;
    bool has_code = token < TOKENS && lengths[token];
    int codes = block_sum(int(has_code), scratch), place;
    if (has_code) {
        unsigned first = first_code(lengths, token, place);
        firsts[place] = uint16_t(first);
        tokens[place] = uint8_t(token);
    }
    __syncthreads();
    for (unsigned bits = threadIdx.x; bits < HUFFMAN_WHOLE; bits += THREADS) {
        unsigned found = tokens[last_not_above(firsts, codes, reversed(bits))];
        entries[bits] = lengths[found] | found << 8;
    }
}

// How many bytes there are from `at` on, below 0 behind the end; of very many, as many as nobody reads.
NCZ_DEVICE int bytes_left(const uint8_t* at, const uint8_t* end) {
    constexpr int64_t MANY = 1 << 30;
    return int(end - at < MANY ? end - at : MANY);
}

// The 4 bytes at a multiple of 4, as far as there are so many left, and zeros behind.
NCZ_DEVICE uint32_t load_word(const uint8_t* at, int left) {
    if (left >= 4) return *reinterpret_cast<const uint32_t*>(at);
    uint32_t word = 0;
    for (int i = 0; i < left; ++i) word |= uint32_t(at[i]) << 8 * i;
    return word;
}

// Words of the bit strings that the lanes of a warp read, in shared memory. Each lane has a column, used in a circle.
constexpr int WINDOW = 16;

struct LaneWindows {
    uint32_t of[WINDOW][WARP];
};

// A bit string to read. Never reads at `end` or behind: there are zeros.
//
// Lanes need their next words at different times. If each loaded its own from global memory, nearly always all would
// wait for one of them. So now and then all `fetch` what they will need, and go on with what they have meanwhile.
class LaneBits {
  public:
    // `window`: this lane's column.
    NCZ_DEVICE LaneBits(const uint8_t* begin, const uint8_t* end, uint32_t* window) : window_(window) {
        unsigned phase = unsigned(reinterpret_cast<uintptr_t>(begin) % 4);
        words_ = begin - phase;
        left_ = bytes_left(words_, end);
        fetch();
        await_fetched();
        bits_ = take() >> 8 * phase;
        filled_ = 32 - 8 * phase;
        ensure();
    }
    NCZ_DEVICE uint32_t bits() const { return uint32_t(bits_); }
    NCZ_DEVICE unsigned read() const { return read_; }  // how many there were
    NCZ_DEVICE void skip(unsigned n) {  // at most as many as are at hand
        bits_ >>= n;
        filled_ -= n;
        read_ += n;
    }
    NCZ_DEVICE void ensure() {  // that 32 bits are at hand
        if (filled_ >= 32) return;
        bits_ |= uint64_t(take()) << filled_;
        filled_ += 32;
    }

    // Starts to fill the window behind what is in it.
    NCZ_DEVICE void fetch() {
        if (fetched_ < taken_) fetched_ = taken_;
        for (; fetched_ < taken_ + WINDOW; ++fetched_) {
            uint32_t* to = window_ + fetched_ % WINDOW * WARP;
            int left = left_ - 4 * fetched_;
            if (left >= 4)
                copy_async(to, reinterpret_cast<const uint32_t*>(words_) + fetched_);
            else
                *to = load_word(words_ + 4 * int64_t(fetched_), left);
        }
    }
    NCZ_DEVICE void await_fetched() {
        await_copies();
        arrived_ = fetched_;
    }

  private:
    NCZ_DEVICE uint32_t take() {
        int i = taken_++;
        if (i < arrived_) return window_[i % WINDOW * WARP];
        return load_word(words_ + 4 * int64_t(i), left_ - 4 * i);  // long symbols have emptied the window
    }

    uint32_t* window_;
    const uint8_t* words_;
    int left_;  // bytes from `words_` on
    int taken_ = 0, arrived_ = 0, fetched_ = 0;  // words
    uint64_t bits_;
    unsigned filled_, read_ = 0;
};

// A warp decodes eight chunks together: a tile of each in shared memory, which then is stored side by side.
constexpr int HUFFMAN_DECODER_WARPS = 4;  // of a block: more would need too much shared memory
constexpr int WARP_CHUNKS = WARP / HUFFMAN_LANES;
constexpr int TILE_SYMBOLS = 32;  // of a lane
constexpr int TILE_CODES = TILE_SYMBOLS * HUFFMAN_LANES;

struct alignas(16) FourCodes {
    int32_t of[4];
};

// Each chunk's begin in another four banks.
struct alignas(16) HuffmanTile {
    int32_t codes[WARP_CHUNKS][TILE_CODES + 4];
};

// Of at least HUFFMAN_MAX_LENGTH bits at hand.
NCZ_DEVICE uint32_t next_symbol(LaneBits& bits, const uint32_t* entries) {
    uint32_t entry = entries[bits.bits() % HUFFMAN_WHOLE], token = entry >> 8;
    bits.skip(entry & 0xffu);
    if (token < DIRECT) return token;
    bits.ensure();
    unsigned extra_bits = extra_bits_of(token);
    uint32_t extra = bits.bits() & ((1u << extra_bits) - 1);
    bits.skip(extra_bits);
    bits.ensure();
    return base_of(token) + (extra << 1);
}

// Whether a lane of `bytes` has been read to its end, and what is left of its last byte is zero.
NCZ_DEVICE bool is_at_end(const LaneBits& bits, unsigned bytes) {
    unsigned left = -bits.read() % 8;
    return (bits.read() + left) / 8 == bytes && (bits.bits() & ((1u << left) - 1)) == 0;
}

// `n` codes of a chunk, four for each lane of the warp, of which the last may be too many. With DELTA, adds to each all
// before it; `sum` is that of those before these, and then that of all.
NCZ_DEVICE void store_codes(FourCodes four, int n, int32_t predictor, uint32_t& sum, int32_t* codes) {
    if (predictor == DELTA) {
        uint32_t residuals[4], own = 0;
        for (int i = 0; i < 4; ++i) residuals[i] = own += uint32_t(four.of[i]);
        uint32_t inclusive = warp_inclusive_sum(own), before = sum + inclusive - own;
        for (int i = 0; i < 4; ++i) four.of[i] = int32_t(before + residuals[i]);
        sum += __shfl_sync(ALL_LANES, inclusive, WARP - 1);
    }
    bool is_aligned = reinterpret_cast<uintptr_t>(codes) % sizeof(FourCodes) == 0;
    if (n == 4 * WARP && is_aligned) {
        reinterpret_cast<FourCodes*>(codes)[lane()] = four;
        return;
    }
    for (int i = 0; i < 4; ++i)
        if (4 * lane() + i < n) codes[4 * lane() + i] = four.of[i];
}

// Shared memory that a block decodes with.
struct HuffmanDecoding {
    uint32_t entries[HUFFMAN_WHOLE];  // by the next bits: bits of the code, and the token from bit 8 on
    HuffmanTile tiles[HUFFMAN_DECODER_WARPS];
    LaneWindows windows[HUFFMAN_DECODER_WARPS];
    uint16_t firsts[TOKENS];
    uint8_t lengths[TOKENS], tokens[TOKENS];
};

// Decodes the chunks of one part of a frame, of as many as a warp has lanes: after it has checked the code and all sizes,
// as every block does by itself. Gives what is wrong with these, the same to all threads, and records what is wrong with
// its own chunks.
NCZ_CALLED int64_t decode_huffman(const Input& input, const Header& header, int part, Status& status,
                                  int32_t* codes, HuffmanDecoding& shared, int64_t* sums) {
    const uint8_t* payload = input.frame + HEADER_BYTES;
    int64_t bytes = header.payload_bytes, count = input.count;
    int chunks = int(chunks_of(count)), first_of_part = part * WARP;
    if (part && first_of_part >= chunks) return 0;
    int64_t wrong = read_code(payload, bytes, shared.lengths, reinterpret_cast<uint32_t*>(sums));
    if (wrong) return wrong;
    int code = code_bytes(payload[0]), first_lane = code + 2 * HUFFMAN_LANES * chunks;
    int64_t all;
    if (bytes < first_lane) return damaged(HUFFMAN_NO_LANES, bytes - code);
    auto chunk_bytes = [=](int chunk) {
        const uint8_t* sizes = payload + code + 2 * HUFFMAN_LANES * chunk;
        int64_t own = 0;
        for (int l = 0; l < HUFFMAN_LANES; ++l) own += load16(sizes + 2 * l);
        return own;
    };
    int64_t before = add_up_sizes(chunks, first_of_part, chunk_bytes, sums, all);
    if (all != bytes - first_lane) return damaged(HUFFMAN_LANE_SUM, bytes - code);
    fill_entries(shared.lengths, shared.firsts, shared.tokens, shared.entries, reinterpret_cast<int*>(sums));
    __syncthreads();
    if (warp() >= HUFFMAN_DECODER_WARPS) return 0;

    int64_t own_bytes = first_of_part + lane() < chunks ? chunk_bytes(first_of_part + lane()) : 0;
    int64_t begins = first_lane + before + warp_inclusive_sum(own_bytes) - own_bytes;  // in lane c that of chunk c
    int first_chunk = first_of_part + warp() * WARP_CHUNKS;
    int in_warp = lane() / HUFFMAN_LANES, in_chunk = lane() % HUFFMAN_LANES;
    int chunk = first_chunk + in_warp;
    bool is_chunk = chunk < chunks;
    int own = is_chunk ? (length_of(chunk, count) - in_chunk + HUFFMAN_LANES - 1) / HUFFMAN_LANES : 0;
    const uint8_t* begin = payload + __shfl_sync(ALL_LANES, begins, warp() * WARP_CHUNKS + in_warp);
    unsigned lane_bytes = 0;
    if (is_chunk) {
        const uint8_t* sizes = payload + code + 2 * HUFFMAN_LANES * chunk;
        for (int l = 0; l < in_chunk; ++l) begin += load16(sizes + 2 * l);
        lane_bytes = load16(sizes + 2 * in_chunk);
    }

    LaneBits bits(begin, payload + bytes, &shared.windows[warp()].of[0][lane()]);
    HuffmanTile& tile = shared.tiles[warp()];
    uint32_t delta_sums = 0;                       // in lane c that of chunk c
    int longest = __shfl_sync(ALL_LANES, own, 0);  // only the last chunk of a frame is short
    for (int done = 0; done < longest; done += TILE_SYMBOLS) {
        int n = own - done < TILE_SYMBOLS ? own - done : TILE_SYMBOLS;
        bits.fetch();
#pragma unroll 2
        for (int i = 0; i < n; ++i) {
            if (i % 2 == 0) bits.ensure();  // enough for two codes
            tile.codes[in_warp][HUFFMAN_LANES * i + in_chunk] = unzigzag(next_symbol(bits, shared.entries));
        }
        bits.await_fetched();
        __syncwarp(ALL_LANES);
        for (int c = 0; c < WARP_CHUNKS && first_chunk + c < chunks; ++c) {
            int first = HUFFMAN_LANES * done, left = length_of(first_chunk + c, count) - first;
            FourCodes four = *reinterpret_cast<const FourCodes*>(tile.codes[c] + 4 * lane());
            uint32_t sum = __shfl_sync(ALL_LANES, delta_sums, c);
            store_codes(four, left < TILE_CODES ? left : TILE_CODES, header.predictor, sum,
                        codes + int64_t(first_chunk + c) * CHUNK + first);
            if (lane() == c) delta_sums = sum;
        }
        __syncwarp(ALL_LANES);
    }
    if (is_chunk && !is_at_end(bits, lane_bytes)) record(status, damaged(HUFFMAN_LANE));
    return 0;
}

#define NCZ_HUFFMAN_KERNELS(X) X(ncz_huffman_count) X(ncz_huffman_encode)
