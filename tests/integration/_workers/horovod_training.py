"""What lasts from step to step: error feedback, policies, steps, the guard, records, and checkpoints.

usage: horovod_training.py FOLDER all|resumed
NCZ_CONFIG names the configuration of the run that leaves checkpoints in FOLDER, and of those that go on from there.
"""

import gc
import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod_common import gradients, largest, largest_error, loss_of, new_model, own_values, save, sha256

import ncz_plugins.horovod
from ncz_plugins.horovod import NCZ

FOLDER = Path(sys.argv[1])
STEPS, STOPS = 8, (1, 4)  # within the warm-up, and between it and the next change of the bounds
BOUND = 0.05
SIZE = 20_000


def wrapped(compression, named: bool = True, **arguments):
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


def refused(action) -> dict | None:
    """The error that `action` raises."""
    try:
        action()
    except Exception as error:
        return {"kind": type(error).__name__, "message": str(error)}
    return None


# ------------------------------------------------------------------ a run, stopped and resumed


def goes_on(model, optimizer, compression, start: int) -> dict:
    """All steps that are left. The first run leaves checkpoints."""
    for number in range(start, STEPS):
        if not start and number in STOPS:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ncz": compression.state_dict()}
            torch.save(states, FOLDER / f"step{number}-rank{hvd.rank()}.pt")
        take_step(model, optimizer, number)
    kept = compression.state_dict()
    [of_rank] = kept[f"rank {hvd.rank()}"]
    return {
        "sha256": sha256([*model.parameters(), *of_rank.pop("residuals").values()]),
        "kept": kept,
    }


def resumed(stop: int) -> dict:
    class Fresh(NCZ):
        """Has a default instance of its own."""

    states = torch.load(FOLDER / f"step{stop}-rank{hvd.rank()}.pt", weights_only=True)
    model, optimizer = wrapped(Fresh)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    Fresh.load_state_dict(states["ncz"])
    return goes_on(model, optimizer, Fresh, stop)


# ------------------------------------------------------------------ error feedback


def what_is_lost_is_made_up_for() -> dict:
    """The sum over steps of averages, and what all ranks have kept in the end, beside the exact sum."""
    compressor = compressor_with(quantizer={"error_feedback": True})
    tensors = [own_values(SIZE, number) for number in range(6)]
    results = [ncz_plugins.horovod.allreduce(t, name="x", compression=compressor) for t in tensors]
    exact = sum(hvd.allreduce(t).double() for t in tensors)
    (kept,) = compressor.training.residuals.by_name.values()
    total = sum(result.double() for result in results)
    return {
        "error": largest([total - exact]),
        "error_with_what_is_kept": largest([total + hvd.allreduce(kept.double()) - exact]),
        "kept": largest([kept]),
        "rounding": len(tensors) * 2.0**-22 * largest(results),
    }


def names() -> dict:
    """By which error feedback knows tensors, for every way to hand them over."""

    def known(prepare) -> list[str]:
        compressor = compressor_with(quantizer={"error_feedback": True})
        prepare(compressor)
        return sorted(compressor.training.residuals.by_name)

    def one(compressor, **arguments):
        take_step(*wrapped(compressor, **arguments), 0)

    def two(compressor):
        (model, optimizer), second = wrapped(compressor), wrapped(compressor)
        take_step(model, optimizer, 0)
        take_step(*second, 0)
        del optimizer
        gc.collect()  # else its hooks stay with the parameters
        anew = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(anew, model.named_parameters(), compression=compressor)
        for number in (1, 2):
            take_step(model, optimizer, number)

    def group(compressor):
        ncz_plugins.horovod.grouped_allreduce([own_values(3), own_values(4)], name="g", compression=compressor)

    def through_average(compressor):
        tensor = own_values(3).requires_grad_()
        hvd.allreduce(tensor, name="x", compression=compressor).sum().backward()

    return {
        "parameters": sorted(name for name, _ in new_model().named_parameters()),
        "an optimizer": known(one),
        "groups": known(lambda compressor: one(compressor, groups=3)),
        "without names": known(lambda compressor: one(compressor, named=False)),
        "two optimizers, the first then made anew": known(two),
        "a group": known(group),
        "a gradient through an average": known(through_average),
    }


def without_names() -> dict:
    average = ncz_plugins.horovod.allreduce
    feeding_back = compressor_with(quantizer={"error_feedback": True})

    def twice():
        start = ncz_plugins.horovod.allreduce_async
        handles = [start(own_values(SIZE), name="same", compression=feeding_back) for _ in range(2)]
        hvd.synchronize(handles[0])

    by_name = compressor_with(policies=[{"name": "*.bias", "action": "skip"}])
    return {
        "a tensor": refused(lambda: average(own_values(SIZE), compression=feeding_back)),
        "a name twice": refused(twice),
        "an optimizer with policies by name": refused(lambda: take_step(*wrapped(by_name, named=False), 0)),
    }


# ------------------------------------------------------------------ policies and steps


def treated_differently() -> dict:
    """One group of parameters for Horovod, three for us, after a step of warm-up."""
    policies = [
        {"name": ["*.bias", "exit.*"], "action": "skip"},
        {"name": "b.weight", "quantizer": {"value": BOUND / 50}},
    ]
    compressor = compressor_with(policies=policies, steps={"warmup": 1})
    (model, optimizer), (plain_model, plain) = wrapped(compressor, groups=1), wrapped(hvd.Compression.none)
    steps = []
    for number in range(2):
        for each, its_optimizer in ((model, optimizer), (plain_model, plain)):
            its_optimizer.zero_grad()
            loss_of(each, number).backward()
            its_optimizer.synchronize()
        names = [name for name, _ in model.named_parameters()]
        pairs = zip(names, gradients(model), gradients(plain_model))
        errors = {name: largest_error([ours], [expected]) for name, ours, expected in pairs}
        done = compressor.stats.steps[-1]
        counted = {"calls": done.calls, "compressed": done.compressed_calls, "bypasses": done.bypasses}
        steps.append({"errors": errors, "largest": largest(gradients(plain_model)), **counted})
    return {"steps": steps}


def steps_are_those_of_the_optimizer() -> dict:
    """An average of a metric is no step, but without an optimizer it is; a new configuration is no beginning."""
    compressor, alone = compressor_with(steps={"warmup": 3}), compressor_with()
    model, optimizer = wrapped(compressor)
    for number in range(4):
        take_step(model, optimizer, number)
        for each in (compressor, alone):
            ncz_plugins.horovod.allreduce(own_values(SIZE), compression=each)
        if number == 1:
            compressor.config = {"steps": {"warmup": 3}, "transport": {"min_bytes": 0}, "quantizer": {"value": 0.1}}
    return {"steps": compressor.training.step, "compressed": compressed_calls(compressor), "alone": alone.training.step}


def compressed_calls(compressor: NCZ) -> list[int]:
    return [step.compressed_calls for step in compressor.stats.steps]


# ------------------------------------------------------------------ the guard, and records


def verified() -> dict:
    """A guard that is never content, and files of what it found."""
    file = FOLDER / "run.jsonl"
    guard = {"every": 2, "max_relative_error": 1e-9}
    compressor = compressor_with(guard=guard | {"on_alarm": "tighten"}, statistics={"jsonl": str(file)})
    plain = [hvd.allreduce(own_values(SIZE, number)) for number in range(4)]
    results = [
        ncz_plugins.horovod.allreduce(own_values(SIZE, number), name=f"tensor {number}", compression=compressor)
        for number in range(4)
    ]
    hvd.barrier()
    stop = compressor_with(guard=guard | {"on_alarm": "stop"})
    return {
        "errors": [largest_error([ours], [expected]) for ours, expected in zip(results, plain)],
        "relative_errors": [((o - e).norm() / e.norm()).item() for o, e in zip(results, plain)],
        "lines": [json.loads(line) for line in file.read_text().splitlines()],
        "stopped": refused(lambda: take_step(*wrapped(stop), 0)),
    }


# ------------------------------------------------------------------ states that come from elsewhere


def loaded_by_the_first_only() -> dict:
    """As Horovod's examples do with a model."""
    before, after = (compressor_with(quantizer={"error_feedback": True}, steps={"warmup": 2}) for _ in range(2))
    for number in range(3):
        ncz_plugins.horovod.allreduce(own_values(SIZE, number), name="x", compression=before)
    if hvd.rank() == 0:
        after.load_state_dict(before.state_dict())
    had = {"step": after.training.step, "kept": largest(after.training.residuals.by_name.values())}
    result = ncz_plugins.horovod.allreduce(own_values(SIZE), name="x", compression=after)
    return {
        "had": had,
        "step": after.training.step,
        "compressed": compressed_calls(after),
        "sha256": sha256([result]),
    }


def known_by_the_first_only() -> dict:
    """What a guard has tightened."""
    guard = {"every": 2, "max_relative_error": 1e-9, "on_alarm": "tighten"}
    kinds = {"guard": {"guard": guard}}
    found = {}
    for kind, how in kinds.items():
        before, after = compressor_with(**how), compressor_with(**how)
        ncz_plugins.horovod.allreduce(own_values(SIZE), compression=before)
        if hvd.rank() == 0:
            after.load_state_dict(before.state_dict())
        result = ncz_plugins.horovod.allreduce(own_values(SIZE), compression=after)
        found[kind] = {
            "error": largest([result - hvd.allreduce(own_values(SIZE))]),
            "rounding": 2.0**-22 * largest([result]),
            "bypasses": after.stats.total.bypasses,
            "sha256": sha256([result]),
        }
    return found


def restored_twice() -> dict:
    """The state of elastic training: twice back to the same commit, with a step between."""
    compressor = compressor_with(quantizer={"error_feedback": True})
    states = []
    for number in range(3):
        ncz_plugins.horovod.allreduce(own_values(SIZE, number), name="x", compression=compressor)
        if number == 0:
            elastic = hvd.elastic.TorchState(ncz=compressor)
        else:
            elastic.restore()
        states.append([compressor.training.step, sha256(compressor.training.residuals.by_name.values())])
    return {"states": states}


def saved_by_another_rank() -> dict:
    compressor = compressor_with(quantizer={"error_feedback": True})
    ncz_plugins.horovod.allreduce(own_values(SIZE), name="x", compression=compressor)
    torch.save(compressor.state_dict(), FOLDER / f"rank{hvd.rank()}.pt")
    hvd.barrier()
    compressor.load_state_dict(torch.load(FOLDER / f"rank{1 - hvd.rank()}.pt", weights_only=True))
    return {"step": compressor.training.step, "kept": len(compressor.training.residuals.by_name)}


hvd.init()
if sys.argv[2] == "resumed":
    save({f"step {stop}": resumed(stop) for stop in STOPS})
else:
    save(
        {
            "run": goes_on(*wrapped(NCZ), NCZ, 0),
            "feedback": what_is_lost_is_made_up_for(),
            "names": names(),
            "without names": without_names(),
            "treated differently": treated_differently(),
            "steps": steps_are_those_of_the_optimizer(),
            "verified": verified(),
            "loaded by the first only": loaded_by_the_first_only(),
            "known by the first only": known_by_the_first_only(),
            "restored twice": restored_twice(),
            "saved by another rank": saved_by_another_rank(),
        }
    )
