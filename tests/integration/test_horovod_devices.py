"""Gradients on each kind of device under Horovod: the bits of the CPU, whatever Horovod was built for."""

import pytest

pytest.importorskip("horovod")

import horovod.torch as hvd
import torch
from on_rank import device, of_all_ranks, same_on_all_ranks
from scenarios import HOROVOD, ranks
from under_horovod import loss_of, new_model, own_values, sha256, wrapped

import ncz_plugins.horovod as ncz
from ncz_plugins.horovod import NCZ

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SIZES = (300_007, 5, 70_001)
SETTINGS = {
    "default": {},
    "auto coder, fine": {"quantizer": {"mode": "rms", "value": 0.01}},
    "at random": {"quantizer": {"kind": "stochastic", "mode": "abs", "value": 0.02}},
    "lossless": {"quantizer": {"kind": "lossless"}},
    "a fixed rate": {"quantizer": {"mode": "bits", "value": 4}},
    "ring": {"transport": {"schedule": "ring"}},
}


def sums(where: torch.device, settings: dict) -> str:
    """A hash of the sums of tensors that are computed late. Some are compressed, some go plain."""
    compressor = NCZ(**settings)
    handles = []
    for number, size in enumerate(SIZES):
        tensor = own_values(size, number).to(where)
        if where.type == "cuda":
            torch.cuda._sleep(50_000_000)  # cycles, on the stream that computes what follows
        handles.append(ncz.allreduce_async(2 * tensor, name=f"{number}", compression=compressor))
    results = [hvd.synchronize(handle) + 1 for handle in handles]  # on the program's stream, at once
    assert all(each.device.type == where.type for each in results)
    assert compressor.stats.total.compressed_calls >= 1
    return sha256([each.cpu() for each in results])


@pytest.mark.parametrize("name", SETTINGS)
@ranks(2, gpu=True, **HOROVOD)
def test_sums_have_the_bits_of_the_cpu(group, name):
    found = sums(device, SETTINGS[name])
    assert found == sums(CPU, SETTINGS[name])
    same_on_all_ranks(found)


@ranks(2, gpu=True, **HOROVOD)
def test_what_goes_plain_is_horovods_own(group):
    for tensor, op in ((own_values(500), hvd.Min), (own_values(500, dtype=torch.int64), hvd.Sum)):
        ours = ncz.allreduce(tensor.to(device), op=op, compression=NCZ())
        assert torch.equal(ours.cpu(), hvd.allreduce(tensor, op=op))


@ranks(2, gpu=True, **HOROVOD)
def test_replicas_stay_identical(group):
    model = new_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model.to(device)
    compressor = NCZ(transport={"min_bytes": 0})
    optimizer = wrapped(model, compressor)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    same_on_all_ranks(sha256([parameter.detach().cpu() for parameter in model.parameters()]))
    first, second = of_all_ranks(losses)
    assert first != second  # of batches of their own
    assert compressor.stats.total.compressed_calls >= 3
