"""Whose gradients the tensors are that DeepSpeed reduces, found by where they lie in memory."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.deepspeed.parameter_slices import PADDING, parts_of, rank_major

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


@st.composite
def buckets(draw):
    """Named gradients in one buffer or in one each, and pieces of them in any order: (index of the gradient, piece)."""
    dtype = draw(DTYPES)
    numels = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    names = [draw(st.sampled_from([f"p{at}", f"p{at}", None, PADDING])) for at in range(len(numels))]
    # In a flat buffer gradients are neighbours; between buffers lies memory that belongs to none of them.
    buffer = torch.zeros(sum(numels), dtype=dtype)
    apart = [torch.zeros(numel, dtype=dtype) for numel in numels]
    flat = apart if draw(st.booleans()) else buffer.split(numels)
    gradients = [each.view(*[1] * draw(st.integers(0, 3)), -1) for each in flat]
    pieces = []
    for at in range(len(numels)):
        left = flat[at]
        while left.numel():
            size = draw(st.integers(1, left.numel()))
            piece, left = left[:size], left[size:]
            if draw(st.booleans()):
                pieces.append((at, piece))
    pieces = [pieces[at] for at in draw(st.permutations(range(len(pieces))))]
    return list(zip(names, gradients)), pieces


def expected(gradients, pieces) -> tuple[list[ParameterSlice], int]:
    found, unknown = [], 0
    for at, piece in pieces:
        name, gradient = gradients[at]
        start = (piece.data_ptr() - gradient.data_ptr()) // gradient.element_size()
        if name == PADDING:
            found.append(ParameterSlice(None, piece.numel(), numel=0))
        else:
            found.append(ParameterSlice(name, piece.numel(), start, gradient.numel(), shape=tuple(gradient.shape)))
            unknown += piece.numel() if name is None else 0
    return found, unknown


@given(buckets())
def test_pieces_of_gradients_are_found_however_they_are_cut_and_ordered(drawn):
    gradients, pieces = drawn
    assert parts_of([piece for _, piece in pieces], gradients) == expected(gradients, pieces)
    assert parts_of([piece for _, piece in pieces], reversed(gradients)) == expected(gradients, pieces)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.data())
def test_a_tensor_across_several_gradients_is_told_apart_into_them(numels, data):
    """As DeepSpeed cuts a flat bucket at partition borders, wherever parameters end."""
    buffer = torch.zeros(sum(numels))
    gradients = [(f"p{at}", gradient) for at, gradient in enumerate(buffer.split(numels))]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(buffer)))) | {0, len(buffer)})
    partitions = [buffer[begin:end] for begin, end in zip(cuts, cuts[1:])]
    parts, unknown = parts_of(partitions, gradients)
    assert unknown == 0 and sum(part.length for part in parts) == len(buffer)
    # Written down element by element, parts must be what the buffer holds, in order.
    elements = [(part.name, part.start + i) for part in parts for i in range(part.length)]
    assert elements == [(f"p{at}", i) for at, numel in enumerate(numels) for i in range(numel)]
    # No part crosses a border of a partition, and none the end of its parameter.
    ends, borders = 0, set(cuts)
    for part in parts:
        assert not any(ends < border < ends + part.length for border in borders)
        assert part.start + part.length <= part.numel == numels[int(part.name[1:])]
        ends += part.length


def test_memory_of_no_gradient_is_unknown():
    buffer = torch.zeros(10)
    gradients = [("a", buffer[2:5])]
    before, past = ([ParameterSlice(None, 2)], 2), ([ParameterSlice(None, 5)], 5)
    assert parts_of([buffer[5:]], gradients) == past
    assert parts_of([buffer[:2]], gradients) == before
    known = ParameterSlice("a", 2, 1, 3, shape=(3,))
    assert parts_of([buffer[3:7]], gradients) == ([known, ParameterSlice(None, 2)], 2)
    assert parts_of([buffer[:0]], gradients) == ([], 0)
    assert parts_of([buffer[:2]], []) == before


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 5))
def test_shares_of_ranks_are_those_of_torch_chunks_with_padding(numels, ranks):
    """Each parameter is cut as DeepSpeed's reduce_scatter_coalesced cuts it: ceil(numel / ranks) elements to a rank."""
    parts = [ParameterSlice(f"p{at}", numel, 0, numel) for at, numel in enumerate(numels)]
    elements = []
    for part in rank_major(parts, ranks):
        elements += [(part.name, part.start + i) for i in range(part.length)] if part.name else [None] * part.length
    wanted = []
    for rank in range(ranks):
        for at, numel in enumerate(numels):
            share = -(-numel // ranks)
            padded = [(f"p{at}", i) for i in range(numel)] + [None] * (share * ranks - numel)
            wanted += padded[rank * share : (rank + 1) * share]
    assert elements == wanted
    assert all(
        part.numel == (0 if part.name is None else numels[int(part.name[1:])]) for part in rank_major(parts, ranks)
    )
