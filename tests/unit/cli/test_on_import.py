"""What `ncz enable` has Python import at its start, from where it lies here."""

import os
import subprocess
import sys

from repository import ROOT

START = "import sys, ncz_plugins.cli.on_import as hook; assert 'torch' not in sys.modules; "


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", START + program],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "DS_ACCELERATOR": "cpu"} | coverage(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def coverage() -> dict[str, str]:
    """What has coverage.py measure this process too, if it measures."""
    return {name: value for name, value in os.environ.items() if name.startswith("COVERAGE")}


def test_torch_knows_the_name_of_the_backend():
    program = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('ncz', store=dist.HashStore(), rank=0, world_size=1); print(dist.get_backend())"
    )
    assert run(program) == "ncz\n"


def test_deepspeed_gets_the_plugin():
    program = "import deepspeed; print(sys.modules['ncz_plugins.deepspeed.engine'].warns_if_none_compresses)"
    assert run(program).endswith("False\n")


def test_where_the_plugin_fails_only_the_key_is_refused():
    program = """
import deepspeed.runtime.engine
from deepspeed.runtime.config import DeepSpeedConfig
hook.refuse_key(ImportError("as if uninstalled"))
DeepSpeedConfig({"train_batch_size": 1})
try:
    DeepSpeedConfig({"train_batch_size": 1, "communication_compression": "ncclz"})
except RuntimeError as error:
    print(error)
"""
    assert '"communication_compression" can\'t be honoured: as if uninstalled' in run(program)


def test_what_is_not_there_is_left_to_other_finders():
    program = "print(hook.AfterImport({'surely_not_there': None}).find_spec('surely_not_there'))"
    assert run(program) == "None\n"
