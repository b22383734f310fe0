"""Which devices are served, and what is said where one isn't."""

import itertools
import sys
from datetime import timedelta

import pytest
import torch

from ncz_plugins import kernels
from ncz_plugins.core.errors import PeerError, UnsupportedError
from ncz_plugins.core.runtime.device import Host, poll, record_event, require_kernels

CUDA = torch.device("cuda", 0)


@pytest.fixture
def without_cached_backend():
    kernels.cuda_backend.cache_clear()
    yield
    kernels.cuda_backend.cache_clear()


def test_the_cpu_is_served():
    require_kernels(torch.device("cpu"))
    assert record_event(torch.device("cpu")) is None


def test_other_devices_are_refused():
    with pytest.raises(UnsupportedError, match="device meta: only CPU and CUDA tensors"):
        require_kernels(torch.device("meta"))


def test_without_a_gpu_a_cuda_tensor_is_refused(without_cached_backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="device cuda:0: .*CUDA.*keep these tensors on the CPU"):
        require_kernels(CUDA)


def test_without_cupy_the_extra_to_install_is_named(without_cached_backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy" or name.endswith("cuda.nvrtc")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it was not installed
    with pytest.raises(UnsupportedError, match=r'pip install "ncz_plugins\[cuda\]"'):
        require_kernels(CUDA)


class Failing:
    """Tells of a failure from the `at`-th time on that it is asked."""

    def __init__(self, at: int):
        self.asked, self.at = 0, at

    def __call__(self) -> None:
        self.asked += 1
        if self.asked >= self.at:
            raise PeerError("a peer died")


@pytest.mark.parametrize("at", [1, 3, 4])
def test_polling_a_device_ends_when_nothing_more_can_come(at):
    done = itertools.chain([False] * 3, itertools.repeat(True))
    with pytest.raises(PeerError, match="a peer died"):  # also when all is done, as it may have been given up
        poll(lambda: next(done), Failing(at), timedelta(seconds=60), "cuda:0")
    poll(lambda: True, Failing(2), timedelta(seconds=60), "cuda:0")


def test_polling_a_device_ends_in_time():
    with pytest.raises(PeerError, match=r"cuda:0 was not done within 0.05 s.*transport.timeout_seconds"):
        poll(lambda: False, lambda: None, timedelta(seconds=0.05), "cuda:0")


def test_a_frame_keeps_its_bytes_when_the_room_is_used_again():
    host = Host()
    buffer = host.buffer(100)
    buffer[:10] = 7
    [kept] = host.trimmed([buffer], [10])
    host.buffer(100).zero_()
    assert kept.tolist() == [7] * 10
