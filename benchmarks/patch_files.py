"""Measures `ncz patch` on checkpoints, beside what the disk and a start of Python with torch take.

    .venv/bin/python -m benchmarks.patch_files [--rounds 3] [--folder FOLDER] [--output FOLDER]

Two checkpoints of 1.07 GB, bfloat16, in 4 safetensors files, of which 1 % of the elements differ by one unit in the
last place. Each command is a process of its own; all of them take turns. Seconds are medians, of the clock and of all
cores together. Files are in the page cache, and what is written is brought to the disk. Needs 5 GB of disk in
`--folder`.
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
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.weights import ROOT, put_into, write_figures

PAGE = ROOT / "docs" / "results" / "weights.md"
MARKS = "<!-- files -->", "<!-- end of files -->"
FILES, TENSORS, SIZE, CHANGED = 4, 8, 4096, 0.01

PYTHON = shlex.quote(sys.executable)
NCZ = f"{PYTHON} -m ncz_plugins patch"
# Each command, and what it makes.
COMMANDS = {
    "`import torch`": (f"{PYTHON} -c 'import torch'", None),
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
    found = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for _, made in COMMANDS.values():
            if made is not None:
                shutil.rmtree(folder / made, ignore_errors=True)
        for name, (command, _) in COMMANDS.items():
            found[name].append(run(command, folder))
    if (folder / "applied" / "model-0.safetensors").read_bytes() != (folder / "new/model-0.safetensors").read_bytes():
        raise SystemExit("what was applied is not what was made")
    medians = {name: [statistics.median(column) for column in zip(*times)] for name, times in found.items()}
    return [{"what": name, "seconds": wall, "core_seconds": cores} for name, (wall, cores) in medians.items()]


def summary(found: list[dict[str, Any]]) -> str:
    """The table for the page of results."""
    lines = ["| 1.07 GB in 4 files, 1 % changed | seconds | of all cores |", "|---|---:|---:|"]
    lines += [f"| {row['what']} | {row['seconds']:.2f} | {row['core_seconds']:.2f} |" for row in found]
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
