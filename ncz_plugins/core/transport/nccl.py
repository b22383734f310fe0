"""Frames between GPUs: NCCL carries them, gloo their sizes.

A send or receive of NCCL holds up its CUDA stream until the peer's counterpart runs. Two ranks that both send first
would wait for ever. So what ranks exchange goes in rounds: a round fuses sends and receives (NCCL's group calls), and
all ranks start their rounds in the same order. A round is complete once every stream of a collective has a frame to
send. Its sizes travel between the hosts while the next frames are coded.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import FrameError, PeerError, UnsupportedError
from ..runtime.statistics import Counters
from ..runtime.trace import span
from ..runtime.worker import Worker
from .base import Agreement, FrameStream, Transport, Work, peer_errors
from .comparison import RankComparison
from .connections import Connections, keep_in_forks
from .forecast import Forecasts
from .link_speed import gloo_link_gbps
from .plain import start_exchange
from .striped import StripedCollectives

_FRAME_TAG, _SIZE_TAG = 0, 1
_ALIGNMENT = 512  # of frames that are gathered, as of tensors
_MOST_PADDING = 1.3  # times the bytes of frames: what is gathered, which is 1.4 times as fast
_ROUNDS_AHEAD = 1  # rounds whose sizes are still on their way while the next one is coded
# A thread of torch's watches each NCCL group and ends the process a minute after an error or a time-out. For our group
# it must not: `require_healthy` raises an error instead, and sooner. Torch reads these settings when a group is made.
_WATCH = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # leave process and group as they are
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # and do not wait for a dump of what went on
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_WATCH_LONGER = timedelta(minutes=1)  # than we wait ourselves
_ABORT_WITHIN = timedelta(seconds=10)


def open_nccl(
    store: dist.Store, rank: int, world_size: int, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """An NCCL process group of our own between ranks that meet at `store`. All of them must call this.

    Raises UnsupportedError where torch has no NCCL, and PeerError if the other ranks don't come.
    """
    if not dist.is_nccl_available():
        raise UnsupportedError("torch was built without NCCL, which carries compressed CUDA tensors")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout + _WATCH_LONGER
    options.is_high_priority_stream = True
    with peer_errors("connecting to the other GPUs"):
        with _environment(_WATCH):
            group = dist.ProcessGroupNCCL(store, rank, world_size, options)
        keep_in_forks(group)
        # NCCL connects in the first operation, in which all ranks must take part. The first frame of a broadcast is not
        # such an operation.
        group.allreduce([torch.zeros(1, dtype=torch.float32, device=device)]).wait()
    return group


def require_healthy(groups: list[dist.ProcessGroup]) -> None:
    """Raise PeerError if NCCL has failed: what a stream waited for may then be incomplete or never come.

    NCCL reports a peer that died, but not one that is silent. torch 2.6 can't be asked at all. There only the time-out
    notices either.
    """
    for group in list(groups):
        if hasattr(group, "get_error") and (error := group.get_error()).value:
            raise PeerError(f"NCCL failed: {error.name}. A peer has died or left; look at its log")


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set these environment variables, and restore the earlier ones afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class NcclTransport(Transport):
    """Frames, agreements and plain collectives for tensors in the memory of one GPU.

    Args:
        connections: for agreements and for the sizes of frames. They belong to somebody else, who closes them.
        groups: NCCL process groups over the same ranks, one at least, which nothing else sends through. They end with
            this transport, which adds and removes others.
        device: where received frames go.
        open_group: opens another one, given a number of its own. All ranks call it. None: there are no others.

    Waiting for a frame holds up the current CUDA stream and not the host: see `Gpu.synchronize` for the time-out.

    Attributes:
        forecasts: how long frames are expected to be where two ranks exchange them.
    """

    def __init__(
        self,
        connections: Connections,
        groups: list[dist.ProcessGroup],
        device: torch.device,
        open_group: Callable[[int], dist.ProcessGroup] | None = None,
    ):
        self.rank = connections.rank
        self.world_size = connections.world_size
        self.link_gbps = gloo_link_gbps()
        self.forecasts = Forecasts()
        self._connections = connections
        self._device = device
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._groups: list[dist.ProcessGroup] | None = groups
        self._more_group = open_group
        self._opened = len(groups)

    @property
    def plain(self) -> StripedCollectives:
        # Made each time: kept here, it would refer back to this object, and keep its connections open.
        return StripedCollectives(self._open_groups)

    def use_groups(self, count: int) -> int:
        groups = self._open_groups()
        while len(groups) < count and self._more_group is not None:
            group = self._more_group(self._opened)
            self._opened += 1
            with self._lock:
                is_open = self._groups is groups  # another thread may have closed all meanwhile
                if is_open:
                    groups.append(group)
            if not is_open:
                _shut_down([group])
                raise _closed()
        with self._lock:
            surplus = groups[count:] if self._groups is groups else []
            del groups[len(groups) - len(surplus) :]
        _shut_down(surplus)
        return len(groups)

    def streams(
        self, peers: list[tuple[int, int]], incoming: int, frame_capacity: int, counters: Counters
    ) -> list[NcclStream]:
        rounds = _Rounds(self._open_groups, len(peers))
        return [
            NcclStream(self._connections, rounds, self._device, to, source, incoming, frame_capacity, counters)
            for to, source in peers
        ]

    def start_max(self, tensor: Tensor, counters: Counters) -> Agreement:
        return self._connections.start_max(tensor, counters)

    def start_comparison(
        self, comparison: RankComparison, counters: Counters, values: Tensor | None = None
    ) -> Agreement:
        return self._connections.start_comparison(comparison, counters)

    def close(self) -> None:
        _shut_down(self._taken_groups())

    def abort(self, error: BaseException) -> None:
        groups = self._taken_groups()
        for group in groups:
            group._set_default_timeout(_ABORT_WITHIN)  # from here on the time-out of aborting
        # Side by side: to abort one may wait for what runs on the GPU, the kernels of the others among it.
        workers: list[Worker] = []
        with suppress(RuntimeError):  # an interpreter that ends starts no threads: then one after the other
            for group in groups[1:]:
                workers.append(Worker("ncz-abort"))
                workers[-1].submit(partial(_abort, group))
        for group in groups[:1] + groups[1 + len(workers) :]:
            _abort(group)
        deadline = time.monotonic() + _ABORT_WITHIN.total_seconds()
        for worker in workers:
            worker.close(max(0.0, deadline - time.monotonic()))

    def _open_groups(self) -> list[dist.ProcessGroup]:
        groups = self._groups
        if groups is None:
            raise _closed()
        return groups

    def _taken_groups(self) -> list[dist.ProcessGroup]:
        """All groups, for whoever ends them: none if somebody has, or in a fork, which has no part in them."""
        if os.getpid() != self._process:
            return []
        with self._lock:
            groups, self._groups = self._groups, None
        return groups or []


def _closed() -> PeerError:
    return PeerError("these connections between GPUs are closed")


def _shut_down(groups: list[dist.ProcessGroup]) -> None:
    """End groups when nothing is under way. Without this, the last reference to one would abort it.

    Peers that still receive would notice that.
    """
    with ExitStack() as stack:  # all in any case
        for group in groups:
            stack.callback(getattr(group, "shutdown", None) or group._shutdown)  # its name in torch 2.6


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):  # what matters is the error that led to this
        group.abort()


class NcclStream(FrameStream):
    """Frames by NCCL, which needs the exact size of what it receives: sizes travel ahead, over gloo.

    Args:
        rounds: what this stream shares with the others of its collective.
        device: where received frames go.
        to, source, incoming, frame_capacity, counters: see `FrameTransport.streams`.
    """

    def __init__(
        self,
        connections: Connections,
        rounds: _Rounds,
        device: torch.device,
        to: int,
        source: int,
        incoming: int,
        frame_capacity: int,
        counters: Counters,
    ):
        self._connections = connections
        self._rounds = rounds
        self.device = device
        self.to = to
        self.source = source
        self._due = incoming  # frames for whose size no receive is posted yet
        self._capacity = frame_capacity
        self._counters = counters
        self._sending: list[tuple[Work, Tensor]] = []
        self._sizes: deque[tuple[Work, Tensor]] = deque()
        self._frames: deque[tuple[Work, Tensor]] = deque()
        for _ in range(_ROUNDS_AHEAD + 2):
            self._expect()

    def send(self, frame: Tensor) -> None:
        self._announce(frame)
        self._rounds.run([(self, frame)], [])

    def exchange(self, frame: Tensor) -> None:
        self._announce(frame)
        self._rounds.add(self, frame)

    def receive(self) -> Tensor:
        while not self._frames and self._rounds.waiting:
            self._rounds.complete()
        if not self._frames:
            self._rounds.run([], [self])
        work, frame = self._frames.popleft()
        with span("wait", frame.nbytes, self._counters), peer_errors(f"receiving from rank {self.source}"):
            work.wait()
        return frame

    def finish(self) -> None:
        while self._rounds.waiting:
            self._rounds.complete()
        left = sum(tensor.nbytes for _, tensor in self._sending)
        with span("wait", left, self._counters), peer_errors(f"sending to rank {self.to}"):
            for work, _ in self._sending:
                work.wait()
        self._sending.clear()

    def sent(self, work: Work, frame: Tensor) -> None:
        """A round began to send this frame, or more."""
        self._sending.append((work, frame))
        self._counters.wire_bytes += frame.nbytes

    def receiving(self, work: Work, frame: Tensor) -> None:
        """A round began to receive this frame."""
        self._frames.append((work, frame))

    def next_size(self) -> int:
        """Wait for the size of the next frame."""
        work, size = self._sizes.popleft()
        self._expect()
        with span("wait", size.nbytes, self._counters), peer_errors(f"receiving from rank {self.source}"):
            work.wait()
        # The size comes from the network: check it before taking memory for it.
        if not 0 < size.item() <= self._capacity:
            raise FrameError(
                f"rank {self.source} announced a frame of {size.item()} bytes; between 1 and {self._capacity} "
                "are possible for this call. All ranks must run the same version of ncz_plugins."
            )
        return int(size)

    def _expect(self) -> None:
        """Start to receive the size of one more frame, if one is due."""
        if not self._due:
            return
        self._due -= 1
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        with peer_errors(f"receiving from rank {self.source}"):
            self._sizes.append((self._connections.receive(size, self.source, _SIZE_TAG), size))

    def _announce(self, frame: Tensor) -> None:
        """Tell the peer how large the frame is that it will get."""
        size = torch.tensor([frame.numel()], dtype=torch.int64, device="cpu")
        with peer_errors(f"sending to rank {self.to}"):
            self._sending.append((self._connections.send(size, self.to, _SIZE_TAG), size))
        self._counters.wire_bytes += size.nbytes


class _Rounds:
    """What the streams of one collective send and receive together.

    Args:
        groups: gives the NCCL groups.
        streams: how many streams there are.

    Attributes:
        waiting: rounds that are filled but not yet started, oldest first.
    """

    def __init__(self, groups: Callable[[], list[dist.ProcessGroup]], streams: int):
        self._group = lambda: groups()[0]
        self._gathers = StripedCollectives(groups)
        self._streams = streams
        self._filling: list[tuple[NcclStream, Tensor]] = []
        self.waiting: deque[list[tuple[NcclStream, Tensor]]] = deque()

    def add(self, stream: NcclStream, frame: Tensor) -> None:
        """Put a frame into the current round, which receives its counterpart as well."""
        self._filling.append((stream, frame))
        if len(self._filling) == self._streams:
            self.waiting.append(self._filling)
            self._filling = []
        if len(self.waiting) > _ROUNDS_AHEAD:
            self.complete()

    def complete(self) -> None:
        """Start the oldest round in `waiting`."""
        sends = self.waiting.popleft()
        self.run(sends, [stream for stream, _ in sends])

    def run(self, sends: list[tuple[NcclStream, Tensor]], receives: list[NcclStream]) -> None:
        """Start sends and receives that belong together."""
        sizes = [stream.next_size() for stream in receives]  # waits for the peers' hosts
        with span("send", sum(frame.nbytes for _, frame in sends)), peer_errors("exchanging frames"):
            if self._is_gather(sends, sizes):
                self._gather(sends, receives, sizes)
            else:
                self._exchange(sends, receives, sizes)

    def _exchange(self, sends: list[tuple[NcclStream, Tensor]], receives: list[NcclStream], sizes: list[int]) -> None:
        frames = [torch.empty(size, dtype=torch.uint8, device=stream.device) for stream, size in zip(receives, sizes)]
        works = start_exchange(
            self._group,
            [(stream.to, frame) for stream, frame in sends],
            [(stream.source, frame) for stream, frame in zip(receives, frames)],
            _FRAME_TAG,
        )
        for (stream, frame), work in zip(sends, works):
            stream.sent(work, frame)
        for stream, frame, work in zip(receives, frames, works[len(sends) :]):
            stream.receiving(work, frame)

    def _is_gather(self, sends: list[tuple[NcclStream, Tensor]], sizes: list[int]) -> bool:
        """Whether every rank sends one frame to all others, of about the same size. All ranks answer alike."""
        if not sizes or len(sends) != self._group().size() - 1 or any(frame is not sends[0][1] for _, frame in sends):
            return False
        every = [sends[0][1].numel(), *sizes]
        return len(every) * max(every) <= _MOST_PADDING * sum(every)

    def _gather(self, sends: list[tuple[NcclStream, Tensor]], receives: list[NcclStream], sizes: list[int]) -> None:
        """As `_exchange`, by an all-gather of as many bytes as the largest frame takes.

        NCCL has more channels for it than for sends and receives: over sockets it takes two thirds of the time.
        """
        group, own = self._group(), sends[0][1]
        length = -(-max(own.numel(), *sizes) // _ALIGNMENT) * _ALIGNMENT
        gathered = own.new_empty(group.size() * length)
        mine = gathered[group.rank() * length :][:length]
        mine[: own.numel()] = own
        mine[own.numel() :] = 0  # not what was in that memory before
        work = self._gathers.all_gather_into_tensor(gathered, mine)
        for stream, _ in sends:
            stream.sent(work, mine)
        for stream, size in zip(receives, sizes):
            stream.receiving(work, gathered[stream.source * length :][:size])
