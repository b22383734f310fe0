"""Measures the CUDA kernels, first each beside its prediction, and the copy bandwidth of the same card in the same run.

    python benchmarks/gpu_kernels.py [--json FILE]
    python benchmarks/gpu_kernels.py --dry      without a GPU: makes the calls of the first table, and launches nothing

The first table has the microseconds of each kernel for 64 MiB of float32 in one frame, by torch's profiler, and what
benchmarks/results/gpu-predicted.json says of it. Several tensors take turns, so that the cache holds none of them.
"auto at random" is the default configuration; sums are of two ranks.

The second table has whole operations. Each is captured in a CUDA graph, so that launches from Python don't count, and
the graphs are replayed in turns with a plain copy of the tensor; figures are medians. GB/s counts the float32 bytes
that go in or come out. "of floor" is the speed as a share of what the copy bandwidth allows: with c bytes of frame per
element, encode and decode move 4 + c bytes, and decode + add + encode 4 + 2 c.

Where nvCOMP is installed (pip install nvidia-nvcomp-cu13), its ANS and Bitcomp code the same integers, as int8 and all
of them at once; quantizing counts for them as it does for ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from codec import CODERS, gradient, low_entropy
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType

from ncz_plugins import kernels
from ncz_plugins.core.whole_files import write_whole
from ncz_plugins.kernels.backend import Decoding, GpuBackend, Sum
from ncz_plugins.kernels.format import (
    SCALE_BLOCK,
    Coder,
    Coding,
    Noise,
    Predictor,
    Rows,
    max_frame_bytes,
    packed_bytes,
    rate_blocks_of,
)

MIB = 1 << 20
DATA = {"gradient": gradient, "low entropy": low_entropy}
CODERS_ON_GPUS = {name: coding for name, coding in CODERS.items() if coding.coder != Coder.RANS}
PREDICTED = Path(__file__).resolve().parent / "results" / "gpu-predicted.json"
ELEMENTS = 64 * MIB // 4  # of each tensor of the first table
SMALL_ELEMENTS = 1 << 16  # without a GPU
TENSORS, TURNS = 4, 5
BITS, RANKS = 4, 2
PICOSECONDS_PER_BYTE = 320  # of a link of 25 Gbit/s, for the selector


# ------------------------------------------------------------------ each kernel


class Nothing:
    """A launcher that launches nothing, and remembers which kernels it was to launch."""

    def __init__(self):
        self.kernels: set[str] = set()

    def launch(self, kernel: str, *_) -> None:
        self.kernels.add(kernel.removeprefix("ncz_"))


class Case:
    """A tensor, its steps, and room for what is made of it."""

    def __init__(self, number: int, elements: int, device: str):
        values, steps, _ = gradient(elements)
        self.x, self.steps = values.roll(number * 4096).to(device), steps.roll(number * 32).to(device)
        self.inverse, self.out = 1 / self.steps, torch.empty_like(self.x)
        # Each is memory of its own, which begins at a multiple of what kernels read at a time.
        room = max_frame_bytes(elements)
        self.frame, self.sum = (torch.empty(room, dtype=torch.uint8, device=device) for _ in range(2))


def works_on(backend: GpuBackend, cases: list[Case]) -> dict[str, Callable[[], None]]:
    """What makes the calls of each kind, once for each case."""
    costs = backend.costs._replace(link=PICOSECONDS_PER_BYTE)
    fixed, huffman = (Coding(coder, Predictor.NONE, costs) for coder in (Coder.FIXED, Coder.HUFFMAN))
    auto, noise = Coding(Coder.AUTO, Predictor.AUTO, costs), Noise(1, 1)
    return {
        "statistics": lambda: [backend.statistics_of([case.x]) for case in cases],
        "auto at random": frames_work(backend, cases, auto, noise),
        "fixed": frames_work(backend, cases, fixed, None),
        "fixed at random": frames_work(backend, cases, fixed, noise),
        "huffman": frames_work(backend, cases, huffman, None),
        "huffman at random": frames_work(backend, cases, huffman, noise),
        f"{BITS} bits": rate_work(backend, cases, adds=False),
        f"{BITS} bits, more ranks": rate_work(backend, cases, adds=True),
    }


def frames_work(backend: GpuBackend, cases: list[Case], coding: Coding, noise: Noise | None) -> Callable[[], None]:
    """Encodes, decodes, adds to values, and adds and encodes: all that two ranks or more do with a frame."""
    sizes = [backend.encode_sums([Sum(case.x, case.inverse, case.frame)], coding, noise) for case in cases]
    on_card = cases[0].x.is_cuda  # else nothing was written, and any length does
    lengths = [int(size) if on_card else case.frame.numel() for size, case in zip(sizes, cases)]
    frames = [case.frame[:length].clone() for case, length in zip(cases, lengths)]

    def work() -> None:
        for case, frame in zip(cases, frames):
            backend.encode_sums([Sum(case.x, case.inverse, case.sum)], coding, noise)
            backend.decode_frames([Decoding(frame, case.steps, case.out)])
            backend.decode_sums([Sum(case.x, case.inverse, case.out, [frame])], [case.steps], noise)
            backend.encode_sums([Sum(case.x, case.inverse, case.sum, [frame])], coding, noise)

    return work


def rate_work(backend: GpuBackend, cases: list[Case], adds: bool) -> Callable[[], None]:
    """What a fixed rate does.

    Args:
        adds: as with more than two ranks: codes are added up, and sums of them decoded.
    """
    x = cases[0].x
    rows, blocks = Rows.of(x.numel(), 1, x.numel()), rate_blocks_of(x.numel())
    magnitudes = torch.empty(blocks, dtype=torch.bfloat16, device=x.device)
    packed = torch.zeros(RANKS, blocks * packed_bytes(BITS), dtype=torch.uint8, device=x.device)
    sums = torch.zeros(blocks * packed_bytes(BITS + 1), dtype=torch.uint8, device=x.device)

    def work() -> None:
        for case in cases:
            backend.block_magnitudes(case.x, rows, magnitudes)
            backend.pack(case.x, rows, magnitudes, BITS, packed[0])
            if adds:
                backend.add_packed(packed.view(-1), RANKS, BITS, sums, BITS + 1)
                backend.unpack(sums, 1, BITS + 1, rows, magnitudes, 7.0, case.out)
            else:
                backend.unpack(packed.view(-1), RANKS, BITS, rows, magnitudes, 7.0, case.out)

    return work


def kernel_rows(kind: str, work: Callable[[], None], predicted: dict[str, list[float]]) -> list[dict]:
    """Time of each kernel that the calls launch, and what is predicted of it."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(TURNS):
            work()
        torch.cuda.synchronize()
    times = defaultdict(list)
    for event in profile.events():
        if event.device_type == DeviceType.CUDA:
            times[event.name].append(event.time_range.end - event.time_range.start)
    if not any(name.startswith("ncz_") for name in times):
        sys.exit(f"torch's profiler saw no kernels in the calls of {kind!r}: does CUPTI work here?")
    rows = []
    for name, us in times.items():
        kernel = name.removeprefix("ncz_")
        row = {"kind": kind, "kernel": kernel, "us": statistics.median(us), "least": min(us), "most": max(us)}
        rows.append(row | {"launches": len(us) / TURNS / TENSORS, "predicted": predicted.get(kernel)})
    return rows


def kernel_table(rows: list[dict], cards: list[str]) -> Table:
    table = Table(title="us of each kernel, 64 MiB of float32 in one frame; predicted for a card, not measured")
    for heading in ("calls", "kernel", "us", "least", "most", "launches", *(f"predicted, {card}" for card in cards)):
        table.add_column(heading, justify="left" if heading in ("calls", "kernel") else "right")
    for row in rows:
        measured = [f"{row[name]:.1f}" for name in ("us", "least", "most", "launches")]
        predicted = [f"{us:.1f}" for us in row["predicted"] or []]
        table.add_row(row["kind"], row["kernel"][:40], *measured, *predicted)
    return table


def kernels_of_all_kinds() -> list[dict]:
    """The rows of the first table."""
    predicted, backend, rows = json.loads(PREDICTED.read_text())["us"], kernels.cuda_backend(), []
    cases = [Case(number, ELEMENTS, "cuda") for number in range(TENSORS)]
    for kind, work in works_on(backend, cases).items():
        rows += kernel_rows(kind, work, predicted.get(kind, {}))
        backend.check()
    return rows


def require_predicted_kernels() -> None:
    """Make the calls without launching. Ends the process if something is predicted that they don't launch."""
    from ncz_plugins.kernels.cuda import CudaBackend

    launcher, predicted = Nothing(), json.loads(PREDICTED.read_text())["us"]
    works = works_on(CudaBackend(launcher), [Case(0, SMALL_ELEMENTS, "cpu")])
    for kind, kernels_of_kind in predicted.items():
        launcher.kernels.clear()
        works.get(kind, lambda: None)()
        if missing := kernels_of_kind.keys() - launcher.kernels:
            sys.exit(f"{PREDICTED.name} predicts of {kind!r} what is not launched: {', '.join(sorted(missing))}")


# ------------------------------------------------------------------ whole operations


def captured(work):
    """What replays `work` as a graph, and keeps it, with the tensors that the graph reads. The first run compiles."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay(work=work):
        graph.replay()

    return replay


def milliseconds(runs: dict, repeats: int) -> dict:
    """Median time of each on the current stream; they take turns."""
    times: dict = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(each) for name, each in times.items()}


def nvcomp_runs(backend, x, inverse, steps, out):
    """Yield for each of nvCOMP's coders (name, bytes that it comes to, what encodes, what decodes to `out`)."""
    try:
        from nvidia import nvcomp
    except ImportError:
        return
    codes = torch.empty(x.numel(), dtype=torch.int32, device=x.device)
    narrow = torch.empty(x.numel(), dtype=torch.int8, device=x.device)  # what nvCOMP reads must stay
    stream = torch.cuda.current_stream().cuda_stream
    for algorithm in ("ANS", "Bitcomp"):
        codec = nvcomp.Codec(algorithm=algorithm, data_type="|i1", cuda_stream=stream)

        def encode(codec=codec):
            backend.quantize(x, inverse, codes)
            narrow.copy_(codes)
            return codec.encode(nvcomp.as_array(narrow, cuda_stream=stream))

        coded = encode()

        def decode(codec=codec, coded=coded):
            codes.copy_(torch.from_dlpack(codec.decode(coded, data_type="|i1")))
            backend.dequantize(codes, steps, out)

        expected = codes.clone()
        decode()
        torch.testing.assert_close(out, expected * steps.repeat_interleave(SCALE_BLOCK)[: out.numel()])
        yield f"nvCOMP {algorithm}", coded.buffer_size, encode, decode


def measure(backend, x, steps, frame_elements: int, repeats: int) -> tuple[float, list[dict]]:
    """The copy bandwidth in GB/s moved, and one row per coder and operation."""
    inverse = 1 / steps
    cuts = [slice(i, min(i + frame_elements, x.numel())) for i in range(0, x.numel(), frame_elements)]
    steps_of = [slice(cut.start // SCALE_BLOCK, -(-cut.stop // SCALE_BLOCK)) for cut in cuts]
    others, out, copy = x.roll(1), torch.empty_like(x), torch.empty_like(x)
    buffers = torch.empty(2, len(cuts), max_frame_bytes(frame_elements), dtype=torch.uint8, device=x.device)
    runs = {"copy": captured(lambda: copy.copy_(x))}
    shares = {}
    for name, coding in CODERS_ON_GPUS.items():
        sums = [Sum(x[cut], inverse[at], buffer) for cut, at, buffer in zip(cuts, steps_of, buffers[0])]
        sizes = backend.encode_sums(sums, coding).tolist()
        frames = [buffer[:size].clone() for buffer, size in zip(buffers[0], sizes)]
        shares[name] = sum(frame.numel() for frame in frames) / x.numel()

        decodings = [Decoding(frame, steps[at], out[cut]) for cut, at, frame in zip(cuts, steps_of, frames)]
        added = [
            Sum(others[cut], inverse[at], buffer, [frame])
            for cut, at, frame, buffer in zip(cuts, steps_of, frames, buffers[1])
        ]

        def encode(sums=sums, coding=coding):
            backend.encode_sums(sums, coding)

        def decode(decodings=decodings):
            backend.decode_frames(decodings)

        def reduce(added=added, coding=coding):
            backend.encode_sums(added, coding)

        for operation in (encode, decode, reduce):
            runs[name, operation.__name__] = captured(operation)
        backend.check()
    for name, coded_bytes, encode, decode in nvcomp_runs(backend, x, inverse, steps, out):
        shares[name] = coded_bytes / x.numel()
        runs[name, "encode"], runs[name, "decode"] = encode, decode
    times = milliseconds(runs, repeats)
    bandwidth = 8e-6 * x.numel() / times.pop("copy")
    rows = []
    for (name, operation), time in times.items():
        moved = 4 + shares[name] * (2 if operation == "reduce" else 1)
        rows.append(
            {
                "coder": name,
                "operation": operation,
                "ratio": 4 / shares[name],
                "gigabytes_per_second": 4e-6 * x.numel() / time,
                "of_floor": 1e-6 * moved * x.numel() / time / bandwidth,
            }
        )
    return bandwidth, rows


def operations(repeats: int, mib: int, frames_mib: list[int]) -> list[dict]:
    """The second table: of each kind of data and size of frames."""
    found = []
    for data, make in DATA.items():
        x, steps = (each.cuda() for each in make(mib * MIB // 4)[:2])
        for frame_mib in frames_mib:
            bandwidth, rows = measure(kernels.cuda_backend(), x, steps, frame_mib * MIB // 4, repeats)
            found.append({"data": data, "frame_mib": frame_mib, "copy_gigabytes_per_second": bandwidth, "rows": rows})
    return found


def operation_table(found: dict) -> Table:
    bandwidth = found["copy_gigabytes_per_second"]
    table = Table(title=f"{found['data']}, frames of {found['frame_mib']} MiB; a copy moves {bandwidth:.0f} GB/s")
    for heading in ("coder", "operation", "ratio", "GB/s", "of floor"):
        table.add_column(heading, justify="left" if heading in ("coder", "operation") else "right")
    for row in found["rows"]:
        speed = f"{row['gigabytes_per_second']:.0f}"
        table.add_row(row["coder"], row["operation"], f"{row['ratio']:.2f}", speed, f"{row['of_floor']:.2f}")
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the tensor of the second table")
    parser.add_argument("--frame-mib", type=int, nargs="+", default=[4, 64], help="sizes of its frames")
    parser.add_argument("--repeats", type=int, default=20, help="of its operations")
    parser.add_argument("--dry", action="store_true", help="launch nothing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = Console()
    if arguments.dry:
        require_predicted_kernels()
        return print("all calls were made, and nothing was launched")
    report = {"kernels": kernels_of_all_kinds()}
    console.print(kernel_table(report["kernels"], json.loads(PREDICTED.read_text())["cards"]))
    if arguments.json:  # what there is, if the rest fails
        write_whole(arguments.json, json.dumps(report, indent=1))
    torch.cuda.set_stream(torch.cuda.Stream())  # nvCOMP takes the default one to mean one of its own
    report["operations"] = operations(arguments.repeats, arguments.mib, arguments.frame_mib)
    for found in report["operations"]:
        console.print(operation_table(found))
    if arguments.json:
        write_whole(arguments.json, json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
