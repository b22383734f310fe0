"""What the ranks of one model exchange under DeepSpeed, compressed if `roles` lists activations."""

import pytest

pytest.importorskip("deepspeed")

import deepspeed
import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.sequence.layer import DistributedAttention
from on_rank import digest, rank, values, world_size
from scenarios import DEEPSPEED, ranks
from small_engine import INPUTS, KEY, OUTPUTS, configuration, without_key
from test_deepspeed_features import AUTO_EP, Mixtral
from torch import nn

import ncz_plugins.deepspeed  # noqa: F401

pytestmark = pytest.mark.slow
on_two_ranks = ranks(2, launcher="torch", **DEEPSPEED)
on_four_ranks = ranks(4, launcher="torch", **DEEPSPEED)

STEPS, TOKENS = 4, 256
CLOSE = {"kind": "error_bound", "mode": "rms", "value": 0.1}


def case(roles: list[str], quantizer: dict, **top_level) -> dict:
    key = {"quantizer": quantizer, "roles": roles, "transport": {"min_bytes": 0}}
    return configuration(1, key, **top_level)


class Experts(nn.Module):
    """Layers around two experts of `deepspeed.moe`, one on each rank of a pair."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(INPUTS, 64)
        expert = nn.Sequential(nn.Linear(64, 65), nn.GELU(), nn.Linear(65, 64))
        self.experts = MoE(64, expert, num_experts=2, ep_size=2, use_rts=False)
        self.head = nn.Linear(64, OUTPUTS)

    def forward(self, inputs):
        return self.head(self.experts(self.first(inputs))[0])


class Attention(nn.Module):
    """Attention of 4 heads by Ulysses, in which each rank has a part of the sequence."""

    def __init__(self):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(INPUTS, 32) for _ in range(3))
        self.attention = DistributedAttention(_attend, dist.group.WORLD)
        self.head = nn.Linear(32, OUTPUTS)

    def forward(self, inputs):
        heads = [each(inputs).view(TOKENS, 1, 4, 8) for each in self.projections]  # [sequence, batch, heads, width]
        return self.head(self.attention(*heads, 1).view(TOKENS, 32))


def _attend(*heads):
    query, key, value = (each.permute(1, 2, 0, 3) for each in heads)
    return nn.functional.scaled_dot_product_attention(query, key, value).permute(2, 0, 1, 3).contiguous()


MODELS = {"experts": Experts, "Ulysses": Attention, "AutoEP": Mixtral}
OPTIONS = {"AutoEP": {"expert_parallel": AUTO_EP}}


def start(name: str, config: dict):
    """An engine with the same first weights in every call."""
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = MODELS[name]()
    parameters = list(model.parameters())
    if name == "experts":
        parameters = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "all"})
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]


def loss_of(engine, step: int) -> torch.Tensor:
    """The loss on this rank's own tokens of that step."""
    random = torch.Generator().manual_seed(100 * step + rank)
    inputs, targets = (torch.randn(TOKENS, each, generator=random) for each in (INPUTS, OUTPUTS))
    return nn.functional.mse_loss(engine(inputs), targets)


def trained(engine) -> tuple[list[float], str]:
    """The losses of some steps, and a digest of the weights after them."""
    losses = []
    for step in range(STEPS):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, digest(torch.cat([each.detach().flatten() for each in engine.module.parameters()]))


def exchanges_are_compressed_where_roles_say_so(name: str) -> None:
    options = OPTIONS.get(name, {})
    config = case(["gradient", "activation"], CLOSE, **options)
    ours, plain = start(name, config), start(name, without_key(config))
    expected, weights = trained(plain)
    losses, changed = trained(ours)
    assert losses != expected and losses == pytest.approx(expected, rel=0.02) and changed != weights
    total = ours.communication_compression.stats.total
    assert 0 < total.wire_bytes_by_role["activation"] < total.plain_bytes_by_role["activation"] / 2
    assert total.bypasses.keys() <= {"one rank"}, total  # of gradients of experts that one rank holds

    # Without loss every bit is that of the plain run, with the role and without it. Without it no exchange is ours.
    for roles in (["activation"], ["gradient"]):
        engine = start(name, case(roles, {"kind": "lossless"}, **options))
        losses, found = trained(engine)
        assert losses == pytest.approx(expected, rel=1e-5) and losses[0] == expected[0]
        if world_size == 2:  # sums of more ranks depend on the order, which differs from gloo's
            assert (losses, found) == (expected, weights)
        counted = engine.communication_compression.stats.total.plain_bytes_by_role
        assert counted.keys() == set(roles) | {"gradient"}
        engine.destroy()


@pytest.mark.parametrize("name", ["experts", "Ulysses"])
@on_two_ranks
def test_exchanges_are_compressed_where_roles_say_so(group, name):
    exchanges_are_compressed_where_roles_say_so(name)


@on_four_ranks
def test_rows_for_experts_of_auto_ep_are_compressed(group):
    exchanges_are_compressed_where_roles_say_so("AutoEP")


@on_two_ranks
def test_all_that_experts_exchange_is_counted(group):
    engine = start("experts", case(["activation"], CLOSE))
    loss = loss_of(engine, 0)
    total = engine.communication_compression.stats.total
    assert total.calls == total.compressed_calls == 2  # tokens to their experts, and back
    engine.backward(loss)
    engine.step()
    total = engine.communication_compression.stats.total
    assert total.compressed_calls == 4
    # Gradients stay as they are, and say why.
    assert set(total.bypasses) == {"role not enabled", "one rank"}, total.bypasses
    engine.destroy()


@on_two_ranks
def test_exchanges_outside_of_a_forward_and_backward_pass_are_exact(group):
    engine = start("experts", case(["gradient", "activation"], CLOSE))
    trained(engine)
    loss_of(engine, 0)  # of a forward pass that no backward pass follows
    before = engine.communication_compression.stats.total.calls
    output, sent = torch.empty(1000), values(rank, 1000)
    deepspeed.comm.all_to_all_single(output, sent)
    parts = [values(source, 1000).view(world_size, -1)[rank] for source in range(world_size)]
    assert torch.equal(output, torch.cat(parts))
    assert engine.communication_compression.stats.total.calls == before
    engine.destroy()


@on_two_ranks
def test_each_engine_has_its_own_roles(group):
    ours = start("experts", case(["gradient", "activation"], CLOSE))
    others = [start("experts", case(["gradient"], CLOSE)), start("experts", without_key(case([], CLOSE)))]
    trained(ours)
    counted = ours.communication_compression.stats.total.plain_bytes_by_role["activation"]
    for other in others:
        trained(other)
    assert ours.communication_compression.stats.total.plain_bytes_by_role["activation"] == counted
    assert "activation" not in others[0].communication_compression.stats.total.plain_bytes_by_role
    assert KEY not in others[1]._config._param_dict
    ours.destroy()
