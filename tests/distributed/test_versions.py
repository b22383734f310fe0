"""Versions that meet: ranks of this one and of an earlier one, and bytes that one wrote and the other reads.

`earlier/` holds the wheel of the version before. Nothing was released before 0.1.0, so it is a development state that
got a number of its own:

    git checkout 7845469 && sed -i 's/0.1.0/0.0.1/' ncz_plugins/version.py && CXX=false CC=false pip wheel --no-deps .

Without a compiler: numpy codes there. With each release its wheel takes the place of this one.
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from repository import ROOT

from ncz_plugins.cli.perf.launch import free_port
from ncz_plugins.version import __version__

[WHEEL] = (Path(__file__).parent / "earlier").glob("*.whl")
EARLIER = WHEEL.name.split("-")[1]
VERSIONS = [__version__, EARLIER, __version__]  # of the ranks
GROUPS = [[0, 1, 2], [0, 1], [1, 2]]  # the earlier one is in the middle, last, and first
SOON = 60  # seconds: until an error, for which time-outs of half an hour count

# What each rank runs, with its own version of the package and without the helpers of this one: groups, and files. These
# are an exact change of a version of weights, and a tensor without loss. Ranks 0 and 1 read what the other one wrote.
PROGRAM = """
import json, os, sys, time
import numpy, torch, torch.distributed as dist
import ncz_plugins

folder, rank = sys.argv[2], int(os.environ["RANK"])
base, new = torch.load(f"{folder}/weights").unbind()
with open(f"{folder}/patch{rank}", "wb") as file:
    file.write(ncz_plugins.make_patch({"w": new}, {"w": base}))
ncz_plugins.compress(new, {"quantizer": {"kind": "lossless"}}).numpy().tofile(f"{folder}/tensor{rank}")

dist.init_process_group("gloo")
groups, told = [dist.new_group(ranks) for ranks in json.loads(sys.argv[1])], []
for group in groups:
    if dist.get_rank(group) < 0:
        told.append(None)
        continue
    start = time.monotonic()
    try:
        told.append({"error": None, "message": str(ncz_plugins.Communicator("ncclz", group=group))})
    except ncz_plugins.NczError as error:
        told.append({"error": type(error).__name__, "message": str(error)})
    told[-1]["seconds"] = time.monotonic() - start
dist.barrier()

# By now the others have written their files.
right = why = None
if rank < 2:
    try:
        patched = ncz_plugins.apply_patch(open(f"{folder}/patch{1 - rank}", "rb").read(), {"w": base})["w"]
        read = torch.from_numpy(numpy.fromfile(f"{folder}/tensor{1 - rank}", numpy.uint8))
        right = torch.equal(patched, new) and torch.equal(ncz_plugins.decompress(read), new)
    except Exception as error:
        why = repr(error)
print(json.dumps({"version": ncz_plugins.__version__, "told": told, "right": right, "why": why}))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Where Python finds each version."""
    folder = tmp_path_factory.mktemp("earlier")
    with zipfile.ZipFile(WHEEL) as archive:
        archive.extractall(folder)
    return {__version__: str(ROOT), EARLIER: str(folder)}


def start(folder: str, *arguments, **environment) -> subprocess.Popen:
    """Start the program with the version in `folder`, from which nothing of another one is near."""
    variables = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-P", "-c", PROGRAM, *map(str, arguments)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(process: subprocess.Popen) -> str:
    """The last line that it printed. Fails unless it ends well, in time."""
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err[-4000:]
    return out.splitlines()[-1] if out else ""


@pytest.fixture(scope="module")
def told(folders, tmp_path_factory) -> list[dict]:
    """What each rank has printed."""
    shared = tmp_path_factory.mktemp("files")
    base = torch.linspace(-1, 1, 5000).to(torch.bfloat16)
    torch.save(torch.stack([base, base + base.abs().gt(0.5) * 0.125]), shared / "weights")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(VERSIONS))}
    processes = [
        start(folders[version], json.dumps(GROUPS), shared, RANK=str(rank), **meeting)
        for rank, version in enumerate(VERSIONS)
    ]
    return [json.loads(printed(process)) for process in processes]


def test_ranks_of_two_versions_are_refused_at_the_start_with_both_named(told):
    assert [each["version"] for each in told] == VERSIONS
    for number, ranks in enumerate(GROUPS):
        for rank in ranks:
            error = told[rank]["told"][number]
            assert error["error"] == "MismatchError", (ranks, rank, error)
            assert f'"{EARLIER}" on rank 1' in error["message"] and f'"{__version__}" on rank' in error["message"]
            assert "All must run the same ncz_plugins" in error["message"]
            assert error["seconds"] < SOON, (ranks, rank, error)


@pytest.mark.parametrize("versions", [(EARLIER, __version__), (__version__, EARLIER)], ids="-".join)
def test_files_of_one_version_are_read_by_the_other(versions, told):
    """As long as their formats have the same numbers."""
    [reader] = [each for each in told[:2] if each["version"] == versions[1]]
    assert reader["right"], reader["why"]
