"""Each target that `make help` lists runs, with arguments that make it short, in the environment that make has made."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from gpt import GPT, GPTConfig
from repository import ROOT, STARTED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("MAKELEVEL" not in os.environ, reason="run by `make test`, which has set up what they use"),
]

ONE_TEST = "tests/unit/core/test_errors.py"
# {} is a folder of the test. Where the whole job takes hours or a card, or begins with a download from GitHub, the
# command line is read and everything imported, no more.
ARGUMENTS = {
    "setup": [],
    "demo": ["ARGS=--steps 4 --output {}/demo"],
    # In one process, and without most files of tests/unit, whose 9,000 tests take ten seconds to collect.
    "quick": ["ARGS=-n 0 -k test_errors --ignore-glob=*/unit/*test_[!e]*"],
    "test": [f"ARGS=-n 0 {ONE_TEST}"],
    "coverage": [f"ARGS=-n 0 {ONE_TEST}", "COVERAGE={}"],
    "lint": [],
    "bench": ["ARGS=--megabytes 1 --repeats 1"],
    "gpu": ["ARGS=--help"],
    "carry": ["ARGS=--help"],
    "convergence": ["ARGS=--help"],
    "results": ["ARGS=--list"],
    "fuzz": ["SECONDS=2"],  # inputs that crash are kept in build/fuzz
    "soak": ["SECONDS=1", "ARGS=--ranks 2 --largest 1000"],
    "thirdparty": ["ARGS=--help"],
    "versions": ["ARGS=--list"],
    "wheels": ["ARGS=--help"],
    "installed": ["ARGS=--list"],
    "release": [],
    "docs": ["ARGS=--site-dir {}/site"],
}


def make(*arguments: str, folder: Path = ROOT) -> str:
    """What a target prints. Fails if it does."""
    # Neither what `make test` was called with, nor what it exported to the tests.
    inherited = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS", "SECONDS", "COVERAGE_FILE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", *inherited))}
    environment["PYTHONPATH"] = str(STARTED)  # what make has installed is to be found where it is
    done = subprocess.run(
        ["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=280
    )
    assert done.returncode == 0, f"make {' '.join(arguments)}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def test_every_target_of_the_list_is_tried():
    listed = re.findall(r"^  make (\w+)", make("help"), re.MULTILINE)
    assert sorted(listed) == sorted([*ARGUMENTS, "help", "clean"])


@pytest.mark.parametrize("target", [target for target in ARGUMENTS if target not in ("demo", "docs")])
def test_a_target_runs(target, tmp_path):
    make(target, *(argument.format(tmp_path) for argument in ARGUMENTS[target]))


def test_the_demo_shows_bytes_loss_and_the_time_behind_a_slow_link(tmp_path):
    shown = make("demo", *(argument.format(tmp_path) for argument in ARGUMENTS["demo"]))
    rows = dict(re.findall(r"^│ (\S.*?) +│ (.*)│$", shown, re.MULTILINE))
    assert re.search(r"[\d.]+ s +│ +[\d.]+ s +│ +[\d.]+ x as fast", rows["step at 100 Mbit/s (median)"]), shown
    assert re.search(r"[\d.]+ x fewer", rows["gradient bytes sent per step (median)"]), shown
    assert "training loss (last 10 steps)" in rows
    runs = json.loads((tmp_path / "demo" / "demo.json").read_text())["runs"]
    plain, ncclz = (runs[name]["summary"] for name in ("plain", "ncclz"))
    assert plain["replicas_identical"] and ncclz["replicas_identical"]
    # The plain run can't have sent its gradients through the slow link in less time.
    assert plain["slow_step_seconds"] > 0.5 * 8 * 4 * GPT(GPTConfig()).parameter_count() / 100e6
    # It ends with what to look at, and what to paste.
    _, _, end = shown.partition(f"Picture: {tmp_path / 'demo' / 'demo.png'}")
    assert (tmp_path / "demo" / "demo.png").stat().st_size
    for line in ("pip install '", "import ncz_plugins.deepspeed", '"communication_compression": "ncclz",'):
        assert line in end


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    make("docs", *(argument.format(tmp_path) for argument in ARGUMENTS["docs"]))
    pages = list((tmp_path / "site").rglob("*.html"))
    assert pages
    for page in pages:
        text = page.read_text()
        assert not re.search(r"<(?:script|img)[^>]+src=\"?https?:|<link[^>]+stylesheet[^>]+href=\"?https?:", text), page
        if page.name != "404.html":  # only servers show that one
            [worker] = re.findall(r'<script src="([^"]*iframe-worker[^"]*)"', text)
            assert (page.parent / worker).is_file(), page
    # The search of pages that are opened from disk: the index is a script, and the script above stands in for a worker.
    assert (tmp_path / "site" / "search" / "search_index.js").read_text().startswith("var __index = {")


def test_clean_leaves_what_git_knows(tmp_path):
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, tmp_path / "clone"], check=True, timeout=60)
    clone = tmp_path / "clone"
    for made in (".venv/file", "build/file", "results/file", "ncz_plugins/kernels/cpu/libncz_cpu.so"):
        (clone / made).parent.mkdir(parents=True, exist_ok=True)
        (clone / made).touch()
    make("clean", folder=clone)
    status = ["git", "status", "--short", "--ignored"]
    assert subprocess.run(status, cwd=clone, capture_output=True, text=True, check=True).stdout == ""
