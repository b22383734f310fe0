"""Compressed gradients and weights for FSDP2: modules to which `fully_shard` was applied.

    from ncz_plugins.torch import fsdp

    fully_shard(model)
    compression = fsdp.compress(model, "ncclz")

See docs/guides/fsdp.md.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..core.communicator import Communicator
from ..core.config import Config
from ..core.errors import ConfigError, UnsupportedError
from ..core.training.baseline import Baseline
from ..core.training.policy import ParameterSlice
from ..core.training.state import Training
from ..core.transport.groups import require_group
from .compression import ModelCompression, name_of, unwrapped

_compressing: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # what serves a sharded module, by the module


class Compression(ModelCompression):
    """Carries the gradients of a model, and its weights where that is wanted. `compress` makes it.

    Args:
        communicators: one for each group that shards gradients, by its `group_name`.
        replicas: the one between ranks that hold the same shard; None where there is one replica.
        training: what they share.
        config: theirs; None is that of `training`.
        model: the root module, all of whose sharded modules are served.

    Attributes:
        closed: whether `close` was called.
        scatters: whether it reduces and scatters gradients, and not averages those of replicas.
    """

    def __init__(
        self,
        communicators: dict[str, Communicator],
        replicas: Communicator | None,
        training: Training,
        config,
        model: torch.nn.Module,
    ):
        super().__init__(training)
        self._communicators = communicators
        self._replicas = replicas
        self.scatters = replicas is None
        self._config = config
        self._model = weakref.ref(model)
        self._served = weakref.WeakSet(_sharded_modules(model).values())
        self._are_all_served = False  # which the first pass finds out
        self.closed = False
        self._ending: weakref.ref | None = None  # what ends the pass under way, which has reduced something
        self._reduced_outside = False  # something, outside of a backward pass, since the last step ended
        self._contributing: dict[str, list[tuple[str, int]]] = {}  # by module, see `note`
        self._of_replicas: dict[str, dist.ReduceOp] = {}

    def note(self, name: str, contributing: list[tuple[str, int]], is_divided: bool) -> None:
        """What is reduced next of a module are the gradients of these parameters, so many elements of each on a rank.

        There is at least one.

        Error feedback keeps what each parameter loses. FSDP reduces those of a module that have a gradient, which may
        be others in each pass.

        Args:
            is_divided: whether FSDP divides the sum over all ranks, by what `set_gradient_divide_factor` was given.
        """
        self._contributing[name] = contributing
        self._of_replicas[name] = dist.ReduceOp.SUM if is_divided else dist.ReduceOp.AVG
        if self.scatters and all(each.world_size == 1 for each in self._communicators.values()):
            self._end_step_with_this_pass()  # one rank reduces nothing

    def _kept_as(self, name: str, gradient: Tensor, ranks: int) -> list[ParameterSlice] | None:
        """What the gradients of a module consist of, the share of each of `ranks` behind that of the one before."""
        shares = self._contributing.get(name, [])
        parts = [ParameterSlice(each, n, rank * n, ranks * n) for rank in range(ranks) for each, n in shares]
        return parts if sum(part.length for part in parts) == gradient.numel() else None

    def close(self) -> None:
        """Finish what was asked for and free the connections. Safe to call twice."""
        self.closed = True
        for communicator in [*self._communicators.values(), *filter(None, [self._replicas])]:
            communicator.close()

    def reduce_scatter(self, name: str, output: Tensor, input: Tensor, group, op, async_op: bool):
        """The gradients of one module: see `Communicator.reduce_scatter_tensor`."""
        self._end_step_with_this_pass()
        kept_as = self._kept_as(name, input, group.size())
        how = {"async_op": async_op, "role": "gradient", "name": name, "kept_as": kept_as}
        return self._communicators[group.group_name].reduce_scatter_tensor(output, input, op, **how)

    def all_gather(self, name: str, output: Tensor, input: Tensor, group, baseline: Baseline | None) -> None:
        """The weights of one module, without loss: see `Communicator.all_gather_into_tensor`."""
        communicator = self._communicators.get(group.group_name)
        if communicator is None:  # fully_shard(reshard_after_forward=n) gathers among so many ranks
            communicator = Communicator(self._config, group, self.training)
            self._communicators[group.group_name] = communicator
        communicator.all_gather_into_tensor(output, input, role="parameter", name=name, baseline=baseline)

    def reduce_replicas(self, name: str, gradient: Tensor) -> None:
        """The same shard of all replicas, in place."""
        self._end_step_with_this_pass()
        how = {"role": "gradient", "name": name, "kept_as": self._kept_as(name, gradient, 1)}
        self._replicas.all_reduce(gradient, self._of_replicas[name], **how)

    def _end_step_with_this_pass(self) -> None:
        """Let the backward pass under way end a step; where there is none, what FSDP does last: see `_tell_of_ends`."""
        self._require_all_served()
        if torch._C._current_graph_task_id() == -1:
            self._reduced_outside = True
        # A pass that failed has dropped what would have ended it.
        elif self._ending is None or self._ending() is None:
            ending = self._end_step
            self._ending = weakref.ref(ending)
            Variable._execution_engine.queue_callback(ending)

    def _require_all_served(self) -> None:
        """Raise UnsupportedError in the first pass if modules were sharded only after `compress`."""
        if self._are_all_served or (model := self._model()) is None:
            return
        for name, module in _sharded_modules(model).items():
            if module not in self._served:
                raise UnsupportedError(
                    f"{name or type(model).__name__} was sharded after fsdp.compress, so its gradients would go "
                    "uncompressed: call fully_shard on all modules first, the root included"
                )
        self._are_all_served = True

    def end_outside_of_passes(self) -> None:
        """FSDP has finished its reductions. End the step if some were made outside of a backward pass."""
        if self._reduced_outside:
            self._end_step()

    def _end_step(self) -> None:
        self._ending = None
        self._reduced_outside = False
        self.training.end_step()


class _ReduceScatter:
    """What a module calls in place of its own reduce-scatter, see `FSDPModule.set_custom_reduce_scatter`."""

    def __init__(self, compression: Compression, name: str):
        self._compression = compression
        self._name = name

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, op, async_op: bool = False):
        return self._compression.reduce_scatter(self._name, output_tensor, input_tensor, group, op, async_op)


class _ReplicaReduction:
    """What a module calls once gradients are scattered, see `FSDPModule.set_all_reduce_hook`."""

    def __init__(self, compression: Compression, name: str):
        self._compression = compression
        self._name = name

    def __call__(self, gradient: Tensor) -> None:
        self._compression.reduce_replicas(self._name, gradient)


class _AllGather:
    """What a module calls in place of its own all-gather, see `FSDPModule.set_custom_all_gather`.

    Args:
        keeps: whether to keep what was gathered, so that the next gather sends changes only.
    """

    def __init__(self, compression: Compression, name: str, keeps: bool):
        self._compression = compression
        self._name = name
        self._keeps = keeps
        self._kept: dict[tuple, tuple[Tensor, Baseline]] = {}  # what was gathered, by group, shape and dtype

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, async_op: bool = False) -> None:
        """Gather at once, also where that need not be done yet: what FSDP would wait for is torch's own work."""
        if not self._keeps:
            return self._compression.all_gather(self._name, output_tensor, input_tensor, group, None)
        if output_tensor.is_cuda:
            raise UnsupportedError(
                f"{self._name}: keep_weights would keep on the GPU what FSDP frees there: use keep_weights=False"
            )
        key = group.group_name, output_tensor.shape, output_tensor.dtype
        if key not in self._kept:
            self._kept[key] = torch.zeros_like(output_tensor), Baseline()
        kept, baseline = self._kept[key]
        self._compression.all_gather(self._name, kept, input_tensor, group, baseline)
        output_tensor.copy_(kept)
        return None


def compress(
    model: torch.nn.Module,
    config=None,
    *,
    replicas: dist.ProcessGroup | None = None,
    training: Training | None = None,
    keep_weights: bool = False,
) -> Compression:
    """Have gradients reduced by compressed collectives from now on. Every rank must call this.

    Weights are gathered as before, unless the setting `roles` names parameters: then they are compressed without loss.

    Where several replicas of the model are sharded, each inside a node say, apply `fully_shard` with the mesh of one
    replica, and pass `replicas`: gradients are then scattered uncompressed within the replica, and averaged between
    replicas by compressed all-reduces.

    Args:
        model: the root module, after `fully_shard` was applied to it and to what it contains; or what `Fabric.setup`
            made of it.
        config: "ncclz", a mapping, the path of a file, or a Config; None is that of `training`, else the defaults.
        replicas: the group of the ranks that hold the same shard of each replica.
        training: what lasts from step to step, if several models are to share it.
        keep_weights: send of weights only what has changed since they were gathered last. Every rank keeps all weights
            in memory for that, in the dtype in which they are gathered, and its own shard once more. Not on a GPU.

    Returns: what holds the statistics, and the state for checkpoints.

    Raises UnsupportedError for a model or a torch that can't be served, MismatchError where ranks differ in version or
    configuration, ConfigError.
    """
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise UnsupportedError(
            f"torch {torch.__version__}: FSDP lets others reduce gradients from 2.9 on; update torch"
        )
    model = unwrapped(model)
    modules = _sharded_modules(model)
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedError("FullyShardedDataParallel (FSDP1) can't be compressed: shard the model with fully_shard")
    if not modules:
        raise UnsupportedError(f"{type(model).__name__}: no module of it is sharded; apply fully_shard first")
    for name, module in modules.items():
        if (before := _compressing.get(module)) is not None and not before.closed:
            raise UnsupportedError(
                f"{name or type(model).__name__}: its gradients are compressed already; close() that first"
            )
    meshes = dict.fromkeys(each.device_mesh for each in model.parameters() if isinstance(each, DTensor))
    for name, module in modules.items():
        if len(_groups_of(module)) > 1:
            raise UnsupportedError(
                f"{name or type(model).__name__}: its parameters are sharded over several meshes, and FSDP lets nobody "
                "else reduce their gradients; give each mesh modules of its own"
            )
    for mesh in meshes:
        if mesh.ndim == 1 and any(each.placements[0].is_replicate() for each in _shards_over(mesh, model)):
            raise UnsupportedError(
                f"parameters over {mesh} are replicated and not sharded: use DistributedDataParallel and ddp.compress"
            )
        if mesh.ndim == 1:
            continue
        if not any(each.placements[0].is_replicate() for each in _shards_over(mesh, model)):
            raise UnsupportedError(
                f"fully_shard over {mesh}, a dimension of which splits the tensors themselves (tensor parallelism): "
                "that can't be compressed"
            )
        raise UnsupportedError(
            f"fully_shard over {mesh}: FSDP averages replicas by itself there, and lets nobody else do so. Use the "
            'mesh of one replica, mesh["shard"], and pass replicas=mesh["replicate"].get_group()'
        )
    if training is None:
        training, config = Training(config), None  # which is the training's own from here on
    roles = (training.config if config is None else Config.load(config)).roles
    sends_weights = "parameter" in roles
    if keep_weights and not sends_weights:
        raise ConfigError(f"keep_weights: roles is {list(roles)}, so weights are gathered as before; add parameter")
    if sends_weights and replicas is not None:
        raise UnsupportedError(
            f"roles: {list(roles)}: weights are gathered within a replica, and only what goes between "
            'replicas is compressed here; set roles to ["gradient"]'
        )
    for module in modules.values():
        _forget_former(module)
    if replicas is not None:
        _require_one_in_common(require_group(replicas), [mesh.get_group() for mesh in meshes])
        compression = Compression({}, Communicator(config, replicas, training), training, config, model)
        for name, module in modules.items():
            module.set_all_reduce_hook(_ReplicaReduction(compression, name or "model"))
    else:
        groups = [mesh.get_group() for mesh in meshes]
        communicators = {group.group_name: Communicator(config, group, training) for group in groups}
        compression = Compression(communicators, None, training, config, model)
        for name, module in modules.items():
            module.set_custom_reduce_scatter(_ReduceScatter(compression, name or "model"))
            if sends_weights:
                module.set_custom_all_gather(_AllGather(compression, name or "model", keep_weights))
    for name, module in modules.items():
        _note_contributing(weakref.ref(compression), name or "model", module)
        _tell_of_ends(weakref.ref(compression), module)
        _compressing[module] = compression
    return compression


def _sharded_modules(model: torch.nn.Module) -> dict[str, FSDPModule]:
    """Those that `fully_shard` was applied to, by name; the root's is empty."""
    return {name_of(name): module for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def _forget_former(module: FSDPModule) -> None:
    """Let FSDP reduce and gather by itself again, where a compression that was closed stands in its place."""
    # Not every torch has it, and `compress` says so.
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    for group in _groups_of(module):
        if isinstance(group._reduce_scatter_comm, _ReduceScatter):
            group._reduce_scatter_comm = DefaultReduceScatter()
        if isinstance(group._all_gather_comm, _AllGather):
            group._all_gather_comm = DefaultAllGather()
        if isinstance(group._all_reduce_hook, _ReplicaReduction):
            group._all_reduce_hook = None


def _note_contributing(compression: weakref.ref[Compression], name: str, module: FSDPModule) -> None:
    """Tell before each reduction of a module which of its parameters have a gradient: FSDP reduces no others."""
    for group in _groups_of(module):

        def noting(*unused, group=group):
            told = compression()
            contributing = [each for each in group.fsdp_params if _contributes(each, group)]
            if told is not None and contributing and group.reduce_grads:
                shares = [(name_of(p._param_fqn or name), p.padded_sharded_param_size.numel()) for p in contributing]
                is_divided = group.gradient_divide_factor is not None
                if is_divided and group._reduce_scatter_process_group.size() > 1 and told.scatters:
                    group.force_sum_reduction_for_comms = True  # not by an operation that only NCCL has
                told.note(name, shares, is_divided)
            return type(group).post_backward(group, *unused)

        group.post_backward = noting


def _tell_of_ends(compression: weakref.ref[Compression], module: FSDPModule) -> None:
    """Tell when FSDP has finished its reductions outside of backward passes.

    `torch.distributed.pipelining` has them made after the backward passes of all microbatches.
    """
    # The second is in torch 2.15. Pipelines call it there in place of the first.
    owners = {"_root_post_backward_final_callback": module._get_fsdp_state(), "finalize_backward": module}
    for name, owner in owners.items():
        if (finish := getattr(type(owner), name, None)) is None:
            continue

        def ending(*args, finish=finish, owner=owner, **options):
            result = finish(owner, *args, **options)
            if (told := compression()) is not None:
                told.end_outside_of_passes()
            return result

        setattr(owner, name, ending)


def _groups_of(module: FSDPModule) -> list:
    """The groups of parameters that FSDP reduces together."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # before torch 2.13


def _contributes(parameter, group) -> bool:
    """Whether FSDP, which knows a parameter by this object, is about to reduce a gradient of it."""
    if not hasattr(parameter, "_unsharded_param"):
        return False
    if parameter.unsharded_accumulated_grad is not None or parameter.unsharded_param.grad is not None:
        return True
    # Zeros, since torch 2.13: see `FSDPModule.set_reduce_scatter_unused_params`.
    return getattr(group, "reduce_scatter_unused_params", False) and parameter.unsharded_param.requires_grad


def _shards_over(mesh: DeviceMesh, model: torch.nn.Module) -> list[DTensor]:
    """The parameters that are sharded over a mesh."""
    return [each for each in model.parameters() if isinstance(each, DTensor) and each.device_mesh == mesh]


def _require_one_in_common(replicas: dist.ProcessGroup, shards: list[dist.ProcessGroup]) -> None:
    """Raise UnsupportedError where a rank would average its shard with another shard of the same replica."""
    of_replicas = set(dist.get_process_group_ranks(replicas))
    for group in shards:
        if len(both := of_replicas.intersection(dist.get_process_group_ranks(group))) > 1:
            raise UnsupportedError(
                f"replicas: ranks {sorted(both)} are in that group and hold different shards of one replica; pass the "
                'group of the ranks that hold the same shard, such as mesh["replicate"].get_group()'
            )
