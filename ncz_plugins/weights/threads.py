"""Frames are independent: threads hash, code and decode them. Kernels release the GIL."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from threading import Barrier, Lock
from typing import TypeVar

import torch

from .boxes import FRAME_ELEMENTS

_Task, _Result = TypeVar("_Task"), TypeVar("_Result")

_GROUPS_AHEAD = 2  # of each thread: what it works on, and what it has done
_counting = Lock()  # held while torch's number of threads is not the program's


def in_order(
    function: Callable[[_Task], _Result], tasks: Iterable[_Task], elements: Callable[[_Task], int], on_host: bool = True
) -> Iterator[_Result]:
    """The result of each task, in the order of the tasks, from as many threads as torch computes with.

    Threads run ahead of what is taken, by a few frames each. An error is raised in its task's place, and ends all.

    Args:
        elements: how many elements a task covers. Small tasks share a thread's turn.
        on_host: False keeps all tasks in this thread. Threads of their own don't follow this thread's CUDA stream.
    """
    threads = _threads_of_torch() if on_host else 1
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


def _threads_of_torch() -> int:
    with _counting:
        return torch.get_num_threads()


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads in each of which torch computes on one core."""
    pool = ThreadPoolExecutor(count, "ncz-weights")
    try:
        # A thread keeps the number of cores that torch has when it first uses torch. With the usual number each would
        # start as many threads again. Threads of the program that begin meanwhile get one core, so this is short.
        all_there = Barrier(count)
        with _counting:
            torch.set_num_threads(1)
            try:
                list(pool.map(_count_cores, [all_there] * count))
            finally:
                torch.set_num_threads(count)
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _count_cores(all_there: Barrier) -> None:
    """Have torch look up its number of cores in this thread, once all threads have come: no thread does it twice."""
    torch.get_num_threads()
    all_there.wait()
