"""Compressed gradients for DistributedDataParallel.

    from ncz_plugins.torch import ddp

    model = DistributedDataParallel(model)
    compression = ddp.compress(model, "ncclz")

See docs/guides/ddp.md.
"""

# No `from __future__ import annotations` here: DDP looks at the annotations of a hook, and does not take strings.

import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..core.bypass import Bypass
from ..core.call import plain_wire_bytes
from ..core.communicator import Communicator
from ..core.errors import UnsupportedError
from ..core.runtime.handle import Handle
from ..core.runtime.statistics import Counters
from ..core.training.policy import ParameterSlice
from ..core.training.state import Training
from .compression import ModelCompression, name_of, unwrapped

_ending: weakref.WeakKeyDictionary[Training, Future] = weakref.WeakKeyDictionary()  # what ends a training's last step


class Compression(ModelCompression):
    """The state of the hook.

    Making one is a collective: every rank of the group must do it, in the same order relative to its other collectives.

    Args:
        config: "ncclz", a mapping, the path of a file, or a Config; None is that of `training`, else the defaults.
        group: the process group whose ranks average their gradients; None is the default group.
        named_parameters: what policies and error feedback know parameters by.
        training: what lasts from step to step, if several models are to share it.

    Raises MismatchError where ranks differ in version or configuration, ConfigError.

    Attributes:
        communicator: carries the calls.
    """

    def __init__(
        self,
        config=None,
        group: dist.ProcessGroup | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
        training: Training | None = None,
    ):
        self.communicator = Communicator(config, group, training)
        super().__init__(self.communicator.training)
        self.training.ends_steps_in_order = False  # `_end_step` may come between calls of another model
        self._names = {id(parameter): name_of(name) for name, parameter in named_parameters}
        self._model: weakref.ref[DistributedDataParallel] | None = None
        self._last: Handle | None = None  # of the calls of this pass, as long as more are to come
        self._computed: set[int] | None = None  # parameters that have a gradient of this pass, by id; None: all have

    def __reduce__(self):
        """A copy of a model, or a file of it, has None here: torch does not register hooks for copies."""
        return type(None), ()

    def attach(self, model: DistributedDataParallel) -> None:
        """Become the communication hook of `model`."""
        try:
            model.register_comm_hook(self, hook)
        except RuntimeError as error:  # torch tells nobody of a hook of its own before
            self.close()
            raise UnsupportedError(f"the model takes no communication hook: {str(error).splitlines()[0]}") from error
        self._model = weakref.ref(model)
        if model.find_unused_parameters:
            self._computed = _with_gradients(model)

    def close(self) -> None:
        """Finish what was asked for and free the connections. Safe to call twice."""
        self.communicator.close()

    def average(self, bucket: dist.GradBucket) -> Future:
        """Begin to average a bucket over ranks. Returns a future of the bucket's tensor, [elements of the bucket].

        With the last bucket of a backward pass a step of the training is over.
        """
        self._require_initial_divisor()
        self._wait_for_step()
        tensor = bucket.buffer()
        if tensor.layout is not torch.strided:
            return self._average_sparse(tensor, bucket.is_last())
        parts = [self._slice_of(each) for each in bucket.parameters()]
        handle = self.communicator.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True, role="gradient", parts=parts)
        self._last = None if bucket.is_last() else handle  # which has the bucket's memory
        if bucket.is_last() and self._computed:
            self._computed.clear()
        future = handle.get_future().then(self._end_step if bucket.is_last() else _result_of)
        if bucket.is_last() and self.training.depends_on_step:
            _ending[self.training] = future
        return future

    def _slice_of(self, parameter: Tensor) -> ParameterSlice:
        """A parameter in a bucket.

        For a parameter that this pass did not use, DDP sends the gradient that an earlier pass left, and drops the
        result if no rank used the parameter.
        """
        is_old = self._computed is not None and id(parameter) not in self._computed and parameter.grad is not None
        return ParameterSlice(self._names.get(id(parameter)), _floats_of(parameter), feeds_back=not is_old)

    def _average_sparse(self, gradient: Tensor, is_last: bool) -> Future:
        """As `average`, uncompressed and at once, of a sparse gradient. It has a bucket of its own."""
        n, bypass = self.communicator.world_size, Bypass.SPARSE.value
        dist.all_reduce(gradient, group=self.communicator.group)
        gradient /= n
        nbytes = gradient._indices().nbytes + gradient._values().nbytes
        sent = plain_wire_bytes("all_reduce", nbytes, n)
        why = {"bypasses": {bypass: 1}, "bypassed_bytes": {bypass: sent}}
        self.training.stats.record(Counters(calls=1, bytes_in=nbytes, plain_bytes=sent, wire_bytes=sent, **why))
        if is_last:
            if self._last is not None:
                self._last.wait()  # and with it all calls before
            self._last = None
            self.communicator.end_step()
        future = Future(devices=[gradient.device] if gradient.is_cuda else None)
        future.set_result(gradient)
        return future

    def _end_step(self, done: Future) -> Tensor:
        result = _result_of(done)  # calls run in order, so all others of this pass are over as well
        self.communicator.end_step()
        return result

    def _wait_for_step(self) -> None:
        """Wait until the last step is over, where what is done to a tensor depends on the step.

        One backward pass may go through several models that share a training: then another one's last bucket may be
        under way, for longer on some ranks.
        """
        ending = _ending.pop(self.training, None)
        if ending is not None and not ending.done():  # one that has failed was its own model's concern
            ending.wait()

    def _require_initial_divisor(self) -> None:
        model = self._model and self._model()
        if model is not None and not getattr(model, "_divide_by_initial_world_size", True):
            raise UnsupportedError(
                "model.join(divide_by_initial_world_size=False): a communication hook does not learn how many ranks "
                "are left; leave it at True, or train without compression"
            )


def hook(state: Compression, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """A communication hook for `DistributedDataParallel.register_comm_hook(state, hook)`.

    A failure comes out of the backward pass as a RuntimeError whose text has the error of ours. Later calls raise that.
    """
    return state.average(bucket)


def compress(
    model: DistributedDataParallel,
    config=None,
    *,
    group: dist.ProcessGroup | None = None,
    training: Training | None = None,
) -> Compression:
    """Have a model's gradients averaged by compressed all-reduces from now on. Every rank must call this.

    Args:
        model: one that has no communication hook yet; compiled or not, or what `Fabric.setup` made of it.
        config: see `Compression`.
        group: the process group; None is the model's own.
        training: see `Compression`.

    Returns: what holds the statistics, and the state for checkpoints.

    Raises UnsupportedError for a model that can't be served, and what `Compression` raises.
    """
    model = unwrapped(model)
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedError(
            f"ddp.compress takes a DistributedDataParallel, got {type(model).__name__}: wrap the model first"
        )
    if model.mixed_precision is not None:
        raise UnsupportedError(
            "DistributedDataParallel(mixed_precision=...) uses the communication hook itself: use torch.autocast, or "
            "parameters in bfloat16"
        )
    if getattr(model, "_use_python_reducer", False):
        raise UnsupportedError(
            'torch._dynamo.config.optimize_ddp = "python_reducer" gives a communication hook single gradients and no '
            "buckets: leave it at its default when the model is wrapped"
        )
    if getattr(model, "_delay_all_reduce_params", None):
        raise UnsupportedError(
            "DistributedDataParallel(delay_all_reduce_named_params=...) reduces these parameters beside the "
            "communication hook, so they would go uncompressed: leave it out"
        )
    model._comm_hooks = [each for each in model._comm_hooks if each != (hook, None)]  # of the model it is a copy of
    if model._comm_hooks:
        name = getattr(model._comm_hooks[0][0], "__qualname__", "one")
        raise UnsupportedError(
            f"the model has a communication hook already ({name}), and DDP takes one only: wrap the module anew"
        )
    group = model.process_group if group is None else group
    state = Compression(config, group, model.module.named_parameters(), training)
    state.attach(model)
    return state


def _with_gradients(model: DistributedDataParallel) -> set[int]:
    """The ids of parameters whose gradients have been computed, from now on, since the set was cleared."""
    computed: set[int] = set()

    def note(parameter: Tensor) -> None:
        computed.add(id(parameter))

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(note)
    return computed


def _floats_of(parameter: Tensor) -> int:
    """How many floats a bucket has for a parameter: two for a complex number."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _result_of(done: Future) -> Tensor:
    [tensor] = done.value()
    return tensor
