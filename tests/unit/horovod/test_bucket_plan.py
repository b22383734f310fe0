"""Which gradients make a bucket, and when it is complete."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("horovod.torch")

from ncz_plugins.core.errors import PeerError
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.horovod import bucket_plan
from ncz_plugins.horovod.bucket_plan import BucketPlan
from ncz_plugins.horovod.pending import PendingTensor, Signature

ELEMENTS = [3000, 5, 9000, 100, 4000, 70, 1, 6000]  # of float32
NAMES = [f"layer{at}" for at in (5, 0, 3, 7, 1, 6, 2, 4)]  # not in the order of the alphabet
POSITIONS = {name: position for position, name in enumerate(NAMES)}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(bucket_plan, "BUCKET_BYTES", 16_000)


def tensors(numels=ELEMENTS) -> list[PendingTensor]:
    signature = Signature(0, 1.0, 1.0, "float32", "cpu")
    return [
        PendingTensor(signature, name, 0, torch.zeros(numel), ParameterSlice(name, numel), ParameterSlice(name, numel))
        for name, numel in zip(NAMES, numels)
    ]


def in_order(some) -> list[PendingTensor]:
    return sorted(some, key=lambda piece: -POSITIONS[piece.name])


def test_buckets_are_neighbours_from_the_end_of_the_model():
    mine = tensors()
    buckets = [in_order(some) for _, some in BucketPlan(mine, POSITIONS).buckets(mine)]
    assert [piece for some in buckets for piece in some] == mine[::-1]
    for some in buckets[:-1]:
        assert sum(p.tensor.nbytes for p in some) >= bucket_plan.BUCKET_BYTES > sum(p.tensor.nbytes for p in some[:-1])
    assert len(buckets) == 4


@given(order=st.permutations(range(len(ELEMENTS))))
def test_buckets_come_in_their_order_once_they_are_complete_whatever_comes_first(order):
    mine = tensors()
    made = BucketPlan(mine, POSITIONS)
    expected = [in_order(some) for _, some in made.buckets(mine)]
    for _ in range(2):  # steps
        there, came = set(), []
        for at in order:
            there.add(mine[at])
            for _, some in made.complete([mine[at]]):
                assert [piece.order for piece in some] == sorted(piece.order for piece in some)  # as on other ranks
                came.append(in_order(some))
            complete = next((n for n, some in enumerate(expected) if not there.issuperset(some)), len(expected))
            assert came == expected[:complete]
        assert came == expected
        made.begin()


def test_nothing_comes_any_more_once_it_is_stopped():
    mine = tensors()
    made = BucketPlan(mine, POSITIONS)
    assert list(made.complete(mine[-1:])) == [(0, mine[-1:])]
    made.stop()
    assert list(made.complete(mine)) == []
    made.begin()
    assert len(list(made.complete(mine))) == 4


def test_a_bucket_is_not_complete_by_a_tensor_that_was_dropped():
    """As by an optimizer that is restored in the middle of a backward pass."""
    mine = tensors()
    made = BucketPlan(mine, POSITIONS)
    _, (number, bucket), *_ = made.buckets(mine)
    assert len(bucket) == 3
    assert len(list(made.complete(mine[-1:]))) == number == 1
    assert list(made.complete([tensors()[mine.index(bucket[0])]])) == []  # which nobody holds any more
    assert list(made.complete(bucket[1:])) == []
    [(_, together)] = made.complete(bucket[:1])
    assert set(together) == set(bucket)


def test_after_an_error_nothing_more_is_begun_in_this_step():
    class Failed:
        def wait(self):
            raise PeerError("gone")

    mine = tensors()
    made = BucketPlan(mine, POSITIONS)
    made.under_way.append(Failed())
    with pytest.raises(PeerError, match="gone"):
        made.wait()
    assert list(made.complete(mine)) == []


def test_tensors_that_it_was_not_made_for():
    mine, others = tensors(), tensors([*ELEMENTS[:-1], ELEMENTS[-1] + 1])
    made = BucketPlan(mine, POSITIONS)
    assert made.covers(reversed(tensors()))
    assert not made.covers(mine[1:]) and not made.covers(others) and not made.covers([*mine, others[-1]])
    assert list(made.complete(others[-1:])) == []


def test_buckets_that_ranks_would_divide_differently_become_one():
    mine, plan = tensors(), BucketPlan(tensors(), POSITIONS)
    assert len({plan.bucket_of(each) for each in mine}) > 1
    plan.merge()
    assert [number for number, _ in plan.buckets(mine)] == [0] and plan.stopped
    plan.begin()
    assert list(plan.complete(mine[1:])) == []
    [(number, together)] = plan.complete(mine[:1])
    assert number == 0 and len(together) == len(mine)


def test_without_positions_all_is_one_bucket():
    mine = tensors()
    assert [len(some) for _, some in BucketPlan(mine, {}).buckets(mine)] == [len(mine)]
