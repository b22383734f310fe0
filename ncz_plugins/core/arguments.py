"""What the arguments of collectives must be. Errors name the collective, the argument and the value."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .call import Pieces
from .errors import UnsupportedError
from .runtime.device import require_tensor
from .training.policy import ParameterSlice


def require_one_device(collective: str, one: Tensor, other: Tensor) -> None:
    """Raise UnsupportedError unless both are tensors that can be served, on one device."""
    require_tensor(one)
    require_tensor(other)
    if one.device != other.device:
        where = f"{one.device} and {other.device}"
        raise UnsupportedError(f"{collective}: both tensors must be on one device, got {where}")


def require_sizes(collective: str, ranks: int, whole: Tensor, part: Tensor) -> None:
    """Raise ValueError unless `whole` holds a part like `part` for each rank, UnsupportedError as above."""
    require_one_device(collective, whole, part)
    if whole.numel() != part.numel() * ranks:
        larger, smaller = ("input", "output") if collective == "reduce_scatter_single" else ("output", "input")
        wanted = f"{larger} must have {ranks} (ranks) times the elements of {smaller}"
        raise ValueError(f"{collective}: {wanted}, got {whole.numel()} and {part.numel()}")


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
    if input.dim() == 0 or output.dim() == 0:
        raise ValueError(f"{collective}: input and output must have rows, got a tensor without dimensions")
    rows = [tensor.shape[1:].numel() for tensor in (input, output)]
    if rows[0] != rows[1]:
        raise ValueError(f"{collective}: rows of input and output must have one size, got {rows[0]} and {rows[1]}")
    if input.numel() and input.data_ptr() == output.data_ptr():
        raise ValueError(f"{collective}: output must have memory of its own, got that of input")
    return Pieces(
        _split_sizes(f"{collective}: input_split_sizes", sent, len(input), ranks),
        _split_sizes(f"{collective}: output_split_sizes", received, len(output), ranks),
        rows[0],
        rank,
    )


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


def require_kept(collective: str, tensor: Tensor, name: str | None, kept: Sequence[ParameterSlice] | None) -> None:
    """Raise ValueError unless error feedback can keep a tensor by these parts."""
    if kept is None:
        return
    if name is None:
        raise ValueError(f"{collective}: kept_as needs a name: pass name as well, or parts alone")
    if (elements := sum(part.length for part in kept)) != tensor.numel():
        raise ValueError(f"{collective}: kept_as must have the {tensor.numel()} elements of the tensor, got {elements}")


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


def parts_of(
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
