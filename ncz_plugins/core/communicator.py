"""Compressed collectives with torch.distributed's signatures: the one way into the core."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .call import Call, Joined, Pieces, slices_of
from .call_description import checksum_of_list, refusal
from .call_queue import CallQueue
from .config import Config
from .errors import ConfigError, MismatchError, NczError, OutOfMemoryError, PeerError, UnsupportedError
from .group import Group
from .on_gpu import GpuCalls
from .on_host import HostCalls
from .run import tell
from .runtime.device import HOST, require_tensor
from .runtime.handle import Handle, Handles
from .runtime.inference_mode import ordinary, outside_of_inference_mode
from .runtime.statistics import Counters, Statistics
from .training.baseline import Baseline
from .training.policy import ParameterSlice
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
from .tuning.measure import TorchRanks, measure_link, measure_open_settings
from .tuning.tuning_file import apply_tuning_file


class Communicator:
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

    The collectives work in place like torch.distributed's, on contiguous tensors of any shape.
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
        number = self._numbered()
        self._group = Group(self.training, self.config, self.ranks, self.rank, self.nodes, communicator=number)
        self._on_host = HostCalls(self._group, self._queue, self._plain)
        self._on_gpus: dict[torch.device, GpuCalls] = {}  # made by the first call on each

    def _connect(self, config, training: Training | None, store: dist.Store | None) -> None:
        """Meet the other ranks, compare settings, connect, and measure what the settings leave open."""
        store = meet(self.ranks, self.rank, "communicator") if store is None else store
        self.config = self._compared(config, training, store)
        hosts, machines = find_places(store, self.rank, self.world_size)
        self.nodes = find_nodes(self.config.transport.hierarchy, hosts, store, self.rank, self.world_size)
        seconds = self.config.transport.timeout_seconds
        timeout = timeout_of(self.group) if seconds is None else timedelta(seconds=seconds)
        on_gpus = torch.cuda.is_available() and "nccl" in self._backend
        self._open_on_gpus = self.config if self.config.leaves_link_open else None
        measures_link = self.config.leaves_link_open and len(hosts) > 1 and not on_gpus
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
        if self.config.needs_measuring:
            self.config = measure_open_settings(self.measured_ranks(), on_gpus)
        elif measures_link:
            self.config = measure_link(self.measured_ranks(), machines)
            self.transport.close_unused()
        if self.config.transport.link_gbps is not None:
            self.transport.link_gbps = self.config.transport.link_gbps

    # ---------------------------------------------------------------- collectives

    def all_reduce(
        self,
        tensor: Tensor,
        op=dist.ReduceOp.SUM,
        async_op: bool = False,
        *,
        role: str | None = None,
        name: str | None = None,
        parts: Sequence[ParameterSlice] | None = None,
        kept_as: Sequence[ParameterSlice] | None = None,
    ):
        """Sum `tensor` over ranks (or average, for AVG), in place on every rank.

        Parts that are treated differently are reduced in one call for each treatment, from and to memory of their own.

        Args:
            tensor: contiguous, of any shape, the same number of elements on all ranks. Floats of 16, 32 and 64 bits are
                compressed; integers and bool go plain.
            op: of torch.distributed. Sums and averages are compressed, others go plain.
            role: "gradient", "parameter" or "activation"; tensors of a role that the configuration does not enable go
                plain. None: the tensor is compressed.
            name: the parameter's name, by which policies and error feedback know the tensor.
            parts: the parameters that the tensor consists of, in order, where there are several.
            kept_as: keys for error feedback, if they should differ from `name`. Ranks may use different keys.

        Returns: a handle if `async_op`, else None.

        Raises ValueError for a role or parts that can't be, UnsupportedError for a tensor that can't be served,
        MismatchError on every rank where ranks make different calls, PeerError, FrameError, OutOfMemoryError; with
        `async_op` the last four when the handle is waited for. So do all collectives here.
        """
        with _Beginning(self, "all_reduce"):
            parts = _parts("all_reduce", tensor, name, parts)
            _require_kept("all_reduce", tensor, name, kept_as)
            calls = self._sums([ordinary(tensor)], op, [parts], role, kept_as)
            return self._start(calls, [tensor], async_op)

    def all_reduce_coalesced(
        self,
        tensors: Sequence[Tensor],
        op=dist.ReduceOp.SUM,
        async_op: bool = False,
        *,
        role: str | None = None,
        names: Sequence[str | None] | None = None,
        parts: Sequence[Sequence[ParameterSlice]] | None = None,
    ):
        """Sum each of `tensors` over ranks (or average, for AVG), in place on every rank, in as few calls as possible.

        There is one call for each dtype and treatment, whose tensors are copied together and back. It counts as one
        call, also where `transport.min_bytes` is compared with its size. All ranks must pass equally many tensors of
        the same sizes and dtypes, on one device.

        Args:
            names: for each tensor what `all_reduce` takes as `name`.
            parts: for each tensor what `all_reduce` takes as `parts`.

        Returns: a handle if `async_op`, else None. Its future gives the list of tensors.
        """
        with _Beginning(self, "all_reduce_coalesced"):
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            parts = _parts_of_each("all_reduce_coalesced", tensors, names, parts)
            calls = self._sums([ordinary(each) for each in tensors], op, parts, role)
            return self._start(calls, tensors, async_op)

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        op=dist.ReduceOp.SUM,
        async_op: bool = False,
        *,
        role: str | None = None,
        name: str | None = None,
        parts: Sequence[ParameterSlice] | None = None,
        kept_as: Sequence[ParameterSlice] | None = None,
    ):
        """Sum `input` over ranks (or average, for AVG) and leave the rank's own of world_size equal parts in `output`.

        Args:
            output: contiguous, [n] elements in any shape, on the device of `input` and of its dtype.
            input: contiguous, [world_size * n] elements in any shape; dtypes as of `all_reduce`.
            parts: those of `input`, all of which must be treated alike.
            kept_as: see `all_reduce`.

        Returns: a handle if `async_op`, else None.

        Raises what `all_reduce` does; ValueError for other sizes, UnsupportedError for parts that are treated
        differently.
        """
        with _Beginning(self, "reduce_scatter_single"):
            self._check_sizes("reduce_scatter_single", whole=input, part=output)
            parts = _parts("reduce_scatter_single", input, name, parts)
            _require_kept("reduce_scatter_single", input, name, kept_as)
            memory = ordinary(input), ordinary(output)
            call = Call("reduce_scatter_single", *memory, op, role=role, parts=parts, residual_parts=kept_as)
            return self._start([call], [output], async_op)

    reduce_scatter_tensor = reduce_scatter_single  # torch's name before 2.13

    def all_gather_single(
        self,
        output: Tensor,
        input: Tensor,
        async_op: bool = False,
        *,
        role: str | None = None,
        name: str | None = None,
        baseline: Baseline | None = None,
    ):
        """Put the `input` of every rank into `output`, in rank order.

        A rank's own part comes out with the same loss as on its peers, so that all ranks agree.

        Args:
            output: contiguous, [world_size * n] elements in any shape, on the device of `input` and of its dtype.
            input: contiguous, [n] elements in any shape; dtypes as of `all_reduce`. It may be this rank's part of
                `output`.
            baseline: send what has changed since the last call with the same baseline, without loss. `output` still
                holds that call's result, but for what this rank has changed in its own part.

        Returns: a handle if `async_op`, else None.

        Raises what `all_reduce` does, and ValueError for other sizes.
        """
        with _Beginning(self, "all_gather_single"):
            self._check_sizes("all_gather_single", whole=output, part=input)
            parts = _parts("all_gather_single", output, name, None)
            memory = ordinary(input), ordinary(output)
            call = Call("all_gather_single", *memory, role=role, parts=parts, baseline=baseline)
            return self._start([call], [output], async_op)

    all_gather_into_tensor = all_gather_single  # torch's name before 2.13

    def broadcast(
        self,
        tensor: Tensor,
        src: int,
        async_op: bool = False,
        *,
        role: str | None = None,
        name: str | None = None,
        baseline: Baseline | None = None,
    ):
        """Replace `tensor` on every rank by what the global rank `src` holds.

        It changes on `src` as well, by the same loss as on its peers, so that all ranks agree.

        Args:
            tensor: contiguous, of any shape, the same number of elements on all ranks; dtypes as of `all_reduce`.
            baseline: as in `all_gather_single`.

        Returns: a handle if `async_op`, else None.

        Raises what `all_reduce` does, and UnsupportedError if `src` is no rank of the group.
        """
        with _Beginning(self, "broadcast"):
            if src not in self.ranks:
                raise UnsupportedError(
                    f"broadcast: src must be a global rank of this group, one of {self.ranks}, got {src}"
                )
            parts = _parts("broadcast", tensor, name, None)
            root, memory = self.ranks.index(src), ordinary(tensor)
            call = Call("broadcast", memory, memory, root=root, role=role, parts=parts, baseline=baseline)
            return self._start([call], [tensor], async_op)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        *,
        role: str | None = None,
        name: str | None = None,
    ):
        """Send some rows of `input` to each rank, and put the rows of each rank into `output`, in rank order.

        Each rank quantizes what it sends by steps of its own, so the error of an element is at most one bound. Rows
        that a rank keeps are copied with every bit. Compressed in host memory, and not at a fixed rate.

        Args:
            output: contiguous, at least 1-D, on the device of `input`, of its dtype, and with rows of the same size. It
                must not share memory with `input`.
            input: contiguous, at least 1-D; dtypes as of `all_reduce`.
            output_split_sizes: rows that come from each rank, 0 allowed; None: the same number from each.
            input_split_sizes: rows that go to each rank, 0 allowed; None: the same number to each.

        Returns: a handle if `async_op`, else None.

        Raises what `all_reduce` does; ValueError for split sizes that can't be; MismatchError on every rank where one
        sends another number of rows than the other one expects.
        """
        with _Beginning(self, "all_to_all_single"):
            pieces = self._pieces("all_to_all_single", output, input, output_split_sizes, input_split_sizes)
            parts = _parts("all_to_all_single", input, name, None)
            memory = ordinary(input), ordinary(output)
            call = Call("all_to_all_single", *memory, role=role, parts=parts, pieces=pieces)
            return self._start([call], [output], async_op)

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
        """The same, once it is sure that all ranks have it in common. An error of one rank ends all of them."""
        try:
            config = self._prepared(source, training)
        except NczError as error:
            with suppress(MismatchError):  # only so that the other ranks know
                compare_ranks(store, self.ranks, self.rank, error)
            raise
        compare_ranks(store, self.ranks, self.rank, config)
        return config

    # ---------------------------------------------------------------- running

    def _sums(
        self,
        tensors: list[Tensor],
        op,
        parts: list[Sequence[ParameterSlice]],
        role: str | None,
        kept_as: Sequence[ParameterSlice] | None = None,
    ) -> list[Call]:
        """The calls that all-reduce tensors: one for each dtype and treatment, in the order in which they come first.

        Tensors of one call are copied together and back.
        """
        # One tensor that is one parameter: at once, as small calls are over before all below would be.
        if len(tensors) == 1 and len(parts[0]) == 1:
            return [Call("all_reduce", *2 * tensors, op, role=role, parts=parts[0], residual_parts=kept_as)]
        together = checksum_of_list(tensors) if len(tensors) > 1 else 0
        by_dtype: dict[torch.dtype, list[int]] = {}
        for at, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(at)
        calls = []
        for dtype, places in by_dtype.items():
            own = [part for at in places for part in parts[at]]
            alike = self.training.grouped(own, dtype, role, self.ranks)

            # A tensor that stands alone and is treated as a whole needs no copy.
            if len(places) == len(alike) == 1:
                tensor = tensors[places[0]]
                call = Call("all_reduce", tensor, tensor, op, role=role, parts=own, residual_parts=kept_as)
                call.together = together
                calls.append(call)
                continue

            slices = [piece for at in places for piece in slices_of(tensors[at], parts[at])]
            for _, indices in alike:
                joined = Joined([slices[at] for at in indices])
                its_parts = [own[at] for at in indices]
                call = Call("all_reduce", joined.whole, joined.whole, op, role=role, parts=its_parts, joined=joined)
                call.residual_parts, call.together = kept_as, together
                calls.append(call)
        return calls

    def _start(self, calls: list[Call], outputs: Sequence[Tensor], async_op: bool) -> Handle | None:
        """Begin calls, and wait for them unless `async_op`. Returns a handle that gives `outputs` if `async_op`."""
        calls_there = self._on(calls[0].input.device)

        # All are decided before any begins, as one may be refused.
        for call in calls:
            calls_there.decide(call)
        if len(calls) == 1:
            handle = calls_there.begin(calls[0], async_op)
            if async_op:
                return handle.giving(*outputs)
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

    def _check_sizes(self, collective: str, whole: Tensor, part: Tensor) -> None:
        _require_one_device(collective, whole, part)
        if whole.numel() != part.numel() * self.world_size:
            larger, smaller = ("input", "output") if collective == "reduce_scatter_single" else ("output", "input")
            wanted = f"{larger} must have {self.world_size} (ranks) times the elements of {smaller}"
            raise ValueError(f"{collective}: {wanted}, got {whole.numel()} and {part.numel()}")

    def _pieces(
        self, collective: str, output: Tensor, input: Tensor, received: Sequence[int] | None, sent: Sequence[int] | None
    ) -> Pieces:
        """The rows that go to each rank and come from each. Raises ValueError and UnsupportedError."""
        _require_one_device(collective, input, output)
        if input.dim() == 0 or output.dim() == 0:
            raise ValueError(f"{collective}: input and output must have rows, got a tensor without dimensions")
        rows = [tensor.shape[1:].numel() for tensor in (input, output)]
        if rows[0] != rows[1]:
            raise ValueError(f"{collective}: rows of input and output must have one size, got {rows[0]} and {rows[1]}")
        if input.numel() and input.data_ptr() == output.data_ptr():
            raise ValueError(f"{collective}: output must have memory of its own, got that of input")
        return Pieces(
            _split_sizes(f"{collective}: input_split_sizes", sent, len(input), self.world_size),
            _split_sizes(f"{collective}: output_split_sizes", received, len(output), self.world_size),
            rows[0],
            self.rank,
        )


def _require_one_device(collective: str, one: Tensor, other: Tensor) -> None:
    """Raise UnsupportedError unless both are tensors that can be served, on one device."""
    require_tensor(one)
    require_tensor(other)
    if one.device != other.device:
        where = f"{one.device} and {other.device}"
        raise UnsupportedError(f"{collective}: both tensors must be on one device, got {where}")


def _split_sizes(what: str, sizes: Sequence[int] | None, rows: int, ranks: int) -> tuple[int, ...]:
    """Rows for each rank. Raises ValueError unless they are all of them."""
    if sizes is None:
        if rows % ranks:
            raise ValueError(f"{what} must be given, as {rows} rows are no multiple of {ranks} ranks")
        return (rows // ranks,) * ranks
    sizes = tuple(map(int, sizes))
    if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(f"{what} must be {ranks} numbers that add up to {rows} rows, got {list(sizes)}")
    return sizes


def _require_settings_of(training: Training, config: Config) -> None:
    """Raise ConfigError if settings that belong to the training differ: its own would count."""
    for section in ("quantizer", "policies", "steps", "guard"):
        if getattr(config, section) != getattr(training.config, section):
            raise ConfigError(
                f"{section}: config and training differ here, and the training's settings would count: pass "
                "config=None, or make the Training with this configuration"
            )


class _Beginning:
    """A context to begin a call in: outside of inference mode, in which nothing that lasts may be made.

    If this rank can't make its call, the others are told. Each call enters one, so it is no generator.
    """

    __slots__ = ("_communicator", "_collective", "_outside")

    def __init__(self, communicator: Communicator, collective: str):
        self._communicator = communicator
        self._collective = collective

    def __enter__(self) -> None:
        self._communicator.require_open()
        self._outside = outside_of_inference_mode()
        self._outside.__enter__()

    def __exit__(self, kind, error: BaseException | None, traceback) -> None:
        try:
            if isinstance(error, (UnsupportedError, ValueError, OutOfMemoryError)):
                self._communicator.refuse(self._collective)
        finally:
            self._outside.__exit__(kind, error, traceback)


def _require_kept(collective: str, tensor: Tensor, name: str | None, kept: Sequence[ParameterSlice] | None) -> None:
    """Raise ValueError unless error feedback can keep a tensor by these parts."""
    if kept is None:
        return
    if name is None:
        raise ValueError(f"{collective}: kept_as needs a name: pass name as well, or parts alone")
    if (elements := sum(part.length for part in kept)) != tensor.numel():
        raise ValueError(f"{collective}: kept_as must have the {tensor.numel()} elements of the tensor, got {elements}")


def _parts_of_each(
    collective: str,
    tensors: list[Tensor],
    names: Sequence[str | None] | None,
    parts: Sequence[Sequence[ParameterSlice]] | None,
) -> list[Sequence[ParameterSlice]]:
    """What each of several tensors consists of. Raises ValueError, and UnsupportedError for what can't be served."""
    for what, given in {"names": names, "parts": parts}.items():
        if given is not None and len(given) != len(tensors):
            raise ValueError(
                f"{collective}: {what} must have one entry for each of {len(tensors)} tensors, got {len(given)}"
            )
    if not tensors:
        raise ValueError(f"{collective}: tensors must hold at least one tensor, got none")
    names = [None] * len(tensors) if names is None else names
    found = [
        _parts(f"{collective}, tensor {at}", tensor, name, None if parts is None else parts[at])
        for at, (tensor, name) in enumerate(zip(tensors, names))
    ]
    if len(devices := dict.fromkeys(str(tensor.device) for tensor in tensors)) > 1:
        raise UnsupportedError(f"{collective}: all tensors must be on one device, got {' and '.join(devices)}")
    return found


def _parts(
    collective: str, tensor: Tensor, name: str | None, parts: Sequence[ParameterSlice] | None
) -> Sequence[ParameterSlice]:
    """What a tensor consists of: one parameter, called `name`, unless told."""
    require_tensor(tensor)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{collective}: name must be a string or None, got {name!r} ({type(name).__name__})")
    if parts is None:
        return [ParameterSlice(name, tensor.numel())]
    if name is not None:
        raise ValueError(f"{collective}: pass name or parts, not both, got name={name!r}")
    if (elements := sum(part.length for part in parts)) != tensor.numel():
        raise ValueError(f"{collective}: parts must have the {tensor.numel()} elements of the tensor, got {elements}")
    return parts
