"""Which devices are served, and what is said where one isn't."""

import sys

import pytest
import torch

from ncz_plugins import kernels
from ncz_plugins.core.config import Config
from ncz_plugins.core.device import Host, demand_kernels, moment
from ncz_plugins.core.errors import UnsupportedError

CUDA = torch.device("cuda", 0)


@pytest.fixture
def without_cached_backend():
    kernels.cuda_backend.cache_clear()
    yield
    kernels.cuda_backend.cache_clear()


def test_the_cpu_is_served():
    demand_kernels(torch.device("cpu"), Config())
    demand_kernels(torch.device("cpu"), Config(quantizer={"kind": "lossless"}))
    assert moment(torch.device("cpu")) is None


def test_other_devices_are_refused():
    with pytest.raises(UnsupportedError, match="device meta: only CPU and CUDA tensors"):
        demand_kernels(torch.device("meta"), Config())


def test_lossless_is_refused_on_a_gpu():
    with pytest.raises(UnsupportedError, match="lossless serves CPU tensors only"):
        demand_kernels(CUDA, Config(quantizer={"kind": "lossless"}))


def test_without_a_gpu_a_cuda_tensor_is_refused(without_cached_backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="device cuda:0: .*CUDA.*keep these tensors on the CPU"):
        demand_kernels(CUDA, Config())


def test_without_cupy_the_extra_to_install_is_named(without_cached_backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy" or name.endswith("cuda.nvrtc")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it was not installed
    with pytest.raises(UnsupportedError, match=r'pip install "ncz_plugins\[cuda\]"'):
        demand_kernels(CUDA, Config())


def test_a_frame_keeps_its_bytes_when_the_room_is_used_again():
    host = Host()
    room = host.room(100)
    room[:10] = 7
    kept = host.trimmed(room, 10)
    host.room(100).zero_()
    assert kept.tolist() == [7] * 10
