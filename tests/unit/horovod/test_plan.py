"""Which gradients make a round, and when it is complete."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("horovod.torch")

from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.horovod import plan
from ncz_plugins.horovod.buckets import Kind, Piece
from ncz_plugins.horovod.plan import Plan

ELEMENTS = [3000, 5, 9000, 100, 4000, 70, 1, 6000]  # of float32
NAMES = [f"layer{at}" for at in (5, 0, 3, 7, 1, 6, 2, 4)]  # not in the order of the alphabet
PLACES = {name: place for place, name in enumerate(NAMES)}


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch):
    monkeypatch.setattr(plan, "ROUND_BYTES", 16_000)


def pieces(numels=ELEMENTS) -> list[Piece]:
    kind = Kind(0, 1.0, "torch.float32")
    return [
        Piece(kind, name, 0, torch.zeros(numel), ParameterSlice(name, numel), ParameterSlice(name, numel))
        for name, numel in zip(NAMES, numels)
    ]


def in_order(some) -> list[Piece]:
    return sorted(some, key=lambda piece: -PLACES[piece.name])


def test_rounds_are_neighbours_from_the_end_of_the_model():
    mine = pieces()
    rounds = [in_order(some) for _, some in Plan(mine, PLACES).cut(mine)]
    assert [piece for some in rounds for piece in some] == mine[::-1]
    for some in rounds[:-1]:
        assert sum(p.tensor.nbytes for p in some) >= plan.ROUND_BYTES > sum(p.tensor.nbytes for p in some[:-1])
    assert len(rounds) == 4


@given(order=st.permutations(range(len(ELEMENTS))))
def test_rounds_come_in_their_order_once_they_are_complete_whatever_comes_first(order):
    mine = pieces()
    made = Plan(mine, PLACES)
    expected = [in_order(some) for _, some in made.cut(mine)]
    for _ in range(2):  # steps
        there, came = set(), []
        for at in order:
            there.add(mine[at])
            came += [in_order(some) for _, some in made.take([mine[at]])]
            complete = next((n for n, some in enumerate(expected) if not there.issuperset(some)), len(expected))
            assert came == expected[:complete]
        assert came == expected
        made.begin()


def test_nothing_comes_any_more_once_it_is_left():
    mine = pieces()
    made = Plan(mine, PLACES)
    assert list(made.take(mine[-1:])) == [(0, mine[-1:])]
    made.leave()
    assert list(made.take(mine)) == []
    made.begin()
    assert len(list(made.take(mine))) == 4


def test_pieces_that_it_was_not_made_for():
    mine, others = pieces(), pieces([*ELEMENTS[:-1], ELEMENTS[-1] + 1])
    made = Plan(mine, PLACES)
    assert made.covers(reversed(pieces()))
    assert not made.covers(mine[1:]) and not made.covers(others) and not made.covers([*mine, others[-1]])
    assert list(made.take(others[-1:])) == []


def test_without_places_all_is_one_round():
    mine = pieces()
    assert [len(some) for _, some in Plan(mine, {}).cut(mine)] == [len(mine)]
