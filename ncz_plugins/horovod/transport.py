"""Transport over Horovod's own operations: frames and plain collectives between the ranks of a process set.

Process sets, elastic training and the timeline keep working. Horovod has no messages between two ranks, and the direct
schedule does without: frames to all peers are collected until the schedule waits for a frame from a peer. Then one
`alltoall` with uneven splits carries all of them. connections.py opens our own connections for other schedules.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import horovod.torch as hvd
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import FrameError, UnsupportedError
from ..core.runtime.statistics import Counters
from ..core.transport.base import FrameStream, GeneratorWork, PlainCollectives, Transport, Work
from ..core.transport.comparison import RankComparison

_POLL_SECONDS = 2e-4  # short beside an operation, which takes a millisecond or more
_OPS = {dist.ReduceOp.SUM: hvd.Sum, dist.ReduceOp.AVG: hvd.Average, dist.ReduceOp.MAX: hvd.Max}


def result_of(handle):
    """Wait for one of Horovod's operations and return its result.

    `hvd.synchronize` alone would keep a core busy, as it calls sched_yield in a loop. Where ranks share cores, Linux
    can make a thread that has yielded so often wait for seconds.
    """
    while not hvd.poll(handle):
        time.sleep(_POLL_SECONDS)
    return hvd.synchronize(handle)


class HorovodTransport(Transport):
    """Transport of one call over one process set, in host memory.

    It owns no connections: Horovod ends its own when a rank fails.

    Args:
        process_set: a process set of Horovod that contains this rank.
        name: prefix of the names of this call's operations. Horovod matches operations of different ranks by name.
    """

    def __init__(self, process_set, name: str):
        self.rank = process_set.rank()
        self.world_size = process_set.size()
        self.plain = HorovodCollectives(process_set, f"{name}.exact")
        self._process_set = process_set
        self._name = name
        self._operations = 0
        self._outgoing: dict[int, list[Tensor]] = {peer: [] for peer in range(self.world_size)}
        self._incoming: dict[int, deque[Tensor]] = {peer: deque() for peer in range(self.world_size)}

    def start_max(self, tensor: Tensor, counters: Counters) -> Work:
        """Start an element-wise maximum of `tensor` over ranks, in place."""
        return GeneratorWork(self._max(tensor, counters))

    def _max(self, tensor: Tensor, counters: Counters) -> Iterator[None]:
        carried = _carried(tensor)
        counters.wire_bytes += 2 * carried.nbytes * (self.world_size - 1) // self.world_size
        handle = hvd.allreduce_async_(carried, op=hvd.Max, name=self._next_name(), process_set=self._process_set)
        yield
        started = time.perf_counter()
        _HorovodWork(handle, tensor).wait()
        counters.wait_seconds += time.perf_counter() - started

    def start_comparison(self, comparison: RankComparison, counters: Counters, values: Tensor | None = None) -> Work:
        """Send nothing: the ranks compare all calls of a bucket before the first one, see `process_set.agree`.

        Measurements travel in a message of their own. Their length follows from the tensors, which may differ until
        they have been compared. Horovod reduces tensors of equal shapes only, and gathers nothing while a rank has
        called hvd.join.
        """
        return ComparedBefore()

    def streams(
        self, peers: list[tuple[int, int]], incoming: Sequence[int], frame_capacity: int, counters: Counters
    ) -> list[HorovodStream]:
        """Streams of frames to and from each peer.

        Raises UnsupportedError unless each peer is both target and source.
        """
        if any(to != source for to, source in peers):
            raise UnsupportedError(
                "Horovod carries frames of the direct schedule only, between pairs of ranks; set "
                "transport.schedule to ring or halving, which open connections of their own"
            )
        return [HorovodStream(self, peer, frame_capacity, counters) for peer, _ in peers]

    def close(self) -> None:
        """Do nothing: the connections are Horovod's."""
        pass

    def abort(self, error: BaseException) -> None:
        """Do nothing: Horovod ends its connections when a rank fails."""
        pass

    def _next_name(self) -> str:
        self._operations += 1
        return f"{self._name}.{self._operations}"

    def _all_to_all(self, frame_capacity: int, counters: Counters) -> None:
        """Send all collected frames and receive those of all peers. All ranks do so at the same points."""
        messages = [_packed(self._outgoing[peer]) for peer in range(self.world_size)]
        splits = torch.tensor([message.numel() for message in messages], dtype=torch.int32, device="cpu")
        own_and_peers = torch.cat(messages)
        self._outgoing = {peer: [] for peer in range(self.world_size)}
        counters.wire_bytes += own_and_peers.nbytes - messages[self.rank].nbytes
        started = time.perf_counter()
        handle = hvd.alltoall_async(own_and_peers, splits, name=self._next_name(), process_set=self._process_set)
        received, sizes = result_of(handle)
        counters.wait_seconds += time.perf_counter() - started
        for peer, message in enumerate(received.split(sizes.tolist())):
            if peer != self.rank:
                self._incoming[peer].extend(_unpacked(message, peer, frame_capacity))


class ComparedBefore:
    """Comparison that was over before the call began."""

    def wait(self, *timeout) -> bool:
        return True


class HorovodStream(FrameStream):
    """Frames to and from one peer during one all-reduce of the direct schedule."""

    def __init__(self, transport: HorovodTransport, peer: int, frame_capacity: int, counters: Counters):
        self.to = self.source = peer
        self._transport = transport
        self._capacity = frame_capacity
        self._counters = counters

    def send(self, *frames: Tensor) -> None:
        raise UnsupportedError("Horovod has no messages from one rank to another: frames can only be exchanged")

    def exchange(self, frame: Tensor) -> None:
        self._transport._outgoing[self.to].append(frame)

    def receive(self) -> Tensor:
        incoming = self._transport._incoming[self.source]
        if not incoming:
            self._transport._all_to_all(self._capacity, self._counters)
        return incoming.popleft()

    def finish(self) -> None:
        pass  # nothing to wait for: the all-reduce ends with a receive from every peer


class HorovodCollectives(PlainCollectives):
    """Uncompressed collectives over one process set.

    Tensors on GPUs are copied to host memory, unless Horovod was built with CUDA.

    Args:
        process_set: a process set of Horovod that contains this rank.
        name: prefix of the names of operations. Horovod matches operations of different ranks by name and caches by it,
            so use the same names in every training step.
        factors: Horovod's prescale and postscale factors, whose product is `scale`. With them sums are rounded as
            Horovod rounds them.
    """

    def __init__(self, process_set, name: str, factors: tuple[float, float] | None = None):
        self._process_set = process_set
        self._name = name
        self._factors = factors
        self._operations = 0

    def all_reduce(self, tensor: Tensor, op=dist.ReduceOp.SUM, scale: float = 1.0) -> Work:
        """See `PlainCollectives.all_reduce`.

        Args:
            op: SUM, AVG or MAX.
            scale: factor of each rank's values before the sum. Ignored if there are `factors`.
        """
        return self._reduced(_carried(tensor), tensor, _OPS[op], *(self._factors or (scale, 1.0)))

    def as_horovod_does(self, tensor: Tensor, op: int) -> Work:
        """All-reduce in place with any of Horovod's own ops."""
        return self._reduced(tensor, tensor, op, *(self._factors or (1.0, 1.0)))

    def _reduced(self, carried: Tensor, tensor: Tensor, op: int, prescale: float, postscale: float) -> Work:
        self._operations += 1
        if carried.is_cuda and not hvd.cuda_built():
            carried = carried.cpu()
        handle = hvd.allreduce_async_(
            carried,
            name=f"{self._name}.{self._operations}",
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=self._process_set,
        )
        return _HorovodWork(handle, tensor)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: Sequence[int] = (), sent: Sequence[int] = ()
    ) -> Work:
        self._operations += 1
        n = self._process_set.size()
        splits = torch.tensor(sent or [len(input) // n] * n, dtype=torch.int32, device="cpu")
        name = f"{self._name}.{self._operations}"
        handle = hvd.alltoall_async(input, splits, name=name, process_set=self._process_set)
        return _HorovodWork(handle, output, lambda received: received[0])

    def all_gather_single(self, output: Tensor, input: Tensor) -> Work:
        self._operations += 1
        name = f"{self._name}.{self._operations}"
        handle = hvd.allgather_async(input, name=name, process_set=self._process_set)
        return _HorovodWork(handle, output)


class _HorovodWork:
    """Operation of Horovod under way, whose result is copied to `output`.

    Args:
        handle: Horovod's.
        output: where the result goes.
        result: returns the result tensor from what Horovod returns. That may be `output` itself.
    """

    def __init__(self, handle, output: Tensor, result: Callable[[object], Tensor] = lambda returned: returned):
        self._handle = handle
        self._output = output
        self._result = result

    def wait(self, *timeout) -> bool:
        if self._handle is not None:
            result = self._result(result_of(self._handle))
            self._handle = None
            if result is not self._output:
                self._output.copy_(result)
        return True

    def is_completed(self) -> bool:
        return self._handle is None or hvd.poll(self._handle)


def _carried(tensor: Tensor) -> Tensor:
    """A tensor that Horovod can reduce: bfloat16 as float32, which holds it exactly, any other dtype as it is."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _packed(frames: list[Tensor]) -> Tensor:
    """Message of frames: their number and the size of each in bytes, as 64-bit integers, then the frames.

    uint8, [bytes].
    """
    if not frames:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    sizes = np.array([len(frames), *(frame.numel() for frame in frames)], dtype="<i8")
    return torch.cat([torch.from_numpy(sizes.view(np.uint8)), *frames])


def _unpacked(message: Tensor, peer: int, frame_capacity: int) -> list[Tensor]:
    """Frames of a message that `_packed` made. It comes from the network, so check everything. Raises FrameError."""
    words = message[: message.numel() // 8 * 8].numpy().view("<i8")
    count = int(words[0]) if words.size else -1
    if 0 < count < words.size:
        sizes = words[1 : 1 + count]
        if sizes.min() > 0 and sizes.max() <= frame_capacity and 8 * (1 + count) + int(sizes.sum()) == message.numel():
            return list(message[8 * (1 + count) :].split(sizes.tolist()))
    raise FrameError(
        f"rank {peer} sent {message.numel()} bytes that are not frames of this call: run the same "
        "version of ncz_plugins on all ranks"
    )
