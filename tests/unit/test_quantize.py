"""The error bound, strictly: no element outside it, for any dtype, magnitude and bound."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ncz_plugins import kernels
from ncz_plugins.core.config import Quantizer
from ncz_plugins.core.frame import Layout, Window
from ncz_plugins.core.quantize import Bypass, Scales, derive, measure
from ncz_plugins.kernels.format import CHUNK

BACKEND = kernels.cpu_backend()
# What the rounding of a result to a dtype of few bits may add, as a share of the result.
HALF_ULP = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# float16 also rounds to multiples of 2**-24 near zero.
SMALLEST = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 0, torch.float16: 2.0**-25}


def agree(tensors: list[torch.Tensor], quantizer: Quantizer, divisor: int = 1) -> Scales | Bypass:
    numel = tensors[0].numel()
    layout = Layout.split(numel, 1, 1 << 20, 0 if quantizer.mode == "abs" else quantizer.block)
    agreed = torch.stack([measure(BACKEND, Window(t), layout, range(1), quantizer) for t in tensors]).amax(0)
    return derive(agreed, layout, quantizer, tensors[0].dtype, len(tensors), divisor)


def sum_of_codes(tensors: list[torch.Tensor], scales: Scales) -> torch.Tensor:
    total = torch.zeros(tensors[0].numel(), dtype=torch.int32)
    for tensor in tensors:
        codes = torch.empty_like(total)
        BACKEND.quantize(tensor, scales.inverse_steps, codes)
        total += codes
    out = torch.empty_like(tensors[0])
    BACKEND.dequantize(total, scales.scales, out)
    return out


def exact(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy().astype(np.longdouble)


def per_element(tensors, quantizer: Quantizer) -> np.ndarray:
    """The bound of each element, from its definition."""
    if quantizer.mode == "abs":
        return np.full(tensors[0].numel(), quantizer.value, dtype=np.longdouble)
    numel = tensors[0].numel()
    block = quantizer.block or numel
    bounds = np.empty(numel, dtype=np.longdouble)
    for start in range(0, numel, block):
        parts = [exact(t[start : start + block]) for t in tensors]
        if quantizer.mode == "rel":
            relative_to = max(np.abs(part).max() for part in parts)
        else:
            relative_to = max(np.sqrt((part**2).mean()) for part in parts)
        bounds[start : start + block] = np.longdouble(quantizer.value) * relative_to
    return bounds


dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
modes = st.sampled_from(["abs", "rel", "rms"])
exponents = st.integers(-140, 120)


@settings(max_examples=300, deadline=None)
@given(
    dtype=dtypes,
    mode=modes,
    log_bound=st.floats(-6, -1),
    exponent=exponents,
    numel=st.sampled_from([1, 2, 31, 4096, 4097, 9001]),
    block=st.sampled_from([0, CHUNK, 2 * CHUNK]),
    ranks=st.integers(1, 5),
    average=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(torch.float32, "rel", -6.0, 0, 9001, 0, 1, False, 0)
@example(torch.float32, "rel", -6.0, 0, 9001, 0, 3, True, 1)
@example(torch.float32, "rms", -1.0, -140, 4097, CHUNK, 2, False, 2)
def test_no_element_leaves_the_bound(dtype, mode, log_bound, exponent, numel, block, ranks, average, seed):
    # In float16's own range its products would be lost, so its data stays where it has normal numbers.
    scale = 2.0 ** (max(-10, min(10, exponent)) if dtype == torch.float16 else exponent)
    rng = np.random.default_rng(seed)
    spread = np.exp2(rng.integers(-12, 1, numel))  # mixed magnitudes within a block
    tensors = [torch.from_numpy(rng.standard_normal(numel) * spread * scale).to(dtype) for _ in range(ranks)]
    value = 10.0**log_bound
    quantizer = Quantizer(mode=mode, value=value * scale if mode == "abs" else value, block=block)
    scales = agree(tensors, quantizer, ranks if average else 1)
    if isinstance(scales, Bypass):
        # A bound too fine for the dtype's own precision, or too fine to pay.
        assert scales in (Bypass.CODE_OVERFLOW, Bypass.NOT_WORTH)
        assert value < 1e-3
        return
    out = exact(sum_of_codes(tensors, scales))
    ideal = sum(exact(t) for t in tensors) / (ranks if average else 1)
    info = np.finfo(np.float64 if dtype == torch.float64 else np.float32)
    # Bounds below the smallest normal number are not told apart.
    bound = np.maximum(per_element(tensors, quantizer), np.longdouble(info.tiny)) * (1 if average else ranks)
    error = np.abs(out - ideal)
    worst = (error - bound - HALF_ULP[dtype] * np.abs(out)).max()
    assert worst <= SMALLEST[dtype], f"{worst} beyond the bound"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("mode", ["abs", "rel", "rms"])
def test_one_non_finite_value_anywhere_is_seen(dtype, poison, mode):
    for at in (0, 4095, 4096, 5000):
        tensor = torch.ones(5001, dtype=dtype)
        tensor[at] = poison
        assert agree([torch.ones_like(tensor), tensor], Quantizer(mode=mode, value=0.1)) is Bypass.NON_FINITE


@pytest.mark.parametrize("mode", ["abs", "rel", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_stay_zeros(mode, dtype):
    zeros = torch.zeros(5000, dtype=dtype)
    assert sum_of_codes([zeros, zeros], agree([zeros, zeros], Quantizer(mode=mode, value=0.1))).eq(0).all()


def test_a_zero_block_beside_a_large_one():
    tensor = torch.cat([torch.zeros(CHUNK), torch.full((CHUNK,), 1e30)])
    out = sum_of_codes([tensor], agree([tensor], Quantizer(mode="rms", value=0.1)))
    assert out[:CHUNK].eq(0).all() and (out[CHUNK:] - 1e30).abs().max() <= 0.1 * 1e30


def test_a_small_layer_in_a_mixed_bucket_keeps_its_precision():
    """Why there is one scale per block: with a single one, the small layer would vanish."""
    small, large = torch.randn(CHUNK) * 1e-4, torch.randn(CHUNK)
    bucket = torch.cat([small, large])
    out = sum_of_codes([bucket], agree([bucket], Quantizer(mode="rms", value=0.25)))
    assert (out[:CHUNK] - small).abs().max() <= 0.25 * small.square().mean().sqrt() * 1.0001
    coarse = sum_of_codes([bucket], agree([bucket], Quantizer(mode="rms", value=0.25, block=0)))
    assert coarse[:CHUNK].eq(0).all()


def test_codes_that_could_overflow_their_sum_are_not_tried():
    tensor = torch.full((5000,), 1.0, dtype=torch.float64)
    quantizer = Quantizer(mode="abs", value=1e-9)
    assert isinstance(agree([tensor], quantizer), Scales)
    assert agree([tensor] * 8, quantizer) is Bypass.CODE_OVERFLOW


def test_a_bound_finer_than_the_dtype_is_not_tried():
    assert agree([torch.ones(5000)], Quantizer(mode="rel", value=1e-7)) is Bypass.CODE_OVERFLOW


def test_bfloat16_that_would_not_shrink_is_not_tried():
    assert agree([torch.ones(5000, dtype=torch.bfloat16)], Quantizer(mode="rel", value=1e-5)) is Bypass.NOT_WORTH


@pytest.mark.parametrize("value", [0.1, 0.3, 0.9])
def test_a_result_never_becomes_infinite_by_its_error(value):
    """Two codes of 0.6 make 1.2 of the largest float: such a call goes plain."""
    largest = torch.finfo(torch.float32).max
    for magnitude in (largest, largest / 4):
        tensor = torch.full((5000,), magnitude)
        scales = agree([tensor], Quantizer(mode="rel", value=value))
        if isinstance(scales, Bypass):
            assert scales is Bypass.NON_FINITE and magnitude == largest
        else:
            assert ((sum_of_codes([tensor], scales).double() - magnitude).abs() <= value * magnitude).all()
