"""How `make test` shares the tests out between two processes."""

from pathlib import PurePath

import pytest

# They start processes of their own, as many as there are cores or more, so that they run one after the other.
STARTING_PROCESSES = {"convergence", "distributed", "fuzz", "integration", "soak"}


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which one process does not need
def pytest_xdist_make_scheduler(config, log):
    """One process takes all that start processes, meanwhile the other takes the rest, file by file."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = PurePath(nodeid.partition("::")[0])
            folder = file.parts[1]
            return "processes" if folder in STARTING_PROCESSES else "cuda" if folder == "cuda" else str(file)

    return ByFolder(config, log)
