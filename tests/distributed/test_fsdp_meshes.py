"""FSDP2 over meshes of two and three dimensions: replicas of shards, `replicate`, tensor parallelism."""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from on_rank import BF16_ROUNDING, device, digest, raises, rank, same_on_all_ranks
from scenarios import ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from turns import Pair

from ncz_plugins import ConfigError, MismatchError, NczError, UnsupportedError
from ncz_plugins.torch import fsdp

SMALL = {"transport": {"min_bytes": 0}}
LOSSLESS = SMALL | {"quantizer": {"kind": "lossless"}}
WITH_FEEDBACK = SMALL | {"quantizer": {"error_feedback": True}}
STEPS = 2  # the second one shows what the first one made of the weights
BOTH_ROLES = {"roles": ["gradient", "parameter"]}
pytestmark = pytest.mark.skipif(not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="needs torch 2.9")


@cache
def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh(device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))


@cache
def flat() -> DeviceMesh:
    return init_device_mesh(device.type, (dist.get_world_size(),))


class Block(nn.Module):
    """Two layers and a norm, whose shards are padded: neither 211 nor 75 can be shared out evenly."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 211)
        self.second = nn.Linear(211, width)

    def forward(self, x):
        return x + self.second(self.first(self.norm(x)).relu())


def unsharded() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 75), Block(75), Block(75), nn.Linear(75, 7)).to(device)


def sharded(mesh: DeviceMesh | None = None, prepare=lambda model: model, **options) -> nn.Module:
    """A model of three sharded modules. `prepare` changes it before it is sharded."""
    model = prepare(unsharded())
    for module in model[1:3]:
        fully_shard(module, mesh=mesh or mesh_of(2, 2), **options)
    return fully_shard(model, mesh=mesh or mesh_of(2, 2), **options)


def batches(count: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed if seed else rank)
    for _ in range(count):
        x = torch.randn(16, 64, generator=generator).to(device)
        yield x, torch.randint(0, 7, (16,), generator=generator).to(device)


def train(model, steps: int = STEPS, before_update=lambda model: None, seed: int = 0) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    losses = []
    for x, target in batches(steps, seed):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).float(), target)
        loss.backward()
        before_update(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model) -> torch.Tensor:
    values = [parameter.detach() for parameter in model.parameters()]
    return torch.cat([(x.full_tensor() if isinstance(x, DTensor) else x).view(-1) for x in values]).cpu()


def near(losses: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0.01, atol=0.01)


def trains_as_plain(group, make, training=train, calls: int = 3 * STEPS, **options) -> None:
    """Fail unless lossless compression ends in the bits of plain training, and the default near it on all ranks alike.

    Args:
        make: returns a new model.
        training: trains one and returns its losses.
        calls: how many compressed reductions the steps make.
        options: of `fsdp.compress`.
    """
    plain, exact, bounded = make(), make(), make()
    expected = training(plain)

    compression = fsdp.compress(exact, LOSSLESS, **options)
    assert training(exact) == expected and torch.equal(weights(exact), weights(plain))
    assert compression.training.step == len(compression.stats.steps) == STEPS
    compression.close()

    compression = fsdp.compress(bounded, SMALL, **options)
    near(training(bounded), expected)
    total = compression.stats.total
    assert total.compressed_calls == total.calls == calls and total.ratio > 2, total.describe()
    assert compression.training.step == STEPS
    assert not torch.equal(weights(bounded), weights(plain))
    same_on_all_ranks(digest(weights(bounded)), group)
    compression.close()


# ------------------------------------------------------------------ replicas


@ranks(4, gpu=True)
def test_replicas_of_shards(group):
    trains_as_plain(group, sharded)


@ranks(4, gpu=True)
def test_replicas_of_shards_that_are_compressed_too(group):
    trains_as_plain(group, sharded, calls=2 * 3 * STEPS, within_replicas=True)
    # With the mesh of one replica, too.
    compression = fsdp.compress(
        model := sharded(mesh_of(2, 2)["shard"]),
        SMALL,
        replicas=mesh_of(2, 2)["replicate"].get_group(),
        within_replicas=True,
    )
    near(train(model), train(sharded()))
    assert compression.stats.total.compressed_calls == 2 * 3 * STEPS and compression.training.step == STEPS
    same_on_all_ranks(digest(weights(model)), group)


@ranks(4)
def test_modules_that_are_sharded_together(group):
    """As one, of which the last one's name is known."""

    def together():
        model = unsharded()
        fully_shard(list(model[1:3]), mesh=mesh_of(2, 2))
        return fully_shard(model, mesh=mesh_of(2, 2))

    trains_as_plain(group, together, calls=2 * STEPS)
    compression = fsdp.compress(model := together(), SMALL | {"policies": [{"name": "2.*", "action": "skip"}]})
    compression.close()
    compression = fsdp.compress(model, SMALL | {"policies": [{"name": "2.*", "action": "skip"}]})
    train(model, 1)
    assert compression.stats.total.bypasses == {"policy": 1}


@ranks(4, gpu=True)
def test_bytes_between_replicas_are_counted(group):
    """The plain all-reduce sends a rank's share of all gradients, twice half of it. Nothing else is counted."""
    model = sharded()
    compression = fsdp.compress(model, SMALL)
    train(model, 1)
    total = compression.stats.total
    shares = sum(-(-each.shape[0] // 2) * each[0].numel() for each in unsharded().parameters())
    assert total.bytes_in == total.plain_bytes == 4 * shares
    assert 0 < total.wire_bytes < total.plain_bytes / 2 and total.seconds > 0


@ranks(4)
def test_one_replica_and_one_shard(group):
    for mesh in (mesh_of(4, 1), mesh_of(1, 4)):
        model = sharded(mesh)
        compression = fsdp.compress(model, SMALL)
        near(train(model), train(sharded(mesh)))
        assert compression.training.step == STEPS
        # Between replicas there is nothing to send if there is one: counted with its reason.
        assert compression.stats.total.bypasses == ({} if mesh.size(0) > 1 else {"one rank": 3 * STEPS})
    model = sharded(mesh_of(1, 4))
    compression = fsdp.compress(model, SMALL, within_replicas=True)
    train(model, 1)
    assert compression.stats.total.compressed_calls == 3 and compression.training.step == 1


@ranks(2, 4, gpu=True)
def test_replicate(group):
    """All ranks have all parameters."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    def replicated():
        model = unsharded()
        for module in model[1:3]:
            replicate(module, mesh=flat())
        return replicate(model, mesh=flat())

    model = replicated()
    compression = fsdp.compress(model, SMALL)
    near(train(model), train(replicated()))
    assert compression.stats.total.compressed_calls == 3 * STEPS and compression.training.step == STEPS
    same_on_all_ranks(digest(weights(model)), group)
    compression.close()
    if dist.get_world_size() == 2:
        trains_as_plain(group, replicated)


# ------------------------------------------------------------------ what FSDP and its users do besides


@ranks(4, gpu=True)
def test_mixed_precision(group):
    for reduce_dtype in (torch.bfloat16, torch.float32):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        trains_as_plain(group, partial(sharded, mp_policy=policy))


@ranks(4, gpu=True)
def test_float16_which_fsdp_divides_itself(group):
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float16)
    trains_as_plain(group, partial(sharded, mp_policy=policy))


def accumulate(setting: str, model) -> list[float]:
    """Train steps of two backward passes, of which the last one synchronizes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number, (x, target) in enumerate(batches(2 * STEPS)):
        getattr(model, setting)(number % 2 == 1)
        losses.append(nn.functional.cross_entropy(model(x), target))
        losses[-1].backward()
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return [loss.item() for loss in losses]


@ranks(4, gpu=True)
def test_gradients_are_accumulated(group):
    """Whether each pass reduces within a replica or none does: the pass that averages replicas ends a step."""
    for setting in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        trains_as_plain(group, sharded, partial(accumulate, setting))
    trains_as_plain(
        group, sharded, partial(accumulate, "set_requires_all_reduce"), calls=3 * STEPS * (2 + 1), within_replicas=True
    )


@ranks(4, gpu=True)
def test_gradients_are_clipped(group):
    def clip(model):
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor().item())

    norms = []
    trains_as_plain(group, sharded, partial(train, before_update=clip))
    assert len(norms) == 3 * STEPS and min(norms) > 0.1
    same_on_all_ranks(norms, group)


@ranks(4)
def test_activation_checkpointing(group):
    def checkpointed(model):
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        return model

    trains_as_plain(group, partial(sharded, prepare=checkpointed))


@ranks(4)
def test_compiled_modules(group):
    def compiled(model):
        for block in model[1:3]:
            block.compile(backend="aot_eager")
        return model

    trains_as_plain(group, partial(sharded, prepare=compiled))
    model = sharded()
    compression = fsdp.compress(torch.compile(model, backend="aot_eager"), SMALL)
    near(train(torch.compile(model, backend="aot_eager")), train(sharded()))
    assert compression.training.step == STEPS


@ranks(4)
def test_frozen_parameters(group):
    """Of some parameters of a module, and of all of them."""

    def frozen(model):
        model[1].first.requires_grad_(False)
        model[2].requires_grad_(False)
        return model

    trains_as_plain(group, partial(sharded, prepare=frozen), calls=2 * STEPS)


@ranks(4)
def test_a_divisor_of_the_users(group):
    """FSDP's own over a 2-D mesh is for NCCL, as gloo can't scale a sum before it is made."""

    def forced(model):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(3.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    trains_as_plain(group, lambda: forced(sharded()))
    models = [forced(sharded()), sharded()]
    for module in models[1].modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(3.0)
    fsdp.compress(models[1], LOSSLESS, within_replicas=True)
    assert train(models[1]) == train(models[0])


@ranks(4)
def test_stages_of_a_pipeline_with_replicas(group):
    """A schedule reduces after the backward passes of all microbatches: one step for each stage."""
    mesh = init_device_mesh(device.type, (2, 2, 1), mesh_dim_names=("pipeline", "replicate", "shard"))
    at, peers = mesh["pipeline"].get_local_rank(), mesh["pipeline"].get_group()
    gradients = []
    for config in (None, LOSSLESS, SMALL):
        torch.manual_seed(at)
        model = fully_shard(nn.Linear(100, 100).to(device), mesh=mesh["replicate", "shard"])
        compression = fsdp.compress(model, config) if config else None
        stage = PipelineStage(model, at, 2, device, group=peers)
        schedule = ScheduleGPipe(stage, 4, loss_fn=lambda output, target: (output * target).sum())
        generator = torch.Generator().manual_seed(rank % 2)
        for _ in range(3):
            x, target = torch.randn(2, 8, 100, generator=generator).to(device)
            schedule.step(*([] if at else [x]), **({"target": target} if at else {}))
        gradients.append(torch.cat([each.grad.full_tensor().view(-1) for each in model.parameters()]))
        if config:
            assert compression.training.step == compression.stats.total.compressed_calls == 3
    plain, exact, bounded = gradients
    assert torch.equal(exact, plain)
    assert 0 < (bounded - plain).norm() < 0.2 * plain.norm()


@ranks(4)
def test_parameters_that_some_ranks_use(group):
    """FSDP reduces zeros for the others, where it is told to."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return  # before torch 2.13
    gradients = []
    for config in (None, LOSSLESS, WITH_FEEDBACK):
        torch.manual_seed(0)
        model = fully_shard(Pair().to(device), mesh=mesh_of(2, 2))
        model.set_reduce_scatter_unused_params(True)
        compression = fsdp.compress(model, config) if config else None
        generator = torch.Generator().manual_seed(rank)
        for number in range(3):
            used = ["left", "right"] if number == rank else ["left"]
            model(torch.randn(8, 100, generator=generator).to(device), used).sum().backward()
        gradients.append(torch.cat([each.grad.full_tensor().view(-1) for each in model.parameters()]))
        assert not config or compression.training.step == 3
    assert torch.equal(gradients[1], gradients[0])
    assert (gradients[2] - gradients[0]).norm() < 0.2 * gradients[0].norm()
    same_on_all_ranks(digest(gradients[2].cpu()), group)


# ------------------------------------------------------------------ state


@ranks(4)
def test_policies_roles_and_error_feedback_know_names(group):
    skip = {"policies": [{"name": "2.*", "action": "skip"}]}
    for within in (False, True):
        model = sharded()
        compression = fsdp.compress(model, WITH_FEEDBACK | skip, within_replicas=within)
        train(model, 2)
        kept = {name for name, _ in model.named_parameters() if not name.startswith("2.")}
        twice = kept | {f"{name} between replicas" for name in kept} if within else kept
        assert compression.training.residuals.by_name.keys() == twice
        assert compression.stats.total.bypasses == {"policy": 4 if within else 2}
        compression.close()
    model = sharded()
    compression = fsdp.compress(model, SMALL | {"roles": ["parameter"]}, within_replicas=True)
    train(model, 1)
    assert compression.stats.total.bypasses == {"role not enabled": 6}


@ranks(4)
def test_error_feedback_loses_nothing_between_replicas(group):
    """What came out in all steps and what is kept add up to the exact sum of gradients."""
    for within in (False, True):
        model = fully_shard(nn.Linear(100, 100, bias=False).to(device), mesh=mesh_of(2, 2))
        config = SMALL | {"quantizer": {"value": 1.0, "error_feedback": True}}
        compression = fsdp.compress(model, config, within_replicas=within)
        generator = torch.Generator().manual_seed(rank)
        exact, came_out = torch.zeros(2, 100, 100, dtype=torch.float64)
        for _ in range(6):
            x, y = torch.randn(2, 8, 100, generator=generator)
            (model(x.to(device)) * y.to(device)).sum().backward()
            exact += y.double().T @ x.double()
            came_out += model.weight.grad.full_tensor().double().cpu()
            model.zero_grad()
        dist.all_reduce(exact, group=group)
        kept = compression.training.residuals.by_name
        # Residuals between replicas are of averages over 2 ranks, for one of 2 shards; those within are of one rank.
        own = kept["weight between replicas" if within else "weight"].double().cpu().view(50, 100)
        lost = torch.zeros(2, 50, 100, dtype=torch.float64)
        lost[rank % 2] += own / 2
        lost = lost.view(100, 100)
        if within:
            lost += kept["weight"].double().cpu().view(100, 100) / 4
        dist.all_reduce(lost, group=group)
        missing = exact / 4 - came_out
        dist.all_reduce(
            largest := max(each.abs().max() for each in kept.values()).double(), dist.ReduceOp.MAX, group=group
        )
        torch.testing.assert_close(missing, lost, rtol=0, atol=6 * len(kept) * largest.item() * BF16_ROUNDING)
        assert missing.abs().max() > 0.1
        compression.close()


@ranks(4)
def test_error_feedback_knows_parameters_that_only_a_pass_before_used(group):
    """torch 2.15 keeps what passes have added up within a replica by parameter. Older ones mix parameters up."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    if not hasattr(FSDPParamGroup, "_get_partial_reduce_grad"):
        return
    model = fully_shard(Pair().to(device), mesh=mesh_of(2, 2))
    plain = fully_shard(Pair().to(device), mesh=mesh_of(2, 2))
    plain.load_state_dict(model.state_dict())
    compression = fsdp.compress(model, SMALL | {"quantizer": {"value": 1e-3, "error_feedback": True}})
    for each in (model, plain):
        generator = torch.Generator().manual_seed(rank)
        for number in range(2):
            each.set_requires_all_reduce(number == 1)
            x = torch.randn(8, 100, generator=generator).to(device)
            each(x, [("left", "right")[number]]).sum().backward()
    assert compression.training.residuals.by_name.keys() == {"left.weight", "right.weight"}
    for mine, expected in zip(model.parameters(), plain.parameters()):
        expected = expected.grad.full_tensor()
        torch.testing.assert_close(mine.grad.full_tensor(), expected, rtol=0, atol=0.01 * expected.abs().max().item())
    assert compression.training.step == 1


@ranks(4)
def test_checkpoints(group):
    """A run goes on from its state with the same bits, residuals included."""
    import tempfile

    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0, group=group)
    for within in (False, True):
        model = sharded()
        compression = fsdp.compress(model, WITH_FEEDBACK, within_replicas=within)
        train(model, 2)
        path = f"{folder[0]}/{within}"
        dcp.save({"model": model.state_dict(), "compression": compression}, checkpoint_id=path)
        expected = train(model, 2, seed=rank + 7)

        again = sharded()
        resumed = fsdp.compress(again, WITH_FEEDBACK, within_replicas=within)
        state = {"model": again.state_dict(), "compression": resumed}
        dcp.load(state, checkpoint_id=path)
        again.load_state_dict(state["model"])
        assert resumed.training.step == 2
        assert train(again, 2, seed=rank + 7) == expected and torch.equal(weights(again), weights(model))
        compression.close()
        resumed.close()


@ranks(4)
def test_weights_are_gathered_to_the_bit(group):
    model, plain = sharded(), sharded()
    fsdp.compress(plain, SMALL, within_replicas=True)
    compression = fsdp.compress(model, SMALL | BOTH_ROLES, within_replicas=True, keep_weights=True)
    assert train(model) == train(plain) and torch.equal(weights(model), weights(plain))
    assert compression.stats.total.wire_bytes_by_role["parameter"] > 0


@ranks(4)
def test_a_closed_compression_is_replaced(group):
    model, plain = sharded(), sharded()
    compression = fsdp.compress(model, SMALL, within_replicas=True)
    train(model, 1)
    raises(UnsupportedError, lambda: fsdp.compress(model, SMALL), "already", "close")
    compression.close()
    raises(NczError, lambda: train(model, 1), "closed")
    model.load_state_dict(plain.state_dict())
    again = fsdp.compress(model := sharded(), LOSSLESS)
    again.close()
    once_more = fsdp.compress(model, LOSSLESS)
    assert train(model) == train(plain)
    assert once_more.stats.total.compressed_calls == 3 * STEPS  # between replicas only


# ------------------------------------------------------------------ tensor parallelism


def in_parallel(mesh: DeviceMesh, how: dict | None = None) -> nn.Module:
    """A model whose blocks are split over the dimension "tensor" of a mesh, and sharded over the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 76), Block(76), Block(76), nn.Linear(76, 7)).to(device)
    for block in model[1:3]:
        block.first, block.second = nn.Linear(76, 212).to(device), nn.Linear(212, 76).to(device)
        parallelize_module(block, mesh["tensor"], how or {"first": ColwiseParallel(), "second": RowwiseParallel()})
    others = mesh["replicate", "shard"] if "replicate" in mesh.mesh_dim_names else mesh["shard"]
    for block in model[1:3]:
        fully_shard(block, mesh=others)
    return fully_shard(model, mesh=others)


def of_all_ranks(tensors: list[torch.Tensor], group) -> list[str]:
    """Digests of this rank's tensors, which ranks compare."""
    gathered: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, [digest(each) for each in tensors], group)
    return gathered


@ranks(4)
def test_tensor_parallelism(group):
    """Sharded over two ranks, split over two. Norms and biases, which are not split, stay alike on both."""
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("shard", "tensor"))
    seed = mesh["shard"].get_local_rank() + 1  # ranks of tensor parallelism see the same data
    plain, exact, bounded = (in_parallel(mesh) for _ in range(3))
    expected = train(plain, seed=seed)
    compression = fsdp.compress(exact, LOSSLESS)
    assert train(exact, seed=seed) == expected and torch.equal(weights(exact), weights(plain))
    assert compression.training.step == STEPS
    compression.close()

    compression = fsdp.compress(bounded, WITH_FEEDBACK)
    near(train(bounded, seed=seed), expected)
    assert compression.stats.total.compressed_calls == 3 * STEPS and compression.training.step == STEPS
    alike = [
        each.to_local().detach().cpu()
        for name, each in bounded.named_parameters()
        if "first" not in name and "second.weight" not in name
    ]
    assert len(alike) == 2 * 2 + 2 * 3
    everyone = of_all_ranks(alike, group)
    peer = rank ^ 1
    assert everyone[rank] == everyone[peer] and everyone[rank] != everyone[rank ^ 2]
    same_on_all_ranks(digest(weights(bounded)), group)


@ranks(8)
def test_replicas_of_shards_under_tensor_parallelism(group):
    mesh = init_device_mesh(device.type, (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    seed = rank // 2 + 1
    plain = in_parallel(mesh)
    expected = train(plain, seed=seed)
    for within in (False, True):
        exact, bounded = in_parallel(mesh), in_parallel(mesh)
        compression = fsdp.compress(exact, LOSSLESS, within_replicas=within)
        assert train(exact, seed=seed) == expected and torch.equal(weights(exact), weights(plain))
        compression.close()
        compression = fsdp.compress(bounded, SMALL, within_replicas=within)
        near(train(bounded, seed=seed), expected)
        assert compression.stats.total.compressed_calls == (2 if within else 1) * 3 * STEPS
        same_on_all_ranks(digest(weights(bounded)), group)
        compression.close()


# ------------------------------------------------------------------ refusals


@ranks(4)
def test_what_can_not_be_served_is_refused(group):
    from torch.distributed._composable.replicate_with_fsdp import replicate

    of_mesh = mesh_of(2, 2)["replicate"].get_group()
    raises(UnsupportedError, lambda: fsdp.compress(sharded(), replicas=of_mesh), "leave replicas out")
    raises(UnsupportedError, lambda: fsdp.compress(sharded(), BOTH_ROLES), "within_replicas=True")
    raises(ConfigError, lambda: fsdp.compress(sharded(), SMALL, keep_weights=True), "add parameter to roles")
    replicated = replicate(nn.Linear(64, 7).to(device), mesh=flat())
    raises(UnsupportedError, lambda: fsdp.compress(replicated, within_replicas=True), "within_replicas", "leave it out")
    raises(UnsupportedError, lambda: fsdp.compress(replicated, BOTH_ROLES), "roles")
    raises(MismatchError, lambda: fsdp.compress(sharded(), {"quantizer": {"value": 0.1 + rank}}), "value")
    if (placement := of_two_meshes()) is not None:
        model = fully_shard(Block(76).to(device), mesh=mesh_of(2, 2), shard_placement_fn=placement)
        raises(UnsupportedError, lambda: fsdp.compress(model), "several meshes")


def of_two_meshes():
    """A `shard_placement_fn` that puts biases on another mesh; None before torch 2.13."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    except ImportError:
        return None
    other = FSDPMeshInfo(flat(), shard_mesh_dim=0)
    return lambda parameter: ShardPlacementResult(None, other) if parameter.ndim == 1 else None


@ranks(4)
def test_an_error_between_replicas_is_the_packages_own(group):
    """torch looks the group of an all-reduce up when that fails."""
    model = sharded()
    compression = fsdp.compress(model, SMALL)
    train(model, 1)
    for communicator in compression._communicators.values():
        communicator.abort()
    raises(NczError, lambda: train(model, 1), "aborted")
