"""What tests of the laboratory have in common."""

import os

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
