"""What a communicator does with tensors on one kind of device, besides the numbers that collectives.py checks.

devices.py cpu | cuda
"""

import torch
import torch.distributed as dist
from common import digest, finish
from on_device import NUMEL, device, everyone, exact, mine, rank, world_size

from ncz_plugins import Communicator

FINE = {"mode": "rms", "value": 0.01}
SIZES = {"transport": {"min_bytes": "128KiB"}}  # what GPUs share is faster than any network, and would be measured

outcomes = {}


def near(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (got.cpu() - wanted).abs().max().item() < 0.05 * world_size**2


# The same bits as on the CPU, with all that decides about them.
for case, config in {
    "fixed": {"entropy": {"coder": "fixed"}},
    "auto": {},
    "rans with checksums": {"entropy": {"coder": "rans", "checksum": True}},
    "at random": {"quantizer": {"kind": "stochastic", "mode": "abs", "value": 0.02, "seed": 7}},
    "with error feedback": {"quantizer": FINE | {"error_feedback": True}},
}.items():
    digests = []
    for where in (device, torch.device("cpu")):
        with Communicator(SIZES | config) as communicator:
            for _ in range(2):
                tensor = mine(where)
                communicator.all_reduce(tensor, name="body")
            residuals = communicator.training.residuals.by_name.values()
            digests.append([digest(each.cpu()) for each in (tensor, *residuals)])
            assert communicator.stats.total.compressed_calls == 2, communicator.stats.total
    assert digests[0] == digests[1], case
    outcomes[case] = digests[0][0]

# NaN and infinity come through, and the next call is compressed again.
with Communicator(SIZES) as communicator:
    for poison in (float("nan"), float("inf")):
        tensor = mine()
        if rank == world_size - 1:
            tensor[77_777] = poison
        communicator.all_reduce(tensor)
        assert not tensor[77_777].isfinite() and tensor.isfinite().sum() == NUMEL - 1
    tensor = mine()
    communicator.all_reduce(tensor)
    total = communicator.stats.total
    assert total.bypasses == {"non-finite": 2} and total.compressed_calls == 1, total

# Sums are verified where that is asked for.
with Communicator(SIZES | {"guard": {"every": 1, "on_alarm": "stop"}}) as communicator:
    for _ in range(2):
        tensor = mine()
        communicator.all_reduce(tensor, name="body")
        communicator.end_step()

# Handles: many at once, waited for in any order.
with Communicator(SIZES | {"quantizer": FINE}) as communicator:
    tensors = [mine() * (i + 1) for i in range(6)]
    handles = [communicator.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i in reversed(range(6)):
        assert handles[i].wait() and near(tensors[i] / (i + 1), exact)

if device.type == "cuda":
    # Where nothing else is said, the first call measures what connects the GPUs, and calls go on as usual.
    with Communicator({"quantizer": FINE}) as communicator:
        for _ in range(2):
            tensor = mine()
            communicator.all_reduce(tensor)
            assert near(tensor, exact)
        total = communicator.stats.total
        assert total.calls == 2 and total.compressed_calls + total.bypasses.get("too small", 0) == 2, total

    side = torch.cuda.Stream()
    some_time = 200_000_000  # cycles: a tenth of a second

    # The tensor is what the caller's stream makes of it, however late that is.
    with Communicator(SIZES | {"quantizer": FINE}) as communicator, torch.cuda.stream(side):
        tensor = torch.zeros(NUMEL, device=device)
        torch.cuda._sleep(some_time)
        tensor.copy_(everyone[rank])
        communicator.all_reduce(tensor)
        assert near(tensor, exact)

# Making and closing some leaves the device to others.
for _ in range(3):
    with Communicator(SIZES) as communicator:
        communicator.all_reduce(mine())
plain = mine()
dist.all_reduce(plain)
torch.testing.assert_close(plain.cpu(), exact)
finish(outcomes)
