"""Fixtures of the integration tests."""

import subprocess
import sys

import pytest
from repository import FORKED_RANKS
from scenarios import batches, group, pytest_pyfunc_call  # noqa: F401


@pytest.fixture(scope="session")
def private_network() -> None:
    """Skip tests whose ranks run on a network of their own where there can be none."""
    program = "import forked_ranks; forked_ranks.enter_private_network()"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=FORKED_RANKS.parent, capture_output=True, text=True, timeout=30)
    if done.returncode:
        pytest.skip(f"no private network namespace: {done.stderr.strip()}")
