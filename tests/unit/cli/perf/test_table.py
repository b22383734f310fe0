"""How `ncz perf` shows its records: the table, the picture, and what the command line may ask for."""

import json
import struct

import numpy as np
import pytest
from rich.console import Console

from ncz_plugins.cli.main import build_parser, main
from ncz_plugins.cli.output import shares, significant
from ncz_plugins.cli.perf import COLLECTIVES, Job, plot, request, table
from ncz_plugins.cli.perf.contenders import CONTENDERS
from ncz_plugins.cli.perf.ranks import Ranks
from ncz_plugins.cli.picture import COLORS
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import ConfigError, UnsupportedError


def record(peer="ncz", size=1 << 20, speedup=4.0, ratio=8.0, **other):
    return {
        "ranks": 2,
        "peer": peer,
        "size": size,
        "count": size // 4,
        "type": "float32",
        "op": "sum",
        "rounds": 5,
        "time_us": 1234.567,
        "times_us": [1234.567] * 5,
        "algbw": 0.84931,
        "busbw": 0.84931,
        "ratio": ratio,
        "wire_bytes": 262144 if ratio else None,
        "network_bytes": 270000.0,
        "coders": {"rans": 3, "fixed": 1} if ratio else None,
        "bypasses": {} if ratio else None,
        "error": 0.1234,
        "max_error": 0.5,
        "of_bound": 0.99 if ratio else None,
        "speedup": speedup,
    } | other


@pytest.fixture
def shown():
    def run(records):
        console = Console(width=200, record=True, file=open("/dev/null", "w"))
        console.print(table.records_table(records))
        return [line.split() for line in console.export_text().splitlines() if line.strip()]

    return run


def test_the_table_has_a_line_for_every_contender(shown):
    plain = record("plain", speedup=1.0, ratio=None, error=0.0, network_bytes=None)
    lines = shown([plain, record(), record(coders=None, bypasses={"too small": 1}, ratio=1.0)])
    assert lines[-3] == ["plain", "1048576", "262144", "float32", "sum", "1235", "0.849", "0.849", "0", "1.00"]
    numbers = ["ncz", "1048576", "262144", "float32", "sum", "1235", "0.849", "0.849", "0.12", "4.00"]
    assert lines[-2] == [*numbers, "8.00", "270000", "rans", "75%", "fixed", "25%"]
    assert lines[-1] == [*numbers, "1.00", "270000", "too", "small"]
    headings = " ".join(" ".join(line) for line in lines[:-3])
    assert all(
        word in headings for word in ("size", "count", "type", "redop", "time", "algbw", "busbw", "ratio", "sent")
    )


@pytest.mark.parametrize(
    "number, text", [(0.000123456, "0.000123"), (1.5, "1.5"), (12.345, "12.3"), (98765.4, "98765")]
)
def test_numbers_keep_three_digits(number, text):
    assert significant(number) == text


@pytest.mark.parametrize(
    "counts, text", [(None, ""), ({}, ""), ({"rans": 7}, "rans"), ({"a": 1, "b": 1}, "a 50% b 50%")]
)
def test_shares(counts, text):
    assert shares(counts) == text


# ------------------------------------------------------------------ the picture


def pixels(file, color: str) -> int:
    """How many have nearly this colour."""
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    return (np.abs(imread(file)[..., :3] - to_rgb(color)) < 0.02).all(-1).sum()


def test_the_picture_is_a_png_with_lines(tmp_path):
    records = [
        record(peer, size, speedup=speedup, ratio=8.0 if peer == "ncz" else None)
        for size in (1 << 16, 1 << 20)
        for peer, speedup in (("plain", 1.0), ("ncz", 4.0), ("fp16", 1.9), ("bf16", 0.001))
    ]
    file = tmp_path / "x.png"
    plot.draw(file, records, "a title")
    header = file.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width == 960 and height < 1000  # a phone's width
    assert pixels(file, COLORS["ncz"]) > 500 and pixels(file, COLORS["fp16"]) > 500
    plot.draw(tmp_path / "y.png", [r for r in records if r["peer"] == "plain"], "a title")
    assert pixels(tmp_path / "y.png", COLORS["plain"]) > 500
    assert pixels(tmp_path / "y.png", COLORS["ncz"]) == pixels(tmp_path / "y.png", COLORS["fp16"]) == 0


def test_contenders_differ_and_ways_have_their_colours():
    names = ("plain", "ncz", "fp16", "bf16", "ddp-fp16", "ddp-powersgd-4", "new", "newer")
    styles = plot._styles(names)
    assert len({(style["color"], style["marker"]) for style in styles.values()}) == len(names)
    assert styles["fp16"]["color"] == styles["ddp-fp16"]["color"] == COLORS["bf16"]
    assert styles["ddp-powersgd-4"]["color"] == COLORS["powersgd"]


# ------------------------------------------------------------------ what may be asked for


@pytest.mark.parametrize(
    "text, found",
    [
        ("64K:512K", [1 << 16, 1 << 17, 1 << 18, 1 << 19]),
        ("64K:300K", [1 << 16, 1 << 17, 1 << 18]),
        ("64K:16M:16", [1 << 16, 1 << 20, 1 << 24]),
        ("1M,64KiB,1000,64k", [1000, 1 << 16, 1 << 20]),
        ("1G", [1 << 30]),
        ("8:8", [8]),
    ],
)
def test_sizes(text, found):
    assert request.sizes(text) == found


@pytest.mark.parametrize(
    "text", ["", "x", "1M:64K", "64K:1M:1", "64K:1M:x", "1:2:3:4", "7", "-1M", "64K,", "1.5M", "1T"]
)
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError, match=f"--sizes: '{text}' is neither"):
        request.sizes(text)


def test_plain_and_ours_always_take_part():
    assert request.choose("none", "all_reduce", CONTENDERS) == (["plain", "ncz"], [])
    assert request.choose("fp16,ncz,fp16", "all_reduce", CONTENDERS) == (["plain", "ncz", "fp16"], [])


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_all_contenders_take_part_or_are_named_with_a_reason(collective):
    chosen, notes = request.choose("all", collective, CONTENDERS)
    assert chosen[:2] == ["plain", "ncz"]
    received = " ".join(notes)
    for name, contender in CONTENDERS.items():
        assert (name in chosen) != (name in received.replace(",", " ").split())
        if name in chosen:
            assert collective in contender.collectives and contender.missing() is None


def test_a_contender_that_is_asked_for_and_cannot_take_part_is_an_error():
    with pytest.raises(
        ConfigError, match="'fp6' is unknown; did you mean (b|f)p16[?] allowed: all, none, or some of plain"
    ):
        request.choose("fp6", "all_reduce", CONTENDERS)
    with pytest.raises(ConfigError, match="--peers: 'none such' is unknown; allowed: all, none, or some of plain"):
        request.choose("none such", "all_reduce", CONTENDERS)
    with pytest.raises(UnsupportedError, match="--peers ddp-fp16: has no broadcast"):
        request.choose("ddp-fp16", "broadcast", CONTENDERS)


@pytest.fixture
def read(monkeypatch):
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "HOROVOD_RANK"):
        monkeypatch.delenv(variable, raising=False)

    def run(*arguments, config=None):
        options = build_parser().parse_args(["perf", "all_reduce", *arguments])
        return request.read(options, config or Config())

    return run


def test_a_job_travels_as_json(read):
    found = read("--sizes", "1M", "--ranks", "4")
    assert found.ranks == Ranks(None, 4)
    assert Config.load(found.job.config) == Config()
    assert Job(**json.loads(json.dumps(vars(found.job)))) == found.job


def test_weights_are_for_all_gather_and_plain_alone(read, monkeypatch):
    for arguments in (("--data", "weights"), ("--data", "weights", "--peers", "fp16")):
        with pytest.raises(ConfigError, match="--data weights needs all_gather and --peers none"):
            read(*arguments)
    options = build_parser().parse_args(["perf", "all_gather", "--data", "weights"])
    job = request.read(options, Config()).job
    assert (job.dtype, job.itemsize) == ("bfloat16", 2)
    config = Config.load(job.config)
    assert config.roles == ("parameter",) and job.role == "parameter"


@pytest.mark.parametrize(
    "environment, launcher",
    [
        ({"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "here", "LOCAL_WORLD_SIZE": "8"}, "torchrun"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "16"}, "horovodrun"),
        ({"RANK": "0"}, None),
    ],
)
def test_a_launchers_ranks_are_taken(read, monkeypatch, environment, launcher):
    of_two = read().job  # with the environment cleared
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = read()
    assert found.ranks.launcher == launcher
    assert bool(found.notes) == (launcher is None)  # as there is a network between machines
    if launcher:
        assert found.ranks.count == 16 and found.job.timeout > 3 * of_two.timeout  # they have more to send
        with pytest.raises(ConfigError, match=f"--ranks: can't be used under {launcher}"):
            read("--ranks=2")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "LOCAL_WORLD_SIZE": "2"},
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2"},
    ],
)
def test_where_there_is_no_network_that_is_said(read, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    [note] = read("--peers", "none").notes
    assert note.startswith("All ranks are on this machine.") and "torchrun" in note


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--ranks", "0"], "--ranks: '0' is not a number above 0"),
        (["--ranks", "two"], "--ranks: 'two' is not a number above 0"),
        (["--repeat", "-1"], "--repeat: '-1' is not a number above 0"),
        (["--data", "nowhere.npy"], "nowhere.npy: cannot be read: No such file or directory"),
        (["--bound", "rms"], "--bound: 'rms' is not MODE:VALUE"),
        (["--bound", "rms:wide"], "quantizer.value: 'wide' is not allowed"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["--plot", "x.foo"], "--plot x.foo: the name must end in one of"),
        (["--plot", "/nowhere/x.png"], "--plot /nowhere/x.png: no file can be made there"),
        (["--trace", "/nowhere/x.json"], "--trace /nowhere/x.json: no file can be made there"),
        (["--trace", "/"], "--trace /: is a folder: name a file in it"),
    ],
    ids=" ".join,
)
def test_mistakes_are_explained_before_anything_starts(read, capsys, arguments, says):
    assert main(["perf", "all_reduce", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("ncz: error: ") and says in output.err


def test_a_bound_has_no_meaning_without_loss(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("quantizer: {kind: lossless}")
    assert main(["perf", "broadcast", "--config", str(tmp_path / "c.yaml"), "--bound", "rms:0.5"]) == 2
    assert "lossless" in capsys.readouterr().err
