"""Files are hashed, copied and written: in threads, and with errors that name them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from ...core.errors import FrameError, MismatchError, UnsupportedError
from ...core.whole_files import replacing
from .manifest import AGAIN, Stored

_CHUNK_BYTES = 1 << 20  # of files that are read, and of pieces that are hashed at once
_MAX_THREADS = 8  # that read files

Progress = Callable[[int, int], object]
"""Called with bytes that are done, and all bytes."""


class Done:
    """Bytes that are done, of all bytes. Threads add to them, until they have to stop."""

    def __init__(self, progress: Progress | None, all_bytes: int):
        self._progress, self._bytes, self._all_bytes, self._lock = progress, 0, all_bytes, Lock()
        self._is_stopped = False

    def stop(self) -> None:
        """Have threads end, also in the middle of a file."""
        self._is_stopped = True

    def add(self, nbytes: int) -> None:
        """Raises CancelledError after `stop`."""
        if self._is_stopped:
            raise CancelledError
        if self._progress is None:
            return
        with self._lock:
            self._bytes += nbytes
            self._progress(self._bytes, self._all_bytes)


NOBODY = Done(None, 0)

# ------------------------------------------------------------------ reading


def _opened(path: Path) -> BinaryIO:
    return path.open("rb")


class Readers:
    """Context manager: a thread for each core, to hash files. At its end they stop, also in the middle of a file."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "ncz-files")
        self._added_to: list[Done] = []

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *raised: object) -> None:
        for done in self._added_to:
            done.stop()
        self._pool.shutdown(cancel_futures=True)

    def stored(
        self, paths: Iterable[Path], done: Done | None = None, opened: Callable[[Path], BinaryIO] = _opened
    ) -> Iterator[Stored]:
        """Size and SHA-256 of files, which `opened` opens. Raises what it raises, and OSError."""
        done = done or Done(None, 0)
        self._added_to.append(done)
        return self._pool.map(lambda path: self._stored(opened(path), done), paths)

    def _stored(self, file: BinaryIO, done: Done) -> Stored:
        with file:
            return stored_in(file, done)


def stored_in(file: BinaryIO, done: Done = NOBODY) -> Stored:
    """Size and SHA-256 of the rest of an open file. Raises OSError, and CancelledError once `done` is stopped."""
    digest, nbytes, buffer = hashlib.sha256(), 0, memoryview(bytearray(_CHUNK_BYTES))
    with _naming_source(file):
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            nbytes += count
            done.add(count)
    return Stored(bytes=nbytes, sha256=digest.hexdigest())


def chunks(file: BinaryIO) -> Iterator[bytes]:
    """The rest of an open file. Raises OSError."""
    with _naming_source(file):
        yield from iter(lambda: file.read(_CHUNK_BYTES), b"")


@contextmanager
def _naming_source(file: BinaryIO) -> Iterator[None]:
    """Have errors name the file that is read. By itself the system names files only when they are opened."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(file.name)
        raise


# ------------------------------------------------------------------ writing


def write(path: Path, pieces: Iterable[bytes], done: Done = NOBODY, max_bytes: int | None = None) -> Stored:
    """Write a file. Returns what it holds. A thread hashes what was written while the next pieces are made.

    Raises FrameError if there are more than `max_bytes`, and OSError.
    """
    digest, nbytes = hashlib.sha256(), 0
    with replacing(path) as file, ThreadPoolExecutor(1) as thread:
        hashing = thread.submit(_update, digest, [])
        for group in _grouped(pieces):
            size = sum(map(len, group))
            nbytes += size
            if max_bytes is not None and nbytes > max_bytes:
                raise FrameError(f"has more than the {max_bytes} bytes that the manifest says: {AGAIN}")
            hashing.result()  # no more pieces are held than these and those before
            hashing = thread.submit(_update, digest, group)
            file.writelines(group)
            done.add(size)
    return Stored(bytes=nbytes, sha256=digest.hexdigest())


def _grouped(pieces: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Pieces in a row that are large enough together to be handed to a thread."""
    group, size = [], 0
    for piece in pieces:
        group.append(piece)
        size += len(piece)
        if size >= _CHUNK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _update(digest: hashlib._Hash, group: list[bytes]) -> None:
    for piece in group:
        digest.update(piece)


# ------------------------------------------------------------------ errors


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put a file of a version in front of errors in making it, unless they name a file of the folder already."""
    try:
        yield
    except (FrameError, MismatchError, UnsupportedError) as error:
        kind = FrameError if isinstance(error, UnsupportedError) else type(error)
        is_named = str(error).startswith(f"{path.parent.parent}{os.sep}")
        raise kind(str(error) if is_named else f"{path}: {error}") from error


@contextmanager
def naming_files(place: Path) -> Iterator[None]:
    """Turn OSError into an error that names the file; `place` if it names none, as that of a full disk."""
    try:
        yield
    except BlockingIOError as error:
        raise UnsupportedError(f"{error.filename}: another process makes it: wait until it has ended") from None
    except OSError as error:
        raise UnsupportedError(f"{error.filename or place}: {error.strerror or error}") from None
