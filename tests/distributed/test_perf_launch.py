"""Ranks that `ncz perf` and `ncz tune` start: each knows its rank, records arrive, none outlives the call."""

import json
from pathlib import Path

import pytest
from launching import gone, launched

from ncz_plugins.cli.perf import launch
from ncz_plugins.cli.perf.launch import run
from ncz_plugins.core.errors import NczError, UnsupportedError


def received(tmp_path: Path, ranks: int) -> list[dict]:
    return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def test_ranks_of_one_host_are_told_who_they_are(tmp_path):
    launched(run, "received", tmp_path, ranks=3, standard_input='{"size": 1}')
    for rank, found in enumerate(received(tmp_path, 3)):
        assert found["RANK"] == found["LOCAL_RANK"] == str(rank)
        assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "3"
        assert (found["MASTER_ADDR"], found["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
        assert found["OMP_NUM_THREADS"] == "1" and found["input"] == '{"size": 1}'


def test_what_starts_ranks_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match="setpriv, which is not here: install util-linux"):
        launched(run, "received", tmp_path)


def test_ranks_of_one_host_meet(tmp_path):
    assert launched(run, "gloo", tmp_path) == [{"sum": [3.0]}] * 2


@pytest.mark.parametrize(
    ("case", "words"),
    [("dies", "rank 1 ended with exit status 1(.|\n)*the cat sat on the keyboard"), ("killed", "rank 1 .* SIGABRT")],
)
def test_a_rank_that_dies_is_told_with_its_last_words(case, words, tmp_path):
    with pytest.raises(NczError, match=words):
        launched(run, case, tmp_path)


def test_time_is_limited_and_nothing_is_left(tmp_path):
    records = []
    with pytest.raises(NczError, match="rank 0 has not ended after 5 s(.|\n)*waiting"):
        launched(run, "waits", tmp_path, on_record=records.append, timeout=5)
    gone(records[0])


def test_nothing_is_left_when_the_receiver_of_records_fails(tmp_path):
    records = []

    def fail(record):
        records.append(record)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launched(run, "waits", tmp_path, on_record=fail)
    gone(records[0])
