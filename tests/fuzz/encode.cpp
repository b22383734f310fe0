// Fuzz target: any codes and floats, with any coder, predictor, costs and noise, into a frame and back. Both
// instruction sets must write the same bytes, no more than max_frame_bytes, and they must decode to the same codes.

#include "kernels.h"

namespace {

using namespace ncz;

struct Control {
    uint16_t count;
    uint8_t kind, dtype, coder, predictor, has_noise, has_checksum;
    uint8_t costs[6], step, offset;
    uint64_t seed, first;
};

// The input over and over, up to `bytes` of it.
Memory tiled(const uint8_t* data, size_t size, int64_t bytes, int offset = 0) {
    Memory memory(bytes, 0, offset);
    for (int64_t i = 0; i < bytes && size; ++i) memory.data()[i] = data[size_t(i) % size];
    return memory;
}

template <class Int>
Memory widened(const Memory& numbers, int64_t count) {
    Memory codes(4 * count, 0);
    for (int64_t i = 0; i < count; ++i) codes.as<int32_t>()[i] = numbers.as<Int>()[i];
    return codes;
}

// The input as numbers of 8, 16 or 32 bits.
Memory codes_of(const Control& control, const uint8_t* data, size_t size) {
    switch (control.kind % 4) {
        case 1: return widened<int8_t>(tiled(data, size, control.count), control.count);
        case 2: return widened<int16_t>(tiled(data, size, 2 * control.count), control.count);
        default: return tiled(data, size, 4 * control.count, 4 * control.offset);
    }
}

Coding coding_of(const Control& control) {
    const uint8_t* c = control.costs;
    auto cost = [](uint8_t byte) { return int64_t(byte) * byte; };
    return {CODERS[control.coder % 5], PREDICTORS[control.predictor % 3],
            {cost(c[0]), cost(c[1]), cost(c[2]), cost(c[3]), cost(c[4]), cost(c[5])}};
}

// `function(frame, scratch)` of both kernels, which must write the same frame.
template <class Function>
Memory frame_of_both(const Control& control, Function function) {
    int64_t count = control.count;
    auto frame_of = [&](const Kernels& kernels) {
        Memory frame(max_frame_bytes(count), kernels.fill, control.offset), scratch = scratch_to_write(kernels, count);
        int64_t written = function(kernels, frame.data(), scratch.data());
        require(written >= HEADER_BYTES && written <= frame.bytes(), "a frame is larger than max_frame_bytes, or none");
        return Memory(frame.data(), written);
    };
    Memory frame = frame_of(both_kernels()[0]);
    require(frame == frame_of(both_kernels()[1]), "the instruction sets write other frames");
    return frame;
}

// `function(out)` of both kernels, which must write the same `bytes`.
template <class Function>
Memory output_of_both(int64_t bytes, Function function) {
    auto output_of = [&](const Kernels& kernels) {
        Memory out(bytes, kernels.fill);
        function(kernels, out.data());
        return out;
    };
    Memory out = output_of(both_kernels()[0]);
    require(out == output_of(both_kernels()[1]), "the instruction sets compute other numbers");
    return out;
}

Memory decoded(const Memory& frame, int64_t count) {
    return output_of_both(4 * count, [&](const Kernels& kernels, void* out) {
        Memory scratch = scratch_to_read(kernels);
        int64_t done = kernels.decode_codes(frame.data(), frame.bytes(), count, static_cast<int32_t*>(out), false,
                                            scratch.data());
        require(done == 0, "a frame that was just written is refused");
    });
}

void add_checksum(const Memory& frame) {
    Header header;
    memcpy(&header, frame.data(), sizeof header);
    header.flags = HAS_CHECKSUM;
    memcpy(frame.data(), &header, sizeof header);
    header.checksum = both_kernels()[0].checksum(frame.data(), frame.bytes());
    require(header.checksum == both_kernels()[1].checksum(frame.data(), frame.bytes()), "checksums differ");
    memcpy(frame.data(), &header, sizeof header);
}

Memory check_codes(const Control& control, const Memory& codes) {
    Coding coding = coding_of(control);
    Memory frame = frame_of_both(control, [&](const Kernels& kernels, uint8_t* out, uint8_t* scratch) {
        return kernels.encode_codes(codes.as<int32_t>(), control.count, &coding, out, scratch);
    });
    if (control.has_checksum % 2) add_checksum(frame);
    require(decoded(frame, control.count) == codes, "a frame does not decode to the codes that it was made of");
    return frame;
}

// The same inverse step for all blocks, any power of two that floats have.
Memory steps_of(const Control& control, bool inverse) {
    int64_t blocks = scale_blocks_of(control.count);
    double step = __builtin_ldexp(1, inverse ? control.step - 127 : 127 - control.step);
    Memory steps(blocks * (control.dtype == FLOAT64 ? 8 : 4), 0);
    for (int64_t b = 0; b < blocks; ++b) {
        if (control.dtype == FLOAT64)
            steps.as<double>()[b] = step;
        else
            steps.as<float>()[b] = float(step);
    }
    return steps;
}

// Where floats change and by how much, which are all codes but 0, gives the floats back.
void check_rare_differences(const Control& control, const Memory& x, const Memory& base, const Memory& codes) {
    int64_t count = control.count, expected = 0;
    for (int64_t i = 0; i < count; ++i) expected += codes.as<int32_t>()[i] != 0;
    for (const Kernels& kernels : both_kernels()) {
        Memory gaps(4 * (count + OCTET), kernels.fill), out(x.bytes(), kernels.fill);
        auto found = [&](const Memory& changes) {
            return kernels.rare_differences(x.data(), base.data(), control.dtype, count, changes.bytes() / 4,
                                            gaps.as<int32_t>(), changes.as<int32_t>());
        };
        if (expected) require(found(Memory(4 * (expected - 1), kernels.fill)) >= expected, "there is no room for a change");
        Memory changes(4 * expected, kernels.fill);
        require(found(changes) == expected, "elements that change are missing");
        if (!expected) continue;
        require(kernels.add_rare_differences(gaps.as<int32_t>(), changes.as<int32_t>(), expected, base.data(), count,
                                             out.data(), control.dtype) && out == x,
                "rare changes do not give the floats back");
    }
}

// Any floats as changes from any others, which come back to the bit.
void check_differences(const Control& control, const Memory& x, const uint8_t* data, size_t size) {
    int64_t count = control.count, bytes = count * element_bytes(control.dtype);
    size_t skipped = size ? control.first % size : 0;
    Memory base = tiled(data + skipped, size - skipped, bytes);
    Memory codes = output_of_both(4 * count, [&](const Kernels& kernels, void* out) {
        kernels.differences(x.data(), base.data(), control.dtype, count, static_cast<int32_t*>(out));
    });
    check_codes(control, codes);
    check_rare_differences(control, x, base, codes);
    Memory restored = output_of_both(bytes, [&](const Kernels& kernels, void* out) {
        if (bytes) memcpy(out, base.data(), size_t(bytes));
        kernels.add_differences(codes.as<int32_t>(), out, count, out, control.dtype);
    });
    require(bytes == 0 || memcmp(restored.data(), x.data(), size_t(bytes)) == 0, "changes do not give the floats back");
}

// What ranks agree on for any floats; and the quantization steps that follow from any 16 bits for each block.
void check_scales(const Control& control, const Memory& x, const uint8_t* data, size_t size) {
    int64_t blocks = scale_blocks_of(control.count);
    double most = control.has_checksum % 2 ? __builtin_inf() : __builtin_ldexp(1, control.step - 127);
    output_of_both(2 * blocks, [&](const Kernels& kernels, void* out) {
        kernels.root_mean_squares(x.data(), control.dtype, control.count, most, static_cast<uint16_t*>(out));
    });
    Memory agreed = tiled(data, size, 2 * blocks, 2 * control.offset);
    for (int64_t b = 0; b < blocks; ++b) agreed.as<uint16_t>()[b] &= 0x7fff;  // ranks find no negative ones
    // value, addends, share, divisor, steps_per_bound, least, reserved, most, rounding, tiny, cap
    double rule[] = {__builtin_ldexp(1, control.step % 16 - 12), 1.0 + control.costs[0], 1, 1.0 + control.costs[1],
                     1.0 + control.has_noise % 2, 0, __builtin_ldexp(control.costs[2], -24), most,
                     __builtin_ldexp(control.costs[3], -16), 0x1p-126, 0x1.fffffep+127};
    output_of_both(8 + 8 * blocks, [&](const Kernels& kernels, void* out) {
        Memory inverse_steps(4 * blocks, kernels.fill), scales(4 * blocks, kernels.fill);
        double spread = kernels.steps_of(agreed.as<uint16_t>(), blocks, reinterpret_cast<const StepRule*>(rule),
                                         inverse_steps.as<float>(), scales.as<float>());
        auto end = static_cast<uint8_t*>(out);
        memcpy(end, &spread, sizeof spread);
        memcpy(end + 8, inverse_steps.data(), size_t(4 * blocks));
        memcpy(end + 8 + 4 * blocks, scales.data(), size_t(4 * blocks));
    });
}

void check_floats(Control control, const uint8_t* data, size_t size) {
    int64_t count = control.count;
    int32_t dtype = control.dtype;
    Memory x = tiled(data, size, count * element_bytes(dtype), control.offset * element_bytes(dtype));
    Memory inverse_steps = steps_of(control, true), scales = steps_of(control, false);
    Noise noise_given = {control.seed, control.first, control.step};
    const Noise* noise = control.has_noise % 2 ? &noise_given : nullptr;
    Coding coding = coding_of(control);

    if (dtype != FLOAT64) {
        check_differences(control, x, data, size);
        check_scales(control, x, data, size);
    }
    output_of_both(24 * scale_blocks_of(count), [&](const Kernels& kernels, void* out) {
        int64_t blocks = scale_blocks_of(count);
        auto results = static_cast<double*>(out);
        kernels.block_statistics(x.data(), dtype, count, results, results + blocks, results + 2 * blocks);
    });
    Memory codes = output_of_both(4 * count, [&](const Kernels& kernels, void* out) {
        kernels.quantize(x.data(), dtype, inverse_steps.data(), count, static_cast<int32_t*>(out), noise);
    });
    control.has_checksum = 0;
    Memory from_codes = check_codes(control, codes);
    Memory frame = frame_of_both(control, [&](const Kernels& kernels, uint8_t* out, uint8_t* scratch) {
        return kernels.encode(x.data(), dtype, inverse_steps.data(), count, &coding, out, noise, scratch);
    });
    require(frame == from_codes, "floats give another frame than their codes");

    Memory floats = output_of_both(x.bytes(), [&](const Kernels& kernels, void* out) {
        Memory scratch = scratch_to_read(kernels);
        int64_t done = kernels.decode(frame.data(), frame.bytes(), scales.data(), count, out, dtype, scratch.data());
        require(done == 0, "a frame that was just written is refused");
    });
    Memory expected = output_of_both(x.bytes(), [&](const Kernels& kernels, void* out) {
        kernels.dequantize(codes.as<int32_t>(), scales.data(), count, out, dtype);
    });
    require(floats == expected, "decode gives other floats than dequantize");

    Memory sum = frame_of_both(control, [&](const Kernels& kernels, uint8_t* out, uint8_t* scratch) {
        return kernels.reduce(frame.data(), frame.bytes(), x.data(), dtype, inverse_steps.data(), count, &coding, out,
                              noise, scratch);
    });
    Memory doubled = decoded(sum, count);
    for (int64_t i = 0; i < count; ++i)
        require(doubled.as<uint32_t>()[i] == 2 * codes.as<uint32_t>()[i], "reduce wrote another sum");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    auto control = take_control<Control>(data, size);
    control.count %= MOST_ELEMENTS;
    control.dtype %= DTYPES;
    control.offset %= 2;
    if (control.kind % 4 == 0)
        check_floats(control, data, size);
    else
        check_codes(control, codes_of(control, data, size));
    return 0;
}
