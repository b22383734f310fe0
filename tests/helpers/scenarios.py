"""Scenarios for several ranks, each a process: what the ranks do and what is asserted stand in one test file.

The process of each rank imports the test file by its path (run_scenario.py does that) and calls functions of it. Such
functions import what they need from `on_rank`. There are two ways to write a test:

    @ranks(2, 3)
    def test_sums_are_alike(group):             # runs on every rank, with two ranks and with three
        ...

    def dies_in_a_call():                       # runs on every rank; what it returns goes through JSON
        ...

    def test_the_others_are_told(tmp_path):     # runs in pytest's process
        finished = run_ranks(3, dies_in_a_call, tmp_path)
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import forking
import pytest
import torch
from repository import FORKED_RANKS

from benchmarks.laboratory.link import Node
from ncz_plugins.cli.perf.launch import free_port

# Where tensors may be. A GPU is shared by all ranks. Machines of CI have none; `make gpu` is for those that do.
NO_GPU = "no CUDA device here"
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)])
DEVICES = ["cpu", GPU]

# Slow modules, imported once for the ranks of all files. None may start a thread. `on_rank` can't be one of them, as it
# reads the environment of its rank.
IMPORTS = (
    "scenarios,ncz_plugins.torch.backend,ncz_plugins.torch.ddp,ncz_plugins.torch.fsdp,torch._dynamo"
    ",torch.distributed.checkpoint"
)
# What `deepspeed.initialize` imports. small_engine asks DeepSpeed which extensions it could compile, and for that it
# starts compilers.
INITIALIZE = "deepspeed.runtime.zero.muon.muon_optimizer,small_engine"
# Options of `ranks` and `run_ranks` for scenarios of DeepSpeed.
DEEPSPEED = {"imports": f"{IMPORTS},ncz_plugins.deepspeed,{INITIALIZE}"}
# Options of `ranks` and `run_ranks` for scenarios of Horovod, with what the first optimizer of PyTorch imports.
HOROVOD = {"launcher": "horovod", "imports": "scenarios,ncz_plugins.core.communicator,horovod.torch,torch._dynamo"}
# Variables of what is started without a launcher: what imports the same forks the same process if all of them are.
OF_ALL = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
RUNNER = Path(__file__).with_name("run_scenario.py")


# ------------------------------------------------------------------ scenarios


@dataclass
class Finished:
    """How the process of a rank ended.

    Attributes:
        returncode: its exit status; None if it was still running when the time was over.
        output: what it printed. The traceback of a scenario that raised is at the end.
        result: what the scenario returned; None if it did not return.
        ended: when it ended, as `time.time()` counts. None if it was still running.
    """

    returncode: int | None
    output: str
    result: object
    ended: float | None = None


def on_ranks(world_size: int, scenario: Callable, folder: Path, *arguments, **options) -> list:
    """What `scenario` returns on each rank. Fails unless all end well. Takes what `run_ranks` takes."""
    return results(run_ranks(world_size, scenario, folder, *arguments, **options))


def run_ranks(
    world_size: int,
    scenario: Callable,
    folder: Path,
    *arguments,
    device: str = "cpu",
    seconds: float = 120,
    imports: str = IMPORTS,
    launcher: str = "hosts",
    environment: dict[str, str] | None = None,
    nodes: Sequence[Node] = (),
) -> list[Finished]:
    """Run a scenario in one process per rank. Every process is gone when this returns.

    Fails, with what all ranks printed, if one has not ended after `seconds`.

    Args:
        scenario: a function of a test file's module. Each rank calls it with `arguments`, which go through JSON.
        folder: of the test. Each run has a folder of its own in it.
        device: what `on_rank.device` is there.
        imports: modules that ranks share, separated by commas. None may start a thread.
        launcher: whose variables ranks have, one of those in forked_ranks.py. "hosts": each rank is a host.
        environment: further variables of the processes.
        nodes: machines of a laboratory, with equally many ranks on each.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{scenario.__name__}-", dir=folder))
    command = program(scenario, folder, *arguments, device=device, seconds=seconds)
    finished, in_time = _run(command, world_size, folder, seconds, imports, launcher, environment or {}, nodes)
    assert in_time, f"not done within {seconds} s:\n" + report(finished)
    return finished


def program(scenario: Callable, folder: Path, *arguments, device: str = "cpu", seconds: float = 120) -> list[str]:
    """A program and its arguments that run a scenario on one rank, for any launcher.

    Each rank leaves `folder`/rankN.json.
    """
    call = {"function": scenario.__name__, "arguments": arguments}
    return _program(scenario.__code__.co_filename, folder, device, seconds, **call)


def _program(file: str, folder: Path, device: str, seconds: float, **what) -> list[str]:
    scenario = {"file": file, "device": device, "seconds": seconds, **what}
    (folder / "scenario.json").write_text(json.dumps(scenario, default=str))
    return [str(RUNNER), str(folder)]


def results(finished: list[Finished]) -> list:
    """Every rank's result, once it is sure that all ended well."""
    assert all(each.returncode == 0 for each in finished), report(finished)
    return [each.result for each in finished]


def report(finished: list[Finished]) -> str:
    """What every rank printed, for the message of a failed assertion."""
    return "\n".join(_report_of(rank, each) for rank, each in enumerate(finished))


def _report_of(rank: int, finished: Finished) -> str:
    ended = "was still running" if finished.returncode is None else f"exited with {finished.returncode}"
    return f"--- rank {rank} {ended}\n{finished.output}"


# ------------------------------------------------------------------ tests that share their processes


def ranks(*world_sizes: int, cpu: bool = True, gpu: bool = False, environment: dict[str, str] | None = None, **options):
    """Decorate a test of which every rank runs its own part, given a process group of all ranks.

    The selected tests of a file run one after another in the same processes, once for each world size and device. Each
    is reported by itself, with what failed on which rank. Further arguments of such a test come from
    `pytest.mark.parametrize` only, and go through JSON; it has no fixtures.

    Args:
        cpu: whether ranks run the test with `on_rank.device` the CPU.
        gpu: whether ranks run the test with `on_rank.device` a GPU, where there is one.
        environment, options: see `Ranks`.
    """
    options["environment"] = tuple((environment or {}).items())
    made = []
    devices = ["cpu"] * cpu + ["cuda"] * (gpu and torch.cuda.is_available())
    for device in devices:
        on, marks = (", cuda", pytest.mark.gpu) if device == "cuda" else ("", ())
        made += [pytest.param(Ranks(n, device, **options), id=f"{n} ranks{on}", marks=marks) for n in world_sizes]
    return pytest.mark.parametrize("group", made, indirect=True) if made else pytest.mark.skip(NO_GPU)


@dataclass(frozen=True)
class Ranks:
    """Processes that tests share.

    Attributes:
        start: name of the test file's function by which a rank joins the others; None: `on_rank.start`.
        seconds: time limit. All processes are killed when it is over.
        imports, launcher, environment: see `run_ranks`. `environment` has pairs.
    """

    world_size: int
    device: str = "cpu"
    start: str | None = None
    seconds: float = 200
    imports: str = IMPORTS
    launcher: str = "hosts"
    environment: tuple[tuple[str, str], ...] = ()


class Batch:
    """The selected tests of a file that share processes, which run when the first of them is asked for."""

    def __init__(self, file: Path, ranks: Ranks, tests: dict[str, Sequence], folder: Path):
        """`tests` has for each test's name its function's name and arguments."""
        self._file, self._ranks, self._tests, self._folder = file, ranks, tests, folder

    @cached_property
    def finished(self) -> list[Finished]:
        """How each rank ended."""
        each = self._ranks
        what = {"tests": self._tests, "start": each.start}
        command = _program(str(self._file), self._folder, each.device, each.seconds, **what)
        how = each.seconds, each.imports, each.launcher, dict(each.environment)
        return _run(command, each.world_size, self._folder, *how)[0]

    def check(self, name: str) -> None:
        """Fail unless a test passed on every rank. Says what failed on which rank."""
        last = name == list(self._tests)[-1]
        wrong = []
        for rank, each in enumerate(self.finished):
            outcomes = each.result or {}
            if name not in outcomes:
                wrong.append(f"It did not end on rank {rank}.\n{_report_of(rank, each)}")
            elif outcomes[name]:
                wrong.append(f"--- rank {rank}\n{outcomes[name]}")
            elif last and each.returncode != 0:
                wrong.append(f"All tests ended on rank {rank}, and then it failed.\n{_report_of(rank, each)}")
        if wrong:
            pytest.fail("\n".join(wrong), pytrace=False)


@pytest.fixture(scope="session")
def batches() -> dict[tuple[Path, Ranks], Batch]:
    """Batches by the file of their tests and the processes that these share."""
    return {}


@pytest.fixture
def group(request, batches, tmp_path_factory) -> Batch:
    """In pytest's process, what ranks found of the tests that `ranks` decorates. The ranks pass a process group."""
    key = request.path, request.param
    if key not in batches:
        batches[key] = Batch(*key, _selected(request.session, *key), tmp_path_factory.mktemp(request.path.stem))
    return batches[key]


def _selected(session: pytest.Session, file: Path, ranks: Ranks) -> dict[str, Sequence]:
    """The tests of a file that run in these processes, unless they are to be skipped."""
    tests = {}
    for item in session.items:
        arguments = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        skipped = any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif"))
        if item.path == file and arguments.pop("group", None) == ranks and not skipped:
            tests[item.name] = (item.originalname, arguments)
    return tests


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Report what ranks found of a test, in place of calling it in pytest's process."""
    batch = pyfuncitem.funcargs.get("group")
    if not isinstance(batch, Batch):
        return None
    batch.check(pyfuncitem.name)
    return True


# ------------------------------------------------------------------ processes


def _run(
    command: list[str],
    world_size: int,
    folder: Path,
    seconds: float,
    imports: str,
    launcher: str,
    environment: dict[str, str],
    nodes: Sequence[Node] = (),
) -> tuple[list[Finished], bool]:
    """Run a program once per rank. Returns how each rank ended, and whether all did within `seconds`."""
    environment = {**os.environ, **OF_ALL, **environment}
    options = ["--into", folder]
    if nodes:
        options += ["--nodes", ",".join([nodes[0].address, *(str(node.pid) for node in nodes)])]
        environment["GLOO_SOCKET_IFNAME"] = nodes[0].interface
    forks = [FORKED_RANKS, imports, *options, launcher, world_size, free_port(), *command]
    ended = _run_forks([*map(str, forks)], world_size, folder, seconds, environment)
    finished = []
    for rank, (code, when) in enumerate(ended):
        log, result = folder / f"rank{rank}.log", folder / f"rank{rank}.json"
        log = log if log.exists() else folder / "fork.log"
        result = json.loads(result.read_text()) if result.exists() else None
        finished.append(Finished(code, log.read_text(errors="replace"), result, when))
    return finished, all(code is not None for code, _ in ended)


def _run_forks(
    forks: list[str], world_size: int, folder: Path, seconds: float, environment: dict[str, str]
) -> list[tuple[int | None, float | None]]:
    """Run forked_ranks.py. Returns exit status and time of each rank."""
    process = forking.start([sys.executable, *forks], cwd=Path.cwd(), env=environment, log=folder / "fork.log")
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        forking.end(process)
    exits = folder / "exits.json"
    return json.loads(exits.read_text()) if exits.exists() else [(None, None)] * world_size
