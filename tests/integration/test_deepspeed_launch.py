"""A training script that does not import the plugin: without it, with it but switched off, and compressed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import deepspeed, deepspeed_ranks, launch, torchrun
from repository import FORKED_RANKS, ROOT
from scenarios import INITIALIZE

from ncz_plugins.cli.perf.launch import free_port

PLUGIN = "ncz_plugins.deepspeed.launch"
FILE_OF_PLUGIN = ROOT / "ncz_plugins" / "deepspeed" / "launch.py"
MODULES = f"deepspeed,{INITIALIZE},torch._dynamo"  # what training imports, without us
SCRIPT = Path(__file__).with_name("user_script.py")
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
REPORT_EVERY = 2
COMPRESSED = {
    **CONFIG,
    "communication_compression": {"transport": {"min_bytes": 0}, "statistics": {"report_every": REPORT_EVERY}},
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """The paths of both configurations, by name."""
    folder = tmp_path_factory.mktemp("configs")
    paths = {"off": folder / "off.json", "on": folder / "on.json"}
    paths["off"].write_text(json.dumps(CONFIG))
    paths["on"].write_text(json.dumps(COMPRESSED))
    return paths


def arguments(config) -> list:
    return ["--deepspeed_config", config, "--other", "a b", "-x"]


UNDER_TORCHRUN = {"LOCAL_SIZE": "2"}  # which torchrun does not set, and DeepSpeed asks for


# In forks, which need no launcher: what launchers pass on is that of `compressed` and `test_under_torchrun`.
@pytest.fixture(scope="module")
def without_plugin(configs, tmp_path_factory):
    forks = [FORKED_RANKS, MODULES, "torch", 2, free_port(), SCRIPT, *arguments(configs["off"])]
    return launch([sys.executable, *map(str, forks)], tmp_path_factory.mktemp("without_plugin"), timeout=120)


@pytest.fixture(scope="module")
def switched_off(configs, tmp_path_factory):
    command = deepspeed_ranks(FILE_OF_PLUGIN, SCRIPT, *arguments(configs["off"]))
    return launch(command, tmp_path_factory.mktemp("switched_off"), timeout=120)


@pytest.fixture(scope="module")
def compressed(configs, tmp_path_factory):
    command = deepspeed("--module", PLUGIN, SCRIPT, *arguments(configs["on"]))
    return launch(command, tmp_path_factory.mktemp("compressed"), timeout=120)


def announcements(output: str) -> list[str]:
    return re.findall(r"^ncz_plugins \S+: gradient reductions are compressed .*$", output, re.MULTILINE)


@pytest.mark.slow
class TestWithoutTheKey:
    def test_the_script_ran_as_meant(self, without_plugin, switched_off):
        assert [rank["plugin_imported"] for rank in without_plugin.ranks] == [False, False]
        assert [rank["plugin_imported"] for rank in switched_off.ranks] == [True, True]

    def test_nothing_is_compressed_and_that_is_said_at_the_end(self, without_plugin, switched_off):
        assert [rank["stats"] for rank in switched_off.ranks] == [None, None]
        (line,) = re.findall("^ncz_plugins.*", switched_off.output, re.MULTILINE)
        assert "nothing was compressed" in line and '"communication_compression": "ncclz"' in line
        assert "ncz_plugins" not in without_plugin.output

    def test_the_training_is_the_same_to_the_bit(self, without_plugin, switched_off):
        for plain, off in zip(without_plugin.ranks, switched_off.ranks):
            assert off["losses"] == plain["losses"]
            assert off["sha256"] == plain["sha256"]


@pytest.mark.slow
class TestThroughTheModule:
    def test_the_script_finds_itself_as_if_started_directly(self, without_plugin, switched_off):
        for plain, off in zip(without_plugin.ranks, switched_off.ranks):
            assert off["name"] == "__main__"
            for what in ("name", "file", "main", "path", "argv"):
                assert off[what] == plain[what]

    def test_gradients_are_compressed(self, compressed, switched_off):
        for on, off in zip(compressed.ranks, switched_off.ranks):
            total = on["stats"]["total"]
            assert total["compressed_calls"] == total["calls"] == len(on["losses"])
            assert total["ratio"] > 2
            assert on["losses"] != off["losses"]
            assert on["losses"] == pytest.approx(off["losses"], rel=0.05)
        assert len({rank["sha256"] for rank in compressed.ranks}) == 1

    def test_one_line_on_one_rank_says_what_is_active(self, compressed):
        (line,) = announcements(compressed.output)
        assert "ZeRO 2" in line and "2 ranks" in line and "rms:0.375" in line

    def test_another_says_after_the_first_steps_what_share_is_compressed(self, compressed):
        (line,) = re.findall("^ncz_plugins: steps 1 to 3: .*", compressed.output, re.MULTILINE)
        assert "100% of the bytes went compressed, ratio " in line and "plain" not in line

    def test_reports_come_as_often_as_asked(self, compressed):
        reported = re.findall(r"^ncz_plugins: step (\d+): .* ratio ([\d.]+)", compressed.output, re.MULTILINE)
        steps = compressed.ranks[0]["stats"]["steps"]
        asked = [step for step in range(1, len(steps) + 1) if step % REPORT_EVERY == 0]
        assert reported == [(str(step), f"{steps[step - 1]['ratio']:.2f}") for step in asked]

    def test_one_rank_is_told_that_nothing_is_compressed(self, configs, tmp_path):
        command = deepspeed_ranks(SCRIPT, *arguments(configs["on"]), ranks=1)
        outcome = launch(command, tmp_path, timeout=120)
        assert "nothing is compressed, as one rank has nothing to send (ZeRO 2)" in outcome.output
        assert "ncz_plugins: steps 1 to 3: " in outcome.output
        assert outcome.ranks[0]["stats"]["total"]["compressed_calls"] == 0

    def test_under_torchrun(self, configs, compressed, without_plugin, tmp_path):
        command = torchrun("--module", PLUGIN, SCRIPT, *arguments(configs["on"]))
        outcome = launch(command, tmp_path, timeout=120, environment=UNDER_TORCHRUN)
        assert [rank["sha256"] for rank in outcome.ranks] == [rank["sha256"] for rank in compressed.ranks]
        for rank, plain in zip(outcome.ranks, without_plugin.ranks):
            # Python ran the module, and the script can't tell.
            for what in ("name", "file", "main", "path"):
                assert rank[what] == plain[what], what
            assert rank["argv"] == [str(SCRIPT), *map(str, arguments(configs["on"]))]
            assert rank["stats"]["total"]["compressed_calls"] == len(rank["losses"])
        assert len(announcements(outcome.output)) == 1


@pytest.mark.parametrize("script", ["nowhere/train.py", None])
def test_a_script_that_is_not_there_is_named_without_a_traceback(script, tmp_path):
    command = deepspeed_ranks(FILE_OF_PLUGIN, "--local_rank=0", *([script] if script else []), ranks=1)
    outcome = launch(command, tmp_path, timeout=60, fails=True)
    assert "usage: deepspeed [launcher options] --module ncz_plugins.deepspeed.launch" in outcome.output
    assert "Traceback" not in outcome.output
    if script:
        assert f"{script}: no such file" in outcome.output


def test_without_deepspeed_the_error_says_what_to_install():
    program = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "deepspeed":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import ncz_plugins
print("ncz_plugins itself is there", flush=True)
import ncz_plugins.deepspeed
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ncz_plugins itself is there" in done.stdout
    assert done.stderr.splitlines()[-1] == (
        "ImportError: ncz_plugins.deepspeed needs DeepSpeed: pip install 'ncz_plugins[deepspeed]'"
    )
