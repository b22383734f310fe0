"""Named checks that all ranks of a worker run in turn: one that fails is recorded, and does not hide those after it."""

import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from common import finish, leave

PATIENCE = timedelta(seconds=30)  # how long ranks wait in a check for one that has failed already

_registered: dict[str, Callable] = {}


def check(function: Callable) -> Callable:
    """Register a check, which takes a process group of all ranks. `processes.names` looks for this decorator."""
    _registered[function.__name__] = function
    return function


def run_checks() -> None:
    """Run every check on this rank, in the order in which they stand in the worker.

    Leaves a dict for the test: for each check an empty string, or the traceback of its failure on this rank. Every
    check has a process group of its own, so that collectives which a failed check has not finished disturb no other.
    """
    outcomes = {}
    for name, function in _registered.items():
        group = dist.new_group(timeout=PATIENCE)
        try:
            function(group)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
        leave(outcomes)  # at once: a later check may end the process
        # The next one starts when all are done with this one.
        dist.all_reduce(torch.zeros(1))
    finish(outcomes)


def same_on_all_ranks(value: object, group: dist.ProcessGroup) -> None:
    """Fail on every rank unless all have the same `value`."""
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group)
    assert all(each == everyone[0] for each in everyone), everyone


def raises(error: type, call: Callable, *words: str) -> None:
    """Fail unless `call` raises `error` with all `words` in its message."""
    try:
        call()
    except error as caught:
        assert all(word in str(caught) for word in words), caught
    else:
        raise AssertionError(f"no {error.__name__}")
