"""Output files. Regular files are replaced as a whole; devices, FIFOs and descriptors are written to directly. Folders
of files appear as a whole.

Symbolic links are followed, even if the target is missing. `-` is standard output.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

STANDARD_OUTPUT = "-"
_STANDARD_OUTPUT_DESCRIPTOR = 1
_SYNC_BYTES = 64 << 20  # of a regular file: the disk takes them while the next ones are made
_MAX_LINKS = 40  # symbolic links that Linux follows in one path
# Errors of replacing a file in another user's folder, another user's file, or a mount point.
_NOT_REPLACEABLE_ERRNOS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY}


class Target(NamedTuple):
    """Destination of output that is written to a path.

    Attributes:
        path: the path as given; of a regular file with all symbolic links resolved.
        descriptor: file descriptor of this process that the path names; None if it names none.
        found: status of the existing file; None if there is none yet, and for a descriptor.
    """

    path: str
    descriptor: int | None
    found: os.stat_result | None

    @property
    def is_plain(self) -> bool:
        """Whether this is a regular file, existing or to be created."""
        return self.descriptor is None and (self.found is None or stat.S_ISREG(self.found.st_mode))

    @property
    def is_standard_output(self) -> bool:
        return self.descriptor == _STANDARD_OUTPUT_DESCRIPTOR

    @property
    def is_protected(self) -> bool:
        """Whether a file exists that this process may not write, even if it could replace the file."""
        return self.found is not None and not os.access(self.path, os.W_OK)


def target_of(path: str | os.PathLike) -> Target:
    """Destination of output that is written to `path`. Raises OSError for a folder or an impossible path."""
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
    """Raise OSError if `write_whole` could not write to `path`. Commands check this before they start to work."""
    target = target_of(path)
    missing = target.is_plain and target.found is None
    if target.is_protected or (missing and not os.access(os.path.dirname(target.path), os.W_OK)):
        raise PermissionError(errno.EACCES, "no file can be made there" if missing else "may not be written", path)


def write_whole(path: str | os.PathLike, data: bytes | str | Iterable[bytes]) -> None:
    """Write a file; text as UTF-8. Pieces of a file may be iterated more than once. Raises OSError.

    A reader of a regular file sees either the whole old content or the whole new content. If the disk is full, the old
    content stays. An existing file keeps its mode and owner.

    A file that can't be replaced (a mount point, or a file in another user's folder) is overwritten in place. Space is
    taken first, so a full disk still leaves the old content; readers, and whoever interrupts this, see half of the new
    one. So pieces must not be read from the file while they are written, nor from its mapping.
    """
    data = data.encode() if isinstance(data, str) else data
    pieces = [data] if isinstance(data, bytes) else data
    target = target_of(path)
    if not target.is_plain:
        with _opened(target) as stream:
            stream.writelines(pieces)
        return
    if target.is_protected:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    try:
        with _replacing(target) as file:
            file.writelines(pieces)
    except OSError as error:
        if target.found is None or error.errno not in _NOT_REPLACEABLE_ERRNOS:
            raise
        _overwrite(target.path, pieces)


def replacing(path: str | os.PathLike) -> AbstractContextManager[BinaryIO]:
    """Context manager that yields a file to write piece by piece, and replaces the regular file at `path` at its end.

    If the block raises, the old file stays. Raises OSError.
    """
    return _replacing(target_of(path))


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Context manager that yields an empty folder, to be filled, which becomes the folder `path` at its end.

    It is `.ncz-NAME` beside `path` until then. What a process left there that died is removed. If the block raises,
    nothing stays. Raises OSError: BlockingIOError if another process fills a folder for the same path, and others if
    `path` is there and not empty.
    """
    if path.exists() and any(path.iterdir()):
        raise FileExistsError(errno.EEXIST, "is there and not empty: name a new folder", str(path))
    partial = path.with_name(f".ncz-{path.name}")
    partial.mkdir(exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _lock(descriptor, partial, path)
        try:
            for left in partial.iterdir():
                left.unlink()
            yield partial
            os.fsync(descriptor)
            os.rename(partial, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)
    # The name of the new folder must outlive a loss of power, too.
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, partial: Path, path: Path) -> None:
    """Lock an open folder until it is closed, or its process ends. Raises BlockingIOError if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_ours = False
    else:  # whoever had the lock before may have renamed the folder
        is_ours = partial.is_dir() and os.path.samestat(os.fstat(descriptor), os.stat(partial))
    if not is_ours:
        raise BlockingIOError(errno.EAGAIN, "another process makes this folder", str(path))


def open_to_append(path: str | os.PathLike) -> BinaryIO:
    """A file opened for appending; a regular file can also be read. Raises OSError.

    Raises OSError for a FIFO without a reader, too: opening it would block without a message.
    """
    target = target_of(path)
    return open(target.path, "a+b") if target.is_plain else _opened(target, os.O_NONBLOCK)


def _descriptor(path: str) -> int | None:
    """The descriptor of this process that a path such as /dev/stdout or /dev/fd/3 names; None for other paths.

    The path itself must not be opened: if the descriptor is a regular file, that would overwrite the file from its
    start, including what `>>` and other programs wrote.
    """
    ours = os.path.realpath("/dev/fd")
    for _ in range(_MAX_LINKS):
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
    """A stream to a destination that is not a regular file."""
    if target.descriptor is None:
        try:
            descriptor = os.open(target.path, os.O_WRONLY | flags)
        except OSError as error:
            if error.errno == errno.ENXIO and stat.S_ISFIFO(target.found.st_mode):
                raise OSError(errno.ENXIO, "this FIFO has no reader: start its reader first", target.path) from None
            raise
        os.set_blocking(descriptor, True)
        return open(descriptor, "wb")
    if target.is_standard_output:
        if sys.__stdout__ is None:  # closed by the parent process; descriptor 1 may now be another file
            raise OSError(errno.EBADF, "standard output is closed", target.path)
        sys.__stdout__.flush()
    return open(os.dup(target.descriptor), "wb")


@contextmanager
def _replacing(target: Target) -> Iterator[BinaryIO]:
    """See `replacing`, which makes the target of a path."""
    partial = os.path.join(os.path.dirname(target.path), f".ncz-{os.urandom(8).hex()}")
    mode = 0o666 if target.found is None else 0o600  # the umask removes bits
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # O_EXCL follows no symbolic link
    try:
        with io.BufferedWriter(_Synced(descriptor)) as file:
            if target.found is not None:
                _keep_owner_and_mode(descriptor, target.found)
            yield file
            file.flush()
            file.raw.wait()
            os.fsync(descriptor)  # some file systems report a full disk only here
        os.replace(partial, target.path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


class _Synced(io.FileIO):
    """An open regular file, of which a thread brings to the disk what was written so far, every 64 MiB."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "wb")
        self._thread = ThreadPoolExecutor(1, "ncz-sync")
        self._running: Future | None = None
        self._unsynced_bytes = 0

    def write(self, data: bytes) -> int:
        written = super().write(data)
        self._unsynced_bytes += written
        if self._unsynced_bytes >= _SYNC_BYTES:
            self.wait()
            self._unsynced_bytes, self._running = 0, self._thread.submit(os.fsync, self.fileno())
        return written

    def wait(self) -> None:
        """Wait until the thread is done. Raises OSError if it failed: the system says so once."""
        if self._running is not None:
            self._running.result()

    def close(self) -> None:
        self._thread.shutdown()
        super().close()


def _keep_owner_and_mode(descriptor: int, before: os.stat_result) -> None:
    """Give an open file the owner and mode that another file had."""
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
        os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))  # after fchown, which clears the setuid and setgid bits


def _overwrite(path: str, pieces: Iterable[bytes]) -> None:
    """Overwrite a regular file in place. Space is allocated first, so that a full disk leaves the old content."""
    with open(os.open(path, os.O_WRONLY), "wb") as file:
        before = os.fstat(file.fileno()).st_size
        try:
            os.posix_fallocate(file.fileno(), 0, sum(map(len, pieces)) or 1)
        except OSError:
            os.ftruncate(file.fileno(), before)
            raise
        file.writelines(pieces)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
