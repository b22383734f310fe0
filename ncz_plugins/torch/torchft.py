"""Compressed all-reduces between the replicas of torchft: for DiLoCo, and for gradients.

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
from .strided import all_reduce
from .work import HandleWork


class CompressedProcessGroup(ProcessGroupWrapper):
    """A process group for `torchft.Manager(pg=...)` whose all-reduces are compressed.

    All else goes to the process group that it wraps. Each quorum opens new connections. Counts last from quorum to
    quorum.

    Args:
        config: "ncclz", a mapping, the path of a file, or a Config; None is that of `training`, else the defaults.
        pg: the process group to wrap, a ProcessGroupGloo or ProcessGroupNCCL; None makes a ProcessGroupGloo.
        timeout: how long to wait for the store and, where `pg` is None, for peers.
        training: what lasts from quorum to quorum, if several groups are to share it.

    Raises ConfigError, UnsupportedError for a process group that lives in another process, and for settings that need
    the names of parameters, which torchft does not tell, or steps, which a replica that joins has not counted.
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
                f"{type(pg).__name__} can't be wrapped: its connections live in another process. Pass a "
                "ProcessGroupGloo or a ProcessGroupNCCL"
            )
        self.training = Training(config) if training is None else training
        _require_no_memory(self.training.config)
        # Of a training of our own, the settings are the training's, and may be replaced there.
        self._config = None if training is None else config
        self._communicator: Communicator | None = None

    @property
    def stats(self) -> Statistics:
        """What was counted."""
        return self.training.stats

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *more, **named) -> None:
        """Connect the replicas of a new quorum. All of them must call this. torchft does.

        Raises MismatchError where replicas differ in version or configuration, PeerError where one does not come.
        """
        self._abort_communicator()
        self.training.forget_groups()
        self.training.rank, self.training.world_size = rank, world_size
        with peer_errors("connecting the replicas of a new quorum"):
            super().configure(store_addr, replica_id, rank, world_size, *more, **named)
            store = create_store_client(f"{store_addr}/ncz_plugins", timeout=self._timeout)
        self._communicator = Communicator(self._config, self._inner.parent, self.training, store)

    def allreduce(self, tensors: list[Tensor], opts) -> dist.Work:
        """Reduce tensors over replicas, in place."""
        if self._communicator is None:
            raise PeerError("this process group has no quorum: it was not configured, or aborted since")
        op = opts.reduceOp.op if isinstance(opts, dist.AllreduceOptions) else opts
        return HandleWork(all_reduce(self._communicator, tensors, op))

    def errored(self) -> Exception | None:
        """What broke the connections of this quorum, so that the next one opens new ones; None while all is well."""
        return (self._communicator and self._communicator.error) or self._inner.errored()

    def abort(self, errored: bool = True) -> None:
        """Give up what is under way and close the connections, until the next `configure`."""
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
    """Raise UnsupportedError unless all that decides over a call is known to a replica that has just joined."""
    found = {
        "policies": config.policies,
        "quantizer.error_feedback": config.quantizer.feeds_back,
        "steps": config.steps != StepsConfig(),
        "guard.every": config.guard.every,
    }
    if names := ", ".join(name for name, is_set in found.items() if is_set):
        raise UnsupportedError(
            f"{names}: torchft passes no names of parameters, and replicas that join have not counted steps; leave out "
            "these settings"
        )
