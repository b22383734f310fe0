"""Tensors out of the memory of another process."""

import multiprocessing
import os

import pytest
import torch

from ncz_plugins.core.transport import process_memory as memory


@pytest.mark.processes
def test_memory_is_read_from_another_process():
    held = torch.arange(100_000)
    ready, done = multiprocessing.Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=_read_it, args=(os.getpid(), held.data_ptr(), done))
    reader.start()
    assert ready.poll(60) and ready.recv() == held.sum().item()
    reader.join(60)
    assert reader.exitcode == 0


def _read_it(process: int, address: int, answer) -> None:
    found = torch.zeros(100_000, dtype=torch.int64)
    memory.read(process, address, found)
    answer.send(found.sum().item())


@pytest.mark.parametrize(("process", "address"), [(os.getpid(), 8), (2**30, 4096)], ids=["own", "none"])
def test_memory_that_is_not_there_is_an_error(process, address):
    with pytest.raises(OSError, match=f"memory of process {process}"):
        memory.read(process, address, torch.zeros(10))
