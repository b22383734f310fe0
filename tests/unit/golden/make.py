"""Writes the golden files: what must never change without a new frame version.

    python tests/unit/golden/make.py

`codes.npz` holds codes and, for each coder and predictor, the frame they give; `floats.npz` holds floats, inverse
steps, the codes (rounded to nearest, and at random) and the statistics they give. `earlier.npz`, which this does not
write, holds frames of these codes that were written once: none are any more, but all are read. Run it again only
together with a change of docs/reference/wire-format.md. The numbers come from a formula: no library's random numbers
are pinned.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from ncz_plugins.kernels.format import CHUNK, ON_GPUS, Coder, Coding, Noise, Predictor, blocks_of
from ncz_plugins.kernels.reference import frames, symbols, values

FOLDER = Path(__file__).parent
CODERS = (Coder.RAW, Coder.FIXED, Coder.PLANES, Coder.HUFFMAN, Coder.HUFFMAN32, Coder.RANS, Coder.AUTO)
NOISE = Noise(seed=2**40 + 7, call=3, shift=2**31 + 5, first=10)


def noise(count: int) -> np.ndarray:
    """uint32 without visible order: a multiplicative congruential sequence's high bits (Knuth, TAOCP 3.3.4)."""
    state = np.uint64(12345)
    values = np.empty(count, dtype=np.uint32)
    with np.errstate(over="ignore"):
        for i in range(count):
            state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
            values[i] = state >> np.uint64(32)
    return values


def codes() -> dict[str, np.ndarray]:
    every_width = np.concatenate([noise(32) >> np.uint32(32 - w) if w else np.zeros(32, np.uint32) for w in range(33)])
    return {
        "empty": np.zeros(0, np.int32),
        "one": np.array([-3], np.int32),
        "extremes": np.array([2**31 - 1, -(2**31), 0, -1, 1], np.int32),
        "every_width": symbols.unpredict(every_width, Predictor.NONE),
        "bytes": (noise(100) % 200).astype(np.int32) - 100,
        "rising": np.arange(1000, 1300, dtype=np.int32) * 3,
        "two_chunks": (noise(CHUNK + 37) % 15).astype(np.int32) - 7,
        "sparse": np.where(noise(CHUNK + 37) % 20, 0, noise(CHUNK + 37) >> 20).astype(np.int32),
        "two_pages": (noise(4 * CHUNK + 300) % 100 > 97).astype(np.int32),
        "gaps": np.where(noise(2 * CHUNK + 300) % 60, 0, (noise(2 * CHUNK + 300) >> 26).astype(np.int32) - 32).astype(
            np.int32
        ),
    }


def floats() -> dict[str, np.ndarray]:
    uniform = noise(CHUNK + 100).astype(np.float64) / 2**31 - 1
    special = uniform[:200].astype(np.float32)
    special[::20] = [np.nan, np.inf, -np.inf, 0, -0.0, 0.5, 1.5, 2.5, 1e-40, 3e38]
    return {"float32": uniform.astype(np.float32), "float64": uniform**3, "special": special}


def frame_name(name: str, coding: Coding) -> str:
    return f"{name}-{coding.coder.name}-{coding.predictor.name}".lower()


def codes_and_frames() -> dict[str, np.ndarray]:
    arrays = codes()
    for name, array in codes().items():
        for coder, predictor in itertools.product(CODERS, Predictor):
            coding = Coding(coder, predictor)
            frame = frames.encode_codes(array, coding, on_gpus=coder in ON_GPUS.values())
            arrays[frame_name(name, coding)] = np.frombuffer(frame, np.uint8)
    return arrays


def floats_and_codes() -> dict[str, np.ndarray]:
    arrays = {}
    for name, x in floats().items():
        inverse_steps = (np.arange(blocks_of(x.size)) * 30 + 20.3).astype(x.dtype)
        arrays[name] = x
        arrays[f"{name}-inverse_steps"] = inverse_steps
        arrays[f"{name}-codes"] = values.quantize(x, inverse_steps)
        arrays[f"{name}-noisy_codes"] = values.quantize(x, inverse_steps, NOISE)
        for statistic, numbers in zip(("lowest", "highest", "squares"), values.block_statistics(x)):
            arrays[f"{name}-{statistic}"] = numbers
    return arrays


if __name__ == "__main__":
    np.savez_compressed(FOLDER / "codes.npz", **codes_and_frames())
    np.savez_compressed(FOLDER / "floats.npz", **floats_and_codes())
