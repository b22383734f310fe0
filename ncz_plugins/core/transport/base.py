"""Interface of all transports, which carry frames, agreements and uncompressed collectives between ranks.

gloo.py, nccl.py and horovod/transport.py implement it. For all of them:

- A frame is a contiguous tensor, uint8, [nbytes], on the transport's device: host memory for gloo and Horovod, one GPU
  for NCCL. Of a frame's contents, a transport reads no more than the header, to learn the size.
- Ranks count from 0 to `world_size - 1` within the transport's group.
- All ranks make the same calls in the same order. Nothing else may use the connections.
- What comes over the network is checked before it is used. FrameError says what is wrong.
- Every method that waits raises PeerError if a peer is dead, has closed its connections, or was silent for longer than
  the group's time-out. After any error the transport can't be used any more, and its owner calls `abort`.
- One thread calls the methods of a transport. Only `close` and `abort` may be called from any thread.
- The sender counts the bytes in `Counters.wire_bytes`. Every rank counts its waits in `Counters.wait_seconds`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.format import HEADER, HEADER_BYTES, MAGIC
from ..config.fields import FAR_TRIP_SECONDS
from ..errors import ErrorTranslation, FrameError, NczError, PeerError, UnsupportedError
from ..runtime.recorded import NEVER, RecordedCall
from ..runtime.statistics import Counters
from .comparison import RankComparison

if TYPE_CHECKING:
    from .small import Exchanges, SmallCollectives, SmallMessages

_DECAY_OF_SPEED = 0.9  # factor for the known speed of a link after each slower call
_MIN_BYTES_TO_LEARN = 1 << 20  # smaller calls fit into buffers, and say nothing about the link


class Tag(IntEnum):
    """Tags of messages between two ranks over torch.distributed. Each use has its own, so that none gets another's."""

    NCCL_FRAME = 0
    SIZE = 1  # of a frame that NCCL carries
    FRAME = 2
    PLAIN = 4
    FIRST_ROUND = 16  # of an agreement; each further round has the next number


class Work(Protocol):
    """Operation that was started and may still be under way. torch.distributed's `Work` is one."""

    def wait(self, *timeout) -> bool:
        """Return True once the operation is over.

        Raises PeerError, or RuntimeError for an operation of torch.distributed, if the operation failed.
        """


class GeneratorWork:
    """Work written as a generator: the code up to its only `yield` starts the operation, and the rest waits for it."""

    __slots__ = ("_steps",)

    def __init__(self, steps: Iterator[None]):
        self._steps = steps
        next(steps)

    def wait(self, *timeout) -> bool:
        next(self._steps, None)
        return True


class FrameStream(ABC):
    """Stream of frames to one rank, and from one rank, during one collective.

    Attributes:
        to: the rank that frames go to.
        source: the rank that frames come from; often the same one.
    """

    to: int
    source: int

    @abstractmethod
    def send(self, *frames: Tensor) -> None:
        """Start to send frames in one message, at a point of the schedule where not every rank sends one.

        Does not wait for the peer: a schedule may send any number of frames before it receives one. Frames must not
        change until `finish` returns.
        """

    def exchange(self, frame: Tensor) -> None:
        """Start to send a frame, at a point of the schedule where every rank sends one on each of its streams.

        Each rank will receive one frame on each stream in return, so a transport may send and receive the frames of all
        streams in one operation. For the rest see `send`.
        """
        self.send(frame)

    @abstractmethod
    def receive(self) -> Tensor:
        """Wait for the next frame. Frames arrive in the order in which the peer sent them.

        On a GPU the current CUDA stream waits, not the host. The caller owns the memory of the frame.

        Raises PeerError, and FrameError if what came is not a frame, or larger than this call allows.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until all frames have left this rank and their memory may be reused. Each schedule ends with this."""


class FrameTransport(ABC):
    """Transport of frames between ranks: the part of a transport that schedules with frames need.

    Attributes:
        rank: this rank.
        world_size: the number of ranks.
    """

    rank: int
    world_size: int

    def connect(self, peers: Iterable[int]) -> None:
        """Connect with ranks that this one is about to open streams with, one after the other. They do the same."""
        return  # for transports whose ranks are connected, or connect when streams are opened

    @abstractmethod
    def streams(
        self, peers: list[tuple[int, int]], incoming: Sequence[int], frame_capacity: int, counters: Counters
    ) -> list[FrameStream]:
        """Open all frame streams of one collective on this rank.

        Args:
            peers: the ranks (to, source) of each stream.
            incoming: the number of frames in each message that each source will send.
            frame_capacity: bytes of the largest possible frame.
            counters: receive the bytes sent and the seconds waited.

        Returns one stream for each pair in `peers`, in this order.
        """


class PlainCollectives(ABC):
    """Uncompressed collectives of the library beneath (gloo, NCCL or Horovod), between the ranks of a transport.

    Each method starts a collective and returns its work, which the caller must wait for. Tensors are contiguous and on
    one device. Raises UnsupportedError for a collective that the library does not have.
    """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op=dist.ReduceOp.SUM, scale: float = 1.0) -> Work:
        """Replace `tensor` on every rank by the sum over ranks, or the result of another op of torch.distributed.

        Args:
            scale: factor for the result.
        """

    def reduce(self, tensor: Tensor, root: int, op=dist.ReduceOp.SUM) -> Work:
        """Replace `tensor` on rank `root` by the sum over ranks, or the result of another op. On others it stays."""
        raise self._missing("reduce")

    def reduce_scatter_single(self, output: Tensor, input: Tensor, op=dist.ReduceOp.SUM) -> Work:
        """Write part `rank` of the sum of `input` over ranks to `output`, which has 1 / world_size of its elements."""
        raise self._missing("reduce_scatter_single")

    def all_gather_single(self, output: Tensor, input: Tensor) -> Work:
        """Write every rank's `input` to `output`, in rank order. `output` has world_size times as many elements."""
        raise self._missing("all_gather_single")

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: Sequence[int] = (), sent: Sequence[int] = ()
    ) -> Work:
        """Send part i of `input` to rank i, and receive part i of `output` from rank i.

        Args:
            received, sent: rows of each part, of `output` and of `input`; empty: all parts are equal.
        """
        raise self._missing("all_to_all_single")

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Replace `tensor` on every rank by the tensor of rank `root`."""
        raise self._missing("broadcast")

    def exchange(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> list[Work]:
        """Start to send tensors to other ranks and to receive tensors from other ranks. Both sides know the sizes.

        Args:
            sends: pairs of a receiving rank and a tensor, which must not change before its work is over.
            receives: pairs of a sending rank and the tensor to fill.

        Returns the works of all sends, then those of all receives.
        """
        raise self._missing("point-to-point messages")

    def _missing(self, what: str) -> UnsupportedError:
        return UnsupportedError(f"{type(self).__name__} has no {what}: its library offers all_reduce only")


class CollectiveTransport(Protocol):
    """Transport of uncompressed collectives: the part of a transport that schedules without frames need.

    Attributes:
        rank: this rank.
        world_size: the number of ranks.
        plain: the uncompressed collectives.
    """

    rank: int
    world_size: int

    @property
    def plain(self) -> PlainCollectives: ...


def replace_by_largest(
    transport: CollectiveTransport, tensor: Tensor, counters: Counters, recorded: RecordedCall = NEVER
) -> None:
    """Replace a tensor of one dimension by its element-wise maximum over ranks. On a GPU the host does not wait.

    Two ranks gather: that takes one step over the network, and an all-reduce two steps for the same bytes.

    Args:
        recorded: keeps the memory of both ranks' tensors, if this one is part of a recording.
    """
    n = transport.world_size
    if n == 2:
        gathered, mine, both = recorded.queue("agree", lambda: _room_to_gather(tensor))
        transport.plain.all_gather_single(gathered, mine).wait()
        torch.maximum(*both, out=tensor)
    else:
        transport.plain.all_reduce(tensor, dist.ReduceOp.MAX).wait()
    counters.wire_bytes += 2 * tensor.nbytes * (n - 1) // n


def _room_to_gather(tensor: Tensor) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Memory for the tensors of two ranks, this rank's tensor, and the parts of that memory.

    The first two are bytes, since not every library gathers every dtype.
    """
    gathered = torch.empty(2 * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return gathered.view(torch.uint8), tensor.view(torch.uint8), gathered.chunk(2)


class Transport(FrameTransport):
    """Transport of frames, agreements and plain collectives between the ranks of one group, for one device.

    Attributes:
        link_gbps: the speed of the link between ranks in Gbit/s, given or measured; None: unknown.
        most_with_comparison: bytes of values that may travel in the same message as a comparison.
        trip_seconds: time of a short message to another rank, the same on all ranks; 0: not measured.
        carried_gbps: the speed of a far link in Gbit/s that calls have shown, see `learn`; 0: unknown.
        plain: the uncompressed collectives.
        small: the uncompressed collectives of small tensors; None if there are none.
        exchanges: exchanges of uncompressed pieces over a mesh; None: `plain` has to make them.
    """

    link_gbps: float | None = None
    most_with_comparison: int = 0
    trip_seconds: float = 0.0
    carried_gbps: float = 0.0
    plain: PlainCollectives
    small: SmallCollectives | SmallMessages | None = None
    exchanges: Exchanges | None = None

    @property
    def is_far(self) -> bool:
        """Whether a short message takes longer than 5 ms, as between cities."""
        return self.trip_seconds > FAR_TRIP_SECONDS

    def learn(self, nbytes: int, seconds: float, waiting: float) -> None:
        """Estimate the speed of a far link from a call. Each rank has its own estimate, as coders may differ by rank.

        On a far link TCP takes many round trips to reach full speed, longer than a measurement before the first call
        may take. Such a measurement is far too low, and would choose coders that are too slow.

        Args:
            nbytes: bytes that the call sent.
            seconds: duration of the call.
            waiting: seconds of it in which the call waited.
        """
        # A call that hardly waited could have sent more bytes: up to twice as many are assumed. TCP slows down after a
        # pause, so the estimate decays slowly.
        if self.is_far and nbytes >= _MIN_BYTES_TO_LEARN:
            shown_gbps = 8e-9 * nbytes / max(waiting, seconds / 2)
            self.carried_gbps = max(shown_gbps, _DECAY_OF_SPEED * self.carried_gbps)

    @abstractmethod
    def start_max(self, tensor: Tensor, counters: Counters) -> Work:
        """Begin to replace `tensor` by its element-wise maximum over ranks. The work can be waited for once.

        Args:
            tensor: in host memory, contiguous, without NaN, of the same size and dtype on all ranks. Nobody else may
                read or write it until `wait` returns.
            counters: receive the bytes sent and the seconds waited.
        """

    def agree_on_largest(self, tensor: Tensor, counters: Counters, recorded: RecordedCall = NEVER) -> None:
        """Replace `tensor` by its element-wise maximum over ranks. On a GPU the host does not wait.

        Args:
            tensor: of one dimension, on the device of this transport; otherwise as in `start_max`.
            recorded: what `tensor` may be part of, see `replace_by_largest`.
        """
        self.start_max(tensor, counters).wait()

    def start_comparison(self, comparison: RankComparison, counters: Counters, values: Tensor | None = None) -> Work:
        """Begin to compare what every call begins with. Then `comparison` knows whether the ranks differ.

        Args:
            values: tensor of at most `most_with_comparison` bytes, replaced by its maximum over ranks as in
                `start_max`; None: no values. If the comparison shows that ranks differ, its contents are undefined.
        """
        return self.start_max(comparison.tensor, counters)

    def use_groups(self, count: int) -> int:
        """Send large gathers and exchanges over `count` NCCL groups side by side.

        All ranks call this, when nothing is under way.

        Returns the number of groups in use, which is 1 for transports without NCCL.
        """
        return 1

    @abstractmethod
    def close(self) -> None:
        """Close the connections of this transport, when nothing is under way any more. What was sent still arrives.

        Every rank calls this, at any time. Safe to call twice, and after `abort`.
        """

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Close the connections at once, so that peers that wait for this rank get an error.

        Args:
            error: the error that ended this transport. Later uses of the transport raise an error that names it.
        """


def frame_bytes(frame: np.ndarray | memoryview, source: int, least: int, most: int) -> int:
    """The bytes of a frame, from its header.

    Args:
        frame: the frame, or its first HEADER_BYTES.
        source: the rank that sent the frame.
        least, most: bytes that the frame may have.

    Raises FrameError if this is not the header of a frame with `least` to `most` bytes.
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


def frames_of(message: np.ndarray | memoryview, count: int, source: int) -> list[np.ndarray | memoryview]:
    """The frames of a message, which may be followed by other bytes.

    Args:
        source: the rank that sent the message.

    Raises FrameError if it does not begin with `count` frames.
    """
    frames = []
    for left in range(count, 0, -1):
        most = len(message) - (left - 1) * HEADER_BYTES
        if most < HEADER_BYTES:
            raise FrameError(f"rank {source} sent a message that ends before the last {left} of its {count} frames")
        nbytes = frame_bytes(message, source, HEADER_BYTES, most)
        frames.append(message[:nbytes])
        message = message[nbytes:]
    return frames


class peer_errors(ErrorTranslation):
    """Context in which a RuntimeError of gloo, NCCL or a store becomes PeerError.

    Its subject says what is being done.
    """

    __slots__ = ()

    def translated(self, error):
        if isinstance(error, NczError) or not isinstance(error, RuntimeError):
            return None
        return PeerError(
            f"{self.subject} failed: {error}. A peer has died, left, or not answered within the time-out; "
            "look at its log, and raise transport.timeout_seconds if it was only slow."
        )
