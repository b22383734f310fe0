"""Calls at a fixed rate: every collective, the bits of the CPU, and on a GPU without the host."""

import pytest
import torch
import torch.distributed as dist
from on_rank import device, digest, places, raises, rank, same_on_all_ranks, values, world_size
from scenarios import ranks

from ncz_plugins import Communicator, UnsupportedError

NUMEL = 300_007
BITS = {"mode": "bits", "value": 4}
SIZES = {"transport": {"min_bytes": "128KiB"}}  # what GPUs share is faster than any network, and would be measured
QUANTIZERS = {
    "nearest": {},
    "8 bits": {"value": 8},
    "at random": {"kind": "stochastic", "seed": 7},
    "with error feedback": {"error_feedback": True},
}
everyone = [values(r, NUMEL) for r in range(world_size)]
exact = sum(everyone)


def mine(where: torch.device = device) -> torch.Tensor:
    """This rank's values, in memory of their own."""
    return everyone[rank].to(where, copy=True)


def near(got: torch.Tensor, wanted: torch.Tensor = exact) -> bool:
    return (got.cpu().float() - wanted).norm() < 0.4 * wanted.norm()


@ranks(2, 3, gpu=True)
@pytest.mark.parametrize("case", QUANTIZERS)
def test_the_bits_are_those_of_the_cpu(group, case):
    """Of every collective."""
    quantizer, digests = QUANTIZERS[case], []
    for where in places(repeat=case == "at random"):
        with Communicator(SIZES | {"quantizer": BITS | quantizer}, group) as communicator:
            results, of_this_rank = [], []
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                tensor = mine(where).to(dtype)
                communicator.all_reduce(tensor, dist.ReduceOp.AVG, name=f"body {dtype}")
                assert near(tensor, exact / world_size)
                results.append(tensor)
            if not quantizer.get("error_feedback"):
                part = torch.empty(NUMEL, device=where)
                communicator.reduce_scatter_single(part, torch.cat([mine(where) * (i + 1) for i in range(world_size)]))
                whole = torch.empty(world_size * NUMEL, device=where)
                communicator.all_gather_single(whole, part)
                assert all(near(each / (i + 1)) for i, each in enumerate(whole.chunk(world_size)))
                sent = mine(where)
                communicator.broadcast(sent, world_size - 1)
                assert near(sent, everyone[-1])
                exchanged, rows = torch.empty(world_size * (rank + 1) * 77_777, device=where), range(1, world_size + 1)
                pieces = torch.cat([mine(where)[: 77_777 * each] for each in rows])
                splits = [77_777 * (rank + 1)] * world_size, [77_777 * each for each in rows]
                communicator.all_to_all_single(exchanged, pieces, *splits)
                assert all(near(got, of[: len(got)]) for got, of in zip(exchanged.chunk(world_size), everyone))
                results += [whole, sent]
                of_this_rank.append(exchanged)
            of_this_rank += communicator.training.residuals.by_name.values()
            digests.append([digest(each.cpu()) for each in results + of_this_rank])
            total = communicator.stats.total
            assert total.compressed_calls == len(results) + 2 * (len(results) > 3) and not total.bypasses, total
    assert all(each == digests[0] for each in digests)
    same_on_all_ranks(digests[-1][: len(results)], group)


@ranks(2, 3, gpu=True)
def test_what_is_not_finite_stays_in_its_block_of_256(group):
    with Communicator(SIZES | {"quantizer": BITS}, group) as communicator:
        tensor = mine()
        if rank == world_size - 1:
            tensor[77_777] = float("nan")
        communicator.all_reduce(tensor)
        assert tensor[77_777].isnan() and tensor.isnan().sum() == 256
        assert communicator.stats.total.compressed_calls == 1


@ranks(2, 3, gpu=True)
def test_calls_of_both_rates_and_plain_ones_run_in_the_order_in_which_they_were_made(group):
    fine = {"name": "fine", "quantizer": {"mode": "rms", "value": 0.01}}
    with Communicator(SIZES | {"quantizer": BITS, "policies": [fine]}, group) as communicator:
        tensor = mine()
        few = torch.ones(3, device=device)
        handles = []
        for name in ("coarse", "fine", None, "coarse", "fine"):
            handles.append(communicator.all_reduce(few if name is None else tensor, async_op=True, name=name))
            if device.type == "cuda":
                handles[-1].wait()  # as NCCL's own calls need it where they share a tensor
        for handle in handles:
            handle.wait()
        assert near(tensor / world_size**3) and (few == world_size).all()
        total = communicator.stats.total
        assert (total.compressed_calls, total.bypasses) == (4, {"too small": 1}), total


@ranks(2, 3, gpu=True)
def test_sums_are_verified_where_that_is_asked_for(group):
    with Communicator(SIZES | {"quantizer": BITS, "guard": {"every": 1, "on_alarm": "stop"}}, group) as communicator:
        for _ in range(2):
            communicator.all_reduce(mine(), name="body")
            communicator.end_step()


# ------------------------------------------------------------------ on a GPU


@ranks(2, 3, cpu=False, gpu=True)
def test_the_host_waits_for_nothing(group):
    """And the tensor is what the caller's stream makes of it, however late that is."""
    with Communicator(SIZES | {"quantizer": BITS}, group) as communicator:
        eager = mine()
        communicator.all_reduce(eager)
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


@ranks(2, 3, cpu=False, gpu=True)
def test_a_cuda_graph_repeats_a_call_with_what_is_in_the_tensor_then(group):
    with Communicator(SIZES | {"quantizer": BITS}, group) as communicator:
        communicator.all_reduce(mine())
        static = mine()
        graph = torch.cuda.CUDAGraph()
        rows = [(NUMEL + other) // world_size for other in range(world_size)]
        pieces = torch.empty(world_size * rows[rank], device=device)
        with torch.cuda.graph(graph):
            communicator.all_reduce(static)
            twice = 2 * static
            communicator.all_to_all_single(pieces, twice, [rows[rank]] * world_size, rows)
        for factor in (1, 3):
            static.copy_(everyone[rank] * factor)
            graph.replay()
            assert near(pieces[: rows[rank]], 2 * factor * exact[sum(rows[:rank]) :][: rows[rank]])
            expected = mine() * factor
            communicator.all_reduce(expected)
            assert digest(static.cpu()) == digest(expected.cpu())
            assert torch.equal(twice.cpu(), 2 * static.cpu())
        del graph


@ranks(2, 3, cpu=False, gpu=True)
def test_what_a_graph_could_not_repeat_is_refused_by_name(group):
    for config, problem in (
        ({}, "sizes that follow from the data"),
        ({"quantizer": BITS | {"kind": "stochastic"}}, "the same numbers in every replay"),
        ({"quantizer": BITS | {"error_feedback": True}}, "error feedback"),
    ):
        with Communicator(SIZES | config, group) as communicator:
            tensor = mine()
            communicator.all_reduce(tensor, name="body")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                refused = lambda: communicator.all_reduce(tensor, name="body")  # noqa: B023, E731
                raises(UnsupportedError, refused, problem)
