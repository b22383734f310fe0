"""A call: one collective, from its caller's arguments to its counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .bypass import Bypass
from .codec.layout import Layout, Window
from .config import Config
from .errors import memory_errors
from .runtime.forecast import Forecast
from .runtime.recorded import NEVER, RecordedCall
from .runtime.statistics import Counters
from .training.baseline import Baseline
from .training.error_feedback import Feedback
from .training.policy import ParameterSlice
from .training.rotation import Rotation
from .transport.base import PlainCollectives
from .transport.comparison import place_of

# Bytes that a bandwidth-optimal collective makes each rank send, on average, for `nbytes` of input.
_PLAIN_BYTES = {
    "all_reduce": lambda nbytes, n: 2 * nbytes * (n - 1) // n,
    "reduce_scatter_single": lambda nbytes, n: nbytes * (n - 1) // n,
    "reduce": lambda nbytes, n: nbytes * (n - 1) // n,
    "all_gather_single": lambda nbytes, n: nbytes * (n - 1),
    "broadcast": lambda nbytes, n: nbytes * (n - 1) // n,
    "all_to_all_single": lambda nbytes, n: nbytes * (n - 1) // n,
}


class Exchange(NamedTuple):
    """What messages say of a collective in which ranks exchange pieces and nothing is summed.

    Attributes:
        unit: what pieces are counted in.
        must_agree: what has to agree.
    """

    unit: str
    must_agree: str


EXCHANGES = {
    "all_to_all_single": Exchange("rows", "input_split_sizes of one rank and output_split_sizes of the others"),
    "all_to_all": Exchange("elements", "input_tensor_list of one rank and output_tensor_list of the others"),
    "gather": Exchange("elements", "tensor of each rank and gather_list of the rank that gathers"),
    "scatter": Exchange("elements", "scatter_list of the rank that scatters and tensor of each rank"),
    "send_recv": Exchange("elements", "the sizes of both tensors"),
}
COLLECTIVES = tuple({**_PLAIN_BYTES, **EXCHANGES})
_NOTHING_TO_COPY = nullcontext()
OPS = tuple(getattr(dist.ReduceOp, op) for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"))


def plain_wire_bytes(collective: str, nbytes: int, world_size: int) -> int:
    """Bytes that each rank sends, on average, when the collective runs plain on `nbytes` of input."""
    return _PLAIN_BYTES[collective](nbytes, world_size)


class Pieces(NamedTuple):
    """What a rank sends to each rank, and gets from each, in a collective that sums nothing.

    Attributes:
        sent: rows of `input` that go to each rank, in rank order.
        received: rows of `output` that come from each rank, in rank order.
        row: elements of a row.
        rank: this rank.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    row: int
    rank: int

    def elements_sent(self) -> list[int]:
        return [rows * self.row for rows in self.sent]

    def elements_received(self) -> list[int]:
        return [rows * self.row for rows in self.received]


class Joined:
    """Memory for pieces one behind the other.

    It is filled when the call runs, not when it is asked for: calls before it may still write to the pieces.

    Args:
        pieces: of any shapes and strides, of one dtype, on one device. Autograd knows nothing of them.
        is_read: whether the call reads the pieces.
        is_written: whether it writes to them.

    Attributes:
        pieces: these.
        whole: the memory, [elements of all pieces].
    """

    def __init__(self, pieces: Sequence[Tensor], is_read: bool = True, is_written: bool = True):
        self.pieces = pieces
        self._is_read = is_read
        self._is_written = is_written
        with memory_errors(f"joining {len(pieces)} tensors"):
            self.whole = pieces[0].new_empty(sum([piece.numel() for piece in pieces]))

    @contextmanager
    def filled(self) -> Iterator[None]:
        """A context in which `whole` holds the pieces. Its values are theirs afterwards, unless something is raised."""
        parts = self.whole.split([piece.numel() for piece in self.pieces])
        if self._is_read and all(piece.dim() == 1 for piece in self.pieces):
            torch.cat(self.pieces, out=self.whole)
        elif self._is_read:
            for piece, part in zip(self.pieces, parts):
                part.view(piece.shape).copy_(piece)
        yield
        if self._is_written:
            for piece, part in zip(self.pieces, parts):
                piece.copy_(part.view(piece.shape))

    @property
    def copied_bytes(self) -> int:
        """Bytes that a call copies."""
        return self.whole.nbytes * (self._is_read + self._is_written)


def joined_for(
    pieces: Sequence[Tensor], is_read: bool = False, is_written: bool = False
) -> tuple[Tensor, tuple[Joined, ...]]:
    """The elements of all pieces as one tensor, and what copies them if that is memory of its own.

    Contiguous pieces that lie one behind the other already, as those of `tensor.chunk` do, need no copy.

    Args:
        pieces, is_read, is_written: see `Joined`.
    """
    found = _one_behind_the_other(pieces)
    if found is not None:
        return found, ()
    joined = Joined(pieces, is_read, is_written)
    return joined.whole, (joined,)


def _one_behind_the_other(pieces: Sequence[Tensor]) -> Tensor | None:
    """The memory of pieces that lie one behind the other in one storage; None if they don't."""
    filled = [piece for piece in pieces if piece.numel()]
    if not filled:
        return pieces[0]
    first, elements = filled[0], 0
    for piece in filled:
        if not piece.is_contiguous():
            return None
        same_storage = piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same_storage or piece.storage_offset() != first.storage_offset() + elements:
            return None
        elements += piece.numel()
    return first.as_strided([elements], [1])


def slices_of(tensor: Tensor, parts: Sequence[ParameterSlice]) -> tuple[Sequence[Tensor], tuple[Joined, ...]]:
    """The parts of a tensor as views of it, which autograd knows nothing of, and what copies it if it is strided.

    Several parts of a strided tensor are no views of it, but of a copy.
    """
    tensor, copies = tensor.detach(), ()
    if not tensor.is_contiguous():
        if len(parts) == 1:
            return [tensor], ()
        copies = (Joined([tensor]),)
        tensor = copies[0].whole
    return tensor.view(-1).split([part.length for part in parts]), copies


@dataclass(slots=True, eq=False)  # not frozen: where caches are cold, that takes 15 us longer to make, in every call
class Call:
    """One collective, from its caller's arguments to its counters.

    The caller's arguments:
        collective: one of COLLECTIVES: torch's name from 2.13 on, or send_recv for a send and its recv, which are one
            call of two ranks.
        input: what this rank contributes, of any shape.
        output: where the result goes, of any shape; the same tensor where the collective works in place.
        op: torch.distributed's, of a sum; None for gathers and broadcasts.
        scale: factor of a sum, on top of what `op` says.
        root: rank within the group that a broadcast or scatter starts from, and a gather or reduce goes to.
        role: "gradient", "parameter" or "activation"; None: compressed whatever it is.
        parts: parameters that the larger of both tensors consists of, for policies.
        residual_parts: the same with the names that error feedback uses, where those differ.
        pieces: what goes to and comes from each rank, where ranks exchange pieces; None: all ranks have equal parts.
        tag: of a send and its recv, which must be equal.
        baseline: what a gather or broadcast sends the changes from, without loss; None: all of it is sent.
        joined: memory that several tensors are copied to, and which is `input` or `output` then, or both.
        together: checksum of the dtypes and sizes of all tensors that were passed at once; 0: there was one.
        is_written: whether this rank gets a result. In a reduce, only its root does.
        plain: collectives that carry the call if it goes plain after all; None: those of the transport.

    Set by `run.decide`:
        config: settings of this call.
        checksum, least_of_pieces: of these settings, see `group.Settings`.
        bypass: why the call goes plain; None if it is compressed.
        described: numbers that all ranks must have in common, see call_description.py; empty: nothing is compared.
            `run.enter` adds those that differ from call to call.

    Set by `run.enter`:
        number: compressed calls of the ranks so far, with a compressed one included.
        plan: how a compressed call is carried out; None for a plain call, and as long as ranks do not know whether they
            exchange enough for it.

    Set by `run.run`:
        counters: bytes and seconds.
        has_arrived: whether pieces travelled while ranks compared them, and `output` holds them.
        forecast: on a GPU, of the lengths of its frames; None where ranks exchange pieces.
        recorded: its launches on a GPU, if they are recorded or replayed.
    """

    collective: str
    input: Tensor
    output: Tensor
    op: dist.ReduceOp | None = None
    scale: float = 1.0
    root: int = 0
    role: str | None = None
    parts: Sequence[ParameterSlice] = ()
    residual_parts: Sequence[ParameterSlice] | None = None
    pieces: Pieces | None = None
    tag: int = 0
    baseline: Baseline | None = None
    joined: Sequence[Joined] = ()
    together: int = 0
    is_written: bool = True
    plain: PlainCollectives | None = None
    config: Config | None = None
    checksum: int = 0
    least_of_pieces: int | str = 0
    bypass: Bypass | None = None
    described: Mapping[str, int] = field(default_factory=dict)
    number: int = 0
    plan: Plan | None = None
    counters: Counters | None = None
    has_arrived: bool = False
    forecast: Forecast | None = None
    recorded: RecordedCall = NEVER

    @property
    def signature(self) -> tuple:
        """What two calls must have in common for ranks to describe both alike, but for their numbers and settings."""
        op = None if self.op is None else place_of(self.op, OPS)
        # Ranks that exchange pieces decide by the pieces of all ranks, once they know them.
        elements = self.larger.numel() if self.has_equal_sizes else self.pieces.row
        tensors = self.input.dtype, self.output.dtype, elements
        return self.collective, self.role, op, tensors, self.root, self.scale, self.together

    @property
    def has_equal_sizes(self) -> bool:
        """Whether all ranks know how much travels before they ask each other."""
        return self.pieces is None or self.collective == "send_recv"

    @property
    def larger(self) -> Tensor:
        """The tensor that holds what all ranks contribute or get."""
        if self.collective == "send_recv":  # the input of one rank, and the output of the other
            return self.input if self.input.numel() else self.output
        return self.output if self.collective == "all_gather_single" else self.input

    @property
    def largest_piece(self) -> int:
        """Bytes of the largest piece that this rank sends or gets."""
        return max(max(self.pieces.sent), max(self.pieces.received)) * self.pieces.row * self.input.itemsize

    @property
    def is_verified(self) -> bool:
        """Whether the guard compares this call with the uncompressed one."""
        return self.plan is not None and self.plan.verify_as is not None

    @property
    def memory(self) -> list[Tensor]:
        """All tensors that a call reads or writes."""
        return [self.input, self.output, *(piece for joined in self.joined for piece in joined.pieces)]

    @property
    def feeds_back(self) -> bool:
        """Whether error feedback keeps what quantizing this call loses."""
        return self.op is not None and self.config.quantizer.feeds_back

    @property
    def rotates(self) -> bool:
        """Whether this call codes matrices in bases of their own."""
        return self.op is not None and self.config.quantizer.rotates

    @property
    def fed_back_parts(self) -> Sequence[ParameterSlice]:
        """Parts of the tensor by the names that error feedback uses."""
        return self.parts if self.residual_parts is None else self.residual_parts

    def copy_strided(self) -> None:
        """Let the call work on contiguous memory, which is copied from and to tensors that are not contiguous."""
        in_place = self.output is self.input
        if not self.input.is_contiguous():
            self.input = self._copied(self.input, is_written=in_place and self.is_written)
        if in_place:
            self.output = self.input
        elif not self.output.is_contiguous():  # a baseline has versions of it
            self.output = self._copied(self.output, is_read=self.baseline is not None)

    def _copied(self, tensor: Tensor, is_read: bool = True, is_written: bool = True) -> Tensor:
        """Contiguous memory in place of a tensor."""
        copy = Joined([tensor.detach()], is_read, is_written)
        self.joined = (copy, *self.joined)
        return copy.whole.view(tensor.shape)

    def pieces_in_place(self) -> AbstractContextManager:
        """A context in which `input` holds the joined tensors. Those that are written to have results afterwards."""
        return self._filled() if self.joined else _NOTHING_TO_COPY

    @contextmanager
    def _filled(self) -> Iterator[None]:
        with ExitStack() as contexts:
            for joined in self.joined:
                contexts.enter_context(joined.filled())
            yield

    def new_counters(self, world_size: int) -> Counters:
        """Counters of a call that begins."""
        nbytes, pieces = self.input.nbytes, self.pieces
        if pieces is None:
            plain_bytes = plain_wire_bytes(self.collective, nbytes, world_size)
        else:  # all but what the rank keeps
            plain_bytes = nbytes - pieces.sent[pieces.rank] * pieces.row * self.input.itemsize
        copied_bytes = sum([joined.copied_bytes for joined in self.joined]) if self.joined else 0
        return Counters(calls=1, bytes_in=nbytes, plain_bytes=plain_bytes, copied_bytes=copied_bytes)

    def plain_counters(self, world_size: int) -> Counters:
        """Counters of a call that goes plain at once."""
        counters = self.new_counters(world_size)
        counters.wire_bytes = counters.plain_bytes
        reason = self.bypass.value
        counters.bypasses, counters.bypassed_bytes = {reason: 1}, {reason: counters.plain_bytes}
        return counters

    def start_plain(self, plain: PlainCollectives):
        """Start the uncompressed collective. Returns its work, which has `wait`."""
        match self.collective:
            case "all_reduce":
                return plain.all_reduce(self.output, self.op, self.scale)
            case "reduce":
                return plain.reduce(self.output, self.root, self.op)
            case "broadcast":
                return plain.broadcast(self.output, self.root)

        # Of any shapes. Gloo wants those of one tensor to follow from those of the other.
        output, input = self.output.detach().view(-1), self.input.detach().view(-1)
        match self.collective:
            case "reduce_scatter_single":
                return plain.reduce_scatter_single(output, input, self.op)
            case "all_gather_single":
                return plain.all_gather_single(output, input)
            case _:
                pieces = self.pieces.elements_received(), self.pieces.elements_sent()
                return plain.all_to_all_single(output, input, *pieces)


@dataclass(slots=True, eq=False)  # not frozen: see `Call`
class Plan:
    """How a compressed call is carried out.

    Attributes:
        layout: how the whole tensor is cut, of which `source` and `output` hold parts.
        source: this rank's values.
        output: where the result goes; may be the memory of `source`.
        measured: segments of `source` that count in the agreement on quantization steps.
        schedule: moves frames; takes the transport, the codec and the counters.
        pieces: layout of what comes from each rank, where ranks exchange pieces; then `layout` is of what goes to each.
        number: from which random numbers follow: compressed calls of the ranks so far, this one included. Where ranks
            exchange pieces, it also depends on who they are.
        within_node: sum that the ranks of a node form first, once all ranks are known to make the same call. Takes the
            transport and the counters, and returns what replaces `source`.
        addends: values that are summed for each element: one of each rank, or of each node.
        addend: number of this rank's values among them.
        divisor: what the sum is divided by.
        feedback: adds what quantizing lost before and keeps what it loses now; None: no error feedback.
        rotation: bases that matrices are coded in; then `source` and `output` are replaced by memory of the call's own.
        verify_as: name of this sum when the guard compares it with the uncompressed one; None: it is not verified.
    """

    layout: Layout
    source: Window
    output: Window
    measured: range
    schedule: Callable
    pieces: Layout | None = None
    number: int = 1
    within_node: Callable[..., Window] | None = None
    addends: int = 1
    addend: int = 0
    divisor: float = 1
    feedback: Feedback | None = None
    rotation: Rotation | None = None
    verify_as: str | None = None
