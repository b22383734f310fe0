"""`ncz check` warns of DeepSpeed configurations: of buckets too small to be compressed, and of bounds for Muon."""

import json

import pytest

from ncz_plugins.cli.check.buckets import warning
from ncz_plugins.cli.main import main
from ncz_plugins.core.config import Config


def warned(document: dict, **transport) -> str | None:
    return warning(document, Config.load({"transport": transport}))


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"zero_optimization": {"stage": 2}},
        {"zero_optimization": {"reduce_bucket_size": 5e8}},
        {"zero_optimization": {"reduce_bucket_size": 32_768}},
        {"zero_optimization": {"reduce_bucket_size": 65_536}, "bf16": {"enabled": True}},
        {"zero_optimization": {"reduce_bucket_size": 32_768}, "bf16": {}, "communication_data_type": "fp32"},
    ],
)
def test_large_buckets_are_fine(document):
    assert warned(document) is None


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"zero_optimization": {"reduce_bucket_size": 32_767}}, ["32,767 elements of 4 bytes", "131,072 bytes"]),
        ({"zero_optimization": {"reduce_bucket_size": 40_000}, "fp16": {"enabled": True}}, ["40,000", "of 2 bytes"]),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, ["auto", "hidden_size below 182"]),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}, "bf16": {"enabled": True}}, ["hidden_size below 256"]),
    ],
)
def test_small_ones_are_named_with_the_remedy(document, words):
    said = warned(document)
    assert all(word in said for word in [*words, "zero_optimization.reduce_bucket_size", "transport.min_bytes"]), said
    assert "gradients of parameters below that size go uncompressed" in said  # larger ones are reduced by themselves


@pytest.mark.parametrize("least", [0, "auto", "never"])
def test_without_a_least_size_there_is_nothing_to_say(least):
    assert warned({"zero_optimization": {"reduce_bucket_size": 1}}, min_bytes=least) is None


@pytest.mark.parametrize(
    ("key", "optimizer", "warns"),
    [("ncclz", "Muon", True), ("ncclz:muon", "Muon", False), ("ncclz", "AdamW", False), ("ncclz", None, False)],
)
def test_the_command_says_if_muon_needs_another_bound(key, optimizer, warns, tmp_path, capsys):
    document = {"communication_compression": key, "zero_optimization": {"stage": 2}}
    document |= {"optimizer": {"type": optimizer}} if optimizer else {}
    (file := tmp_path / "ds.json").write_text(json.dumps(document))
    assert main(["check", str(file)]) == 0
    assert ("warning: Muon trains matrices" in capsys.readouterr().out) == warns


def test_the_command_refuses_what_deepspeed_can_not_do(tmp_path, capsys):
    (file := tmp_path / "ds.json").write_text(
        json.dumps({"communication_compression": "ncclz:muon-ddp", "zero_optimization": {"stage": 2}})
    )
    assert main(["check", str(file)]) != 0
    said = capsys.readouterr().err
    assert "quantizer.rotation" in said and "DeepSpeed" in said and "ncclz:muon" in said


def test_the_command_says_it(tmp_path, capsys):
    (file := tmp_path / "ds.json").write_text(
        json.dumps({"communication_compression": "ncclz", "zero_optimization": {"reduce_bucket_size": "auto"}})
    )
    assert main(["check", str(file)]) == 0
    assert "warning: zero_optimization.reduce_bucket_size: auto" in capsys.readouterr().out
