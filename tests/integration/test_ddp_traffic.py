"""The example GPT under DDP with each hook that it takes, alone on a network whose bytes the kernel counts."""

import json
import os
import sys
from pathlib import Path

import pytest
from launch import deepspeed_ranks, launch
from repository import ROOT
from scenarios import program

pytestmark = pytest.mark.slow

LAYERS, WIDTH, STEPS = 2, 64, 5
PARAMETERS = LAYERS * (12 * WIDTH**2 + 13 * WIDTH) + (256 + 128 + 2) * WIDTH
SETTINGS = {"transport": {"link_gbps": 0.1}}  # such a link is worth compressing for
WAYS = ("none", "bf16", "powersgd", "ncclz")


def train_each_way(folder: str) -> None:
    """One training after the other, by the example's own main program. Each leaves what it tells in WAY.jsonl."""
    sys.path.insert(0, str(ROOT / "examples"))
    import train_ddp

    sizes = ["--layers", LAYERS, "--width", WIDTH, "--heads", 8, "--steps", STEPS, "--batch", 2]
    for number, way in enumerate(WAYS):
        os.environ["MASTER_PORT"] = str(29500 + number)  # so that no rank comes to the store of the training before
        compression = f"{folder}/settings.json" if way == "ncclz" else way
        options = ["--compression", compression, "--log-file", f"{folder}/{way}.jsonl", *sizes]
        sys.argv = ["train_ddp.py", *map(str, options)]
        train_ddp.main()


@pytest.fixture(scope="module")
def told(private_network, tmp_path_factory) -> dict[str, list[dict]]:
    """What the example tells of each training: a record of each step, and one of all."""
    folder = tmp_path_factory.mktemp("ddp")
    (folder / "settings.json").write_text(json.dumps(SETTINGS))
    command = deepspeed_ranks(*program(train_each_way, folder, folder), alone=True)  # what others have imported
    launch(command, folder, timeout=200, environment={"GLOO_SOCKET_IFNAME": "lo"})
    return {way: [json.loads(line) for line in Path(folder, f"{way}.jsonl").read_text().splitlines()] for way in WAYS}


def test_bytes_are_those_that_the_hook_promises(told):
    sent = {way: sum(record["interface_bytes"] for record in records[-3:-1]) / 2 for way, records in told.items()}
    both = 2 * 4 * PARAMETERS  # each of two ranks sends as many bytes as its gradients have
    assert both < sent["none"] < 1.1 * both
    assert sent["bf16"] < 0.6 * sent["none"]
    assert sent["ncclz"] < 0.3 * sent["none"]
    assert told["ncclz"][-1]["compression"]["ratio"] > 4 and "compression" not in told["none"][-1]


def test_replicas_stay_identical_and_learn_as_the_plain_ones(told):
    for way, records in told.items():
        assert len(records) == STEPS + 1 and records[-1]["replicas_identical"], way
    of_plain, *others = (sum(r["loss"] for r in told[way][:-1]) / STEPS for way in ("none", "bf16", "ncclz"))
    assert others == pytest.approx([of_plain] * 2, rel=0.05)
