"""What lasts from step to step under Horovod: error feedback, policies, steps, the guard, records, checkpoints."""

import contextlib
import gc
import io
import json
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("horovod")

import horovod.torch as hvd
import torch
from on_rank import BF16_ROUNDING, attempt, folder, of_all_ranks, raises, rank, same_on_all_ranks, start
from scenarios import HOROVOD, on_ranks, ranks
from under_horovod import gradients, largest, largest_error, loss_of, new_model, own_values, sha256

from ncz_plugins import AccuracyError, UnsupportedError
from ncz_plugins.horovod import NCZ, allreduce, allreduce_async, grouped_allreduce

pytestmark = pytest.mark.slow

BOUND = 0.05
SIZE = 20_000
ROUNDING = 2.0**-22  # of an average or two, as a share of the largest value
FEEDBACK = {"error_feedback": True}
on_two_ranks = ranks(2, **HOROVOD)


def new_optimizer(compression, named: bool = True, **arguments):
    """A new model with its optimizer."""
    model = new_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if named:
        arguments["named_parameters"] = model.named_parameters()
    return model, hvd.DistributedOptimizer(sgd, compression=compression, **arguments)


def take_step(model, optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, number).backward()
    optimizer.step()


def compressor_with(value: float = BOUND, **sections) -> NCZ:
    quantizer = {"mode": "abs", "value": value} | sections.pop("quantizer", {})
    return NCZ(quantizer=quantizer, transport={"min_bytes": 0}, **sections)


def compressed_calls(compressor: NCZ) -> list[int]:
    return [step.compressed_calls for step in compressor.stats.steps]


# ------------------------------------------------------------------ a run, stopped and resumed

STEPS, STOPS = 8, (1, 4)  # within the warm-up, and between it and the next change of the bounds
# Every step differs from the one before in something that must be restored.
CONFIG = {
    "quantizer": {"kind": "stochastic", "value": 1.0, "error_feedback": True},
    "policies": [{"name": "*.bias", "action": "skip"}, {"name": "b.weight", "quantizer": {"value": 0.1}}],
    "steps": {"warmup": 2, "bounds": [{"step": 5, "times": 0.5}]},
    "guard": {"every": 3, "max_relative_error": 1e-9, "on_alarm": "tighten"},
    "transport": {"min_bytes": 0},
}


def train_to_the_end(model, optimizer, compression, first: int, checkpoints: Path | None = None) -> dict:
    """Take all steps that are left, with checkpoints before those of STOPS. Returns what the run has come to."""
    for number in range(first, STEPS):
        if checkpoints and number in STOPS:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ncz": compression.state_dict()}
            torch.save(states, checkpoints / f"step{number}-rank{rank}.pt")
        take_step(model, optimizer, number)
    kept = compression.state_dict()
    [of_rank] = kept[f"rank {rank}"]
    return {"sha256": sha256([*model.parameters(), *of_rank.pop("residuals").values()]), "kept": kept}


def train_and_save(checkpoints: str) -> dict:
    start()
    found = train_to_the_end(*new_optimizer(NCZ), NCZ, 0, Path(checkpoints))
    assert found["kept"]["step"] == STEPS
    return found


def resume(checkpoints: str) -> list[dict]:
    """What runs have come to that went on from each of STOPS."""
    start()
    found = []
    for stop in STOPS:
        compression = type("Fresh", (NCZ,), {})  # has a default instance of its own
        states = torch.load(Path(checkpoints, f"step{stop}-rank{rank}.pt"), weights_only=True)
        model, optimizer = new_optimizer(compression)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
        compression.load_state_dict(states["ncz"])
        found.append(train_to_the_end(model, optimizer, compression, stop))
    return found


def test_a_run_that_was_stopped_and_resumed_is_the_same_to_the_bit(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    how = HOROVOD | {"environment": {"NCZ_CONFIG": str(config)}}
    whole = on_ranks(2, train_and_save, tmp_path, tmp_path, **how)
    resumed = on_ranks(2, resume, tmp_path, tmp_path, **how)
    assert resumed == [[each] * len(STOPS) for each in whole]


# ------------------------------------------------------------------ error feedback


@on_two_ranks
def test_what_is_lost_is_made_up_for(group):
    """The sum over steps of averages, and what all ranks have kept in the end, beside the exact sum."""
    compressor = compressor_with(quantizer=FEEDBACK)
    tensors = [own_values(SIZE, number) for number in range(6)]
    results = [allreduce(t, name="x", compression=compressor) for t in tensors]
    exact = sum(hvd.allreduce(t).double() for t in tensors)
    (kept,) = compressor.training.residuals.by_name.values()
    total = sum(result.double() for result in results)
    rounding = len(tensors) * (ROUNDING * largest(results) + BOUND * BF16_ROUNDING)
    assert BOUND / 2 < largest([total - exact]) <= BOUND + rounding  # after six steps as after one
    assert largest([total + hvd.allreduce(kept.double()) - exact]) <= rounding
    assert BOUND / 2 < largest([kept]) <= BOUND * (1 + BF16_ROUNDING)


def known_after(act) -> list[str]:
    """The names by which error feedback knows tensors after `act`, which takes the compressor."""
    compressor = compressor_with(quantizer=FEEDBACK)
    act(compressor)
    return sorted(compressor.training.residuals.by_name)


def take_first_step(compressor: NCZ, **arguments) -> None:
    take_step(*new_optimizer(compressor, **arguments), 0)


def train_two_models_and_make_the_first_optimizer_anew(compressor: NCZ) -> None:
    (model, optimizer), second = new_optimizer(compressor), new_optimizer(compressor)
    take_step(model, optimizer, 0)
    take_step(*second, 0)
    del optimizer
    gc.collect()  # else its hooks stay with the parameters
    anew = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(anew, model.named_parameters(), compression=compressor)
    for number in (1, 2):
        take_step(model, optimizer, number)


def reduce_a_group(compressor: NCZ) -> None:
    grouped_allreduce([own_values(3), own_values(4)], name="g", compression=compressor)


def differentiate_an_average(compressor: NCZ) -> None:
    tensor = own_values(3).requires_grad_()
    hvd.allreduce(tensor, name="x", compression=compressor).sum().backward()


@on_two_ranks
def test_every_tensor_is_known_by_a_name_of_its_own(group):
    """For every way to hand tensors over."""
    parameters = sorted(name for name, _ in new_model().named_parameters())
    second = [f"optimizer 2/{name}" for name in parameters]
    assert known_after(take_first_step) == parameters
    assert known_after(partial(take_first_step, groups=3)) == parameters
    unnamed = [f"allreduce.noname.0.{at}" for at in range(len(parameters))]
    assert known_after(partial(take_first_step, named=False)) == unnamed
    assert known_after(train_two_models_and_make_the_first_optimizer_anew) == parameters + second
    assert known_after(reduce_a_group) == ["allreduce/g.0", "allreduce/g.1"]
    assert known_after(differentiate_an_average) == ["allreduce/x", "allreduce/x.gradient"]


def reduce_two_of_one_name(compressor: NCZ) -> None:
    handles = [allreduce_async(own_values(SIZE), name="same", compression=compressor) for _ in range(2)]
    hvd.synchronize(handles[0])


@on_two_ranks
def test_what_needs_names_is_refused_without(group):
    feeding_back = compressor_with(quantizer=FEEDBACK)
    raises(UnsupportedError, lambda: allreduce(own_values(SIZE), compression=feeding_back), "pass name=")
    twice = "2 pending tensors have the name allreduce/same"
    raises(UnsupportedError, lambda: reduce_two_of_one_name(feeding_back), twice)
    by_name = compressor_with(policies=[{"name": "*.bias", "action": "skip"}])
    raises(UnsupportedError, lambda: take_first_step(by_name, named=False), "policies[0].name: '*.bias'")


# ------------------------------------------------------------------ policies and steps


@on_two_ranks
def test_each_parameter_gets_what_its_policy_says(group):
    """One group of parameters for Horovod, three for us, after a step of warm-up."""
    policies = [
        {"name": ["*.bias", "exit.*"], "action": "skip"},
        {"name": "b.weight", "quantizer": {"value": BOUND / 50}},
    ]
    compressor = compressor_with(policies=policies, steps={"warmup": 1})
    (model, optimizer), (plain_model, plain) = new_optimizer(compressor, groups=1), new_optimizer(hvd.Compression.none)
    for number in range(2):
        for each, its_optimizer in ((model, optimizer), (plain_model, plain)):
            its_optimizer.zero_grad()
            loss_of(each, number).backward()
            its_optimizer.synchronize()
        rounding = ROUNDING * largest(gradients(plain_model))
        for (name, _), ours, expected in zip(model.named_parameters(), gradients(model), gradients(plain_model)):
            error = largest_error([ours], [expected])
            if number == 0 or name.endswith(".bias") or name.startswith("exit."):
                assert error <= rounding, name
            elif name == "b.weight":
                assert 0 < error <= BOUND / 50 + rounding
            else:
                assert BOUND / 50 < error <= BOUND + rounding, name
    warm_up, step = compressor.stats.steps
    assert (warm_up.calls, warm_up.compressed_calls, warm_up.bypasses) == (1, 0, {"warm-up": 1})
    assert (step.calls, step.compressed_calls, step.bypasses) == (3, 2, {"policy": 1})


@on_two_ranks
def test_steps_are_those_of_the_optimizer(group):
    """An average of a metric is no step, but without an optimizer it is; a new configuration is no beginning."""
    compressor, alone = compressor_with(steps={"warmup": 3}), compressor_with()
    model, optimizer = new_optimizer(compressor)
    for number in range(4):
        take_step(model, optimizer, number)
        for each in (compressor, alone):
            allreduce(own_values(SIZE), compression=each)
        if number == 1:
            compressor.config = {"steps": {"warmup": 3}, "transport": {"min_bytes": 0}, "quantizer": {"value": 0.1}}
    assert compressor.training.step == alone.training.step == 4
    # The metric after the third step belongs to the fourth, which is the first one after the warm-up.
    assert compressed_calls(compressor) == [0, 0, 0, 2]


# ------------------------------------------------------------------ the guard, and records

NEVER_CONTENT = {"every": 2, "max_relative_error": 1e-9}


@on_two_ranks
def test_the_guard_verifies_and_answers(group):
    """It writes what it found to a file."""
    file = folder() / "run.jsonl"
    guard, statistics = NEVER_CONTENT | {"on_alarm": "tighten"}, {"jsonl": str(file)}
    compressor = compressor_with(guard=guard, statistics=statistics)
    tensors = [own_values(SIZE, number) for number in range(4)]
    plain = [hvd.allreduce(tensor) for tensor in tensors]
    ours = [allreduce(tensor, name=f"tensor {at}", compression=compressor) for at, tensor in enumerate(tensors)]
    hvd.barrier()
    header, *steps = (json.loads(line) for line in file.read_text().splitlines())
    assert header["backend"] == "horovod" and header["ranks"] == 2
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert [step["bound_times"] for step in steps] == [1, 0.5, 0.5, 0.25]
    for at, (step, result, expected) in enumerate(zip(steps, ours, plain)):
        bound = step["bound_times"] * BOUND
        assert bound / 2 < largest_error([result], [expected]) <= bound + 1e-5
        if at % 2:
            assert "guard" not in step
            continue
        (finding,) = step["guard"]
        assert finding["name"] == f"tensor {at}" and finding["alarm"]
        relative_error = ((result - expected).norm() / expected.norm()).item()
        assert finding["relative_error"] == pytest.approx(relative_error, rel=1e-3)


@on_two_ranks
def test_it_stops_all_ranks_with_the_same_words(group):
    compressor = compressor_with(guard=NEVER_CONTENT | {"on_alarm": "stop"})
    stopped = attempt(lambda: take_first_step(compressor))
    assert stopped and stopped["error"] == AccuracyError.__name__
    same_on_all_ranks(stopped["message"])


# ------------------------------------------------------------------ states that come from elsewhere


@on_two_ranks
def test_ranks_that_load_nothing_follow_the_one_that_does(group):
    """As Horovod's examples do with a model."""
    before, after = (compressor_with(quantizer=FEEDBACK, steps={"warmup": 2}) for _ in range(2))
    for number in range(3):
        allreduce(own_values(SIZE, number), name="x", compression=before)
    if rank == 0:
        after.load_state_dict(before.state_dict())
    kept = largest(after.training.residuals.by_name.values())
    assert (after.training.step, kept > 0) == ((3, True) if rank == 0 else (0, False))
    result = allreduce(own_values(SIZE), name="x", compression=after)
    assert after.training.step == 4 and compressed_calls(after) == [1]  # past the warm-up
    same_on_all_ranks(sha256([result]))


@on_two_ranks
def test_they_follow_a_guard_that_has_tightened(group):
    before, after = (compressor_with(guard=NEVER_CONTENT | {"on_alarm": "tighten"}) for _ in range(2))
    allreduce(own_values(SIZE), compression=before)
    if rank == 0:
        after.load_state_dict(before.state_dict())
    result = allreduce(own_values(SIZE), compression=after)
    error = largest([result - hvd.allreduce(own_values(SIZE))])
    assert BOUND / 4 < error <= BOUND / 2 + ROUNDING * largest([result])
    same_on_all_ranks(sha256([result]))


@on_two_ranks
def test_elastic_training_can_go_back_to_a_commit_again(group):
    """Twice back to the same commit, with a step between."""
    compressor = compressor_with(quantizer=FEEDBACK)
    states = []
    for number in range(3):
        allreduce(own_values(SIZE, number), name="x", compression=compressor)
        if number == 0:
            elastic = hvd.elastic.TorchState(ncz=compressor)
        else:
            elastic.restore()
        states.append([compressor.training.step, sha256(compressor.training.residuals.by_name.values())])
    committed, *restored = states
    assert committed[0] == 1 and restored == [committed] * 2


@on_two_ranks
def test_what_another_rank_has_kept_is_left_to_it(group):
    compressor = compressor_with(quantizer=FEEDBACK)
    allreduce(own_values(SIZE), name="x", compression=compressor)
    torch.save(compressor.state_dict(), folder() / f"state{rank}.pt")
    hvd.barrier()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        compressor.load_state_dict(torch.load(folder() / f"state{1 - rank}.pt", weights_only=True))
    assert compressor.training.step == 1 and not compressor.training.residuals.by_name
    everyone = "".join(of_all_ranks(said.getvalue()))
    assert everyone.count("saved by rank 1 of 2 and is loaded by rank 0 of 2") == 1
