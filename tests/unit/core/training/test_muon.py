"""Which settings are known to be visible in the loss where Muon trains."""

import pytest
import torch

from ncz_plugins.cli import loss
from ncz_plugins.core.config import Config
from ncz_plugins.core.training.muon import DDP_PRESET, PRESET, advice, is_muon
from ncz_plugins.core.training.policy import ParameterSlice, Policies

# Of examples/gpt.py; GPT-2 and nanoGPT; Llama and Qwen; torchtitan's Llama; BERT; ViT, with an unlucky name.
IN_LAYERS = [
    "blocks.0.attention.qkv.weight",
    "transformer.h.11.attn.c_attn.weight",
    "model.layers.3.self_attn.q_proj.weight",
    "layers.0.feed_forward.w1.weight",
    "bert.encoder.layer.0.attention.self.query.weight",
    "blocks.7.attn.heads.proj.weight",
]
ELSEWHERE = [
    *("tokens.weight", "positions.weight"),
    *("transformer.wte.weight", "transformer.wpe.weight"),
    *("model.embed_tokens.weight", "lm_head.weight"),
    *("tok_embeddings.weight", "output.weight"),
    *("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    *("patch_embed.proj.weight", "head.weight"),
]
MEASURED = [each for each in loss.MEASURED if each.optimizer == "Muon"]


@pytest.mark.parametrize("measured", MEASURED, ids=str)
def test_it_warns_of_what_was_measured_to_be_visible(measured):
    quantizer = {key: getattr(measured, key) for key in ("kind", "mode", "value", "error_feedback", "rotation")}
    if measured.mode == "rms":
        quantizer["block"] = measured.block
    said = advice(Config(quantizer=quantizer))
    assert (said is None) == (measured.loss_class == "harmless")


@pytest.mark.parametrize("name", ["ncclz", "ncclz:accurate", "ncclz:small"])
def test_the_warning_names_optimizer_setting_cost_and_remedy(name):
    config = Config.load(name)
    said = advice(config, "MuonWithAuxAdam")
    for words in ("MuonWithAuxAdam", config.quantizer.describe(), "0.9 %", "3.2 %", loss.SOURCE, f'"{PRESET}"'):
        assert words in said
    [default] = [each for each in MEASURED if (each.kind, each.block, each.value) == ("stochastic", 128, 0.375)]
    assert f"{default.added:.1%}".replace("%", " %") in said


@pytest.mark.parametrize(
    "config",
    [
        Config.load(PRESET),
        Config(policies=[{"shape": "matrix", "quantizer": Config.load(PRESET).quantizer.model_dump(exclude={"seed"})}]),
        Config(policies=[{"shape": "matrix", "action": "skip"}]),
        Config(quantizer={"kind": "error_bound", "value": 0.05, "error_feedback": True, "rotation": True}),
        Config(quantizer={"kind": "lossless"}),
        Config(quantizer={"mode": "abs", "value": 1}),  # nobody has measured that
        Config(quantizer={"mode": "bits", "value": 8}),
        Config(transport={"min_bytes": "never"}),
        Config(roles=["parameter"]),
    ],
    ids=Config.describe,
)
def test_it_says_nothing_of_other_settings(config):
    assert advice(config) is None


def test_the_policies_for_the_matrices_that_it_trains_count():
    config = Config.load(PRESET).model_copy(
        update={"policies": Config(policies=[{"name": "head.*", "quantizer": {"value": 1}}]).policies}
    )
    body, head = (ParameterSlice(f"{name}.weight", 9, shape=(3, 3)) for name in ("body", "head"))
    assert advice(config, matrices=[(body, torch.float32)]) is None
    assert "head.weight" in advice(config, matrices=[(body, torch.float32), (head, torch.float32)])


def matrix(name: str) -> ParameterSlice:
    return ParameterSlice(name, 1 << 20, shape=(1 << 10, 1 << 10))


@pytest.mark.parametrize("name", [*IN_LAYERS, *ELSEWHERE])
def test_the_preset_for_ddp_turns_the_matrices_of_layers_and_no_others(name):
    config = Config.load(DDP_PRESET)
    treatment, vector = (
        Policies(config).treatment(each, torch.float32, "gradient", 0).quantizer
        for each in (matrix(name), ParameterSlice(name, 1 << 10, shape=(1 << 10,)))
    )
    assert treatment.rotates == treatment.feeds_back == (name in IN_LAYERS)
    assert vector == config.quantizer
    assert name in IN_LAYERS or treatment == config.quantizer


def test_the_preset_for_ddp_serves_the_matrices_of_layers_and_a_warning_names_others():
    served = [(matrix(name), torch.float32) for name in IN_LAYERS]
    assert advice(Config.load(DDP_PRESET), matrices=served, preset=DDP_PRESET) is None
    said = advice(
        Config.load(DDP_PRESET), matrices=[*served, (matrix("proj.weight"), torch.float32)], preset=DDP_PRESET
    )
    assert "Muon trains proj.weight" in said
    assert f'"{PRESET}"' in said and DDP_PRESET not in said  # it is what was taken


def test_warm_up_is_not_what_counts():
    assert advice(Config(steps={"warmup": 100})) is not None


def test_it_is_known_by_the_names_of_its_classes():
    parameters = [torch.nn.Parameter(torch.ones(2, 2))]

    class SomebodysMuon(torch.optim.SGD):
        pass

    class Wrapper(SomebodysMuon):  # as Horovod and Lightning wrap optimizers
        pass

    assert is_muon(torch.optim.Muon(parameters)) and is_muon(Wrapper(parameters))
    assert not is_muon(torch.optim.AdamW(parameters)) and not is_muon(None)
