"""What contenders need, and how they refuse: without starting any ranks."""

import json
import subprocess
import sys

import pytest

from ncz_plugins import Config, UnsupportedError
from ncz_plugins.cli.perf import COLLECTIVES
from ncz_plugins.cli.perf.contenders import CONTENDERS, Context

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
from ncz_plugins.cli.perf.contenders import CONTENDERS
print(json.dumps({name: contender.missing() for name, contender in CONTENDERS.items()}))
"""

# One rank alone, which was told that there are two: what Horovod makes of it.
NOT_UNDER_HOROVODRUN = """
from ncz_plugins import Config, UnsupportedError
from ncz_plugins.cli.perf.contenders import CONTENDERS, Context
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
        assert contender.needs_horovod == name.startswith("horovod")


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
