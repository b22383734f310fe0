"""Measures all_reduce over NCCL between processes on one GPU, plain and compressed in turns.

    python benchmarks/gpu_ranks.py [--ranks 2] [--mib 1 4 16 64 256] [--dtypes float32 bfloat16] [--json FILE]

NCCL_HOSTID makes each process a host of its own for NCCL: traffic goes through sockets, as between machines. Only
the ratios of the times mean something, and those only under CUDA MPS, which benchmarks/gpu.py starts: without it the
processes share the card in slices of about 2 ms. The configuration is the default one. Every rank checks that results
are within the bound and equal on all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from codec import gradient
from rich.console import Console
from rich.table import Table

import ncz_plugins
from ncz_plugins.cli.perf.launch import free_port
from ncz_plugins.kernels.format import CHUNK

MIB = 1 << 20
BOUND = ncz_plugins.Config().quantizer.value  # of the rms of each block
ROUNDING = {"float32": 1e-6, "bfloat16": 2.0**-8}  # of a result, as a share of it
SECONDS = 150


def rank_main(arguments) -> None:
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = []
    with ncz_plugins.Communicator({"transport": {"min_bytes": 0}}) as communicator:
        for name_of_dtype, mib in product(arguments.dtypes, arguments.mib):
            dtype = getattr(torch, name_of_dtype)
            x = gradient(mib * MIB // dtype.itemsize)[0].to(device).roll(rank).to(dtype)
            exact = x.double()
            dist.all_reduce(exact)
            times: dict[str, list[float]] = {"plain": [], "compressed": []}
            for repeat in range(arguments.repeats + 1):
                for name, all_reduce in (("plain", dist.all_reduce), ("compressed", communicator.all_reduce)):
                    tensor = x.clone()
                    synchronize()
                    dist.all_reduce(torch.zeros(1))  # a barrier by gloo
                    started = time.perf_counter()
                    all_reduce(tensor)
                    synchronize()
                    if repeat:  # the first connects and compiles
                        times[name].append(time.perf_counter() - started)
            squares = x.double().square().view(-1, CHUNK).mean(1)
            dist.all_reduce(squares, op=dist.ReduceOp.MAX)  # what the ranks agree on
            bounds = (ranks * BOUND * squares.sqrt()).repeat_interleave(CHUNK)
            bounds = bounds * (1 + 1e-6) + ROUNDING[name_of_dtype] * (exact.abs() + bounds)
            within = bool(((tensor.double() - exact).abs() <= bounds).all())
            low, high = tensor.view(torch.int32).clone(), tensor.view(torch.int32).clone()
            dist.all_reduce(low, op=dist.ReduceOp.MIN)
            dist.all_reduce(high, op=dist.ReduceOp.MAX)
            plain, compressed = (statistics.median(times[name]) for name in ("plain", "compressed"))
            last = communicator.stats.end_step()
            rows.append(
                {
                    "ranks": ranks,
                    "dtype": name_of_dtype,
                    "mib": mib,
                    "plain_seconds": plain,
                    "compressed_seconds": compressed,
                    "speed_up": plain / compressed,
                    "ratio": last.ratio,
                    "bypasses": last.bypasses,
                    "within_bound": within,
                    "same_on_all_ranks": bool((low == high).all()),
                }
            )
            if rank == 0:  # what there is, if the rest is cut off
                Path(os.environ["NCZ_RESULT"]).write_text(json.dumps(rows))
    dist.barrier(dist.new_group(backend="gloo"))
    dist.destroy_process_group()


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
    started, port = [], free_port()
    for rank in range(arguments.ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(arguments.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCL_HOSTID": f"ncz-{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCZ_RESULT": str(arguments.json.resolve()),
        }
        started.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    deadline = time.monotonic() + SECONDS
    try:
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(codes):
        sys.exit(f"ranks ended with {codes}")
    rows = json.loads(arguments.json.read_text())
    table = Table(title=f"all_reduce of {arguments.ranks} ranks that share one {arguments.device} device")
    for heading in ("dtype", "MiB", "plain ms", "compressed ms", "speed-up", "ratio", "within bound", "same on all"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = [f"{1e3 * row[name]:.1f}" for name in ("plain_seconds", "compressed_seconds")]
        verdicts = [str(row["within_bound"]), str(row["same_on_all_ranks"])]
        table.add_row(row["dtype"], str(row["mib"]), *times, f"{row['speed_up']:.2f}", f"{row['ratio']:.2f}", *verdicts)
    Console().print(table)
    if not all(row["within_bound"] and row["same_on_all_ranks"] for row in rows):
        sys.exit("a result is out of bounds or differs between ranks")


if __name__ == "__main__":
    main()
