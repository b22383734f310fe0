"""Private names of torch that this package uses: the only file to change when a new torch renames one.

Tried on torch 2.13.0, those of FSDP also on 2.15.0, those of process groups on 2.14.1 and 2.15.0; the others were read
in the source of 2.14.1. A version in brackets: the name exists from that version on, or until it.

    torch.distributed.ProcessGroup   _set_default_backend, _register_backend, _get_backend, _start_coalescing,
                                     _end_coalescing; backend_calls.py overrides _reduce_scatter_base, _allgather_base
    dist.Backend                     _plugins, _ensure_backend_registered [from 2.14]
    distributed_c10d                 _resolve_process_group
    torch._C._distributed_c10d       Backend [to inherit from: from 2.14], its Options._timeout;
                                     backend.py overrides _get_sequence_number_for_group
    ProcessGroupNCCL                 _set_default_timeout; its Options._timeout, Options.lazy_init [from 2.15]
    ProcessGroupNCCL2 [from 2.14]    the device in its constructor [from 2.15], without a GPU
    dist.ReduceOp                    __getstate__ [of PREMUL_SUM: the op and its factor]
    torch._C                         _current_graph_task_id
    torch.utils.checkpoint           recompute_fn [a function inside of another]
    torch.autograd.Variable          _execution_engine.queue_callback
    DistributedDataParallel          _comm_hooks, _divide_by_initial_world_size, _use_python_reducer,
                                     _delay_all_reduce_params, _match_all_reduce_for_bwd_pass
    FSDPModule                       _get_fsdp_state, finalize_backward [from 2.15]
    FSDPState                        _fsdp_param_groups [from 2.13], _fsdp_param_group [until 2.12],
                                     _root_post_backward_final_callback
    FSDPParamGroup                   post_backward, fsdp_params, reduce_grads, gradient_divide_factor,
                                     force_sum_reduction_for_comms, reduce_scatter_unused_params [from 2.13],
                                     mesh_info, _reduce_scatter_comm, _all_gather_comm, _all_reduce_hook,
                                     _reduce_scatter_param_indices, _get_partial_reduce_grad [from 2.15]
    FSDPMeshInfo, DDPMeshInfo        shard_process_group, replicate_process_group
    FSDPParam                        sharded_param, _param_fqn, padded_sharded_param_size, _unsharded_param,
                                     unsharded_param, unsharded_accumulated_grad
    torch.distributed.fsdp._fully_shard._fsdp_collectives   DefaultAllGather, DefaultReduceScatter
    Tensor, sparse                   _indices, _values
    torch.nn.Module                  _modules
    torch.compile                    _orig_mod, torch._disable_dynamo
    Lightning Fabric                 _original_module, _forward_module
    Megatron-Core                    start_grad_sync; tried on 0.16.1 and 0.19.2
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from datetime import timedelta
from inspect import isfunction
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:  # these imports take as long as torch's own, and programs without FSDP need none of them
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

# ------------------------------------------------------------------ process groups


def set_default_backend(group: dist.ProcessGroup, backend_type: dist.ProcessGroup.BackendType) -> None:
    """Set the type of backend that a process group uses if a call names no device."""
    group._set_default_backend(backend_type)


def register_backend(
    group: dist.ProcessGroup, device: str, backend_type: dist.ProcessGroup.BackendType, backend
) -> None:
    """Let `backend` serve the tensors of a process group on a type of device: "cpu" or "cuda"."""
    group._register_backend(torch.device(device), backend_type, backend)


def backend_of(group: dist.ProcessGroup, device: str):
    """The backend that serves the tensors of a process group on a type of device; None if there is none."""
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:
        return None


def description_of(name: str) -> str:
    """The description of a process group that has this name, such as "mesh_tp"."""
    return dist.distributed_c10d._resolve_process_group(name).group_desc


# c10d's class of backends, if torch's C++ calls the methods of a Python class that inherits from it: since 2.14.
PythonBackend = torch._C._distributed_c10d.Backend if hasattr(dist.Backend, "_ensure_backend_registered") else None

_RENAMED = hasattr(dist.ProcessGroup, "reduce_scatter_single_coalesced")
REDUCE_SCATTER = "reduce_scatter_single" if _RENAMED else "_reduce_scatter_base"
REDUCE_SCATTER_COALESCED = "reduce_scatter_single_coalesced" if _RENAMED else "reduce_scatter_tensor_coalesced"


def nccl_options(timeout: timedelta) -> dist.ProcessGroupNCCL.Options:
    """Options of an NCCL backend with a time-out."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def multiplies_by_one(op: dist.ReduceOp) -> bool:
    """Whether an op is PREMUL_SUM with a factor of 1, which FSDP2 passes for `set_gradient_divide_factor(1)`."""
    if op != dist.ReduceOp.PREMUL_SUM:
        return False
    _, factor = op.__getstate__()
    return isinstance(factor, float) and factor == 1


def not_compiled(cls: type) -> type:
    """Class decorator that keeps `torch.compile` from tracing methods that torch's C++ calls.

    C++ calls them while a compiled function runs, for example where DDP broadcasts buffers. Traced methods fail at
    process groups. The first call of a method imports torch._dynamo, as the first optimizer of a program does.
    """
    for name in dir(cls):
        method, is_call = getattr(cls, name), not name.startswith("_") or hasattr(dist.ProcessGroup, name)
        if isfunction(method) and is_call and name not in _OUTSIDE_OF_CALLS:
            setattr(cls, name, not_traced(method))
    return cls


def not_traced(function: Callable) -> Callable:
    """Function decorator that keeps `torch.compile` from tracing a function. Its first call imports torch._dynamo."""
    return torch._disable_dynamo(function)


# No compiled function calls these, and nothing can be imported where a program's end calls them.
_OUTSIDE_OF_CALLS = {"getBackendName", "set_timeout", "shutdown", "abort"}


def is_registered(name: str) -> bool:
    """Whether torch knows a backend of this name that is not its own."""
    return name.upper() in dist.Backend._plugins


# ------------------------------------------------------------------ backward passes and modules


def in_backward_pass() -> bool:
    """Whether autograd runs a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


# Methods that reduce gradients outside of a backward pass: DDP's for a rank that is out of data (see `model.join`), and
# Megatron-Core's, which it calls after the backward pass if `overlap_grad_reduce` is off, and always in the first step.
_STAND_INS = ("_match_all_reduce_for_bwd_pass", "start_grad_sync")


def stands_in_for_backward_pass() -> bool:
    """Whether a framework reduces gradients that a backward pass has left to it."""
    return _runs_in(*_STAND_INS)


def runs_forward_again() -> bool:
    """Whether activation checkpointing runs a part of the forward pass again on this thread."""
    return _runs_in("recompute_fn")


def _runs_in(*functions: str) -> bool:
    """Whether a function with one of these names is under way on this thread."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in functions:
        frame = frame.f_back
    return frame is not None


def at_end_of_backward_pass(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass under way has ended. A pass that fails drops it."""
    Variable._execution_engine.queue_callback(callback)


def wrapped_module(model: torch.nn.Module) -> torch.nn.Module | None:
    """The module that `torch.compile` or Lightning's `Fabric.setup` wrapped; None if `model` is neither's."""
    # Look into `_modules` and not at attributes: Fabric's wrapper passes unknown attributes on to the user's module.
    modules = getattr(model, "_modules", {})
    if "_original_module" in modules:  # Fabric's wrapper; `_forward_module` is what its strategy made of the model
        return modules.get("_forward_module")
    return modules.get("_orig_mod")


def name_of(name: str) -> str:
    """The name of a module or parameter without the part that `torch.compile` puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def sparse_bytes(tensor: Tensor) -> int:
    """Bytes of the indices and values of a sparse tensor, which need not be coalesced."""
    return tensor._indices().nbytes + tensor._values().nbytes


# ------------------------------------------------------------------ DistributedDataParallel


def hooks_of(model: DistributedDataParallel) -> list[tuple]:
    """The communication hooks of a model: (hook, state) of each."""
    return model._comm_hooks


def forget_hook(model: DistributedDataParallel, hook: Callable) -> None:
    """Drop `hook` without a state, which a copy of a hooked model lists although torch registered none for it."""
    model._comm_hooks = [each for each in model._comm_hooks if each != (hook, None)]


def divides_by_initial_world_size(model: DistributedDataParallel) -> bool:
    """Whether gradients are divided by the number of ranks, also after some have left: see `model.join`."""
    return getattr(model, "_divide_by_initial_world_size", True)


def uses_python_reducer(model: DistributedDataParallel) -> bool:
    """Whether the model hands single gradients to its hook, and no buckets."""
    return getattr(model, "_use_python_reducer", False)


def delays_reductions(model: DistributedDataParallel) -> bool:
    """Whether the model reduces some parameters itself, without its hook."""
    return bool(getattr(model, "_delay_all_reduce_params", None))


# ------------------------------------------------------------------ FSDP2


def parameter_groups(module: FSDPModule) -> list:
    """The groups of a module's parameters. FSDP reduces the gradients of a group together."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def shard_group(group) -> dist.ProcessGroup | None:
    """The process group that a group of parameters is sharded over; None if each rank has all of them."""
    return getattr(group.mesh_info, "shard_process_group", None)


def replicate_group(group) -> dist.ProcessGroup | None:
    """The process group that FSDP averages replicas over: of a 2-D mesh or in `replicate`. None if it averages none."""
    return getattr(group.mesh_info, "replicate_process_group", None)


def replace_replicate_group(group, replicas) -> None:
    """Let FSDP average the replicas of a group of parameters by the all-reduce of `replicas`."""
    # A copy, as modules may share what describes their mesh.
    group.mesh_info = copy(group.mesh_info)
    group.mesh_info.replicate_process_group = replicas


def restore_collectives(
    module: FSDPModule, reduce_scatter: type, all_gather: type, all_reduce: type, replicas: type
) -> None:
    """Give a module FSDP's own collectives back, where it has those of the given types instead."""
    # torch 2.8 and older lack the import; `fsdp.compress` refuses these versions.
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    for group in parameter_groups(module):
        if isinstance(group._reduce_scatter_comm, reduce_scatter):
            group._reduce_scatter_comm = DefaultReduceScatter()
        if isinstance(group._all_gather_comm, all_gather):
            group._all_gather_comm = DefaultAllGather()
        if isinstance(group._all_reduce_hook, all_reduce):
            group._all_reduce_hook = None
        if isinstance(replicate_group(group), replicas):
            replace_replicate_group(group, replicate_group(group).group)


def before_reductions(module: FSDPModule, callback: Callable[[object], None]) -> None:
    """Call `callback` before each reduction of a module, with the group of parameters that it is about."""
    for group in parameter_groups(module):

        def post_backward(*unused, group=group):
            callback(group)
            return type(group).post_backward(group, *unused)

        group.post_backward = post_backward


def after_reductions(module: FSDPModule, callback: Callable[[], None]) -> None:
    """Call `callback` when FSDP has finished the reductions of a module."""
    # From torch 2.15 on, pipelines call `finalize_backward` instead of `_root_post_backward_final_callback`.
    owners = {"_root_post_backward_final_callback": module._get_fsdp_state(), "finalize_backward": module}
    for name, owner in owners.items():
        if (original := getattr(type(owner), name, None)) is None:
            continue

        def finish(*args, original=original, owner=owner, **options):
            result = original(owner, *args, **options)
            callback()
            return result

        setattr(owner, name, finish)


class ReducedParameter(NamedTuple):
    """A parameter whose gradient FSDP is about to reduce.

    Attributes:
        name: its full name; None if FSDP does not know it.
        elements: how many elements of the gradient each rank gets, padding included.
        parameter: this rank's shard of it.
    """

    name: str | None
    elements: int
    parameter: DTensor


def reduced_parameters(group) -> list[ReducedParameter]:
    """The parameters of a group whose gradients FSDP is about to reduce, in the order in which it does."""
    if not group.reduce_grads:
        return []
    order = getattr(group, "_reduce_scatter_param_indices", range(len(group.fsdp_params)))
    reduced = [each for at in order if _is_reduced(each := group.fsdp_params[at], group)]
    return [
        ReducedParameter(each._param_fqn, each.padded_sharded_param_size.numel(), each.sharded_param)
        for each in reduced
    ]


def _is_reduced(parameter, group) -> bool:
    if not hasattr(parameter, "_unsharded_param"):
        return False
    if parameter.unsharded_accumulated_grad is not None or parameter.unsharded_param.grad is not None:
        return True
    # torch 2.15 reduces zeros for parameters of which an earlier pass left a sum that is not averaged over replicas.
    if hasattr(group, "_get_partial_reduce_grad") and group._get_partial_reduce_grad(parameter) is not None:
        return True
    # torch 2.13 and newer reduce zeros for unused parameters if `FSDPModule.set_reduce_scatter_unused_params` says so.
    return getattr(group, "reduce_scatter_unused_params", False) and parameter.unsharded_param.requires_grad


def has_divide_factor(group) -> bool:
    """Whether the user has set a divisor of the sum of gradients: see `FSDPModule.set_gradient_divide_factor`."""
    return group.gradient_divide_factor is not None


def force_sum(group) -> None:
    """Let FSDP divide by itself and reduce with SUM, not with an op that NCCL alone has."""
    group.force_sum_reduction_for_comms = True
