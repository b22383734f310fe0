"""What the default, and steps for Muon, add to the loss, against batch, ranks and model size, under three optimizers.

    .venv/bin/python benchmarks/convergence/evidence.py [--seeds 5] [--hours 8] [--device cuda] [--report]

Trains what the repository's figures lack, the cheapest first, until the hours are over; ranks are simulated, see
frontier.py, whose runs and files it shares. Then prints a table with what is still missing, and writes it into
docs/results/convergence.md, and draws its picture.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import lru_cache
from statistics import fmean
from typing import Any, NamedTuple

import frontier
import outcome
import plan
import suite
from candidates import Candidate
from frontier import DEFAULT, FED, PLAIN, ROOT, TURNED, Job
from matplotlib.figure import Figure
from outcome import HARMLESS, interval, put_into, redraw
from rich.console import Console
from tasks import TASKS

from ncz_plugins.cli.picture import BLUE, BROWN, GREEN, RED, finish, new_figure, paper

PAGE, MARK = ROOT / "docs" / "results" / "convergence.md", "<!-- evidence -->"
SECONDS = 1.1e-10  # of one core of an AMD EPYC of 2025, for each parameter, token and step
STEPS = 300
COLORS = {"AdamW": BLUE, "Muon": RED, "SGD": BROWN}
MARKERS = {"default": "o", "fed back": "s", "rotated": "D"}


class Cell(NamedTuple):
    """Trainings that differ by gradients' candidate and seed."""

    optimizer: str
    task: str
    ranks: int

    def job(self, candidate: Candidate, seed: int) -> Job:
        return Job(self.task, self.optimizer, candidate, seed, STEPS, self.ranks)

    @property
    def candidates(self) -> dict[str, Candidate]:
        """What is compared with plain, by the name that the table has."""
        return {"default": DEFAULT} | ({"fed back": FED, "rotated": TURNED} if self.optimizer == "Muon" else {})

    @property
    def sequences(self) -> int:
        """In each step, of all ranks together."""
        return TASKS[self.task]().batch

    @property
    def parameters(self) -> int:
        return _parameters(self.task)

    @property
    def hours(self) -> float:
        """That one training takes, roughly, of one core."""
        tokens = self.sequences * TASKS[self.task]().sizes.context
        return SECONDS * self.parameters * tokens * STEPS / 3600


@lru_cache
def _parameters(task: str) -> int:
    return sum(each.numel() for each in TASKS[task]().model().parameters())


GPT, GPT64 = "GPT", "GPT, 64 sequences"
BATCHES = (GPT, GPT64, "GPT, 256 sequences")
SIZES = (GPT, "GPT of 3 M", "GPT of 11 M")
SIZES64 = tuple(f"{task}, 64 sequences" for task in SIZES)
RANKS = (2, 8, 32)
AXES = {  # of the picture: what differs, and the cells' tasks and ranks
    "sequences in a step": [(task, 2) for task in BATCHES],
    "ranks": [(GPT64, ranks) for ranks in RANKS],
    "parameters, 16 sequences": [(task, 2) for task in SIZES],
    "parameters, 64 sequences": [(task, 2) for task in SIZES64],
}
GRID = [
    Cell(optimizer, *place)
    for place in dict.fromkeys(place for places in AXES.values() for place in places)
    for optimizer in COLORS
]


# ------------------------------------------------------------------ what came of it


class Found(NamedTuple):
    """What a candidate adds to the loss, as a share of it, by seed; and its ratio to the bytes of fp32."""

    added: list[float]
    ratio: float

    def __str__(self) -> str:
        """ "+0.08% ± 0.12% (5; 9.3 x)"."""
        several = f" ± {interval(self.added):.2%}" if len(self.added) > 1 else ""
        return f"{fmean(self.added):+.2%}{several} ({len(self.added)}; {self.ratio:.1f} x)"


Results = dict[tuple[Cell, Candidate], Found]


def results(done: dict[Job, dict[str, Any]], real: dict[suite.Job, dict[str, Any]] | None = None) -> Results:
    """Of simulated ranks; or of real ones (default: those of the file), where the suite has trained more seeds."""
    found = {
        (Cell(optimizer, task, ranks), each.candidate): Found(each.added, 32 / each.bits)
        for each in frontier.outcomes(done)
        for task, optimizer, ranks, steps in [each.group]
        if steps == STEPS
    }
    default = plan.NAMED["balanced"]
    for each in outcome.outcomes(suite.published() if real is None else real):
        task, optimizer, ranks, steps = each.group
        place = Cell(optimizer, task, ranks), DEFAULT
        simulated = len(found[place].added) if place in found else 0
        if each.setting == default and steps == STEPS and len(each.added) > simulated:
            found[place] = Found(each.added, each.mean("ratio"))
    return found


def markdown(found: Results) -> str:
    """A row for each cell; in brackets the number of seeds and the ratio to fp32."""
    lines = [f"| optimizer | sequences | ranks | parameters | {' | '.join(MARKERS)} | core hours a seed |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    for cell in sorted(GRID, key=lambda each: (each.optimizer, each.parameters, each.sequences, each.ranks)):
        of = cell.candidates
        told = [f"{found.get((cell, of[name]), '')}" if name in of else "-" for name in MARKERS]
        hours = (1 + len(of)) * cell.hours
        numbers = (cell.optimizer, cell.sequences, cell.ranks, f"{cell.parameters / 1e6:.2f} M", *told, f"{hours:.2f}")
        lines += [f"| {' | '.join(map(str, numbers))} |"]
    return "\n".join(lines) + "\n"


def missing(done: dict[Job, dict[str, Any]], seeds: int) -> Iterator[tuple[float, Job]]:
    """Hours and trainings that nobody has done yet, the cheapest first, all of one seed before the next."""
    found = results(done)
    for seed in range(seeds):
        for cell in sorted(GRID, key=lambda each: each.hours):
            candidates = cell.candidates.values()
            left = [each for each in candidates if (cell, each) not in found or seed >= len(found[cell, each].added)]
            for candidate in (PLAIN, *left) if left else ():
                if cell.job(candidate, seed) not in done:
                    yield cell.hours, cell.job(candidate, seed)


def draw(simulated: dict[str, Any], real: dict[str, Any]) -> Figure:
    """What is added to the loss, by batch, by ranks and by size.

    Args:
        simulated, real: what frontier.json and convergence.json hold.
    """
    found = results(dict(map(frontier.read, simulated["runs"])), suite.by_job(real))
    # A curve begins with two places.
    trained = {(cell.task, cell.ranks) for cell, _ in found}
    axes = {axis: places for axis, places in AXES.items() if len(trained.intersection(places)) > 1}
    figure, panels = new_figure(len(axes))
    for panel, (axis, places) in zip(panels, axes.items()):
        for optimizer, color in COLORS.items():
            cells = [Cell(optimizer, *place) for place in places]
            for name, candidate in cells[0].candidates.items():
                there = [(_along(axis, cell), found[cell, candidate]) for cell in cells if (cell, candidate) in found]
                points = [(x, 100 * fmean(each.added), 100 * interval(each.added)) for x, each in there]
                if points:
                    style = {"color": color, "marker": MARKERS[name], "capsize": 3, "mfc": paper()}
                    style |= {"mfc": color} if name == "default" else {}
                    label = f"{optimizer}, {name}" if panel is panels[0] else None
                    panel.errorbar(*zip(*points), label=label, ls="-" if len(points) > 1 else "", **style)
        ticks = [_along(axis, Cell("AdamW", *place)) for place in places]
        panel.set(xscale="log", xlim=(ticks[0] / 1.3, ticks[-1] * 1.3), ylabel="%")
        of_size = axis.startswith("parameters")
        panel.set_xticks(ticks, [f"{each / 1e6:.1f} M" if of_size else f"{each}" for each in ticks])
        panel.minorticks_off()
        panel.axhspan(-100 * HARMLESS, 100 * HARMLESS, color=GREEN, alpha=0.2, lw=0)
        finish(panel, f"added to the training loss, by {axis}")
    return figure


def _along(axis: str, cell: Cell) -> int:
    return {"sequences in a step": cell.sequences, "ranks": cell.ranks}.get(axis, cell.parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of everything (default: 5)")
    parser.add_argument("--hours", type=float, default=8, help="start no training after that (default: 8)")
    parser.add_argument("--device", default="cpu", help='where to train: "cpu" or "cuda" (default: cpu)')
    parser.add_argument("--report", action="store_true", help="train nothing: show and write what is there")
    arguments = parser.parse_args()
    console, until = Console(), time.monotonic() + 3600 * arguments.hours
    done = frontier.committed() | frontier.kept()
    left = [] if arguments.report else list(missing(done, arguments.seeds))
    for _, job in left:
        if time.monotonic() < until:
            frontier.train_all([job], done, 1, arguments.device)
    found = results(done)
    console.print(markdown(found), soft_wrap=True)
    still = list(missing(done, arguments.seeds))
    console.print(f"{len(still)} trainings are missing: {sum(hours for hours, _ in still):.1f} hours of one core")
    put_into(PAGE, markdown(found), MARK)
    frontier.publish(done)
    redraw("evidence")


if __name__ == "__main__":
    main()
