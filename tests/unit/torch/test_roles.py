"""What the backend `ncz` takes tensors for. Real calls: tests/distributed/test_torch_backend.py."""

import threading

import pytest
import torch

from ncz_plugins import ConfigError
from ncz_plugins.torch import roles


@pytest.mark.parametrize(
    ("description", "role"),
    [
        ("mesh_tp", "activation"),
        ("mesh_pp", "activation"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "activation"),
        ("CONTEXT_PARALLEL_GROUP", "activation"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "activation"),
        ("mesh_dp_shard_cp", None),
        ("mesh_replicate", None),
        ("DATA_PARALLEL_GROUP_WITH_CP", None),
        ("default_pg", None),
        ("undefined", None),
    ],
)
def test_usual_names_of_groups_are_known(description, role):
    assert roles.of_group(description, "") == role


def test_the_first_rule_that_matches_counts_and_comes_before_usual_names():
    rules = " dp_*=gradient, TP=gradient,*=parameter"
    found = {name: roles.of_group(name, rules) for name in ("mesh_dp_shard", "mesh_tp", "mesh_cp")}
    assert found == {"mesh_dp_shard": "gradient", "mesh_tp": "gradient", "mesh_cp": "parameter"}


@pytest.mark.parametrize("rules", ["tp", "tp=", "=gradient", "tp=weights", "dp=gradient,tp"])
def test_rules_that_can_not_be_read_are_refused(rules):
    with pytest.raises(ConfigError, match="NCZ_ROLES: each rule must be PATTERN=ROLE"):
        roles.of_group("mesh_tp", rules)


def test_the_innermost_role_of_a_thread_counts():
    others = []
    with roles.role("gradient"):
        with pytest.raises(RuntimeError), roles.role("activation"):
            assert roles.said() == "activation"
            thread = threading.Thread(target=lambda: others.append(roles.said()))
            thread.start()
            thread.join()
            raise RuntimeError
        assert roles.said() == "gradient"
    assert roles.said() is None and others == [None]


def test_tensors_show_that_they_are_no_gradients():
    weight = torch.nn.Parameter(torch.ones(3))
    assert roles.seems([torch.ones(3)]) is None
    assert roles.seems([torch.ones(3), weight]) == "parameter"
    assert roles.seems([weight * 2]) == "activation"
    (weight * weight).sum().backward()
    assert roles.seems([weight.grad]) is None
