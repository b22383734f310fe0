"""What it costs a mixture-of-experts GPT to compress the rows that travel to its experts and back.

    .venv/bin/python benchmarks/convergence/activations.py [--seeds 5] [--report]

Ranks are simulated in one process, see simulated_experts.py. Chance moves a training by more than fine rounding, so
there are two questions:

1. At fixed weights, after a plain training: what is added to the loss of the same batches, and how far is the gradient
   from the exact one? Precise, for many quantizers (`look`).
2. Over a training with several seeds: what is added to the loss of the plain training with the same seed (`train`)?

Prints a table, and writes benchmarks/results/activations.json, docs/images/activations.png and the tables of
docs/results/convergence.md and docs/notebook/convergence.md. What is done is kept in results/activations*.jsonl: an
interrupted study goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from optimizers import optimizers, rate
from outcome import interval, put_into, redraw
from rich.console import Console
from rich.table import Table
from simulated_experts import BALANCE, ExpertsGPT, Link, Links, Way
from tasks import GPTConfig, Text
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from training import LAST

from ncz_plugins.cli import machine
from ncz_plugins.cli.picture import BLUE, BROWN, GREEN, ORANGE, PURPLE, RED, TEAL, finish, logarithmic, new_figure
from ncz_plugins.core.config import Config
from ncz_plugins.version import __version__

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = ROOT / "benchmarks" / "results" / "activations.json"
RESULTS, MARK = ROOT / "docs" / "results" / "convergence.md", "<!-- activations -->"
NOTEBOOK = ROOT / "docs" / "notebook" / "convergence.md"
KEPT, KEPT_LOOKS = (ROOT / "results" / name for name in ("activations.jsonl", "activations-looks.jsonl"))
SIZES, SEQUENCES, STEPS = GPTConfig(context=64, layers=3, heads=4, width=128), 8, 200
TASK = Text(torch.float32, SIZES, SEQUENCES)
LOOK_BATCHES = 16  # that a look takes the mean over
HARMLESS = 0.05  # % of the loss: what may be added by the default


class Job(NamedTuple):
    """One training, or one look at what a training comes to.

    Attributes:
        forward, backward: how activations travel, and their gradients.
        of: "both", or only one of "dispatch" and "combine" while the other is plain.
        seed: of the first weights, of the batches, and of random rounding.
    """

    forward: Way
    backward: Way
    of: str = "both"
    seed: int = 0
    steps: int = STEPS

    def describe(self) -> str:
        """A few words: "stochastic, rms 0.1 per 128; forward only"."""
        if self.forward == self.backward:
            ways = self.forward.describe()
        elif PLAIN in (self.forward, self.backward):
            way, when = (self.forward, "forward") if self.backward == PLAIN else (self.backward, "backward")
            ways = f"{way.describe()}; {when} only"
        else:
            ways = f"{self.forward.describe()}; backward {self.backward.describe()}"
        return ways + (f"; {self.of} only" if self.of != "both" else "")

    def links(self) -> Links:
        """What the rows of a training travel by."""
        exact = [self.of not in ("both", which) for which in ("dispatch", "combine")] * 2
        ways = [self.forward] * 2 + [self.backward] * 2
        used = [PLAIN if is_exact else way for is_exact, way in zip(exact, ways)]
        return Links(*(Link(way, 4 * self.seed + number) for number, way in enumerate(used)))


# ------------------------------------------------------------------ what is tried

PLAIN, NUDGED, BF16, E4M3, E5M2 = map(Way, ("plain", "nudged", "bf16", "E4M3", "E5M2"))
DEFAULT = Way.of(Config().quantizer_of("activation"))


def rms(kind: str, value: float, block: int = 128) -> Way:
    return Way(kind, "rms", value, block)


# A quantizer that rounds to the nearest has the same steps as one at random with twice the bound.
STEPS_TRIED = (0.05, 0.1, 0.2, 0.4, 0.8)
AT_RANDOM = {step: rms("stochastic", step) for step in STEPS_TRIED}
NEAREST = {step: rms("error_bound", step / 2) for step in STEPS_TRIED}
REL = [Way("error_bound", "rel", value, 128) for value in (1 / 64, 1 / 32, 1 / 16)]
RATES = {kind: [Way(kind, "bits", bits) for bits in (8, 6, 4)] for kind in ("error_bound", "stochastic")}
CASTS = [(BF16, BF16), (E4M3, E5M2), (E4M3, BF16), (NUDGED, NUDGED)]
QUANTIZERS = [*NEAREST.values(), *AT_RANDOM.values(), *REL, *RATES["error_bound"], *RATES["stochastic"]]
IN_PARTS = (DEFAULT, NEAREST[0.4])  # of which single ways are looked at
TRAINED = [(PLAIN, PLAIN), *((way, way) for way in (DEFAULT, BF16, NEAREST[0.8])), (E4M3, E5M2)]


def looks(seed: int) -> list[Job]:
    """What is looked at with the weights of a seed."""
    found = [Job(*each, seed=seed) for each in CASTS] + [Job(way, way, seed=seed) for way in QUANTIZERS]
    for way in IN_PARTS:
        found += [Job(way, way, seed=seed), Job(way, PLAIN, seed=seed), Job(PLAIN, way, seed=seed)]
        found += [Job(way, way, of, seed) for of in ("dispatch", "combine")]
    return list(dict.fromkeys(found))


def trainings(seeds: int) -> Iterator[Job]:
    """All of one seed before the next seed, so that an interrupted study has a little of all."""
    for seed in range(seeds):
        yield from dict.fromkeys(Job(*each, seed=seed) for each in TRAINED)


# ------------------------------------------------------------------ one training


def train(job: Job, task: Text = TASK) -> tuple[ExpertsGPT, dict[str, Any]]:
    """Returns the model, and a record of the loss at the end and of the bits of what travelled."""
    torch.set_num_threads(1)
    started = time.process_time()  # which does not run while others use the core
    torch.manual_seed(job.seed)
    links = job.links()
    model = ExpertsGPT(task.sizes, links)
    named = dict(model.named_parameters())
    used = optimizers("AdamW", named, task.sgd_rate)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: rate(step, job.steps)) for each in used]
    losses, balances = [], []
    for step in range(job.steps):
        loss = task.loss(model, task.training_batch(job.seed, step, 0, 1))
        model.zero_grad()
        (loss + BALANCE * model.balance).backward()
        clip_grad_norm_(named.values(), task.clip)
        for each in (*used, *schedules):
            each.step()
        losses.append(loss.item())
        balances.append(model.balance.item())
    last = max(1, round(LAST * job.steps))
    record = {
        "training_loss": fmean(losses[-last:]),
        "balance": fmean(balances[-last:]),
        "bits": bits_of(links),
        "active_parameters": model.active_parameters(),
    }
    model.travel(Job(PLAIN, PLAIN).links())  # so that all are judged alike
    record |= task.evaluate(model, 0, 1)
    return model, record | {"seconds": round(time.process_time() - started, 1), "torch": torch.__version__}


def bits_of(links: Links) -> dict[str, float]:
    """Bits of each value that the links have sent."""
    return {name: round(link.bits, 3) for name, link in zip(Links._fields, links)}


# ------------------------------------------------------------------ a look at fixed weights


def look(seed: int, model: ExpertsGPT, jobs: Iterable[Job], task: Text = TASK) -> dict[Job, dict[str, Any]]:
    """What each job does to the loss and the gradient of a model that was trained plain, on the same batches."""
    batches = [task.training_batch(seed, STEPS + number, 0, 1) for number in range(LOOK_BATCHES)]
    losses, gradients = _loss_and_gradient(model, Job(PLAIN, PLAIN).links(), batches, task)
    mean = gradients.mean(0)
    between_batches = ((gradients - mean).norm(dim=1) / mean.norm()).mean().item()
    found = {}
    for job in jobs:
        links = job.links()
        its_losses, its_gradients = _loss_and_gradient(model, links, batches, task)
        errors = (its_gradients - gradients).norm(dim=1) / gradients.norm(dim=1)
        found[job] = {
            "added": its_losses.mean().item() / losses.mean().item() - 1,
            "gradient_error": errors.mean().item(),
            "between_batches": between_batches,
            "bits": bits_of(links),
        }
    return found


def _loss_and_gradient(model: ExpertsGPT, links: Links, batches: list[tuple], task: Text) -> tuple[Tensor, Tensor]:
    """Of each batch: float64, [batches], and float32, [batches, parameters]."""
    model.travel(links)
    losses, gradients = [], []
    for batch in batches:
        model.zero_grad()
        loss = task.loss(model, batch)
        (loss + BALANCE * model.balance).backward()
        losses.append(loss.detach().double())
        gradients.append(parameters_to_vector([p.grad for p in model.parameters()]))
    return torch.stack(losses), torch.stack(gradients)


# ------------------------------------------------------------------ what came of it


class Outcome(NamedTuple):
    """What differs by the seed alone.

    Attributes:
        job: that of seed 0.
        looks: at fixed weights.
        added, added_to_validation: by a training to the losses of the plain one with the same seed, as a part of them.
    """

    job: Job
    looks: list[dict[str, Any]]
    added: list[float]
    added_to_validation: list[float]

    @property
    def bits(self) -> float:
        """The mean of what was not sent plain."""
        sent = [value for record in self.looks for value in record["bits"].values()]
        return fmean([value for value in sent if value < 32] or sent)

    def mean(self, key: str) -> float:
        """Over the looks."""
        return fmean(record[key] for record in self.looks)


def outcomes(runs: dict[Job, dict[str, Any]], looks: dict[Job, dict[str, Any]]) -> list[Outcome]:
    """By the bits that they take, from few to many."""
    found: dict[Job, Outcome] = {}
    for job, record in looks.items():
        outcome = found.setdefault(job._replace(seed=0), Outcome(job._replace(seed=0), [], [], []))
        outcome.looks.append(record)
        run, plain = runs.get(job), runs.get(Job(PLAIN, PLAIN, seed=job.seed, steps=job.steps))
        if run and plain:
            outcome.added.append(run["training_loss"] / plain["training_loss"] - 1)
            outcome.added_to_validation.append(run["validation_loss"] / plain["validation_loss"] - 1)
    return sorted(found.values(), key=lambda each: each.bits)


HEADINGS = (
    "how rows travel",
    "bits",
    "to fp32",
    "gradient error",
    "added, fixed weights",
    "added by training",
    "the same, validation",
    "seeds",
)


def cells(outcome: Outcome) -> list[str]:
    """Under HEADINGS."""
    name = outcome.job.describe()
    at_fixed_weights = [record["added"] for record in outcome.looks]
    return [
        f"**{name}, the default**" if is_default(outcome.job) else name,
        f"{outcome.bits:.2f}",
        f"{32 / outcome.bits:.1f}",
        f"{outcome.mean('gradient_error'):.2%}",
        share(at_fixed_weights, ".3%"),
        share(outcome.added, ".2%"),
        share(outcome.added_to_validation, ".2%"),
        f"{len(outcome.added)}" if outcome.added else "",
    ]


def share(values: list[float], how: str) -> str:
    """A mean with its confidence interval: "+0.10% ± 0.05%"; empty without values."""
    if not values:
        return ""
    return f"{fmean(values):+{how}}" + (f" ± {interval(values):{how}}" if len(values) > 1 else "")


def is_default(job: Job) -> bool:
    """Whether this is what the library does with activations unless told otherwise."""
    return job.forward == job.backward == DEFAULT and job.of == "both"


def table(found: list[Outcome]) -> Table:
    """For a terminal."""
    result = Table(title="What compressed rows add to the loss", box=None, pad_edge=False)
    for number, heading in enumerate(HEADINGS):
        result.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for each in found:
        result.add_row(*cells(each))
    return result


def markdown(found: list[Outcome]) -> str:
    """For the documentation."""
    rows = [HEADINGS, ["---"] + ["---:"] * (len(HEADINGS) - 1), *map(cells, found)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def trained(found: list[Outcome]) -> list[Outcome]:
    """What was trained with several seeds."""
    return [each for each in found if len(each.added) > 1]


# ------------------------------------------------------------------ as a picture


def draw(document: dict[str, Any]) -> Figure:
    """Against bits: the gradient's error, what is added at fixed weights, and what a training adds."""
    found = outcomes(read(document["runs"]), read(document["looks"]))
    figure, panels = new_figure(3)
    whole = [each for each in found if each.job.of == "both" and PLAIN not in each.job[:2]]
    for label, (color, some) in series(whole).items():
        given = {"color": color, "marker": "o", "lw": 0 if label == "casts" else 1}
        bits = [each.bits for each in some]
        panels[0].plot(bits, [100 * each.mean("gradient_error") for each in some], label=label, **given)
        panels[1].plot(bits, [100 * each.mean("added") for each in some], **given)
        several = trained(some)
        added = [100 * fmean(each.added) for each in several], [100 * interval(each.added) for each in several]
        panels[2].errorbar([each.bits for each in several], *added, fmt="o", color=color, capsize=3)
        for each in some if label == "casts" else ():
            if each.job.forward != NUDGED:
                place = each.bits, 100 * each.mean("gradient_error")
                panels[0].annotate(each.job.describe(), place, (4, 5), textcoords="offset points", rotation=30)
    logarithmic(panels[0].yaxis)
    panels[0].set_ylim(bottom=0.3)  # a nudge makes far less
    for panel in panels[1:]:
        panel.axhspan(-HARMLESS, HARMLESS, color=GREEN, alpha=0.2, lw=0)
    titles = "gradient error, fixed weights", "added to the loss, fixed weights", f"added by {STEPS} steps of training"
    for panel, title in zip(panels, titles):
        panel.set(xlabel="bits per value", ylabel="%", xscale="log")
        panel.set_xticks(ticks := (2, 3, 4, 6, 8, 16, 32), map(str, ticks))
        panel.minorticks_off()
        finish(panel, title, columns=2)
    return figure


def series(found: list[Outcome]) -> dict[str, tuple[str, list[Outcome]]]:
    """Outcomes by how they round, each with a color."""
    ways = {
        "to the nearest, rms": (BLUE, [*NEAREST.values(), DEFAULT]),
        "at random, rms": (TEAL, AT_RANDOM.values()),
        "to the nearest, rel": (BROWN, REL),
        "fixed rate, nearest": (PURPLE, RATES["error_bound"]),
        "fixed rate, at random": (RED, RATES["stochastic"]),
        "casts": (ORANGE, [way for way, _ in CASTS]),
    }
    return {
        label: (color, [each for each in found if each.job.forward in some]) for label, (color, some) in ways.items()
    }


# ------------------------------------------------------------------ what is kept


Records = dict[Job, dict[str, Any]]


def written(job: Job, record: dict[str, Any]) -> dict[str, Any]:
    """A record, ready for JSON."""
    ways = {"forward": job.forward._asdict(), "backward": job.backward._asdict()}
    return {"job": job._asdict() | ways, **record}


def read(records: Iterable[dict[str, Any]]) -> Records:
    """Records as `written` left them."""
    found = {}
    for record in records:
        job = record.pop("job")
        found[Job(**job | {key: Way(**job[key]) for key in ("forward", "backward")})] = record
    return found


def kept(path: Path) -> Records:
    """What is done."""
    return read(map(json.loads, path.read_text().splitlines())) if path.exists() else {}


def keep(path: Path, done: Records) -> None:
    """Add to what is done."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(written(*each)) + "\n" for each in done.items())


def committed() -> tuple[Records, Records]:
    """The trainings and the looks of the repository."""
    whole = json.loads(NUMBERS.read_text())
    return read(whole["runs"]), read(whole["looks"])


def study(seeds: int, console: Console) -> None:
    """Do what is left, and keep it."""
    for seed in range(seeds):
        plain, runs, seen = Job(PLAIN, PLAIN, seed=seed), kept(KEPT), kept(KEPT_LOOKS)
        missing = [job for job in looks(seed) if job not in seen]
        if missing or plain not in runs:
            model, record = train(plain)
            if plain not in runs:
                keep(KEPT, {plain: record})
            keep(KEPT_LOOKS, look(seed, model, missing))
            console.print(f"seed {seed}: looked at {len(missing)} ways", highlight=False)
    runs = kept(KEPT)
    left = [job for job in trainings(seeds) if job not in runs]
    for number, job in enumerate(left, 1):
        _, record = train(job)
        keep(KEPT, {job: record})
        line = f"{number}/{len(left)} seed {job.seed}, {job.describe()}: {record['training_loss']:.4f}"
        console.print(line, highlight=False)


def publish(console: Console) -> None:
    """Show and write what is done."""
    runs, seen = kept(KEPT), kept(KEPT_LOOKS)
    found = outcomes(runs, seen)
    console.print(table(found))
    whole = {
        "command": "make convergence",
        "versions": {"ncz_plugins": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "cpu": machine.cpu(),
        "hours": round(sum(record["seconds"] for record in runs.values()) / 3600, 2),  # of one core, for the trainings
        "runs": [written(*each) for each in runs.items()],
        "looks": [written(*each) for each in seen.items()],
    }
    NUMBERS.write_text(json.dumps(whole, indent=1) + "\n")
    put_into(NOTEBOOK, markdown(found), MARK)
    put_into(RESULTS, markdown(trained(found)), MARK)
    redraw("activations")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each way (default: 5)")
    parser.add_argument("--report", action="store_true", help="train nothing: show and write what is there")
    arguments = parser.parse_args()
    console = Console()
    if not arguments.report:
        study(arguments.seeds, console)
    publish(console)


if __name__ == "__main__":
    main()
