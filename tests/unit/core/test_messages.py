"""Lines that a training prints, on terminals that lack some of their characters."""

import ast
import io
import os
import sys

import pytest
from repository import ROOT

from ncz_plugins.core.messages import say

PACKAGE = ROOT / "ncz_plugins"
OURS = sorted(file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] != "cli")


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", r"\xfcber \u6f22 raw\udcff"), ("latin-1", r"über \u6f22 raw\udcff"), ("utf-8", r"über 漢 raw\udcff")],
)
def test_what_an_encoding_lacks_is_escaped(monkeypatch, encoding, shown):
    for name in ("stdout", "stderr"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
        monkeypatch.setattr(sys, name, stream)
        say("über 漢 " + os.fsdecode(b"raw\xff"), None if name == "stdout" else sys.stderr)
        assert stream.buffer.getvalue().decode(encoding) == shown + "\n"


def test_streams_without_an_encoding_and_none_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    say("über 漢")
    assert sys.stdout.getvalue() == "über 漢\n"
    monkeypatch.setattr(sys, "stdout", None)
    say("über 漢")


def test_nothing_else_prints():
    """`print` raises UnicodeEncodeError where a terminal lacks a character of a parameter's name or of a path."""
    prints = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in OURS
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert len(prints) == 1 and prints[0].startswith("core/messages.py:"), prints
