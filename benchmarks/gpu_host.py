"""Time that the host takes for a default all_reduce of two GPUs, without a GPU: launched anew, and replayed.

    python benchmarks/gpu_host.py [--calls 1000]

This process is one of two ranks; the other one has the same values, and answers at once. Both kinds of call take turns.
First calls run kernels, by the tests' emulator. Later ones, which are timed, run none, and find in memory what those
left. The clock stands still in the driver, NCCL and gloo; there are no streams and events. What is left is this package
and torch, from the decision how to serve a call to its counting. Needs CuPy, as a GPU does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cuda"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from calls import run_decided
from emulator import EmulatedLauncher

from ncz_plugins.core.call import Call
from ncz_plugins.core.config import Config
from ncz_plugins.core.group import Group
from ncz_plugins.core.runtime.device import HOST, Gpu
from ncz_plugins.core.runtime.recorded import RecordedCalls
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.training.state import Training
from ncz_plugins.core.transport.nccl import NcclTransport
from ncz_plugins.kernels.cuda import CudaBackend, nvrtc

ELEMENTS, SECONDS, WARM_UP = 65476, 60, 10  # of a tensor; for a kernel; calls that run kernels
ON_HOST = torch.empty(0).get_device()  # in place of a GPU's number


class Others:
    """The driver, the other rank, and what connects both ranks. Time that passes here is not the host's."""

    rank, world_size = 0, 2

    def __init__(self):
        self.seconds, self.run_kernels = 0.0, True
        self.library = EmulatedLauncher()._machine(torch.float32)
        self.launchKernel, self._allgather_base = partial(self._timed, self._launch), partial(self._timed, self._gather)

    def _timed(self, function, *arguments) -> Others:
        begun = time.perf_counter()
        function(*arguments)
        self.seconds += time.perf_counter() - begun
        return self

    def _launch(self, kernel, grid, _y, _z, block, *others):
        if self.run_kernels:
            self.library.run(kernel, grid, block, 0, SECONDS, others[-2])

    def _gather(self, output, input):
        output.view(2, -1)[:] = input

    def start_comparison(self, comparison, _) -> Others:
        return self._timed(comparison.hear, [(1, comparison.told)])

    def wait(self) -> bool:
        return True


class Rank(Gpu):
    """All-reduces of one tensor, in host memory as if it were a GPU's."""

    def __init__(self, others: Others, replays: bool):
        launcher = nvrtc.CupyLauncher()
        launcher._thread.devices.add(ON_HOST)
        launcher._functions = {(kernel, torch.float32, ON_HOST): kernel for kernel in others.library.kernels}
        self.backend, self._device, self._others = CudaBackend(launcher), HOST, others
        self.recorded = RecordedCalls(self.backend, HOST) if replays else None
        self._arena = self.backend._launcher._thread.arena = None if replays else self.backend.arena(HOST)
        self._transport, config = NcclTransport(others, [others], HOST), Config(transport={"min_bytes": 0}).resolved()
        self.group = Group(Training(config), config, range(2), others.rank).for_gpus()
        self._values, self.tensor = torch.randn(ELEMENTS), torch.empty(ELEMENTS)

    def synchronize(self) -> None:
        pass

    def start_copy_to_host(self, tensor):
        return partial(torch.Tensor.view, tensor.clone(), tensor.dtype)

    def call(self) -> float:
        """Microseconds of the host."""
        self.tensor.copy_(self._values)
        if self._arena is not None:
            self._arena.restart()
        begun, elsewhere = time.perf_counter(), self._others.seconds
        parts = [ParameterSlice(None, ELEMENTS)]
        call = Call("all_reduce", self.tensor, self.tensor, torch.distributed.ReduceOp.SUM, parts=parts)
        run_decided(self.group, call, self, self._transport)
        return 1e6 * (time.perf_counter() - begun - (self._others.seconds - elsewhere))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000, help="of each kind (default: %(default)s)")
    calls = parser.parse_args().calls
    torch.set_num_threads(1)
    nvrtc.driver = others = Others()
    torch.cuda.current_device, torch._C._cuda_getCurrentRawStream = lambda: ON_HOST, lambda _: 0
    ranks = {"launched anew": Rank(others, False), "replayed": Rank(others, True)}
    for _ in range(WARM_UP):
        for rank in ranks.values():
            rank.call()
    others.run_kernels = False
    us = [[rank.call() for rank in ranks.values()] for _ in range(calls)]
    for (name, rank), found in zip(ranks.items(), zip(*us)):
        replayed = rank.group.training.stats.total.replayed_calls
        print(f"{name}: median {statistics.median(found):.0f} us, least {min(found):.0f} us, {replayed} replayed")


if __name__ == "__main__":
    main()
