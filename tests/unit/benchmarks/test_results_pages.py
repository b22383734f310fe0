"""The tables that benchmarks write into docs/results and docs/notebook are those of the committed files."""

import json
import re

import pytest
from repository import ROOT

from benchmarks import (
    codec_table,
    gains,
    gpu_page,
    patch_files,
    performance,
    plan,
    remake,
    schedules,
    weight_dtypes,
    weight_ways,
    weights,
)
from benchmarks.thirdparty import run as third_party


def committed(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def test_the_codec():
    found, kernels = committed("codec-data.json"), committed("codec-cpu.json")
    for table in (codec_table.summary(found["rows"]), codec_table.kernels_summary(kernels)):
        assert table in codec_table.MARKDOWN.read_text()
    assert codec_table.page(found["rows"], found, kernels) == codec_table.NOTEBOOK.read_text()


def test_what_the_page_of_the_codec_shows_is_measured():
    measured = {(row["data"], row["bound"]) for row in committed("codec-data.json")["rows"]}
    assert {(name, bound) for name, bounds in codec_table.SHOWN.items() for bound in bounds} <= measured


def test_what_is_gained_at_which_link():
    assert gains.table(gains.gains()) in gains.PAGE.read_text()


def test_performance():
    page = performance.PAGE.read_text()
    for name, table in performance.TABLES.items():
        assert f"<!-- {name} -->\n{table()}\n<!-- end of {name} -->" in page


def test_gpus():
    page = gpu_page.PAGE.read_text()
    for name, table in gpu_page.TABLES.items():
        assert f"<!-- {name} -->\n{table()}\n<!-- end of {name} -->" in page


def test_tests_of_others():
    assert third_party.markdown(committed("third-party.json")["suites"]) in third_party.PAGE.read_text()


def test_schedules():
    assert schedules.markdown(committed("schedules.json")["records"]) in schedules.PAGE.read_text()


def test_weights():
    found = committed("weights.json")["found"]
    assert weights.summary(found) in weights.PAGE.read_text()
    assert weights.markdown(found) in weights.NOTEBOOK.read_text()


def test_schedules_by_the_number_of_ranks():
    found = committed("plan-ranks.json")["calls"]
    assert plan.table_of_ranks(found) in plan.PAGE.read_text()


def test_dtypes_of_weights():
    assert weight_dtypes.markdown(committed("weight-dtypes.json")["found"]) in weight_dtypes.PAGE.read_text()


def test_ways_to_send_weights():
    assert weight_ways.summary(committed("weight-ways.json")) in weight_ways.PAGE.read_text()


def test_patches_of_files():
    assert patch_files.summary(committed("patch-files.json")["found"]) in patch_files.PAGE.read_text()


@pytest.mark.parametrize("name", sorted(remake.JOBS.keys() - {"evidence", "convergence", "frontier", "activations"}))
def test_a_file_names_the_command_that_makes_it_again(name):
    """So `make results` measures what pages show, with the same sizes and rounds."""
    assert options(committed(f"{name}.json")["command"]) == options(remake.JOBS[name].command)


def options(command):
    """What follows the program, without the place of the file."""
    _, words = re.split(r"-m \S+|ncz perf|\S+\.py", command, maxsplit=1)
    return re.sub(r"--json \S+", "--json", words).split()


def test_a_table_is_put_between_the_marks_of_its_page(tmp_path):
    page, marks = tmp_path / "page.md", weights.MARKS
    page.write_text(f"before\n{marks[0]}\nold\n{marks[1]}\nafter\n")
    weights.put_into(page, "new")
    assert page.read_text().split("\n") == ["before", marks[0], "new", marks[1], "after", ""]
