"""reduce: the bits of an all_reduce on one rank, and nothing changed on the others."""

import pytest
import torch
import torch.distributed as dist
from on_rank import device, raises, rank, same_on_all_ranks, values, world_size
from scenarios import ranks

from ncz_plugins import Communicator, MismatchError, UnsupportedError

BOUND = 0.01
ABS = {"mode": "abs", "value": BOUND}
SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HIERARCHY = 2 if world_size == 4 else "off"  # four ranks are two nodes
FEW = (1, 20_011)
SIZES = (0, 1, 7, 4099, 120_011) if device.type == "cpu" else FEW
last = world_size - 1


def pairs_of_calls(communicator, other, tensor, dst, op=SUM, **options):
    """A reduce of one communicator, and an all_reduce of the other one."""
    reduced, everywhere = tensor.clone(), tensor.clone()
    handle = communicator.reduce(reduced, dst, op, **options)
    if handle is not None:
        handle.wait()
    other.all_reduce(everywhere, op, **{key: value for key, value in options.items() if key != "async_op"})
    return reduced, everywhere


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


QUANTIZERS = pytest.mark.parametrize(
    "quantizer",
    [ABS, {"kind": "stochastic", "mode": "rms", "value": 0.5}, {"kind": "lossless"}, {"mode": "bits", "value": 4}],
    ids=["abs", "rms", "lossless", "bits"],
)


@ranks(1, 2, 3, 4, gpu=True)
@pytest.mark.parametrize("schedule", ["ring", "direct"])
@QUANTIZERS
def test_the_root_gets_the_bits_of_an_all_reduce(group, schedule, quantizer):
    roots_get_the_bits_of_an_all_reduce(group, schedule, quantizer)


@ranks(3, 4)
@QUANTIZERS
def test_so_it_does_by_halving(group, quantizer):
    roots_get_the_bits_of_an_all_reduce(group, "halving", quantizer)


def roots_get_the_bits_of_an_all_reduce(group, schedule: str, quantizer: dict) -> None:
    calls = [(dtype, numel) for dtype in DTYPES for numel in (SIZES if dtype == torch.float32 else FEW)]
    for frame_bytes, some in (("16KiB", calls), ("1MiB", calls[: len(SIZES)])):
        transport = {"schedule": schedule, "frame_bytes": frame_bytes, "min_bytes": 0, "hierarchy": HIERARCHY}
        config = {"quantizer": quantizer, "transport": transport}
        with Communicator(config, group) as communicator, Communicator(config, group) as other:
            for at, (dtype, numel) in enumerate(some):
                mine, dst = values(rank, numel, dtype).to(device), (0, last)[at % 2]
                op = AVG if at % 3 == 1 and "kind" not in quantizer else SUM
                got, wanted = pairs_of_calls(communicator, other, mine, dst, op, async_op=at % 2 == 1)
                assert same_bits(got, wanted if rank == dst else mine), (dtype, numel)
            total = communicator.stats.total
            assert total.compressed_calls == other.stats.total.compressed_calls
            assert (total.compressed_calls > 0) == (world_size > 1), total


@ranks(2, 3)
def test_error_feedback_loses_nothing_on_the_root(group):
    """The mean of many sums comes near to the exact sum, by a bound a tenth as wide as the values."""
    config = {"quantizer": {"mode": "abs", "value": 0.5, "kind": "error_bound", "error_feedback": True}}
    config["transport"] = {"min_bytes": 0}
    rounds, mine = 40, values(rank, 5003)
    with Communicator(config, group) as communicator:
        total = torch.zeros(5003, dtype=torch.float64)
        for _ in range(rounds):
            tensor = mine.clone()
            communicator.reduce(tensor, last, name="weight")
            total += tensor
        raises(UnsupportedError, lambda: communicator.reduce(mine.clone(), last), "needs a name")
    exact = sum(values(source, 5003).double() for source in range(world_size))
    if rank == last:
        assert (total / rounds - exact).abs().max() < 2 * world_size * 0.5 / rounds
    else:
        assert torch.equal(total / rounds, mine.double())


@ranks(2, 3, 4)
def test_what_is_not_finite_goes_plain_and_changes_nothing_elsewhere(group):
    transport = {"min_bytes": 0, "hierarchy": HIERARCHY}
    with Communicator({"quantizer": ABS, "transport": transport}, group) as communicator:
        mine = values(rank, 40_000)
        mine[7] = float("nan") if rank == 0 else 1.0
        got = mine.clone()
        communicator.reduce(got, last)
        exact = sum(values(source, 40_000).double() for source in range(world_size))
        if rank == last:
            assert got[7].isnan() and not got[:7].isnan().any()
            assert (got[8:] - exact[8:]).abs().max() < 1e-4
        else:
            assert same_bits(got, mine)
        assert communicator.stats.total.bypasses == {"non-finite": 1}


@ranks(2, 3)
def test_what_goes_plain_is_exact_and_counted(group):
    with Communicator({"quantizer": ABS, "transport": {"min_bytes": 0}}, group) as communicator:
        for tensor, op, how, reason in (
            (torch.arange(999) + rank, SUM, {}, "dtype"),
            (torch.arange(999.0) + rank, MAX, {}, "reduce op"),
            (torch.arange(999.0) + rank, SUM, {"role": "activation"}, "role not enabled"),
            (torch.arange(999.0) + rank, AVG, {"role": "parameter"}, "role not enabled"),
        ):
            kept, before = tensor.clone(), dict(communicator.stats.total.bypasses)
            communicator.reduce(tensor, last, op, **how)
            added = {SUM: world_size * (world_size - 1) // 2, MAX: world_size - 1, AVG: (world_size - 1) / 2}[op]
            times = world_size if op == SUM else 1
            assert torch.equal(tensor, times * (kept - rank) + added if rank == last else kept)
            assert communicator.stats.total.bypasses == before | {reason: before.get(reason, 0) + 1}


@ranks(2, 3)
@pytest.mark.parametrize("schedule", ["ring", "direct", "halving"])
def test_only_the_root_gets_sums(group, schedule):
    """Fewer bytes than an all_reduce, and over two ranks none from the root but what ranks agree on."""
    config = {"quantizer": {"mode": "rms", "value": 0.5}, "transport": {"min_bytes": 0, "schedule": schedule}}
    sent = {}
    for collective in ("reduce", "all_reduce"):
        with Communicator(config, group) as communicator:
            tensor = values(rank, 600_000)
            communicator.reduce(tensor, 0) if collective == "reduce" else communicator.all_reduce(tensor)
            sent[collective] = communicator.stats.total.wire_bytes
    everyone = [torch.zeros(2, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(everyone, torch.tensor([sent["reduce"], sent["all_reduce"]]), group)
    reduced, everywhere = torch.stack(everyone).sum(0).tolist()
    assert reduced < 0.85 * everywhere, (reduced, everywhere)
    if rank == 0:
        assert sent["reduce"] < 0.6 * sent["all_reduce"]


@ranks(3)
def test_ranks_that_differ_are_told(group):
    def told(call, *words):
        with Communicator({"quantizer": ABS, "transport": {"min_bytes": 0}}, group) as communicator:
            raises(MismatchError, lambda: call(communicator), *words)

    for size in (5, 50_000):
        told(lambda c, size=size: c.reduce(torch.ones(size), rank // 2), "root rank 1 on rank 2, 0 on rank 0")
        told(
            lambda c, size=size: c.reduce(torch.ones(size + rank // 2), 0), f"elements {size + 1} on rank 2, {size} on"
        )
        told(lambda c, size=size: c.reduce(torch.ones(size), 0, (SUM, AVG)[rank // 2]), "reduce op AVG on rank 2")
    told(lambda c: c.reduce(torch.ones(5)) if rank else c.all_reduce(torch.ones(5)), "collective", "reduce on rank")


@ranks(2)
def test_a_wrong_root_is_an_error_on_all(group):
    with Communicator({"transport": {"min_bytes": 0}}, group) as communicator:
        if rank == 1:
            raises(
                UnsupportedError, lambda: communicator.reduce(torch.ones(5), 2), "dst must be a global rank", "got 2"
            )
        else:
            raises(MismatchError, lambda: communicator.reduce(torch.ones(5), 0), "rank 1 refused its call")
    same_on_all_ranks("done", group)
