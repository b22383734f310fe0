"""What all ranks must have in common of a call, as numbers that they compare, and in words where they differ."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .bypass import Bypass
from .call import COLLECTIVES, EXCHANGES, OPS, Call, Pieces
from .config import Config
from .errors import MismatchError, UnsupportedError, refused
from .training.policy import ParameterSlice
from .transport.comparison import Extremes, RankComparison, bytes_of_numbers, place_of

# The dtypes that gloo and NCCL carry.
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_BITWISE = OPS[-3:]
_MOST_PIECES_NAMED = 4  # of those that don't match, in a message
_BYPASSES = tuple(Bypass)
# What "transfer" is besides the place of a bypass.
_COMPRESSED, _AS_CHANGES, _MEASURING, _CONNECTING = 0, *(len(_BYPASSES) + i for i in (1, 2, 3))


def signature_described(call: Call) -> dict[str, int]:
    """Numbers that ranks compare of all calls with this signature. `numbered` says the rest of each call.

    Texts and floats travel as checksums, other things as their place in a list.
    """
    return {
        "call number": 0,
        "collective": COLLECTIVES.index(call.collective),
        "dtype": place_of(call.input.dtype, DTYPES),
        "elements": call.larger.numel() if call.has_equal_sizes else 0,
        "elements of a row": 0 if call.pieces is None else call.pieces.row,
        "reduce op": 0 if call.op is None else 1 + place_of(call.op, OPS),
        "scale": 0 if call.scale == 1 else zlib.crc32(repr(float(call.scale)).encode()),
        "root rank": call.root,
        "tag": 0,
        "transfer": 0,
        "configuration": 0,
        "calls on GPUs before it": 0,
        "list of parameters": 0,
        "training step": 0,
        "list of tensors": call.together,
        "bases of matrices": 0,
        "refusal": 0,
    }


def numbered(
    described: Mapping[str, int],
    call: Call,
    number: int,
    bypass: Bypass | None,
    configuration: int = 0,
    uncompared: int = 0,
    step: int = 0,
) -> dict[str, int]:
    """Numbers that ranks compare of one call.

    Args:
        described: what `signature_described` returned for a call with this signature.
        number: calls so far, this one included.
        bypass: why the call goes plain; None if it is compressed.
        configuration: a checksum of the settings of a call that is compressed.
        uncompared: a checksum of the calls before it that ranks did not compare.
        step: of the training, where something depends on it.
    """
    return {
        **described,
        "call number": number,
        "tag": call.tag,
        "transfer": _transfer(call, bypass),
        "configuration": configuration,
        "calls on GPUs before it": uncompared,
        "list of parameters": 0 if call.op is None else _checksum_of_parts(tuple(call.parts)),
        "training step": step,
    }


def _transfer(call: Call, bypass: Bypass | None) -> int:
    if bypass is not None:
        return 1 + _BYPASSES.index(bypass)
    return _COMPRESSED if call.baseline is None else _AS_CHANGES


def require_plain(call: Call) -> None:
    """Raise UnsupportedError, saying what to do, for a call that gloo and NCCL do not make."""
    dtype, what = call.input.dtype, call.collective
    if call.output.dtype != dtype:
        raise UnsupportedError(f"{what}: input and output must have one dtype, got {dtype} and {call.output.dtype}")
    if dtype not in DTYPES:
        known = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
        raise UnsupportedError(f"{what}: dtype {dtype}: neither gloo nor NCCL carries it; convert it to one of {known}")
    if call.op is None:
        return
    if call.op not in OPS:
        raise UnsupportedError(f"{what}: reduce op must be one of torch.distributed's own, got {call.op}")
    if call.op == dist.ReduceOp.AVG and not dtype.is_floating_point:
        raise UnsupportedError(f"{what}: reduce op AVG of {dtype}: only floats can be averaged; use SUM and divide")
    if call.op in _BITWISE and dtype.is_floating_point:
        raise UnsupportedError(
            f"{what}: reduce op {_named(OPS, place_of(call.op, OPS))} needs integers or bool, got {dtype}"
        )


def refusal(number: int) -> dict[str, int]:
    """Numbers of a rank that can't make its call, so that nobody waits for it. `number`: calls before it."""
    numbers = signature_described(Call("all_reduce", _NOTHING, _NOTHING))
    return dict.fromkeys(numbers, 0) | {"call number": number, "refusal": 1}


def measuring(number: int) -> dict[str, int]:
    """Numbers of a rank that is about to measure what connects the GPUs. `number`: calls before it."""
    return refusal(number) | {"refusal": 0, "transfer": _MEASURING}


def connecting(number: int) -> dict[str, int]:
    """Numbers of a rank that is about to connect its GPU. `number`: calls before it."""
    return refusal(number) | {"refusal": 0, "transfer": _CONNECTING}


def require_same(collective: str, comparison: RankComparison, ranks: Sequence[int]) -> None:
    """Raise MismatchError if ranks described different calls.

    Args:
        comparison: of what `numbered`, `refusal`, `measuring` and `connecting` returned; its tensor is the maximum
            over ranks.
        ranks: their global ranks, for the message.
    """
    differing = comparison.differing()
    if "refusal" in differing:
        raise refused(collective, ranks[differing["refusal"].highest_rank])
    if differing:
        in_words = _in_words if collective != "send_recv" else _of_message_in_words
        found = "; ".join(in_words(name, ends, ranks) for name, ends in differing.items())
        steps = ", and end the same steps (end_step)" if "training step" in differing else ""
        ways = "Every rank must make the same calls in the same order"
        if collective == "send_recv":
            ways = "Messages from one rank to another arrive in the order in which they were sent"
        raise MismatchError(f"{collective}: {found}. {ways}{steps}")


def pieces_described(pieces: Pieces) -> bytes:
    """What a rank sends and expects, for ranks to compare: rows that it sends to each, then rows that it expects."""
    return bytes_of_numbers((*pieces.sent, *pieces.received))


@lru_cache(maxsize=4)  # calls of equal sizes follow one another; with 1,024 ranks a description has 16 MiB
def require_same_pieces(collective: str, described: bytes, ranks: tuple[int, ...]) -> tuple[int, list[int]]:
    """Raise MismatchError, on all ranks alike, if a rank sends another number of rows than the other one expects.

    "Rows" are those of `Pieces`; where a row is one element, messages say elements.

    Args:
        described: what `pieces_described` returned on each rank, in rank order.
        ranks: their global ranks, for the message.

    Returns the rows of the rank that sends or gets most, and those of the largest piece of each rank.
    """
    rows = np.frombuffer(described, np.int64).reshape(len(ranks), 2, len(ranks))
    sent, expected = rows[:, 0], rows[:, 1].T
    if (sent == expected).all():
        return int(rows.sum(2).max()), rows.max((1, 2)).tolist()
    differing = np.argwhere(sent != expected).tolist()
    unit, must_agree = EXCHANGES[collective]
    found = "; ".join(
        f"rank {ranks[i]} sends {sent[i, j]} {unit} to rank {ranks[j]}, which expects {expected[i, j]}"
        for i, j in differing[:_MOST_PIECES_NAMED]
    )
    more = f"; and {len(differing) - _MOST_PIECES_NAMED} more" if len(differing) > _MOST_PIECES_NAMED else ""
    raise MismatchError(f"{collective}: {found}{more}. {must_agree} must agree")


@lru_cache
def checksum_of(config: Config) -> int:
    """A number by which ranks tell whether their configurations differ; found once for each, as calls are many."""
    return zlib.crc32(config.canonical().encode())


@lru_cache(maxsize=256)  # lists of hundreds of parts have 30 KB each, and those of DDP may differ from step to step
def _checksum_of_parts(parts: tuple[ParameterSlice, ...]) -> int:
    """A number by which ranks tell whether they sum the same parameters; 0 if none of these has a name."""
    if all(part.name is None for part in parts):
        return 0
    return 1 + zlib.crc32(repr([part[:4] for part in parts]).encode())  # ranks may differ in the rest


def checksum_of_list(tensors: Sequence[Tensor]) -> int:
    """A number, not 0, by which ranks tell whether the tensors that they pass at once differ in size or dtype."""
    return 1 + zlib.crc32(repr([(tensor.numel(), str(tensor.dtype)) for tensor in tensors]).encode())


def _in_words(name: str, ends: Extremes, ranks: Sequence[int]) -> str:
    """Which rank has what."""
    high, low = ranks[ends.highest_rank], ranks[ends.lowest_rank]
    if name in _CHECKSUMS:
        return f"{name} differs between rank {low} and rank {high}"
    words = _WORDS.get(name, str)
    return f"{name} {words(ends.highest)} on rank {high}, {words(ends.lowest)} on rank {low}"


def _of_message_in_words(name: str, ends: Extremes, ranks: Sequence[int]) -> str:
    """The same of a message from the first of two ranks to the second."""
    if name != "elements":
        return _in_words(name, ends, ranks)
    sent, expected = (ends.lowest, ends.highest) if ends.lowest_rank == 0 else (ends.highest, ends.lowest)
    return f"rank {ranks[0]} sends {sent} elements to rank {ranks[1]}, which expects {expected}"


def _named(values: Sequence, number: int) -> str:
    """What a number stands for. It comes from a peer, so it may be any."""
    return str(values[number]).rpartition(".")[2] if 0 <= number < len(values) else f"unknown ({number})"


_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
_CHECKSUMS = (
    "scale",
    "configuration",
    "calls on GPUs before it",
    "list of parameters",
    "list of tensors",
    "bases of matrices",
)
_REASONS = tuple(bypass.value for bypass in _BYPASSES)
_TRANSFERS = {
    _COMPRESSED: "compressed",
    _AS_CHANGES: "compressed, as changes from a baseline",
    _MEASURING: "being measured (the first call of a tensor on a GPU)",
    _CONNECTING: "connecting GPUs (the first compressed call of a tensor on a GPU)",
}
_WORDS: dict[str, Callable[[int], str]] = {
    "collective": lambda number: _named(COLLECTIVES, number),
    "dtype": lambda number: _named(DTYPES, number),
    "reduce op": lambda number: "none" if number == 0 else _named(OPS, number - 1),
    "transfer": lambda number: _TRANSFERS.get(number) or f"plain ({_named(_REASONS, number - 1)})",
}
