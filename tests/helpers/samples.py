"""Codes and floats that are hard on kernels, and the compiled kernels to try them on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from ncz_plugins import kernels
from ncz_plugins.kernels.format import blocks_of

COMPILED = [
    pytest.param(name, marks=pytest.mark.skipif(status != "ok", reason=status))
    for name, status in kernels.statuses().items()
    if name != "reference"
]


def codes_of_width(count: int, width: int, seed: int = 0) -> torch.Tensor:
    """Codes whose symbols take up to `width` bits, narrower in some blocks and zero in others."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(0, 1 << width, (count,), generator=generator)
    narrowed = torch.randint(0, width + 1, (-(-count // 32),), generator=generator).repeat_interleave(32)[:count]
    symbols = wide >> narrowed
    return ((symbols >> 1) ^ -(symbols & 1)).to(torch.int32)


def sparse_codes(count: int, share: float, seed: int = 0) -> torch.Tensor:
    """Mostly one small code; about `share` of them are others, a few of those large."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.full((count,), -1)
    others = torch.rand(count, generator=generator) < share
    sizes = 2 ** (torch.rand(count, generator=generator) ** 8 * 30)
    codes[others] = torch.randn(count, generator=generator)[others].mul(sizes[others]).round().long()
    return codes.to(torch.int32)


def floats(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Gaussian, with NaN, infinities, zeros, subnormals and the largest finite number among them."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    info = torch.finfo(dtype)
    for i, value in enumerate(
        (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, info.smallest_normal / 4, info.max)
    ):
        x[5 + 131 * i :: 1009] = value
    return x


def steps_of(x: torch.Tensor, bits: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse steps and scales that give codes of about `bits` bits to numbers near 1; another in each chunk."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    inverse = 2.0 ** (bits - 1) * (1 + torch.arange(blocks_of(x.numel())) % 5 / 7)
    return inverse.to(dtype), (1 / inverse).to(dtype)


def assert_same(a: torch.Tensor, b: torch.Tensor, case: str = "") -> None:
    """Equal to the last bit, but for which NaN a NaN is; -0.0 is not 0.0. `case` is for the message."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=lambda said: f"{case} {said}")
    if a.is_floating_point():
        assert torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan()), case


def with_flipped_bits(frame: torch.Tensor, data: st.DataObject) -> torch.Tensor:
    """A copy of `frame` in which some bits, as hypothesis draws them, are other ones."""
    damaged = frame.clone()
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, frame.numel() - 1))
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    return damaged
