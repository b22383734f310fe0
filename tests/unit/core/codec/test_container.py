"""compress and decompress: any tensor comes back as it should, and damaged bytes are found before they do harm."""

import os
import re
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncz_plugins import BoundError, Config, ConfigError, FrameError, UnsupportedError, compress, decompress, kernels
from ncz_plugins.cli.codec.round_trip import round_trip
from ncz_plugins.core.codec import container
from ncz_plugins.kernels.format import CHUNK, DTYPES, HAS_CHECKSUM, HEADER_BYTES

LOSSLESS = {"quantizer": {"kind": "lossless"}}
FINE = {"quantizer": {"mode": "abs", "value": 1e-3}}
HEAD = struct.Struct("<IBBBBIQI")
SMALL_FRAMES = {"transport": {"frame_bytes": "16KiB"}}


def randn(*shape, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a_bits, b_bits = (each.contiguous().view(-1).view(torch.uint8) for each in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a_bits, b_bits)


def kind_of(data: torch.Tensor) -> str:
    return ("error_bound", "stochastic", "lossless")[data[6]]


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (7, 11), (2, 3, 4, 5), (70_001,), (1,) * 20])
@pytest.mark.parametrize("kind", ["error_bound", "stochastic", "lossless"])
def test_any_shape_comes_back(dtype, shape, kind):
    tensor = randn(*shape, dtype=dtype)
    out = decompress(compress(tensor, {"quantizer": {"kind": kind, "mode": "abs", "value": 0.05}}))
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, tensor.shape, True)
    assert kind != "lossless" or torch.equal(out, tensor)
    assert tensor.numel() == 0 or (out.double() - tensor.double()).abs().max() <= 0.05


@pytest.mark.parametrize("config", [LOSSLESS, FINE])
def test_strides_do_not_matter(config):
    whole = randn(60, 90, 3)
    for view in (whole.transpose(0, 2), whole[::2, 1:, :2], whole[5, 7], whole[:, 0, 0].expand(4, 60), whole[..., 1]):
        assert same_bits(decompress(compress(view, config)), decompress(compress(view.clone(), config)))
        assert torch.equal(compress(view, config), compress(view.contiguous(), config))
    whole.requires_grad_()
    assert torch.equal(compress(whole, config), compress(whole.detach(), config))


def test_bytes_may_have_strides_as_well():
    tensor = randn(5000)
    data = compress(tensor, LOSSLESS)
    assert same_bits(decompress(torch.stack([data, data + 1], 1)[:, 0]), tensor)


def test_a_frame_size_that_is_to_be_measured_is_the_default_one():
    x = randn(1 << 19)
    left_open = {"frame_bytes": "auto", "min_bytes": "auto", "tuning": "none.json"}
    assert same_bits(compress(x, {"transport": left_open}), compress(x))


@pytest.mark.parametrize("block", [0, CHUNK, 3 * CHUNK])
@pytest.mark.parametrize("mode", ["abs", "rel", "rms", "range"])
def test_every_block_has_its_own_step(mode, block):
    """Blocks a thousand times smaller than others keep their own precision, unless they share a scale."""
    scale = torch.tensor([1.0, 1e-3, 1e-3, 1e-3, 1.0]).repeat_interleave(CHUNK)[:-100]
    tensor = randn(len(scale)) * scale
    data = compress(tensor, {"quantizer": {"mode": mode, "value": 0.01, "block": block}, **SMALL_FRAMES})
    error = (decompress(data) - tensor).abs()
    assert error.max() < 0.1
    assert (error[2 * CHUNK : 3 * CHUNK].max() < 1e-4) == (mode != "abs" and block == CHUNK)


def test_the_default_suits_gradients():
    tensor = randn(100_000)
    data = compress(tensor)
    assert len(data) < 0.15 * tensor.nbytes
    assert (decompress(data) - tensor).abs().max() < 0.375 * 1.2
    assert torch.equal(data, compress(tensor, Config())) and torch.equal(data, compress(tensor, "ncclz"))


@pytest.mark.parametrize("config", [LOSSLESS, FINE, {"quantizer": {"kind": "stochastic"}}])
def test_threads_change_nothing(config):
    tensor = randn(400_000)
    data = compress(tensor, config | SMALL_FRAMES)
    for threads in (2, 5):
        assert torch.equal(compress(tensor, config | SMALL_FRAMES, threads=threads), data)
        assert same_bits(decompress(data, threads=threads), decompress(data))
    with pytest.raises(ValueError):
        compress(tensor, threads=0)
    assert threading.active_count() < 20


def test_stochastic_follows_the_seed():
    tensor = randn(10_000)

    def out(seed, **others):
        return decompress(compress(tensor, {"quantizer": {"kind": "stochastic", "seed": seed}, **others}))

    assert torch.equal(out(1), out(1)) and not torch.equal(out(1), out(2))
    assert torch.equal(out(1), out(1, **SMALL_FRAMES))  # however it is cut


@pytest.mark.parametrize("kind", ["error_bound", "stochastic", "lossless"])
def test_all_backends_write_the_same(kind, monkeypatch):
    # With coder auto, backends of different speed may choose differently.
    config, made = {"quantizer": {"kind": kind}, "entropy": {"coder": "huffman"}}, []
    for name in (name for name, status in kernels.statuses().items() if status == "ok"):
        backend = kernels.load(name)
        monkeypatch.setattr(kernels, "cpu_backend", lambda backend=backend: backend)
        made.append(compress(randn(30_000), config).tolist())
    assert all(each == made[0] for each in made)


# ---------------------------------------------------------------- what is held without loss


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_held_without_loss(dtype, poison):
    tensor = randn(9001, dtype=dtype)
    tensor[5000] = poison
    data = compress(tensor)
    assert kind_of(data) == "lossless" and same_bits(decompress(data), tensor)


def test_what_overflows_by_its_error_is_held_without_loss():
    tensor = randn(9001, dtype=torch.float16)
    tensor[5000] = torch.finfo(torch.float16).max
    data = compress(tensor, {"quantizer": {"mode": "rel", "value": 1e-11}})  # besides, it is too fine a bound
    assert kind_of(data) == "lossless" and same_bits(decompress(data), tensor)


def test_what_quantizing_would_hardly_shrink_is_held_without_loss():
    tensor = randn(9001, dtype=torch.bfloat16)
    data = compress(tensor, {"quantizer": {"mode": "rel", "value": 1e-5}})
    assert kind_of(data) == "lossless" and same_bits(decompress(data), tensor)


def test_what_no_bound_of_the_mode_serves_is_held_without_loss():
    for tensor in (torch.tensor(3.7), torch.full((5000,), 3.7)):
        config = Config(quantizer={"kind": "stochastic", "mode": "range", "value": 0.1})
        data = compress(tensor, config)
        assert kind_of(data) == "lossless" and same_bits(decompress(data), tensor)
        assert "no bound of this mode" in round_trip(tensor.numpy(), config).lossless_because
        data = compress(tensor, {"quantizer": {"mode": "range", "value": 0.1}})
        assert kind_of(data) == "error_bound" and same_bits(decompress(data), tensor)


@pytest.mark.parametrize("mode", ["abs", "rel", "rms", "range"])
@pytest.mark.parametrize("kind", ["error_bound", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bound_too_fine_names_the_smallest_that_will_do(mode, kind, dtype):
    tensor = randn(9001, dtype=dtype)
    with pytest.raises(BoundError, match=f"1e-11 .mode {mode}, {kind}. .* {dtype}") as caught:
        compress(tensor, {"quantizer": {"mode": mode, "kind": kind, "value": 1e-11}})
    assert "kind: lossless" in str(caught.value)
    smallest = float(re.search(r"will do is (\S+)\.", str(caught.value))[1])
    compress(tensor, {"quantizer": {"mode": mode, "kind": kind, "value": smallest}})
    with pytest.raises(BoundError):
        compress(tensor, {"quantizer": {"mode": mode, "kind": kind, "value": smallest / 1.03}})


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5),
        torch.zeros(5, dtype=torch.bool),
        torch.zeros(5, dtype=torch.complex64),
        torch.zeros(5, device="meta"),
        torch.zeros(5).to_sparse(),
    ],
    ids=str,
)
def test_other_tensors_are_refused(tensor):
    with pytest.raises(UnsupportedError, match="convert it first"):
        compress(tensor)


def test_what_is_no_tensor_is_refused():
    with pytest.raises(UnsupportedError, match="not list: make one by torch.as_tensor"):
        compress([1.0])


def test_a_fixed_rate_is_refused():
    with pytest.raises(UnsupportedError, match="mode: bits is for collectives"):
        compress(torch.ones(3), {"quantizer": {"mode": "bits", "value": 4}})


def test_other_arguments_are_refused():
    for data in (b"123", torch.zeros(30), torch.zeros(5, 6, dtype=torch.uint8), torch.tensor(3, dtype=torch.uint8)):
        with pytest.raises(UnsupportedError, match="compress returned"):
            decompress(data)
    with pytest.raises(ConfigError):
        compress(torch.zeros(3), {"quantizer": {"mode": "x"}})


# ---------------------------------------------------------------- damage


def sealed(data: torch.Tensor, dimensions: int, steps: int) -> torch.Tensor:
    """With the checksum that a head of this size must have: damage that is no accident."""
    end = HEAD.size + 8 * dimensions + steps
    checksum = kernels.cpu_backend().checksum(data[:end])
    data[20:24] = torch.tensor(list(checksum.to_bytes(4, "little")), dtype=torch.uint8)
    return data


def with_head(data: torch.Tensor, steps: int = 0, shape: list[int] | None = None, **changes) -> torch.Tensor:
    """`data` (of one dimension) with other fields in its head."""
    names = ("magic", "version", "dtype", "kind", "dimensions", "frame_elements", "block", "checksum")
    fields = dict(zip(names, HEAD.unpack(data[: HEAD.size].numpy().tobytes()))) | changes
    sizes = data[HEAD.size : HEAD.size + 8].numpy().tobytes() if shape is None else np.array(shape, "<i8").tobytes()
    if shape is not None:
        fields["dimensions"] = len(shape)
    head = torch.frombuffer(bytearray(HEAD.pack(*fields.values()) + sizes), dtype=torch.uint8)
    made = torch.cat([head, data[HEAD.size + 8 :]])
    return sealed(made, len(sizes) // 8, steps)


def refused(data: torch.Tensor, words: str | None = None) -> None:
    with pytest.raises(FrameError, match=words):
        decompress(data)


@pytest.mark.parametrize("config", [LOSSLESS, FINE])
def test_cut_anywhere_or_too_long_is_refused(config):
    data = compress(randn(40), config)
    for size in range(len(data)):
        refused(data[:size])
    refused(torch.cat([data, data[:1]]), "1 bytes follow")


@pytest.mark.parametrize("config", [LOSSLESS, FINE])
def test_with_checksums_every_flipped_bit_is_found(config):
    data = compress(randn(20), config | {"entropy": {"checksum": True}})
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            refused(data)
            data[position] ^= 1 << bit


def test_without_checksums_a_flipped_bit_in_the_head_is_found():
    data = compress(randn(20), FINE)
    for position in range(HEAD.size + 8 + 4):
        for bit in range(8):
            data[position] ^= 1 << bit
            refused(data)
            data[position] ^= 1 << bit


def test_a_head_that_can_not_be_is_refused():
    data = compress(randn(9001), LOSSLESS)
    assert decompress(with_head(data)).shape == (9001,)
    assert decompress(with_head(data, shape=[1, 9001, 1])).shape == (1, 9001, 1)
    refused(with_head(data, magic=1), "not a compressed tensor")
    for version in (0, 2):
        refused(with_head(data, version=version), f"version {version}; this build reads version 1")
    refused(with_head(data, dtype=4), "dtype 4")
    refused(with_head(data, dtype=1), "damaged")
    refused(with_head(data, kind=3), "kind 3")
    refused(with_head(data, kind=0, steps=4))
    refused(with_head(data, block=4096), "block 4096")
    for elements in (0, 100, 1 << 26, 0xFFFFF000):
        refused(with_head(data, frame_elements=elements), "impossible")
    for shape in ([-1], [1 << 62], [2**40, 2**40], [0, 2**62], [-3, -3001]):
        refused(with_head(data, shape=shape), "shape .* is impossible")
    refused(with_head(data, shape=[9002]), "expected")
    refused(with_head(data, shape=[]), "expected")
    refused(with_head(data, shape=[0]), "expected")


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_can_not_be_is_refused(step):
    data = compress(randn(40), FINE)
    data[HEAD.size + 8 :][:4] = torch.tensor([step]).view(torch.uint8)
    refused(sealed(data, 1, 4), "a scale is not")


@pytest.mark.parametrize("config", [LOSSLESS, FINE])
def test_a_count_that_can_not_be_there_is_refused_before_memory_is_taken(config, monkeypatch):
    data = compress(randn(40), config)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("memory was taken"))
    for count in (1 << 20, 1 << 30, 1 << 40, (1 << 62) - 1):
        for elements in (1 << 12, 1 << 25):
            refused(with_head(data, shape=[count], frame_elements=elements, steps=4 * (config is FINE)), "can't hold")


def test_a_block_of_any_size_takes_no_memory():
    data = compress(randn(40), {"quantizer": {"value": 0.1}})
    assert torch.equal(decompress(with_head(data, steps=4, block=(1 << 63))), decompress(data))


def test_a_frame_that_claims_more_than_there_is_is_refused():
    data = compress(randn(40), LOSSLESS)
    for size in (0, 1, 1 << 31, (1 << 64) - 1):
        data[HEAD.size + 8 :][:8] = torch.tensor(list(size.to_bytes(8, "little")), dtype=torch.uint8)
        refused(data)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.booleans())
def test_overwritten_bytes_are_refused_or_give_a_tensor(drawn, lossless):
    data = compress(randn(50), LOSSLESS if lossless else FINE)
    for _ in range(drawn.draw(st.integers(1, 5))):
        data[drawn.draw(st.integers(0, len(data) - 1))] = drawn.draw(st.integers(0, 255))
    if drawn.draw(st.booleans()) and data[7] == 1:
        sealed(data, 1, 0 if lossless else 4)
    try:
        decompress(data)
    except FrameError:
        pass


def test_checksums_are_in_every_frame():
    for config, flags in ((FINE, 0), (FINE | {"entropy": {"checksum": True}}, HAS_CHECKSUM)):
        data = compress(randn(200_000), config | {"transport": {"frame_bytes": "256KiB"}})
        frames = container.contents_of(data).frames
        assert len(frames) > 2
        assert {int(frame[HEADER_BYTES - 8]) for frame in frames} == {flags}


# ---------------------------------------------------------------- memory

MEASURED = """
import resource, sys, torch
import ncz_plugins
from ncz_plugins.core.codec.container import compress, decompress

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

config = {"quantizer": {"kind": sys.argv[1], "mode": "abs", "value": 1e-6}, "entropy": {"coder": "raw"}}
decompress(compress(torch.rand(2_000_000), config))  # what a whole frame needs stays with the process
tensor = torch.rand(6_000_000)
before = peak()
data = compress(tensor, config)
used = peak() - before - data.nbytes
assert used < 1.2 * 1.03 * tensor.nbytes, used / tensor.nbytes
out = decompress(data)  # takes its own size only, which the peak of compress covers
assert peak() - before - data.nbytes - out.nbytes < 1.2 * tensor.nbytes
"""


@pytest.mark.processes
@pytest.mark.skipif(kernels.cpu_backend().name == "reference", reason="numpy takes what it likes")
@pytest.mark.parametrize("kind", ["error_bound", "lossless"])
def test_no_more_memory_is_taken_than_promised(kind):
    """The peak of a process's memory, on data that hardly shrinks."""
    gives_back = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # else glibc keeps some of what was freed
    command = [sys.executable, "-c", MEASURED, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=gives_back)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["error_bound", "stochastic", "lossless"])
def test_a_negated_view(kind):
    values = torch.randn(3000)
    view = torch.complex(torch.zeros_like(values), -values).conj().imag
    assert view.is_neg()
    result = decompress(compress(view, {"quantizer": {"kind": kind, "mode": "abs", "value": 0.01}}))
    torch.testing.assert_close(result, values, rtol=0, atol=0.0101)


def test_more_dimensions_than_a_head_can_tell():
    with pytest.raises(UnsupportedError, match="256 dimensions"):
        compress(torch.ones([1] * 256))
