"""What is gained at which link, from committed results: the picture of README.md, and the table of docs/index.md.

    .venv/bin/python -m benchmarks.gains

Calls are all-reduces of 64 MiB between 2 ranks, steps those of a GPT of 25 M parameters on 2 nodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks import pictures
from benchmarks.pages import put_into
from benchmarks.performance import LINKS, read
from ncz_plugins.cli.output import duration
from ncz_plugins.cli.picture import COLORS, finish, new_figure

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "index.md"
CALLS = "perf-default-2-ranks"
SHOWN_LINKS = "100mbit", "1gbit", "10gbit"
STEPS = (  # file, framework, name of the run with 16 bits
    ("end-to-end", "DeepSpeed", "bf16"),
    ("end-to-end", "Horovod", "fp16"),
    ("end-to-end-ddp", "DDP", "bf16"),
    ("end-to-end-fsdp", "FSDP2", "bf16"),
)
FILES = (CALLS, *dict.fromkeys(file for file, _, _ in STEPS))
CALL, STEP = "all_reduce", "step"
TITLES = {CALL: "time of an all_reduce of 64 MiB, 2 ranks", STEP: "time of a step at 1 Gbit/s, 2 nodes"}


class Gain(NamedTuple):
    """Seconds of a call or a step, without compression and with our default.

    Attributes:
        what: CALL or STEP.
        where: the link, or the framework.
        half: the step with gradients cast to 16 bits; None for calls.
    """

    what: str
    where: str
    plain: float
    ncclz: float
    half: float | None

    @property
    def cells(self) -> tuple[str, str, str]:
        """Both times and how many times as fast, as words."""
        plain, ncclz = (duration(float(f"{seconds:.2g}")) for seconds in (self.plain, self.ncclz))
        return plain, ncclz, f"{self.plain / self.ncclz:.1f} x"


def gains() -> list[Gain]:
    """What the committed files hold, in the order of the picture."""
    return gains_of({name: read(name) for name in FILES})


def gains_of(documents: dict[str, Any]) -> list[Gain]:
    """What the files hold, given by their names."""
    found = []
    records = documents[CALLS]["records"]
    largest = max(record["size"] for record in records)
    for link in SHOWN_LINKS:
        times = {r["peer"]: r["time_us"] / 1e6 for r in records if (r["link"], r["size"]) == (link, largest)}
        found.append(Gain(CALL, LINKS[link], times["plain"], times["ncz"], None))
    for file, framework, half in STEPS:
        runs = documents[file]["runs"]
        times = {run["name"]: run["step_seconds"] for run in runs if run["framework"] == framework}
        found.append(Gain(STEP, framework, times["plain"], times["ncclz"], times[half]))
    return found


def table(found: list[Gain]) -> str:
    """The rows as Markdown."""
    lines = ["| | plain | ncclz | speed-up |", "|---|---:|---:|---:|"]
    for gain in found:
        plain, ncclz, factor = gain.cells
        lines.append(f"| {gain.what}, {gain.where} | {plain} | {ncclz} | **{factor}** |")
    return "\n".join(lines)


def draw(*documents: Any) -> Figure:
    """Bars for each row, as shares of the plain time, so that seconds and milliseconds fit in one picture."""
    found = gains_of(dict(zip(FILES, documents)))
    figure, panels = new_figure(2, height=1.9)
    for axes, (what, title) in zip(panels, TITLES.items()):
        rows = [gain for gain in found if gain.what == what]
        places = range(len(rows))
        axes.barh(places, [1] * len(rows), color=COLORS["plain"], label="plain")
        axes.barh(places, [row.ncclz / row.plain for row in rows], color=COLORS["ncclz"], label="ncclz, by default")
        for y, row in enumerate(rows):
            plain, ncclz, factor = row.cells
            axes.text(1.13, y, f"{plain} → {ncclz}, {factor} as fast", va="center")
            if row.half:
                label = "16 bits" if not y else ""
                axes.vlines(row.half / row.plain, y - 0.4, y + 0.4, COLORS["bf16"], linewidth=4, label=label)
        axes.set(xlim=(0, 1.98), yticks=places, yticklabels=[row.where for row in rows])
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)
        finish(axes, title)
    return figure


def main() -> None:
    found = gains()
    pictures.redraw("gains")
    put_into(PAGE, table(found))
    print(table(found))


if __name__ == "__main__":
    main()
