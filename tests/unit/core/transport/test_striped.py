"""Gathers and exchanges over several groups side by side."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import play

from ncz_plugins.core.errors import PeerError
from ncz_plugins.core.transport import nccl
from ncz_plugins.core.transport.nccl import NcclTransport
from ncz_plugins.core.transport.striped import MOST_GROUPS, StripedCollectives

SIZES = [1 << 20, (1 << 20) + 512, 3_000_017, 511]  # bytes: with equal stripes and others, and too little for stripes


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("count", range(1, MOST_GROUPS + 1))
def test_stripes_come_together_in_rank_order(world_size, count):
    store = dist.HashStore()

    def body(transport):
        groups = [
            dist.ProcessGroupGloo(dist.PrefixStore(f"{i}", store), transport.rank, world_size, timedelta(seconds=30))
            for i in range(count)
        ]
        collectives = StripedCollectives(lambda: groups)
        for size in SIZES:
            of_ranks = [
                torch.randint(256, (world_size, size), generator=torch.Generator().manual_seed(rank)).to(torch.uint8)
                for rank in range(world_size)
            ]
            own = of_ranks[transport.rank]
            gathered, exchanged = own.new_empty(world_size * size), own.new_empty(world_size * size)
            works = collectives.all_gather_single(gathered, own[0]), collectives.all_to_all_single(exchanged, own)
            assert all(work.wait() and work.wait() for work in works)
            alike = torch.empty_like(exchanged)
            splits = [size] * world_size
            collectives.all_to_all_single(alike, own.view(-1), splits, splits).wait()
            assert torch.equal(alike, exchanged)
            for rank, theirs in enumerate(of_ranks):
                assert torch.equal(gathered.chunk(world_size)[rank], theirs[0])
                assert torch.equal(exchanged.chunk(world_size)[rank], theirs[transport.rank])
        return True

    assert play(world_size, body) == [True] * world_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elements_of_any_size(dtype):
    store = dist.HashStore()

    def body(transport):
        groups = [
            dist.ProcessGroupGloo(dist.PrefixStore(f"{i}", store), transport.rank, 2, timedelta(seconds=30))
            for i in range(2)
        ]
        own = torch.randn(700_001, generator=torch.Generator().manual_seed(transport.rank)).to(dtype)
        gathered = own.new_empty(2, own.numel())
        StripedCollectives(lambda: groups).all_gather_single(gathered, own).wait()
        return torch.equal(gathered[transport.rank], own), gathered

    (first, of_first), (second, of_second) = play(2, body)
    assert first and second and torch.equal(of_first, of_second)


class Group:
    """Stands in for an NCCL group, which needs a GPU, where nothing is sent."""

    together: threading.Barrier  # of those that are aborted
    ended = None

    def shutdown(self):
        self.ended = "shut down"

    def abort(self):
        self.together.wait(10)
        self.ended = "aborted"

    def _set_default_timeout(self, timeout):
        assert timeout < timedelta(minutes=1)


class Connected:
    rank, world_size = 0, 2


def test_a_transport_opens_groups_as_they_are_asked_for_and_ends_all():
    groups, opened = [Group()], []

    def open_group(number: int) -> Group:
        opened.append(number)
        return Group()

    first = groups[0]
    transport = NcclTransport(Connected(), groups, torch.device("cpu"), open_group)
    assert transport.use_groups(2) == 2 and transport.use_groups(4) == 4
    surplus = groups[2:]
    assert transport.use_groups(2) == 2 and [group.ended for group in surplus] == ["shut down"] * 2
    assert transport.use_groups(3) == 3 and opened == [1, 2, 3, 4]  # each number once, as a store keeps what was said
    assert transport.further_groups == groups[1:]
    left = list(groups)
    transport.close()
    assert left[0] is first and [group.ended for group in left] == ["shut down"] * 3
    with pytest.raises(PeerError, match="closed"):
        transport.use_groups(2)
    assert NcclTransport(Connected(), [Group()], torch.device("cpu")).use_groups(4) == 1


def test_groups_are_aborted_side_by_side():
    """One may wait for the kernels of the others."""
    groups = [Group() for _ in range(3)]
    Group.together = threading.Barrier(len(groups))
    transport = NcclTransport(Connected(), groups, torch.device("cpu"))
    transport.abort(RuntimeError())
    transport.abort(RuntimeError())  # once
    assert [group.ended for group in groups] == ["aborted"] * 3


def test_groups_are_aborted_in_turn_where_no_thread_can_start(monkeypatch):
    """As when the interpreter ends, from Python 3.12 on."""

    def worker(name):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(nccl, "Worker", worker)
    groups = [Group() for _ in range(3)]
    Group.together = threading.Barrier(1)
    NcclTransport(Connected(), groups, torch.device("cpu")).abort(RuntimeError())
    assert [group.ended for group in groups] == ["aborted"] * 3


def test_a_group_that_opens_too_late_is_shut_down():
    late = Group()

    def open_group(number: int) -> Group:
        transport.close()
        return late

    transport = NcclTransport(Connected(), [Group()], torch.device("cpu"), open_group)
    with pytest.raises(PeerError, match="closed"):
        transport.use_groups(2)
    assert late.ended == "shut down"
