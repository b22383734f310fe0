"""Threads: the same bytes whatever their number, errors in their place, and torch's number of threads as it was."""

import os
import threading
import weakref

import numpy as np
import pytest
import torch

from ncz_plugins import MismatchError, PartlyAppliedError, apply_patch, make_patch, stage_patch
from ncz_plugins.weights import boxes, threads
from ncz_plugins.weights.apply import read_patches, values_of
from ncz_plugins.weights.tensors import held_in
from ncz_plugins.weights.threads import in_order


@pytest.fixture(params=[1, 2, 5])
def count(request, monkeypatch):
    """How many threads torch computes with. Frames are small."""
    monkeypatch.setattr(boxes, "FRAME_ELEMENTS", 64)
    monkeypatch.setattr(threads, "FRAME_ELEMENTS", 64)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


def versions() -> tuple[dict, dict]:
    random = torch.Generator().manual_seed(0)
    old = {f"w{number}": torch.randn(number, 30, generator=random) for number in range(20)}
    old |= {"bytes": torch.arange(2000).to(torch.int8), "narrow": torch.randn(500, generator=random).bfloat16().float()}
    new = {name: x.clone() for name, x in old.items()}
    for name in ("w3", "w15", "w19", "bytes", "narrow"):
        new[name].view(-1)[::7] = 1
    return old, new


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_pause_takes_one_thread_whatever_torch_has():
    """A pause that waits for several threads takes long where all cores are busy."""

    def pause():
        before = len(os.listdir("/proc/self/task"))
        staged.apply()
        found.append(len(os.listdir("/proc/self/task")) - before)

    number, found = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        old, new = ({"w": torch.full((1 << 18,), value, dtype=torch.bfloat16)} for value in (1, 2))
        staged = stage_patch(make_patch(new, old), old, decoded=True)
        # A thread of its own has no other threads yet, which torch would start.
        thread = threading.Thread(target=pause)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(number)
    assert found[0] <= 0 and same(old, new)  # one of another test may have ended


def test_results_come_in_order_and_an_error_in_its_place(count):
    def work(task):
        names.add(threading.current_thread().name)
        return 100 // task

    names = set()
    assert list(in_order(work, range(1, 200), lambda task: 20)) == [100 // task for task in range(1, 200)]
    assert (names == {threading.current_thread().name}) == (count == 1)
    found = in_order(work, [5, 4, 0, 2], lambda task: 20)
    assert [next(found), next(found)] == [20, 25]
    with pytest.raises(ZeroDivisionError):
        next(found)
    assert next(in_order(work, range(1, 200), lambda task: 20)) == 100  # and the rest is not wanted


def test_bytes_do_not_depend_on_threads(count):
    old, new = versions()
    patch, whole = make_patch(new, old), make_patch(new)
    torch.set_num_threads(1)
    assert patch == make_patch(new, old) and whole == make_patch(new)
    torch.set_num_threads(count)
    assert same(apply_patch(patch, old), new) and same(apply_patch(whole), new)
    for decoded in (False, True):
        weights = {name: x.clone() for name, x in old.items()}
        stage_patch(patch, weights, decoded).apply()
        assert same(weights, new)


class Made(dict):
    """Tensors that are made anew each time, and counted while somebody holds their memory."""

    live = most = 0

    def __getitem__(self, name: str):
        held = super().__getitem__(name)
        memory = held.data.copy()
        self.live, self.most = self.live + 1, max(self.most, self.live + 1)
        weakref.finalize(memory, self._freed)
        return held._replace(data=memory)

    def _freed(self) -> None:
        self.live -= 1


def test_tensors_that_did_not_change_are_read_in_frames_and_a_few_of_them_are_there(count):
    """One that is made while frames of the one before wait, and one whose last frame was just taken."""
    old = {f"w{number}": torch.full((40, 50), float(number)) for number in range(8)}
    held = held_in(old, "old")
    made, version = Made(held), read_patches(make_patch({"other": torch.ones(9)} | old, old))
    values = []
    for x in values_of(version, old, held, made):
        assert len(x) <= 64
        values.append(x.copy())
    assert np.array_equal(np.concatenate(values), torch.cat([x.view(-1) for x in old.values()]).numpy())
    assert made.most <= 3


def test_errors_name_their_tensor(count):
    old, new = versions()
    patch = make_patch(new, old)
    weights = {name: x.clone() for name, x in old.items()}
    staged = stage_patch(patch, weights)
    weights["w15"].add_(1)
    with pytest.raises(MismatchError, match="w15: its values are not those of the version"):
        stage_patch(patch, weights)
    with pytest.raises(PartlyAppliedError) as failed:
        staged.apply()
    assert (failed.value.new, failed.value.mixed) == (["w3"], "w15")
    assert torch.equal(weights["w3"], new["w3"]) and torch.equal(weights["w19"], old["w19"])


def test_threads_that_begin_meanwhile_compute_with_as_many_cores_as_others():
    """Also threads that use torch for the first time while a version is coded."""
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        coded = in_order(lambda task: task, range(8), lambda task: threads.FRAME_ELEMENTS)
        next(coded)
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert found == [3] and list(coded) == list(range(1, 8))
    finally:
        torch.set_num_threads(before)
