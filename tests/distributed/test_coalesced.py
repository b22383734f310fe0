"""Several tensors in one call: `all_reduce_coalesced`, beside `all_reduce` of the same values."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from on_rank import digest, raises, rank, same_on_all_ranks, values, world_size
from scenarios import ranks

from ncz_plugins import Communicator, MismatchError, NczError, ParameterSlice, PeerError, UnsupportedError

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
LENGTHS = [40_000, 0, 1, 9973, 30_000]
NAMES = ["body", "nothing", "bias", "odd", "head"]
ABS = {"quantizer": {"mode": "abs", "value": 0.01}}
last = rank == world_size - 1


def several(of: int = rank, dtype=torch.float32, lengths=LENGTHS) -> list[torch.Tensor]:
    return [values(of, length, dtype, seed=at) for at, length in enumerate(lengths)]


def sums(dtype=torch.float32) -> list[torch.Tensor]:
    """In the order of ranks."""
    return [sum(of_all) for of_all in zip(*(several(each, dtype) for each in range(world_size)))]


def digests(tensors: list[torch.Tensor]) -> list[str]:
    return [digest(tensor) for tensor in tensors]


def counted(communicator: Communicator) -> tuple[int, int, dict]:
    total = communicator.stats.total
    return total.calls, total.compressed_calls, dict(total.bypasses)


@ranks(2, 3)
def test_several_tensors_are_one_compressed_call(group):
    """To the bit what all_reduce of the same values in one tensor gives."""
    with Communicator(ABS, group) as communicator, Communicator(ABS, group) as other:
        for op, divisor in ((SUM, 1), (AVG, world_size)):
            tensors = several()
            assert communicator.all_reduce_coalesced(tensors, op) is None
            bound = 0.01 * world_size / divisor
            for tensor, exact in zip(tensors, sums()):
                assert ((tensor - exact / divisor).abs() <= bound + 1e-5).all()
            together = torch.cat(several())
            other.all_reduce(together, op)
            assert torch.equal(torch.cat(tensors), together)
            same_on_all_ranks(digests(tensors), group)
        assert counted(communicator) == counted(other) == (2, 2, {})


@ranks(2, 3)
def test_a_handle_and_its_future_give_the_tensors(group):
    with Communicator(ABS, group) as communicator:
        for dtypes in ([torch.float32], [torch.float32, torch.float64, torch.int64]):  # one call, and three
            tensors = [tensor for dtype in dtypes for tensor in several(dtype=dtype)]
            handle = communicator.all_reduce_coalesced(tensors, async_op=True)
            results = handle.get_future().wait()
            assert len(results) == len(tensors) and all(one is other for one, other in zip(results, tensors))
            assert handle.wait() is True and handle.wait(1) is True
            assert handle.is_completed() and handle.is_success() and handle.exception() is None


@ranks(2, 3)
def test_tensors_of_any_shape_are_reduced_in_place(group):
    """Scalars, matrices and what requires a gradient; a tensor by itself is a list of one."""
    with Communicator(ABS | {"transport": {"min_bytes": 0}}, group) as communicator:
        scalar, matrix = torch.tensor(float(rank)), torch.full((3, 7), 1.0 + rank)
        leaf = torch.nn.Parameter(torch.full((11,), float(rank)))
        communicator.all_reduce_coalesced([scalar, matrix, leaf])
        total = sum(range(world_size))
        for tensor, exact in ((scalar, total), (matrix, total + world_size), (leaf, total)):
            assert ((tensor.detach() - exact).abs() <= 0.01 * world_size + 1e-5).all()
        assert matrix.shape == (3, 7) and scalar.shape == () and leaf.requires_grad
        alone = torch.full((100,), float(rank))
        communicator.all_reduce_coalesced(alone)
        assert ((alone - total).abs() <= 0.01 * world_size + 1e-5).all()
        assert counted(communicator) == (2, 2, {})


@ranks(2, 3)
def test_each_dtype_has_a_call_of_its_own(group):
    dtypes = [torch.float32, torch.int64, torch.float64, torch.bfloat16]
    with Communicator(ABS, group) as communicator:
        tensors = {dtype: several(dtype=dtype) for dtype in dtypes}
        mixed = [tensors[dtype][at] for at in range(len(LENGTHS)) for dtype in dtypes]
        communicator.all_reduce_coalesced(mixed)
        assert counted(communicator) == (4, 3, {"dtype": 1})
        assert digests(tensors[torch.int64]) == digests(sums(torch.int64))
        for dtype in (torch.float32, torch.float64):
            for tensor, exact in zip(tensors[dtype], sums(dtype)):
                assert ((tensor - exact).abs() <= 0.01 * world_size + 1e-5).all()
        same_on_all_ranks(digests(mixed), group)


@ranks(2, 3)
def test_what_goes_plain_is_exact_and_counted_once(group):
    policies = {"policies": [{"name": "*", "action": "skip"}]}
    for config, how, reason in (
        ({"transport": {"min_bytes": "1MiB"}}, {}, "too small"),
        ({}, {"op": MAX}, "reduce op"),
        ({}, {"role": "parameter"}, "role not enabled"),
        (policies, {"names": NAMES}, "policy"),
        ({"quantizer": {"mode": "abs", "value": 1e-12}}, {}, "code overflow"),
    ):
        with Communicator(config, group) as communicator:
            tensors = several()
            communicator.all_reduce_coalesced(tensors, **how)
            exact = sums()
            if "op" in how:
                exact = [torch.stack(each).amax(0) for each in zip(*(several(r) for r in range(world_size)))]
            for tensor, wanted in zip(tensors, exact):
                torch.testing.assert_close(tensor, wanted)
            assert counted(communicator) == (1, 0, {reason: 1}), counted(communicator)
            same_on_all_ranks(digests(tensors), group)


@ranks(2, 3)
def test_a_nan_of_one_rank_comes_out_where_it_went_in(group):
    with Communicator(ABS, group) as communicator:
        tensors = several()
        if last:
            tensors[3][77] = float("nan")
        communicator.all_reduce_coalesced(tensors)
        assert tensors[3][77].isnan() and sum(tensor.isnan().sum() for tensor in tensors) == 1
        assert counted(communicator) == (1, 0, {"non-finite": 1})


@ranks(2, 3)
def test_each_treatment_has_a_call_of_its_own(group):
    """By names, and by parts of one of the tensors."""
    policies = [{"name": "head", "action": "skip"}, {"name": "body", "quantizer": {"value": 0.5}}]
    with Communicator(ABS | {"policies": policies, "transport": {"min_bytes": 0}}, group) as communicator:
        tensors = several()
        communicator.all_reduce_coalesced(tensors, names=NAMES)
        assert counted(communicator) == (3, 2, {"policy": 1})
        body, nothing, bias, odd, head = (abs(each - exact) for each, exact in zip(tensors, sums()))
        assert 0.1 < body.max() <= 0.5 * world_size + 1e-5 and odd.max() <= 0.01 * world_size + 1e-5
        assert head.max() < 1e-5
        tensors = several()
        parts = [[ParameterSlice(name, length)] for name, length in zip(NAMES, LENGTHS)]
        parts[0] = [ParameterSlice("body", 10_000), ParameterSlice("head", 30_000)]
        communicator.all_reduce_coalesced(tensors, parts=parts)
        body, head = abs(tensors[0] - sums()[0]).split([10_000, 30_000])
        assert 0.1 < body.max() <= 0.5 * world_size + 1e-5 and head.max() < 1e-5
        same_on_all_ranks(digests(tensors), group)


@ranks(2, 3)
def test_what_is_lost_is_kept_by_name(group):
    """As all_reduce keeps it by parts."""
    config = {"quantizer": {"mode": "abs", "value": 0.5, "error_feedback": True}}
    parts = [ParameterSlice(name, length) for name, length in zip(NAMES, LENGTHS)]
    with Communicator(config, group) as communicator, Communicator(config, group) as other:
        for _ in range(3):
            tensors, together = several(), torch.cat(several())
            communicator.all_reduce_coalesced(tensors, names=NAMES)
            other.all_reduce(together, parts=parts)
            assert torch.equal(torch.cat(tensors), together)
        kept, others = (each.training.residuals.by_name for each in (communicator, other))
        assert kept.keys() == others.keys() and all(torch.equal(kept[name], others[name]) for name in kept)
        assert sum(each.abs().sum() for each in kept.values()) > 0


# ------------------------------------------------------------------ order


@ranks(2, 3)
def test_it_follows_the_calls_before_it_and_comes_before_those_after_it(group):
    """Of the same tensors, without waiting in between; and so does a tensor whose parts are treated differently."""
    policies = [{"name": "exact", "action": "skip"}]
    parts = [ParameterSlice("exact", 100_000), ParameterSlice("other", 300_000)]
    with Communicator({"quantizer": {"kind": "lossless"}, "policies": policies}, group) as communicator:
        for _ in range(5):
            large, small = torch.ones(400_000), torch.ones(1000)
            handles = [
                communicator.all_reduce(large, async_op=True),
                communicator.all_reduce_coalesced([large, small], async_op=True),
                communicator.all_reduce(large, async_op=True, parts=parts),
                communicator.all_reduce_coalesced([small, large], async_op=True),
                communicator.all_reduce(small, async_op=True),
            ]
            handles[-1].wait()
            assert all(handle.is_completed() for handle in handles)
            assert large.unique().tolist() == [world_size**4] and small.unique().tolist() == [world_size**3]


# ------------------------------------------------------------------ ranks that differ


@ranks(2, 3)
def test_lists_that_differ_are_told_to_all_ranks(group):
    def ones(lengths: list[int], dtypes: list[torch.dtype]) -> list[torch.Tensor]:
        return [torch.ones(length, dtype=dtype) for length, dtype in zip(lengths, dtypes)]

    float32, float64 = torch.float32, torch.float64
    for size in (1000, 100_000):  # plain, and compressed
        first = ones([size, 2 * size], [float32] * 2)
        for other in (
            ones([2 * size, size], [float32] * 2),  # as many elements
            ones([size, size, size], [float32] * 3),
            ones([3 * size], [float32]),
            ones([size, 2 * size], [float32, float64]),
            ones([size, 2 * size, size], [float32, float32, float64]),  # whose first call would be alike
        ):
            with Communicator({"transport": {"timeout_seconds": 40}}, group) as communicator:
                tensors = other if last else first
                before, reduce = digests(tensors), partial(communicator.all_reduce_coalesced, tensors)
                raises(MismatchError, reduce, "list of tensors differs")
                assert digests(tensors) == before
                raises(MismatchError, reduce)


def refused(group, config: dict, call, error: type, *words: str) -> None:
    """All ranks refuse, and go on. Then one does, and the others are told."""
    with Communicator(config | {"transport": {"timeout_seconds": 40}}, group) as communicator:
        raises(error, lambda: call(communicator), *words)
        tensors = several()
        communicator.all_reduce_coalesced(tensors, names=NAMES)
        same_on_all_ranks(digests(tensors), group)
        if last:
            raises(error, lambda: call(communicator), *words)
        else:
            tensors = several()
            told = f"rank {world_size - 1} refused"
            raises(MismatchError, lambda: communicator.all_reduce_coalesced(tensors, names=NAMES), told)
            assert digests(tensors) == digests(several())


@ranks(2, 3)
def test_what_can_not_be_reduced_is_refused_by_name_and_before_anything_begins(group):
    for tensors, error, words in (
        ([], ValueError, ["at least one tensor"]),
        ([torch.ones(5), torch.ones(1).expand(5)], UnsupportedError, ["share memory", "clone()"]),
        ([torch.ones(5), [1.0]], UnsupportedError, ["list", "torch.Tensor"]),
        ([torch.ones(50_000), torch.ones(5, dtype=torch.int16)], UnsupportedError, ["int16", "convert"]),
        ([torch.ones(5), torch.ones(5, device="meta")], UnsupportedError, ["cpu and meta", "one device"]),
    ):
        refused(group, {}, lambda c, t=tensors: c.all_reduce_coalesced(t), error, *words)
    two = [torch.ones(50_000), torch.ones(50_000).double()]
    for how, words in (
        ({"names": ["one"]}, ["names must have one entry for each of 2 tensors, got 1"]),
        ({"parts": [[ParameterSlice("one", 50_000)]]}, ["parts must have one entry for each of 2 tensors, got 1"]),
        ({"names": ["one", "two"], "parts": [[ParameterSlice("one", 50_000)]] * 2}, ["pass name or parts, not both"]),
        ({"parts": [[ParameterSlice("one", 7)]] * 2}, ["tensor 0", "50000 elements", "got 7"]),
    ):
        refused(group, {}, lambda c, h=how: c.all_reduce_coalesced(two, **h), ValueError, *words)
    feedback = {"quantizer": {"error_feedback": True}}
    refused(
        group, feedback, lambda c: c.all_reduce_coalesced(two, names=["one", None]), UnsupportedError, "needs a name"
    )
    assert all((tensor == 1).all() for tensor in two)  # the first dtype was not reduced either


@ranks(2, 3)
@pytest.mark.parametrize("schedule", ["direct", "halving"])
def test_a_rank_that_leaves_is_a_peer_error_and_the_tensors_stay(group, schedule):
    transport = {"timeout_seconds": 20, "min_bytes": 0, "schedule": schedule}
    communicator = Communicator({"transport": transport}, group)
    tensors = several()
    communicator.all_reduce_coalesced(tensors)
    if last:
        communicator.abort()
    else:
        tensors = several()
        raises(PeerError, lambda: communicator.all_reduce_coalesced(tensors))
        assert digests(tensors) == digests(several())
        handle_error = None
        try:
            communicator.all_reduce_coalesced(tensors, async_op=True)
        except NczError as error:
            handle_error = error
        assert isinstance(handle_error, PeerError)
    communicator.close()


@ranks(2, 3)
def test_one_rank_by_itself_keeps_its_values(group):
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    with Communicator(group=alone) as communicator:
        tensors = several()
        handle = communicator.all_reduce_coalesced(tensors, async_op=True)
        assert handle.wait() and digests(tensors) == digests(several())
        assert counted(communicator) == (1, 0, {"one rank": 1})
