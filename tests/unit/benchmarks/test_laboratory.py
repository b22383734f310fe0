"""What contenders of the laboratory need, how they refuse, and its checks and picture: without starting any ranks."""

import json
import struct
import subprocess
import sys

import pytest

from benchmarks.laboratory import perf, plot
from benchmarks.laboratory.measure import require_crossing
from benchmarks.laboratory.peers import CONTENDERS
from ncz_plugins import Config, UnsupportedError
from ncz_plugins.cli.perf import COLLECTIVES, request
from ncz_plugins.cli.perf.contenders import Context
from ncz_plugins.core.errors import NczError

LIBRARIES = {
    "horovod": "horovod",
    "horovod-fp16": "horovod",
    "hivemind": "hivemind",
    "hivemind-quantile": "hivemind",
    "zstd": "zstandard",
    "lz4": "lz4",
}

# Where no library is installed: what is missing then.
WITHOUT = """
import json, sys
for library in sys.argv[1:]:
    sys.modules[library] = None
from benchmarks.laboratory.peers import CONTENDERS
print(json.dumps({name: contender.missing() for name, contender in CONTENDERS.items()}))
"""

# One rank alone, which was told that there are two: what Horovod makes of it.
NOT_UNDER_HOROVODRUN = """
from ncz_plugins import Config, UnsupportedError
from benchmarks.laboratory.peers import CONTENDERS
from ncz_plugins.cli.perf.contenders import Context
try:
    CONTENDERS["horovod"].open(Context(Config(), "a group", 2, 1, "all_reduce"))
except UnsupportedError as error:
    print(error)
"""


def output(program: str, *arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_names_are_unique_and_described():
    assert {"plain", "ncz"} <= set(CONTENDERS)
    for name, contender in CONTENDERS.items():
        assert name == contender.name
        assert contender.description and "\n" not in contender.description
        assert contender.collectives and contender.collectives <= set(COLLECTIVES)


@pytest.mark.processes
def test_without_any_library_the_others_remain():
    missing = json.loads(output(WITHOUT, *LIBRARIES.values()))
    assert {name for name, lacking in missing.items() if lacking is None} == set(CONTENDERS) - {*LIBRARIES, "nccl"}


@pytest.mark.parametrize("library", sorted(set(LIBRARIES.values())))
def test_a_library_that_is_absent_is_missed_by_those_who_need_it_and_by_nobody_else(library, monkeypatch):
    before = {name: contender.missing() for name, contender in CONTENDERS.items()}
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    context = Context(Config(), "a group", 2, 0, "all_reduce")
    for name, contender in CONTENDERS.items():
        if LIBRARIES.get(name) == library:
            extra = "horovod" if library == "horovod" else "peers"
            assert contender.missing() == f"{library} is not installed: pip install 'ncz_plugins[{extra}]'"
            with pytest.raises(UnsupportedError, match=f"{name}: {library} is not installed"):
                contender.open(context)
        else:
            assert contender.missing() == before[name]


def test_a_contender_refuses_collectives_that_it_lacks():
    context = Context(Config(), "a group", 2, 0, "broadcast")
    for name, contender in CONTENDERS.items():
        if "broadcast" not in contender.collectives:
            with pytest.raises(UnsupportedError, match=rf"{name} has no broadcast; it has all_"):
                contender.open(context)


@pytest.mark.processes
@pytest.mark.skipif(CONTENDERS["horovod"].missing() is not None, reason="Horovod is not installed")
def test_horovod_refuses_ranks_that_horovodrun_did_not_start():
    message = output(NOT_UNDER_HOROVODRUN)
    assert "rank 0 of 1" in message and "rank 1 of 2" in message and "horovodrun" in message


def test_under_torchrun_there_is_no_horovod(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("HOROVOD_RANK", raising=False)
    with pytest.raises(UnsupportedError, match="--peers horovod: needs Horovod's ranks: start this by horovodrun"):
        request.choose("horovod", "all_reduce", CONTENDERS)


def read(*arguments):
    options = perf.build_parser().parse_args(["all_reduce", *arguments])
    return request.read(options, Config(), CONTENDERS)


def test_slower_links_get_more_time(monkeypatch):
    for variable in ("RANK", "HOROVOD_RANK"):
        monkeypatch.delenv(variable, raising=False)
    slow, fast = (perf._job(read("--sizes", "64M"), rate) for rate in ("1mbit", "10gbit"))
    assert slow.timeout > 4 * 64 * 8 > fast.timeout


@pytest.mark.parametrize("option", ["--link=1gbit", "--ranks-per-node=2"])
def test_a_launcher_has_its_own_network(monkeypatch, option):
    for name, value in {"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)
    options = perf.build_parser().parse_args(["all_reduce", option])
    with pytest.raises(NczError, match=f"{option.split('=')[0]}: can't be used under torchrun"):
        perf._ranks_per_node(options, read())


def test_bytes_that_did_not_cross_the_link_are_an_error():
    require_crossing("ncz", "1gbit", 1000, 950.0)  # the kernel may count the rest with the next call
    for seen, says in (
        (949.0, "1,000 bytes must go through the links of 1gbit, but only 949 did"),
        (None, "no bytes are counted"),
    ):
        with pytest.raises(NczError, match=says):
            require_crossing("ncz", "1gbit", 1000, seen)


@pytest.mark.parametrize("links", [[None], ["1gbit"], ["unlimited", "1gbit", "100mbit"]])
def test_the_picture_has_a_panel_for_links(tmp_path, links):
    pytest.importorskip("matplotlib")
    records = [
        {"link": link, "peer": peer, "size": size, "speedup": speedup, "ratio": 8.0 if peer == "ncz" else None}
        for link in links
        for size in (1 << 16, 1 << 20)
        for peer, speedup in (("plain", 1.0), ("ncz", 4.0), ("lz4", 0.001))
    ]
    plot.draw(tmp_path / "x.png", records, "a title")
    header = (tmp_path / "x.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width == 960 and (height > 1000) == (len(links) > 1)  # a phone's width; one panel, or two
