"""What the tests of kernels are run with."""

import numpy as np
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


@pytest.fixture(autouse=True)
def errors_of_numpy():
    """Programs that debug their own arithmetic let numpy raise. Ours overflows and vanishes on purpose."""
    before = np.seterr(all="raise")
    yield
    np.seterr(**before)
