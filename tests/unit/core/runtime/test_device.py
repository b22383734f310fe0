"""Which devices are served, and what is said where one isn't."""

import itertools
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch

from ncz_plugins import kernels
from ncz_plugins.core.errors import PeerError, UnsupportedError
from ncz_plugins.core.runtime.device import Gpu, Host, poll, record_event, require_kernels
from ncz_plugins.core.runtime.recorded import ENVIRONMENT

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


def test_no_job_writes_to_the_callers_memory_after_an_error():
    host, output, begun = Host(two_threads=True), torch.zeros(1), threading.Event()

    def job():
        begun.set()
        time.sleep(0.2)
        output.fill_(1)

    host.submit(job)
    begun.wait(10)
    host.abandon([output])
    assert output == 1  # the job has ended


def test_memory_of_a_failed_call_stays_until_a_gpu_has_done_what_is_queued(monkeypatch):
    """Until then torch gives it to no other tensor."""
    stays = []
    monkeypatch.setenv(ENVIRONMENT, "0")
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: "the stream of calls")
    monkeypatch.setattr(kernels, "cuda_backend", lambda: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *noted: stays.append(noted))
    gpu, memory = Gpu(torch.device("cpu"), timedelta(1), lambda: None), [torch.zeros(1), torch.zeros(2)]
    gpu.abandon(memory)
    assert [(tensor.numel(), stream) for tensor, stream in stays] == [(n, "the stream of calls") for n in (1, 2)]


def test_frames_keep_their_bytes_until_the_next_collective():
    host, capacity, kept = Host(), 5 << 20, []
    for number in range(12):  # more than there is room for at once
        buffer = host.buffer(capacity)
        buffer.fill_(number)
        kept += host.trimmed([buffer], [capacity - number])
    assert all(frame.numel() == capacity - number for number, frame in enumerate(kept))
    assert all((frame == number).all() for number, frame in enumerate(kept))
    with host.after(None):
        [first] = host.trimmed([host.buffer(capacity)], [10])
    with host.after(None):
        assert host.buffer(capacity).data_ptr() == first.data_ptr()


def test_frames_share_memory_that_is_little_more_than_they_fill():
    host = Host()
    buffers = []
    for _ in range(100):
        buffers += host.trimmed([host.buffer(1 << 20)], [1000])
    assert buffers[-1].data_ptr() - buffers[0].data_ptr() == 99 * 1024
