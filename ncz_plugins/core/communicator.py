"""One process group with compressed collectives, from construction to close: the one way into the core."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .arrays import giving
from .call import Call
from .call_description import refusal
from .call_queue import CallQueue
from .collectives import Collectives
from .config import Config
from .errors import ConfigError, MismatchError, NczError, PeerError
from .group import Group
from .on_gpu import GpuCalls
from .on_host import HostCalls
from .pairs import Directions, Messages
from .run import tell
from .runtime.device import HOST
from .runtime.handle import Handle, Handles
from .runtime.statistics import Counters, Statistics
from .training.state import Training
from .transport.base import Transport
from .transport.connections import timeout_of
from .transport.groups import require_group
from .transport.handshake import compare_ranks, meet
from .transport.intra_node import with_memory
from .transport.nccl_classes import nccl_class_of
from .transport.plain import TorchCollectives
from .transport.routes import Routes
from .transport.topology import Nodes, find_nodes, find_places
from .tuning.decisions import MOST_CONNECTIONS
from .tuning.measure import TorchRanks, measure_link, measure_open_settings, measure_trip
from .tuning.tuning_file import apply_tuning_file


class Communicator(Collectives, Messages):
    """Compressed collectives over one process group.

    Args:
        config: a Config or anything that `Config.load` takes; None is that of `training`, else the defaults.
        group: the process group whose ranks take part; None is the default group.
        training: state that outlives a step: step number, error-feedback residuals, policies, statistics. Communicators
            may share one. None: the communicator makes its own.
        store: store in which the ranks meet, for groups that torch.distributed does not know, such as torchft's. Only
            these ranks may use it. Ranks are then numbered within the group.

    Constructing one is itself a collective: every rank of the group must do it, in the same order
    relative to its other collectives. It opens a process group of its own over the same ranks, so
    that nothing else gets between its messages, and refuses (MismatchError) ranks that differ in
    version or configuration.

    The collectives work in place like torch.distributed's, on tensors and arrays of any shape: those of torch, numpy,
    CuPy, or of another library with `__dlpack__`. Results appear in the caller's own array. What is not contiguous is
    copied for the call; `Counters.copied_bytes` counts that. A complex number is a pair of floats, each of which keeps
    the bound; sizes in messages and of `parts` count these floats.

    With `async_op=True` they return a handle with `wait()`, and run one after another on a
    background thread, in the order they were made. Results are bit-identical on all ranks. For
    float32 and float64 the error of an element is at most `eb` times the ranks summed (SUM), or
    `eb` (AVG, gathers, broadcasts), where `eb` is what the configured bound comes to in that
    element's block. Sums in float16 and bfloat16 add the rounding of the result. With kind lossless
    the result is a plain sum of floats.

    With `transport.hierarchy`, the ranks of a node add up uncompressed first, and compressed frames
    travel between nodes. The bound is the same, but for the rounding of the sums inside nodes.

    Names are those of torch 2.13 and newer. Torch's older names are aliases: `reduce_scatter_tensor` is
    `reduce_scatter_single`, `all_gather_into_tensor` is `all_gather_single`.

    Calls that compression can't serve, or would not make shorter, run plain. `stats` counts them by
    reason (`reasons.Bypass`). `role` says what a tensor is: "gradient", "parameter" or "activation".
    Roles that the configuration does not enable go plain; tensors without a role are compressed.
    Policies and error feedback know a tensor by its `name`, or by the names of its `parts` if it
    consists of several parameters. `end_step` ends a step of the training.

    Waiting may raise PeerError (a peer died or fell silent), MismatchError (ranks made different
    calls) or FrameError (damaged data). After any of them the communicator is broken: it closes
    its connections, so that peers notice too, and further calls raise at once.

    Attributes:
        config: effective settings. With several ranks every `auto` has been replaced by a number; on GPUs, after the
            first call.
        training: state that outlives a step. Saved with a checkpoint.
        nodes: the ranks of each node; None if no sums are formed inside nodes.
    """

    def __init__(
        self,
        config=None,
        group: dist.ProcessGroup | None = None,
        training: Training | None = None,
        store: dist.Store | None = None,
    ):
        self.group = require_group(group) if store is None or group is None else group
        self.rank = self.group.rank()
        self.world_size = self.group.size()
        if store is None:
            self.ranks, self._backend = dist.get_process_group_ranks(self.group), dist.get_backend(self.group)
        else:
            self.ranks, self._backend = list(range(self.world_size)), self.group.name()
        self.nodes: Nodes | None = None
        group = self.group
        self._plain = TorchCollectives(lambda: group)  # not self.group: a circle would keep this object alive
        self._queue: CallQueue | None = None  # with one rank there is nothing to wait for
        self._open_on_gpus: Config | None = None  # the settings, if GPUs measure what they leave open
        if self.world_size == 1:
            self.config = self._prepared(config, training)
        else:
            self._connect(config, training, store)
        trip = self.transport.trip_seconds if self.world_size > 1 else 0.0
        known = {"communicator": self._numbered(), "trip_seconds": trip}
        self._group = Group(self.training, self.config, self.ranks, self.rank, self.nodes, **known)
        self._on_host = HostCalls(self._group, self._queue, self._plain)
        self._on_gpus: dict[torch.device, GpuCalls] = {}  # made by the first call on each
        self._directions = None if self._queue is None else Directions(self._group, self._queue, self.group, *self._met)

    def _connect(self, config, training: Training | None, store: dist.Store | None) -> None:
        """Meet the other ranks, compare settings, connect, and measure what the settings leave open."""
        store = meet(self.ranks, self.rank, "communicator") if store is None else store
        self.config = self._compared(config, training, store)
        places = find_places(store, self.rank, self.world_size)
        self.nodes = find_nodes(self.config.transport.hierarchy, places, self.rank, self.world_size)
        seconds = self.config.transport.timeout_seconds
        timeout = timeout_of(self.group) if seconds is None else timedelta(seconds=seconds)
        self._met = store, timeout
        on_gpus = torch.cuda.is_available() and "nccl" in self._backend
        self._open_on_gpus = self.config if self.config.leaves_link_open else None
        are_apart = len(places.hosts) > 1 and not on_gpus
        measures_link = self.config.leaves_link_open and are_apart
        channels, nccl_groups = self.config.transport.connections, 1
        if channels == "auto":
            channels = MOST_CONNECTIONS if measures_link else 1
        else:
            nccl_groups = channels
        nccl_class = nccl_class_of(self.group)
        routes = Routes(store, self.rank, self.world_size, timeout, channels, nccl_groups, nccl_class)
        self._queue = CallQueue(routes, f"ncz-communicator-{self.rank}")
        if self.nodes is not None:
            self.nodes = with_memory(self.nodes, self.transport)
        if are_apart:
            measure_trip(self.measured_ranks())
        if self.config.needs_measuring:
            self.config = measure_open_settings(self.measured_ranks(), on_gpus)
        elif measures_link:
            self.config = measure_link(self.measured_ranks(), places.machines)
            self.transport.close_unused()
        if self.config.transport.link_gbps is not None:
            self.transport.link_gbps = self.config.transport.link_gbps

    def end_step(self) -> Counters:
        """A step of the training is over: see `Training.end_step`. All handles must have been waited for."""
        return self.training.end_step()

    @property
    def stats(self) -> Statistics:
        """What was counted."""
        return self.training.stats

    @property
    def transport(self) -> Transport:
        """What carries frames and agreements between all ranks, for tensors in host memory."""
        return self._queue.routes.of(HOST).transport

    def measured_ranks(self, config: Config | None = None) -> TorchRanks:
        """The ranks of this communicator, as `tuning.measure` measures them.

        Args:
            config: what is left open in it is to be chosen; None for that of the communicator.
        """
        config = self.config if config is None else config
        return TorchRanks(self._queue, self._plain, config, self.ranks, self.rank, self.nodes)

    # ---------------------------------------------------------------- life cycle

    def close(self) -> None:
        """Finish what was asked for and free the connections. Safe to call twice."""
        if self.world_size > 1:
            self._queue.close()

    def abort(self) -> None:
        """Give up what is under way, and close the connections at once: peers get a PeerError. Safe to call twice."""
        if self.world_size > 1:
            self._queue.abort(PeerError("this communicator was aborted"))

    @property
    def error(self) -> NczError | None:
        """What broke this communicator, so that further calls raise it; None as long as it is whole."""
        return self._queue.error if self.world_size > 1 else None

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _numbered(self) -> int:
        """The number of this communicator among those of the training between its ranks, on all of them the same."""
        number = torch.tensor([self.training.free_number(self.ranks)], dtype=torch.int64, device="cpu")
        if self.world_size > 1:
            self.transport.start_max(number, Counters()).wait()
        self.training.number(self, int(number))
        return int(number)

    def _prepared(self, source, training: Training | None) -> Config:
        """The configuration with what its tuning file says. From here on there is a training, with its files open."""
        if training is not None and not isinstance(training, Training):
            raise ConfigError(f"training must be a Training, got {training!r}: pass settings as config")
        config = training.config if source is None and training is not None else Config.load(source)
        if training is not None:
            _require_settings_of(training, config)
        self.training = Training(config) if training is None else training
        if self.world_size > 1:
            config = apply_tuning_file(config, self.world_size)
        self.training.begin(ranks=self.world_size, backend=self._backend, link_gbps=config.transport.link_gbps)
        return config

    def _compared(self, source, training: Training | None, store: dist.Store) -> Config:
        """Configuration of this rank, after all ranks were found to have the same. If one rank fails, all raise."""
        try:
            config = self._prepared(source, training)
        except NczError as error:
            with suppress(MismatchError):  # only so that the other ranks know
                compare_ranks(store, self.ranks, self.rank, error)
            raise
        compare_ranks(store, self.ranks, self.rank, config)
        return config

    # ---------------------------------------------------------------- running

    def _start(self, calls: list[Call], outputs: Sequence[Tensor], async_op: bool) -> Handle | None:
        """Begin calls, and wait for them unless `async_op`. Returns a handle that gives `outputs` if `async_op`."""
        calls_there = self._on(calls[0].input.device)

        # All are decided before any begins, as one may be refused.
        for call in calls:
            calls_there.decide(call)
        if len(calls) == 1:
            handle = calls_there.begin(calls[0], async_op)
            if async_op:
                return giving(handle, outputs, calls[0].output)
        else:
            handles = [calls_there.begin(call, async_op=True).giving(call.output) for call in calls]
            handle = Handles(handles, outputs)
            if async_op:
                return handle
        if handle is not None:
            handle.wait()
        return None

    def _on(self, device: torch.device) -> HostCalls | GpuCalls:
        """What begins calls on tensors on this device."""
        if device == HOST:
            return self._on_host
        if device not in self._on_gpus:
            group = self._group.for_gpus()
            self._on_gpus[device] = GpuCalls(group, device, self._queue, self.group, self._open_on_gpus)
        return self._on_gpus[device]

    def require_open(self) -> None:
        """Raise what broke this communicator, if anything did, and UnsupportedError in a fork of its process."""
        if self.world_size > 1:
            self._queue.require_open()

    def refuse(self, collective: str) -> None:
        """Tell the other ranks, which would wait for it, that this one can't make its call.

        Nobody waits for them here: those whose GPUs carry the call without the host compare nothing before a later one.
        """
        if self.world_size > 1:
            with suppress(NczError):  # what matters is why it was refused
                tell(self._queue, self._group, collective, refusal(self._group.calls))


def _require_settings_of(training: Training, config: Config) -> None:
    """Raise ConfigError if settings that belong to the training differ: its own would count."""
    for section in ("quantizer", "policies", "steps", "guard"):
        if getattr(config, section) != getattr(training.config, section):
            raise ConfigError(
                f"{section}: config and training differ here, and the training's settings would count: pass "
                "config=None, or make the Training with this configuration"
            )
