"""What all commands share for their output."""

import json
import os
import sys

import pytest
from rich.console import Console

from ncz_plugins.cli import output
from ncz_plugins.core.errors import UnsupportedError


def shown(*what) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    for each in what:
        console.print(each)
    return console.export_text()


def test_milliseconds_have_one_unit():
    assert [output.milliseconds(seconds) for seconds in (0.0000012, 0.0123, 12)] == [
        "0.00 ms",
        "12.30 ms",
        "12000.00 ms",
    ]


def test_a_table_aligns_numbers_and_takes_brackets_for_text():
    table = output.table("name", "count", numbers=["count"])
    output.add_row(table, "[bold]a", "1")
    output.add_row(table, "b", "1,234")
    assert [line.rstrip() for line in shown(table).splitlines()] == [
        "name     count",
        "[bold]a      1",
        "b        1,234",
    ]


def test_a_grid_shows_names_and_values_as_they_are():
    assert [line.split() for line in shown(output.grid([("a", "[1]"), ("", "x")])).splitlines()] == [
        ["a", "[1]"],
        ["x"],
    ]


def test_without_a_terminal_no_line_is_broken(capsys):
    output.unbroken_console().print("x " * 1000)
    assert len(capsys.readouterr().out.strip().splitlines()) == 1


def test_without_a_terminal_lines_have_no_blanks_at_their_end(capsys):
    table = output.table("name", "words")
    output.add_row(table, "a", "long " * 100)
    output.add_row(table, "b", "short")
    console = output.unbroken_console()
    console.print(table)
    console.print(output.grid([("a", "long " * 100), ("b", "short"), ("c", "/" + "x" * 150)]))
    lines = capsys.readouterr().out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert lines[:3] == ["name  words", f"a     {'long ' * 100}".rstrip(), "b     short"]  # rows of tables are whole
    *sentence, short, path = lines[3:]
    assert len(sentence) > 1 and short.split() == ["b", "short"] and path.endswith("/" + "x" * 150)


def test_a_reader_that_goes_is_left_to_the_command(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone, pytest.raises(BrokenPipeError):
        monkeypatch.setattr(sys, "stdout", gone)
        try:
            output.unbroken_console().print("x")
        finally:
            os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # what is left goes there as the file is closed


def test_without_any_output_nothing_is_printed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # as where the caller has closed it
    output.unbroken_console().print("x")


def test_json_is_strict(capsys):
    output.print_json({"a": float("nan"), "b": [float("inf"), 1]})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1]}


def test_a_file_that_cannot_be_written_is_named_with_its_option(tmp_path):
    file = tmp_path / "missing" / "x.json"
    with pytest.raises(UnsupportedError, match=f"^--output {file}: cannot be written: No such file or directory$"):
        output.write_file("--output", file, "text")
    with pytest.raises(UnsupportedError, match=f"^--output {file}: no file can be made there$"):
        output.require_writable("--output", file)
    output.require_writable("--output", tmp_path / "x.json")
    with pytest.raises(UnsupportedError, match=f"^--output {tmp_path}: is a folder: name a file in it$"):
        output.require_writable("--output", tmp_path)


def test_a_picture_is_refused_before_any_work(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    output.require_picture("--plot", tmp_path / "x.png")
    with pytest.raises(UnsupportedError, match="--plot x.foo: the name must end in one of .*[.]png"):
        output.require_picture("--plot", "x.foo")
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(UnsupportedError, match="--plot needs matplotlib"):
        output.require_picture("--plot", tmp_path / "x.png")
