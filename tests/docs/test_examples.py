"""What lies in examples/ runs or parses, and its README names it. Trainings are run by test_docs.py and others."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from repository import ROOT

EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text()
NOTEBOOK = EXAMPLES / "gradients.ipynb"
MOST_BYTES = 300_000  # of the notebook, with its pictures
PROGRAMS = sorted(file for file in EXAMPLES.glob("*.py") if re.search("__main__|torchrun", file.read_text()))


def test_the_readme_names_every_file():
    for file in filter(Path.is_file, EXAMPLES.iterdir()):
        assert file.name == "README.md" or f"`{file.name}`" in README, file.name


def test_commands_of_the_readme_start_what_is_there_with_options_that_it_has():
    commands = re.findall(r"`([^`]*?(\w+\.py)( [^`]*)?)`", README)
    assert len(commands) > 20
    for _, name, options in commands:
        if name.startswith("test_"):
            continue
        known = (EXAMPLES / name).read_text() + (EXAMPLES / "reporting.py").read_text()
        own = re.findall(r"--[\w-]+", options)
        assert all(f'"{option}"' in known or option == "--deepspeed_config" for option in own), (name, own)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda file: file.name)
def test_every_program_is_run_by_the_test_that_the_readme_names(program):
    [row] = re.findall(rf"^\| `{program.name}` .*$", README, re.MULTILINE)
    [name] = re.findall(r"`(test_\w+\.py)` \|$", row)
    [test] = (ROOT / "tests").rglob(name)
    assert re.search(rf"\b{program.stem}\b", test.read_text()), name


def cells() -> list[dict]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_runs(tmp_path):
    program = "\n".join("".join(cell["source"]) for cell in cells())
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(EXAMPLES)])
    environment = os.environ | {"PYTHONPATH": path, "MPLBACKEND": "agg"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=200)


def test_the_notebook_is_small_and_shows_what_its_cells_made_in_order():
    assert NOTEBOOK.stat().st_size < MOST_BYTES
    assert [cell["execution_count"] for cell in cells()] == [*range(1, len(cells()) + 1)]
    outputs = [output for cell in cells() for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 6
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]


# ------------------------------------------------------------------ starters for clusters; nothing here starts them


def test_the_dockerfile_copies_what_is_there_and_all_that_the_package_is_built_from():
    copies = re.findall(r"^COPY (?!--from)(.*) \S+$", (EXAMPLES / "Dockerfile").read_text(), re.MULTILINE)
    sources = {source for line in copies for source in line.split()}
    assert all((ROOT / source).exists() for source in sources), sources
    assert sources >= {"setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE", "ncz_plugins"}


def test_the_script_for_slurm_parses_and_starts_an_example():
    script = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    assert all((ROOT / path).is_file() for path in re.findall(r"examples/\w+\.py", script.read_text()))


def test_the_job_for_kubernetes_parses_and_starts_an_example():
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert service["kind"] == "Service" and job["kind"] == "Job"
    assert (ROOT / container["command"][-1]).is_file()
