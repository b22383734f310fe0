"""What continuous integration runs is what anybody can run: make targets that exist."""

import re

import pytest
import yaml
from repository import ROOT

from ncz_plugins.version import __version__

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_nothing_but_make_targets(path):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    for command in commands:
        assert command.removeprefix("make ") in targets, f"{path.name}: {command}"


def test_the_version_that_is_cited_is_that_of_the_package():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(cited["version"]) == __version__


@pytest.mark.parametrize("name", ["release", "docs"])
def test_what_is_published_knows_its_repository(name):
    environment = yaml.safe_load((FOLDER / f"{name}.yml").read_text())["env"]
    assert environment["REPOSITORY_URL"] == "${{ github.server_url }}/${{ github.repository }}"
    reader = {"release": "setup.py", "docs": "mkdocs.yml"}[name]
    assert "REPOSITORY_URL" in (ROOT / reader).read_text()
