"""What tests of the laboratory have in common."""

import os
import time
from pathlib import Path

import pytest

from benchmarks.laboratory.link import link
from ncz_plugins.core.errors import UnsupportedError


def _why_not() -> str:
    try:
        with link(1, "1gbit"):
            return ""
    except UnsupportedError as error:
        return str(error)


# The processes of ranks import test files too. They need not try.
_REASON = "" if "NCZ_TEST_RESULT" in os.environ else _why_not()
needs_links = pytest.mark.skipif(bool(_REASON), reason=_REASON)


def gone(pids: list[int], seconds: float = 30) -> None:
    """Wait until none of these processes is there any more, and fail if that does not come to pass."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"processes {left} are still there"
        time.sleep(0.05)
