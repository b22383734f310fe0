"""Printed output of `ncz codec`, and its JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..output import counted
from .round_trip import RoundTrip
from .speed import Speeds


def document(trip: RoundTrip, speeds: Speeds) -> dict[str, Any]:
    """The document that --json prints."""
    return {
        "ratio": trip.ratio,
        "bits_per_value": trip.bits_per_value,
        "entropy_bits": trip.entropy_bits,
        "max_abs_error": trip.max_abs_error,
        "bound_abs": trip.bound_abs,
        "bound_ok": not trip.blocks_over,
        "encode_gbps": speeds.encode,
        "decode_gbps": speeds.decode,
        "memcpy_gbps": speeds.memcpy,
        "coders": trip.coders,
        "backend": trip.codec.backend.name,
    }


def rows(trip: RoundTrip, speeds: Speeds) -> Iterator[tuple[str, str]]:
    """Lines (name, value)."""
    if not trip.array.size:
        yield "bytes", f"{trip.bytes_out}, for an array without elements"
        return
    if trip.lossless_because:
        yield "without loss", f"not quantized, as {trip.lossless_because}"
    yield "ratio", f"{trip.ratio:.4g}"
    yield "bits per value", f"{trip.bits_per_value:.4g}, with headers and steps"
    if trip.entropy_bits is not None:
        passed = ", which a predictor went below" if trip.bits_per_value < trip.entropy_bits else ""
        yield "entropy", f"{trip.entropy_bits:.4g} bits per code, of single codes (order 0){passed}"
    kept = f"outside the bound in {trip.blocks_over}" if trip.blocks_over else "within the bound in each"
    yield "maximum error", f"{trip.max_abs_error:.4g}, {kept} of {counted(trip.bounds.size, 'block')}"
    if math.isfinite(trip.bound_abs):
        yield "largest bound", f"{trip.bound_abs:.4g}"
    for name, counts in (("coders", trip.coders), ("predictors", trip.predictors)):
        for value, frames in counts.items():
            bar = "\N{FULL BLOCK}" * max(1, round(20 * frames / len(trip.frames)))
            yield name, f"{value:8}{frames:6,} of {counted(len(trip.frames), 'frame')}  {bar}"
            name = ""
    link = 8000 / trip.codec.coding.costs.link
    yield "link", f"{link:g} Gbit/s, which coder and predictor auto reckon with"
    for name in ("encode", "decode", "measuring"):
        gbps = getattr(speeds, name)
        yield name, f"{gbps:.3g} GB/s, {gbps / speeds.memcpy:.2f} of memcpy"
    yield "memcpy", f"{speeds.memcpy:.3g} GB/s, all on one core"
    yield "kernels", trip.codec.backend.name
