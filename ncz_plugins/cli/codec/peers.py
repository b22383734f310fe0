"""Other compressors beside ours: `ncz codec --compare` and benchmarks/codec_table.py.

The lossless ones get our codes (the floats where there are none), the lossy ones the floats and the bound. All run on
one thread, with the settings that their users normally take. Each is imported when it is used;
`pip install 'ncz_plugins[compare]'` installs all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...core.codec.tensor_codec import QuantizingCodec
from . import Trial, chunk_errors, codes_of, largest_of_blocks, largest_share
from .speed import Speeds, speeds

# () -> compressed, and compressed -> array; both on one thread.
Pair = tuple[Callable[[], Any], Callable[[Any], np.ndarray]]


@dataclass(frozen=True)
class Peer:
    """One library.

    Attributes:
        name: as its users call it.
        module: what is imported.
        settings: how it is used here, in a few words.
        lossy: whether it takes floats and an absolute error bound, where 0 means lossless.
        start: takes a C-contiguous array and, if lossy, the bound.
    """

    name: str
    module: str
    settings: str
    lossy: bool
    start: Callable[..., Pair]


@dataclass(frozen=True)
class Result:
    """What a peer did to an array. Its speed is in GB/s of the array's own bytes.

    Attributes:
        of_bound: the largest error as a share of the bound of its block.
    """

    peer: Peer
    ratio: float
    bits_per_value: float
    encode: float
    decode: float
    max_abs_error: float
    of_bound: float


def missing() -> list[Peer]:
    """Those that are not installed."""
    return [peer for peer in PEERS if find_spec(peer.module) is None]


def compare(trial: Trial) -> tuple[Speeds, list[Result]]:
    """All that are installed, on the array of `trial`, which has an element; and our own speed in the same run."""
    absent = missing()
    kept, runs = {}, {}
    for peer in PEERS:
        if peer in absent:
            continue
        compress, decompress = peer.start(*_floats(trial)) if peer.lossy else peer.start(_codes(trial))
        data = compress()
        kept[peer] = len(data), _errors(trial, decompress(data)) if peer.lossy else trial.errors
        runs[peer.name, "encode"] = compress
        runs[peer.name, "decode"] = partial(decompress, data)
    own, gbps = speeds(trial, runs)
    results = [
        Result(
            peer=peer,
            ratio=trial.array.nbytes / size,
            bits_per_value=8 * size / trial.array.size,
            encode=gbps[peer.name, "encode"],
            decode=gbps[peer.name, "decode"],
            max_abs_error=float(errors.max()),
            of_bound=largest_share(errors, trial.bounds),
        )
        for peer, (size, errors) in kept.items()
    ]
    return own, results


def _codes(trial: Trial) -> np.ndarray:
    codec = trial.codec
    if not isinstance(codec, QuantizingCodec):
        return trial.array
    return np.concatenate([codes_of(codec, index) for index in range(codec.layout.frames)])


def _floats(trial: Trial) -> tuple[np.ndarray, float]:
    """What the lossy ones get, float32 or float64, and their bound.

    Where blocks have bounds of their own, it is the values in units of their bound, and 1.
    """
    x = np.atleast_1d(trial.array).astype(_at_least_float32(trial), copy=False)
    if not np.isfinite(trial.bounds).all():
        return x, 0.0
    return (x.reshape(-1) / _unit(trial), 1.0) if trial.bounds.size > 1 else (x, trial.bound_abs)


def _errors(trial: Trial, decoded: np.ndarray) -> np.ndarray:
    """The largest of each block, of what was made of `_floats`."""
    decoded = decoded.reshape(-1)
    if trial.bounds.size > 1 and np.isfinite(trial.bounds).all():
        decoded = decoded * _unit(trial)
    return largest_of_blocks(chunk_errors(trial.array.reshape(-1), decoded), trial.codec.layout, trial.block)


def _unit(trial: Trial) -> np.ndarray:
    """The bound of each element, or 1 where that is 0."""
    bounds = trial.bounds.astype(_at_least_float32(trial))
    lengths = trial.codec.layout.block_lengths(trial.block)
    return np.repeat(np.where(bounds > 0, bounds, 1), lengths)


def _at_least_float32(trial: Trial) -> np.dtype:
    return np.promote_types(trial.array.dtype, np.float32)


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


PEERS = (
    Peer("zstd", "zstandard", "level 3, our codes", False, _zstd),
    Peer("lz4", "lz4", "level 0, our codes", False, _lz4),
    Peer("blosc2", "blosc2", "byte shuffle and zstd level 5, our codes", False, _blosc2),
    Peer("zfp", "zfpy", "fixed accuracy, the floats", True, _zfp),
    Peer("SZ3", "pysz", "interpolation or Lorenzo, the floats", True, _sz3),
)


def _array(data: bytes, like: np.ndarray) -> np.ndarray:
    return np.frombuffer(data, dtype=like.dtype).reshape(like.shape)


def _up_to_4d(x: np.ndarray) -> np.ndarray:
    """What zfp and SZ3 take; leading axes become one."""
    return x.reshape(-1, *x.shape[-3:]) if x.ndim > 4 else x
