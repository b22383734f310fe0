"""Compression of gradients and weights for FSDP2: models to which `fully_shard` or `replicate` was applied.

    from ncz_plugins.torch import fsdp

    fully_shard(model)
    compression = fsdp.compress(model, "ncclz")

See docs/guides/fsdp.md.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..core.communicator import Communicator
from ..core.config import Config
from ..core.errors import ConfigError, UnsupportedError
from ..core.training.baseline import Baseline
from ..core.training.policy import ParameterSlice
from ..core.training.rotation import refuse
from ..core.training.state import Training
from ..core.transport.groups import require_group
from . import private
from .compression import ModelCompression, unwrapped, watch_first_steps
from .private import ReducedParameter, name_of
from .replicas import ReplicaGroup
from .tensor_parallel import TensorParallel

_compressing: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by sharded module: its `Compression`


class Reductions(NamedTuple):
    """How the gradients of one module are reduced: first among the ranks of a replica, then over replicas.

    Attributes:
        shards: the process group that shards the module's parameters; None if each rank has all of them.
        replicas: the process group of the ranks that hold the same shard; None if there is one replica.
        compresses_shards: whether the first reduction is compressed. The second always is.
    """

    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    compresses_shards: bool


class Compression(ModelCompression):
    """State of a compressed FSDP2 model: its communicators, and what lasts from step to step. `compress` makes it.

    Args:
        reductions: those of each sharded module, by name.
        training: the state that all communicators share.
        config: the settings of the communicators; None takes the settings of `training`.
        model: the root module. All of its sharded modules are served.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(self, reductions: dict[str, Reductions], training: Training, config, model: torch.nn.Module):
        super().__init__(training)
        self._config = config
        self._reductions = reductions
        self._communicators: dict[tuple[int, ...], Communicator] = {}  # by global ranks
        # Connect among the ranks of replicas first, then between replicas: all ranks must connect in the same order.
        for group in [each.shards for each in reductions.values() if each.compresses_shards]:
            self._communicator(group)
        for group in [each.replicas for each in reductions.values() if each.replicas is not None]:
            self._communicator(group)
        data_groups = [group for each in reductions.values() for group in each[:2] if group is not None]
        sharded = [each for each in model.parameters() if isinstance(each, DTensor)]
        self._tensor_parallel = TensorParallel(sharded, data_groups)
        self._model = weakref.ref(model)
        self._served = weakref.WeakSet(_sharded_modules(model).values())
        self._are_all_served = False  # checked in the first backward pass
        self.closed = False
        self._end_callback: weakref.ref | None = None  # for the pass under way, once it has reduced something
        self._reduced_outside = False  # whether something was reduced outside of a backward pass in this step
        self._contributing: dict[str, list[ReducedParameter]] = {}  # by module, see `note`
        self._hook_ops: dict[str, dist.ReduceOp] = {}  # by module: how a hook reduces over replicas

    def note(self, name: str, contributing: list[ReducedParameter], is_divided: bool) -> None:
        """Take note of the parameters of a module whose gradients FSDP reduces next.

        FSDP reduces the gradients that a module has, which may be others in each pass. Policies and error feedback know
        parameters, and so must know which these are.

        Args:
            name: the module's.
            contributing: at least one parameter.
            is_divided: whether FSDP divides the sum over all ranks itself, by the factor of
                `set_gradient_divide_factor`.
        """
        self._contributing[name] = contributing
        self._hook_ops[name] = dist.ReduceOp.SUM if is_divided else dist.ReduceOp.AVG
        shards, replicas, _ = self._reductions[name]
        if replicas is None and shards.size() == 1:
            self._end_step_with_this_pass()  # FSDP reduces nothing where each rank has all of a module

    def reduces_shards(self, name: str) -> bool:
        """Whether a module has a compressed reduction within a replica, which FSDP leaves out for one rank."""
        shards, _, compresses_shards = self._reductions[name]
        return compresses_shards and shards.size() > 1

    def _known_as(self, name: str, gradient: Tensor, ranks: int, suffix: str = "") -> dict[str, Any]:
        """Arguments by which policies and error feedback know a module's gradients: rank 0's shares, then rank 1's.

        They know the module alone if the parameters noted don't have as many elements as `gradient`.
        """
        shares = [(name_of(each.name or name), each) for each in self._contributing.get(name, [])] * ranks
        if sum(each.elements for _, each in shares) != gradient.numel():
            return {"parts": [ParameterSlice(name, gradient.numel())]}
        starts = [rank * each.elements for rank in range(ranks) for _, each in shares[: len(shares) // ranks]]
        kept_as = [
            ParameterSlice(f"{own}{suffix}", each.elements, start, ranks * each.elements)
            for start, (own, each) in zip(starts, shares)
        ]
        if not self.training.config.policies:  # one name is compared faster
            return {"name": name, "kept_as": kept_as}
        parts = [
            ParameterSlice(own, each.elements, start, each.parameter.numel(), shape=tuple(each.parameter.shape))
            for start, (own, each) in zip(starts, shares)
        ]
        return {"parts": parts, "kept_as": kept_as}

    def _communicator(self, group: dist.ProcessGroup) -> Communicator:
        """The communicator of the ranks of a group. The first call connects them.

        torch has several groups of the same ranks, such as that of `FSDPModule.set_separate_reduce_scatter_group`.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._communicators:
            self._communicators[ranks] = Communicator(self._config, group, self.training)
        return self._communicators[ranks]

    def close(self) -> None:
        """Finish all calls and free the connections. Safe to call twice."""
        self.closed = True
        for communicator in self._communicators.values():
            communicator.close()

    def reduce_scatter(self, name: str, output: Tensor, input: Tensor, group, op, async_op: bool):
        """Reduce and scatter the gradients of one module: see `Communicator.reduce_scatter_single`."""
        # Averaging over replicas ends a step, not this: passes that accumulate gradients may come between.
        is_last = self._reductions[name].replicas is None
        if is_last:
            self._end_step_with_this_pass()

        # Parameters that ranks of tensor parallelism have in common are made equal after the last reduction.
        equalizes = is_last and self._tensor_parallel.is_used
        how = {"async_op": async_op and not equalizes, "role": "gradient", **self._known_as(name, input, group.size())}
        handle = self._communicator(group).reduce_scatter_single(output, input, op, **how)
        if equalizes:
            self._equalize(name, output)
        return handle

    def all_gather(self, name: str, output: Tensor, input: Tensor, group, baseline: Baseline | None) -> None:
        """Gather the weights of one module without loss: see `Communicator.all_gather_single`.

        fully_shard(reshard_after_forward=n) gathers within groups of n ranks, which meet here.
        """
        communicator = self._communicator(group)
        communicator.all_gather_single(output, input, role="parameter", name=name, baseline=baseline)

    def reduce_replicas(self, name: str, gradient: Tensor, op: dist.ReduceOp | None = None) -> None:
        """Reduce the gradients of one module's shard over all replicas, in place.

        Args:
            op: how; None: as a hook must, which FSDP does not tell it.
        """
        self._end_step_with_this_pass()
        _, replicas, compresses_shards = self._reductions[name]
        # Where a parameter is rounded twice, it has two residuals.
        known_as = self._known_as(name, gradient, 1, " between replicas" if compresses_shards else "")
        op = self._hook_ops[name] if op is None else op
        self._communicator(replicas).all_reduce(gradient, op, role="gradient", **known_as)
        if self._tensor_parallel.is_used:
            self._equalize(name, gradient)

    def _equalize(self, name: str, gradient: Tensor) -> None:
        """Give ranks of tensor parallelism the same gradients of parameters that each of them holds whole."""
        self.training.stats.record(self._tensor_parallel.equalize(gradient, self._contributing[name]))

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
    within_replicas: bool = False,
    training: Training | None = None,
    keep_weights: bool = False,
) -> Compression:
    """Compress the gradient reductions of a model from now on. Every rank must call this.

    Weights are gathered as before. With "parameter" in the setting `roles` they are compressed without loss.

    Several replicas: apply `fully_shard` with a 2-D mesh, whose second dimension is one replica, such as the GPUs of a
    node. FSDP then scatters gradients uncompressed within the replica, and compressed all-reduces average them between
    replicas. `replicate` keeps all parameters on each rank: it only averages.

    Args:
        model: the root module, after `fully_shard` or `replicate` was applied to it and its submodules; or what
            `Fabric.setup` returned for it.
        config: "ncclz", a mapping, the path of a file, or a Config; None is that of `training`, else the defaults.
        replicas: the process group of the ranks that hold the same shard of each replica, where `fully_shard` got the
            mesh of one replica and knows of no other.
        within_replicas: compress the reductions within a replica, too. Gradients are then rounded twice.
        training: state that lasts from step to step, to share it between models.
        keep_weights: send only the weights that changed since the last gather. Every rank then keeps all weights in
            host memory, in the dtype in which they are gathered, and its own shard once more. CPU only.

    Returns: the compression, with its statistics and its state for checkpoints.

    Raises UnsupportedError for a model or a torch that can't be served, MismatchError if ranks differ in version or
    configuration, ConfigError for invalid settings.
    """
    # Refuse what can't be served.
    model = unwrapped(model)
    modules = _sharded_modules(model)
    _require_served(model, modules)

    # Find what to compress, and with which settings.
    reductions = _reductions_of(modules, replicas, within_replicas)
    if training is None:
        training, config = Training(config), None  # None: the communicators take the training's settings
    asked = training.config if config is None else Config.load(config)
    refuse(asked, "FSDP2")
    roles = asked.roles
    sends_weights = "parameter" in roles
    if keep_weights and not sends_weights:
        raise ConfigError(
            f"keep_weights: roles is {list(roles)}, so weights are not compressed; add parameter to roles"
        )
    if sends_weights and not all(each.compresses_shards for each in reductions.values()):
        raise UnsupportedError(
            f"roles: {list(roles)}: weights are gathered within a replica, and only what goes between "
            'replicas is compressed here; set roles to ["gradient"], or pass within_replicas=True if replicas are '
            "sharded"
        )

    # Connect, and only then take FSDP's collectives over.
    for module in modules.values():  # which may hold the collectives of a compression that was closed
        private.restore_collectives(module, _ReduceScatter, _AllGather, _ReplicaReduction, ReplicaGroup)
    compression = Compression(reductions, training, config, model)
    for name, module in modules.items():
        name = name or "model"
        if name in reductions:
            _take_over(module, name, compression, reductions[name])
        if name in reductions and sends_weights:
            module.set_custom_all_gather(_AllGather(compression, name, keep_weights))
        _note_reductions(weakref.ref(compression), name, module)
        _note_ends(weakref.ref(compression), module)
        _compressing[module] = compression
    if dist.get_rank() == 0:
        watch_first_steps(training, ((name_of(name), each) for name, each in model.named_parameters()))
    return compression


def _require_served(model: torch.nn.Module, modules: dict[str, FSDPModule]) -> None:
    """Raise UnsupportedError for a torch or a model that can't be served, or is served already."""
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise UnsupportedError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter; update torch to 2.9 or newer"
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedError("FullyShardedDataParallel (FSDP1) can't be compressed: shard the model with fully_shard")
    if not modules:
        raise UnsupportedError(f"{type(model).__name__}: none of its modules is sharded; apply fully_shard first")
    for name, module in modules.items():
        if (before := _compressing.get(module)) is not None and not before.closed:
            raise UnsupportedError(
                f"{name or type(model).__name__}: its gradients are compressed already; close() that first"
            )
        if len(private.parameter_groups(module)) > 1:
            raise UnsupportedError(
                f"{name or type(model).__name__}: its parameters are sharded over several meshes, and FSDP takes no "
                "other reduce-scatter for such a module; give each mesh its own modules"
            )


def _reductions_of(
    modules: dict[str, FSDPModule], replicas: dist.ProcessGroup | None, within_replicas: bool
) -> dict[str, Reductions]:
    """How each module that has parameters is reduced. Raises UnsupportedError for what contradicts its mesh."""
    found = {}
    for name, module in modules.items():
        for group in private.parameter_groups(module):
            shards, own_replicas = private.shard_group(group), private.replicate_group(group)
            if isinstance(own_replicas, ReplicaGroup):  # of a compression that was closed
                own_replicas = own_replicas.group
            if replicas is not None and own_replicas is not None:
                raise UnsupportedError(
                    f"replicas: the mesh of {name or 'the model'} has replicas already, which fsdp.compress finds by "
                    "itself; leave replicas out"
                )
            if replicas is not None:
                _require_one_in_common(require_group(replicas), shards)
            between = own_replicas if replicas is None else require_group(replicas)
            compresses_shards = shards is not None and (between is None or within_replicas)
            found[name or "model"] = Reductions(shards, between, compresses_shards)
    if within_replicas and found and not any(each.compresses_shards for each in found.values()):
        raise UnsupportedError(
            "within_replicas: each rank has all parameters, so nothing is reduced within a replica; leave it out"
        )
    return found


def _take_over(module: FSDPModule, name: str, compression: Compression, reductions: Reductions) -> None:
    """Let a module reduce its gradients by the compression."""
    if reductions.compresses_shards:
        module.set_custom_reduce_scatter(_ReduceScatter(compression, name))
    [group] = private.parameter_groups(module)
    if private.replicate_group(group) is not None:
        reduce = partial(compression.reduce_replicas, name)
        private.replace_replicate_group(group, ReplicaGroup(reductions.replicas, reduce))
    elif reductions.replicas is not None:
        module.set_all_reduce_hook(_ReplicaReduction(compression, name))


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
        if is_divided and told.reduces_shards(name):
            private.force_sum(group)
        told.note(name, reduced, is_divided)

    private.before_reductions(module, note)


def _note_ends(compression: weakref.ref[Compression], module: FSDPModule) -> None:
    """Tell a compression when FSDP has finished reductions that it makes outside of backward passes.

    `torch.distributed.pipelining` reduces after the backward passes of all microbatches.
    """

    def end() -> None:
        if (told := compression()) is not None:
            told.end_outside_of_passes()

    private.after_reductions(module, end)


def _require_one_in_common(replicas: dist.ProcessGroup, shards: dist.ProcessGroup) -> None:
    """Raise UnsupportedError if `replicas` would average a rank's shard with another shard of the same replica."""
    of_replicas = set(dist.get_process_group_ranks(replicas))
    if len(both := of_replicas.intersection(dist.get_process_group_ranks(shards))) > 1:
        raise UnsupportedError(
            f"replicas: ranks {sorted(both)} are in that group and hold different shards of one replica; pass the "
            'group of the ranks that hold the same shard, such as mesh["replicate"].get_group()'
        )
