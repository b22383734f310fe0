"""`ncz enable` in a Python environment of its own: what scripts that know nothing of us do there."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from launch import launch
from repository import FORKED_RANKS, ROOT, STARTED

from ncz_plugins.cli import enable as enabling
from ncz_plugins.cli.enable import HOOK
from ncz_plugins.cli.perf.launch import free_port

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("user_script.py")
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
KEY = {"communication_compression": {"transport": {"min_bytes": 0}}}


class Environment:
    """A virtual environment that has all packages of this one, but not what .pth files there do."""

    def __init__(self, folder: Path):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
        self.folder = folder
        self.python = folder / "bin" / "python"
        [self.site_packages] = (folder / "lib").glob("python*/site-packages")
        others = Path(sysconfig.get_path("purelib"))
        (self.site_packages / "others.pth").write_text(f"{others}\n")
        for file in others.glob("*_coverage.pth"):  # so that coverage.py, if it runs, measures these processes too
            (self.site_packages / file.name).write_text(file.read_text())

    def run(self, *arguments: object, installed: bool = True, status: int = 0) -> str:
        """What Python prints; `installed` is whether it finds ncz_plugins."""
        paths = os.pathsep.join(map(str, [STARTED, ROOT] if installed else [STARTED]))
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": paths}
        done = subprocess.run(
            [self.python, *map(str, arguments)],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    def train(self, folder: Path, config: dict) -> list[dict]:
        """What each rank of the script saved."""
        file = folder / "ds.json"
        folder.mkdir()
        file.write_text(json.dumps(config))
        forks = [FORKED_RANKS, "deepspeed", "torch", 2, free_port(), SCRIPT, "--deepspeed_config", file]
        return launch([str(self.python), *map(str, forks)], folder, timeout=120).ranks


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "environment")


def files(environment) -> set[str]:
    """What `ncz enable` left, without what says which Python compiled it."""
    everything = environment.site_packages.rglob("*ncz_plugins*")
    return {re.sub(r"\.cpython-\d+", "", file.name) for file in everything}


def test_every_script_honours_the_key_and_other_scripts_are_left_alone(environment, tmp_path):
    said = environment.run("-m", "ncz_plugins", "enable")
    assert "Every script" in said and str(environment.site_packages) in said
    assert environment.run("-m", "ncz_plugins", "enable") == said  # twice is once
    assert files(environment) == {
        "ncz_plugins_on_import.pth",
        "_ncz_plugins_on_import.py",
        "_ncz_plugins_on_import.pyc",
    }
    [path] = json.loads(environment.run("-m", "ncz_plugins", "info", "--json"))["enabled"]
    assert Path(path).parent == environment.site_packages

    for rank in environment.train(tmp_path / "training", CONFIG | KEY):
        total = rank["stats"]["total"]
        assert total["compressed_calls"] == total["calls"] == len(rank["losses"])

    # What needs no DeepSpeed does not even import us, and to ask whether DeepSpeed is there changes nothing.
    look = "import sys, importlib.util as u; assert u.find_spec('deepspeed'); print('ncz_plugins' in sys.modules)"
    look += "; import deepspeed; print(sys.modules['ncz_plugins.deepspeed.engine'].warns_if_none_compresses)"
    assert re.search(r"^False\n(.*\n)*False\n$", environment.run("-c", look))

    program = (
        "import sys, torch.distributed as dist; print('ncz_plugins' in sys.modules)\n"
        "dist.init_process_group('ncz', store=dist.HashStore(), rank=0, world_size=1); print(dist.get_backend())"
    )
    assert environment.run("-c", program) == "False\nncz\n"

    assert "removed" in environment.run("-m", "ncz_plugins", "disable")
    assert files(environment) == set()
    assert environment.run("-m", "ncz_plugins", "disable") == "was not enabled\n"
    assert environment.run("-c", "import sys; print([m for m in sys.modules if 'ncz' in m])") == "[]\n"


def test_once_ncz_plugins_is_uninstalled_only_the_key_is_refused(environment):
    environment.run("-m", "ncz_plugins", "enable")
    assert environment.run("-c", "print(1)", installed=False) == "1\n"
    program = f"""
import traceback, deepspeed, torch.distributed as dist
deepspeed.DeepSpeedConfig({{"train_batch_size": 1}})
for refused in (
    lambda: deepspeed.DeepSpeedConfig({{"train_batch_size": 1, **{KEY!r}}}),
    lambda: dist.init_process_group("ncz", store=dist.HashStore(), rank=0, world_size=1),
):
    try:
        refused()
    except Exception:
        traceback.print_exc()
    print("---", flush=True)
"""
    key, backend, _ = environment.run("-c", program, installed=False).split("---")
    assert "can't be honoured: No module named 'ncz_plugins'" in key and "ncz_plugins_on_import" in key
    assert "\"ncz\" can't be made: No module named 'ncz_plugins'" in backend and "ncz_plugins_on_import" in backend


def test_a_deepspeed_that_is_laid_out_differently_is_left_as_it_is(environment, tmp_path):
    (tmp_path / "hook.py").write_text(HOOK.read_text())
    program = f"""
import sys, deepspeed
sys.path.insert(0, {str(tmp_path)!r})
from deepspeed.runtime.engine import DeepSpeedEngine
del DeepSpeedEngine._load_checkpoint
before = dict(vars(DeepSpeedEngine))
import hook
hook.import_plugin()
assert vars(DeepSpeedEngine) == before
deepspeed.DeepSpeedConfig({{"train_batch_size": 1}})
print("trains")
deepspeed.DeepSpeedConfig({{"train_batch_size": 1, **{KEY!r}}})
"""
    said = environment.run("-c", program, status=1)
    assert "trains\n" in said and "has no DeepSpeedEngine._load_checkpoint, which ncz_plugins hooks into" in said


def test_a_folder_of_the_user_is_made(monkeypatch, tmp_path):
    folder = tmp_path / "lib" / "site-packages"
    monkeypatch.setattr(enabling, "_folders", lambda: [Path("/proc/none"), folder])
    enabling.enable(None)
    assert enabling.enabled() == [folder / enabling.PTH]


def test_a_folder_that_can_not_be_written_to_is_named(environment):
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    environment.site_packages.chmod(0o555)
    said = environment.run("-m", "ncz_plugins", "enable", status=2)
    assert str(environment.site_packages) in said and "ncz_plugins.deepspeed.launch" in said
