"""Weights over torch.distributed: every worker has every version to the bit, whatever happened to it in between."""

import os

import pytest
import torch
import torch.distributed as dist
from on_rank import attempt, leave, leave_alone, raises, rank, start
from scenarios import on_ranks, ranks

from ncz_plugins import PatchKeyError, UnsupportedError, WeightSync

VERSIONS, LOST, CHANGED = 6, 3, 4  # the last two: before which version that happens to rank 2


def versions() -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    made = [{"w": 0.02 * torch.randn(50_000, generator=random), "n": torch.tensor(0)}]
    for number in range(1, VERSIONS):
        made.append({"w": made[-1]["w"] + 1e-4 * torch.randn(50_000, generator=random), "n": torch.tensor(number)})
    return [{"w": each["w"].bfloat16(), "n": each["n"]} for each in made]


def same(weights: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(weights[name], tensor) for name, tensor in state.items())


@ranks(3)
def test_workers_follow_a_trainer(group):
    """Also one that lost its weights, and one that changed them."""
    sync, sent = WeightSync(group, src=1), []
    for number, state in enumerate(versions()):
        if rank == 1:
            assert sync.publish(state) == number + 1
            sent.append(sync.bytes_sent)
            continue
        if rank == 2 and number == LOST:
            sync = WeightSync(group, src=1)  # as after a restart
        if rank == 2 and number == CHANGED:
            weights["w"].zero_()  # noqa: F821 - of the version before
        weights = sync.receive()
        assert same(weights, state)
    if rank == 1:
        whole, *later = sent
        assert all(size < 0.5 * whole for at, size in enumerate(later, 1) if at not in (LOST, CHANGED))
        for at in (LOST, CHANGED):  # all of it for one, changes for the other
            assert whole < sent[at] < 1.5 * whole


@ranks(3)
def test_a_worker_with_another_key_takes_nothing_and_the_others_go_on(group):
    """Rank 1 has no key at first."""
    key, first, second = bytes(range(32)), *versions()[:2]
    sync = WeightSync(group, key=None if rank == 1 else key)
    if rank == 0:
        for state in (first, second):
            sync.publish(state)
        return
    if rank == 1:
        raises(PatchKeyError, sync.receive, "no key was given")
        sync = WeightSync(group, key=key)
    else:
        assert same(sync.receive(), first)
    assert same(sync.receive(), second)


@ranks(3)
def test_workers_begin_with_the_checkpoint_on_their_disk(group):
    """Its first version costs what differs; a worker with another one, or with none, gets all. Tied tensors go once."""
    first, second, third = (each | {"head": each["w"]} for each in versions()[:3])
    sizes = []
    for bases in ((first, first, first), (first, third, None), (None, first, first)):
        sync = WeightSync(group, base=bases[rank])
        if rank == 0:
            sync.publish(second)
            sizes.append(sync.bytes_sent)
            continue
        weights = sync.receive()
        assert same(weights, second) and weights["head"] is weights["w"]
    if rank == 0:
        changes, whole, unknown = sizes
        assert changes < 0.5 * whole and whole == unknown < 1.01 * second["w"].nbytes


@ranks(3)
def test_what_can_not_be_published_is_told_to_workers_at_once_and_all_go_on(group):
    sync, state = WeightSync(group, src=1), versions()[0]
    unfit = {"w": torch.ones(3).to_sparse()}
    if rank == 1:
        sync.publish(state)
        raises(UnsupportedError, lambda: sync.publish(unfit), "sparse")
        raises(UnsupportedError, lambda: sync.publish([torch.ones(3)]))
        assert sync.publish(state) == 2
        raises(UnsupportedError, sync.receive, "which publishes")
    else:
        weights = sync.receive()
        for _ in range(2):
            refused = attempt(sync.receive)
            assert refused["error"] == "MismatchError" and "rank 1 could not publish" in refused["message"], refused
            assert refused["seconds"] < 20
        weights["w"] = unfit["w"]  # which the next version replaces
        weights = sync.receive()
        assert same(weights, state)
        raises(UnsupportedError, lambda: sync.publish({}), "rank 1 publishes")


@ranks(3)
def test_a_trainer_by_itself_sends_nothing(group):
    alone = [dist.new_group([each]) for each in range(3)][rank]
    sync = WeightSync(alone, src=rank)
    assert sync.publish({"w": torch.ones(3)}) == 1 and sync.bytes_sent == 0


@ranks(3)
def test_a_group_of_some_ranks(group):
    """Its trainer is not the rank of the group that it is of all, and the others have no part in it."""
    first, second, *_ = versions()
    some = dist.new_group([1, 2])
    if rank == 0:
        return
    for keep in (2, 1):
        sync, sent = WeightSync(some, src=2, keep=keep), []
        for state in (first, second):
            if rank == 2:
                sync.publish(state)
                sent.append(sync.bytes_sent)
            else:
                assert same(sync.receive(), state)
        if rank == 2 and keep == 2:
            assert sent[1] < 0.5 * sent[0]
        elif rank == 2:
            assert sent[1] > 0.9 * sent[0]  # where only the newest is kept, nothing tells what changed
    raises(UnsupportedError, lambda: WeightSync(some, src=0), "src", "rank of this group", "[1, 2]")


def die_before_or_within_the_second_version(when: str) -> None:
    start()
    sync = WeightSync()
    state = {"w": torch.ones(1000)}
    if rank == 0:
        sync.publish(state)
        leave("published")
        if when == "within":  # where ranks have compared their versions, and sizes come next
            sync._broadcast = lambda tensor: os._exit(0)
            sync.publish(state)
        os._exit(0)
    sync.receive()
    leave_alone(attempt(sync.receive))


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_dead_trainer_is_an_error(when, tmp_path):
    published, failed = on_ranks(2, die_before_or_within_the_second_version, tmp_path, when)
    assert published == "published"
    assert failed["error"] == "PeerError" and failed["seconds"] < 30
