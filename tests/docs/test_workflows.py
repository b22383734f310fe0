"""What continuous integration runs is what anybody can run: make targets that exist."""

import re

import pytest
import yaml
from repository import ROOT

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_nothing_but_make_targets(path):
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    for command in commands:
        assert command.removeprefix("make ") in targets, f"{path.name}: {command}"


def test_a_release_begins_by_comparing_its_tag_with_the_version():
    steps = yaml.safe_load((FOLDER / "release.yml").read_text())["jobs"]["wheels"]["steps"]
    assert [step["run"] for step in steps if "run" in step][0] == "make release"


def test_the_version_of_actionlint_is_one():
    used = re.findall(r"rhysd/actionlint\S*[:@]v?([\d.]+\d)", (FOLDER / "tests.yml").read_text())
    named = re.findall(r"rhysd/actionlint\S*@v([\d.]+\d)", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(used) == 1 and used == named


@pytest.mark.parametrize("name", ["release", "docs"])
def test_what_is_published_knows_its_repository(name):
    environment = yaml.safe_load((FOLDER / f"{name}.yml").read_text())["env"]
    assert environment["REPOSITORY_URL"] == "${{ github.server_url }}/${{ github.repository }}"
    reader = {"release": "setup.py", "docs": "mkdocs.yml"}[name]
    assert "REPOSITORY_URL" in (ROOT / reader).read_text()
