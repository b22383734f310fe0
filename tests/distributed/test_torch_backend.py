"""The backend `ncz` as torch 2.14 and newer have it, a c10d Backend that torch finds by its entry point."""

import configparser
import gc
import os
import sys
import time
import warnings
import weakref
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from on_rank import PATIENCE, attempt, digest, folder, leave_alone, raises, rank, same_on_all_ranks, start, world_size
from repository import ROOT
from scenarios import GPU, on_ranks, ranks, run_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ncz_plugins import ConfigError, NczError, PeerError, UnsupportedError
from ncz_plugins.torch import private
from ncz_plugins.torch.roles import role

pytestmark = pytest.mark.skipif(
    private.PythonBackend is None, reason="before torch 2.14 ncz is another class: test_backend.py"
)
NOTHING_OF_OURS = "scenarios,torch._dynamo"  # what ranks share: torch must find the backend by itself
in_backend = ranks(4, start="join", imports=NOTHING_OF_OURS)

CPU = torch.device("cpu")
SPLITS = torch.__version__ >= "2.15"  # torch 2.14 splits groups of GPUs only
SETTINGS = "transport: {min_bytes: 128KiB}\n"
by_rank = torch.stack([torch.randn(100_000, generator=torch.Generator().manual_seed(each)) for each in range(4)])
values, exact = by_rank[rank], by_rank.sum(0)


def join() -> None:
    """Start with settings that NCZ_CONFIG names, and "ncz" as the backend of the default group."""
    install()
    os.environ["NCZ_CONFIG"] = str(folder() / f"rank{rank}.yaml")
    configure(SETTINGS)
    start("ncz")


def install() -> None:
    """Let Python find the package's entry points, as if it were installed. Nothing has imported the backend so far."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    groups = [f"[{name}]{lines}\n" for name, lines in setup["options.entry_points"].items()]
    metadata = folder() / f"installed{rank}" / "ncz_plugins-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: ncz_plugins\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    sys.path.insert(0, str(metadata.parent))
    assert "ncz_plugins.torch.backend" not in sys.modules


def configure(settings: str) -> None:
    """Write this rank's configuration file, which new groups read."""
    with open(os.environ["NCZ_CONFIG"], "w") as file:
        file.write(settings)


def ours(group: dist.ProcessGroup | None = None):
    """The backend of a group. Its module is imported here only, as torch must find it by itself."""
    from ncz_plugins.torch import backend

    return backend.of_group(group)


def is_lossy(result: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether a result is off by what compression may lose, and by no less."""
    return 0.01 < float((result - exact).norm() / exact.norm()) < 0.3


def is_exact(result: torch.Tensor, exact: torch.Tensor) -> bool:
    return torch.allclose(result, exact, rtol=1e-5, atol=1e-5)


def counted(group=None) -> dict[str, int]:
    """How many calls of a group went compressed, and how many plain for each reason."""
    total = ours(group).stats.total
    assert total.calls == total.compressed_calls + sum(total.bypasses.values()), total
    others = {name: calls for name, calls in total.bypasses.items() if name != "not compressed by the backend"}
    return {"compressed": total.compressed_calls} | others


class Reduced(torch.autograd.Function):
    """The identity, whose gradient is what `reduce` makes of it."""

    @staticmethod
    def forward(ctx, tensor, reduce):
        ctx.reduce = reduce
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.reduce(gradient.contiguous()), None


def in_backward(reduce, value: torch.Tensor) -> torch.Tensor:
    """What `reduce` makes of `value` in a backward pass."""
    leaf = torch.zeros_like(value, requires_grad=True)
    found = []
    Reduced.apply(leaf, lambda gradient: found.append(reduce(gradient)) or gradient).backward(value)
    return found[0]


@in_backend
def test_torch_finds_the_backend_by_its_name(group):
    assert dist.get_backend() == "ncz" and dist.get_backend(group) == "ncz"
    assert type(group) is dist.ProcessGroup and group._get_backend(CPU) is ours(group)
    assert isinstance(ours(), private.PythonBackend) and sys.modules["ncz_plugins.torch.backend"].role is role
    raises(UnsupportedError, lambda: ours(dist.new_group(backend="gloo")), '"ncz"', "cpu:gloo")


@in_backend
def test_a_backward_pass_is_compressed_and_all_else_is_exact(group):
    def summed(gradient):
        dist.all_reduce(gradient, group=group)
        return gradient

    result = in_backward(summed, values.clone())
    assert is_lossy(result, exact)
    same_on_all_ranks(digest(result), group)
    assert is_exact(summed(values.clone()), exact)
    average = values.clone()
    dist.all_reduce(average, dist.ReduceOp.AVG, group=group)
    assert is_exact(average, exact / world_size)
    assert counted(group) == {"compressed": 1, "role not enabled": 2}
    with role("gradient"):
        assert is_lossy(summed(values.clone()), exact)
    for its_role in ("activation", "parameter"):
        with role("gradient"), role(its_role):
            assert is_exact(summed(values.clone()), exact)
            assert is_exact(in_backward(summed, values.clone()), exact)
    largest, whole = values.clone(), torch.arange(100_000)
    with role("gradient"):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        dist.all_reduce(whole, group=group)
    assert torch.equal(largest, by_rank.amax(0)) and torch.equal(whole, 4 * torch.arange(100_000))
    with role("gradient"):
        dist.all_reduce(sparse := torch.eye(5).to_sparse(), group=group)
    assert torch.equal(sparse.to_dense(), 4 * torch.eye(5))
    assert counted(group)["role not enabled"] == 6 and counted(group)["compressed"] == 2
    assert counted(group)["reduce op"] == counted(group)["dtype"] == counted(group)["sparse"] == 1
    raises(ValueError, role("weights").__enter__, "gradient, parameter, activation", "'weights'")


@in_backend
def test_a_sum_is_one_whatever_it_is_called(group):
    def scattered(factor: float) -> torch.Tensor:
        op = dist.ReduceOp.PREMUL_SUM(factor)
        dist.reduce_scatter_single(part := torch.empty(25_000), values, op, group=group)
        return part

    # FSDP2 asks for this where a model was told to divide gradients by 1, as torchtitan does.
    assert is_lossy(in_backward(lambda _: scattered(1.0), values), exact.view(4, -1)[rank])
    assert is_exact(scattered(1.0), exact.view(4, -1)[rank])
    assert counted(group) == {"compressed": 1, "role not enabled": 1}
    raises(RuntimeError, lambda: scattered(0.5), "PREMUL_SUM", "Gloo")  # NCCL alone has it
    assert counted(group)["reduce op"] == 1


@in_backend
def test_other_collectives_are_exact_and_counted(group):
    copy, everyone, one = values.clone(), torch.empty(400_000), torch.empty(100_000)
    dist.broadcast(copy, 3, group=group)
    assert torch.equal(copy, by_rank[3])
    dist.all_gather_single(everyone, values, group=group)
    assert torch.equal(everyone.view(4, -1), by_rank)
    lists = [torch.empty(100_000) for _ in range(4)]
    dist.all_gather(lists, values, group=group)
    assert torch.equal(torch.stack(lists), by_rank)
    dist.all_to_all_single(one, values, group=group)
    assert torch.equal(one.view(4, -1), by_rank.view(4, 4, -1)[:, rank])
    dist.reduce(copy := values.clone(), 1, group=group)
    assert rank != 1 or is_exact(copy, exact)
    dist.scatter(one, list(by_rank) if rank == 0 else None, src=0, group=group)
    assert torch.equal(one, values)
    dist.gather(values, lists if rank == 2 else None, dst=2, group=group)
    dist.reduce_scatter(one, [values] * 4, group=group)
    assert is_exact(one, exact)
    uneven = [values[: 10 * (each + 1)].clone() for each in range(4)]
    received = [torch.empty(10 * (rank + 1)) for _ in range(4)]
    dist.all_to_all_single(torch.cat(received), torch.cat(uneven), [10 * (rank + 1)] * 4, [10, 20, 30, 40], group=group)
    if rank < 2:
        operations = [dist.P2POp(dist.isend, values, group=group, group_peer=1 - rank)]
        operations.append(dist.P2POp(dist.irecv, one, group=group, group_peer=1 - rank))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(one, by_rank[1 - rank])
    objects = [None] * 4
    dist.all_gather_object(objects, rank, group=group)
    assert objects == [0, 1, 2, 3]
    dist.barrier(group)
    total = ours(group).stats.total
    assert counted(group) == {"compressed": 0, "role not enabled": 4 if rank > 1 else 6}
    assert total.wire_bytes == total.plain_bytes == sum(total.bypassed_bytes.values())
    assert total.wire_bytes > 5 * values.nbytes


@in_backend
def test_functional_collectives_go_through_us(group):
    result = functional.all_reduce(values, "sum", group)
    assert is_exact(functional.wait_tensor(result), exact)
    result = in_backward(lambda gradient: functional.wait_tensor(functional.all_reduce(gradient, "sum", group)), values)
    assert is_lossy(result, exact)
    part = in_backward(
        lambda gradient: functional.wait_tensor(functional.reduce_scatter_single(gradient, "avg", 0, group)), values
    )
    assert is_lossy(part, (exact / 4).view(4, -1)[rank])
    several = in_backward(
        lambda gradient: [
            functional.wait_tensor(each) for each in functional.all_reduce_coalesced([gradient, gradient], "sum", group)
        ],
        values,
    )
    assert all(is_lossy(each, exact) for each in several)
    assert torch.equal(functional.wait_tensor(functional.all_gather_single(values, 0, group)).view(4, -1), by_rank)
    # Works that only C++ holds, several at once.
    with role("gradient"):
        sums = [functional.all_reduce(values[:each], "sum", group) for each in (99_999, 7, 77_777)]
    assert all((functional.wait_tensor(each) - exact[: each.numel()]).abs().max() < 4 for each in sums)
    expected = {"compressed": 5, "role not enabled": 1, "too small": 1}
    assert counted(group) == expected, counted(group)


@in_backend
def test_ranks_that_differ_in_a_tensors_role_get_an_error(group):
    def summed(part: dist.ProcessGroup, elements: int = 100_000) -> torch.Tensor:
        dist.all_reduce(result := values[:elements].clone(), group=part)
        return result

    def check(call, says_role: bool = True) -> None:
        """Fail unless every rank gets an error, and no time-out, if only rank 2 calls a tensor a gradient."""
        part = dist.new_group(timeout=PATIENCE)
        with role("gradient" if rank == 2 else "activation") if says_role else nullcontext():
            failed = attempt(lambda: call(part))
        assert failed is not None and failed["error"] == "MismatchError", failed
        assert "rank 2" in failed["message"] and "role" in failed["message"], failed
        assert failed["seconds"] < PATIENCE.total_seconds() / 2, failed

    check(summed)
    check(lambda part: summed(part, 100))  # so few go plain, whatever they are
    check(lambda part: dist.reduce_scatter_single(torch.empty(25_000), values, group=part))
    check(lambda part: dist.all_reduce(values.clone(), group=part, async_op=True).wait())
    check(lambda part: functional.wait_tensor(functional.all_reduce(values, "sum", part)))
    # No rank says what it reduces, and only rank 2 is in a backward pass.
    check(lambda part: in_backward(lambda _: summed(part), values) if rank == 2 else summed(part), says_role=False)
    # Both of these are exact.
    with role("parameter" if rank == 2 else "activation"):
        assert is_exact(summed(group), exact)


@in_backend
def test_dtensors_are_redistributed_through_us(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tp"))
    dim = mesh["replicate"]
    pair = by_rank[rank % 2 :: 2].sum(0)

    def redistributed(gradient, to):
        return DTensor.from_local(gradient, dim, [Partial()]).redistribute(dim, [to]).to_local().clone()

    assert is_exact(redistributed(values, Replicate()), pair)
    assert is_lossy(in_backward(lambda each: redistributed(each, Replicate()), values), pair)
    mine = pair.view(2, -1)[rank // 2]
    assert is_lossy(in_backward(lambda each: redistributed(each, Shard(0)), values), mine)
    whole = DTensor.from_local(values, dim, [Shard(0)]).full_tensor()
    assert torch.equal(whole, by_rank[rank % 2 :: 2].flatten())
    expected = {"compressed": 2, "role not enabled": 1}
    assert counted(dim.get_group()) == expected, counted(dim.get_group())
    # A dimension called "tp" carries activations, also in a backward pass.
    dim = mesh["tp"]
    pair = by_rank[rank // 2 * 2 : rank // 2 * 2 + 2].sum(0)
    assert is_exact(in_backward(lambda each: redistributed(each, Replicate()), values), pair)
    assert counted(dim.get_group()) == {"compressed": 0, "role not enabled": 1}


@in_backend
def test_calls_are_coalesced(group):
    with role("gradient"):
        several = [values[:60_000].clone(), values[60_000:].clone()]
        with dist._coalescing_manager(group):
            for each in several:
                dist.all_reduce(each, group=group)
        assert is_lossy(torch.cat(several), exact) and counted(group) == {"compressed": 1}
        several = [values[:60_000].clone(), values[60_000:].clone()]
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch has no new name for it
            dist.all_reduce_coalesced(several, group=group)
        assert is_lossy(torch.cat(several), exact) and counted(group) == {"compressed": 2}
        parts = [torch.empty(25_000), torch.empty(12_500)]
        with dist._coalescing_manager(group, async_ops=True) as manager:
            dist.reduce_scatter_single(parts[0], values, group=group)
            dist.reduce_scatter_single(parts[1], values[:50_000], group=group)
        manager.wait()
        assert is_lossy(parts[0], exact.view(4, -1)[rank]) and is_lossy(parts[1], exact[:50_000].view(4, -1)[rank])
        assert counted(group) == {"compressed": 4}
        # With a device, begin and end are calls of the backend.
        several = [values.clone()]
        with dist._coalescing_manager(group, CPU, async_ops=True) as manager:
            dist.all_reduce(several[0], group=group)
        manager.wait()
        assert is_lossy(several[0], exact)
    gathered = [torch.empty(400), torch.empty(40)]
    with dist._coalescing_manager(group):
        dist.all_gather_single(gathered[0], values[:100], group=group)
        dist.all_gather_single(gathered[1], values[:10], group=group)
    assert torch.equal(gathered[0].view(4, -1), by_rank[:, :100])
    averaged = [torch.empty(25_000), torch.empty(25)]
    with dist._coalescing_manager(group):
        dist.reduce_scatter_single(averaged[0], values, dist.ReduceOp.AVG, group=group)
        dist.reduce_scatter_single(averaged[1], values[:100], dist.ReduceOp.AVG, group=group)
    assert is_exact(averaged[0], exact.view(4, -1)[rank] / 4)
    assert is_exact(averaged[1], exact[:100].view(4, -1)[rank] / 4)
    assert counted(group) == {"compressed": 5, "role not enabled": 2}


@in_backend
def test_groups_are_split_and_made_of_some_ranks(group):
    if SPLITS:
        parts = dist.split_group(group, [[0, 1], [2, 3]], timeout=PATIENCE)
        with role("gradient"):
            dist.all_reduce(result := values.clone(), group=parts)
        assert is_lossy(result, by_rank[rank // 2 * 2 : rank // 2 * 2 + 2].sum(0)) and dist.get_backend(parts) == "ncz"
        assert ours(parts).options._timeout == PATIENCE
    own, _ = dist.new_subgroups(2)
    with role("gradient"):
        dist.all_reduce(result := values.clone(), group=own)
    assert is_lossy(result, by_rank[rank // 2 * 2 : rank // 2 * 2 + 2].sum(0))
    alone = dist.new_subgroups_by_enumeration([[each] for each in range(4)])[0]
    with role("gradient"):
        dist.all_reduce(result := values.clone(), group=alone)
    assert torch.equal(result, values) and counted(alone) == {"compressed": 0, "one rank": 1}
    if not SPLITS:
        return
    if rank < 3:
        dist.split_group(group, [[0, 1, 2]])
    else:  # torch would end the process with a segmentation fault
        raises(UnsupportedError, lambda: dist.split_group(group, [[0, 1, 2]]), "rank 3", "every rank", "new_group")


@in_backend
def test_each_dimension_of_a_mesh_has_its_backend(group):
    kinds = {"replicate": "cpu:ncz", "shard": "cpu:gloo"}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"), backend_override=kinds)
    assert dist.get_backend_config(mesh.get_group("shard")) == "cpu:gloo"
    replicas = mesh.get_group("replicate")
    assert dist.get_backend_config(replicas) == "cpu:ncz"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400))
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        model(values[:4000].view(10, 400)).square().mean().backward()
    gradient = model[0].weight.grad.to_local()
    same = [torch.empty_like(gradient) for _ in range(2)]
    dist.all_gather(same, gradient.contiguous(), group=replicas)
    assert torch.equal(*same)
    assert ours(replicas).stats.total.compressed_calls == 2, counted(replicas)


@in_backend
def test_trainings_by_ddp_and_fsdp_are_compressed(group):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(400, 400), process_group=group)
    for _ in range(3):
        model(values[:4000].view(10, 400)).square().mean().backward()
    same_on_all_ranks(digest(model.module.weight.grad), group)
    assert counted(group)["compressed"] == 3
    assert "role not enabled" not in counted(group)
    # Ranks that run out of data: their sums of one number are held by C++ only.
    with model.join():
        for _ in range(1 + rank):
            model(values[:4000].view(10, 400)).square().mean().backward()
    # A hook that makes collectives in callbacks, on other threads.
    torch.manual_seed(0)
    hooked = DistributedDataParallel(nn.Linear(600, 600), process_group=group)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    hooked.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        hooked(values[:6000].view(10, 600)).square().mean().backward()
    same_on_all_ranks(digest(hooked.module.weight.grad), group)
    assert "role not enabled" not in counted(group)
    static = DistributedDataParallel(nn.Linear(400, 400), process_group=group, static_graph=True)
    before = counted(group)["compressed"]
    for _ in range(2):
        static(values[:4000].view(10, 400)).square().mean().backward()
    assert counted(group)["compressed"] == before + 2, counted(group)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    before = counted()["compressed"]
    sharded = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for _ in range(2):
        sharded(values[:4000].view(10, 400)).square().mean().backward()
    assert counted()["compressed"] == before + 4, counted()


@in_backend
def test_activations_that_are_computed_again_are_exact(group):
    tensor = values.clone().requires_grad_()

    def layer(each):
        summed.append(functional.wait_tensor(functional.all_reduce(each.detach() * 1, "sum", group)))
        return each * summed[-1]

    summed = []
    checkpoint(layer, tensor, use_reentrant=False).sum().backward()
    assert len(summed) == 2 and all(is_exact(each, exact) for each in summed)
    assert counted(group) == {"compressed": 0, "role not enabled": 2}


def warned(call) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in found if "ncz_plugins" in str(each.message)]


@in_backend
def test_users_are_warned_once(group):
    from ncz_plugins.torch import backend_calls

    def weights():
        with role("gradient"), torch.no_grad():
            dist.all_reduce(nn.Parameter(values.clone()), group=group)

    def activations():
        with role("gradient"):
            dist.all_reduce(values.clone().requires_grad_() * 2, group=group)

    def unknown():
        dist.all_reduce(values.clone(), group=group)

    backend_calls._warned.clear()
    [words] = warned(weights)
    assert "seems to be a parameter" in words and 'role("parameter")' in words and "NCZ_ROLES" in words
    [words] = warned(activations)
    assert "seems to be an activation" in words
    unknown_to = warned(unknown)
    assert len(unknown_to) == (rank == 0) and all('role("gradient")' in words for words in unknown_to)
    assert not warned(weights) + warned(activations) + warned(unknown)


@in_backend
def test_the_environment_says_what_groups_carry(group):
    os.environ["NCZ_ROLES"] = "mine=gradient, tp = gradient,*_rest=parameter"
    try:
        mine = dist.new_group(group_desc="mine")
        dist.all_reduce(result := values.clone(), group=mine)
        assert is_lossy(result, exact) and counted(mine) == {"compressed": 1}
        rest = dist.new_group(group_desc="mesh_the_rest")
        dist.all_reduce(result := values.clone(), group=rest)
        assert is_exact(result, exact) and counted(rest) == {"compressed": 0, "role not enabled": 1}
        with role("gradient"):
            dist.all_reduce(result, group=rest)
        assert counted(rest)["compressed"] == 1
        for wrong in ("tp", "tp=weights", "=gradient"):
            os.environ["NCZ_ROLES"] = wrong
            raises(ConfigError, dist.new_group, "NCZ_ROLES", "PATTERN=ROLE", wrong)
    finally:
        del os.environ["NCZ_ROLES"]


@in_backend
def test_roles_that_the_settings_list_are_compressed(group):
    configure("{transport: {min_bytes: 128KiB}, roles: [activation]}\n")
    other = dist.new_group()
    configure(SETTINGS)
    for its_role in ("activation", "gradient"):
        with role(its_role):
            dist.all_reduce(result := values.clone(), group=other)
        assert is_lossy(result, exact) is (its_role == "activation")
    assert counted(other) == {"compressed": 1, "role not enabled": 1}


def group_for_activations(**options) -> dist.ProcessGroup:
    """A new group of all ranks whose settings list activations."""
    configure("{transport: {min_bytes: 16KiB}, roles: [gradient, activation]}\n")
    group = dist.new_group(timeout=PATIENCE, **options)
    configure(SETTINGS)
    return group


def is_close(result: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether a result is off by what any treatment of activations may lose, and not exact."""
    return 0 < float((result - exact).norm() / exact.norm()) < 0.3


SENT = [[900 + 97 * source + 31 * to for to in range(4)] for source in range(4)]  # rows of 10 elements
ROWS = [tensor[: 10 * sum(sent)].view(-1, 10) for tensor, sent in zip(by_rank, SENT)]
ARRIVING = torch.cat([rows.split(sent)[rank] for rows, sent in zip(ROWS, SENT)])


@in_backend
def test_exchanges_are_compressed_if_the_settings_list_activations(group):
    other = group_for_activations()
    # Even and uneven pieces, by a plain call and by one that autograd goes through, forward and backward.
    dist.all_to_all_single(result := torch.empty(100_000), values, group=other)
    assert is_close(result.view(4, -1), by_rank.view(4, 4, -1)[:, rank])
    splits = [sent[rank] for sent in SENT], SENT[rank]
    dist.all_to_all_single(result := torch.empty(len(ARRIVING), 10), ROWS[rank], *splits, group=other)
    assert is_close(result, ARRIVING)
    leaf = ROWS[rank].clone().requires_grad_()
    result = functional.all_to_all_single_autograd(leaf, *splits, other)
    assert is_close(result.detach(), ARRIVING)
    result.backward(functional.wait_tensor(result.detach()))  # what came goes back
    assert is_close(leaf.grad, ROWS[rank])
    assert counted(other) == {"compressed": 4}
    total = ours(other).stats.total
    assert total.plain_bytes_by_role == {"activation": total.plain_bytes}
    assert total.wire_bytes_by_role["activation"] < total.plain_bytes / 2

    # Integers, and roles that the settings don't list, keep every bit.
    tokens = torch.arange(40_000)
    dist.all_to_all_single(whole := torch.empty_like(tokens), tokens, group=other)
    assert torch.equal(whole.view(4, -1), tokens.view(4, -1)[rank].expand(4, -1))
    with role("parameter"):
        dist.all_to_all_single(result := torch.empty(100_000), values, group=other)
    assert torch.equal(result.view(4, -1), by_rank.view(4, 4, -1)[:, rank])
    dist.all_to_all_single(result := torch.empty(100_000), nn.Parameter(values), group=other)
    assert torch.equal(result.view(4, -1), by_rank.view(4, 4, -1)[:, rank])
    assert counted(other) == {"compressed": 4, "dtype": 1, "role not enabled": 2}


@in_backend
def test_sums_by_reduce_and_of_lists_are_compressed_in_a_backward_pass(group):
    def reduced(gradient):
        dist.reduce(result := gradient.clone(), 1, group=group)
        return result

    def scattered(gradient):
        dist.reduce_scatter(result := torch.empty(25_000), list(gradient.chunk(4)), dist.ReduceOp.AVG, group=group)
        return result

    result = in_backward(reduced, values)
    assert is_lossy(result, exact) if rank == 1 else torch.equal(result, values)
    assert is_lossy(4 * in_backward(scattered, values), exact.view(4, -1)[rank])
    assert is_exact(reduced(values), exact) if rank == 1 else torch.equal(reduced(values), values)
    with role("gradient"):
        dist.reduce(strided := values.clone().view(200, 500)[:, ::2], 3, group=group)
        assert rank != 3 or is_lossy(strided, exact.view(200, 500)[:, ::2])
        dist.reduce(largest := values.clone(), 0, dist.ReduceOp.MAX, group=group)
    assert rank or torch.equal(largest, by_rank.amax(0))
    assert counted(group) == {"compressed": 3, "role not enabled": 1, "reduce op": 1}


@in_backend
def test_lists_are_exchanged_as_activations_and_gathered_as_weights(group):
    other = group_for_activations()
    received = [torch.empty(10 * sent[rank]) for sent in SENT]
    work = dist.all_to_all(
        received, [rows.flatten() for rows in ROWS[rank].split(SENT[rank])], group=other, async_op=True
    )
    work.get_future().wait()
    assert is_close(torch.cat(received), ARRIVING.flatten())
    assert counted(other) == {"compressed": 1}

    def gathered_and_scattered() -> list[tuple[torch.Tensor, torch.Tensor]]:
        lists, one, everyone = [torch.empty_like(values) for _ in range(4)], torch.empty_like(values), by_rank.clone()
        dist.gather(values, lists if rank == 2 else None, dst=2, group=other, async_op=True).get_future().wait()
        found = list(zip(lists, everyone))[:2] if rank == 2 else []
        dist.scatter(one, list(everyone) if rank == 3 else None, src=3, group=other)
        found += [(one, values)] if rank < 3 else []
        dist.all_gather(all_of := [torch.empty_like(values) for _ in range(4)], values, group=other)
        return [*found, (torch.stack(all_of), everyone)]

    assert all(torch.equal(*each) for each in gathered_and_scattered())
    assert counted(other) == {"compressed": 1, "role not enabled": 3}
    with role("activation"):
        assert all(is_close(*each) for each in gathered_and_scattered())
    assert counted(other) == {"compressed": 4, "role not enabled": 3}
    # What goes plain at once on all ranks: integers. Roles that differ are told.
    dist.scatter(number := torch.zeros(1), [torch.ones(1)] * 4 if rank == 0 else None, group=other)
    dist.gather(torch.arange(5), [torch.empty(5, dtype=torch.int64)] * 4 if rank == 0 else None, group=other)
    assert number == 1 and counted(other)["dtype"] == 1
    with role("activation" if rank == 1 else "parameter"):
        failed = attempt(lambda: dist.gather(values, [values.clone()] * 4 if rank == 0 else None, group=other))
    assert failed["error"] == "MismatchError" and "role" in failed["message"], failed


@in_backend
def test_ranks_whose_exchanges_differ_are_told(group):
    output = torch.empty(100_000)
    with role("parameter" if rank == 2 else "activation"):
        failed = attempt(lambda: dist.all_to_all_single(output, values, group=group_for_activations()))
    assert failed["error"] == "MismatchError" and "rank 2" in failed["message"] and "role" in failed["message"], failed
    sent = [[400, 300, 200, 100]] * 4
    rows = [2000 if (source, rank) == (1, 3) else of_one[rank] for source, of_one in enumerate(sent)]
    output = torch.empty(sum(rows), 10)
    given, other = (output, ROWS[rank][:1000], rows, sent[rank]), group_for_activations()
    failed = attempt(lambda: dist.all_to_all_single(*given, group=other))
    assert "rank 1 sends 100 rows to rank 3, which expects 2000" in failed["message"], failed


@in_backend
def test_messages_are_compressed_if_the_settings_list_activations(group):
    other = group_for_activations()
    # Ranks 0 and 1 give each other what ranks 2 and 3 know nothing of. Integers come first, as shapes do.
    peer = rank ^ 1
    if rank < 2:
        received, count = torch.empty(100_000), torch.tensor([rank])
        messages = (dist.isend, count.clone()), (dist.irecv, count), (dist.isend, values), (dist.irecv, received)
        operations = [dist.P2POp(of, tensor, group=other, group_peer=peer) for of, tensor in messages]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert is_close(received, by_rank[peer]) and count == peer
        # Messages in one direction arrive in their order, in whatever order they are waited for.
        if rank == 0:
            dist.send(values[:50_000], group=other, group_dst=1)
            dist.send(values[50_000:], group=other, group_dst=1)
        else:
            halves = [torch.empty(50_000) for _ in range(2)]
            works = [dist.irecv(half, group=other, group_src=0) for half in halves]
            assert [work.wait() for work in reversed(works)] == [True, True]
            assert is_close(torch.cat(halves), by_rank[0])
        assert counted(other) == {"compressed": 4, "dtype": 2}
        total = ours(other).stats.total
        sent = (values.nbytes * 2, values.nbytes)[rank]
        assert total.plain_bytes_by_role == {"activation": sent}
        assert total.wire_bytes_by_role["activation"] < sent / 2

        # Roles that the settings don't list, and what is small, keep every bit.
        for given, few in ((values, "parameter"), (values[:100], "activation")):
            with role(few):
                works = [dist.isend(given, group=other, group_dst=peer)]
                works.append(dist.irecv(received[: given.numel()], group=other, group_src=peer))
            assert all(work.wait() for work in works)
            assert torch.equal(received[: given.numel()], by_rank[peer][: given.numel()])
        assert counted(other) == {"compressed": 4, "dtype": 2, "role not enabled": 2, "too small": 2}
    else:
        assert ours(other).stats.total.calls == 0
    raises(UnsupportedError, lambda: dist.irecv(torch.empty(5), group=other), "src must be given", "roles")


@in_backend
def test_ranks_whose_messages_differ_are_told(group):
    if rank > 1:
        group_for_activations(), group_for_activations()
        return
    move = dist.send if rank == 0 else dist.recv
    other = group_for_activations()
    with role("parameter" if rank else "activation"):
        failed = attempt(lambda: move(values.clone(), 1 - rank, group=other))
    assert failed["error"] == "MismatchError" and "role" in failed["message"], failed
    other = group_for_activations()
    failed = attempt(lambda: move(values[: 40 if rank else 38].clone(), 1 - rank, group=other))
    assert "rank 0 sends 38 elements to rank 1, which expects 40" in failed["message"], failed


@in_backend
def test_time_outs_end_calls(group):
    other = dist.new_group(timeout=timedelta(seconds=2))
    assert ours(other).options._timeout == timedelta(seconds=2)
    dist.set_timeout(timedelta(seconds=1), other)
    if rank:
        with role("gradient"):
            dist.all_reduce(values.clone(), group=group)
        raises(PeerError, lambda: connect(other))
    else:
        time.sleep(1.5)
        with role("gradient"):
            dist.all_reduce(values.clone(), group=group)
    assert ours(other).options._timeout == timedelta(seconds=1)


def connect(group):
    with role("gradient"):
        dist.all_reduce(values.clone(), group=group)


@in_backend
@pytest.mark.parametrize("schedule", ["direct", "halving"])
def test_groups_that_are_shut_down_finish_and_those_that_are_aborted_give_up(group, schedule):
    configure(f"transport: {{min_bytes: 128KiB, schedule: {schedule}}}\n")
    ends, gives_up = dist.new_group(timeout=PATIENCE), dist.new_group(timeout=PATIENCE)
    configure(SETTINGS)
    connect(ends), connect(gives_up)
    with role("gradient"):
        work = dist.all_reduce(result := values.clone(), group=ends, async_op=True)
    mine = ours(ends)
    dist.destroy_process_group(ends)
    assert work.wait() and is_lossy(result, exact)
    with role("gradient"):
        raises(NczError, lambda: mine.allreduce([values.clone()]), "closed")
    if rank == 0:
        with role("gradient"):
            work = dist.all_reduce(values.clone(), group=gives_up, async_op=True)
        gives_up.abort()
    dist.barrier(group)
    if rank == 0:
        raises(PeerError, work.wait, "aborted")
    else:
        raises(PeerError, lambda: connect(gives_up))


@in_backend
def test_works_end_and_let_go_of_tensors(group):
    with role("gradient"):
        work = dist.all_reduce(values.clone(), group=group, async_op=True)
        [result] = work.get_future().wait()
        assert work.wait() and is_lossy(result, exact)

        def calls():
            tensor, part, whole = values.clone(), torch.empty(25_000), values.clone()
            dist.all_reduce(tensor, group=group, async_op=True).wait()
            dist.reduce_scatter_single(part, whole, group=group)
            waited = values.clone()
            dist.all_reduce(waited, group=group, async_op=True).get_future().then(lambda done: done.value()).wait()
            return [tensor, part, whole, waited]

        gc.collect()
        gc.disable()
        try:
            watched, deadline = [weakref.ref(each) for each in calls()], time.monotonic() + 10
            while any(each() is not None for each in watched):
                assert time.monotonic() < deadline
                time.sleep(0.001)
        finally:
            gc.enable()


@in_backend
def test_tensors_of_any_layout_are_reduced(group):
    with role("gradient"):
        whole = values.clone().view(200, 500)
        dist.all_reduce(strided := whole[:, ::2], group=group)
        assert is_lossy(strided, exact.view(200, 500)[:, ::2])
        dist.all_reduce(weights := values.clone().view(200, 500).t(), group=group)
        assert is_lossy(weights, exact.view(200, 500).t())


@in_backend
def test_compiled_models_call_it(group):
    """DDP broadcasts buffers in the forward pass, where torch traces all Python that C++ calls."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(400, 400), nn.BatchNorm1d(400)), process_group=group)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        compiled(values[:4000].view(10, 400)).square().mean().backward()
    same_on_all_ranks(digest(model.module[0].weight.grad), group)
    assert counted(group)["compressed"] == 2, counted(group)

    @torch.compile(backend="aot_eager")
    def compute(tensor):
        torch._dynamo.graph_break()
        with role("gradient"):
            work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        return tensor + 0

    assert is_lossy(compute(values.clone()), exact)


@in_backend
def test_a_monitored_barrier_names_the_rank_that_does_not_come(group):
    dist.monitored_barrier(group)
    if rank != 2:
        # Rank 0 finds out. The others learn that it has given up.
        words = ["Ranks 2 failed"] if rank == 0 else []
        raises(RuntimeError, lambda: dist.monitored_barrier(group, timedelta(seconds=2), wait_all_ranks=True), *words)


@in_backend
def test_a_message_from_any_rank_arrives(group):
    if rank == 1:
        dist.send(values[:5], 0, group=group)
    if rank == 0:
        work = dist.irecv(received := torch.empty(5), group=group)
        work.wait()
        assert torch.equal(received, by_rank[1, :5])


@in_backend
def test_groups_are_not_reconfigured(group):
    assert not group.supports_reconfigure
    raises(RuntimeError, group.get_reconfigure_handle, "ncz does not support")
    assert not ours(group).supports_shrinking and not ours(group).supports_window


@pytest.mark.parametrize(
    ("backends", "device", "served"),
    [
        ("ncz", "cpu", ["cpu", "cuda"]),
        ("cpu:ncz", "cpu", ["cpu"]),
        ("cpu:ncz,cuda:gloo", "cpu", ["cpu"]),
        ("cpu:gloo,cuda:ncz", "cpu", ["cuda"]),
        pytest.param("cpu:ncz,cuda:nccl", "cpu", ["cpu"], marks=GPU.marks),
        pytest.param("cpu:gloo,cuda:ncz", "cuda", ["cuda"], marks=GPU.marks),
    ],
)
def test_devices_have_their_backends(backends, device, served, tmp_path):
    for found in on_ranks(2, reduce_a_gradient, tmp_path, backends, device, imports=NOTHING_OF_OURS):
        assert found["served"] == served
        assert 0.01 < found["error"] < 0.3 if device in served else found["error"] < 1e-6


def test_torch_debugs_it(tmp_path):
    """Torch then wraps backends, compares calls by their numbers, and lets go of the Python object."""
    found = on_ranks(2, reduce_a_gradient, tmp_path, "ncz", "cpu", "DETAIL", imports=NOTHING_OF_OURS)
    assert all(each["served"] == ["cpu", "cuda"] and each["error"] > 0.01 for each in found)


def reduce_a_gradient(backends: str, device: str, debug_level: str = "OFF") -> dict:
    """Reduce a gradient on a device. Returns the relative error, and the devices that ncz serves.

    Args:
        debug_level: what TORCH_DISTRIBUTED_DEBUG is.
    """
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = debug_level
    dist.set_debug_level_from_env()
    install()
    torch.set_num_threads(1)
    # With a device, torch makes new groups by splitting, in which all ranks take part.
    bound = {"device_id": torch.device("cpu", 0)} if backends == "cpu:ncz" and SPLITS else {}
    dist.init_process_group(backends, timeout=PATIENCE, **bound)

    mine = values.to(device)
    every = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(every, mine)
    with role("gradient"):
        dist.all_reduce(mine)
    error = float((mine - sum(every)).norm() / sum(every).norm())
    if bound:
        alone = dist.new_group([1])
        assert (alone is dist.GroupMember.NON_GROUP_MEMBER) == (rank == 0)
        if rank:
            dist.all_reduce(every[1], group=alone)

    # With TORCH_DISTRIBUTED_DEBUG=DETAIL a backend is wrapped.
    world = dist.group.WORLD
    by_device = {each.type: world._get_backend(each) for each in world._device_types}
    unwrapped = {kind: getattr(each, "wrapped_pg", each) for kind, each in by_device.items()}
    assert any(each is not by_device[kind] for kind, each in unwrapped.items()) == (debug_level == "DETAIL")
    served = sorted(kind for kind, each in unwrapped.items() if type(each).__name__ == "CompressedBackend")
    assert "cpu" not in served or ours().stats.total.compressed_calls == 1
    dist.barrier()
    dist.destroy_process_group()
    return {"error": error, "served": served}


def test_a_dead_rank_ends_the_backward_pass_of_the_others(tmp_path):
    finished = run_ranks(3, train_until_one_dies, tmp_path, imports=NOTHING_OF_OURS)
    assert finished[2].returncode == 7
    for survivor in finished[:2]:
        assert survivor.returncode == 0 and "PeerError" in survivor.result and "rank 2" in survivor.result, survivor


def train_until_one_dies() -> None:
    """Train by DDP while halving. The last rank dies in the fifth step, in which the others get an error."""
    install()
    os.environ["NCZ_CONFIG"] = str(folder() / f"rank{rank}.yaml")
    configure("transport: {min_bytes: 128KiB, schedule: halving}\n")
    torch.set_num_threads(1)
    dist.init_process_group("ncz", timeout=PATIENCE)
    model = DistributedDataParallel(nn.Linear(400, 400))
    for step in range(5):
        loss = model(values[:4000].view(10, 400)).square().mean()
        if step < 4:
            loss.backward()
    if rank == 2:
        os._exit(7)
    try:
        loss.backward()
    except RuntimeError as error:
        leave_alone(str(error))
