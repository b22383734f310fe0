"""Errors that this package raises. All derive from `NczError`.

Each message names the object, the value and the remedy. Each docstring below says when a class is raised and what to
do. The second base classes (ValueError, RuntimeError) let code that knows nothing of this package catch them.
"""

from __future__ import annotations

import traceback
from copy import copy


class NczError(Exception):
    """Base class of all errors of this package."""


class ConfigError(NczError, ValueError):
    """Configuration that is missing, unreadable or invalid.

    Raised at start-up, before any communication. The message lists all problems: dotted key, value given, values
    allowed. Remedy: correct the file. `ncz check FILE` repeats the check without starting a training.
    """


class BoundError(NczError, ValueError):
    """Error bound that is too fine for 32-bit codes.

    The message names the smallest bound that works. Remedy: use that bound or a larger one, another mode, or
    `quantizer.kind: lossless`.
    """


class FrameError(NczError):
    """Received or stored bytes that this version can't read: damaged, truncated or from another program.

    Nothing past the damage was decoded; on a GPU the result is undefined. Remedy: run the same version on all ranks,
    and let nothing else write to the same process group. If the error comes back, suspect the hardware.
    """


class PatchKeyError(FrameError, ValueError):
    """Patch of weights whose keyed checksum is not that of the key, or key on one side only. A kind of FrameError.

    Nothing of the patch was read. Remedy: give the publisher and all readers the same key. If they have the same one,
    somebody changed the patch: get it again.
    """


class MismatchError(NczError, RuntimeError):
    """Ranks that disagree on the configuration, the version, the order of calls, a size or a dtype.

    The message names the ranks that differ, and in what. Remedy: give all ranks the same configuration and the same
    sequence of collectives.
    """


class PeerError(NczError, RuntimeError):
    """Another rank that died, closed its connection, or did not answer within the time-out.

    Remedy: read that rank's log first; its failure is the cause. If the rank was only slow, raise
    `transport.timeout_seconds` or the time-out of the process group.
    """


class UnsupportedError(NczError, TypeError):
    """Request that can't be compressed, where silently sending it uncompressed would be wrong.

    Examples: a tensor on a device without kernels, a read-only array, a framework feature that bypasses the compressed
    path, a limit on open files below the number of connections. Remedy: the message names the setting or limit to
    change, or what to call instead.
    """


class AccuracyError(NczError):
    """Verified compressed sum that is too far from the uncompressed one, with `guard.on_alarm: stop`.

    Raised at the end of the step, on all ranks of the group. Remedy: a smaller `quantizer.value`, for all tensors or by
    a policy for the tensor that the message names; or other thresholds in `guard`.
    """


class PartlyAppliedError(NczError, RuntimeError):
    """Weights of which some are of the new version and others are not, because writing a staged patch failed.

    The message names how many tensors are new, and the one at which writing stopped. Remedy: ask for a patch that holds
    a whole version, and apply that.

    Attributes:
        new: names of the tensors that are of the new version.
        mixed: name of the tensor that may be partly of either.
    """

    def __init__(self, new: list[str], mixed: str, cause: BaseException):
        super().__init__(
            f"applying a patch failed: {len(new)} tensors are new, {mixed} may be partly new, all others are old: "
            f"{cause}; apply a patch that holds a whole version"
        )
        self.new, self.mixed = new, mixed


class OutOfMemoryError(NczError, MemoryError):
    """No memory left for frames or results. The other ranks raise PeerError, in the same call or in the next one.

    Remedy: smaller frames (`transport.frame_bytes`), smaller calls, or more memory for the process.
    """


def refused(collective: str, rank: int) -> MismatchError:
    """The error on ranks that wait for a rank which can't make its call."""
    return MismatchError(f"{collective}: rank {rank} refused its call; the error that it raised says why")


def fresh(error: BaseException) -> BaseException:
    """A copy of a stored error, to raise instead of the error itself.

    The traceback of a raised error collects frames, and these refer to tensors. A stored error must not keep the
    tensors alive, and would form a reference cycle if one of the frames holds the object that stores it.

    Returns the error itself if its class can't be copied.
    """
    try:
        copied = copy(error)
    except Exception:  # a class whose constructor takes other arguments than `args`
        return error
    copied.__cause__, copied.__suppress_context__ = error.__cause__, error.__suppress_context__
    return copied.with_traceback(error.__traceback__)


def without_frames(error: BaseException) -> BaseException:
    """A copy of an error without traceback and cause, to store while the error itself is raised further."""
    copied = fresh(error)
    copied.__cause__ = None
    return copied.with_traceback(None)


def forget_tensors(error: BaseException) -> None:
    """Clear the local variables in an error's tracebacks, so that whoever stores the error keeps no tensors alive."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


class ErrorTranslation:
    """Context manager that raises an error of this package in place of another error.

    A class and no generator, because every call enters several of these and generators are slower.

    Args:
        subject: first words of the message.
    """

    __slots__ = ("subject",)

    def __init__(self, subject: str):
        self.subject = subject

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type, error: BaseException | None, traceback) -> None:
        if error is not None and (translated := self.translated(error)) is not None:
            try:
                raise translated from error
            finally:
                del translated  # its traceback refers to this frame: the cycle would keep the caller's tensors alive

    def translated(self, error: BaseException) -> NczError | None:
        """The error to raise in place of `error`; None: raise `error` itself."""
        raise NotImplementedError


class memory_errors(ErrorTranslation):
    """Context manager that turns the out-of-memory errors of Python, torch and CUDA into OutOfMemoryError.

    Args:
        subject: what was being done.
    """

    __slots__ = ()

    def translated(self, error):
        if isinstance(error, NczError) or not isinstance(error, (MemoryError, RuntimeError)):
            return None
        words = str(error)
        if not isinstance(error, MemoryError) and "allocate memory" not in words and "out of memory" not in words:
            return None
        return OutOfMemoryError(
            f"{self.subject}: no memory left: {words or 'none for a Python object'}. Use a smaller "
            "transport.frame_bytes or smaller tensors, or give this process more memory"
        )
