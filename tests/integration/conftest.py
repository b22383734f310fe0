"""Fixtures of the integration tests."""

import os
import subprocess

import pytest
from scenarios import batches, group, pytest_pyfunc_call  # noqa: F401

WITH_LOOPBACK = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


@pytest.fixture(scope="session")
def private_network() -> list[str]:
    """What to put before a command so that it has a loopback interface of its own."""
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    prefix = [*unshare, *WITH_LOOPBACK]
    try:
        done = subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        pytest.skip(f"no private network namespace: {error}")
    if done.returncode:
        pytest.skip(f"no private network namespace: {' '.join(prefix)} true: {done.stderr.strip()}")
    return prefix
