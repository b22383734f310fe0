"""Compression of one DeepSpeed engine, and what its configuration may ask for."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups
from torch import Tensor

from ..core.call import plain_wire_bytes
from ..core.communicator import Communicator
from ..core.config import DEEPSPEED_KEY, Config, Policy, find_in_deepspeed
from ..core.errors import ConfigError, MismatchError, NczError, PeerError, UnsupportedError
from ..core.reasons import Bypass
from ..core.runtime.device import require_kernels
from ..core.runtime.statistics import Counters, Statistics
from ..core.training.baseline import Baseline
from ..core.training.metrics import scalars
from ..core.training.policy import ParameterSlice
from ..core.training.rotation import refuse
from ..core.training.state import Training
from ..core.transport.handshake import compare_ranks, meet
from ..version import __version__
from .parameter_slices import NamedGradient, parts_of


class GradientCompression:
    """Compression of one engine's gradient reductions.

    With "parameter" in `roles` it also compresses the weights that the engine gathers, with "activation" what its
    forward and backward passes exchange with other ranks.

    Attributes:
        config: effective settings.
        training: state that lasts from step to step. A step is an optimizer step.
        stages: communicator of the stages of a pipeline that hold one replica of the model. None: the engine has no
            pipeline, or `roles` lacks "activation".
    """

    def __init__(self, config: Config):
        self.config = config
        self.training = Training(config)
        # The ranks are the key: DeepSpeed passes different group objects for the same ranks.
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        self.stages: Communicator | None = None
        self._baselines: dict[int, Baseline] = {}
        self._by_parameter = bool(config.policies) or config.quantizer.feeds_back

    def __repr__(self) -> str:
        step, total = self.training.step, self.stats.total
        return f"GradientCompression({self.config.describe()}; step {step}, {total.describe()})"

    @property
    def stats(self) -> Statistics:
        """Statistics of all steps."""
        return self.training.stats

    def keep_exact(self, names: Sequence[str]) -> None:
        """Send gradients of these parameters plain, whatever policies say. To be called before the first reduction."""
        if names:
            skip = Policy(name=tuple(glob.escape(name) for name in names), role="gradient", action="skip")
            self.config = self.config.model_copy(update={"policies": (skip, *self.config.policies)})
            self.training.config = self.config
            self._by_parameter = True

    def communicator(self, group: dist.ProcessGroup | None) -> Communicator:
        """Communicator for the ranks of `group`; None: all ranks. The first call is a collective of these ranks."""
        group = dist.group.WORLD if group is None else group
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._communicators:
            # None: take the settings of the training, which the user may replace there.
            self._communicators[ranks] = Communicator(None, group, self.training)
        return self._communicators[ranks]

    @property
    def sends_weights(self) -> bool:
        """Whether gathered weights are compressed, without loss."""
        return "parameter" in self.config.roles

    @property
    def sends_activations(self) -> bool:
        """Whether exchanged activations are compressed, and their gradients."""
        return "activation" in self.config.roles

    def gather_weights(
        self, number: int, whole: Tensor, shards: Sequence[Tensor], group: dist.ProcessGroup | None
    ) -> None:
        """Gather the shards of all ranks into `whole`, [elements of all shards], sending changes since the last gather.

        Args:
            number: identifies the weights. Their memory moves when DeepSpeed offloads and reloads its states.
            shards: views of `whole`, one for each rank of `group`.
        """
        own = shards[dist.get_rank(group)]
        baseline = self._baselines.setdefault(number, Baseline())
        self.communicator(group).all_gather_single(whole, own, role="parameter", baseline=baseline)

    def forget_weights(self) -> None:
        """Make the next gathers send all weights."""
        self._baselines.clear()

    def parts(self, tensors: Iterable[Tensor], gradients: Iterable[NamedGradient]) -> list[ParameterSlice]:
        """Parameter slices that the gradients in `tensors` consist of, in order: see `parts_of`.

        Raises UnsupportedError if some elements belong to no known parameter, and the settings depend on parameters'
        names.
        """
        parts, unknown = parts_of(tensors, gradients)
        if unknown and self._by_parameter:
            raise UnsupportedError(
                f"{unknown} of {sum(part.length for part in parts)} elements that DeepSpeed reduces belong to no "
                f"parameter that its engine knows by name, so {DEEPSPEED_KEY} can't apply policies and "
                "quantizer.error_feedback to them. Pass deepspeed.initialize the model with all of its parameters, or "
                "remove both settings"
            )
        return parts

    def count_plain(self, collective: str, nbytes: int, group: dist.ProcessGroup | None, reason: Bypass) -> None:
        """Count a plain collective of `group`, to which each rank contributes `nbytes`, unless it has one rank."""
        ranks = dist.get_world_size(group)
        if ranks == 1:
            return
        sent = plain_wire_bytes(collective, nbytes, ranks)
        why = {"bypasses": {reason.value: 1}, "bypassed_bytes": {reason.value: sent}}
        self.stats.record(Counters(calls=1, bytes_in=nbytes, plain_bytes=sent, wire_bytes=sent, **why))

    def end_step(self, was_skipped: bool, rescaled: float) -> None:
        """End a step, after an optimizer step: see `Training.end_step`.

        Error feedback keeps residuals in units of the scaled gradients, so they change with the loss scale. A skipped
        step has used up the old residuals, and its new ones belong to sums that nobody uses: they become 0.

        Args:
            was_skipped: whether the optimizer skipped the step, as after an overflow.
            rescaled: factor by which the loss scale changed.
        """
        for residual in self.training.residuals.by_name.values() if was_skipped or rescaled != 1 else ():
            residual.mul_(0 if was_skipped else rescaled)
        self.training.end_step()

    def feed(self, monitor) -> None:
        """Send the numbers of each step to DeepSpeed's monitor as well."""

        def sink(record: dict) -> None:
            monitor.write_events([(name, value, record["step"]) for name, value in scalars(record)])

        sink.__qualname__ = "DeepSpeed's monitor"  # its name in the warning if it fails
        self.training.metrics.sinks.append(sink)

    def close(self) -> None:
        """Free the connections. Reductions of the engine fail afterwards."""
        for communicator in self._communicators.values():
            communicator.close()
        self.training.metrics.close()


def configured(deepspeed_config, mpu=None, mesh_device=None) -> GradientCompression | None:
    """Compression that a DeepSpeedConfig asks for; None if it does not have our key.

    Without the key this neither waits nor fails.

    Args:
        mpu, mesh_device: the engine's arguments, which say which ranks reduce gradients together; None: all ranks.

    Raises ConfigError or UnsupportedError for settings that are invalid or can't be served. If that is so on some ranks
    only, or if ranks ask for different settings, the other ranks with the key raise MismatchError.
    """
    try:
        asked = _read(deepspeed_config)
    except NczError as error:
        asked = error  # raise it after the other ranks were told
    if asked is None:
        with suppress(Exception):
            _compare(_ranks_that_reduce(mpu, mesh_device), None)
        return None
    try:
        _compare(_ranks_that_reduce(mpu, mesh_device), asked)
    except (MismatchError, PeerError) as error:
        if isinstance(asked, NczError):
            raise asked from None
        raise type(error)(
            f"{error}. Every rank of this DeepSpeed engine needs the same {DEEPSPEED_KEY} in its configuration, and "
            "`import ncz_plugins.deepspeed`"
        ) from None
    if isinstance(asked, NczError):
        raise asked
    return GradientCompression(asked)


def _ranks_that_reduce(mpu, mesh_device) -> list[int]:
    """Global ranks that will reduce gradients together with this one, in an engine with these arguments.

    DeepSpeed keeps both arguments of an engine in its module `groups`, and later engines without them use these.
    """
    if not dist.is_initialized():
        return [0]
    kept = groups.mpu, groups.mesh_device
    groups.mpu = kept[0] if mpu is None else mpu
    groups.mesh_device = kept[1] if mesh_device is None else mesh_device
    try:
        # Without both, DeepSpeed would make a group of all ranks here and wait for all of them.
        is_world = groups.mpu is None and groups.mesh_device is None
        group = None if is_world else groups._get_sequence_data_parallel_group()
    finally:
        groups.mpu, groups.mesh_device = kept
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def _compare(ranks: Sequence[int], asked: Config | NczError | None) -> None:
    """Raise MismatchError or PeerError unless all ranks ask for the same settings.

    None: no key; an error: invalid settings.
    """
    if len(ranks) > 1:
        rank = ranks.index(dist.get_rank())
        compare_ranks(meet(ranks, rank, "deepspeed engine"), ranks, rank, asked)


def _read(deepspeed_config) -> Config | None:
    """Settings from a DeepSpeedConfig; None without our key. Raises ConfigError or UnsupportedError."""
    try:
        source = find_in_deepspeed(deepspeed_config._param_dict)
        config = None if source is None else Config.load(source)
    except ConfigError as error:
        raise ConfigError(f"{DEEPSPEED_KEY}: {error}") from None
    if config is not None:
        refuse(config, "DeepSpeed")
        _refuse_unsupported_options(deepspeed_config, config)
    return config


def describe(compression: GradientCompression, zero_stage: int, replicas: int) -> str:
    """Line of text that says what is compressed, with which settings.

    Args:
        replicas: number of ranks that reduce the same gradients.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return f"ncz_plugins {__version__}: nothing is compressed, as one rank has nothing to send (ZeRO {zero_stage})"
    exchanges = compression.sends_activations
    if replicas == 1 and not exchanges:
        return (
            f"ncz_plugins {__version__}: nothing is compressed, as no two ranks of this engine have the same "
            f"parameters (ZeRO {zero_stage})"
        )
    if compression.config.transport.min_bytes == "never":
        return f"ncz_plugins {__version__}: nothing is compressed, as transport.min_bytes is never (ZeRO {zero_stage})"
    what = ["gradient reductions"] if "gradient" in compression.config.roles and replicas > 1 else []
    what += ["exchanges of activations"] if exchanges else []
    weights = ", and gathered weights are without loss" if compression.sends_weights else ""
    among = f"{ranks} ranks" if replicas == ranks else f"{replicas} of {ranks} ranks"
    return (
        f"ncz_plugins {__version__}: {' and '.join(what)} are compressed{weights} (ZeRO {zero_stage}, {among}): "
        f"{compression.config.describe()}"
    )


def _refuse_unsupported_options(deepspeed_config, config: Config) -> None:
    """Raise ConfigError or UnsupportedError for options with which gradients would bypass this plugin uncompressed."""
    zero = deepspeed_config.zero_config
    if not {"gradient", "activation"}.intersection(config.roles):
        raise ConfigError(
            f"{DEEPSPEED_KEY}: roles: {list(config.roles)}: under DeepSpeed weights are compressed beside gradients or "
            'activations; allowed: ["gradient"], ["gradient", "parameter"], ["gradient", "activation"] and others with '
            "one of these two"
        )
    if "parameter" in config.roles and zero.stage == 0:
        raise UnsupportedError(
            f"{DEEPSPEED_KEY}: roles: {list(config.roles)}: without ZeRO no weights are gathered. Set roles to "
            '["gradient"], or zero_optimization.stage to 1 or more'
        )
    if "parameter" in config.roles and zero.stage == 3 and zero.use_all_reduce_for_fetch_params:
        raise UnsupportedError(
            f"zero_optimization.stage3_use_all_reduce_for_fetch_params: true can't be combined with {DEEPSPEED_KEY}: "
            f"roles: {list(config.roles)}: it sums weights instead of gathering them. Set it to false (the "
            'default), or roles to ["gradient"]'
        )
    try:
        require_kernels(torch.device(get_accelerator().device_name()))
    except UnsupportedError as error:
        raise UnsupportedError(f"{DEEPSPEED_KEY}: {error}. Remove the key, or run with DS_ACCELERATOR=cpu") from None
    if deepspeed_config.compile_config.deepcompile:
        raise UnsupportedError(
            f"compile.deepcompile: true can't be combined with {DEEPSPEED_KEY}: it reduces gradients in C++, "
            "which this plugin can't replace. Set compile.deepcompile to false, or remove one of the two"
        )
    if zero.zero_quantized_gradients:
        raise UnsupportedError(
            f"zero_optimization.zero_quantized_gradients: true can't be combined with {DEEPSPEED_KEY}: "
            "both compress gradients. Remove one of the two"
        )
    if zero.stage in (1, 2) and zero.reduce_scatter and not zero.use_multi_rank_bucket_allreduce:
        raise UnsupportedError(
            f"zero_optimization.use_multi_rank_bucket_allreduce: false can't be combined with {DEEPSPEED_KEY}: "
            "it reduces to one rank at a time, which can't be compressed. "
            "Set it to true (the default), or zero_optimization.reduce_scatter to false"
        )
