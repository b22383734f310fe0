"""Measures `ncz patch` on checkpoints, beside what the disk and a start of Python with torch take.

    sudo .venv/bin/python -m benchmarks.patch_files [--rounds 3] [--folder FOLDER] [--output FOLDER]

Two checkpoints of 3.22 GB, bfloat16, in 12 safetensors files, of which 1 % of the elements differ by one unit in the
last place. Each command is a process of its own; all of them take turns, first with files in the page cache, then
without: emptying it needs root. What `cp` writes is brought to the disk. Seconds are medians, of the clock and of all
cores together. Needs 15 GB of disk in `--folder`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.pages import ROOT, put_into, write_figures

PAGE = ROOT / "docs" / "results" / "weights.md"
MARKS = "<!-- files -->", "<!-- end of files -->"
FILES, TENSORS, SIZE, CHANGED = 12, 8, 4096, 0.01

PYTHON = shlex.quote(sys.executable)
NCZ = f"{PYTHON} -m ncz_plugins patch"
# Each command, and what it makes.
COMMANDS = {
    "`import torch`": (f"{PYTHON} -c 'import torch'", None),
    "the disk: `cat` of both": ("cat old/* new/* > /dev/null", None),
    "the disk: `cp`, `sync`": ("cp -r new copy && sync copy/*", "copy"),
    "`sha256sum`, one core": ("sha256sum new/*", None),
    "`ncz patch make`": (f"{NCZ} make new versions --base old", "versions/00000002"),
    "`ncz patch apply`": (f"{NCZ} apply versions applied --base first", "applied"),
    "`ncz patch verify`": (f"{NCZ} verify versions", None),
}


def save_checkpoints(folder: Path) -> None:
    """Two checkpoints: `old` and `new`."""
    random = torch.Generator().manual_seed(0)
    for name in ("old", "new"):
        (folder / name).mkdir()
    for number in range(FILES):
        old = {f"{number}.{at}": 0.02 * torch.randn(SIZE, SIZE, generator=random) for at in range(TENSORS)}
        old, new = {name: x.bfloat16() for name, x in old.items()}, {}
        for name, x in old.items():
            moves = torch.rand(SIZE, SIZE, generator=random) < CHANGED
            new[name] = (x.view(torch.int16) + moves.to(torch.int16)).view(torch.bfloat16)
        for state, name in ((old, "old"), (new, "new")):
            save_file(state, folder / name / f"model-{number}.safetensors", {"format": "pt"})


def run(command: str, folder: Path) -> tuple[float, float]:
    """Seconds of the clock and of the cores that a command takes. Raises CalledProcessError."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    process = subprocess.Popen(
        ["sh", "-c", command], cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return seconds, used.ru_utime + used.ru_stime


def measure(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Seconds of all commands, which take turns."""
    save_checkpoints(folder)
    run(f"{NCZ} make old versions && {NCZ} apply versions first && sync", folder)
    cached = medians(folder, rounds, run)
    from_disk = medians(folder, rounds, run_without_cache)
    if (folder / "applied" / "model-0.safetensors").read_bytes() != (folder / "new/model-0.safetensors").read_bytes():
        raise SystemExit("what was applied is not what was made")
    columns = "seconds", "core_seconds", "seconds_from_disk", "core_seconds_from_disk"
    return [{"what": name, **dict(zip(columns, cached[name] + from_disk[name]))} for name in COMMANDS]


def medians(
    folder: Path, rounds: int, run: Callable[[str, Path], tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Seconds of the clock and of the cores of each command."""
    found = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, (command, made) in COMMANDS.items():
            if made is not None:
                shutil.rmtree(folder / made, ignore_errors=True)
            found[name].append(run(command, folder))
    return {name: tuple(statistics.median(column) for column in zip(*times)) for name, times in found.items()}


def run_without_cache(command: str, folder: Path) -> tuple[float, float]:
    """`run` with files that have to be read from the disk."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    return run(command, folder)


def summary(found: list[dict[str, Any]]) -> str:
    """The table for the page of results."""
    lines = ["| 3.22 GB in 12 files, 1 % changed | seconds | of all cores | from the disk | of all cores |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for what, *seconds in (row.values() for row in found):
        lines += [f"| {what} | {' | '.join(f'{each:.2f}' for each in seconds)} |"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where files are made and removed; default: the system's folder")
    parser.add_argument("--output", type=Path, help="where figures are written; default: benchmarks/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = measure(Path(folder), arguments.rounds)
    command = ["python", "-m", "benchmarks.patch_files", *sys.argv[1:]]
    write_figures("patch-files.json", command, {}, arguments.output, found=found)
    if arguments.output is None:
        put_into(PAGE, summary(found), MARKS)
    print(summary(found))


if __name__ == "__main__":
    main()
