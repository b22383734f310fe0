"""Parts of one tensor that are reduced in groups: the groups get the right elements, and results the right places."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ncz_plugins.core.errors import PeerError
from ncz_plugins.core.regroup import regrouped
from ncz_plugins.core.training.policy import ParameterSlice


class Started:
    """A reduction that is under way until it is waited for; adds `addend` to all elements."""

    def __init__(self, tensor: torch.Tensor, addend: float, error: Exception | None = None):
        self.tensor, self.addend, self.error, self.completed = tensor, addend, error, False

    def is_completed(self) -> bool:
        return self.completed

    def wait(self, timeout=None) -> bool:
        self.completed = True
        if self.error:
            raise self.error
        self.tensor += self.addend
        return True


@st.composite
def groupings(draw):
    """Lengths of parts, and the group of each."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    count = draw(st.integers(1, len(lengths)))
    owners = draw(st.lists(st.integers(0, count - 1), min_size=len(lengths), max_size=len(lengths)))
    return lengths, owners, count


@given(groupings())
def test_every_group_is_reduced_together_and_put_back_where_it_was(drawn):
    lengths, owners, count = drawn
    groups = [[at for at, owner in enumerate(owners) if owner == group] for group in range(count)]
    groups = [group for group in groups if group]
    tensor = torch.arange(float(sum(lengths)))
    parts = [ParameterSlice(str(at), length) for at, length in enumerate(lengths)]
    before, seen = tensor.clone().split(lengths), []

    def reduce(together, its_parts):
        seen.append((together.clone(), its_parts))
        return Started(together, addend=1000.0 * len(seen))

    handle = regrouped(tensor, parts, groups, reduce)
    assert torch.equal(tensor, torch.cat(before))  # not before it is waited for
    for group, (together, its_parts) in zip(groups, seen, strict=True):
        assert its_parts == [parts[at] for at in group]
        assert torch.equal(together, torch.cat([before[at] for at in group]))
    assert handle.wait() is True and handle.is_completed()
    addend = {at: 1000.0 * (number + 1) for number, group in enumerate(groups) for at in group}
    assert torch.equal(tensor, torch.cat([piece + addend[at] for at, piece in enumerate(before)]))
    assert handle.wait() is True  # once more adds nothing
    assert torch.equal(tensor, torch.cat([piece + addend[at] for at, piece in enumerate(before)]))


def test_any_shape_is_reduced_in_place():
    tensor = torch.zeros(2, 3)
    parts = [ParameterSlice("a", 4), ParameterSlice("b", 2)]
    regrouped(tensor, parts, [[1], [0]], lambda each, _: Started(each, each.numel())).wait()
    assert tensor.tolist() == [[4, 4, 4], [4, 2, 2]]


def test_asking_whether_it_is_completed_puts_results_in_place():
    tensor, started = torch.zeros(3), []

    def reduce(together, _):
        started.append(Started(together, 1))
        return started[-1]

    handle = regrouped(tensor, [ParameterSlice("a", 2), ParameterSlice("b", 1)], [[0], [1]], reduce)
    assert not handle.is_completed() and not tensor.any()
    for each in started:
        each.completed = True
    assert handle.is_completed() and tensor.tolist() == [1, 1, 1]
    assert handle.is_success() and handle.exception() is None


def test_what_went_wrong_is_raised_and_the_results_before_it_stay():
    tensor = torch.zeros(3)
    errors = iter([None, PeerError("gone")])
    handle = regrouped(
        tensor,
        [ParameterSlice("a", 2), ParameterSlice("b", 1)],
        [[0], [1]],
        lambda each, _: Started(each, 1, next(errors)),
    )
    for _ in range(2):
        with pytest.raises(PeerError, match="gone"):
            handle.wait()
    assert not handle.is_success() and isinstance(handle.exception(), PeerError)
    assert tensor.tolist() == [1, 1, 0]
