"""Steps whose gradients are reduced while others are computed, beside other calls, and steps that run none ahead.

usage: horovod_ahead.py living|killed
"""

import os
import signal
import sys
import time
from contextlib import contextmanager, nullcontext
from functools import partial

import horovod.torch as hvd
import torch
from horovod_common import hide_the_end_of_the_last_rank, loss_of, new_model, own_values, save, sha256, wrapped

import ncz_plugins.horovod
from ncz_plugins import NczError, kernels
from ncz_plugins.horovod import NCZ, bucket_plan

STEPS = 4
bucket_plan.BUCKET_BYTES = 32 << 10  # so that the small model has several buckets
CONFIG = {"quantizer": {"mode": "abs", "value": 2e-4}, "transport": {"min_bytes": 0}}
if sys.argv[1] == "killed":
    hide_the_end_of_the_last_rank()
hvd.init(process_sets="dynamic")
rank, last = hvd.rank(), hvd.size() - 1


def train(compressor: NCZ, optimizer, model, beside=nullcontext, branches: str = "ab", steps=range(STEPS)) -> dict:
    """Some steps; `beside` is entered before the backward pass and left after it."""
    calls = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step, branches=branches)
        with beside():
            loss.backward()
        before = compressor.stats.total.calls
        optimizer.step()
        calls.append([before, compressor.stats.total.calls])
    return {"calls": calls, "sha256": sha256(model.parameters()), "step": compressor.training.step}


def alone(beside=nullcontext, branches=("ab",), schedule: str = "direct") -> dict:
    compressor, model = NCZ({**CONFIG, "transport": {"min_bytes": 0, "schedule": schedule}}), new_model()
    return train(compressor, wrapped(model, compressor), model, beside, branches[rank % len(branches)])


def waiting() -> dict:
    """All that can be reduced ahead gets the time for it: nothing is left when the program waits.

    What a rank does to its own gradients in the meantime has no effect.
    """
    compressor, model = NCZ(CONFIG), new_model()
    optimizer = wrapped(model, compressor)
    found = [train(compressor, optimizer, model, steps=[0])["calls"][0]]
    for step in range(1, STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        deadline = time.monotonic() + 60
        while compressor.stats.total.calls < (1 + step) * found[0][1] and time.monotonic() < deadline:
            time.sleep(0.01)
        found.append([compressor.stats.total.calls])
        for parameter in model.parameters():
            parameter.grad.mul_(rank)
        optimizer.step()
        found[-1].append(compressor.stats.total.calls)
    return {"calls": found, "sha256": sha256(model.parameters()), "step": compressor.training.step}


def never_ahead(branches=("ab",)) -> dict:
    """Another optimizer shares the compressor, which keeps both from running ahead."""
    compressor, model, other = NCZ(CONFIG), new_model(), new_model()
    optimizer, beside = wrapped(model, compressor), wrapped(other, compressor, "other.")
    assert not compressor.may_run_ahead and beside is not optimizer
    return train(compressor, optimizer, model, branches=branches[rank % len(branches)])


def named_in_other_orders() -> dict:
    """As where the modules of a model come from a set: Horovod matches gradients by their names."""
    compressor, model = NCZ(CONFIG), new_model()
    names = list(model.named_parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(sgd, names[rank:] + names[:rank], compression=compressor)
    found, alike = train(compressor, optimizer, model), new_model()
    reference = NCZ(CONFIG)
    train(reference, wrapped(alike, reference), alike)
    apart = [(a - b).abs().max().item() for a, b in zip(model.parameters(), alike.parameters())]
    return {**found, "apart": max(apart)}


@contextmanager
def metric(compressor: NCZ, process_set=hvd.global_process_set):
    """A single all-reduce that is asked for before the backward pass and waited for after it."""
    start = ncz_plugins.horovod.allreduce_async
    handle = start(own_values(5000), name="metric", compression=compressor, process_set=process_set)
    time.sleep(0.03 * (rank == 0))
    yield
    time.sleep(0.03 * (rank == 1))
    hvd.synchronize(handle)


def metric_beside() -> dict:
    """By the same compressor."""
    compressor, model = NCZ(CONFIG), new_model()
    return train(compressor, wrapped(model, compressor), model, partial(metric, compressor))


def in_another_process_set() -> dict:
    """Ranks 0 and 1 have another call of their own: before what is ahead on one of them, after it on the other."""
    return alone(partial(metric, NCZ(CONFIG), pair) if pair.included() else nullcontext)


def two_models() -> dict:
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
    first, second = (sha256(model.parameters()) for model in models)
    return {"sha256": first if first == second else [first, second], "step": compressors[0].training.step}


def dropped() -> dict:
    """Each backward pass is taken twice: what came of the first is dropped, whether it was reduced or not."""
    compressor, model = NCZ(CONFIG), new_model()
    optimizer = wrapped(model, compressor)
    for step in range(STEPS):
        for again in (True, False):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if again:
                optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    return {"sha256": sha256(model.parameters()), "step": compressor.training.step}


def dropped_in_part() -> dict:
    """As `dropped`, but the first pass has not come to all gradients, and the second comes to them in another order."""
    compressor, model = NCZ(CONFIG), new_model()
    optimizer = wrapped(model, compressor)
    train(compressor, optimizer, model, steps=[0])
    for step in range(1, STEPS):
        for branches in ("a", orders[rank % 2]):
            optimizer.zero_grad()
            loss_of(model, step, branches=branches).backward()
            if branches == "a":
                optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    return {"sha256": sha256(model.parameters()), "step": compressor.training.step}


def differing() -> dict:
    """In the third step the ranks have different bounds; the fourth is as all others."""
    compressor, model = NCZ(CONFIG), new_model()
    optimizer = wrapped(model, compressor)
    train(compressor, optimizer, model, steps=range(2))
    compressor.config = {**CONFIG, "quantizer": {"value": [0.25, 0.125][rank % 2]}}
    error = None
    try:
        train(compressor, optimizer, model, steps=[2])
    except NczError as found:
        error = [type(found).__name__, str(found)]
    compressor.config = CONFIG
    optimizer.load_state_dict(optimizer.state_dict())
    return {"error": error, **train(compressor, optimizer, model, steps=[2, 3])}


def killed() -> dict:
    """The last rank dies at its first frame of the third step, while the others compute."""
    compressor, model = NCZ(CONFIG), new_model()
    optimizer = wrapped(model, compressor)
    train(compressor, optimizer, model, steps=range(2))
    if rank == last:
        kernels.cpu_backend().encode = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        train(compressor, optimizer, model, steps=[2])
    except hvd.HorovodInternalError as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    return {}


if sys.argv[1] == "killed":
    save(killed(), rank)
else:
    pair = hvd.add_process_set([0, 1])
    orders, missing = ("ab", "ba"), ("ab", "a")
    cases = {
        "ahead": waiting,
        "as it comes": alone,
        "on the ring": partial(alone, schedule="ring"),
        "never ahead": never_ahead,
        "another order on each rank": partial(alone, branches=orders),
        "a gradient that only some ranks have": partial(alone, branches=missing),
        "a gradient that only some ranks have, never ahead": partial(never_ahead, branches=missing),
        "named in other orders": named_in_other_orders,
        "a metric beside": metric_beside,
        "another process set": in_another_process_set,
        "two models": two_models,
        "dropped": dropped,
        "dropped in part": dropped_in_part,
        "differing": differing,
    }
    save({name: case() for name, case in cases.items()})
