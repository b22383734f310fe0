"""What tests in these folders need of pytest: see tests/helpers/scenarios.py."""

from scenarios import batches, group, pytest_pyfunc_call  # noqa: F401
