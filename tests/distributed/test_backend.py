"""What programs get that know the backend `ncz` by its name only, with torch before 2.14."""

import gc
import os
import time
import warnings
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from on_rank import PATIENCE, device, digest, folder, raises, rank, same_on_all_ranks, start, world_size
from scenarios import ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ncz_plugins import ConfigError, NczError, PeerError, UnsupportedError
from ncz_plugins.cli.perf.contenders.collectives import all_gather_single, reduce_scatter_single
from ncz_plugins.torch import private
from ncz_plugins.torch.backend import role

pytestmark = pytest.mark.skipif(
    private.PythonBackend is not None, reason="torch 2.14 and newer have another class: test_torch_backend.py"
)
in_backend = ranks(3, gpu=True, start="join")
# torch 2.6 can't shut a group down or abort it, and its Gloo takes every reduce_scatter_tensor for a sum.
is_torch_2_6 = not hasattr(dist.ProcessGroup, "abort")
SETTINGS = "transport: {min_bytes: 128KiB}\n"  # what GPUs share is faster than any network, and would be measured
generators = [torch.Generator().manual_seed(r) for r in range(world_size)]
values_by_rank = torch.stack([torch.randn(100_003, generator=each) for each in generators]).to(device)
generator, values = generators[rank], values_by_rank[rank].clone()


def join() -> None:
    """Start with a configuration that `NCZ_CONFIG` names, and "ncz" as the backend of the default group."""
    os.environ["NCZ_CONFIG"] = str(folder() / f"rank{rank}.yaml")
    configure(SETTINGS)
    os.environ["NCZ_ROLES"] = "*=gradient"  # also what no backward pass reduces
    start("ncz")


def configure(settings: str) -> None:
    """Write the file that `NCZ_CONFIG` names, which groups made from now on read."""
    with open(os.environ["NCZ_CONFIG"], "w") as file:
        file.write(settings)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """What all ranks hold, [ranks, elements]."""
    everyone = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(everyone, tensor)
    return torch.stack(everyone)


def is_lossy(result: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether a result is off by what compression may lose, and by no less."""
    return 0.01 < (result - exact).norm() / exact.norm() < 0.3


@in_backend
def test_groups_are_ours(group):
    assert dist.get_backend() == "ncz" and dist.get_backend(group) == "ncz"
    assert type(dist.group.WORLD).__name__ == "CompressedBackend"


@in_backend
def test_sums_and_averages_of_floats_are_compressed(group):
    exact = gathered(values).sum(0)
    for op, expected in ((dist.ReduceOp.SUM, exact), (dist.ReduceOp.AVG, exact / world_size)):
        result = values.clone()
        dist.all_reduce(result, op, group=group)
        assert is_lossy(result, expected)
        same_on_all_ranks(digest(result.cpu()), group)
    work = dist.all_reduce(values.clone(), group=group, async_op=True)
    [result] = work.get_future().wait()
    assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    torch.testing.assert_close(result, exact, rtol=0, atol=float(world_size))
    total = group.communicator.stats.total
    assert total.compressed_calls == 3 and total.ratio > 5


@in_backend
def test_lists_of_floats_are_compressed_together(group):
    # torch has no new name for it. Every test of this file's ranks may call it.
    warnings.filterwarnings("ignore", ".*all_reduce_coalesced", FutureWarning)
    first, second = values[:70_000].clone(), values[70_000:].clone()
    dist.all_reduce_coalesced([first, second], group=group)
    exact = gathered(values).sum(0)
    assert is_lossy(torch.cat([first, second]), exact)
    same_on_all_ranks([digest(each.cpu()) for each in (first, second)], group)
    future = dist.all_reduce_coalesced([first, second], group=group, async_op=True)
    results = future.wait()
    assert [each.shape for each in results] == [first.shape, second.shape]
    total = group.communicator.stats.total
    assert total.compressed_calls == 2, total
    integers = [torch.arange(5, device=device), torch.arange(3, device=device)]
    dist.all_reduce_coalesced(integers, group=group)
    assert integers[0].tolist() == [world_size * each for each in range(5)]
    assert group.stats.total.bypasses["dtype"] == 1
    average, largest = values.clone(), values.clone()
    dist.all_reduce_coalesced([average], dist.ReduceOp.AVG, group=group)
    assert is_lossy(average, gathered(values).mean(0)) and group.stats.total.compressed_calls == 3
    dist.all_reduce_coalesced([largest], dist.ReduceOp.MAX, group=group)
    assert torch.equal(largest, gathered(values).amax(0))


@in_backend
def test_reduce_scatters_are_compressed(group):
    whole = torch.randn(world_size * 50_000, generator=generator).to(device)
    exact = gathered(whole).sum(0).view(world_size, -1)[rank]
    part = torch.empty(50_000, device=device)
    reduce_scatter_single(part, whole, group=group)
    assert is_lossy(part, exact)
    assert group.communicator.stats.total.compressed_calls == 1
    work = reduce_scatter_single(part, whole, dist.ReduceOp.AVG, group=group, async_op=True)
    [result] = work.get_future().wait()
    assert result is part and is_lossy(part, exact / world_size)
    reduce_scatter_single(part, whole, dist.ReduceOp.MAX, group=group)
    assert is_torch_2_6 or torch.equal(part, gathered(whole).amax(0).view(world_size, -1)[rank])


@in_backend
def test_sums_by_reduce_and_of_lists_are_compressed(group):
    whole = torch.randn(world_size * 50_000, generator=generator).to(device)
    exact = gathered(whole).sum(0)
    part = torch.empty(50_000, device=device)
    dist.reduce_scatter(part, list(whole.chunk(world_size)), group=group)
    assert is_lossy(part, exact.view(world_size, -1)[rank])
    dist.reduce(result := whole.clone(), 1, dist.ReduceOp.AVG, group=group)
    assert is_lossy(result, exact / world_size) if rank == 1 else torch.equal(result, whole)
    dist.reduce(count := torch.arange(5, device=device), 1, group=group)
    assert rank != 1 or torch.equal(count, world_size * torch.arange(5, device=device))
    assert group.stats.total.compressed_calls == 2


@in_backend
def test_lists_are_exchanged_as_activations_and_gathered_as_weights(group):
    configure("{transport: {min_bytes: 128KiB}, roles: [gradient, activation]}\n")
    other = dist.new_group(timeout=PATIENCE)
    configure(SETTINGS)
    lists = [torch.empty_like(values) for _ in range(world_size)]
    with role("activation"):
        dist.all_to_all(lists, [values.clone() for _ in range(world_size)], group=other)
        assert is_lossy(torch.stack(lists), values_by_rank)
        dist.all_gather(lists, values, group=other)
        assert is_lossy(torch.stack(lists), values_by_rank)
    dist.gather(values, lists if rank == 2 else None, dst=2, group=other)
    dist.scatter(result := torch.empty_like(values), list(values_by_rank) if rank == 0 else None, group=other)
    assert torch.equal(result, values) and (rank != 2 or torch.equal(torch.stack(lists), values_by_rank))
    total = other.stats.total
    assert total.compressed_calls == 2 and total.bypasses == {"role not enabled": 2}, total


@in_backend
def test_tensors_of_any_layout_are_reduced(group):
    whole = values[:100_000].clone().view(200, 500)
    expected = gathered(whole).sum(0)[:, ::2]
    strided = whole[:, ::2]
    dist.all_reduce(strided, group=group)
    assert is_lossy(strided, expected)
    weights = nn.Parameter(values[:100_000].clone().view(200, 500).t())
    dist.all_reduce(weights, group=group)
    assert is_lossy(weights.detach(), gathered(values[:100_000]).sum(0).view(200, 500).t())
    assert group.communicator.stats.total.compressed_calls == 2
    columns = torch.randn(500, world_size * 200, generator=generator).to(device).t()
    parts = torch.zeros(500, 200, device=device).t()
    work = reduce_scatter_single(parts, columns, group=group, async_op=True)
    [result] = work.get_future().wait()
    assert result is parts and is_lossy(parts, gathered(columns.contiguous()).sum(0).view(world_size, 200, 500)[rank])
    if device.type == "cpu":  # NCCL has no sums of sparse tensors
        sparse = torch.eye(5).to_sparse()
        dist.all_reduce(sparse, group=group)
        assert torch.equal(sparse.to_dense(), world_size * torch.eye(5))


@in_backend
def test_hooks_may_wait_for_collectives_in_callbacks(group):
    """As torch's PowerSGD does."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(600, 600).to(device), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        model(torch.randn(4, 600, generator=generator).to(device)).square().mean().backward()
    same_on_all_ranks(digest(model.module.weight.grad.cpu()), group)


@in_backend
def test_all_else_is_exact(group):
    copy = values.clone()
    dist.broadcast(copy, world_size - 1, group=group)
    assert torch.equal(copy, gathered(values)[-1])
    largest = values.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    assert torch.equal(largest, gathered(values).amax(0))
    count = torch.arange(100_000, device=device)
    dist.all_reduce(count, group=group)
    assert torch.equal(count, world_size * torch.arange(100_000, device=device))
    part = torch.empty(5, dtype=torch.int64, device=device)
    reduce_scatter_single(part, torch.arange(5 * world_size, device=device), group=group)
    assert torch.equal(part, world_size * torch.arange(5 * rank, 5 * rank + 5, device=device))
    everyone = values.new_empty(world_size * values.numel())
    all_gather_single(everyone, values, group=group)
    assert torch.equal(everyone.view(world_size, -1), gathered(values))
    objects = [None] * world_size
    dist.all_gather_object(objects, rank, group=group)
    assert objects == list(range(world_size))
    if rank < 2:
        other = torch.empty_like(values)
        starts = [lambda: dist.isend(values, 1, group=group), lambda: dist.irecv(other, 1 - rank, group=group)]
        if rank == 1:  # with NCCL, two ranks that both send first would wait for each other
            starts = [starts[1], lambda: dist.isend(values, 0, group=group)]
        works = [start() for start in starts]
        assert all(work.wait() or True for work in works) and torch.equal(other, values_by_rank[1 - rank])
    dist.barrier(group)
    assert group.communicator is None  # nothing was to be compressed


@in_backend
def test_small_tensors_go_plain_and_are_counted(group):
    for numel in (0, 2, 7):
        tensor = torch.full([numel], rank + 1.0, device=device)
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.full_like(tensor, sum(range(1, world_size + 1))))
    bypasses = group.communicator.stats.total.bypasses
    assert bypasses == {"too small": 3}, bypasses


@in_backend
def test_distributed_data_parallel_trains(group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 7)).to(device)
    model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        x, target = torch.randn(16, 64, generator=generator), torch.randint(0, 7, (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), target.to(device)).backward()
        optimizer.step()
    same_on_all_ranks(digest(torch.cat([each.view(-1).cpu() for each in model.parameters()])), group)
    assert group.communicator.stats.total.compressed_calls >= 5


@in_backend
def test_models_join_whose_ranks_have_more_data_than_others(group):
    """DDP leaves the work that counts ranks to C++."""
    for divides in (True, False):
        model = DistributedDataParallel(nn.Linear(8, 8).to(device), process_group=group)
        with model.join(divide_by_initial_world_size=divides):
            for _ in range(1 + rank):
                model(torch.ones(2, 8, device=device)).sum().backward()


@in_backend
def test_barriers_wait_for_sums_before_them(group):
    result = values.clone()
    work = dist.all_reduce(result, group=group, async_op=True)
    dist.barrier(group=group)
    same_on_all_ranks(digest(result.cpu()), group)
    [same] = work.result()
    assert same is result


@in_backend
def test_a_work_can_be_asked_and_waited_for_with_a_time_out(group):
    if device.type == "cuda":  # there the host need not wait at all
        return
    other = dist.new_group(timeout=PATIENCE)
    dist.all_reduce(values.clone(), group=other)  # which connects
    if rank == 0:
        work = dist.all_reduce(values.clone(), group=other, async_op=True)
        raises(PeerError, lambda: work.wait(timedelta(milliseconds=10)), "did not end within")
        assert not work.is_completed() and not work.is_success() and work.exception() is None
    dist.barrier(group)  # only now do the others make the call
    if rank != 0:
        work = dist.all_reduce(values.clone(), group=other, async_op=True)
    [result] = work.result()
    assert work.is_completed() and work.wait(timedelta(0)) and is_lossy(result, values_by_rank.sum(0))


@in_backend
def test_works_that_are_left_to_cpp(group):
    """Functional collectives leave works to C++, several at once."""
    sums = [functional.all_reduce(values[:each], "sum", group) for each in (99_999, 7, 77_777)]
    averages = functional.all_reduce(values, "avg", group)
    exact = gathered(values).sum(0)
    for each in map(functional.wait_tensor, sums):
        torch.testing.assert_close(each, exact[: each.numel()], rtol=0, atol=float(world_size))
    assert is_lossy(functional.wait_tensor(averages), exact / world_size)
    assert group.communicator.stats.total.compressed_calls == 3


@in_backend
def test_methods_of_the_group_take_what_those_of_torch_take(group):
    exact, one, several = gathered(values).sum(0), values.clone(), values.clone()
    group.allreduce(one).wait()
    group.allreduce([several], dist.ReduceOp.AVG).wait()
    assert is_lossy(one, exact) and is_lossy(several, exact / world_size)
    group.allreduce(one, dist.ReduceOp.MAX).wait()  # which all ranks have already
    same_on_all_ranks(digest(one.cpu()), group)
    assert is_lossy(one, exact) and group.communicator.stats.total.compressed_calls == 2


@in_backend
def test_groups_of_some_ranks(group):
    some = dist.new_group([0, world_size - 1])
    if rank in (0, world_size - 1):
        result = values.clone()
        dist.all_reduce(result, group=some)
        assert is_lossy(result, values_by_rank[0] + values_by_rank[-1])
        part = torch.empty(50_000, device=device)
        reduce_scatter_single(part, values[:100_000], group=some)
        whole = (values_by_rank[0] + values_by_rank[-1])[:100_000].view(2, -1)
        assert is_lossy(part, whole[0 if rank == 0 else 1])


def noted(group) -> list[str]:
    """A list to which it is added when what carries plain calls of a group is shut down or aborted."""
    plain, ended = group._plain, []
    group._plain = SimpleNamespace(
        shutdown=lambda: ended.append("shutdown") or plain.shutdown(),
        abort=lambda: ended.append("abort") or plain.abort(),
    )
    return ended


@in_backend
def test_a_group_that_is_destroyed_finishes_what_is_under_way(group):
    other = dist.new_group(timeout=PATIENCE)
    dist.all_reduce(values.clone(), group=other)
    work = dist.all_reduce(values.clone(), group=other, async_op=True)
    ended = noted(other)
    dist.destroy_process_group(other)
    assert work.wait() and is_lossy(work.result()[0], values_by_rank.sum(0))
    if is_torch_2_6:
        return
    assert ended == ["shutdown"]
    if device.type == "cpu":
        raises(NczError, lambda: other.allreduce(values.clone()), "closed")


@in_backend
@pytest.mark.parametrize("schedule", ["direct", "halving"])
def test_a_group_that_is_aborted_gives_up_what_is_under_way(group, schedule):
    if is_torch_2_6 or device.type == "cuda":  # what NCCL does on the other ranks is not ours
        return
    configure(f"transport: {{min_bytes: 128KiB, schedule: {schedule}}}\n")
    other = dist.new_group(timeout=PATIENCE)
    dist.all_reduce(values.clone(), group=other)  # which connects
    configure(SETTINGS)
    if rank == 0:
        work = dist.all_reduce(values.clone(), group=other, async_op=True)
        ended = noted(other)
        other.abort()
    dist.barrier(group)  # only now do the others make the call
    if rank == 0:
        raises(PeerError, work.wait, "aborted")
        assert work.is_completed() and not work.is_success() and isinstance(work.exception(), PeerError)
        assert ended == ["abort"]
    else:
        raises(PeerError, lambda: dist.all_reduce(values.clone(), group=other))


@in_backend
def test_other_backends_beside_it_are_refused(group):
    mixed = dist.new_group(backend="cpu:ncz,cuda:gloo")
    raises(UnsupportedError, lambda: dist.all_reduce(values.clone(), group=mixed), "cpu:ncz,cuda:gloo", '"ncz" alone')


@in_backend
def test_a_group_of_one_rank(group):
    alone = dist.new_subgroups_by_enumeration([[each] for each in range(world_size)])[0]
    result = values.clone()
    dist.all_reduce(result, group=alone)
    assert torch.equal(result, values)


@in_backend
def test_tensors_go_with_their_last_reference(group):
    """Also where Python collects no garbage, and where nothing follows."""

    def waits() -> list:
        tensor = values.clone()
        assert dist.all_reduce(tensor, group=group, async_op=True).wait()
        return [tensor]

    def asks_for_the_future() -> list:
        tensors = [values.clone(), values.clone()]
        for tensor in tensors:
            dist.all_reduce(tensor, group=group, async_op=True).get_future().then(lambda done: done.value()).wait()
        return tensors

    def scatters() -> list:
        part, whole = values[:1000].clone(), torch.ones(world_size * 1000, device=device)
        reduce_scatter_single(part, whole, group=group)
        return [part, whole]

    gc.collect()
    gc.disable()
    try:
        for call in (waits, asks_for_the_future, scatters):
            watched = [weakref.ref(tensor) for tensor in call()]
            deadline = time.monotonic() + 10
            while any(each() is not None for each in watched):
                assert time.monotonic() < deadline, call.__name__
                time.sleep(0.001)
    finally:
        gc.enable()


@in_backend
def test_without_rules_a_backward_pass_is_compressed_and_all_else_is_exact(group):
    rules = os.environ.pop("NCZ_ROLES")
    try:
        other = dist.new_group()
        result = values.clone()
        dist.all_reduce(result, dist.ReduceOp.AVG, group=other)
        torch.testing.assert_close(result, values_by_rank.mean(0))
        assert other.stats.total.bypasses == {"role not enabled": 1}
        model = DistributedDataParallel(nn.Linear(400, 400).to(device), process_group=other)
        model(values[:4000].view(10, 400)).square().mean().backward()
        with role("gradient"):
            dist.all_reduce(result, group=other)
        assert other.stats.total.compressed_calls == 2
    finally:
        os.environ["NCZ_ROLES"] = rules


@in_backend
def test_the_environment_names_the_configuration(group):
    with open(os.environ["NCZ_CONFIG"], "w") as file:
        file.write("quantizer: {kind: lossless}\n")
    result = values.clone()
    dist.all_reduce(result, group=dist.new_group())
    torch.testing.assert_close(result, gathered(values).sum(0))
    with open(os.environ["NCZ_CONFIG"], "w") as file:
        file.write("roles: [parameter]\n")  # what is reduced is taken for gradients
    other, part = dist.new_group(), torch.empty(50_000, device=device)
    dist.all_reduce(values.clone(), group=other)
    reduce_scatter_single(part, torch.ones(world_size * 50_000, device=device), group=other)
    assert other.communicator.stats.total.bypasses == {"role not enabled": 2}
    file = os.environ["NCZ_CONFIG"]
    try:
        os.environ["NCZ_CONFIG"] = "missing.yaml"
        raises(ConfigError, dist.new_group, "NCZ_CONFIG=missing.yaml", "no such file")
        os.environ["NCZ_CONFIG"] = ""  # as if it were not set
        dist.new_group()
    finally:
        os.environ["NCZ_CONFIG"] = file
