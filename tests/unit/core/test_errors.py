"""Typed errors: code that knows nothing of this package catches what it expects."""

import inspect

import pytest

from ncz_plugins.core import errors
from ncz_plugins.core.errors import NczError, OutOfMemoryError, memory_errors

CLASSES = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, NczError)]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_each_is_caught_as_ncz_error_and_says_what_to_do(error):
    assert issubclass(error, NczError)
    assert error is NczError or "Remedy" in error.__doc__


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (errors.ConfigError, ValueError),
        (errors.BoundError, ValueError),
        (errors.UnsupportedError, TypeError),
        (errors.OutOfMemoryError, MemoryError),
        (errors.MismatchError, RuntimeError),  # as torch.distributed and Horovod raise
        (errors.PeerError, RuntimeError),
    ],
)
def test_standard_classes_catch_them_too(error, base):
    with pytest.raises(base):
        raise error("no")


@pytest.mark.parametrize(
    "raised",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError("CUDA out of memory")],
)
def test_no_memory_has_one_type_whoever_ran_out_of_it(raised):
    with pytest.raises(OutOfMemoryError, match="all_reduce: no memory left") as caught, memory_errors("all_reduce"):
        raise raised
    assert caught.value.__cause__ is raised


@pytest.mark.parametrize(
    "raised",
    [RuntimeError("connection closed"), ValueError("allocate memory"), errors.PeerError("that rank is out of memory")],
)
def test_other_errors_stay_what_they_are(raised):
    with pytest.raises(type(raised)) as caught, memory_errors("all_reduce"):
        raise raised
    assert caught.value is raised
