"""Imports point down only: the contracts are in setup.cfg, and import-linter checks them."""

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports
from repository import ROOT


def test_imports_point_down_only(capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    status = lint_imports(config_filename="setup.cfg", no_cache=True)
    assert status == EXIT_STATUS_SUCCESS, capfd.readouterr().out
