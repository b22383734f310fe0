"""Picture of `ncz codec --plot`: ratio against bound."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from ... import kernels
from ...core.codec.container import compress
from ...core.config import Config, MiB
from ...core.errors import BoundError
from ..output import counted
from ..picture import COLORS, GRAY, finish, ink, logarithmic, new_figure, save_figure
from .round_trip import round_trip

_CODERS = "raw", "fixed", "huffman", "rans"
_FACTORS = 2.0 ** np.arange(-6, 7)  # bounds to draw, relative to the one asked for
_MAX_BOUND = {"rel": 0.5, "range": 0.5, "rms": 10.0}  # by mode
_SAMPLE_BYTES = 16 * MiB
_SLOW_SAMPLE_BYTES = MiB  # with the numpy kernels


def draw(file: str | os.PathLike, array: np.ndarray, config: Config) -> None:
    """Write the picture of an array of finite values, for bounds around that of `config`. Raises UnsupportedError."""
    save_figure("--plot", file, partial(figure, measure(array, config)))


def measure(array: np.ndarray, config: Config) -> dict[str, Any]:
    """What the picture shows, ready for JSON. A bound that is too fine has no ratios."""
    mode, value = config.quantizer.mode, config.quantizer.value
    bounds = value * _FACTORS
    bounds = bounds[bounds <= _MAX_BOUND.get(mode, np.inf)]
    part = _sample(array, config)
    rows = [{"bound": float(bound), **_at_bound(part, config, float(bound))} for bound in bounds]
    return {"mode": mode, "bound": value, "values": array.size, "sample": part.size, "rows": rows}


def figure(found: dict[str, Any]) -> Figure:
    """What `measure` found, as a picture."""
    result, [axes] = new_figure(1, height=4)
    rows, bounds = found["rows"], [row["bound"] for row in found["rows"]]

    def column(name: str) -> list[float]:
        return [np.nan if (value := row.get(name)) is None else value for row in rows]

    if not np.isnan(column("entropy")).all():
        # Our coders can exceed this entropy: a predictor uses neighbours, and each frame has its own table.
        axes.plot(bounds, column("entropy"), color=GRAY, linestyle="--", linewidth=2, label="entropy of single codes")
    for coder in _CODERS:
        axes.plot(bounds, column(coder), label=coder, color=COLORS[coder])
    axes.plot(bounds, column("auto"), "o", color=COLORS["auto"], fillstyle="none", markersize=8, label="auto")
    axes.axvline(found["bound"], color=ink(), linestyle=":", zorder=0, label="asked for")
    axes.set(xlabel=f"error bound ({found['mode']})", ylabel="ratio")
    highest = np.nanmax([column(name) for name in (*_CODERS, "auto")], initial=1)
    axes.set_ylim(axes.dataLim.y0 / 1.2, 2 * highest)  # the limit is huge if most codes are equal
    for axis in (axes.xaxis, axes.yaxis):
        logarithmic(axis)
    sample = f", by a sample of {found['sample']:,}" if found["sample"] < found["values"] else ""
    finish(axes, f"ratio of {counted(found['values'], 'value')}{sample}", columns=4)
    return result


def _sample(array: np.ndarray, config: Config) -> np.ndarray:
    """The flat array if it is small; else frames at equal distances."""
    flat = array.reshape(-1)
    most = _SLOW_SAMPLE_BYTES if kernels.cpu_backend().name == "reference" else _SAMPLE_BYTES
    if flat.nbytes <= most:
        return flat
    frame_bytes = config.resolved().transport.frame_bytes_in_effect()
    length, count = frame_bytes // flat.itemsize, max(1, most // frame_bytes)
    starts = np.linspace(0, flat.size - length, count).astype(np.int64)
    return np.concatenate([flat[start : start + length] for start in starts])


def _at_bound(array: np.ndarray, config: Config, bound: float) -> dict[str, float | None]:
    """Ratio of each coder, and ratio at the entropy of single codes; empty if the bound is too fine."""
    quantizer = config.quantizer.model_copy(update={"value": bound})

    def with_coder(coder: str) -> Config:
        return config.model_copy(
            update={"quantizer": quantizer, "entropy": config.entropy.model_copy(update={"coder": coder})}
        )

    try:
        auto = round_trip(array, with_coder("auto"))
    except BoundError:
        return {}
    if auto.entropy_bits is None:
        return {}
    tensor = torch.from_numpy(array)
    ratios = {coder: array.nbytes / compress(tensor, with_coder(coder)).numel() for coder in _CODERS}
    limit = 8 * array.itemsize / auto.entropy_bits if auto.entropy_bits else None
    return ratios | {"auto": auto.ratio, "entropy": limit}
