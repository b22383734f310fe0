"""Data of known statistics: what a codec should be good at, and what it must survive."""

import numpy as np

VERSION = 1
DESCRIPTIONS = {
    "noise": "white Gaussian noise of variance 1",
    "constant": "0.1 everywhere",
    "sparse": "zeros, with Gaussian values at 1 % of the places",
    "ramps": "straight lines from 0 with random slopes, 100 to 10,000 elements each",
    "mixed-scales": "Gaussian blocks of 1 to 20,000 elements, each with its own scale from 1e-6 to 1e3",
    "random-bits": "uniformly random 32-bit patterns that are finite floats",
    "heavy-tailed": "Student's t with 2 degrees of freedom, whose variance is infinite",
}

COUNT = 1 << 22
SEED = 0


def noise(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.standard_normal(count, dtype=np.float32)


def constant(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.full(count, 0.1, np.float32)


def sparse(rng: np.random.Generator, count: int) -> np.ndarray:
    x = np.zeros(count, np.float32)
    places = rng.choice(count, count // 100, replace=False)
    x[places] = noise(rng, len(places))
    return x


def ramps(rng: np.random.Generator, count: int) -> np.ndarray:
    lengths = pieces(rng, count, 100, 10_000)
    within = np.arange(count) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    slopes = 1e-3 * rng.standard_normal(len(lengths))
    return (np.repeat(slopes, lengths) * within).astype(np.float32)


def mixed_scales(rng: np.random.Generator, count: int) -> np.ndarray:
    """The scales' logarithms are uniform, and blocks end anywhere, not only where a codec's blocks end."""
    lengths = pieces(rng, count, 1, 20_000)
    scales = 10 ** rng.uniform(-6, 3, len(lengths))
    return noise(rng, count) * np.repeat(scales, lengths).astype(np.float32)


def random_bits(rng: np.random.Generator, count: int) -> np.ndarray:
    x = rng.integers(1 << 32, size=count, dtype=np.uint32).view(np.float32)
    while (bad := ~np.isfinite(x)).any():
        x[bad] = rng.integers(1 << 32, size=bad.sum(), dtype=np.uint32).view(np.float32)
    return x


def heavy_tailed(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.standard_t(2, count).astype(np.float32)


def pieces(rng: np.random.Generator, count: int, shortest: int, longest: int) -> np.ndarray:
    """Random lengths, uniform from shortest to longest, that add up to count; the last one is cut to fit."""
    lengths = []
    while count > 0:
        lengths.append(min(count, int(rng.integers(shortest, longest + 1))))
        count -= lengths[-1]
    return np.array(lengths)


def make(count: int = COUNT) -> dict[str, np.ndarray]:
    """All sets, float32, (count,), of random bits a quarter of that; each has a generator of its own."""
    functions = {
        "noise": noise,
        "constant": constant,
        "sparse": sparse,
        "ramps": ramps,
        "mixed-scales": mixed_scales,
        "random-bits": random_bits,
        "heavy-tailed": heavy_tailed,
    }
    sizes = {"random-bits": count // 4}
    return {
        name: function(np.random.default_rng((SEED, index)), sizes.get(name, count))
        for index, (name, function) in enumerate(functions.items())
    }
