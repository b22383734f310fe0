"""The interface of every transport: what carries frames, agreements and uncompressed collectives between ranks.

gloo.py, nccl.py and horovod/transport.py implement it side by side. What they all have in common:

- A frame is a tensor of uint8, [nbytes], contiguous, on the device that the transport serves: host memory for gloo and
  Horovod, one GPU for NCCL. A transport does not look into frames any further than it must to learn their size.
- Ranks count from 0 to `world_size - 1` within the transport's own group.
- All ranks make the same calls in the same order. Nothing else may use the connections beneath.
- What comes over the network is not believed before it is checked: FrameError says what can't be.
- Every method that waits raises PeerError when a peer is dead, has closed its connections, or was silent for longer
  than the group's time-out. After any error the transport is of no use: its owner calls `abort`.
- One thread makes the calls of one transport. `close` and `abort` may come from any thread.
- Whoever sends counts the bytes in `Counters.wire_bytes`, and the seconds spent on waiting in `Counters.wait_seconds`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.format import HEADER, HEADER_BYTES, MAGIC
from ..errors import ErrorTranslation, FrameError, NczError, PeerError, UnsupportedError
from ..runtime.statistics import Counters
from .comparison import RankComparison

_FAR_SECONDS = 0.005  # of a message
_KEPT = 0.9  # of what calls before told of a link, with each that tells less
_TELLING_BYTES = 1 << 20  # that a call must have sent to tell what a link carries: more than passes at once


class Work(Protocol):
    """An operation that was started and may still be under way. torch.distributed's `Work` is one."""

    def wait(self, *timeout) -> bool:
        """Return True once the operation is over. Raises RuntimeError if it failed."""

    def is_completed(self) -> bool:
        """Whether the operation is over; `wait` must still be called."""


class Agreement(ABC):
    """An element-wise maximum over ranks that is under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return once the tensor given to `start_max` holds the maximum. Called once. Raises PeerError."""


class FrameStream(ABC):
    """The frames that one collective sends to one rank and receives from one rank.

    Attributes:
        to: the rank that frames go to.
        source: the rank that frames come from; often the same one.
    """

    to: int
    source: int

    @abstractmethod
    def send(self, frame: Tensor) -> None:
        """Start to send a frame that has no counterpart: not every rank sends at this point of the schedule.

        Never waits until the peer receives, so a schedule may send any number of frames before it receives one. The
        frame must not change until `finish` returns.
        """

    @abstractmethod
    def exchange(self, frame: Tensor) -> None:
        """Start to send a frame where every rank sends one on each of its streams, and receives one in return later.

        A transport may collect such frames, and send and receive those of all streams in one operation. Otherwise as
        `send`.
        """

    @abstractmethod
    def receive(self) -> Tensor:
        """Wait for the next frame and return it. Frames arrive in the order in which the peer sent them.

        On a GPU this holds up the current CUDA stream, not the host. The memory is the caller's.

        Raises FrameError if the peer's frame is larger than this call allows or is no frame, and PeerError.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until all frames have left this rank, so that their memory may go. Each schedule ends with this."""


class FrameTransport(ABC):
    """Frames between ranks: all of a transport that a schedule needs.

    Attributes:
        rank: this rank.
        world_size: the number of ranks.
    """

    rank: int
    world_size: int

    @abstractmethod
    def streams(
        self, peers: list[tuple[int, int]], incoming: int, frame_capacity: int, counters: Counters
    ) -> list[FrameStream]:
        """Open all streams of one collective on this rank.

        Args:
            peers: the ranks (to, source) of each stream.
            incoming: how many frames each source will send.
            frame_capacity: the bytes of the largest possible frame.
            counters: take the bytes sent and the seconds waited.

        Returns: one stream for each pair of `peers`, in this order.
        """


class PlainCollectives(ABC):
    """The uncompressed collectives of the runtime beneath, over the same ranks.

    Each method starts one and returns its work, which the caller must wait for. Not every runtime has all of them: one
    that is missing raises UnsupportedError. Tensors are contiguous and on one device.
    """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op=dist.ReduceOp.SUM, scale: float = 1.0) -> Work:
        """Replace `tensor` on every rank by the sum over ranks, or what another op of torch.distributed gives.

        Args:
            scale: what the result is multiplied by.
        """

    def reduce_scatter_tensor(self, output: Tensor, input: Tensor, op=dist.ReduceOp.SUM) -> Work:
        """Leave part `rank` of the sum over ranks of `input` in `output`, which has 1 / world_size of its elements."""
        raise self._missing("reduce_scatter_tensor")

    def all_gather_into_tensor(self, output: Tensor, input: Tensor) -> Work:
        """Put every rank's `input` into `output`, which has world_size times as many elements, in rank order."""
        raise self._missing("all_gather_into_tensor")

    def all_to_all_single(self, output: Tensor, input: Tensor) -> Work:
        """Send part i of world_size equal parts of `input` to rank i; put what rank i sent into part i of `output`."""
        raise self._missing("all_to_all_single")

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Replace `tensor` on every rank by that of rank `root`."""
        raise self._missing("broadcast")

    def exchange(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> list[Work]:
        """Start to send tensors to ranks and to receive tensors from ranks, of sizes that both sides know.

        Args:
            sends: pairs of the rank that gets a tensor, and the tensor, which must not change meanwhile.
            receives: pairs of the rank that a tensor comes from, and the tensor to fill.

        Returns: the works of all sends, then those of all receives.
        """
        raise self._missing("point-to-point messages")

    def _missing(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{type(self).__name__} has no {what}: its runtime offers all_reduce only")


class CollectiveTransport(Protocol):
    """Uncompressed collectives between ranks: all of a transport that schedules without streams of frames need.

    Attributes:
        rank: this rank.
        world_size: the number of ranks.
        plain: the uncompressed collectives.
    """

    rank: int
    world_size: int

    @property
    def plain(self) -> PlainCollectives: ...


def replace_by_largest(transport: CollectiveTransport, tensor: Tensor, counters: Counters) -> None:
    """Replace a tensor of one dimension by its element-wise maximum over ranks: on a GPU in the order of the stream.

    Two ranks gather: one step over the network, where an all-reduce takes two for as many bytes.
    """
    n = transport.world_size
    if n == 2:
        gathered = tensor.new_empty(2, tensor.numel())
        # As bytes, since not every runtime gathers every dtype.
        transport.plain.all_gather_into_tensor(gathered.view(-1).view(torch.uint8), tensor.view(torch.uint8)).wait()
        torch.maximum(*gathered, out=tensor)
    else:
        transport.plain.all_reduce(tensor, dist.ReduceOp.MAX).wait()
    counters.wire_bytes += 2 * tensor.nbytes * (n - 1) // n


class SmallWork(ABC):
    """An uncompressed collective of small tensors that is under way."""

    @abstractmethod
    def finish(self, check: Callable[[], None]) -> None:
        """Return once the result is in place. Called once.

        Args:
            check: raises an error if ranks differ. Called once that is known, before any value is looked at.

        Raises PeerError, and what `check` raises.
        """


class SmallCollectives(ABC):
    """Uncompressed collectives of small tensors, which find out as well whether all ranks make the same call."""

    @abstractmethod
    def serve(self, collective: str, input: Tensor, op: dist.ReduceOp | None) -> bool:
        """Whether `start` takes such a call."""

    @abstractmethod
    def start(
        self,
        collective: str,
        input: Tensor,
        output: Tensor,
        op: dist.ReduceOp | None,
        root: int,
        comparison: RankComparison,
        link_gbps: float | None = None,
    ) -> SmallWork:
        """Begin a call. It never waits.

        Args:
            collective: its name in torch.distributed; `input`, `output` and `op` as there.
            root: the rank within the group that a broadcast starts from.
            comparison: what ranks compare; what all of them tell is found here.
            link_gbps: the speed of the link, the same on all ranks; None: nobody knows it.
        """


class Transport(FrameTransport):
    """Frames, agreements and plain collectives between the ranks of one group, for tensors on one device.

    Attributes:
        link_gbps: the speed of the link between ranks, in Gbit/s, as far as anybody states or measures it; else None.
        most_with_comparison: bytes of values that may travel in the same message as a comparison.
        trip_seconds: what a short message takes to the other ranks, the same on all; 0 where nobody has measured it.
        carried_gbps: what calls tell that a far link carries, in Gbit/s, see `learn`; 0: nothing.
        plain: the uncompressed collectives.
        small: those of small tensors, which compare the ranks' calls as well; None where there are none.
    """

    link_gbps: float | None
    most_with_comparison: int = 0
    trip_seconds: float = 0.0
    carried_gbps: float = 0.0
    plain: PlainCollectives
    small: SmallCollectives | None = None

    @property
    def is_far(self) -> bool:
        """Whether messages are long on their way, as between cities."""
        return self.trip_seconds > _FAR_SECONDS

    def learn(self, nbytes: int, seconds: float, waiting: float) -> None:
        """Learn what a far link carries from a call that sent so many bytes, and waited for a part of its time.

        It takes TCP many trips to find out how much it may send at once, longer than anyone wants to measure before the
        first call. What that measures is far too little, and coders would be chosen that are too slow. A call that
        hardly waits could have sent more: up to twice as much is assumed. A call after a pause finds the link slow, so
        what those before it told is forgotten slowly. Nothing depends on the coder that a rank chooses, so each learns
        for itself.
        """
        if self.is_far and nbytes >= _TELLING_BYTES:
            told = 8e-9 * nbytes / max(waiting, seconds / 2)
            self.carried_gbps = max(told, _KEPT * self.carried_gbps)

    @abstractmethod
    def start_max(self, tensor: Tensor, counters: Counters) -> Agreement:
        """Begin to replace `tensor` by its element-wise maximum over ranks.

        Args:
            tensor: in host memory, contiguous, without NaN, of at most a few numbers for each block. All ranks pass
                equally many of the same dtype. Nobody else may read or write it until `Agreement.wait` returns.
        """

    def start_comparison(
        self, comparison: RankComparison, counters: Counters, values: Tensor | None = None
    ) -> Agreement:
        """Begin to compare what every call begins with. Then `comparison` knows whether the ranks differ.

        Args:
            values: at most `most_with_comparison` that are replaced by their maximum, too. What becomes of them means
                nothing if the comparison shows that ranks differ.
        """
        return self.start_max(comparison.tensor, counters)

    def use_groups(self, count: int) -> int:
        """Send large gathers over so many groups of the runtime beneath side by side, where that may be faster.

        All ranks must call this, when nothing is under way. Returns over how many they go.
        """
        return 1

    @abstractmethod
    def close(self) -> None:
        """Close what this transport owns, when nothing is under way any more. What was sent still arrives.

        All ranks do so, but they need not wait for each other. Safe to call twice, and after `abort`.
        """

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """After `error`, close at once what this transport owns, so that peers that wait for this rank get an error.

        Args:
            error: what went wrong here, which whoever still uses the transport is told.
        """


def frame_bytes(frame: np.ndarray | memoryview, source: int, least: int, most: int) -> int:
    """The bytes of a frame that came from rank `source`, as its header says, of which `frame` has all.

    Raises FrameError unless it is the header of a frame, of `least` to `most` bytes.
    """
    magic, *_, payload_bytes, _, _ = HEADER.unpack_from(frame)
    size = HEADER_BYTES + payload_bytes
    if magic != MAGIC or not least <= size <= most:
        possible = f"{most}" if least == most else f"{least} to {most}"
        raise FrameError(
            f"rank {source} sent a frame of {size} bytes with magic {magic:#x}; {possible} bytes and {MAGIC:#x} are "
            "possible here. All ranks must run the same version of ncz_plugins."
        )
    return size


class peer_errors(ErrorTranslation):
    """Turns the RuntimeError of a backend into PeerError. Its subject is what is being done."""

    __slots__ = ()

    def translated(self, error):
        if isinstance(error, NczError) or not isinstance(error, RuntimeError):
            return None
        return PeerError(
            f"{self.subject} failed: {error}. A peer has died, left, or not answered within the time-out; "
            "look at its log, and raise transport.timeout_seconds if it was only slow."
        )
