"""Which quantizer costs least loss for its bytes: many candidates, several optimizers, ranks simulated in one process.

    .venv/bin/python benchmarks/convergence/frontier.py [--seeds 3] [--part screen] [--processes 1] [--report]

Prints a table, and writes benchmarks/results/frontier.json and draws its picture. Runs that are done are kept in
results/frontier.jsonl, beside those of the repository: an interrupted search goes on where it was. candidates.py says
what was tried.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import plan
import suite
import torch
from candidates import Candidate, Quantizer
from matplotlib.figure import Figure
from optimizers import optimizers, rate
from outcome import HARMLESS, interval, put_into, redraw
from outcome import outcomes as outcomes_of_suite
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tasks import TASKS
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from training import LAST

from ncz_plugins.cli import machine
from ncz_plugins.cli.picture import BLUE, BROWN, COLORS, GREEN, ORANGE, RED, finish, ink, new_figure
from ncz_plugins.version import __version__

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = ROOT / "benchmarks" / "results" / "frontier.json"
NOTEBOOK, MARK = ROOT / "docs" / "notebook" / "convergence.md", "<!-- frontier -->"
ELSEWHERE_MARK, MUON_MARK = "<!-- elsewhere -->", "<!-- muon -->"  # of the tables in the page of results
REAL_MUON = ROOT / "benchmarks" / "results" / "muon-real-ranks.json"  # what under_ddp.py found
CURVE = 20  # points of a loss curve, each a mean
MOST_DRAWN_BITS = 4  # of fixed rates: more would take all of the picture
CLEARLY = 0.0004  # of the loss: by how much less a candidate adds whose number is drawn
KEPT = ROOT / "results" / "frontier.jsonl"


class Job(NamedTuple):
    """One training."""

    task: str
    optimizer: str
    candidate: Candidate
    seed: int
    steps: int
    ranks: int

    @property
    def group(self) -> tuple[str, str, int, int]:
        return self.task, self.optimizer, self.ranks, self.steps


# ------------------------------------------------------------------ what is tried

PLAIN, BF16, NUDGED = Candidate("plain"), Candidate("bf16"), Candidate("nudged")
SCREEN = (
    PLAIN,
    BF16,
    Candidate("nearest", "block", 0.5),  # the default up to November 2026
    Candidate("strata", "block", 0.5),
    Candidate("strata", "row", 0.5),
    Candidate("strata", "rows and columns", 0.5),
    Candidate("strata", "rows and columns", 1),
    Candidate("strata", "history", 0.5),
    Candidate("strata", "history", 1),
    *(Candidate(rounding, "block", 0.5, 256) for rounding in ("random", "strata", "near zero", "strata near zero")),
    *(Candidate(rounding, "block", 0.4, 256) for rounding in ("nearest", "strata", "strata near zero")),
    Candidate("strata", "block", 0.8, 256),
    Candidate("strata", "block", 1, 256),
    Candidate("strata near zero", "block", 0.9, 256),
    Candidate("strata", "block", 1, 128),
    Candidate("strata", "block", 0.5, 64),
    Candidate("strata", "block", 0.5, 64, octave=4),
    Candidate("strata", "block", 0.5, 128, octave=4),
    Candidate("strata", "block", 0.5, 1024, octave=4),
    *(Candidate("nearest", "block", 0.5, 256, feedback=0.8, kept_in=bits) for bits in (0, 16, 8)),
)
SUMS = (
    PLAIN,
    *(Candidate("strata", "block", step, 256) for step in (0.4, 0.57)),
    *(Candidate("strata", "block", 0.4, 256, last=last) for last in (0.75, 1.1)),  # twice and three times as wide
)
# The longer training of the suite, in which one seed of the default was worse than plain, and four were better.
LONG = (
    PLAIN,
    NUDGED,
    *(Candidate("strata", scale, 0.5) for scale in ("rows and columns", "history")),
    *(Candidate("strata", "block", step, 128) for step in (0.5, 0.375, 0.25)),
    Candidate("random", "block", 0.375, 128),
)
# Small batches for longer than in the screening, in a small model: what wide steps do to it shows in one run.
COARSE, DEFAULT = (Candidate("strata", "block", step, 128) for step in (1, 0.375))
SHORT = (
    PLAIN,
    NUDGED,
    DEFAULT,
    COARSE,
    *(each._replace(apart="vectors") for each in (DEFAULT, COARSE)),
    COARSE._replace(apart="vectors", apart_step=0.125),
    COARSE._replace(apart="embeddings"),
    Candidate("strata", "rows and columns", 1),
    Candidate("strata", "history", 1),
    COARSE._replace(block=32, octave=4),
)
# At a high rate a millionth decides where that training ends: this shows how far chance goes.
CHAOS = (PLAIN, NUDGED, DEFAULT, COARSE)
# All with feedback and finely; and what Muon trains in the basis of its momentum, the rest nearly by the default.
FED = Candidate("nearest", "block", 0.05, 128, feedback=1)
TURNED = FED._replace(apart="rest", apart_step=0.2, rotated=20, tilt=0.5)
FED_APART = FED._replace(apart="rest", apart_step=0.2)
MUON = (PLAIN, DEFAULT, FED, FED_APART, FED_APART._replace(step=0.1), TURNED, TURNED._replace(sides=2))
MUON_SHOWN = (  # in docs/results/convergence.md
    DEFAULT,
    FED_APART._replace(step=0.1),
    FED,
    TURNED._replace(step=0.2, apart_step=0.375),
    TURNED,
    TURNED._replace(sides=2),
)
PRESETS = (PLAIN, *(Candidate("strata", "block", step, 128) for step in (0.25, 0.375, 0.85)))
PARTS = {  # name on the command line: task, optimizer, candidates, steps, ranks
    "screen": ("GPT", "AdamW", SCREEN, 300, 2),
    "sums": ("GPT", "AdamW", SUMS, 300, 8),
    "long": ("GPT large", "AdamW", LONG, 2000, 2),
    "short": ("GPT short", "AdamW", SHORT, 1500, 2),
    "chaos": ("GPT short", "AdamW 0.003", CHAOS, 1500, 2),
    "Lion": ("GPT", "Lion", PRESETS, 300, 2),
    "Muon": ("GPT", "Muon", MUON, 300, 2),
    "Muon 64": ("GPT, 64 sequences", "Muon", MUON, 300, 2),
}
BY_DEFAULT = ("screen", "sums")  # a run of "long" takes 40 minutes of a core


def jobs(part: str, seeds: int) -> list[Job]:
    """All seeds of one candidate after the other seed's, so that an interrupted search has a little of all."""
    task, optimizer, candidates, steps, ranks = PARTS[part]
    return [Job(task, optimizer, each, seed, steps, ranks) for seed in range(seeds) for each in candidates]


# ------------------------------------------------------------------ one training


def train(job: Job, device: str = "cpu") -> dict[str, Any]:
    """The loss at the end, and what was sent for it."""
    torch.set_num_threads(1)
    started = time.process_time()  # which does not run while others use the core
    task = TASKS[job.task]()
    torch.manual_seed(job.seed)
    model = task.model().to(device)
    named = dict(model.named_parameters())
    parameters = list(named.values())
    quantizer = Quantizer(job.candidate, [tuple(p.shape) for p in parameters], job.seed, list(named))
    used = optimizers(job.optimizer, named, task.sgd_rate)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: rate(step, job.steps)) for each in used]
    losses, errors = [], []
    for step in range(job.steps):
        gradients = []
        for rank in range(job.ranks):
            model.zero_grad()
            batch = task.training_batch(job.seed, step, rank, job.ranks)
            loss = task.loss(model, tuple(each.to(device) for each in batch))
            loss.backward()
            gradients.append(parameters_to_vector([p.grad for p in parameters]))
            losses.append(loss.item())
        average = quantizer(gradients)
        if step % 20 == 10:
            exact = torch.stack(gradients).mean(0)
            errors.append(((average - exact).norm() / exact.norm()).item())
        for parameter, gradient in zip(parameters, average.split([p.numel() for p in parameters])):
            parameter.grad = gradient.view_as(parameter)
        if task.clip:
            clip_grad_norm_(parameters, task.clip)
        for each in (*used, *schedules):
            each.step()
    return {
        "loss": fmean(losses[-round(LAST * len(losses)) :]),
        "curve": [round(part.mean().item(), 5) for part in torch.tensor(losses).tensor_split(CURVE)],
        "bits": fmean(quantizer.bits or [16.0 if job.candidate == BF16 else 32.0]),
        "gradient_error": fmean(errors),
        **task.evaluate(model.cpu(), 0, 1),
        "seconds": time.process_time() - started,
        "device": device,
        "torch": torch.__version__,
    }


# ------------------------------------------------------------------ what came of it


class Outcome(NamedTuple):
    """The runs of one candidate: the same but for the seed.

    Attributes:
        added: to the loss of the plain run with the same seed, as a part of that.
        added_to_validation: the same of the validation loss; empty where that was not kept.
    """

    group: tuple[str, str, int, int]
    candidate: Candidate
    records: list[dict[str, Any]]
    added: list[float]
    added_to_validation: list[float]

    @property
    def interval(self) -> float:
        """Half the width of the 95 % confidence interval of the mean; nan for a single run."""
        return interval(self.added)

    @property
    def bits(self) -> float:
        return fmean(record["bits"] for record in self.records)


def outcomes(runs: dict[Job, dict[str, Any]]) -> list[Outcome]:
    """By group; inside of a group by bits."""
    found: dict[tuple, Outcome] = {}
    for job, record in runs.items():
        plain = runs.get(job._replace(candidate=PLAIN))
        if plain is not None:
            outcome = found.setdefault((job.group, job.candidate), Outcome(job.group, job.candidate, [], [], []))
            outcome.records.append(record)
            outcome.added.append(record["loss"] / plain["loss"] - 1)
            if "validation_loss" in record and "validation_loss" in plain:
                outcome.added_to_validation.append(record["validation_loss"] / plain["validation_loss"] - 1)
    return sorted(found.values(), key=lambda each: (each.group, each.bits))


def table(found: Iterable[Outcome]) -> Table:
    result = Table(title="Loss added to that of plain, by bits per value", box=None, pad_edge=False)
    for heading in ("", "bits", "added", "95 %", "in validation", "loss", "error", "seeds"):
        result.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    group = None
    for each in found:
        if each.group != group:
            group = each.group
            result.add_row("[bold]{}, {}, {} ranks, {} steps".format(*group))
        result.add_row(
            each.candidate.describe(),
            f"{each.bits:.2f}",
            f"{fmean(each.added):+.2%}",
            f"{each.interval:.2%}",
            in_validation(each)[0],
            f"{fmean(record['loss'] for record in each.records):.4f}",
            f"{fmean(record['gradient_error'] for record in each.records):.3f}",
            f"{len(each.added)}",
        )
    return result


def in_validation(outcome: Outcome) -> tuple[str, str]:
    """What is added to the validation loss, and the interval; empty where not all runs have it."""
    added = outcome.added_to_validation
    if len(added) < len(outcome.records):
        return "", ""
    return f"{fmean(added):+.2%}", f"± {interval(added):.2%}" if len(added) > 1 else ""


def numbered(found: Iterable[Outcome], group: tuple[str, str, int, int]) -> Iterator[tuple[int, Outcome]]:
    """What was tried in a group, but for plain, from 1 on."""
    return enumerate((each for each in found if each.group == group and each.candidate != PLAIN), 1)


def markdown(found: list[Outcome]) -> str:
    """For the documentation: a table for each group."""
    lines: list[str] = []
    for group in dict.fromkeys(each.group for each in found):
        lines += ["### {}, {}, {} ranks, {} steps".format(*group), ""]
        lines += ["| | rounding, scale, step | bits | added | 95 % | in validation | 95 % | gradient error | seeds |"]
        lines += ["|---:|---|---:|---:|---:|---:|---:|---:|---:|"]
        for number, each in numbered(found, group):
            several = len(each.added) > 1
            cells = (
                f"{number}",
                each.candidate.describe(),
                f"{each.bits:.2f}",
                f"{fmean(each.added):+.2%}",
                f"± {each.interval:.2%}" if several else "",
                *in_validation(each),
                f"{fmean(record['gradient_error'] for record in each.records):.3f}",
                f"{len(each.added)}",
            )
            lines += [f"| {' | '.join(cells)} |"]
        lines += [""]
    return "\n".join(lines)


def added_words(added: list[float], seeds: bool = False) -> str:
    """ "+0.91% ± 0.07% (5 seeds)"; an interval takes several seeds."""
    several = len(added) > 1
    counted = f" ({len(added)} seed{'s' * several})" if seeds else ""
    return f"{fmean(added):+.2%}{f' ± {interval(added):.2%}' * several}{counted}"


def elsewhere(done: dict[Job, dict[str, Any]]) -> str:
    """What the default, and `small` under Lion, add to other trainings than those by which presets are compared."""
    simulated = {(each.group, each.candidate): each for each in outcomes(done)}
    real = {(each.group, each.setting): each for each in outcomes_of_suite(suite.published())}
    eight = real[("GPT", "AdamW", 8, 300), plan.NAMED["balanced"]]
    found = [("the default", "processes", eight, eight.mean("ratio"))]
    small = DEFAULT._replace(step=plan.NAMED["small"].bound)
    for part, candidate in (("Lion", DEFAULT), ("Lion", small), ("short", DEFAULT), ("long", DEFAULT)):
        each = simulated[jobs(part, 1)[0].group, candidate]
        found.append(("`small`" if candidate == small else "the default", "simulated", each, 32 / each.bits))
    lines = ["| model | optimizer | steps | ranks | preset | to fp32 | added | seeds |"]
    lines += ["|---|---|---:|---|---|---:|---:|---:|"]
    for preset, kind, each, ratio in found:
        task, optimizer, ranks, steps = each.group
        model = f"GPT of {sum(p.numel() for p in TASKS[task]().model().parameters()) / 1e6:.2f} M"
        cells = model, optimizer, f"{steps:,}", f"{ranks} {kind}", preset, f"{ratio:.1f}", added_words(each.added)
        lines.append(f"| {' | '.join(cells)} | {len(each.added)} |")
    return "\n".join(lines) + "\n"


def muon(done: dict[Job, dict[str, Any]]) -> str:
    """What quantizers add to the loss under Muon, by sequences in a step; the last row is of real ranks."""
    groups = [jobs(part, 1)[0].group for part in ("Muon", "Muon 64")]
    found = {(each.group, each.candidate): each for each in outcomes(done)}
    lines = ["| matrices of the layers | the rest | bits | to fp32 | 16 sequences | 64 sequences |"]
    lines += ["|---|---|---:|---:|---:|---:|"]
    for candidate in MUON_SHOWN:
        cells = [found.get((group, candidate)) for group in groups]
        bits = cells[0].bits
        told = [added_words(each.added, seeds=True) if each else "" for each in cells]
        lines.append(f"| {' | '.join([*muon_words(candidate), f'{bits:.1f}', f'{32 / bits:.1f}', *told])} |")
    return "\n".join([*lines, muon_by_real_ranks([group[0] for group in groups])]) + "\n"


def muon_by_real_ranks(tasks: list[str]) -> str:
    """The row of the preset under DDP, whose bits are all that was sent."""
    document, added, ratios = json.loads(REAL_MUON.read_text()), [], []
    for task in tasks:
        runs = [run for run in document["runs"] if run["task"] == task]
        added.append([run["rotated"]["training_loss"] / run["plain"]["training_loss"] - 1 for run in runs])
        ratios.append(fmean(run["rotated"]["ratio"] for run in runs))
    words = f"**`ncclz:muon-ddp`, by two real ranks** | at random, {document['config']['quantizer']['value']:g}"
    cells = f"{32 / ratios[0]:.1f}", f"{ratios[0]:.1f}", *(added_words(each, seeds=True) for each in added)
    return f"| {words} | {' | '.join(cells)} |"


def muon_words(candidate: Candidate) -> tuple[str, str]:
    """How a candidate treats the layers' matrices, and all else."""
    if candidate == DEFAULT:
        return "the default", "the default"
    way = f"rotated{' on both sides' * (candidate.sides > 1)}" if candidate.rotated else "to the nearest"
    matrices = f"{way}, {candidate.step / 2:g}, with error feedback"  # a bound is half a step
    if candidate == FED:
        return f"**{matrices}, `ncclz:muon`**", "the same"
    return matrices, f"at random, {candidate.apart_step:g}"


def kept() -> dict[Job, dict[str, Any]]:
    """The runs that are done."""
    if not KEPT.exists():
        return {}
    return dict(read(json.loads(line)) for line in KEPT.read_text().splitlines())


def committed() -> dict[Job, dict[str, Any]]:
    """The runs of the repository."""
    return dict(map(read, json.loads(NUMBERS.read_text())["runs"]))


def read(record: dict[str, Any]) -> tuple[Job, dict[str, Any]]:
    """A run as `written` left it."""
    job = record.pop("job")
    return Job(**job | {"candidate": Candidate(**job["candidate"])}), record


def written(job: Job, record: dict[str, Any]) -> dict[str, Any]:
    """A run, ready for JSON."""
    return {"job": job._asdict() | {"candidate": job.candidate._asdict()}, **record}


def train_all(wanted: list[Job], done: dict[Job, dict[str, Any]], processes: int, device: str = "cpu") -> None:
    """Do what is left, and keep it."""
    left = [job for job in wanted if job not in done]
    columns = (TextColumn("{task.description:<60}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    KEPT.parent.mkdir(exist_ok=True)
    with (
        ProcessPoolExecutor(processes) as pool,
        Progress(*columns, console=Console(stderr=True)) as progress,
        KEPT.open("a") as file,
    ):
        task = progress.add_task("", total=len(left))
        for job, record in zip(left, pool.map(partial(train, device=device), left)):
            done[job] = record
            print(json.dumps(written(job, record)), file=file, flush=True)
            progress.update(task, advance=1, description=f"{job.candidate.describe()}, seed {job.seed}")


DRAWN = ("screen", "short", "Muon")  # parts that the page of results speaks of
ROUNDINGS = {"nearest": RED, "random": ORANGE, "strata": BLUE, "near zero": BROWN, "strata near zero": BROWN}
SCALES = {"block": "o", "row": "s", "rows and columns": "D", "history": "^", "rotated": "*"}


def draw(searched: dict[str, Any], trained: dict[str, Any]) -> Figure:
    """Loss added against bits, a panel for each part. Numbers are those of the table in the notebook.

    Args:
        searched, trained: what frontier.json and convergence.json hold. Of the latter, which has real processes, fixed
            rates are shown.
    """
    found, real = outcomes(dict(map(read, searched["runs"]))), outcomes_of_suite(suite.by_job(trained))
    figure, panels = new_figure(len(DRAWN), height=3.2)
    for part, axes in zip(DRAWN, panels):
        group = jobs(part, 1)[0].group
        _candidates(axes, [(number, each) for number, each in numbered(found, group) if each.candidate.scale])
        for each in real:
            if each.group == group and each.setting.is_fixed_rate and each.setting.bound <= MOST_DRAWN_BITS:
                nearest = each.setting.kind == "bits"
                label = f"{each.setting.bound:g} bits" if nearest else ""
                _labeled(axes, 32 / each.mean("ratio"), each.added, label, COLORS["bits"], "x" if nearest else "+")
        axes.margins(x=0.1, y=0.1)
        axes.set(ylabel="loss added, %", ylim=(min(0, axes.get_ylim()[0]), axes.get_ylim()[1]))
        axes.axhspan(-100 * HARMLESS, 100 * HARMLESS, color=GREEN, alpha=0.2, lw=0)
    _legend(panels[0])
    panels[-1].set_xlabel("bits per value")
    for part, axes in zip(DRAWN, panels):
        finish(axes, "{}, {}, {} ranks, {} steps".format(*jobs(part, 1)[0].group))
    return figure


def _candidates(axes, candidates: list[tuple[int, Outcome]]) -> None:
    """Points. Those have a number that add clearly less than all of fewer bits."""
    best = math.inf
    for number, each in sorted(candidates, key=lambda pair: pair[1].bits):
        marker = SCALES["rotated" if each.candidate.rotated else each.candidate.scale]
        label = f"{number}" if fmean(each.added) < best - CLEARLY else ""
        best = min(best, fmean(each.added))
        _labeled(axes, each.bits, each.added, label, ROUNDINGS[each.candidate.rounding], marker)


def _labeled(axes, bits: float, added: list[float], label: str, color: str, marker: str) -> None:
    place = bits, 100 * fmean(added)
    axes.plot(*place, marker, color=color)
    axes.annotate(label, place, (5, 4), textcoords="offset points")


def _legend(axes) -> None:
    """What colours and markers say."""
    for name, color in ROUNDINGS.items():
        if name != "near zero":  # as the next one
            axes.plot([], [], "o", color=color, label=name.replace("strata near", "near"))
    for name, marker in SCALES.items():
        axes.plot([], [], marker, color=ink(), label=f"scale: {name}")
    for name, marker in {"fixed rate, nearest": "x", "fixed rate, random": "+"}.items():
        axes.plot([], [], marker, color=COLORS["bits"], label=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of everything (default: 3)")
    default = " and ".join(BY_DEFAULT)
    parser.add_argument("--part", choices=PARTS, action="append", help=f"what to try (default: {default})")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="trainings at a time (default: cores)")
    parser.add_argument("--report", action="store_true", help="train nothing: show and write what is there")
    arguments = parser.parse_args()
    done = committed() | kept()
    if not arguments.report:
        for part in arguments.part or BY_DEFAULT:
            train_all(jobs(part, arguments.seeds), done, arguments.processes)
    Console().print(table(outcomes(done)))
    publish(done)
    redraw("frontier")


def publish(done: dict[Job, dict[str, Any]]) -> None:
    """Write all runs into the repository, and their tables into the notebook and the page of results."""
    versions = ", ".join(sorted({record["torch"] for record in done.values()}))
    whole = {
        "command": "make convergence",
        "versions": {"ncz_plugins": __version__, "torch": versions, "python": platform.python_version()},
        "cpu": machine.cpu(),
        "hours": round(sum(record["seconds"] for record in done.values()) / 3600, 2),  # of one core
        "runs": [written(job, record) for job, record in done.items()],
    }
    NUMBERS.write_text(json.dumps(whole, indent=1) + "\n")
    put_into(NOTEBOOK, markdown(outcomes(done)), MARK)
    put_into(suite.RESULTS, elsewhere(done), ELSEWHERE_MARK)
    put_into(suite.RESULTS, muon(done), MUON_MARK)


if __name__ == "__main__":
    main()
