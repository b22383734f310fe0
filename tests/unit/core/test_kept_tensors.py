"""A tensor goes with its last reference, also where Python collects no garbage, as in many large trainings."""

import gc
import time
import weakref

import pytest
import torch
from ranks import play_communicators

from ncz_plugins.core.errors import NczError

SIZES = (1000, 100_000, 3_000_000)  # in one message, on the caller's thread, on a thread of its own
CONFIG = {"quantizer": {"kind": "error_bound"}, "transport": {"min_bytes": 0, "timeout_seconds": 30}}
PLAIN = CONFIG | {"transport": {"min_bytes": "never", "timeout_seconds": 30}}


@pytest.fixture(autouse=True, scope="module")
def no_garbage_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left(watched: list[weakref.ref], seconds: float = 5.0) -> int:
    """How many of these are still there in the end: a thread may take a moment to let go of what it has done."""
    deadline = time.monotonic() + seconds
    while (count := sum(each() is not None for each in watched)) and time.monotonic() < deadline:
        time.sleep(0.001)
    return count


def watch(*things: object) -> list[weakref.ref]:
    return [weakref.ref(each) for each in things]


# ---------------------------------------------------------------- calls that succeed


def waits(communicator, size: int) -> list[weakref.ref]:
    tensor = torch.ones(size)
    communicator.all_reduce(tensor)
    handle = communicator.all_reduce(tensor, async_op=True)
    handle.wait()
    return watch(tensor, handle)


def asks_for_the_future(communicator, size: int) -> list[weakref.ref]:
    tensor = torch.ones(size)
    handle = communicator.all_reduce(tensor, async_op=True)
    handle.get_future().wait()
    handle.get_future().wait()  # of what is over
    return watch(tensor, handle)


def chains_futures(communicator, size: int) -> list[weakref.ref]:
    tensor = torch.ones(size)
    handle = communicator.all_reduce(tensor, async_op=True)
    future = handle.get_future().then(lambda done: done.value()[0]).then(lambda done: (handle, done.value()))
    future.wait()
    return watch(tensor, handle)


def coalesces(communicator, size: int) -> list[weakref.ref]:
    tensors = [torch.ones(size), torch.ones(size // 2), torch.ones(size, dtype=torch.float64)]
    handle = communicator.all_reduce_coalesced(tensors, async_op=True)
    handle.get_future().then(lambda done: done.value()).wait()
    return watch(*tensors, handle)


def scatters_and_gathers(communicator, size: int) -> list[weakref.ref]:
    part, whole = torch.ones(size), torch.ones(2 * size)
    for start in (communicator.reduce_scatter_single, communicator.all_gather_single):
        given = (part, whole) if start == communicator.reduce_scatter_single else (whole, part)
        handle = start(*given, async_op=True)
        handle.get_future().wait()
    return watch(part, whole, handle)


SUCCESSES = [waits, asks_for_the_future, chains_futures, coalesces, scatters_and_gathers]


@pytest.mark.parametrize("config", [CONFIG, PLAIN], ids=["compressed", "plain"])
def test_what_calls_were_given_goes_with_its_last_reference(config):
    def body(communicator):
        return {(call.__name__, size): left(call(communicator, size)) for call in SUCCESSES for size in SIZES}

    for found in play_communicators(2, config, body):
        assert not any(found.values()), found


# ---------------------------------------------------------------- calls that fail


def fails_at_once(communicator, tensor) -> None:
    communicator.all_reduce(tensor)


def fails_when_waited_for(communicator, tensor) -> None:
    handle = communicator.all_reduce(tensor, async_op=True)
    for _ in range(2):
        with pytest.raises(NczError):
            handle.wait()
    communicator.all_reduce(tensor)  # which raises what ended the communicator


def fails_by_its_future(communicator, tensor) -> None:
    future = communicator.all_reduce(tensor, async_op=True).get_future()
    with pytest.raises(NczError):
        future.wait()
    future.wait()


def fails_among_several(communicator, tensor) -> None:
    future = communicator.all_reduce_coalesced([tensor, tensor.double()], async_op=True).get_future()
    future.wait()


def attempt(call, communicator, size: int) -> list[weakref.ref]:
    tensor = torch.ones(size)
    watched = watch(tensor)
    try:
        call(communicator, tensor)
    except NczError as error:
        assert error.__traceback__ is not None
        return watched
    raise AssertionError("no error")


@pytest.mark.parametrize("config", [CONFIG, PLAIN], ids=["compressed", "plain"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("call", [fails_at_once, fails_when_waited_for, fails_by_its_future, fails_among_several])
def test_errors_keep_neither_tensors_nor_the_communicator(call, size, config):
    """Of ranks that make different calls. The communicator keeps what ended it."""
    communicators = []

    def body(communicator):
        communicators.extend(watch(communicator))
        return left(attempt(call, communicator, size + communicator.rank)), type(communicator.error).__name__

    assert play_communicators(2, config, body) == [(0, "MismatchError")] * 2
    assert not left(communicators)


@pytest.mark.parametrize("size", SIZES)
def test_messages_that_never_came_keep_nothing(size):
    def body(communicator):
        if communicator.rank == 1:
            communicator.abort()
            return 0
        return left(attempt(fails_by_its_future, communicator, size))

    assert play_communicators(2, CONFIG, body) == [0, 0]
