"""What a collective is before it runs: what was asked for (`Request`), and how it will be carried out (`Call`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from .bypass import Bypass
from .codec.layout import Layout, Window
from .config import Config
from .joined import Joined
from .runtime.statistics import Counters
from .training.baseline import Baseline
from .training.error_feedback import Feedback
from .training.policy import ParameterSlice
from .transport.base import PlainCollectives
from .transport.comparison import place_of

# Bytes that a bandwidth-optimal collective makes each rank send, on average, for `nbytes` of input.
_PLAIN_BYTES = {
    "all_reduce": lambda nbytes, n: 2 * nbytes * (n - 1) // n,
    "reduce_scatter_tensor": lambda nbytes, n: nbytes * (n - 1) // n,
    "all_gather_into_tensor": lambda nbytes, n: nbytes * (n - 1),
    "broadcast": lambda nbytes, n: nbytes * (n - 1) // n,
}

COLLECTIVES = tuple(_PLAIN_BYTES)
OPS = tuple(getattr(dist.ReduceOp, op) for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"))


def plain_wire_bytes(collective: str, nbytes: int, world_size: int) -> int:
    """What each rank sends, on average, when the collective runs plain on `nbytes` of input."""
    return _PLAIN_BYTES[collective](nbytes, world_size)


@dataclass(slots=True, eq=False)  # not frozen: where caches are cold, that takes 15 us longer to make, in every call
class Request:
    """A collective as its caller asks for it. Nobody changes it.

    Attributes:
        collective: its name in torch.distributed: all_reduce, reduce_scatter_tensor, all_gather_into_tensor, broadcast.
        input: what this rank contributes, of any shape.
        output: where the result goes, of any shape; the same tensor where the collective works in place.
        op: torch.distributed's, of a sum; None for gathers and broadcasts.
        scale: what a sum is multiplied by, on top of what `op` says.
        root: the rank within the group that a broadcast starts from.
        role: what the tensor is: "gradient", "parameter" or "activation"; None: compress it whatever it is.
        parts: what the larger of both tensors consists of, for policies.
        residual_parts: the same by the names that error feedback knows them by, if these are others.
        baseline: what a gather or broadcast sends the changes from, without loss; None: all of it is sent.
        joined: what `input`, which is `output` then, is put together from; None: it is the caller's own.
        together: a checksum of the dtypes and sizes of all tensors that were passed at once; 0: there was one.
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
    baseline: Baseline | None = None
    joined: Joined | None = None
    together: int = 0

    @property
    def kind(self) -> tuple:
        """What requests must have in common for ranks to tell the same of them, and often to serve them alike."""
        larger, op = self.larger, None if self.op is None else place_of(self.op, OPS)
        tensors = self.input.dtype, self.output.dtype, larger.numel(), larger.is_cuda
        return self.collective, self.role, op, tensors, self.root, self.scale, self.together

    @property
    def memory(self) -> list[Tensor]:
        """All tensors that a call reads or writes."""
        return [self.input, self.output, *([] if self.joined is None else self.joined.pieces)]

    def pieces_in_place(self) -> AbstractContextManager:
        """A context in which `input` holds what it is put together from, and after which that has its result."""
        return nullcontext() if self.joined is None else self.joined.filled()

    @property
    def larger(self) -> Tensor:
        """The tensor that holds what all ranks contribute or get."""
        return self.output if self.collective == "all_gather_into_tensor" else self.input

    def start_plain(self, plain: PlainCollectives):
        """Start the uncompressed collective. Returns its work, which has `wait`."""
        match self.collective:
            case "all_reduce":
                return plain.all_reduce(self.output, self.op, self.scale)
            case "reduce_scatter_tensor":
                return plain.reduce_scatter_tensor(self.output, self.input, self.op)
            case "all_gather_into_tensor":
                return plain.all_gather_into_tensor(self.output, self.input)
            case _:
                return plain.broadcast(self.output, self.root)


@dataclass(frozen=True)
class Call:
    """One collective, ready to run.

    Attributes:
        collective: its name in torch.distributed.
        config: the settings of this call.
        layout: how the whole tensor is cut, of which `source` and `output` hold parts.
        source: what this rank contributes.
        output: where the result goes; may be the memory of `source`.
        measured: segments of `source` that count in the agreement on quantization steps.
        schedule: takes the transport, the codec and the counters.
        plain: starts the uncompressed collective, for when it turns out that compression can't serve: takes
            `PlainCollectives`, and returns a work.
        number: how many compressed calls the ranks have made, this one included. A stochastic quantizer draws its
            random numbers by it.
        within_node: what the ranks of a node do among themselves first, once it is sure that all ranks make
            the same call: takes the transport and the counters, and returns what is contributed in place of `source`.
        addends: how many values are summed for each element: one of each rank, or of each node, as a sum of its ranks'.
        addend: the number of this rank's among them.
        divisor: what the sum is divided by.
        root: rank that a broadcast starts from.
        feedback: adds what quantizing has lost before, and keeps what it loses now; None where that is not wanted.
        described: what all ranks must have in common, see call_description.py. Nothing is compared if it is empty.
        role: what the tensor is, if that was said.
        baseline: what the changes are sent from; None: all is sent.
        verify_as: what to call this sum when the guard compares it with the uncompressed one; None: it does not.
    """

    collective: str
    config: Config
    layout: Layout
    source: Window
    output: Window
    measured: range
    schedule: Callable
    plain: Callable[[PlainCollectives], object]
    number: int = 1
    within_node: Callable[..., Window] | None = None
    addends: int = 1
    addend: int = 0
    divisor: float = 1
    root: int = 0
    feedback: Feedback | None = None
    role: str | None = None
    baseline: Baseline | None = None
    verify_as: str | None = None
    described: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def kind(self) -> str:
        """What calls must have in common to be expected to go alike."""
        quantizer = self.config.quantizer
        bound = f"{quantizer.kind_in_effect} {quantizer.mode} {quantizer.value}"
        dtype = self.source.data.dtype
        return f"{self.collective} {self.layout.lengths} {dtype} {self.root} {self.divisor} {bound}"

    def counters(self, world_size: int) -> Counters:
        """Those of a call that begins."""
        nbytes = self.source.data.nbytes
        return Counters(calls=1, bytes_in=nbytes, plain_bytes=plain_wire_bytes(self.collective, nbytes, world_size))


class PlainCall(NamedTuple):
    """An uncompressed collective, ready to run.

    Attributes:
        bypass: why it goes plain.
        described: what all ranks must have in common, see call_description.py.
    """

    request: Request
    bypass: Bypass
    described: Mapping[str, int]
