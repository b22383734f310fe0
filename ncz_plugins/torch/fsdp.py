"""Compression of gradients and weights for FSDP2: models to which `fully_shard` was applied.

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
from . import private
from .compression import ModelCompression, unwrapped
from .private import name_of

_compressing: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by sharded module: its `Compression`


class Compression(ModelCompression):
    """State of a compressed FSDP2 model: its communicators, and what lasts from step to step. `compress` makes it.

    Args:
        communicators: for each group that shards parameters, by its `group_name`.
        replicas: the communicator of the ranks that hold the same shard; None if there is one replica.
        training: the state that all communicators share.
        config: the settings of the communicators; None takes the settings of `training`.
        model: the root module. All of its sharded modules are served.

    Attributes:
        closed: whether `close` was called.
        scatters: True if gradients are reduced and scattered; False if they are averaged over replicas.
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
        self._are_all_served = False  # checked in the first backward pass
        self.closed = False
        self._end_callback: weakref.ref | None = None  # for the pass under way, once it has reduced something
        self._reduced_outside = False  # whether something was reduced outside of a backward pass in this step
        self._contributing: dict[str, list[tuple[str, int]]] = {}  # by module, see `note`
        self._replica_ops: dict[str, dist.ReduceOp] = {}  # by module: how to reduce over replicas

    def note(self, name: str, contributing: list[tuple[str, int]], is_divided: bool) -> None:
        """Take note of the parameters of a module whose gradients FSDP reduces next.

        FSDP reduces the gradients that a module has, which may be others in each pass. Error feedback keeps residuals
        by parameter, so it must know which these are.

        Args:
            name: the module's.
            contributing: name of each parameter, and how many of its elements each rank gets. At least one parameter.
            is_divided: whether FSDP divides the sum over all ranks itself, by the factor of
                `set_gradient_divide_factor`.
        """
        self._contributing[name] = contributing
        self._replica_ops[name] = dist.ReduceOp.SUM if is_divided else dist.ReduceOp.AVG
        if self.scatters and all(each.world_size == 1 for each in self._communicators.values()):
            self._end_step_with_this_pass()  # FSDP reduces nothing where each group has one rank

    def _kept_as(self, name: str, gradient: Tensor, ranks: int) -> list[ParameterSlice] | None:
        """Keys of error feedback for a module's gradients: rank 0's shares, then rank 1's, and so on.

        None if the parameters noted don't have as many elements as `gradient`.
        """
        shares = self._contributing.get(name, [])
        parts = [ParameterSlice(each, n, rank * n, ranks * n) for rank in range(ranks) for each, n in shares]
        return parts if sum(part.length for part in parts) == gradient.numel() else None

    def close(self) -> None:
        """Finish all calls and free the connections. Safe to call twice."""
        self.closed = True
        for communicator in [*self._communicators.values(), *filter(None, [self._replicas])]:
            communicator.close()

    def reduce_scatter(self, name: str, output: Tensor, input: Tensor, group, op, async_op: bool):
        """Reduce and scatter the gradients of one module: see `Communicator.reduce_scatter_tensor`."""
        self._end_step_with_this_pass()
        kept_as = self._kept_as(name, input, group.size())
        how = {"async_op": async_op, "role": "gradient", "name": name, "kept_as": kept_as}
        return self._communicators[group.group_name].reduce_scatter_tensor(output, input, op, **how)

    def all_gather(self, name: str, output: Tensor, input: Tensor, group, baseline: Baseline | None) -> None:
        """Gather the weights of one module without loss: see `Communicator.all_gather_into_tensor`."""
        communicator = self._communicators.get(group.group_name)
        if communicator is None:  # fully_shard(reshard_after_forward=n) gathers within groups of n ranks
            communicator = Communicator(self._config, group, self.training)
            self._communicators[group.group_name] = communicator
        communicator.all_gather_into_tensor(output, input, role="parameter", name=name, baseline=baseline)

    def reduce_replicas(self, name: str, gradient: Tensor) -> None:
        """Reduce the gradients of one module's shard over all replicas, in place."""
        self._end_step_with_this_pass()
        how = {"role": "gradient", "name": name, "kept_as": self._kept_as(name, gradient, 1)}
        self._replicas.all_reduce(gradient, self._replica_ops[name], **how)

    def _end_step_with_this_pass(self) -> None:
        """End a step with the backward pass under way.

        Outside of a pass, FSDP's last reduction ends it: see `_note_ends`.
        """
        self._require_all_served()
        if not private.in_backward_pass():
            self._reduced_outside = True
        # The reference is dead if an earlier pass failed: autograd dropped the callback then.
        elif self._end_callback is None or self._end_callback() is None:
            callback = self._end_step
            self._end_callback = weakref.ref(callback)
            private.at_end_of_backward_pass(callback)

    def _require_all_served(self) -> None:
        """Raise UnsupportedError in the first pass if a module was sharded after `compress`."""
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
        """End the step if FSDP has reduced something outside of a backward pass. Called when FSDP has finished."""
        if self._reduced_outside:
            self._end_step()

    def _end_step(self) -> None:
        self._end_callback = None
        self._reduced_outside = False
        self.training.end_step()


class _ReduceScatter:
    """Reduce-scatter of one module in place of FSDP's own: see `FSDPModule.set_custom_reduce_scatter`."""

    def __init__(self, compression: Compression, name: str):
        self._compression = compression
        self._name = name

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, op, async_op: bool = False):
        return self._compression.reduce_scatter(self._name, output_tensor, input_tensor, group, op, async_op)


class _ReplicaReduction:
    """Reduction of one module over replicas, after FSDP has scattered: see `FSDPModule.set_all_reduce_hook`."""

    def __init__(self, compression: Compression, name: str):
        self._compression = compression
        self._name = name

    def __call__(self, gradient: Tensor) -> None:
        self._compression.reduce_replicas(self._name, gradient)


class _AllGather:
    """All-gather of one module in place of FSDP's own: see `FSDPModule.set_custom_all_gather`.

    Args:
        keeps: whether to keep the gathered weights, so that the next gather sends changes only.
    """

    def __init__(self, compression: Compression, name: str, keeps: bool):
        self._compression = compression
        self._name = name
        self._keeps = keeps
        self._kept: dict[tuple, tuple[Tensor, Baseline]] = {}  # gathered weights by group, shape and dtype

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, async_op: bool = False) -> None:
        """Gather the weights of one module and return None.

        The gather is synchronous also with `async_op`: FSDP can wait for torch's own works only.
        """
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
    """Compress the gradient reductions of a model from now on. Every rank must call this.

    Weights are gathered as before. With "parameter" in the setting `roles` they are compressed without loss.

    Several replicas: apply `fully_shard` with the mesh of one replica, such as the GPUs of a node, and pass `replicas`.
    FSDP then scatters gradients uncompressed within the replica, and compressed all-reduces average them between
    replicas.

    Args:
        model: the root module, after `fully_shard` was applied to it and its submodules; or what `Fabric.setup`
            returned for it.
        config: "ncclz", a mapping, the path of a file, or a Config; None is that of `training`, else the defaults.
        replicas: the process group of the ranks that hold the same shard of each replica.
        training: state that lasts from step to step, to share it between models.
        keep_weights: send only the weights that changed since the last gather. Every rank then keeps all weights in
            host memory, in the dtype in which they are gathered, and its own shard once more. CPU only.

    Returns: the compression, with its statistics and its state for checkpoints.

    Raises UnsupportedError for a model or a torch that can't be served, MismatchError if ranks differ in version or
    configuration, ConfigError for invalid settings.
    """
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise UnsupportedError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter; update torch to 2.9 or newer"
        )
    model = unwrapped(model)
    modules = _sharded_modules(model)
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedError("FullyShardedDataParallel (FSDP1) can't be compressed: shard the model with fully_shard")
    if not modules:
        raise UnsupportedError(f"{type(model).__name__}: none of its modules is sharded; apply fully_shard first")
    for name, module in modules.items():
        if (before := _compressing.get(module)) is not None and not before.closed:
            raise UnsupportedError(
                f"{name or type(model).__name__}: its gradients are compressed already; close() that first"
            )
    meshes = dict.fromkeys(each.device_mesh for each in model.parameters() if isinstance(each, DTensor))
    for name, module in modules.items():
        if len(private.parameter_groups(module)) > 1:
            raise UnsupportedError(
                f"{name or type(model).__name__}: its parameters are sharded over several meshes, and FSDP takes no "
                "other reduce-scatter for such a module; give each mesh its own modules"
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
                f"fully_shard over {mesh}, one dimension of which is tensor parallelism: that can't be compressed; "
                "shard over a mesh without it"
            )
        raise UnsupportedError(
            f"fully_shard over {mesh}: FSDP averages the replicas of such a mesh itself, uncompressed. Use the "
            'mesh of one replica, mesh["shard"], and pass replicas=mesh["replicate"].get_group()'
        )
    if training is None:
        training, config = Training(config), None  # None: the communicators take the training's settings
    roles = (training.config if config is None else Config.load(config)).roles
    sends_weights = "parameter" in roles
    if keep_weights and not sends_weights:
        raise ConfigError(
            f"keep_weights: roles is {list(roles)}, so weights are not compressed; add parameter to roles"
        )
    if sends_weights and replicas is not None:
        raise UnsupportedError(
            f"roles: {list(roles)}: weights are gathered within a replica, and only what goes between "
            'replicas is compressed here; set roles to ["gradient"]'
        )
    for module in modules.values():  # which may hold the collectives of a compression that was closed
        private.restore_collectives(module, _ReduceScatter, _AllGather, _ReplicaReduction)
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
        _note_reductions(weakref.ref(compression), name or "model", module)
        _note_ends(weakref.ref(compression), module)
        _compressing[module] = compression
    return compression


def _sharded_modules(model: torch.nn.Module) -> dict[str, FSDPModule]:
    """Modules that `fully_shard` was applied to, by name. The root's name is empty."""
    return {name_of(name): module for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def _note_reductions(compression: weakref.ref[Compression], name: str, module: FSDPModule) -> None:
    """Tell a compression before each reduction of a module which parameters have a gradient to reduce."""

    def note(group) -> None:
        told, reduced = compression(), private.reduced_parameters(group)
        if told is None or not reduced:
            return
        is_divided = private.has_divide_factor(group)
        if is_divided and told.scatters and private.reduce_scatter_ranks(group) > 1:
            private.force_sum(group)
        told.note(name, [(name_of(parameter or name), elements) for parameter, elements in reduced], is_divided)

    private.before_reductions(module, note)


def _note_ends(compression: weakref.ref[Compression], module: FSDPModule) -> None:
    """Tell a compression when FSDP has finished reductions that it makes outside of backward passes.

    `torch.distributed.pipelining` reduces after the backward passes of all microbatches.
    """

    def end() -> None:
        if (told := compression()) is not None:
            told.end_outside_of_passes()

    private.after_reductions(module, end)


def _shards_over(mesh: DeviceMesh, model: torch.nn.Module) -> list[DTensor]:
    """Parameters that are sharded over `mesh`."""
    return [each for each in model.parameters() if isinstance(each, DTensor) and each.device_mesh == mesh]


def _require_one_in_common(replicas: dist.ProcessGroup, shards: list[dist.ProcessGroup]) -> None:
    """Raise UnsupportedError if `replicas` would average a rank's shard with another shard of the same replica."""
    of_replicas = set(dist.get_process_group_ranks(replicas))
    for group in shards:
        if len(both := of_replicas.intersection(dist.get_process_group_ranks(group))) > 1:
            raise UnsupportedError(
                f"replicas: ranks {sorted(both)} are in that group and hold different shards of one replica; pass the "
                'group of the ranks that hold the same shard, such as mesh["replicate"].get_group()'
            )
