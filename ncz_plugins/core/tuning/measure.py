"""Measures the link, the codec, and real all-reduces, plain and compressed, to choose what is fastest here.

Of each time the maximum over ranks is taken before anything follows from it, so that all do the same and choose alike.
The data are Laplace values, other ones on every rank: at the default bound they compress as the gradients of a small
GPT do.
"""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median_low

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.backend import Backend
from ...kernels.format import Coder, Coding, Predictor, blocks_of, max_frame_bytes
from ...version import __version__
from ..call import Call
from ..call_queue import CallQueue
from ..config import FRAME_BYTES, CoderCosts, Config, KiB, MiB, format_size
from ..errors import UnsupportedError
from ..group import Group
from ..messages import say
from ..planning import layout_of_sum
from ..run import decide, enter
from ..run import run as run_call
from ..runtime.device import Host
from ..runtime.statistics import Counters
from ..schedules.choice import schedule_for
from ..training.policy import ParameterSlice
from ..training.state import Training
from ..transport.base import PlainCollectives
from ..transport.topology import Nodes
from .decisions import SHARED, SPARE, best, connections_to_use, crossover, ranks_on_a_core, rans_costs
from .tuning_file import SpeedComparison, Trial, Tuning

OPENING_SECONDS = 2.0
_LINK_SECONDS = 0.02  # of an exchange that tells the speed of the link
_ENOUGH = 0.75  # of them
_LEAST_SECONDS = 1e-6  # that an exchange takes beyond a trip, as clocks and trips vary
_BURST_SECONDS = 0.04  # of coding, that tells how many cores a rank has: several turns of the scheduler
_READY_SECONDS = 0.01  # from when on all ranks should know when it begins, beyond what messages take
_OTHER_CLOCK_SECONDS = 1.0  # by which a rank is not late, but has another clock
_ENOUGH_CORES = 2.0  # for a rank, which codes in up to two threads
_FRAMES = (FRAME_BYTES, MiB, 256 * KiB, 2 * MiB, 8 * MiB)  # the ordinary one first; few at the opening
_FRAMES_AT_OPENING = 2
_LEAST_BYTES, _GROWTH = 16 * KiB, 4
_LARGEST_BYTES = 64 * MiB
_EXCHANGED_BYTES = 16 * MiB  # at once, to find the link's speed
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 9  # odd, for medians
_CODING_ROUNDS = 12
_ITEMSIZE = 4  # of float32
_TILE = 1 << 18  # values; more are made by repeating, which no coder sees
# Steps for Laplace values of scale 1: that of the default bound, and one that turns 19 of 20 codes into zero.
_STEPS = 2**-0.5, 6.0


class Subject(ABC):
    """Ranks that are measured together.

    Attributes:
        config: what is left open in it is to be chosen.
        exchanging: how many ranks exchange frames with each other: all of them, or one of each node.
        schedules: what there is to choose from, the ordinary one first.
        peers: whom this rank sends a frame to, and whom it receives one from, under the ordinary schedule.
    """

    config: Config
    rank: int
    world_size: int
    exchanging: int
    schedules: Sequence[str]
    peers: Sequence[tuple[int, int]]

    @abstractmethod
    def highest(self, numbers: Sequence[float]) -> list[float]:
        """The element-wise maximum over all ranks."""

    @abstractmethod
    def exchange(self, frame: Tensor, times: int = 1) -> None:
        """Send a frame to all of `peers`, so many times, and receive theirs, of the same size."""

    @abstractmethod
    def plain(self, tensor: Tensor) -> None:
        """The uncompressed all-reduce, in place."""

    @abstractmethod
    def compressed(self, tensor: Tensor, config: Config) -> None:
        """The compressed all-reduce, in place."""


class TorchRanks(Subject):
    """The ranks of a communicator.

    Attributes:
        transport: between all of them, for tensors in host memory.
        host: what serves these on this rank.

    Args:
        queue: runs compressed calls.
        plain: the uncompressed collectives of the group that the communicator was made for.
        config: see Subject.
        ranks: global ranks of the group; `rank` is this one's number among them.
        nodes: which of them share a node; None where every rank stands for itself.
    """

    def __init__(
        self,
        queue: CallQueue,
        plain: PlainCollectives,
        config: Config,
        ranks: Sequence[int],
        rank: int,
        nodes: Nodes | None,
    ):
        self._queue = queue
        self._plain = plain
        self._ranks = ranks
        self._nodes = nodes
        self.host, self.transport = queue.routes.of(torch.device("cpu"))
        self._everyone = self.transport
        self._between = nodes.between(self._everyone) if nodes else self._everyone
        # What calls of measuring leave behind is no concern of the training that follows.
        self._training = Training(Config(quantizer=config.quantizer.changed(error_feedback=False)))
        self.config = config
        self.rank = rank
        self.world_size = len(ranks)
        self.exchanging = self._between.world_size
        ordinary = schedule_for(self.exchanging)
        self.schedules = sorted(("ring", "direct"), key=lambda name: name != ordinary)
        place, n = self._between.rank, self.exchanging
        self.peers = [(peer, peer) for peer in range(n) if peer != place]
        if ordinary == "ring":
            self.peers = [((place + 1) % n, (place - 1) % n)]

    def highest(self, numbers):
        joined = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._everyone.start_max(joined, Counters()).wait()
        return joined.tolist()

    def exchange(self, frame, times=1):
        streams = self._between.streams(list(self.peers), times, frame.numel(), Counters())
        for stream in times * streams:
            stream.exchange(frame)
        for stream in times * streams:
            stream.receive()
        for stream in streams:
            stream.finish()

    def plain(self, tensor):
        self._plain.all_reduce(tensor, dist.ReduceOp.SUM).wait()

    def compressed(self, tensor, config):
        group = Group(self._training, config, self._ranks, self.rank, self._nodes)
        parts = [ParameterSlice(None, tensor.numel())]
        call = Call("all_reduce", tensor, tensor, dist.ReduceOp.SUM, parts=parts)
        decide(group, call)
        if call.bypass is not None:
            return self.plain(tensor)
        enter(group, call)
        self._queue.submit(call.collective, tensor.device, partial(run_call, group, call)).wait()


def measure_link(subject: TorchRanks, machines: Sequence[Sequence[int]]) -> Config:
    """The configuration of ranks that have just connected, with the speed of their link, which rank 0 says.

    With `connections: auto`, one of the connections is used from then on, or several where these carry more.
    Where ranks share cores, coders cost more, so that others are chosen. No value depends on the coder. Where a rank
    has no second core, it decodes on the thread that does all else.
    Takes 0.2 to 0.5 seconds; longer on links of less than 10 Mbit/s, and with a long round trip: about 2 with 50 ms.

    Args:
        machines: the ranks of each, which share its cores.
    """
    backend, transport = subject.host.backend, subject.transport
    trip = transport.trip_seconds = _latency(subject, 3, min)
    gbps = 0.0

    def carried(count: int) -> float:
        nonlocal gbps
        transport.channels = count
        gbps = _link_gbps(subject, backend, _LINK_SECONDS, trip, times=count, expected=gbps)
        return gbps

    if transport.channels > 1 and subject.config.transport.connections == "auto":
        transport.channels, gbps = connections_to_use(carried)
    else:
        gbps = carried(transport.channels)
    # As long as by itself that coding takes, if it is more than 1.
    times = ranks_on_a_core(_cores_of_each(subject, backend, trip, machines), machines)
    if 1 / times < SPARE:
        subject.host.use_one_thread()
    costs = None if times < SHARED else _costs_of(subject, backend, times)
    config = subject.config.resolved(link_gbps=float(f"{gbps:.3g}"), costs=costs)
    if subject.rank == 0:
        words = f"the link carries {config.transport.link_gbps:g} Gbit/s"
        if transport.channels > 1:
            words += f" over {transport.channels} connections with each rank"
        least = format_size(config.min_bytes_in_effect(ranks=subject.world_size))
        words += f"; tensors of {least} and more are compressed"
        if costs is not None:
            words += f"; ranks share cores, so that coding takes {times:.1f} times as long"
        say(f"ncz_plugins: {words}", sys.stderr)
    return config


def measure_open_settings(subject: TorchRanks, on_gpus: bool) -> Config:
    """The configuration of ranks that have just connected, with what it leaves open measured, and said by rank 0.

    Raises UnsupportedError where tensors would be on GPUs.
    """
    if on_gpus:
        raise UnsupportedError(
            "transport: frame_bytes and min_bytes: auto is measured with tensors in host memory over gloo, not over "
            "NCCL; name sizes, such as 4MiB and 64KiB"
        )
    tuned = measure(subject, OPENING_SECONDS)
    if subject.rank == 0:
        say(f"ncz_plugins: measured {tuned.describe()}")
    return tuned.fill_in(subject.config)


def measure(subject: Subject, seconds: float, tell: Callable[[str], None] = lambda what: None) -> Tuning:
    """Measure for about so many seconds, and choose. A collective of all ranks.

    Args:
        seconds: what does not fit is left out; at the least a few small all-reduces are made.
        tell: called with what is being measured.
    """
    clock = _Clock(subject, seconds)
    tell("link")
    latency = _latency(subject, 21, median_low)
    backend = Host().backend
    link_gbps = _link_gbps(subject, backend, seconds / 100, latency)
    tell("coders")
    costs = _costs(subject, backend)
    config = subject.config.resolved(link_gbps=link_gbps, costs=costs).with_transport(min_bytes=0)
    data = _Data(subject.rank)
    trials = _trials(subject, config, data, clock, tell)
    chosen = best(trials)
    config = config.with_transport(schedule=chosen.schedule, frame_bytes=chosen.frame_bytes)
    comparisons = _comparisons(subject, config, data, clock, tell)
    return Tuning(
        format=1,
        world_size=subject.world_size,
        schedule=chosen.schedule,
        frame_bytes=chosen.frame_bytes,
        min_bytes=crossover(comparisons),
        link_gbps=link_gbps,
        costs=costs,
        latency_seconds=latency,
        trials=trials,
        comparisons=comparisons,
        quantizer=config.quantizer.describe(),
        kernels=backend.name,
        version=__version__,
    )


class _Clock:
    """How much of the time is left, the same for all ranks."""

    def __init__(self, subject: Subject, seconds: float):
        self._subject = subject
        self._started = time.perf_counter()
        self.seconds = seconds

    def left(self) -> float:
        (elapsed,) = self._subject.highest([time.perf_counter() - self._started])
        return self.seconds - elapsed


class _Data:
    """Laplace values, this rank's own."""

    def __init__(self, rank: int):
        self._tile = torch.from_numpy(np.random.default_rng(rank).laplace(size=_TILE).astype(np.float32))

    def of(self, nbytes: int) -> Tensor:
        count = nbytes // _ITEMSIZE
        return self._tile.repeat(-(-count // _TILE))[:count]


def _latency(subject: Subject, rounds: int, choose: Callable[[Sequence[float]], float]) -> float:
    """Seconds of the smallest all-reduce: what `choose` takes from those of so many rounds.

    A round is two in a row. A rank that begins one a trip later than another finds that one's message there, and waits
    twice as long in the next.
    """
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(2):
            subject.highest([0.0])
        seconds.append((time.perf_counter() - started) / 2)
    (joined,) = subject.highest([choose(seconds)])
    return joined


def _link_gbps(
    subject: Subject, backend: Backend, seconds: float, trip: float, times: int = 1, expected: float = 0.0
) -> float:
    """Gbit/s that every rank can send while all of them do, by exchanges that take about so many seconds each.

    Args:
        trip: seconds of a short message, which are no part of the others.
        times: so many frames at once, which may take as many connections.
        expected: Gbit/s, from which follows the size to begin with.

    What passes at once after a pause, as through a token bucket, is spent by the exchanges that find the size.
    """
    exchange = partial(subject.exchange, times=times)
    most = _EXCHANGED_BYTES // times
    codes = torch.full((most // _ITEMSIZE,), 2**30, dtype=torch.int32, device="cpu")  # as wide in the frame
    buffer = torch.empty(max_frame_bytes(codes.numel()), dtype=torch.uint8, device="cpu")
    sends = times * len(subject.peers)

    nbytes = min(max(2 * _LEAST_BYTES, int(expected * 1e9 / 8 * seconds / sends)), most)
    while True:
        values = codes[: nbytes // _ITEMSIZE]
        frame = buffer[: backend.encode_codes(values, Coding(Coder.RAW, Predictor.NONE), buffer)]
        (taken,) = _interleaved(subject, [exchange], frame, seconds=0, least=1)
        carrying = max(taken - 2 * trip, _LEAST_SECONDS)  # some ranks begin a trip later than others
        if carrying >= _ENOUGH * seconds or nbytes == most:
            break
        nbytes = min(int(nbytes * min(seconds / carrying, _GROWTH)), most)
    (taken,) = _interleaved(subject, [exchange], frame, seconds=0)
    gbps = 8e-9 * frame.numel() * sends / max(taken - trip, _LEAST_SECONDS)
    return min(max(gbps, 1e-3), 1e4)  # what a configuration allows


def _cores_of_each(subject: Subject, backend: Backend, trip: float, machines: Sequence[Sequence[int]]) -> list[float]:
    """How many cores each rank has while all of them code in two threads, [ranks]; more than 0.

    What the ranks of a machine had is taken from a time in which all of them coded, by its clock: in times of their
    own, each may happen to look when it has a core. No message travels meanwhile: on busy cores one may take seconds.

    Args:
        trip: seconds of a short message.
        machines: see `measure_link`.
    """
    machine = next(ranks for ranks in machines if subject.rank in ranks)

    def latest(seconds: float) -> float:
        """Of what the ranks of this machine say."""
        said = [-math.inf] * subject.world_size
        said[subject.rank] = seconds
        said = subject.highest(said)
        return max(said[rank] for rank in machine)

    begin = latest(time.monotonic()) + 2 * trip + _READY_SECONDS
    end = begin + _BURST_SECONDS
    wait = begin - time.monotonic()
    both, started = [], math.inf
    if wait < 4 * trip + _OTHER_CLOCK_SECONDS:  # else it is not one machine: a copy of a virtual one, say
        time.sleep(max(0.0, wait))
        started = time.monotonic()
        with ThreadPoolExecutor(2) as threads:
            both = list(threads.map(partial(_code, backend), [end, end]))
    start = latest(started)
    cores = [0.0] * subject.world_size
    cores[subject.rank] = _ENOUGH_CORES
    if start < end:  # else a rank began too late, or not at all, and nothing is known
        worked = sum(np.diff(np.interp((start, end), *zip(*each))).item() for each in both)
        cores[subject.rank] = max(worked / (end - start), 1e-9)
    return subject.highest(cores)


def _code(backend: Backend, end: float) -> list[tuple[float, float]]:
    """Code until `end`. Returns at which times this thread had worked for how many seconds."""
    worked = [(time.monotonic(), time.thread_time())]
    x = torch.linspace(-1, 1, _TILE, dtype=torch.float32, device="cpu")
    steps = torch.ones(blocks_of(_TILE), dtype=torch.float32, device="cpu")
    codes = torch.empty(_TILE, dtype=torch.int32, device="cpu")
    while worked[-1][0] < end:
        backend.quantize(x, steps, codes)
        worked.append((time.monotonic(), time.thread_time()))
    return worked


def _costs_of(subject: Subject, backend: Backend, times: float) -> CoderCosts:
    """What coders cost where they take so many times as long, with the slowest kernels that a rank has."""
    names, known = list(CoderCosts.model_fields), backend.costs._asdict()
    return CoderCosts(**dict(zip(names, map(round, subject.highest([times * known[name] for name in names])))))


def _costs(subject: Subject, backend: Backend) -> CoderCosts:
    """What coding a value costs while all ranks code, encoding and decoding together."""
    x = torch.from_numpy(np.random.default_rng(subject.rank).laplace(size=_TILE).astype(np.float32))
    out, codes = torch.empty_like(x), torch.empty(_TILE, dtype=torch.int32, device="cpu")
    frame = torch.empty(max_frame_bytes(_TILE), dtype=torch.uint8, device="cpu")

    def code(coder: Coder, step: float) -> None:
        scales = torch.full((blocks_of(_TILE),), step, dtype=torch.float32, device="cpu")
        size = backend.encode(x, 1 / scales, Coding(coder, Predictor.NONE), frame)
        backend.decode(frame[:size], scales, out)

    def rest(step: float) -> float:
        backend.quantize(x, torch.full((blocks_of(_TILE),), 1 / step, dtype=torch.float32, device="cpu"), codes)
        return (codes != 0).double().mean().item()

    wide, narrow = _STEPS
    cases = [(Coder.RAW, wide), (Coder.FIXED, wide), (Coder.HUFFMAN, wide), (Coder.RANS, wide), (Coder.RANS, narrow)]
    rounds = [sorted(_timed(subject, partial(code, *case)) for _ in range(_CODING_ROUNDS)) for case in cases]
    # Not the median: a round is so short that others' turns on the CPU would fill many of them.
    picoseconds = [1e12 * each / _TILE for each in subject.highest([taken[_CODING_ROUNDS // 4] for taken in rounds])]
    rans = rans_costs(picoseconds[3:], subject.highest([rest(wide), rest(narrow)]))
    return CoderCosts(**dict(zip(CoderCosts.model_fields, map(round, [*picoseconds[:3], *rans]))))


def _trials(subject: Subject, config: Config, data: _Data, clock: _Clock, tell: Callable[[str], None]) -> list[Trial]:
    """Compressed all-reduces with each schedule and frame size that is left to be chosen."""
    own = subject.config.transport
    frames = _FRAMES if clock.seconds > OPENING_SECONDS else _FRAMES[:_FRAMES_AT_OPENING]
    configs = [
        config.with_transport(schedule=schedule, frame_bytes=frame_bytes)
        for frame_bytes in (frames if own.frame_bytes == "auto" else [config.transport.frame_bytes_in_effect()])
        for schedule in (subject.schedules if own.schedule == "auto" else [own.schedule])
    ]
    runs = [partial(subject.compressed, config=each) for each in configs]
    allowed = clock.left() / 3
    tell("schedules and frame sizes")
    nbytes = _affordable(subject, runs, data, len(runs) * _compressed_seconds_per_byte(config), allowed)
    source = data.of(nbytes)
    # Of those that do the same with a tensor of this size only the first: nothing but noise would tell them apart.
    different = {}
    for each, run in zip(configs, runs):
        does = each.transport.schedule, layout_of_sum(source, subject.world_size, each)
        different.setdefault(does, (each.transport, run))
    seconds = _interleaved(subject, [run for _, run in different.values()], source, allowed)
    return [
        Trial(schedule=transport.schedule, frame_bytes=transport.frame_bytes, nbytes=nbytes, seconds=taken)
        for (transport, _), taken in zip(different.values(), seconds)
    ]


def _comparisons(
    subject: Subject, config: Config, data: _Data, clock: _Clock, tell: Callable[[str], None]
) -> list[SpeedComparison]:
    """Plain beside compressed, from a small size to the largest that there is time for."""
    runs = [subject.plain, partial(subject.compressed, config=config)]
    tell("plain and compressed")
    per_byte = _plain_seconds_per_byte(config) + _compressed_seconds_per_byte(config)
    nbytes = _affordable(subject, runs, data, per_byte, clock.left() * 2 / 3)
    comparisons = []
    while nbytes >= _LEAST_BYTES:
        tell(f"plain and compressed, {format_size(nbytes)}")
        plain, compressed = _interleaved(subject, runs, data.of(nbytes), clock.left() / 2)
        comparisons.append(SpeedComparison(nbytes=nbytes, plain_seconds=plain, compressed_seconds=compressed))
        nbytes //= _GROWTH
    return comparisons[::-1]


def _affordable(
    subject: Subject, runs: Sequence[Callable[[Tensor], None]], data: _Data, seconds_per_byte: float, seconds: float
) -> int:
    """The largest size of which all of `runs` can have the least number of rounds in so many seconds.

    Args:
        seconds_per_byte: what a size takes, in all of `runs`, beyond what the smallest one does.
    """
    once = sum(_interleaved(subject, runs, data.of(_LEAST_BYTES), seconds=0))
    nbytes = _LEAST_BYTES
    while nbytes < _LARGEST_BYTES and _LEAST_ROUNDS * (once + _GROWTH * nbytes * seconds_per_byte) < seconds:
        nbytes *= _GROWTH
    return nbytes


def _plain_seconds_per_byte(config: Config) -> float:
    """A guess from above: all of a tensor is sent twice."""
    return 2 * 8e-9 / config.transport.link_gbps


def _compressed_seconds_per_byte(config: Config) -> float:
    """A guess from above: it is sent at an eighth of its size, and coded twice as slowly as was measured."""
    costs = config.entropy.costs
    return _plain_seconds_per_byte(config) / 8 + 2e-12 * (costs.rans + costs.rans_rest) / _ITEMSIZE


def _interleaved(
    subject: Subject,
    runs: Sequence[Callable[[Tensor], None]],
    source: Tensor,
    seconds: float,
    least: int = _LEAST_ROUNDS,
) -> list[float]:
    """Seconds that each of `runs` takes on a copy of `source`: medians over rounds in which they take turns.

    Args:
        seconds: for all rounds, of which there are `least` in any case.
    """
    work = torch.empty_like(source)
    rounds: list[list[float]] = []
    spent = 0.0
    # One more, if it fits by what those before it took.
    while len(rounds) < least or (len(rounds) < _MOST_ROUNDS and spent * (1 + 1 / len(rounds)) < seconds):
        taken = []
        for run in runs:
            work.copy_(source)
            taken.append(_timed(subject, partial(run, work)))
        rounds.append(subject.highest(taken))
        spent += sum(rounds[-1])
    return [median_low(of_one) for of_one in zip(*rounds)]


def _timed(subject: Subject, run: Callable[[], None]) -> float:
    """Seconds on this rank, begun with the others."""
    subject.highest([0.0])
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
