"""Measures all_reduce over NCCL between processes on one GPU, plain and compressed in turns.

    python benchmarks/gpu_ranks.py [--ranks 2] [--mib 1 4 16 64 256] [--dtypes float32 bfloat16] [--json FILE]

NCCL_HOSTID makes each process a host of its own for NCCL: traffic goes through sockets, as between machines. Only
the ratios of the times mean something, and those only under CUDA MPS, which benchmarks/gpu.py starts: without it the
processes share the card in slices of about 2 ms. Beside plain NCCL: the default configuration, which leaves small
tensors uncompressed; the same without that; a fixed rate of 4 bits, the same replayed from a CUDA graph, and what such
a call sends by NCCL alone. "launched anew" is "always" without replayed launches. Every rank checks that results are
within the bound and equal on all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from codec import gradient
from rich.console import Console
from rich.table import Table

import ncz_plugins
from ncz_plugins.cli.perf.contenders.collectives import all_gather_single
from ncz_plugins.cli.perf.launch import free_port
from ncz_plugins.core.codec.fixed_rate import equal_rows, levels_of, sum_bits
from ncz_plugins.core.transport.nccl_classes import nccl_class_of
from ncz_plugins.core.whole_files import write_whole
from ncz_plugins.kernels.format import CHUNK, RATE_BLOCK, SCALE_BLOCK, packed_bytes

MIB = 1 << 20
BOUND = ncz_plugins.Config().quantizer.value  # of the rms of each block
BITS = 4
WHATEVER_SIZE = {"transport": {"min_bytes": 0}}
SETTINGS = {
    "default": {},
    "always": WHATEVER_SIZE,
    "launched anew": WHATEVER_SIZE,
    "bits": WHATEVER_SIZE | {"quantizer": {"mode": "bits", "value": BITS}},
}
ROUNDING = {"float32": 1e-6, "bfloat16": 2.0**-8}  # of a result, as a share of it
WARM_UP = 6  # turns that don't count: two ranks replay the launches of the sixth call on a tensor
SECONDS = 150


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """A context with these environment variables, which are not set otherwise."""
    os.environ.update(values)
    yield
    for name in values:
        del os.environ[name]


def bounds_of(contender: str, x: torch.Tensor, ranks: int) -> torch.Tensor:
    """How far off each element of a sum may be, float64."""
    is_bound = not contender.startswith("bits")
    block = SCALE_BLOCK if is_bound else RATE_BLOCK
    blocks = x.double().view(-1, block)
    if is_bound:
        measured, share = blocks.square().mean(1), BOUND
    else:
        measured = blocks.abs().amax(1)
        share = (1 + 2.0**-7) / (2 * levels_of(BITS))
    dist.all_reduce(measured, op=dist.ReduceOp.MAX)  # what the ranks agree on
    scales = measured.sqrt() if is_bound else measured
    return (ranks * share * scales).repeat_interleave(block)


def same_bytes(x: torch.Tensor, ranks: int) -> Callable[[], None]:
    """What a call at a fixed rate sends, by the operations that carry it and nothing else."""
    blocks = equal_rows(x.numel(), ranks, CHUNK).lengths[0] // RATE_BLOCK
    magnitudes = torch.zeros(ranks * blocks, dtype=torch.bfloat16, device=x.device)
    sent, received = torch.zeros(2, ranks * blocks * packed_bytes(BITS), dtype=torch.uint8, device=x.device)
    if ranks == 2:  # each gets all codes of the other one
        of_both = sent.repeat(2)

        def run_two() -> None:
            dist.all_reduce(magnitudes, op=dist.ReduceOp.MAX)
            all_gather_single(of_both, sent)

        return run_two
    sums = torch.zeros(blocks * packed_bytes(sum_bits(BITS, ranks)), dtype=torch.uint8, device=x.device)
    gathered = sums.repeat(ranks)

    def run() -> None:
        dist.all_reduce(magnitudes, op=dist.ReduceOp.MAX)
        dist.all_to_all_single(received, sent)
        all_gather_single(gathered, sums)

    return run


def contenders(x: torch.Tensor, communicators: dict) -> tuple[dict[str, Callable], dict[str, torch.Tensor]]:
    """What is measured, and the tensor that each of them reduces, if it reduces any. Connects and compiles."""
    tensors = {name: x.clone() for name in ("plain", *communicators)}
    calls = {"plain": partial(dist.all_reduce, tensors["plain"])}
    calls |= {name: partial(each.all_reduce, tensors[name]) for name, each in communicators.items()}
    calls["same bytes"] = same_bytes(x, dist.get_world_size())
    for call in calls.values():
        call()
    if x.is_cuda:
        tensors["bits in a graph"] = x.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            communicators["bits"].all_reduce(tensors["bits in a graph"])
        calls["bits in a graph"] = graph.replay
    return calls, tensors


def checked(contender: str, result: torch.Tensor, x: torch.Tensor, exact: torch.Tensor) -> dict[str, bool]:
    """Whether a sum is within its bound, and the same on all ranks."""
    bounds = bounds_of(contender, x, dist.get_world_size())
    bounds = bounds * (1 + 1e-5) + ROUNDING[str(x.dtype).removeprefix("torch.")] * (exact.abs() + bounds)
    low, high = result.view(torch.int32).clone(), result.view(torch.int32).clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    within = bool(((result.double() - exact).abs() <= bounds).all())
    return {"within_bound": within, "same_on_all_ranks": bool((low == high).all())}


def rank_main(arguments) -> None:
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    rank, rows = dist.get_rank(), []
    if on_gpu and rank == 0:
        print(f'"nccl" is a {nccl_class_of(dist.group.WORLD).__name__}', flush=True)
    communicators = {name: ncz_plugins.Communicator(settings) for name, settings in SETTINGS.items()}
    with variables(NCZ_REPLAY="0"):  # which the first call on a GPU reads
        communicators["launched anew"].all_reduce(torch.zeros(CHUNK, device=device))
    for name_of_dtype, mib in product(arguments.dtypes, arguments.mib):
        dtype = getattr(torch, name_of_dtype)
        x = gradient(mib * MIB // dtype.itemsize)[0].to(device).roll(rank).to(dtype)
        exact = x.double()
        dist.all_reduce(exact)
        calls, tensors = contenders(x, communicators)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for turn in range(-WARM_UP, arguments.repeats):
            for name, call in calls.items():
                if name in tensors:
                    tensors[name].copy_(x)
                synchronize()
                dist.all_reduce(torch.zeros(1))  # a barrier by gloo
                started = time.perf_counter()
                call()
                returned = time.perf_counter()
                synchronize()
                if turn >= 0:
                    times[name].append((time.perf_counter() - started, returned - started))
        medians = {name: [statistics.median(each) for each in zip(*found)] for name, found in times.items()}
        for name, (seconds, host_seconds) in medians.items():
            row = {"ranks": dist.get_world_size(), "dtype": name_of_dtype, "mib": mib, "contender": name}
            row |= {"seconds": seconds, "host_seconds": host_seconds, "speed_up": medians["plain"][0] / seconds}
            if name in tensors and name != "plain":
                row |= checked(name, tensors[name], x, exact)
            if name in communicators:
                last = communicators[name].stats.end_step()
                row |= {"ratio": last.ratio, "bypasses": last.bypasses, "replayed_calls": last.replayed_calls}
            rows.append(row)
        del calls, call  # a graph must be gone before its communicator is
        if rank == 0:  # what there is, if the rest is cut off
            write_whole(Path(os.environ["NCZ_RESULT"]), json.dumps(rows))
    for communicator in communicators.values():
        communicator.close()
    dist.barrier(dist.new_group(backend="gloo"))
    dist.destroy_process_group()


def run_ranks(command: list[str], ranks: int, seconds: float, environment: dict[str, str]) -> list[int]:
    """Run a command once for each rank, each as if on a host of its own, and return their exit codes.

    NCCL then sends through sockets. All processes are gone at the end.
    Raises subprocess.TimeoutExpired.
    """
    port, started = free_port(), []
    for rank in range(ranks):
        of_rank = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCL_HOSTID": f"ncz-{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        started.append(subprocess.Popen(command, env=os.environ | of_rank | environment))
    deadline = time.monotonic() + seconds
    try:
        return [process.wait(max(1.0, deadline - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--dtypes", nargs="+", default=list(ROUNDING), choices=ROUNDING)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda", help="cpu: try the program where there is no GPU, over gloo")
    parser.add_argument("--json", type=Path, default=Path("gpu_ranks.json"))
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        return rank_main(arguments)
    result = {"NCZ_RESULT": str(arguments.json.resolve())}
    codes = run_ranks([sys.executable, *sys.argv], arguments.ranks, SECONDS, result)
    if any(codes):
        sys.exit(f"ranks ended with {codes}")
    rows = json.loads(arguments.json.read_text())
    table = Table(title=f"all_reduce of {arguments.ranks} ranks that share one {arguments.device} device")
    for heading in ("dtype", "MiB", "contender", "ms", "host ms", "speed-up", "ratio", "within bound", "same on all"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = [f"{1e3 * row[name]:.2f}" for name in ("seconds", "host_seconds")]
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        verdicts = [str(row.get(name, "")) for name in ("within_bound", "same_on_all_ranks")]
        table.add_row(
            row["dtype"], str(row["mib"]), row["contender"], *times, f"{row['speed_up']:.2f}", ratio, *verdicts
        )
    Console().print(table)
    if not all(row.get("within_bound", True) and row.get("same_on_all_ranks", True) for row in rows):
        sys.exit("a result is out of bounds or differs between ranks")


if __name__ == "__main__":
    main()
