"""A process group for torchft, before there is a quorum and with one replica in it."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ncz_plugins import PeerError

pytest.importorskip("torchft")

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


def test_another_quorum_gives_up_the_connections_of_the_one_before(group, monkeypatch):
    store, aborted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []
    group.configure(f"127.0.0.1:{store.port}/first", "replica", 0, 1)
    monkeypatch.setattr(group._communicator, "abort", lambda: aborted.append("first"))
    group.configure(f"127.0.0.1:{store.port}/second", "replica", 0, 1)
    assert aborted == ["first"]
