"""Which parameters the tensors that DeepSpeed reduces belong to, by their addresses."""

import pytest
import torch

pytest.importorskip("deepspeed")

from ncz_plugins.core.training.policy import ParameterSlice  # noqa: E402
from ncz_plugins.deepspeed.parameter_slices import PADDING, parts_of, rank_major  # noqa: E402


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def memory(request):
    """A flat gradient buffer of 100 elements: "a" has the first 30, "b" the next 50, padding the rest."""
    flat = torch.zeros(100, dtype=request.param)
    return flat, [("b", flat[30:80].view(5, 10)), ("a", flat[:30]), (PADDING, flat[80:])]


def test_whole_gradients(memory):
    flat, gradients = memory
    expected = [ParameterSlice("b", 50, 0, 50), ParameterSlice("a", 30, 0, 30)]
    assert parts_of([flat[30:80], flat[:30]], gradients) == (expected, 0)


def test_a_tensor_across_borders(memory):
    flat, gradients = memory
    expected = [ParameterSlice("a", 10, 20, 30), ParameterSlice("b", 50, 0, 50), ParameterSlice(None, 5, numel=0)]
    assert parts_of([flat[20:85]], gradients) == (expected, 0)


def test_a_tensor_inside_a_gradient(memory):
    flat, gradients = memory
    assert parts_of([flat[41:42]], gradients) == ([ParameterSlice("b", 1, 11, 50)], 0)


def test_no_elements(memory):
    flat, gradients = memory
    assert parts_of([flat[:0]], gradients) == ([], 0)
    assert parts_of([], []) == ([], 0)


def test_elements_without_a_known_name_are_counted(memory):
    flat, gradients = memory
    unnamed = [(None if name == "a" else name, gradient) for name, gradient in gradients]
    parts, unknown = parts_of([flat[20:40]], unnamed)
    assert parts == [ParameterSlice(None, 10, 20, 30), ParameterSlice("b", 10, 0, 50)]
    assert unknown == 10


@pytest.mark.parametrize("known", [[], [slice(0, 30)], [slice(60, 100)]])
def test_memory_of_no_gradient_is_unknown(memory, known):
    flat, _ = memory
    gradients = [("a", flat[where]) for where in known]
    assert parts_of([flat[40:50]], gradients) == ([ParameterSlice(None, 10)], 10)


def test_a_tensor_that_ends_behind_the_last_gradient(memory):
    flat, gradients = memory
    parts, unknown = parts_of([flat[25:50]], [(name, gradient) for name, gradient in gradients if name == "a"])
    assert parts == [ParameterSlice("a", 5, 25, 30), ParameterSlice(None, 20)]
    assert unknown == 20


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_rank_major_is_the_order_of_padded_shares(ranks):
    """Against the tensor of reduce_scatter_coalesced: each element's parameter and index, -1 for padding."""
    sizes = {"a": 7, "b": 1, "c": 12}
    names = list(sizes)
    shares = []
    for number, numel in enumerate(sizes.values()):
        padded = torch.full((-(-numel // ranks) * ranks,), -1)
        padded[:numel] = 100 * number + torch.arange(numel)
        shares.append(padded.view(ranks, -1))
    expected = torch.cat(shares, dim=1).flatten().tolist()
    found = []
    for part in rank_major([ParameterSlice(name, numel, 0, numel) for name, numel in sizes.items()], ranks):
        if part.name is None:
            assert part.numel == 0
            found += [-1] * part.length
        else:
            assert part.numel == sizes[part.name]
            found += [100 * names.index(part.name) + part.start + i for i in range(part.length)]
    assert found == expected
