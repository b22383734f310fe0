"""Send and receive: messages from one rank to another.

A send and its recv are one call of two ranks, which exchange pieces of which one is empty: see `run`. Each direction
between two ranks has an order of calls of its own, on a thread of its own. In one order for all, a rank that first
calls irecv would not come to its isend, for which the other one may wait. So messages between other ranks, or in the
other direction, go past a message that waits.

A direction takes a thread and a socket (`transport.connections` sockets) on each of its two ranks, from its first
message on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .arguments import flat, parts_of
from .arrays import giving, tensor_of
from .call import Call, Pieces
from .call_description import refusal
from .call_queue import CallQueue
from .collectives import Beginning
from .errors import ErrorTranslation, NczError, PeerError, UnsupportedError
from .group import Group
from .on_gpu import GpuCalls
from .on_host import HostCalls
from .run import tell
from .runtime.device import HOST
from .runtime.handle import Handle
from .runtime.inference_mode import outside_of_inference_mode
from .transport.nccl_classes import nccl_class_of
from .transport.plain import TorchCollectives
from .transport.routes import OneWayRoutes
from .transport.subset import SubsetCollectives

_SOURCE, _DESTINATION = 0, 1  # ranks of a direction
_MOST_TAG = 2**31 - 1


class P2POp(Protocol):
    """An operation of `batch_isend_irecv`. torch.distributed's `P2POp` is one.

    Attributes:
        op: torch.distributed's isend or irecv.
        tensor: see `Messages.isend` and `Messages.irecv`.
        peer: global rank of the other end.
        tag: see there.
    """

    op: Callable
    tensor: Tensor
    peer: int
    tag: int


class Messages:
    """Send and receive of one process group, with torch.distributed's signatures.

    Attributes:
        rank: this rank's number within the group.
        ranks: global ranks of the group.
    """

    rank: int
    ranks: list[int]
    _directions: Directions | None  # None: the group has one rank

    def send(self, tensor: Tensor, dst: int, tag: int = 0, *, role: str | None = None, name: str | None = None) -> None:
        """Send `tensor` to the global rank `dst`. Returns once it has left, which takes the recv of that rank.

        The tensor stays as it is. Of two ranks that both send first, each waits for the other one until its time-out:
        use `isend` or `batch_isend_irecv`.

        Args:
            tensor: of any shape. Floats of 16, 32 and 64 bits are compressed; integers and bool go plain.
            tag: any number, the same as that of the recv. It selects no message: messages from one rank to another
                arrive in the order in which they were sent.
            role: "gradient", "parameter" or "activation", as in `all_reduce`, the same as that of the recv.
            name: by which policies know the tensor, the same as that of the recv.

        Raises ValueError for a role or tag that can't be, UnsupportedError for a rank or tensor that can't be,
        MismatchError on both ranks if they differ in size, dtype, tag or settings, PeerError, FrameError,
        OutOfMemoryError.
        """
        self._wait_for_message("send", tensor, dst, tag, role, name)

    def recv(self, tensor: Tensor, src: int, tag: int = 0, *, role: str | None = None, name: str | None = None) -> int:
        """Fill `tensor` with what the global rank `src` sends to this rank next. Returns `src`.

        The error of an element is at most the bound. Arguments and errors are those of `send`.
        """
        self._wait_for_message("recv", tensor, src, tag, role, name)
        return src

    def isend(
        self, tensor: Tensor, dst: int, tag: int = 0, *, role: str | None = None, name: str | None = None
    ) -> Handle:
        """Do what `send` does in the background. The tensor must not change before the handle was waited for."""
        [handle] = self._begin_messages([_Message("isend", tensor, dst, tag, role, name)])
        return handle

    def irecv(
        self, tensor: Tensor, src: int, tag: int = 0, *, role: str | None = None, name: str | None = None
    ) -> Handle:
        """Do what `recv` does in the background. Handles may be waited for in any order."""
        [handle] = self._begin_messages([_Message("irecv", tensor, src, tag, role, name)])
        return handle

    def batch_isend_irecv(self, p2p_op_list: Sequence[P2POp], *, role: str | None = None) -> list[Handle]:
        """Begin several messages, all of one role.

        Args:
            p2p_op_list: torch.distributed's `P2POp`. Their groups are ignored.

        Returns a handle for each, in their order. Raises what `send` does; then none has begun.
        """
        messages = [_Message(_named(each), each.tensor, each.peer, each.tag, role) for each in p2p_op_list]
        return self._begin_messages(messages)

    def _wait_for_message(self, *message) -> None:
        [handle] = self._begin_messages([_Message(*message)], async_op=False)
        if handle is not None:
            handle.wait()

    def _begin_messages(self, messages: Sequence[_Message], async_op: bool = True) -> list[Handle]:
        """Begin messages. Without `async_op` they may be over when this returns; then there are no handles."""
        decided = [self._decided(message) for message in messages]
        with outside_of_inference_mode():
            begun = [calls.begin(call, async_op) for calls, call in decided]
        return [
            handle and giving(handle, [message.tensor], call.output)
            for handle, message, (_, call) in zip(begun, messages, decided)
        ]

    def _decided(self, message: _Message) -> tuple[HostCalls | GpuCalls, Call]:
        """The call of a message, and what begins it. The other rank is told if this one can't make its call."""
        peer = self._peer(message)
        pair = (self.rank, peer) if message.is_send else (peer, self.rank)
        direction = self._directions.of(*pair)
        with Beginning(direction, message.what):
            call = message.call()
            calls = direction.on(call.input.device)
            calls.decide(call)
        return calls, call

    def _peer(self, message: _Message) -> int:
        """The other end's number in the group. Raises UnsupportedError."""
        what, peer, argument = message.what, message.peer, "dst" if message.is_send else "src"
        if peer not in self.ranks:
            raise UnsupportedError(
                f"{what}: {argument} must be a global rank of this group, one of {self.ranks}, got {peer!r}"
            )
        if peer == self.ranks[self.rank]:
            raise UnsupportedError(f"{what}: {argument}={peer} is this rank itself: copy the tensor (Tensor.copy_)")
        return self.ranks.index(peer)


class _Message(NamedTuple):
    """What was asked for: see `Messages`.

    Attributes:
        what: send, recv, isend or irecv.
        peer: global rank of the other end.
    """

    what: str
    tensor: Tensor
    peer: int
    tag: int
    role: str | None
    name: str | None = None

    @property
    def is_send(self) -> bool:
        return self.what.endswith("send")

    def call(self) -> Call:
        """The call, in which this rank sends all or receives all. Raises UnsupportedError, ValueError."""
        if not isinstance(self.tag, int) or not 0 <= self.tag <= _MOST_TAG:
            raise ValueError(f"{self.what}: tag must be a number from 0 to {_MOST_TAG}, got {self.tag!r}")
        whole = flat(tensor_of(self.tensor, is_written=not self.is_send))
        # Memory of its own: to write to no elements of a tensor is a change of it for autograd, too.
        nothing = torch.empty(0, dtype=whole.dtype, device=whole.device)
        rows, none = (0, whole.numel()), (0, 0)
        if self.is_send:
            memory, pieces = (whole, nothing), Pieces(rows, none, 1, _SOURCE)
        else:
            memory, pieces = (nothing, whole), Pieces(none, rows[::-1], 1, _DESTINATION)
        parts = parts_of(self.what, whole, self.name, None)
        return Call("send_recv", *memory, role=self.role, parts=parts, pieces=pieces, tag=self.tag)


def _named(operation: P2POp) -> str:
    """What an operation of a batch does: isend or irecv. Raises UnsupportedError."""
    if operation.op is dist.isend:
        return "isend"
    if operation.op is dist.irecv:
        return "irecv"
    raise UnsupportedError(
        f"batch_isend_irecv: op must be torch.distributed.isend or torch.distributed.irecv, got {operation.op!r}"
    )


class Directions:
    """Directions between two ranks of a communicator. Each is made for its first message.

    Args:
        group: the communicator's.
        queue: the communicator's. A failure there or in a direction ends all.
        user_group: the user's process group, which carries plain messages between GPUs.
        store: in which the ranks of the communicator have met.
        timeout: how long to wait for a peer.
    """

    def __init__(
        self, group: Group, queue: CallQueue, user_group: dist.ProcessGroup, store: dist.Store, timeout: timedelta
    ):
        self._group = group
        self._queue = queue
        self._user_group = user_group
        self._store = store
        self._timeout = timeout
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], Direction] = {}

    def of(self, source: int, to: int) -> Direction:
        """The direction between two ranks of the group, of which this rank is one. Raises what ended the queue."""
        self._queue.require_open()
        with self._lock:
            if (source, to) not in self._known:
                self._known[source, to] = self._made(source, to)
            return self._known[source, to]

    def _made(self, source: int, to: int) -> Direction:
        all_ranks, own = self._group, self._group.rank
        rank, peer = (_SOURCE, to) if own == source else (_DESTINATION, source)
        names = [all_ranks.ranks[source], all_ranks.ranks[to]]

        # The first rank stands twice, which no list of ranks does: this key can't be that of a group.
        key = (*names, names[0], all_ranks.communicator)
        group = Group(all_ranks.training, all_ranks.config, names, rank, communicator=all_ranks.communicator, key=key)
        routes = OneWayRoutes(
            dist.PrefixStore(f"messages {source} to {to}", self._store),
            names,
            rank,
            self._timeout,
            self._queue.routes.of(HOST).transport,
            peer,
            nccl_class_of(self._user_group),
        )
        about = "send to rank {1}, which ends with the recv there", "recv from rank {0}, which ends with the send there"
        errors = _MessageErrors(about[rank].format(*names))
        queue = CallQueue(routes, f"ncz-messages-{source}-to-{to}", self._queue.together, errors)
        group_of_user = self._user_group  # not self: a circle would keep this object alive
        plain = SubsetCollectives(TorchCollectives(lambda: group_of_user), [source, to], rank)
        return Direction(group, queue, partial(GpuCalls, user_group=group_of_user, open_settings=None, plain=plain))


class Direction:
    """Messages from one rank to another, one after another.

    Args:
        group: the two ranks.
        queue: runs their calls.
        gpu_calls: makes what begins calls on a GPU. Takes the group, the device and the queue.
    """

    def __init__(self, group: Group, queue: CallQueue, gpu_calls: Callable[..., GpuCalls]):
        self._group = group
        self._queue = queue
        self._gpu_calls = gpu_calls
        self._calls: dict[torch.device, HostCalls | GpuCalls] = {HOST: HostCalls(group, queue, None)}

    def on(self, device: torch.device) -> HostCalls | GpuCalls:
        """What begins calls on tensors on this device."""
        if device not in self._calls:
            self._calls[device] = self._gpu_calls(self._group.for_gpus(), device, self._queue)
        return self._calls[device]

    def require_open(self) -> None:
        """Raise what broke the communicator, if anything did, and UnsupportedError in a fork of its process."""
        self._queue.require_open()

    def refuse(self, collective: str) -> None:
        """Tell the other rank, which would wait for it, that this one can't make its call."""
        with suppress(NczError):  # what matters is why it was refused
            self._queue.routes.note_refusal()
            tell(self._queue, self._group, collective, refusal(self._group.calls))


class _MessageErrors(ErrorTranslation):
    """Context in which a PeerError says which message failed."""

    __slots__ = ()

    def translated(self, error):
        if not isinstance(error, PeerError):
            return None
        return PeerError(f"{self.subject}: {error}")
