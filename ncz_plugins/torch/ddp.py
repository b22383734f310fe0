"""Compression of gradients for DistributedDataParallel.

    from ncz_plugins.torch import ddp

    model = DistributedDataParallel(model)
    compression = ddp.compress(model, "ncclz")

See docs/guides/ddp.md.
"""

# No `from __future__ import annotations` here: DDP checks the annotations of a hook, and does not take strings.

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
from ..core.training.muon import DDP_PRESET
from ..core.training.policy import ParameterSlice
from ..core.training.state import Training
from . import private
from .compression import ModelCompression, unwrapped, watch_first_steps
from .private import name_of

_last_steps: weakref.WeakKeyDictionary[Training, Future] = weakref.WeakKeyDictionary()  # done when the step has ended


class Compression(ModelCompression):
    """State of the communication hook: the communicator, and what lasts from step to step.

    Making one is a collective: every rank of the group must do so, in the same order relative to its other collectives.

    Args:
        config: "ncclz", a mapping, the path of a file, or a Config; None is that of `training`, else the defaults.
        group: the process group whose ranks average their gradients; None is the default group.
        named_parameters: names by which policies and error feedback know the parameters.
        training: state that lasts from step to step, to share it between models.

    Raises MismatchError if ranks differ in version or configuration, ConfigError for invalid settings.

    Attributes:
        communicator: the one that averages the buckets.
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
        self.training.ends_steps_in_order = False  # calls of another model may come before `_end_step`
        named = list(named_parameters)
        self._names = {id(parameter): name_of(name) for name, parameter in named}
        self._shapes = {id(parameter): _shape_in_memory(parameter) for _, parameter in named}
        self._model: weakref.ref[DistributedDataParallel] | None = None
        self._last: Handle | None = None  # of this pass; None after its last bucket
        self._computed: set[int] | None = None  # ids of the parameters with a gradient of this pass; None: all have one

    def __reduce__(self):
        """Pickle and copy as None: torch registers no hook for the copy of a model."""
        return type(None), ()

    def attach(self, model: DistributedDataParallel) -> None:
        """Become the communication hook of `model`. Raises UnsupportedError if torch refuses the hook."""
        try:
            model.register_comm_hook(self, hook)
        except RuntimeError as error:  # the only sign of a hook that torch registered in C++
            self.close()
            raise UnsupportedError(f"the model takes no communication hook: {str(error).splitlines()[0]}") from error
        self._model = weakref.ref(model)
        if model.find_unused_parameters:
            self._computed = _with_gradients(model)

    def close(self) -> None:
        """Finish all calls and free the connections. Safe to call twice."""
        self.communicator.close()

    def average(self, bucket: dist.GradBucket) -> Future:
        """Start to average a bucket over ranks. The last bucket of a backward pass ends a step of the training.

        Returns: a future of the bucket's tensor, [elements of the bucket], in the dtype of the gradients.

        Raises UnsupportedError under `model.join(divide_by_initial_world_size=False)`.
        """
        self._require_initial_divisor()
        self._wait_for_step()
        tensor = bucket.buffer()
        if tensor.layout is not torch.strided:
            return self._average_sparse(tensor, bucket.is_last())
        parts = [self._slice_of(each) for each in bucket.parameters()]
        handle = self.communicator.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True, role="gradient", parts=parts)
        self._last = None if bucket.is_last() else handle  # a handle holds the bucket's memory
        if bucket.is_last() and self._computed:
            self._computed.clear()
        future = handle.get_future().then(self._end_step if bucket.is_last() else _result_of)
        if bucket.is_last() and self.training.depends_on_step:
            _last_steps[self.training] = future
        return future

    def _slice_of(self, parameter: Tensor) -> ParameterSlice:
        """A parameter as a slice of its bucket.

        If this pass did not use the parameter, DDP sends the gradient of an earlier pass, and drops the result if no
        rank used the parameter. Such a gradient gets no error feedback.
        """
        is_old = self._computed is not None and id(parameter) not in self._computed and parameter.grad is not None
        name, floats = self._names.get(id(parameter)), _floats_of(parameter)
        return ParameterSlice(name, floats, feeds_back=not is_old, shape=self._shapes.get(id(parameter)))

    def _average_sparse(self, gradient: Tensor, is_last: bool) -> Future:
        """Average a sparse gradient, uncompressed and at once. DDP gives it a bucket of its own."""
        n, bypass = self.communicator.world_size, Bypass.SPARSE.value
        dist.all_reduce(gradient, group=self.communicator.group)
        gradient /= n
        nbytes = private.sparse_bytes(gradient)
        sent = plain_wire_bytes("all_reduce", nbytes, n)
        why = {"bypasses": {bypass: 1}, "bypassed_bytes": {bypass: sent}}
        self.training.stats.record(Counters(calls=1, bytes_in=nbytes, plain_bytes=sent, wire_bytes=sent, **why))
        if is_last:
            if self._last is not None:
                self._last.wait()  # all earlier calls are over then, too
            self._last = None
            self.communicator.end_step()
        future = Future(devices=[gradient.device] if gradient.is_cuda else None)
        future.set_result(gradient)
        return future

    def _end_step(self, done: Future) -> Tensor:
        result = _result_of(done)  # calls run in order: all others of this pass are over, too
        self.communicator.end_step()
        return result

    def _wait_for_step(self) -> None:
        """Wait until the last step has ended, if the settings depend on the step.

        One backward pass may go through several models that share a training. The last bucket of one may then still be
        under way while another starts, for longer on some ranks.
        """
        last_step = _last_steps.pop(self.training, None)
        if last_step is not None and not last_step.done():  # a step that failed has told its own model
            last_step.wait()

    def _require_initial_divisor(self) -> None:
        model = self._model and self._model()
        if model is not None and not private.divides_by_initial_world_size(model):
            raise UnsupportedError(
                "model.join(divide_by_initial_world_size=False): a communication hook does not learn how many ranks "
                "still take part; leave it at True, or train without compression"
            )


def hook(state: Compression, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Average a bucket: a communication hook for `DistributedDataParallel.register_comm_hook(state, hook)`.

    A failure leaves the backward pass as a RuntimeError whose text holds our error. Later calls raise our error itself.
    """
    return state.average(bucket)


def compress(
    model: DistributedDataParallel,
    config=None,
    *,
    group: dist.ProcessGroup | None = None,
    training: Training | None = None,
) -> Compression:
    """Average the gradients of a model by compressed all-reduces from now on. Every rank must call this.

    Args:
        model: a model without a communication hook; compiled or not, or what `Fabric.setup` returned for it.
        config: see `Compression`.
        group: the process group; None is the model's own.
        training: see `Compression`.

    Returns: the compression, with its statistics and its state for checkpoints.

    Raises UnsupportedError for a model that can't be served, and what `Compression` raises.
    """
    model = unwrapped(model)
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedError(
            f"ddp.compress takes a DistributedDataParallel, got {type(model).__name__}: wrap the model first. "
            "Trainer and Accelerate do so if a launcher, such as torchrun, starts several ranks"
        )
    if model.mixed_precision is not None:
        raise UnsupportedError(
            "DistributedDataParallel(mixed_precision=...) uses the communication hook itself: use torch.autocast, or "
            "parameters in bfloat16"
        )
    if private.uses_python_reducer(model):
        raise UnsupportedError(
            'torch._dynamo.config.optimize_ddp = "python_reducer" gives a communication hook single gradients and no '
            "buckets: leave it at its default when the model is wrapped"
        )
    if private.delays_reductions(model):
        raise UnsupportedError(
            "DistributedDataParallel(delay_all_reduce_named_params=...) reduces these parameters without the "
            "communication hook, so they would not be compressed: leave it out"
        )
    private.forget_hook(model, hook)
    if hooks := private.hooks_of(model):
        name = getattr(hooks[0][0], "__qualname__", "one")
        raise UnsupportedError(
            f"the model has a communication hook already ({name}), and DDP takes only one: wrap the module anew"
        )
    group = model.process_group if group is None else group
    state = Compression(config, group, model.module.named_parameters(), training)
    state.attach(model)
    if state.communicator.rank == 0 and state.communicator.world_size > 1:
        named = ((name_of(name), each) for name, each in model.module.named_parameters())
        watch_first_steps(state.training, named, DDP_PRESET)
    return state


def _with_gradients(model: DistributedDataParallel) -> set[int]:
    """A set that collects the ids of parameters whose gradients have been computed since it was cleared last."""
    computed: set[int] = set()

    def note(parameter: Tensor) -> None:
        computed.add(id(parameter))

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(note)
    return computed


def _floats_of(parameter: Tensor) -> int:
    """Number of floats that a bucket has for a parameter: two for each complex number."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _shape_in_memory(parameter: Tensor) -> tuple[int, ...]:
    """Its dimensions in the order in which a bucket has its elements. The last one is in floats."""
    by_stride = sorted(zip(parameter.stride(), parameter.shape), key=lambda each: -each[0])
    *sizes, last = [size for _, size in by_stride] or [1]
    return *sizes, last * (2 if parameter.is_complex() else 1)


def _result_of(done: Future) -> Tensor:
    [tensor] = done.value()
    return tensor
