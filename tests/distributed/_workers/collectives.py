"""Every collective x dtype x size x schedule against the exact answer; leaves a digest of each result.

collectives.py [cpu | cuda [RANKS]]: where the tensors are, and how many ranks form a node.
"""

import sys

import torch
import torch.distributed as dist
from common import digest, finish, start, values

from ncz_plugins import Communicator

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALF_ULP = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
BOUND = 0.01

device = torch.device(*sys.argv[1:2] or ["cpu"])
hierarchy = int(sys.argv[2]) if sys.argv[2:] else "off"
rank, world_size = start(device)
# A prime number of elements last. A GPU that ranks share takes turns among them, so each frame takes long.
sizes, frames = ((0, 1, 20_011), ("32KiB",)) if device.type == "cuda" else ((0, 1, 7, 4099, 120_011), ("16KiB", "1MiB"))
outcomes = {}


def check(name: str, got: torch.Tensor, exact: torch.Tensor, addends: int = 1) -> None:
    """Within the bound, plus the rounding of the result to a short dtype."""
    if exact.numel():
        # A plain collective of a short dtype rounds after every addition, and is not ours to judge.
        slack = world_size * HALF_ULP[got.dtype] * exact.abs().max().item() * 2
        error = (got.double().cpu() - exact).abs().max().item()
        # Plain float32 sums round as well.
        assert error <= addends * BOUND + slack + 1e-5, f"{name}: error {error}"
    outcomes[name] = digest(got.cpu())


for schedule in ("ring", "direct"):
    for frame_bytes in frames:
        config = {
            "quantizer": {"mode": "abs", "value": BOUND},
            "transport": {"schedule": schedule, "frame_bytes": frame_bytes, "min_bytes": 0, "hierarchy": hierarchy},
        }
        with Communicator(config) as communicator:
            for dtype in DTYPES if frame_bytes == frames[0] else DTYPES[:1]:  # frames are cut alike for all
                for numel in sizes:
                    name = f"{dtype} {numel}"
                    mine = values(rank, numel, dtype).to(device)
                    everyone = [values(r, numel, dtype).double() for r in range(world_size)]

                    tensor = mine.clone()
                    assert communicator.all_reduce(tensor) is None
                    check(f"all_reduce {name}", tensor, sum(everyone), world_size)

                    tensor = mine.clone()
                    handle = communicator.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)
                    handle.wait()
                    check(f"average {name}", tensor, sum(everyone) / world_size)

                    whole = values(rank, numel * world_size, dtype).to(device)
                    exact = sum(values(r, numel * world_size, dtype).double() for r in range(world_size))
                    part = torch.empty(numel, dtype=dtype, device=device)
                    communicator.reduce_scatter_tensor(part, whole)
                    check(f"reduce_scatter {name}", part, exact[rank * numel :][:numel], world_size)

                    aliased = whole.clone()  # as ZeRO 3 does: the output is a part of the input
                    own = aliased[rank * numel :][:numel]
                    communicator.reduce_scatter_tensor(own, aliased)
                    assert torch.equal(own, part)

                    gathered = torch.empty(numel * world_size, dtype=dtype, device=device)
                    communicator.all_gather_into_tensor(gathered, mine)
                    check(f"all_gather {name}", gathered, torch.cat(everyone))

                    aliased = torch.zeros_like(gathered)  # the input is a part of the output
                    aliased[rank * numel :][:numel] = mine
                    communicator.all_gather_into_tensor(aliased, aliased[rank * numel :][:numel])
                    assert torch.equal(aliased, gathered)

                    for src in {0, world_size - 1}:
                        tensor = mine.clone()
                        communicator.broadcast(tensor, src)
                        check(f"broadcast from {src} {name}", tensor, everyone[src])
            total = communicator.stats.total
            assert (total.compressed_calls > 0) == (world_size > 1), total

config = {"quantizer": {"mode": "abs", "value": BOUND}, "guard": {"every": 1}}
with Communicator(config | {"transport": {"min_bytes": 0, "hierarchy": hierarchy}}) as communicator:
    whole = values(rank, 4096 * world_size).to(device)
    communicator.reduce_scatter_tensor(torch.empty(4096, device=device), whole, name="weight")
    findings = communicator.training.of_group(communicator.ranks).guard.findings
    assert all(each.relative_error < BOUND for each in findings) and (world_size == 1 or findings), findings

finish(outcomes)
