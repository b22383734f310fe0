"""Features of DeepSpeed that change which gradients are reduced, or how, each beside a plain run."""

import contextlib
import io
from collections.abc import Callable, Collection
from types import SimpleNamespace

import pytest

pytest.importorskip("deepspeed")

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime import torch_autocast
from deepspeed.utils import groups, safe_get_full_grad
from on_rank import digest, rank, same_on_all_ranks, world_size
from scenarios import DEEPSPEED, ranks
from small_engine import BATCH, INPUTS, OUTPUTS, configuration, engine_of, loss_of, without_key
from torch import nn

import ncz_plugins.deepspeed  # noqa: F401

pytestmark = pytest.mark.slow
on_two_ranks = ranks(2, launcher="torch", **DEEPSPEED)
on_four_ranks = ranks(4, launcher="torch", **DEEPSPEED)

BOUND = 2e-4  # of each rank's contribution to each reduction, in the gradients' own unit
STEPS = 3
BF16_ROUNDING = 2.0**-7  # two roundings of half a unit in the last place, as a share of the value
SGD = {"type": "SGD", "params": {"lr": 1e-3}}


def case(stage: int, *, zero: dict | None = None, **top_level) -> dict:
    """A DeepSpeed configuration in which every gradient is compressed, and must be known by name."""
    key = {
        "quantizer": {"mode": "abs", "value": BOUND, "error_feedback": True},
        "transport": {"min_bytes": 0},
    }
    zero = {"stage": stage, **(zero or {})}
    return configuration(stage, key, zero_optimization=zero, zero_allow_untested_optimizer=True, **top_level)


def start(make_model: Callable[[], nn.Module], config: dict, **options):
    """An engine around a model with the same first weights in every call, of which some may be frozen."""
    torch.manual_seed(0)
    model = make_model()
    options.setdefault("model_parameters", [p for p in model.parameters() if p.requires_grad])
    return deepspeed.initialize(model=model, config=config, **options)[0]


def backward(engine, step: int) -> float:
    loss = loss_of(engine, step)
    engine.backward(loss)
    return loss.item()


def trains_as_without_compression(
    ours,
    plain,
    backward: Callable = backward,
    rounding: float = 0.0,
    reasons: Collection[str] = (),
    has_gradients: bool = True,
) -> None:
    """Train two engines that differ in our key only.

    Args:
        backward: computes the gradients of a step, given an engine and the step's number. Returns the loss.
        rounding: what sending gradients in another dtype may cost, as a share of the largest gradient.
        reasons: why some calls are expected to go plain.
        has_gradients: whether DeepSpeed shows gradients before its optimizer has changed them.
    """
    losses, plain_losses = [], []
    for step in range(STEPS):
        losses.append(backward(ours, step))
        plain_losses.append(backward(plain, step))
        if step == 0 and has_gradients:  # the only step that both take from the same weights
            gradients_stay_within_the_bound(ours, plain, rounding)
        ours.step()
        plain.step()
    assert losses[0] == plain_losses[0]
    assert losses == pytest.approx(plain_losses, rel=0.01)
    replicas_are_identical(ours)
    counts_all_calls(ours, reasons)


def gradients_stay_within_the_bound(ours, plain, rounding: float) -> None:
    pairs = [
        (safe_get_full_grad(a).float(), safe_get_full_grad(b).float())
        for a, b in zip(ours.module.parameters(), plain.module.parameters())
        if a.requires_grad
    ]
    error = max((a - b).abs().max().item() for a, b in pairs)
    largest = max(b.abs().max().item() for _, b in pairs)
    assert 0 < error <= world_size * BOUND + (rounding + 1e-6) * largest  # 1e-6: of float32 in the plain run


def replicas_are_identical(engine) -> None:
    """All ranks hold the same parameters, and those with the same experts the same experts."""
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        for parameter in parameters:
            of_expert = is_moe_param(parameter)
            group = groups._get_expert_data_parallel_group(parameter.group_name) if of_expert else None
            same_on_all_ranks(digest(parameter), group)


def counts_all_calls(engine, reasons: Collection[str] = ()) -> None:
    """Every call is counted, compressed or with one of `reasons`, all of which occur."""
    steps = engine.communication_compression.stats.steps
    assert len(steps) > 0
    for step in steps:
        assert set(step.bypasses) == set(reasons)
        assert step.compressed_calls == step.calls - sum(step.bypasses.values()) > 0
        assert step.wire_bytes < step.plain_bytes
        assert all(step.bypassed_bytes[reason] > 0 for reason in reasons)


# ------------------------------------------------------------------ what is reduced, and when


SUM = {"gradient_allreduce_op": "sum", "optimizer": SGD}
SUMS = {
    **{f"stage {stage}": case(stage, **SUM) for stage in range(3)},  # DeepSpeed refuses it with ZeRO 3
    "stage 2 without reduce_scatter": case(2, zero={"reduce_scatter": False}, **SUM),
}


@pytest.mark.parametrize("name", SUMS)
@on_two_ranks
def test_gradients_that_are_summed(group, name):
    """gradient_allreduce_op: sum."""
    trains_as_without_compression(engine_of(SUMS[name]), engine_of(without_key(SUMS[name])))


def backward_coalesced(engine, step: int) -> float:
    with engine.coalesce_grad_reduction():
        return sum(backward(engine, 3 * step + number) for number in range(3))


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_two_ranks
def test_backward_passes_that_are_reduced_together(group, stage):
    ours, plain = engine_of(case(stage)), engine_of(without_key(case(stage)))
    trains_as_without_compression(ours, plain, backward_coalesced)
    # One reduction of each parameter.
    elements = sum(getattr(p, "ds_numel", p.numel()) for p in ours.module.parameters())
    for step in ours.communication_compression.stats.steps:
        assert step.bytes_in == pytest.approx(4 * elements, rel=1e-3)


# ------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("stage", range(4))
@on_two_ranks
def test_torch_autocast(group, stage):
    """DeepSpeed sends the gradients of layers that autocast runs in bfloat16 as bfloat16."""
    config = case(stage, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    try:
        trains_as_without_compression(engine_of(config), engine_of(without_key(config)), rounding=BF16_ROUNDING)
    finally:
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = False  # or later engines of this process warn about it


class Adapted(nn.Module):
    """A layer of one dtype, beside it adapters of low rank of another."""

    def __init__(self, base: torch.dtype, adapters: torch.dtype, train_base: bool):
        super().__init__()
        self.base = nn.Linear(INPUTS, 257, dtype=base).requires_grad_(train_base)
        self.down = nn.Linear(INPUTS, 8, bias=False, dtype=adapters)
        self.up = nn.Linear(8, 257, bias=False, dtype=adapters)
        self.head = nn.Linear(257, OUTPUTS, dtype=adapters)

    def forward(self, inputs):
        dtype = self.up.weight.dtype
        base = self.base(inputs.to(self.base.weight.dtype)).to(dtype)
        return self.head(F.gelu(base + self.up(self.down(inputs.to(dtype)))))


DTYPES = {
    "bfloat16 frozen": (torch.bfloat16, torch.float32, False),
    "float32 frozen": (torch.float32, torch.bfloat16, False),
    "bfloat16 trained": (torch.bfloat16, torch.float32, True),
}
ADAPTED = [(name, stage) for name in DTYPES for stage in range(4) if (name, stage) != ("bfloat16 trained", 3)]


@pytest.mark.parametrize("base,stage", ADAPTED)  # DeepSpeed does not train two dtypes with ZeRO 3
@on_two_ranks
def test_adapters_in_another_dtype_than_their_layer(group, base, stage):
    config, how = case(stage), DTYPES[base]
    ours, plain = start(lambda: Adapted(*how), config), start(lambda: Adapted(*how), without_key(config))
    trains_as_without_compression(ours, plain, rounding=BF16_ROUNDING)


# ------------------------------------------------------------------ optimizers


MUON = {"type": "Muon", "params": {"lr": 1e-3, "torch_adam": True}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# DeepSpeed wants this for Muon with ZeRO 3.
ALL_REDUCE = {"reduce_scatter": False}
MUON_CASES = {
    "stage 0": (case(0, optimizer=MUON), []),
    "stage 1": (case(1, optimizer=MUON), []),
    "stage 2": (case(2, optimizer=MUON), []),
    "stage 2 offloaded": (
        case(2, zero=OFFLOAD, optimizer=MUON, zero_force_ds_cpu_optimizer=False),
        ["already reduced"],
    ),
    "stage 3": (case(3, zero=ALL_REDUCE, optimizer=MUON), ["already reduced"]),
}


@pytest.mark.parametrize("name", MUON_CASES)
@on_two_ranks
def test_muon(group, name):
    config, reasons = MUON_CASES[name]
    with torch.compiler.set_stance("force_eager"):  # Muon compiles itself, which takes a minute
        ours, plain = engine_of(config), engine_of(without_key(config))
        # ZeRO 1 and 2 replace gradients by Muon's updates when they reduce.
        in_place = config["zero_optimization"]["stage"] in (1, 2)
        trains_as_without_compression(ours, plain, reasons=reasons, has_gradients=not in_place)


TORCHS = "torch.optim.Muon"


def muon_of_torch(parameters):
    return torch.optim.Muon([each for each in parameters if each.dim() == 2])


@pytest.mark.parametrize(
    ("stage", "key", "optimizer", "warns"),
    [
        *((stage, "ncclz", MUON, True) for stage in range(4)),
        *((stage, "ncclz:muon", MUON, False) for stage in range(4)),
        (2, "ncclz:small", TORCHS, True),
        (2, "ncclz:muon", TORCHS, False),
        (2, "ncclz", {"type": "AdamW", "params": {"torch_adam": True}}, False),
    ],
)
@on_two_ranks
def test_the_first_rank_warns_of_a_bound_that_is_visible_under_muon(group, stage, key, optimizer, warns):
    zero, options = {"stage": stage, "reduce_scatter": False}, {}
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    config = configuration(stage, key, **config, optimizer=optimizer)
    if optimizer == TORCHS:
        del config["optimizer"]
        options["optimizer"] = muon_of_torch
    with contextlib.redirect_stderr(io.StringIO()) as said:
        engine = start(two_layers, config, **options)
    warnings = [line for line in said.getvalue().splitlines() if "ncz_plugins: warning: " in line]
    assert len(warnings) == int(warns and rank == 0), said.getvalue()
    assert all("Muon" in line and "ncclz:muon" in line for line in warnings)
    engine.destroy()


class AdamOfZenFlow(torch.optim.AdamW):
    """DeepSpeed's own takes a minute to compile."""

    def step(self, closure=None, step_id=None):
        return super().step(closure)


@pytest.mark.parametrize("stage", [1, 2])  # ZenFlow with ZeRO 3 needs a GPU
@on_two_ranks
def test_zenflow(group, stage):
    zenflow = {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": 2, "update_interval": 1}
    zero = {**OFFLOAD, "zenflow": {**zenflow, "overlap_step": False, "offload": False, "full_warm_up_rounds": 0}}
    # ZenFlow reads the settings of its optimizer for selected gradients here.
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = case(stage, zero=zero, optimizer=optimizer, zero_force_ds_cpu_optimizer=False)
    engine = start(two_layers, config, optimizer=lambda parameters: AdamOfZenFlow(parameters, lr=1e-3))
    for step in range(STEPS):
        backward(engine, step)
        engine.step()
    replicas_are_identical(engine)
    counts_all_calls(engine, ["already reduced"])


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 64), nn.GELU(), nn.Linear(64, OUTPUTS))


# ------------------------------------------------------------------ experts


class Experts(nn.Module):
    """Layers around experts of `deepspeed.moe`."""

    def __init__(self, ep_size: int):
        super().__init__()
        self.first = nn.Linear(INPUTS, 64)
        expert = nn.Sequential(nn.Linear(64, 65), nn.GELU(), nn.Linear(65, 64))
        self.experts = MoE(64, expert, num_experts=2, ep_size=ep_size, use_rts=False)
        self.head = nn.Linear(64, OUTPUTS)

    def forward(self, inputs):
        return self.head(self.experts(self.first(inputs))[0])


def start_experts(config: dict, ep_size: int):
    model = Experts(ep_size)
    parameters = {"params": list(model.parameters()), "name": "all"}
    return start(
        lambda: model, config, model_parameters=split_params_into_different_moe_groups_for_optimizer(parameters)
    )


def experts_train_as_without_compression(stage: int, ep_size: int) -> None:
    engines = []
    for config in (case(stage), without_key(case(stage))):
        torch.manual_seed(0)
        engines.append(start_experts(config, ep_size))
    trains_as_without_compression(*engines)


@pytest.mark.parametrize("stage", range(3))  # DeepSpeed has no such experts with ZeRO 3
@on_two_ranks
def test_experts_that_every_rank_holds(group, stage):
    experts_train_as_without_compression(stage, ep_size=1)


@pytest.mark.parametrize("stage", range(3))
@on_four_ranks
def test_experts_that_every_other_rank_holds(group, stage):
    experts_train_as_without_compression(stage, ep_size=2)


class Mixtral(nn.Module):
    """As much of Transformers' Mixtral as AutoEP looks for. It replaces the layer `mlp`."""

    def __init__(self):
        super().__init__()
        sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": INPUTS, "intermediate_size": 48}
        self.config = SimpleNamespace(model_type="mixtral", **sizes)
        self.model, layer, mlp, experts = nn.Module(), nn.Module(), nn.Module(), nn.Module()
        experts.gate_up_proj = nn.Parameter(torch.randn(4, 2 * 48, INPUTS) / 8)
        experts.down_proj = nn.Parameter(torch.randn(4, INPUTS, 48) / 8)
        mlp.gate, mlp.experts, mlp.top_k = nn.Linear(INPUTS, 4, bias=False), experts, 2
        layer.dense, layer.mlp = nn.Linear(INPUTS, INPUTS), mlp
        self.model.layers = nn.ModuleList([layer])
        self.lm_head = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, inputs):
        layer = self.model.layers[0]
        return self.lm_head(inputs + layer.mlp(layer.dense(inputs)[None])[0])


AUTO_EP = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral", "use_grouped_mm": False}


@pytest.mark.parametrize("stage", range(4))
@on_four_ranks
def test_auto_ep(group, stage):
    config = case(stage, expert_parallel=AUTO_EP)
    trains_as_without_compression(start(Mixtral, config), start(Mixtral, without_key(config)))


# ------------------------------------------------------------------ what stays plain, and is counted


def auto_tp(up: str, down: str) -> dict:
    """Two ranks of tensor parallelism. `up` and `down` say how layers of these names are split, and others are not."""
    layers = {".*up.weight$": up, ".*down.weight$": down, ".*(gate|dense|head).weight$": "skip"}
    specs = [{"patterns": [pattern], "partition_type": how} for pattern, how in layers.items()]
    return {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}


def backward_in_pairs(engine, step: int) -> None:
    """Both ranks of tensor parallelism have the same batch."""
    random = torch.Generator().manual_seed(100 * step + rank // 2)
    engine.backward(engine(torch.randn(BATCH, INPUTS, generator=random)).square().mean())


@pytest.mark.parametrize("stage", range(4))
@on_four_ranks
def test_auto_ep_under_tensor_parallelism_compresses_experts_only(group, stage):
    engine = start(Mixtral, case(stage, expert_parallel=AUTO_EP, tensor_parallel=auto_tp("skip", "skip")))
    for step in range(STEPS):
        backward_in_pairs(engine, step)
        engine.step()
    replicas_are_identical(engine)
    counts_all_calls(engine, ["model parallelism", "policy"])


class Block(nn.Module):
    """A block of a transformer without attention."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(INPUTS), nn.Linear(INPUTS, 128), nn.Linear(128, INPUTS)

    def forward(self, inputs):
        return inputs + self.down(F.gelu(self.up(self.norm(inputs))))


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_four_ranks
def test_ranks_of_tensor_parallelism_agree_on_what_they_all_hold(group, stage):
    # Blocks of a scale reach from one parameter into the next, of which these ranks hold different parts.
    key = {"quantizer": {"mode": "rms"}, "transport": {"min_bytes": 0}}
    config = case(stage, communication_compression=key, tensor_parallel=auto_tp("column", "row"))
    engine = start(Block, config)
    for step in range(STEPS):
        backward_in_pairs(engine, step)
        engine.step()
    for name in ("norm.weight", "norm.bias", "down.bias"):
        same_on_all_ranks(digest(engine.module.get_parameter(name)))
    counts_all_calls(engine, ["policy"])


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(INPUTS, INPUTS) / 5)

    def forward(self, inputs):
        return inputs @ self.weight


def tied_stages() -> PipelineModule:
    tied, layer = TiedLayerSpec("tied", Product, tied_weight_attr="weight"), LayerSpec(nn.Linear, INPUTS, INPUTS)
    return PipelineModule([tied, layer, layer, tied], num_stages=2, loss_fn=F.mse_loss, partition_method="uniform")


@pytest.mark.parametrize("stage", [0, 1])
@on_four_ranks
def test_weights_that_pipeline_stages_share_stay_the_same_on_both(group, stage):
    """They are summed between stages, and averaged over replicas of each stage, both plain."""
    deepspeed.init_distributed()
    engine = start(tied_stages, case(stage, gradient_accumulation_steps=2))
    for step in range(STEPS):
        random = torch.Generator().manual_seed(100 * step + rank)
        engine.train_batch(iter([tuple(torch.randn(2, BATCH, INPUTS, generator=random)) for _ in range(2)]))
    same_on_all_ranks(digest(engine.module.tied_modules["tied"].weight))
    for step in engine.communication_compression.stats.steps:
        assert step.bypasses == {"model parallelism": 1, "policy": 1}
        assert step.bypassed_bytes == {"model parallelism": 4 * INPUTS**2, "policy": 4 * INPUTS**2}
        assert step.wire_bytes < step.plain_bytes


@on_two_ranks
def test_sparse_gradients_are_gathered_plain(group):
    engine = start(
        lambda: nn.Sequential(nn.EmbeddingBag(100, 31, sparse=True), nn.Linear(31, 7)), case(0, optimizer=SGD)
    )
    for step in range(STEPS):
        random = torch.Generator().manual_seed(100 * step + rank)
        engine.backward(engine(torch.randint(0, 100, (BATCH, 6), generator=random)).square().mean())
        engine.step()
    replicas_are_identical(engine)
    counts_all_calls(engine, ["sparse"])
