"""Compares what `ncz plan` predicts with what collectives and training steps take, and simulates up to 16,384 ranks.

    sudo .venv/bin/python -m benchmarks.plan validate     # 30 minutes: measures, fits the costs, predicts, compares
    .venv/bin/python -m benchmarks.plan simulate          # some minutes: schedules against the number of ranks

`validate` measures calls and training steps in namespaces. It keeps what is done in results/plan.jsonl, and goes on
where it was: remove that file to measure all of it again. It fits the costs of a rank to calls of 2 and 4 ranks without
a limit and at 1 Gbit/s. It predicts all other calls, and training steps, and compares. It writes a picture, and
benchmarks/results/plan.json with the costs, which ncz_plugins/cli/plan/catalogue.yaml repeats.

All ranks share this machine's cores with the network, which predictions take into account.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import least_squares

from benchmarks import end_to_end, pictures
from benchmarks.laboratory.launch import run
from benchmarks.laboratory.link import UNLIMITED, burst_bytes, link
from benchmarks.pages import put_into
from ncz_plugins.cli import machine
from ncz_plugins.cli.picture import BLUE, COLORS, GRAY, RED, finish, in_seconds, ink, logarithmic, new_figure, pale
from ncz_plugins.cli.plan.catalogue import load
from ncz_plugins.cli.plan.simulation import calls
from ncz_plugins.cli.plan.simulation.calls import Group
from ncz_plugins.cli.plan.simulation.costs import Costs
from ncz_plugins.cli.plan.simulation.fleet import Link, Racks
from ncz_plugins.cli.plan.step import Setup, predict
from ncz_plugins.cli.plan.strategy import sendings
from ncz_plugins.cli.plan.workload import Interval, Workload
from ncz_plugins.core.config import Config, MiB, format_size
from ncz_plugins.version import __version__

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "results" / "plan.jsonl"
NUMBERS = ROOT / "benchmarks" / "results" / "plan.json"
RANKS_NUMBERS = ROOT / "benchmarks" / "results" / "plan-ranks.json"
PAGE, MARKS = ROOT / "docs" / "results" / "planning.md", ("<!-- figures -->", "<!-- end of figures -->")
RANKS_MARKS = "<!-- ranks -->", "<!-- end of ranks -->"

CORES = 2  # of the machine that was measured
GBPS = {"100mbit": 0.1, "200mbit": 0.2, "1gbit": 1.0, "10gbit": 10.0, "unlimited": 1000.0}
_SETTING_GBPS = {
    "100mbit": 0.1,
    "1gbit": 1.0,
    "10gbit": 10.0,
    "unlimited": 25.0,
}  # what the configuration says of the link, for the choice of coders
# Ranks, ranks per node, schedule.
LAYOUTS = (
    (2, 1, "direct"), (4, 1, "direct"), (2, 1, "ring"), (4, 1, "ring"), (8, 1, "direct"), (8, 1, "ring"),
    (4, 2, "auto"), (8, 4, "auto"),
)  # fmt: skip
_FITTED_TO = {(2, 1, "direct"), (4, 1, "direct"), (4, 2, "auto")}, {"unlimited", "1gbit"}
_SIZES, _FEW_SIZES = "64K,512K,4M,16M,64M", "64K,4M,64M"
_FRAMEWORKS = {"ddp": "ddp", "horovod": "horovod", "deepspeed": "zero-1"}  # whose steps are trained, and what they are
_KINDS = {"plain": "plain", "bf16": "bfloat16", "ncclz": "compressed"}
_STEP_LINKS = {"ddp": ("200mbit", "1gbit"), "horovod": ("1gbit",), "deepspeed": ("1gbit",)}
_PARAMETERS = 25_486_848  # of the GPT that `end_to_end` trains
_LINK_SHARE = 0.956  # 1,448 of the 1,514 bytes of an Ethernet frame
_SIMULATED_GBPS, _SIMULATED_LATENCY, _NODE = 10.0, 50e-6, 8
_RACK, _RANKS = 32, (2, 4, 8, 16, 64, 256, 1024, 4096, 16384)
_SHOWN_RANKS = 64, 4096, 16384
_MOST_UNEVEN_RANKS = {"direct": 1024, "ring": 4096, "plain": 4096}
_SCHEDULES = "plain", "ring", "direct", "halving", "hierarchy"


class Cell(NamedTuple):
    """What was measured of one kind of call."""

    ranks: int
    per_node: int
    schedule: str
    link: str
    peer: str
    nbytes: int
    seconds: float

    @property
    def is_fitted_to(self) -> bool:
        layouts, links = _FITTED_TO
        return (self.ranks, self.per_node, self.schedule) in layouts and self.link in links


# ------------------------------------------------------------------ measure


def measure() -> None:
    """Run what is not in the file yet."""
    KEPT.parent.mkdir(exist_ok=True)
    done = {json.dumps(each["what"]) for each in _kept()}
    for what in [*_calls(), *_steps()]:
        if json.dumps(what) in done:
            continue
        begun = time.monotonic()
        found = _measured_calls(what) if what["what"] == "calls" else _measured_steps(what)
        with KEPT.open("a") as file:
            print(json.dumps({"what": what, "found": found}), file=file)
        print(f"{time.monotonic() - begun:4.0f} s: {what}", flush=True)


def _kept() -> list[dict[str, Any]]:
    return [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []


def _calls() -> Iterator[dict[str, Any]]:
    for ranks, per_node, schedule in LAYOUTS:
        for rate in _SETTING_GBPS:
            sizes = _SIZES if schedule == "direct" and ranks < 8 else _FEW_SIZES
            if rate == "100mbit" and ranks > 2:  # where 64 MiB take 9 seconds a call
                sizes = sizes.removesuffix(",64M")
            yield {"what": "calls", "ranks": ranks, "per_node": per_node, "schedule": schedule, "link": rate,
                   "sizes": sizes}  # fmt: skip


def _measured_calls(what: dict[str, Any]) -> list[list[Any]]:
    """[contender, bytes, seconds] of each."""
    settings = {
        "schedule": what["schedule"],
        "hierarchy": "auto" if what["per_node"] > 1 else "off",
        "min_bytes": 0,
        "connections": 1,
        "link_gbps": _SETTING_GBPS[what["link"]],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"transport": settings}, file)
        file.flush()
        options = {"--ranks": what["ranks"], "--ranks-per-node": what["per_node"], "--link": what["link"],
                   "--sizes": what["sizes"], "--config": file.name,
                   "--repeat": 3 if what["link"] == "100mbit" else 5 if what["sizes"] != _SIZES else 7}  # fmt: skip
        flat = [str(each) for option in options.items() for each in option]
        command = [sys.executable, "-m", "benchmarks.laboratory.perf", "all_reduce", *flat, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [[each["peer"], each["size"], 1e-6 * each["time_us"]] for each in json.loads(done.stdout)["records"]]


def _steps() -> Iterator[dict[str, Any]]:
    for framework in _FRAMEWORKS:
        for rate in _STEP_LINKS[framework]:
            yield {"what": "steps", "framework": framework, "link": rate}


def _measured_steps(what: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step: of one rank alone, and of two with each kind of gradients."""
    arguments = argparse.Namespace(link=what["link"], steps=13, batch=2, layers=8, heads=8, width=512, timeout=600)
    with tempfile.TemporaryDirectory() as folder:
        found, records = {}, Path(folder) / "records.jsonl"
        for runs in end_to_end.FRAMEWORKS[what["framework"]](arguments, Path(folder)):
            if runs.name not in _KINDS:
                continue
            with link(end_to_end.RANKS, what["link"]) as nodes:
                runs.go(records, nodes, arguments.timeout, lambda: None)
            found[runs.name] = statistics.median(runs.seconds)
            if runs.name == "plain":
                found["alone"] = _alone(runs, records)
    return found


def _alone(runs: end_to_end.Runs, records: Path) -> float:
    """Seconds of a step of one rank, which has nothing to send."""
    seconds = []

    def take(record: dict[str, Any]) -> None:
        if record.get("step", -1) >= end_to_end.WARMUP:
            seconds.append(record["seconds"])

    deepspeed = "DeepSpeed" in runs.framework
    environment = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"} if deepspeed else {}
    with link(1) as nodes:
        options = {"nodes": nodes, "horovod": runs.framework == "Horovod", "environment": environment}
        run(runs.command, 1, records, on_record=take, timeout=600, **options)
    return statistics.median(seconds)


# ------------------------------------------------------------------ validate

_NAMES = ("call_us", "message_us", "socket_ps", "measure_ps", "coding_times", "plain_call_us", "plain_message_us",
          "plain_ps", "local_gbps", "local_us")  # fmt: skip
_BEGIN = (2000, 200, 100, 1000, 2, 200, 300, 500, 20, 200)


def validate() -> None:
    """Measure, fit, predict, compare, write."""
    measure()
    kept = _kept()
    cells = [
        Cell(*(each["what"][key] for key in ("ranks", "per_node", "schedule", "link")), *found)
        for each in kept
        if each["what"]["what"] == "calls"
        for found in each["found"]
    ]
    costs = _fitted([cell for cell in cells if cell.is_fitted_to])
    compared = [{**cell._asdict(), "predicted": _predicted(costs, cell), "fitted": cell.is_fitted_to} for cell in cells]
    errors = [abs(each["predicted"] / each["seconds"] - 1) for each in compared if not each["fitted"]]
    costs = costs.model_copy(update={"error": round(float(np.quantile(errors, 0.8)), 2)})
    steps = [found for each in kept if each["what"]["what"] == "steps" for found in _compared_steps(costs, each)]
    document = {
        "command": "python -m benchmarks.plan validate",
        "version": __version__,
        "cpu": machine.cpu(),
        "costs": costs.model_dump(),
        "errors": _summary(errors),
        "errors_by_kind": {
            peer: _summary([abs(each["predicted"] / each["seconds"] - 1) for each in compared
                            if not each["fitted"] and each["peer"] == peer])
            for peer in ("plain", "ncz")
        },
        "errors_of_steps": _summary([abs(each["predicted"] / each["seconds"] - 1) for each in steps]),
        "calls": compared,
        "steps": steps,
    }  # fmt: skip
    NUMBERS.write_text(json.dumps(document, indent=1) + "\n")
    put_into(PAGE, figures(document), MARKS)
    pictures.redraw("plan")
    _print(document)


def _fitted(cells: list[Cell]) -> Costs:
    """The costs with which predictions are closest, in ratios; those that are far off count less."""

    def off(logarithms: np.ndarray) -> np.ndarray:
        costs = _costs(np.exp(logarithms))
        return np.array([np.log(_predicted(costs, cell) / cell.seconds) for cell in cells])

    found = least_squares(off, np.log(_BEGIN), loss="soft_l1", f_scale=0.1)
    return _costs(np.array([float(f"{figure:.3g}") for figure in np.exp(found.x)]))


def _costs(figures: np.ndarray) -> Costs:
    given = dict(zip(_NAMES, map(float, figures)))
    known = load().cost("cpu")
    return Costs(
        kind="cpu",
        source=known.source,
        coders=known.coders,
        cast_ps=given["plain_ps"] * 4,  # a value is read and written once more
        link_share=_LINK_SHARE,
        **given,
    )


def _predicted(costs: Costs, cell: Cell) -> float:
    """Seconds. All nodes share the cores of one machine."""
    nodes = cell.ranks // cell.per_node
    group = Group(nodes, cell.per_node, _link(cell.link), costs, cores=CORES / nodes)
    if cell.peer == "plain":
        return calls.plain(group, "all_reduce", cell.nbytes).seconds
    transport = {"schedule": cell.schedule, "min_bytes": 0, "link_gbps": _SETTING_GBPS[cell.link]}
    return calls.compressed(group, "all_reduce", cell.nbytes, Config(transport=transport)).seconds


def _link(name: str) -> Link:
    """A link of the laboratory, which is a token bucket."""
    burst = 0 if name == UNLIMITED else burst_bytes(1e9 * GBPS[name])
    return Link(GBPS[name], burst=burst)


def _compared_steps(costs: Costs, kept: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Training steps beside what is predicted of them from how long a rank computes alone."""
    what, found = kept["what"], kept["found"]
    compute = Interval.exactly(found["alone"])
    workload = Workload("GPT", _PARAMETERS, 4, compute, "measured")
    group = Group(2, 1, _link(what["link"]), costs, cores=CORES / 2)
    setup = Setup(workload, sendings(_FRAMEWORKS[what["framework"]], workload), group, Config())
    for name, kind in _KINDS.items():
        if name in found:
            yield {
                "framework": what["framework"],
                "link": what["link"],
                "gradients": kind,
                "seconds": found[name],
                "predicted": predict(setup, kind).seconds.middle,
            }


def _summary(errors: list[float]) -> dict[str, float]:
    ends = {"count": len(errors)}
    if errors:
        quantiles = {"median": 0.5, "80 %": 0.8, "90 %": 0.9, "worst": 1.0}
        ends |= {name: round(float(np.quantile(errors, share)), 4) for name, share in quantiles.items()}
    return ends


def figures(document: dict[str, Any]) -> str:
    """The tables of the page."""
    lines = ["| | cells | median | 80 % | 90 % | worst |", "|---|---|---|---|---|---|"]
    of = {"calls": document["errors"], **{f"of that {name}": each for name, each in document["errors_by_kind"].items()}}
    for name, each in (of | {"training steps": document["errors_of_steps"]}).items():
        shares = [f"{each[key]:.1%}" for key in ("median", "80 %", "90 %", "worst") if key in each]
        lines.append(f"| {' | '.join([name, str(each['count']), *shares])} |")
    # One row for each framework and link, so that the table stays short.
    kinds = list(dict.fromkeys(each["gradients"] for each in document["steps"]))
    lines += ["", "Training steps in seconds, measured and predicted:", ""]
    lines += [f"| | link | {' | '.join(kinds)} |", "|---|---" + "|---" * len(kinds) + "|"]
    for framework, rate in dict.fromkeys((each["framework"], each["link"]) for each in document["steps"]):
        of_kind = {
            each["gradients"]: f"{each['seconds']:.2f}, {each['predicted']:.2f}"
            for each in document["steps"]
            if (each["framework"], each["link"]) == (framework, rate)
        }
        lines.append(f"| {' | '.join([framework, rate, *(of_kind.get(kind, '') for kind in kinds)])} |")
    return "\n".join(lines)


def draw(document: dict[str, Any]) -> Figure:
    """Predicted times against measured ones."""
    figure, [axes] = new_figure(1, height=5.6)
    new = [each for each in document["calls"] if not each["fitted"]]
    groups = {
        "plain": ([each for each in new if each["peer"] == "plain"], {"color": GRAY, "marker": "o"}),
        "compressed": ([each for each in new if each["peer"] == "ncz"], {"color": BLUE, "marker": "o"}),
        "fitted to": (
            [each for each in document["calls"] if each["fitted"]],
            {"color": GRAY, "marker": ".", "zorder": 1, "alpha": 0.5},
        ),
        "training steps": (document["steps"], {"color": RED, "marker": "s"}),
    }
    for name, (group, style) in groups.items():
        points = [(each["seconds"], each["predicted"]) for each in group]
        if points:
            axes.plot(*zip(*points), linestyle="", markersize=4, label=name, **{"zorder": 2, **style})
    for axis in (axes.xaxis, axes.yaxis):
        logarithmic(axis)
        in_seconds(axis)
    ends = np.array(axes.get_xlim())
    axes.plot(ends, ends, color=ink(), linewidth=0.8)
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color=pale(), zorder=0, label="10 %")
    axes.set(xlabel="measured", ylabel="predicted", xlim=ends)
    finish(axes, "predicted and measured times")
    return figure


def _print(document: dict[str, Any]) -> None:
    print("How far predictions are off, of calls that nothing was fitted to:\n")
    print(figures(document))
    print("\nThe worst:\n")
    for each in sorted(document["calls"], key=lambda each: -abs(np.log(each["predicted"] / each["seconds"])))[:12]:
        print(each)
    print(f"\n{json.dumps(document['costs'])}")


# ------------------------------------------------------------------ simulate


class Case(NamedTuple):
    """A fleet, and how large it gets.

    Attributes:
        name: what the picture calls it.
        sizes: bytes of the tensors.
        slowest_gbps: link of the last rank; None: as all others.
        late: seconds by which the first rank comes late.
        oversubscription: see `Racks`; None: racks make no difference.
    """

    name: str
    sizes: tuple[int, ...]
    slowest_gbps: float | None = None
    late: float | None = None
    oversubscription: float | None = None

    @property
    def is_even(self) -> bool:
        return self.slowest_gbps is self.late is self.oversubscription is None

    def ranks(self, schedule: str) -> list[int]:
        """Numbers of ranks. In an uneven fleet every rank counts its own time, in each of its many messages."""
        most = _RANKS[-1] if self.is_even else _MOST_UNEVEN_RANKS.get(schedule, _RANKS[-1])
        return [ranks for ranks in _RANKS if (2 * _NODE if schedule == "hierarchy" else 2) <= ranks <= most]


CASES = (
    Case("all alike", (64 << 10, MiB, 16 * MiB, 256 * MiB)),
    Case("one link a tenth as fast", (256 * MiB,), slowest_gbps=1.0),
    Case("one rank 0.1 s late", (MiB,), late=0.1),
    Case("racks 4 x oversubscribed", (MiB, 256 * MiB), oversubscription=4.0),
)
# What the picture shows: a case each, and of an even fleet a small tensor as well.
DRAWN = ((CASES[0].name, MiB), *((case.name, case.sizes[-1]) for case in CASES))


def simulate() -> None:
    """Calls against the number of ranks, even and uneven, and how long it took to find that out."""
    begun, costs, found = time.monotonic(), load().cost("cpu"), []
    gc.disable()  # looking for cycles among millions of messages takes a tenth of the time
    for case in CASES:
        for nbytes in case.sizes:
            for schedule in _SCHEDULES:
                for ranks in case.ranks(schedule):
                    seconds = _simulated(costs, schedule, ranks, nbytes, case)
                    found.append({"nbytes": nbytes, "case": case.name, "ranks": ranks, "schedule": schedule,
                                  "seconds": float(f"{seconds:.4g}")})  # fmt: skip
            print(f"{time.monotonic() - begun:4.0f} s: {format_size(nbytes)}, {case.name}", flush=True)
    document = {
        "command": "python -m benchmarks.plan simulate",
        "version": __version__,
        "cpu": machine.cpu(),
        "gbps": _SIMULATED_GBPS,
        "latency_seconds": _SIMULATED_LATENCY,
        "seconds": round(time.monotonic() - begun, 1),
        "calls": found,
    }
    RANKS_NUMBERS.write_text(json.dumps(document, indent=1) + "\n")
    pictures.redraw("plan-ranks")
    put_into(PAGE, table_of_ranks(found), RANKS_MARKS)


def _simulated(costs: Costs, schedule: str, ranks: int, nbytes: int, case: Case) -> float:
    """Seconds of an all-reduce. Each rank has a link, and a node the links of its ranks."""
    size = _NODE if schedule == "hierarchy" else 1
    nodes, gbps = ranks // size, _SIMULATED_GBPS * size
    links = gbps if case.slowest_gbps is None else (gbps,) * (nodes - 1) + (case.slowest_gbps * size,)
    late = None if case.late is None else (case.late,) + (0.0,) * (nodes - 1)
    racks = None if case.oversubscription is None else Racks(_RACK // size, case.oversubscription)
    group = Group(nodes, size, Link(links, _SIMULATED_LATENCY), costs, late=late, racks=racks)
    if schedule == "plain":
        return calls.plain(group, "all_reduce", nbytes).seconds
    name = "auto" if schedule == "hierarchy" else schedule
    transport = {"schedule": name, "min_bytes": 0, "link_gbps": _SIMULATED_GBPS}
    return calls.compressed(group, "all_reduce", nbytes, Config(transport=transport)).seconds


def table_of_ranks(found: list[dict[str, Any]]) -> str:
    """Milliseconds of each schedule, by case, size and some numbers of ranks."""
    seconds = {(each["case"], each["nbytes"], each["ranks"], each["schedule"]): each["seconds"] for each in found}
    lines = [f"| | ranks | {' | '.join(_SCHEDULES)} |", "|---" * (2 + len(_SCHEDULES)) + "|"]
    for case in CASES:
        for nbytes in case.sizes:
            for ranks in _SHOWN_RANKS:
                cells = [seconds.get((case.name, nbytes, ranks, schedule)) for schedule in _SCHEDULES]
                shown = ["" if each is None else f"{1e3 * each:,.0f} ms" for each in cells]
                lines.append(f"| {format_size(nbytes)}, {case.name} | {ranks:,} | {' | '.join(shown)} |")
    return "\n".join(lines)


def draw_ranks(document: dict[str, Any]) -> Figure:
    """Seconds against the number of ranks, of the sizes that differ most."""
    figure, panels = new_figure(len(DRAWN), height=1.9, share_x=True)
    for axes, (name, nbytes) in zip(panels, DRAWN):
        for schedule in _SCHEDULES:
            points = [
                (each["ranks"], each["seconds"])
                for each in document["calls"]
                if (each["nbytes"], each["case"], each["schedule"]) == (nbytes, name, schedule)
            ]
            label = schedule if axes is panels[0] else None
            axes.plot(*zip(*points), marker="o", markersize=3, color=COLORS[schedule], label=label)
        logarithmic(axes.yaxis)
        in_seconds(axes.yaxis)
        finish(axes, f"{format_size(nbytes)}, {name}", columns=5)
    logarithmic(panels[-1].xaxis)
    panels[-1].set_xlabel("ranks")
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("validate", "simulate"))
    {"validate": validate, "simulate": simulate}[parser.parse_args().stage]()
