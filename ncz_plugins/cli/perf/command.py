"""What `ncz perf` asks for: read, measured on the ranks that there are or that are started for it, and shown."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ...core.config import Config
from ...core.errors import ConfigError, UnsupportedError
from .. import machine
from ..codec.plot import check as check_picture
from . import DATA, Job, data, launch, plot, rank
from .link import bits_per_second, link
from .peers import PEERS
from .table import table

_ALWAYS = ["plain", "ncz"]  # what others are compared with, and what this is all about
_SIZE = re.compile(r"([0-9]+)([KMG]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_PACKAGES = ("horovod", "hivemind", "zstandard", "lz4")  # whose versions matter to the peers

_SLOWEST_GBPS = 0.1  # what a network of unknown speed is taken to reach at least
_START_SECONDS = 900  # more than starting the ranks and making the data takes


@dataclass(frozen=True)
class Request:
    """One run of `ncz perf`.

    Attributes:
        jobs: one per link.
        ranks, per_node: how many to start, and how many of them share a link; without meaning under a launcher.
        launcher: the one that this process was started by as one of several ranks, or None.
        notes: what people should know beside the records.
    """

    jobs: list[Job]
    ranks: int
    per_node: int
    launcher: str | None
    notes: list[str]

    @property
    def needs_horovod(self) -> bool:
        return any(PEERS[name].needs_horovod for name in self.jobs[0].peers)


def run(options: argparse.Namespace, config: Config, command: str) -> None:
    """Measure and show what the options of the command line ask for.

    Args:
        config: of our own collectives.
        command: what was typed, to be kept with the results.
    """
    for file, what in ((options.plot, "--plot"), (options.trace, "--trace")):
        if file and not os.access(Path(file).parent, os.W_OK):
            raise UnsupportedError(f"{what} {file}: no file can be made there")
    if options.plot:
        check_picture(options.plot)
    request = read(options, config)
    records, trace = measure(request)
    if not records:  # another rank's, which shows them
        return
    document = {
        "command": command,
        "versions": _versions(),
        "machine": {"platform": platform.platform(), "cpu": machine.cpu()},
        "ranks": records[0]["ranks"],
        "ranks_per_node": request.per_node,
        "notes": request.notes,
        "jobs": [asdict(job) for job in request.jobs],
        "records": _finite(records),
    }
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        _show(request, config, records)
    if options.plot:
        plot.draw(options.plot, records, _title(request, records))
    if trace is not None:
        Path(options.trace).write_text(json.dumps(trace), encoding="utf-8")


# ------------------------------------------------------------------ reading


def read(options: argparse.Namespace, config: Config) -> Request:
    """Raises ConfigError or UnsupportedError for what can't be done, before anything is started."""
    launcher, ranks, per_node = ranks_of(options)
    rates = [None] if options.link is None else list(dict.fromkeys(options.link.split(",")))
    gbps = {rate: (bits_per_second(rate) or 0) / 1e9 for rate in rates}
    if options.trace and len(rates) > 1:
        raise ConfigError(f"--trace: it records one call, and --link {options.link} has {len(rates)} rates: give one")
    if options.data not in DATA:
        data.from_file(options.data)
    peers, notes = choose(options.peers, options.collective, horovod=launcher != "torchrun")
    jobs = []
    for rate in rates:
        settings = config.model_dump(mode="json")
        if gbps[rate] and config.transport.link_gbps is None and config.transport.tuning is None:
            settings["transport"]["link_gbps"] = gbps[rate]
            notes.append(f"transport.link_gbps: {gbps[rate]:g}, from --link, as the configuration leaves it open")
        jobs.append(
            Job(
                collective=options.collective,
                sizes=(found := sizes(options.sizes)),
                peers=peers,
                data=options.data,
                config=settings,
                link=rate,
                repeat=None if options.repeat is None else _count("--repeat", options.repeat, 0),
                trace=bool(options.trace),
                timeout=_seconds_for(found[-1], ranks, gbps[rate]),
            )
        )
    return Request(jobs, ranks, per_node, launcher, notes)


def ranks_of(options: argparse.Namespace) -> tuple[str | None, int, int]:
    """The launcher that started this process as one of several ranks, if one did; else how many ranks to start, and how
    many of them share a link. Raises ConfigError.
    """
    launcher = started_by()
    if launcher:
        for name in ("link", "ranks", "ranks_per_node"):
            if getattr(options, name) is not None:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option}: the ranks are those that {launcher} started, on the network as it is")
    ranks = _count("--ranks", options.ranks, 2)
    per_node = _count("--ranks-per-node", options.ranks_per_node, 1)
    if per_node > 1 and options.link is None:
        raise ConfigError("--ranks-per-node: nodes are those of --link RATE, which is missing")
    if ranks % per_node:
        raise ConfigError(f"--ranks-per-node: {per_node} does not divide --ranks {ranks}")
    return launcher, ranks, per_node


def sizes(text: str) -> list[int]:
    """Bytes, ascending: of "64K,1M" these two, of "64K:1M" twice as many each time, of "64K:16M:4" four times."""
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
    """The peers in the order of their turns, and notes on those of "all" that can't take part.

    Args:
        horovod: whether Horovod's ranks can meet here.

    Raises ConfigError for an unknown name, UnsupportedError for a named peer that can't take part.
    """
    wanted = {"all": list(PEERS), "none": []}.get(text, text.split(","))
    chosen, left_out = list(_ALWAYS), {}
    for name in wanted:
        if name not in PEERS:
            near = get_close_matches(name, PEERS, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--peers: '{name}' is unknown{meant} allowed: all, none, or some of {', '.join(PEERS)}")
        reason = _why_not(name, collective, horovod)
        if reason and text != "all":
            raise UnsupportedError(f"--peers {name}: {reason}")
        if reason:
            left_out.setdefault(reason, []).append(name)
        elif name not in chosen:
            chosen.append(name)
    return chosen, [f"left out ({reason}): {', '.join(names)}" for reason, names in left_out.items()]


def _why_not(name: str, collective: str, horovod: bool) -> str | None:
    peer = PEERS[name]
    if collective not in peer.collectives:
        return f"has no {collective}"
    if peer.needs_horovod and not horovod:
        return "needs Horovod's ranks: start this by horovodrun instead of torchrun"
    return peer.missing()


def started_by() -> str | None:
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return "torchrun"
    return "horovodrun" if "HOROVOD_RANK" in os.environ else None


def _count(option: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{option}: '{text}' is not a number above 0")
    return int(text)


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


def _seconds_for(size: int, ranks: int, gbps: float) -> float:
    """What no exchange takes, even one in which every rank sends all it has to every other."""
    return 60 + 4 * ranks * 8e-9 * size / (gbps or _SLOWEST_GBPS)


# ------------------------------------------------------------------ measuring


def measure(request: Request) -> tuple[list[dict[str, Any]], Any]:
    """All records, and the trace if one was asked for; nothing on ranks other than 0 of a launcher."""
    records, traces = [], []
    silent = not sys.stderr.isatty()
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=silent) as progress:
        for job in request.jobs:
            task = progress.add_task(f"{job.collective} {job.link or ''}", total=1.0)

            def take(record: dict[str, Any], job: Job = job, task=task) -> None:
                if "progress" in record:
                    progress.update(task, completed=record["progress"])
                elif "trace" in record:
                    traces.append(record["trace"])
                else:
                    records.append({"link": job.link, "collective": job.collective} | record["result"])

            _run(job, request, take)
    return records, traces[0] if traces else None


def _run(job: Job, request: Request, take: Callable[[dict[str, Any]], None]) -> None:
    if request.launcher:
        rank.take_part(job, take)
        return
    with ExitStack() as stack:
        nodes = stack.enter_context(link(request.ranks // request.per_node, job.link)) if job.link else None
        launch.run_ranks(
            request.ranks,
            asdict(job),
            nodes=nodes,
            ranks_per_node=request.per_node,
            horovod=request.needs_horovod,
            on_record=take,
            timeout=_START_SECONDS + len(job.peers) * len(job.sizes) * (job.repeat or 5) * job.timeout,
        )


# ------------------------------------------------------------------ showing


def _show(request: Request, config: Config, records: list[dict[str, Any]]) -> None:
    console = Console(width=200)  # a narrower terminal breaks the lines, which is better than cut numbers
    job = request.jobs[0]
    console.print(Text(f"{_title(request, records)}: {DATA.get(job.data, 'from the file')}"))
    console.print(Text(f"ncz: {config.describe()}"))
    for job in request.jobs:
        console.print()
        if job.link:
            console.print(Text(f"link {job.link}", style="bold"))
        console.print(table([record for record in records if record["link"] == job.link]))
    console.print()
    for name in job.peers:
        console.print(Text(f"{name}: {PEERS[name].description}"))
    for note in request.notes:
        console.print(Text(note))


def _title(request: Request, records: list[dict[str, Any]]) -> str:
    job = request.jobs[0]
    per_node = f", {request.per_node} to a node" if request.per_node > 1 else ""
    return f"{job.collective}, {records[0]['ranks']} ranks{per_node}, data {job.data}"


def _versions() -> dict[str, str]:
    import numpy
    import torch

    from ...version import __version__

    found = {"ncz_plugins": __version__, "python": platform.python_version()}
    found |= {"torch": torch.__version__, "numpy": numpy.__version__}
    return found | {name: version for name in _PACKAGES if (version := machine.installed_version(name))}


def _finite(value: Any) -> Any:
    """The same for JSON, which has no NaN and no infinity: None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
