"""Horovod's and DeepSpeed's own tests, as they are, plain and compressed: what fails only when compressed?

    make thirdparty                                  all of it (half an hour)
    python -m benchmarks.thirdparty.run --suite horovod   one of both
    python -m benchmarks.thirdparty.run --horovod-source DIR --deepspeed-source DIR   clones that are there already

Each suite is taken from GitHub at a pinned version and run three times: plain, with kind lossless, and with a tight
bound. Exits with 1 if a test fails with kind lossless that passes plain. --write puts the outcomes into
benchmarks/results/third-party.json and their table into docs/results/third-party.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.pages import put_into
from benchmarks.performance import rows_of
from ncz_plugins.cli import machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BIN = Path(sys.executable).parent
CACHE = ROOT / ".cache" / "thirdparty"
NUMBERS = ROOT / "benchmarks" / "results" / "third-party.json"
PAGE, MARKS = ROOT / "docs" / "results" / "third-party.md", ("<!-- outcomes -->", "<!-- end of outcomes -->")
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "."]
SMALL_TOO = {"transport": {"min_bytes": 0}}
TITLES = {"horovod": "Horovod", "deepspeed": "DeepSpeed"}
MODES = {
    "plain": None,
    "lossless": SMALL_TOO | {"quantizer": {"kind": "lossless"}},
    "abs:1e-6": SMALL_TOO | {"quantizer": {"mode": "abs", "value": 1e-6}},
}


Outcomes = dict[str, dict[str, str]]  # mode: test: passed, skipped, or the last line of its error


@dataclass(frozen=True)
class Suite:
    """Tests of a project.

    Attributes:
        url, version: where they come from.
        folder: where pytest is started, in the clone.
        tests: arguments of pytest.
        launcher: starts each rank; empty where the tests start ranks themselves. Each test is launched by itself then,
            since ranks of which one failed in the middle of a test are no more at the same place.
        seconds: the most for one launch.
        known: tests that fail with us for a reason that the documentation gives.
    """

    url: str
    version: str
    folder: str
    tests: tuple[str, ...]
    launcher: tuple[str, ...]
    seconds: float
    known: Mapping[str, str] = field(default_factory=dict)


SUITES = {
    "horovod": Suite(
        "https://github.com/horovod/horovod",
        "v0.28.1",
        "test/parallel",
        (
            "test_torch.py",
            "-k",
            "allreduce or optimizer or gradient_clipping or dynamic_requires_grad or broadcast_state",
        ),
        (f"{BIN}/horovodrun", "-np", "2"),
        60,
        {
            "test_horovod_allreduce_duplicate_name_error": "a reduction whose handle was dropped is none",
        },
    ),
    "deepspeed": Suite(
        "https://github.com/deepspeedai/DeepSpeed",
        "v0.19.5",
        "tests",
        (
            "unit/v1/zero/test_zero.py",
            "unit/v1/zero/test_zero_user_backward.py",
            "-k",  # on two ranks
            "BF16Optimizer or ToFP32 or ZeroFrozenWeights or ManyParams or LargeParam or BackwardBasic or NonScalar or "
            "BackwardGradAccumulation or MultipleEngines",
        ),
        (),
        1500,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, action="append", help="by default all")
    for name, suite in SUITES.items():
        parser.add_argument(f"--{name}-source", type=Path, metavar="DIR", help=f"a clone that has {suite.version}")
    parser.add_argument("--write", action="store_true", help="write the file of results and the page's table")
    options = vars(parser.parse_args())
    found = {}
    for name in options["suite"] or SUITES:
        source = options[f"{name}_source"] or clone(name)
        found[name] = {mode: run(name, source, mode) for mode in MODES}
        show(name, found[name])
        if "passed" not in found[name]["plain"].values():
            sys.exit(f"{name}: no test passes plain, so nothing is known; see {log_of(name, 'plain')}")
    if options["write"]:
        write(found)
    return int(any(not known(name, test) for name in found for test in only_with_us(found[name], "lossless")))


def write(found: dict[str, Outcomes]) -> None:
    """Write the outcomes of the suites that were run, what they were found with, and the page's table."""
    suites = json.loads(NUMBERS.read_text())["suites"]
    for name, outcomes in found.items():
        versions = {each: machine.installed_version(each) for each in ("ncz_plugins", "torch", name)}
        about = {"tests": SUITES[name].version, "versions": versions, "cpu": machine.cpu()}
        suites[name] = about | {"outcomes": outcomes}
    command = "python -m benchmarks.thirdparty.run --write"
    versions = {"torch": ", ".join(sorted({each["versions"]["torch"] for each in suites.values()}))}
    NUMBERS.write_text(json.dumps({"command": command, "versions": versions, "suites": suites}, indent=1) + "\n")
    put_into(PAGE, markdown(suites), MARKS)


def markdown(suites: dict[str, dict[str, Any]]) -> str:
    """The page's table."""
    rows = []
    for name, suite in suites.items():
        with_versions = (
            f"{TITLES[name]} {suite['tests']}, run with {suite['versions'][name]}, torch {suite['versions']['torch']}"
        )
        for mode in suite["outcomes"]:
            rows.append([with_versions if mode == "plain" else "", mode, *counts(suite["outcomes"], mode)])
    return rows_of(["tests of", "mode", "passed", "skipped", "failed", "only when compressed"], rows)


def counts(found: Outcomes, mode: str) -> list[str]:
    """How many tests passed, were skipped, failed, and failed only with us, as text."""
    outcomes = list(found[mode].values())
    failures = sum(map(failed, outcomes))
    only = "" if mode == "plain" else str(len(only_with_us(found, mode)))
    return [str(outcomes.count("passed")), str(outcomes.count("skipped")), str(failures), only]


def clone(name: str) -> Path:
    """The suite's project at its version, from the cache or from GitHub."""
    suite, target = SUITES[name], CACHE / f"{name}-{SUITES[name].version}"
    if not target.exists():
        git = ["git", "-c", "advice.detachedHead=false"]
        options = ["--quiet", "--depth", "1", "--filter", "blob:none", "--sparse", "--branch", suite.version]
        subprocess.run([*git, "clone", *options, suite.url, str(target)], check=True)
        # The tests only: the project itself is the one that is installed.
        subprocess.run([*git, "sparse-checkout", "set", suite.folder.partition("/")[0]], cwd=target, check=True)
    return target


def log_of(name: str, mode: str) -> Path:
    """What pytest and the tests print."""
    return CACHE / f"{name}-{mode.replace(':', '-')}.log"


def run(name: str, source: Path, mode: str) -> dict[str, str]:
    """The outcome of each test, by its name: passed, skipped, or the last line of its error on the first rank."""
    suite, console = SUITES[name], Console(stderr=True)
    console.print(f"{name} {suite.version}, {mode} ...")
    log_of(name, mode).unlink(missing_ok=True)
    if not suite.launcher:
        return launch(name, source, mode, suite.tests)
    found: dict[str, str] = {}
    for test in collected(name, source):
        found |= launch(name, source, mode, (test,)) or {test: "ended without an outcome"}
    return found


def collected(name: str, source: Path) -> list[str]:
    """The names of a suite's tests."""
    suite = SUITES[name]
    command = [*PYTEST, "--collect-only", *suite.tests]
    done = subprocess.run(
        command, cwd=source / suite.folder, env=environment("plain", CACHE), capture_output=True, text=True
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


def launch(name: str, source: Path, mode: str, tests: tuple[str, ...]) -> dict[str, str]:
    """The outcomes of those tests that came to one."""
    suite = SUITES[name]
    with tempfile.TemporaryDirectory() as outcomes, open(log_of(name, mode), "a") as log:
        process = subprocess.Popen(
            [*suite.launcher, *PYTEST, "-p", "outcomes", *tests],
            cwd=source / suite.folder,
            env=environment(mode, Path(outcomes)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            process.wait(suite.seconds)
        except subprocess.TimeoutExpired:
            pass  # the tests that are missing then are told
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found: dict[str, str] = {}
        for file in sorted(Path(outcomes).iterdir()):
            for line in file.read_text().splitlines():
                test, outcome = json.loads(line)
                if found.get(test, "passed") in ("passed", "skipped"):
                    found[test] = outcome
        return found


def environment(mode: str, outcomes: Path) -> dict[str, str]:
    """What site/sitecustomize.py and outcomes.py look for, and what both projects need on CPUs."""
    return os.environ | {
        "NCZ_THIRDPARTY_CONFIG": json.dumps(MODES[mode]),
        "NCZ_THIRDPARTY_OUTCOMES": str(outcomes),
        "PYTHONPATH": os.pathsep.join(map(str, [HERE / "site", HERE, ROOT])),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "4",
    }


def failed(outcome: str) -> bool:
    return outcome not in ("passed", "skipped")


def only_with_us(found: dict[str, dict[str, str]], mode: str) -> dict[str, str]:
    """The tests that pass plain and fail in a mode, with their errors."""
    missing = "did not come to an end: it, or one before it, hung or ended the process"
    passing = [test for test, outcome in found["plain"].items() if outcome == "passed"]
    outcomes = {test: found[mode].get(test, missing) for test in passing}
    return {test: outcome for test, outcome in outcomes.items() if failed(outcome)}


def known(name: str, test: str) -> str | None:
    """Why a test may fail with us."""
    return SUITES[name].known.get(test.rpartition("::")[2])


def show(name: str, found: dict[str, dict[str, str]]) -> None:
    console = Console()
    table = Table("", "passed", "skipped", "failed", "only with us", title=f"{name} {SUITES[name].version}")
    for mode in found:
        table.add_row(mode, *counts(found, mode))
    console.print(table)
    for mode in found:
        for test, outcome in only_with_us(found, mode).items():
            why = known(name, test)
            console.print(f"{mode}: {test}: {f'known: {why}' if why else outcome}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    CACHE.mkdir(parents=True, exist_ok=True)
    sys.exit(main())
