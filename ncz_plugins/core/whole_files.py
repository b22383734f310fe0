"""Output files. A plain file is replaced as a whole. Devices, FIFOs and descriptors are written to.

Symbolic links are followed, also those whose target is missing. `-` is standard output.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import BinaryIO, NamedTuple

STANDARD_OUTPUT = "-"
_STANDARD_OUTPUT_DESCRIPTOR = 1
_MOST_LINKS = 40  # that Linux follows
# What replacing a file ends with in a folder of somebody else, for a file of somebody else, and for a mount point.
_NOT_REPLACEABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY}


class Target(NamedTuple):
    """Where output goes that is meant for a path.

    Attributes:
        path: of a plain file: its own, without links.
        descriptor: of this process, if the path names one.
        found: what is there; None for a file that is to be made, and for a descriptor.
    """

    path: str
    descriptor: int | None
    found: os.stat_result | None

    @property
    def is_plain(self) -> bool:
        """Whether it is a file that is replaced as a whole, or made."""
        return self.descriptor is None and (self.found is None or stat.S_ISREG(self.found.st_mode))

    @property
    def is_standard_output(self) -> bool:
        return self.descriptor == _STANDARD_OUTPUT_DESCRIPTOR

    @property
    def is_protected(self) -> bool:
        """Whether something is there that this process may not write, although it may be able to replace it."""
        return self.found is not None and not os.access(self.path, os.W_OK)


def target_of(path: str | os.PathLike) -> Target:
    """Where output for `path` goes. Raises OSError for a folder, and where nothing can be there."""
    path = os.fsdecode(path)
    descriptor = _STANDARD_OUTPUT_DESCRIPTOR if path == STANDARD_OUTPUT else _descriptor(path)
    if descriptor is not None:
        return Target(path, descriptor, None)
    try:
        found = os.stat(path or os.curdir)
    except FileNotFoundError:
        found = None
    if path.endswith(os.sep) or (found is not None and stat.S_ISDIR(found.st_mode)):
        raise IsADirectoryError(errno.EISDIR, "is a folder: name a file in it", path)
    if found is not None and not stat.S_ISREG(found.st_mode):
        return Target(path, None, found)
    return Target(os.path.realpath(path), None, found)


def require_writable(path: str | os.PathLike) -> None:
    """Raise OSError, before any work, if `write_whole` can't write there."""
    target = target_of(path)
    missing = target.is_plain and target.found is None
    if target.is_protected or (missing and not os.access(os.path.dirname(target.path), os.W_OK)):
        raise PermissionError(errno.EACCES, "no file can be made there" if missing else "may not be written", path)


def write_whole(path: str | os.PathLike, data: bytes | str) -> None:
    """Write a file. Text is written as UTF-8. Raises OSError.

    Whoever reads a plain file finds all of the new one, or all of the old one, which a full disk leaves as it was. An
    existing file keeps its mode and owner. Where it can't be replaced, as it is a mount point or lies in a folder of
    somebody else, it is overwritten in place.
    """
    data = data.encode() if isinstance(data, str) else data
    target = target_of(path)
    if not target.is_plain:
        with _opened(target) as stream:
            stream.write(data)
        return
    if target.is_protected:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    try:
        with _replacing(target) as file:
            file.write(data)
    except OSError as error:
        if target.found is None or error.errno not in _NOT_REPLACEABLE:
            raise
        _overwrite(target.path, data)


def replacing(path: str | os.PathLike) -> AbstractContextManager[BinaryIO]:
    """A context that yields a file, to be written piece by piece, which then takes the place of the plain one.

    If the block raises, what was there stays. Raises OSError.
    """
    return _replacing(target_of(path))


def open_to_append(path: str | os.PathLike) -> BinaryIO:
    """A file at whose end a long-running program writes. Only a plain one can also be read. Raises OSError.

    A FIFO that nobody reads is an error: the program would wait for a reader without a word.
    """
    target = target_of(path)
    return open(target.path, "a+b") if target.is_plain else _opened(target, os.O_NONBLOCK)


def _descriptor(path: str) -> int | None:
    """The descriptor of this process that a path such as /dev/stdout or /dev/fd/3 names, if it does.

    Opening such a path would write at the start of a plain file, over what the shell's >> and other programs wrote.
    """
    ours = os.path.realpath("/dev/fd")
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(path)
        folder = os.path.realpath(folder or os.curdir)
        if folder == ours and name.isdecimal():
            return int(name)
        path = os.path.join(folder, name)
        if not os.path.islink(path):
            return None
        path = os.path.join(folder, os.readlink(path))
    return None


def _opened(target: Target, flags: int = 0) -> BinaryIO:
    """A stream to what is no plain file."""
    if target.descriptor is None:
        try:
            descriptor = os.open(target.path, os.O_WRONLY | flags)
        except OSError as error:
            if error.errno == errno.ENXIO and stat.S_ISFIFO(target.found.st_mode):
                raise OSError(errno.ENXIO, "nobody reads this FIFO: start its reader first", target.path) from None
            raise
        os.set_blocking(descriptor, True)
        return open(descriptor, "wb")
    if target.is_standard_output:
        if sys.__stdout__ is None:  # whoever started this has closed it, and the number may be another file's
            raise OSError(errno.EBADF, "standard output is closed", target.path)
        sys.__stdout__.flush()
    return open(os.dup(target.descriptor), "wb")


@contextmanager
def _replacing(target: Target) -> Iterator[BinaryIO]:
    """See `replacing`."""
    partial = os.path.join(os.path.dirname(target.path), f".ncz-{os.urandom(8).hex()}")
    mode = 0o666 if target.found is None else 0o600  # less what the umask takes
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # never through somebody else's link
    try:
        with open(descriptor, "wb") as file:
            if target.found is not None:
                _keep_owner_and_mode(descriptor, target.found)
            yield file
            file.flush()
            os.fsync(descriptor)  # some disks say only now that they are full
        os.replace(partial, target.path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def _keep_owner_and_mode(descriptor: int, before: os.stat_result) -> None:
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
        os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))  # last: a change of the owner clears some bits


def _overwrite(path: str, data: bytes) -> None:
    """Write into a plain file. The room is taken first, so that a full disk leaves the file as it was."""
    with open(os.open(path, os.O_WRONLY), "wb") as file:
        before = os.fstat(file.fileno()).st_size
        try:
            os.posix_fallocate(file.fileno(), 0, len(data) or 1)
        except OSError:
            os.ftruncate(file.fileno(), before)
            raise
        file.write(data)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
