"""torchtitan's own trainer, on CPUs, with compressed gradients."""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_rank import digest
from repository import ROOT
from scenarios import IMPORTS, on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ncz_plugins.torch import backend

pytest.importorskip("torchtitan")
pytestmark = [
    pytest.mark.skipif(torch.__version__ < "2.15", reason="torchtitan 0.3 needs a newer torch"),
    pytest.mark.slow,
    pytest.mark.timeout(800),  # each test runs two or three trainings
]

STEPS, STOP = 4, 2
SMALL = "transport: {min_bytes: 0}\n"
WITH_FEEDBACK = SMALL + "quantizer: {kind: stochastic, error_feedback: true}\n"
REPLICAS, SHARDS = "--parallelism.data_parallel_replicate_degree", "--parallelism.data_parallel_shard_degree"
TENSOR_PARALLEL = "--parallelism.tensor_parallel_degree"
EXPERTS = SHARDS, "2", "--parallelism.expert_parallel_degree", "2", "--training.disable_cuda_graphs"
STAGES = "--parallelism.pipeline_parallel_degree", "2", "--training.disable_cuda_graphs", "--compression", "none"
BFLOAT16 = "--training.mixed_precision_param", "bfloat16"  # torchtitan's default
WITH_ACTIVATIONS = SMALL + "roles: [gradient, activation]\n"
LLAMA = "--module", "train_torchtitan", "--config", "llama3_debugmodel", "--validator.no-enable"
DEEPSEEK = "--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel"
# torchtitan, and what it imports late.
TORCHTITAN = "torchtitan_on_cpus,torchtitan.models.llama3.config_registry,torchtitan.models.deepseek_v3.config_registry"
LATE = "torch.distributed.pipelining.schedules,torch._inductor.lowering,torch.utils.tensorboard,datasets,scipy.io"
HOW = {
    "launcher": "torch",
    "seconds": 250,
    "imports": f"{IMPORTS},{TORCHTITAN},{LATE}",
    "environment": {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # what is imported once for several ranks may have no thread
    },
}


# ------------------------------------------------------------------ on each rank


def config_of(folder: str, *options: str, model: Sequence[str] = LLAMA):
    """The configuration of a small model, with two layers, after torchtitan has read its command line.

    Args:
        model: the options that choose it.
    """
    sys.path.insert(0, str(ROOT / "examples"))
    from torchtitan.config import ConfigManager
    from torchtitan.models.common.attention import ScaledDotProductAttention

    command = [*model, "--hf_assets_path", f"{folder}/tokenizer", "--dataloader.dataset_path", f"{folder}/data"]
    command += ["--dump_folder", f"{folder}/out", "--debug.seed", "1", "--training.steps", str(STEPS)]
    command += ["--training.seq_len", "64", "--training.local_batch_size", "4"]
    # In float32, as CPUs without AVX-512 multiply bfloat16 a hundred times slower.
    command += ["--training.mixed_precision_param", "float32"]
    config = ConfigManager().parse_args([*command, *options])
    layers = config.model_spec.model.layers
    del layers[2:]
    for layer in layers:  # torchtitan's choice has no backward pass on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def trained(folder: str, *options: str, **model) -> dict:
    """Train, and return what this rank has seen."""
    trainer = config_of(folder, *options, **model).build()
    if dist.get_backend() == "gloo":  # which lacks PREMUL_SUM, by which torchtitan lets FSDP reduce
        for module in trainer.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    losses, log = [], trainer.metrics_processor.log

    def note(step, loss, *others, **more):
        losses.append(loss)
        log(step, loss, *others, **more)

    trainer.metrics_processor.log = note
    trainer.train()
    seen = {"losses": losses, "weights": weights_of(trainer.model_parts[0]), "counted": counted(trainer)}
    trainer.close()
    return seen


def weights_of(model: nn.Module) -> str:
    """A digest of all weights, as this rank and the others of its replica have them."""
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return digest(torch.cat([each.detach().flatten() for each in whole]))


def counted(trainer) -> dict:
    """What this rank has counted, by part of its model, and by mesh dimension with the backend ncz."""
    compressions = getattr(trainer, "compressions", [])  # which torchtitan's own trainer lacks
    found = {f"part {at}": compression.stats for at, compression in enumerate(compressions)}
    meshes = trainer.parallel_dims.get_all_one_dimensional_meshes()
    if "tp" in meshes:
        meshes["tp"] = trainer.parallel_dims.get_dense_tp_mesh()  # torchtitan has several meshes of the same ranks
    for name, mesh in meshes.items():
        if dist.get_backend(mesh.get_group()) == "ncz":
            found[name] = backend.of_group(mesh.get_group()).stats
    return {
        name: {
            "calls": stats.total.calls,
            "compressed": stats.total.compressed_calls,
            "ratio": stats.total.ratio,
            "steps": len(stats.steps),
            "bypasses": stats.total.bypasses,
            "activations": [
                each.get("activation", 0) for each in (stats.total.plain_bytes_by_role, stats.total.wire_bytes_by_role)
            ],
        }
        for name, stats in found.items()
    }


def trained_by_backend(folder: str, *options: str) -> dict:
    dist.Backend.default_device_backend_map["cpu"] = "ncz"
    return trained(folder, *options)


def trained_stages(backend: str, folder: str) -> dict:
    """Train the small Llama with one layer on each of two ranks."""
    dist.Backend.default_device_backend_map["cpu"] = backend
    return trained(folder, *STAGES, *BFLOAT16)


def trained_experts(backend: str, folder: str, *options: str) -> dict:
    """Train torchtitan's small DeepSeek-V3, one layer of experts among its two."""
    dist.Backend.default_device_backend_map["cpu"] = backend
    return trained(folder, *EXPERTS, *options, model=DEEPSEEK)


# ------------------------------------------------------------------ trainings


def run(inputs: Path, ranks: int, settings: str, *options: str, scenario=trained, **environment) -> list[dict]:
    """What each rank has seen of a training. spmd_types allows one in each process."""
    how = HOW | {"environment": HOW["environment"] | environment}
    compression = settings if settings == "none" else f"{inputs}/{settings}.yaml"
    return on_ranks(ranks, scenario, inputs, str(inputs), "--compression", compression, *options, **how)


def check(seen: list[dict], plain: list[float], name: str = "part 0") -> None:
    """Fail unless a training has learned as a plain one, and compressed all gradients, and all ranks have its weights.

    Args:
        plain: the losses of a plain training.
        name: the mesh dimension whose group compresses gradients, if not `fsdp.compress`.
    """
    for each in seen:
        assert each["losses"] == pytest.approx(plain, rel=0.01) and each["losses"] != plain
        total = each["counted"][name]
        # The embedding, two layers, the norm, and the head.
        assert total["compressed"] == 5 * STEPS, total
        assert name != "part 0" or (total["calls"] == 5 * STEPS and total["ratio"] > 5), total
    assert len({each["weights"] for each in seen}) == 1


def plain(inputs: Path, ranks: int, *mesh: str) -> list[float]:
    """The losses of a plain training."""
    seen = run(inputs, ranks, "none", *mesh)
    losses = seen[0]["losses"]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.5
    assert all(each["losses"] == losses and not each["counted"] for each in seen)
    return losses


def test_shards_and_a_training_that_is_resumed(inputs):
    saving = "--checkpoint.enable", "--checkpoint.interval", str(STOP)
    seen = run(inputs, 2, "feedback", *saving)
    check(seen, plain(inputs, 2))
    # The loss runs a backward pass of its own for the head.
    assert all(each["counted"]["part 0"]["steps"] == 2 * STEPS for each in seen)
    resumed = run(inputs, 2, "feedback", *saving, "--checkpoint.load_step", str(STOP))
    for whole, half in zip(seen, resumed):
        assert half["losses"] == whole["losses"][STOP:] and half["weights"] == whole["weights"]


def test_replicas(inputs):
    mesh = REPLICAS, "2", SHARDS, "1"
    check(run(inputs, 2, "small", *mesh), plain(inputs, 2, *mesh))


def test_tensor_parallelism_by_the_backend(inputs):
    mesh = SHARDS, "2", TENSOR_PARALLEL, "2"
    seen = run(inputs, 4, "none", *mesh, scenario=trained_by_backend, NCZ_CONFIG=f"{inputs}/small.yaml")
    check(seen, plain(inputs, 4, *mesh), "dp_shard")
    for each in seen:
        activations = each["counted"]["tp"]
        assert activations["compressed"] == 0 and activations["bypasses"]["role not enabled"] > STEPS


def by_backend(inputs: Path, backend: str, settings: str, scenario, *options: str) -> list[dict]:
    """What two ranks have seen of a training whose groups have this backend."""
    how = HOW | {"environment": HOW["environment"] | {"NCZ_CONFIG": f"{inputs}/{settings}.yaml"}}
    folder = inputs / f"{scenario.__name__}-{backend}-{settings}"
    folder.mkdir()
    return on_ranks(2, scenario, folder, backend, str(inputs), *options, **how)


def test_tokens_of_experts_are_compressed_where_roles_list_activations(inputs):
    functional = "--parallelism.spmd_backend", "partial_dtensor"  # gloo has no all_to_all of uneven lists
    expected = by_backend(inputs, "gloo", "small", trained_experts, *functional)[0]["losses"]
    assert len(expected) == STEPS and expected[-1] < expected[0] - 0.5
    for each in by_backend(inputs, "ncz", "activations", trained_experts, *functional):
        assert each["losses"] == pytest.approx(expected, rel=0.01) and each["losses"] != expected
        plain_bytes, sent = each["counted"]["ep"]["activations"]
        assert 0 < sent < plain_bytes / 2


def test_messages_of_stages_are_compressed_where_roles_list_activations(inputs):
    first, last = by_backend(inputs, "gloo", "small", trained_stages)
    assert len(last["losses"]) == STEPS and last["losses"][-1] < last["losses"][0] - 0.5
    for each, plain_run in zip(by_backend(inputs, "ncz", "small", trained_stages), (first, last)):
        assert (each["losses"], each["weights"]) == (plain_run["losses"], plain_run["weights"])
        assert each["counted"]["pp"]["activations"] == [0, 0]
    compressed = by_backend(inputs, "ncz", "activations", trained_stages)
    assert (
        compressed[1]["losses"] == pytest.approx(last["losses"], rel=0.03) and compressed[1]["losses"] != last["losses"]
    )
    for each in compressed:
        plain_bytes, sent = each["counted"]["pp"]["activations"]
        assert 0 < sent < plain_bytes / 2 and each["weights"] not in (first["weights"], last["weights"])


# ------------------------------------------------------------------ what trainings read


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with a tokenizer, a dataset and configurations. What torchtitan's repository has is not in its wheel."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("inputs")
    letters = {each: number for number, each in enumerate(["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz "])}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    folders = folder / "tokenizer", folder / "data"
    for each in folders:
        each.mkdir()
    tokenizer.save(str(folders[0] / "tokenizer.json"))
    (folders[0] / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    words, chosen = "alpha beta gamma delta epsilon".split(), random.Random(0)
    texts = [" ".join(chosen.choices(words, k=40)) for _ in range(100)]
    (folders[1] / "train.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    (folder / "small.yaml").write_text(SMALL)
    (folder / "activations.yaml").write_text(WITH_ACTIVATIONS)
    (folder / "feedback.yaml").write_text(WITH_FEEDBACK)
    return folder
