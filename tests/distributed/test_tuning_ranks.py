"""Measured by real ranks: they choose alike, whatever the times are; files that all must have; `ncz tune`."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from links import link, needs_links
from on_rank import digest, folder, raises, rank, same_on_all_ranks, start, values, world_size
from scenarios import on_ranks, ranks

from ncz_plugins import Communicator, Config, ConfigError, MismatchError
from ncz_plugins.cli.main import main
from ncz_plugins.core.config import FRAME_BYTES, CoderCosts
from ncz_plugins.core.tuning.tuning_file import SpeedComparison, Trial, Tuning

NCZ = [sys.executable, "-m", "ncz_plugins"]
HIERARCHY = 2 if world_size == 4 else "off"  # four ranks are two nodes
OPEN = {"frame_bytes": "auto", "min_bytes": "auto", "hierarchy": HIERARCHY}
ELEMENTS = 1 << 20
COSTS = {"raw": 1, "fixed": 2, "huffman": 3, "rans": 4, "rans_rest": 5}

everyone = [values(r, ELEMENTS) for r in range(world_size)]
exact = sum(each.double() for each in everyone)


def file(name: str, **values) -> Path:
    """A tuning file of this rank's own."""
    path = folder() / f"{name}{rank}.json"
    found = {
        "format": 1,
        "world_size": world_size,
        "schedule": "direct",
        "frame_bytes": 128 << 10,
        "min_bytes": 1 << 20,
        "link_gbps": 0.5,
        "costs": CoderCosts(**COSTS),
        "latency_seconds": 1e-4,
        "trials": [Trial(schedule="direct", frame_bytes=128 << 10, nbytes=1 << 20, seconds=0.5)],
        "comparisons": [SpeedComparison(nbytes=1 << 24, plain_seconds=2, compressed_seconds=1)],
        "quantizer": Config().quantizer.describe(),
        "kernels": "avx2",
        "version": "0",
    }
    Tuning(**found | values).write(path)
    return path


def with_file(path: Path) -> dict:
    return {"transport": {"tuning": str(path), **OPEN}}


@ranks(3, 4)
def test_all_ranks_choose_alike_at_the_opening_and_one_says_it_in_one_line(group):
    """Results are bit-identical, and what was measured with is not counted."""
    config = {"quantizer": {"mode": "abs", "value": 0.01}, "transport": OPEN}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        communicator = Communicator(config, group)
    with communicator:
        chosen = communicator.config
        assert communicator.stats.total.calls == 0
        tensor = everyone[rank].clone()
        communicator.all_reduce(tensor)
        assert communicator.stats.total.calls == 1
    assert (tensor - exact).abs().max() <= world_size * 0.01 + 1e-5
    same_on_all_ranks([chosen.canonical(), digest(tensor)], group)
    assert chosen.transport.schedule in ("ring", "direct", "halving")
    assert chosen.transport.frame_bytes in (4 << 20, 1 << 20)
    assert chosen.transport.min_bytes == "never" or chosen.transport.min_bytes >= 16 << 10
    assert chosen.transport.link_gbps > 0 and chosen.entropy.costs is not None
    line = rf"ncz_plugins: measured {world_size} ranks, [0-9.e+]+ Gbit/s, .*\n" if rank == 0 else ""
    assert re.fullmatch(line, printed.getvalue()), printed.getvalue()


@ranks(3, 4)
def test_what_is_named_is_kept(group):
    """Also where the rest is measured."""
    named = {"schedule": "ring", "frame_bytes": "64KiB", "min_bytes": "auto", "link_gbps": 3, "hierarchy": HIERARCHY}
    with Communicator({"transport": named}, group) as communicator:
        transport = communicator.config.transport
    assert (transport.schedule, transport.frame_bytes, transport.link_gbps) == ("ring", 64 << 10, 3)
    assert transport.min_bytes != "auto"


@ranks(3, 4)
def test_a_file_is_followed(group):
    with Communicator(with_file(file("same")), group) as communicator:
        found = communicator.config.transport
        assert (found.schedule, found.frame_bytes, found.min_bytes, found.link_gbps) == (
            "direct",
            128 << 10,
            1 << 20,
            0.5,
        )
        assert communicator.config.entropy.costs.model_dump() == COSTS
        communicator.all_reduce(everyone[rank][: ELEMENTS // 8].clone())
        assert communicator.stats.total.bypasses == {"too small": 1}


@ranks(3, 4)
def test_a_link_that_is_too_fast_is_a_reason_of_its_own(group):
    with Communicator(with_file(file("never", min_bytes="never")), group) as communicator:
        tensor = everyone[rank].clone()
        communicator.all_reduce(tensor)
        assert torch.equal(tensor, sum(everyone))  # in the order of ranks
        assert communicator.stats.total.bypasses == {"link too fast": 1}


@ranks(3, 4)
def test_a_file_of_other_ranks_gives_a_warning_and_no_schedule(group):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Communicator(with_file(file("others", world_size=world_size + 1)), group) as communicator:
            transport = communicator.config.transport
    assert (transport.schedule, transport.frame_bytes) == ("auto", 128 << 10)
    (warning,) = [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]
    assert f"was measured with {world_size + 1} ranks, not {world_size}" in warning


@ranks(3, 4)
def test_files_that_differ_are_an_error_on_every_rank(group):
    config = with_file(file("differing", min_bytes=(1 + rank) << 20))
    words = "transport.min_bytes is 1048576 on rank 0, 2097152 on rank 1"
    raises(MismatchError, lambda: Communicator(config, group), words)


@ranks(3, 4)
def test_a_missing_or_damaged_file_is_an_error_on_every_rank(group):
    nowhere = folder() / "nowhere.json"
    words = "nowhere.json: cannot be read", "ncz tune --output"
    raises(ConfigError, lambda: Communicator(with_file(nowhere), group), *words)
    config = with_file(nowhere if rank == 1 else file("present"))
    error = ConfigError if rank == 1 else MismatchError
    raises(error, lambda: Communicator(config, group), "nowhere.json: cannot be read")
    damaged = file("damaged")
    damaged.write_text(damaged.read_text()[:-20])
    raises(ConfigError, lambda: Communicator(with_file(damaged), group), "invalid JSON")


# ------------------------------------------------------------------ the command


def ncz(*arguments: str, command: list[str] = NCZ, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*command, "tune", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_command_starts_ranks_and_writes_a_file(tmp_path):
    file = tmp_path / "tuned.json"
    done = ncz("--ranks", "3", "--seconds", "1", "--output", str(file))
    assert done.returncode == 0, done.stderr
    tuned = Tuning.read(file)
    assert tuned.world_size == 3
    assert {trial.schedule for trial in tuned.trials} == {"ring", "direct", "halving"}
    sizes = [each.nbytes for each in tuned.comparisons]
    assert sizes == sorted(set(sizes)) and sizes[0] == 16 << 10
    assert tuned.describe() in done.stdout and "chosen" in done.stdout
    assert "All ranks are on this machine" in done.stdout
    assert f"transport: {{tuning: {file}, frame_bytes: auto, min_bytes: auto}}" in done.stdout
    assert [each.name for each in tmp_path.iterdir()] == ["tuned.json"]


def test_the_command_takes_the_ranks_of_a_launcher_and_a_configuration(tmp_path):
    file, config = tmp_path / "tuned.json", tmp_path / "c.yaml"
    config.write_text("quantizer:\n  value: 0.5\ntransport:\n  frame_bytes: 64KiB\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = ncz("--seconds", "1", "--output", str(file), "--config", str(config), command=[*torchrun, "ncz_plugins"])
    assert done.returncode == 0, done.stderr
    tuned = Tuning.read(file)
    assert tuned.world_size == 2 and tuned.quantizer.startswith("stochastic rms:0.5 ")
    assert tuned.trials[0].frame_bytes == FRAME_BYTES  # chosen all the same
    assert done.stdout.count("is written") == 1


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--ranks", "1"], "a single rank sends nothing, so there is nothing to tune"),
        (["--ranks", "none"], "--ranks: 'none' is not a number above 0"),
        (["--seconds", "0"], "--seconds: 0 is not a number above 0"),
        (["--seconds", "nan"], "--seconds: nan is not a number above 0"),
        (["--config", "none.yaml"], "none.yaml: cannot be read"),
    ],
)
def test_what_can_not_be_done_is_said(tmp_path, capsys, arguments, says):
    file = tmp_path / "tuned.json"
    assert main(["tune", *arguments, "--output", str(file)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and says in output.err and not file.exists()


def test_a_file_that_can_not_be_written_is_said_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ncz_plugins.cli.tune.run_job.run_job", None)
    assert main(["tune", "--output", str(tmp_path / "none" / "tuned.json")]) == 2
    assert "none/tuned.json: no file can be made there" in capsys.readouterr().err


def test_ctrl_c_ends_all_ranks_and_leaves_no_file(tmp_path):
    file = tmp_path / "tuned.json"
    process = subprocess.Popen([*NCZ, "tune", "--output", str(file)], start_new_session=True)
    try:
        ranks = wait_for(lambda: len(found := children(process.pid)) == 2 and found, seconds=120)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        assert wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), seconds=20)
    finally:
        process.kill()
        process.wait()
    assert not file.exists()


def children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []


def wait_for(condition, seconds: float):
    """What `condition` returns, once that is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.05)
    return value


# ------------------------------------------------------------------ trips


def trips() -> list[float]:
    """Seconds of a trip, by where the speed of the link comes from."""
    start()
    speeds = [{"transport": OPEN}, with_file(file("far")), {"transport": {"link_gbps": 1}}, {}]
    found = []
    for config in speeds:
        with Communicator(config) as communicator:
            found.append(communicator.transport.trip_seconds)
    return found


@needs_links
def test_ranks_on_two_hosts_time_a_trip_wherever_the_speed_of_their_link_comes_from(tmp_path):
    """Schedules depend on it, and only a link that is known to be far is learned from calls."""
    with link(2, "1gbit") as nodes:
        found = on_ranks(2, trips, tmp_path, nodes=nodes)
    assert found[0] == found[1] and all(0 < trip < 5 for trip in found[0]), found
