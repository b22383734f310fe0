"""Other compressors, compared with ours on one array.

    .venv/bin/python -m benchmarks.compressors gradients.npy [--bound range:1e-4] [--config ncclz.yaml]

Lossless libraries compress our codes (the floats if there are no codes); lossy ones compress the floats within the
bound. All run on one thread with common settings. Each is imported when it is used.
`pip install 'ncz_plugins[compare]'` installs all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from rich.table import Table

from ncz_plugins.cli.codec.array_file import read_array
from ncz_plugins.cli.codec.block_errors import largest_of_blocks, largest_share, step_errors
from ncz_plugins.cli.codec.round_trip import RoundTrip, codes_of, round_trip
from ncz_plugins.cli.codec.speed import Speeds, interleaved, runs
from ncz_plugins.cli.output import add_row, table, unbroken_console
from ncz_plugins.cli.settings import config_with, parse_bound
from ncz_plugins.core.codec.tensor_codec import QuantizingCodec
from ncz_plugins.core.errors import NczError, UnsupportedError

# Compress: () -> bytes. Decompress: bytes -> array. Both run on one thread.
Pair = tuple[Callable[[], Any], Callable[[Any], np.ndarray]]


@dataclass(frozen=True)
class Library:
    """Another compressor.

    Attributes:
        name: name of the compressor.
        module: Python module to import.
        settings: settings used here, in a few words.
        lossy: whether it compresses floats within an absolute error bound (0 means lossless), rather than our codes.
        start: takes a C-contiguous array and, if lossy, the bound; returns the functions to compress and decompress.
    """

    name: str
    module: str
    settings: str
    lossy: bool
    start: Callable[..., Pair]


@dataclass(frozen=True)
class LibraryResult:
    """Result of a library on one array.

    Attributes:
        library: the library.
        ratio: bytes of the array over compressed bytes.
        bits_per_value: compressed bits per value.
        encode, decode: speed in GB/s of the array's bytes.
        max_abs_error: largest absolute error.
        of_bound: largest error as a share of the bound of its block.
    """

    library: Library
    ratio: float
    bits_per_value: float
    encode: float
    decode: float
    max_abs_error: float
    of_bound: float


def main() -> None:
    """Compare on the array that the options name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE.npy", help="float16, float32 or float64, of any shape")
    parser.add_argument("--bound", metavar="MODE:VALUE", help="error bound: rms:0.25, rel:1e-3, range:1e-4, abs:0.01")
    parser.add_argument("--config", metavar="FILE", help="take the settings from this file; --bound overrides it")
    options = parser.parse_args()
    try:
        array = read_array(options.file)
        if not array.size:
            raise UnsupportedError(f"{options.file}: holds no values")
        trip = round_trip(array, config_with(options.config, {"quantizer": parse_bound(options.bound)}))
        own, others = compare(trip)
    except NczError as error:
        parser.error(str(error))
    console = unbroken_console()
    console.print(comparison(trip, own, others))
    for library in missing():
        console.print(f"{library.name} is not installed: pip install 'ncz_plugins[compare]'", markup=False)


def missing() -> list[Library]:
    """The libraries that are not installed."""
    return [library for library in LIBRARIES if find_spec(library.module) is None]


def compare(trip: RoundTrip) -> tuple[Speeds, list[LibraryResult]]:
    """Our speed on the array of `trip`, which must not be empty, and results of all installed libraries.

    Our codec and the libraries take turns.
    """
    absent = missing()
    kept, others = {}, {}
    for library in LIBRARIES:
        if library in absent:
            continue
        compress, decompress = library.start(*_floats(trip)) if library.lossy else library.start(_codes(trip))
        data = compress()
        kept[library] = len(data), _errors(trip, decompress(data)) if library.lossy else trip.errors
        others[library.name, "encode"] = compress
        others[library.name, "decode"] = partial(decompress, data)
    ours, nbytes = runs(trip)
    seconds = interleaved(ours | others)
    gbps = {name: 1e-9 * trip.array.nbytes / seconds[name] for name in others}
    results = [
        LibraryResult(
            library=library,
            ratio=trip.array.nbytes / size,
            bits_per_value=8 * size / trip.array.size,
            encode=gbps[library.name, "encode"],
            decode=gbps[library.name, "decode"],
            max_abs_error=float(errors.max()),
            of_bound=largest_share(errors, trip.bounds),
        )
        for library, (size, errors) in kept.items()
    ]
    return Speeds.of(nbytes, seconds), results


def _codes(trip: RoundTrip) -> np.ndarray:
    codec = trip.codec
    if not isinstance(codec, QuantizingCodec):
        return trip.array
    return np.concatenate([codes_of(codec, index) for index in range(codec.layout.frames)])


def _floats(trip: RoundTrip) -> tuple[np.ndarray, float]:
    """Input of lossy libraries, float32 or float64, and its absolute bound.

    If blocks have different bounds, values are divided by the bound of their block, and the absolute bound is 1.
    """
    x = np.atleast_1d(trip.array).astype(_at_least_float32(trip), copy=False)
    if not np.isfinite(trip.bounds).all():
        return x, 0.0
    return (x.reshape(-1) / _unit(trip), 1.0) if trip.bounds.size > 1 else (x, trip.bound_abs)


def _errors(trip: RoundTrip, decoded: np.ndarray) -> np.ndarray:
    """Largest error of each block, [blocks], of the decompressed result of `_floats`."""
    decoded = decoded.reshape(-1)
    if trip.bounds.size > 1 and np.isfinite(trip.bounds).all():
        decoded = decoded * _unit(trip)
    return largest_of_blocks(step_errors(trip.array.reshape(-1), decoded), trip.codec.layout, trip.block)


def _unit(trip: RoundTrip) -> np.ndarray:
    """Bound of each element; 1 where the bound is 0."""
    bounds = trip.bounds.astype(_at_least_float32(trip))
    lengths = trip.codec.layout.block_lengths(trip.block)
    return np.repeat(np.where(bounds > 0, bounds, 1), lengths)


def _at_least_float32(trip: RoundTrip) -> np.dtype:
    return np.promote_types(trip.array.dtype, np.float32)


def _zstd(x: np.ndarray) -> Pair:
    import zstandard

    compressor, decompressor = zstandard.ZstdCompressor(), zstandard.ZstdDecompressor()
    return lambda: compressor.compress(x), lambda data: _array(decompressor.decompress(data), x)


def _lz4(x: np.ndarray) -> Pair:
    import lz4.frame

    return lambda: lz4.frame.compress(x), lambda data: _array(lz4.frame.decompress(data), x)


def _blosc2(x: np.ndarray) -> Pair:
    import blosc2

    def compress():
        return blosc2.compress2(x, typesize=x.itemsize, nthreads=1)

    return compress, lambda data: _array(blosc2.decompress2(data, nthreads=1), x)


def _zfp(x: np.ndarray, bound: float) -> Pair:
    import zfpy

    # Without a tolerance, zfp is reversible.
    settings = {"tolerance": bound} if bound else {}
    return lambda: zfpy.compress_numpy(_up_to_4d(x), **settings), zfpy.decompress_numpy


def _sz3(x: np.ndarray, bound: float) -> Pair:
    from pysz import sz, szAlgorithm, szConfig, szErrorBoundMode

    x = _up_to_4d(x)
    config = szConfig()
    config.errorBoundMode = szErrorBoundMode.ABS
    config.absErrorBound = bound
    if not bound:
        config.cmprAlgo = szAlgorithm.LOSSLESS
    return lambda: sz.compress(x, config)[0], lambda data: sz.decompress(data, x.dtype, x.shape)[0]


LIBRARIES = (
    Library("zstd", "zstandard", "level 3, our codes", False, _zstd),
    Library("lz4", "lz4", "level 0, our codes", False, _lz4),
    Library("blosc2", "blosc2", "byte shuffle and zstd level 5, our codes", False, _blosc2),
    Library("zfp", "zfpy", "fixed accuracy, the floats", True, _zfp),
    Library("SZ3", "pysz", "interpolation or Lorenzo, the floats", True, _sz3),
)


def _array(data: bytes, like: np.ndarray) -> np.ndarray:
    return np.frombuffer(data, dtype=like.dtype).reshape(like.shape)


def _up_to_4d(x: np.ndarray) -> np.ndarray:
    """`x` with at most 4 dimensions, as zfp and SZ3 require: leading axes are merged."""
    return x.reshape(-1, *x.shape[-3:]) if x.ndim > 4 else x


def comparison(trip: RoundTrip, speeds: Speeds, others: list[LibraryResult]) -> Table:
    """Table with a line for our codec and one for each other compressor."""
    notes = [f"{r.library.name}: {r.library.settings}" for r in others]
    numbers = ("ratio", "bits/value", "encode", "decode", "max error", "of bound")
    found = table("", *numbers, numbers=numbers, no_wrap=True)
    found.caption, found.caption_justify = "; ".join(notes), "left"
    own = (trip.ratio, trip.bits_per_value, speeds.encode, speeds.decode)
    rows = [("ncz", *own, trip.max_abs_error, trip.of_bound)]
    for r in others:
        rows.append((r.library.name, r.ratio, r.bits_per_value, r.encode, r.decode, r.max_abs_error, r.of_bound))
    for name, ratio, bits, encode, decode, error, of_bound in rows:
        speed = f"{encode:.3g} GB/s", f"{decode:.3g} GB/s"
        add_row(found, name, f"{ratio:.4g}", f"{bits:.4g}", *speed, f"{error:.4g}", f"{of_bound:.3f}")
    return found


if __name__ == "__main__":
    main()
