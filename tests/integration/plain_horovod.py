"""Horovod's own documented behaviours, with or without ncz_plugins.horovod imported: the results must be the same.

usage: plain_horovod.py with|without

It is a program of its own as what runs scenarios imports ncz_plugins.
"""

import copy
import json
import os
import sys
import warnings
from pathlib import Path

import horovod.torch as hvd
import torch
from under_horovod import gradients, loss_of, new_model, own_values, sha256

if sys.argv[1] == "with":
    import ncz_plugins.horovod  # noqa: F401

DTYPES = (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64)
SIZE = 5001


def all_reduces() -> dict:
    results = {}
    for dtype in DTYPES:
        for op in ("Average", "Sum", "Min", "Max", "Product"):
            results[f"{op} of {dtype}"] = hvd.allreduce(own_values(SIZE, dtype=dtype), op=getattr(hvd, op))
    tensor = own_values(SIZE)
    results["scaled"] = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.3, postscale_factor=0.7)
    results["positional"] = hvd.allreduce(tensor, False, "positional", hvd.Compression.fp16)
    results["by keywords"] = hvd.allreduce(tensor=tensor, name="by keywords", compression=hvd.Compression.none)
    results["group by keywords"] = hvd.grouped_allreduce(tensors=[tensor], name="group by keywords", op=hvd.Sum)[0]
    results["group as fp16"] = hvd.grouped_allreduce([tensor, tensor[:7]], compression=hvd.Compression.fp16)[1]
    handle = hvd.allreduce_async(tensor, name="asynchronous")
    while not hvd.poll(handle):
        pass
    results["asynchronous"] = hvd.synchronize(handle)
    results["in place"] = hvd.allreduce_(tensor.clone(), op=hvd.Max)
    results["group in place"] = hvd.grouped_allreduce_([tensor.clone(), tensor[:9].clone()])[1]
    needs_gradient = own_values(SIZE).requires_grad_()
    (hvd.allreduce(needs_gradient) * tensor).sum().backward()
    results["gradient"] = needs_gradient.grad
    return results


def other_collectives() -> dict:
    rank, n = hvd.rank(), hvd.size()
    tensor = own_values((3 + rank, 5))
    gathered = hvd.allgather(tensor, name="uneven")
    parts, sizes = hvd.alltoall(own_values((2 * n + 1, 4)), splits=torch.tensor([2] * (n - 1) + [3], dtype=torch.int32))
    handle = hvd.sparse_allreduce_async(own_values((9, 4)).relu().to_sparse(1), name="sparse", op=hvd.Average)
    return {
        "allgather": gathered,
        "grouped allgather": hvd.grouped_allgather([tensor, tensor[:2]])[1],
        "broadcast": hvd.broadcast(own_values(SIZE), root_rank=n - 1),
        "broadcast in place": hvd.broadcast_(own_values(SIZE), root_rank=0),
        "alltoall": parts,
        "alltoall sizes": sizes,
        "reducescatter": hvd.reducescatter(own_values((7, 3)), op=hvd.Sum),
        "reducescatter as fp16": hvd.reducescatter(own_values((7, 3)), compression=hvd.Compression.fp16),
        "grouped reducescatter": hvd.grouped_reducescatter(tensors=[own_values((7, 3)), own_values((2, 3))])[1],
        "sparse": handle().coalesce().to_dense(),
        "object": torch.tensor(hvd.broadcast_object([rank, "of the first"], root_rank=0)[0]),
        "objects": torch.tensor(hvd.allgather_object(rank)),
    }


def train(**arguments):
    """Three steps; the model, its optimizer and the last gradients."""
    model = new_model()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = hvd.DistributedOptimizer(adam, named_parameters=model.named_parameters(), **arguments)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
    return model, optimizer, gradients(model)


def optimizers() -> dict:
    results = {}
    variants = {
        "none": {},
        "fp16": {"compression": hvd.Compression.fp16},
        "sum": {"op": hvd.Sum},
        "predivided": {"gradient_predivide_factor": 2.0},
        "groups": {"groups": 2, "compression": hvd.Compression.fp16},
    }
    for name, arguments in variants.items():
        model, optimizer, _ = train(**arguments)
        results[f"optimizer {name}"] = torch.cat([p.detach().view(-1) for p in model.parameters()])
    if hvd.rank() > 0:  # what the others lack is sent by the first
        optimizer.load_state_dict(copy.deepcopy(torch.optim.AdamW(model.parameters()).state_dict()))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    results["optimizer state"] = torch.cat([s["exp_avg"].view(-1) for s in optimizer.state.values()])
    return results


def process_set() -> dict:
    first = hvd.add_process_set([0])
    result = hvd.allreduce(own_values(SIZE), process_set=first) if first.included() else torch.zeros(1)
    hvd.remove_process_set(first)
    return {"process set": result}


def joined() -> dict:
    """The last rank has one batch more than the others."""
    results = [hvd.allreduce(own_values(SIZE), name="for all")]
    if hvd.rank() == hvd.size() - 1:
        results.append(hvd.allreduce(own_values(SIZE), name="for the last"))
    last = hvd.join()
    return {"reduced before the join": torch.cat(results), "last to join": torch.tensor(last)}


warnings.simplefilter("ignore")
hvd.init(process_sets="dynamic")
tensors = {**all_reduces(), **other_collectives(), **optimizers(), **process_set(), **joined()}
assert ("ncz_plugins" in sys.modules) == (sys.argv[1] == "with")
found = {name: sha256([tensor]) for name, tensor in tensors.items()}
Path(os.environ["NCZ_TEST_RESULTS"], f"rank{hvd.rank()}.json").write_text(json.dumps(found))
