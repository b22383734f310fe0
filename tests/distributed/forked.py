"""As `processes.run`, with ranks that are forks of one process: what takes long to import is imported once."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from processes import WORKERS, Finished, report


def run(
    worker: str,
    world_size: int,
    folder: Path,
    *arguments: str,
    seconds: float = 120,
    imports: str = "ncz_plugins.core.communicator",
    environment: dict[str, str] | None = None,
) -> list[Finished]:
    """Run `_workers/WORKER.py` once per rank; every process is gone when this returns.

    Args:
        imports: modules that the worker will import, none of which may start a thread.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    settings = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "NCZ_TEST_IMPORTS": imports,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(WORKERS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    script = [str(WORKERS / "fork.py"), str(world_size), str(folder), str(WORKERS / f"{worker}.py")]
    with open(folder / "fork.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, *script, *arguments],
            env={**os.environ, **settings, **(environment or {})},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    exits = folder / "exits.json"
    codes = json.loads(exits.read_text()) if exits.exists() else [None] * world_size
    finished = []
    for rank, code in enumerate(codes):
        result, log = folder / f"rank{rank}.json", folder / f"rank{rank}.log"
        output = log.read_text(errors="replace") if log.exists() else (folder / "fork.log").read_text()
        finished.append(Finished(code, output, json.loads(result.read_text()) if result.exists() else None))
    assert not late, f"not done within {seconds} s:\n" + report(finished)
    return finished
