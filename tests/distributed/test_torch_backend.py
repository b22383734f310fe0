"""The backend `ncz` as torch 2.14 and newer have it. What each test is about stands in `_workers/torch_backend.py`."""

import configparser
import os

import pytest
import torch
from processes import WORKERS, names, passed, results, run

from ncz_plugins.torch import private

pytestmark = pytest.mark.skipif(private.PythonBackend is None, reason="torch has no backends in Python before 2.14")


def installed(folder) -> dict[str, str]:
    """Variables with which Python finds the package's entry points, as if it were installed."""
    setup = configparser.ConfigParser()
    setup.read(WORKERS.parents[2] / "setup.cfg")
    metadata = folder / "ncz_plugins-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: ncz_plugins\nVersion: 0\n")
    groups = [f"[{name}]{lines}\n" for name, lines in setup["options.entry_points"].items()]
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(WORKERS), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch_backend")
    return run("torch_backend", 4, folder, imports="torch._dynamo", environment=installed(folder), seconds=240)


@pytest.mark.parametrize("name", names("torch_backend"))
def test_on_all_ranks(ranks, name):
    passed(ranks, name)


def test_all_checks_ran_and_all_ranks_ended_well(ranks):
    assert all(list(result) == names("torch_backend") for result in results(ranks))


ON_GPU = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.parametrize(
    ("backends", "device", "ours"),
    [
        ("ncz", "cpu", ["cpu", "cuda"]),
        ("cpu:ncz", "cpu", ["cpu"]),
        ("cpu:ncz,cuda:gloo", "cpu", ["cpu"]),
        ("cpu:gloo,cuda:ncz", "cpu", ["cuda"]),
        pytest.param("cpu:ncz,cuda:nccl", "cpu", ["cpu"], marks=ON_GPU),
        pytest.param("cpu:gloo,cuda:ncz", "cuda", ["cuda"], marks=ON_GPU),
    ],
)
def test_devices_have_their_backends(backends, device, ours, tmp_path):
    imports = "torch.distributed"  # nothing of ours
    outcome = results(
        run("torch_backend_names", 2, tmp_path, backends, device, imports=imports, environment=installed(tmp_path))
    )
    for each in outcome:
        assert each["ours"] == ours
        assert 0.01 < each["error"] < 0.3 if device in ours else each["error"] < 1e-6


def test_torch_debugs_it(tmp_path):
    """Torch then wraps backends, compares calls by their numbers, and lets go of the Python object."""
    environment = installed(tmp_path) | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    run_by = {"imports": "torch.distributed", "environment": environment}
    assert all(
        each["error"] > 0.01 for each in results(run("torch_backend_names", 2, tmp_path, "ncz", "cpu", **run_by))
    )
