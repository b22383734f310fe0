"""Gradients on each kind of device under Horovod: the bits of the CPU, whatever Horovod was built for."""

import pytest
import torch
from launch import WORKERS, horovod_ranks, launch, needs_horovod

pytestmark = [pytest.mark.slow, needs_horovod]
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
)


@pytest.fixture(scope="module", params=["cpu", GPU])
def ranks(request, tmp_path_factory):
    command = horovod_ranks(WORKERS / "horovod_devices.py", request.param)
    outcome = launch(command, tmp_path_factory.mktemp("devices"), timeout=150)
    assert len(outcome.ranks) == 2
    return outcome.ranks


def test_sums_have_the_bits_of_the_cpu(ranks):
    for name, (there, on_cpu) in ranks[0]["same"].items():
        assert there == on_cpu, name
        assert ranks[1]["same"][name] == [there, on_cpu], name


def test_what_goes_plain_is_horovods_own(ranks):
    assert [rank["exact"] for rank in ranks] == [[True, True]] * 2


def test_replicas_stay_identical(ranks):
    first, second = (rank["trained"] for rank in ranks)
    assert first["sha256"] == second["sha256"] and first["compressed_calls"] >= 3
    assert first["losses"] != second["losses"]  # of batches of their own
