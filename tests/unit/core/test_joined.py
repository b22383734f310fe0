"""Several tensors that one call reduces: what the call gets, where results go, and the handles of several calls."""

import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import play_communicators, same_bits

from ncz_plugins.core.call import Joined, joined_for, slices_of
from ncz_plugins.core.communicator import Communicator
from ncz_plugins.core.errors import PeerError
from ncz_plugins.core.runtime.handle import Handles
from ncz_plugins.core.runtime.worker import Worker
from ncz_plugins.core.training.policy import ParameterSlice

LENGTHS = [0, 1, 2, 127, 997, 5003]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
BOUND = 0.01


# ------------------------------------------------------------------ pieces of memory


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_pieces_are_taken_when_the_job_runs_and_get_the_results(lengths):
    tensor = torch.zeros(sum(lengths))
    slices, _ = slices_of(tensor, [ParameterSlice(None, length) for length in lengths])
    joined = Joined(slices[::-1])
    seen = []

    tensor += torch.arange(float(sum(lengths)))  # by a call before it, say
    before = tensor.clone()
    with joined.filled():
        seen.append(joined.whole.clone())
        joined.whole += 1000
    assert torch.equal(seen[0], torch.cat(before.split(lengths)[::-1]))
    assert torch.equal(tensor, before + 1000)


def test_pieces_stay_as_they_are_if_the_job_fails():
    tensor = torch.zeros(2, 3, requires_grad=True)
    slices, _ = slices_of(tensor, [ParameterSlice("a", 4), ParameterSlice("b", 2)])
    joined = Joined(slices)

    with pytest.raises(PeerError, match="gone"), joined.filled():
        joined.whole += 1
        raise PeerError("gone")
    assert not tensor.any()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 3))
def test_pieces_that_lie_one_behind_the_other_are_taken_as_they_are(lengths, before):
    tensor = torch.arange(float(before + sum(lengths)))[before:]
    whole, joined = joined_for(list(tensor.split(lengths)), is_written=True)
    assert joined == () and torch.equal(whole, tensor)
    assert not whole.numel() or whole.data_ptr() == tensor.data_ptr()


@given(st.lists(st.integers(1, 5), min_size=2, max_size=8), st.booleans())
def test_pieces_that_lie_elsewhere_are_copied_in_or_out_but_not_both(lengths, is_written):
    pieces = list(torch.arange(float(sum(lengths))).split(lengths))[::-1]
    whole, [joined] = joined_for(pieces, is_read=not is_written, is_written=is_written)
    before = torch.cat(pieces)
    with joined.filled():
        assert is_written or torch.equal(whole, before)
        whole.fill_(-1)
    assert torch.equal(torch.cat(pieces), whole if is_written else before)


# ------------------------------------------------------------------ all ranks


def reduced(tensors, op, communicator: Communicator) -> tuple[list[torch.Tensor], dict]:
    """What all ranks get for `tensors(rank)`, and what was counted."""
    mine = tensors(communicator.rank)
    communicator.all_reduce_coalesced(mine, op)
    total = communicator.stats.total
    return mine, {"calls": total.calls, "compressed": total.compressed_calls, "bypasses": total.bypasses}


def reduced_by_hand(tensors, op, communicator: Communicator) -> tuple[list[torch.Tensor], dict]:
    """The same by `all_reduce` of what has one dtype, put together."""
    mine = tensors(communicator.rank)
    for dtype in dict.fromkeys(tensor.dtype for tensor in mine):
        its = [tensor for tensor in mine if tensor.dtype == dtype]
        whole = torch.cat(its)
        communicator.all_reduce(whole, op)
        for tensor, result in zip(its, whole.split([tensor.numel() for tensor in its])):
            tensor.copy_(result)
    total = communicator.stats.total
    return mine, {"calls": total.calls, "compressed": total.compressed_calls, "bypasses": total.bypasses}


@settings(max_examples=25, deadline=None)
@given(
    lists=st.lists(st.tuples(st.sampled_from(LENGTHS), st.sampled_from(DTYPES)), min_size=1, max_size=6),
    world_size=st.sampled_from([2, 3]),
    config=st.sampled_from(
        [
            {"quantizer": {"mode": "abs", "value": BOUND}, "transport": {"min_bytes": 0}},
            {"quantizer": {"kind": "lossless"}, "transport": {"min_bytes": 0}},
            {"quantizer": {"mode": "abs", "value": BOUND}, "transport": {"min_bytes": 4000}},  # some go plain
        ]
    ),
    op=st.sampled_from([dist.ReduceOp.SUM, dist.ReduceOp.MAX]),
    poisoned=st.booleans(),
)
def test_a_list_of_tensors_is_reduced_as_its_dtypes_put_together_are(lists, world_size, config, op, poisoned):
    def tensors(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        made = [torch.randn(length, generator=generator).mul_(3).to(dtype) for length, dtype in lists]
        if poisoned and rank == 1 and made[-1].is_floating_point():
            made[-1][made[-1].numel() // 2 :] = float("nan")
        return made

    results, counted = zip(*play_communicators(world_size, config, partial(reduced, tensors, op)))
    assert all(same_bits(list(of_all)) for of_all in zip(*results))
    assert counted == (counted[0],) * world_size
    wanted, counted_by_hand = play_communicators(world_size, config, partial(reduced_by_hand, tensors, op))[0]
    assert all(same_bits([result, other]) for result, other in zip(results[0], wanted, strict=True))
    assert counted[0] == counted_by_hand
    combine = torch.sum if op == dist.ReduceOp.SUM else torch.amax
    for at, result in enumerate(results[0]):
        exact = combine(torch.stack([tensors(rank)[at] for rank in range(world_size)]).double(), 0)
        bound = world_size * BOUND + (0.05 if result.dtype == torch.bfloat16 else 1e-5) * (1 + exact.nan_to_num().abs())
        assert torch.equal(result.isnan(), exact.isnan())
        assert ((result.double() - exact).abs() <= bound)[~exact.isnan()].all()


# ------------------------------------------------------------------ handles of several calls


@pytest.fixture
def worker():
    worker = Worker("test")
    yield worker
    assert worker.close(5)


def gone() -> None:
    raise PeerError("gone")


def test_several_handles_are_one(worker):
    tensors = [torch.zeros(2), torch.zeros(3)]
    handle = Handles([worker.submit(partial(each.fill_, 7)).giving(each) for each in tensors]).giving(*tensors)
    assert handle.wait() is True and handle.wait(1) is True
    assert handle.is_completed() and handle.is_success() and handle.exception() is None
    assert [tensor.tolist() for tensor in tensors] == [[7, 7], [7, 7, 7]]
    result = handle.get_future().wait()
    assert len(result) == 2 and all(each is tensor for each, tensor in zip(result, tensors))


def test_several_handles_share_one_time_out():
    class Slow:
        def wait(self, timeout):
            given.append(timeout)
            time.sleep(0.02)

    given: list[float] = []
    Handles([Slow(), Slow(), Slow()]).wait(0.03)
    assert given[0] <= 0.03 and given[1] <= 0.01 and 0 < given[2] <= given[1]  # none would be no limit to some works


def test_what_went_wrong_is_told_once_all_of_several_are_over(worker):
    go = threading.Event()
    failed = worker.submit(gone)
    handle = Handles([failed, worker.submit(partial(go.wait, 10))])
    with pytest.raises(PeerError):
        failed.wait()
    assert not handle.is_completed() and handle.exception() is None
    go.set()
    with pytest.raises(PeerError, match="gone"):
        handle.wait()
    worker.submit(lambda: None).wait()
    assert handle.is_completed() and isinstance(handle.exception(), PeerError)


def test_the_first_failure_of_several_is_raised_each_time(worker):
    handle = Handles([worker.submit(job).giving(torch.zeros(1)) for job in (lambda: None, gone, lambda: None)])
    for _ in range(2):
        with pytest.raises(PeerError, match="gone"):
            handle.wait()
    worker.submit(lambda: None).wait()
    assert handle.is_completed() and not handle.is_success() and str(handle.exception()) == "gone"
    with pytest.raises(PeerError, match="gone"):
        handle.giving(torch.zeros(1)).get_future().wait()
