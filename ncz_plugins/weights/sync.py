"""A trainer that publishes versions of its weights, and workers that follow by patches: for RL, inference, evaluation.

`WeightPublisher` makes patches and `WeightSubscriber` applies them; you carry the bytes. `WeightSync` does both, and
carries the bytes over torch.distributed.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import MismatchError, UnsupportedError
from ..core.transport.base import peer_errors
from ..core.transport.groups import require_group
from .apply import require_no_base
from .forms import Held, held_copy
from .keys import require_key
from .make import Snapshot, identity_of, make_patch_of
from .state_dicts import apply_patch, rank_among, require_number
from .tensors import TensorPart, held_in, is_sharded, published_in

# What ranks send in place of numbers from 0 on.
_NO_VERSION = -1  # in place of an identity
_REFUSED = -1  # in place of the bytes of a patch

_NOTHING_PUBLISHED = "no version was published yet: call publish(state_dict) first"


class WeightPublisher:
    """The trainer's side: keeps the newest versions of a state dict, and makes patches from any of them to the newest.

    With DTensors every rank has a publisher, which keeps its own shards and makes patches of them. A version is then
    the patches of all ranks, and each rank has identities of its own. Readers refuse patches with different numbers of
    `publish`. Without numbers ranks count its calls: all ranks make their publishers, and publish, equally often. They
    count from 1 in each run, so patches of a run before may have the same numbers: pass the step.

    Args:
        keep: number of versions to keep, the newest one included. With 2, a worker that is one version behind gets
            changes. Each version takes the memory of a state dict on the host.
        group: see `make_patch`.
        base: what workers begin with, such as the checkpoint that a training begins with. It is kept like a version,
            so that their first patch holds changes.
        key: see `make_patch`.

    Attributes:
        version: how many versions were published.
    """

    def __init__(
        self,
        keep: int = 2,
        group: dist.ProcessGroup | None = None,
        base: Mapping[str, Tensor | TensorPart] | None = None,
        key: bytes | None = None,
    ):
        require_key(key)
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep must be an integer, 1 or more, got {keep!r}: the newest version is always kept")
        self.version = 0
        self._keep, self._group, self._key = keep, group, key
        self._calls = 0  # of publish, those that raised included: the same on all ranks
        self._number: int | None = None  # that patches of the newest version have
        self._place = 0, 1  # number of this rank, and of ranks that publish together
        self._kept: dict[int, Snapshot] = {}  # versions by identity, the oldest first
        self._made: dict[int | None, bytes] = {}  # patches to the newest version, by the identity of their base
        self._changing = threading.Lock()  # held while another version becomes the newest, or is looked up
        if base is not None:
            self._keep_newest(base, None)

    def publish(self, state: Mapping[str, Tensor | TensorPart], number: int | None = None) -> int:
        """Copy `state` as the newest version. Returns how many versions were published, this one included.

        Args:
            state: see `make_patch`.
            number: see `make_patch`, such as the training's step. None: if several ranks publish, the number of this
                call, from 1.

        Raises UnsupportedError as `make_patch` does; the version published before then remains the newest. Other
        threads may ask for patches meanwhile: they get those to the version before.
        """
        self._calls += 1
        require_number(number)
        self._keep_newest(state, number)
        self.version += 1
        return self.version

    def _keep_newest(self, state: Mapping[str, Tensor | TensorPart], number: int | None) -> None:
        new, place = Snapshot.of(_copy(state)), rank_among(state, self._group)
        if number is None and place[1] > 1:
            number = self._calls
        with self._changing:
            self._place, self._number = place, number
            # A version that is published again becomes the newest.
            self._kept.pop(new.identity, None)
            self._kept[new.identity] = new
            for old in list(self._kept)[: -self._keep]:
                del self._kept[old]
            self._made = {}  # a new one: a patch that is being made for the version before goes to the other

    @property
    def identity(self) -> int:
        """The identity of the newest version, or of `base` if none was published. Raises UnsupportedError without."""
        with self._changing:
            if not self._kept:
                raise UnsupportedError(_NOTHING_PUBLISHED)
            return next(reversed(self._kept))

    def patch(self, base: int | None = None) -> bytes:
        """The patch that turns the version with the identity `base` into the newest.

        If that version is not kept, or `base` is None, the patch holds the whole newest version. A worker gets that if
        it is new, too far behind, or has changed its weights.

        Raises UnsupportedError if nothing was published.
        """
        if not self.version:
            raise UnsupportedError(_NOTHING_PUBLISHED)
        with self._changing:  # what belongs together; `publish` need not wait for the patch to be made
            newest, older = next(reversed(self._kept.values())), self._kept.get(base)
            made, place, number = self._made, self._place, self._number
        base = None if older is None else base
        if base not in made:
            made[base] = make_patch_of(
                newest.held,
                older and older.held,
                *place,
                key=self._key,
                number=number,
                known=newest.digests,
                known_base=older and older.digests,
            )
        return made[base]


class WeightSubscriber:
    """A worker's side: applies patches, and holds the weights that they make.

    Args:
        base: what this worker begins with, such as a checkpoint from its disk. Its first patch holds changes if the
            publisher keeps that version, and all weights otherwise.
        key: of the publisher, see `apply_patch`.

    Attributes:
        weights: tensors by name, in host memory; empty before the first patch. Tensors that share memory at the
            trainer are one tensor here. May be set to another version that the publisher keeps.
    """

    def __init__(self, base: Mapping[str, Tensor] | None = None, key: bytes | None = None):
        require_key(key)
        self._key = key
        self.weights: dict[str, Tensor] = {} if base is None else dict(base)
        self._made: tuple[dict[str, Tensor], int | None] | None = None  # by patches of several ranks, and identity

    @property
    def identity(self) -> int | None:
        """The identity of `weights` as they are now, for `WeightPublisher.patch`; None before the first patch.

        Each use reads all weights, and so notices changes in place. None as well if `weights` has something that no
        patch can hold.
        """
        try:
            return identity_of(held_in(self.weights, "weights")) if self.weights else None
        except UnsupportedError:
            return None

    def apply(self, patch: bytes | Sequence[bytes]) -> dict[str, Tensor]:
        """Apply a patch, or those of all ranks that published a version. Returns the new weights.

        Raises PatchKeyError if its key is another one, FrameError if the patch is damaged, and MismatchError if it is
        for another version than `weights` as they are now, also because they were changed in place. `weights` stay as
        they were: get a patch for their present `identity`, or a whole version.
        """
        # Patches of several ranks name what each rank held: only this worker knows what they made.
        is_of_several = isinstance(patch, (list, tuple)) and len(patch) > 1
        base = self.weights or None
        if is_of_several and self._made is not None and self._made[0] is base and self.identity != self._made[1]:
            require_no_base(patch, self._key, "the weights were changed in place since the last patch")
        self.weights = apply_patch(patch, base, self._key)
        self._made = (self.weights, self.identity) if is_of_several else None
        return self.weights

    def follow(self, ask: Callable[[int | None], bytes | Sequence[bytes]]) -> dict[str, Tensor]:
        """Get a patch and apply it. Returns the new weights, whatever happened to those before.

        Args:
            ask: gives the patch for an identity, or a whole version for None: `WeightPublisher.patch`, or a request
                that brings what it returns from the trainer.

        Raises what `ask` and `apply` raise, except for a MismatchError of changes: a whole version is asked for then.
        """
        try:
            return self.apply(ask(self.identity))
        except MismatchError:
            return self.apply(ask(None))


class PatchExchange(ABC):
    """One version from a trainer to workers that hold different ones, in three collectives.

    1. All gather the identities that the workers have: the bases of the patches.
    2. The trainer broadcasts, for each base, where its patch begins in the bytes that follow, and its length.
    3. The trainer broadcasts these bytes: all patches, one behind the other.
    """

    @abstractmethod
    def _gather(self, own: int) -> Iterable[int]:
        """The numbers of all workers, not that of the trainer, which gives any. Raises PeerError."""

    @abstractmethod
    def _broadcast(self, tensor: Tensor) -> Tensor:
        """The trainer's tensor, in host memory. All pass a tensor of its size and dtype. Raises PeerError."""

    def _send(self, publisher: WeightPublisher) -> int:
        """Send the newest version of a publisher. Returns the bytes that each worker gets."""
        bases = self._gather_bases()
        if not bases:  # the trainer is alone
            return 0
        patches = [publisher.patch(None if base == _NO_VERSION else base) for base in bases]
        # All bases that the publisher does not keep have the same patch, the whole version. It is sent once.
        distinct = list({id(patch): patch for patch in patches}.values())
        starts = dict(zip(map(id, distinct), accumulate(map(len, distinct), initial=0)))
        places = [[starts[id(patch)], len(patch)] for patch in patches]
        self._broadcast(torch.tensor(places, dtype=torch.int64, device="cpu"))
        self._broadcast(torch.frombuffer(bytearray(b"".join(distinct)), dtype=torch.uint8))
        return sum(map(len, distinct))

    def _refuse(self) -> None:
        """Tell the workers that no version comes. Otherwise they would wait until their time-out."""
        if bases := self._gather_bases():
            self._broadcast(torch.full((len(bases), 2), _REFUSED, dtype=torch.int64, device="cpu"))

    def _receive(self, identity: int | None, trainer: str) -> Tensor:
        """The patch for the version that this worker has. Raises MismatchError if the trainer could not publish."""
        own = _NO_VERSION if identity is None else identity
        bases = self._gather_bases(own)
        places = self._broadcast(torch.zeros(len(bases), 2, dtype=torch.int64, device="cpu"))
        if (places == _REFUSED).any():
            raise MismatchError(f"receive: {trainer} could not publish; the error that it raised says why")
        # All patches, of which one is for the weights of this rank.
        data = self._broadcast(torch.empty(int(places.sum(1).max()), dtype=torch.uint8, device="cpu"))
        start, size = places[bases.index(own)].tolist()
        return data[start : start + size]

    def _gather_bases(self, own: int = _NO_VERSION) -> list[int]:
        """The identities of all workers' weights, each one once, sorted: the same list on every rank."""
        return sorted(set(self._gather(own)))


class WeightSync(PatchExchange):
    """Brings the weights of one rank to all ranks of a process group, as patches.

    Every rank makes one of these. Then the trainer calls `publish` and all other ranks call `receive`, at the same
    time: they are collectives. A rank that is new, lost its weights or changed them gets a whole version.

    Args:
        group: the process group; None is the default group.
        src: global rank of the trainer.
        keep: see `WeightPublisher`.
        base: what this rank begins with, such as the checkpoint on its disk. A worker's first version costs what
            differs if its base is that of the trainer; otherwise the worker gets all weights.
        key: see `make_patch`; the same on all ranks.

    Attributes:
        bytes_sent: what the trainer sent to each rank for the last version. Stays 0 on workers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        src: int = 0,
        keep: int = 2,
        base: Mapping[str, Tensor] | None = None,
        key: bytes | None = None,
    ):
        self._group = require_group(group, "WeightSync")
        ranks = dist.get_process_group_ranks(self._group)
        if src not in ranks:
            raise UnsupportedError(f"src must be a global rank of this group, one of {ranks}, got {src!r}")
        self._src, self._src_in_group = src, ranks.index(src)
        is_trainer = dist.get_rank() == src
        self._publisher = WeightPublisher(keep, base=base if is_trainer else None, key=key)
        self._subscriber = WeightSubscriber(None if is_trainer else base, key)
        self.bytes_sent = 0

    def publish(self, state: Mapping[str, Tensor]) -> int:
        """Send `state` to all other ranks. Returns the number of the version, from 1.

        Raises UnsupportedError on any rank but `src`, and if no patch can hold `state`; PeerError if a rank fails.
        Whatever keeps the trainer from publishing is a MismatchError on all other ranks.
        """
        if dist.get_rank() != self._src:
            raise UnsupportedError(
                f"publish: rank {self._src} publishes, and this is rank {dist.get_rank()}: call receive() here"
            )
        try:
            if isinstance(state, Mapping) and is_sharded(state):
                raise UnsupportedError(
                    "publish: one rank sends all weights, and these are DTensors or parts: use make_patch on every rank"
                )
            version = self._publisher.publish(state)
        except Exception:
            self._refuse()
            raise
        self.bytes_sent = self._send(self._publisher)
        return version

    def receive(self) -> dict[str, Tensor]:
        """The newest weights, as the trainer published them.

        Raises UnsupportedError on the rank `src`, MismatchError if the trainer could not publish, PatchKeyError if it
        has another key, FrameError if a patch is damaged, and PeerError if a rank fails.
        """
        if dist.get_rank() == self._src:
            raise UnsupportedError(f"receive: this is rank {self._src}, which publishes: call publish(state_dict) here")
        return self._subscriber.apply(self._receive(self._subscriber.identity, f"rank {self._src}"))

    def _gather(self, own: int) -> list[int]:
        given = torch.tensor([own], dtype=torch.int64, device=self._device)
        gathered = [torch.empty_like(given) for _ in range(self._group.size())]
        with peer_errors("comparing versions of weights"):
            dist.all_gather(gathered, given, group=self._group)
        return [int(each) for rank, each in enumerate(gathered) if rank != self._src_in_group]

    def _broadcast(self, tensor: Tensor) -> Tensor:
        sent = tensor.to(self._device)
        with peer_errors("the broadcast of weights"):
            dist.broadcast(sent, self._src, group=self._group)
        return sent.cpu()

    @property
    def _device(self) -> torch.device:
        """Where the group's collectives want tensors: in host memory if they take them there."""
        if "cpu:" in dist.get_backend_config(self._group):
            return torch.device("cpu")
        return getattr(self._group, "bound_device_id", None) or torch.device("cuda")


def _copy(state: Mapping[str, Tensor | TensorPart]) -> dict[str, Held]:
    """Copy what this rank publishes to host memory. Tensors that share all of their memory are copied once."""
    made: dict[Hashable, Held] = {}
    copied = {}
    for name, held in published_in(state, "state").items():
        if held.memory is None or held.memory not in made or not made[held.memory].is_alike(held):
            made[held.memory] = held_copy(held)
        copied[name] = made[held.memory]
    return copied
