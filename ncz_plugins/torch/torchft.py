"""Compressed all-reduces between torchft's replicas, for DiLoCo and for gradients.

    from ncz_plugins.torch.torchft import CompressedProcessGroup

    manager = Manager(pg=CompressedProcessGroup("ncclz"), ...)
    with DiLoCo(manager, [model], inner_optimizer, outer_optimizer, sync_every=100):
        ...

See docs/guides/diloco.md.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

try:
    from torchft.process_group import ProcessGroupGloo, ProcessGroupWrapper, create_store_client
except ImportError as error:
    raise ImportError("ncz_plugins.torch.torchft needs torchft: pip install 'ncz_plugins[torchft]'") from error

from ..core.communicator import Communicator
from ..core.config import Config, StepsConfig
from ..core.errors import PeerError, UnsupportedError
from ..core.runtime.statistics import Statistics
from ..core.training.state import Training
from ..core.transport.base import peer_errors
from .work import HandleWork


class CompressedProcessGroup(ProcessGroupWrapper):
    """Process group for `torchft.Manager(pg=...)` that compresses all-reduces.

    All other collectives go to the process group that it wraps. Each quorum opens new connections. Statistics last from
    quorum to quorum.

    Args:
        config: a preset, such as "ncclz", a mapping, the path of a file, or a Config; None is that of `training`, else
            the defaults.
        pg: the process group to wrap, a ProcessGroupGloo or ProcessGroupNCCL; None makes a ProcessGroupGloo.
        timeout: how long to wait for the store and, if `pg` is None, for peers.
        training: state that lasts from quorum to quorum, to share it between groups.

    Raises ConfigError for invalid settings. Raises UnsupportedError for a process group that lives in another process,
    for settings that need names of parameters, which torchft does not pass, and for settings that need the step, which
    a replica that joins does not know.
    """

    def __init__(
        self,
        config=None,
        pg: ProcessGroupWrapper | None = None,
        timeout: timedelta = timedelta(seconds=60),
        training: Training | None = None,
    ):
        super().__init__(timeout, ProcessGroupGloo(timeout) if pg is None else pg)
        self._inner = self._pg
        if not isinstance(self._inner, ProcessGroupWrapper):
            raise UnsupportedError(
                f"{type(pg).__name__} can't be wrapped, because its connections are in another process. Pass a "
                "ProcessGroupGloo or a ProcessGroupNCCL"
            )
        self.training = Training(config) if training is None else training
        _require_no_memory(self.training.config)
        # None: the communicator takes the settings of `training`, which the user may replace there.
        self._config = None if training is None else config
        self._communicator: Communicator | None = None

    @property
    def stats(self) -> Statistics:
        """Statistics of all quorums."""
        return self.training.stats

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *more, **named) -> None:
        """Connect the replicas of a new quorum. torchft calls this on all of them.

        Raises MismatchError if replicas differ in version or configuration, PeerError if one does not connect.
        """
        self._abort_communicator()
        self.training.forget_groups()
        self.training.rank, self.training.world_size = rank, world_size
        with peer_errors("connecting the replicas of a new quorum"):
            super().configure(store_addr, replica_id, rank, world_size, *more, **named)
            store = create_store_client(f"{store_addr}/ncz_plugins", timeout=self._timeout)
        self._communicator = Communicator(self._config, self._inner.parent, self.training, store)

    def allreduce(self, tensors: list[Tensor], opts) -> dist.Work:
        """Reduce tensors over replicas, in place. Raises PeerError without a quorum."""
        if self._communicator is None:
            raise PeerError("this process group has no quorum: it was never configured, or was aborted")
        op = opts.reduceOp.op if isinstance(opts, dist.AllreduceOptions) else opts
        return HandleWork(self._communicator.all_reduce_coalesced(tensors, op, async_op=True, role="gradient"))

    def errored(self) -> Exception | None:
        """The error that broke this quorum's connections, None if there was none. torchft then forms a new quorum."""
        return (self._communicator and self._communicator.error) or self._inner.errored()

    def abort(self, errored: bool = True) -> None:
        """Give up the calls under way and close the connections. The next `configure` opens new ones."""
        self._abort_communicator()
        self._inner.abort(errored)

    def shutdown(self) -> None:
        """Close the connections."""
        self._abort_communicator()
        self._inner.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._inner.set_timeout(timeout)

    def getBackendName(self) -> str:
        return f"ncz-{self._inner.getBackendName()}"

    def _abort_communicator(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()


def _require_no_memory(config: Config) -> None:
    """Raise UnsupportedError if a setting depends on something that a replica that has just joined does not know."""
    found = {
        "policies": config.policies,
        "quantizer.error_feedback": config.quantizer.feeds_back,
        "quantizer.rotation": config.quantizer.rotates,
        "steps": config.steps != StepsConfig(),
        "guard.every": config.guard.every,
    }
    if names := ", ".join(name for name, is_set in found.items() if is_set):
        raise UnsupportedError(
            f"{names}: torchft passes no names of parameters, and a replica that joins does not know the step; remove "
            "these settings"
        )
