"""Quantization steps found on the emulated GPU, against those of the host."""

from __future__ import annotations

import functools

import pytest
import torch
from emulator import EmulatedLauncher
from samples import floats

from ncz_plugins import kernels
from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.core.codec.quantize import (
    derive,
    derive_on_gpu,
    derived_on_gpu,
    measure,
    measure_on_gpu,
    most_summable,
    step_rule,
)
from ncz_plugins.core.config import QuantizerConfig
from ncz_plugins.kernels.cuda import CudaBackend
from ncz_plugins.kernels.format import CHUNK, DTYPES, SCALE_BLOCK, blocks_of

FAST = kernels.load(next(name for name, status in kernels.statuses().items() if status == "ok"))
LENGTHS = [2 * CHUNK + 5, 3 * CHUNK, 7, 0]
QUANTIZERS = [
    {"mode": "rms", "value": 0.25, "block": CHUNK},
    {"mode": "rms", "value": 0.25, "block": 0},
    {"mode": "rms", "value": 0.5, "block": SCALE_BLOCK},
    {"mode": "rms", "value": 0.5, "block": 3 * SCALE_BLOCK, "kind": "stochastic"},
    {"mode": "rms", "value": 0.5, "block": 2 * CHUNK, "kind": "stochastic"},
    {"mode": "rel", "value": 0.01, "block": CHUNK},
    {"mode": "rel", "value": 0.01, "block": SCALE_BLOCK},
    {"mode": "rel", "value": 0.01, "block": 0},
    {"mode": "abs", "value": 0.01},
    {"mode": "range", "value": 0.001, "block": CHUNK},
    {"mode": "range", "value": 0.001, "block": 2 * CHUNK, "kind": "stochastic"},
]


@functools.cache
def cuda(seed: int = 0, sanitizer: str | None = None) -> CudaBackend:
    return CudaBackend(EmulatedLauncher(seed=seed, sanitizer=sanitizer))


def both_measured(x: torch.Tensor, layout: Layout, segments: range, quantizer: QuantizerConfig, backend=None):
    most = most_summable(quantizer, x.dtype, addends=3)
    ours = measure_on_gpu(backend or cuda(1), Window(x), layout, segments, quantizer, most)
    return ours, measure(FAST, Window(x), layout, segments, quantizer, most=most)


def assert_same_measured(ours: torch.Tensor, expected: torch.Tensor, quantizer: QuantizerConfig) -> None:
    """But where sums of squares are added, in another order: in float64 the result differs in its last bits."""
    if quantizer.mode == "rms" and quantizer.block != SCALE_BLOCK:
        rtol = {torch.float64: 1e-14, torch.float32: 2**-23, torch.bfloat16: 2**-7}[ours.dtype]
        torch.testing.assert_close(ours, expected, rtol=rtol, atol=0)
    else:
        assert ours.dtype == expected.dtype and torch.equal(ours, expected)


def both_derived(agreed: torch.Tensor, layout: Layout, quantizer: QuantizerConfig, dtype, addends: int, backend=None):
    rule = step_rule(quantizer, dtype, addends, addends)
    scales, outcome = derive_on_gpu(backend or cuda(2), agreed, layout, quantizer, rule)
    ours = derived_on_gpu(scales, outcome.tolist(), layout.steps)
    return ours, derive(agreed, layout, quantizer, dtype, addends, addends)


def assert_same(ours, expected) -> None:
    assert ours.finite == expected.finite and (ours.scales is None) == (expected.scales is None)
    if expected.scales is not None:
        assert torch.equal(ours.scales.inverse_steps, expected.scales.inverse_steps)
        assert torch.equal(ours.scales.scales, expected.scales.scales)
        assert ours.bits_per_value == pytest.approx(expected.bits_per_value, abs=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", QUANTIZERS, ids=str)
def test_the_steps_are_those_of_the_host(settings, dtype):
    quantizer, layout = QuantizerConfig(**settings), Layout.of(LENGTHS, CHUNK)
    x = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(5)).to(dtype)
    x[: CHUNK + 9] *= 1000
    for segments in (range(4), range(1, 3), range(2, 2)):
        ours, expected = both_measured(x, layout, segments, quantizer)
        assert_same_measured(ours, expected, quantizer)
        for addends in (1, 3):
            assert_same(*both_derived(expected, layout, quantizer, dtype, addends))


@pytest.mark.parametrize("settings", QUANTIZERS, ids=str)
def test_so_are_those_of_many_segments_and_of_wide_blocks(settings):
    quantizer = QuantizerConfig(**settings)
    x = torch.randn(300 * CHUNK, generator=torch.Generator().manual_seed(6))
    for lengths in ([CHUNK + 1] * 70, [300 * CHUNK]):
        layout = Layout.of(lengths, CHUNK)
        ours, expected = both_measured(x[: sum(lengths)], layout, range(len(lengths)), quantizer)
        assert_same_measured(ours, expected, quantizer)
        assert_same(*both_derived(expected, layout, quantizer, torch.float32, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", QUANTIZERS, ids=str)
def test_what_allows_no_steps_is_found(settings, dtype):
    """Infinities and NaN, the largest and the smallest numbers there are, zeros, blocks of one value."""
    layout = Layout.of([CHUNK + 5, CHUNK], CHUNK)
    most, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    for filling in (0.0, -0.0, 3.0, -1e-4, most, tiny, float("inf"), float("-inf"), float("nan"), None):
        x = torch.full([layout.numel], filling, dtype=dtype) if filling is not None else floats(layout.numel, dtype)
        if filling is not None and filling != filling:
            x = torch.linspace(-1, 1, layout.numel).to(dtype).index_fill(0, torch.tensor([77]), filling)
        for value in (0.25, 1e-7, 1e-9):
            quantizer = QuantizerConfig(**settings | {"value": value})
            ours, expected = both_measured(x, layout, range(2), quantizer)
            assert_same_measured(ours, expected, quantizer)
            for addends in (1, 4):
                assert_same(*both_derived(expected, layout, quantizer, dtype, addends))


def test_where_there_are_no_steps_they_are_zero():
    layout, quantizer = Layout.of([2 * CHUNK], CHUNK), QuantizerConfig(mode="rel", value=0.01, block=CHUNK)
    x = torch.ones(2 * CHUNK)
    x[5] = torch.inf
    measured, _ = both_measured(x, layout, range(1), quantizer)
    scales, outcome = derive_on_gpu(cuda(), measured, layout, quantizer, step_rule(quantizer, x.dtype, 2))
    assert not scales.scales[: blocks_of(CHUNK)].any() and not scales.inverse_steps[: blocks_of(CHUNK)].any()
    assert (scales.scales[blocks_of(CHUNK) :] > 0).all()
    assert outcome.tolist()[:2] == [1, 0]


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("settings", QUANTIZERS, ids=str)
def test_under_sanitizers(settings, sanitizer):
    quantizer, layout, backend = QuantizerConfig(**settings), Layout.of(LENGTHS, CHUNK), cuda(1, sanitizer)
    x = torch.randn(sum(LENGTHS))
    ours, expected = both_measured(x, layout, range(4), quantizer, backend)
    assert_same_measured(ours, expected, quantizer)
    assert_same(*both_derived(expected, layout, quantizer, x.dtype, 3, backend))
