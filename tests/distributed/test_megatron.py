"""Megatron-Core trains a small GPT over the backend `ncz`, data-parallel and beside tensor and expert parallelism.

Megatron-Core asks for CUDA devices, which cuda_on_cpus.py lets be CPUs. All else is its own code.
"""

import os
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cuda_on_cpus import CudaOnCpus
from on_rank import digest, folder, rank, world_size
from scenarios import IMPORTS, on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]

VERSION = version("megatron-core") if find_spec("megatron") else ""
EXPERTS_RUN = not VERSION.startswith("0.16.")  # it lacks a name where Transformer Engine is not installed
STEPS = 4
VOCABULARY, SEQUENCE = 256, 32
SETTINGS = "transport: {min_bytes: 32KiB}\n"
LOSSLESS = SETTINGS + "quantizer: {kind: lossless}\n"
# How Megatron-Core reduces gradients: in one all-reduce or reduce-scatter after the backward pass, or in buckets during
# it. In the first step it reduces buckets after the backward pass, too.
WAYS = {
    f"{reduction}, {when}": {"use_distributed_optimizer": reduction == "reduce-scatter", "overlap_grad_reduce": overlap}
    for reduction in ("all-reduce", "reduce-scatter")
    for when, overlap in (("after", False), ("during", True))
}
LAST = "reduce-scatter, during"


# ------------------------------------------------------------------ on the ranks


@contextmanager
def joined(backend: str, settings: str = ""):
    """A process group of all ranks, with a backend for all groups and settings that NCZ_CONFIG names."""
    import ncz_plugins.torch.backend  # noqa: F401 - registers the name

    place = folder() / f"{backend}-{len(settings)}".replace(":", "-")
    os.environ["NCZ_CONFIG"] = f"{place}-{rank}.yaml"
    Path(os.environ["NCZ_CONFIG"]).write_text(settings)
    store = dist.FileStore(f"{place}.store", world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    yield
    dist.barrier()
    dist.destroy_process_group()


def counted(group: dist.ProcessGroup) -> dict[str, int] | None:
    """How many calls of a group went compressed, and how many plain for each reason. None for another backend."""
    from ncz_plugins import UnsupportedError
    from ncz_plugins.torch import backend

    try:
        total = backend.of_group(group).stats.total
    except UnsupportedError:
        return None
    return {"compressed": total.compressed_calls} | total.bypasses


def train(ddp: dict, half: bool = False, parallel: dict | None = None, more: dict | None = None, data=None) -> dict:
    """Train for some steps as Megatron-Core's own loop does.

    Args:
        ddp: settings of its DistributedDataParallel.
        half: whether parameters are bfloat16.
        parallel: sizes of groups, as `initialize_model_parallel` takes them.
        more: further settings of the model.
        data: makes the group over which gradients are reduced; None: Megatron-Core makes it as all others.

    Returns what this rank saw.
    """
    from megatron.core import parallel_state as groups
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    parallel, more = parallel or {}, more or {}
    groups.initialize_model_parallel(**parallel)
    # Its own generators for dropout are those of CUDA. Those for inference do nothing.
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16 if half else torch.float32,
        bf16=half,
        **parallel,
        **more,
    )
    spec = get_gpt_layer_local_spec(num_experts=more.get("num_moe_experts"))
    model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE)
    model = Float16Module(config, model) if half else model
    used = ProcessGroupCollection.use_mpu_process_groups()
    if data is not None:
        used.dp = used.dp_cp = used.intra_dp_cp = data()
    ddp_config = DistributedDataParallelConfig(bucket_size=100_000, **ddp)
    model = DistributedDataParallel(config, ddp_config, model, pg_collection=used)
    model.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-3, clip_grad=1.0, bf16=half, use_distributed_optimizer=ddp.get("use_distributed_optimizer", False)
        ),
        [model],
        use_gloo_process_groups=False,
        pg_collection=used,
    )

    group = used.dp_cp
    generator = torch.Generator().manual_seed(groups.get_data_parallel_rank())
    mask, positions = torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5, torch.arange(SEQUENCE).expand(4, -1)
    losses, averages, norms = [], [], []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        first = torch.randint(0, VOCABULARY, (4, 1), generator=generator)
        tokens = (first + torch.arange(SEQUENCE + 1)) % VOCABULARY
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        loss = model(inputs, positions, mask, labels=labels).mean()
        loss.backward()
        finalize_model_grads([model], pg_collection=used)
        _, norm, _ = optimizer.step()
        # What is logged: a sum of two numbers in the group of the gradients, as Megatron-LM's training loop makes it.
        logged = torch.stack([loss.detach(), torch.tensor(1.0)])
        dist.all_reduce(logged, group=group)
        losses.append(loss.item())
        averages.append((logged[0] / logged[1]).item())
        norms.append(float(norm))
    seen = {
        "losses": losses,
        "averages": averages,
        "norms": norms,
        "parameters": digest(torch.cat([each.detach().float().flatten() for each in model.parameters()])),
        "buckets": len([bucket for each in model.bucket_groups for bucket in each.buckets]),
        "buckets of experts": len([bucket for each in model.expert_parallel_bucket_groups for bucket in each.buckets]),
        "gradients": counted(group),
        "gradients of experts": counted(used.expt_dp),
        "tensor parallel": counted(used.tp),
        "expert parallel": counted(used.tp_ep),
        "counters of experts": counted(used.tp_dp_cp),
        "shard": groups.get_tensor_model_parallel_rank(),
    }
    groups.destroy_model_parallel()
    return seen


def train_two() -> dict[str, dict]:
    """Train on two ranks over several backends, in each way to reduce gradients."""
    torch.set_num_threads(1)
    CudaOnCpus().enable()
    found = {}
    with joined("gloo"):
        found["plain"] = {way: train(ddp) for way, ddp in WAYS.items()}
    with joined("ncz", SETTINGS):
        found["compressed"] = {way: train(ddp) for way, ddp in WAYS.items()}
        found["half"] = {way: train(ddp, half=True) for way, ddp in WAYS.items()}
    with joined("cpu:ncz", LOSSLESS):
        found["lossless"] = {way: train(ddp) for way, ddp in WAYS.items()}
    with joined("cpu:gloo", SETTINGS):
        found["own group"] = train(WAYS[LAST], data=lambda: dist.new_group(backend="cpu:ncz"))
    return found


def train_four(with_experts: bool) -> dict[str, dict]:
    """Train on four ranks with tensor parallelism, then with expert parallelism."""
    torch.set_num_threads(1)
    CudaOnCpus().enable()
    experts = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "add_bias_linear": False,
    }
    with joined("ncz", SETTINGS):
        found = {"tensors": train(WAYS[LAST], parallel={"tensor_model_parallel_size": 2})}
        if with_experts:
            found["experts"] = train(WAYS[LAST], parallel={"expert_model_parallel_size": 2}, more=experts)
    return found


# ------------------------------------------------------------------ in pytest's process

RUN = {"imports": f"{IMPORTS},cuda_on_cpus,megatron.core", "seconds": 280}


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict]:
    """What each of two ranks sees, over each backend."""
    return on_ranks(2, train_two, tmp_path_factory.mktemp("two"), **RUN)


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> list[dict]:
    """What each of four ranks sees, with tensor parallelism and with expert parallelism."""
    return on_ranks(4, train_four, tmp_path_factory.mktemp("four"), EXPERTS_RUN, **RUN)


def test_gradients_are_compressed_and_all_else_is_exact(two):
    for way in WAYS:
        first, second = (each["compressed"][way] for each in two)
        assert first["parameters"] == second["parameters"] and first["norms"] == second["norms"], way
        plain = two[0]["plain"][way]["losses"]
        assert first["losses"] == pytest.approx(plain, rel=0.01) and first["losses"] != plain, way
        assert first["losses"][-1] < 0.9 * first["losses"][0], way
        exact = [sum(pair) / 2 for pair in zip(first["losses"], second["losses"])]
        assert first["averages"] == second["averages"] == pytest.approx(exact, rel=1e-6), way
        # All buckets are compressed, from the first step on. Sums that are logged and gathers of parameters are exact.
        assert first["buckets"] == (4 if "during" in way else 1)
        calls = first["gradients"]
        assert calls.pop("not compressed by the backend") > 0, way
        assert calls == {"compressed": STEPS * first["buckets"], "role not enabled": STEPS}, way


def test_without_loss_a_training_is_the_plain_one_to_the_bit(two):
    for each in two:
        for way in WAYS:
            ours, theirs = each["lossless"][way], each["plain"][way]
            assert ours["gradients"]["compressed"] == STEPS * ours["buckets"]
            for same in ("losses", "averages", "norms", "parameters"):
                assert ours[same] == theirs[same], (way, same)


def test_gradients_in_half_precision_are_compressed(two):
    for way in WAYS:
        first, second = (each["half"][way] for each in two)
        assert first["parameters"] == second["parameters"]
        assert first["losses"][-1] < 0.95 * first["losses"][0]
        assert first["gradients"]["compressed"] == STEPS * first["buckets"], (way, first["gradients"])


def test_the_group_of_gradients_alone_can_be_ours(two):
    first, second = (each["own group"] for each in two)
    assert first["parameters"] == second["parameters"]
    assert first["losses"] == pytest.approx(two[0]["plain"][LAST]["losses"], rel=0.01)
    assert first["gradients"]["compressed"] == STEPS * first["buckets"] and first["tensor parallel"] is None


def test_activations_of_tensor_parallelism_are_exact(four):
    ranks = [each["tensors"] for each in four]
    for each in ranks:
        assert each["losses"][-1] < 0.9 * each["losses"][0]
        assert each["gradients"]["compressed"] == STEPS * each["buckets"], each["gradients"]
        calls = each["tensor parallel"]
        assert calls["compressed"] == 0 and calls["role not enabled"] > 10 * STEPS, calls
    for shard in (0, 1):
        assert len({each["parameters"] for each in ranks if each["shard"] == shard}) == 1


@pytest.mark.skipif(not EXPERTS_RUN, reason="Megatron-Core 0.16 needs Transformer Engine for experts")
def test_activations_and_counters_of_experts_are_exact(four):
    for each in (each["experts"] for each in four):
        assert each["losses"][-1] < 0.95 * each["losses"][0]
        assert each["gradients"]["compressed"] == STEPS * each["buckets"], each["gradients"]
        assert each["gradients of experts"]["compressed"] == STEPS * each["buckets of experts"] > 0
        for exact, calls in (("expert parallel", 4 * STEPS), ("counters of experts", STEPS)):
            assert each[exact]["compressed"] == 0 and each[exact]["role not enabled"] >= calls, each[exact]
