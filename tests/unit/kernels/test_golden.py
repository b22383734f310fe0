"""The bytes of frames, and the numbers in them, are what they were when golden/make.py last ran."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from repository import GOLDEN

from ncz_plugins import kernels
from ncz_plugins.kernels.format import ON_GPUS, Coder, Coding, Noise, Predictor, max_frame_bytes
from ncz_plugins.kernels.reference import ReferenceBackend

CODES = dict(np.load(GOLDEN / "codes.npz"))
FLOATS = dict(np.load(GOLDEN / "floats.npz"))
EARLIER = dict(np.load(GOLDEN / "earlier.npz"))
FRAMES = [name for name in CODES if "-" in name]  # codes-coder-predictor
OF_GPUS = [name for name in FRAMES if Coder[name.split("-")[1].upper()] in ON_GPUS.values()]
STATUSES = kernels.statuses()


def coders_of(frames: Iterable[str]) -> list[str]:
    """The coders of frames, each once."""
    return list(dict.fromkeys(name.split("-")[1] for name in frames))


@pytest.fixture(params=list(STATUSES))
def backend(request):
    if STATUSES[request.param] != "ok":
        pytest.skip(STATUSES[request.param])
    return kernels.load(request.param)


OF_FRAMES = (Coder.SPLIT, Coder.SPARSE)  # those that consist of frames of other coders


def test_each_coder_and_predictor_is_pinned():
    pinned = {tuple(name.split("-")[1:]) for name in FRAMES}
    assert pinned == {(c.name.lower(), p.name.lower()) for c in Coder if c not in OF_FRAMES for p in Predictor}


@pytest.mark.parametrize("coder", coders_of(each for each in FRAMES if each not in OF_GPUS))
def test_frames(backend, coder):
    check_all(backend, coder)


@pytest.mark.parametrize("coder", coders_of(OF_GPUS))
def test_frames_of_gpus(coder):
    check_all(ReferenceBackend(on_gpus=True), coder)


@pytest.mark.parametrize("name", EARLIER)
def test_frames_that_were_written_once_are_read(name):
    """Those of mostly zeros, of which HUFFMAN32's letters were tokens."""
    codes, frame = torch.from_numpy(CODES[name.split("-")[0]]), torch.from_numpy(EARLIER[name])
    decoded = torch.empty_like(codes)
    ReferenceBackend(on_gpus=True).decode_codes(frame, decoded)
    assert decoded.tolist() == codes.tolist() and frame.tolist() != CODES[name].tolist()


def check_all(backend, coder: str) -> None:
    """Check the frames of a coder, of all kinds of codes and with all predictors."""
    for name in FRAMES:
        kind, of, predictor = name.split("-")
        if of == coder:
            check(backend, name, kind, Coding(Coder[coder.upper()], Predictor[predictor.upper()]))


def check(backend, name: str, kind: str, coding: Coding) -> None:
    codes, golden = torch.from_numpy(CODES[kind]), torch.from_numpy(CODES[name])
    frame = torch.empty(max_frame_bytes(codes.numel()), dtype=torch.uint8)
    written = backend.encode_codes(codes, coding, frame)
    assert frame[:written].tolist() == golden.tolist(), name
    decoded = torch.empty_like(codes)
    backend.decode_codes(golden, decoded)
    assert decoded.tolist() == codes.tolist(), name


@pytest.mark.parametrize("name", [name for name in FLOATS if "-" not in name])
def test_quantizer_and_statistics(backend, name):
    golden = {key.partition("-")[2]: torch.from_numpy(value) for key, value in FLOATS.items() if key.startswith(name)}
    x = golden[""]
    codes = torch.empty(x.numel(), dtype=torch.int32)
    backend.quantize(x, golden["inverse_steps"], codes)
    assert torch.equal(codes, golden["codes"])
    backend.quantize(x, golden["inverse_steps"], codes, Noise(seed=2**40 + 7, call=3, shift=2**31 + 5, first=10))
    assert torch.equal(codes, golden["noisy_codes"])
    for name, statistic in zip(("lowest", "highest", "squares"), backend.block_statistics(x)):
        assert torch.equal(statistic, golden[name])
