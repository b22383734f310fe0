"""Measures all_reduce over NCCL between processes on one GPU, plain and compressed in turns.

    python benchmarks/gpu_ranks.py [--ranks 2] [--mib 64 256] [--json FILE]

NCCL_HOSTID makes each process a host of its own for NCCL: traffic goes through sockets, as between machines. Only
the ratios of the times mean something. Every rank checks that results are within the bound and equal on all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from codec import gradient
from rich.console import Console
from rich.table import Table

import ncz_plugins
from ncz_plugins.kernels.format import CHUNK

MIB = 1 << 20
BOUND = 0.25  # of the rms of each block
SECONDS = 150


def rank_main(arguments) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = {"quantizer": {"mode": "rms", "value": BOUND, "block": CHUNK}, "transport": {"frame_bytes": 4 * MIB}}
    rows = []
    with ncz_plugins.Communicator(config) as communicator:
        for mib in arguments.mib:
            x = gradient(mib * MIB // 4)[0].cuda().roll(rank)
            exact = x.double()
            dist.all_reduce(exact)
            times: dict[str, list[float]] = {"plain": [], "compressed": []}
            for repeat in range(arguments.repeats + 1):
                for name, all_reduce in (("plain", dist.all_reduce), ("compressed", communicator.all_reduce)):
                    tensor = x.clone()
                    torch.cuda.synchronize()
                    dist.all_reduce(torch.zeros(1))  # a barrier by gloo
                    started = time.perf_counter()
                    all_reduce(tensor)
                    torch.cuda.synchronize()
                    if repeat:  # the first connects and compiles
                        times[name].append(time.perf_counter() - started)
            squares = x.double().square().view(-1, CHUNK).mean(1)
            dist.all_reduce(squares, op=dist.ReduceOp.MAX)  # what the ranks agree on
            bounds = (ranks * BOUND * squares.sqrt()).repeat_interleave(CHUNK)
            within = bool(((tensor.double() - exact).abs() <= bounds * (1 + 1e-6)).all())
            low, high = tensor.view(torch.int32).clone(), tensor.view(torch.int32).clone()
            dist.all_reduce(low, op=dist.ReduceOp.MIN)
            dist.all_reduce(high, op=dist.ReduceOp.MAX)
            plain, compressed = (statistics.median(times[name]) for name in ("plain", "compressed"))
            last = communicator.stats.end_step()
            rows.append(
                {
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
    if rank == 0:
        Path(os.environ["NCZ_RESULT"]).write_text(json.dumps(rows))
    dist.barrier(dist.new_group(backend="gloo"))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("gpu_ranks.json"))
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        return rank_main(arguments)
    started = []
    for rank in range(arguments.ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(arguments.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29511",
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
    table = Table(title=f"all_reduce over NCCL, {arguments.ranks} ranks on one GPU")
    for heading in ("MiB", "plain ms", "compressed ms", "speed-up", "ratio", "within bound", "same on all"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = [f"{1e3 * row[name]:.1f}" for name in ("plain_seconds", "compressed_seconds")]
        verdicts = [str(row["within_bound"]), str(row["same_on_all_ranks"])]
        table.add_row(str(row["mib"]), *times, f"{row['speed_up']:.2f}", f"{row['ratio']:.2f}", *verdicts)
    Console().print(table)
    if not all(row["within_bound"] and row["same_on_all_ranks"] for row in rows):
        sys.exit("a result is out of bounds or differs between ranks")


if __name__ == "__main__":
    main()
