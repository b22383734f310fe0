// Fuzz target: any bytes as a frame, through each function that reads one. Both instruction sets must say the same of
// it and decode the same, and a frame that RAW or FIXED refuses must leave the output alone.

#include "kernels.h"
#include "repair.h"

namespace {

using namespace ncz;

enum Function { DECODE_CODES, ADD_CODES, DECODE_FLOATS, REDUCE, FUNCTIONS };

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

Result run(const Kernels& kernels, const Memory& frame, const Control& control) {
    switch (control.function) {
        case DECODE_CODES: return decode_codes(kernels, frame, control.count, false, control.offset);
        case ADD_CODES: return decode_codes(kernels, frame, control.count, true, control.offset);
        case DECODE_FLOATS: return decode_floats(kernels, frame, control.count, control.dtype, control.offset);
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
