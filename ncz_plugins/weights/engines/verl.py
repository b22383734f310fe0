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

from ...core.transport.base import peer_errors
from ..keys import read_key
from ..sync import PatchExchange, WeightPublisher
from .checkpoint import CheckpointCopy


@CheckpointEngineRegistry.register("ncz")
class PatchCheckpointEngine(PatchExchange, CheckpointEngine):
    """Sends what has changed since the version that each rollout has. verl makes one in every worker.

    Args:
        bucket_size: not used: patches go whole.
        is_master: whether this is actor rank 0, which sends.
        timeout: seconds to wait for other workers.
        key_file: a file with a key, the same for actor rank 0 and all rollouts; other actors don't read it. None:
            patches have none.

    Attributes:
        bytes_sent: what each rollout got with the last version.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout: float = 600, key_file: str | None = None):
        self.bytes_sent = 0
        self._is_master, self._timeout = is_master, timedelta(seconds=timeout)
        self._key_file = key_file
        self._publisher: WeightPublisher | None = None  # of actor rank 0, from its first connection on
        self._checkpoint: CheckpointCopy | None = None  # of a rollout, likewise
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
        """Connect. Workers may come and go between two updates, so each has a group of its own.

        Raises UnsupportedError and PatchKeyError if the key can't be read, and PeerError.
        """
        if rank < 0:
            return
        # The other actors need no key, and may have no such file.
        if rank == 0 and self._publisher is None:
            self._publisher = WeightPublisher(keep=2, key=read_key(self._key_file))
        if rank > 0 and self._checkpoint is None:
            self._checkpoint = CheckpointCopy(key=read_key(self._key_file))
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
            self._refuse()
            raise
        self.bytes_sent = self._send(self._publisher)
        return {"ncz/bytes_sent": float(self.bytes_sent)}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Tensor], None]:
        """All tensors of the new version, on this worker's device.

        Raises MismatchError if the trainer could not publish, PatchKeyError if it has another key, FrameError if a
        patch is damaged, and PeerError if a worker fails.
        """
        self._checkpoint.apply([self._receive(self._checkpoint.identity, "actor rank 0")])
        device = get_device_name() if get_torch_device().is_available() else "cpu"
        for name, tensor in self._checkpoint.weights.items():
            yield name, tensor.to(device)

    def _gather(self, own: int) -> list[int]:
        given = torch.tensor([own], dtype=torch.int64, device="cpu")
        gathered = [torch.empty_like(given) for _ in range(self._group.size())]
        with peer_errors("comparing versions of weights"):
            self._group.allgather([gathered], [given]).wait()
        return [int(each) for each in gathered[1:]]

    def _broadcast(self, tensor: Tensor) -> Tensor:
        with peer_errors("the broadcast of weights"):
            self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
        return tensor
