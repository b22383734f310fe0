"""The records of a training, as files get them."""

import json

import pytest

from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import ConfigError
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.training.records import Records
from ncz_plugins.version import __version__


def written(path, *headers: dict, steps: int = 0) -> list[dict]:
    config = Config.load({"statistics": {"jsonl": str(path)}})
    records = Records(config)
    assert not records.begun
    for header in headers:
        records.begin(config, header)
    for step in range(1, steps + 1):
        records.write(step, Counters(calls=2, bytes_in=800, plain_bytes=800, wire_bytes=100), 1.5, [])
        records.end_step()
    assert records.begun
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_header_is_written_once_for_each_that_differs(tmp_path):
    headers = written(tmp_path / "run.jsonl", {"ranks": 2}, {"ranks": 2}, {"ranks": 3})
    assert [header["ranks"] for header in headers] == [2, 3]
    assert headers[0]["ncz_plugins"] == __version__ and headers[0]["config"]["quantizer"]["value"] == 0.375


def test_each_step_is_a_record_with_its_time(tmp_path):
    _, first, second = written(tmp_path / "run.jsonl", {"ranks": 2}, steps=2)
    assert (first["step"], first["calls"], first["bound_times"], first["step_seconds"]) == (1, 2, 1.5, None)
    assert second["step_seconds"] >= 0 and second["time"] >= first["time"]
    assert "guard" not in first


def test_a_group_of_some_ranks_writes_no_header(tmp_path):
    headers = written(tmp_path / "run.jsonl", {"ranks": 4}, {"ranks": 2}, {"ranks": 4, "backend": "gloo"})
    assert [header["ranks"] for header in headers] == [4, 4]


def test_fewer_ranks_that_meet_anew_do(tmp_path):
    config = Config.load({"statistics": {"jsonl": str(tmp_path / "run.jsonl")}})
    records = Records(config)
    records.begin(config, {"ranks": 4}, world_size=4)
    records.begin(config, {"ranks": 3}, world_size=3)
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2


def test_a_file_that_can_not_be_opened_is_an_error_again(tmp_path):
    (tmp_path / "file").touch()
    config = Config.load({"statistics": {"jsonl": str(tmp_path / "file" / "run.jsonl")}})
    records = Records(config)
    for _ in range(2):
        with pytest.raises(ConfigError):
            records.begin(config, {"ranks": 2})
        assert not records.begun
