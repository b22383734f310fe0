"""Which settings are known to be visible in the loss where Muon trains."""

import pytest
import torch

from ncz_plugins.cli import loss
from ncz_plugins.core.config import Config
from ncz_plugins.core.training.muon import PRESET, advice, is_muon
from ncz_plugins.core.training.policy import ParameterSlice

MEASURED = [each for each in loss.MEASURED if each.optimizer == "Muon"]


@pytest.mark.parametrize("measured", MEASURED, ids=str)
def test_it_warns_of_what_was_measured_to_be_visible(measured):
    quantizer = {key: getattr(measured, key) for key in ("kind", "mode", "value")}
    if measured.mode == "rms":
        quantizer["block"] = measured.block
    said = advice(Config(quantizer=quantizer))
    assert (said is None) == (measured.loss_class == "harmless")


@pytest.mark.parametrize("name", ["ncclz", "ncclz:accurate", "ncclz:small"])
def test_the_warning_names_optimizer_setting_cost_and_remedy(name):
    config = Config.load(name)
    said = advice(config, "MuonWithAuxAdam")
    for words in ("MuonWithAuxAdam", config.quantizer.describe(), "0.9 %", "1.7 %", loss.SOURCE, f'"{PRESET}"'):
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
        # That of the guide.
        Config(
            quantizer={"kind": "error_bound", "value": 0.06, "block": 32768, "error_feedback": True, "rotation": True}
        ),
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
