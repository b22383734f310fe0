"""Compressed all-reduces between replicas of torchft that come and go."""

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from processes import DEVICES, report, run

from ncz_plugins import ConfigError, MismatchError, PeerError, UnsupportedError

pytest.importorskip("torchft")

from torchft.process_group import ProcessGroupBabyGloo

from ncz_plugins.torch.torchft import CompressedProcessGroup

SMALL = {"quantizer": {"value": 0.05}, "transport": {"min_bytes": 0}}
TIMEOUT = timedelta(seconds=20)


@pytest.fixture(scope="module", params=DEVICES)
def replicas(request, tmp_path_factory):
    """What replicas 0, 1 and 3 saw. Replica 2 was killed, whereupon replica 3 joined."""
    imports = "ncz_plugins.torch.torchft,torchft.local_sgd,torch._dynamo"
    folder = tmp_path_factory.mktemp("torchft")
    finished = run("torchft_replicas", 4, folder, request.param, imports=imports, seconds=100)
    assert [each.returncode for each in finished] == [0, 0, -9, 0], report(finished)
    return [finished[rank].result for rank in (0, 1, 3)]


def test_a_death_in_a_call_ends_one_round_and_no_training(replicas):
    first, second, _ = replicas
    for each in (first, second):
        assert each["steps"].count(2) > 1  # the round in which a replica died is made again
        assert sorted(set(each["steps"])) == list(range(9))


def test_each_quorum_connects_those_that_are_there(replicas):
    first, second, joined = replicas
    for each in (first, second):
        assert each["sizes"][0] == each["sizes"][-1] == 3 and 2 in each["sizes"]
    assert joined["sizes"][-1] == 3


def test_all_end_with_the_same_weights(replicas):
    assert len({each["weights"] for each in replicas}) == 1


def test_all_of_it_was_compressed(replicas):
    for each in replicas:
        assert each["compressed_calls"] == each["calls"] > 0 and each["bypasses"] == {}
        assert each["ratio"] > 4


# ------------------------------------------------------------------ the process group by itself


def together(groups: list[CompressedProcessGroup], work) -> list:
    """What `work` returns for each group and its number, all at the same time. An error counts as a result."""

    def attempt(rank: int):
        try:
            return work(groups[rank], rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(attempt, range(len(groups))))


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def configure(groups, store, quorum: int) -> list:
    address = f"127.0.0.1:{store.port}/quorum/{quorum}"
    return together(groups, lambda group, rank: group.configure(address, str(rank), rank, len(groups), quorum))


ONES = torch.ones(10_007)


def sums(groups, tensor=ONES, op=dist.ReduceOp.SUM) -> list:
    options = dist.AllreduceOptions()
    options.reduceOp = op

    def work(group, rank):
        mine = tensor * (rank + 1)
        handle = group.allreduce([mine], options)
        assert handle.wait() and handle.get_future().value()[0] is mine
        return mine

    return together(groups, work)


def test_quorums_of_any_size_follow_each_other(store):
    groups = [CompressedProcessGroup(SMALL, timeout=TIMEOUT) for _ in range(3)]
    for quorum, some in enumerate([groups, groups[:2], groups[1:2], groups]):
        assert configure(some, store, quorum) == [None] * len(some)
        places = [(group.training.rank, group.training.world_size) for group in some]
        assert places == [(rank, len(some)) for rank in range(len(some))]
        expected = torch.full([10_007], float(sum(range(1, len(some) + 1))))
        for result in sums(some):
            torch.testing.assert_close(result, expected, rtol=0.3, atol=0)
        [*_, integers] = sums(some, torch.arange(5))
        assert torch.equal(integers, torch.arange(5) * int(expected[0]))
    assert groups[1].stats.total.compressed_calls == 3  # not with itself alone
    assert groups[1].getBackendName() == "ncz-torchft-gloo"
    for group in groups:
        group.shutdown()


def test_averages_and_maxima(store):
    groups = [CompressedProcessGroup(SMALL, timeout=TIMEOUT) for _ in range(2)]
    configure(groups, store, 0)
    for result in sums(groups, op=dist.ReduceOp.AVG):
        torch.testing.assert_close(result, torch.full([10_007], 1.5), rtol=0.3, atol=0)
    for result in sums(groups, op=dist.ReduceOp.MAX):
        assert torch.equal(result, ONES * 2)
    assert groups[0].stats.total.compressed_calls == 1
    for group in groups:
        group.shutdown()


def test_an_abort_ends_what_waits_for_a_replica(store):
    groups = [CompressedProcessGroup(SMALL, timeout=TIMEOUT) for _ in range(2)]
    configure(groups, store, 0)
    handle = groups[0].allreduce([ONES.clone()], dist.AllreduceOptions())
    groups[0].abort()
    with pytest.raises(PeerError, match="aborted"):
        handle.wait()
    groups[1].shutdown()


def test_several_tensors_are_one_call(store):
    groups = [CompressedProcessGroup(SMALL, timeout=TIMEOUT) for _ in range(2)]
    configure(groups, store, 0)

    def work(group, rank):
        mine = [ONES * (rank + 1), ONES[:7] * (rank + 1)]
        assert len(group.allreduce(mine, dist.AllreduceOptions()).get_future().wait()) == 2
        return torch.cat(mine)

    for result in together(groups, work):
        torch.testing.assert_close(result, torch.full([10_014], 3.0), rtol=0.3, atol=0)
    assert groups[0].stats.total.compressed_calls == groups[0].stats.total.calls == 1
    for group in groups:
        group.shutdown()


def test_tensors_that_are_not_contiguous(store):
    """As those of models in channels_last."""
    groups = [CompressedProcessGroup(SMALL, timeout=TIMEOUT) for _ in range(2)]
    configure(groups, store, 0)

    def work(group, rank):
        images = torch.ones(8, 3, 16, 16).to(memory_format=torch.channels_last) * (rank + 1)
        handle = group.allreduce([images, images.transpose(0, 1).clone().transpose(0, 1)], dist.AllreduceOptions())
        given = handle.get_future().wait()
        assert given[0] is images
        return torch.stack(given)

    for result in together(groups, work):
        torch.testing.assert_close(result, torch.full([2, 8, 3, 16, 16], 3.0), rtol=0.3, atol=0)
    for group in groups:
        group.shutdown()


def test_parameters_that_are_not_contiguous_are_reduced_in_place(store):
    """Of a model itself: they require gradients."""
    groups = [CompressedProcessGroup(SMALL, timeout=TIMEOUT) for _ in range(2)]
    configure(groups, store, 0)

    def work(group, rank):
        weights = torch.nn.Parameter((torch.ones(100, 70) * (rank + 1)).t())
        assert group.allreduce([weights], dist.AllreduceOptions()).wait()
        return weights.detach()

    for result in together(groups, work):
        torch.testing.assert_close(result, torch.full([70, 100], 3.0), rtol=0.3, atol=0)
    for group in groups:
        group.shutdown()


def test_what_is_reduced_are_gradients(store):
    """So it goes plain where these are not to be compressed."""
    groups = [CompressedProcessGroup(SMALL | {"roles": ["parameter"]}, timeout=TIMEOUT) for _ in range(2)]
    configure(groups, store, 0)
    for result in sums(groups):
        assert torch.equal(result, ONES * 3)
    for group in groups:
        assert group.stats.total.bypasses == {"role not enabled": 1}
        group.shutdown()


def test_an_aborted_group_says_so_until_its_next_quorum(store):
    groups = [CompressedProcessGroup(SMALL, timeout=TIMEOUT) for _ in range(2)]
    assert all(isinstance(each, PeerError) for each in sums(groups))
    configure(groups, store, 0)
    groups[1].abort()
    waiting, aborted = sums(groups)
    assert isinstance(aborted, PeerError) and "no quorum" in str(aborted)
    assert isinstance(waiting, PeerError) and str(groups[0].errored()) == str(waiting)
    assert configure(groups, store, 1) == [None, None]
    assert groups[0].errored() is None
    torch.testing.assert_close(sums(groups)[0], torch.full([10_007], 3.0), rtol=0.3, atol=0)


def test_tensors_go_with_their_last_reference(store):
    """Also those of failed calls, and where Python collects no garbage. A work of torchft gives its future."""
    groups = [CompressedProcessGroup(SMALL, timeout=TIMEOUT) for _ in range(2)]
    configure(groups, store, 0)

    def work(group, rank, numel: int) -> list[weakref.ref]:
        tensors, watched = [torch.ones(numel), torch.ones(numel, 2).t()], []
        for tensor in tensors:
            watched.append(weakref.ref(tensor))
            try:
                group.allreduce([tensor], dist.AllreduceOptions()).get_future().wait()
            except (MismatchError, PeerError):
                assert group.errored() is not None
        return watched

    gc.collect()
    gc.disable()
    for sizes in ((10_007, 10_007), (10_007, 10_008)):
        watched = sum(together(groups, lambda group, rank, sizes=sizes: work(group, rank, sizes[rank])), [])
        deadline = time.monotonic() + 10
        while any(each() is not None for each in watched) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not any(each() is not None for each in watched), sizes
    gc.enable()
    for group in groups:
        group.shutdown()


def test_replicas_that_differ_are_refused(store):
    groups = [CompressedProcessGroup({"quantizer": {"value": value}}, timeout=TIMEOUT) for value in (0.1, 0.2)]
    for error in configure(groups, store, 0):
        assert isinstance(error, MismatchError) and "quantizer.value is 0.1 on rank 0, 0.2 on rank 1" in str(error)


def test_what_can_not_be_served_is_refused():
    with pytest.raises(ConfigError, match="valeu"):
        CompressedProcessGroup({"quantizer": {"valeu": 1}})
    with pytest.raises(UnsupportedError, match="quantizer.error_feedback, steps: torchft passes no names"):
        CompressedProcessGroup({"quantizer": {"error_feedback": True}, "steps": {"warmup": 3}})
    with pytest.raises(UnsupportedError, match="ProcessGroupBabyGloo can't be wrapped"):
        CompressedProcessGroup(pg=ProcessGroupBabyGloo())
