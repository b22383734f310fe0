// Fuzz target: any bytes as a frame, through each function that reads one, and as the gaps and changes of a SPARSE frame.
// Both instruction sets must say the same of it and decode the same, and what RAW, FIXED or SPARSE refuse must leave the
// output alone.

#include "kernels.h"
#include "repair.h"

namespace {

using namespace ncz;

enum Function { DECODE_CODES, ADD_CODES, DECODE_FLOATS, REDUCE, ADD_RARE, DECODE_CHANGES, FUNCTIONS };

struct Control {
    uint16_t count;
    uint8_t function, dtype, repair, offset, coder, predictor;
};

constexpr uint8_t ADDED_TO = 0x11;  // each byte of the codes that a frame's are added to

// One number per block of SCALE_BLOCK, of the type that steps and scales of `dtype` have.
Memory steps_of(int32_t dtype, int64_t count, double first) {
    int64_t blocks = scale_blocks_of(count);
    Memory steps(blocks * (dtype == FLOAT64 ? 8 : 4), 0);
    for (int64_t b = 0; b < blocks; ++b) {
        if (dtype == FLOAT64)
            steps.as<double>()[b] = first + double(b);
        else
            steps.as<float>()[b] = float(first + double(b));
    }
    return steps;
}

struct Result {
    int64_t verdict;  // bytes written, or why the frame is damaged
    Memory out;
};

Result decode_codes(const Kernels& kernels, const Memory& frame, int64_t count, bool add, int offset = 0) {
    Memory codes(4 * count, add ? ADDED_TO : kernels.fill, 4 * offset), scratch = scratch_to_read(kernels);
    int64_t verdict =
        kernels.decode_codes(frame.data(), frame.bytes(), count, codes.as<int32_t>(), add, scratch.data());
    return {verdict, std::move(codes)};
}

Result decode_floats(const Kernels& kernels, const Memory& frame, int64_t count, int32_t dtype, int offset) {
    int bytes = element_bytes(dtype);
    Memory floats(bytes * count, kernels.fill, bytes * offset), scratch = scratch_to_read(kernels);
    Memory scales = steps_of(dtype, count, 0.375);
    int64_t verdict =
        kernels.decode(frame.data(), frame.bytes(), scales.data(), count, floats.data(), dtype, scratch.data());
    return {verdict, std::move(floats)};
}

// The sum's frame decodes to the sum of codes.
void check_sum(const Kernels& kernels, const Memory& frame, const Memory& sum, const Memory& x, const Memory& steps,
               int64_t count, int32_t dtype) {
    Result decoded = decode_codes(kernels, frame, count, false), summed = decode_codes(kernels, sum, count, false);
    Memory own(4 * count, kernels.fill);
    kernels.quantize(x.data(), dtype, steps.data(), count, own.as<int32_t>(), nullptr);
    require(decoded.verdict == 0 && summed.verdict == 0, "reduce wrote a frame that is damaged");
    for (int64_t i = 0; i < count; ++i)
        require(decoded.out.as<uint32_t>()[i] + own.as<uint32_t>()[i] == summed.out.as<uint32_t>()[i],
                "reduce wrote another sum");
}

Result reduce(const Kernels& kernels, const Memory& frame, const Control& control) {
    int64_t count = control.count;
    int32_t dtype = control.dtype;
    Memory codes(4 * count, 0), x(element_bytes(dtype) * count, 0, element_bytes(dtype) * control.offset);
    Memory out(max_frame_bytes(count), kernels.fill, control.offset), scratch = scratch_to_write(kernels, count);
    for (int64_t i = 0; i < count; ++i) codes.as<int32_t>()[i] = i % 11 ? 0 : int32_t(i % 23 - 7);
    kernels.dequantize(codes.as<int32_t>(), steps_of(dtype, count, 0.5).data(), count, x.data(), dtype);
    Memory steps = steps_of(dtype, count, 2);
    Coding coding = {CODERS[control.coder % 5], PREDICTORS[control.predictor % 3], {8000, 600, 500, 1800, 900, 3000}};
    int64_t verdict = kernels.reduce(frame.data(), frame.bytes(), x.data(), dtype, steps.data(), count, &coding,
                                     out.data(), nullptr, scratch.data());
    require(verdict <= out.bytes(), "the sum's frame is larger than max_frame_bytes");
    if (verdict < 0) return {verdict, std::move(out)};
    Memory sum(out.data(), verdict);
    check_sum(kernels, frame, sum, x, steps, count, dtype);
    return {verdict, std::move(sum)};
}

// The floats that all codes of a SPARSE frame make of `base`, those that are 0 included.
Memory with_all_codes(const Kernels& kernels, const int32_t* gaps, const int32_t* codes, int64_t changes,
                      const Memory& base, int64_t count, int32_t dtype) {
    Memory all(4 * count, 0), out(base.bytes(), kernels.fill);
    for (int64_t i = 0, place = -1; i < changes; ++i) all.as<int32_t>()[place += 1 + gaps[i]] = codes[i];
    kernels.add_differences(all.as<int32_t>(), base.data(), count, out.data(), dtype);
    return out;
}

// The first half of the input as gaps, the second one as changes.
Result add_rare(const Kernels& kernels, const Memory& input, const Control& control) {
    int64_t changes = input.bytes() / 8, count = control.count;
    int32_t dtype = control.dtype % FLOAT64;
    Memory gaps(input.data(), 4 * changes, 4 * control.offset), codes(input.data() + 4 * changes, 4 * changes);
    if (control.repair & 1)
        for (int64_t i = 0; i < changes; ++i) gaps.as<uint32_t>()[i] &= 63;
    if (control.repair & 2)
        for (int64_t i = 0; i < changes; ++i) codes.as<uint32_t>()[i] |= 1;
    Memory base(element_bytes(dtype) * count, 0x3c), out(base.bytes(), kernels.fill);
    auto add = [&](const Memory& from, const Memory& to) {
        return kernels.add_rare_differences(gaps.as<int32_t>(), codes.as<int32_t>(), changes, from.data(), count,
                                            to.data(), dtype);
    };
    if (!add(base, out)) return {-1, std::move(out)};
    require(out == with_all_codes(kernels, gaps.as<int32_t>(), codes.as<int32_t>(), changes, base, count, dtype),
            "rare changes give other floats than all codes");
    require(add(base, base) && base == out, "rare changes give other floats in place");
    return {0, std::move(out)};
}

// A frame of changes in one pass, which are those of its codes; a SPARSE one's are what `add_rare` tries.
Result decode_changes(const Kernels& kernels, const Memory& frame, const Control& control) {
    int64_t count = control.count;
    int32_t dtype = control.dtype % FLOAT64;
    Memory base(element_bytes(dtype) * count, 0x3c), out(base.bytes(), kernels.fill), codes(4 * count, kernels.fill);
    Memory scratch = scratch_to_read(kernels), expected(base.bytes(), kernels.fill);
    uint32_t digests[2];
    bool is_read = kernels.decode_changes(frame.data(), frame.bytes(), base.data(), count, out.data(), dtype, digests,
                                          codes.as<int32_t>(), scratch.data());
    if (!is_read) return {-1, std::move(out)};
    require(digests[0] == kernels.digest(base.data(), base.bytes()), "the base has another checksum");
    require(digests[1] == kernels.digest(out.data(), out.bytes()), "what changes make has another checksum");
    Result all = decode_codes(kernels, frame, count, false);
    if (all.verdict == 0) {
        kernels.add_differences(all.out.as<int32_t>(), base.data(), count, expected.data(), dtype);
        require(out == expected, "changes give other floats than their codes");
    }
    return {0, std::move(out)};
}

Result run(const Kernels& kernels, const Memory& frame, const Control& control) {
    switch (control.function) {
        case DECODE_CODES: return decode_codes(kernels, frame, control.count, false, control.offset);
        case ADD_CODES: return decode_codes(kernels, frame, control.count, true, control.offset);
        case DECODE_FLOATS: return decode_floats(kernels, frame, control.count, control.dtype, control.offset);
        case ADD_RARE: return add_rare(kernels, frame, control);
        case DECODE_CHANGES: return decode_changes(kernels, frame, control);
        default: return reduce(kernels, frame, control);
    }
}

bool is_filled(const Memory& memory, uint8_t fill) {
    for (int64_t i = 0; i < memory.bytes(); ++i)
        if (memory.data()[i] != fill) return false;
    return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    auto control = take_control<Control>(data, size);
    control.count %= MOST_ELEMENTS;
    control.function %= FUNCTIONS;
    control.dtype %= DTYPES;
    control.offset %= 2;
    Memory frame(data, int64_t(size), control.offset);
    if (control.repair & 1) repair_payload(frame.data(), frame.bytes(), control.count);
    if (control.repair & 2) repair_header(frame.data(), frame.bytes(), control.count, both_kernels()[0].checksum);

    Result results[] = {run(both_kernels()[0], frame, control), run(both_kernels()[1], frame, control)};
    int64_t verdict = results[0].verdict, cause = -verdict % 256;
    require(verdict == results[1].verdict, "the instruction sets disagree on whether and why a frame is damaged");
    if (verdict >= 0) {
        require(results[0].out == results[1].out, "the instruction sets disagree on what a frame holds");
    } else if (cause != HUFFMAN_LANE && cause != RANS_DAMAGED_PAGE) {  // which show on decoding
        for (int k = 0; k < 2; ++k) {
            uint8_t before = control.function == ADD_CODES ? ADDED_TO : both_kernels()[k].fill;
            require(is_filled(results[k].out, before), "a frame was refused, but something written to the output");
        }
    }
    return 0;
}
