"""Bytes of a patch where a few elements of a tensor changed, by dtype, beside XOR, a shuffle of bytes and zstd.

    .venv/bin/python -m benchmarks.weight_dtypes

Writes benchmarks/results/weight-dtypes.json and the table of docs/results/weights.md. Needs the laboratory's zstandard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import zstandard
from torch import Tensor

from benchmarks.pages import put_into, write_figures
from benchmarks.performance import rows_of
from benchmarks.weights import PAGE
from ncz_plugins import make_patch

MARKS = "<!-- dtypes -->", "<!-- end of dtypes -->"
ELEMENTS = 1 << 20
SHARES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1)


def tensors(share: float) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, old and new version of a tensor of each kind. `share` of its elements have changed, at random places."""
    random = torch.Generator().manual_seed(0)
    at = torch.randperm(ELEMENTS, generator=random)[: max(1, round(share * ELEMENTS))]
    normal = 0.02 * torch.randn(ELEMENTS, generator=random, dtype=torch.float64)
    moves = torch.zeros_like(normal)
    moves[at] = 1e-5 * torch.randn(len(at), generator=random, dtype=torch.float64)
    units = torch.zeros(ELEMENTS, dtype=torch.int8)
    units[at] = 1

    # Weights that move by one unit.
    integers = torch.randint(-127, 127, (ELEMENTS,), generator=random, dtype=torch.int8)
    fp8 = normal.to(torch.float8_e4m3fn)
    yield "float8_e4m3fn", fp8, (fp8.view(torch.int8) + units).view(fp8.dtype)
    yield "int8", integers, integers + units
    bf16 = normal.bfloat16()
    moved = (bf16.view(torch.int16) + units).view(bf16.dtype)
    yield "bfloat16", bf16, moved
    yield "bfloat16 held as float32", bf16.float(), moved.float()

    # Packed weights, of which one of eight in an integer changes by its lowest bit.
    packed = torch.randint(-(1 << 31), (1 << 31) - 1, (ELEMENTS,), generator=random, dtype=torch.int64).int()
    nibble = 4 * torch.randint(0, 8, (ELEMENTS,), generator=random, dtype=torch.int32)
    yield "4-bit in int32", packed, packed ^ (units.int() << nibble)

    yield "float64", normal, normal + moves
    yield "float64 that holds float32", normal.float().double(), (normal.float() + moves.float()).double()
    counters = torch.randint(0, 1000, (ELEMENTS,), generator=random)
    yield "int64 counters", counters, counters + units


def ours(old: Tensor, new: Tensor) -> int:
    """Bytes of a patch, its index included."""
    return len(make_patch({"w": new}, {"w": old}))


def zstd(old: Tensor, new: Tensor) -> int:
    """Bytes of XOR, shuffled so that equal bytes of all elements stand together, at zstd's usual level."""
    changed = (new.view(torch.uint8) ^ old.view(torch.uint8)).view(-1, new.element_size())
    return len(zstandard.ZstdCompressor(level=3).compress(changed.t().contiguous().numpy().tobytes()))


def measure() -> list[dict[str, Any]]:
    """Bytes of both, for each kind of tensor and share of elements."""
    return [
        {"tensor": name, "share": share, "ours": ours(old, new), "zstd": zstd(old, new)}
        for share in SHARES
        for name, old, new in tensors(share)
    ]


def markdown(found: list[dict[str, Any]]) -> str:
    """A row for each kind of tensor: bytes of ours, and of zstd."""
    rows: dict[str, list[str]] = {}
    for each in found:
        rows.setdefault(each["tensor"], []).append(f"{each['ours']:,}, {each['zstd']:,}")
    shares = dict.fromkeys(each["share"] for each in found)
    headings = ["one element" if share * ELEMENTS < 2 else f"{100 * share:g} %" for share in shares]
    return rows_of(["tensor", *headings], ([name, *cells] for name, cells in rows.items()))


def main() -> None:
    found, command = measure(), ["python", "-m", "benchmarks.weight_dtypes"]
    write_figures("weight-dtypes.json", command, {"zstandard": zstandard.__version__}, None, found=found)
    put_into(PAGE, markdown(found), MARKS)
    print(markdown(found))


if __name__ == "__main__":
    main()
