"""Measurement of contenders in turns (A B A B) on the same data: seconds, bytes and error of each."""

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
from ...core.training.policy import ParameterSlice, Policies
from . import verify
from .contenders import CONTENDERS, Context, Exchange
from .data import Source, values
from .gather import gathered
from .job import COLLECTIVES, Job
from .network import namespace, sent_bytes

SECONDS = 2.0  # for each contender and size, unless the minimum number of rounds takes longer
_ROUNDS = range(5, 501)  # allowed numbers of rounds. Of 100 short calls, one may find both ranks on one core


def elements(collective: str, size: int, ranks: int, itemsize: int = 4) -> tuple[int, int]:
    """Elements of a tensor of about `size` bytes, and elements that nccl-tests would count.

    The tensor is the larger one of input and output. nccl-tests counts elements of one rank's part if there are parts.
    """
    if not COLLECTIVES[collective].parts:
        count = max(1, size // itemsize)
        return count, count
    part = max(1, size // itemsize // ranks)
    return part * ranks, part


def bandwidths(collective: str, nbytes: int, ranks: int, seconds: float) -> tuple[float, float]:
    """algbw and busbw as in nccl-tests, in GB/s."""
    algbw = 1e-9 * nbytes / seconds
    return algbw, algbw * COLLECTIVES[collective].bus_share(ranks)


@dataclass
class Turns:
    """Measurements of one contender at one size, on one rank.

    Attributes:
        seconds: seconds of each timed round.
        sent: bytes sent in each timed round; nan if nothing is counted.
        details: `Exchange.details` of the last round.
        error: relative L2 error and largest absolute error of the last result.
        over: largest error as a share of the bound; None if there is no bound.
    """

    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    error: tuple[float, float] = (0.0, 0.0)
    over: float | None = None


class Measurement:
    """Run of one job on one rank. All ranks make the same calls.

    Args:
        job: the job.
        sources: sources of the data; several take turns.
        emit: called with {"progress": share of the work}, {"result": record} and {"trace": document for Perfetto}.

    Attributes:
        contenders: contenders that a job may name.
    """

    contenders = CONTENDERS

    def __init__(self, job: Job, sources: list[Source], emit: Callable[[dict[str, Any]], None]):
        self.job = job
        self._sources = sources
        self._emit = emit
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        # A group of its own for barriers: with the default group they would warm up the connections of plain calls.
        self.between = dist.new_group()
        self.config = Config.load(job.config)
        # The quantizer of the data's role, for the allowed error.
        treatment = Policies(self.config).treatment(ParameterSlice(None, 1), torch.float32, job.role, step=0)
        self.quantizer = treatment.quantizer
        # The first rank of each network namespace counts its bytes.
        self.namespaces = gathered(namespace())
        self._passes_a_part = COLLECTIVES[job.collective].parts == "input"
        self._counts_bytes = self.namespaces.index(self.namespaces[self.rank]) == self.rank

    def run(self) -> None:
        """Emit a record for each size and contender. Raises NczError if a result is wrong."""
        job = self.job
        context = Context(self.config, dist.group.WORLD, self.ranks, self.rank, job.collective, job.role)
        whole, _ = elements(job.collective, job.sizes[-1], self.ranks, job.itemsize)
        numel = whole // self.ranks if self._passes_a_part else whole
        data = [values(source, self.rank, numel, getattr(torch, job.dtype)) for source in self._sources]
        with ExitStack() as opened:
            exchanges = {name: opened.enter_context(self.contenders[name].open(context)) for name in job.peers}
            for size in job.sizes:
                self._size(size, data, exchanges)
            if job.trace:
                self._trace(exchanges["ncz"], data[0])

    def _size(self, size: int, data: list[Tensor], exchanges: dict[str, Exchange]) -> None:
        """Time all contenders at one size, and emit a record for each."""
        collective = self.job.collective
        numel, count = elements(collective, size, self.ranks, self.job.itemsize)
        versions = [each[: count if self._passes_a_part else numel] for each in data]

        # Warm up, which also tells how many rounds fit.
        warm_up = [self._turn(exchange, versions[-1])[0] for exchange in exchanges.values()]
        for exchange in exchanges.values():
            exchange.details()  # drops the counters of the warm-up
        rounds = self.job.repeat or self._rounds(warm_up)

        # Let the contenders take turns, and verify the results of the last round.
        answer = verify.exact(collective, versions[(rounds - 1) % len(versions)], self.quantizer)
        turns = {name: Turns() for name in exchanges}
        for number in range(rounds):
            for name, exchange in exchanges.items():
                turn = turns[name]
                seconds, sent, result = self._turn(exchange, versions[number % len(versions)])
                turn.seconds.append(seconds)
                turn.sent.append(sent)
                turn.details = exchange.details()
                if number == rounds - 1:  # now, as the next contender may overwrite the result
                    self._check(turn, exchange, result.cpu(), answer)
            before = sum(other for other in self.job.sizes if other < size)
            self._emit({"progress": (before + size * (number + 1) / rounds) / sum(self.job.sizes)})

        # Emit a record for each. Plain comes first, and the others are compared with it.
        plain = None
        for name, turn in turns.items():
            record = self.record(turn, numel * self.job.itemsize, count, name, exchanges[name].op)
            plain = plain or record["time_us"]
            self._emit({"result": record | {"speedup": plain / record["time_us"]}})

    def _trace(self, exchange: Exchange, data: Tensor) -> None:
        """Record one more call of the largest size on all ranks."""
        exchange.load(data)
        dist.barrier()
        origin = 1e6 * time.perf_counter()  # clocks of machines differ: this moment is the common origin
        with trace.recording() as events:
            exchange.run()
        merged = []
        for rank, (start, own) in enumerate(gathered((origin, events))):
            merged.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
            merged += [event | {"pid": rank} | ({"ts": event["ts"] - start} if "ts" in event else {}) for event in own]
        self._emit({"trace": {"traceEvents": merged, "displayTimeUnit": "ms"}})

    def _turn(self, exchange: Exchange, x: Tensor) -> tuple[float, float, Tensor]:
        """Run one call. Returns seconds on this rank, bytes sent by its network namespace, and the result."""
        exchange.load(x)
        self.wait()
        before = sent_bytes()
        begun = time.perf_counter()
        result = exchange.run()
        seconds = time.perf_counter() - begun
        dist.barrier(self.between)  # now all bytes have arrived
        after = sent_bytes()
        return seconds, float("nan") if before is None or after is None else float(after - before), result

    def wait(self) -> None:
        """Wait until all ranks are ready for the next call."""
        dist.barrier(self.between)

    def _rounds(self, seconds: list[float]) -> int:
        """Number of rounds to time, the same on all ranks."""
        slowest = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        fitting = int(SECONDS * len(seconds) / slowest.sum().item())
        return min(max(fitting, _ROUNDS.start), _ROUNDS.stop - 1)

    def _check(self, turn: Turns, exchange: Exchange, result: Tensor, answer: verify.Answer) -> None:
        divisor = self.ranks if exchange.op == "avg" else 1
        turn.error = verify.errors(result, answer, divisor)
        if turn.details.get("compressed_calls") and answer.allowed is not None:
            turn.over = answer.over(result, divisor)

    def record(self, turn: Turns, nbytes: int, count: int, name: str, op: str) -> dict[str, Any]:
        """The record of one contender at one size, from the measurements of all ranks. Raises NczError."""
        # Join the ranks: the slowest one's seconds, bytes of all network namespaces, counters, errors.
        seconds = torch.tensor(turn.seconds, dtype=torch.float64, device="cpu")
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        sent = torch.tensor(
            turn.sent if self._counts_bytes else [0.0] * len(turn.sent), dtype=torch.float64, device="cpu"
        )
        dist.all_reduce(sent)
        details, shares = zip(*gathered((turn.details, turn.over)))

        # A record of a wrong result would mean nothing.
        over = None if None in shares else max(shares)
        if over is not None and over > 1:
            raise NczError(
                f"{name}: {self.job.collective} of {nbytes} bytes has an error of {over:.6g} times its bound"
            )
        wire = plain_wire = None
        if "wire_bytes" in turn.details:
            wire, plain_wire = (sum(each[key] for each in details) for key in ("wire_bytes", "plain_bytes"))
        network = None if sent.isnan().any() else statistics.median(sent.tolist())

        times = [round(1e6 * taken, 1) for taken in seconds.tolist()]
        median = statistics.median(times)
        algbw, busbw = bandwidths(self.job.collective, nbytes, self.ranks, 1e-6 * median)
        error, largest = turn.error
        return {
            "ranks": self.ranks,
            "peer": name,
            "size": nbytes,
            "count": count,
            "type": self.job.dtype,
            "op": op,
            "rounds": len(turn.seconds),
            "time_us": median,
            "times_us": times,
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


def _added(details: tuple[dict[str, Any], ...], key: str) -> dict[str, int] | None:
    """Counts by name, added over ranks, the most frequent first; None for contenders that count nothing."""
    if not all(key in each for each in details):
        return None
    return dict(sum((Counter(each[key]) for each in details), Counter()).most_common())
