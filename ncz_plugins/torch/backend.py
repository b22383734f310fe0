"""Backend "ncz" of torch.distributed: import this module, then call `init_process_group("ncz")`.

It is for programs that offer no other place for compression. Tensors in host memory go through gloo, tensors on GPUs
through NCCL. Compressed are `all_reduce`, `all_reduce_coalesced` and `reduce_scatter_tensor` of floats with SUM or AVG:
a process group can't tell gradients from other tensors, so weights that a program averages by all_reduce are compressed
as well. All other collectives, such as broadcasts of weights, stay uncompressed.

The environment variable NCZ_CONFIG names a configuration file. Without it all settings have their defaults.

See docs/guides/pytorch.md.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.communicator import Communicator
from ..core.config import Config
from ..core.errors import ConfigError, UnsupportedError
from ..core.runtime.handle import Handle
from . import private
from .strided import all_reduce, reduce_scatter
from .work import HandleWork

NAME = "ncz"
ENVIRONMENT = "NCZ_CONFIG"


class CompressedBackend(dist.ProcessGroup):
    """Process group with gloo and NCCL that compresses reductions of gradients.

    Raises ConfigError if the configuration file is invalid. The first compressed call raises UnsupportedError if
    another backend serves some devices, and MismatchError if ranks differ in version or configuration.

    Attributes:
        communicator: for compressed calls. None before the first one, in which all ranks connect.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self.communicator: Communicator | None = None
        self._store = store
        # Works of compressed calls under way. In torch 2.6 a work that only C++ refers to loses its Python object.
        self._works: set[HandleWork] = set()
        self._plain = dist.ProcessGroup(store, rank, size)  # the same backends, for all calls that stay uncompressed
        types = dist.ProcessGroup.BackendType
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        for group in (self, self._plain):
            private.set_default_backend(group, types.GLOO)
            private.register_backend(group, "cpu", types.GLOO, gloo)
        # Read the settings after gloo has connected: if this rank fails here, the others see its connections close.
        self._config = _configured()
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl_store = dist.PrefixStore("nccl", store)
            nccl = dist.ProcessGroupNCCL(nccl_store, rank, size, private.nccl_options(timeout))
            for group in (self, self._plain):
                private.register_backend(group, "cuda", types.NCCL, nccl)

    def allreduce(self, tensors: list[Tensor] | Tensor, opts=None) -> dist.Work:
        """Reduce one tensor over ranks, in place.

        Compressed if it holds gradients, as far as `_reduces_gradients` can tell.
        """
        tensors, opts = [tensors] if isinstance(tensors, Tensor) else tensors, _options(opts)
        op = opts.reduceOp.op
        # DDP counts the ranks that have data left by sums of one number, and only its C++ holds their works. C++ can't
        # keep a work alive that is written in Python, so these sums stay with torch's own works.
        if len(tensors) != 1 or tensors[0].numel() == 1 or not _reduces_gradients(tensors[0], op):
            return self._plain.allreduce(tensors, opts)
        return self._work(all_reduce(self._connected(), tensors, op))

    def allreduce_coalesced(self, tensors: list[Tensor], opts=None) -> dist.Work:
        """Reduce several tensors over ranks, in place. Compressed if all of them hold gradients."""
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        op = opts.reduceOp.op
        if not all(_reduces_gradients(tensor, op) for tensor in tensors):
            return self._plain.allreduce_coalesced(tensors, opts)
        return self._work(all_reduce(self._connected(), tensors, op))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts=None) -> dist.Work:
        """Reduce `input`, [ranks * elements of output], over ranks, and write this rank's share to `output`."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        op = opts.reduceOp.op
        if not _reduces_gradients(input, op):
            return self._plain._reduce_scatter_base(output, input, opts)
        return self._work(reduce_scatter(self._connected(), output, input, op))

    reduce_scatter_single = _reduce_scatter_base  # the name that torch 2.13 calls

    def barrier(self, *args, **kwargs) -> dist.Work:
        """Wait for this rank's compressed calls, then for all ranks."""
        for work in list(self._works):
            work.wait()
        return self._plain.barrier(*args, **kwargs)

    def shutdown(self) -> None:
        """Finish all calls and close all connections."""
        if self.communicator is not None:
            self.communicator.close()
        _end(self._plain, "shutdown")

    def abort(self) -> None:
        """Give up the calls under way and close all connections."""
        if self.communicator is not None:
            self.communicator.abort()
        _end(self._plain, "abort")

    def getBackendName(self) -> str:
        return NAME

    def _work(self, handle: Handle) -> dist.Work:
        """A work for `handle`, which is kept until somebody has waited for it."""
        self._works.difference_update([each for each in list(self._works) if each.is_completed()])
        return HandleWork(handle, self._works)

    def _connected(self) -> Communicator:
        """The communicator. The first call connects all ranks."""
        if self.communicator is None:
            _require_alone(dist.get_backend_config(self))
            self.communicator = Communicator(self._config, self._plain, store=dist.PrefixStore("ncz", self._store))
        return self.communicator


def _forwarded(name: str):
    """A method that calls the method of the same name of the plain process group.

    The inherited method would do the same. But torch calls inherited methods of a Python class with the interpreter
    locked, and gloo's threads need that lock to free tensors: a deadlock.
    """

    def method(self, *args, **kwargs):
        return getattr(self._plain, name)(*args, **kwargs)

    return method


# Every method that torch looks for in a Python class. Its versions use different names, so some do not exist.
for _name in (
    "allgather",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "all_to_all_single",
    "alltoall_base",
    "broadcast",
    "recv",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "send",
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(CompressedBackend, _name, _forwarded(_name))


def _configured() -> Config:
    """Settings from the file that NCZ_CONFIG names, or the defaults. Raises ConfigError."""
    source = os.environ.get(ENVIRONMENT) or "ncclz"
    try:
        return Config.load(source)
    except ConfigError as error:
        raise ConfigError(f"{ENVIRONMENT}={source}: {error}") from error


def _end(group: dist.ProcessGroup, how: str) -> None:
    """Call `shutdown` or `abort` of a group if it has the method.

    In torch 2.6 connections close when the group is freed.
    """
    if hasattr(group, how):
        getattr(group, how)()


def _options(given) -> dist.AllreduceOptions:
    """Options of an all-reduce. torch also passes a bare reduce op."""
    if isinstance(given, dist.AllreduceOptions):
        return given
    options = dist.AllreduceOptions()
    if given is not None:
        options.reduceOp = given
    return options


def _require_alone(backends: str) -> None:
    """Raise UnsupportedError if another backend serves some devices, as in "cpu:ncz,cuda:nccl"."""
    if any(not each.endswith(f":{NAME}") for each in backends.split(",")):
        raise UnsupportedError(
            f'backend "{backends}": {NAME} serves all devices (GPUs through NCCL), so pass "{NAME}" alone'
        )


def _reduces_gradients(tensor: Tensor, op) -> bool:
    """Whether a reduction is treated as one of gradients: dense floats, with SUM or AVG."""
    return (
        tensor.is_floating_point() and tensor.layout is torch.strided and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
    )


if not private.is_registered(NAME):  # `ncz enable` may have registered it
    dist.Backend.register_backend(NAME, CompressedBackend, devices=["cpu", "cuda"])
