"""Starts a real launcher and brings back what every rank wrote."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import forking
import pytest
from repository import FORKED_RANKS
from scenarios import DEEPSPEED, HOROVOD, OF_ALL

from ncz_plugins.cli.perf.launch import free_port

BIN = Path(sys.executable).parent

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed; `make setup` builds it"
)


@dataclass(frozen=True)
class Outcome:
    """How a launch ended.

    Attributes:
        returncode: the launcher's exit status.
        output: standard output and error of the launcher and all ranks.
        ranks: what each rank left in its rankN.json, in the order of ranks.
    """

    returncode: int
    output: str
    ranks: list[dict]


def deepspeed(*script: object, ranks: int = 2) -> list[str]:
    """The command that starts a script, or `--module` and a module, under DeepSpeed's launcher."""
    return [f"{BIN}/deepspeed", "--num_gpus", str(ranks), "--master_port", str(free_port()), *map(str, script)]


def torchrun(*script: object, ranks: int = 2) -> list[str]:
    """The same under PyTorch's launcher."""
    return [f"{BIN}/torchrun", "--nproc_per_node", str(ranks), "--master_port", str(free_port()), *map(str, script)]


def horovodrun(*script: object, ranks: int = 2, options: tuple[str, ...] = ()) -> list[str]:
    """The same under Horovod's launcher, which takes `options` of its own."""
    # Unless it is told what to use, it starts processes of its own to find out what Horovod was built with.
    return [f"{BIN}/horovodrun", "--gloo", "-np", str(ranks), *options, sys.executable, *map(str, script)]


def deepspeed_ranks(*script: object, ranks: int = 2, alone: bool = False) -> list[str]:
    """The command that starts a script once per rank without a launcher, for tests that are not about one.

    All ranks share the modules that scenarios of DeepSpeed import.

    Args:
        alone: on a network that nothing else uses. Needs the fixture `private_network`.
    """
    return _forked("torch", DEEPSPEED["imports"], script, ranks, alone)


def horovod_ranks(*script: object, ranks: int = 2, alone: bool = False, imports: str = HOROVOD["imports"]) -> list[str]:
    """The same for Horovod."""
    return _forked("horovod", imports, script, ranks, alone)


def _forked(kind: str, modules: str, script: tuple[object, ...], ranks: int, alone: bool) -> list[str]:
    options = ["--private-network"] if alone else []
    forks = [FORKED_RANKS, modules, *options, kind, ranks, free_port(), *script]
    return [sys.executable, *map(str, forks)]


def launch(
    command: list[str], folder: Path, *, timeout: float, fails: bool = False, environment: dict[str, str] | None = None
) -> Outcome:
    """Run `command` to its end and collect the results that its ranks left in `folder`.

    Its whole process group is killed at the end, and after `timeout` seconds. Fails, showing the
    output, if it took longer, or if it did not end the way `fails` says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = OF_ALL | {"NCZ_TEST_RESULTS": str(folder)}
    log = folder / "output.log"
    process = forking.start(command, cwd=folder, env={**os.environ, **settings, **(environment or {})}, log=log)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not done after {timeout} s: {command}\n{_end_of(log)}") from None
    finally:
        forking.end(process)
    assert (process.returncode != 0) == fails, f"exit status {process.returncode}: {command}\n{_end_of(log)}"
    files = sorted(folder.glob("rank*.json"), key=lambda file: int(file.stem.removeprefix("rank")))
    return Outcome(
        process.returncode, log.read_text(errors="replace"), [json.loads(file.read_text()) for file in files]
    )


def _end_of(log: Path, lines: int = 60) -> str:
    """The end of a log, and where all of it is."""
    return "\n".join([f"{log}:", *log.read_text(errors="replace").splitlines()[-lines:]])
