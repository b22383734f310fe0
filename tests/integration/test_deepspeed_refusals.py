"""What can't be compressed as asked is an error on every rank at start-up, not a plain run or a hang."""

import json

import pytest
from launch import WORKERS, deepspeed_ranks, launch

pytestmark = pytest.mark.slow

RANKS = 2


def config(compression="ncclz", zero: dict | None = None, **top_level) -> dict:
    """A DeepSpeed configuration; no compression key where that is None."""
    key = {} if compression is None else {"communication_compression": compression}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2, **(zero or {})},
        **key,
        **top_level,
    }


# name: (the configuration of each rank, the kind of error on all or on each, what its message must name)
CASES = {
    "unknown option": (
        [config({"quantizer": {"valeu": 0.1}})] * RANKS,
        "ConfigError",
        ["communication_compression", "quantizer.valeu", "0.1", "quantizer.value"],
    ),
    "impossible value": (
        [config({"quantizer": {"value": -1}})] * RANKS,
        "ConfigError",
        ["communication_compression", "quantizer.value", "-1", "above 0"],
    ),
    "misspelt key": (
        [config(None, comunication_compression="ncclz")] * RANKS,
        "ConfigError",
        ["comunication_compression", "did you mean 'communication_compression'"],
    ),
    "key inside zero_optimization": (
        [config(None, zero={"communication_compression": "ncclz"})] * RANKS,
        "ValidationError",  # DeepSpeed's own
        ["communication_compression", "Extra inputs are not permitted"],
    ),
    "key inside another section": (
        [config(None, flops_profiler={"communication_compression": "ncclz"})] * RANKS,
        "ConfigError",
        ["flops_profiler.communication_compression", "move it to the top level"],
    ),
    "roles that DeepSpeed does not offer": (
        [config({"roles": ["gradient", "activation"]})] * RANKS,
        "ConfigError",
        ["roles", "activation", '["gradient"]', '["gradient", "parameter"]'],
    ),
    "weights that nobody gathers": (
        [config({"roles": ["gradient", "parameter"]}, zero={"stage": 0})] * RANKS,
        "UnsupportedError",
        ["roles", "without ZeRO", '["gradient"]'],
    ),
    "weights that are added up": (
        [config({"roles": ["gradient", "parameter"]}, {"stage": 3, "stage3_use_all_reduce_for_fetch_params": True})]
        * RANKS,
        "UnsupportedError",
        ["stage3_use_all_reduce_for_fetch_params: true", "Set it to false", '["gradient"]'],
    ),
    "deepcompile": (
        [config(compile={"deepcompile": True})] * RANKS,
        "UnsupportedError",
        ["compile.deepcompile: true", "communication_compression"],
    ),
    "quantized gradients": (
        [config(zero={"stage": 3, "zero_quantized_gradients": True})] * RANKS,
        "UnsupportedError",
        ["zero_quantized_gradients: true", "communication_compression"],
    ),
    "reduction to one rank": (
        [config(zero={"use_multi_rank_bucket_allreduce": False})] * RANKS,
        "UnsupportedError",
        ["use_multi_rank_bucket_allreduce: false", "Set it to true"],
    ),
    "different values": (
        [config({"quantizer": {"value": 0.25}}), config({"quantizer": {"value": 0.1}})],
        "MismatchError",
        ["quantizer.value", "0.25 on rank 0", "0.1 on rank 1"],
    ),
    "invalid on one rank": (
        [config(), config({"quantizer": {"valeu": 0.1}})],
        ["MismatchError", "ConfigError"],
        ["communication_compression", "quantizer.valeu", "did you mean quantizer.value"],
    ),
}


# What ends all ranks where nobody catches it. In the second case, the rank without the key waits in DeepSpeed.
UNCAUGHT = {
    "different values": (
        CASES["different values"][0],
        "ranks differ: quantizer.value is 0.25 on rank 0, 0.1 on rank 1",
    ),
    "off on the first rank": (
        [config(None), config()],
        'ranks differ: compression is "off" on rank 0, "on" on rank 1. All must run the same ncz_plugins with the same '
        "configuration. Every rank of this DeepSpeed engine needs the same communication_compression",
    ),
}


def cases_file(folder, cases):
    file = folder / "cases.json"
    file.write_text(json.dumps({name: configs for name, (configs, *_) in cases.items()}))
    return file


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    return launch(deepspeed_ranks(WORKERS / "refusals.py", cases_file(folder, CASES)), folder, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_refuses_and_says_why(name, refused):
    _, kind, named = CASES[name]
    assert len(refused.ranks) == RANKS
    kinds = [kind] * RANKS if isinstance(kind, str) else kind
    for errors, own_kind in zip(refused.ranks, kinds):
        assert errors[name] is not None, "no error"
        assert errors[name]["kind"] == own_kind
        for text in named:
            assert text in errors[name]["message"]


@pytest.mark.parametrize("name", UNCAUGHT)
def test_left_uncaught_it_ends_all_ranks_with_an_exit_status(name, tmp_path):
    file = cases_file(tmp_path, {name: UNCAUGHT[name]})
    outcome = launch(deepspeed_ranks(WORKERS / "refusals.py", file, name), tmp_path, timeout=90, fails=True)
    assert f"MismatchError: {UNCAUGHT[name][1]}" in outcome.output
    assert outcome.ranks == []
