"""Calls on a GPU whose launches are recorded and replayed, so that the host has next to nothing to do.

Frameworks pass the same tensors again and again: DDP's and DeepSpeed's buckets. Once the lengths of frames are forecast
(see forecast.py), a call launches the same kernels with the same arguments as the one before, but for the
random numbers. So launches are recorded in stages, between which the host acts: it gathers, and learns the outcome.

1. `RecordedCalls.of` finds what was recorded for the addresses, settings and lengths of a call.
2. A call passes each stage to `RecordedCall.queue`, which makes the launches of the stage, and records or replays them.
3. `RecordedCall.finish` ends the recording of a call that went well. An error forgets everything.

A call that can't be replayed makes its launches as if there were no recordings, and is counted with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from ...kernels.backend import GpuBackend, Recording
from ...kernels.format import Noise
from .statistics import Counters

ENVIRONMENT = "NCZ_REPLAY"  # "0" turns recording off
_MOST_CALLS = 256  # that are known by their addresses

_Result = TypeVar("_Result")


class RecordedCalls:
    """What was recorded of the calls on one GPU, by their keys. For calls that run one after another.

    Args:
        backend: the kernels.
        device: the GPU.
    """

    def __init__(self, backend: GpuBackend, device: torch.device):
        self._backend = backend
        self._device = device
        self._arena = backend.arena(device)
        self._calls: dict[Hashable, RecordedCall] = {}  # the last used last

    def of(self, key: Hashable, given: object, counters: Counters) -> RecordedCall:
        """The launches of calls like this one: to be replayed, to be recorded now, or neither.

        Args:
            key: addresses of the call's tensors, and what else a call with these addresses never changes.
            given: all else that arguments of launches follow from, compared by `==`. A call whose `key` or `given` is
                new is not recorded, as it may not come again.
            counters: count the call as replayed, or why it is not.
        """
        found = self._calls.pop(key, None)
        if found is None:
            reason, found = "new addresses", RecordedCall(self._backend, self._arena, given)
        else:
            reason = found.begin(given)
        self._calls[key] = found
        if len(self._calls) > _MOST_CALLS:
            del self._calls[next(iter(self._calls))]
        if reason is None:
            counters.replayed_calls = 1
        else:
            counters.not_replayed[reason] = 1
        return found

    def forget(self) -> None:
        """Forget all recordings, and let go of their memory."""
        self._calls.clear()
        self._arena = self._backend.arena(self._device)


class RecordedCall:
    """The launches of one call, by stage."""

    def __init__(self, backend: GpuBackend | None, arena: object | None, given: object):
        self._backend = backend
        self._arena = arena
        self._last_given = given
        self._given: object = None  # of what was recorded
        self._stages: dict[Hashable, tuple[Recording, object]] = {}
        self._is_complete = False
        self._is_recording = False
        self._is_replayed = False

    def begin(self, given: object) -> str | None:
        """Begin a call. Returns None if it is replayed, or why it is not."""
        self._is_replayed = self._is_complete and self._given == given
        is_new, self._last_given = self._last_given != given, given
        if is_new and not self._is_replayed:
            return "other lengths"
        self._arena.restart()
        if self._is_replayed:
            return None
        self._stages.clear()
        self._given, self._is_complete, self._is_recording = given, False, True
        return "recorded"

    def queue(self, stage: Hashable, work: Callable[[], _Result], noise: Noise | None = None) -> _Result:
        """Make the launches of a stage.

        Args:
            stage: its name.
            work: makes launches, and queues nothing else. Its result depends on `given` alone, and holds no tensors of
                the caller, which would live as long as the recording.
            noise: the random numbers in the launches.

        Returns what `work` returned when it was recorded, or else returns now.
        """
        if self._is_replayed and stage in self._stages:
            recording, result = self._stages[stage]
            recording.replay(noise)
            return result
        if not self._is_recording:
            return work()
        with self._backend.recording(self._arena) as recording:
            result = work()
        self._stages[stage] = recording, result
        return result

    def finish(self) -> None:
        """End the recording. Later stages of the call are launched without one."""
        self._is_complete, self._is_recording = self._is_complete or self._is_recording, False


NEVER = RecordedCall(None, None, None)  # of calls that are neither recorded nor replayed
