"""Frames are independent: threads hash, code and decode them. Kernels and numpy release the GIL."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import TypeVar

from .boxes import FRAME_ELEMENTS

_Task, _Result = TypeVar("_Task"), TypeVar("_Result")

_GROUPS_AHEAD = 2  # of each thread: what it works on, and what it has done


def in_order(
    function: Callable[[_Task], _Result], tasks: Iterable[_Task], elements: Callable[[_Task], int], on_host: bool = True
) -> Iterator[_Result]:
    """The result of each task, in the order of the tasks, from several threads, see `_thread_count`.

    Threads run ahead of what is taken, by a few frames each. An error is raised in its task's place, and ends all.

    Args:
        elements: how many elements a task covers. Small tasks share a thread's turn.
        on_host: False keeps all tasks in this thread. Threads of their own don't follow this thread's CUDA stream.
    """
    threads = _thread_count() if on_host else 1
    groups = _grouped(tasks, elements)
    first = list(islice(groups, 2))
    if threads == 1 or len(first) < 2:
        for group in chain(first, groups):
            yield from map(function, group)
        return
    pool, waiting = ThreadPoolExecutor(threads, "ncz-weights"), deque()
    try:
        for group in chain(first, groups):
            waiting.append(pool.submit(_all, function, group))
            if len(waiting) == _GROUPS_AHEAD * threads:
                yield from _taken(waiting.popleft())
        while waiting:
            yield from _taken(waiting.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


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


def _thread_count() -> int:
    """As many as torch computes with; without torch, one for each core."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.get_num_threads()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
