"""Publishing weights again and again: workers that follow, join late, miss versions, or lose theirs."""

import pytest
import torch
import torch.distributed as dist

from ncz_plugins import MismatchError, UnsupportedError, WeightPublisher, WeightSubscriber, WeightSync, apply_patch
from ncz_plugins.weights import make, sync
from ncz_plugins.weights.apply import read_patch
from ncz_plugins.weights.make import make_patch_of
from ncz_plugins.weights.tensors import held_in


def versions(count: int) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    made = [{"w": 0.02 * torch.randn(5000, generator=random), "frozen": torch.ones(5000)}]
    for _ in range(count - 1):
        made.append({"w": made[-1]["w"] + 1e-4 * torch.randn(5000, generator=random), "frozen": torch.ones(5000)})
    return [{name: tensor.bfloat16() for name, tensor in each.items()} for each in made]


def same(a, b) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b) and a.keys() == b.keys()


def test_a_worker_follows():
    publisher, worker = WeightPublisher(), WeightSubscriber()
    sizes = []
    for number, state in enumerate(versions(4), 1):
        assert publisher.publish(state) == number
        patch = publisher.patch(worker.identity)
        sizes.append(len(patch))
        assert same(worker.apply(patch), state) and worker.identity == publisher.identity
    assert max(sizes[1:]) < 0.4 * sizes[0]


def test_a_tensor_that_has_more_or_fewer_frames_than_before():
    """Checksums of the version before are known, and are of no use for it."""
    publisher, worker = WeightPublisher(), WeightSubscriber()
    for size in (10, 1_500_000, 10, 0, 3_000_000):
        state = {"w": torch.arange(size, dtype=torch.float32), "same": torch.ones(7)}
        publisher.publish(state)
        assert same(worker.apply(publisher.patch(worker.identity)), state) and worker.identity == publisher.identity


def test_a_version_has_the_number_that_is_given():
    publisher, [first, second] = WeightPublisher(), versions(2)
    for number, state in ((None, first), (700, second), (None, first)):
        publisher.publish(state, number)
        assert read_patch(publisher.patch())[0].number == number
    with pytest.raises(UnsupportedError, match="number must be an integer from 0 to"):
        publisher.publish(second, -1)
    assert publisher.version == 3 and same(apply_patch(publisher.patch()), first)


def test_a_patch_that_is_made_while_another_version_is_published_leads_to_the_one_before_and_is_given_once(monkeypatch):
    """Requests are served on threads of their own: a patch that stayed would keep workers a version behind."""
    base, second, third = versions(3)
    publisher = WeightPublisher(keep=3, base=base)
    begin = publisher.identity
    publisher.publish(second)

    def make_meanwhile(*arguments, **named):
        monkeypatch.setattr(sync, "make_patch_of", make_patch_of)
        publisher.publish(third)
        return make_patch_of(*arguments, **named)

    monkeypatch.setattr(sync, "make_patch_of", make_meanwhile)
    assert same(apply_patch(publisher.patch(begin), base), second)
    assert same(apply_patch(publisher.patch(begin), base), third)


def test_a_worker_that_missed_versions_gets_one_patch_or_all():
    publisher, worker = WeightPublisher(keep=3), WeightSubscriber()
    first, *rest = versions(5)
    publisher.publish(first)
    worker.apply(publisher.patch())
    for state in rest[:2]:
        publisher.publish(state)
    patch = publisher.patch(worker.identity)
    assert len(patch) < len(publisher.patch()) and same(worker.apply(patch), rest[1])
    old = worker.identity
    for state in versions(9)[5:]:  # more than are kept
        publisher.publish(state)
    assert publisher.patch(old) == publisher.patch()
    assert same(worker.apply(publisher.patch(old)), versions(9)[-1])


def test_a_late_worker_and_one_that_follows_get_what_each_needs():
    publisher, early, late = WeightPublisher(), WeightSubscriber(), WeightSubscriber()
    for state in versions(3):
        publisher.publish(state)
        early.apply(publisher.patch(early.identity))
    assert same(late.apply(publisher.patch(late.identity)), early.weights)


def test_a_patch_for_another_version_leaves_the_weights_as_they_are():
    publisher, worker = WeightPublisher(), WeightSubscriber()
    states = versions(3)
    publisher.publish(states[0])
    worker.apply(publisher.patch())
    publisher.publish(states[1])
    between = publisher.identity
    publisher.publish(states[2])
    followed = worker.identity
    with pytest.raises(MismatchError):
        worker.apply(publisher.patch(between))
    assert same(worker.weights, states[0]) and worker.identity == followed


def test_a_worker_that_changed_its_weights_in_place_recovers_by_itself():
    publisher, worker = WeightPublisher(keep=3), WeightSubscriber()
    first, second, third = versions(3)
    publisher.publish(first)
    worker.apply(publisher.patch(worker.identity))
    publisher.publish(second)
    worker.weights["w"][0] += 1
    assert worker.identity not in (None, publisher.identity)
    assert same(worker.apply(publisher.patch(worker.identity)), second)
    # Between asking for a patch and applying it: this patch fits no more, the next one does.
    publisher.publish(third)
    patch = publisher.patch(worker.identity)
    worker.weights["w"].zero_()
    with pytest.raises(MismatchError, match="changed in place"):
        worker.apply(patch)
    assert same(worker.apply(publisher.patch(worker.identity)), third)


def test_a_worker_that_follows_gets_a_whole_version_whatever_happened_to_its_weights():
    publisher, worker = WeightPublisher(), WeightSubscriber()
    asked = []

    def ask(identity):
        asked.append(identity)
        if identity is not None:
            worker.weights["w"][0] += 1  # while the request is on its way
        return publisher.patch(identity)

    first, second = versions(2)
    publisher.publish(first)
    assert same(worker.follow(ask), first) and asked == [None]
    publisher.publish(second)
    assert same(worker.follow(ask), second) and len(asked) == 3 and asked[-1] is None


def test_a_worker_of_several_ranks_notices_weights_that_were_changed_in_place():
    """Also those that no patch touches, which no checksum of a frame covers."""
    states = versions(3)
    names = ["w", "frozen"]  # one tensor for each rank

    def patches(new, old=None):
        held = [[None if state is None else held_in({name: state[name]}, "") for state in (new, old)] for name in names]
        return [make_patch_of(*each, rank, 2) for rank, each in enumerate(held)]

    first, second, third = states
    worker = WeightSubscriber()
    worker.apply(patches(first))
    assert same(worker.apply(patches(second, first)), second)
    worker.weights["frozen"][0] += 1
    with pytest.raises(MismatchError, match="changed in place since the last patch, and the patch holds changes: ask"):
        worker.apply(patches(third, second))
    assert same(worker.apply(patches(third)), third)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_worker_may_begin_with_a_checkpoint(keep):
    """Its first patch holds changes if the publisher began with the same one and still keeps it."""
    first, second, third = versions(3)
    copy = {name: tensor.clone() for name, tensor in first.items()}
    publisher, worker, other = WeightPublisher(keep, base=first), WeightSubscriber(copy), WeightSubscriber(third)
    assert publisher.identity == worker.identity
    with pytest.raises(UnsupportedError, match="publish"):
        publisher.patch()
    publisher.publish(second)
    patch, whole = publisher.patch(worker.identity), publisher.patch(other.identity)
    assert (len(patch) < 0.4 * len(whole)) == (keep == 2)
    assert same(worker.apply(patch), second) and same(other.apply(whole), second) and same(copy, first)


def test_a_version_is_hashed_once(monkeypatch):
    """Publishing reads the new version, and patches read no checksums again."""
    read = []
    monkeypatch.setattr(make, "digest_of", lambda *each, digest=make.digest_of: read.append(1) or digest(*each))
    publisher = WeightPublisher()
    for number, state in enumerate(versions(3), 1):
        publisher.publish(state)
        publisher.patch(), publisher.patch(publisher.identity)
        assert len(read) == 2 * number


def test_tied_tensors_are_kept_and_held_once():
    publisher, worker = WeightPublisher(), WeightSubscriber()
    for state in versions(2):
        publisher.publish(state | {"head": state["w"]})
        weights = worker.apply(publisher.patch(worker.identity))
        assert weights["w"] is weights["head"] and same(weights, state | {"head": state["w"]})
        [*_, kept] = publisher._kept.values()
        assert kept.held["w"] is kept.held["head"] and kept.held["w"].data.ctypes.data != state["w"].data_ptr()


def test_what_is_published_is_copied():
    publisher, worker = WeightPublisher(), WeightSubscriber()
    state = versions(1)[0]
    publisher.publish(state)
    exact = {name: tensor.clone() for name, tensor in state.items()}
    state["w"].zero_()
    assert same(worker.apply(publisher.patch()), exact)


def test_the_same_weights_again_cost_next_to_nothing():
    publisher, worker = WeightPublisher(), WeightSubscriber()
    state = versions(1)[0]
    publisher.publish(state)
    worker.apply(publisher.patch())
    assert publisher.publish(state) == 2
    patch = publisher.patch(worker.identity)
    assert len(patch) < 100 and same(worker.apply(patch), state)


def test_an_older_version_that_is_published_again_is_the_newest():
    """Of those that are kept it is then the last one to go."""
    publisher = WeightPublisher(keep=2)
    first, second, third = versions(3)
    for number, state in enumerate((first, second, first), 1):
        assert publisher.publish(state) == number
        again = publisher.identity
        assert same(WeightSubscriber().apply(publisher.patch()), state)
    publisher.publish(third)
    worker = WeightSubscriber()
    worker.weights = first
    assert worker.identity == again
    patch = publisher.patch(again)
    assert len(patch) < len(publisher.patch()) and same(worker.apply(patch), third)


def test_mistakes_are_told():
    with pytest.raises(UnsupportedError, match="publish"):
        WeightPublisher().patch()
    with pytest.raises(ValueError, match="keep must be an integer, 1 or more, got 0"):
        WeightPublisher(keep=0)


class Wrapped(torch.Tensor):
    """Has no memory that a patch could hold."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


@pytest.mark.parametrize(
    "value", [{"state": 1}, None, torch.ones(3).to_sparse(), torch.ones(3, device="meta"), Wrapped()], ids=type
)
def test_what_can_not_be_published_leaves_all_as_it_was(value):
    publisher, worker = WeightPublisher(), WeightSubscriber()
    [state] = versions(1)
    publisher.publish(state)
    with pytest.raises(UnsupportedError, match="extra"):
        publisher.publish(state | {"extra": value})
    assert publisher.version == 1 and same(worker.apply(publisher.patch()), state)


def test_weights_that_no_version_has_begin_anew():
    publisher, worker = WeightPublisher(), WeightSubscriber()
    [state] = versions(1)
    publisher.publish(state)
    worker.apply(publisher.patch())
    worker.weights["w"] = torch.ones(3).to_sparse()
    assert worker.identity is None and same(worker.apply(publisher.patch(worker.identity)), state)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_workers_that_are_fewer_versions_behind_than_are_kept_get_changes(keep):
    publisher, identities = WeightPublisher(keep), []
    for state in versions(5):
        publisher.publish(state)
        identities.append(publisher.identity)
    whole = publisher.patch()
    assert [publisher.patch(each) is whole for each in identities] == [True] * (5 - keep) + [False] * keep


@pytest.mark.parametrize("keep", [0, -1, 1.5, "2"])
def test_how_many_versions_are_kept(keep):
    with pytest.raises(ValueError, match="keep"):
        WeightPublisher(keep)


@pytest.mark.parametrize(
    ("backends", "device"), [("gloo", "cpu"), ("cpu:gloo,cuda:gloo", "cpu"), ("cuda:gloo", "cuda")]
)
def test_tensors_are_where_the_group_takes_them(backends, device):
    """On a GPU only if nothing serves the CPU, as with "nccl", "nccl2" and "nccl-legacy"."""
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert WeightSync()._device.type == device
    finally:
        dist.destroy_process_group()
