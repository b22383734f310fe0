"""The options of `ncz plan`, and its run from start to output."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import replace
from typing import NamedTuple

from ...core.config import Config
from ...core.errors import ConfigError
from ...core.tuning.decisions import connections_to_use
from ...core.tuning.tuning_file import apply_tuning_file
from ..output import print_json, require_picture, unbroken_console
from ..report.command import add_training
from ..report.read import Run, read
from ..settings import config_with, parse_bound
from .catalogue import Catalogue, Instance, load
from .strategy import STRATEGIES, sendings
from .workload import ITEMSIZES, Interval, Workload, compute_from_tokens, from_run, settings_of

_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)([kMBT]?)", re.ASCII)
_MOST_COUNT = 1e15
_UNITS = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_POSITIVE = (
    "nodes",
    "ranks_per_node",
    "link_gbps",
    "flow_gbps",
    "cores",
    "price",
    "ratio",
    "tflops",
    "efficiency",
    "every",
)
_LATENCY_US = 50.0  # between two machines of a data centre: a guess
_NCCL_CONNECTIONS = 16  # on AWS: NCCL_SOCKET_NTHREADS 2 times NCCL_NSOCKS_PERTHREAD 8, by the documentation of NCCL


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `ncz`."""
    parser = commands.add_parser(
        "plan", help="predict whether compression pays: a training step plain, in bfloat16 and compressed"
    )
    what = parser.add_argument_group("what is trained (one of the first three)")
    what.add_argument("--parameters", metavar="N", help="number of parameters: 124M, 7B, 1e9")
    what.add_argument("--model", metavar="SPEC", help="FILE.py:NAME or package.module:NAME, as `ncz check` takes it")
    what.add_argument("--run", dest="recorded", metavar="RUN.jsonl", help="a run that statistics.jsonl recorded")
    add_training(what)
    what.add_argument("--dtype", choices=tuple(ITEMSIZES), help="dtype of gradients as sent; float32 by default")
    what.add_argument("--compute-seconds", metavar="S", help="seconds of computing per step, or LOW:HIGH")
    what.add_argument("--tokens", metavar="N", help="tokens per rank and step, instead of --compute-seconds")
    what.add_argument("--tflops", metavar="F", type=float, help="peak of a rank's device, if the instance states none")
    what.add_argument("--efficiency", metavar="E", type=float, help="share of the peak that is reached, such as 0.4")
    where = parser.add_argument_group("where")
    where.add_argument("--instance", metavar="NAME", help="machine in the catalogue")
    where.add_argument("--link-gbps", metavar="G", type=float, help="link of each node, instead of --instance")
    where.add_argument("--nodes", metavar="N", type=int, default=2, help="nodes, 2 by default")
    where.add_argument("--ranks-per-node", metavar="K", type=int, help="GPUs of the instance, or 1, by default")
    where.add_argument(
        "--latency-us", metavar="L", type=float, help=f"one-way latency; {_LATENCY_US:g} by default, a guess"
    )
    where.add_argument("--flow-gbps", metavar="F", type=float, help="limit of one TCP connection")
    where.add_argument(
        "--cores", metavar="C", type=float, help="cores of a node, if ranks compute on CPUs; 2 per rank by default"
    )
    where.add_argument("--costs", metavar="NAME", help="costs in the catalogue; gpu with --instance, else cpu")
    where.add_argument("--price", metavar="D", type=float, help="dollars per hour and node")
    where.add_argument("--catalogue", metavar="FILE.yaml", help="add instances, costs and sources from a file")
    where.add_argument("--compare", metavar="A,B", help="several instances to compare")
    how = parser.add_argument_group("how")
    how.add_argument("--strategy", choices=tuple(STRATEGIES), default="ddp", help="ddp by default")
    how.add_argument(
        "--every", metavar="H", type=int, default=500, help="with diloco: steps from one synchronization to the next"
    )
    how.add_argument(
        "--config", metavar="FILE", help="our settings, a file or a preset; else those of --run, or the defaults"
    )
    how.add_argument("--bound", metavar="MODE:VALUE", help="error bound; overrides the file")
    how.add_argument("--ratio", metavar="R", type=float, help="compression ratio of one rank's codes, relative to fp32")
    parser.add_argument("--json", action="store_true", help="everything as JSON, for `ncz report --plan`")
    parser.add_argument("--plot", metavar="FILE.png", help="also draw the steps, and calls against the number of ranks")
    parser.set_defaults(run=run, outputs={"--plot": "plot"})


class Place(NamedTuple):
    """Machines on which a training may run.

    Attributes:
        name: name of the machines.
        ranks_per_node: ranks on each node.
        gbps: speed of a node's link in Gbit/s.
        flow_gbps: limit of one TCP connection in Gbit/s; None for no limit.
        tflops: peak of a rank's device in 10^12 operations per second; None if unknown.
        price: dollars per hour and node; None if unknown.
        source: source of these numbers.
    """

    name: str
    ranks_per_node: int
    gbps: float
    flow_gbps: float | None
    tflops: float | None
    price: float | None
    source: str


def run(options: argparse.Namespace) -> None:
    """Predict steps, and print the plan. Raises ConfigError and UnsupportedError."""
    if options.plot:
        require_picture("--plot", options.plot)
    if options.training is not None and not options.recorded:
        raise ConfigError(f"--training {options.training}: needs --run, the file that contains this training")
    recorded = read(options.recorded, options.training) if options.recorded else None
    otherwise = settings_of(recorded) if recorded else None
    config = config_with(options.config, {"quantizer": parse_bound(options.bound)}, otherwise)
    if options.ratio is not None and config.quantizer.bits is not None:
        raise ConfigError(
            f"--ratio {options.ratio:g}: has no effect, as quantizer.mode: bits always sends {config.quantizer.bits} "
            "bits per value: omit it"
        )
    catalogue = load(options.catalogue)
    places = _places(options, catalogue)
    from .show import document, show  # these modules import torch
    from .step import predict
    from .verdict import judge

    plans = []
    for place in places:
        setup = _setup(options, catalogue, place, config, _workload(options, place, recorded, config))
        steps = [predict(setup, kind) for kind in setup.kinds]
        plans.append((place, setup, steps, judge(setup, steps)))
    if options.json:
        print_json(document(options.command, options.strategy, plans))
    else:
        show(unbroken_console(), options.strategy, plans)
    if options.plot:
        from .plot import draw  # imports matplotlib

        draw(options.plot, plans)


def _places(options: argparse.Namespace, catalogue: Catalogue) -> list[Place]:
    """The machines that the options name. Raises ConfigError for missing, excess or invalid options."""
    given = [each for each in ("instance", "link_gbps", "compare") if getattr(options, each) is not None]
    if len(given) != 1:
        raise ConfigError("give one of --instance, --link-gbps and --compare: the link between nodes matters most")
    for name in _POSITIVE:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: allowed: a number above 0")
    if options.efficiency is not None and options.efficiency > 1:
        raise ConfigError(f"--efficiency {options.efficiency:g}: allowed: a share of the peak, up to 1, such as 0.4")
    if options.latency_us is not None and not 0 <= options.latency_us < math.inf:
        raise ConfigError(f"--latency-us {options.latency_us:g}: allowed: a number of 0 or more")
    if options.link_gbps is not None:
        size = options.ranks_per_node or 1
        name = f"{options.link_gbps:g} Gbit/s"
        return [Place(name, size, options.link_gbps, options.flow_gbps, options.tflops, options.price, "--link-gbps")]
    option, names = "--instance", [options.instance]
    if options.compare is not None:
        option, names = "--compare", [name.strip() for name in options.compare.split(",")]
    return [_of_instance(options, name, catalogue.instance(name, option), catalogue) for name in names]


def _of_instance(options: argparse.Namespace, name: str, instance: Instance, catalogue: Catalogue) -> Place:
    source = catalogue.sources[instance.source]
    return Place(
        name,
        options.ranks_per_node or instance.gpus,
        instance.gbps,
        options.flow_gbps or instance.flow_gbps,
        options.tflops or instance.tflops,
        options.price or instance.price,
        f"{name}: {source.text.strip()} ({source.date})",
    )


def _setup(options: argparse.Namespace, catalogue: Catalogue, place: Place, config: Config, workload: Workload):
    from .simulation.calls import Group  # these modules import torch
    from .simulation.fleet import Link
    from .step import Setup

    costs = catalogue.cost(options.costs or ("cpu" if options.link_gbps is not None else "gpu"))
    costs_from = config.transport.tuning if config.entropy.costs is None else "entropy.costs"
    config = apply_tuning_file(config, options.nodes * place.ranks_per_node)
    if costs.kind == "cpu" and config.entropy.costs is not None:
        costs = costs.with_coders(config.entropy.costs, costs_from)
    connections = config.transport.connections
    if costs.kind == "gpu":
        connections = _NCCL_CONNECTIONS
    elif connections == "auto":
        flow = place.gbps if place.flow_gbps is None else place.flow_gbps
        connections, _ = connections_to_use(lambda count: min(place.gbps, count * flow))
    latency = _LATENCY_US if options.latency_us is None else options.latency_us
    link = Link(place.gbps, 1e-6 * latency, place.flow_gbps, connections)
    cores = None if costs.kind == "gpu" else options.cores
    group = Group(options.nodes, place.ranks_per_node, link, costs, cores)
    if group.nodes < 2:
        raise ConfigError("--nodes 1: nothing crosses the network between nodes: plan with 2 nodes or more")
    price = None if place.price is None else place.price * options.nodes
    return Setup(workload, sendings(options.strategy, workload, options.every), group, config, price)


def _workload(options: argparse.Namespace, place: Place, recorded: Run | None, config: Config) -> Workload:
    """The training that the options describe. Raises ConfigError if they don't, or if it has no parameters."""
    workload = _trained(options, place, recorded, config)
    if not workload.parameters:
        raise ConfigError(
            f"{workload.name}: trains no parameter, so no gradient is sent: give a model or a run that trains some"
        )
    return workload


def _trained(options: argparse.Namespace, place: Place, recorded: Run | None, config: Config) -> Workload:
    given = [each for each in ("parameters", "model", "recorded") if getattr(options, each)]
    if len(given) != 1:
        raise ConfigError("give one of --parameters, --model and --run: they decide what is sent")
    itemsize = ITEMSIZES[options.dtype or "float32"]
    if recorded:
        for name in ("tokens", "tflops", "efficiency"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name}: --run already states how long a step computes: omit one of them")
        workload = from_run(options.recorded, recorded, itemsize, config.quantizer)
        if options.compute_seconds:
            workload = replace(workload, compute=_seconds(options.compute_seconds), how="--compute-seconds")
        return workload if options.ratio is None else replace(workload, ratio=options.ratio, ratio_ranks=1)
    if options.parameters:
        name, parameters = options.parameters, _count("--parameters", options.parameters)
        computed = parameters
    else:
        from ..check.model import load_model

        name, model = load_model(options.model)
        parameters = sum(each.numel() for each in model.parameters() if each.requires_grad)
        computed = sum(each.numel() for each in model.parameters())
        sizes = {each.dtype.itemsize for each in model.parameters()}
        itemsize = itemsize if options.dtype else max(2, min(4, max(sizes, default=4)))
    if bool(options.compute_seconds) == bool(options.tokens):
        raise ConfigError(
            "give one of --compute-seconds and --tokens: how much is hidden depends on how long a step computes"
        )
    if options.compute_seconds:
        compute, how = _seconds(options.compute_seconds), "--compute-seconds"
    else:
        tokens = _count("--tokens", options.tokens)
        compute, how = compute_from_tokens(computed, tokens, place.tflops, options.efficiency)
    return Workload(name, parameters, itemsize, compute, how, options.ratio)


def _count(option: str, text: str) -> int:
    match = _COUNT.fullmatch(text)
    number = float(match[1]) * _UNITS[match[2]] if match else 0.0
    count = round(number) if number < _MOST_COUNT else 0
    if count < 1:
        raise ConfigError(f"{option} {text}: allowed: a number such as 124M, 7B or 1e9")
    return count


def _seconds(text: str) -> Interval:
    try:
        ends = [float(each) for each in text.split(":")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2) or not 0 <= ends[0] <= ends[-1] < math.inf:
        raise ConfigError(f"--compute-seconds {text}: allowed: seconds, or LOW:HIGH, such as 0.5 or 0.4:0.6")
    return Interval(ends[0], sum(ends) / len(ends), ends[-1])
