"""Frames are independent: threads hash, code and decode them. Kernels release the GIL."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from typing import TypeVar

import torch

from .boxes import FRAME_ELEMENTS

_Task, _Result = TypeVar("_Task"), TypeVar("_Result")

_GROUPS_AHEAD = 2  # of each thread: what it works on, and what it has done


def in_order(
    function: Callable[[_Task], _Result], tasks: Iterable[_Task], elements: Callable[[_Task], int], on_host: bool = True
) -> Iterator[_Result]:
    """The result of each task, in the order of the tasks, from as many threads as torch computes with.

    Threads run ahead of what is taken, by a few frames each. An error is raised in its task's place, and ends all.

    Args:
        elements: how many elements a task covers. Small tasks share a thread's turn.
        on_host: False keeps all tasks in this thread. Threads of their own don't follow this thread's CUDA stream.
    """
    threads = torch.get_num_threads() if on_host else 1
    groups = _grouped(tasks, elements)
    first = list(islice(groups, 2))
    if threads == 1 or len(first) < 2:
        for group in chain(first, groups):
            yield from map(function, group)
        return
    with _threads(threads) as pool:
        waiting = deque()
        for group in chain(first, groups):
            waiting.append(pool.submit(_all, function, group))
            if len(waiting) == _GROUPS_AHEAD * threads:
                yield from _taken(waiting.popleft())
        while waiting:
            yield from _taken(waiting.popleft())


def _grouped(tasks: Iterable[_Task], elements: Callable[[_Task], int]) -> Iterator[list[_Task]]:
    """Tasks in a row that cover up to a frame together."""
    group, covered = [], 0
    for task in tasks:
        size = elements(task)
        if group and covered + size > FRAME_ELEMENTS:
            yield group
            group, covered = [], 0
        group.append(task)
        covered += size
    if group:
        yield group


def _all(function: Callable[[_Task], _Result], group: list[_Task]) -> tuple[list[_Result], Exception | None]:
    """The results up to the first error, and that error."""
    results = []
    try:
        for task in group:
            results.append(function(task))
    except Exception as error:
        return results, error
    return results, None


def _taken(done: Future) -> Iterator:
    results, error = done.result()
    yield from results
    if error is not None:
        raise error


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads in each of which torch computes on one core."""
    pool = ThreadPoolExecutor(count, "ncz-weights")
    # A thread takes this number when it first uses torch. With the usual one each would start as many threads again.
    torch.set_num_threads(1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(count)
