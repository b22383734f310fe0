"""Gradients that are reduced while others are computed, beside other calls. All tests take the same steps."""

import os
import signal
import time
from contextlib import contextmanager, nullcontext
from functools import cache, partial

import pytest

pytest.importorskip("horovod")

import horovod.torch as hvd
import torch
from on_rank import attempt, rank, same_on_all_ranks, start, world_size
from scenarios import HOROVOD, ranks, report, run_ranks
from under_horovod import largest_error, loss_of, new_model, own_values, sha256, wrapped

import ncz_plugins.horovod
from ncz_plugins import MismatchError, kernels
from ncz_plugins.horovod import NCZ, bucket_plan

pytestmark = pytest.mark.slow

STEPS = 4
SOON = 60.0
CONFIG = {"quantizer": {"mode": "abs", "value": 2e-4}, "transport": {"min_bytes": 0}}
ORDERS = "ab", "ba"  # of the branches of the model, for even and for odd ranks
on_three_ranks = ranks(
    3, start="with_small_buckets", **HOROVOD | {"environment": {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}}
)


def with_small_buckets() -> None:
    """Join the other ranks. The small model has several buckets."""
    bucket_plan.BUCKET_BYTES = 32 << 10
    start()


def train(compressor: NCZ, optimizer, model, beside=nullcontext, branches="ab", steps=range(STEPS)) -> list[list[int]]:
    """Take steps. `beside` is entered before the backward pass and left after it.

    Returns how many calls there were before and after each `optimizer.step()`.
    """
    calls = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step, branches=branches)
        with beside():
            loss.backward()
        before = compressor.stats.total.calls
        optimizer.step()
        calls.append([before, compressor.stats.total.calls])
    return calls


def new_optimizer(schedule: str = "auto"):
    """A compressor, a model, and its optimizer."""
    compressor, model = NCZ({**CONFIG, "transport": {"min_bytes": 0, "schedule": schedule}}), new_model()
    return compressor, model, wrapped(model, compressor)


def train_never_ahead(branches: str = "ab"):
    """Take the steps with a compressor that another optimizer shares, which keeps both from running ahead.

    Returns the model, and what `train` returns.
    """
    compressor, model, optimizer = new_optimizer()
    other = wrapped(new_model(), compressor, "other.")
    assert not compressor.may_run_ahead and other is not optimizer
    calls = train(compressor, optimizer, model, branches=branches)
    return model, calls


@cache
def never_ahead() -> str:
    """A hash of the weights after steps without anything ahead, with which many tests compare theirs."""
    model, _ = train_never_ahead()
    return sha256(model.parameters())


def as_never_ahead(compressor: NCZ, *models) -> None:
    """Fail unless models have the bits that steps without anything ahead give, on every rank."""
    digest = never_ahead()
    assert all(sha256(model.parameters()) == digest for model in models)
    same_on_all_ranks(digest)
    assert compressor.training.step == STEPS


@on_three_ranks
def test_nothing_is_reduced_ahead_where_optimizers_share_a_compressor(group):
    model, calls = train_never_ahead()
    assert [before for before, _ in calls] == [0, *(after for _, after in calls[:-1])]
    same_on_all_ranks(sha256(model.parameters()))


@on_three_ranks
def test_all_is_reduced_before_it_is_waited_for_from_the_second_step_on(group):
    """All that can be reduced ahead gets the time for it: nothing is left when the program waits.

    What a rank does to its own gradients in the meantime has no effect.
    """
    compressor, model, optimizer = new_optimizer()
    [[before, first]] = train(compressor, optimizer, model, steps=[0])
    assert before == 0 and first > 2
    for step in range(1, STEPS):
        expected = first * (step + 1)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        deadline = time.monotonic() + 60
        while compressor.stats.total.calls < expected and time.monotonic() < deadline:
            time.sleep(0.01)
        assert compressor.stats.total.calls == expected
        for parameter in model.parameters():
            parameter.grad.mul_(rank)
        optimizer.step()
        assert compressor.stats.total.calls == expected
    as_never_ahead(compressor, model)


@pytest.mark.parametrize("schedule", ["direct", "ring"])
@on_three_ranks
def test_the_bits_do_not_depend_on_when_gradients_are_reduced(group, schedule):
    compressor, model, optimizer = new_optimizer(schedule)
    train(compressor, optimizer, model)
    as_never_ahead(compressor, model)


@contextmanager
def metric(compressor: NCZ, process_set=hvd.global_process_set):
    """A single all-reduce that is asked for before the backward pass and waited for after it."""
    handle = ncz_plugins.horovod.allreduce_async(
        own_values(5000), name="metric", compression=compressor, process_set=process_set
    )
    time.sleep(0.03 * (rank == 0))
    yield
    time.sleep(0.03 * (rank == 1))
    hvd.synchronize(handle)


@on_three_ranks
def test_nor_on_a_metric_beside_by_the_same_compressor(group):
    compressor, model, optimizer = new_optimizer()
    train(compressor, optimizer, model, partial(metric, compressor))
    as_never_ahead(compressor, model)


@on_three_ranks
def test_nor_on_calls_of_another_process_set(group):
    """Ranks 0 and 1 have another call of their own: before what is ahead on one of them, after it on the other."""
    compressor, model, optimizer = new_optimizer()
    pair = hvd.add_process_set([0, 1])
    train(compressor, optimizer, model, partial(metric, NCZ(CONFIG), pair) if pair.included() else nullcontext)
    hvd.remove_process_set(pair)
    as_never_ahead(compressor, model)


@on_three_ranks
def test_nor_on_a_second_model(group):
    """Two optimizers whose backward passes come before either synchronizes, in another order on each rank."""
    models = [new_model(), new_model()]
    compressors = [NCZ(CONFIG), NCZ(CONFIG)]
    optimizers = [wrapped(model, ncz, f"{at}.") for at, (model, ncz) in enumerate(zip(models, compressors))]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for model in models[:: 1 if rank == 0 else -1]:
            loss_of(model, step).backward()
            time.sleep(0.01 * rank)
        for optimizer in optimizers:
            optimizer.step()
    as_never_ahead(compressors[0], *models)


@on_three_ranks
def test_nor_on_gradients_that_are_dropped(group):
    """Each backward pass is taken twice: what came of the first is dropped, whether it was reduced or not."""
    compressor, model, optimizer = new_optimizer()
    for step in range(STEPS):
        for again in (True, False):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if again:
                optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    as_never_ahead(compressor, model)


@on_three_ranks
def test_nor_on_gradients_that_are_dropped_in_part(group):
    """The first pass has not come to all gradients, and the second comes to them in another order."""
    compressor, model, optimizer = new_optimizer()
    train(compressor, optimizer, model, steps=[0])
    for step in range(1, STEPS):
        for branches in ("a", ORDERS[rank % 2]):
            optimizer.zero_grad()
            loss_of(model, step, branches=branches).backward()
            if branches == "a":
                optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    as_never_ahead(compressor, model)


@on_three_ranks
def test_nor_on_which_gradients_a_rank_has(group):
    branches = "ab" if rank % 2 == 0 else "a"
    compressor, model, optimizer = new_optimizer()
    train(compressor, optimizer, model, branches=branches)
    expected, _ = train_never_ahead(branches)
    assert sha256(model.parameters()) == sha256(expected.parameters())
    same_on_all_ranks(sha256(model.parameters()))


@on_three_ranks
def test_nor_on_the_order_in_which_ranks_have_them(group):
    compressor, model, optimizer = new_optimizer()
    train(compressor, optimizer, model, branches=ORDERS[rank % 2])
    same_on_all_ranks(sha256(model.parameters()))


@on_three_ranks
def test_ranks_that_name_parameters_in_other_orders_sum_the_same_ones(group):
    """As where the modules of a model come from a set: Horovod matches gradients by their names."""
    compressor, model = NCZ(CONFIG), new_model()
    names = list(model.named_parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(sgd, names[rank:] + names[:rank], compression=compressor)
    train(compressor, optimizer, model)
    reference, alike, its_optimizer = new_optimizer()
    train(reference, its_optimizer, alike)
    same_on_all_ranks(sha256(model.parameters()))
    # Buckets of other sizes have other quantization steps.
    assert largest_error([*model.parameters()], [*alike.parameters()]) < 1e-4


@on_three_ranks
def test_ranks_that_differ_are_refused_when_they_wait_and_can_go_on(group):
    """In the third step the ranks have different bounds; the fourth is as all others."""
    compressor, model, optimizer = new_optimizer()
    train(compressor, optimizer, model, steps=range(2))
    compressor.config = {**CONFIG, "quantizer": {"value": [0.25, 0.125][rank % 2]}}
    with pytest.raises(MismatchError, match="quantizer.value is 0.25 on rank"):
        train(compressor, optimizer, model, steps=[2])
    compressor.config = CONFIG
    optimizer.load_state_dict(optimizer.state_dict())
    train(compressor, optimizer, model, steps=[2, 3])
    same_on_all_ranks(sha256(model.parameters()))


def die_while_others_compute() -> dict | None:
    """The last rank dies at its first frame of the third step."""
    with_small_buckets()
    compressor, model, optimizer = new_optimizer()
    train(compressor, optimizer, model, steps=range(2))
    if rank == world_size - 1:
        kernels.cpu_backend().encode = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return attempt(lambda: train(compressor, optimizer, model, steps=[2]))


def test_the_others_notice_a_rank_that_dies_while_they_compute(tmp_path):
    environment = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}
    finished = run_ranks(3, die_while_others_compute, tmp_path, **HOROVOD | {"environment": environment})
    assert finished[2].returncode == -signal.SIGKILL, report(finished)
    for each in finished[:2]:
        assert each.result and each.result["error"] == "HorovodInternalError", report(finished)
        assert each.result["message"] and each.result["seconds"] < SOON
