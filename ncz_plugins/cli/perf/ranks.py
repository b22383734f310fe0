"""Ranks that take part: those of a launcher, or new ones on this machine."""

from __future__ import annotations

import argparse
import os
from typing import NamedTuple

from ...core.errors import ConfigError


class Ranks(NamedTuple):
    """The ranks that take part.

    Attributes:
        launcher: "torchrun" or "horovodrun" if it started this process as one of several ranks; else None.
        count: number of ranks, existing or to be started.
        on_one_machine: whether all ranks run on this machine.
    """

    launcher: str | None
    count: int
    on_one_machine: bool = True

    def notes(self) -> list[str]:
        """What to know about measurements on these ranks."""
        if not self.on_one_machine:
            return []
        return [
            "All ranks are on this machine. Its loopback is faster than a network, so compression hardly pays here: "
            "measure on several machines (torchrun)."
        ]


def ranks_of(options: argparse.Namespace) -> Ranks:
    """Ranks from the options and the environment. Raises ConfigError."""
    launcher = started_by()
    if launcher is None:
        return Ranks(None, parse_count("--ranks", options.ranks, 2))
    if options.ranks is not None:
        raise ConfigError(f"--ranks: can't be used under {launcher}, which has started the ranks")
    size, local = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if launcher == "horovodrun":
        size, local = ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE")
    count = parse_count(size, os.environ.get(size), 2)
    return Ranks(launcher, count, os.environ.get(local) == str(count))


def started_by() -> str | None:
    """The launcher that started this process as one of several ranks; None if there is none."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return "torchrun"
    return "horovodrun" if "HOROVOD_RANK" in os.environ else None


def parse_count(option: str, text: str | None, default: int | None) -> int | None:
    """The number above 0 in `text`, or `default` if it is None. Raises ConfigError, naming the option."""
    if text is None:
        return default
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{option}: '{text}' is not a number above 0")
    return int(text)
