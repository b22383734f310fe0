"""What the ranks of one model exchange under DeepSpeed, compressed if `roles` lists activations."""

import os

import pytest

pytest.importorskip("deepspeed")

import deepspeed
import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import TENSOR_META_SIZE
from deepspeed.sequence.layer import DistributedAttention
from on_rank import PATIENCE, attempt, digest, leave_alone, raises, rank, values, world_size
from scenarios import DEEPSPEED, ranks, report, run_ranks
from small_engine import INPUTS, KEY, OUTPUTS, configuration, without_key
from test_deepspeed_features import AUTO_EP, Mixtral
from torch import nn

import ncz_plugins.deepspeed  # noqa: F401
from ncz_plugins import UnsupportedError

pytestmark = pytest.mark.slow
on_two_ranks = ranks(2, launcher="torch", **DEEPSPEED)
on_four_ranks = ranks(4, launcher="torch", **DEEPSPEED)

STEPS, TOKENS, WIDTH, MICRO_BATCHES = 4, 256, 48, 4
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


# ------------------------------------------------------------------ pipelines


class Layer(nn.Module):
    """A layer that adds an embedding of each token, whose number it hands on."""

    def __init__(self):
        super().__init__()
        self.linear, self.embedding = nn.Linear(WIDTH, WIDTH), nn.Embedding(10, WIDTH)

    def forward(self, inputs):
        hidden, tokens = inputs
        return torch.tanh(self.linear(hidden) + self.embedding(tokens)), tokens


def loss_of_last(outputs, targets):
    return nn.functional.mse_loss(outputs[0], targets)


class GPT2ModelPipe(PipelineModule):
    """DeepSpeed sends a mask between the stages of a model of this name."""


def start_stages(config: dict, number: int, kind: type = PipelineModule):
    """An engine with that many stages, with the same first weights in every call."""
    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [LayerSpec(Layer)] * 4
    model = kind(layers, num_stages=number, loss_fn=loss_of_last, partition_method="uniform")
    config = config | {"gradient_accumulation_steps": MICRO_BATCHES}
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def batches(engine):
    """Micro-batches without end, other ones for each replica."""
    random = torch.Generator().manual_seed(engine.grid.get_data_parallel_id())
    while True:
        inputs, targets = torch.randn(2, TOKENS, WIDTH, generator=random)
        yield (inputs, torch.randint(10, (TOKENS,), generator=random)), targets


def trained_stages(engine) -> tuple[list[float], str]:
    """The losses of some steps, and a digest of this stage's weights after them."""
    losses, source = [], batches(engine)
    for _ in range(STEPS):
        losses.append(engine.train_batch(source).item())
    return losses, digest(torch.cat([each.detach().flatten() for each in engine.module.parameters()]))


def stages_send_compressed(number: int) -> None:
    expected, weights = trained_stages(start_stages(without_key(case([], CLOSE)), number))
    engine = start_stages(case(["gradient", "activation"], CLOSE), number)
    losses, changed = trained_stages(engine)
    assert losses != expected and losses == pytest.approx(expected, rel=0.02) and changed != weights

    # Activations go to the next stage, and their gradients to the one before. Tokens go plain, and shapes, once.
    total = engine.communication_compression.stats.total
    has_next = engine.stage_id < number - 1
    neighbours = (engine.stage_id > 0) + has_next
    messages, floats, integers = STEPS * MICRO_BATCHES, TOKENS * WIDTH * 4, TENSOR_META_SIZE * 4
    integers += messages * TOKENS * 8
    plain = total.plain_bytes_by_role["activation"]
    assert plain == neighbours * messages * floats + has_next * integers
    assert has_next * integers < total.wire_bytes_by_role["activation"] < has_next * integers + plain / 4
    assert total.bypasses["dtype"] == neighbours * (1 + messages)
    assert total.bypasses.keys() <= {"dtype", "one rank"}, total
    engine.destroy()

    # Without loss every bit is that of the plain run, with the role and without it.
    for roles in (["activation"], ["gradient"]):
        engine = start_stages(case(roles, {"kind": "lossless"}), number)
        assert trained_stages(engine) == (expected, weights)
        total = engine.communication_compression.stats.total
        assert ("activation" in total.wire_bytes_by_role) == ("activation" in roles), total
        engine.destroy()


@on_two_ranks
def test_two_stages_of_a_pipeline_send_compressed(group):
    stages_send_compressed(2)


@pytest.mark.parametrize("number", [2, 4])
@on_four_ranks
def test_stages_with_and_without_replicas_send_compressed(group, number):
    stages_send_compressed(number)


@on_two_ranks
def test_masks_that_would_be_rounded_are_refused(group):
    config, words = case(["gradient", "activation"], CLOSE), ("communication_compression", "roles", "masks")
    raises(UnsupportedError, lambda: start_stages(config, 2, GPT2ModelPipe), *words)
    engine = start_stages(config, 2)
    raises(UnsupportedError, lambda: engine.set_has_attention_mask(True), *words)
    engine.destroy()
    without = start_stages(case(["gradient"], CLOSE), 2)
    without.set_has_attention_mask(True)
    without.destroy()


def lose_a_stage() -> None:
    """The second of three stages dies in the middle of a step."""

    seen = []

    def die(*_):
        seen.append(len(seen))
        if rank == 1 and len(seen) == MICRO_BATCHES + 2:
            os._exit(7)

    key = {"roles": ["activation"], "transport": {"min_bytes": 0, "timeout_seconds": PATIENCE.total_seconds()}}
    engine = start_stages(configuration(1, key), 3)
    engine.module.register_forward_pre_hook(die)
    source = batches(engine)
    engine.train_batch(source)
    leave_alone(attempt(lambda: engine.train_batch(source)))


def test_a_dead_stage_is_an_error(tmp_path):
    finished = run_ranks(3, lose_a_stage, tmp_path, launcher="torch", **DEEPSPEED)
    assert finished[1].returncode == 7, report(finished)
    for each in (finished[0].result, finished[2].result):
        assert each["error"] == "PeerError" and "rank 1" in each["message"], report(finished)
        assert each["seconds"] < PATIENCE.total_seconds() / 2, each
