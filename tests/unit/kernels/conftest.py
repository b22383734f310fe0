"""What the tests of kernels are run with."""

import pytest
from samples import COMPILED

from ncz_plugins import kernels


@pytest.fixture(params=COMPILED)
def backend(request):
    """The compiled kernels that work here, each in its turn."""
    return kernels.load(request.param)


@pytest.fixture(params=["reference", *COMPILED])
def any_backend(request):
    """The same, and the numpy reference."""
    return kernels.load(request.param)
