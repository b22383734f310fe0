"""Ratio against bound, as a picture: `ncz codec --plot`."""

from __future__ import annotations

import os

import numpy as np
import torch

from ... import kernels
from ...core.codec.container import compress
from ...core.config import Config, MiB
from ...core.errors import BoundError
from ..output import save_figure
from .round_trip import round_trip

_CODERS = ("raw", "fixed", "huffman", "rans")
_FACTORS = 2.0 ** np.arange(-6, 7)  # so far to both sides of the bound that is asked for
_LARGEST = {"rel": 0.5, "range": 0.5, "rms": 10.0}  # what a mode allows, and still makes sense
_SAMPLE_BYTES = 16 * MiB
_SLOW_SAMPLE_BYTES = MiB  # for the numpy kernels


def draw(file: str | os.PathLike, array: np.ndarray, config: Config) -> None:
    """Write the picture of an array with finite elements, for bounds around that of `config`. Raises
    UnsupportedError."""
    from matplotlib.figure import Figure

    mode, value = config.quantizer.mode, config.quantizer.value
    bounds = value * _FACTORS
    bounds = bounds[bounds <= _LARGEST.get(mode, np.inf)]
    part = _sample(array, config)
    ratios, limits = zip(*(_at_bound(part, config, float(bound)) for bound in bounds))

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(bounds, limits, color="0.6", linestyle="--", label="limit of order-0 entropy")
    for coder in _CODERS:
        axes.plot(bounds, [at_bound.get(coder, np.nan) for at_bound in ratios], label=coder)
    auto = [at_bound.get("auto", np.nan) for at_bound in ratios]
    axes.plot(bounds, auto, "ko", fillstyle="none", label="auto")
    axes.axvline(value, color="0.8", zorder=0)
    axes.set(xscale="log", yscale="log", xlabel=f"error bound ({mode})", ylabel="ratio")
    axes.set_ylim(top=2 * np.nanmax([list(at_bound.values()) for at_bound in ratios if at_bound], initial=1))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(f"{array.size:,} values" + (f", by a sample of {part.size:,}" if part.size < array.size else ""))
    axes.legend()
    save_figure("--plot", file, figure)


def _sample(array: np.ndarray, config: Config) -> np.ndarray:
    """The array itself, flat, or frames at even distances."""
    flat = array.reshape(-1)
    most = _SLOW_SAMPLE_BYTES if kernels.cpu_backend().name == "reference" else _SAMPLE_BYTES
    if flat.nbytes <= most:
        return flat
    frame_bytes = config.resolved().transport.frame_bytes_in_effect()
    length, count = frame_bytes // flat.itemsize, max(1, most // frame_bytes)
    starts = np.linspace(0, flat.size - length, count).astype(np.int64)
    return np.concatenate([flat[start : start + length] for start in starts])


def _at_bound(array: np.ndarray, config: Config, bound: float) -> tuple[dict[str, float], float]:
    """The ratio with each coder, and what the entropy allows; none where the bound is too fine for codes."""
    quantizer = config.quantizer.model_copy(update={"value": bound})

    def with_coder(coder: str) -> Config:
        return config.model_copy(
            update={"quantizer": quantizer, "entropy": config.entropy.model_copy(update={"coder": coder})}
        )

    try:
        auto = round_trip(array, with_coder("auto"))
    except BoundError:
        return {}, np.nan
    if auto.entropy_bits is None:
        return {}, np.nan
    tensor = torch.from_numpy(array)
    ratios = {coder: array.nbytes / compress(tensor, with_coder(coder)).numel() for coder in _CODERS}
    limit = 8 * array.itemsize / auto.entropy_bits if auto.entropy_bits else np.nan
    return ratios | {"auto": auto.ratio}, limit
