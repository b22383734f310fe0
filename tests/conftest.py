"""How `make test` shares the tests out between two processes."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# They start processes of their own, as many as there are cores or more, so that they run one after the other.
STARTING_PROCESSES = {"convergence", "distributed", "fuzz", "integration", "soak"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process takes all that start processes, meanwhile the other takes the rest, file by file."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        group = "processes" if folder in STARTING_PROCESSES else "cuda" if folder == "cuda" else item.path.name
        item.add_marker(pytest.mark.xdist_group(group))
