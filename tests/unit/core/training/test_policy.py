"""What each part of a tensor gets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ncz_plugins.core.arguments import parts_of
from ncz_plugins.core.bypass import Bypass
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import ConfigError
from ncz_plugins.core.training import policy
from ncz_plugins.core.training.policy import ParameterSlice, Policies, named

ROLES = ["gradient", "parameter", "activation"]
CONFIG = Config(
    policies=[
        {"name": ["*.bias", "norm?.*"], "action": "skip"},
        {"max_elements": 100, "dtype": "bfloat16", "quantizer": {"kind": "lossless"}},
        {"min_elements": 1000, "role": "parameter", "quantizer": {"mode": "rel", "value": 0.01, "block": 0}},
        {"name": "head.*", "quantizer": {"value": 0.05, "error_feedback": True}},
    ],
    steps={"warmup": 3, "bounds": [{"step": 0, "times": 0.5}, {"step": 10, "times": 2}]},
)


def treatment(name="weight", numel=5000, dtype=torch.float32, role="gradient", step=10, tightening=1.0, config=CONFIG):
    return Policies(config).treatment(ParameterSlice(name, numel), dtype, role, step, tightening)


@pytest.mark.parametrize(
    ("asked", "because"),
    [
        ({"name": "layer.bias"}, "policies[0]"),
        ({"name": "norm1.weight"}, "policies[0]"),
        ({"name": "bias"}, "default"),
        ({"name": "norm12.weight"}, "default"),
        ({"name": "head.bias"}, "policies[0]"),  # the first that fits
        ({"name": "head.weight"}, "policies[3]"),
        ({"name": "head.weight", "numel": 100, "dtype": torch.bfloat16}, "policies[1]"),
        ({"numel": 100, "dtype": torch.bfloat16}, "policies[1]"),
        ({"numel": 101, "dtype": torch.bfloat16}, "default"),
        ({"numel": 1000, "role": "parameter"}, "policies[2]"),
        ({"numel": 999, "role": "parameter"}, "default"),
        ({"numel": 1000, "role": None}, "default"),
        ({"name": None}, "default"),
        ({"name": None, "numel": 1, "dtype": torch.bfloat16}, "policies[1]"),
    ],
)
def test_the_first_policy_that_fits_counts(asked, because):
    assert treatment(**asked).because == because


def test_sizes_that_are_others_in_each_call_take_no_more_and_more_memory(monkeypatch):
    monkeypatch.setattr(policy, "_MAX_CACHED_PARTS", 4)
    for config, most in ((CONFIG, 4), (Config(), 0)):
        policies = Policies(config)
        found = [policies.matching(ParameterSlice(None, 98 + n), torch.bfloat16, None) for n in range(6)]
        assert found == ([1, 1, 1, None, None, None] if most else [None] * 6)
        assert len(policies._matching) <= most


def test_a_policy_changes_what_it_names_and_nothing_else():
    changed = treatment("head.weight").quantizer
    assert changed == CONFIG.quantizer.changed(value=0.1, error_feedback=True)  # 0.05 times 2
    assert treatment("head.bias").bypass is Bypass.POLICY
    assert treatment("head.weight").bypass is None
    assert treatment(numel=1000, role="parameter").quantizer.mode == "rel"


@pytest.mark.parametrize(
    "quantizer", [{}, {"mode": "abs", "value": 0.001}, {"mode": "bits", "value": 4}, {"error_feedback": True}]
)
def test_weights_and_activations_have_quantizers_of_their_own(quantizer):
    config = Config(quantizer=quantizer, policies=[{"min_elements": 6000, "quantizer": {"value": 5}}], roles=ROLES)
    default = config.quantizer_of("activation")
    assert default == Config().quantizer_of("activation")
    for numel in (5000, 6000):  # a policy for everything changes gradients alone
        assert treatment(numel=numel, role="activation", config=config, step=0).quantizer == default
        assert treatment(numel=numel, role="parameter", config=config, step=0).quantizer.kind == "lossless"
        assert treatment(numel=numel, config=config, step=0).quantizer == config.quantizer.changed(
            **({"value": 5} if numel == 6000 else {})
        )


def test_a_policy_for_activations_replaces_their_quantizer():
    policies = [{"role": "activation", "name": "router.*", "quantizer": {"mode": "rel", "value": 0.01}}]
    policies += [{"name": "exact.*", "quantizer": {"kind": "lossless"}}, {"role": "activation", "action": "skip"}]
    config = Config(quantizer={"seed": 7}, policies=policies)
    assert treatment("router.1", role="activation", config=config).quantizer == config.quantizer.changed(
        mode="rel", value=0.01
    )
    assert treatment("exact.1", role="activation", config=config).quantizer.kind == "lossless"
    assert treatment("other", role="activation", config=config).bypass is Bypass.POLICY


def test_nothing_is_lost_where_no_role_may_lose():
    config = Config(quantizer={"kind": "lossless"}, roles=ROLES)
    assert treatment(role="activation", config=config).quantizer == config.quantizer


def test_bounds_of_activations_change_over_the_steps():
    steps = {"bounds": [{"step": 0, "times": 0.5}]}
    found = treatment(role="activation", config=Config(steps=steps), tightening=0.5)
    assert found.quantizer.value == Config().quantizer_of("activation").value / 4
    steps = {"bounds": [{"step": 0, "times": 1000}]}
    quantizer = {"mode": "rel", "value": 1e-4}
    with pytest.raises(ConfigError, match=r"bounds\[0\].times: 1000 is too much for activations"):
        Config(quantizer=quantizer, steps=steps, roles=ROLES)
    Config(quantizer=quantizer, steps=steps)  # without them it is not


def test_the_size_is_that_of_the_whole_parameter():
    slice_of_many = ParameterSlice(None, length=50, start=200, numel=5000)
    found = Policies(CONFIG).treatment(slice_of_many, torch.bfloat16, "gradient", step=10)
    assert found.because == "default"


@pytest.mark.parametrize(
    ("shape", "because"),
    [
        ((), "policies[1]"),
        ((5000,), "policies[1]"),
        ((50, 100), "policies[0]"),
        ((10, 20, 5, 5), "policies[0]"),  # the kernels of a convolution
        (None, "default"),  # unknown
    ],
)
def test_a_policy_for_shapes_asks_for_the_dimensions_of_the_whole_parameter(shape, because):
    config = Config(policies=[{"shape": "matrix", "quantizer": {"value": 0.1}}, {"shape": "vector", "action": "skip"}])
    shard = ParameterSlice("weight", 50, 200, 5000, shape=shape)
    assert Policies(config).treatment(shard, torch.float32, "gradient", step=0).because == because


@pytest.mark.parametrize(
    ("name", "tensor", "dimensions"),
    [
        ("weight", torch.zeros(2, 3), 2),
        ("bias", torch.zeros(3), 1),
        ("scale", torch.zeros(()), 0),
        (None, torch.zeros(2, 3), 2),
        (None, torch.zeros(6), None),  # maybe a bucket of matrices
    ],
)
def test_a_tensor_of_its_own_has_its_own_shape(name, tensor, dimensions):
    [part] = parts_of("all_reduce", tensor, name, None)
    assert part.dimensions == dimensions


@pytest.mark.parametrize(
    ("step", "bypass", "times"),
    [
        (0, Bypass.WARM_UP, None),
        (2, Bypass.WARM_UP, None),
        (3, None, 0.5),
        (9, None, 0.5),
        (10, None, 2),
        (99, None, 2),
    ],
)
def test_steps_change_the_bound(step, bypass, times):
    found = treatment(step=step)
    assert found.bypass is bypass
    if times:
        assert found.quantizer.value == CONFIG.quantizer.value * times
        assert treatment(step=step, tightening=0.25).quantizer.value == CONFIG.quantizer.value * times / 4


def test_before_the_first_bound_nothing_is_changed():
    config = Config(steps={"bounds": [{"step": 5, "times": 0.1}]})
    assert treatment(step=4, config=config).quantizer == config.quantizer


@given(st.text(st.characters(categories=["L", "N", "P"]), min_size=1))
def test_any_name_is_taken(name):
    assert treatment(name).because in {"default", "policies[0]", "policies[3]"}


def test_a_tensor_is_called_by_its_first_parameter():
    assert named([ParameterSlice(None, 3)]) is None
    assert named([ParameterSlice("a", 3), ParameterSlice(None, 1), ParameterSlice("a", 4, 3)]) == "a"
    assert named([ParameterSlice("a", 3), ParameterSlice("b", 1), ParameterSlice("c", 4)]) == "a and 2 more"
