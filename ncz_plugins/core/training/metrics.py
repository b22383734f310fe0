"""Records of each step: written as JSON lines and for TensorBoard, and passed to any callable.

The record of a step is a mapping of plain numbers, strings, and mappings and lists of these. One of its keys is "step";
the documentation of metrics lists all of them. Keeping records must never end a running training: what can't be set up
is an error at the start; what fails later is reported once on stderr, and then left out.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config import StatisticsConfig, expanded_path
from ..errors import ConfigError
from ..json_numbers import finite
from ..messages import say
from ..whole_files import open_to_append

_FLUSH_SECONDS = 10  # TensorBoard may show a step this late; waiting for the disk in each step takes milliseconds

Sink = Callable[[dict[str, Any]], None]


class Metrics:
    """Passes the record of every step to all sinks. Only rank 0 of a training does this.

    Attributes:
        sinks: callables that get each record, in order. Append one to get the records. A sink that raises is named on
            stderr, with the reason, and removed; the training goes on.
    """

    def __init__(self, statistics: StatisticsConfig):
        self.sinks: list[Sink] = []
        self._statistics = statistics
        self._files: list[JsonLines | TensorBoard] = []

    def begin(self, header: Mapping[str, Any]) -> None:
        """Open the files that `statistics` names, and write a header to them: what the following steps have in common.

        Another call (after an elastic training has changed its ranks) writes another header.

        Raises `ConfigError`, naming the setting, where a file can't be written or TensorBoard is not installed.
        """
        if not self._files:
            wanted = (JsonLines, self._statistics.jsonl), (TensorBoard, self._statistics.tensorboard)
            self._files = [kind(path) for kind, path in wanted if path is not None]
            self.sinks[:0] = self._files
        for sink in self._files:
            self._attempt(sink, sink.begin, header)

    def write(self, record: Mapping[str, Any]) -> None:
        """Pass the record of one step to all sinks, with None in place of NaN and infinity, which JSON can't hold."""
        record = finite(record)
        for sink in list(self.sinks):
            self._attempt(sink, sink, record)

    def close(self) -> None:
        """Close the files. Without this call, they close when this object is garbage collected."""
        for sink in self._files:
            if sink in self.sinks:
                self.sinks.remove(sink)
            with suppress(OSError):
                sink.close()
        self._files.clear()

    def _attempt(self, sink: Sink, action: Sink, what: Mapping[str, Any]) -> None:
        """Call `action(what)`. If it fails, for whatever reason, report that and remove `sink`."""
        try:
            if sink in self.sinks:
                action(what)
        except Exception as error:  # a full disk, or a service that a monitor sends to
            with suppress(ValueError):  # it has removed itself
                self.sinks.remove(sink)
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            name = getattr(sink, "__qualname__", None) or str(sink)
            say(f"ncz_plugins: {name}: {reason}; no more metrics there", sys.stderr)


_written: weakref.WeakValueDictionary[Path, JsonLines] = weakref.WeakValueDictionary()  # by trainings of this process


class JsonLines:
    """A file with one JSON object per line: a header, then the records. An existing file is continued.

    A line on stderr says so where another training writes to the same file now. Both go on: records must not end a
    training, and a lock may outlive its machine on NFS. `ncz report` tells the trainings apart by their records' `run`.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(expanded_path(path))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_to_append(self.path)
            # A killed run left it; it stays, on a line of its own.
            if self._file.readable() and _ends_within_a_line(self._file):
                self._file.write(b"\n")
        except OSError as error:
            raise _unwritable("jsonl", path, error, "give the path of a file") from None
        where = self.path.resolve()
        if _is_locked(self._file) or where in _written:
            say(
                f"ncz_plugins: {self}: another training writes to this file now. Give each training a file of its own. "
                "ncz report tells them apart, and --training chooses one",
                sys.stderr,
            )
        _written[where] = self

    def __str__(self) -> str:
        return f"statistics.jsonl: {self.path}"

    def begin(self, header: Mapping[str, Any]) -> None:
        self(header)

    def __call__(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(finite(record), allow_nan=False, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        if _written.get(self.path.resolve()) is self:
            del _written[self.path.resolve()]


class TensorBoard:
    """The records as scalars whose names begin with "ncz/", and the header as a text."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(expanded_path(folder))
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                f"statistics.tensorboard: {self.folder} is asked for, but TensorBoard is not installed: "
                "pip install 'ncz_plugins[tensorboard]', or set it to null"
            ) from None
        try:
            self._writer = SummaryWriter(self.folder, flush_secs=_FLUSH_SECONDS)
        except OSError as error:
            raise _unwritable("tensorboard", folder, error, "give the path of a folder") from None
        except UnicodeEncodeError:
            raise ConfigError(
                f"statistics.tensorboard: {self.folder}: TensorBoard needs a name that is UTF-8: give another, or null"
            ) from None
        self.close = weakref.finalize(self, _close, self._writer)  # at the latest when the process ends

    def __str__(self) -> str:
        return f"statistics.tensorboard: {self.folder}"

    def begin(self, header: Mapping[str, Any]) -> None:
        self._writer.add_text("ncz/header", f"```\n{json.dumps(finite(header), indent=2)}\n```")

    def __call__(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record["step"])


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a step's record by name, for tools that draw curves: "ncz/ratio", "ncz/bypasses/too small" ...

    The guard's findings become the largest error, the lowest cosine, and the number of alarms.
    """
    for key, value in record.items():
        if key == "guard":
            for name, choose in (("relative_error", max), ("cosine", min), ("alarm", sum)):
                found = [finding[name] for finding in value if finding[name] is not None]
                # What is not finite is null in records: an alarm without a figure is an error without a limit.
                if name == "relative_error" and any(each["alarm"] and each[name] is None for each in value):
                    found.append(math.inf)
                if found:
                    yield f"ncz/guard/{name}", float(choose(found))
        elif isinstance(value, Mapping):
            yield from ((f"ncz/{key}/{name}", float(count)) for name, count in value.items())
        elif key not in ("step", "time") and isinstance(value, int | float):
            yield f"ncz/{key}", float(value)


def _close(writer) -> None:
    with suppress(Exception):  # nobody is left to report it to
        writer.close()


def _is_locked(file) -> bool:
    """Whether a training of another process has locked this file. Takes a lock that lasts until this process ends.

    POSIX locks: forked children, such as the workers of a DataLoader, don't inherit them, so those that outlive a
    killed training are not taken for one. Always False where the file system has no locks.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = False
    except OSError as error:
        is_locked = error.errno in (errno.EACCES, errno.EAGAIN)
    with suppress(OSError):  # from here on a shared lock, so that the file stays locked when the first of three ends
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return is_locked


def _ends_within_a_line(file) -> bool:
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _unwritable(setting: str, path: str | os.PathLike, error: OSError, remedy: str) -> ConfigError:
    reason = f"{error.strerror} ({error.filename})" if error.filename else error
    return ConfigError(
        f"statistics.{setting}: {os.fspath(path)} cannot be written on rank 0: {reason}; "
        f"{remedy} that can be made there, or null"
    )
