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


def test_torch_knows_the_backend_and_deepspeed_the_plugin_or_refuses_the_key():
    """In one process, as each takes seconds to start."""
    program = """
import deepspeed, torch.distributed as dist
assert hook.AfterImport({"surely_not_there": None}).find_spec("surely_not_there") is None
print(sys.modules["ncz_plugins.deepspeed.engine"].warns_if_none_compresses)
dist.init_process_group("ncz", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend())

from deepspeed.runtime.config import DeepSpeedConfig
hook.refuse_key(ImportError("as if uninstalled"))
DeepSpeedConfig({"train_batch_size": 1})
try:
    DeepSpeedConfig({"train_batch_size": 1, "communication_compression": "ncclz"})
except RuntimeError as error:
    print(error)
"""
    *_, warns, backend, refused = run(program).splitlines()
    assert (warns, backend) == ("False", "ncz")
    assert '"communication_compression" can\'t be honoured: as if uninstalled' in refused
