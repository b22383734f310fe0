"""Numbers that ranks compare by a maximum: what differs is named, with a rank for each extreme."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ncz_plugins.core.transport.comparison import Extremes, RankComparison, place_of

NUMBERS = st.integers(-(1 << 40), 1 << 40)


def compared(numbers: list[dict[str, int]]) -> list[dict[str, Extremes]]:
    """What each rank finds, by a maximum as well as by what each tells all others."""
    by_maximum, by_word = (
        [RankComparison(each, rank, len(numbers)) for rank, each in enumerate(numbers)] for _ in range(2)
    )
    joined = torch.stack([each.tensor for each in by_maximum]).amax(0)
    for each in by_maximum:
        each.tensor.copy_(joined)
    for rank, each in enumerate(by_word):
        for other, told in enumerate(by_word):
            if other != rank:
                each.hear([(other, told.told)])
    found = [each.differing() for each in by_maximum]
    assert [each.differing() for each in by_word] == found
    return found


def test_what_differs_is_named_with_its_extremes_and_their_ranks():
    wanted = {"b": Extremes(-7, 0, 3, 1), "c": Extremes(0, 2, 1 << 40, 1)}
    assert (
        compared([{"a": 5, "b": -7, "c": 1}, {"a": 5, "b": 3, "c": 1 << 40}, {"a": 5, "b": 0, "c": 0}]) == [wanted] * 3
    )


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_what_is_equal_is_not_named(world_size):
    assert compared([{"a": 5, "b": -7, "c": 0}] * world_size) == [{}] * world_size


@given(st.lists(NUMBERS, min_size=1, max_size=9))
def test_the_extremes_are_those_of_the_ranks(numbers):
    (found, *others) = compared([{"a": number} for number in numbers])
    assert all(other == found for other in others)
    if min(numbers) == max(numbers):
        assert found == {}
    else:
        ends = found["a"]
        assert (ends.lowest, ends.highest) == (min(numbers), max(numbers))
        assert (ends.lowest_rank, ends.highest_rank) == (numbers.index(ends.lowest), numbers.index(ends.highest))


def test_the_place_of_a_value_is_that_of_the_first_like_it():
    names = ["min", "max", "max"]
    assert place_of(names[1], names) == 1
    assert place_of("".join(["m", "ax"]), names) == 1  # equal, and not the same
    assert place_of("sum", names) == 3  # behind all
