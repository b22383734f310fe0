"""Request of a user of `ncz perf`: from options to a job."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from difflib import get_close_matches

from ...core.config import Config
from ...core.errors import ConfigError, UnsupportedError
from . import data
from .contenders import CONTENDERS, Contender
from .job import DATA, Job
from .ranks import Ranks, parse_count, ranks_of

_ALWAYS = ["plain", "ncz"]  # contenders that always take part
_SIZE = re.compile(r"([0-9]+)([KMG]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MIN_GBPS = 0.1  # assumed speed of an unknown network


@dataclass(frozen=True)
class Request:
    """One run of `ncz perf`.

    Attributes:
        job: what all ranks measure.
        ranks: ranks that take part.
        contenders: contenders to choose from, by name.
        left_out: remarks on the contenders of --peers all that can't take part.
    """

    job: Job
    ranks: Ranks
    contenders: dict[str, Contender]
    left_out: list[str]

    @property
    def notes(self) -> list[str]:
        """Remarks to print after the results."""
        return [*self.ranks.notes(), *self.left_out]


def read(options: argparse.Namespace, config: Config, contenders: dict[str, Contender] = CONTENDERS) -> Request:
    """The request in the options. Starts nothing. Raises ConfigError or UnsupportedError for what can't be done."""
    ranks = ranks_of(options)
    if options.data not in DATA:
        data.from_file(options.data)
    if options.data == "weights" and (options.collective, options.peers) != ("all_gather", "none"):
        raise ConfigError("--data weights needs all_gather and --peers none: only ncz sends changes of a tensor")
    peers, left_out = choose(options.peers, options.collective, contenders)
    settings = config.model_dump(mode="json")
    found = sizes(options.sizes)
    job = Job(
        collective=options.collective,
        sizes=found,
        peers=peers,
        data=options.data,
        config=settings,
        repeat=parse_count("--repeat", options.repeat, None),
        trace=bool(options.trace),
        timeout=call_seconds(ranks.count, found[-1], _MIN_GBPS),
    )
    if job.role is not None:
        settings["roles"] = [job.role]
    return Request(job, ranks, contenders, left_out)


def call_seconds(ranks: int, nbytes: int, gbps: float) -> float:
    """Time limit of one call: long enough for every rank to send everything to every other rank."""
    return 60 + 4 * ranks * 8e-9 * nbytes / gbps


def sizes(text: str) -> list[int]:
    """Sizes in bytes, ascending: "64K,1M" lists two, "64K:1M" doubles each time, "64K:16M:4" multiplies by 4.

    Raises ConfigError.
    """
    if ":" not in text:
        return sorted({_size(part, text) for part in text.split(",")})
    first, last, *factor = text.split(":")
    if len(factor) > 1 or not (factor or ["2"])[0].isdecimal() or int((factor or ["2"])[0]) < 2:
        raise _not_sizes(text)
    size, end, times = _size(first, text), _size(last, text), int((factor or ["2"])[0])
    if size > end:
        raise _not_sizes(text)
    found = []
    while size <= end:
        found.append(size)
        size *= times
    return found


def choose(text: str, collective: str, contenders: dict[str, Contender]) -> tuple[list[str], list[str]]:
    """Names of the contenders in the order of their turns, and notes on those of "all" that can't take part.

    Args:
        text: value of --peers.
        collective: the collective to measure.
        contenders: contenders to choose from, by name.

    Raises ConfigError for an unknown name, UnsupportedError for a named contender that can't take part.
    """
    wanted = {"all": list(contenders), "none": []}.get(text, text.split(","))
    chosen, left_out = list(_ALWAYS), {}
    for name in wanted:
        if name not in contenders:
            near = get_close_matches(name, contenders, n=1)
            meant = f"; did you mean {near[0]}?" if near else ";"
            raise ConfigError(
                f"--peers: '{name}' is unknown{meant} allowed: all, none, or some of {', '.join(contenders)}"
            )
        contender = contenders[name]
        reason = contender.missing() if collective in contender.collectives else f"has no {collective}"
        if reason and text != "all":
            raise UnsupportedError(f"--peers {name}: {reason}")
        if reason:
            left_out.setdefault(reason, []).append(name)
        elif name not in chosen:
            chosen.append(name)
    return chosen, [f"left out ({reason}): {', '.join(names)}" for reason, names in left_out.items()]


def _size(part: str, text: str) -> int:
    match = _SIZE.fullmatch(part)
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if size < 8:
        raise _not_sizes(text)
    return size


def _not_sizes(text: str) -> ConfigError:
    return ConfigError(
        f"--sizes: '{text}' is neither FROM:TO (64K:256M, doubling) nor FROM:TO:FACTOR (64K:64M:4) nor a list "
        "(64K,1M), each of 8 bytes or more"
    )
