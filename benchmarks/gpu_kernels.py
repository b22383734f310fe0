"""Measures the CUDA kernels, and the copy bandwidth of the same card in the same run.

    python benchmarks/gpu_kernels.py [--json FILE]

Each operation on all frames of the tensor is captured in a CUDA graph, so that launches from Python don't count, and
the graphs are replayed in turns with a plain copy of the tensor; figures are medians. GB/s counts the float32 bytes
that go in or come out.
"of floor" is the speed as a share of what the copy bandwidth allows: with c bytes of frame per element, encode and
decode move 4 + c bytes, and decode + add + encode 4 + 2 c.

Where nvCOMP is installed (pip install nvidia-nvcomp-cu13), its ANS and Bitcomp code the same integers, as int8 and all
of them at once; quantizing counts for them as it does for ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from codec import CODERS, gradient, low_entropy
from rich.console import Console
from rich.table import Table

from ncz_plugins import kernels
from ncz_plugins.core.whole_files import write_whole
from ncz_plugins.kernels.backend import Decoding, Sum
from ncz_plugins.kernels.format import SCALE_BLOCK, max_frame_bytes

MIB = 1 << 20
DATA = {"gradient": gradient, "low entropy": low_entropy}


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
    for name, coding in CODERS.items():
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the tensor")
    parser.add_argument("--frame-mib", type=int, nargs="+", default=[4, 64], help="sizes of frames")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    backend = kernels.cuda_backend()
    console = Console()
    report = []
    torch.cuda.set_stream(torch.cuda.Stream())  # nvCOMP takes the default one to mean one of its own
    for data, make in DATA.items():
        x, steps = (each.cuda() for each in make(arguments.mib * MIB // 4))
        for frame_mib in arguments.frame_mib:
            bandwidth, rows = measure(backend, x, steps, frame_mib * MIB // 4, arguments.repeats)
            report.append({"data": data, "frame_mib": frame_mib, "copy_gigabytes_per_second": bandwidth, "rows": rows})
            table = Table(title=f"{data}, frames of {frame_mib} MiB; a copy moves {bandwidth:.0f} GB/s")
            for heading in ("coder", "operation", "ratio", "GB/s", "of floor"):
                table.add_column(heading, justify="left" if heading in ("coder", "operation") else "right")
            for row in rows:
                speed = f"{row['gigabytes_per_second']:.0f}"
                table.add_row(row["coder"], row["operation"], f"{row['ratio']:.2f}", speed, f"{row['of_floor']:.2f}")
            console.print(table)
    if arguments.json:
        write_whole(arguments.json, json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
