"""Contenders in turns, A B A B, on the same data in the same run: time, bytes and error of each."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.config import Config
from ...core.errors import NczError
from ...core.runtime import trace
from . import verify
from .contenders import CONTENDERS, Context, Exchange
from .data import Source, values
from .gather import gathered
from .job import Job
from .network import namespace, require_crossing, sent_bytes

SECONDS = 2.0  # for every contender and size, unless the least number of rounds takes longer
_ROUNDS = range(5, 101)  # how many that may be
# Sent before every call over a limited link, as such a link lets through at once what it saved up while it was idle,
# 128 KiB: all that a small compressed tensor needs.
_DRAIN_BYTES = 256 << 10

# Shares of the data that a bandwidth-optimal collective over n ranks moves through each of them: what nccl-tests
# multiplies algbw by to get busbw.
_BUS_SHARES = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


def elements(collective: str, size: int, ranks: int, itemsize: int = 4) -> tuple[int, int]:
    """Of a tensor of about `size` bytes: how many it has, and how many nccl-tests would count.

    The tensor is the larger one of input and output. With a part for every rank it is the parts that count.
    """
    if collective in ("all_reduce", "broadcast"):
        count = max(1, size // itemsize)
        return count, count
    part = max(1, size // itemsize // ranks)
    return part * ranks, part


def bandwidths(collective: str, nbytes: int, ranks: int, seconds: float) -> tuple[float, float]:
    """algbw and busbw of nccl-tests, in GB/s."""
    algbw = 1e-9 * nbytes / seconds
    return algbw, algbw * _BUS_SHARES[collective](ranks)


@dataclass
class Turns:
    """What one rank saw of one contender at one size.

    Attributes:
        seconds: of each timed round.
        sent: bytes sent in each timed round; nan where nothing is counted.
        details: of the last round's call.
        error: of its result: relative L2, and the largest of an element.
        over: the largest error as a share of the bound; None where there is no bound.
    """

    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    error: tuple[float, float] = (0.0, 0.0)
    over: float | None = None


class Measurement:
    """One job on one rank. All ranks make the same calls.

    Args:
        sources: of the data; if there are several, they take turns.
        emit: takes what there is to tell, of JSON types: {"progress": share of the work}, {"result": record} and
            {"trace": what Perfetto opens}.
    """

    def __init__(self, job: Job, sources: list[Source], emit: Callable[[dict[str, Any]], None]):
        self.job = job
        self._sources = sources
        self._emit = emit
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        # Nobody's connections are in use just before a call. Those of plain calls would be faster if they were.
        self._between = dist.new_group()
        self.config = Config.load(job.config)
        where = gathered(namespace())
        self._counts_bytes = where.index(where[self.rank]) == self.rank  # one rank for each network namespace
        self._own_links = len(set(where)) == self.ranks

    def run(self) -> None:
        """Emit a record for every size and contender. Raises NczError where a result is wrong."""
        job = self.job
        context = Context(self.config, dist.group.WORLD, self.ranks, self.rank, job.collective, job.sends_weights)
        whole, _ = elements(job.collective, job.sizes[-1], self.ranks, job.itemsize)
        numel = whole // self.ranks if job.collective == "all_gather" else whole
        data = [values(source, self.rank, numel, getattr(torch, job.dtype)) for source in self._sources]
        with ExitStack() as opened:
            exchanges = {name: opened.enter_context(CONTENDERS[name].open(context)) for name in job.peers}
            for size in job.sizes:
                self._size(size, data, exchanges)
            if job.trace:
                self._trace(exchanges["ncz"], data[0])

    def _size(self, size: int, data: list[Tensor], exchanges: dict[str, Exchange]) -> None:
        collective = self.job.collective
        numel, count = elements(collective, size, self.ranks, self.job.itemsize)
        versions = [each[: count if collective == "all_gather" else numel] for each in data]
        warm_up = [self._turn(exchange, versions[-1])[0] for exchange in exchanges.values()]
        for exchange in exchanges.values():
            exchange.details()  # of the warm-up: not to be counted
        rounds = self.job.repeat or self._rounds(warm_up)
        answer = verify.exact(collective, versions[(rounds - 1) % len(versions)], self.config.quantizer)
        turns = {name: Turns() for name in exchanges}
        for number in range(rounds):
            for name, exchange in exchanges.items():
                turn = turns[name]
                seconds, sent, result = self._turn(exchange, versions[number % len(versions)])
                turn.seconds.append(seconds)
                turn.sent.append(sent)
                turn.details = exchange.details()
                if number == rounds - 1:  # at once, as the next contender may write over it
                    self._check(turn, exchange, result.cpu(), answer)
            before = sum(other for other in self.job.sizes if other < size)
            self._emit({"progress": (before + size * (number + 1) / rounds) / sum(self.job.sizes)})
        plain = None
        for name, turn in turns.items():
            record = self._record(turn, numel * self.job.itemsize, count, name, exchanges[name].op)
            plain = plain or record["time_us"]
            self._emit({"result": record | {"speedup": plain / record["time_us"]}})

    def _trace(self, exchange: Exchange, data: Tensor) -> None:
        """Record one more call of the largest size on all ranks."""
        exchange.load(data)
        dist.barrier()
        origin = 1e6 * time.perf_counter()  # ranks on several machines have no clock in common but this moment
        with trace.recording() as events:
            exchange.run()
        joined = []
        for rank, (start, own) in enumerate(gathered((origin, events))):
            joined.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
            joined += [event | {"pid": rank} | ({"ts": event["ts"] - start} if "ts" in event else {}) for event in own]
        self._emit({"trace": {"traceEvents": joined, "displayTimeUnit": "ms"}})

    def _turn(self, exchange: Exchange, x: Tensor) -> tuple[float, float, Tensor]:
        """One call: seconds on this rank, bytes that its network namespace sent, and the result."""
        exchange.load(x)
        if self.job.link:
            dist.all_reduce(torch.zeros(_DRAIN_BYTES, dtype=torch.uint8, device="cpu"), group=self._between)
        dist.barrier(self._between)
        before = sent_bytes()
        begun = time.perf_counter()
        result = exchange.run()
        seconds = time.perf_counter() - begun
        dist.barrier(self._between)  # now what was sent has arrived everywhere
        after = sent_bytes()
        return seconds, float("nan") if before is None or after is None else float(after - before), result

    def _rounds(self, seconds: list[float]) -> int:
        """How many rounds to time, the same on all ranks."""
        slowest = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        fitting = int(SECONDS * len(seconds) / slowest.sum().item())
        return min(max(fitting, _ROUNDS.start), _ROUNDS.stop - 1)

    def _check(self, turn: Turns, exchange: Exchange, result: Tensor, answer: verify.Answer) -> None:
        divisor = self.ranks if exchange.op == "avg" else 1
        turn.error = verify.errors(result, answer, divisor)
        if turn.details.get("compressed_calls") and answer.allowed is not None:
            turn.over = answer.over(result, divisor)

    def _record(self, turn: Turns, nbytes: int, count: int, name: str, op: str) -> dict[str, Any]:
        """What all ranks saw together."""
        seconds = torch.tensor(turn.seconds, dtype=torch.float64, device="cpu")
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        sent = torch.tensor(
            turn.sent if self._counts_bytes else [0.0] * len(turn.sent), dtype=torch.float64, device="cpu"
        )
        dist.all_reduce(sent)
        details, shares = zip(*gathered((turn.details, turn.over)))
        over = None if None in shares else max(shares)
        if over is not None and over > 1:
            raise NczError(f"{name}: {self.job.collective} of {nbytes} bytes is {over:.6g} times its bound off")
        wire = plain_wire = None
        if "wire_bytes" in turn.details:
            wire, plain_wire = (sum(each[key] for each in details) for key in ("wire_bytes", "plain_bytes"))
        network = None if sent.isnan().any() else statistics.median(sent.tolist())
        least = self._least_plain_bytes(nbytes) if name == "plain" else wire
        if self.job.link and self._own_links and least:  # ranks of one node exchange some bytes inside it
            require_crossing(f"{name}, {self.job.collective} of {nbytes:,} bytes", self.job.link, least, network)
        median = statistics.median(seconds.tolist())
        algbw, busbw = bandwidths(self.job.collective, nbytes, self.ranks, median)
        error, largest = turn.error
        return {
            "ranks": self.ranks,
            "peer": name,
            "size": nbytes,
            "count": count,
            "type": self.job.dtype,
            "op": op,
            "rounds": len(turn.seconds),
            "time_us": 1e6 * median,
            "times_us": [1e6 * s for s in seconds.tolist()],
            "algbw": algbw,
            "busbw": busbw,
            "ratio": plain_wire / wire if wire else None,
            "wire_bytes": wire,
            "network_bytes": network,
            "coders": _added(details, "coders"),
            "bypasses": _added(details, "bypasses"),
            "error": error,
            "max_error": largest,
            "of_bound": over,
        }

    def _least_plain_bytes(self, nbytes: int) -> int:
        """What all ranks together must send at least, uncompressed."""
        passes = 2 if self.job.collective == "all_reduce" else 1
        return passes * (self.ranks - 1) * nbytes


def _added(details: tuple[dict[str, Any], ...], key: str) -> dict[str, int] | None:
    """Counts by name, over ranks, the most frequent first; None for contenders that count nothing."""
    if not all(key in each for each in details):
        return None
    return dict(sum((Counter(each[key]) for each in details), Counter()).most_common())
