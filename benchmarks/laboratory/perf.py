"""`ncz perf` over links of any rate, with more contenders.

    sudo .venv/bin/python -m benchmarks.laboratory.perf all_reduce --link 100mbit,1gbit --peers all [--ranks 4]
    horovodrun -np 4 .venv/bin/python -m benchmarks.laboratory.perf all_reduce --peers horovod

Has the options of `ncz perf`, and --link and --ranks-per-node. With --link each rank is in a network namespace of its
own, behind a link of that rate, and the run ends with an error if fewer bytes crossed the links than had to.

Ranks and network share the cores of this machine: above 2 to 5 Gbit/s you may be measuring the CPU. The links have no
delay, and pass up to 128 KiB at once after a pause: don't trust sizes of which less than 256 KiB cross the link.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ncz_plugins.cli import machine
from ncz_plugins.cli.output import print_json, write_file
from ncz_plugins.cli.perf import command, rank, show
from ncz_plugins.cli.perf.ranks import parse_count
from ncz_plugins.cli.perf.request import Request, call_seconds, read
from ncz_plugins.cli.perf.run_job import Records, job_seconds
from ncz_plugins.core.errors import ConfigError, NczError

from . import plot
from .launch import run
from .link import bits_per_second, link
from .measure import LinkJob, LinkMeasurement
from .peers import CONTENDERS

_UNLIMITED_GBPS = 0.1  # assumed for time limits
_PACKAGES = ("horovod", "hivemind", "zstandard", "lz4")  # used by contenders: their versions are reported


def build_parser() -> argparse.ArgumentParser:
    """The parser of this program."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=command.EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_options(parser)
    parser.add_argument("--link", metavar="RATE", help="1gbit, 100mbit, unlimited, or a list of these; as root")
    parser.add_argument("--ranks-per-node", metavar="K", help="how many ranks share a link, 1 by default")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the program with `arguments` (default: those of this process) and return the exit code."""
    options = build_parser().parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    try:
        measure(options, shlex.join(["python", "-m", "benchmarks.laboratory.perf", *given]))
    except NczError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def measure(options: argparse.Namespace, command_line: str) -> None:
    """Measure what the options ask for, and print the results. Raises NczError."""
    config = command.settings_of(options)
    request = read(options, config, CONTENDERS)
    per_node = _ranks_per_node(options, request)
    rates = [None] if options.link is None else list(dict.fromkeys(options.link.split(",")))
    if options.trace and len(rates) > 1:
        raise ConfigError(f"--trace: records one call, and --link {options.link} has {len(rates)} rates: give one rate")
    if options.link:  # the remark on the loopback does not hold behind links
        request = replace(request, ranks=request.ranks._replace(on_one_machine=False))
    jobs = [_job(request, rate) for rate in rates]

    # Measure one link after the other.
    records, trace = [], None
    for job in jobs:
        found = _run(job, request, per_node)
        records += [{"link": job.link} | record for record in found.results]
        trace = trace or found.trace
    if not records:  # only rank 0 has records
        return

    title = show.title(request, records) + (f", {per_node} to a node" if per_node > 1 else "")
    if options.json:
        print_json(_document(command_line, request, per_node, jobs, records))
    else:
        tables = {f"link {rate}" if rate else "": [r for r in records if r["link"] == rate] for rate in rates}
        show.show_tables(title, request, config, tables)
    if options.plot:
        plot.draw(options.plot, records, title)
    if trace is not None:
        write_file("--trace", options.trace, json.dumps(trace))


def _ranks_per_node(options: argparse.Namespace, request: Request) -> int:
    """Number of ranks that share a link. Raises ConfigError."""
    for name in ("link", "ranks_per_node"):
        if request.ranks.launcher and getattr(options, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option}: can't be used under {request.ranks.launcher}, which has its own network")
    per_node = parse_count("--ranks-per-node", options.ranks_per_node, 1)
    if per_node > 1 and options.link is None:
        raise ConfigError("--ranks-per-node: needs --link RATE, which makes the nodes")
    if request.ranks.count % per_node:
        raise ConfigError(f"--ranks-per-node: {per_node} does not divide --ranks {request.ranks.count}")
    return per_node


def _job(request: Request, rate: str | None) -> LinkJob:
    """The job of the request over links of a rate, with more time on slower links. Raises ConfigError."""
    job = request.job
    gbps = (bits_per_second(rate) or 0) / 1e9 or _UNLIMITED_GBPS
    timeout = call_seconds(request.ranks.count, job.sizes[-1], gbps)
    return LinkJob(**asdict(job) | {"timeout": timeout, "link": rate})


def _run(job: LinkJob, request: Request, per_node: int) -> Records:
    """Run a job on a launcher's ranks, or on new ranks. Returns the records, on rank 0 only. Raises NczError."""
    ranks = request.ranks
    with Records(f"{job.collective} {job.link or ''}") as found, ExitStack() as stack:
        if ranks.launcher:
            rank.take_part(job, found.take, LinkMeasurement)
            return found
        nodes = stack.enter_context(link(ranks.count // per_node, job.link)) if job.link else None
        records = stack.enter_context(tempfile.NamedTemporaryFile())
        run(
            [sys.executable, "-m", "benchmarks.laboratory.rank"],
            ranks.count,
            Path(records.name),
            standard_input=json.dumps(asdict(job)),
            nodes=nodes,
            ranks_per_node=per_node,
            horovod=any(name.startswith("horovod") for name in job.peers),
            on_record=found.take,
            timeout=job_seconds(job),
        )
    return found


def _document(
    command_line: str, request: Request, per_node: int, jobs: list[LinkJob], records: list[dict[str, Any]]
) -> dict[str, Any]:
    """The document that --json prints."""
    found = show.document(command_line, request, records)
    found["versions"] |= {name: version for name in _PACKAGES if (version := machine.installed_version(name))}
    del found["job"]
    return found | {"ranks_per_node": per_node, "jobs": [asdict(job) for job in jobs]}


if __name__ == "__main__":
    sys.exit(main())
