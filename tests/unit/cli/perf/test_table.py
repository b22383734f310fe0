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
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import ConfigError, UnsupportedError


def record(peer="ncz", size=1 << 20, link="1gbit", speedup=4.0, ratio=8.0, **other):
    return {
        "link": link,
        "collective": "all_reduce",
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
    assert lines[-2] == [*numbers, "8.00", "262144", "270000", "rans", "75%", "fixed", "25%"]
    assert lines[-1] == [*numbers, "1.00", "262144", "270000", "too", "small"]
    headings = " ".join(" ".join(line) for line in lines[:-3])
    assert all(word in headings for word in ("size", "count", "type", "op", "time", "algbw", "busbw", "ratio", "wire"))


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


def pixels(file) -> np.ndarray:
    from matplotlib.image import imread

    return imread(file)


@pytest.mark.parametrize("links", [[None], ["1gbit"], ["unlimited", "1gbit", "100mbit"]])
def test_the_picture_is_a_png_with_lines(tmp_path, links):
    records = [
        record(peer, size, link, speedup, 8.0 if peer == "ncz" else None)
        for link in links
        for size in (1 << 16, 1 << 20)
        for peer, speedup in (("plain", 1.0), ("ncz", 4.0), ("fp16", 1.9), ("lz4", 0.001))
    ]
    file = tmp_path / "x.png"
    plot.draw(file, records, "a title")
    header = file.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width == 960 and (height > 1000) == (len(links) > 1)  # a phone's width; one panel, or two
    image = pixels(file)[..., :3]
    blue = (np.abs(image - [0x1F / 255, 0x77 / 255, 0xB4 / 255]) < 0.02).all(-1)  # the first of tab20: fp16
    assert blue.sum() > 500
    only_plain = [r for r in records if r["peer"] == "plain"]
    plot.draw(tmp_path / "y.png", only_plain, "a title")
    assert (image < 0.05).all(-1).sum() > (pixels(tmp_path / "y.png")[..., :3] < 0.05).all(-1).sum() + 500  # black: ncz


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
    assert request.choose("none", "all_reduce", horovod=True) == (["plain", "ncz"], [])
    assert request.choose("fp16,ncz,fp16", "all_reduce", horovod=True) == (["plain", "ncz", "fp16"], [])


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_all_contenders_take_part_or_are_named_with_a_reason(collective):
    chosen, notes = request.choose("all", collective, horovod=False)
    assert chosen[:2] == ["plain", "ncz"]
    received = " ".join(notes)
    for name, contender in CONTENDERS.items():
        assert (name in chosen) != (name in received.replace(",", " ").split())
        if name in chosen:
            assert collective in contender.collectives and not contender.needs_horovod and contender.missing() is None


def test_a_contender_that_is_asked_for_and_cannot_take_part_is_an_error():
    with pytest.raises(
        ConfigError, match="'zst' is unknown; did you mean zstd[?] allowed: all, none, or some of plain"
    ):
        request.choose("zst", "all_reduce", horovod=True)
    with pytest.raises(ConfigError, match="--peers: 'none such' is unknown; allowed: all, none, or some of plain"):
        request.choose("none such", "all_reduce", horovod=True)
    with pytest.raises(UnsupportedError, match="--peers zstd: has no broadcast"):
        request.choose("zstd", "broadcast", horovod=True)
    with pytest.raises(UnsupportedError, match="--peers horovod: needs Horovod's ranks: start this by horovodrun"):
        request.choose("horovod", "all_reduce", horovod=False)


@pytest.fixture
def read(monkeypatch):
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "HOROVOD_RANK"):
        monkeypatch.delenv(variable, raising=False)

    def run(*arguments, config=None):
        options = build_parser().parse_args(["perf", "all_reduce", *arguments])
        return request.read(options, config or Config())

    return run


def test_there_is_one_job_for_each_link(read):
    found = read("--link", "1gbit,unlimited,100mbit,1gbit", "--sizes", "1M", "--ranks", "4", "--ranks-per-node", "2")
    assert found.ranks == Ranks(None, 4, 2)
    assert [job.link for job in found.jobs] == ["1gbit", "unlimited", "100mbit"]
    assert all(Config.load(job.config) == Config() for job in found.jobs) and not found.notes
    assert all(Job(**json.loads(json.dumps(vars(job)))) == job for job in found.jobs)


def test_weights_are_for_all_gather_and_plain_alone(read, monkeypatch):
    for arguments in (("--data", "weights"), ("--data", "weights", "--peers", "fp16")):
        with pytest.raises(ConfigError, match="--data weights needs all_gather and --peers none"):
            read(*arguments)
    options = build_parser().parse_args(["perf", "all_gather", "--data", "weights"])
    [job] = request.read(options, Config()).jobs
    assert (job.dtype, job.itemsize) == ("bfloat16", 2)
    config = Config.load(job.config)
    assert config.roles == ("parameter",) and config.quantizer.kind == "lossless"


def test_slower_links_get_more_time(read):
    slow, fast = read("--link", "1mbit,10gbit", "--sizes", "64M").jobs
    assert slow.timeout > 4 * 64 * 8 > fast.timeout


@pytest.mark.parametrize(
    "environment, launcher",
    [
        ({"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "here", "LOCAL_WORLD_SIZE": "8"}, "torchrun"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "16"}, "horovodrun"),
        ({"RANK": "0"}, None),
    ],
)
def test_a_launchers_ranks_are_taken(read, monkeypatch, environment, launcher):
    [of_two] = read().jobs  # with the environment cleared
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = read()
    assert found.ranks.launcher == launcher
    assert bool(found.notes) == (launcher is None)  # as there is a network between machines
    if launcher:
        assert found.ranks.count == 16 and found.jobs[0].timeout > 3 * of_two.timeout  # they have more to send
        for option in ("--link=1gbit", "--ranks=2", "--ranks-per-node=2"):
            with pytest.raises(ConfigError, match=f"{option.split('=')[0]}: can't be used under {launcher}"):
                read(option)


@pytest.mark.parametrize(
    "environment, without",
    [
        ({}, ""),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "LOCAL_WORLD_SIZE": "2"}, ", without torchrun"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2"}, ", without horovodrun"),
    ],
)
def test_where_there_is_no_link_that_is_said(read, monkeypatch, environment, without):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    first, second = read("--peers", "none").notes
    assert first.startswith("No link was limited: all ranks are on this machine")
    assert f"`sudo ncz perf all_reduce --link 1gbit`{without}" in second


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--link", "1gb"], "'1gb' is not a rate such as 1gbit"),
        (["--ranks", "0"], "--ranks: '0' is not a number above 0"),
        (["--ranks", "two"], "--ranks: 'two' is not a number above 0"),
        (["--repeat", "-1"], "--repeat: '-1' is not a number above 0"),
        (["--ranks-per-node", "2"], "--ranks-per-node: needs --link RATE, which makes the nodes"),
        (["--link", "1gbit", "--ranks", "3", "--ranks-per-node", "2"], "--ranks-per-node: 2 does not divide --ranks 3"),
        (["--link", "1gbit,2gbit", "--trace", "x.json"], "--trace: records one call, and --link 1gbit,2gbit has 2"),
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
