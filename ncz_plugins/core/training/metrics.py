"""Destinations of step records: JSON lines, TensorBoard, and any callable.

A record is a mapping of numbers, strings, and mappings and lists of these. One key is "step"; docs/guides/metrics.md
lists all keys. Records must never end a running training: a destination that can't be set up is an error at the start,
and one that fails later is reported once on stderr and dropped.
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

_FLUSH_SECONDS = 10  # interval at which TensorBoard's file is flushed; flushing each step would take milliseconds

Sink = Callable[[dict[str, Any]], None]


class Metrics:
    """Distributor of step records to sinks. Only rank 0 of a training writes records.

    Attributes:
        sinks: callables that get each record, in order. Append one to receive records. A sink that raises is named on
            stderr with the reason, and removed; the training continues.
    """

    def __init__(self, statistics: StatisticsConfig):
        self.sinks: list[Sink] = []
        self._statistics = statistics
        self._files: list[JsonLines | TensorBoard] = []

    def begin(self, header: Mapping[str, Any]) -> None:
        """Open the files that `statistics` names, and write a header: what the following steps have in common.

        A second call writes a second header, for instance after an elastic training has changed its ranks.

        Raises ConfigError, naming the setting, if a file can't be written or TensorBoard is not installed.
        """
        if not self._files:
            wanted = (JsonLines, self._statistics.jsonl), (TensorBoard, self._statistics.tensorboard)
            self._files = [sink_type(path) for sink_type, path in wanted if path is not None]
            self.sinks[:0] = self._files
        for sink in self._files:
            self._attempt(sink, sink.begin, header)

    def write(self, record: Mapping[str, Any]) -> None:
        """Pass the record of one step to all sinks, with None in place of NaN and infinity, which JSON can't hold."""
        record = finite(record)
        for sink in list(self.sinks):
            self._attempt(sink, sink, record)

    def close(self) -> None:
        """Close the files. Otherwise they close when this object is garbage collected."""
        for sink in self._files:
            if sink in self.sinks:
                self.sinks.remove(sink)
            with suppress(OSError):
                sink.close()
        self._files.clear()

    def _attempt(self, sink: Sink, action: Sink, what: Mapping[str, Any]) -> None:
        """Call `action(what)`. If it raises anything, report the reason on stderr and remove `sink`."""
        try:
            if sink in self.sinks:
                action(what)
        except Exception as error:  # for example a full disk, or a service that is down
            with suppress(ValueError):  # the sink has removed itself
                self.sinks.remove(sink)
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            name = getattr(sink, "__qualname__", None) or str(sink)
            say(f"ncz_plugins: {name}: {reason}; no more metrics there", sys.stderr)


_open_files: weakref.WeakValueDictionary[Path, JsonLines] = weakref.WeakValueDictionary()  # of this process


class JsonLines:
    """File with one JSON object per line: a header, then the records. An existing file is appended to.

    If another training writes to the same file now, a warning is printed on stderr, and both trainings continue:
    records must not end a training, and on NFS a lock may outlive its machine. `ncz report` tells the trainings apart
    by the key `run` of their records.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(expanded_path(path))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_to_append(self.path)
            # A killed training may have left an unfinished line: end the line, and keep it.
            if self._file.readable() and _ends_within_a_line(self._file):
                self._file.write(b"\n")
        except OSError as error:
            raise _unwritable("jsonl", path, error, "give the path of a file") from None
        where = self.path.resolve()
        if _is_locked(self._file) or where in _open_files:
            say(
                f"ncz_plugins: {self}: another training writes to this file now. Give each training a file of its own. "
                "ncz report tells them apart, and --training chooses one",
                sys.stderr,
            )
        _open_files[where] = self

    def __str__(self) -> str:
        return f"statistics.jsonl: {self.path}"

    def begin(self, header: Mapping[str, Any]) -> None:
        self(header)

    def __call__(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(finite(record), allow_nan=False, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        if _open_files.get(self.path.resolve()) is self:
            del _open_files[self.path.resolve()]


class TensorBoard:
    """TensorBoard log: each record as scalars whose names begin with "ncz/", the header as text."""

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
                f"statistics.tensorboard: {self.folder}: TensorBoard needs a UTF-8 name: give another name, or null"
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
    """Numbers of a record by name, for tools that draw curves: "ncz/ratio", "ncz/bypasses/too small" ...

    Findings of the guard become three numbers: largest error, lowest cosine, number of alarms.
    """
    for key, value in record.items():
        if key == "guard":
            for name, choose in (("relative_error", max), ("cosine", min), ("alarm", sum)):
                found = [finding[name] for finding in value if finding[name] is not None]
                # Records have null in place of infinity, so an alarm without an error had an infinite one.
                if name == "relative_error" and any(each["alarm"] and each[name] is None for each in value):
                    found.append(math.inf)
                if found:
                    yield f"ncz/guard/{name}", float(choose(found))
        elif isinstance(value, Mapping):
            yield from ((f"ncz/{key}/{name}", float(count)) for name, count in value.items())
        elif key not in ("step", "time") and isinstance(value, int | float):
            yield f"ncz/{key}", float(value)


def _close(writer) -> None:
    with suppress(Exception):  # the process ends: too late to report anything
        writer.close()


def _is_locked(file) -> bool:
    """Whether a training in another process has locked this file. Locks the file until this process ends.

    The lock is a POSIX lock, which forked children don't inherit: a DataLoader worker that outlives a killed training
    is not mistaken for a training. Always False on file systems without locks.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = False
    except OSError as error:
        is_locked = error.errno in (errno.EACCES, errno.EAGAIN)
    with suppress(OSError):  # a shared lock, so that the file stays locked while any of several trainings runs
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
