"""What is passed to a compiled kernel fits it, or is refused before anything is read or written."""

from __future__ import annotations

import ast
import re

import numpy as np
import pytest
import torch
from repository import ROOT

from ncz_plugins import kernels
from ncz_plugins.kernels.backend import Sum
from ncz_plugins.kernels.cuda import CudaBackend
from ncz_plugins.kernels.cuda.arguments import inputs_table, require_on
from ncz_plugins.kernels.format import (
    OCTET,
    Coder,
    Coding,
    Combination,
    Predictor,
    Rows,
    StepRule,
    WrongTensor,
    blocks_of,
    max_frame_bytes,
    packed_bytes,
    rate_blocks_of,
)

COUNT, BITS = 700, 4
BLOCKS, ROWS = blocks_of(COUNT), Rows.of(COUNT, 2, 350)
RATE_BLOCKS = 2 * rate_blocks_of(350)
CODING = Coding(Coder.FIXED, Predictor.NONE)
RULE = StepRule(4, 1.0, 2.0, 2.0, 1.0, 2.0, 1e-37, 1e-6, 3e38, 0.0, 1e-38, 1e38)


def floats() -> torch.Tensor:
    return torch.ones(COUNT)


def steps() -> torch.Tensor:
    return torch.ones(BLOCKS)


def codes() -> torch.Tensor:
    return torch.ones(COUNT, dtype=torch.int32)


def room() -> torch.Tensor:
    return torch.zeros(max_frame_bytes(COUNT), dtype=torch.uint8)


def frame() -> torch.Tensor:
    written = room()
    return written[: kernels.load("portable").encode_codes(codes(), CODING, written)]


def magnitudes() -> torch.Tensor:
    return torch.ones(RATE_BLOCKS, dtype=torch.bfloat16)


def packed(blocks: int = RATE_BLOCKS, bits: int = BITS) -> torch.Tensor:
    return torch.zeros(blocks * packed_bytes(bits), dtype=torch.uint8)


# Of each function of the interface: arguments that fit. Whatever is a tensor is then replaced by one that does not.
CALLS = {
    "block_statistics": {"x": floats()},
    "quantize": {"x": floats(), "inverse_steps": steps(), "codes": codes()},
    "dequantize": {"codes": codes(), "scales": steps(), "out": floats()},
    "encode_codes": {"codes": codes(), "coding": CODING, "frame": room()},
    "decode_codes": {"frame": frame(), "codes": codes()},
    "encode": {"x": floats(), "inverse_steps": steps(), "coding": CODING, "frame": room()},
    "decode": {"frame": frame(), "scales": steps(), "out": floats()},
    "reduce": {"frame": frame(), "x": floats(), "inverse_steps": steps(), "coding": CODING, "out": room()},
    "differences": {"x": floats(), "base": floats(), "codes": codes()},
    "rare_differences": {
        "x": floats(), "base": floats(), "most": 9, "gaps": torch.zeros(COUNT + OCTET, dtype=torch.int32),
        "codes": torch.zeros(9, dtype=torch.int32),
    },
    "add_differences": {"codes": codes(), "base": floats(), "out": floats()},
    "add_rare_differences": {
        "gaps": torch.zeros(COUNT, dtype=torch.int32), "codes": codes(), "base": floats(), "out": floats(),
    },
    "decode_changes": {"frame": frame(), "base": floats(), "out": floats()},
    "checksum": {"frame": frame()},
    "root_mean_squares": {"x": floats(), "most": 1e30, "out": torch.zeros(BLOCKS, dtype=torch.bfloat16)},
    "steps_of": {"agreed": torch.ones(BLOCKS, dtype=torch.bfloat16), "rule": RULE},
    "block_magnitudes": {"x": floats(), "rows": ROWS, "magnitudes": magnitudes()},
    "pack": {"x": floats(), "rows": ROWS, "magnitudes": magnitudes(), "bits": BITS, "packed": packed()},
    "add_packed": {"packed": packed(), "count": 2, "bits": BITS, "out": packed(2, 5), "out_bits": 5},
    "unpack": {
        "packed": packed(2 * RATE_BLOCKS), "addends": 2, "bits": BITS, "rows": ROWS, "magnitudes": magnitudes(),
        "denominator": 1.0, "out": floats(),
    },
}  # fmt: skip
SIZES_THE_CALL = {  # the tensors whose own length says how much is worked on: they are never too short
    ("block_statistics", "x"), ("quantize", "x"), ("dequantize", "out"), ("encode_codes", "codes"),
    ("decode_codes", "codes"), ("decode_codes", "frame"), ("encode", "x"), ("decode", "frame"), ("decode", "out"),
    ("reduce", "frame"), ("reduce", "x"), ("differences", "x"), ("rare_differences", "x"), ("add_differences", "out"),
    ("root_mean_squares", "x"), ("steps_of", "agreed"), ("add_packed", "out"), ("add_rare_differences", "codes"),
    ("add_rare_differences", "out"), ("decode_changes", "frame"), ("decode_changes", "out"),
}  # fmt: skip


WAYS = ["dtype", "device", "contiguous", "elements"]
TENSORS = [
    (name, argument)
    for name, call in CALLS.items()
    for argument, given in call.items()
    if isinstance(given, torch.Tensor)
]


def ways_of(name: str, argument: str) -> list[str]:
    """What can be wrong with an argument of a function."""
    return [wrong for wrong in WAYS if wrong != "elements" or (name, argument) not in SIZES_THE_CALL]


def unfit(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same tensor, but for one thing."""
    return {
        "dtype": tensor.to(torch.int16),
        "device": tensor.to("meta"),
        "contiguous": torch.stack([tensor, tensor], 1)[:, 0],
        "elements": tensor[:-1] if tensor.dtype != torch.uint8 else tensor[:19],
    }


@pytest.mark.parametrize("name", CALLS)
def test_what_fits_is_taken(backend, name):
    getattr(backend, name)(**CALLS[name])


def refusal(backend, name: str, argument: str, other: torch.Tensor, wrong: str) -> str:
    """What a function says of an argument that does not fit."""
    with pytest.raises(WrongTensor) as refused:
        getattr(backend, name)(**CALLS[name] | {argument: other})
        pytest.fail(f"{argument} was taken, whose {wrong} is wrong")
    return str(refused.value)


@pytest.mark.parametrize(("name", "argument"), TENSORS)
def test_what_does_not_fit_is_refused(backend, name, argument):
    given = CALLS[name][argument]
    for wrong in ways_of(name, argument):
        other = unfit(given)[wrong]
        said = refusal(backend, name, argument, other, wrong)
        expected, got = said.split("; got ") if "; got" in said else said.split(", got ")
        words = {"dtype": "int16", "device": "meta", "contiguous": "strided", "elements": f"{other.numel()} elements"}
        assert words[wrong] in got, wrong
        assert str(given.dtype).removeprefix("torch.") in expected, wrong
        assert wrong == "dtype" or said.startswith(f"{argument} must be"), wrong


def test_all_functions_of_the_interface_are_here():
    backend = kernels.load("portable")
    of_cpp = {name.removeprefix("_") for name in vars(backend) if name.startswith("_")} - {"scratch_bytes"}
    assert of_cpp - {"decode_sum", "add_up", "combine", "digest"} == set(CALLS)


@pytest.mark.parametrize("member", ["x", "inverse_steps", "out", "frames"])
def test_sums_of_frames(backend, member):
    """`decode_sum` of one frame, and of two."""
    for frames in ([frame()], [frame(), frame()]):
        fits = Sum(floats(), steps(), floats(), frames)
        backend.decode_sum(fits, steps())
        given = getattr(fits, member)
        elsewhere = [each.to("meta") for each in given] if member == "frames" else given.to("meta")
        with pytest.raises(WrongTensor, match="on meta"):
            backend.decode_sum(fits._replace(**{member: elsewhere}), steps())
        with pytest.raises(WrongTensor, match="^scales must be float32.* of at least 6 elements; got"):
            backend.decode_sum(fits, steps()[:-1])


@pytest.mark.parametrize("wrong", WAYS)
def test_combinations(backend, wrong):
    for values, out in (([floats(), unfit(floats())[wrong]], floats()), ([floats()] * 2, unfit(floats())[wrong])):
        if wrong == "elements" and out.numel() < COUNT:
            continue  # a combination is as long as its result
        with pytest.raises(WrongTensor):
            backend.combination(values, Combination.ADD, out)


# ------------------------------------------------------------------ launches on a GPU


class NoLauncher:
    """Where nothing may be launched."""

    def launch(self, kernel, *_, **__):
        raise AssertionError(f"{kernel} was launched")


@pytest.mark.parametrize(("name", "argument"), [each for each in TENSORS if hasattr(CudaBackend, each[0])])
def test_what_does_not_fit_is_not_launched(name, argument):
    for wrong in {"dtype", "elements"}.intersection(ways_of(name, argument)):
        other = unfit(CALLS[name][argument])[wrong]
        said = refusal(CudaBackend(NoLauncher()), name, argument, other, wrong)
        assert re.search(f"{str(other.dtype).removeprefix('torch.')}.* of {other.numel()} elements", said), wrong


def test_all_tensors_of_a_launch_are_on_its_device():
    table = inputs_table([(frame(), 20, COUNT, 0)])
    for arguments in ((floats(),), (table,), (None, np.int64(3), floats())):
        with pytest.raises(WrongTensor, match="^each tensor of a launch must be .*, on cuda:0, .* on cpu"):
            require_on(0, arguments)
    require_on(-1, (floats(), table))  # as `Tensor.get_device` calls host memory
    with pytest.raises(WrongTensor, match="strided"):
        require_on(-1, (unfit(floats())["contiguous"],))


# ------------------------------------------------------------------ the place where addresses leave Python

ASKS_FOR_ADDRESSES = {
    "kernels/addresses.py": {"host_address"},
    "kernels/cuda/arguments.py": {"value", "_packed"},  # of launches: see `require_on`
    # To compare addresses, which nobody follows.
    "kernels/cuda/frames.py": {"_where_words_are"},
    "core/codec/tensor_codec.py": {"decode"},
    "core/arguments.py": {"pieces_of", "pieces_of_lists", "require_sizes"},
    "core/call.py": {"_one_behind_the_other"},
    "core/run.py": {"_recorded"},
    "core/transport/small.py": {"_overlaps"},
    "deepspeed/parameter_slices.py": {"parts_of"},
    "weights/tensors.py": {"memory_of"},
}


def test_addresses_leave_python_where_they_are_checked():
    found = {}
    for file in sorted((ROOT / "ncz_plugins").rglob("*.py")):
        tree = ast.parse(file.read_text())
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and any(
                isinstance(node, ast.Attribute) and node.attr == "data_ptr" for node in ast.walk(function)
            ):
                found.setdefault(str(file.relative_to(ROOT / "ncz_plugins")), set()).add(function.name)
    assert found == ASKS_FOR_ADDRESSES
