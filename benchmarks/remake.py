"""Measures again what the pages of docs/results show, and writes their tables: `make results`.

    sudo .venv/bin/python -m benchmarks.remake --list
    sudo .venv/bin/python -m benchmarks.remake 'perf-default-*' small-calls

Names are those of files in benchmarks/results, with wildcards; without names everything is measured, one after the
other, in two days. Run it on a machine that does nothing else. Links need root. --list also says where files come from
that are not measured here.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from benchmarks import codec_table, gains, performance, pictures
from ncz_plugins.cli.output import add_row, table, unbroken_console

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PERF = "-m benchmarks.laboratory.perf"
DEFAULT = "--link 100mbit,1gbit,10gbit,unlimited --sizes 16K:64M:4 --peers none --json"
EXCHANGE = "--sizes 1M,16M,64M --link 100mbit,1gbit,unlimited --peers fp16,fp8 --data activation --json"
ALL_PEERS = "fp16,bf16,ddp-fp16,ddp-powersgd-1,ddp-powersgd-4,ddp-int8,horovod,horovod-fp16,hivemind,zstd,lz4"
STEPS = "-m benchmarks.end_to_end"


class Job(NamedTuple):
    """What makes a file, and how many minutes that takes on two cores.

    A command that ends in --json prints the file. One of benchmarks.end_to_end writes end-to-end.json, which then gets
    the name of the job. Others write files, pictures and pages themselves.
    """

    minutes: int
    command: str


# Training steps that bear another name come before those that keep the name.
JOBS = {
    "perf-default-2-ranks": Job(5, f"{PERF} all_reduce --ranks 2 {DEFAULT}"),
    "perf-default-4-ranks": Job(7, f"{PERF} all_reduce --ranks 4 {DEFAULT}"),
    "perf-1gbit-2-ranks": Job(2, f"{PERF} all_reduce --link 1gbit --sizes 64M --peers {ALL_PEERS} --repeat 9 --json"),
    "perf-1gbit-4-ranks": Job(
        2,
        f"{PERF} all_reduce --link 1gbit --ranks 4 --sizes 64M "
        "--peers fp16,ddp-powersgd-1,ddp-powersgd-4,ddp-int8,hivemind --repeat 9 --json",
    ),
    "perf-links": Job(
        2,
        f"{PERF} all_reduce --link 100mbit,1gbit,10gbit,unlimited --sizes 256K:16M:4 --peers fp16,hivemind "
        "--repeat 15 --plot docs/images/perf.png --json",
    ),
    "perf-all-to-all-2-ranks": Job(4, f"{PERF} all_to_all --ranks 2 {EXCHANGE}"),
    "perf-all-to-all-4-ranks": Job(5, f"{PERF} all_to_all --ranks 4 {EXCHANGE}"),
    "perf-all-to-all-8-ranks": Job(8, f"{PERF} all_to_all --ranks 8 {EXCHANGE}"),
    "small-calls": Job(2, "-m benchmarks.small_calls --json benchmarks/results/small-calls.json"),
    "coming-from": Job(5, "-m benchmarks.coming_from --json benchmarks/results/coming-from.json"),
    "connections": Job(10, "-m benchmarks.connections --json benchmarks/results/connections.json"),
    "end-to-end-weights": Job(7, f"{STEPS} --frameworks deepspeed,deepspeed-bf16 --rounds 2"),
    "end-to-end-zero-3": Job(4, f"{STEPS} --frameworks deepspeed-zero-3 --rounds 2"),
    "end-to-end-ddp": Job(3, f"{STEPS} --frameworks ddp --rounds 2 --steps 13"),
    "end-to-end-fsdp": Job(4, f"{STEPS} --frameworks fsdp --rounds 2"),
    "end-to-end-experts": Job(3, f"{STEPS} --frameworks experts"),
    "end-to-end-diloco": Job(
        6,
        f"{STEPS} --frameworks diloco --link 100mbit --layers 4 --heads 6 --width 192 --batch 12 --steps 33 --rounds 1 "
        "--timeout 500",
    ),
    "end-to-end": Job(5, f"{STEPS} --frameworks deepspeed,horovod --rounds 2 --steps 13"),
    "codec-cpu": Job(3, "benchmarks/codec.py --megabytes 32 --repeats 11 --json benchmarks/results/codec-cpu.json"),
    "codec-data": Job(10, "-m benchmarks.codec_table --write"),
    "schedules": Job(8, "-m benchmarks.schedules --json benchmarks/results/schedules.json"),
    "plan": Job(30, "-m benchmarks.plan validate"),
    "plan-ranks": Job(5, "-m benchmarks.plan simulate"),
    "weights": Job(6, "-m benchmarks.weights"),
    "weight-ways": Job(13, "-m benchmarks.weight_ways"),
    "patch-files": Job(5, "-m benchmarks.patch_files"),
    "weight-dtypes": Job(1, "-m benchmarks.weight_dtypes"),
    "third-party": Job(20, "-m benchmarks.thirdparty.run --write"),
    "fuzz": Job(63, "tests/fuzz/run.py --seconds 3600 --json benchmarks/results/fuzz.json"),
    "ddp-hooks": Job(20, "benchmarks/convergence/ddp_hooks.py"),
    "soak": Job(31, "benchmarks/soak/soak.py --seconds 1800 --seed 20261201 --json benchmarks/results/soak.json"),
    "convergence": Job(120, "benchmarks/convergence/suite.py"),
    "frontier": Job(90, "benchmarks/convergence/frontier.py"),
    "activations": Job(30, "benchmarks/convergence/activations.py"),
    # Adds runs to convergence.json, which is why it comes last.
    "evidence": Job(3000, "benchmarks/convergence/evidence.py --seeds 5"),
}

OF_NOTEBOOK = "for docs/notebook, once: the file says by what command"
MADE_OTHERWISE = {  # files, with wildcards
    "gpu": "make gpu, on a machine with a GPU; then python -m benchmarks.gpu_page",
    "gpu-steps": "python benchmarks/gpu_steps.py, on a machine with a GPU",
    "gpu-predicted": "a model of the compiled kernels, not measured",
    "demo": "make demo; then python -m benchmarks.demo_page",
    "halo": "python examples/halo_exchange.py --json benchmarks/results/halo.json",
    "codec-bounds": "the job codec-data",
    "muon-real-ranks": "torchrun --nproc-per-node 2 benchmarks/convergence/under_ddp.py, for each task and seed",
    "guard-4-ranks": "torchrun --nproc-per-node 4 benchmarks/guard.py --output benchmarks/results/guard-4-ranks.json",
    "fixed-rate": "python benchmarks/fixed_rate.py",
    "perf-incompressible": OF_NOTEBOOK,
    "perf-1gbit-*-ranks-alone": OF_NOTEBOOK,
    "perf-1gbit-*-ranks-rms-1": OF_NOTEBOOK,
    "perf-between-*-ranks": OF_NOTEBOOK,
    "perf-small-*-ranks": OF_NOTEBOOK,
    "end-to-end-weights-unlimited": OF_NOTEBOOK,
    "*-epyc": f"{OF_NOTEBOOK}, beside files of a Xeon",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["*"], metavar="NAME", help="of files, with wildcards")
    parser.add_argument("--list", action="store_true", help="say what would run, and how old the files are")
    arguments = parser.parse_args()
    for name in arguments.names:
        if not any(fnmatch(each, name) for each in JOBS):
            parser.error(f"no file is called {name!r}; choose from {', '.join(JOBS)}")
    arguments.jobs = {each: job for each, job in JOBS.items() if any(fnmatch(each, name) for name in arguments.names)}
    return arguments


def run(name: str, job: Job) -> None:
    """Measure, and put the file where it belongs. Raises CalledProcessError: the old one is still there then."""
    command = [sys.executable, *shlex.split(job.command)]
    if command[-1] == "--json":
        printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        (RESULTS / f"{name}.json").write_bytes(printed)
        return
    kept = RESULTS / "end-to-end.json"
    before = kept.read_bytes()
    subprocess.run(command, cwd=ROOT, check=True)
    if name.startswith("end-to-end-"):
        shutil.copy(kept, RESULTS / f"{name}.json")
        kept.write_bytes(before)


def age(name: str) -> tuple[str, str, str]:
    """Versions that a file was measured with, the day of its commit, and commits to the package since then."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "", "", ""
    versions = json.loads(path.read_text()).get("versions", {})
    commit, _, day = git("log", "-1", "--format=%H %cs", "--", str(path)).partition(" ")
    since = git("rev-list", "--count", f"{commit}..HEAD", "--", "ncz_plugins") if commit else ""
    return versions.get("torch", ""), day, since


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> int:
    arguments = parse_arguments()
    console = unbroken_console()
    if arguments.list:
        listed = table(
            "file", "minutes", "torch", "committed", "commits since", "command", numbers=("minutes", "commits since")
        )
        for name, job in arguments.jobs.items():
            add_row(listed, name, f"{job.minutes:,}", *age(name), f"python {job.command}")
        console.print(listed)
        others = table("file", "comes from")
        for name, source in MADE_OTHERWISE.items():
            add_row(others, name, source)
        console.print(others)
        return 0
    failed = []
    for name, job in arguments.jobs.items():
        console.print(f"[bold]{name}[/bold], {job.minutes} minutes: python {job.command}", highlight=False)
        began = time.monotonic()
        try:
            run(name, job)
        except subprocess.CalledProcessError as error:
            failed.append(f"{name} (exit status {error.returncode})")
        console.print(f"  {(time.monotonic() - began) / 60:.1f} minutes", highlight=False)
    # Pages whose tables come from several files; other programs have written theirs.
    gains.main()
    performance.main()
    codec_table.write_pages()
    pictures.redraw(*pictures.drawable())
    console.print(git("diff", "--stat", "--", "docs", "benchmarks/results"), highlight=False)
    if failed:
        console.print(f"error: not measured: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
