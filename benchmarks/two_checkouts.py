"""Compares two checkouts: seconds of calls and of training steps, in turns, behind links of a given rate.

    sudo .venv/bin/python -m benchmarks.two_checkouts ../before . --link 100mbit,1gbit,unlimited --ranks 2,4

Both checkouts need their kernels (`python setup.py build_ext --inplace`) and use the Python that runs this program. One
rank is in each network namespace. A call is an all_reduce of float32 gradients by the default configuration; a step is
that of an MLP with 8.4 M parameters under DDP, and under DeepSpeed with ZeRO 2. Seconds are the median on rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, DEPTH, BATCH = 1024, 8, 16
WARM_UP, STEPS = 4, 12
SECONDS_OF_A_SIZE = 2.0  # at least 5 calls, at most 200
SIZES = [256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def main() -> None:
    """Run the program, which starts itself on each rank of each checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="FOLDER", help="before and after")
    parser.add_argument("--link", default="1gbit", metavar="RATES", help="separated by commas")
    parser.add_argument("--ranks", default="2", metavar="NUMBERS", help="separated by commas")
    parser.add_argument("--what", default="calls,ddp,deepspeed", help="some of calls, ddp, deepspeed")
    parser.add_argument("--largest", type=int, default=64, metavar="MIB", help="largest tensor in MiB")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each checkout (default: 2)")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    options = parser.parse_args()
    cells: list[dict] = []
    for link in options.link.split(","):
        for ranks in map(int, options.ranks.split(",")):
            for what in options.what.split(","):
                cells += _compared(options, link, ranks, what)
    if options.output:
        command = "python -m benchmarks.two_checkouts " + " ".join(sys.argv[1:])
        options.output.write_text(
            json.dumps({"command": command, "torch": torch.__version__, "cells": cells}, indent=1)
        )


def _compared(options: argparse.Namespace, link: str, ranks: int, what: str) -> list[dict]:
    """Seconds of both checkouts behind one link, and prints them."""
    found: list[dict[str, list[float]]] = [{}, {}]
    for turn in range(2 * options.rounds):
        which = (turn + turn // 2) % 2  # before, after, after, before, ...
        for name, seconds in _measured(options.checkouts[which], link, ranks, what, options.largest).items():
            found[which].setdefault(name, []).append(seconds)
    cells = []
    for name, before in found[0].items():
        after = found[1][name]
        ratio = statistics.mean(after) / statistics.mean(before)
        print(f"{link:>10} {ranks} ranks {name:>22}: {_ms(before)} -> {_ms(after)} ms, {ratio:.3f} times", flush=True)
        cells.append({"link": link, "ranks": ranks, "what": name, "before_s": before, "after_s": after})
    return cells


def _ms(seconds: list[float]) -> str:
    return " ".join(f"{1e3 * each:.2f}" for each in seconds)


def _measured(checkout: Path, link: str, ranks: int, what: str, largest: int) -> dict[str, float]:
    """One run of a checkout on all ranks."""
    from benchmarks.laboratory.start import start

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.json"
        environment = {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        settings = [f"{name}={value}" for name, value in environment.items()]
        program = [sys.executable, str(Path(__file__).resolve())]
        command = ["env", "-C", folder, *settings, *program, "--on-rank", what, str(largest), str(file)]
        if start(command, ranks, 1, link):
            raise SystemExit(f"{checkout}: {what} failed")
        return json.loads(file.read_text())


# ------------------------------------------------------------------ on each rank


def on_rank(what: str, largest: int, file: str) -> None:
    """Measure, and write the seconds on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with contextlib.redirect_stdout(sys.stderr):
        measure = {"calls": _calls, "ddp": _ddp_steps, "deepspeed": _deepspeed_steps}[what]
        seconds = dict(measure(largest << 20))
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def _gradients(numel: int) -> Tensor:
    """Gaussian values whose scale changes from row to row, as gradients' do."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randn(numel // 1024, 1024, generator=generator)
    return (rows * torch.randn(numel // 1024, 1, generator=generator).exp()).view(-1)


def _calls(largest: int) -> Iterator[tuple[str, float]]:
    from ncz_plugins import Communicator

    with Communicator() as communicator:
        for nbytes in [size for size in SIZES if size <= largest]:
            gradients = _gradients(nbytes // 4)
            tensor = gradients.clone()

            def call(tensor: Tensor = tensor, gradients: Tensor = gradients) -> None:
                communicator.all_reduce(tensor.copy_(gradients), dist.ReduceOp.AVG, role="gradient")

            first = _median(call, 3)
            calls = torch.tensor([min(200.0, max(5.0, SECONDS_OF_A_SIZE / first))])
            dist.broadcast(calls, 0)
            yield f"all_reduce {nbytes >> 10} KiB", _median(call, int(calls))


def _median(call: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        dist.barrier()
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def _ddp_steps(largest: int) -> Iterator[tuple[str, float]]:
    from torch.nn.parallel import DistributedDataParallel

    from ncz_plugins.torch import ddp

    model = DistributedDataParallel(_model())
    ddp.compress(model, "ncclz")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        optimizer.step()

    _median(step, WARM_UP)
    yield "DDP step", _median(step, STEPS)


def _deepspeed_steps(largest: int) -> Iterator[tuple[str, float]]:
    import deepspeed

    import ncz_plugins.deepspeed  # noqa: F401 - so that DeepSpeed takes the key

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "communication_compression": "ncclz",
    }
    model = _model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> None:
        engine.backward(engine(torch.randn(BATCH, WIDTH)).square().mean())
        engine.step()

    _median(step, WARM_UP)
    assert engine.communication_compression.stats.total.compressed_calls
    yield "DeepSpeed ZeRO 2 step", _median(step, STEPS)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--on-rank"]:
        on_rank(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main()
