"""The example GPT under ZeRO 2, plain and compressed, each alone on a network whose bytes the kernel counts."""

import json
from statistics import fmean

import pytest
from launch import deepspeed_ranks, launch
from repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = ROOT / "examples"
STEPS = 10  # enough for the loss to fall
LAST_STEPS = 5  # enough to count bytes, which are the same in every step
MODEL = ("--layers", 2)  # a part of the example: enough that messages of another kind hardly count
# What the default does to the loss needs many more steps to be told from noise: docs/results/convergence.md.
CLOSE = {"quantizer": {"mode": "rms", "value": 0.002}}
BATCH = {"train_micro_batch_size_per_gpu": 4}  # a third of the example's: gradients are as large


def train(config: str, steps: int, folder, **settings) -> list[dict]:
    """The records that examples/train_deepspeed.py writes: one per step, and a last one for the whole run."""
    log, file = folder / "log.jsonl", folder / "config.json"
    file.write_text(json.dumps(json.loads((EXAMPLES / config).read_text()) | BATCH | settings))
    script = EXAMPLES / "train_deepspeed.py"
    command = deepspeed_ranks(
        script, "--deepspeed_config", file, "--steps", steps, "--log-file", log, *MODEL, alone=True
    )
    launch(command, folder, timeout=280, environment={"GLOO_SOCKET_IFNAME": "lo"})
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(private_network, tmp_path_factory):
    return train("deepspeed_plain.json", STEPS, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def ncclz(private_network, tmp_path_factory):
    return train("deepspeed_ncclz.json", LAST_STEPS, tmp_path_factory.mktemp("ncclz"))


@pytest.fixture(scope="module")
def close(private_network, tmp_path_factory):
    """Compressed so little that the losses must be those of the plain run."""
    folder = tmp_path_factory.mktemp("close")
    return train("deepspeed_plain.json", STEPS, folder, communication_compression=CLOSE)


def bytes_per_step(records: list[dict]) -> float:
    return fmean(record["interface_bytes"] for record in records[:-1])


def test_both_runs_are_the_default_zero_2_in_fp32(plain, ncclz):
    off = json.loads((EXAMPLES / "deepspeed_plain.json").read_text())
    on = json.loads((EXAMPLES / "deepspeed_ncclz.json").read_text())
    assert on == {**off, "communication_compression": "ncclz"}
    assert on["zero_optimization"]["stage"] == 2 and "bf16" not in on and "fp16" not in on
    assert (len(plain), len(ncclz)) == (STEPS + 1, LAST_STEPS + 1)
    assert "compression" not in plain[-1]


def test_the_statistics_tell_what_the_interface_carries(plain, ncclz):
    shrunk = bytes_per_step(plain) / bytes_per_step(ncclz)
    assert shrunk == pytest.approx(ncclz[-1]["compression"]["ratio"], rel=0.05)


def test_fp32_gradients_shrink_at_least_five_fold(plain, ncclz):
    assert bytes_per_step(plain) >= 5 * bytes_per_step(ncclz)


def test_every_gradient_goes_compressed(ncclz):
    assert ncclz[-1]["compression"]["bypasses"] == {}
    for record in ncclz[:-1]:
        assert record["compression"]["compressed_calls"] == record["compression"]["calls"] > 0


def test_the_loss_follows_the_plain_run(plain, close):
    plain_loss, loss = (fmean(record["loss"] for record in records[-1 - LAST_STEPS : -1]) for records in (plain, close))
    assert plain_loss < plain[0]["loss"] / 1.1  # it did learn
    assert loss == pytest.approx(plain_loss, rel=0.001)
    assert close[-1]["validation_loss"] == pytest.approx(plain[-1]["validation_loss"], rel=0.001)


def test_replicas_are_identical_to_the_bit(ncclz, close):
    for records in (ncclz, close):
        hashes = records[-1]["parameters_sha256"]
        assert len(hashes) == 2 and len(set(hashes)) == 1
