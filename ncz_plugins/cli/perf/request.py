"""Request of a user of `ncz perf`: from options to jobs."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from difflib import get_close_matches

from ...core.config import Config
from ...core.errors import ConfigError, UnsupportedError
from . import data
from .contenders import CONTENDERS
from .job import DATA, Job
from .link import bits_per_second
from .ranks import Ranks, parse_count, ranks_of

_ALWAYS = ["plain", "ncz"]  # contenders that always take part
_SIZE = re.compile(r"([0-9]+)([KMG]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MIN_GBPS = 0.1  # assumed speed of an unknown network


@dataclass(frozen=True)
class Request:
    """One run of `ncz perf`.

    Attributes:
        jobs: one job for each link.
        ranks: ranks that take part.
        notes: remarks to print after the results.
    """

    jobs: list[Job]
    ranks: Ranks
    notes: list[str]

    @property
    def needs_horovod(self) -> bool:
        """Whether one of the contenders needs Horovod's ranks."""
        return any(CONTENDERS[name].needs_horovod for name in self.jobs[0].peers)


def read(options: argparse.Namespace, config: Config) -> Request:
    """The request in the options. Starts nothing. Raises ConfigError or UnsupportedError for what can't be done."""
    ranks = ranks_of(options)
    rates = [None] if options.link is None else list(dict.fromkeys(options.link.split(",")))
    if options.trace and len(rates) > 1:
        raise ConfigError(f"--trace: records one call, and --link {options.link} has {len(rates)} rates: give one rate")
    if options.data not in DATA:
        data.from_file(options.data)
    if options.data == "weights" and (options.collective, options.peers) != ("all_gather", "none"):
        raise ConfigError("--data weights needs all_gather and --peers none: only ncz sends changes of a tensor")
    peers, notes = choose(options.peers, options.collective, horovod=ranks.launcher != "torchrun")
    jobs = []
    for rate in rates:
        # Long enough for every rank to send everything to every other rank.
        gbps = (bits_per_second(rate) or 0) / 1e9 or _MIN_GBPS
        settings = config.model_dump(mode="json")
        if options.data == "weights":
            settings["roles"], settings["quantizer"]["kind"] = ["parameter"], "lossless"
        jobs.append(
            Job(
                collective=options.collective,
                sizes=(found := sizes(options.sizes)),
                peers=peers,
                data=options.data,
                config=settings,
                link=rate,
                repeat=parse_count("--repeat", options.repeat, None),
                trace=bool(options.trace),
                timeout=60 + 4 * ranks.count * 8e-9 * found[-1] / gbps,
            )
        )
    on_loopback = ranks.without_link(f"ncz perf {options.collective}") if options.link is None else []
    return Request(jobs, ranks, [*on_loopback, *notes])


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


def choose(text: str, collective: str, horovod: bool) -> tuple[list[str], list[str]]:
    """Names of the contenders in the order of their turns, and notes on those of "all" that can't take part.

    Args:
        text: value of --peers.
        collective: the collective to measure.
        horovod: whether Horovod's ranks can meet.

    Raises ConfigError for an unknown name, UnsupportedError for a named contender that can't take part.
    """
    wanted = {"all": list(CONTENDERS), "none": []}.get(text, text.split(","))
    chosen, left_out = list(_ALWAYS), {}
    for name in wanted:
        if name not in CONTENDERS:
            near = get_close_matches(name, CONTENDERS, n=1)
            meant = f"; did you mean {near[0]}?" if near else ";"
            raise ConfigError(
                f"--peers: '{name}' is unknown{meant} allowed: all, none, or some of {', '.join(CONTENDERS)}"
            )
        reason = _why_not(name, collective, horovod)
        if reason and text != "all":
            raise UnsupportedError(f"--peers {name}: {reason}")
        if reason:
            left_out.setdefault(reason, []).append(name)
        elif name not in chosen:
            chosen.append(name)
    return chosen, [f"left out ({reason}): {', '.join(names)}" for reason, names in left_out.items()]


def _why_not(name: str, collective: str, horovod: bool) -> str | None:
    """Reason why a contender can't take part; None if it can."""
    contender = CONTENDERS[name]
    if collective not in contender.collectives:
        return f"has no {collective}"
    if contender.needs_horovod and not horovod:
        return "needs Horovod's ranks: start this by horovodrun instead of torchrun"
    return contender.missing()


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
