"""Engines of DeepSpeed, of all ranks and of some, with the key and without: see the worker."""

import importlib.util

import pytest
from processes import names, passed, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    modules = "ncz_plugins.deepspeed,deepspeed.runtime.zero.muon.muon_optimizer"
    folder, environment = tmp_path_factory.mktemp("engines"), {"DS_ACCELERATOR": "cpu"}
    return run("engines", 4, folder, seconds=120, imports=modules, environment=environment)


@pytest.mark.parametrize("name", names("engines"))
def test_on_every_rank(name, finished):
    passed(finished, name)
