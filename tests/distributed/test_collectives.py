"""Every collective x dtype x size x schedule: within the bound of the exact answer, and the same bits on every rank."""

import pytest
import torch
import torch.distributed as dist
from on_rank import device, digest, rank, same_on_all_ranks, values, world_size
from scenarios import ranks

from ncz_plugins import Communicator

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALF_ULP = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
BOUND = 0.01
ABS = {"mode": "abs", "value": BOUND}
HIERARCHY = 2 if world_size == 4 else "off"  # four ranks are two nodes
# Prime numbers of elements last. A GPU that ranks share takes turns among them, so each frame takes long.
ON_GPU = device.type == "cuda"
FEW = (0, 1, 20_011)
SIZES, FRAMES = (FEW, ("32KiB",)) if ON_GPU else ((0, 1, 7, 4099, 120_011), ("16KiB", "1MiB"))


def within_bound(got: torch.Tensor, exact: torch.Tensor, addends: int = 1) -> None:
    """Within the bound, plus the rounding of the result to a short dtype."""
    if exact.numel():
        # A plain collective of a short dtype rounds after every addition, and is not ours to judge.
        slack = world_size * HALF_ULP[got.dtype] * exact.abs().max().item() * 2
        error = (got.double().cpu() - exact).abs().max().item()
        # Plain float32 sums round as well.
        assert error <= addends * BOUND + slack + 1e-5, f"error {error}"


@ranks(1, 2, 3, 4, gpu=True)
@pytest.mark.parametrize("schedule", ["ring", "direct"])
def test_every_collective(group, schedule):
    for frame_bytes in FRAMES:
        collectives(group, {"schedule": schedule, "frame_bytes": frame_bytes, "min_bytes": 0, "hierarchy": HIERARCHY})


@ranks(1, 2, 3, 4, 5)
def test_every_collective_by_halving(group):
    for hierarchy in sorted({"off", HIERARCHY}, key=str):
        collectives(group, {"schedule": "halving", "frame_bytes": FRAMES[0], "min_bytes": 0, "hierarchy": hierarchy})


def collectives(group, transport: dict) -> None:
    digests = []  # of what all ranks should have alike

    def check(got: torch.Tensor, exact: torch.Tensor, addends: int = 1) -> None:
        within_bound(got, exact, addends)
        digests.append(digest(got.cpu()))

    with Communicator({"quantizer": ABS, "transport": transport}, group) as communicator:
        for dtype in DTYPES if transport["frame_bytes"] == FRAMES[0] else DTYPES[:1]:  # frames are cut alike for all
            for numel in SIZES if dtype == torch.float32 else FEW:
                mine = values(rank, numel, dtype).to(device)
                everyone = [values(r, numel, dtype).double() for r in range(world_size)]

                tensor = mine.clone()
                assert communicator.all_reduce(tensor) is None
                check(tensor, sum(everyone), world_size)

                tensor = mine.clone()
                handle = communicator.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)
                handle.wait()
                check(tensor, sum(everyone) / world_size)

                whole = values(rank, numel * world_size, dtype).to(device)
                exact = sum(values(r, numel * world_size, dtype).double() for r in range(world_size))
                part = torch.empty(numel, dtype=dtype, device=device)
                communicator.reduce_scatter_single(part, whole)
                within_bound(part, exact[rank * numel :][:numel], world_size)

                aliased = whole.clone()  # as ZeRO 3 does: the output is a part of the input
                own = aliased[rank * numel :][:numel]
                communicator.reduce_scatter_single(own, aliased)
                assert torch.equal(own, part)

                gathered = torch.empty(numel * world_size, dtype=dtype, device=device)
                communicator.all_gather_single(gathered, mine)
                check(gathered, torch.cat(everyone))

                aliased = torch.zeros_like(gathered)  # the input is a part of the output
                aliased[rank * numel :][:numel] = mine
                communicator.all_gather_single(aliased, aliased[rank * numel :][:numel])
                assert torch.equal(aliased, gathered)

                for src in {0, world_size - 1}:
                    tensor = mine.clone()
                    communicator.broadcast(tensor, src)
                    check(tensor, everyone[src])
        total = communicator.stats.total
        assert (total.compressed_calls > 0) == (world_size > 1), total
    same_on_all_ranks(digests, group)


@ranks(2, gpu=True)
def test_calls_on_the_same_tensor_have_the_bits_of_those_on_others(group):
    """On GPUs their launches are replayed, with other values and random numbers; at once or on the other thread."""
    config = {"quantizer": {"kind": "stochastic", "mode": "rms", "value": 0.5}, "transport": {"min_bytes": 0}}
    with Communicator(config, group) as communicator, Communicator(config, group) as other:
        tensor, kept = torch.empty(50_003, device=device), []
        for call in range(1, 15):
            tensor.copy_(values(rank, tensor.numel()).to(device) * call)
            kept.append(tensor.clone())  # so that no address comes again
            handle = communicator.all_reduce(tensor, async_op=call % 2 == 0)
            if handle is not None:
                handle.wait()
            other.all_reduce(kept[-1])
            assert digest(tensor.cpu()) == digest(kept[-1].cpu())
        assert (communicator.stats.total.replayed_calls >= 4) == ON_GPU, communicator.stats.total
        assert other.stats.total.replayed_calls == 0, other.stats.total


@ranks(1, 2, 3, 4, gpu=True)
def test_the_guard_verifies_a_reduce_scatter(group):
    config = {"quantizer": ABS, "guard": {"every": 1}, "transport": {"min_bytes": 0, "hierarchy": HIERARCHY}}
    with Communicator(config, group) as communicator:
        whole = values(rank, 4096 * world_size).to(device)
        communicator.reduce_scatter_single(torch.empty(4096, device=device), whole, name="weight")
        findings = communicator.training.of_group(communicator.ranks).guard.findings
        assert all(each.relative_error < BOUND for each in findings) and (world_size == 1 or findings), findings
