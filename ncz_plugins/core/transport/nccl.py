"""Transport for tensors on a GPU: NCCL carries frames, and connections.py their sizes.

A send or receive of NCCL blocks its CUDA stream until the matching operation of the peer runs, so two ranks that both
send first would wait for ever. Therefore frames go in rounds. A round fuses sends and receives into one NCCL operation,
and all ranks start their rounds in the same order. A round is complete once every frame stream of a collective has a
frame to send. The sizes of its frames travel between the hosts while the next frames are coded.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import FrameError, PeerError, UnsupportedError
from ..runtime.forecast import Forecasts
from ..runtime.process import keep_in_forks
from ..runtime.recorded import NEVER, RecordedCall
from ..runtime.statistics import Counters
from ..runtime.trace import span
from ..runtime.worker import Worker
from .base import FrameStream, Tag, Transport, Work, peer_errors, replace_by_largest
from .comparison import RankComparison
from .connections import Connections
from .nccl_classes import make_nccl_group, set_timeout
from .striped import StripedCollectives

_GATHER_ALIGNMENT_BYTES = 512  # as of tensors on a GPU
_MAX_PADDED_SHARE = 1.3  # padded bytes of an all-gather over bytes of its frames; an all-gather is 1.4 times as fast
_ROUNDS_AHEAD = 1  # rounds whose sizes are on their way while the next round is coded
# Torch's watchdog thread ends the process a minute after an error or time-out of an NCCL group. For our groups it must
# not: `require_healthy` raises an error instead, and sooner. Torch reads these settings when it makes a group.
_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # leave the process and the group as they are
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # do not wait for a dump of the operations
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # with "1" a ProcessGroupNCCL2 has no watchdog, which finds its errors
}
_WATCHDOG_GRACE = timedelta(minutes=1)  # the watchdog's time-out is longer than ours
_ABORT_WITHIN = timedelta(seconds=10)


def open_nccl(
    store: dist.Store,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: timedelta,
    nccl_class: type | None = None,
) -> dist.ProcessGroup:
    """A new NCCL process group between ranks that meet at `store`. All of them must call this.

    Args:
        store: a store that nothing else uses under the same prefix.
        device: this rank's GPU.
        timeout: how long to wait for a peer, when connecting and in each operation.
        nccl_class: see `make_nccl_group`.

    Raises UnsupportedError if torch has no NCCL, and PeerError if the other ranks don't come.
    """
    if not dist.is_nccl_available():
        raise UnsupportedError("torch was built without NCCL, which carries compressed CUDA tensors")
    watchdog_timeout = 2 * timeout + _WATCHDOG_GRACE
    with peer_errors("connecting to the other GPUs"):
        with _environment(_WATCHDOG):
            group = make_nccl_group(nccl_class, store, rank, world_size, device, watchdog_timeout)
        keep_in_forks(group)
        # NCCL connects in the first operation, which needs all ranks. A broadcast's first send would not do.
        group.allreduce([torch.zeros(1, dtype=torch.float32, device=device)]).wait()
    return group


def require_healthy(groups: list[dist.ProcessGroup]) -> None:
    """Raise PeerError if NCCL has failed: operations may then be incomplete, or never end.

    NCCL reports a peer that died, but not one that is silent. With torch 2.6 it can't be asked at all, and only the
    time-out finds either.
    """
    for group in list(groups):
        if hasattr(group, "get_error") and (error := group.get_error()).value:
            raise PeerError(f"NCCL failed: {error.name}. A peer has died or left; look at its log")


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """A context with these environment variables. Restores the earlier values at its end."""
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
    """Transport for tensors on one GPU.

    `FrameStream.receive` makes the current CUDA stream wait, not the host: see `Gpu.synchronize` for the time-out.

    Args:
        connections: connections between the hosts, for agreements and sizes of frames. This transport does not close
            them.
        groups: NCCL process groups between the same ranks, at least one. This transport owns them, and changes the list
            in `use_groups`.
        device: this rank's GPU.
        open_group: takes a number, and opens one more group. All ranks call it. None: there are no more groups.

    Attributes:
        forecasts: the expected lengths of frames between two ranks: see schedules/padded.py.
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
        self.forecasts = Forecasts()
        self._connections = connections
        self._device = device
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._groups = _Groups(groups)
        self.plain = StripedCollectives(self._groups.open)
        self._open_one_more = open_group
        self._opened_groups = len(groups)

    @property
    def further_groups(self) -> list[dist.ProcessGroup]:
        """All groups but the first. Raises PeerError once they are closed."""
        return self._groups.open()[1:]

    def use_groups(self, count: int) -> int:
        groups = self._groups.open()
        while len(groups) < count and self._open_one_more is not None:
            group = self._open_one_more(self._opened_groups)
            self._opened_groups += 1
            with self._lock:
                is_open = self._groups.found is groups  # another thread may have closed the transport
                if is_open:
                    groups.append(group)
            if not is_open:
                _shut_down([group])
                raise _closed()
        with self._lock:
            surplus = groups[count:] if self._groups.found is groups else []
            del groups[len(groups) - len(surplus) :]
        _shut_down(surplus)
        return len(groups)

    def streams(
        self, peers: list[tuple[int, int]], incoming: Sequence[int], frame_capacity: int, counters: Counters
    ) -> list[NcclStream]:
        self._connections.connect(rank for pair in peers for rank in pair)
        rounds = _Rounds(self.plain, self.rank, self.world_size, len(peers))
        return [
            NcclStream(self._connections, rounds, self._device, to, source, incoming, frame_capacity, counters)
            for to, source in peers
        ]

    def start_max(self, tensor: Tensor, counters: Counters) -> Work:
        return self._connections.start_max(tensor, counters)

    def agree_on_largest(self, tensor: Tensor, counters: Counters, recorded: RecordedCall = NEVER) -> None:
        with peer_errors("agreeing on quantization steps"):
            replace_by_largest(self, tensor, counters, recorded)

    def start_comparison(self, comparison: RankComparison, counters: Counters, values: Tensor | None = None) -> Work:
        return self._connections.start_comparison(comparison, counters)

    def close(self) -> None:
        _shut_down(self._take_groups())

    def abort(self, error: BaseException) -> None:
        groups = self._take_groups()
        for group in groups:
            set_timeout(group, _ABORT_WITHIN)  # now the time-out of aborting
        # Abort all groups at the same time: aborting one may wait for kernels of the others. Not on this thread, as a
        # ProcessGroupNCCL2 waits for them without a limit.
        workers: list[Worker] = []
        with suppress(RuntimeError):  # an interpreter that ends starts no threads: then abort one after another
            for group in groups:
                workers.append(Worker("ncz-abort"))
                workers[-1].submit(group.abort)
        for group in groups[len(workers) :]:
            with suppress(RuntimeError):  # the error that came before it matters more
                group.abort()
        deadline = time.monotonic() + _ABORT_WITHIN.total_seconds()
        for worker in workers:
            worker.close(max(0.0, deadline - time.monotonic()))

    def _take_groups(self) -> list[dist.ProcessGroup]:
        """Remove and return all groups. Returns none in a fork, which must leave them alone."""
        if os.getpid() != self._process:
            return []
        with self._lock:
            groups, self._groups.found = self._groups.found, None
        return groups or []


class _Groups:
    """Process groups, until they are closed. Collectives refer to them, and not to a transport, which refers to those.

    Attributes:
        found: the groups; None once they are closed.
    """

    def __init__(self, groups: list[dist.ProcessGroup]):
        self.found: list[dist.ProcessGroup] | None = groups

    def open(self) -> list[dist.ProcessGroup]:
        """The groups. Raises PeerError once they are closed."""
        groups = self.found
        if groups is None:
            raise _closed()
        return groups


def _closed() -> PeerError:
    return PeerError("these connections between GPUs are closed")


def _shut_down(groups: list[dist.ProcessGroup]) -> None:
    """End groups when nothing is under way.

    Without this a group would be aborted with its last reference, which peers that still receive would notice.
    """
    with ExitStack() as stack:  # all are ended even if one raises
        for group in groups:
            stack.callback(getattr(group, "shutdown", None) or group._shutdown)  # its name in torch 2.6


class NcclStream(FrameStream):
    """Stream of frames over NCCL. NCCL needs the exact size to receive, so sizes travel ahead between the hosts.

    Args:
        connections: connections between the hosts, for sizes.
        rounds: the rounds of the collective, which all its streams share.
        device: this rank's GPU.
        to, source, incoming, frame_capacity, counters: see `FrameTransport.streams`.
    """

    def __init__(
        self,
        connections: Connections,
        rounds: _Rounds,
        device: torch.device,
        to: int,
        source: int,
        incoming: Sequence[int],
        frame_capacity: int,
        counters: Counters,
    ):
        self._connections = connections
        self._rounds = rounds
        self.device = device
        self.to = to
        self.source = source
        self._due = sum(incoming)  # frames for whose size no receive is posted yet
        self._capacity = frame_capacity
        self._counters = counters
        self._sending: list[tuple[Work, Tensor]] = []
        self._sizes: deque[tuple[Work, Tensor]] = deque()
        self._frames: deque[tuple[Work, Tensor]] = deque()
        for _ in range(_ROUNDS_AHEAD + 2):
            self._expect()

    def send(self, *frames: Tensor) -> None:
        for frame in frames:
            self._announce(frame)
            self._rounds.run([(self, frame)], [])

    def exchange(self, frame: Tensor) -> None:
        self._announce(frame)
        self._rounds.add(self, frame)

    def receive(self) -> Tensor:
        while not self._frames and self._rounds.waiting:
            self._rounds.start_oldest()
        if not self._frames:
            self._rounds.run([], [self])
        work, frame = self._frames.popleft()
        with span("wait", frame.nbytes, self._counters), peer_errors(f"receiving from rank {self.source}"):
            work.wait()
        return frame

    def finish(self) -> None:
        while self._rounds.waiting:
            self._rounds.start_oldest()
        left = sum(tensor.nbytes for _, tensor in self._sending)
        with span("wait", left, self._counters), peer_errors(f"sending to rank {self.to}"):
            for work, _ in self._sending:
                work.wait()
        self._sending.clear()

    def sent(self, work: Work, frame: Tensor) -> None:
        """Called by a round that has begun to send this frame."""
        self._sending.append((work, frame))
        self._counters.wire_bytes += frame.nbytes

    def receiving(self, work: Work, frame: Tensor) -> None:
        """Called by a round that has begun to receive this frame."""
        self._frames.append((work, frame))

    def next_size(self) -> int:
        """Wait for the size of the next frame."""
        work, size = self._sizes.popleft()
        self._expect()
        with span("wait", size.nbytes, self._counters), peer_errors(f"receiving from rank {self.source}"):
            work.wait()
        # Check the size before memory is allocated for it.
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
            self._sizes.append((self._connections.receive(size, self.source, Tag.SIZE), size))

    def _announce(self, frame: Tensor) -> None:
        """Send the size of a frame to the peer that will receive it."""
        size = torch.tensor([frame.numel()], dtype=torch.int64, device="cpu")
        with peer_errors(f"sending to rank {self.to}"):
            self._sending.append((self._connections.send(size, self.to, Tag.SIZE), size))
        self._counters.wire_bytes += size.nbytes


class _Rounds:
    """Rounds of one collective, in which its frame streams send and receive together.

    Args:
        plain: the collectives of the NCCL groups between the ranks.
        streams: the number of frame streams.

    Attributes:
        waiting: rounds that are complete but not yet started, oldest first.
    """

    def __init__(self, plain: StripedCollectives, rank: int, world_size: int, streams: int):
        self._plain = plain
        self._rank = rank
        self._world_size = world_size
        self._streams = streams
        self._filling: list[tuple[NcclStream, Tensor]] = []
        self.waiting: deque[list[tuple[NcclStream, Tensor]]] = deque()

    def add(self, stream: NcclStream, frame: Tensor) -> None:
        """Add a frame to the current round, which will also receive one on this stream."""
        self._filling.append((stream, frame))
        if len(self._filling) == self._streams:
            self.waiting.append(self._filling)
            self._filling = []
        if len(self.waiting) > _ROUNDS_AHEAD:
            self.start_oldest()

    def start_oldest(self) -> None:
        """Start the oldest round in `waiting`."""
        sends = self.waiting.popleft()
        self.run(sends, [stream for stream, _ in sends])

    def run(self, sends: list[tuple[NcclStream, Tensor]], receives: list[NcclStream]) -> None:
        """Start sends and receives as one operation."""
        sizes = [stream.next_size() for stream in receives]  # waits for the peers' hosts
        with span("send", sum(frame.nbytes for _, frame in sends)), peer_errors("exchanging frames"):
            if self._is_gather(sends, sizes):
                self._gather(sends, receives, sizes)
            else:
                self._send_receive(sends, receives, sizes)

    def _send_receive(
        self, sends: list[tuple[NcclStream, Tensor]], receives: list[NcclStream], sizes: list[int]
    ) -> None:
        """Start sends, and receives of these sizes."""
        frames = [torch.empty(size, dtype=torch.uint8, device=stream.device) for stream, size in zip(receives, sizes)]
        works = self._plain.exchange(
            [(stream.to, frame) for stream, frame in sends],
            [(stream.source, frame) for stream, frame in zip(receives, frames)],
            Tag.NCCL_FRAME,
        )
        for (stream, frame), work in zip(sends, works):
            stream.sent(work, frame)
        for stream, frame, work in zip(receives, frames, works[len(sends) :]):
            stream.receiving(work, frame)

    def _is_gather(self, sends: list[tuple[NcclStream, Tensor]], sizes: list[int]) -> bool:
        """Whether every rank sends one frame to all others, of about the same size. The same on all ranks."""
        if not sizes or len(sends) != self._world_size - 1 or any(frame is not sends[0][1] for _, frame in sends):
            return False
        every = [sends[0][1].numel(), *sizes]
        return len(every) * max(every) <= _MAX_PADDED_SHARE * sum(every)

    def _gather(self, sends: list[tuple[NcclStream, Tensor]], receives: list[NcclStream], sizes: list[int]) -> None:
        """Do what `_send_receive` does by an all-gather, with each frame padded to the largest one.

        NCCL has more channels for all-gathers. Over sockets they take two thirds of the time.
        """
        own = sends[0][1]
        length = -(-max(own.numel(), *sizes) // _GATHER_ALIGNMENT_BYTES) * _GATHER_ALIGNMENT_BYTES
        gathered = own.new_empty(self._world_size * length)
        mine = gathered[self._rank * length :][:length]
        mine[: own.numel()] = own
        mine[own.numel() :] = 0  # do not send what was in this memory before
        work = self._plain.all_gather_single(gathered, mine)
        for stream, _ in sends:
            stream.sent(work, mine)
        for stream, size in zip(receives, sizes):
            stream.receiving(work, gathered[stream.source * length :][:size])
