"""What can't be compressed as asked is an error on every rank at start-up, not a plain run or a hang."""

import pytest

pytest.importorskip("deepspeed")

from deepspeed import init_distributed
from launch import deepspeed_ranks, launch
from on_rank import rank
from scenarios import DEEPSPEED, program, ranks
from small_engine import configuration, engine_of

import ncz_plugins.deepspeed  # noqa: F401

pytestmark = pytest.mark.slow

RANKS = 2


def config(compression="ncclz", zero: dict | None = None, **top_level) -> dict:
    """A DeepSpeed configuration; no compression key where that is None."""
    return configuration(2, compression, zero_optimization={"stage": 2, **(zero or {})}, **top_level)


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
        [config({"roles": ["parameter"]})] * RANKS,
        "ConfigError",
        ["roles", "parameter", '["gradient"]', '["gradient", "parameter"]', '["gradient", "activation"]'],
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
    "matrices of which there are parts": (
        [config("ncclz:muon-ddp")] * RANKS,
        "UnsupportedError",
        ["quantizer.rotation", "DeepSpeed", "in policies as well", "ncclz:muon"],
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


@pytest.mark.parametrize("name", CASES)
@ranks(RANKS, launcher="torch", **DEEPSPEED)
def test_every_rank_refuses_and_says_why(group, name):
    configs, kind, named = CASES[name]
    with pytest.raises(Exception) as refused:
        engine_of(configs[rank])
    assert type(refused.value).__name__ == (kind if isinstance(kind, str) else kind[rank])
    assert all(text in str(refused.value) for text in named), refused.value


def start_engine(name: str) -> None:
    init_distributed()
    engine_of(UNCAUGHT[name][0][rank])


@pytest.mark.parametrize("name", UNCAUGHT)
def test_left_uncaught_it_ends_all_ranks_with_an_exit_status(name, tmp_path):
    scenario = program(start_engine, tmp_path, name)
    outcome = launch(deepspeed_ranks(*scenario), tmp_path, timeout=90, fails=True)
    assert f"MismatchError: {UNCAUGHT[name][1]}" in outcome.output
    assert outcome.ranks == []
