"""Gradients on one kind of device under Horovod: horovod_devices.py cpu | cuda"""

import os
import sys

import horovod.torch as hvd
import torch
from horovod_common import loss_of, new_model, own_values, save, sha256, wrapped

import ncz_plugins.horovod as ncz
from ncz_plugins.horovod import NCZ

SIZES = (300_007, 5, 70_001)
KINDS = {
    "default": {},
    "auto coder, fine": {"quantizer": {"mode": "rms", "value": 0.01}},
    "at random": {"quantizer": {"kind": "stochastic", "mode": "abs", "value": 0.02}},
    "lossless": {"quantizer": {"kind": "lossless"}},
    "a fixed rate": {"quantizer": {"mode": "bits", "value": 4}},
    "ring": {"transport": {"schedule": "ring"}},
}

hvd.init()
device = torch.device(sys.argv[1])
if device.type == "cuda":
    torch.cuda.set_device(0)
    os.environ["NCCL_HOSTID"] = f"host-{hvd.rank()}"  # all ranks share one card, which NCCL refuses within a host


def sums(where: torch.device, settings: dict) -> str:
    """Of tensors that are computed late, some compressed and some plain, by what they are to the bit."""
    compressor = NCZ(**settings)
    handles = []
    for number, size in enumerate(SIZES):
        tensor = own_values(size, number).to(where)
        if where.type == "cuda":
            torch.cuda._sleep(50_000_000)  # cycles, on the stream that computes what follows
        handles.append(ncz.allreduce_async(2 * tensor, name=f"{number}", compression=compressor))
    results = [hvd.synchronize(handle) + 1 for handle in handles]  # on the program's stream, at once
    assert all(each.device.type == where.type for each in results)
    total = compressor.stats.total
    assert total.compressed_calls >= 1, total
    return sha256([each.cpu() for each in results])


def exact(where: torch.device) -> list[bool]:
    """What goes plain by its op, as Horovod does it."""
    cases = [(own_values(500).to(where), hvd.Min), (own_values(500, dtype=torch.int64).to(where), hvd.Sum)]
    return [
        torch.equal(ncz.allreduce(tensor, op=op, compression=NCZ()).cpu(), hvd.allreduce(tensor.cpu(), op=op))
        for tensor, op in cases
    ]


def trained() -> dict:
    """Some steps of an optimizer: whether replicas are the same, and gradients were compressed."""
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
    return {
        "sha256": sha256([parameter.detach().cpu() for parameter in model.parameters()]),
        "losses": losses,
        "compressed_calls": compressor.stats.total.compressed_calls,
    }


same = {name: (sums(device, settings), sums(torch.device("cpu"), settings)) for name, settings in KINDS.items()}
save({"same": same, "exact": exact(device), "trained": trained()})
