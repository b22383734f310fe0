"""Calls of the backend `ncz`: which of them go compressed, and how torch's arguments become those of a Communicator.

Torch knows two kinds of backends that are written in Python: since 2.14 a subclass of c10d's `Backend`, before that of
`ProcessGroup`. Both have the methods here. See backend.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.bypass import by_dtype, by_op
from ..core.call import plain_wire_bytes
from ..core.communicator import Communicator
from ..core.config import Config
from ..core.errors import ConfigError, UnsupportedError
from ..core.reasons import Bypass
from ..core.runtime.handle import Handle, Handles
from ..core.runtime.statistics import Counters, Statistics
from ..core.training.state import Training
from . import private, roles
from .work import HandleWork

ENVIRONMENT = "NCZ_CONFIG"
_WARNED_FROM_BYTES = 128 << 10  # smaller sums are of metrics, and would not be compressed on most links anyway
_warned: set[str] = set()


class BackendCalls:
    """Methods of a process group or backend that compresses reductions of gradients, and exchanges of activations.

    A class that inherits them calls `_open` once it is initialized.

    Attributes:
        communicator: for compressed calls. None before the ranks have connected for them: in the first such call, or in
            `_open` if `roles` has "activation".
        training: what the calls have counted, and the settings.
    """

    def _open(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Connect gloo and NCCL, which carry all calls that stay uncompressed, and read the settings."""
        self.communicator: Communicator | None = None
        self._store = store
        # Works of compressed calls under way. In torch 2.6 a work that only C++ refers to loses its Python object.
        self._works: set[HandleWork] = set()
        self._plain = dist.ProcessGroup(store, rank, size)
        types = dist.ProcessGroup.BackendType
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        private.set_default_backend(self._plain, types.GLOO)
        private.register_backend(self._plain, "cpu", types.GLOO, gloo)
        # Read the settings after gloo has connected: if this rank fails here, the others see its connections close.
        self.training = Training(_configured())
        roles.of_group("")  # raises ConfigError
        if torch.cuda.is_available() and dist.is_nccl_available():
            # Not a ProcessGroupNCCL2, which would have to know its GPU here. This class sees it by the first tensor.
            nccl_store = dist.PrefixStore("nccl", store)
            nccl = dist.ProcessGroupNCCL(nccl_store, rank, size, private.nccl_options(timeout))
            private.register_backend(self._plain, "cuda", types.NCCL, nccl)
        if self._exchanges:
            # A message has two ranks, and must not wait in its first call for others, which may wait for a plain one.
            BackendCalls._connected(self)

    @property
    def stats(self) -> Statistics:
        """Statistics of all calls of this group on this rank, plain ones included."""
        return self.training.stats

    # ---------------------------------------------------------------- reductions

    def allreduce(self, tensors: list[Tensor] | Tensor, opts=None) -> dist.Work:
        """Reduce one tensor over ranks, in place. Compressed if it is a gradient: see roles.py."""
        tensors, opts = [tensors] if isinstance(tensors, Tensor) else tensors, _options(opts)
        # DDP counts the ranks that have data left by sums of one number. Before torch 2.14 its C++ can't keep the work
        # of such a sum alive if the work is written in Python.
        small = Bypass.TOO_SMALL if len(tensors) != 1 or tensors[0].numel() == 1 else None
        return self._reduced(_all_reduce, "allreduce", tensors, (tensors,), opts, small)

    def allreduce_coalesced(self, tensors: list[Tensor], opts=None) -> dist.Work:
        """Reduce several tensors over ranks, in place. Compressed if they are gradients."""
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        return self._reduced(_all_reduce, "allreduce_coalesced", tensors, (tensors,), opts)

    def reduce(self, tensors: list[Tensor], opts=None) -> dist.Work:
        """Reduce one tensor over ranks, in place on one of them. Compressed if it is a gradient."""
        opts = dist.ReduceOptions() if opts is None else opts
        return self._reduced(partial(_reduce, group_dst=opts.rootRank), "reduce", tensors, (tensors,), opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts=None) -> dist.Work:
        """Reduce a list of tensors over ranks, and leave the rank's own in the one of `outputs`."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        tensors, arguments = list(_tensors_in(inputs)), (outputs, inputs)
        return self._reduced(_reduce_scatter_of_list, "reduce_scatter", tensors, arguments, opts, _by_sizes(tensors))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts=None) -> dist.Work:
        """Reduce `input`, [ranks * elements of output], over ranks, and write this rank's share to `output`."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        return self._reduced(_reduce_scatter, private.REDUCE_SCATTER, [input], (output, input), opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts=None) -> dist.Work:
        """Reduce and scatter several tensors, one call for each. Compressed if they are gradients."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        return self._reduced(_reduce_scatters, private.REDUCE_SCATTER_COALESCED, inputs, (outputs, inputs), opts)

    # Names of the same methods before torch 2.14.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduced(
        self,
        compressed: Callable[..., Handle],
        method: str,
        inputs: Sequence[Tensor],
        arguments: tuple,
        opts,
        reason: Bypass | None = None,
    ) -> dist.Work:
        """Begin a reduction. A communicator carries it, unless there is a reason why it can only go plain.

        Args:
            compressed: takes a communicator, the arguments, the op and the role, and begins the call.
            method: the method of the plain process group.
            inputs: the tensors that are reduced.
            arguments: those of the method, without its options.
            reason: a reason to go plain, if there is one already.
        """
        if private.multiplies_by_one(opts.reduceOp):
            opts.reduceOp = dist.ReduceOp.SUM
        op = opts.reduceOp.op

        # What is no dense float with SUM or AVG can't be compressed, whatever it is.
        reason = by_op(op) or _by_tensors(inputs) or reason
        if reason is not None:
            called = "reduce" if method == "reduce" else "all_reduce"
            called = "reduce_scatter_single" if "scatter" in method else called
            self._count(called, inputs, reason)
            return self._forwarded(method, *arguments, opts)

        # Of the others the communicator compresses those whose role the settings list, and sees whether ranks differ.
        role = self._role_of(inputs)
        return self._work(compressed(self._connected(), *arguments, op, role), role)

    # ---------------------------------------------------------------- exchanges: see _without_sum

    def _by_exchange(self, tensors: Sequence[Tensor]) -> Bypass | None:
        """The reason why an exchange goes plain without asking other ranks: no settings list activations, or its dtype.

        Ranks that compare no exchange wait for nobody, so that programs which don't ask for this lose no time by it.
        """
        return by_dtype(*[tensor.dtype for tensor in tensors]) if self._exchanges else Bypass.ROLE

    @property
    def _exchanges(self) -> bool:
        """Whether activations are compressed, which ranks exchange."""
        return "activation" in self.training.config.roles

    def _role_of_exchanged(self, tensors: Sequence[Tensor]) -> str:
        """The role of what ranks exchange: activations, unless something says otherwise. See roles.py."""
        is_parameter = roles.seems(tensors) == "parameter"
        return roles.said() or self._group_role() or ("parameter" if is_parameter else "activation")

    # ---------------------------------------------------------------- roles

    def _role_of(self, tensors: Sequence[Tensor]) -> str:
        """What tensors are taken for: see roles.py. Says so once if that may be wrong."""
        told, seems = roles.said() or self._group_role(), roles.seems(tensors)
        if told == "gradient" and seems is not None:
            _warn_once(
                f"ncz_plugins: the backend ncz compresses what was called a gradient and seems to be {_SEEMS[seems]}. "
                f'If it is no gradient, put `with ncz_plugins.torch.backend.role("{seems}"):` around the call, or name '
                f"its group in {roles.ENVIRONMENT}"
            )
        if told or seems:
            return told or seems
        if private.in_backward_pass() or private.stands_in_for_backward_pass():
            return "gradient"
        self._warn_of_large(tensors)
        return "parameter"

    def _warn_of_large(self, tensors: Sequence[Tensor]) -> None:
        """Say once on rank 0 that something large stays exact because no backward pass reduces it."""
        is_exact = self.size() > 1 and "parameter" not in self.training.config.roles
        if is_exact and self.rank() == 0 and sum(tensor.nbytes for tensor in tensors) >= _WARNED_FROM_BYTES:
            _warn_once(
                "ncz_plugins: the backend ncz takes what is reduced outside of a backward pass for weights, and keeps "
                'it exact. If these are gradients, put `with ncz_plugins.torch.backend.role("gradient"):` around the '
                f"call, or name its group in {roles.ENVIRONMENT}"
            )

    def _group_role(self) -> str | None:
        """The role that the group's name says. Torch names a group after it has made the backend."""
        if not hasattr(self, "_role_by_name"):
            self._role_by_name = roles.of_group(self._description())
        return self._role_by_name

    def _description(self) -> str:
        """Torch's description of the group, such as "mesh_tp"."""
        raise NotImplementedError

    # ---------------------------------------------------------------- works, counting, life cycle

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

    def _work(self, handle: Handle, role: str) -> dist.Work:
        """A work for `handle`, which is kept until somebody has waited for it."""
        self._works.difference_update([each for each in list(self._works) if each.is_completed()])
        # Hooks of DDP such as PowerSGD's make their next call in a callback, on any thread: it has the same role.
        return self._begun(HandleWork(handle, self._works, partial(roles.role, role)))

    def _begun(self, work: dist.Work) -> dist.Work:
        """Take note of a work that has begun. Returns the work."""
        return work

    def _forwarded(self, name: str, *args, **kwargs) -> dist.Work:
        """Make a call of the plain process group."""
        return self._begun(getattr(self._plain, name)(*args, **kwargs))

    def _connected(self) -> Communicator:
        """The communicator. The first call connects all ranks."""
        if self.communicator is None:
            store = dist.PrefixStore("ncz", self._store_to_meet())
            self.communicator = Communicator(None, self._plain, self.training, store)
        return self.communicator

    def _store_to_meet(self) -> dist.Store:
        """The store in which the ranks meet for compressed calls."""
        return self._store

    def _count(self, collective: str, tensors: Sequence[Tensor], reason: Bypass) -> None:
        """Count a reduction that can only go plain."""
        nbytes = sum(private.sparse_bytes(each) if each.is_sparse else each.nbytes for each in tensors)
        self._count_bytes(nbytes, plain_wire_bytes(collective, nbytes, self.size()), reason)

    def _count_bytes(self, nbytes: int, sent: int, reason: Bypass) -> None:
        why = {"bypasses": {reason.value: 1}, "bypassed_bytes": {reason.value: sent}}
        self.stats.record(Counters(calls=1, bytes_in=nbytes, plain_bytes=sent, wire_bytes=sent, **why))


_SEEMS = {"parameter": "a parameter", "activation": "an activation"}

# Collectives without a sum: where what this rank contributes stands among the arguments, and how many times these bytes
# are sent by a rank, on average, with n ranks. Torch's versions have different names, so some do not exist.
_WITHOUT_SUM: dict[str, tuple[int, Callable[[int], float]]] = {
    "broadcast": (0, lambda n: (n - 1) / n),
    **dict.fromkeys(("gather", "gather_single", "scatter"), (1, lambda n: (n - 1) / n)),
    **dict.fromkeys(("all_to_all_single", "alltoall_base", "alltoall"), (1, lambda n: (n - 1) / n)),
    **dict.fromkeys(("allgather", "allgather_coalesced"), (1, lambda n: n - 1)),
    **dict.fromkeys(("all_gather_single", "_allgather_base"), (1, lambda n: n - 1)),
    **dict.fromkeys(("all_gather_single_coalesced", "allgather_into_tensor_coalesced"), (1, lambda n: n - 1)),
    "send": (0, lambda n: 1),
    **dict.fromkeys(("recv", "recv_anysource"), (0, lambda n: 0)),
}


def _all_to_all_single(communicator: Communicator, role: str, output, input, received=(), sent=(), *options) -> Handle:
    # Torch passes no split sizes where all pieces are equal.
    return communicator.all_to_all_single(output, input, received or None, sent or None, async_op=True, role=role)


def _all_to_all(communicator: Communicator, role: str, outputs, inputs, *options) -> Handle:
    return communicator.all_to_all(outputs, inputs, async_op=True, role=role)


def _gather(communicator: Communicator, role: str, outputs, inputs, options) -> Handle:
    how = {"async_op": True, "group_dst": options.rootRank, "role": role}
    return communicator.gather(inputs[0], outputs[0] if outputs else None, **how)


def _scatter(communicator: Communicator, role: str, outputs, inputs, options) -> Handle:
    how = {"async_op": True, "group_src": options.rootRank, "role": role}
    return communicator.scatter(outputs[0], inputs[0] if inputs else None, **how)


def _all_gather(communicator: Communicator, role: str, outputs, inputs, *options) -> Handle:
    return communicator.all_gather(outputs[0], inputs[0], async_op=True, role=role)


def _send(communicator: Communicator, role: str, tensors, rank: int, tag: int) -> Handle:
    return communicator.isend(tensors[0], rank, tag, role=role)


def _recv(communicator: Communicator, role: str, tensors, rank: int, tag: int) -> Handle:
    return communicator.irecv(tensors[0], rank, tag, role=role)


def _recv_from_any(communicator: Communicator, role: str, tensors, tag: int) -> Handle:
    raise UnsupportedError(
        "recv: src must be given, got None: as roles lists activation, the backend ncz compresses messages, each "
        "between two ranks. Pass src, or take activation out of roles"
    )


# Those of them that a communicator can make, which then compresses the roles that the settings list.
_EXCHANGES: dict[str, Callable[..., Handle]] = {
    **dict.fromkeys(("all_to_all_single", "alltoall_base"), _all_to_all_single),
    "alltoall": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "allgather": _all_gather,
    "send": _send,
    "recv": _recv,
    "recv_anysource": _recv_from_any,
}

# Those by which checkpoints and sharded models move weights, whatever the group: taken for weights unless the caller
# says otherwise.
_OF_WEIGHTS = frozenset({"gather", "scatter", "allgather"})


def _without_sum(name: str):
    """A method for a collective without a sum: a communicator makes it, or the plain process group, and it is counted.

    Not inherited: a `Backend` has no collectives of its own. A `ProcessGroup` has, but torch calls inherited methods of
    a Python class with the interpreter locked, and gloo's threads need that lock to free tensors: a deadlock.
    """
    (place, times), exchange = _WITHOUT_SUM[name], _EXCHANGES.get(name)
    of_weights = name in _OF_WEIGHTS

    def method(self, *args, **kwargs):
        given = [*args, *kwargs.values()]
        tensors, reason = list(_tensors_in(given[place])), Bypass.COLLECTIVE
        if exchange is not None and (self._exchanges or not of_weights):
            # A rank that scatters nothing has what it gets.
            reason = self._by_exchange(tensors or list(_tensors_in(given[0])))
        if name == "allgather":
            reason = reason or _by_sizes(list(_tensors_in(given[0])))
        if reason is None:
            role = roles.said() or "parameter" if of_weights else self._role_of_exchanged(tensors)
            return self._work(exchange(self._connected(), role, *args, **kwargs), role)
        nbytes = sum(tensor.nbytes for tensor in tensors if not tensor.is_sparse)
        self._count_bytes(nbytes, int(nbytes * times(self.size())), reason)
        return self._forwarded(name, *args, **kwargs)

    method.__name__ = name
    return method


for _name in _WITHOUT_SUM:
    if hasattr(dist.ProcessGroup, _name):
        setattr(BackendCalls, _name, _without_sum(_name))


def _all_reduce(communicator: Communicator, tensors: Sequence[Tensor], op, role: str) -> Handle:
    return communicator.all_reduce_coalesced(tensors, op, async_op=True, role=role)


def _reduce(communicator: Communicator, tensors: Sequence[Tensor], op, role: str, *, group_dst: int) -> Handle:
    [tensor] = tensors
    return communicator.reduce(tensor, op=op, async_op=True, group_dst=group_dst, role=role)


def _reduce_scatter(communicator: Communicator, output: Tensor, input: Tensor, op, role: str) -> Handle:
    return communicator.reduce_scatter_single(output, input, op, async_op=True, role=role)


def _reduce_scatter_of_list(
    communicator: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], op, role: str
) -> Handle:
    [output], [tensors] = outputs, inputs
    return communicator.reduce_scatter(output, tensors, op, async_op=True, role=role)


def _reduce_scatters(
    communicator: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op, role: str
) -> Handle:
    """Reduce and scatter several tensors, one call for each."""
    handles = [_reduce_scatter(communicator, *pair, op, role) for pair in zip(outputs, inputs)]
    return Handles(handles, list(outputs))


def _by_tensors(tensors: Sequence[Tensor]) -> Bypass | None:
    """The reason to go plain if a tensor is no dense one of floats."""
    if not all(tensor.layout is torch.strided for tensor in tensors):
        return Bypass.SPARSE
    return None if tensors and all(tensor.is_floating_point() for tensor in tensors) else Bypass.DTYPE


def _by_sizes(tensors: Sequence[Tensor]) -> Bypass | None:
    """The reason to go plain if the tensors of a list differ in size, which NCCL alone allows."""
    return Bypass.COLLECTIVE if len({tensor.numel() for tensor in tensors}) > 1 else None


def _tensors_in(value) -> Iterator[Tensor]:
    """The tensors of a list, which may be one of lists."""
    if isinstance(value, Tensor):
        yield value
    else:
        for each in value:
            yield from _tensors_in(each)


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


def _warn_once(words: str) -> None:
    """Warn, once in this process for each text."""
    if words not in _warned:
        _warned.add(words)
        warnings.warn(words, RuntimeWarning, stacklevel=3)
