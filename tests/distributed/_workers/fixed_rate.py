"""What a communicator does at a fixed rate, with tensors on one kind of device.

fixed_rate.py cpu | cuda
"""

import torch
import torch.distributed as dist
from common import digest, finish
from on_device import NUMEL, device, everyone, exact, mine, rank, world_size

from ncz_plugins import Communicator, UnsupportedError

BITS = {"mode": "bits", "value": 4}
SIZES = {"transport": {"min_bytes": "128KiB"}}  # what GPUs share is faster than any network, and would be measured

on_gpu = device.type == "cuda"
outcomes = {}


def near(got: torch.Tensor, wanted: torch.Tensor = exact) -> bool:
    return (got.cpu().float() - wanted).norm() < 0.4 * wanted.norm()


# The same bits as on the CPU, of every collective.
for case, quantizer in {
    "nearest": {},
    "8 bits": {"value": 8},
    "at random": {"kind": "stochastic", "seed": 7},
    "with error feedback": {"error_feedback": True},
}.items():
    digests = []
    for where in (device, torch.device("cpu")):
        with Communicator(SIZES | {"quantizer": BITS | quantizer}) as communicator:
            results = []
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                tensor = mine(where).to(dtype)
                communicator.all_reduce(tensor, dist.ReduceOp.AVG, name=f"body {dtype}")
                assert near(tensor, exact / world_size)
                results.append(tensor)
            if not quantizer.get("error_feedback"):
                part = torch.empty(NUMEL, device=where)
                communicator.reduce_scatter_tensor(part, torch.cat([mine(where) * (i + 1) for i in range(world_size)]))
                whole = torch.empty(world_size * NUMEL, device=where)
                communicator.all_gather_into_tensor(whole, part)
                assert all(near(each / (i + 1)) for i, each in enumerate(whole.chunk(world_size)))
                sent = mine(where)
                communicator.broadcast(sent, world_size - 1)
                assert near(sent, everyone[-1])
                results += [whole, sent]
            residuals = communicator.training.residuals.by_name.values()
            digests.append([digest(each.cpu()) for each in (*results, *residuals)])
            total = communicator.stats.total
            assert total.compressed_calls == len(results) + (len(results) > 3) and not total.bypasses, total
    assert digests[0] == digests[1], case
    outcomes[case] = digests[0][: len(results)]

# What is not finite stays in its block of 256.
with Communicator(SIZES | {"quantizer": BITS}) as communicator:
    tensor = mine()
    if rank == world_size - 1:
        tensor[77_777] = float("nan")
    communicator.all_reduce(tensor)
    assert tensor[77_777].isnan() and tensor.isnan().sum() == 256
    assert communicator.stats.total.compressed_calls == 1

# Both rates in one communicator, and plain calls between them, take effect in the order in which they were made.
fine = {"name": "fine", "quantizer": {"mode": "rms", "value": 0.01}}
with Communicator(SIZES | {"quantizer": BITS, "policies": [fine]}) as communicator:
    tensor = mine()
    few = torch.ones(3, device=device)
    names = ("coarse", "fine", None, "coarse", "fine")
    handles = []
    for name in names:
        handles.append(communicator.all_reduce(few if name is None else tensor, async_op=True, name=name))
        if on_gpu:
            handles[-1].wait()  # as NCCL's own calls need it where they share a tensor
    for handle in handles:
        handle.wait()
    assert near(tensor / world_size**3) and (few == world_size).all()
    total = communicator.stats.total
    assert (total.compressed_calls, total.bypasses) == (4, {"too small": 1}), total

# Sums are verified where that is asked for.
with Communicator(SIZES | {"quantizer": BITS, "guard": {"every": 1, "on_alarm": "stop"}}) as communicator:
    for _ in range(2):
        communicator.all_reduce(mine(), name="body")
        communicator.end_step()

if on_gpu:
    with Communicator(SIZES | {"quantizer": BITS}) as communicator:
        eager = mine()
        communicator.all_reduce(eager)

        # The host waits for nothing, and the tensor is what the caller's stream makes of it, however late that is.
        tensor = torch.zeros(NUMEL, device=device)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
        tensor.copy_(everyone[rank], non_blocking=True)
        handle = communicator.all_reduce(tensor, async_op=True)
        assert not handle.is_completed()
        handle.wait()
        twice = 2 * tensor
        assert digest(tensor.cpu()) == digest(eager.cpu()) and torch.equal(twice.cpu(), 2 * tensor.cpu())
        assert handle.is_completed() and handle.is_success() and handle.exception() is None

        # A CUDA graph repeats it, with what is in the tensor then.
        static = mine()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            communicator.all_reduce(static)
            twice = 2 * static
        for factor in (1, 3):
            static.copy_(everyone[rank] * factor)
            graph.replay()
            expected = mine() * factor
            communicator.all_reduce(expected)
            assert digest(static.cpu()) == digest(expected.cpu())
            assert torch.equal(twice.cpu(), 2 * static.cpu())
        del graph

    # What a graph could not repeat is refused by name.
    for config, problem in (
        ({}, "sizes that follow from the data"),
        ({"quantizer": BITS | {"kind": "stochastic"}}, "the same numbers in every replay"),
        ({"quantizer": BITS | {"error_feedback": True}}, "error feedback"),
    ):
        with Communicator(SIZES | config) as communicator:
            tensor = mine()
            communicator.all_reduce(tensor, name="body")
            graph, caught = torch.cuda.CUDAGraph(), None
            with torch.cuda.graph(graph):
                try:
                    communicator.all_reduce(tensor, name="body")
                except UnsupportedError as error:
                    caught = str(error)
            assert caught and problem in caught, caught

finish(outcomes)
