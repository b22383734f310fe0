"""Weights that a trainer publishes again and again, and that workers follow by patches: for RL and inference.

Patches are bytes (patch.py). Send them as you like, or let `WeightSync` do it over torch.distributed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import MismatchError, UnsupportedError
from ..core.transport.base import peer_errors
from ..core.transport.groups import require_group
from .items import memory_of, on_host, require_state
from .patch import apply_patch, identity, make_patch

_NONE = -1  # in place of the identity of a version
_REFUSED = -1  # in place of the bytes of a patch


class WeightPublisher:
    """The trainer's side: keeps some versions of a state dict, and makes patches from each of them to the newest.

    Args:
        keep: how many versions it keeps, the newest among them: 2 serve workers that are one version behind. Each takes
            the memory of a state dict, on the host.

    Attributes:
        version: how often was published.
    """

    def __init__(self, keep: int = 2):
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep: {keep!r}: at least the newest version is kept; allowed: an integer from 1 on")
        self.version = 0
        self._keep = keep
        self._kept: dict[int, dict[str, Tensor]] = {}  # by identity, the oldest first
        self._made: dict[int | None, bytes] = {}  # patches to the newest version

    def publish(self, state: Mapping[str, Tensor]) -> int:
        """Copy `state` as the newest version. Returns the number of the version, from 1.

        Raises UnsupportedError as `make_patch` does, and then keeps what was published before.
        """
        copied = _copied(state)
        new = identity(copied)
        self._kept.pop(new, None)
        self._kept[new] = copied
        for old in list(self._kept)[: -self._keep]:
            del self._kept[old]
        self._made.clear()
        self.version += 1
        return self.version

    @property
    def identity(self) -> int:
        """What tells the newest version from others. Raises UnsupportedError if there is none."""
        self._require_published()
        return next(reversed(self._kept))

    def patch(self, base: int | None = None) -> bytes:
        """What turns the version with the identity `base` into the newest; all of the newest if that is not kept.

        So a worker whose weights are none that was published, because it is new or has changed them, gets all of them.

        Raises UnsupportedError if nothing was published.
        """
        self._require_published()
        base = base if base in self._kept else None
        if base not in self._made:
            self._made[base] = make_patch(self._kept[self.identity], None if base is None else self._kept[base])
        return self._made[base]

    def _require_published(self) -> None:
        if not self._kept:
            raise UnsupportedError("no version was published yet: call publish(state_dict) first")


class WeightSubscriber:
    """A worker's side: holds the weights that patches made.

    Attributes:
        weights: tensors by name, in host memory; empty before the first patch. Tensors that share memory at the trainer
            are one tensor here, too.
    """

    def __init__(self):
        self.weights: dict[str, Tensor] = {}

    @property
    def identity(self) -> int | None:
        """What `WeightPublisher.patch` wants to know: the identity of the weights, as they are now; None without any.

        It takes a pass over all of them, and so notices if somebody has changed them in place.
        """
        try:
            return identity(self.weights) if self.weights else None
        except UnsupportedError:  # of what was put among them
            return None

    def apply(self, patch: bytes) -> dict[str, Tensor]:
        """The weights, once the patch is applied.

        Raises FrameError if it is damaged, and MismatchError if it is for another version, also if the weights were
        changed in place since `identity` was asked for. The weights are unchanged then: ask for a patch for the
        `identity` that they have now.
        """
        self.weights = apply_patch(patch, self.weights or None)
        return self.weights


class WeightSync:
    """Brings the weights of one rank to all ranks of a process group, as patches.

    Every rank makes one, and calls `publish` or `receive` at the same time: they are collectives. A rank that has lost
    its weights, has changed them, or is new, gets all of them.

    Args:
        group: the process group; None is the default group.
        src: global rank of the trainer.
        keep: see `WeightPublisher`.

    Attributes:
        bytes_sent: by the trainer to each rank, of the last version that went out.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, src: int = 0, keep: int = 2):
        self._group = require_group(group, "WeightSync")
        ranks = dist.get_process_group_ranks(self._group)
        if src not in ranks:
            raise UnsupportedError(f"src={src!r} is not a rank of this group; they are {ranks}")
        self._src, self._place = src, ranks.index(src)
        self._publisher = WeightPublisher(keep)
        self._subscriber = WeightSubscriber()
        self.bytes_sent = 0

    def publish(self, state: Mapping[str, Tensor]) -> int:
        """Send `state` to all other ranks. Returns the number of the version, from 1.

        Raises UnsupportedError on any rank but `src`, and for a state that can't be published; and PeerError. Of
        whatever keeps a state from being published, all other ranks learn by a MismatchError.
        """
        if dist.get_rank() != self._src:
            raise UnsupportedError(
                f"publish: this is rank {dist.get_rank()}, and rank {self._src} publishes: receive()"
            )
        try:
            version = self._publisher.publish(state)
        except Exception:  # whatever it was, a worker would wait for this rank until its time-out
            bases = self._bases(_NONE)
            if bases:
                self._broadcast(torch.full((len(bases), 2), _REFUSED, dtype=torch.int64, device="cpu"))
            raise
        bases = self._bases(_NONE)
        if not bases:
            return version
        patches = [self._publisher.patch(None if base == _NONE else base) for base in bases]
        distinct = list({id(patch): patch for patch in patches}.values())  # all that have no kept version share one
        starts = dict(zip(map(id, distinct), accumulate(map(len, distinct), initial=0)))
        self._broadcast(
            torch.tensor([[starts[id(patch)], len(patch)] for patch in patches], dtype=torch.int64, device="cpu")
        )
        self.bytes_sent = sum(map(len, distinct))
        self._broadcast(torch.frombuffer(bytearray(b"".join(distinct)), dtype=torch.uint8))
        return version

    def receive(self) -> dict[str, Tensor]:
        """The newest weights, as the trainer published them.

        Raises UnsupportedError on the rank `src`, MismatchError where that could not publish, FrameError, and
        PeerError.
        """
        if dist.get_rank() == self._src:
            raise UnsupportedError(f"receive: this is rank {self._src}, which publishes: publish(state_dict)")
        own = self._subscriber.identity
        own = _NONE if own is None else own
        bases = self._bases(own)
        places = self._broadcast(torch.zeros(len(bases), 2, dtype=torch.int64, device="cpu"))
        if (places == _REFUSED).any():
            raise MismatchError(f"receive: rank {self._src} could not publish; the error that it raised says why")
        data = self._broadcast(torch.empty(int(places.sum(1).max()), dtype=torch.uint8, device="cpu"))
        start, size = places[bases.index(own)].tolist()
        return self._subscriber.apply(data[start : start + size])

    def _bases(self, own: int) -> list[int]:
        """The versions that workers have, each once, the same list on every rank."""
        given = torch.tensor([own], dtype=torch.int64, device=self._device)
        all_of_them = [torch.empty_like(given) for _ in range(self._group.size())]
        with peer_errors("comparing versions of weights"):
            dist.all_gather(all_of_them, given, group=self._group)
        return sorted({int(each) for place, each in enumerate(all_of_them) if place != self._place})

    def _broadcast(self, tensor: Tensor) -> Tensor:
        sent = tensor.to(self._device)
        with peer_errors("the broadcast of weights"):
            dist.broadcast(sent, self._src, group=self._group)
        return sent.cpu()

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda" if dist.get_backend(self._group) == "nccl" else "cpu")


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of all tensors, in which those that share their memory still do."""
    require_state(state, "state")
    made: dict[Hashable, Tensor] = {}
    copied = {}
    for name, tensor in state.items():
        memory = memory_of(tensor)
        copied[name] = made[memory] if memory in made else on_host(name, tensor, copy=True)
        if memory is not None:
            made[memory] = copied[name]
    return copied
