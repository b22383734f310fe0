"""Writes the inputs that fuzzing begins with: the golden files, and small frames of every coder.

An input is a target's control bytes (`Control` in decode.cpp and encode.cpp), then a frame, codes or floats.
"""

from __future__ import annotations

import itertools
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ncz_plugins import kernels
from ncz_plugins.kernels.format import Coder, Coding, Predictor, max_frame_bytes

GOLDEN = Path(__file__).resolve().parent.parent / "unit" / "golden"
MOST_BYTES = 2000  # of a frame: mutations of large ones are slow and seldom hit what matters
FUNCTIONS, DTYPES, NO_REPAIR, ALL_REPAIRS = 5, 4, 0, 3  # control bytes of the target decode
CODERS = (Coder.RAW, Coder.FIXED, Coder.HUFFMAN, Coder.RANS)
PREDICTORS = (Predictor.NONE, Predictor.DELTA)
FLOATS, INT8, INT16, INT32 = range(4)  # kinds of input of the target encode
STEP_ONE = 127  # its control byte; one more is half the step


def write(folder: Path) -> None:
    """A folder of seeds for each target, `folder`/decode and `folder`/encode, instead of what is in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    for target, inputs in (("decode", decode_inputs()), ("encode", encode_inputs())):
        (folder / target).mkdir(parents=True)
        for number, data in enumerate(sorted(set(inputs))):
            (folder / target / f"{number:04}").write_bytes(data)


def decode_inputs() -> Iterator[bytes]:
    """The golden frames as they are, and small frames with all repairs; for one function after another."""
    frames = [(frame, NO_REPAIR) for frame in golden_frames()] + [(frame, ALL_REPAIRS) for frame in small_frames()]
    for i, ((count, frame), repair) in enumerate(frames):
        if len(frame) <= MOST_BYTES:
            control = (i % FUNCTIONS, i // 3 % DTYPES, repair, i % 2, i // FUNCTIONS % 5, i // 7 % 3)
            yield struct.pack("<H6B", count, *control) + frame


def golden_frames() -> Iterator[tuple[int, bytes]]:
    arrays = np.load(GOLDEN / "codes.npz")
    for name in arrays.files:
        if "-" in name:  # codes-coder-predictor
            yield arrays[name.split("-")[0]].size, arrays[name].tobytes()


def small_frames() -> Iterator[tuple[int, bytes]]:
    """Those which are as short as the coder allows, each also with a checksum."""
    backend = kernels.load("reference")
    for codes, (coder, predictor) in itertools.product(small_codes(), itertools.product(CODERS, PREDICTORS)):
        frame = torch.empty(max_frame_bytes(codes.size), dtype=torch.uint8)
        frame = frame[: backend.encode_codes(torch.from_numpy(codes), Coding(coder, predictor), frame)]
        if frame[5] == coder:  # not written as RAW, as it would be larger
            yield codes.size, frame.numpy().tobytes()
            backend.seal(frame)
            yield codes.size, frame.numpy().tobytes()


def small_codes() -> Iterator[np.ndarray]:
    """Of few values, of many, nearly all zero, with outliers. RANS takes 100 bytes and more: it needs longer ones."""
    random = np.random.default_rng(1)
    for count in (1, 37, 250):
        yield random.integers(-3, 4, count, dtype=np.int32)
        yield random.normal(0, 300, count).astype(np.int32)
    for count in (300, 4100, 16500):
        sparse = (random.random(count) < 8 / count).astype(np.int32)
        yield sparse
        yield sparse * random.integers(-(2**31), 2**31, count).astype(np.int32)


def encode_inputs() -> Iterator[bytes]:
    """Numbers of every kind with each coder and predictor, in frames of up to two pages."""
    random = np.random.default_rng(1)
    special = np.load(GOLDEN / "floats.npz")["special"]
    with np.errstate(over="ignore"):
        floats = [special.astype(dtype) for dtype in (np.float32, np.float16, np.float64)]
    numbers = [  # kind, dtype, themselves
        (FLOATS, 0, floats[0]),
        (FLOATS, 1, floats[0]),  # their halves as bf16
        (FLOATS, 2, floats[1]),
        (FLOATS, 3, floats[2]),
        (INT8, 0, random.integers(-3, 4, 300, dtype=np.int8)),
        (INT8, 0, (random.random(300) < 0.03).astype(np.int8)),
        (INT16, 0, random.normal(0, 2000, 300).astype(np.int16)),
        (INT32, 0, random.integers(-(2**31), 2**31, 100).astype(np.int32)),
        (INT32, 0, np.arange(100, dtype=np.int32) * 1000),
    ]
    for i, ((kind, dtype, data), coder, predictor) in enumerate(itertools.product(numbers, range(5), range(3))):
        count = (data.size, 1, 4097, 17000, 33)[(i + i // 15) % 5]
        control = struct.pack("<H6B", count, kind, dtype, coder, predictor, i % 2, i // 2 % 2)
        costs = bytes([89, 24, 22, 42, 30, 55]) if i % 4 else random.bytes(6)
        yield control + costs + bytes([STEP_ONE + 4, i % 2]) + struct.pack("<QQ", 2**40 + 7, i) + data.tobytes()
