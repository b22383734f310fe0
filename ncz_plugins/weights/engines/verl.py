"""A checkpoint engine of verl that sends patches from the trainer to the rollouts.

    actor_rollout_ref.rollout.checkpoint_engine.backend=ncz
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=ncz_plugins.weights.engines.verl

Actor rank 0 keeps the last two versions in host memory, each rollout worker one. An update is four steps: rollouts say
which version they have; actor rank 0 makes a patch for each; all of them go to all rollouts, over gloo; each rollout
applies its own and hands all tensors to its inference engine. See docs/guides/rl.md.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

try:
    import ray
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
    from verl.utils.device import get_device_name, get_torch_device
except ImportError as error:
    raise ImportError("ncz_plugins.weights.engines.verl needs verl 0.9 or newer: pip install verl") from error

from ...core.errors import MismatchError
from ...core.transport.base import peer_errors
from ..sync import WeightPublisher
from .checkpoint import CheckpointCopy

_NO_VERSION = -1  # in place of the identity of a version, which is 0 or more
_REFUSED = -1  # in place of the place of a patch


@CheckpointEngineRegistry.register("ncz")
class PatchCheckpointEngine(CheckpointEngine):
    """Sends what has changed since the version that each rollout has. verl makes one in every worker.

    Args:
        bucket_size: not used: patches go whole.
        is_master: whether this is actor rank 0, which sends.
        timeout: seconds to wait for other workers.

    Attributes:
        bytes_sent: what each rollout got with the last version.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout: float = 600):
        self.bytes_sent = 0
        self._is_master, self._timeout = is_master, timedelta(seconds=timeout)
        self._publisher, self._checkpoint = WeightPublisher(keep=2), CheckpointCopy()
        self._store: dist.TCPStore | None = None
        self._group: dist.ProcessGroupGloo | None = None

    def prepare(self) -> dict[str, Any]:
        """Where actor rank 0 waits for the others. Nothing on other workers."""
        if not self._is_master:
            return {}
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return {"host": host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Actor rank 0 and all rollouts are a group. The other actors have rank -1."""
        size = 1 + rollout_world_size
        actors = [0, *[-1] * (actor_wg_world_size - 1)]
        return tuple(
            {"rank": ranks, "world_size": [size] * len(ranks), "master": [metadata[0]] * len(ranks)}
            for ranks in (actors, list(range(1, size)))
        )

    def init_process_group(self, rank: int, world_size: int, master: dict[str, Any]) -> None:
        """Connect. Workers may come and go between two updates, so each has a group of its own."""
        if rank < 0:
            return
        with peer_errors("connecting trainer and rollouts"):
            if rank:
                self._store = dist.TCPStore(master["host"], master["port"], is_master=False, timeout=self._timeout)
            self._group = dist.ProcessGroupGloo(self._store, rank, world_size, self._timeout)

    def finalize(self) -> None:
        """Close the connections. The versions stay."""
        self._group = self._store = None

    async def send_weights(
        self, weights: Generator[tuple[str, Tensor], None, None], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send a version to all rollouts. Returns metrics for the trainer.

        What keeps the trainer from publishing is a MismatchError on all rollouts.
        """
        # Making a tensor whole is a collective of all actors, so all of them go through the weights.
        state = {name: weight.detach().to("cpu") for name, weight in weights if self._is_master}
        if not self._is_master:
            return {}
        try:
            self._publisher.publish(state)
        except Exception:
            bases = self._gather_bases(_NO_VERSION)
            self._broadcast(torch.full((len(bases), 2), _REFUSED, dtype=torch.int64, device="cpu"))
            raise
        # A patch for each version that some rollout has. Those that are not kept have the same one, the whole version.
        patches = [self._publisher.patch(None if base == _NO_VERSION else base) for base in self._gather_bases()]
        distinct = list({id(patch): patch for patch in patches}.values())
        starts = dict(zip(map(id, distinct), accumulate(map(len, distinct), initial=0)))
        places = [[starts[id(patch)], len(patch)] for patch in patches]
        self._broadcast(torch.tensor(places, dtype=torch.int64, device="cpu"))
        self._broadcast(torch.frombuffer(bytearray(b"".join(distinct)), dtype=torch.uint8))
        self.bytes_sent = sum(map(len, distinct))
        return {"ncz/bytes_sent": float(self.bytes_sent)}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Tensor], None]:
        """All tensors of the new version, on this worker's device.

        Raises MismatchError if the trainer could not publish, FrameError if a patch is damaged, and PeerError if a
        worker fails.
        """
        own = self._checkpoint.identity
        own = _NO_VERSION if own is None else own
        bases = self._gather_bases(own)
        places = self._broadcast(torch.zeros(len(bases), 2, dtype=torch.int64, device="cpu"))
        if (places == _REFUSED).any():
            raise MismatchError("actor rank 0 could not publish its weights; the error that it raised says why")
        data = self._broadcast(torch.empty(int(places.sum(1).max()), dtype=torch.uint8, device="cpu"))
        start, size = places[bases.index(own)].tolist()
        self._checkpoint.apply([data[start : start + size]])
        device = get_device_name() if get_torch_device().is_available() else "cpu"
        for name, tensor in self._checkpoint.weights.items():
            yield name, tensor.to(device)

    def _gather_bases(self, own: int = _NO_VERSION) -> list[int]:
        """The identities of all rollouts' versions, each one once, sorted: the same list everywhere."""
        given = torch.tensor([own], dtype=torch.int64, device="cpu")
        gathered = [torch.empty_like(given) for _ in range(self._group.size())]
        with peer_errors("comparing versions of weights"):
            self._group.allgather([gathered], [given]).wait()
        return sorted({int(each) for each in gathered[1:]})

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of actor rank 0. All others pass one of its size and dtype."""
        with peer_errors("the broadcast of weights"):
            self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
        return tensor
