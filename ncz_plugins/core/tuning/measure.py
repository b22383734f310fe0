"""Measurement of the link, the coders, and all-reduces plain and compressed, to choose the fastest settings.

Decisions use the maximum of a time over all ranks, so all ranks decide alike. The data are Laplace-distributed values,
different on each rank: at the default bound they compress like the gradients of a small GPT.
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
from ..planning import layout_of_sum, segments_of_sum
from ..run import decide, enter
from ..run import run as run_call
from ..runtime.device import HOST, Host
from ..runtime.statistics import Counters
from ..schedules.choice import schedule_for
from ..training.policy import ParameterSlice
from ..training.state import Training
from ..transport.base import PlainCollectives
from ..transport.mesh import connects_all
from ..transport.topology import Between, Nodes
from .decisions import (
    MIN_CORES_FOR_TWO_THREADS,
    MIN_SLOWDOWN_OF_SHARED_CORES,
    best,
    connections_to_use,
    crossover,
    ranks_on_a_core,
    rans_costs,
)
from .tuning_file import SpeedComparison, Trial, Tuning

OPENING_SECONDS = 2.0
_LINK_SECONDS = 0.02  # length of an exchange that measures the link
_MIN_SHARE_OF_LINK_SECONDS = 0.75  # a shorter exchange is repeated with more bytes
_MIN_EXCHANGE_SECONDS = 1e-6  # time beyond a round trip; clocks and round trips vary
_BURST_SECONDS = 0.04  # length of the coding that counts a rank's cores: several time slices of the scheduler
_READY_SECONDS = 0.01  # delay before that coding starts, so that all ranks know its start
_OTHER_CLOCK_SECONDS = 1.0  # a start this far away comes from a machine with another clock
_MAX_CORES = 2.0  # a rank codes in up to two threads
_MIN_CORES = 1e-3  # counted for a rank that got no time at all on a busy machine
_FRAME_BYTES = (FRAME_BYTES, MiB, 256 * KiB, 2 * MiB, 8 * MiB)  # frame sizes to try, the default first
_FRAME_SIZES_AT_OPENING = 2  # of these, tried when a communicator opens
_MIN_BYTES, _GROWTH = 16 * KiB, 4  # smallest all-reduce, and the factor to the next size
_MAX_BYTES = 64 * MiB
_MAX_EXCHANGED_BYTES = 16 * MiB  # sent at once to measure the link
_MIN_ROUNDS, _MAX_ROUNDS = 3, 9  # odd, for medians
_CODING_ROUNDS = 12
_ITEMSIZE = 4  # bytes of a float32
_TILE_VALUES = 1 << 18  # longer data repeat this tile, which no coder notices
# Quantization steps for Laplace values of scale 1: that of the default bound, and one that makes 19 of 20 codes zero.
_WIDE_STEP, _NARROW_STEP = 2**-0.5, 6.0


class Subject(ABC):
    """Group of ranks to measure, seen from one of them.

    Attributes:
        config: configuration whose open settings are to be chosen.
        rank, world_size: this rank, and the number of ranks.
        exchanging: number of ranks that exchange frames: all of them, or one per node.
        shares: parts of a tensor that are exchanged apart: one for each rank of a node that speaks to others, or 1.
        schedules: schedules to choose from, the default first.
        peers: (rank to send to, rank to receive from) under the default schedule.
    """

    config: Config
    rank: int
    world_size: int
    exchanging: int
    shares: int = 1
    schedules: Sequence[str]
    peers: Sequence[tuple[int, int]]

    @abstractmethod
    def highest(self, numbers: Sequence[float]) -> list[float]:
        """Element-wise maximum over all ranks."""

    @abstractmethod
    def exchange(self, frame: Tensor, times: int = 1) -> None:
        """Send a frame `times` times to all of `peers`, and receive frames of the same size from them."""

    @abstractmethod
    def plain(self, tensor: Tensor) -> None:
        """Uncompressed all-reduce, in place."""

    @abstractmethod
    def compressed(self, tensor: Tensor, config: Config) -> None:
        """Compressed all-reduce with the settings of `config`, in place."""


class TorchRanks(Subject):
    """Ranks of a communicator.

    Attributes:
        transport: transport between all ranks, for tensors in host memory.
        host: kernels and threads for these tensors on this rank.

    Args:
        queue: queue that runs compressed calls.
        plain: uncompressed collectives of the communicator's group.
        config: see Subject.
        ranks: global ranks of the group.
        rank: index of this rank in `ranks`.
        nodes: ranks that share a node; None if nodes play no part.
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
        self.host, self.transport = queue.routes.of(HOST)
        # Ranks that don't speak with other nodes take part in all but the exchange of frames.
        own, self.exchanging = (nodes.node, nodes.count) if nodes else (rank, len(ranks))
        self.shares = nodes.speakers if nodes else 1
        self._speaks = nodes is None or nodes.speaks
        self._frames = Between(self.transport, nodes) if nodes and nodes.speaks else self.transport
        # A training of its own, so that measuring leaves no trace in that of the user.
        quantizer = config.quantizer.changed(error_feedback=False, rotation=False)
        self._training = Training(Config(quantizer=quantizer))
        self.config = config
        self.rank = rank
        self.world_size = len(ranks)
        default = schedule_for(self.exchanging, _MAX_BYTES)
        # Direct would connect all ranks with each other, for as long as they live.
        names = ("ring", "direct", "halving") if connects_all(self.exchanging) else ("ring", "halving")
        self.schedules = sorted(names, key=lambda name: name != default)
        n = self.exchanging
        self.peers = [(peer, peer) for peer in range(n) if peer != own]
        if default == "halving":  # whose ranks are not connected with all others
            self.peers = [((own + 1) % n, (own - 1) % n)]

    def highest(self, numbers):
        maximum = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self.transport.start_max(maximum, Counters()).wait()
        return maximum.tolist()

    def tell_next(self) -> None:
        """Send a short message to the next rank, and wait until it comes back: one trip each way.

        Without the way back, ranks with near neighbours would find messages of ranks that ran ahead.
        """
        n, told = self.world_size, torch.zeros(3, dtype=torch.float32, device="cpu")
        after, before = (self.rank + 1) % n, (self.rank - 1) % n
        own, others, back = told.split(1)
        for to, sent, source, received in ((after, own, before, others), (before, others, after, back)):
            for work in self.transport.plain.exchange([(to, sent)], [(source, received)]):
                work.wait()

    def exchange(self, frame, times=1):
        if not self._speaks:
            return
        streams = self._frames.streams(list(self.peers), [1] * times, frame.numel(), Counters())
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


def measure_trip(subject: TorchRanks) -> None:
    """Time how long a short message takes to the next rank, for `Transport.trip_seconds`. A collective of all ranks.

    Takes 13 messages, one after the other: milliseconds, or 0.4 seconds with a round trip of 50 ms.
    """
    # An agreement takes longer than a trip where there are many ranks or few cores. Some rank is next to a far one.
    subject.transport.trip_seconds = _latency(subject, 3, min, subject.tell_next) / 2


def measure_link(subject: TorchRanks, machines: Sequence[Sequence[int]]) -> Config:
    """Measure the link of ranks that have just connected, and return their configuration with its speed.

    A collective of all ranks; rank 0 prints the result. Takes 0.2 to 0.5 seconds, longer on links below 10 Mbit/s and
    with long round trips (2 seconds with 50 ms). Also decides three things:

    - With `connections: auto`, how many connections are used from now on.
    - If ranks share cores, coding is slower, and the returned costs make other coders win. Results don't depend on the
      coder.
    - If a rank has no second core, it decodes on the thread that does everything else.

    Args:
        machines: ranks of each machine, which share its cores.
    """
    # Measure the link, with as many connections as it takes.
    backend, transport = subject.host.backend, subject.transport
    trip = _latency(subject, 3, min, partial(subject.highest, [0.0]))
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
    # Measure the cores. Above 1: coding takes this many times as long as on a free core.
    times = ranks_on_a_core(_cores_of_each(subject, backend, trip, machines), machines)
    if 1 / times < MIN_CORES_FOR_TWO_THREADS:
        subject.host.use_one_thread()
    costs = None if times < MIN_SLOWDOWN_OF_SHARED_CORES else _known_costs(subject, backend, times)
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
    """Measure ranks that have just connected, and return their configuration with every open setting filled in.

    A collective of all ranks; rank 0 prints the result. Raises UnsupportedError if tensors will be on GPUs.
    """
    if on_gpus:
        raise UnsupportedError(
            "transport: frame_bytes and min_bytes: auto works with tensors in host memory over gloo, not over NCCL; "
            "set sizes, such as 4MiB and 64KiB"
        )
    tuned = measure(subject, OPENING_SECONDS)
    if subject.rank == 0:
        say(f"ncz_plugins: measured {tuned.describe()}")
    return tuned.fill_in(subject.config)


def measure(subject: Subject, seconds: float, tell: Callable[[str], None] = lambda what: None) -> Tuning:
    """Measure link, coders and all-reduces, and choose settings. A collective of all ranks.

    Args:
        subject: the ranks.
        seconds: time for measuring, approximately. Measurements that don't fit are left out; a few small all-reduces
            are always made.
        tell: called with the name of each measurement when it starts.
    """
    # Measure the parts: link and coders.
    clock = _Clock(subject, seconds)
    tell("link")
    latency = _latency(subject, 21, median_low, partial(subject.highest, [0.0]))
    backend = Host().backend
    link_gbps = _link_gbps(subject, backend, seconds / 100, latency)
    tell("coders")
    costs = _measured_costs(subject, backend)
    config = subject.config.resolved(link_gbps=link_gbps, costs=costs).with_transport(min_bytes=0)
    # Measure all-reduces: choose schedule and frame size, then the smallest size that gains.
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
    """Clock that counts down from `seconds`. All ranks read the same time."""

    def __init__(self, subject: Subject, seconds: float):
        self._subject = subject
        self._started = time.perf_counter()
        self.seconds = seconds

    def left(self) -> float:
        (elapsed,) = self._subject.highest([time.perf_counter() - self._started])
        return self.seconds - elapsed


class _Data:
    """Laplace-distributed values, different on each rank."""

    def __init__(self, rank: int):
        self._tile = torch.from_numpy(np.random.default_rng(rank).laplace(size=_TILE_VALUES).astype(np.float32))

    def of(self, nbytes: int) -> Tensor:
        """float32, 1-D, of `nbytes`."""
        count = nbytes // _ITEMSIZE
        return self._tile.repeat(-(-count // _TILE_VALUES))[:count]


def _latency(
    subject: Subject, rounds: int, choose: Callable[[Sequence[float]], float], send: Callable[[], object]
) -> float:
    """Seconds that `send` takes on the slowest rank.

    A round sends twice: a rank that starts late finds the messages of others waiting, but then waits twice as long for
    the next ones.

    Args:
        rounds: number of rounds.
        choose: picks this rank's time from those of all rounds.
        send: sends a short message, and waits for what comes in return.
    """
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(2):
            send()
        seconds.append((time.perf_counter() - started) / 2)
    (slowest,) = subject.highest([choose(seconds)])
    return slowest


def _link_gbps(
    subject: Subject, backend: Backend, seconds: float, trip: float, times: int = 1, expected: float = 0.0
) -> float:
    """Gbit/s that every rank can send while all ranks send.

    First looks for a number of bytes whose exchange takes long enough, then times that. The first exchanges also use up
    the burst that a link lets through after a pause (a token bucket).

    Args:
        seconds: length of one exchange, approximately.
        trip: seconds of a short message, which are subtracted.
        times: number of frames sent at once to each peer; they may use that many connections.
        expected: expected Gbit/s, which gives the first size; 0 if unknown.
    """
    max_bytes = _MAX_EXCHANGED_BYTES // times
    codes = torch.full((max_bytes // _ITEMSIZE,), 2**30, dtype=torch.int32, device="cpu")  # 32 bits in the frame, too
    buffer = torch.empty(max_frame_bytes(codes.numel()), dtype=torch.uint8, device="cpu")
    sends = times * len(subject.peers)

    nbytes = min(max(2 * _MIN_BYTES, int(expected * 1e9 / 8 * seconds / sends)), max_bytes)
    while True:
        values = codes[: nbytes // _ITEMSIZE]
        frame = buffer[: backend.encode_codes(values, Coding(Coder.RAW, Predictor.NONE), buffer)]
        taken = _exchange_seconds(subject, frame, times, rounds=1)
        carrying = max(taken - 2 * trip, _MIN_EXCHANGE_SECONDS)  # some ranks start one message later than others
        if carrying >= _MIN_SHARE_OF_LINK_SECONDS * seconds or nbytes == max_bytes:
            break
        nbytes = min(int(nbytes * min(seconds / carrying, _GROWTH)), max_bytes)
    taken = _exchange_seconds(subject, frame, times, rounds=_MIN_ROUNDS)
    gbps = 8e-9 * frame.numel() * sends / max(taken - trip, _MIN_EXCHANGE_SECONDS)
    return min(max(gbps, 1e-3), 1e4)  # the range of transport.link_gbps


def _exchange_seconds(subject: Subject, frame: Tensor, times: int, rounds: int) -> float:
    """Seconds of `Subject.exchange` on the slowest rank: the median over rounds."""
    slowest = []
    for _ in range(rounds):
        started = _started_together(subject)
        subject.exchange(frame, times)
        slowest += subject.highest([time.perf_counter() - started])
    return median_low(slowest)


def _cores_of_each(subject: Subject, backend: Backend, trip: float, machines: Sequence[Sequence[int]]) -> list[float]:
    """Cores that each rank gets while all ranks code in two threads, [ranks], each above 0.

    All ranks of a machine are measured in the same interval of its clock: in an interval of its own, a rank might find
    cores that the others use a moment later. No message travels in that interval: on busy cores one may take seconds.

    Args:
        trip: seconds of a short message.
        machines: ranks of each machine.
    """
    machine = next(ranks for ranks in machines if subject.rank in ranks)

    def latest(seconds: float) -> float:
        """The maximum over the ranks of this machine."""
        times = [-math.inf] * subject.world_size
        times[subject.rank] = seconds
        times = subject.highest(times)
        return max(times[rank] for rank in machine)

    # Agree on the interval [begin, end] of the machine's clock, and code in two threads until its end.
    begin = latest(time.monotonic()) + 2 * trip + _READY_SECONDS
    end = begin + _BURST_SECONDS
    wait = begin - time.monotonic()
    both, started = [], math.inf
    if wait < 4 * trip + _OTHER_CLOCK_SECONDS:  # else ranks have different clocks, as copies of a virtual machine do
        time.sleep(max(0.0, wait))
        started = time.monotonic()
        with ThreadPoolExecutor(2) as threads:
            both = list(threads.map(_code, [backend] * 2, [end] * 2))
    # Count the CPU time that this rank got from the moment when all ranks of the machine were coding.
    start = latest(started)
    if end <= start < math.inf:  # the cores are so crowded that a rank came too late: count what the others got
        start = begin
    cores = [0.0] * subject.world_size
    cores[subject.rank] = _MAX_CORES
    if start < end:  # else a rank has another clock: assume enough cores
        worked = sum(np.diff(np.interp((start, end), *zip(*each))).item() for each in both)
        cores[subject.rank] = max(worked / (end - start), _MIN_CORES)
    return subject.highest(cores)


def _code(backend: Backend, end: float) -> list[tuple[float, float]]:
    """Quantize until `end`. Returns pairs (time, CPU seconds of this thread until then)."""
    worked = [(time.monotonic(), time.thread_time())]
    x = torch.linspace(-1, 1, _TILE_VALUES, dtype=torch.float32, device="cpu")
    steps = torch.ones(blocks_of(_TILE_VALUES), dtype=torch.float32, device="cpu")
    codes = torch.empty(_TILE_VALUES, dtype=torch.int32, device="cpu")
    while worked[-1][0] < end:
        backend.quantize(x, steps, codes)
        worked.append((time.monotonic(), time.thread_time()))
    return worked


def _known_costs(subject: Subject, backend: Backend, times: float) -> CoderCosts:
    """Costs of the coders as known from the kernels, multiplied by `times`; of all ranks the highest."""
    names, known = list(CoderCosts.model_fields), backend.costs._asdict()
    return CoderCosts(**dict(zip(names, map(round, subject.highest([times * known[name] for name in names])))))


def _measured_costs(subject: Subject, backend: Backend) -> CoderCosts:
    """Costs of the coders while all ranks code: picoseconds per value, encoding and decoding together."""
    x = torch.from_numpy(np.random.default_rng(subject.rank).laplace(size=_TILE_VALUES).astype(np.float32))
    out, codes = torch.empty_like(x), torch.empty(_TILE_VALUES, dtype=torch.int32, device="cpu")
    frame = torch.empty(max_frame_bytes(_TILE_VALUES), dtype=torch.uint8, device="cpu")

    # Time the coders. The lower quartile counts, not the median: a round is so short that other processes fill many.
    quartiles = []
    for coder, step in (
        (Coder.RAW, _WIDE_STEP),
        (Coder.FIXED, _WIDE_STEP),
        (Coder.HUFFMAN, _WIDE_STEP),
        (Coder.RANS, _WIDE_STEP),
        (Coder.RANS, _NARROW_STEP),
    ):
        scales = torch.full((blocks_of(_TILE_VALUES),), step, dtype=torch.float32, device="cpu")
        inverse_steps, taken = 1 / scales, []
        for _ in range(_CODING_ROUNDS):
            started = _started_together(subject)
            size = backend.encode(x, inverse_steps, Coding(coder, Predictor.NONE), frame)
            backend.decode(frame[:size], scales, out)
            taken.append(time.perf_counter() - started)
        quartiles.append(sorted(taken)[_CODING_ROUNDS // 4])
    picoseconds = [1e12 * each / _TILE_VALUES for each in subject.highest(quartiles)]

    # Count the codes other than 0, the most frequent one, on which the time of RANS depends.
    rests = []
    for step in (_WIDE_STEP, _NARROW_STEP):
        inverse_steps = torch.full((blocks_of(_TILE_VALUES),), 1 / step, dtype=torch.float32, device="cpu")
        backend.quantize(x, inverse_steps, codes)
        rests.append((codes != 0).double().mean().item())
    rans = rans_costs(picoseconds[3:], subject.highest(rests))
    return CoderCosts(**dict(zip(CoderCosts.model_fields, map(round, [*picoseconds[:3], *rans]))))


def _trials(subject: Subject, config: Config, data: _Data, clock: _Clock, tell: Callable[[str], None]) -> list[Trial]:
    """Time compressed all-reduces with each schedule and frame size to choose from."""
    own = subject.config.transport
    sizes = _FRAME_BYTES if clock.seconds > OPENING_SECONDS else _FRAME_BYTES[:_FRAME_SIZES_AT_OPENING]
    configs = [
        config.with_transport(schedule=schedule, frame_bytes=frame_bytes)
        for frame_bytes in (sizes if own.frame_bytes == "auto" else [config.transport.frame_bytes_in_effect()])
        for schedule in (subject.schedules if own.schedule == "auto" else [own.schedule])
    ]
    allowed = clock.left() / 3
    tell("schedules and frame sizes")
    nbytes = _affordable(subject, configs, data, len(configs) * _compressed_seconds_per_byte(config), allowed)
    source = data.of(nbytes)
    # Configurations that cut a tensor of this size alike differ by noise only: time the first of them.
    different = {}
    for each in configs:
        name = each.transport.schedule
        segments = segments_of_sum(source, name, subject.exchanging, subject.shares, each)
        different.setdefault((name, layout_of_sum(source, segments, each)), each)
    seconds = _interleaved(subject, list(different.values()), source, allowed)
    return [
        Trial(schedule=each.transport.schedule, frame_bytes=each.transport.frame_bytes, nbytes=nbytes, seconds=taken)
        for each, taken in zip(different.values(), seconds)
    ]


def _comparisons(
    subject: Subject, config: Config, data: _Data, clock: _Clock, tell: Callable[[str], None]
) -> list[SpeedComparison]:
    """Time plain and compressed all-reduces, from the largest size that there is time for down to 16 KiB."""
    tell("plain and compressed")
    per_byte = _plain_seconds_per_byte(config) + _compressed_seconds_per_byte(config)
    nbytes = _affordable(subject, [None, config], data, per_byte, clock.left() * 2 / 3)
    comparisons = []
    while nbytes >= _MIN_BYTES:
        tell(f"plain and compressed, {format_size(nbytes)}")
        plain, compressed = _interleaved(subject, [None, config], data.of(nbytes), clock.left() / 2)
        comparisons.append(SpeedComparison(nbytes=nbytes, plain_seconds=plain, compressed_seconds=compressed))
        nbytes //= _GROWTH
    return comparisons[::-1]


def _affordable(
    subject: Subject, configs: Sequence[Config | None], data: _Data, seconds_per_byte: float, seconds: float
) -> int:
    """The largest size in bytes for which the minimum number of rounds of all-reduces fits into `seconds`.

    Args:
        configs: see `_interleaved`.
        seconds_per_byte: time of one round for each byte beyond the smallest size.
    """
    once = sum(_interleaved(subject, configs, data.of(_MIN_BYTES), seconds=0))
    nbytes = _MIN_BYTES
    while nbytes < _MAX_BYTES and _MIN_ROUNDS * (once + _GROWTH * nbytes * seconds_per_byte) < seconds:
        nbytes *= _GROWTH
    return nbytes


def _plain_seconds_per_byte(config: Config) -> float:
    """Upper estimate: every byte is sent twice."""
    return 2 * 8e-9 / config.transport.link_gbps


def _compressed_seconds_per_byte(config: Config) -> float:
    """Upper estimate: an eighth of the bytes is sent, and coding takes twice as long as measured."""
    costs = config.entropy.costs
    return _plain_seconds_per_byte(config) / 8 + 2e-12 * (costs.rans + costs.rans_rest) / _ITEMSIZE


def _interleaved(subject: Subject, configs: Sequence[Config | None], source: Tensor, seconds: float) -> list[float]:
    """Seconds of an all-reduce of `source` with each of `configs`: medians over rounds, in which they take turns.

    Args:
        configs: settings of a compressed all-reduce; None: an uncompressed one.
        seconds: time for all rounds. At least 3 rounds are made.
    """
    work = torch.empty_like(source)
    rounds: list[list[float]] = []
    spent = 0.0
    # Make one more round if it fits, judging by the mean of the rounds so far.
    while len(rounds) < _MIN_ROUNDS or (len(rounds) < _MAX_ROUNDS and spent * (1 + 1 / len(rounds)) < seconds):
        taken = []
        for config in configs:
            work.copy_(source)
            started = _started_together(subject)
            if config is None:
                subject.plain(work)
            else:
                subject.compressed(work, config)
            taken.append(time.perf_counter() - started)
        rounds.append(subject.highest(taken))
        spent += sum(rounds[-1])
    return [median_low(of_one) for of_one in zip(*rounds)]


def _started_together(subject: Subject) -> float:
    """Wait for all ranks. Returns the time, in seconds of `time.perf_counter`."""
    subject.highest([0.0])
    return time.perf_counter()
