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


@pytest.fixture(scope="module")
def two_ranks(request, tmp_path_factory) -> list[dict]:
    """What each of two ranks found of a module's `CASES`, which the module's `run` has them do."""
    return request.module.run(tmp_path_factory.mktemp("two_ranks"), request.module.CASES, ranks=2)


@pytest.fixture(scope="module")
def three_ranks(request, tmp_path_factory) -> list[dict]:
    """What each of three ranks found of those that `THREE_RANKS` names."""
    return request.module.run(tmp_path_factory.mktemp("three_ranks"), request.module.THREE_RANKS, ranks=3)
