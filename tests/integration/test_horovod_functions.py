"""`allreduce` and its siblings for single tensors, beside Horovod's own; configured by NCZ_CONFIG alone."""

import gc
import itertools
import json
import os
import sys
import weakref
from functools import partial

import pytest

pytest.importorskip("horovod")

import cloudpickle
import horovod
import horovod.torch as hvd
import on_rank
import torch
from on_rank import folder, raises, rank, same_on_all_ranks, world_size
from scenarios import HOROVOD, on_ranks, ranks
from under_horovod import largest, largest_error, loss_of, new_model, own_values, sha256, wrapped

import ncz_plugins.horovod as ncz
from ncz_plugins import MismatchError
from ncz_plugins.horovod import NCZ, pending

pytestmark = pytest.mark.slow

BOUND = 2e-4
CONFIG = {"quantizer": {"mode": "abs", "value": BOUND}, "transport": {"min_bytes": 0}}
SIZE = 5001
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Of a result or two, as a share of the largest value.
ROUNDING = {torch.float64: 2.0**-22, torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def configured_by_the_environment() -> None:
    """Join the other ranks, with a file of CONFIG for `NCZ.default()`."""
    file = folder() / f"config{rank}.json"
    file.write_text(json.dumps(CONFIG))
    os.environ["NCZ_CONFIG"] = str(file)
    on_rank.start()


on_two_ranks = ranks(2, start="configured_by_the_environment", **HOROVOD)


# ------------------------------------------------------------------ compressed


def grouped(function):
    return lambda *tensors, **arguments: function(list(tensors), **arguments)


def through_handle(start):
    """An asynchronous function together with its wait."""
    return lambda *args, **kwargs: hvd.synchronize(start(*args, **kwargs))


def in_float64(tensor, **arguments):
    """Horovod's own all-reduce takes no bfloat16, and rounds often in float16."""
    return hvd.allreduce(tensor.double(), **arguments)


def same_within_the_bound(ours, plain, *inputs, scale: float = 1.0, **arguments) -> None:
    """Call both functions with the same tensors, which they must not change; one tensor stands for a list of one."""
    before = [tensor.clone() for tensor in inputs]
    calls = NCZ.default().stats.total.compressed_calls
    results = ours(*inputs, **arguments)
    expected = plain(*inputs, **arguments)
    results, expected = ([r] if isinstance(r, torch.Tensor) else list(r) for r in (results, expected))
    error = largest_error([r.double() for r in results], [e.double() for e in expected])
    assert 0 < error <= BOUND * scale + ROUNDING[inputs[0].dtype] * largest(expected)
    assert NCZ.default().stats.total.compressed_calls == calls + 1
    assert all(map(torch.equal, inputs, before))
    assert [r.dtype for r in results] == [t.dtype for t in inputs]
    same_on_all_ranks(sha256(results))


@on_two_ranks
def test_averages_and_sums_are_horovods_own_within_the_bound(group):
    check, mine = partial(same_within_the_bound, ncz.allreduce, hvd.allreduce), own_values(SIZE)
    check(mine)
    check(mine, op=hvd.Sum, scale=world_size)
    check(mine, average=False, scale=world_size)  # deprecated
    check(mine, prescale_factor=0.5, scale=0.5)
    check(mine, op=hvd.Sum, postscale_factor=3.0, scale=3.0 * world_size)
    check(mine, prescale_factor=0.25, postscale_factor=2.0, scale=0.5)
    check(mine, name="named")
    check(own_values(()))
    same_within_the_bound(through_handle(ncz.allreduce_async), through_handle(hvd.allreduce_async), mine)
    same_within_the_bound(partial(hvd.allreduce, compression=NCZ), hvd.allreduce, mine)
    transposed = own_values((30, 50, 4)).transpose(0, 2)
    same_within_the_bound(ncz.allreduce, lambda t: hvd.allreduce(t.contiguous()), transposed)


@on_two_ranks
def test_those_of_groups_too(group):
    ours, theirs, mine = grouped(ncz.grouped_allreduce), grouped(hvd.grouped_allreduce), own_values(SIZE)
    check = partial(same_within_the_bound, ours, theirs, mine)
    check(own_values((30, 40)))
    check(own_values((30, 40)), op=hvd.Sum, scale=world_size)
    check(own_values((30, 40)), prescale_factor=0.25, postscale_factor=2.0, scale=0.5)
    check(own_values((0, 3)))  # an empty one
    same_within_the_bound(
        grouped(through_handle(ncz.grouped_allreduce_async)), grouped(through_handle(hvd.grouped_allreduce_async)), mine
    )
    same_within_the_bound(grouped(partial(hvd.grouped_allreduce, compression=NCZ)), theirs, mine)


@on_two_ranks
def test_every_dtype(group):
    for dtype in FLOATS:
        # Smaller, as with that bound 16 bits would gain nothing else.
        same_within_the_bound(ncz.allreduce, in_float64, own_values(SIZE, dtype=dtype) / 32)


@on_two_ranks
def test_a_fixed_rate(group):
    """Sums and averages at 8 bits per value, whose errors are shares of the largest one."""
    compressor = NCZ(quantizer={"mode": "bits", "value": 8}, transport={"min_bytes": 0})
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for op in (hvd.Average, hvd.Sum):
            tensor = own_values(SIZE, dtype=dtype)
            result = hvd.allreduce(tensor, op=op, postscale_factor=0.5, compression=compressor)
            expected = in_float64(tensor, op=op, postscale_factor=0.5)
            # Half a step of each rank is the 254th part of a block's largest magnitude.
            assert 0 < largest_error([result.double()], [expected]) / largest([expected]) < 2 / 100
            same_on_all_ranks(sha256([result]))
    assert compressor.stats.total.compressed_calls == 6


# ------------------------------------------------------------------ exact


def goes_plain(reason: str, function, expected, tensor: torch.Tensor, **arguments) -> None:
    """What takes Horovod's own path is exact, and counted with its reason."""
    before = NCZ.default().stats.total.bypasses
    ours = function(tensor, **arguments)
    after = NCZ.default().stats.total.bypasses
    assert torch.equal(ours, expected(tensor, **arguments))
    assert {k: v - before.get(k, 0) for k, v in after.items() if v > before.get(k, 0)} == {reason: 1}


@on_two_ranks
def test_what_goes_plain_is_exact_and_counted(group):
    by_hvd = partial(hvd.allreduce, compression=NCZ)
    for dtype in (torch.int64, torch.int32):  # Horovod adds no smaller ones
        tensor = own_values(SIZE, dtype=dtype)
        goes_plain("dtype", ncz.allreduce, hvd.allreduce, tensor, op=hvd.Sum)
        goes_plain("dtype", by_hvd, hvd.allreduce, tensor)
    for op in (hvd.Min, hvd.Max, hvd.Product):
        for ours in (ncz.allreduce, by_hvd):
            goes_plain("reduce op", ours, hvd.allreduce, own_values(SIZE), op=op)
    for scale in (0.0, -2.0):
        goes_plain("reduce op", ncz.allreduce, hvd.allreduce, own_values(SIZE), prescale_factor=scale)


@on_two_ranks
def test_without_loss_and_plain_they_are_horovods_own_to_the_bit(group):
    lossless, plain = NCZ(quantizer={"kind": "lossless"}, transport={"min_bytes": 0}), NCZ(roles=["gradient"])
    for compressor in (lossless, plain):
        for dtype in (torch.float32, torch.float16):
            for how in (
                {},
                {"prescale_factor": 0.3},
                {"postscale_factor": 0.7},
                {"prescale_factor": 0.3, "postscale_factor": 0.7},
            ):
                tensor = own_values(SIZE, dtype=dtype)
                ours, theirs = ncz.allreduce(tensor, compression=compressor, **how), hvd.allreduce(tensor, **how)
                assert torch.equal(ours, theirs), (dtype, how)
    assert lossless.stats.total.compressed_calls == lossless.stats.total.calls
    assert plain.stats.total.compressed_calls == 0


# ------------------------------------------------------------------ handles and gradients


@on_two_ranks
def test_handles_can_be_waited_for_in_any_order_and_again(group):
    """In the order of their start on one rank, in reverse on the others."""
    tensors = [own_values(SIZE, number) for number in range(3)]
    started = [ncz.allreduce_async(t, name=f"handle {i}") for i, t in enumerate(tensors)]
    assert [hvd.poll(handle) for handle in started] == [False] * 3
    found = {i: hvd.synchronize(started[i]) for i in (range(3) if rank == 0 else reversed(range(3)))}
    results = [found[i] for i in range(3)]
    assert [hvd.poll(handle) for handle in started] == [True] * 3
    assert all(hvd.synchronize(handle) is result for handle, result in zip(started, results))
    assert 0 < largest_error(results, [hvd.allreduce(t) for t in tensors]) <= 1.01 * BOUND
    same_on_all_ranks(sha256(results))
    only_polled = ncz.allreduce_async(tensors[0], name="only polled")
    assert [hvd.poll(only_polled) for _ in range(2)] == [False, True]  # a loop that only polls must end


@on_two_ranks
def test_ranks_that_have_made_other_numbers_of_unnamed_calls_sum_the_same_ones(group):
    """They are about to need another digit for them."""
    pending._unnamed = itertools.count(9 - rank)
    tensors = [own_values(SIZE, number) for number in range(3)]
    started = [ncz.allreduce_async(t) for t in tensors]
    results = [hvd.synchronize(handle) for handle in started]
    for ours, tensor in zip(results, tensors):
        assert 0 < largest_error([ours], [hvd.allreduce(tensor)]) <= 1.01 * BOUND


def gradient_of_an_average(function, **how) -> torch.Tensor:
    tensor = own_values(SIZE).requires_grad_()
    (function(tensor, **how) * own_values(SIZE, 1)).sum().backward()
    return tensor.grad


def second_of_a_group(function):
    """An average that counts twice, as its input does."""
    return lambda tensor, **how: function([tensor, 2 * tensor], **how)[1]


@on_two_ranks
def test_gradients_flow_back(group):
    """Through averages, where Horovod's own reduces with the same op."""
    for ours, theirs, times in (
        (ncz.allreduce, hvd.allreduce, 1),
        (second_of_a_group(ncz.grouped_allreduce), second_of_a_group(hvd.grouped_allreduce), 2),
    ):
        for how, scale in (({}, 1), ({"op": hvd.Sum}, 2), ({"prescale_factor": 0.5, "postscale_factor": 0.25}, 1 / 8)):
            error = largest_error([gradient_of_an_average(ours, **how)], [gradient_of_an_average(theirs, **how)])
            assert 0 < error <= 1.01 * times * scale * BOUND, how


@on_two_ranks
def test_evaluation_in_inference_mode_can_average(group):
    tensor = own_values(SIZE)
    expected = hvd.allreduce(tensor)
    with torch.inference_mode():
        mine = tensor.clone()
        results = [hvd.allreduce(mine, compression=NCZ), *hvd.grouped_allreduce([mine, mine], compression=NCZ)]
    assert all(0 < largest_error([result], [expected]) <= 1.01 * BOUND for result in results)


# ------------------------------------------------------------------ the program around


def results_by_default_dtype(default: torch.dtype) -> str:
    """A hash of sums and trained weights."""
    torch.set_default_dtype(default)
    found = [ncz.allreduce(own_values(SIZE, dtype=dtype)) for dtype in FLOATS]
    for settings in ({"error_feedback": True}, {"kind": "lossless"}, {"mode": "bits", "value": 4}):
        torch.set_default_dtype(torch.float32)  # of what the model is made
        model = new_model()
        torch.set_default_dtype(default)
        optimizer = wrapped(model, NCZ(quantizer=settings, transport={"min_bytes": 0}))
        for number in range(2):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
        found += [parameter.detach() for parameter in model.parameters()]
    return sha256(found)


@on_two_ranks
def test_the_default_dtype_of_the_program_changes_no_bit(group):
    try:
        digests = {results_by_default_dtype(each) for each in (torch.float32, torch.bfloat16, torch.float64)}
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(digests) == 1


def watched_after_success() -> list[weakref.ref]:
    tensor = own_values(SIZE)
    handle = ncz.allreduce_async(tensor, name="x")
    return [weakref.ref(each) for each in (tensor, handle, hvd.synchronize(handle))]


def watched_after_failure() -> list[weakref.ref]:
    tensor = own_values(SIZE + rank)
    handle = ncz.allreduce_async(tensor, name="x")
    watched = [weakref.ref(each) for each in (tensor, handle, handle.tensors[0].tensor)]
    raises(MismatchError, partial(hvd.synchronize, handle))
    return watched


@on_two_ranks
def test_tensors_go_with_their_last_reference_also_those_of_failed_calls(group):
    """Where Python collects no garbage."""
    gc.collect()
    gc.disable()
    try:
        watched = [*watched_after_success(), *watched_after_failure()]
        watched_after_success()  # a thread that has something else to do has let go of what was before
        assert [each() for each in watched] == [None] * 6
    finally:
        gc.enable()


def take_a_step(compression: NCZ) -> tuple[list[float], int]:
    """One step; the weights after it, and how many calls were compressed."""
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(hvd.rank()))
    model(inputs).square().sum().backward()
    optimizer.step()
    return model.weight.flatten().tolist(), compression.stats.total.compressed_calls


def run_by_value() -> list:
    """What `horovod.run` brings back from two ranks, to which the function travels by value, and an NCZ with it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return horovod.run(take_a_step, args=(NCZ({"transport": {"min_bytes": 0}}),), np=2, use_gloo=True)


def test_horovod_run_takes_an_instance_to_all_ranks(tmp_path):
    [[(weights, compressed), other]] = on_ranks(1, run_by_value, tmp_path, imports=HOROVOD["imports"])
    assert other == [weights, compressed] and len(weights) == 3 * 64 and compressed == 1
