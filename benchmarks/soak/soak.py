"""Random collectives on real ranks for a long time, each checked on every rank (docs/results/soak.md).

    python benchmarks/soak/soak.py [--seconds 1800] [--ranks 4] [--seed N] [--first SESSION --sessions 1] [--json FILE]

What is run follows from the seed, the number of ranks and --largest. A failure names the session: run that one alone
to see it again. With --json benchmarks/results/soak.json, tables of both pages are written as well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.pages import put_into
from ncz_plugins.cli import machine
from ncz_plugins.cli.perf.launch import free_port
from ncz_plugins.version import __version__

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "soak.json"
PAGE, NOTEBOOK = ROOT / "docs" / "results" / "soak.md", ROOT / "docs" / "notebook" / "soak.md"
SILENCE = 600.0  # seconds without a word from any rank, after which the run is ended
GRACE = 30.0  # seconds for the other ranks to end after one has failed
KERNELS = ("auto", "portable")  # of even ranks, of odd ranks: they must agree to the bit


def soak(seconds: float, ranks: int, seed: int, folder: Path, **options) -> list[dict]:
    """Run a soak; what each rank has done. Logs are left in `folder`. Raises RuntimeError that says what failed.

    Args:
        options: first, sessions and largest, as on the command line; warm_up: sessions before the memory is looked at.
    """
    defaults = {"first": 0, "sessions": 10**9, "largest": 1 << 26, "warm_up": 50}
    job = defaults | options | {"seconds": seconds, "seed": seed, "results": str(folder)}
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    running: list[subprocess.Popen] = []
    port = free_port()
    try:
        for rank, log in enumerate(logs):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "NCZ_CPU_KERNELS": KERNELS[rank % 2],
                # Else glibc keeps up to 64 MiB of free memory for each of 16 arenas, as threads come and go.
                "MALLOC_ARENA_MAX": "2",
                "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            }
            command = [sys.executable, "-u", str(HERE / "worker.py"), json.dumps(job)]
            with open(log, "w") as out:
                streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
                running.append(subprocess.Popen(command, env=environment, **streams))
        why = _watch(running, logs, seconds)
    finally:
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)  # prints where it is
        time.sleep(0.5)
        for process in running:
            process.kill()
            process.wait()
    failed = [rank for rank, process in enumerate(running) if process.returncode]
    if why or failed:
        texts = [log.read_text(errors="replace") for log in logs]
        lines = [line for text in texts for line in text.splitlines()]
        received = [line for what in ("WRONG", "FAILED") for line in lines if line.startswith(what)]
        ends = [f"--- rank {r} exited with {running[r].returncode}\n{text[-4000:]}" for r, text in enumerate(texts)]
        again = " ".join(f"--{key} {job[key]}" for key in ("seed", "largest"))
        raise RuntimeError(
            "\n".join([*received, why or f"ranks {failed} failed", *ends])
            + f"\nTo see it again: make soak ARGS='--ranks {ranks} {again} --first SESSION --sessions 1'"
        )
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def _watch(running: list[subprocess.Popen], logs: list[Path], seconds: float) -> str:
    """Wait until all ranks have ended; else say why that is not worth waiting for any longer."""
    columns = [*Progress.get_default_columns()[:2], TimeElapsedColumn(), TextColumn("{task.fields[received]}")]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("soak", total=seconds, received="")
        begun = time.monotonic()
        until = math.inf
        while None in (codes := [process.poll() for process in running]):
            now = time.monotonic()
            if any(codes):  # neither None nor 0
                until = min(until, now + GRACE)
            if now > until:
                return f"some ranks did not end within {GRACE:g} s after another one had failed"
            if now - begun > SILENCE and time.time() - max(log.stat().st_mtime for log in logs) > SILENCE:
                return f"no rank has finished a session for {SILENCE:g} s"
            last = logs[0].read_bytes()[-200:].decode(errors="replace").splitlines()
            progress.update(task, completed=min(now - begun, seconds), received=last[-1] if last else "")
            time.sleep(0.5)
    return ""


def total(found: list[dict]) -> dict[str, Counter]:
    """Calls by kind, each counted once on every rank that took part."""
    joined: dict[str, Counter] = {}
    for one in found:
        for kind, counts in one["counts"].items():
            joined.setdefault(kind, Counter()).update(counts)
    return joined


def show(found: list[dict], seed: int) -> None:
    """What was run, as tables."""
    console = Console()
    first = found[0]
    calls, elements = (sum(one[key] for one in found) for key in ("calls", "elements"))
    console.print(
        f"seed {seed}, {len(found)} ranks, {first['sessions']} sessions in {first['seconds']:.0f} s: {calls:,} calls "
        f"checked, {elements:,} elements, up to {max(one['largest'] for one in found):,} in a call; "
        f"the largest error is {max(one['worst'] for one in found):.6f} of its bound"
    )
    table = Table("", "calls", title="Calls, counted on every rank")
    for kind, counts in total(found).items():
        table.add_section()
        for name, count in counts.most_common():
            table.add_row(f"{kind}: {name}", f"{count:,}")
    console.print(table)
    table = Table("rank", "", *first["usages"][0], title="After the warm-up, and at the end")
    for rank, one in enumerate(found):
        for when in (0, -1):
            table.add_row(str(rank), ("start", "end")[when], *(f"{value:,}" for value in one["usages"][when].values()))
    console.print(table)


def document(found: list[dict], seed: int, command: str) -> dict:
    """What the file holds: of the memory and files that a rank took, those after the warm-up and at the end."""
    ranks = [{**one, "usages": [one["usages"][0], one["usages"][-1]]} for one in found]
    versions = {"ncz_plugins": __version__, "torch": machine.installed_version("torch")}
    return {"command": command, "versions": versions, "cpu": machine.cpu(), "seed": seed, "ranks": ranks}


def summary(kept: dict) -> str:
    """A run as Markdown, for the page of results."""
    ranks = kept["ranks"]
    calls, elements = (sum(one[key] for one in ranks) for key in ("calls", "elements"))
    before, after = (max(one["usages"][when]["resident"] for one in ranks) / 1e6 for when in (0, -1))
    cells = {
        "minutes": f"{ranks[0]['seconds'] / 60:.0f}",
        "ranks": f"{len(ranks)}",
        "sessions": f"{ranks[0]['sessions']:,}",
        "checked calls": f"{calls:,}",
        "of that compressed": f"{total(ranks)['went']['compressed']:,}",
        "elements": f"{elements / 1e9:.1f} billion",
        "largest error, of its bound": f"{max(one['worst'] for one in ranks):.8f}",
        "resident memory of a rank, first and last": f"{before:.0f}, {after:.0f} MB",
    }
    return "\n".join(f"| {' | '.join(line)} |" for line in (cells, ["---:"] * len(cells), cells.values()))


def by_kind(kept: dict) -> str:
    """The calls of a run by kind as Markdown, for the notebook."""
    lines = ["| | calls |", "|---|---|"]
    for kind, counts in total(kept["ranks"]).items():
        told = (f"{name}: {count:,}" for name, count in counts.most_common())
        lines.append(f"| {kind.replace('_', ' ')} | {', '.join(told)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument("--first", type=int, default=0, help="the session to begin with")
    parser.add_argument("--sessions", type=int, default=10**9, help="the most sessions to run")
    parser.add_argument("--largest", type=int, default=1 << 26, help="elements of the largest tensors")
    parser.add_argument("--json", type=Path, help="a file for what each rank has done")
    arguments = vars(parser.parse_args())
    file = arguments.pop("json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the ranks as well
    folder = Path(tempfile.mkdtemp(prefix="ncz-soak-"))  # stays there if the run fails
    print(f"seed {arguments['seed']}; logs are in {folder}", flush=True)
    try:
        found = soak(folder=folder, **arguments)
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    show(found, arguments["seed"])
    if file:
        kept = document(found, arguments["seed"], shlex.join(["python", *sys.argv]))
        file.write_text(json.dumps(kept, indent=1) + "\n")
        if file.resolve() == RESULTS:
            put_into(PAGE, summary(kept))
            put_into(NOTEBOOK, by_kind(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
