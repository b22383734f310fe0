"""What a bound is known to do to a loss."""

import pytest

from ncz_plugins.cli import loss
from ncz_plugins.core.config import Config, QuantizerConfig


def classes(**quantizer) -> dict[str, str]:
    return {each.optimizer: each.loss_class for each in loss.expected(QuantizerConfig(**quantizer))}


@pytest.mark.parametrize(
    "added, expected",
    [(-0.1, "harmless"), (0.0015, "harmless"), (0.002, "visible"), (0.01, "visible"), (0.02, "harmful")],
)
def test_classes(added, expected):
    assert loss.Measured("AdamW", "stochastic", 256, 0.4, added, 0.1).loss_class == expected


@pytest.mark.parametrize("name", ["accurate", "balanced", "small"])
def test_every_preset_was_measured(name):
    quantizer = Config.load(f"ncclz:{name}").quantizer
    found = loss.expected(quantizer)
    assert {"AdamW", "SGD"} <= {each.optimizer for each in found}
    assert all((each.value, each.block) == (quantizer.value, 128) for each in found if each.optimizer == "AdamW")
    assert "AdamW: " in loss.describe(quantizer) and loss.SOURCE in loss.describe(quantizer)


def test_both_ways_for_muon_were_measured():
    fed_back = Config.load("ncclz:muon").quantizer
    [policy] = Config.load("ncclz:muon-ddp").policies
    rotated = policy.quantizer.applied_to(QuantizerConfig())
    for quantizer in (fed_back, rotated):
        [found] = [each for each in loss.expected(quantizer) if each.optimizer == "Muon"]
        assert (found.loss_class, found.value) == ("harmless", quantizer.value)
        assert "Muon: harmless, +0.0" in loss.describe(quantizer)


def test_what_is_finer_counts_as_the_next_coarser_setting():
    assert classes(value=0.3) == classes(value=0.375)
    assert classes(kind="error_bound", value=0.2, block=256) == classes(kind="error_bound", value=0.25, block=4096)


def test_each_kind_of_fixed_rate_was_measured():
    for kind in ("error_bound", "stochastic"):
        found = {bits: loss.expected(QuantizerConfig(mode="bits", value=bits, kind=kind)) for bits in (3, 8)}
        assert all("AdamW" in {each.optimizer for each in some} for some in found.values())
        assert [each.loss_class for each in found[8] if each.optimizer == "AdamW"] == ["harmless"]
        assert "at bits:8" in loss.describe(QuantizerConfig(mode="bits", value=8, kind=kind))


@pytest.mark.parametrize(
    "quantizer",
    [
        {"value": 2},
        {"block": 4096},
        {"block": 0},
        {"mode": "rel", "value": 0.01},
        {"error_feedback": True},
        {"kind": "error_bound", "error_feedback": True, "rotation": True, "value": 0.25},
    ],
    ids=str,
)
def test_what_was_not_measured_is_said(quantizer):
    assert classes(**quantizer) == {}
    assert loss.describe(QuantizerConfig(**quantizer)).startswith("not measured for such settings")


def test_without_loss_there_is_none():
    assert loss.describe(QuantizerConfig(kind="lossless")) == "harmless: nothing is lost"
