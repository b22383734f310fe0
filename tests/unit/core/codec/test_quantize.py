"""The error bound, strictly: no element outside it, for any dtype, magnitude and bound."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ncz_plugins import BoundError, compress, decompress, kernels
from ncz_plugins.core.bypass import Bypass, by_size, scales_or_bypass
from ncz_plugins.core.codec.from_config import noise_for
from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.core.codec.quantize import (
    Scales,
    derive,
    measure,
    measured_bytes,
    most_summable,
    smallest_value,
    step_rule,
)
from ncz_plugins.core.config import Config, QuantizerConfig
from ncz_plugins.kernels.format import CHUNK, SCALE_BLOCK, Noise, blocks_of

BACKEND = kernels.cpu_backend()
# What the rounding of a sum to a dtype of few bits may add, as a share of the result.
HALF_ULP = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# float16 also rounds to multiples of 2**-24 near zero.
SMALLEST = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 0, torch.float16: 2.0**-25}
KINDS = ["error_bound", "stochastic"]
MODES = ["abs", "rel", "rms", "range"]


def agree(tensors: list[torch.Tensor], quantizer: QuantizerConfig, divisor: int = 1) -> Scales | Bypass:
    layout = Layout.split(tensors[0].numel(), 1, 1 << 20, quantizer.block_in_effect)
    most = most_summable(quantizer, tensors[0].dtype, len(tensors), divisor)
    measured = [measure(BACKEND, Window(t), layout, range(1), quantizer, most=most) for t in tensors]
    agreed = torch.stack(measured).amax(0)
    return scales_or_bypass(agreed, layout, quantizer, tensors[0].dtype, len(tensors), divisor)


@settings(deadline=None)
@given(
    magnitude=st.sampled_from([1e-38, 1e-20, 1.0, 3e4, 1e37]),
    numel=st.sampled_from([0, 1, SCALE_BLOCK, 1000, CHUNK + 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kind=st.sampled_from(KINDS),
    value=st.sampled_from([1e-6, 1e-3, 0.05, 1.0, 9.0]),
    divisor=st.sampled_from([1, 3]),
)
def test_kernels_find_the_steps_that_numpy_finds(magnitude, numel, dtype, kind, value, divisor):
    """Of small blocks; or the same reason to go plain."""
    quantizer = QuantizerConfig(kind=kind, mode="rms", value=value, block=SCALE_BLOCK)
    generator = torch.Generator().manual_seed(numel)
    x = (torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator) * magnitude).to(dtype)
    layout = Layout.split(numel, 2, 1 << 20, SCALE_BLOCK)
    measured = measure(
        BACKEND, Window(x), layout, range(2), quantizer, most=most_summable(quantizer, dtype, 3, divisor)
    )
    ours, theirs = (
        scales_or_bypass(measured, layout, quantizer, dtype, 3, divisor, backend) for backend in (BACKEND, None)
    )
    if isinstance(theirs, Scales):
        assert torch.equal(ours.inverse_steps, theirs.inverse_steps) and torch.equal(ours.scales, theirs.scales)
    else:
        assert ours == theirs


def test_a_block_that_needs_many_bits_does_not_decide_whether_quantizing_is_worth_it():
    x = torch.zeros(64 * SCALE_BLOCK, dtype=torch.bfloat16)
    quantizer = QuantizerConfig(mode="rms", value=1e-4, block=SCALE_BLOCK)
    layout = Layout.split(x.numel(), 1, 1 << 20, SCALE_BLOCK)
    for noisy, is_worthwhile in ((1, True), (64, False)):
        x[: noisy * SCALE_BLOCK] = torch.randn(noisy * SCALE_BLOCK, generator=torch.Generator().manual_seed(1))
        measured = measure(BACKEND, Window(x), layout, range(1), quantizer)
        for backend in (BACKEND, None):
            derived = derive(measured, layout, quantizer, x.dtype, 1, backend=backend)
            assert derived.is_worthwhile(x.dtype) == is_worthwhile


def sum_of_codes(tensors: list[torch.Tensor], scales: Scales, quantizer: QuantizerConfig | None = None) -> torch.Tensor:
    total = torch.zeros(tensors[0].numel(), dtype=torch.int32)
    for rank, tensor in enumerate(tensors):
        noise = noise_for(Config(quantizer=quantizer), 1, rank, len(tensors)) if quantizer else None
        codes = torch.empty_like(total)
        BACKEND.quantize(tensor, scales.inverse_steps, codes, noise)
        total += codes
    out = torch.empty_like(tensors[0])
    BACKEND.dequantize(total, scales.scales, out)
    return out


def exact(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy().astype(np.longdouble)


def per_element(tensors, quantizer: QuantizerConfig) -> np.ndarray:
    """The bound of each element, from its definition."""
    numel = tensors[0].numel()
    if quantizer.mode == "abs":
        return np.full(numel, quantizer.value, dtype=np.longdouble)
    block = quantizer.block or numel
    bounds = np.empty(numel, dtype=np.longdouble)
    for start in range(0, numel, block):
        parts = [exact(t[start : start + block]) for t in tensors]
        if quantizer.mode == "rel":
            relative_to = max(np.abs(part).max() for part in parts)
        elif quantizer.mode == "rms":
            relative_to = max(np.sqrt((part**2).mean()) for part in parts)
        else:
            relative_to = max(part.max() for part in parts) - min(part.min() for part in parts)
        bounds[start : start + block] = np.longdouble(quantizer.value) * relative_to
    return bounds


def smallest_bound(dtype: torch.dtype, divisor: int = 1) -> np.longdouble:
    """Bounds below this are not told apart."""
    return np.longdouble(np.finfo(np.float64 if dtype == torch.float64 else np.float32).tiny) * 4 * divisor


def mixed(rng: np.random.Generator, numel: int, dtype: torch.dtype, exponent: int, offset: float) -> torch.Tensor:
    """Mixed magnitudes within a block, `offset` away from zero, all times 2**exponent."""
    values = rng.standard_normal(numel) * np.exp2(rng.integers(-12, 1, numel)) + offset
    return torch.from_numpy(np.ldexp(values, exponent)).to(dtype)


# From denormal to near the largest number that does not become infinite in a sum.
EXPONENTS = {torch.float32: (-149, 120), torch.float64: (-1074, 1016), torch.bfloat16: (-133, 120)}
EXPONENTS[torch.float16] = (-24, 9)
a_case = st.tuples(st.sampled_from(sorted(EXPONENTS, key=str)), st.floats(0, 1)).map(
    lambda drawn: (drawn[0], round(EXPONENTS[drawn[0]][0] + drawn[1] * np.ptp(EXPONENTS[drawn[0]])))
)
a_quantizer = st.builds(
    QuantizerConfig,
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from(MODES),
    value=st.floats(-6, -1).map(lambda exponent: 10.0**exponent),
    block=st.sampled_from([0, SCALE_BLOCK, 3 * SCALE_BLOCK, CHUNK, 2 * CHUNK]),
    seed=st.integers(0, 2**64 - 1),
)
a_size = st.sampled_from([1, 2, 31, 4096, 4097, 9001])
an_offset = st.sampled_from([0.0, 0.0, 1.0, -3.0])
a_seed = st.integers(0, 2**31)


def in_units_of(quantizer: QuantizerConfig, exponent: int) -> QuantizerConfig:
    """In mode abs the bound goes with the data."""
    if quantizer.mode != "abs":
        return quantizer
    return quantizer.model_copy(update={"value": max(float(np.ldexp(quantizer.value, exponent)), 5e-324)})


FINE = QuantizerConfig(mode="rel", value=1e-6, block=0)


@settings(max_examples=300, deadline=None)
@given(a_case, a_quantizer, a_size, an_offset, st.integers(1, 5), st.booleans(), a_seed)
@example((torch.float32, 0), FINE, 9001, 0.0, 1, False, 0)
@example((torch.float32, 0), FINE, 9001, 0.0, 3, True, 1)
@example((torch.float32, -140), QuantizerConfig(mode="rms", value=0.1), 4097, 0.0, 2, False, 2)
@example((torch.float64, -600), QuantizerConfig(mode="rms", value=0.1), 4097, 0.0, 2, False, 3)  # squares vanish
@example((torch.float64, 600), QuantizerConfig(mode="rms", value=0.1), 4097, 0.0, 2, False, 4)  # squares overflow
@example((torch.float32, -149), QuantizerConfig(kind="stochastic", mode="abs", value=0.1), 31, 0.0, 5, True, 5)
def test_no_element_of_a_sum_leaves_the_bound(case, quantizer, numel, offset, ranks, average, seed):
    dtype, exponent = case
    rng = np.random.default_rng(seed)
    tensors = [mixed(rng, numel, dtype, exponent, offset) for _ in range(ranks)]
    quantizer = in_units_of(quantizer, exponent)
    divisor = ranks if average else 1
    scales = agree(tensors, quantizer, divisor)
    bounds = per_element(tensors, quantizer)
    largest = max(np.abs(exact(tensor)).max() for tensor in tensors)
    if isinstance(scales, Bypass):
        if scales is Bypass.NON_FINITE:  # a sum could be
            assert (largest + bounds.max()) * ranks > torch.finfo(dtype).max / 2
        else:  # a bound too fine for the dtype's own precision, or too fine to pay
            assert scales in (Bypass.CODE_OVERFLOW, Bypass.NOT_WORTH)
            assert bounds.min() < 1e-3 * largest
        return
    error = np.abs(exact(sum_of_codes(tensors, scales, quantizer)) - sum(exact(t) for t in tensors) / divisor)
    allowed = np.maximum(bounds, smallest_bound(dtype, divisor)) * ranks / divisor
    if ranks > 1:
        allowed = allowed + np.maximum(HALF_ULP[dtype] * (largest * ranks / divisor + allowed), SMALLEST[dtype])
    assert (error <= allowed).all(), f"{(error - allowed).max()} beyond the bound"


@settings(max_examples=300, deadline=None)
@given(a_case, a_quantizer, a_size, an_offset, st.booleans(), a_seed)
@example((torch.float32, 0), FINE, 9001, 0.0, False, 0)
@example((torch.float16, 0), QuantizerConfig(mode="range", value=0.01), 9001, 1.0, False, 0)
@example((torch.float16, -20), QuantizerConfig(mode="rel", value=0.1), 4096, 0.0, False, 0)
def test_no_element_leaves_the_bound_through_compress(case, quantizer, numel, offset, lossless, seed):
    """Not even by the rounding of the result to a half type."""
    dtype, exponent = case
    tensor = mixed(np.random.default_rng(seed), numel, dtype, exponent, offset)
    quantizer = in_units_of(quantizer, exponent)
    if lossless:
        quantizer = quantizer.model_copy(update={"kind": "lossless"})
    try:
        out = decompress(compress(tensor, Config(quantizer=quantizer)))
    except BoundError:
        assert per_element([tensor], quantizer).min() < 2e-6 * np.abs(exact(tensor)).max()
        return
    error = np.abs(exact(out) - exact(tensor))
    allowed = 0 if lossless else np.maximum(per_element([tensor], quantizer), smallest_bound(dtype))
    assert (error <= allowed).all(), f"{(error - allowed).max()} beyond the bound"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_halves_of_steps_stay_within_the_bound(dtype, kind, mode):
    """The worst that rounding can meet, at a bound so fine that the arithmetic's own error counts."""
    tensor = torch.linspace(-1, 1, 9001, dtype=dtype)
    for value in np.geomspace(1e-6, 1e-1, 11):
        quantizer = QuantizerConfig(kind=kind, mode=mode, value=value, block=0)
        step = agree([tensor], quantizer).scales[0]
        worst = ((torch.arange(9001) - 4500) * (torch.floor(1 / step) / 4500).floor().clamp(min=1) + 0.5) * step
        worst = worst[worst.abs() <= 1]
        for near in (
            worst,
            worst.nextafter(torch.tensor(9, dtype=dtype)),
            worst.nextafter(-torch.tensor(9, dtype=dtype)),
        ):
            near = torch.cat([tensor[:1], near.clamp(-1, 1), tensor[-1:]])
            bound = per_element([near], quantizer)
            out = sum_of_codes([near], agree([near], quantizer), quantizer)
            assert (np.abs(exact(out) - exact(near)) <= bound).all(), value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rounding_at_random_has_no_bias(dtype, mode):
    """By Hoeffding's inequality, a mean as far off as this comes by chance in less than one of 10**9 runs."""
    calls, numel = 64, 5000
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(3)).to(dtype)
    quantizer = QuantizerConfig(kind="stochastic", mode=mode, value=0.2)
    scales = agree([tensor], quantizer)
    step = scales.scales.repeat_interleave(SCALE_BLOCK)[:numel].double()
    codes = torch.empty(numel, dtype=torch.int32)
    mean = torch.zeros(numel, dtype=torch.float64)
    for call in range(calls):
        BACKEND.quantize(tensor, scales.inverse_steps, codes, Noise(quantizer.seed, call))
        mean += (codes - tensor.double() / step) / calls
    assert mean.mean().abs() < np.sqrt(np.log(2e9) / (2 * calls * numel))
    assert mean.abs().max() < np.sqrt(np.log(2e9 * numel) / (2 * calls))  # nor has any single element
    assert mean.abs().max() > 0.1  # it is random at all


def test_random_numbers_differ_by_call_shift_and_seed_only():
    tensor = torch.full((5000,), 0.5)
    codes = {}
    for noise in [Noise(1, 2, 3), Noise(1, 2, 3), Noise(1, 2, 2**31), Noise(1, 3, 3), Noise(2, 2, 3)]:
        codes[noise] = torch.empty(5000, dtype=torch.int32)
        BACKEND.quantize(tensor, torch.ones(blocks_of(5000)), codes[noise], noise)
    assert len(codes) == 4 and len({tuple(c.tolist()) for c in codes.values()}) == 4


@pytest.mark.parametrize("ranks", [2, 3, 7, 16])
def test_where_ranks_have_equal_values_their_sum_is_off_by_less_than_one_step(ranks):
    value, step = torch.rand(5000, generator=torch.Generator().manual_seed(ranks)), 0.3
    config = Config(quantizer={"kind": "stochastic"})
    codes = torch.empty(ranks, 5000, dtype=torch.int32)
    for rank, own in enumerate(codes):
        BACKEND.quantize(value, torch.full((blocks_of(5000),), 1 / step), own, noise_for(config, 5, rank, ranks))
    assert len({tuple(own.tolist()) for own in codes}) == ranks
    assert (codes.sum(0) * step - ranks * value).abs().max() < step * 1.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("mode", MODES)
def test_one_non_finite_value_anywhere_is_seen(dtype, poison, mode):
    for at in (0, 4095, 4096, 5000):
        tensor = torch.ones(5001, dtype=dtype)
        tensor[at] = poison
        assert agree([torch.ones_like(tensor), tensor], QuantizerConfig(mode=mode, value=0.1)) is Bypass.NON_FINITE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_stay_zeros(mode, dtype):
    zeros = torch.zeros(5000, dtype=dtype)
    assert sum_of_codes([zeros, zeros], agree([zeros, zeros], QuantizerConfig(mode=mode, value=0.1))).eq(0).all()


def test_a_zero_block_beside_a_large_one():
    tensor = torch.cat([torch.zeros(CHUNK), torch.full((CHUNK,), 1e30)])
    out = sum_of_codes([tensor], agree([tensor], QuantizerConfig(mode="rms", value=0.1)))
    assert out[:CHUNK].eq(0).all() and (out[CHUNK:] - 1e30).abs().max() <= 0.1 * 1e30


def test_a_small_layer_in_a_mixed_bucket_keeps_its_precision():
    """Why there is one scale per block: with a single one, the small layer would vanish."""
    small, large = torch.randn(CHUNK) * 1e-4, torch.randn(CHUNK)
    bucket = torch.cat([small, large])
    out = sum_of_codes([bucket], agree([bucket], QuantizerConfig(mode="rms", value=0.25)))
    assert (out[:CHUNK] - small).abs().max() <= 0.25 * small.square().mean().sqrt() * 1.0001
    coarse = sum_of_codes([bucket], agree([bucket], QuantizerConfig(mode="rms", value=0.25, block=0)))
    assert coarse[:CHUNK].eq(0).all()


def test_codes_that_could_overflow_their_sum_are_not_tried():
    tensor = torch.full((5000,), 1.0, dtype=torch.float64)
    quantizer = QuantizerConfig(mode="abs", value=1e-9)
    assert isinstance(agree([tensor], quantizer), Scales)
    assert agree([tensor] * 8, quantizer) is Bypass.CODE_OVERFLOW


def test_a_bound_finer_than_the_dtype_is_not_tried():
    assert agree([torch.ones(5000)], QuantizerConfig(mode="rel", value=1e-7)) is Bypass.CODE_OVERFLOW


def test_bfloat16_that_would_not_shrink_is_not_tried():
    assert agree([torch.ones(5000, dtype=torch.bfloat16)], QuantizerConfig(mode="rel", value=1e-5)) is Bypass.NOT_WORTH


@pytest.mark.parametrize("value", [0.1, 0.3, 0.9])
def test_a_result_never_becomes_infinite_by_its_error(value):
    """Two codes of 0.6 make 1.2 of the largest float: such a call goes plain."""
    largest = torch.finfo(torch.float32).max
    for magnitude in (largest, largest / 4):
        tensor = torch.full((5000,), magnitude)
        scales = agree([tensor], QuantizerConfig(mode="rel", value=value))
        if isinstance(scales, Bypass):
            assert scales is Bypass.NON_FINITE and magnitude == largest
        else:
            assert ((sum_of_codes([tensor], scales).double() - magnitude).abs() <= value * magnitude).all()


def test_one_value_in_a_block_leaves_no_range_and_no_error():
    tensor = torch.cat([torch.full((CHUNK,), -9999.0), torch.randn(CHUNK), torch.full((5,), 273.15)])
    quantizer = QuantizerConfig(mode="range", value=1e-3)
    out = sum_of_codes([tensor], agree([tensor], quantizer))
    assert torch.equal(out[:CHUNK], tensor[:CHUNK]) and torch.equal(out[2 * CHUNK :], tensor[2 * CHUNK :])
    assert agree([tensor, -tensor], quantizer).scales[0] < 9999  # but it differs between ranks
    assert agree([tensor], QuantizerConfig(kind="stochastic", mode="range", value=1e-3)) is Bypass.CODE_OVERFLOW


def test_in_mode_range_a_rank_says_nothing_of_what_others_measure():
    """Zero would be within their range: [5, 6] would become [0, 6]."""
    layout, quantizer = Layout.of([CHUNK, CHUNK], CHUNK), QuantizerConfig(mode="range", value=0.01)
    whole = torch.linspace(5, 6, 2 * CHUNK)
    parts = [
        measure(BACKEND, Window(whole[i * CHUNK :][:CHUNK], i * CHUNK), layout, range(i, i + 1), quantizer)
        for i in (0, 1)
    ]
    both = measure(BACKEND, Window(whole), layout, range(2), quantizer)
    assert torch.equal(torch.maximum(*parts), both)
    nobody = measure(BACKEND, Window(whole), layout, range(0), quantizer)
    scales = scales_or_bypass(torch.maximum(parts[0], nobody), layout, quantizer, torch.float32, addends=1)
    codes = torch.empty(CHUNK, dtype=torch.int32)
    BACKEND.quantize(torch.zeros(CHUNK), scales.inverse_steps[CHUNK // SCALE_BLOCK :], codes)
    assert not codes.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_value_is_that(kind, mode, dtype):
    tensor = torch.randn(9001, dtype=dtype, generator=torch.Generator().manual_seed(5))
    tensor[4096:8192] *= 1e-3
    layout = Layout.split(9001, 1, 1 << 20, 0 if mode == "abs" else CHUNK)
    measured = measure(BACKEND, Window(tensor), layout, range(1), QuantizerConfig(kind=kind, mode=mode))
    smallest = smallest_value(measured, QuantizerConfig(kind=kind, mode=mode), dtype)
    for factor, works in ((1.001, True), (0.999, False)):
        quantizer = QuantizerConfig(kind=kind, mode=mode, value=factor * smallest)
        scales = scales_or_bypass(measured, layout, quantizer, dtype, addends=1)
        assert (scales is not Bypass.CODE_OVERFLOW) == works


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", list(EXPONENTS), ids=str)
def test_steps_are_the_same_where_numpy_raises(dtype, mode, kind):
    """Of values whose squares and steps vanish or overflow, and of those that are not finite."""
    for exponent in (*EXPONENTS[dtype], 0, EXPONENTS[dtype][0] // 2):
        quantizer = in_units_of(QuantizerConfig(kind=kind, mode=mode, value=1e-2, block=0), exponent)
        tensors = [mixed(np.random.default_rng(seed), 4097, dtype, exponent, 0.0) for seed in range(2)]
        tensors[1][5] = torch.inf if exponent == 0 else 0.0
        found = [agree(tensors, quantizer, 2)]
        with np.errstate(all="raise"):
            found.append(agree(tensors, quantizer, 2))
            compress(tensors[0], Config(quantizer={"kind": "lossless"}))
        expected, found = found
        assert type(found) is type(expected)
        if isinstance(found, Bypass):
            assert found is expected
        else:
            assert torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("average_of", [1, 3, 64])
def test_the_smallest_steps_and_scales_have_all_their_digits(average_of, dtype, kind):
    """However small the bound: denormal numbers have fewer digits, and some devices take them for zero."""
    tiny = torch.finfo(dtype).tiny
    layout = Layout.split(1, 1, 1 << 20, 0)
    too_fine = 0
    for value in tiny * average_of * np.array([2.0**-20, 0.5, 1, 2, 4, 5]):
        quantizer = QuantizerConfig(kind=kind, mode="abs", value=value)
        # The larger the values beside the bound, the smaller are the steps, until it is too fine.
        for largest in tiny * average_of * np.geomspace(0.01, 2.0**36, 150):
            measured = measure(BACKEND, Window(torch.tensor([largest], dtype=dtype)), layout, range(1), quantizer)
            scales = scales_or_bypass(measured, layout, quantizer, dtype, addends=average_of, divisor=average_of)
            if scales is Bypass.CODE_OVERFLOW:
                too_fine += 1
            else:
                assert scales.scales.min() >= tiny and scales.inverse_steps.isfinite().all(), (value, largest)
    assert 0 < too_fine < 6 * 150 / 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_finest_bound_leaves_a_quarter_to_the_step(kind, mode):
    """The rest of it covers what float32 arithmetic may add; with less, codes would grow for hardly any gain."""
    tensor = torch.randn(CHUNK, generator=torch.Generator().manual_seed(6))
    layout, quantizer = Layout.split(CHUNK, 1, 1 << 20, 0), QuantizerConfig(kind=kind, mode=mode, block=0)
    measured = measure(BACKEND, Window(tensor), layout, range(1), quantizer)
    smallest = smallest_value(measured, quantizer, tensor.dtype)
    quantizer = quantizer.model_copy(update={"value": 1.0001 * smallest})
    step = scales_or_bypass(measured, layout, quantizer, tensor.dtype, addends=1).scales[0].double()
    whole = {"error_bound": 2, "stochastic": 1}[kind] * float(per_element([tensor], quantizer)[0])
    assert 0.25 <= step / whole < 0.251


def test_where_no_value_will_do_there_is_no_smallest():
    tensor = torch.full((5000,), 1000.0)
    tensor[::2] = 1000.0001  # one unit in the last place
    layout, quantizer = Layout.split(5000, 1, 1 << 20, CHUNK), QuantizerConfig(mode="range", value=0.1)
    measured = measure(BACKEND, Window(tensor), layout, range(1), quantizer)
    assert scales_or_bypass(measured, layout, quantizer, torch.float32, addends=1) is Bypass.CODE_OVERFLOW
    assert smallest_value(measured, quantizer, torch.float32) is None


def test_the_smallest_value_does_not_mind_blocks_of_one_value():
    tensor = torch.cat([torch.full((CHUNK,), 7.0), torch.randn(CHUNK)])
    layout, quantizer = Layout.split(2 * CHUNK, 1, 1 << 20, CHUNK), QuantizerConfig(mode="range", value=1e-9)
    measured = measure(BACKEND, Window(tensor), layout, range(1), quantizer)
    assert scales_or_bypass(measured, layout, quantizer, torch.float32, addends=1) is Bypass.CODE_OVERFLOW
    assert 1e-9 < smallest_value(measured, quantizer, torch.float32) < 1e-6


@pytest.mark.parametrize("numel", [1, SCALE_BLOCK, 2 * SCALE_BLOCK + 7])
def test_of_small_blocks_ranks_agree_on_a_root_mean_square_in_16_bits(numel):
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    quantizer = QuantizerConfig(mode="rms", block=SCALE_BLOCK)
    layout = Layout.split(numel, 1, 1 << 20, SCALE_BLOCK)
    measured = measure(BACKEND, Window(tensor), layout, range(1), quantizer)
    exact = torch.stack([part.double().square().mean().sqrt() for part in tensor.split(SCALE_BLOCK)])
    assert measured.dtype == torch.bfloat16
    assert (measured.double() <= exact).all() and (measured.double() > exact / (1 + 2**-7)).all()


@pytest.mark.parametrize("numel", [1, 3 * CHUNK + 7])
@pytest.mark.parametrize("block", [0, SCALE_BLOCK, 2 * CHUNK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mode", MODES)
def test_what_ranks_agree_on_takes_as_many_bytes_as_is_known_before(mode, dtype, block, numel):
    quantizer = QuantizerConfig(mode=mode, block=block if mode != "abs" else 0)
    layout = Layout.split(numel, 2, CHUNK, quantizer.block_in_effect)
    measured = measure(BACKEND, Window(torch.ones(numel, dtype=dtype)), layout, range(2), quantizer)
    assert measured_bytes(layout, quantizer, dtype) == measured.nbytes


@pytest.mark.parametrize("block", [SCALE_BLOCK, 2 * SCALE_BLOCK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_small_blocks_go_plain_where_a_sum_may_overflow_and_not_sooner(dtype, block):
    """The largest magnitude is not known afterwards, and could be 16 times the root mean square."""
    quantizer = QuantizerConfig(mode="rms", value=0.25, block=block)
    of_each = torch.full((block,), torch.finfo(dtype).max / 3, dtype=dtype)
    assert agree([of_each] * 2, quantizer) is not Bypass.NON_FINITE
    assert agree([of_each] * 3, quantizer) is Bypass.NON_FINITE
    assert agree([of_each] * 3, quantizer, divisor=3) is not Bypass.NON_FINITE


@pytest.mark.parametrize("mode", ["abs", "rel", "rms"])
def test_what_overflows_only_by_its_error_goes_plain_too(mode):
    """A result may be off by the bound, and a finite one must not become infinite by that."""
    dtype, most = torch.float16, 65504.0
    tensor = torch.full((CHUNK,), 0.8 * most, dtype=dtype)

    def agreed(share: float) -> Scales | Bypass:
        value = share * most if mode == "abs" else share / 0.8
        return agree([tensor], QuantizerConfig(mode=mode, value=value, block=0))

    assert agreed(0.25) is Bypass.NON_FINITE and isinstance(agreed(0.15), Scales)


def test_the_rounding_of_a_result_is_reserved_where_nothing_is_added():
    """A sum of short floats may be off by it on top of the bound, whoever adds."""
    quantizer = QuantizerConfig(mode="abs", value=0.25)
    assert step_rule(quantizer, torch.bfloat16, 1).rounding == 2.0**-8
    assert step_rule(quantizer, torch.float16, 1).rounding == 2.0**-11
    assert step_rule(quantizer, torch.bfloat16, 2).rounding == step_rule(quantizer, torch.float32, 1).rounding == 0


@pytest.mark.parametrize("exponent", [-600, -540, -537, -530, -500, 0, 500, 600])
def test_a_root_mean_square_is_never_measured_too_large(exponent):
    """Also where squares vanish, or round to the smallest number there is."""
    tensor = torch.full((5000,), float(np.ldexp(np.sqrt(0.75), exponent)), dtype=torch.float64)
    layout = Layout.split(5000, 1, 1 << 20, 0)
    _, rms = measure(BACKEND, Window(tensor), layout, range(1), QuantizerConfig(mode="rms", block=0)).tolist()
    assert tensor[0] / np.sqrt(5000) <= rms <= tensor[0]


@pytest.mark.parametrize(
    "nbytes, least, reason",
    [
        (0, 0, Bypass.TOO_SMALL),  # nothing to send
        (1, 0, None),
        ((128 << 10) - 1, 128 << 10, Bypass.TOO_SMALL),
        (128 << 10, 128 << 10, None),
        (1 << 40, "never", Bypass.FAST_LINK),
        (0, "never", Bypass.FAST_LINK),
    ],
)
def test_a_size_may_be_a_reason_to_go_plain(nbytes, least, reason):
    assert by_size(nbytes, Config(transport={"min_bytes": least})) is reason
