"""Every error this package raises on purpose. All derive from `NczError`.

Each message names the thing, the value and the remedy; the docstrings here say when a class is
used and what to do about it. The standard base classes (ValueError, RuntimeError) are there so that
code which knows nothing of this package still catches what it expects.
"""

from __future__ import annotations

import traceback
from copy import copy


class NczError(Exception):
    """Base of all errors of this package: catch this one to catch them all."""


class ConfigError(NczError, ValueError):
    """A configuration is missing, unreadable or invalid.

    Raised at start-up, before any communication. The message lists every problem at once: the
    dotted key, the value given, what is allowed. Remedy: correct the file; `ncz check FILE`
    repeats the check without starting a training.
    """


class BoundError(NczError, ValueError):
    """A tensor can't be compressed within the error bound that was asked for: it is too fine for 32-bit codes.

    The message names the smallest bound that would do. Remedy: use that or a larger one, another
    mode, or `quantizer.kind: lossless`.
    """


class FrameError(NczError):
    """Received or stored bytes are nothing this version can read: damaged, truncated or foreign.

    Nothing was decoded past the damage; on a GPU, what the result holds is undefined. Remedy: make sure that all ranks
    run the same version and that nothing else writes to the same process group; a repeated error hints at faulty
    hardware.
    """


class MismatchError(NczError, RuntimeError):
    """The ranks disagree: on the configuration, the version, the order of calls, a size or a dtype.

    Remedy: give every rank the same configuration and the same sequence of collectives; the
    message says which ranks differ and in what.
    """


class PeerError(NczError, RuntimeError):
    """Another rank is dead, closed the connection or did not answer within the time-out.

    Remedy: look at that rank's own log first, its failure is the cause and this is the echo. If it
    was only slow, raise `transport.timeout_seconds` or the process group's time-out.
    """


class UnsupportedError(NczError, TypeError):
    """What was asked for cannot be compressed, and sending it uncompressed in silence is refused.

    For instance a tensor on a device that has no kernels, a strided tensor, a framework feature
    that goes round the compressed path, or a process that may not open as many descriptors as
    connections take. Remedy: the message names the setting or the limit to change, or what to call
    instead.
    """


class AccuracyError(NczError):
    """A compressed sum was verified and is too far from the uncompressed one, and `guard.on_alarm` is `stop`.

    Raised at the end of the step, on every rank of the group alike. Remedy: a smaller `quantizer.value`, in general or
    by a policy for the tensor that the message names, or thresholds in `guard` that fit.
    """


class OutOfMemoryError(NczError, MemoryError):
    """There was no memory for frames or results; the other ranks get a PeerError, in the same call or in the next.

    Remedy: smaller frames (`transport.frame_bytes`), smaller calls, or more memory for the process.
    """


def fresh(error: BaseException) -> BaseException:
    """A copy of an error that is kept, to be raised in its place.

    The traceback of what is raised collects the frames that it passes through, with the tensors in their variables. An
    error that somebody keeps must not hold on to these, and often belongs to what they hold: a circle.
    """
    try:
        copied = copy(error)
    except Exception:  # its class takes other arguments than it keeps
        return error
    copied.__cause__, copied.__suppress_context__ = error.__cause__, error.__suppress_context__
    return copied.with_traceback(error.__traceback__)


def without_frames(error: BaseException) -> BaseException:
    """A copy of an error that is about to pass through frames, to be kept: without its traceback and its cause."""
    copied = fresh(error)
    copied.__cause__ = None
    return copied.with_traceback(None)


def forget_tensors(error: BaseException) -> None:
    """Clear the frames that an exception went through: who keeps it must not keep the tensors of the call."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


class ErrorTranslation:
    """A context that raises an error of this package in place of another one. Each call enters some: no generators.

    Args:
        subject: what the message's first words name.
    """

    __slots__ = ("subject",)

    def __init__(self, subject: str):
        self.subject = subject

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error: BaseException | None, traceback) -> None:
        if error is not None and (translated := self.translated(error)) is not None:
            try:
                raise translated from error
            finally:
                del translated  # its traceback has this frame: a circle, which would keep the caller's tensors

    def translated(self, error: BaseException) -> NczError | None:
        """What to raise in place of an error; None: itself."""
        raise NotImplementedError


class memory_errors(ErrorTranslation):
    """Turns what Python, torch and CUDA raise where memory is short into OutOfMemoryError.

    Its subject is what is being done.
    """

    __slots__ = ()

    def translated(self, error):
        if isinstance(error, NczError) or not isinstance(error, (MemoryError, RuntimeError)):
            return None
        words = str(error)
        if not isinstance(error, MemoryError) and "allocate memory" not in words and "out of memory" not in words:
            return None
        return OutOfMemoryError(
            f"{self.subject}: no memory left: {words or 'none for an object of Python'}. Use a smaller "
            "transport.frame_bytes or smaller tensors, or give this process more memory"
        )
