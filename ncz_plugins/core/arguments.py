"""What the arguments of collectives must be. Errors name the collective, the argument and the value."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from .arrays import tensor_of
from .call import Pieces
from .errors import ErrorTranslation, UnsupportedError
from .training.policy import NO_SIZE, ParameterSlice


class _called(ErrorTranslation):
    """Context in which an UnsupportedError names the argument. Its subject is that name."""

    __slots__ = ()

    def translated(self, error):
        return UnsupportedError(f"{self.subject}: {error}") if isinstance(error, UnsupportedError) else None


def require_one_device(collective: str, one: Tensor, other: Tensor) -> None:
    """Raise UnsupportedError unless both tensors are on one device."""
    if one.device != other.device:
        where = f"{one.device} and {other.device}"
        raise UnsupportedError(f"{collective}: both tensors must be on one device, got {where}")


def require_sizes(collective: str, ranks: int, whole: Tensor, part: Tensor) -> None:
    """Raise ValueError unless `whole` has `ranks` times the elements of `part`.

    Raises UnsupportedError if they are on different devices.

    `part` may be one of them, but not overlap them otherwise: what is read there would be written before.
    """
    require_one_device(collective, whole, part)
    larger, smaller = ("input", "output") if collective == "reduce_scatter_single" else ("output", "input")
    if whole.numel() != part.numel() * ranks:
        wanted = f"{larger} must have {ranks} (ranks) times the elements of {smaller}"
        raise ValueError(f"{collective}: {wanted}, got {whole.numel()} and {part.numel()}")
    begin = part.data_ptr() - whole.data_ptr()
    if -part.nbytes < begin < whole.nbytes and begin % part.nbytes:
        raise ValueError(
            f"{collective}: {smaller} must have memory of its own, or be one of the parts of {larger}, which begin "
            f"every {part.nbytes} bytes; it begins at byte {begin}"
        )


def pieces_of(
    collective: str,
    rank: int,
    ranks: int,
    output: Tensor,
    input: Tensor,
    received: Sequence[int] | None,
    sent: Sequence[int] | None,
) -> Pieces:
    """The rows that go to each rank and come from each. Raises ValueError and UnsupportedError."""
    require_one_device(collective, input, output)
    if not input.shape or not output.shape:
        raise ValueError(f"{collective}: input and output must have rows, got a tensor without dimensions")
    (rows_sent, *row), (rows_received, *of_output) = input.shape, output.shape
    if (row := math.prod(row)) != (of_output := math.prod(of_output)):
        raise ValueError(f"{collective}: rows of input and output must have one size, got {row} and {of_output}")
    if input.numel() and input.data_ptr() == output.data_ptr():
        raise ValueError(f"{collective}: output must have memory of its own, got that of input")
    sent = _split_sizes(f"{collective}: input_split_sizes", sent, rows_sent, ranks)
    received = _split_sizes(f"{collective}: output_split_sizes", received, rows_received, ranks)
    return Pieces(sent, received, row, rank)


def _split_sizes(what: str, sizes: Sequence[int] | None, rows: int, ranks: int) -> tuple[int, ...]:
    """Rows for each rank. Raises ValueError unless they are all of them."""
    if sizes is None:
        if rows % ranks:
            raise ValueError(f"{what} must be given: {rows} rows can't be divided evenly among {ranks} ranks")
        return (rows // ranks,) * ranks
    sizes = tuple(map(int, sizes))
    if len(sizes) != ranks or min(sizes) < 0 or sum(sizes) != rows:
        raise ValueError(f"{what} must be {ranks} numbers that add up to {rows} rows, got {list(sizes)}")
    return sizes


def tensors_of_list(
    collective: str,
    what: str,
    given: object,
    ranks: int,
    like: Tensor | None = None,
    elements: int | None = None,
    op=None,
    is_written: bool = True,
) -> list[Tensor]:
    """The tensors of a list that has one for each rank: see `flat`.

    Args:
        what: the argument's name.
        op, is_written: see `tensor_of`.
        like: a tensor that may be served, of their dtype and on their device; None: the first of them.
        elements: what each must have; None: any number.

    Raises ValueError for another list, UnsupportedError for tensors that can't be served.
    """
    if not isinstance(given, (list, tuple)) or len(given) != ranks:
        found = f"one of {len(given)}" if isinstance(given, (list, tuple)) else type(given).__name__
        raise ValueError(f"{collective}: {what} must be a list of {ranks} tensors, one for each rank, got {found}")
    tensors = []
    for at, array in enumerate(given):
        name = f"{collective}: {what}[{at}]"
        with _called(name):
            tensor = tensor_of(array, op, is_written)
        like = tensor if like is None else like
        if (tensor.dtype, tensor.device) != (like.dtype, like.device):
            kinds = " and ".join(f"{each.dtype} on {each.device}" for each in (tensor, like))
            raise UnsupportedError(f"{name}: all tensors must have one dtype and be on one device, got {kinds}")
        if elements is not None and tensor.numel() != elements:
            raise ValueError(f"{name} must have the {elements} elements of each rank's part, got {tensor.numel()}")
        tensors.append(flat(tensor))
    return tensors


def flat(tensor: Tensor) -> Tensor:
    """A view in one dimension of which autograd knows nothing; in those of the tensor if it is strided."""
    tensor = tensor.detach()
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def for_root_alone(tensor: Tensor, root: int, ranks: int) -> list[Tensor]:
    """The tensor for rank `root`, and nothing for the others: see `flat`."""
    whole = flat(tensor)
    return [whole if rank == root else whole[:0] for rank in range(ranks)]


def list_of_root(
    collective: str, what: str, given: object, root: int, rank: int, ranks: int, tensor: Tensor, is_written: bool
) -> list[Tensor]:
    """The tensors of a list that the root alone passes, and empty ones on other ranks.

    Args:
        root, rank: rank that passes it, and this rank, both within the group.
        tensor: what each rank passes.
        is_written: whether the call writes to the list.

    Raises ValueError for a list on another rank, and what `tensors_of_list` does.
    """
    if rank == root:
        if given is None:
            raise ValueError(f"{collective}: {what} must be given on this rank, which is the root, got None")
        return tensors_of_list(collective, what, given, ranks, tensor, is_written=is_written)
    if given is not None and len(given):
        raise ValueError(f"{collective}: {what} must be None on all ranks but the root, got one of {len(given)}")
    return [tensor.new_empty(0)] * ranks  # no view, as to write to one is a change of `tensor` for autograd


def pieces_of_lists(collective: str, rank: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Pieces:
    """Pieces of one element a row: what goes to each rank and comes from each. Raises ValueError."""
    sent, received = (tuple([tensor.numel() for tensor in tensors]) for tensors in (inputs, outputs))
    if sent[rank] != received[rank]:
        found = f"{sent[rank]} and {received[rank]}"
        raise ValueError(f"{collective}: a rank's input and output for itself must have one size, got {found} elements")
    # What a rank keeps may stay where it is.
    read = {tensor.data_ptr(): at for at, tensor in enumerate(inputs) if tensor.numel()}
    for at, tensor in enumerate(outputs):
        of = read.get(tensor.data_ptr())
        if tensor.numel() and of is not None and not of == at == rank:
            found = f"the output for rank {at} in that of the input for rank {of}"
            raise ValueError(f"{collective}: outputs must have memory of their own, got {found}")
    return Pieces(sent, received, 1, rank)


def root_of(collective: str, what: str, given: int | None, in_group: int | None, ranks: Sequence[int]) -> int:
    """The rank within the group that a collective starts from or goes to.

    Args:
        what: "src" or "dst", torch's name of the argument.
        given: global rank; None: 0, unless `in_group` is given.
        in_group: rank within the group.
        ranks: global ranks of the group.

    Raises ValueError if both are given, UnsupportedError for a rank that is not in the group.
    """
    if given is not None and in_group is not None:
        raise ValueError(f"{collective}: pass {what} or group_{what}, not both, got {given} and {in_group}")
    if in_group is not None:
        if in_group not in range(len(ranks)):
            known = f"a rank within this group, 0 to {len(ranks) - 1}"
            raise UnsupportedError(f"{collective}: group_{what} must be {known}, got {in_group}")
        return in_group
    given = 0 if given is None else given
    if given not in ranks:
        raise UnsupportedError(f"{collective}: {what} must be a global rank of this group, one of {ranks}, got {given}")
    return ranks.index(given)


def require_kept(collective: str, parts: Sequence[ParameterSlice], kept: Sequence[ParameterSlice] | None) -> None:
    """Raise ValueError unless error feedback can keep a tensor that consists of `parts` as `kept`."""
    if kept is None:
        return
    if all(part.name is None for part in parts):
        raise ValueError(f"{collective}: kept_as needs a name: pass name or parts as well")
    of_parts, of_kept = ([part.length for part in each] for each in (parts, kept))
    if sum(of_kept) != sum(of_parts):
        wanted = f"the {sum(of_parts)} elements of the tensor"
        raise ValueError(f"{collective}: kept_as must have {wanted}, got {sum(of_kept)}")
    if len(of_parts) > 1 and of_kept != of_parts:
        raise ValueError(f"{collective}: kept_as must have the lengths of parts, {of_parts}, got {of_kept}")


def parts_of_each(
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
        parts_of(f"{collective}, tensor {at}", tensor, name, None if parts is None else parts[at])
        for at, (tensor, name) in enumerate(zip(tensors, names))
    ]
    if len(devices := dict.fromkeys(str(tensor.device) for tensor in tensors)) > 1:
        raise UnsupportedError(f"{collective}: all tensors must be on one device, got {' and '.join(devices)}")
    return found


def exchanged_parts(collective: str, tensor: Tensor, name: str | None) -> Sequence[ParameterSlice]:
    """What a tensor of which ranks exchange pieces consists of: one parameter, whose size may differ by rank."""
    _require_name(collective, name)
    return [ParameterSlice(name, tensor.numel(), numel=NO_SIZE)]


def _require_name(collective: str, name: object) -> None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{collective}: name must be a string or None, got {name!r} ({type(name).__name__})")


def parts_of(
    collective: str, tensor: Tensor, name: str | None, parts: Sequence[ParameterSlice] | None
) -> Sequence[ParameterSlice]:
    """What a tensor consists of: one parameter, called `name`, unless told."""
    _require_name(collective, name)
    if parts is None:
        # A flat tensor without a name may be a bucket of matrices.
        is_known = name is not None or tensor.dim() > 1
        return [ParameterSlice(name, tensor.numel(), shape=tuple(tensor.shape) if is_known else None)]
    if name is not None:
        raise ValueError(f"{collective}: pass name or parts, not both, got name={name!r}")
    if (elements := sum(part.length for part in parts)) != tensor.numel():
        raise ValueError(f"{collective}: parts must have the {tensor.numel()} elements of the tensor, got {elements}")
    return parts or [ParameterSlice(None, 0)]
