"""The collectives of a Communicator: torch.distributed's signatures, which become calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .arguments import (
    exchanged_parts,
    flat,
    for_root_alone,
    list_of_root,
    parts_of,
    parts_of_each,
    pieces_of,
    pieces_of_lists,
    require_kept,
    require_sizes,
    root_of,
    tensors_of_list,
)
from .arrays import is_array, tensor_of
from .call import Call, Joined, joined_for, slices_of
from .call_description import checksum_of_list
from .errors import OutOfMemoryError, UnsupportedError
from .runtime.handle import Handle
from .runtime.inference_mode import outside_of_inference_mode
from .training.baseline import Baseline
from .training.policy import ParameterSlice
from .training.state import Training


class Collectives:
    """The collectives of one process group. `Communicator` begins and runs the calls that are made here.

    Attributes:
        rank: this rank's number within the group.
        world_size: number of ranks.
        ranks: their global ranks.
        training: see `Communicator`.
    """

    rank: int
    world_size: int
    ranks: list[int]
    training: Training

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
            tensor: or an array, of any shape, the same number of elements on all ranks. Floats of 16, 32 and 64 bits
                and complex numbers are compressed; integers and bool go plain.
            op: of torch.distributed. Sums and averages are compressed, others go plain.
            role: "gradient", "parameter" or "activation"; tensors of a role that the configuration does not enable go
                plain. None: the tensor is compressed.
            name: the parameter's name, by which policies and error feedback know the tensor.
            parts: the parameters that the tensor consists of, in order, where there are several.
            kept_as: keys for error feedback, if they should differ from `name` or the names of `parts`; beside `parts`
                one for each. Ranks may use different keys.

        Returns: a handle if `async_op`, else None.

        Raises ValueError for a role or parts that can't be, UnsupportedError for a tensor that can't be served,
        MismatchError on every rank where ranks make different calls, PeerError, FrameError, OutOfMemoryError; with
        `async_op` the last four when the handle is waited for. So do all collectives here.
        """
        with Beginning(self, "all_reduce"):
            memory = tensor_of(tensor, op)
            parts = parts_of("all_reduce", memory, name, parts)
            require_kept("all_reduce", parts, kept_as)
            calls = self._sums([memory], op, [parts], role, kept_as)
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
        with Beginning(self, "all_reduce_coalesced"):
            tensors = [tensors] if is_array(tensors) else list(tensors)
            memory = [tensor_of(each, op) for each in tensors]
            parts = parts_of_each("all_reduce_coalesced", memory, names, parts)
            calls = self._sums(memory, op, parts, role)
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
            output: [n] elements in any shape, on the device of `input` and of its dtype. May be a part of `input`.
            input: [world_size * n] elements in any shape; dtypes as of `all_reduce`.
            parts: those of `input`. There is a call for each treatment, as of `all_reduce`, if what goes to each rank
                consists of parts of the same lengths and treatments.
            kept_as: see `all_reduce`.

        Returns: a handle if `async_op`, else None.

        Raises what `all_reduce` does; ValueError for other sizes, and for an output that overlaps several parts of
        `input`; UnsupportedError for parts that are treated differently if ranks get
        other parts.
        """
        with Beginning(self, "reduce_scatter_single"):
            source, memory = tensor_of(input, op, is_written=False), tensor_of(output)
            require_sizes("reduce_scatter_single", self.world_size, whole=source, part=memory)
            parts = parts_of("reduce_scatter_single", source, name, parts)
            require_kept("reduce_scatter_single", parts, kept_as)
            calls = self._scattered_sums(source, memory, op, parts, role, kept_as)
            return self._start(calls, [output], async_op)

    reduce_scatter_tensor = reduce_scatter_single  # torch's name before 2.13

    def reduce(
        self,
        tensor: Tensor,
        dst: int | None = None,
        op=dist.ReduceOp.SUM,
        async_op: bool = False,
        *,
        group_dst: int | None = None,
        role: str | None = None,
        name: str | None = None,
        parts: Sequence[ParameterSlice] | None = None,
        kept_as: Sequence[ParameterSlice] | None = None,
    ):
        """Sum `tensor` over ranks (or average, for AVG), in place on rank `dst`, which gets the bits of an all_reduce.

        On all other ranks it stays as it is. The guard verifies no reduce.

        Args:
            tensor: as of `all_reduce`.
            dst: a global rank; None: 0.
            group_dst: the rank within the group, instead of `dst`.
            parts: see `all_reduce`; all must be treated alike.

        Returns: a handle if `async_op`, else None.

        Raises what `all_reduce` does; UnsupportedError if `dst` is no rank of the group, and for parts that are treated
        differently.
        """
        with Beginning(self, "reduce"):
            root = root_of("reduce", "dst", dst, group_dst, self.ranks)
            is_written = self.rank == root
            memory = tensor_of(tensor, op, is_written)
            parts = parts_of("reduce", memory, name, parts)
            require_kept("reduce", parts, kept_as)
            call = Call("reduce", memory, memory, op, root=root, role=role, parts=parts, residual_parts=kept_as)
            call.is_written = is_written
            return self._start([call], [tensor], async_op)

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
            output: [world_size * n] elements in any shape, on the device of `input` and of its dtype.
            input: [n] elements in any shape; dtypes as of `all_reduce`. It may be this rank's part of
                `output`.
            baseline: send what has changed since the last call with the same baseline, without loss. `output` still
                holds that call's result, but for what this rank has changed in its own part.

        Returns: a handle if `async_op`, else None.

        Raises what `all_reduce` does, and ValueError for other sizes, and for an input that overlaps several parts of
        `output`.
        """
        with Beginning(self, "all_gather_single"):
            source, memory = tensor_of(input, is_written=False), tensor_of(output)
            require_sizes("all_gather_single", self.world_size, whole=memory, part=source)
            parts = parts_of("all_gather_single", memory, name, None)
            call = Call("all_gather_single", source, memory, role=role, parts=parts, baseline=baseline)
            return self._start([call], [output], async_op)

    all_gather_into_tensor = all_gather_single  # torch's name before 2.13

    def broadcast(
        self,
        tensor: Tensor,
        src: int | None = None,
        async_op: bool = False,
        *,
        group_src: int | None = None,
        role: str | None = None,
        name: str | None = None,
        baseline: Baseline | None = None,
    ):
        """Replace `tensor` on every rank by what rank `src` holds.

        It changes on `src` as well, by the same loss as on its peers, so that all ranks agree.

        Args:
            tensor: of any shape, the same number of elements on all ranks; dtypes as of `all_reduce`.
            src: a global rank; None: 0.
            group_src: the rank within the group, instead of `src`.
            baseline: as in `all_gather_single`.

        Returns: a handle if `async_op`, else None.

        Raises what `all_reduce` does, and UnsupportedError if `src` is no rank of the group.
        """
        with Beginning(self, "broadcast"):
            root = root_of("broadcast", "src", src, group_src, self.ranks)
            memory = tensor_of(tensor)
            parts = parts_of("broadcast", memory, name, None)
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
        that a rank keeps are copied with every bit. At a fixed rate on GPUs ranks compare no sizes, and compress pieces
        of any size.

        Args:
            output: at least 1-D, on the device of `input`, of its dtype, and with rows of the same size. It
                must not share memory with `input`.
            input: at least 1-D; dtypes as of `all_reduce`.
            output_split_sizes: rows that come from each rank, 0 allowed; None: the same number from each.
            input_split_sizes: rows that go to each rank, 0 allowed; None: the same number to each.

        Returns: a handle if `async_op`, else None.

        Raises what `all_reduce` does; ValueError for split sizes that can't be; MismatchError on every rank where one
        sends another number of rows than the other one expects.
        """
        with Beginning(self, "all_to_all_single"):
            source, memory = tensor_of(input, is_written=False), tensor_of(output)
            splits = output_split_sizes, input_split_sizes
            pieces = pieces_of("all_to_all_single", self.rank, self.world_size, memory, source, *splits)
            parts = exchanged_parts("all_to_all_single", source, name)
            call = Call("all_to_all_single", source, memory, role=role, parts=parts, pieces=pieces)
            return self._start([call], [output], async_op)

    # ---------------------------------------------------------------- the same with lists of tensors

    def all_to_all(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        async_op: bool = False,
        *,
        role: str | None = None,
        name: str | None = None,
    ):
        """Send tensor i of `input_tensor_list` to rank i, and fill tensor i of `output_tensor_list` with what comes.

        For the error see `all_to_all_single`. Tensors that don't lie one behind the other
        in memory are copied.

        Args:
            output_tensor_list: for each rank a tensor of any shape, of the size that the rank sends. It must
                not share memory with the input.
            input_tensor_list: for each rank a tensor of any shape and size, all of one dtype.

        Returns: a handle if `async_op`, else None.

        Raises what `all_reduce` does; ValueError for lists of other lengths; MismatchError on every rank where one
        sends another number of elements than the other one expects.
        """
        with Beginning(self, "all_to_all"):
            given = "input_tensor_list", input_tensor_list, self.world_size
            inputs = tensors_of_list("all_to_all", *given, is_written=False)
            given = "output_tensor_list", output_tensor_list, self.world_size, inputs[0]
            outputs = tensors_of_list("all_to_all", *given)
            call = self._exchange("all_to_all", inputs, outputs, role, name)
            return self._start([call], output_tensor_list, async_op)

    def gather(
        self,
        tensor: Tensor,
        gather_list: list[Tensor] | None = None,
        dst: int | None = None,
        async_op: bool = False,
        *,
        group_dst: int | None = None,
        role: str | None = None,
        name: str | None = None,
    ):
        """Fill `gather_list` on rank `dst` with the tensors of all ranks, in rank order.

        Each rank quantizes its tensor by steps of its own. What `dst` contributes is copied with every bit.
        Tensors of the list that don't lie one behind the other in memory are copied.

        Args:
            tensor: of any shape; dtypes as of `all_reduce`. Ranks may pass other sizes, unlike torch's.
            gather_list: on `dst` a tensor for each rank, of the size that the rank sends; on others None.
            dst: a global rank; None: 0.
            group_dst: the rank within the group, instead of `dst`.

        Returns: a handle if `async_op`, else None.

        Raises what `all_to_all` does, and UnsupportedError if `dst` is no rank of the group.
        """
        with Beginning(self, "gather"):
            root = root_of("gather", "dst", dst, group_dst, self.ranks)
            memory = tensor_of(tensor, is_written=False)
            given = "gather_list", gather_list, root, self.rank, self.world_size, memory
            outputs = list_of_root("gather", *given, is_written=True)
            inputs = for_root_alone(memory, root, self.world_size)
            call = self._exchange("gather", inputs, outputs, role, name, root)
            return self._start([call], gather_list or [], async_op)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        src: int | None = None,
        async_op: bool = False,
        *,
        group_src: int | None = None,
        role: str | None = None,
        name: str | None = None,
    ):
        """Fill `tensor` on every rank with the rank's own of the tensors in `scatter_list` on rank `src`.

        Each of the tensors is quantized by steps of its own. What `src` keeps is copied with every bit.
        Tensors of the list that don't lie one behind the other in memory are copied.

        Args:
            tensor: of any shape; dtypes as of `all_reduce`. Ranks may pass other sizes, unlike torch's.
            scatter_list: on `src` a tensor for each rank, of the size that the rank expects; on others None.
            src: a global rank; None: 0.
            group_src: the rank within the group, instead of `src`.

        Returns: a handle if `async_op`, else None.

        Raises what `all_to_all` does, and UnsupportedError if `src` is no rank of the group.
        """
        with Beginning(self, "scatter"):
            root = root_of("scatter", "src", src, group_src, self.ranks)
            memory = tensor_of(tensor)
            given = "scatter_list", scatter_list, root, self.rank, self.world_size, memory
            inputs = list_of_root("scatter", *given, is_written=False)
            outputs = for_root_alone(memory, root, self.world_size)
            call = self._exchange("scatter", inputs, outputs, role, name, root)
            return self._start([call], [tensor], async_op)

    def all_gather(
        self,
        tensor_list: list[Tensor],
        tensor: Tensor,
        async_op: bool = False,
        *,
        role: str | None = None,
        name: str | None = None,
    ):
        """Fill `tensor_list` with the tensors of all ranks, in rank order: `all_gather_single` with a list.

        Args:
            tensor_list: for each rank a tensor of the size of `tensor`. Tensors that don't lie one behind
                the other in memory are copied.
            tensor: of any shape; dtypes as of `all_reduce`.

        Returns: a handle if `async_op`, else None.

        Raises what `all_reduce` does, and ValueError for another list.
        """
        with Beginning(self, "all_gather"):
            source = flat(tensor_of(tensor, is_written=False))
            given = "tensor_list", tensor_list, self.world_size, source, source.numel()
            output, joined = joined_for(tensors_of_list("all_gather", *given), is_written=True)
            parts = parts_of("all_gather", output, name, None)
            call = Call("all_gather_single", source, output, role=role, parts=parts, joined=joined)
            return self._start([call], tensor_list, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: list[Tensor],
        op=dist.ReduceOp.SUM,
        async_op: bool = False,
        *,
        role: str | None = None,
        name: str | None = None,
        parts: Sequence[ParameterSlice] | None = None,
        kept_as: Sequence[ParameterSlice] | None = None,
    ):
        """Sum tensor i of `input_list` over ranks (or average, for AVG) into `output` of rank i.

        It is `reduce_scatter_single` with a list.

        Args:
            output: of any shape; dtypes as of `all_reduce`.
            input_list: for each rank a tensor of the size of `output`. Tensors that don't lie one behind the
                other in memory are copied.
            parts: those of all tensors of the list, all of which must be treated alike.
            kept_as: see `all_reduce`.

        Returns: a handle if `async_op`, else None.

        Raises what `reduce_scatter_single` does, and ValueError for another list.
        """
        with Beginning(self, "reduce_scatter"):
            memory = flat(tensor_of(output, op))
            given = "input_list", input_list, self.world_size, memory, memory.numel(), op
            input, joined = joined_for(tensors_of_list("reduce_scatter", *given, is_written=False), is_read=True)
            parts = parts_of("reduce_scatter", input, name, parts)
            require_kept("reduce_scatter", parts, kept_as)
            call = Call("reduce_scatter_single", input, memory, op, role=role, parts=parts, residual_parts=kept_as)
            call.joined = joined
            return self._start([call], [output], async_op)

    # ---------------------------------------------------------------- calls

    def _exchange(
        self,
        collective: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        role: str | None,
        name: str | None,
        root: int = 0,
    ) -> Call:
        """The call that sends tensor i of `inputs` to rank i, and fills tensor i of `outputs` with what rank i sends.

        Args:
            inputs, outputs: one for each rank, empty where nothing is sent, see `arguments.flat`.
        """
        pieces = pieces_of_lists(collective, self.rank, inputs, outputs)
        input, read = joined_for(inputs, is_read=True)
        output, written = joined_for(outputs, is_written=True)
        parts, joined = exchanged_parts(collective, input, name), read + written
        return Call(collective, input, output, root=root, role=role, parts=parts, pieces=pieces, joined=joined)

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

            slices, copies = [], []
            for at in places:
                its_slices, its_copies = slices_of(tensors[at], parts[at])
                slices += its_slices
                copies += its_copies
            for _, indices in alike:
                joined = Joined([slices[at] for at in indices])
                its_parts = [own[at] for at in indices]
                call = Call("all_reduce", joined.whole, joined.whole, op, role=role, parts=its_parts)
                call.joined = (*copies, joined)
                call.residual_parts, call.together = _chosen(kept_as, indices), together
                calls.append(call)
        return calls

    def _scattered_sums(
        self,
        source: Tensor,
        memory: Tensor,
        op,
        parts: Sequence[ParameterSlice],
        role: str | None,
        kept_as: Sequence[ParameterSlice] | None,
    ) -> list[Call]:
        """The calls of a reduce_scatter_single: one for each treatment if all ranks get parts alike."""
        how = {"role": role, "residual_parts": kept_as}
        n, each, lengths = self.world_size, len(parts) // self.world_size, [part.length for part in parts]
        alike = self.training.grouped(parts, source.dtype, role, self.ranks) if len(parts) > 1 else []
        places = [indices for _, indices in alike]
        own = [[at for at in indices if at < each] for indices in places]  # of what goes to the first rank
        as_each = [[rank * each + at for rank in range(n) for at in of_first] for of_first in own]
        if len(alike) < 2 or places != as_each or lengths != lengths[:each] * n:  # `decide` refuses what is not alike
            return [Call("reduce_scatter_single", source, memory, op, parts=parts, **how)]

        # The parts of one treatment are copied together, and the sums of this rank's own to where they belong.
        given, copied = slices_of(source, parts)
        taken, its_copy = slices_of(memory, parts[:each])
        calls = []
        for indices, of_first in zip(places, own):
            read, written = (
                Joined([given[at] for at in indices], is_written=False),
                Joined([taken[at] for at in of_first]),
            )
            its_parts = [parts[at] for at in indices]
            call = Call("reduce_scatter_single", read.whole, written.whole, op, parts=its_parts, **how)
            call.joined, call.residual_parts = (*copied, *its_copy, read, written), _chosen(kept_as, indices)
            calls.append(call)
        return calls

    # ---------------------------------------------------------------- what a Communicator does with calls

    def _start(self, calls: list[Call], outputs: Sequence[Tensor], async_op: bool) -> Handle | None:
        """Begin calls, and wait for them unless `async_op`. Returns a handle that gives `outputs` if `async_op`."""
        raise NotImplementedError

    def require_open(self) -> None:
        """Raise what broke this communicator, if anything did, and UnsupportedError in a fork of its process."""
        raise NotImplementedError

    def refuse(self, collective: str) -> None:
        """Tell the other ranks, which would wait for it, that this one can't make its call."""
        raise NotImplementedError


class Beginning:
    """A context to begin a call in: outside of inference mode, in which nothing that lasts may be made.

    If this rank can't make its call, the others are told. A class and not a generator, which would be
    slower: every call enters one.
    """

    __slots__ = ("_communicator", "_collective", "_outside")

    def __init__(self, communicator: Collectives, collective: str):
        self._communicator = communicator
        self._collective = collective

    def __enter__(self) -> None:
        self._communicator.require_open()
        self._outside = outside_of_inference_mode()
        self._outside.__enter__()

    def __exit__(self, kind, error: BaseException | None, traceback) -> None:
        try:
            if isinstance(error, (UnsupportedError, ValueError, TypeError, OutOfMemoryError)):
                self._communicator.refuse(self._collective)
        finally:
            self._outside.__exit__(kind, error, traceback)


def _chosen(parts: Sequence[ParameterSlice] | None, places: Sequence[int]) -> Sequence[ParameterSlice] | None:
    return None if parts is None else [parts[at] for at in places]
