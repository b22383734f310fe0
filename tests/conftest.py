"""How `make test` shares the tests out among its processes, and what all tests may rely on."""

import gc
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path, PurePath

import pytest

# Before torch is imported, here and in what tests start. There is a process of tests for each core already. With more
# threads they wait for each other on busy cores, which takes a third more of the processor's time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# DeepSpeed looks for a GPU otherwise. Tests that are about one say so.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

# Torch's store asks the DNS for the name of each address that it connects to. A server that loses one of several
# questions at once would let a rank wait for 5 seconds, the resolver's time-out. Here that is 1 second, the least.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# What processes that tests start find: started/sitecustomize.py, which spares time, this package with its benchmarks,
# and what scenarios import.
TESTS = Path(__file__).parent
PATHS = [str(path) for path in (TESTS / "started", TESTS.parent, TESTS / "helpers")]
PATHS += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in PATHS]
os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)

# What torch is about to drop may not be used: not by the package, nor by tests, nor by programs that tests start, such
# as examples and those of the documentation. What packages do among themselves is theirs. For ranks,
# tests/helpers/run_scenario.py has this.
NOTHING_DEPRECATED = r"error::FutureWarning:(ncz_plugins|tests\.|test_)"
os.environ.setdefault("PYTHONWARNINGS", "error::FutureWarning:__main__")

# Under nohup, in a script's background and in some CI systems SIGINT is ignored, and children inherit that. Tests that
# interrupt a command would then wait for ever. Python's handler in this process gives children the system's default.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# They start processes of their own, as many as there are cores or more, and some of them measure how long something
# takes. So they run one after the other, until all else is done.
ONE_AFTER_THE_OTHER = {"convergence", "distributed", "fuzz", "soak"}
FIRST = "test_make.py"  # of the rest: two minutes in one piece, with which nobody could help at the end


# What pytest.importorskip and the tests' own marks say where a package is missing.
PACKAGE_IS_MISSING = re.compile(r"could not import '|\b(is|are) not installed\b", re.IGNORECASE)
# Packages that PyPI does not have for this Python: their tests are skipped even where all packages are required.
UNAVAILABLE = {"megatron", "torchft"} if sys.version_info >= (3, 14) else set()


def pytest_addoption(parser):
    help = "fail what would be skipped because a package is missing: `make test` has installed all of them"
    parser.addoption("--require-packages", action="store_true", help=help)


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", NOTHING_DEPRECATED)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Leave what is collected out of the search for garbage: it stays to the end, and each look at it takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """A file that is skipped because a package is missing is an error where all packages are required."""
    return require_packages(collector.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A test that is skipped because a package is missing fails where all packages are required."""
    return require_packages(item.config, (yield))


def require_packages(config, report):
    """`report`, failed if it is about a test that was skipped for want of a package, and packages are required."""
    if report.skipped and isinstance(report.longrepr, tuple) and config.getoption("--require-packages"):
        *_, reason = report.longrepr
        if PACKAGE_IS_MISSING.search(reason) and not any(package in reason for package in UNAVAILABLE):
            report.outcome, report.longrepr = "failed", f"{reason}, and --require-packages asks for it"
    return report


def pytest_unconfigure():
    """End the processes that tests kept."""
    import forking  # from a folder that `pythonpath` names, which is not there yet when this file is read

    forking.close()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which one process does not need
def pytest_xdist_make_scheduler(config, log):
    """Hand out files so that tests that compute fill the gaps of others, which wait: for ranks, launchers, time-outs.

    The first process begins with `ONE_AFTER_THE_OTHER`, the second with the rest, and there with `FIRST`. A third one
    begins at the end, with tests/unit, which start few processes. Whoever has none left helps the others. So it is with
    `--dist loadscope`, which `make test` asks for. Other ways of sharing out are those of pytest-xdist.
    """
    if config.getoption("dist") != "loadscope":
        return None

    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0]

        def _assign_work_unit(self, node) -> None:
            self.workqueue.move_to_end(next_file(node.gateway.id, self.workqueue), last=False)
            super()._assign_work_unit(node)

    return ByFolder(config, log)


def next_file(process: str, files: Mapping[str, object]) -> str:
    """Which of the `files` that are left a process of pytest-xdist begins next."""
    if process == "gw2":
        return next(reversed(files))
    own = [file for file in files if (PurePath(file).parts[1] in ONE_AFTER_THE_OTHER) == (process == "gw0")]
    return next((file for file in own if PurePath(file).name == FIRST), next(iter(own or files)))
