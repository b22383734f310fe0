"""Uncompressed collectives of small tensors: exact, alike on all ranks, and in place of none that gloo must make."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import play, same_bits, values

from ncz_plugins.core.errors import MismatchError, PeerError
from ncz_plugins.core.transport import small
from ncz_plugins.core.transport.comparison import RankComparison

OPS = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
LENGTHS = [0, 1, 2, 7, 997, 5003]  # the last one in two rounds where there are more than two ranks


def run(transport, collective, input, output, op=None, root=0, call: int = 1) -> None:
    def check() -> None:
        if comparison.differing():
            raise MismatchError("for this test")

    comparison = RankComparison({"call": call}, transport.rank, transport.world_size)
    assert transport.small.serve(collective, input, op)
    transport.small.start(collective, input, output, op, root, comparison, check).wait()


def exact(op, everyone: list[torch.Tensor]) -> torch.Tensor:
    """float64, or the dtype of integers."""
    stacked = torch.stack(everyone)
    stacked = stacked.double() if stacked.is_floating_point() else stacked
    match op:
        case dist.ReduceOp.SUM:
            return stacked.sum(0)
        case dist.ReduceOp.AVG:
            return stacked.mean(0)
        case dist.ReduceOp.PRODUCT:
            return stacked.prod(0)
        case dist.ReduceOp.MIN:
            return stacked.amin(0)
        case _:
            return stacked.amax(0)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("op", OPS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reductions_are_right_and_alike_on_all_ranks(world_size, op, dtype):
    def body(transport):
        results = []
        for length in LENGTHS:
            tensor = values(transport.rank, length, dtype)
            run(transport, "all_reduce", tensor, tensor, op)
            results.append(tensor)
            parts = values(transport.rank, length * world_size, dtype)
            part = torch.empty(length, dtype=dtype)
            run(transport, "reduce_scatter_single", parts, part, op)
            results.append(part)
        return results

    ranks = play(world_size, body, reuse=True)
    for at, length in enumerate(LENGTHS):
        wanted = exact(op, [values(rank, length, dtype) for rank in range(world_size)])
        reduced = [rank[2 * at] for rank in ranks]
        assert same_bits(reduced)
        torch.testing.assert_close(reduced[0], wanted.to(dtype))
        whole = exact(op, [values(rank, length * world_size, dtype) for rank in range(world_size)])
        torch.testing.assert_close(torch.cat([rank[2 * at + 1] for rank in ranks]), whole.to(dtype))


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.integers(0, 9000), st.sampled_from([torch.int64, torch.int32, torch.int8, torch.uint8]))
def test_integers_are_exact(world_size, length, dtype):
    everyone = [(values(rank, length) * 3).to(torch.int64).to(dtype) for rank in range(world_size)]

    def body(transport):
        tensor = everyone[transport.rank].clone()
        run(transport, "all_reduce", tensor, tensor, dist.ReduceOp.SUM)
        return tensor

    assert all(torch.equal(each, sum(everyone)) for each in play(world_size, body, reuse=True))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64], ids=str)
def test_values_are_moved_unchanged(world_size, dtype):
    everyone = [values(rank, 1009).to(dtype) for rank in range(world_size)]

    def body(transport):
        gathered = torch.empty(1009 * world_size, dtype=dtype)
        run(transport, "all_gather_single", everyone[transport.rank], gathered)
        from_last = everyone[transport.rank].clone()
        run(transport, "broadcast", from_last, from_last, root=world_size - 1)
        return gathered, from_last

    for gathered, from_last in play(world_size, body, reuse=True):
        assert torch.equal(gathered, torch.cat(everyone))
        assert torch.equal(from_last, everyone[-1])


def test_what_goes_in_may_be_part_of_what_comes_out():
    def body(transport):
        parts = torch.arange(30.0).view(3, 10)
        gathered = torch.zeros(3, 10)
        gathered[transport.rank] = parts[transport.rank]
        run(transport, "all_gather_single", gathered[transport.rank], gathered)
        assert torch.equal(gathered, parts)
        run(transport, "reduce_scatter_single", gathered, gathered[transport.rank], dist.ReduceOp.SUM)
        assert torch.equal(gathered[transport.rank], 3 * parts[transport.rank])

    play(3, body)


def test_what_goes_in_may_overlap_what_comes_out():
    def body(transport):
        memory = torch.arange(10_001.0)
        run(transport, "reduce_scatter_single", memory[:10_000], memory[1:5001], dist.ReduceOp.SUM)
        return memory[1:5001]

    first, second = play(2, body)
    assert torch.equal(first, 2 * torch.arange(5000.0)) and torch.equal(second, 2 * torch.arange(5000.0, 10_000))


def test_what_goes_in_may_lie_where_the_values_of_another_rank_go():
    def body(transport):
        gathered = torch.full((3, 10), float(transport.rank))
        run(transport, "all_gather_single", gathered[(transport.rank + 1) % 3], gathered)
        return gathered[:, 0].tolist()

    assert play(3, body) == [[0.0, 1.0, 2.0]] * 3


@pytest.mark.parametrize(("world_size", "length"), [(2, 3 << 20), (3, 1 << 20)])
def test_a_part_may_be_formed_where_those_of_other_ranks_still_have_to_leave(world_size, length):

    def body(transport):
        tensor = values(transport.rank, length * world_size)
        part = tensor[length // 2 :][:length]
        run(transport, "reduce_scatter_single", tensor, part, dist.ReduceOp.SUM)
        return part

    whole = exact(dist.ReduceOp.SUM, [values(rank, length * world_size) for rank in range(world_size)])
    torch.testing.assert_close(torch.cat(play(world_size, body)), whole.float())


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_in_two_rounds_are_those_in_one(world_size, op, dtype, monkeypatch):
    """To the bit, in place or not, also where ranks have parts of different lengths."""

    def body(transport):
        results = []
        for length in (256 * world_size, 256 * world_size - 1, 5003):
            tensor = values(transport.rank, length, dtype)
            run(transport, "all_reduce", tensor, tensor, op)
            apart = torch.empty(length, dtype=dtype)
            run(transport, "all_reduce", values(transport.rank, length, dtype), apart, op)
            results += [tensor, apart]
        return results

    in_two_rounds = []
    for most in (256, 1 << 30):
        monkeypatch.setattr(small, "_MAX_ONE_ROUND_BYTES", most)
        in_two_rounds.append(play(world_size, body, reuse=True))
    for ranks in zip(*in_two_rounds):
        assert all(map(torch.equal, *ranks))


def test_parameters_are_taken_although_they_require_gradients():
    def body(transport):
        parameter = torch.nn.Parameter(torch.full((5,), float(transport.rank)))
        run(transport, "broadcast", parameter, parameter, root=1)
        run(transport, "all_reduce", parameter, parameter, dist.ReduceOp.SUM)
        return parameter.tolist()

    assert play(2, body) == [[2.0] * 5] * 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_overflows_is_infinite_and_no_warning(dtype):
    """Whoever scales the loss sees by that which steps to leave out."""

    def body(transport):
        tensor = torch.tensor([torch.finfo(dtype).max, torch.inf, torch.nan, 1], dtype=dtype)
        tensor[1] *= 1 - 2 * transport.rank
        run(transport, "all_reduce", tensor, tensor, dist.ReduceOp.SUM)
        return [str(each) for each in tensor.tolist()]

    assert play(2, body) == [["inf", "nan", "nan", "2.0"]] * 2


@pytest.mark.parametrize("elements", [(10, 20), (10, 30_000), (0, 5), (10, 3 << 20)])
def test_ranks_that_differ_are_told_before_a_value_is_looked_at(elements):
    def body(transport):
        tensor = torch.ones(elements[transport.rank])
        with pytest.raises(MismatchError):
            run(transport, "all_reduce", tensor, tensor, dist.ReduceOp.SUM, call=1 + transport.rank)
        assert torch.equal(tensor, torch.ones_like(tensor))
        assert not any(peer.outgoing or peer.incoming for peer in transport._connections.mesh._connections)
        again = torch.ones(3)
        run(transport, "all_reduce", again, again, dist.ReduceOp.SUM)  # nothing is left of it in the connections
        return again

    assert all(torch.equal(each, torch.full((3,), 2.0)) for each in play(2, body))


@pytest.mark.parametrize("collective", ["broadcast", "all_gather_single"])
def test_what_other_calls_send_is_not_put_into_place(collective):
    def body(transport):
        tensor, output = torch.full((5,), 1.0 + transport.rank), torch.zeros(10)
        output = tensor if collective == "broadcast" else output
        before = output.clone()
        with pytest.raises(MismatchError):
            run(transport, collective, tensor, output, call=1 + transport.rank)
        assert torch.equal(output, before)
        run(transport, collective, tensor, output)
        return output.tolist()

    wanted = [1.0] * 5 if collective == "broadcast" else [1.0] * 5 + [2.0] * 5
    assert play(2, body) == [wanted] * 2


@pytest.mark.parametrize("collective", ["broadcast", "all_gather_single", "all_reduce"])
def test_values_of_another_size_are_an_error_although_the_calls_are_said_to_be_the_same(collective):
    def body(transport):
        tensor = torch.ones(5 + transport.rank)
        output = torch.zeros(2 * tensor.numel()) if collective == "all_gather_single" else tensor
        op = dist.ReduceOp.SUM if collective == "all_reduce" else None
        if collective == "broadcast" and transport.rank == 0:  # which gets nothing
            return run(transport, collective, tensor, output)
        with pytest.raises(PeerError, match="parts of other sizes"):
            run(transport, collective, tensor, output, op)

    play(2, body)


@pytest.mark.parametrize(
    ("collective", "nbytes", "served"),
    [
        ("all_reduce", 6 << 20, True),  # of which a rank sends each other one a third, in each of two rounds
        ("all_reduce", (6 << 20) + 4, False),
        ("broadcast", 128 << 10, True),
        ("broadcast", (128 << 10) + 4, False),
        ("all_gather_single", 8 << 20, True),
        ("all_gather_single", (8 << 20) + 4, False),
        ("reduce_scatter_single", 24 << 20, True),
    ],
)
def test_what_is_small(collective, nbytes, served):
    op = dist.ReduceOp.SUM if "reduce" in collective else None
    found = play(3, lambda transport: transport.small.serve(collective, torch.zeros(nbytes // 4), op))
    assert found == [served] * 3


@pytest.mark.parametrize(("dtype", "op"), [(torch.float32, dist.ReduceOp.BXOR), (torch.int16, dist.ReduceOp.SUM)])
def test_bitwise_reductions_and_those_of_other_dtypes_are_left_to_gloo(dtype, op):
    tensor = torch.zeros(4, dtype=dtype)
    assert play(2, lambda each: each.small.serve("all_reduce", tensor, op)) == [False] * 2
