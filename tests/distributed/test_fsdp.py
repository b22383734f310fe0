"""What compression does to FSDP2, with even numbers of ranks."""

import contextlib
import io
from functools import cache

import pytest
import torch
import torch.distributed as dist
from on_rank import device, digest, raises, rank, same_on_all_ranks, world_size
from scenarios import ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from turns import Pair, Passes, by_turns

from ncz_plugins import ConfigError, MismatchError, NczError, UnsupportedError
from ncz_plugins.torch import fsdp

SMALL = {"transport": {"min_bytes": 0}}
LOSSLESS = SMALL | {"quantizer": {"kind": "lossless"}}
FINE = SMALL | {"quantizer": {"value": 1e-3}}
pytestmark = pytest.mark.skipif(not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="needs torch 2.9")


@cache
def flat() -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh(device.type, (world_size,))


@cache
def square() -> DeviceMesh:
    """Two replicas, each sharded among half of the ranks."""
    return init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("replicate", "shard"))


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first = nn.Linear(width, 211)  # a prime: shards of it are padded
        self.second = nn.Linear(211, width)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


def sharded(mesh=None, dtype=torch.float32) -> nn.Module:
    mesh = mesh or flat()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), Block(300), Block(300), nn.Linear(300, 7)).to(device, dtype)
    for module in model[1:3]:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batches(count: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        x = torch.randn(16, 64, generator=generator).to(device, dtype)
        yield x, torch.randint(0, 7, (16,), generator=generator).to(device)


def train(model, steps: int = 4, dtype=torch.float32) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, target in batches(steps, dtype):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).float(), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.detach().full_tensor().view(-1) for parameter in model.parameters()]).cpu()


def near(losses: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0.01, atol=0.01)


@ranks(2, 4, gpu=True)
def test_lossless_trains_as_plain_does(group):
    plain, ours = sharded(), sharded()
    compression = fsdp.compress(ours, LOSSLESS)
    expected, losses = train(plain), train(ours)
    if world_size == 2:
        assert losses == expected and torch.equal(weights(ours), weights(plain))
    near(losses, expected)
    assert compression.stats.total.compressed_calls == 3 * 4  # reductions of a pass, one of each sharded module
    assert compression.training.step == len(compression.stats.steps) == 4


@ranks(2, gpu=True)
def test_at_a_bound_the_loss_is_that_of_plain(group):
    for dtype in (torch.float32, torch.bfloat16):
        plain, ours = sharded(dtype=dtype), sharded(dtype=dtype)
        compression = fsdp.compress(ours, SMALL)
        near(train(ours, dtype=dtype), train(plain, dtype=dtype))
        assert compression.stats.total.compressed_calls == 3 * 4 and compression.stats.total.ratio > 2
        same_on_all_ranks(digest(weights(ours)), group)


@ranks(2, gpu=True)
def test_weights_are_gathered_to_the_bit(group):
    """Compressed with and without what was gathered before, beside plain gathers: the same gradients, hence weights."""
    with_weights = {"roles": ["gradient", "parameter"]}
    for dtype in (torch.float32, torch.bfloat16):
        plain, whole, kept = (sharded(dtype=dtype) for _ in range(3))
        fsdp.compress(plain, SMALL)
        of_whole = fsdp.compress(whole, SMALL | with_weights)
        of_kept = fsdp.compress(kept, SMALL | with_weights, keep_weights=device.type == "cpu")
        expected = train(plain, dtype=dtype)
        assert train(whole, dtype=dtype) == expected and train(kept, dtype=dtype) == expected
        assert torch.equal(weights(whole), weights(plain)) and torch.equal(weights(kept), weights(plain))
        sent = [each.stats.total.wire_bytes_by_role["parameter"] for each in (of_whole, of_kept)]
        assert sent[0] < of_whole.stats.total.plain_bytes_by_role["parameter"]
        if device.type == "cpu":
            # Of a step's two gathers the second finds nothing changed.
            assert sent[1] < (0.5 if dtype == torch.bfloat16 else 0.75) * sent[0], sent
            assert of_kept.stats.total.sent_whole == {"first call": 3}
        assert of_whole.stats.total.bypasses == {}


@ranks(2, gpu=True)
def test_weights_that_no_replica_gathers_are_refused(group):
    both = {"roles": ["gradient", "parameter"]}
    replicas = square()["replicate"].get_group()
    raises(UnsupportedError, lambda: fsdp.compress(sharded(square()["shard"]), both, replicas=replicas), "replica")
    raises(ConfigError, lambda: fsdp.compress(sharded(), SMALL, keep_weights=True), "keep_weights", "add parameter")


@ranks(2, gpu=True)
def test_a_model_of_one_sharded_module(group):
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(300, 500).to(device), mesh=flat())
    compression = fsdp.compress(model, SMALL)
    for _ in range(3):
        model(torch.randn(4, 300, device=device)).square().mean().backward()
    assert compression.training.step == 3 == compression.stats.total.compressed_calls


@ranks(4, gpu=True)
def test_replicas_are_averaged(group):
    """FSDP inside a replica, compressed between replicas, beside what FSDP does over a mesh of both."""
    plain, ours = sharded(square()), sharded(square()["shard"])
    compression = fsdp.compress(ours, LOSSLESS, replicas=square()["replicate"].get_group())
    near(train(ours), train(plain))
    torch.testing.assert_close(weights(ours), weights(plain), rtol=1e-3, atol=1e-4)
    same_on_all_ranks(digest(weights(ours)), group)
    assert compression.training.step == 4 and compression.stats.total.compressed_calls == 3 * 4

    bounded = sharded(square()["shard"])
    compression = fsdp.compress(bounded, SMALL, replicas=square()["replicate"].get_group())
    near(train(bounded), train(sharded(square())))
    same_on_all_ranks(digest(weights(bounded)), group)
    assert compression.stats.total.ratio > 4
    compression.close()
    raises(NczError, lambda: train(bounded, 1), "closed")


@ranks(2, gpu=True)
def test_gradients_are_accumulated(group):
    plain, ours = sharded(), sharded()
    compression = fsdp.compress(ours, LOSSLESS)
    for model in (plain, ours):
        for number, (x, target) in enumerate(batches(2)):
            model.set_requires_gradient_sync(number == 1)
            nn.functional.cross_entropy(model(x), target).backward()
    for mine, expected in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad.full_tensor(), expected.grad.full_tensor())
    assert compression.training.step == 1  # only passes that reduce are steps


@ranks(2, 4, gpu=True)
def test_stages_of_a_pipeline(group):
    """Schedules have gradients reduced after the backward passes of all microbatches: one step for each stage."""
    for schedule in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
        plain, exact, near = (gradients_of_stages(schedule, config) for config in (None, LOSSLESS, FINE))
        torch.testing.assert_close(exact, plain, rtol=1e-5, atol=1e-5)
        assert plain.norm() > 1 and (near - plain).norm() < 1e-2 * plain.norm()


def gradients_of_stages(schedule, config) -> torch.Tensor:
    """Gradients of this rank's stages after three steps of a pipeline of two times as many."""
    at, count = square()["replicate"].get_local_rank(), 1 if issubclass(schedule, PipelineScheduleSingle) else 2
    models = [stage_model(at + 2 * each) for each in range(count)]
    compressions = [fsdp.compress(model, config) for model in models if config]
    peers = square()["replicate"].get_group()
    stages = [PipelineStage(each, at + 2 * i, 2 * count, device, group=peers) for i, each in enumerate(models)]
    run = schedule(stages[0] if count == 1 else stages, 4, loss_fn=lambda output, target: (output * target).sum())
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x, target = torch.randn(2, 8, 100, generator=generator).to(device)
        run.step(*([x] if at == 0 else []), **({"target": target} if at == 1 else {}))
    for compression in compressions:
        total, steps = compression.stats.total, compression.stats.steps
        assert compression.training.step == len(steps) == 3 and total.compressed_calls == total.calls
        assert all(bool(each.calls) == (world_size > 2) for each in steps)  # of 2 ranks, each has a whole stage
    return torch.cat([each.grad.full_tensor().view(-1) for model in models for each in model.parameters()])


def stage_model(number: int) -> nn.Module:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100)).to(device)
    fully_shard(model[0], mesh=square()["shard"])
    return fully_shard(model, mesh=square()["shard"])


@ranks(2, gpu=True)
def test_reductions_outside_of_a_backward_pass(group):
    """As `FSDPModule.finalize_backward` makes them, which torch 2.15 has."""
    if hasattr(FSDPModule, "finalize_backward"):
        return  # `stages_of_a_pipeline` uses it

    def finalize_backward(module):
        for state in module._get_fsdp_state()._state_ctx.all_states:
            for parameters in state._fsdp_param_groups:
                parameters.post_backward()
                parameters.finalize_backward()

    FSDPModule.finalize_backward = finalize_backward
    try:
        plain, ours = sharded(), sharded()
        compression = fsdp.compress(ours, LOSSLESS)
        for model in (plain, ours):
            for step in range(2):
                model.set_requires_gradient_sync(False)
                for x, target in batches(2):
                    nn.functional.cross_entropy(model(x), target).backward()
                assert model is plain or compression.training.step == step
                model.set_requires_gradient_sync(True)
                model.finalize_backward()
    finally:
        del FSDPModule.finalize_backward
    for mine, expected in zip(ours.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad.full_tensor(), expected.grad.full_tensor())
    assert compression.training.step == 2 and [each.calls for each in compression.stats.steps] == [3, 3]


@ranks(2, gpu=True)
def test_policies_and_error_feedback_know_parameters_by_name(group):
    model = sharded()
    kept = {name for name, _ in model.named_parameters() if not name.startswith("2.")}
    config = {"quantizer": {"error_feedback": True}, "policies": [{"name": "2.*", "action": "skip"}]}
    compression = fsdp.compress(model, SMALL | config)
    train(model, 2)
    assert compression.training.residuals.by_name.keys() == kept
    assert compression.stats.total.bypasses == {"policy": 2}
    again = fsdp.compress(sharded(), SMALL | config)
    again.load_state_dict(compression.state_dict())
    assert again.training.step == 2 and again.training.residuals.by_name.keys() == kept
    compression.close()


@ranks(2, gpu=True)
def test_policies_know_the_shapes_of_whole_parameters(group):
    """Of which this rank has shards, and which FSDP reduces together."""
    plain, ours = sharded(), sharded()
    policies = [{"shape": "vector", "action": "skip"}, {"name": "0.weight", "quantizer": {"kind": "lossless"}}]
    compression = fsdp.compress(ours, SMALL | {"policies": policies})
    for model in (plain, ours):
        for x, target in batches(1):
            nn.functional.cross_entropy(model(x), target).backward()
    expected = {name: each.grad.full_tensor() for name, each in plain.named_parameters()}
    for name, each in ours.named_parameters():
        exact = each.dim() == 1 or name == "0.weight"
        gradient = each.grad.full_tensor()
        assert torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-8) == exact
        assert (gradient - expected[name]).norm() < 0.3 * expected[name].norm()
    # Three modules with biases and weights; the root's first weight is treated as no other.
    assert (compression.stats.total.calls, compression.stats.total.bypasses) == (7, {"policy": 3})


def muon_and_adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) == is_matrix] for is_matrix in (True, False))
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest)]


@ranks(2)
@pytest.mark.parametrize(("config", "warns"), [("ncclz", True), ("ncclz:muon", False)])
def test_the_first_rank_warns_once_of_a_bound_that_is_visible_under_muon(group, config, warns):
    model = sharded()
    compression = fsdp.compress(model, config)
    optimizers = muon_and_adam(model)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for x, target in batches(3):
            nn.functional.cross_entropy(model(x), target).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert said.getvalue().count("warning: Muon trains 0.weight") == int(warns and rank == 0)
    assert said.getvalue().count('"ncclz:muon"') == int(warns and rank == 0)
    compression.close()


def loses_nothing(group, model, used=by_turns, begin=lambda model, used: None, accumulates=False):
    """Fail unless the sum of all that came out differs from the exact sum by what is kept, and by no more.

    Args:
        used: gives the names that a rank uses in a pass, from the pass's number and the rank.
        begin: prepares the model for a pass, given the names that this rank uses.
        accumulates: whether only every other pass reduces, the first and the last among them.
    """
    compression = fsdp.compress(model, SMALL | {"quantizer": {"value": 1.0, "error_feedback": True}})
    passes = Passes()
    for number in range(9):
        mine, reduces = used(number, rank), not accumulates or number % 2 == 0
        begin(model, mine)
        model.set_requires_gradient_sync(reduces)
        passes.backward(model, mine)
        for name in passes.missing:
            if (gradient := getattr(model, name).weight.grad) is not None:
                passes.came_out(name, gradient.full_tensor())
        model.zero_grad()
    passes.require_kept(compression, group)


@ranks(2, 4, gpu=True)
def test_error_feedback_loses_nothing_of_parameters_that_take_turns(group):
    def freeze_others(model, used):
        for name in ("left", "right"):
            getattr(model, name).weight.requires_grad_(name in used)

    loses_nothing(group, branches())
    loses_nothing(group, branches(), accumulates=True)
    loses_nothing(group, branches(), begin=freeze_others)
    loses_nothing(group, branches(in_modules=True))  # of which FSDP skips one
    loses_nothing(group, branches(in_modules=True), accumulates=True)


def branches(in_modules: bool = False) -> nn.Module:
    model = Pair().to(device)
    for module in (model.left, model.right) if in_modules else ():
        fully_shard(module, mesh=flat())
    return fully_shard(model, mesh=flat())


@ranks(2, 4, gpu=True)
def test_error_feedback_loses_nothing_of_parameters_that_some_ranks_use(group):
    """FSDP reduces zeros for the others, where it is told to."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return  # before torch 2.13

    def on_one_rank(number, rank):
        return ["left", "right"] if number % 4 == rank else ["left"]

    for used in (on_one_rank, by_turns):
        model = branches()
        model.set_reduce_scatter_unused_params(True)
        loses_nothing(group, model, used)


@ranks(2, gpu=True)
def test_error_feedback_knows_parameters_that_only_a_pass_before_used(group):
    """FSDP keeps such gradients in its `reduce_dtype`, and reduces them with the last pass."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(Pair().to(device), mesh=flat(), mp_policy=policy)
    compression = fsdp.compress(model, SMALL | {"quantizer": {"error_feedback": True}})
    for number in (0, 1, 3):
        model.set_requires_gradient_sync(number == 3)
        model(torch.randn(8, 100, device=device), by_turns(number, rank)).sum().backward()
    assert compression.training.residuals.by_name.keys() == {"left.weight", "right.weight"}
    assert compression.training.step == compression.stats.total.compressed_calls == 1


@ranks(2, gpu=True)
def test_a_model_is_compressed_once(group):
    model = sharded()
    compression = fsdp.compress(model, SMALL)
    raises(UnsupportedError, lambda: fsdp.compress(model, SMALL), "already", "close")
    raises(UnsupportedError, lambda: fsdp.compress(model[1], SMALL), "Block", "already")
    raises(UnsupportedError, lambda: fsdp.compress(nn.Sequential(nn.Identity(), model), SMALL), "1", "already")
    compression.close()
    again = fsdp.compress(model, SMALL | {"roles": ["gradient", "parameter"]})
    train(model, 1)
    again.close()
    once_more = fsdp.compress(model, SMALL)
    train(model, 1)
    assert once_more.stats.total.wire_bytes_by_role.keys() == {"gradient"}


@ranks(2, gpu=True)
def test_steps_go_on_after_a_pass_that_failed(group):
    if not hasattr(FSDPModule, "reset_iter_state"):
        return  # before torch 2.13 FSDP itself does not go on
    model = sharded()
    compression = fsdp.compress(model, SMALL)
    train(model, 1)
    fails = model[0].register_full_backward_hook(lambda *unused: 1 / 0)
    raises(ZeroDivisionError, lambda: train(model, 1), "division")
    fails.remove()
    model.reset_iter_state()
    calls = compression.stats.total.calls
    assert calls > 3 and compression.training.step == 1  # a part of the pass was reduced
    train(model, 2)
    assert compression.training.step == len(compression.stats.steps) == 3


@ranks(2, gpu=True)
def test_modules_that_are_sharded_afterwards_are_noticed(group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), Block(300), nn.Linear(300, 7)).to(device)
    fully_shard(model[1], mesh=flat())
    fsdp.compress(model, SMALL)
    fully_shard(model, mesh=flat())
    raises(UnsupportedError, lambda: train(model, 1), "Sequential", "after fsdp.compress", "fully_shard")


@ranks(2, 4, gpu=True)
def test_sums_that_are_divided_by_a_factor(group):
    """As FSDP does it by itself: over replicas as well, and over gloo, which can't multiply beforehand."""
    for factor in (1.0, 3.0):
        models = [sharded(square()), sharded(square()["shard"]), sharded(), sharded()]
        fsdp.compress(models[1], LOSSLESS, replicas=square()["replicate"].get_group())
        compression = fsdp.compress(models[2], LOSSLESS)
        for model in models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(factor)
                    if model is not models[2] and (model is models[3] or world_size > 2):
                        module.set_force_sum_reduction_for_comms(True)  # which divides twice where one rank has all
            x, target = next(batches(1))
            nn.functional.cross_entropy(model(x), target).backward()
        of_all, *others = ([p.grad.full_tensor() for p in model.parameters()] for model in models)
        for gradients in others:
            for mine, expected in zip(gradients, of_all):
                torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
        assert compression.stats.total.compressed_calls == 3


@ranks(2, gpu=True)
def test_names_are_those_of_the_model(group):
    """Whatever torch.compile puts into them, and also of parameters that a state was assigned to later."""
    model = sharded()
    model[2] = torch.compile(model[2], backend="eager")
    config = {"quantizer": {"error_feedback": True}, "policies": [{"name": "2.*", "action": "skip"}]}
    compression = fsdp.compress(model, SMALL | config)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    train(model, 2)
    kept = {name for name, _ in sharded().named_parameters() if not name.startswith("2.")}
    assert compression.training.residuals.by_name.keys() == kept
    assert compression.stats.total.bypasses == {"policy": 2}


@ranks(2, gpu=True)
def test_one_rank_counts_steps(group):
    alone = init_device_mesh(device.type, (world_size, 1), mesh_dim_names=("others", "alone"))["alone"]
    model = fully_shard(nn.Linear(64, 7).to(device), mesh=alone)
    compression = fsdp.compress(model, SMALL)
    train(model, 3)
    assert compression.training.step == len(compression.stats.steps) == 3
    model.set_requires_gradient_sync(False)
    train(model, 2)
    assert compression.training.step == 3


@ranks(4, gpu=True)
def test_weights_may_be_gathered_among_some_ranks(group):
    """In the backward pass, with `reshard_after_forward` a number."""
    torch.manual_seed(0)
    model, plain = (fully_shard(nn.Linear(64, 7).to(device), mesh=flat(), reshard_after_forward=2) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    keeps = device.type == "cpu"
    compression = fsdp.compress(model, LOSSLESS | {"roles": ["gradient", "parameter"]}, keep_weights=keeps)
    near(train(model, 2), train(plain, 2))
    assert compression.training.step == 2 and not compression.stats.total.bypasses
    assert not keeps or compression.stats.total.sent_whole == {"first call": 2}  # of each group, which keeps its own


@ranks(2, gpu=True)
def test_what_can_not_be_served_is_refused(group):
    raises(UnsupportedError, lambda: fsdp.compress(nn.Linear(3, 3)), "Linear", "fully_shard")
    if device.type == "cpu":
        old = FullyShardedDataParallel(nn.Linear(3, 3), device_id=device)
        raises(UnsupportedError, lambda: fsdp.compress(old), "FSDP1", "fully_shard")
    raises(UnsupportedError, lambda: fsdp.compress(sharded(), replicas=dist.group.WORLD), "different shards")
    raises(MismatchError, lambda: fsdp.compress(sharded(), {"quantizer": {"value": 0.1 + rank}}), "value")
    rotated = "ncclz:muon-ddp"
    raises(UnsupportedError, lambda: fsdp.compress(sharded(), rotated), "quantizer.rotation", "FSDP2", "ncclz:muon")
    kept = FSDPModule.set_custom_reduce_scatter
    del FSDPModule.set_custom_reduce_scatter  # as in torch 2.8
    try:
        raises(UnsupportedError, lambda: fsdp.compress(sharded()), "2.9")
    finally:
        FSDPModule.set_custom_reduce_scatter = kept
