"""Measures the codec and other compressors on real and synthetic data, and what the selector's choices cost.

    python -m benchmarks.codec_table --write    # from the repository's root; without --write it only prints
    python -m benchmarks.codec_table --report   # measures nothing, writes the pages from the committed files

For each data set and bound: what benchmarks/compressors.py measures, the ratio with each coder and predictor forced on
all frames, and, for links of several speeds, the time that the selector estimates (bytes / link + coding, by
`format.SelectorCosts`) for its own choices and for the best of those forced. Repetitions are interleaved, figures are
medians on one core. Trust the ratios to memcpy more than absolute speeds.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import data, pictures
from benchmarks.codec import machine
from benchmarks.compressors import LIBRARIES, compare, missing
from benchmarks.pages import put_into
from ncz_plugins import kernels
from ncz_plugins.cli.codec import plot, speed
from ncz_plugins.cli.codec.round_trip import RoundTrip, codes_of, round_trip
from ncz_plugins.core.codec.tensor_codec import QuantizingCodec
from ncz_plugins.core.config import Config
from ncz_plugins.kernels.format import HEADER, HEADER_BYTES, Coder, SelectorCosts
from ncz_plugins.kernels.reference.symbols import predict

ROOT = Path(__file__).resolve().parents[1]
MARKDOWN, MARKS = ROOT / "docs" / "results" / "codec.md", ("<!-- figures -->", "<!-- end of figures -->")
KERNELS_MARKS = "<!-- kernels -->", "<!-- end of kernels -->"
NOTEBOOK = ROOT / "docs" / "notebook" / "codec.md"
RESULTS = ROOT / "benchmarks" / "results" / "codec-data.json"
CURVES, CURVES_OF = ROOT / "benchmarks" / "results" / "codec-bounds.json", "gradients-step-200"  # of the picture
KERNELS = ROOT / "benchmarks" / "results" / "codec-cpu.json"  # by benchmarks/codec.py

QUANTIZERS: dict[str, dict[str, Any]] = {  # name of a bound in the tables: settings
    "default": {},
    "default, nearest": {"kind": "error_bound"},
    "rms 1": {"value": 1},
    "rel 0.01": {"mode": "rel", "value": 1e-2, "block": 0},
    "rel 0.001": {"mode": "rel", "value": 1e-3, "block": 0},
    "rel 0.001 per block": {"mode": "rel", "value": 1e-3},
    "range 0.001": {"mode": "range", "value": 1e-3, "block": 0},
    "range 0.0001": {"mode": "range", "value": 1e-4, "block": 0},
    "range 1e-06": {"mode": "range", "value": 1e-6, "block": 0},
    "lossless": {"kind": "lossless"},
}
GRADIENT = ("default", "default, nearest", "rel 0.01", "rel 0.001")
FIELD = ("range 0.001", "range 0.0001", "range 1e-06")
BOUNDS = {  # of each data set
    "gradients-step-0": GRADIENT,
    "gradients-step-50": GRADIENT,
    "gradients-step-200": (*GRADIENT, "lossless"),
    "navier-stokes-velocity": (*FIELD, "lossless"),
    "navier-stokes-vorticity": FIELD,
    "lennard-jones-positions": FIELD,
    "lennard-jones-velocities": (*FIELD, "lossless"),
    "noise": ("default", "default, nearest", "rms 1"),
    "constant": ("rel 0.001 per block",),
    "sparse": ("rel 0.01", "rel 0.001"),
    "ramps": ("range 0.001", "range 0.0001"),
    "mixed-scales": ("default", "default, nearest", "rel 0.001 per block"),
    "random-bits": ("lossless",),
    "heavy-tailed": ("default", "default, nearest", "rel 0.001 per block"),
}
LINKS = (0.1, 1, 10, 100)  # Gbit/s
CODERS = ("raw", "fixed", "huffman", "rans")
PREDICTORS = ("none", "delta")
TARGET = 0.03  # that the selector's choices may cost more than the best


def measure(name: str, bound: str) -> dict[str, Any]:
    """One row of the tables."""
    x = data.load(name)

    def run(link: float = 1, **entropy: str) -> RoundTrip:
        return round_trip(x, Config(quantizer=QUANTIZERS[bound], entropy=entropy, transport={"link_gbps": link}))

    auto = run()
    ours, others = compare(auto)
    row = {
        "data": name,
        "bound": bound,
        "megabytes": x.nbytes / 1e6,
        "entropy_bits": auto.entropy_bits,
        "of_bound": auto.of_bound,
        "auto": {"ratio": auto.ratio, "bits_per_value": auto.bits_per_value, "coders": auto.coders} | asdict(ours),
        "peers": {
            r.library.name: {key: getattr(r, key) for key in ("ratio", "of_bound", "encode", "decode")} for r in others
        },
    }
    if isinstance(auto.codec, QuantizingCodec):
        forced = {f"{c} {p}": run(coder=c, predictor=p) for c in CODERS for p in PREDICTORS}
        best = min(forced, key=lambda pair: forced[pair].bytes_out)
        best_speeds = speed.speeds(forced[best])
        row["forced"] = {pair: each.ratio for pair, each in forced.items()}
        row["best"] = {"coder": best, "ratio": forced[best].ratio} | asdict(best_speeds)
        row["selector"] = [judge(run(link), list(forced.values())) | {"link_gbps": link} for link in LINKS]
    return row


def judge(auto: RoundTrip, forced: list[RoundTrip]) -> dict[str, Any]:
    """What the choices of `auto` cost beyond the best.

    over_best: of the coders and predictors forced on the whole array; over_best_per_frame: chosen anew for each frame,
    with hindsight. Shares, 0.01 for 1 %.
    """
    costs = auto.codec.coding.costs
    own = sum(frame_costs(auto, costs))
    of_frames = np.array([frame_costs(each, costs) for each in forced])
    return {
        "coders": auto.coders,
        "over_best": own / of_frames.sum(axis=1).min() - 1,
        "over_best_per_frame": own / of_frames.min(axis=0).sum() - 1,
    }


def frame_costs(made: RoundTrip, costs: SelectorCosts) -> list[float]:
    """Picoseconds to code and to send each frame, as the selector reckons, but by what the frame really became."""
    result = []
    for index, frame in enumerate(made.frames):
        _, _, coder, predictor, _, count, *_ = HEADER.unpack(frame[:HEADER_BYTES].numpy())
        coding = {Coder.RAW: costs.raw, Coder.FIXED: costs.fixed, Coder.HUFFMAN: costs.huffman, Coder.RANS: costs.rans}
        total = costs.link * frame.numel() + coding[coder] * count
        if coder == Coder.RANS:
            mode = int(frame[HEADER_BYTES])
            symbols = predict(codes_of(made.codec, index).numpy(), predictor)
            total += costs.rans_rest * np.count_nonzero(symbols != mode)
        result.append(total)
    return result


# ------------------------------------------------------------------ the page

SHOWN = {  # what the page of results has of the notebook's table
    "gradients-step-200": ("default", "default, nearest", "rel 0.001", "lossless"),
    "navier-stokes-velocity": ("range 0.001", "range 1e-06"),
    "lennard-jones-positions": ("range 0.001",),
    "sparse": ("rel 0.001",),
    "heavy-tailed": ("default",),
}

PAGE = """# Notebook: codec

Laboratory notebook: every data set, bound and compressor. Nobody has to read it: [today's results](../results/codec.md)
are one page.

How much the data sets in `benchmarks/data` shrink, with our coders and with other compressors. {where}. Repeat with

```sh
.venv/bin/python -m benchmarks.codec_table --write
```

`benchmarks/results/codec-data.json` holds all figures, with the errors that each compressor leaves.

**default** bounds errors to 0.375 rms of each block of 128 elements and rounds at random, so that errors have a mean of
0. **default, nearest** (`quantizer.kind: error_bound`) has the same bound, to which a step twice as wide suffices.
Other bounds are relative to the whole tensor or, "per block", to 4,096 elements (`quantizer.block`). All compressors
keep the bound: zstd, lz4 and blosc2 get the same codes as our coders; zfp and SZ3 get the floats and the bound, and
never round at random. Where each block has its own bound, their floats are divided by it. All run with their default
settings. zfp and SZ3 see an array in its shape, in up to three dimensions. Our frames hold flat data. Each frame
decodes alone, and only our codes can be added without decoding to floats.

## Size

Ratios to float32; higher is better. **entropy** is the order-0 entropy of the codes in bits: a coder without a
predictor can reach a ratio of 32 / entropy. **bits** is the size per value that `auto` reaches at 1 Gbit/s,
everything counted. **best** is the coder and predictor that give the smallest result when forced on all frames.

{sizes}

## Speed

Encoding / decoding speed as a multiple of memcpy of the same bytes, on the same core in the same run (memcpy:
{memcpy}).

{speeds}

## Selector

How much more the choices of `auto` cost than the best single coder and predictor for the whole array. The cost is the
selector's own estimate of sending and coding time, for links of {links} Gbit/s. It can be below zero, because each
frame gets its own choice. The target is at most {target:.0%}. **Selector: at most {worst:.1f} % over the best.**

{choices}

## The CPU kernels

{kernels}

`decode, add, encode` is what a rank does with a frame that it adds its own values to. Of "low entropy" a code takes 0.3
bit, of the "smooth field" without delta 9 to 11 bits; both are rounded to the nearest. Beyond input and output, the
kernels need 4 bytes per code and 64 KiB to write a frame, and 64 KiB to read one. Tests measure that.

HUFFMAN decodes up to six small codes with one table look-up and encodes them in pairs. With extra bits, each symbol
takes a step of its own. All loops ask for memory ahead, as a processor's own prefetching ends with each page.

AVX2's decoders store outputs of 1 MiB or more past the caches, but for sums of two ranks, whose values were just read.
Through the caches, a processor reads the memory that it is about to write. The decoder of FIXED waited for that half of
its time on an Intel Xeon: it took 3.7 ms instead of 7.5 for 64 MiB in frames of 4 MiB, and that of a fixed rate 3.9
instead of 6.5, both builds in turns.
"""


def page(rows: list[dict[str, Any]], about: dict[str, Any], speeds_of_kernels: dict[str, Any]) -> str:
    """docs/notebook/codec.md, as a whole."""
    names = [name for name in (library.name for library in LIBRARIES) if any(name in row["peers"] for row in rows)]
    sizes = [["data", "bound", "entropy", "bits", "auto", "best", "", *names]]
    speeds = [["data", "bound", "auto", "best", "", *names]]
    choices = [["data", "bound", *(f"{link:g}" for link in LINKS)]]
    for row in rows:
        label = [row["data"], row["bound"]]
        auto, best = row["auto"], row.get("best")
        entropy = "" if row["entropy_bits"] is None else f"{row['entropy_bits']:.2f}"
        found = [f"{best['ratio']:.2f}", best["coder"].replace(" none", "")] if best else ["", ""]
        ratios = [f"{row['peers'][name]['ratio']:.2f}" for name in names]
        sizes.append([*label, entropy, f"{auto['bits_per_value']:.2f}", f"{auto['ratio']:.2f}", *found, *ratios])
        memcpy = auto["memcpy"]
        found = [_pair(best, best["memcpy"]), best["coder"].replace(" none", "")] if best else ["", ""]
        speeds.append([*label, _pair(auto, memcpy), *found, *(_pair(row["peers"][name], memcpy) for name in names)])
        if best:
            choices.append([*label, *(f"{100 * judged['over_best']:+.1f} %" for judged in row["selector"])])
    worst = max((judged["over_best"] for row in rows for judged in row.get("selector", ())), default=0.0)
    memcpy = [row["auto"]["memcpy"] for row in rows]
    return PAGE.format(
        where=about["where"],
        sizes=_table(sizes),
        speeds=_table(speeds),
        choices=_table(choices),
        memcpy=f"{min(memcpy):.1f} to {max(memcpy):.1f} GB/s",
        links=", ".join(f"{link:g}" for link in LINKS),
        target=TARGET,
        worst=100 * max(0.0, worst),
        kernels=kernels_table(speeds_of_kernels, lambda row: row["data"] == "gradient" or row["kernels"] == "avx2"),
    )


def kernels_summary(found: dict[str, Any]) -> str:
    """The table of kernels in docs/results/codec.md."""
    shown = {
        "avx2": ("fixed", "huffman", "rans", "raw", "auto"),
        "portable": ("fixed", "huffman"),
        "reference": ("fixed",),
    }
    return kernels_table(found, lambda row: row["data"] == "gradient" and row["coder"] in shown.get(row["kernels"], ()))


def kernels_table(found: dict[str, Any], shown: Callable[[dict[str, Any]], bool]) -> str:
    """Some rows of what benchmarks/codec.py found, and where."""
    operations = {
        "encode": "encode",
        "decode": "decode",
        "reduce": "decode, add, encode",
        "statistics": "measure scales",
    }
    rows = [["kernels, coder", "data", "ratio", *operations.values()]]
    for row in filter(shown, found["results"]):
        speeds = [f"{row[each]['gigabytes_per_second']:.2g} ({row[each]['of_memcpy']:.2f})" for each in operations]
        rows.append([f"{row['kernels']}, {row['coder'].upper()}", row["data"], f"{row['ratio']:.2f}", *speeds])
    on = found["machine"]
    return (
        f"GB/s of float32 on one core of an {on['cpu']}, {found['megabytes']} MiB in frames of "
        f"{found['frame_bytes'] >> 20} MiB, and in brackets the ratio to memcpy on the same core in the same run "
        f"(torch {on['torch']}). The gradient is Gaussian, quantized by the default.\n\n{_table(rows)}"
    )


def summary(rows: list[dict[str, Any]]) -> str:
    """The table in docs/results/codec.md: ratios, speeds beside memcpy, and how good the selector is."""
    names = [name for name in (library.name for library in LIBRARIES) if any(name in row["peers"] for row in rows)]
    lines = [["data", "bound", "auto", "best", *names, "speed of auto"]]
    for row in rows:
        if row["bound"] in SHOWN.get(row["data"], ()):
            auto, best = row["auto"], row.get("best")
            ratios = [f"{row['peers'][name]['ratio']:.1f}" for name in names]
            ratios = [f"{auto['ratio']:.1f}", f"{best['ratio']:.1f}" if best else "", *ratios]
            lines.append([row["data"], row["bound"], *ratios, _pair(auto, auto["memcpy"])])
    worst = max((judged["over_best"] for row in rows for judged in row.get("selector", ())), default=0.0)
    selector = (
        f"**The choices of `auto` take at most {100 * max(0.0, worst):.1f} % more time than the best single coder**, "
        f"by the selector's own estimate for several links; the target is {TARGET:.0%}. `best` is the smallest, not "
        "the fastest."
    )
    return f"{_table(lines)}\n\n{selector}"


def write_pages() -> None:
    """Write all tables from the committed files."""
    found, speeds_of_kernels = json.loads(RESULTS.read_text()), json.loads(KERNELS.read_text())
    NOTEBOOK.write_text(page(found["rows"], found, speeds_of_kernels))
    put_into(MARKDOWN, f"\n{summary(found['rows'])}\n", MARKS)
    put_into(MARKDOWN, f"\n{kernels_summary(speeds_of_kernels)}\n", KERNELS_MARKS)


def _pair(speeds: dict[str, float], memcpy: float) -> str:
    return f"{speeds['encode'] / memcpy:.2g} / {speeds['decode'] / memcpy:.2g}"


def _table(rows: list[list[str]]) -> str:
    heading, *body = rows
    lines = [heading, ["---"] * 2 + ["---:"] * (len(heading) - 2), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def where() -> str:
    """The machine and the versions, in one sentence."""
    facts = machine()
    versions = {each.name: metadata.version(each.module) for each in LIBRARIES if each not in missing()}
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"One core of {facts['cpu']}, kernels {kernels.cpu_backend().name}; Python {facts['python']}, torch "
        f"{facts['torch']}, numpy {facts['numpy']}; {libraries} (version of the Python package)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="data sets; default: all")
    parser.add_argument(
        "--write", action="store_true", help=f"write {', '.join(map(_short, (MARKDOWN, NOTEBOOK, RESULTS)))}"
    )
    parser.add_argument(
        "--report", action="store_true", help="measure nothing: write the pages from the committed files"
    )
    options = parser.parse_args()
    if options.report:
        return write_pages()
    if unknown := [name for name in options.names if name not in BOUNDS]:
        parser.error(f"no data set is called {', '.join(unknown)}; there are {', '.join(BOUNDS)}")
    cases = [(name, bound) for name in options.names or BOUNDS for bound in BOUNDS[name]]

    console = Console(width=None if sys.stdout.isatty() else 160)
    rows, started = [], time.perf_counter()
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for name, bound in cases:
            progress.update(task, description=name)
            rows.append(measure(name, bound))
            progress.advance(task)
    about = {"where": where()}
    console.print(Markdown(summary(rows)))
    console.print(f"{time.perf_counter() - started:.0f} s")
    if options.write:
        report = {"command": shlex.join(["python", "-m", "benchmarks.codec_table", *sys.argv[1:]])} | about
        RESULTS.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n")
        write_curves()
        write_pages()


def write_curves() -> None:
    """Measure and draw ratios against bounds."""
    found = plot.measure(data.load(CURVES_OF), Config())
    CURVES.write_text(json.dumps({"data": CURVES_OF, **found}, indent=1) + "\n")
    pictures.redraw("codec")


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
