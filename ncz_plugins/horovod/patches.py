"""Replacements of Horovod's functions: everything that this plugin changes in Horovod.

Calls without an NCZ go to the original function. Tested with Horovod 0.28.1.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence

import horovod
import horovod.torch as hvd
import horovod.torch.mpi_ops as mpi_ops
import horovod.torch.optimizer as optimizer
import torch

from ..core.errors import UnsupportedError
from ..core.messages import say
from ..core.training.muon import Gradient, warn
from ..core.training.policy import ParameterSlice
from ..version import __version__
from . import elastic, functions, reduction
from .compressor import NCZ, Tagged, as_instance
from .pending import ReductionHandle

_installed = False


def install() -> None:
    """Replace Horovod's functions; a second call does nothing.

    Raises UnsupportedError if this Horovod lacks one of them.
    """
    global _installed
    if _installed:
        return
    # The optimizer module imported these functions by name, so replace them there.
    _wrap([optimizer], "allreduce_async_", _takes_tagged)
    _wrap([optimizer], "grouped_allreduce_async_", _takes_tagged_group)
    _wrap([optimizer, hvd, mpi_ops], "synchronize", _takes_pending)
    _wrap([hvd, mpi_ops], "poll", _polls)
    _wrap([hvd, mpi_ops], "allreduce", _takes_compression)
    _wrap([hvd, mpi_ops], "grouped_allreduce", _takes_compression)
    for name in ("reducescatter", "grouped_reducescatter"):
        _wrap([hvd, mpi_ops], name, _refuses_compression)
    _wrap([optimizer, hvd], "DistributedOptimizer", _takes_ncz)
    # Every way to initialize Horovod, also the elastic one, calls this.
    _wrap([mpi_ops._basics], "init", _resets)
    elastic.install()
    _installed = True


def _wrap(owners: list, name: str, wrapper) -> None:
    try:
        originals = [getattr(owner, name) for owner in owners]
    except AttributeError as error:
        raise UnsupportedError(
            f"Horovod {horovod.__version__} has no {error.name}, which ncz_plugins hooks into: install Horovod 0.28.1, "
            "with which it is tested"
        ) from error
    replacement = functools.wraps(originals[0])(wrapper(originals[0]))
    for owner in owners:
        setattr(owner, name, replacement)


def _takes_tagged(original):
    """all-reduce of the optimizer: a tagged tensor becomes pending."""

    def allreduce_async_(
        tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=None
    ):
        process_set = hvd.global_process_set if process_set is None else process_set
        if isinstance(tensor, Tagged):
            op = mpi_ops.handle_average_backwards_compatibility(op, average)
            how = op, prescale_factor, postscale_factor, process_set
            return reduction.submit(ReductionHandle(tensor.owner, [tensor.tensor], [name], *how, grouped=False))
        return original(tensor, average, name, op, prescale_factor, postscale_factor, process_set)

    return allreduce_async_


def _takes_tagged_group(original):
    """all-reduce of a group of the optimizer: tagged tensors become pending."""

    def grouped_allreduce_async_(
        tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=None
    ):
        process_set = hvd.global_process_set if process_set is None else process_set
        if len(tensors) and isinstance(tensors[0], Tagged):
            op = mpi_ops.handle_average_backwards_compatibility(op, average)
            how = op, prescale_factor, postscale_factor, process_set
            owner = tensors[0].owner
            names, inside = owner.names_in_group(name), [tagged.tensor for tagged in tensors]
            return reduction.submit(ReductionHandle(owner, inside, names, *how, grouped=True))
        return original(tensors, average, name, op, prescale_factor, postscale_factor, process_set)

    return grouped_allreduce_async_


def _takes_pending(original):
    """hvd.synchronize that takes our handles as well."""

    def synchronize(handle):
        return reduction.wait_for(handle) if isinstance(handle, ReductionHandle) else original(handle)

    return synchronize


def _polls(original):
    """hvd.poll that takes our handles as well."""

    def poll(handle):
        if not isinstance(handle, ReductionHandle):
            return original(handle)
        # Without a plan a reduction starts only when the program waits for it. The first poll returns False. The second
        # one waits: a program that polls in a loop would never end otherwise.
        if handle.done or handle.polled:
            reduction.wait_for(handle)
            return True
        handle.polled = True
        return False

    return poll


def _takes_compression(original):
    """A function of Horovod that calls ours of the same name if its argument `compression` is NCZ."""
    ours = getattr(functions, original.__name__)

    def allreduce(*args, **kwargs):
        arguments = _bound(original, *args, **kwargs)
        return original(*args, **kwargs) if as_instance(arguments.get("compression")) is None else ours(**arguments)

    return allreduce


def _refuses_compression(original):
    """A function of Horovod that raises UnsupportedError if its argument `compression` is NCZ."""

    def reducescatter(*args, **kwargs):
        if as_instance(_bound(original, *args, **kwargs).get("compression")) is not None:
            raise UnsupportedError(f"hvd.{original.__name__} can't be compressed with NCZ; use hvd.Compression.none")
        return original(*args, **kwargs)

    return reducescatter


def _takes_ncz(original):
    """hvd.DistributedOptimizer that gives the optimizer a compressor of its own."""

    def DistributedOptimizer(*args, **kwargs):
        arguments = _bound(original, *args, **kwargs)
        compressor = as_instance(arguments.get("compression"))
        if compressor is None:
            return original(*args, **kwargs)
        if arguments.get("op") == hvd.Adasum:
            raise UnsupportedError(
                "op=hvd.Adasum can't be combined with compression=NCZ: it needs the exact gradients of every rank. "
                "Use hvd.Average or hvd.Sum, or another compression"
            )
        if hvd.rank() == 0:
            say(f"ncz_plugins {__version__}: {_what_is_active(compressor)}")
        compressor.begin()
        if (named := arguments.get("named_parameters")) is not None:
            arguments["named_parameters"] = named = list(named)
        if hvd.rank() == 0 and hvd.size() > 1:
            warn(arguments["optimizer"], compressor.config, _matrices(arguments["optimizer"], named))
        process_set = arguments.get("process_set", hvd.global_process_set)
        owner = compressor.held_by(
            arguments["optimizer"],
            knows_names=named is not None,
            takes_part=bool(process_set.included()),
        )
        optimizer = original(**{**arguments, "compression": owner})
        name_of = optimizer._parameter_names
        parameters = (
            [p for _, p in named] if named else [p for group in optimizer.param_groups for p in group["params"]]
        )
        owner.learn_names(
            [name_of[p] for p in parameters],
            [[name_of[p] for p in group] for group in set(optimizer._p_to_group.values())],
        )
        return optimizer

    return DistributedOptimizer


def _matrices(optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, torch.Tensor]] | None) -> list[Gradient]:
    """Gradients of the matrices that an optimizer trains."""
    names = {id(parameter): name for name, parameter in named or ()}
    return [
        (ParameterSlice(names.get(id(each)), each.numel(), shape=tuple(each.shape)), each.dtype)
        for group in optimizer.param_groups
        for each in group["params"]
        if each.dim() >= 2
    ]


def _what_is_active(compressor: NCZ) -> str:
    if hvd.size() == 1:
        return "nothing is compressed, as one rank has nothing to send (Horovod)"
    return f"gradient all-reduces are compressed (Horovod, {hvd.size()} ranks): {compressor.config.describe()}"


def _resets(original):
    """hvd.init that forgets all pending tensors first."""

    def init(*args, **kwargs):
        if not hvd.is_initialized():  # a second hvd.init does nothing, and may be called by some ranks only
            reduction.reset()
        return original(*args, **kwargs)

    return init


def _bound(original, *args, **kwargs) -> dict:
    return inspect.signature(original).bind(*args, **kwargs).arguments
