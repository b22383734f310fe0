"""Configuration: every form it is read from, every mistake it refuses, and the files that ship with it."""

import copy
import json
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pydantic
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from repository import ROOT

from ncz_plugins.cli.schema import settings_table
from ncz_plugins.core.call_description import checksum_of
from ncz_plugins.core.config import (
    CHUNK,
    CoderCosts,
    Config,
    EntropyConfig,
    KiB,
    MiB,
    QuantizerConfig,
    TransportConfig,
    expanded_path,
    find_in_deepspeed,
    format_size,
    is_deepspeed,
    json_schema,
    read_document,
    settings,
)
from ncz_plugins.core.errors import ConfigError, NczError
from ncz_plugins.kernels import format as frame_format

CONFIGS = ROOT / "configs"
OURS = sorted(f for f in CONFIGS.glob("ncclz*") if f.name != "ncclz.schema.json")
DEEPSPEED = sorted(CONFIGS.glob("deepspeed_*.json"))


def message(source):
    """The text of the ConfigError that loading `source` raises."""
    with pytest.raises(ConfigError) as caught:
        Config.load(source)
    return str(caught.value)


# ------------------------------------------------------------------ forms


def test_the_short_form_and_nothing_are_the_defaults():
    assert Config.load() == Config.load(None) == Config.load("ncclz") == Config.load({}) == Config()


def test_presets_differ_in_the_bound():
    accurate, balanced, small = (Config.load(f"ncclz:{name}") for name in ("accurate", "balanced", "small"))
    assert balanced == Config()
    assert accurate.quantizer.value < balanced.quantizer.value < small.quantizer.value
    for each in (accurate, small):
        assert each.quantizer.changed(value=balanced.quantizer.value) == balanced.quantizer
        assert each.model_copy(update={"quantizer": balanced.quantizer}) == balanced


@pytest.mark.parametrize("name", ["", "ncclz", "large", "Small", "small "])
def test_an_unknown_preset_is_refused_and_the_others_are_named(name):
    text = message(f"ncclz:{name}")
    assert f"'ncclz:{name}' is not a configuration" in text
    assert "allowed: 'ncclz', 'ncclz:accurate', 'ncclz:balanced', 'ncclz:small'" in text
    assert ("did you mean 'ncclz:small'?" in text) == (name.strip().lower() == "small")


def test_every_default_is_as_documented():
    assert {key: default for key, default, _, _ in settings()} == {
        "quantizer.kind": "auto",
        "quantizer.mode": "rms",
        "quantizer.value": 0.375,
        "quantizer.block": None,
        "quantizer.seed": 0,
        "quantizer.error_feedback": False,
        "quantizer.rotation": False,
        "entropy.coder": "auto",
        "entropy.predictor": "auto",
        "entropy.checksum": False,
        "entropy.costs": None,
        "transport.schedule": "auto",
        "transport.frame_bytes": None,
        "transport.min_bytes": None,
        "transport.hierarchy": "auto",
        "transport.connections": "auto",
        "transport.tuning": None,
        "transport.link_gbps": None,
        "transport.timeout_seconds": None,
        "policies": (),
        "steps.warmup": 0,
        "steps.bounds": (),
        "guard.every": 0,
        "guard.max_relative_error": 0.6,
        "guard.on_alarm": "warn",
        "roles": ("gradient",),
        "statistics.report_every": 0,
        "statistics.jsonl": None,
        "statistics.tensorboard": None,
    }


def test_a_config_is_returned_as_it_is():
    config = Config.load({"quantizer": {"value": 0.1}})
    assert Config.load(config) is config


SOME = {
    "quantizer": {"mode": "abs", "value": 1e-3},
    "transport": {"frame_bytes": "4MB"},
    "roles": ["activation", "gradient"],
}


@pytest.mark.parametrize("as_path", [str, Path])
@pytest.mark.parametrize("name, dump", [("c.json", json.dumps), ("c.yaml", yaml.safe_dump), ("c.yml", yaml.safe_dump)])
def test_files_give_what_the_mapping_gives(tmp_path, name, dump, as_path):
    file = tmp_path / name
    file.write_text(dump(SOME))
    assert Config.load(as_path(file)) == Config.load(SOME)


def test_settings_are_what_was_given_and_the_rest_is_default():
    config = Config.load(SOME)
    assert (config.quantizer.mode, config.quantizer.value, config.quantizer.block) == ("abs", 1e-3, None)
    assert config.transport.frame_bytes == 4_000_000
    assert config.transport.min_bytes == Config().transport.min_bytes
    assert config.roles == ("gradient", "activation")  # in one order, whatever order they were given in


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "1.0e-3", "+1e-3", "0.001"])
def test_yaml_reads_all_ways_to_write_a_float(tmp_path, number):
    file = tmp_path / "c.yaml"
    file.write_text(f"quantizer:\n  value: {number}\n")
    assert Config.load(file).quantizer.value == 1e-3


def test_yaml_is_loaded_safely(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("quantizer: !!python/object/apply:os.getcwd []\n")
    assert "c.yaml:1: invalid YAML" in message(file)


def test_schema_reference_for_editors_is_ignored():
    assert Config.load({"$schema": "ncclz.schema.json"}) == Config()


@pytest.mark.parametrize(
    "text, size",
    [("20000B", 20000), ("64KiB", 65536), ("64 KiB", 65536), ("64kB", 64000), ("64KB", 64000), ("4MB", 4_000_000)],
)
def test_sizes_may_be_written_with_units(text, size):
    config = Config.load({"transport": {"frame_bytes": text, "min_bytes": text}})
    assert config.transport.frame_bytes == config.transport.min_bytes == size


# ------------------------------------------------------------------ values at their limits

COSTS = {"raw": 0, "fixed": 1, "huffman": 2, "rans": 3, "rans_rest": 10**9 - 1}
GOOD = [
    ("quantizer", {"mode": "abs", "value": 1e300}),
    ("quantizer", {"mode": "abs", "value": 1}),
    ("quantizer", {"mode": "rel", "value": 0.999}),
    ("quantizer", {"mode": "rms", "value": 10}),
    ("quantizer", {"mode": "range", "value": 0.999}),
    ("quantizer", {"mode": "bits", "value": 3}),
    ("quantizer", {"mode": "bits", "value": 8.0}),
    ("quantizer", {"kind": "stochastic", "seed": 2**64 - 1}),
    ("quantizer", {"kind": "lossless"}),
    ("quantizer", {"value": 5e-324}),
    ("quantizer", {"block": 0}),
    ("quantizer", {"block": 3 * 4096}),
    ("entropy", {"coder": "huffman", "checksum": True}),
    ("entropy", {"coder": "rans", "checksum": False}),
    ("entropy", {"costs": None}),
    ("transport", {"frame_bytes": 16 * 1024}),
    ("transport", {"frame_bytes": "64MiB"}),
    ("transport", {"frame_bytes": "auto"}),
    ("transport", {"min_bytes": 0}),
    ("transport", {"min_bytes": "auto"}),
    ("transport", {"min_bytes": "never"}),
    ("transport", {"hierarchy": "off"}),
    ("transport", {"hierarchy": 2}),
    ("transport", {"tuning": "tuned.json"}),
    ("transport", {"link_gbps": 0.001}),
    ("transport", {"link_gbps": 10000}),
    ("transport", {"timeout_seconds": 1}),
    ("statistics", {"report_every": 0}),
]
BAD = [
    ("quantizer", {"kind": "nearest"}),
    ("quantizer", {"kind": None}),
    ("quantizer", {"mode": "max"}),
    ("quantizer", {"mode": "RMS"}),
    ("quantizer", {"value": 0}),
    ("quantizer", {"value": -0.1}),
    ("quantizer", {"value": math.nan}),
    ("quantizer", {"value": math.inf}),
    ("quantizer", {"value": True}),
    ("quantizer", {"value": "0.25"}),
    ("quantizer", {"value": None}),
    ("quantizer", {"value": [0.25]}),
    ("quantizer", {"value": 10.001}),
    ("quantizer", {"block": -4096}),
    ("quantizer", {"block": 4095}),
    ("quantizer", {"block": True}),
    ("quantizer", {"block": "4096"}),
    ("quantizer", {"seed": -1}),
    ("quantizer", {"seed": 2**64}),
    ("quantizer", {"seed": 1.5}),
    ("quantizer", {"seed": True}),
    ("quantizer", {"seed": None}),
    ("entropy", {"coder": "split"}),
    ("entropy", {"checksum": 1}),
    ("entropy", {"checksum": "yes"}),
    ("entropy", {"checksum": None}),
    ("entropy", {"predictor": None}),
    ("entropy", {"costs": "auto"}),
    ("transport", {"schedule": "tree"}),
    ("transport", {"frame_bytes": 16 * 1024 - 1}),
    ("transport", {"frame_bytes": "65MiB"}),
    ("transport", {"frame_bytes": "1 XiB"}),
    ("transport", {"frame_bytes": "1.5MiB"}),
    ("transport", {"frame_bytes": "1048576"}),
    ("transport", {"frame_bytes": "-1MiB"}),
    ("transport", {"frame_bytes": True}),
    ("transport", {"frame_bytes": "never"}),
    ("transport", {"min_bytes": -1}),
    ("transport", {"min_bytes": False}),
    ("transport", {"min_bytes": "always"}),
    ("transport", {"hierarchy": "on"}),
    ("transport", {"hierarchy": True}),
    ("transport", {"hierarchy": 1}),
    ("transport", {"hierarchy": 2.5}),
    ("transport", {"hierarchy": None}),
    ("transport", {"tuning": ""}),
    ("transport", {"tuning": 3}),
    ("transport", {"link_gbps": 0}),
    ("transport", {"link_gbps": 0.0009}),
    ("transport", {"link_gbps": 10001}),
    ("transport", {"link_gbps": math.inf}),
    ("transport", {"link_gbps": True}),
    ("transport", {"link_gbps": "10"}),
    ("transport", {"timeout_seconds": 0}),
    ("transport", {"timeout_seconds": True}),
    ("transport", {"timeout_seconds": "30"}),
    ("transport", {"timeout_seconds": math.inf}),
    ("statistics", {"report_every": -1}),
    ("statistics", {"report_every": True}),
    ("statistics", {"report_every": 10.5}),
    ("statistics", {"jsonl": ""}),
    ("quantizer", {"error_feedback": 1}),
    ("steps", {"warmup": -1}),
    ("guard", {"every": True}),
    ("guard", {"max_relative_error": 0}),
    ("guard", {"on_alarm": "halt"}),
]


@pytest.mark.parametrize("section, values", GOOD)
def test_values_at_the_limits_are_accepted(section, values):
    loaded = getattr(Config.load({section: values}), section)
    for key, value in values.items():
        if key not in ("frame_bytes", "min_bytes") or value in ("auto", "never") or type(value) is int:
            assert getattr(loaded, key) == value


@pytest.mark.parametrize("section, values", BAD)
def test_a_wrong_value_is_named_with_its_key_and_what_is_allowed(section, values):
    ((key, value),) = values.items()
    allowed = {name: text for name, _, text, _ in settings()}[f"{section}.{key}"]
    assert message({section: values}) == f"{section}.{key}: {value!r} is not allowed; allowed: {allowed}"


@pytest.mark.parametrize(
    "wrong, received",
    [
        ({"policies": [{"nam": "*"}]}, "policies[0].nam: unknown key (value '*'); did you mean policies[0].name?"),
        ({"policies": [{}, {"dtype": "int8"}]}, "policies[1].dtype: 'int8' is not allowed; allowed: null, or one of"),
        ({"policies": [{"quantizer": {"vale": 1}}]}, "did you mean policies[0].quantizer.value?"),
        ({"policies": {"name": "*"}}, "policies: {'name': '*'} is not allowed; allowed: a list of mappings"),
        (
            {"policies": [{"quantizer": {"value": 20}}]},
            "policies[0].quantizer, with the rest of quantizer: value: 20 is not",
        ),
        ({"policies": [{"quantizer": {"mode": "rel", "value": 1.5}}]}, "with mode rel or range below 1"),
        ({"steps": {"bounds": [{"step": 0}]}}, "steps.bounds[0].times: is missing; allowed: a finite number above 0"),
        ({"steps": {"bounds": [{"step": 5, "times": 1}, {"step": 5, "times": 2}]}}, "in the order of their steps"),
        (
            {"steps": {"bounds": [{"step": 0, "times": 100}]}},
            "steps.bounds[0].times: 100 is too much for quantizer.value",
        ),
    ],
)
def test_what_is_wrong_with_policies_and_steps_is_named(wrong, received):
    assert received in message(wrong)


def test_costs_are_given_for_all_coders_or_none():
    assert Config.load({"entropy": {"costs": COSTS}}).entropy.costs.model_dump() == COSTS
    for wrong in ({"raw": 1}, COSTS | {"rans": -1}, COSTS | {"rans": 10**9}, COSTS | {"rans": 1.5}, COSTS | {"x": 1}):
        text = message({"entropy": {"costs": wrong}})
        assert text.startswith("entropy.costs: ") and "raw, fixed, huffman, rans, rans_rest to integers" in text


def test_yaml_says_off_without_quotes(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("transport:\n  hierarchy: off\n")
    assert Config.load(file).transport.hierarchy == "off"


def test_a_tuning_file_is_looked_for_beside_the_file_that_names_it(tmp_path):
    named = {"transport": {"tuning": "tuned.json"}}
    file = tmp_path / "c.json"
    file.write_text(json.dumps(named))
    assert Config.load(file).transport.tuning == str(tmp_path / "tuned.json")
    assert Config.load(named).transport.tuning == "tuned.json"
    for elsewhere in ("/elsewhere/tuned.json", "~/tuned.json", "$HOME/tuned.json"):
        file.write_text(json.dumps({"transport": {"tuning": elsewhere}}))
        assert Config.load(file).transport.tuning == elsewhere


@pytest.mark.parametrize("folder", ["a$HOME", "~", "$$"])
def test_a_folder_of_a_file_means_itself(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir()
    Path(folder, "c.json").write_text(json.dumps({"transport": {"tuning": "tuned.json"}}))
    loaded = Config.load(f"{folder}/c.json")
    assert os.path.samefile(Path(expanded_path(loaded.transport.tuning)).parent, folder)


# ------------------------------------------------------------------ paths

PATHS = [("statistics", "jsonl"), ("statistics", "tensorboard"), ("transport", "tuning")]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("~", "{home}"),
        ("~/out/f", "{home}/out/f"),
        ("$HOME/f", "{home}/f"),
        ("~/${RUN_1}/$RUN_1.f", "{home}/a $b/a $b.f"),
        ("a$$b/~/$1$", "a$b/~/$1$"),
        ("$$HOME", "$HOME"),
        ("./~", "./~"),
        ("~root/f", os.path.expanduser("~root/f")),
    ],
)
def test_paths_stand_for_the_folders_of_whoever_uses_them(tmp_path, monkeypatch, path, meant):
    monkeypatch.setenv("HOME", str(tmp_path / "$home"))
    monkeypatch.setenv("RUN_1", "a $b")
    assert expanded_path(path) == meant.replace("{home}", str(tmp_path / "$home"))
    for section, name in PATHS:
        for either in (path, Path(path)):
            loaded = Config.load({section: {name: either}})
            assert getattr(getattr(loaded, section), name) == os.fspath(either)  # ranks may have other folders


@pytest.mark.parametrize(("section", "name"), PATHS)
def test_a_path_that_means_nothing_is_named(monkeypatch, section, name):
    monkeypatch.delenv("NO_SUCH", raising=False)
    for path in ("$NO_SUCH/f", "a/${NO_SUCH}", Path("x$NO_SUCH")):
        text = message({section: {name: path}})
        assert text.startswith(f"{section}.{name}: {path}: the environment variable NO_SUCH is not defined"), text
    text = message({section: {name: "~no-such-user/f"}})
    assert text.startswith(f"{section}.{name}: ~no-such-user/f: ~no-such-user is not a user with a home folder"), text
    for path in ("", "a\0b", 3, b"f"):
        assert f"{section}.{name}: {path!r} is not allowed" in message({section: {name: path}})
    assert "which lacks some of these characters" in message({section: {name: "\ud800"}})


def test_a_path_that_is_not_utf_8_is_kept(tmp_path):
    path = tmp_path / os.fsdecode(b"raw\xff")
    config = Config.load({"statistics": {"jsonl": path}})
    assert os.fsencode(config.statistics.jsonl) == os.fsencode(path)
    assert Config.load(json.loads(config.canonical())) == config and checksum_of(config)


def test_files_of_settings_are_found_in_folders_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WHERE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("c.json", "a$b.json"):
        Path(name).write_text(json.dumps(SOME))
    for path in ("~/c.json", "$WHERE/c.json", Path("~/c.json"), "a$b.json"):
        assert Config.load(path) == Config.load(SOME)
    assert "$NO_SUCH/c.json: the environment variable NO_SUCH is not defined" in message("$NO_SUCH/c.json")
    assert f"{tmp_path}/none.json: no such file" in message("~/none.json")


# ------------------------------------------------------------------ numbers of others


@pytest.mark.parametrize(
    "number", [256, 256.0, np.int64(256), np.uint16(256), np.float32(256), np.array(256), torch.tensor(256)], ids=repr
)
def test_equal_numbers_are_equal_settings(number):
    def loaded(number):
        return Config.load(
            {
                "quantizer": {"mode": "abs", "block": number, "seed": number, "value": number},
                "transport": {"min_bytes": number, "frame_bytes": number * 64, "hierarchy": number},
                "entropy": {"costs": dict.fromkeys(COSTS, number)},
                "policies": [{"min_elements": number, "quantizer": {"block": number}}],
                "steps": {"warmup": number, "bounds": [{"step": number, "times": 1}]},
                "statistics": {"report_every": number},
            }
        )

    assert loaded(number) == loaded(256)
    assert loaded(number).canonical() == loaded(256).canonical()
    assert checksum_of(loaded(number)) == checksum_of(loaded(256))


@pytest.mark.parametrize("flag", [True, False])
def test_flags_of_numpy_are_flags(flag):
    for other in (np.bool_(flag), np.array(flag), torch.tensor(flag)):
        assert Config.load({"quantizer": {"error_feedback": other}}).quantizer.error_feedback is flag


@pytest.mark.parametrize(
    ("section", "name", "value", "shown"),
    [
        ("quantizer", "block", 256.5, "256.5"),
        ("quantizer", "block", np.float64(256.5), "256.5"),
        ("quantizer", "block", np.True_, "True"),
        ("quantizer", "error_feedback", np.int64(1), "1"),
        ("quantizer", "block", np.array([256]), "array([256])"),
        ("transport", "min_bytes", 256.5, "256.5"),
        ("transport", "frame_bytes", np.float32(1e30), f"{float(np.float32(1e30))}"),
        ("transport", "hierarchy", np.True_, "True"),
        ("transport", "connections", 2.5, "2.5"),
        ("statistics", "report_every", 10.5, "10.5"),
    ],
)
def test_other_numbers_are_refused_by_name(section, name, value, shown):
    assert message({section: {name: value}}).startswith(f"{section}.{name}: {shown} is not allowed; allowed: ")


def test_resolving_fills_in_only_what_is_left_open():
    values = {"schedule": "direct", "frame_bytes": 1 << 18, "min_bytes": "never", "link_gbps": 3.0}
    left_open = Config.load({"transport": {"frame_bytes": "auto", "min_bytes": "auto", "tuning": "tuned.json"}})
    resolved = left_open.resolved(**values, costs=CoderCosts(**COSTS))
    assert resolved.transport == TransportConfig(**values)
    assert resolved.entropy == EntropyConfig(costs=COSTS)
    named = Config.load(
        {"transport": {"schedule": "ring", "min_bytes": 0, "link_gbps": 9}, "entropy": {"costs": COSTS}}
    )
    assert named.resolved(**values, costs=CoderCosts(**dict.fromkeys(COSTS, 7))) == named
    assert left_open.resolved().transport == TransportConfig(min_bytes="128KiB")


def test_a_schedule_that_tuning_chose_is_open_again_for_gpus():
    tuned = Config().resolved(schedule="ring")
    named = Config(transport={"schedule": "ring"}).resolved(schedule="direct")
    assert tuned.transport == named.transport
    assert tuned.resolved(link_gbps=1.0).for_gpus().transport == TransportConfig(link_gbps=1.0)
    assert named.for_gpus() is named
    assert tuned.with_transport(schedule="direct").for_gpus().transport.schedule == "direct"
    assert tuned.canonical() != named.canonical()  # such ranks differ on GPUs


@pytest.mark.parametrize(
    ("gbps", "least"),
    [
        (None, 128 * KiB),
        (0.001, 128 * KiB),
        (0.095, 128 * KiB),
        (0.94, MiB),
        (1, MiB),
        (1.9, 2 * MiB),
        (2.1, 4 * MiB),
        (9.4, 16 * MiB),
        (23.5, 32 * MiB),
        (1e4, 1 << 34),
    ],
)
def test_the_least_size_follows_from_the_link(gbps, least):
    named, measured = Config(transport={"link_gbps": gbps}), Config().resolved(link_gbps=gbps)
    assert named.min_bytes_in_effect() == measured.min_bytes_in_effect() == least
    assert Config(transport={"link_gbps": gbps, "min_bytes": 5}).resolved().transport.min_bytes == 5
    assert named.min_bytes_in_effect(on_gpu=True) <= least
    assert named.leaves_link_open == (gbps is None)


@pytest.mark.parametrize(("min_bytes", "is_open"), [(None, True), (0, True), ("auto", False), ("never", False)])
def test_the_link_is_measured_unless_it_is_given_or_nothing_depends_on_it(min_bytes, is_open):
    assert Config(transport={"min_bytes": min_bytes}).leaves_link_open == is_open
    assert not Config(transport={"min_bytes": min_bytes, "link_gbps": 1}).leaves_link_open


@pytest.mark.parametrize(
    ("gbps", "least"),
    [(None, 128 * KiB), (0.01, 32 * KiB), (0.095, 64 * KiB), (0.94, 512 * KiB), (2.4, 2 * MiB), (2.5, 4 * MiB)],
)
def test_two_ranks_compress_smaller_tensors_on_slow_links(gbps, least):
    config = Config(transport={"link_gbps": gbps})
    assert config.min_bytes_in_effect(ranks=2) == least <= config.min_bytes_in_effect(ranks=3)
    assert config.min_bytes_in_effect(on_gpu=True, ranks=2) == config.min_bytes_in_effect(on_gpu=True)
    assert Config(transport={"link_gbps": gbps, "min_bytes": 5}).min_bytes_in_effect(ranks=2) == 5


@pytest.mark.parametrize("gbps", [None, 0.01, 10, 400])
def test_many_ranks_compress_small_tensors_on_any_link(gbps):
    """As uncompressed ones travel around a ring of all ranks."""
    config = Config(transport={"link_gbps": gbps})
    assert config.min_bytes_in_effect(ranks=17) == 128 * KiB <= config.min_bytes_in_effect(ranks=16)
    assert config.min_bytes_in_effect(on_gpu=True, ranks=17) == config.min_bytes_in_effect(on_gpu=True)
    assert Config(transport={"link_gbps": gbps, "min_bytes": 5}).min_bytes_in_effect(ranks=17) == 5
    assert config.min_bytes_in_effect(ranks=17, around_ring=False) == config.min_bytes_in_effect(ranks=16)


@pytest.mark.parametrize(("gbps", "nbytes"), [(None, 4 * MiB), (2.49, 4 * MiB), (2.5, 8 * MiB), (400, 8 * MiB)])
def test_the_size_of_frames_follows_from_the_link_and_the_device(gbps, nbytes):
    transport = Config().resolved(link_gbps=gbps).transport
    assert transport.frame_bytes is None and transport.has_fast_link == (nbytes == 8 * MiB)
    assert transport.frame_bytes_in_effect() == nbytes
    assert transport.frame_bytes_in_effect(on_gpu=True) == 64 * MiB
    named = Config(transport={"frame_bytes": 4 * MiB, "link_gbps": gbps}).transport
    assert named.frame_bytes_in_effect() == named.frame_bytes_in_effect(on_gpu=True) == 4 * MiB


def test_only_auto_leaves_the_size_of_frames_to_what_was_measured():
    measured = {"frame_bytes": MiB, "link_gbps": 1.0}
    assert Config(transport={"frame_bytes": "auto"}).resolved(**measured).transport.frame_bytes == MiB
    assert Config().resolved(**measured).transport.frame_bytes is None
    assert Config(transport={"frame_bytes": "auto"}).resolved().transport.frame_bytes is None


def test_the_limit_of_value_depends_on_the_mode():
    for mode in ("rel", "range"):
        assert message({"quantizer": {"mode": mode, "value": 1}}).startswith("quantizer.value: 1 is not allowed")
    assert message({"quantizer": {"value": 11, "mode": "rms"}}).startswith("quantizer.value: 11 is not allowed")
    assert Config.load({"quantizer": {"mode": "abs", "value": 11}}).quantizer.value == 11
    for value in (2, 4.5, 9):
        assert message({"quantizer": {"mode": "bits", "value": value}}).startswith(f"quantizer.value: {value} is not ")
    assert message({"quantizer": {"mode": "bits"}}).startswith("quantizer.value: 0.375 is not allowed")


@pytest.mark.parametrize("roles", [[], ["gradient", "gradient"], ["gradients"], "gradient", None, [1], [["gradient"]]])
def test_wrong_roles_are_refused(roles):
    assert re.match(
        r"roles: .* is not allowed; allowed: a list .* gradient, parameter, activation", message({"roles": roles})
    )


@pytest.mark.parametrize("section", ["quantizer", "entropy", "transport", "statistics"])
@pytest.mark.parametrize("value", [None, "auto", 3, True, []])
def test_a_section_must_be_a_mapping(section, value):
    keys = ", ".join(type(getattr(Config(), section)).model_fields)
    assert message({section: value}) == f"{section}: {value!r} is not allowed; allowed: a mapping with the keys {keys}"


# ------------------------------------------------------------------ unknown keys


def test_an_unknown_key_is_named_with_the_closest_valid_one():
    assert message({"quantizer": {"bound_mode": "rms"}}) == (
        "quantizer.bound_mode: unknown key (value 'rms'); "
        "did you mean quantizer.mode? allowed: kind, mode, value, block, seed, error_feedback, rotation"
    )


@pytest.mark.parametrize(
    "source, meant",
    [
        ({"quantiser": {}}, "quantizer"),
        ({"statistic": {}}, "statistics"),
        ({"mode": "rms"}, "quantizer.mode"),  # one level too high
        ({"quantizer": {"coder": "raw"}}, "entropy.coder"),  # in the wrong section
        ({"transport": {"frame_size": 1}}, "transport.frame_bytes"),
        ({"schedul": "ring"}, "transport.schedule"),
    ],
)
def test_suggestions(source, meant):
    assert f"did you mean {meant}?" in message(source)


def test_no_suggestion_where_nothing_is_close():
    allowed = "quantizer, entropy, transport, policies, steps, guard, roles, statistics"
    assert message({"zzz": 1}) == f"zzz: unknown key (value 1); allowed: {allowed}"


@pytest.mark.parametrize(
    "section, key, value, remedy",
    [
        ("guard", "min_cosine", 0.85, "guard.max_relative_error is enough"),
        ("statistics", "history", 1000, "statistics.jsonl keeps all steps"),
    ],
)
def test_a_setting_that_was_removed_is_named_with_what_to_do(section, key, value, remedy):
    text = message({section: {key: value}})
    assert text.startswith(f"{section}.{key}: this setting has been removed (value {value}): delete it. ")
    assert remedy in text


def test_keys_that_are_not_strings_are_reported_like_any_other(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("1: 2\nquantizer:\n  yes: 1\n")
    assert {line.strip().partition(" ")[0] for line in message(file).splitlines()[1:]} == {"1:", "quantizer.True:"}
    assert "self: unknown key" in message({"self": 1})


def test_all_problems_come_at_once():
    text = message({"quantizer": {"mode": "x", "bloc": 1}, "roles": ["x", "y"], "entropy": 3})
    assert text.startswith("4 problems\n")
    keys = [line.strip().partition(":")[0] for line in text.splitlines()[1:]]
    assert sorted(keys) == ["entropy", "quantizer.bloc", "quantizer.mode", "roles"]


def test_a_long_value_is_shortened():
    assert len(message({"zzz": "x" * 10_000})) < 300


def test_building_a_section_by_hand_reports_the_same_way():
    with pytest.raises(ConfigError, match="mode: 'x' is not allowed; allowed: abs, rel, rms, range, bits$"):
        QuantizerConfig(mode="x")
    with pytest.raises(ConfigError, match="did you mean quantizer.mode"):
        Config(mode="rms")
    assert Config(quantizer=QuantizerConfig(value=0.1)) == Config.load({"quantizer": {"value": 0.1}})


def test_config_errors_are_ncz_errors_and_value_errors():
    assert issubclass(ConfigError, NczError) and issubclass(ConfigError, ValueError)


# ------------------------------------------------------------------ sources that cannot be read


@pytest.mark.parametrize("typo", ["nclz", "ncclzz", "NCCLZ", "ncz", "ncclz "])
def test_a_misspelt_short_form_gets_a_suggestion(typo):
    assert f"{typo!r} is not a configuration; did you mean 'ncclz'?" in message(typo)


def test_a_preset_without_its_first_word_gets_a_suggestion():
    assert "'small' is not a configuration; did you mean 'ncclz:small'?" in message("small")


def test_a_missing_file_is_named(tmp_path):
    assert f"{tmp_path}/my.yaml: no such file" in message(f"{tmp_path}/my.yaml")
    assert f"{tmp_path}/my.yaml: cannot be read: No such file" in message(tmp_path / "my.yaml")
    assert f"{tmp_path}: cannot be read: " in message(tmp_path)  # a directory


@pytest.mark.parametrize("source", [True, 3, 0.5, ["ncclz"], b"ncclz"])
def test_other_types_are_refused(source):
    text = message(source)
    assert f"{source!r} ({type(source).__name__}) is not a configuration; allowed: 'ncclz', 'ncclz:accurate', " in text
    assert "'ncclz:muon-ddp', a mapping, or the path" in text


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("c.json", '{\n "quantizer": {\n}', "c.json:3: invalid JSON: "),
        ("c.json", '{"roles": ["gradient"], "roles": []}', "c.json: key 'roles' is given twice"),
        ("c.json", '{"quantizer": {"value": NaN}}', "c.json: quantizer.value: nan is not allowed"),
        ("c.json", "[1, 2]", "c.json: holds [1, 2], not a mapping"),
        ("c.json", "[" * 100_000, "c.json: brackets are nested too deeply"),
        ("c.json", "", "c.json:1: invalid JSON: "),
        ("c.yaml", "quantizer:\n  mode: [rms\n", "c.yaml:3: invalid YAML: "),
        ("c.yaml", "quantizer:\n\tmode: rms\n", "c.yaml:2: invalid YAML: "),
        ("c.yaml", "entropy:\n  coder: raw\n  coder: fixed\n", "c.yaml:3: invalid YAML: key 'coder' is given twice"),
        ("c.yaml", "? [a]\n: 1\n", "c.yaml:1: invalid YAML: "),
        ("c.yaml", "quantizer: \x01\n", "c.yaml: invalid YAML: "),
        ("c.yaml", "quantizer: 2026-13-01\n", "c.yaml: month must be in 1..12"),
        ("c.yaml", "", "c.yaml: holds None, not a mapping"),
        ("c.yaml", "ncclz", "c.yaml: holds 'ncclz', not a mapping"),
        ("c.yaml", "quantizer:\n  value: .nan\n", "c.yaml: quantizer.value: nan is not allowed"),
        ("c.toml", "", "c.toml: unknown type of file; allowed: .yaml, .yml, .json"),
    ],
)
def test_a_file_that_is_not_right_is_named(tmp_path, name, text, says):
    file = tmp_path / name
    file.write_text(text)
    assert message(file).startswith(f"{tmp_path}/{says}")


def test_a_file_that_is_not_text_is_named(tmp_path):
    file = tmp_path / "c.json"
    file.write_bytes(b"\xff\xfe\x00")
    assert message(file).startswith(f"{file}: is not UTF-8 text")


def test_a_byte_order_mark_does_no_harm(tmp_path):
    file = tmp_path / "c.json"
    file.write_bytes(b"\xef\xbb\xbf{}")
    assert Config.load(file) == Config()


# ------------------------------------------------------------------ the object


def test_it_is_immutable_hashable_and_travels():
    config = Config.load(SOME)
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.quantizer.value = 1.0
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.roles = ()
    assert hash(config) == hash(Config.load(SOME))
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_canonical_text_is_equal_for_equal_settings_only():
    plain = Config().canonical()
    assert plain == Config.load({"entropy": {"coder": "auto"}}).canonical()
    sizes = [Config.load({"transport": {"frame_bytes": size}}).canonical() for size in ("4MiB", 4 << 20, None)]
    assert sizes[0] == sizes[1] != sizes[2] == plain
    assert (
        Config.load({"quantizer": {"value": 1}}).canonical() == Config.load({"quantizer": {"value": 1.0}}).canonical()
    )
    assert (
        Config.load({"roles": ["parameter", "gradient"]}).canonical()
        == Config.load({"roles": ["gradient", "parameter"]}).canonical()
    )
    variants = [Config.load({section: values}).canonical() for section, values in GOOD]
    assert plain not in variants[:5] and len(set(variants[:5])) == 5


@st.composite
def configs(draw):
    mode = draw(st.sampled_from(["abs", "rel", "rms", "range"]))
    limit = {"abs": 1e30, "rel": 0.99, "rms": 10.0, "range": 0.99}[mode]
    return {
        "quantizer": {
            "kind": draw(st.sampled_from(["error_bound", "stochastic", "lossless"])),
            "mode": mode,
            "value": draw(st.floats(0, limit, exclude_min=True)),
            "block": 4096 * draw(st.integers(0, 100)),
            "seed": draw(st.integers(0, 2**64 - 1)),
        },
        "entropy": {"checksum": draw(st.booleans()), "costs": draw(st.sampled_from([None, COSTS]))},
        "transport": {
            "frame_bytes": draw(st.integers(16 << 10, 64 << 20)),
            "min_bytes": draw(st.sampled_from(["auto", "never"]) | st.integers(0, 1 << 40)),
            "hierarchy": draw(st.sampled_from(["auto", "off"]) | st.integers(2, 1 << 20)),
            "tuning": draw(
                st.none() | st.text(min_size=1).filter(lambda path: path[0] != "~" and not set(path) & set("$\0"))
            ),
            "link_gbps": draw(st.none() | st.floats(1e-3, 1e4)),
            "timeout_seconds": draw(st.none() | st.floats(1e-3, 1e6)),
        },
        "roles": draw(st.lists(st.sampled_from(["gradient", "parameter", "activation"]), min_size=1, unique=True)),
    }


@given(configs())
def test_canonical_text_loads_back_to_the_same_settings(document):
    config = Config.load(document)
    text = config.canonical()
    assert "\n" not in text and json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text
    assert Config.load(json.loads(text)) == config
    assert config.quantizer.value == document["quantizer"]["value"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
some_key = st.sampled_from(["quantizer", "transport", "roles", "value", "frame_bytes"]) | st.text(max_size=5)


@given(st.dictionaries(some_key, json_values | st.dictionaries(some_key, json_values, max_size=3), max_size=3))
def test_whatever_is_given_the_only_error_is_ours(document):
    try:
        assert isinstance(Config.load(document), Config)
    except ConfigError as error:
        assert str(error)


def test_describe_is_one_line_with_what_matters():
    assert Config().describe() == ("stochastic rms:0.375 per 128 elements, coder auto, schedule auto, roles gradient")
    assert "rms:0.375 per tensor" in Config.load({"quantizer": {"block": 0}}).describe()
    never = Config.load({"transport": {"min_bytes": "never"}}).describe()
    assert never.endswith("roles gradient, min_bytes never: nothing is compressed")
    assert Config.load({"quantizer": {"kind": "error_bound"}}).describe().startswith("error bound rms:0.375 per 128 el")
    assert Config.load({"quantizer": {"mode": "rel"}}).describe().startswith("error bound rel:0.375 per 4096 elements")
    assert Config.load({"quantizer": {"kind": "lossless"}}).describe().startswith("lossless, coder auto, schedule")
    assert "coder auto, checksums, schedule" in Config.load({"entropy": {"checksum": True}}).describe()
    text = Config.load(SOME | {"entropy": {"coder": "raw", "predictor": "delta"}}).describe()
    assert text.startswith("error bound abs:0.001, coder raw, predictor delta, ")
    activations = "activations: error bound rms:0.1 per 128 elements"
    assert text.endswith(f"frames 4000000 B, roles gradient+activation ({activations})")
    exact = Config(quantizer={"kind": "lossless"}, roles=["activation"])
    assert exact.describe().endswith("roles activation")


@pytest.mark.parametrize(
    "size, text", [(0, "0 B"), (1000, "1000 B"), (1 << 10, "1 KiB"), (3 << 19, "1536 KiB"), (1 << 30, "1 GiB")]
)
def test_sizes_for_people(size, text):
    assert format_size(size) == text


def test_a_fixed_rate():
    quantizer = QuantizerConfig(mode="bits", value=4)
    assert quantizer.bits == 4 and quantizer.block_in_effect == 0
    assert quantizer.describe() == "error bound, 4 bits per value"
    assert QuantizerConfig(kind="lossless").bits is None and QuantizerConfig().bits is None


@pytest.mark.parametrize(
    ("bits", "factor", "expected"),
    [(4, 1, 4), (4, 0.5, 5), (4, 0.4, 6), (8, 0.5, 8), (4, 2, 4), (4, 2.4, 3), (3, 9, 3)],
)
def test_a_bound_times_a_factor_is_as_many_bits_as_keep_it(bits, factor, expected):
    """The largest codes are 3, 7, 15, 31, 63, 127; a bound is to them as 1 to the code."""
    assert QuantizerConfig(mode="bits", value=bits).times(factor).bits == expected


def test_a_fixed_rate_has_no_frames_that_could_carry_checksums():
    fixed = {"mode": "bits", "value": 4}
    assert "sends no frames" in message({"quantizer": fixed, "entropy": {"checksum": True}})
    policies = [{"name": "a", "quantizer": fixed}]
    assert "policies[0].quantizer.value 4" in message({"policies": policies, "entropy": {"checksum": True}})


@pytest.mark.parametrize("mode", ["abs", "rel", "rms", "range"])
@pytest.mark.parametrize("kind", ["error_bound", "stochastic", "lossless"])
def test_a_block_takes_effect_where_there_are_scales_that_differ(kind, mode):
    quantizer = QuantizerConfig(kind=kind, mode=mode, block=8192)
    assert quantizer.block_in_effect == (0 if mode == "abs" or kind == "lossless" else 8192)


def test_block_is_counted_in_the_kernels_chunks():
    assert CHUNK == frame_format.CHUNK


# ------------------------------------------------------------------ inside a DeepSpeed configuration

# Keys of DeepSpeed that resemble ours most, or that hold other mappings.
DEEPSPEED_DOCUMENT = {
    "train_batch_size": 8,
    "communication_data_type": "fp32",
    "seq_parallel_communication_data_type": "fp32",
    "compression_training": {"weight_quantization": {"shared_parameters": {}}},
    "comms_logger": {"enabled": True},
    "activation_checkpointing": {},
    "zero_optimization": {"stage": 2},
}


@pytest.mark.parametrize("value", ["ncclz", "my.yaml", {}, {"quantizer": {"value": 0.1}}, True, 3])
def test_our_section_is_found(value):
    assert find_in_deepspeed(DEEPSPEED_DOCUMENT | {"communication_compression": value}) == value


def test_absent_null_and_false_are_off():
    assert find_in_deepspeed(DEEPSPEED_DOCUMENT) is None
    assert find_in_deepspeed(DEEPSPEED_DOCUMENT | {"communication_compression": None}) is None
    assert find_in_deepspeed(DEEPSPEED_DOCUMENT | {"communication_compression": False}) is None


@pytest.mark.parametrize(
    "key",
    [
        "comunication_compression",
        "communication_compresion",
        "communication-compression",
        "CommunicationCompression",
        "comms_compression",
        "communications_compression",
    ],
)
def test_a_misspelt_key_is_an_error_also_beside_the_right_one(key):
    for document in (DEEPSPEED_DOCUMENT, DEEPSPEED_DOCUMENT | {"communication_compression": "ncclz"}):
        with pytest.raises(ConfigError, match=f"{key}: unknown key; did you mean 'communication_compression'"):
            find_in_deepspeed(document | {key: "ncclz"})


def test_a_misplaced_key_is_an_error():
    document = DEEPSPEED_DOCUMENT | {"zero_optimization": {"stage": 2, "communication_compression": "ncclz"}}
    with pytest.raises(ConfigError, match="zero_optimization.communication_compression; move it to the top level"):
        find_in_deepspeed(document)
    with pytest.raises(ConfigError, match="at a.b.communication_compression; move it"):
        find_in_deepspeed({"a": {"b": {"communication_compression": None}}})


def test_a_deepspeed_file_is_not_taken_for_one_of_ours():
    assert "this is a DeepSpeed configuration" in message(DEEPSPEED_DOCUMENT)
    assert "this is a DeepSpeed configuration" in message(DEEPSPEED[0])
    assert not is_deepspeed(SOME)


# ------------------------------------------------------------------ the files that ship


@pytest.mark.parametrize("file", OURS, ids=lambda f: f.name)
def test_our_files_are_valid(file):
    jsonschema = pytest.importorskip("jsonschema")
    Config.load(file)
    jsonschema.validate(read_document(file), json_schema())


@pytest.mark.parametrize("name", ["ncclz.yaml", "ncclz.json"])
def test_the_full_files_hold_every_key_at_its_default(name):
    document = read_document(CONFIGS / name)
    document.pop("$schema", None)
    keys = {f"{k}.{inner}" for k, v in document.items() if isinstance(v, dict) for inner in v} | {"roles", "policies"}
    assert keys == {key for key, *_ in settings()}
    assert Config.load(CONFIGS / name) == Config()


def test_the_tight_file_is_that():
    tight = Config.load(CONFIGS / "ncclz_tight.yaml").quantizer
    assert tight.mode == Config().quantizer.mode and tight.value < Config.load("ncclz:accurate").quantizer.value


def test_the_deepspeed_files_show_the_short_form_and_a_mapping():
    sources = [find_in_deepspeed(read_document(file)) for file in DEEPSPEED]
    assert all(isinstance(Config.load(source), Config) for source in sources)
    assert {type(source) for source in sources} == {str, dict}


@pytest.mark.processes
def test_deepspeed_itself_accepts_the_deepspeed_files():
    pytest.importorskip("deepspeed")
    code = (
        "import sys\n"
        "from deepspeed.runtime.config import DeepSpeedConfig\n"
        "for file in sys.argv[1:]:\n"
        "    config = DeepSpeedConfig(file)\n"
        "    print('stage', config.zero_optimization_stage, config.bfloat16_config.enabled, config.optimizer_name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, DEEPSPEED)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("stage ")]
    expected = [f"stage {re.search('zero([0-9])', file.name)[1]} {'bf16' in file.name} adamw" for file in DEEPSPEED]
    assert lines == expected


# ------------------------------------------------------------------ schema and documentation


@pytest.mark.skipif(
    tuple(map(int, pydantic.VERSION.split(".")[:2])) < (2, 10), reason="older pydantic words the same schema otherwise"
)
def test_the_committed_schema_is_the_models():
    assert json.loads((CONFIGS / "ncclz.schema.json").read_text()) == json_schema()


def test_the_schema_agrees_with_the_model():
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json_schema())
    jsonschema.Draft202012Validator.check_schema(validator.schema)
    for section, values in GOOD:
        assert validator.is_valid({section: values})
    # JSON Schema cannot say limits that depend on the mode or stand behind a unit, and takes 1e6 for an integer.
    beyond = [{"value": 10.001}, {"frame_bytes": "65MiB"}, {"block": 4096.0}, {"frame_bytes": 1e6}]
    for section, values in BAD:
        in_json = all(not isinstance(v, float) or math.isfinite(v) for v in values.values())
        if in_json and values not in beyond:
            assert not validator.is_valid({section: values}), values
    assert not validator.is_valid({"unknown": 1}) and not validator.is_valid({"quantizer": {"unknown": 1}})


def test_every_setting_is_described():
    for key, _, allowed, description in settings(of_elements=True):
        assert allowed and description.endswith("."), key


def test_the_reference_in_the_documentation_is_the_models():
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    table = text.split("<!-- settings -->\n")[1].split("\n<!-- end of settings -->")[0]
    assert table == settings_table(), "run `ncz schema --markdown` and paste it into docs/reference/configuration.md"


def test_the_errors_in_the_documentation_are_real(tmp_path):
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert message({"quantizer": {"bound_mode": "rms", "value": -1}}) in text
    with pytest.raises(ConfigError) as caught:
        find_in_deepspeed({"zero_optimization": {"communication_compression": "ncclz"}})
    assert str(caught.value) in text


def test_every_file_that_the_documentation_names_exists():
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    named = set(re.findall(r"`((?:ncclz|deepspeed_)[a-z0-9_.]*\.(?:yaml|json))`", text))
    assert named - {"ncclz.yaml"} and all((CONFIGS / name).is_file() for name in named)
    assert {file.name for file in CONFIGS.iterdir()} <= named
