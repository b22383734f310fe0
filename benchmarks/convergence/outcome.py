"""What the trainings came to: figures over seeds, as tables and pictures."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import plan
from matplotlib.figure import Figure
from rich.table import Table
from scipy.stats import t as student
from tasks import FINE_TUNING
from training import Job, Setting

from ncz_plugins.cli.picture import COLORS, GREEN, RED, TEAL, color_of, finish, ink, new_figure, paper

HARMLESS = 0.0015  # of the loss: what may be added by the default
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

    def mean(self, key: str) -> float:
        return fmean(record[key] for record in self.records)

    @property
    def added(self) -> list[float]:
        """What each seed's run has added to the training loss of the plain run of that seed, as a share of it."""
        return [mine["training_loss"] / plain["training_loss"] - 1 for mine, plain in zip(self.records, self.plain)]

    @property
    def interval(self) -> float:
        """Half the width of the 95 % confidence interval of the mean of `added`; nan for a single run."""
        return interval(self.added)

    @property
    def sound(self) -> bool:
        """Whether all replicas ended alike, and compression was at work in every step if it was asked for."""
        compressed = all(each["compressed_calls"] == each["calls"] for each in self.records)
        at_work = not self.setting.bound or all(each["calls"] for each in self.records)
        return compressed and at_work and all(each["replicas_identical"] for each in self.records)


def interval(values: list[float]) -> float:
    """Half the width of the 95 % confidence interval of their mean, by Student's t; nan for a single one."""
    n = len(values)
    return student.ppf(0.975, n - 1) * stdev(values) / math.sqrt(n) if n > 1 else math.nan


def outcomes(runs: dict[Job, dict[str, Any]]) -> list[Outcome]:
    """In the order in which groups and settings come first. Seeds without a plain run are left out."""
    found: dict[tuple, Outcome] = {}
    for job, record in runs.items():
        plain = runs.get(job._replace(setting=plan.PLAIN))
        if plain is not None:
            group = (job.task, job.optimizer, job.ranks, job.steps)
            outcome = found.setdefault((group, job.setting), Outcome(group, job.setting, [], []))
            outcome.records.append(record)
            outcome.plain.append(plain)
    groups = list(dict.fromkeys(group for group, _ in found))
    return sorted(found.values(), key=lambda each: groups.index(each.group))


def name_of(setting: Setting) -> str:
    """The preset's name, "plain", "bf16", "former" for the default that was, or "4 bits"; else what it is."""
    if setting.is_fixed_rate:
        return f"{setting.bound:g} bits{' at random' * (setting.kind != 'bits')}"
    named = {preset: name for name, preset in plan.NAMED.items()} | {plan.FORMER: "former"}
    return named.get(setting) or (f"{setting.kind} {setting.bound:g}" if setting.bound else setting.kind)


def describe(setting: Setting) -> str:
    """A few words: "small: stochastic 1 per 256"."""
    if not setting.bound or setting.is_fixed_rate:
        return name_of(setting)
    what = f"{setting.kind} {setting.bound:g} per {setting.block:,}"
    return what if name_of(setting).startswith(setting.kind) else f"{name_of(setting)}: {what}"


# ------------------------------------------------------------------ in words and numbers

HEADINGS = (
    "", "training loss", "added", "95 %", "validation loss", "accuracy", "gradient error", "to fp32", "to bf16", "seeds"
)  # fmt: skip


def title(group: tuple[str, str, int, int]) -> str:
    return "{}, {}, {} ranks, {} steps".format(*group)


def row(outcome: Outcome) -> list[str]:
    """The cells under HEADINGS."""
    plain, several = outcome.setting == plan.PLAIN, len(outcome.records) > 1
    return [
        describe(outcome.setting),
        f"{outcome.mean('training_loss'):.4f}",
        "" if plain else f"{fmean(outcome.added):+.2%}",
        f"± {outcome.interval:.2%}" if several and not plain else "",
        f"{outcome.mean('validation_loss'):.4f}",
        f"{outcome.mean('accuracy'):.1%}" if "accuracy" in outcome.records[0] else "",
        "" if plain else f"{outcome.mean('gradient_error'):.3f}",
        "" if plain else f"{outcome.mean('ratio'):.1f}",
        "" if plain else f"{outcome.mean('ratio') / 2:.1f}",
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


def compared(found: list[Outcome]) -> list[Outcome]:
    """Those by which presets are compared: trainings from random weights by 2 ranks, with several seeds."""
    return [each for each in found if each.group[2] == 2 and len(each.records) > 1 and each.group[0] != FINE_TUNING]


def fine_tuning(found: list[Outcome]) -> str:
    """The table of the pretrained model."""
    return markdown([each for each in found if each.group[0] == FINE_TUNING])


def presets(found: list[Outcome]) -> str:
    """What each preset costs and saves, for the guide."""
    rows = {f"`ncclz:{name}`{', the default' * (name == 'balanced')}": each for name, each in plan.NAMED.items()}
    return _costs(found, ("preset", "`value`"), rows.items())


def fixed_rates(found: list[Outcome]) -> str:
    """What each fixed rate costs and saves, for the guide."""
    rows = [("to the nearest", each) for each in plan.RATES.values()]
    rows += [("at random, `kind: stochastic`", each) for each in plan.RATES_AT_RANDOM.values()]
    return _costs(found, ("rounding", "bits"), rows)


def _costs(found: list[Outcome], headings: Sequence[str], rows: Iterable[tuple[str, Setting]]) -> str:
    """A table with a row for each named setting that was tried."""
    groups = compared(found)
    optimizers = list(dict.fromkeys(each.group[1] for each in groups))
    lines = [f"| {' | '.join([*headings, 'to fp32', 'to bf16', *optimizers])} |"]
    lines.append("|---" + "|---:" * (3 + len(optimizers)) + "|")
    for name, setting in rows:
        of = {each.group[1]: each for each in groups if each.setting == setting}
        if not of:  # not tried yet
            continue
        added = (f"{fmean(each.added):+.2%} ± {each.interval:.2%}" if each else "" for each in map(of.get, optimizers))
        ratio = of.get("AdamW", next(iter(of.values()))).mean("ratio")
        cells = name, f"{setting.bound:g}", f"{ratio:.1f}", f"{ratio / 2:.1f}", *added
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def put_into(path: Path, text: str, mark: str = MARK) -> None:
    """Replace what stands between the two marks of a Markdown file."""
    whole = path.read_text()
    path.write_text(re.sub(f"{mark}.*{mark}", lambda _: f"{mark}\n\n{text}\n{mark}", whole, flags=re.DOTALL))


# ------------------------------------------------------------------ as a picture


def redraw(*names: str) -> None:
    """Draw pictures of the documentation anew, from the files of the repository."""
    subprocess.run([sys.executable, "-m", "benchmarks.pictures", *names], cwd=plan.ROOT, check=True)


def read(document: dict[str, Any]) -> list[Outcome]:
    """The outcomes in a document such as suite.py writes."""
    return outcomes({Job.read(record["job"]): record for record in document["runs"]})


def draw(document: dict[str, Any]) -> Figure:
    """What is added to the training loss, by the ratio to fp32. What is pale stands in the notebook alone."""
    found = read(document)
    groups = list(dict.fromkeys(each.group for each in compared(found)))
    figure, panels = new_figure(len(groups))
    for group, panel in zip(groups, panels):
        inside = [each for each in found if each.group == group and each.setting != plan.PLAIN]
        for each in inside:
            _point(panel, each, in_legend=panel is panels[0])
        _bits(panel, inside)
        panel.axhspan(-100 * HARMLESS, 100 * HARMLESS, color=GREEN, alpha=0.2, lw=0)
        panel.set(ylabel="added to the loss, %")
        panel.margins(x=0.08, y=0.12)
        finish(panel, title(group))
    panels[-1].set_xlabel("times fewer bytes than fp32")
    return figure


def _point(panel, each: Outcome, in_legend: bool) -> None:
    """A setting, with its interval. What has a colour of its own can be in the legend, other presets are named here."""
    setting, name, place = each.setting, name_of(each.setting), (each.mean("ratio"), 100 * fmean(each.added))
    color, at_random = color_of(name), setting in plan.RATES_AT_RANDOM.values()
    if setting.is_fixed_rate:
        color, name = COLORS["bits"], f"fixed rates{' at random' * at_random}"
    in_legend &= color is not None and (setting.bound == 4 or not setting.is_fixed_rate)  # once for all rates
    style = {"color": color or ink(), "alpha": 1 if color or name in plan.NAMED else 0.35}
    style |= {"mfc": paper() if at_random else style["color"], "fmt": "o", "capsize": 3}
    panel.errorbar(*place, 100 * each.interval, label=name if in_legend else "", **style)
    if color is None and name in plan.NAMED:
        panel.annotate(name, place, (-5, -15), textcoords="offset points")


def _bits(panel, inside: list[Outcome]) -> None:
    """The bits of each fixed rate, above its intervals."""
    for bits in plan.RATES:
        same = [each for each in inside if each.setting in (plan.RATES[bits], plan.RATES_AT_RANDOM[bits])]
        if same:
            place = same[0].mean("ratio"), max(100 * (fmean(each.added) + each.interval) for each in same)
            panel.annotate(f"{bits}", place, (0, 3), textcoords="offset points", ha="center")


def draw_curves(document: dict[str, Any]) -> Figure:
    """The loss over the steps of the longest training, and what each setting adds to it."""
    inside = [each for each in read(document) if "curve" in each.records[0]]
    figure, (whole, added) = new_figure(2)
    for each in inside:
        curve, plain = (records[0]["curve"] for records in (each.records, each.plain))
        steps = [each.group[3] * (at + 0.5) / len(curve) for at in range(len(curve))]
        style = curve_style(each.setting)
        whole.plot(steps, curve, label=describe(each.setting), **style)
        if each.setting != plan.PLAIN:
            smooth = [
                fmean(curve[max(0, at - 4) : at + 5]) / fmean(plain[max(0, at - 4) : at + 5]) for at in range(100)
            ]
            added.plot(steps, [100 * (share - 1) for share in smooth], **style)
    added.axhspan(-100 * HARMLESS, 100 * HARMLESS, color=GREEN, alpha=0.2, lw=0)
    whole.set(ylabel="training loss, nats per byte")
    added.set(xlabel="step", ylabel="added, %")
    finish(whole, title(inside[0].group), columns=2)
    finish(added, "the same, less that of plain")
    return figure


def curve_style(setting: Setting) -> dict[str, Any]:
    """Presets that were, in blocks of 256, have no name."""
    unnamed = {plan.WIDE: RED, plan.WIDE_ACCURATE: TEAL}
    return {"color": unnamed.get(setting) or color_of(name_of(setting)), "lw": 3 if setting == plan.PLAIN else 1.2}
