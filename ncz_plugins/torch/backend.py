"""Backend "ncz" of torch.distributed, for programs that offer no other place for compression.

    torch.distributed.init_process_group("ncz")

Torch 2.14 and newer find it by its name. With older versions, import this module first.

Compressed are sums and averages of floats that a backward pass makes, and what you call a gradient. All else is exact.
A process group can't tell gradients from other tensors: roles.py says what it goes by. Tensors in host memory travel
through gloo where they stay uncompressed, tensors on GPUs through NCCL.

The environment variable NCZ_CONFIG names a configuration file. Without it all settings have their defaults.

See docs/guides/pytorch.md.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ..core.errors import UnsupportedError
from . import private
from .backend_calls import ENVIRONMENT, BackendCalls
from .roles import role
from .work import HandleWork, WorkOfSeveral

__all__ = ["ENVIRONMENT", "NAME", "CompressedBackend", "of_group", "register", "role"]

NAME = "ncz"
# With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps a backend, and the wrapper keeps the C++ half of it only.
_wrapped: set[CompressedBackend] = set()


if private.PythonBackend is None:

    @private.not_compiled
    class CompressedBackend(BackendCalls, dist.ProcessGroup):
        """Process group with gloo and NCCL that compresses reductions of gradients, for torch before 2.14.

        It serves all devices, so "cpu:ncz,cuda:nccl" is refused. Raises ConfigError if the configuration file is
        invalid. The first compressed call raises UnsupportedError if another backend serves some devices, and
        MismatchError if ranks differ in version or configuration.

        Attributes:
            communicator: for compressed calls. None before the ranks have connected for them.
            training: what the calls have counted, and the settings.
        """

        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
            dist.ProcessGroup.__init__(self, rank, size)
            self._is_alone = False  # until it is sure that no other backend serves some devices
            self._open(store, rank, size, timeout)
            # Torch asks the group itself for the backend of a device, and calls methods that are not overridden here.
            types = dist.ProcessGroup.BackendType
            private.set_default_backend(self, types.GLOO)
            for device, its_type in (("cpu", types.GLOO), ("cuda", types.NCCL)):
                if (backend := private.backend_of(self._plain, device)) is not None:
                    private.register_backend(self, device, its_type, backend)

        def getBackendName(self) -> str:
            return NAME

        def _description(self) -> str:
            return self.group_desc

        def _connected(self):
            if not self._is_alone:
                _require_alone(dist.get_backend_config(self))
                self._is_alone = True
            return super()._connected()

else:

    @private.not_compiled
    class CompressedBackend(BackendCalls, private.PythonBackend):
        """Backend with gloo and NCCL that compresses reductions of gradients, for torch 2.14 and newer.

        Torch's C++ calls it for tensors on the devices that it was asked for, also from functional collectives. Raises
        ConfigError if the configuration file is invalid. The first compressed call raises MismatchError if ranks differ
        in version or configuration.

        Args:
            name: the name that torch gives the group.

        Attributes:
            communicator: for compressed calls. None before the ranks have connected for them.
            training: what the calls have counted, and the settings.
        """

        supports_splitting = True
        # Said here because torch 2.15 recurses for ever where a Python class leaves these to its base.
        supports_reconfigure = supports_shrinking = supports_window = False
        supports_time_estimate = _supports_time_estimate = False  # names in 2.14 and 2.15

        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str):
            private.PythonBackend.__init__(self, rank, size)
            self._name = name
            self._timeout = timeout
            self._coalesced: list[dist.Work] | None = None  # works begun since start_coalescing
            self._is_nccl_coalescing = False
            self._open(store, rank, size, timeout)
            if dist.get_debug_level() == dist.DebugLevel.DETAIL:
                _wrapped.add(self)

        def getBackendName(self) -> str:
            return NAME

        def shutdown(self) -> None:
            super().shutdown()
            _wrapped.discard(self)

        def abort(self) -> None:
            super().abort()
            _wrapped.discard(self)

        @property
        def options(self):
            """What torch takes time-outs from, and hands to `split`."""
            return private.PythonBackend.Options(NAME, self._timeout)

        def set_timeout(self, timeout: timedelta) -> None:
            """Set the time-out of plain calls, and of compressed ones if the ranks have not connected for them."""
            self._timeout = timeout
            self._plain.set_timeout(timeout)

        def allreduce_sparse(self, tensors, opts=None) -> dist.Work:
            return self.allreduce(tensors, opts)

        def monitored_barrier(self, opts: dist.BarrierOptions, wait_all_ranks: bool) -> None:
            """A barrier of gloo. Rank 0 raises RuntimeError that names the first missing rank, or all of them."""
            self._plain.monitored_barrier(opts.timeout, wait_all_ranks)

        def _get_sequence_number_for_group(self) -> int:
            """The number of plain calls, which torch compares and prints when it debugs."""
            return private.backend_of(self._plain, "cpu")._get_sequence_number_for_group()

        def _description(self) -> str:
            return private.description_of(self._name)

        def _store_to_meet(self) -> dist.Store:
            # A connection of its own, which waits as long as the group does, and not as long as the default group.
            store = self._store.clone()
            store.set_timeout(self._timeout)
            return store

        # ------------------------------------------------------------ parts of the group

        def split(self, store: dist.Store, ranks: list[int], opts) -> CompressedBackend:
            """The backend of some ranks. Raises UnsupportedError on the others: torch ends their processes instead."""
            if self.rank() not in ranks:
                raise UnsupportedError(
                    f"split_group: rank {self.rank()} of the group is in no part, which torch can't serve with a "
                    "backend in Python: let split_ranks name every rank, or use new_group"
                )
            # The parent's connection to the store may block other threads while it waits.
            place = ranks.index(self.rank()), len(ranks)
            return CompressedBackend(store.clone(), *place, opts._timeout, opts.group_name)

        def perform_nocolor_split(self, device: torch.device) -> None:
            """Do nothing: ranks outside of a new group need not take part in making it."""

        # ------------------------------------------------------------ coalescing

        @property
        def supports_coalescing(self) -> bool:
            """Whether `batch_isend_irecv` must coalesce: NCCL's sends and receives would wait for each other."""
            return private.backend_of(self._plain, "cuda") is not None

        def start_coalescing(self) -> None:
            """Collect the works of calls until `end_coalescing`."""
            self._coalesced, self._is_nccl_coalescing = [], False

        def end_coalescing(self) -> dist.Work:
            """One work for all calls since `start_coalescing`."""
            works, self._coalesced = self._coalesced, None
            if self._is_nccl_coalescing:
                works.append(self._plain._end_coalescing(torch.device("cuda")))
            return WorkOfSeveral(works)

        def _forwarded(self, name: str, *args, **kwargs) -> dist.Work:
            # NCCL begins to coalesce with the first plain send or receive: what is compressed must not wait for it.
            if name in ("send", "recv") and self._coalesced is not None and args[0][0].is_cuda:
                if not self._is_nccl_coalescing:
                    self._plain._start_coalescing(torch.device("cuda"))
                    self._is_nccl_coalescing = True
            return super()._forwarded(name, *args, **kwargs)

        def _begun(self, work: dist.Work) -> dist.Work:
            is_of_nccl = self._is_nccl_coalescing and not isinstance(work, HandleWork)
            if self._coalesced is not None and work is not None and not is_of_nccl:
                self._coalesced.append(work)
            return work


def of_group(group: dist.ProcessGroup | None = None) -> CompressedBackend:
    """The backend of a process group, which has its `stats` and its `communicator`.

    Args:
        group: None for the default group.

    Raises UnsupportedError if "ncz" serves none of its devices.
    """
    group = dist.group.WORLD if group is None else group
    if isinstance(group, CompressedBackend):
        return group
    for device in ("cuda", "cpu"):
        backend = private.backend_of(group, device)
        if isinstance(backend := getattr(backend, "wrapped_pg", backend), CompressedBackend):
            return backend
    raise UnsupportedError(f'of_group: the backend of the group must be "{NAME}", got {dist.get_backend_config(group)}')


def create(options, _) -> CompressedBackend:
    """The backend of a new group. Torch calls this, with what it knows of the group."""
    arguments = options.store, options.group_rank, options.group_size, options.timeout
    return CompressedBackend(*arguments, *(() if private.PythonBackend is None else (options.group_id,)))


def register() -> None:
    """Let torch know the backend's name. Torch 2.14 and newer call this when they meet the name."""
    if not private.is_registered(NAME):  # `ncz enable` may have registered it
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def _require_alone(backends: str) -> None:
    """Raise UnsupportedError if another backend serves some devices, as in "cpu:ncz,cuda:nccl"."""
    if any(not each.endswith(f":{NAME}") for each in backends.split(",")):
        raise UnsupportedError(
            f'backend "{backends}": before torch 2.14 {NAME} serves all devices (GPUs through NCCL), so pass "{NAME}" '
            "alone"
        )


register()
