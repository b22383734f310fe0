"""The tests that `make versions` runs, and how it writes its table."""

import importlib.util

import pytest
from repository import ROOT

PAGE = """# Compatibility

| Python | torch | Core | DDP |
|---|---|---|---|
| 3.10 | 2.6.0 | 1 pass | 1 pass |
| 3.14 | 2.15.0 | 2 pass | 2 pass |

Below the table.
"""


@pytest.fixture(scope="module")
def noxfile():
    specification = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_every_path_exists(noxfile):
    paths = [path for _, paths in noxfile.COLUMNS.values() for path in paths]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_row_is_replaced_or_added_in_order_and_old_environments_go(noxfile, monkeypatch, tmp_path):
    monkeypatch.setattr(noxfile, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(noxfile, "ENVIRONMENTS", [("3.11", "2.13.0"), ("3.14", "2.15.0")])
    noxfile.PAGE.write_text(PAGE)
    noxfile.write_row("3.11", "2.13.0", {"Core": "3 pass", "DDP": "skipped"})
    noxfile.write_row("3.14", "2.15.0", {"Core": "4 pass", "DDP": "1 of 2 fail"})
    kept = "| 3.10 | 2.6.0 | 1 pass | 1 pass |\n| 3.14 | 2.15.0 | 2 pass | 2 pass |\n"
    added = "| 3.11 | 2.13.0 | 3 pass | skipped |\n| 3.14 | 2.15.0 | 4 pass | 1 of 2 fail |\n"
    assert noxfile.PAGE.read_text() == PAGE.replace(kept, added)


@pytest.mark.parametrize(
    ("counts", "cell"),
    [
        ('tests="5" failures="0" errors="0" skipped="2"', "3 pass"),
        ('tests="5" failures="1" errors="1" skipped="0"', "2 of 5 fail"),
        ('tests="5" failures="0" errors="0" skipped="5"', "skipped"),
    ],
)
def test_a_cell_says_how_many_tests_passed(noxfile, tmp_path, counts, cell):
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite {counts}/></testsuites>")
    assert noxfile.cell_of(report) == cell
