"""A backend by name, for programs that offer nothing else: import this, then `init_process_group("ncz")`.

torch takes a process group that is written in Python in place of its own. This one has gloo for tensors in host memory
and NCCL for those on GPUs, and compresses what reduces gradients, as far as a process group can tell: `all_reduce`,
`all_reduce_coalesced` and `reduce_scatter_tensor` of floats, with SUM or AVG. Nothing else is touched: weights are
broadcast as they are. But what a program averages by all-reduce, such as weights, is compressed as gradients are.

The environment variable NCZ_CONFIG names a configuration file; without it all settings have their defaults.

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
from .strided import all_reduce, reduce_scatter
from .work import HandleWork

NAME = "ncz"
ENVIRONMENT = "NCZ_CONFIG"


class CompressedBackend(dist.ProcessGroup):
    """A process group with gloo and NCCL that compresses reductions of gradients.

    Attributes:
        communicator: carries what is compressed; None before the first such call, which is when all ranks make it.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self.communicator: Communicator | None = None
        self._store = store
        # Works of compressed calls under way. torch 2.6 forgets what Python made of a work that C++ alone has.
        self._works: set[HandleWork] = set()
        self._plain = dist.ProcessGroup(store, rank, size)  # the same backends, without what is replaced here
        kinds = dist.ProcessGroup.BackendType
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        for group in (self, self._plain):
            group._set_default_backend(kinds.GLOO)
            group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        self._config = _configured()  # when ranks have met: those that wait for one that fails here notice that it ends
        if torch.cuda.is_available() and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
            for group in (self, self._plain):
                group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)

    def allreduce(self, tensors: list[Tensor] | Tensor, opts=None) -> dist.Work:
        tensors, opts = [tensors] if isinstance(tensors, Tensor) else tensors, _options(opts)
        op = opts.reduceOp.op
        # DDP counts the ranks that have data left by sums of one number, and lets C++ alone keep the work: that keeps
        # torch's own alive, but not one that is written in Python.
        if len(tensors) != 1 or tensors[0].numel() == 1 or not _reduces_gradients(tensors[0], op):
            return self._plain.allreduce(tensors, opts)
        return self._work(all_reduce(self._connected(), tensors, op))

    def allreduce_coalesced(self, tensors: list[Tensor], opts=None) -> dist.Work:
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        op = opts.reduceOp.op
        if not all(_reduces_gradients(tensor, op) for tensor in tensors):
            return self._plain.allreduce_coalesced(tensors, opts)
        return self._work(all_reduce(self._connected(), tensors, op))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts=None) -> dist.Work:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        op = opts.reduceOp.op
        if not _reduces_gradients(input, op):
            return self._plain._reduce_scatter_base(output, input, opts)
        return self._work(reduce_scatter(self._connected(), output, input, op))

    reduce_scatter_single = _reduce_scatter_base  # its name in torch 2.13

    def barrier(self, *args, **kwargs) -> dist.Work:
        for work in list(self._works):
            work.wait()
        return self._plain.barrier(*args, **kwargs)

    def shutdown(self) -> None:
        """Finish what was asked for and close all connections."""
        if self.communicator is not None:
            self.communicator.close()
        _end(self._plain, "shutdown")

    def abort(self) -> None:
        """Give up what is under way and close all connections."""
        if self.communicator is not None:
            self.communicator.abort()
        _end(self._plain, "abort")

    def getBackendName(self) -> str:
        return NAME

    def _work(self, handle: Handle) -> dist.Work:
        self._works.difference_update([each for each in list(self._works) if each.is_completed()])
        return HandleWork(handle, self._works)

    def _connected(self) -> Communicator:
        if self.communicator is None:
            _require_alone(dist.get_backend_config(self))
            self.communicator = Communicator(self._config, self._plain, store=dist.PrefixStore("ncz", self._store))
        return self.communicator


def _forwarded(name: str):
    """A method that another group carries out.

    Those inherited would do the same, but torch calls what a Python class inherits with the interpreter locked, and
    gloo's threads want it as well, to free tensors: both wait for ever.
    """

    def method(self, *args, **kwargs):
        return getattr(self._plain, name)(*args, **kwargs)

    return method


# All that torch looks for in a Python class, under the names that its versions give them.
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
    """The settings that the environment names. Raises ConfigError."""
    source = os.environ.get(ENVIRONMENT) or "ncclz"
    try:
        return Config.load(source)
    except ConfigError as error:
        raise ConfigError(f"{ENVIRONMENT}={source}: {error}") from error


def _end(group: dist.ProcessGroup, how: str) -> None:
    """Shut a group down or abort it, where torch can: with 2.6 its connections close when nobody holds it any more."""
    if hasattr(group, how):
        getattr(group, how)()


def _options(given) -> dist.AllreduceOptions:
    """The options of an all-reduce. torch takes the reduce op alone as well."""
    if isinstance(given, dist.AllreduceOptions):
        return given
    options = dist.AllreduceOptions()
    if given is not None:
        options.reduceOp = given
    return options


def _require_alone(backends: str) -> None:
    """Raise UnsupportedError if other backends than this one are to serve some devices, such as "cpu:ncz,cuda:nccl"."""
    if any(not each.endswith(f":{NAME}") for each in backends.split(",")):
        raise UnsupportedError(f'backend "{backends}": {NAME} serves all devices, on GPUs by NCCL; pass "{NAME}" alone')


def _reduces_gradients(tensor: Tensor, op) -> bool:
    """Whether a reduction is taken for one of gradients."""
    return (
        tensor.is_floating_point() and tensor.layout is torch.strided and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
    )


if NAME.upper() not in dist.Backend._plugins:  # `ncz enable` has done it otherwise
    dist.Backend.register_backend(NAME, CompressedBackend, devices=["cpu", "cuda"])
