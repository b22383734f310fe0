"""A process group for torchft, before there is a quorum and with one replica in it."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from ncz_plugins import ConfigError, PeerError, UnsupportedError
from ncz_plugins.core.training.state import Training

pytest.importorskip("torchft")

from torchft.process_group import ProcessGroupGloo, create_store_client

from ncz_plugins.torch import torchft
from ncz_plugins.torch.torchft import CompressedProcessGroup


@pytest.fixture
def group():
    group = CompressedProcessGroup({"transport": {"min_bytes": 0}})
    yield group
    group.shutdown()


def test_without_a_quorum_nothing_is_reduced(group):
    with pytest.raises(PeerError, match="no quorum"):
        group.allreduce([torch.zeros(3)], dist.ReduceOp.SUM)


def test_one_replica(group):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group.set_timeout(timedelta(seconds=20))
    group.configure(f"127.0.0.1:{store.port}/quorum", "replica", 0, 1)
    tensor = torch.ones(3)
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    assert tensor.tolist() == [1, 1, 1] and group.errored() is None
    several = [torch.ones(3), torch.ones(2)]
    assert len(group.allreduce(several, dist.ReduceOp.SUM).get_future().wait()) == 2
    group.abort()
    with pytest.raises(PeerError, match="no quorum"):
        group.allreduce([tensor], dist.ReduceOp.SUM)


def test_after_a_shutdown_there_is_no_quorum(group):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group.configure(f"127.0.0.1:{store.port}/quorum", "replica", 0, 1)
    group.shutdown()
    with pytest.raises(PeerError, match="no quorum"):
        group.allreduce([torch.zeros(3)], dist.ReduceOp.SUM)


def test_settings_may_be_replaced_before_a_quorum(group):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group.training.config = {"quantizer": {"value": 0.01}}
    group.configure(f"127.0.0.1:{store.port}/quorum", "replica", 0, 1)
    tensor = torch.ones(3)
    assert group.allreduce([tensor], dist.ReduceOp.SUM).wait() and tensor.tolist() == [1, 1, 1]


def test_sparse_tensors_are_refused_by_name(group):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group.configure(f"127.0.0.1:{store.port}/quorum", "replica", 0, 1)
    with pytest.raises(UnsupportedError, match="sparse"):
        group.allreduce([torch.eye(3).to_sparse()], dist.ReduceOp.SUM)


def test_what_else_torchft_tells_of_a_quorum_is_passed_on(group, monkeypatch):
    """And the store of a quorum is waited for as long as the time-out says."""
    waited = []

    def noted(address, timeout):
        waited.append(timeout)
        return create_store_client(address, timeout)

    monkeypatch.setattr(torchft, "create_store_client", noted)
    group.set_timeout(timedelta(seconds=7))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group.configure(f"127.0.0.1:{store.port}/quorum", "replica", 0, 1, 5, group_world_size=3)
    assert (group._inner._quorum_id, group._inner._group_world_size) == (5, 3)
    assert waited == [timedelta(seconds=7)]


def test_another_quorum_gives_up_the_connections_of_the_one_before(group, monkeypatch):
    store, aborted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []
    group.configure(f"127.0.0.1:{store.port}/first", "replica", 0, 1)
    monkeypatch.setattr(group._communicator, "abort", lambda: aborted.append("first"))
    group.configure(f"127.0.0.1:{store.port}/second", "replica", 0, 1)
    assert aborted == ["first"]


def test_functional_collectives_go_through_it(group):
    """They leave works to C++, which takes those of torch only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group.register("functional")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        group.configure(f"127.0.0.1:{store.port}/quorum", "replica", 0, 1)
        tensor = torch.arange(3.0)
        assert torch.equal(functional.wait_tensor(functional.all_reduce(tensor, "sum", group)), tensor)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work.wait(timedelta(0)) and work.result()[0] is tensor  # to torch a time-out of 0 is none
        assert group.stats.total.calls == 2
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("had_a_quorum", [False, True])
def test_a_replica_that_does_not_come(group, had_a_quorum):
    group.set_timeout(timedelta(seconds=1))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if had_a_quorum:
        group.configure(f"127.0.0.1:{store.port}/before", "replica", 0, 1)
    with pytest.raises(PeerError, match="connecting the replicas of a new quorum failed"):
        group.configure(f"127.0.0.1:{store.port}/quorum", "replica", 0, 2)
    with pytest.raises(PeerError, match="no quorum"):
        group.allreduce([torch.zeros(3)], dist.ReduceOp.SUM)


class Noting(ProcessGroupGloo):
    """Takes notes of what it is told, and does nothing."""

    def __init__(self):
        super().__init__()
        self.notes = []

    def abort(self, errored=True):
        self.notes.append(("abort", errored))

    def shutdown(self):
        self.notes.append("shutdown")

    def set_timeout(self, timeout):
        self.notes.append(timeout)

    def errored(self):
        return KeyError("as if broken")


def test_the_group_that_it_wraps_is_told_and_asked():
    wrapped = Noting()
    group = CompressedProcessGroup(pg=wrapped)
    group.set_timeout(timedelta(seconds=7))
    assert group._timeout == timedelta(seconds=7) and isinstance(group.errored(), KeyError)
    group.abort(errored=False)
    group.abort()
    group.shutdown()
    assert wrapped.notes == [timedelta(seconds=7), ("abort", False), ("abort", True), "shutdown"]


def test_the_time_out_is_also_that_of_the_group_that_it_makes():
    group = CompressedProcessGroup(timeout=timedelta(seconds=7))
    assert group._timeout == group._inner._timeout == timedelta(seconds=7)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"policies": [{"name": "*", "quantizer": {"value": 0.1}}]}, "policies"),
        ({"guard": {"every": 5}}, "guard.every"),
    ],
)
def test_settings_that_need_names_or_steps_are_refused(settings, named):
    with pytest.raises(UnsupportedError, match=f"^{named}: torchft passes no names"):
        CompressedProcessGroup(settings)
    with pytest.raises(UnsupportedError, match=f"^{named}: torchft passes no names"):
        CompressedProcessGroup(training=Training(settings))


def test_groups_share_a_training(group):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = CompressedProcessGroup(training=group.training)
    for number, each in enumerate((group, other)):
        each.configure(f"127.0.0.1:{store.port}/{number}", "replica", 0, 1)
        each.allreduce([torch.ones(3)], dist.ReduceOp.SUM).wait()
    assert other.stats is group.stats and group.stats.total.calls == 2
    other.shutdown()
    differs = CompressedProcessGroup({"quantizer": {"value": 0.01}}, training=group.training)
    with pytest.raises(ConfigError, match="quantizer: config and training differ"):
        differs.configure(f"127.0.0.1:{store.port}/differs", "replica", 0, 1)
