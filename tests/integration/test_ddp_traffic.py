"""The examples' GPT under DDP with each hook that it takes, and with experts and each way to send tokens to them, alone
on a network whose bytes the kernel counts."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest
from launch import deepspeed_ranks, launch
from repository import ROOT
from scenarios import program

pytestmark = pytest.mark.slow

LAYERS, WIDTH, STEPS = 2, 64, 5
SO_FAR = "interface_bytes_so_far"
PARAMETERS = LAYERS * (12 * WIDTH**2 + 13 * WIDTH) + (256 + 128 + 2) * WIDTH
SETTINGS = {"transport": {"link_gbps": 0.1}}  # such a link is worth compressing for
WAYS = {
    "train_ddp": ("none", "bf16", "powersgd", "ncclz"),
    "train_experts": ("none", "bf16", "fp8", "ncclz"),
}


def train_each_way(folder: str) -> None:
    """One training after the other, by the examples' own main programs. Each leaves what it tells in a file."""
    sys.path.insert(0, str(ROOT / "examples"))
    sizes = ["--layers", LAYERS, "--width", WIDTH, "--heads", 8, "--steps", STEPS, "--batch", 2]
    trainings = [(example, way) for example, ways in WAYS.items() for way in ways]
    for number, (example, way) in enumerate(trainings):
        os.environ["MASTER_PORT"] = str(29500 + number)  # so that no rank comes to the store of the training before
        compression = f"{folder}/settings.json" if way == "ncclz" else way
        options = ["--compression", compression, "--log-file", f"{folder}/{example}-{way}.jsonl", *sizes]
        sys.argv = [f"{example}.py", *map(str, options)]
        import_module(example).main()


@pytest.fixture(scope="module")
def told(private_network, tmp_path_factory) -> dict[str, dict[str, list[dict]]]:
    """What each example tells of each training: a record of each step, and one of all."""
    folder = tmp_path_factory.mktemp("ddp")
    (folder / "settings.json").write_text(json.dumps(SETTINGS))
    command = deepspeed_ranks(*program(train_each_way, folder, folder), alone=True)  # what others have imported
    launch(command, folder, timeout=200, environment={"GLOO_SOCKET_IFNAME": "lo"})
    return {example: {way: read(folder / f"{example}-{way}.jsonl") for way in ways} for example, ways in WAYS.items()}


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_bytes_are_those_that_the_hook_promises(told):
    told = told["train_ddp"]
    sent = {way: sum(record["interface_bytes"] for record in records[-3:-1]) / 2 for way, records in told.items()}
    both = 2 * 4 * PARAMETERS  # each of two ranks sends as many bytes as its gradients have
    assert both < sent["none"] < 1.1 * both
    assert sent["bf16"] < 0.6 * sent["none"]
    assert sent["ncclz"] < 0.3 * sent["none"]
    assert told["ncclz"][-1]["compression"]["ratio"] > 4 and "compression" not in told["none"][-1]


def test_tokens_on_their_way_to_experts_and_back_are_cast_or_compressed_as_gradients_are(told):
    told = told["train_experts"]
    before, last = -3, -2  # what is sent from one step to the next
    sent = {way: each[last][SO_FAR] - each[before][SO_FAR] for way, each in told.items()}
    assert sent["bf16"] < 0.6 * sent["none"] and sent["fp8"] < 0.45 * sent["none"], sent
    assert sent["ncclz"] < 0.35 * sent["none"] and told["ncclz"][-1]["compression"]["ratio"] > 3, sent


@pytest.mark.parametrize("example", WAYS)
def test_replicas_stay_identical_and_learn_as_the_plain_ones(told, example):
    for way, records in told[example].items():
        assert len(records) == STEPS + 1 and records[-1]["replicas_identical"], way
    losses = {way: sum(r["loss"] for r in records[:-1]) / STEPS for way, records in told[example].items()}
    losses.pop("powersgd", None)  # which makes up for its errors later
    assert list(losses.values()) == pytest.approx([losses["none"]] * len(losses), rel=0.05)
