"""hvd.DistributedOptimizer where other settings alone do not lead."""

import copy
import warnings
from functools import partial

import pytest

pytest.importorskip("horovod")

import horovod.torch as hvd
import torch
import torch.distributed as dist
from on_rank import BF16_ROUNDING, of_all_ranks, raises, rank, same_on_all_ranks, world_size
from scenarios import HOROVOD, ranks
from torch import nn
from under_horovod import (
    INPUTS,
    OUTPUTS,
    gradients,
    largest,
    largest_error,
    loss_of,
    new_model,
    own_values,
    sha256,
    wrapped,
)

import ncz_plugins.horovod
from ncz_plugins import ConfigError
from ncz_plugins.core.errors import UnsupportedError
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.horovod import NCZ
from ncz_plugins.horovod.transport import HorovodTransport

pytestmark = pytest.mark.slow

BOUND = 2e-4
ROUNDING = 2.0**-22  # of sums that two runs add in another order, as a share of the largest value
COMPRESSED_ONCE = {"calls": 1, "compressed": 1, "bypasses": {}}
WITH_PROCESS_SETS = HOROVOD | {"environment": {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}}
on_two_ranks = ranks(2, **WITH_PROCESS_SETS)
on_three_ranks = ranks(3, **WITH_PROCESS_SETS)


def plain_once(reason: str) -> dict:
    return {"calls": 1, "compressed": 0, "bypasses": {reason: 1}}


def bounded(value: float = BOUND) -> dict:
    return {"quantizer": {"mode": "abs", "value": value}, "transport": {"min_bytes": 0}}


def like(model: nn.Module, new) -> nn.Module:
    """A second model with the same weights."""
    twin = new()
    twin.load_state_dict(model.state_dict())
    return twin


def reduced(model: nn.Module, optimizer, loss) -> list[torch.Tensor]:
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.synchronize()
    return gradients(model)


def step(optimizer) -> None:
    with optimizer.skip_synchronize():
        optimizer.step()


def counts(compressor: NCZ) -> list[dict]:
    return [
        {"calls": s.calls, "compressed": s.compressed_calls, "bypasses": s.bypasses} for s in compressor.stats.steps
    ]


def same_replicas(*models: nn.Module) -> None:
    same_on_all_ranks(sha256([parameter for model in models for parameter in model.parameters()]))


# ------------------------------------------------------------------ kinds of gradients


@pytest.mark.parametrize("sparse_as_dense", [False, True], ids=["sparse", "sparse as dense"])
@on_two_ranks
def test_sparse_gradients_stay_sparse_and_the_others_are_compressed(group, sparse_as_dense):
    """Gradients of an embedding are sparse, those of the rest dense."""

    def new():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(300, 40, sparse=True), nn.Linear(40, 200), nn.GELU(), nn.Linear(200, 3))

    def loss(model):
        tokens = own_values((4, 6), 5, torch.int64).abs() + 7 * rank
        return model(tokens).square().sum()

    model, compressor = new(), NCZ(bounded())
    optimizer = wrapped(model, compressor, sparse_as_dense=sparse_as_dense)
    plain = like(model, new)
    expected = reduced(plain, wrapped(plain, hvd.Compression.none, "plain.", sparse_as_dense=sparse_as_dense), loss)
    ours = reduced(model, optimizer, loss)
    bound = BOUND + ROUNDING * largest(expected)
    embedding_error = largest_error(ours[:1], expected[:1])
    assert model[0].weight.grad.is_sparse
    assert 0 < largest_error(ours[1:], expected[1:]) <= bound
    embedding_bytes = model[0].weight.nbytes
    other_bytes = sum(p.nbytes for p in model.parameters()) - embedding_bytes
    if sparse_as_dense:
        assert 0 < embedding_error <= bound
        assert compressor.stats.total.bytes_in == other_bytes + embedding_bytes
    else:
        assert embedding_error == 0
        assert compressor.stats.total.bytes_in == other_bytes
    step(optimizer)
    assert counts(compressor) == [COMPRESSED_ONCE]
    same_replicas(model)


POISONED_RANK = 1
POISONED = {(3, 5): float("nan"), (100, 7): float("inf")}  # places in the first weight's gradient


def poison(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    for place, value in POISONED.items():
        gradient[place] = value
    return gradient


@on_two_ranks
def test_what_is_not_finite_comes_out_where_it_was_on_every_rank(group):
    """In the first of two steps one rank's gradient of the first weight has values that are not finite."""
    compressor, model = NCZ(bounded()), new_model()
    plain = like(model, new_model)
    results = []
    for each, compression, prefix in ((model, compressor, ""), (plain, hvd.Compression.none, "plain.")):
        optimizer = wrapped(each, compression, prefix)
        hook = each.entry.weight.register_hook(poison) if rank == POISONED_RANK else None
        results.append(reduced(each, optimizer, lambda m: loss_of(m, 0)))
        if hook:
            hook.remove()
        if each is model:
            reduced(each, optimizer, lambda m: loss_of(m, 1))
    ours, expected = results
    first, *others = [[tuple(place) for place in (~g.isfinite()).nonzero().tolist()] for g in ours]
    assert first == sorted(POISONED) and others == [[]] * 7
    for a, b in zip(ours, expected):
        assert all(torch.equal(f(a), f(b)) for f in (torch.isnan, torch.isposinf, torch.isneginf))
    finite, expected = ([g.nan_to_num(0, 0, 0) for g in each] for each in results)
    assert largest_error(finite, expected) <= ROUNDING * largest(expected)
    assert counts(compressor) == [plain_once("non-finite"), COMPRESSED_ONCE]


@on_two_ranks
def test_a_model_below_min_bytes_goes_plain_and_counted(group):
    def new():
        torch.manual_seed(0)
        return nn.Linear(INPUTS, OUTPUTS)

    model, compressor = new(), NCZ()
    plain = like(model, new)
    ours, expected = (
        reduced(m, wrapped(m, compression, prefix), lambda m: loss_of(m, 0))
        for m, compression, prefix in ((model, compressor, ""), (plain, hvd.Compression.none, "plain."))
    )
    assert counts(compressor) == [plain_once("too small")]
    assert largest_error(ours, expected) <= ROUNDING * largest(expected)


# ------------------------------------------------------------------ what programs do between synchronize and step


@on_two_ranks
def test_gradients_can_be_clipped_between_synchronize_and_step(group):
    model, compressor = new_model(), NCZ(bounded())
    optimizer = wrapped(model, compressor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Horovod's, of a step that would reduce a second time
        for number in range(3):
            reduced(model, optimizer, lambda m, number=number: loss_of(m, number))
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            norm = torch.stack([g.norm() for g in gradients(model)]).norm().item()
            assert norm == pytest.approx(0.01, rel=1e-3)
            step(optimizer)
    assert counts(compressor) == [COMPRESSED_ONCE] * 3
    same_replicas(model)


def stay_in_one_buffer(dtype=torch.float32, process_set=hvd.global_process_set, **how) -> None:
    """Gradients are views of one buffer, as optimizers with flat memory have them, and must stay there."""
    transport = {"min_bytes": how.pop("min_bytes", 0), "schedule": how.pop("schedule", "direct")}
    passes = how.get("backward_passes_per_step", 1)
    config = bounded() | {"transport": transport}
    models = [new_model(dtype), new_model(dtype)]
    # Each has an optimizer and a compressor of its own, so both give the same bits.
    optimizers = [wrapped(m, NCZ(config), f"{i}.", process_set=process_set, **how) for i, m in enumerate(models)]
    parameters = list(models[0].parameters())
    buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype)
    views = [view.view_as(p) for view, p in zip(buffer.split([p.numel() for p in parameters]), parameters)]
    for parameter, view in zip(parameters, views):
        parameter.grad = view
    for number in range(3):
        buffer.zero_()
        optimizers[1].zero_grad()
        for model, optimizer in zip(models, optimizers):
            for each in range(passes):
                loss_of(model, passes * number + each).backward()
            optimizer.synchronize()
        assert all(p.grad.data_ptr() == view.data_ptr() for p, view in zip(parameters, views))
        assert torch.equal(buffer, torch.cat([p.grad.flatten() for p in models[1].parameters()]))
        buffer.mul_(0.5)  # as clipping does, to both
        for parameter in models[1].parameters():
            parameter.grad.mul_(0.5)
        for optimizer in optimizers:
            step(optimizer)
    assert sha256(parameters) == sha256(models[1].parameters())


@on_two_ranks
def test_gradients_stay_in_a_buffer_that_the_program_keeps_them_in(group):
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        stay_in_one_buffer(dtype)
    for how in (
        {},
        {"groups": 2},
        {"backward_passes_per_step": 2},
        {"schedule": "ring"},
        {"min_bytes": 1 << 30},  # all of it goes plain
    ):
        stay_in_one_buffer(**how)


@on_three_ranks
def test_so_do_those_of_a_process_set(group):
    pair = hvd.add_process_set([0, 2])
    if pair.included():
        stay_in_one_buffer(process_set=pair)
    hvd.remove_process_set(pair)


# ------------------------------------------------------------------ gradients that are skipped

OVERFLOWN = 3  # the step that the program skips, as a loss scaler does


def freeze_in_turns(model: nn.Module, number: int) -> None:
    model.b.requires_grad_(number % 2 == 0)


def overflow_once(model: nn.Module, number: int) -> None:
    if number == OVERFLOWN and rank == POISONED_RANK:
        model.entry.weight.grad = torch.full_like(model.entry.weight, torch.inf)  # which the backward pass adds to


# How gradients are skipped: the branches that this rank uses, in turns; what is done before a step; and what the
# optimizer is told besides.
SKIPPED = {
    "used in turns": (["a", "b"], None, {}),
    "used in turns, in groups": (["a", "b"], None, {"groups": 2}),
    "used in turns, accumulated": (["a", "b", "b", "ab"], None, {"backward_passes_per_step": 2}),
    "used in turns by one rank": (["ab", "a"] if rank == 0 else ["ab"], None, {}),
    "frozen in turns": (["ab"], freeze_in_turns, {}),
    "one overflows": (["ab"], overflow_once, {}),
}


@pytest.mark.parametrize("case", SKIPPED)
@on_two_ranks
def test_sums_are_off_by_what_is_kept_and_nothing_else_where_gradients_are_skipped(group, case):
    """The gradients that came out over some steps, beside those of a plain twin and what is kept."""
    branches, change, how = SKIPPED[case]
    quantizer = {"kind": "error_bound", "value": 1.0, "error_feedback": True}
    compressor, passes = NCZ(bounded() | {"quantizer": quantizer}), how.get("backward_passes_per_step", 1)
    models = new_model(), new_model()
    optimizers = wrapped(models[0], compressor, **how), wrapped(models[1], hvd.Compression.none, "plain.", **how)
    off = [0.0 for _ in models[0].parameters()]
    for number in range(6):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            if change:
                change(model, number)
            for each in range(passes * number, passes * (number + 1)):
                loss_of(model, each, branches=branches[each % len(branches)]).backward()
            optimizer.synchronize()
        if change is overflow_once and number == OVERFLOWN:
            continue
        ours, expected = map(gradients, models)
        off = [o + a.double() - b.double() for o, a, b in zip(off, ours, expected)]
        # Gradients of parameters that no rank has used are zero.
        assert largest([a for a, b in zip(ours, expected) if not b.any()]) == 0
    kept = compressor.training.residuals.by_name
    explained = {name: hvd.allreduce(each.double(), name=f"kept {name}") for name, each in kept.items()}
    names = [name for name, _ in models[0].named_parameters()]
    assert sorted(explained) == sorted(names)
    assert largest(off) / largest(gradients(models[1])) > 0.05
    rounding = 6 * largest(kept.values()) * BF16_ROUNDING
    assert largest([o.flatten() + explained[name] for o, name in zip(off, names)]) < rounding + 1e-5


@on_two_ranks
def test_a_group_may_be_complete_in_one_step_and_not_in_another(group):
    """In the second of three steps no rank has a gradient for some members of both groups."""
    model, compressor = new_model(), NCZ(bounded())
    plain = like(model, new_model)
    optimizer = wrapped(model, compressor, groups=2)
    plain_optimizer = wrapped(plain, hvd.Compression.none, "plain.", groups=2)
    for number, branches in enumerate(["ab", "a", "ab"]):
        plain.load_state_dict(model.state_dict())
        ours, expected = (
            reduced(m, o, lambda m, number=number, branches=branches: loss_of(m, number, branches=branches))
            for m, o in ((model, optimizer), (plain, plain_optimizer))
        )
        assert 0 < largest_error(ours, expected) <= 1.01 * BOUND
        step(optimizer)
    assert counts(compressor) == [COMPRESSED_ONCE] * 3
    same_replicas(model)


# ------------------------------------------------------------------ optimizers and configurations that change


@on_two_ranks
def test_restoring_the_optimizer_forgets_what_was_pending(group):
    """The optimizer is restored after backward: those gradients must be forgotten."""
    model, compressor = new_model(), NCZ(bounded())
    optimizer = wrapped(model, compressor)
    loss_of(model, 0).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    plain = like(model, new_model)
    ours = reduced(model, optimizer, lambda m: loss_of(m, 1))
    expected = reduced(plain, wrapped(plain, hvd.Compression.none, "plain."), lambda m: loss_of(m, 1))
    step(optimizer)
    assert 0 < largest_error(ours, expected) <= 1.01 * BOUND
    assert counts(compressor) == [COMPRESSED_ONCE]
    same_replicas(model)


@on_two_ranks
def test_the_configuration_can_change_between_steps(group):
    """As Config or as anything else. An invalid one is refused, and the one before stays."""
    model, compressor = new_model(), NCZ(bounded())
    optimizer = wrapped(model, compressor)
    plain = like(model, new_model)
    plain_optimizer = wrapped(plain, hvd.Compression.none, "plain.")
    ratios = []
    for bound in (1e-2, 1e-3, 1e-5):
        compressor.config = bounded(bound)
        ours, expected = (
            reduced(m, o, lambda m: loss_of(m, 0)) for m, o in ((model, optimizer), (plain, plain_optimizer))
        )
        assert bound / 10 < largest_error(ours, expected) <= bound + ROUNDING * largest(expected)
        ratios.append(compressor.stats.steps[-1].ratio)
    assert ratios == sorted(ratios, reverse=True)
    before = compressor.config
    raises(ConfigError, lambda: setattr(compressor, "config", bounded(-1)), "quantizer.value: -1 is not allowed")
    assert compressor.config is before


@on_two_ranks
def test_two_optimizers_can_share_one_ncz(group):
    """One rank has a gradient less, which is known only when the second is synchronized."""
    compressor = NCZ(bounded())
    models = [new_model(), new_model()]
    plain_models = [new_model(), new_model()]
    optimizers = [wrapped(m, compressor, f"{i}.") for i, m in enumerate(models)]
    plain_optimizers = [wrapped(m, hvd.Compression.none, f"{i}.plain.") for i, m in enumerate(plain_models)]
    branches = "ab" if rank == 0 else "b"
    for some, their_optimizers in ((models, optimizers), (plain_models, plain_optimizers)):
        (loss_of(some[0], 0, branches=branches) + loss_of(some[1], 1, branches=branches)).backward()
        for optimizer in their_optimizers:
            optimizer.synchronize()
    for optimizer in optimizers:
        step(optimizer)
    ours, expected = ([*gradients(a), *gradients(b)] for a, b in (models, plain_models))
    assert 0 < largest_error(ours, expected) <= 1.01 * BOUND
    assert counts(compressor) == [COMPRESSED_ONCE] * 2
    same_replicas(*models)


@on_two_ranks
def test_the_first_group_of_parameters_can_be_empty(group):
    """As where parameters are sorted into groups, one of which gets none."""
    model, compressor = new_model(), NCZ(bounded())
    sgd = torch.optim.SGD([{"params": []}, {"params": model.parameters()}], lr=0.05)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=compressor)
    loss_of(model, 0).backward()
    optimizer.step()
    assert counts(compressor) == [COMPRESSED_ONCE]
    same_replicas(model)


@on_two_ranks
def test_a_copy_of_a_model_with_a_frozen_layer_can_train_all_of_it(group):
    """A copy of the model has none of the hooks that Horovod gave the first one."""
    model, compressor = new_model(), NCZ(bounded())
    model.entry.requires_grad_(False)
    for frozen, steps in ((True, 1), (False, 2)):
        if not frozen:
            model = copy.deepcopy(model).requires_grad_(True)
        optimizer = wrapped(model, compressor)
        for number in range(steps):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
    first, *others = (done.bytes_in for done in compressor.stats.steps)
    all_bytes = sum(p.nbytes for p in model.parameters())
    assert 0 < first < all_bytes
    assert others == [all_bytes] * 2
    same_replicas(model)


@on_two_ranks
def test_a_metric_can_be_averaged_before_the_optimizer_synchronizes(group):
    """Between backward and synchronize, with the optimizer's own NCZ, while one rank has a gradient less."""
    compressor, model = NCZ(bounded()), new_model()
    optimizer = wrapped(model, compressor)
    loss_of(model, 0, branches="ab" if rank == 0 else "b").backward()
    metric = ncz_plugins.horovod.allreduce(torch.tensor([float(rank)] * 100), compression=compressor)
    optimizer.step()
    assert (metric - (world_size - 1) / 2).abs().max() <= 1.01 * BOUND
    same_replicas(model)


# ------------------------------------------------------------------ the transport


@on_two_ranks
def test_the_transport_reduces_uncompressed_and_agrees(group):
    opened = HorovodTransport(hvd.global_process_set, "transport")
    share, total = float(1 + rank), world_size * (world_size + 1) / 2
    for op, expected in (
        (dist.ReduceOp.SUM, total),
        (dist.ReduceOp.AVG, total / world_size),
        (dist.ReduceOp.MAX, world_size),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.full((1000,), share, dtype=dtype)
            work = opened.plain.all_reduce(tensor, op)
            assert work.wait() and work.wait() and work.is_completed()
            assert tensor.unique().tolist() == [expected]
    scaled = torch.full((1000,), share)
    opened.plain.all_reduce(scaled, scale=0.5).wait()
    assert scaled.unique().tolist() == [total / 2]
    highest = torch.tensor([share, -share])
    opened.start_max(highest, Counters()).wait()
    assert highest.tolist() == [world_size, -1]
    raises(UnsupportedError, lambda: opened.plain.broadcast(scaled, 0), "no broadcast")
    raises(UnsupportedError, lambda: opened.streams([(0, 1)], [1], 4096, Counters()), "direct schedule only")
    (stream,) = opened.streams([(0, 0)], [1], 4096, Counters())
    raises(UnsupportedError, lambda: stream.send(scaled), "only be exchanged")


# ------------------------------------------------------------------ process sets


def same_on(process_set, value: object) -> None:
    """Fail on the ranks of a process set unless they have the same `value`. Every rank calls it."""
    everyone = of_all_ranks(value)
    assert not process_set.included() or len({everyone[each] for each in process_set.ranks}) == 1


@pytest.mark.parametrize("groups", [None, 2])
@on_three_ranks
def test_the_optimizer_reduces_over_its_own_process_set(group, groups):
    pair, compressor = hvd.add_process_set([0, 2]), NCZ(bounded())
    model = new_model()
    plain = like(model, new_model)
    ours, expected = (
        reduced(m, wrapped(m, compression, prefix, process_set=pair, groups=groups), lambda m: loss_of(m, 0))
        for m, compression, prefix in ((model, compressor, ""), (plain, hvd.Compression.none, "plain."))
    )
    assert pair.included() == (rank != 1)
    assert compressor.stats.total.compressed_calls == (rank != 1)
    assert rank == 1 or 0 < largest_error(ours, expected) <= 1.01 * BOUND
    first, second, third = of_all_ranks(sha256(ours))
    assert first == third != second
    hvd.remove_process_set(pair)


def three_pairs() -> list[hvd.ProcessSet]:
    """Process sets that overlap."""
    return [hvd.add_process_set(pair) for pair in ([0, 1], [0, 2], [1, 2])]


def name_of(process_set: hvd.ProcessSet) -> str:
    return " ".join(map(str, process_set.ranks))


def remove(process_sets: list[hvd.ProcessSet]) -> None:
    for process_set in process_sets:
        hvd.remove_process_set(process_set)


@on_three_ranks
def test_sums_over_overlapping_process_sets_can_be_started_in_another_order_on_each_rank(group):
    pairs, compressor = three_pairs(), NCZ(bounded())
    mine = [pair for pair in pairs if pair.included()]
    handles = {}
    for pair in mine[:: -1 if rank == 1 else 1]:
        how = {"name": name_of(pair), "op": hvd.Sum, "process_set": pair, "compression": compressor}
        handles[pair] = ncz_plugins.horovod.allreduce_async(own_values(5000), **how)
    ours = {pair: hvd.synchronize(handle) for pair, handle in handles.items()}
    for pair in mine:
        expected = hvd.allreduce(own_values(5000), name=f"plain {name_of(pair)}", op=hvd.Sum, process_set=pair)
        assert 0 < largest_error([ours[pair]], [expected]) <= 2.01 * BOUND  # a sum of two
    for pair in pairs:
        same_on(pair, sha256([ours[pair]]) if pair in ours else None)
    remove(pairs)


def second_of_a_group(tensor: torch.Tensor, **how) -> torch.Tensor:
    """The average of a tensor that is the second one of a group."""
    return ncz_plugins.horovod.grouped_allreduce([torch.ones(3), tensor], **how)[1]


@pytest.mark.parametrize("case", ["ring", "group"])
@on_three_ranks
def test_averages_over_each_process_set(group, case):
    average = {"ring": ncz_plugins.horovod.allreduce, "group": second_of_a_group}[case]
    schedule = "ring" if case == "ring" else "auto"
    compressor = NCZ(bounded() | {"transport": {"min_bytes": 0, "schedule": schedule}})
    pairs = three_pairs()
    for pair in pairs:
        found = None
        if pair.included():
            ours = average(own_values(5000), name=case, process_set=pair, compression=compressor)
            expected = hvd.allreduce(own_values(5000), name=f"plain {case}", process_set=pair)
            assert 0 < largest_error([ours], [expected]) <= 1.01 * BOUND
            found = sha256([ours])
        same_on(pair, found)
    remove(pairs)


@on_three_ranks
def test_error_feedback_tells_process_sets_apart(group):
    compressor = NCZ(quantizer={"value": 0.1, "error_feedback": True}, transport={"min_bytes": 0})
    pairs = three_pairs()
    mine = [pair for pair in pairs if pair.included()]
    for pair in mine:
        ncz_plugins.horovod.allreduce(own_values(5000), name="same", process_set=pair, compression=compressor)
    kept = sorted(compressor.training.residuals.by_name)
    assert kept == [f"allreduce/ranks {name_of(pair)}/same" for pair in mine]
    remove(pairs)


@on_three_ranks
def test_a_new_process_set_may_get_the_number_of_a_removed_one(group):
    """Ranks 0 and 1 have made another number of calls before they find themselves in a set of that number."""
    compressor = NCZ(bounded())
    pair = hvd.add_process_set([0, 2])
    number = pair.process_set_id
    if pair.included():
        ncz_plugins.horovod.allreduce(own_values(5000), process_set=pair, compression=compressor)
    hvd.remove_process_set(pair)
    mixed = hvd.add_process_set([0, 1])
    while mixed.process_set_id != number:  # it has got that of a set that an earlier test removed
        hvd.remove_process_set(mixed)
        mixed = hvd.add_process_set([0, 1])
    found = None
    if mixed.included():
        ours, expected = (
            average(own_values(5000), name="reused", process_set=mixed)
            for average in (partial(ncz_plugins.horovod.allreduce, compression=compressor), hvd.allreduce)
        )
        assert 0 < largest_error([ours], [expected]) <= 1.01 * BOUND
        found = sha256([ours])
    same_on(mixed, found)
    hvd.remove_process_set(mixed)


@on_three_ranks
def test_a_process_set_of_one_rank(group):
    alone, compressor = hvd.add_process_set([1]), NCZ(bounded())
    assert alone.included() == (rank == 1)
    if alone.included():
        ours = ncz_plugins.horovod.allreduce(own_values(5000), process_set=alone, compression=compressor)
        assert torch.equal(ours, own_values(5000))
        assert counts(compressor) == [plain_once("one rank")]
    hvd.remove_process_set(alone)


# ------------------------------------------------------------------ ranks that have joined


@on_three_ranks
def test_while_a_rank_has_joined_gradients_are_not_reduced_early(group):
    """The first rank takes a step less than the others, which would else reduce their last gradients early."""
    model, compressor = new_model(), NCZ(bounded())
    optimizer = wrapped(model, compressor)
    for number in range(2):
        reduced(model, optimizer, lambda m, number=number: loss_of(m, number))
        step(optimizer)
    plain = like(model, new_model)
    if rank > 0:
        loss = partial(loss_of, number=2)
        expected = reduced(plain, wrapped(plain, hvd.Compression.none, "plain."), loss)
        assert largest_error(reduced(model, optimizer, loss), expected) <= ROUNDING * largest(expected)
    hvd.join()
    assert counts(compressor) == [COMPRESSED_ONCE] * 2 + [plain_once("a rank has joined")] * (rank > 0)


@on_three_ranks
def test_while_a_rank_has_joined_the_others_reduce_plain_and_then_all_go_on_compressed(group):
    """The first rank has run out of data, and contributes zeros; then all go on together."""
    compressor, results = NCZ(bounded()), []
    if rank > 0:
        for _ in range(2):
            results.append(ncz_plugins.horovod.allreduce(own_values(5000), compression=compressor))
    last = hvd.join()
    ncz_plugins.horovod.allreduce(own_values(5000), compression=compressor)
    everyone = [torch.randn(5000, generator=torch.Generator().manual_seed(1000 * r)) for r in range(1, world_size)]
    assert all(torch.allclose(each, sum(everyone) / world_size, atol=1e-6) for each in results)
    total = compressor.stats.total
    assert total.bypasses == ({"a rank has joined": 2} if rank > 0 else {}) and total.compressed_calls == 1
    same_on_all_ranks(last)
