"""Compressed all-reduces between replicas of torchft that come and go."""

import gc
import os
import signal
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_rank import device, digest, rank
from scenarios import DEVICES, IMPORTS, report, run_ranks
from torch import nn

from ncz_plugins import ConfigError, MismatchError, PeerError, UnsupportedError

pytest.importorskip("torchft")

from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupBabyGloo, ProcessGroupGloo, ProcessGroupNCCL

from ncz_plugins.torch.torchft import CompressedProcessGroup

SMALL = {"quantizer": {"value": 0.05}, "transport": {"min_bytes": 0}}
TIMEOUT = timedelta(seconds=20)


# ------------------------------------------------------------------ replicas that come and go

FATAL_STEP, JOINED_STEP, LAST_STEP = 2, 4, 9


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)


class NotingGroup(CompressedProcessGroup):
    """Takes notes; that of replica 2 dies. Replicas halve, but on GPUs, which refuse it."""

    def __init__(self):
        plain, schedule = (ProcessGroupGloo, "halving") if device.type == "cpu" else (ProcessGroupNCCL, "auto")
        super().__init__({"transport": {"min_bytes": 0, "schedule": schedule}}, plain(TIMEOUT), TIMEOUT)
        self.sizes, self.manager = [], None

    def configure(self, store_addr, replica_id, rank, world_size, *more, **named):
        super().configure(store_addr, replica_id, rank, world_size, *more, **named)
        self.sizes.append(world_size)

    def allreduce(self, tensors, opts):
        if rank == 2 and self.manager.current_step() == FATAL_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().allreduce(tensors, opts)


def train_a_replica(folder: str) -> dict:
    """DiLoCo with compressed all-reduces. Replica 2 dies inside one of them; some time later replica 3 joins.

    Returns what a replica saw that is left at the end.
    """
    folder = Path(folder)
    address, went_on = folder / "lighthouse", folder / "went on"
    if rank == 0:
        lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=5000, heartbeat_timeout_ms=2000)
        written = address.with_suffix(".new")
        written.write_text(f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}")
        written.rename(address)
    if rank == 3:
        wait_for(went_on)
    wait_for(address)

    torch.set_num_threads(1)
    torch.manual_seed(rank)  # torchft gives all of them the weights of one
    model = nn.Sequential(nn.Linear(64, 307), nn.ReLU(), nn.Linear(307, 7)).to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = NotingGroup()
    manager = Manager(
        pg=group,
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["inner"])),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        lighthouse_addr=address.read_text(),
        replica_id=f"replica_{rank}",
    )
    group.manager = manager
    (folder / f"ready {rank}").touch()
    if rank < 3:  # they begin together
        for each in range(3):
            wait_for(folder / f"ready {each}")
    generator = torch.Generator().manual_seed(rank)
    steps = []  # at which a round began, as the manager counts
    with DiLoCo(manager, [model], inner, outer, sync_every=2):
        while manager.current_step() < LAST_STEP:
            steps.append(manager.current_step())
            if steps[-1] > FATAL_STEP:
                went_on.touch()
            if steps[-1] == JOINED_STEP:
                wait_for(folder / "ready 3")
            for _ in range(2):
                x, target = torch.randn(16, 64, generator=generator), torch.randint(0, 7, (16,), generator=generator)
                inner.zero_grad()
                nn.functional.cross_entropy(model(x.to(device)), target.to(device)).backward()
                inner.step()
            time.sleep(0.2)  # so that replica 3 takes part before the end
    found = {
        "steps": steps,
        "sizes": group.sizes,
        "weights": digest(torch.cat([each.view(-1).cpu() for each in model.parameters()])),
        "compressed_calls": group.stats.total.compressed_calls,
        "calls": group.stats.total.calls,
        "bypasses": group.stats.total.bypasses,
        "ratio": group.stats.total.ratio,
    }
    (folder / f"done {rank}").touch()
    if rank == 0:  # the lighthouse goes last
        wait_for(folder / "done 1")
        wait_for(folder / "done 3")
    manager.shutdown(wait=False)
    return found


@pytest.fixture(scope="module", params=DEVICES)
def replicas(request, tmp_path_factory):
    """What replicas 0, 1 and 3 saw. Replica 2 was killed, whereupon replica 3 joined."""
    imports = f"{IMPORTS},ncz_plugins.torch.torchft,torchft.local_sgd"
    folder = tmp_path_factory.mktemp("torchft")
    finished = run_ranks(4, train_a_replica, folder, folder, device=request.param, imports=imports, seconds=100)
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


def pair(schedule: str) -> list[CompressedProcessGroup]:
    config = SMALL | {"transport": {"min_bytes": 0, "schedule": schedule}}
    return [CompressedProcessGroup(config, timeout=TIMEOUT) for _ in range(2)]


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


@pytest.mark.parametrize("schedule", ["direct", "halving"])
def test_an_abort_ends_what_waits_for_a_replica(store, schedule):
    groups = pair(schedule)
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


@pytest.mark.parametrize("schedule", ["direct", "halving"])
def test_an_aborted_group_says_so_until_its_next_quorum(store, schedule):
    groups = pair(schedule)
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
