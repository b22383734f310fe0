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
        per_node: number of ranks that share a link. Ignored under a launcher.
        on_one_machine: whether all ranks run on this machine.
    """

    launcher: str | None
    count: int
    per_node: int
    on_one_machine: bool = True

    def without_link(self, command: str) -> list[str]:
        """Note for measurements without a limited link, with the command to run instead of `command`."""
        if not self.on_one_machine:
            return []
        without = f", without {self.launcher}" if self.launcher else ""
        return [
            "No link was limited: all ranks are on this machine, and its loopback is faster than a network, so "
            "compression hardly pays.",
            f"Try `sudo {command} --link 1gbit`{without}, or ranks on several machines (torchrun).",
        ]


def ranks_of(options: argparse.Namespace) -> Ranks:
    """Ranks from the options and the environment. Raises ConfigError."""
    launcher = started_by()
    if launcher:
        for name in ("link", "ranks", "ranks_per_node"):
            if getattr(options, name) is not None:
                option = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{option}: can't be used under {launcher}, which has started the ranks on its own network"
                )
        size, local = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        if launcher == "horovodrun":
            size, local = ("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE")
        count = parse_count(size, os.environ.get(size), 2)
        return Ranks(launcher, count, 1, os.environ.get(local) == str(count))
    ranks = parse_count("--ranks", options.ranks, 2)
    per_node = parse_count("--ranks-per-node", options.ranks_per_node, 1)
    if per_node > 1 and options.link is None:
        raise ConfigError("--ranks-per-node: needs --link RATE, which makes the nodes")
    if ranks % per_node:
        raise ConfigError(f"--ranks-per-node: {per_node} does not divide --ranks {ranks}")
    return Ranks(None, ranks, per_node)


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
