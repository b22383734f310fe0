"""How ranks find out that they make the same call, before any of them uses a value.

Ranks that exchange pieces also tell each other how many rows go where. Small pieces travel with that, so after an error
outputs may hold some of what came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .call import Call
from .call_description import pieces_described, require_same, require_same_pieces
from .codec.pieces import PiecesCodec
from .runtime.statistics import Counters
from .transport.agreements import MAX_BYTES_WITH_COMPARISON
from .transport.base import Transport
from .transport.comparison import RankComparison
from .transport.small import borrowed_memory

_ROW_BYTES = 8  # of a number of rows


def require_same_call(
    collective: str,
    numbers: Mapping[str, int],
    transport: Transport,
    ranks: Sequence[int],
    counters: Counters | None = None,
) -> None:
    """Wait for what the other ranks are about to do. Raises MismatchError on every rank unless all do the same.

    Args:
        numbers: what this rank is about to do, see call_description.py.
        counters: receive the bytes sent and the seconds waited.
    """
    comparison = RankComparison(numbers, transport.rank, transport.world_size)
    transport.start_comparison(comparison, counters or Counters()).wait()
    require_same(collective, comparison, ranks)


class Told(NamedTuple):
    """What ranks know of their pieces once they have told each other.

    Attributes:
        most: bytes that the rank which sends or gets most sends or gets.
        measured: whether each rank has sent what it measured.
    """

    most: int
    measured: bool


def tell_pieces(
    call: Call, transport: Transport, ranks: Sequence[int], most: int, codec: PiecesCodec | None = None
) -> Told:
    """Compare a call of ranks that exchange pieces, and tell all of them how many rows go where.

    In host memory something travels along: from a rank without a large piece its pieces, from others what they
    measured. If no rank has a large piece, the uncompressed call is over then: see `Call.has_arrived`.

    Args:
        most: bytes of a piece that is not large, at most `most_at_once`; below 0: all are large.
        codec: measures pieces; None: this rank has no large one, or the call goes plain.

    Raises MismatchError on every rank if the ranks make different calls, or one expects other rows than are sent.
    """
    rows, counters = pieces_described(call.pieces), call.counters or Counters()
    bytes_of_row = call.pieces.row * call.input.itemsize
    if transport.exchanges is None:
        require_same_call(call.collective, call.described, transport, ranks, counters)
        if call.has_equal_sizes:
            return Told(call.larger.nbytes, False)
        of_ranks = np.zeros((len(ranks), len(rows)), np.uint8)
        of_ranks[transport.rank] = np.frombuffer(rows, np.uint8)
        transport.start_max(torch.from_numpy(of_ranks).view(-1).view(torch.int64), counters).wait()
        most_rows, _ = require_same_pieces(call.collective, of_ranks.tobytes(), tuple(ranks))
        return Told(most_rows * bytes_of_row, False)

    outgoing = incoming = [memoryview(bytearray())] * transport.world_size
    if call.largest_piece <= most:
        outgoing, incoming = memory_of_pieces(call)
    elif isinstance(codec, PiecesCodec):
        outgoing, incoming = [list(map(borrowed_memory, heads)) for heads in codec.heads]
    comparison = RankComparison(call.described, transport.rank, transport.world_size)
    check = partial(require_same, call.collective, comparison, ranks)
    told = transport.exchanges.tell(rows, outgoing, incoming, comparison, check, counters)

    most_rows, largest_rows = require_same_pieces(call.collective, told, tuple(ranks))
    call.has_arrived = max(largest_rows) * bytes_of_row <= most
    return Told(most_rows * bytes_of_row, min(largest_rows) * bytes_of_row > most)


def most_at_once(world_size: int) -> int:
    """Bytes of the largest piece that may travel with what ranks tell each other.

    A rank that makes another call expects no more bytes than a comparison may have with it.
    """
    told = 2 * world_size * _ROW_BYTES  # see `pieces_described`
    return MAX_BYTES_WITH_COMPARISON - told


def memory_of_pieces(call: Call) -> tuple[list[memoryview], list[memoryview]]:
    """The bytes of the piece for each rank, and the memory for the piece of each rank."""
    bytes_of_row = call.pieces.row * call.input.itemsize
    return _cut(call.input, call.pieces.sent, bytes_of_row), _cut(call.output, call.pieces.received, bytes_of_row)


def _cut(tensor: Tensor, rows: Sequence[int], bytes_of_row: int) -> list[memoryview]:
    """The bytes of a contiguous tensor in pieces."""
    memory, at, pieces = borrowed_memory(tensor), 0, []
    for count in rows:
        pieces.append(memory[at : at + count * bytes_of_row])
        at += count * bytes_of_row
    return pieces
