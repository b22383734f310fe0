"""Communicators on each kind of device: what they do besides the numbers that test_collectives.py checks."""

import pytest
import torch
import torch.distributed as dist
from on_rank import device, digest, places, rank, same_on_all_ranks, values, world_size
from scenarios import ranks

from ncz_plugins import Communicator

NUMEL = 300_007
FINE = {"mode": "rms", "value": 0.01}
SIZES = {"transport": {"min_bytes": "128KiB"}}  # what GPUs share is faster than any network, and would be measured
CASES = {
    "fixed": {"entropy": {"coder": "fixed"}},
    "auto": {},
    "huffman with checksums": {"entropy": {"coder": "huffman", "checksum": True}},
    "at random": {"quantizer": {"kind": "stochastic", "mode": "abs", "value": 0.02, "seed": 7}},
    "with error feedback": {"quantizer": FINE | {"error_feedback": True}},
}
everyone = [values(r, NUMEL) for r in range(world_size)]
exact = sum(everyone)


def mine(where: torch.device = device) -> torch.Tensor:
    """This rank's values, in memory of their own."""
    return everyone[rank].to(where, copy=True)


def near(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (got.cpu() - wanted).abs().max().item() < 0.05 * world_size**2


@ranks(3, gpu=True)
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_the_cpu(group, case):
    """With all that decides about them."""
    digests = []
    for where in places(repeat=case == "at random"):
        with Communicator(SIZES | CASES[case], group) as communicator:
            for _ in range(2):
                tensor = mine(where)
                communicator.all_reduce(tensor, name="body")
            residuals = communicator.training.residuals.by_name.values()
            digests.append([digest(each.cpu()) for each in (tensor, *residuals)])
            assert communicator.stats.total.compressed_calls == 2, communicator.stats.total
    assert all(each == digests[0] for each in digests)
    same_on_all_ranks(digests[0][0], group)


@ranks(3, gpu=True)
@pytest.mark.parametrize("quantizer", [{}, {"mode": "abs", "value": 0.01}, {"kind": "lossless"}], ids=str)
def test_pieces_have_the_bits_of_the_cpu(group, quantizer):
    """Of an exchange. A value of one piece can't be quantized."""
    sent = [50_000 * (rank + to) for to in range(world_size)]
    received = [50_000 * (source + rank) for source in range(world_size)]
    results = []
    for where in places():
        came = [torch.empty(sum(received), device=where) for _ in range(2)]
        with Communicator(SIZES | {"quantizer": quantizer}, group) as communicator:
            for output, poison in zip(came, (1.0, float("nan"))):
                tensor = values(rank, sum(sent)).to(where)
                tensor[-1] = poison
                communicator.all_to_all_single(output, tensor, received, sent)
            assert communicator.stats.total.compressed_calls == 2, communicator.stats.total
        results.append([digest(each.cpu()) for each in came])
    assert all(each == results[0] for each in results)


@ranks(3, gpu=True)
@pytest.mark.parametrize("quantizer", [{}, {"kind": "lossless"}, {"mode": "bits", "value": 4}], ids=str)
def test_lists_have_the_bits_of_the_cpu(group, quantizer):
    sizes, last, results = [100_000 + 777 * each for each in range(world_size)], world_size - 1, []
    for where in places():
        with Communicator(SIZES | {"quantizer": quantizer}, group) as communicator:
            pieces = [values(rank, size, seed=to).to(where) for to, size in enumerate(sizes)]
            mine = pieces[0][: sizes[0]]
            lists = [[torch.empty_like(each) for each in pieces] for _ in range(2)]
            swapped = [torch.empty(sizes[rank], device=where) for _ in sizes]
            handles = [communicator.all_to_all(swapped, pieces, async_op=True)]
            handles.append(communicator.gather(pieces[rank], lists[0] if rank == last else None, last, async_op=True))
            handles.append(communicator.scatter(lists[1][rank], pieces if rank == last else None, last, async_op=True))
            handles.append(communicator.reduce(mine, last, async_op=True))
            for handle in handles:
                handle.wait()
            came = [*swapped, lists[1][rank], mine, *(lists[0] if rank == last else [])]
            results.append([digest(each.cpu()) for each in came])
            assert communicator.stats.total.compressed_calls == 4, communicator.stats.total
    assert all(each == results[0] for each in results)


@ranks(3, gpu=True)
def test_nan_and_infinity_come_through_and_the_next_call_is_compressed_again(group):
    with Communicator(SIZES, group) as communicator:
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


@ranks(3, gpu=True)
def test_sums_are_verified_where_that_is_asked_for(group):
    with Communicator(SIZES | {"guard": {"every": 1, "on_alarm": "stop"}}, group) as communicator:
        for _ in range(2):
            tensor = mine()
            communicator.all_reduce(tensor, name="body")
            communicator.end_step()


@ranks(3, gpu=True)
def test_many_handles_are_waited_for_in_any_order(group):
    with Communicator(SIZES | {"quantizer": FINE}, group) as communicator:
        tensors = [mine() * (i + 1) for i in range(6)]
        handles = [communicator.all_reduce(tensor, async_op=True) for tensor in tensors]
        for i in reversed(range(6)):
            assert handles[i].wait() and near(tensors[i] / (i + 1), exact)


@ranks(3, cpu=False, gpu=True)
def test_the_first_call_measures_what_connects_gpus_and_calls_go_on_as_usual(group):
    with Communicator({"quantizer": FINE}, group) as communicator:
        for _ in range(2):
            tensor = mine()
            communicator.all_reduce(tensor)
            assert near(tensor, exact)
        total = communicator.stats.total
        assert total.calls == 2 and total.compressed_calls + total.bypasses.get("too small", 0) == 2, total


@ranks(3, cpu=False, gpu=True)
def test_the_tensor_is_what_the_callers_stream_makes_of_it_however_late(group):
    some_time = 200_000_000  # cycles: a tenth of a second
    with Communicator(SIZES | {"quantizer": FINE}, group) as communicator, torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.zeros(NUMEL, device=device)
        torch.cuda._sleep(some_time)
        tensor.copy_(everyone[rank])
        communicator.all_reduce(tensor)
        assert near(tensor, exact)


@ranks(3, gpu=True)
def test_making_and_closing_some_leaves_the_device_to_others(group):
    for _ in range(3):
        with Communicator(SIZES, group) as communicator:
            communicator.all_reduce(mine())
    plain = mine()
    dist.all_reduce(plain, group=group)
    torch.testing.assert_close(plain.cpu(), exact)
