"""What each step was, in a file of JSON lines, in TensorBoard, and for whoever else asked."""

import gc
import json
import math
import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

from ncz_plugins.core.config import StatisticsConfig
from ncz_plugins.core.errors import ConfigError
from ncz_plugins.core.training.metrics import JsonLines, Metrics, scalars

HEADER = {"ncz_plugins": "1.2", "config": {"quantizer": {"value": 0.25}}, "link_gbps": None}
RECORD = {
    "step": 3,
    "time": 1.7e9,
    "step_seconds": None,
    "calls": 4,
    "bypasses": {"too small": 2},
    "ratio": 8.5,
    "guard": [
        {"name": "a", "relative_error": 0.25, "cosine": 0.5, "alarm": True},
        {"name": None, "relative_error": 0.125, "cosine": 0.75, "alarm": True},
    ],
}


def metrics(**statistics) -> Metrics:
    begun = Metrics(StatisticsConfig(**{name: str(path) for name, path in statistics.items()}))
    begun.begin(HEADER)
    return begun


def lines(path) -> list[dict]:
    def no_constants(name: str):
        raise AssertionError(f"{name} is not JSON")

    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=no_constants) for line in text.splitlines()]


# ------------------------------------------------------------------ JSON lines


def test_a_header_and_a_line_for_each_step_are_there_at_once(tmp_path):
    path = tmp_path / "new" / "folder" / "run.jsonl"
    one = metrics(jsonl=path)
    assert lines(path) == [HEADER]
    one.write(RECORD)
    assert lines(path) == [HEADER, RECORD]  # although nothing was closed
    one.write(RECORD | {"step": 4})
    assert [line.get("step") for line in lines(path)] == [None, 3, 4]


def test_a_run_that_is_resumed_goes_on_in_the_same_file(tmp_path):
    path = tmp_path / "run.jsonl"
    for step in (1, 2):
        one = metrics(jsonl=path)
        one.write({"step": step})
        one.close()
        one.close()
        one.write({"step": 99})  # goes nowhere
    assert lines(path) == [HEADER, {"step": 1}, HEADER, {"step": 2}]


def test_what_a_killed_run_left_of_a_line_keeps_to_itself(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"ncz_plugins":"1.2"}\n{"step":1,"ca')
    metrics(jsonl=path).write({"step": 1})
    _, torn, *rest = path.read_text().splitlines()
    assert torn == '{"step":1,"ca' and list(map(json.loads, rest)) == [HEADER, {"step": 1}]


def test_beginning_again_is_another_header_in_the_same_file(tmp_path):
    one = metrics(jsonl=tmp_path / "run.jsonl")
    one.begin({"ncz_plugins": "1.2", "ranks": 3})
    one.write({"step": 1})
    assert lines(tmp_path / "run.jsonl") == [HEADER, {"ncz_plugins": "1.2", "ranks": 3}, {"step": 1}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(tmp_path, value):
    one = metrics(jsonl=tmp_path / "run.jsonl")
    one.write({"step": 1, "ratio": value, "guard": [{"relative_error": value}], "coders": {"rans": value}})
    written = lines(tmp_path / "run.jsonl")[1]
    assert written == {"step": 1, "ratio": None, "guard": [{"relative_error": None}], "coders": {"rans": None}}


@pytest.mark.parametrize("folder", ["~", "$HOME", "${HOME}"])
def test_records_go_to_folders_of_the_user(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    metrics(jsonl=f"{folder}/out/run.jsonl", tensorboard=f"{folder}/board").write({"step": 1})
    assert lines(tmp_path / "home" / "out" / "run.jsonl") == [HEADER, {"step": 1}]
    assert [file.name for file in tmp_path.iterdir()] == ["home"] and list((tmp_path / "home" / "board").iterdir())


def test_names_that_are_not_utf_8_are_names(tmp_path):
    raw = tmp_path / os.fsdecode(b"raw\xff")
    metrics(jsonl=raw / "run.jsonl").write({"step": 1})
    assert lines(raw / "run.jsonl") == [HEADER, {"step": 1}]
    with pytest.raises(ConfigError, match="TensorBoard needs a UTF-8 name"):
        metrics(tensorboard=raw / "board")


def test_records_go_to_whoever_reads_a_fifo_and_one_that_nobody_reads_is_an_error(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="statistics.jsonl: .*fifo cannot be written .*this FIFO has no reader"):
        metrics(jsonl=path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(reader, "rb") as pipe:
        one = metrics(jsonl=path)
        one.write({"step": 1})
        assert list(map(json.loads, pipe.read().splitlines())) == [HEADER, {"step": 1}]
        one.close()


@pytest.mark.parametrize("path", ["-", "/dev/stdout"])
def test_records_go_to_standard_output(tmp_path, monkeypatch, capfd, path):
    monkeypatch.chdir(tmp_path)
    one = metrics(jsonl=path)
    one.write({"step": 1})
    assert list(map(json.loads, capfd.readouterr().out.splitlines())) == [HEADER, {"step": 1}]
    one.close()
    print("more")  # as closing them closes no more than what they opened
    assert capfd.readouterr().out == "more\n" and not list(tmp_path.iterdir())


# ------------------------------------------------------------------ what can go wrong


@pytest.mark.parametrize("setting", ["jsonl", "tensorboard"])
def test_a_path_that_cannot_be_written_is_an_error_at_the_start(tmp_path, setting):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as error:
        metrics(**{setting: tmp_path / "file" / "run"})
    taken, wanted = tmp_path / "file", tmp_path / "file" / "run"
    for words in (f"statistics.{setting}: {wanted} cannot be written", f"({taken}", "give the path of a"):
        assert words in str(error.value)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="statistics.jsonl: .*is a folder"):
        metrics(jsonl=tmp_path)


def test_where_tensorboard_is_missing_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # importing it fails, as if it were not installed
    one = Metrics(StatisticsConfig(jsonl=str(tmp_path / "run.jsonl"), tensorboard=str(tmp_path / "board")))
    with pytest.raises(ConfigError) as error:
        one.begin(HEADER)
    for words in ("statistics.tensorboard", "not installed", "pip install 'ncz_plugins[tensorboard]'"):
        assert words in str(error.value)


def test_a_full_disk_is_said_once_and_the_rest_goes_on(capsys):
    one = metrics(jsonl="/dev/full")  # takes nothing: the header fails as each line does
    seen = []
    one.sinks.append(lambda record: seen.append(record["step"]))
    for step in (1, 2, 3):
        one.write({"step": step})
    one.close()
    assert seen == [1, 2, 3]
    expected = "ncz_plugins: statistics.jsonl: /dev/full: No space left on device; no more metrics there\n"
    assert capsys.readouterr().err == expected


def test_a_sink_that_fails_is_named_once_and_the_others_go_on(tmp_path, capsys):
    def unreachable(record):
        seen.append(record["step"])
        raise ConnectionError("the service is down")

    seen, after = [], []
    one = metrics(jsonl=tmp_path / "run.jsonl")
    one.sinks += [unreachable, after.append]
    for step in (1, 2):
        one.write({"step": step})
    assert seen == [1] and after == [{"step": 1}, {"step": 2}] and len(lines(tmp_path / "run.jsonl")) == 3
    [line] = capsys.readouterr().err.splitlines()
    assert "unreachable: the service is down; no more metrics there" in line


def test_a_sink_that_takes_itself_out_and_fails_ends_no_training(capsys):
    def once(record):
        one.sinks.remove(once)
        raise OSError("gone")

    one = metrics()
    one.sinks.append(once)
    one.write(RECORD)
    assert not one.sinks and "gone; no more metrics there" in capsys.readouterr().err


def test_an_interrupt_is_none_of_a_sinks_failures():
    def interrupted(record):
        raise KeyboardInterrupt

    one = metrics()
    one.sinks.append(interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.write({"step": 1})


# ------------------------------------------------------------------ TensorBoard


def test_tensorboard_gets_every_number_at_its_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    one = metrics(tensorboard=tmp_path / "board")
    one.write(RECORD)
    one.write(RECORD | {"step": 4, "ratio": 9.0, "step_seconds": 0.5, "seconds": math.inf})
    del one  # without closing it
    gc.collect()
    read = EventAccumulator(str(tmp_path / "board")).Reload()

    def curve(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in read.Scalars(name)]

    assert curve("ncz/ratio") == [(3, 8.5), (4, 9.0)]
    assert curve("ncz/step_seconds") == [(4, 0.5)]
    assert curve("ncz/bypasses/too small") == [(3, 2.0), (4, 2.0)]
    assert curve("ncz/guard/relative_error") == [(3, 0.25), (4, 0.25)]
    assert sorted(read.Tags()["scalars"]) == sorted({name for name, _ in scalars(RECORD)} | {"ncz/step_seconds"})
    assert read.Tags()["tensors"] == ["ncz/header/text_summary"]


def test_scalars_are_the_numbers_of_a_record_and_the_worst_of_the_guards():
    assert dict(scalars(RECORD)) == {
        "ncz/calls": 4,
        "ncz/bypasses/too small": 2,
        "ncz/ratio": 8.5,
        "ncz/guard/relative_error": 0.25,
        "ncz/guard/cosine": 0.5,
        "ncz/guard/alarm": 2,
    }
    unknown = [{"name": "a", "relative_error": None, "cosine": None, "alarm": False}]
    assert dict(scalars({"step": 1, "guard": unknown})) == {"ncz/guard/alarm": 0}
    infinite = [{"name": "a", "relative_error": None, "cosine": 0.0, "alarm": True}]
    assert dict(scalars({"step": 1, "guard": infinite}))["ncz/guard/relative_error"] == math.inf


@pytest.mark.processes
def test_tensorboard_is_imported_only_where_it_is_asked_for():
    program = "import sys, ncz_plugins.core.training.metrics; raise SystemExit('tensorboard' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


_TOLD = "another training writes to this file now. Give each training a file of its own."


def test_two_trainings_of_a_process_that_write_to_one_file_are_told(tmp_path, capsys):
    first = JsonLines(tmp_path / "run.jsonl")
    assert not capsys.readouterr().err
    second = JsonLines(tmp_path / "." / "run.jsonl")
    assert f"statistics.jsonl: {tmp_path / 'run.jsonl'}: {_TOLD}" in capsys.readouterr().err
    first.close()
    second.close()
    JsonLines(tmp_path / "run.jsonl")  # as where one training follows another
    assert not capsys.readouterr().err


@pytest.mark.processes
def test_a_training_of_another_process_is_told_until_it_ends(tmp_path, capsys):
    """Also once the first of three has ended. A child that outlives its killed parent is no training."""
    path = tmp_path / "run.jsonl"
    program = (
        "import os, sys, time\n"
        "from ncz_plugins.core.training.metrics import JsonLines\n"
        "log = JsonLines(sys.argv[1])\n"
        "if not os.fork():\n"
        "    time.sleep(30)\n"
        "    os._exit(0)\n"
        "print('open', flush=True)\n"
        "time.sleep(30)\n"
    )
    with ExitStack() as stack:
        first, second = (_started(stack, program, path) for _ in range(2))
        first.kill()
        first.wait()
        log = JsonLines(path)
        assert f"{path}: {_TOLD}" in capsys.readouterr().err
        log.close()
        second.kill()
        second.wait()
        JsonLines(path)
        assert not capsys.readouterr().err


def _started(stack: ExitStack, program: str, path) -> subprocess.Popen:
    """A process that has opened the file. All of its group ends with the test."""
    process = stack.enter_context(
        subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE, start_new_session=True)
    )
    stack.callback(os.killpg, process.pid, signal.SIGKILL)
    assert process.stdout.readline() == b"open\n"
    return process
