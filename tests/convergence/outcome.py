"""What the trainings came to: figures over seeds, as a table, a picture and JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws into files; needs no display
import matplotlib.pyplot as plt
import plan
from matplotlib.ticker import NullLocator
from rich.table import Table
from training import Job, Setting

COLORS = {"nearest": "#d1495b", "error feedback": "#2e86ab", "stochastic": "#edae49"}
LINEAR = 0.01  # up to this the vertical axis is linear, then logarithmic
RATIOS = (5, 10, 20, 30)
MARK = "<!-- results -->"


@dataclass
class Outcome:
    """The runs of one setting: the same but for the seed.

    Attributes:
        group: task, optimizer, ranks, steps.
        records: one per seed, in order.
        plain: those of the group's plain setting with the same seeds.
    """

    group: tuple[str, str, int, int]
    setting: Setting
    records: list[dict[str, Any]]
    plain: list[dict[str, Any]]

    def series(self, key: str) -> list[float]:
        return [record[key] for record in self.records]

    def mean(self, key: str) -> float:
        return fmean(self.series(key))

    def spread(self, key: str) -> float:
        """Standard deviation over the seeds; 0 for a single one."""
        values = self.series(key)
        return stdev(values) if len(values) > 1 else 0.0

    def added(self, key: str) -> list[float]:
        """What each seed's run has more than the plain run of that seed."""
        return [mine[key] - plain[key] for mine, plain in zip(self.records, self.plain)]

    @property
    def sound(self) -> bool:
        """Whether all replicas ended alike, and compression was at work in every step if it was asked for."""
        compressed = all(each["compressed_calls"] == each["calls"] for each in self.records)
        at_work = self.setting.kind == "plain" or all(each["calls"] for each in self.records)
        return compressed and at_work and all(each["replicas_identical"] for each in self.records)


def outcomes(runs: dict[Job, dict[str, Any]]) -> list[Outcome]:
    """By group, in the order in which groups come first; inside by kind and bound. Seeds without a plain run are
    left out."""
    found: dict[tuple, Outcome] = {}
    for job, record in runs.items():
        plain = runs.get(job._replace(setting=plan.PLAIN))
        if plain is None:
            continue
        group = (job.task, job.optimizer, job.ranks, job.steps)
        outcome = found.setdefault((group, job.setting), Outcome(group, job.setting, [], []))
        outcome.records.append(record)
        outcome.plain.append(plain)
    groups = list(dict.fromkeys(group for group, _ in found))
    kinds = ["plain", *COLORS]
    return sorted(found.values(), key=lambda o: (groups.index(o.group), kinds.index(o.setting.kind), o.setting.bound))


def describe(setting: Setting) -> str:
    """A few words: "rms 0.5, error feedback"."""
    if setting.kind == "plain":
        return "plain"
    known = {plan.DEFAULT: " (default)", plan.AGGRESSIVE: " (aggressive)"} if setting.kind == "nearest" else {}
    kind = "" if setting.kind == "nearest" else f", {setting.kind}"
    return f"rms {setting.bound:g}{kind}{known.get(setting.bound, '')}"


# ------------------------------------------------------------------ in words and numbers

HEADINGS = ("", "training loss", "more than plain", "validation loss", "accuracy", "gradient error", "ratio", "seeds")


def title(group: tuple[str, str, int, int]) -> str:
    return "{}, {}, {} ranks, {} steps".format(*group)


def row(outcome: Outcome) -> list[str]:
    """The cells under HEADINGS. What follows ± is the standard deviation over the seeds."""

    def over_seeds(key: str, digits: int, factor: float = 1) -> str:
        spread = f" ± {factor * outcome.spread(key):.{digits}f}" if len(outcome.records) > 1 else ""
        return f"{factor * outcome.mean(key):.{digits}f}{spread}"

    plain = outcome.setting.kind == "plain"
    more = outcome.added("training_loss")
    among = f" ({min(more):+.4f} to {max(more):+.4f})" if len(more) > 1 else ""
    return [
        describe(outcome.setting),
        over_seeds("training_loss", 4),
        "" if plain else f"{fmean(more):+.4f}{among}",
        over_seeds("validation_loss", 4),
        over_seeds("accuracy", 1, 100) + " %" if "accuracy" in outcome.records[0] else "",
        "" if plain else f"{outcome.mean('gradient_error'):.2f}",
        "" if plain else f"{outcome.mean('ratio'):.1f}",
        f"{len(outcome.records)}" + ("" if outcome.sound else " UNSOUND"),
    ]


def table(found: list[Outcome]) -> Table:
    """All of it, for a terminal."""
    result = Table(title="Loss after training, plain and compressed", box=None, pad_edge=False)
    for heading in HEADINGS:
        result.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for group in dict.fromkeys(each.group for each in found):
        result.add_row(f"[bold]{title(group)}")
        for outcome in (each for each in found if each.group == group):
            result.add_row(*row(outcome))
    return result


def markdown(found: list[Outcome]) -> str:
    """All of it, for the documentation: a table for each group."""
    lines = []
    for group in dict.fromkeys(each.group for each in found):
        lines += [f"### {title(group)}", ""]
        inside = [each for each in found if each.group == group]
        columns = [at for at in range(len(HEADINGS)) if at == 0 or any(row(each)[at] for each in inside)]
        rows = [HEADINGS, ["---"] + ["---:"] * (len(HEADINGS) - 1), *map(row, inside)]
        lines += ["| " + " | ".join(each[at] for at in columns) + " |" for each in rows] + [""]
    return "\n".join(lines)


def put_into(path: Path, text: str) -> None:
    """Replace what stands between the two marks of a Markdown file."""
    whole = path.read_text()
    path.write_text(re.sub(f"{MARK}.*{MARK}", lambda _: f"{MARK}\n\n{text}\n{MARK}", whole, flags=re.DOTALL))


# ------------------------------------------------------------------ as a picture


def draw(found: list[Outcome], path: Path) -> None:
    """What compression adds to the training loss, by bound and by ratio, for each group that was swept."""
    swept = {
        group: inside
        for group in dict.fromkeys(each.group for each in found)
        if len(inside := [each for each in found if each.group == group]) > len(plan.MAIN)
    }
    if not swept:
        return
    figure, axes = plt.subplots(2, len(swept), figsize=(3.6 * len(swept), 7), layout="constrained", squeeze=False)
    for column, (group, inside) in enumerate(swept.items()):
        by_bound, by_ratio = axes[:, column]
        by_bound.set_title(title(group), size=11)
        for kind, color in COLORS.items():
            some = [each for each in inside if each.setting.kind == kind]
            added = [each.added("training_loss") for each in some]
            for panel, places in (
                (by_bound, [each.setting.bound for each in some]),
                (by_ratio, [each.mean("ratio") for each in some]),
            ):
                panel.plot(places, list(map(fmean, added)), "o-", color=color, label=kind, markersize=4)
                panel.fill_between(places, list(map(min, added)), list(map(max, added)), color=color, alpha=0.15)
        spread = next(each for each in inside if each.setting.kind == "plain").spread("training_loss")
        for panel, label in ((by_bound, "bound (times rms)"), (by_ratio, "times fewer bytes")):
            panel.axhspan(-spread, spread, color="#7f7f7f", alpha=0.2, lw=0, label="plain, ± deviation over seeds")
            panel.set_xscale("log")
            panel.set_yscale("symlog", linthresh=LINEAR)
            panel.xaxis.set_minor_locator(NullLocator())
            panel.set_xlabel(label)
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
        by_bound.set_xticks(plan.BOUNDS)
        by_ratio.set_xticks(RATIOS)
        for axis in (by_bound.xaxis, by_bound.yaxis, by_ratio.xaxis, by_ratio.yaxis):
            axis.set_major_formatter("{x:g}")
    for first in axes[:, 0]:
        first.set_ylabel("training loss above plain")
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
