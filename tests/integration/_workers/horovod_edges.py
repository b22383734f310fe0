"""Cases of hvd.DistributedOptimizer that need more than other settings."""

import copy
import warnings
from functools import partial

import horovod.torch as hvd
import torch
import torch.distributed as dist
from horovod_common import (
    INPUTS,
    OUTPUTS,
    gradients,
    largest,
    largest_error,
    loss_of,
    new_model,
    own_values,
    save,
    sha256,
    wrapped,
)
from torch import nn

import ncz_plugins.horovod
from ncz_plugins import ConfigError
from ncz_plugins.core.errors import UnsupportedError
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.horovod import NCZ
from ncz_plugins.horovod.transport import HorovodTransport

hvd.init(process_sets="dynamic")
BOUND = 2e-4
POISONED_RANK = 1
POISONED = ((3, 5), float("nan")), ((100, 7), float("inf"))  # places in the first weight, and what is put there


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


def embedding(sparse_as_dense: bool) -> dict:
    """Sparse gradients of an embedding, dense ones of the rest."""

    def new():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(300, 40, sparse=True), nn.Linear(40, 200), nn.GELU(), nn.Linear(200, 3))

    def loss(model):
        tokens = own_values((4, 6), 5, torch.int64).abs() + 7 * hvd.rank()
        return model(tokens).square().sum()

    model, compressor = new(), NCZ(bounded())
    optimizer = wrapped(model, compressor, sparse_as_dense=sparse_as_dense)
    plain = like(model, new)
    expected = reduced(plain, wrapped(plain, hvd.Compression.none, "plain.", sparse_as_dense=sparse_as_dense), loss)
    ours = reduced(model, optimizer, loss)
    result = {
        "is_sparse": model[0].weight.grad.is_sparse,
        "embedding_error": largest_error(ours[:1], expected[:1]),
        "error": largest_error(ours[1:], expected[1:]),
        "largest": largest(expected),
        "bytes_in": compressor.stats.total.bytes_in,
        "embedding_bytes": model[0].weight.nbytes,
        "other_bytes": sum(p.nbytes for p in model.parameters()) - model[0].weight.nbytes,
    }
    step(optimizer)
    return {**result, "counts": counts(compressor), "sha256": sha256(model.parameters())}


def not_finite() -> dict:
    """In the first of two steps one rank's gradient of the first weight has values that are not finite."""

    def poison(gradient):
        gradient = gradient.clone()
        for place, value in POISONED:
            gradient[place] = value
        return gradient

    compressor = NCZ(bounded())
    model = new_model()
    plain = like(model, new_model)
    results = []
    for each, compression, prefix in ((model, compressor, ""), (plain, hvd.Compression.none, "plain.")):
        optimizer = wrapped(each, compression, prefix)
        hook = each.entry.weight.register_hook(poison) if hvd.rank() == POISONED_RANK else None
        results.append(reduced(each, optimizer, lambda m: loss_of(m, 0)))
        if hook:
            hook.remove()
        if each is model:
            reduced(each, optimizer, lambda m: loss_of(m, 1))
    ours, expected = results
    return {
        "places": [(~g.isfinite()).nonzero().tolist() for g in ours],
        "expected_places": [sorted(list(place) for place, _ in POISONED), [], [], [], [], [], [], []],
        "same_kind": [
            all(torch.equal(f(a), f(b)) for f in (torch.isnan, torch.isposinf, torch.isneginf))
            for a, b in zip(ours, expected)
        ],
        "error": largest_error(*([g.nan_to_num(0, 0, 0) for g in each] for each in results)),
        "largest": largest([g.nan_to_num(0, 0, 0) for g in expected]),
        "counts": counts(compressor),
    }


def tiny() -> dict:
    """A model below min_bytes."""

    def new():
        torch.manual_seed(0)
        return nn.Linear(INPUTS, OUTPUTS)

    model, compressor = new(), NCZ()
    plain = like(model, new)
    ours, expected = (
        reduced(m, wrapped(m, compression, prefix), lambda m: loss_of(m, 0))
        for m, compression, prefix in ((model, compressor, ""), (plain, hvd.Compression.none, "plain."))
    )
    return {
        "min_bytes": compressor.config.transport.min_bytes,
        "error": largest_error(ours, expected),
        "largest": largest(expected),
        "counts": counts(compressor),
    }


def clipping() -> dict:
    """Gradients are clipped between synchronize and step."""
    model, compressor = new_model(), NCZ(bounded())
    optimizer = wrapped(model, compressor)
    norms = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Horovod's, of a step that would reduce a second time
        for number in range(3):
            reduced(model, optimizer, lambda m, number=number: loss_of(m, number))
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            norms.append(torch.stack([g.norm() for g in gradients(model)]).norm().item())
            step(optimizer)
    return {"norms": norms, "counts": counts(compressor), "sha256": sha256(model.parameters())}


DOORS = {
    "alone": {},
    "in groups": {"groups": 2},
    "accumulated": {"backward_passes_per_step": 2},
    "on the ring": {"schedule": "ring"},
    "too small": {"min_bytes": 1 << 30},
}


def in_one_buffer(dtype: torch.dtype, process_set=hvd.global_process_set, schedule="direct", min_bytes=0, **how) -> str:
    """Gradients are views of one buffer, as optimizers with flat memory have them. What is wrong, if anything is."""
    passes = how.get("backward_passes_per_step", 1)
    config = bounded() | {"transport": {"min_bytes": min_bytes, "schedule": schedule}}
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
        if any(p.grad.data_ptr() != view.data_ptr() for p, view in zip(parameters, views)):
            return f"step {number}: a gradient has other memory"
        if not torch.equal(buffer, torch.cat([p.grad.flatten() for p in models[1].parameters()])):
            return f"step {number}: the buffer holds something else than gradients that are not in one"
        buffer.mul_(0.5)  # as clipping does, to both
        for parameter in models[1].parameters():
            parameter.grad.mul_(0.5)
        for optimizer in optimizers:
            step(optimizer)
    return "" if sha256(parameters) == sha256(models[1].parameters()) else "the weights differ"


def buffers() -> dict:
    found = {str(dtype): in_one_buffer(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)}
    found |= {name: in_one_buffer(torch.float32, **how) for name, how in DOORS.items()}
    if hvd.size() == 3:
        pair = hvd.add_process_set([0, 2])
        found["of a process set"] = in_one_buffer(torch.float32, pair) if pair.included() else ""
        hvd.remove_process_set(pair)
    return found


def freeze_in_turns(model: nn.Module, number: int) -> None:
    model.b.requires_grad_(number % 2 == 0)


def overflow_once(model: nn.Module, number: int) -> None:
    if number == OVERFLOWN and hvd.rank() == POISONED_RANK:
        model.entry.weight.grad = torch.full_like(model.entry.weight, torch.inf)  # which the backward pass adds to


OVERFLOWN = 3  # the step that the program skips, as a loss scaler does
# How gradients are skipped: the branches that this rank uses, in turns; what is done before a step; and what the
# optimizer is told besides.
SKIPPED = {
    "used in turns": (["a", "b"], None, {}),
    "used in turns, in groups": (["a", "b"], None, {"groups": 2}),
    "used in turns, accumulated": (["a", "b", "b", "ab"], None, {"backward_passes_per_step": 2}),
    "used in turns by one rank": (["ab", "a"] if hvd.rank() == 0 else ["ab"], None, {}),
    "frozen in turns": (["ab"], freeze_in_turns, {}),
    "one overflows": (["ab"], overflow_once, {}),
}


def fed_back(branches: list[str], change, how: dict) -> dict:
    """What the gradients that came out add up to over some steps, beside those of a plain twin and what is kept."""
    quantizer = {"kind": "error_bound", "value": 1.0, "error_feedback": True}
    compressor, passes = NCZ(bounded() | {"quantizer": quantizer}), how.get("backward_passes_per_step", 1)
    models = new_model(), new_model()
    optimizers = wrapped(models[0], compressor, **how), wrapped(models[1], hvd.Compression.none, "plain.", **how)
    off, moved = [0.0 for _ in models[0].parameters()], 0.0
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
        off = [o + a.double() - b.double() for o, a, b in zip(off, *map(gradients, models))]
        moved = max(moved, largest([a for a, b in zip(*map(gradients, models)) if not b.any()]))
    kept = compressor.training.residuals.by_name
    explained = {name: hvd.allreduce(each.double(), name=f"kept {name}") for name, each in kept.items()}
    names = [name for name, _ in models[0].named_parameters()]
    return {
        "kept": sorted(explained) == sorted(names),
        "moved": moved,  # of parameters that no rank has used
        "off": largest(off) / largest(gradients(models[1])),
        "unexplained": largest([o.flatten() + explained[name] for o, name in zip(off, names)]),
    }


def restored() -> dict:
    """The optimizer is restored after backward: those gradients must be forgotten."""
    model, compressor = new_model(), NCZ(bounded())
    optimizer = wrapped(model, compressor)
    loss_of(model, 0).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    plain = like(model, new_model)
    ours = reduced(model, optimizer, lambda m: loss_of(m, 1))
    expected = reduced(plain, wrapped(plain, hvd.Compression.none, "plain."), lambda m: loss_of(m, 1))
    step(optimizer)
    return {
        "error": largest_error(ours, expected),
        "counts": counts(compressor),
        "sha256": sha256(model.parameters()),
    }


def schedule() -> dict:
    """A new configuration before each step, as Config or as anything else, and an invalid one."""
    model, compressor = new_model(), NCZ(bounded())
    optimizer = wrapped(model, compressor)
    plain = like(model, new_model)
    plain_optimizer = wrapped(plain, hvd.Compression.none, "plain.")
    bounds, errors, ratios = [1e-2, 1e-3, 1e-5], [], []
    for bound in bounds:
        compressor.config = bounded(bound)
        ours, expected = (
            reduced(m, o, lambda m: loss_of(m, 0)) for m, o in ((model, optimizer), (plain, plain_optimizer))
        )
        errors.append(largest_error(ours, expected))
        ratios.append(compressor.stats.steps[-1].ratio)
    before = compressor.config
    try:
        compressor.config = bounded(-1)
        refused = None
    except ConfigError as error:
        refused = str(error)
    return {
        "bounds": bounds,
        "errors": errors,
        "ratios": ratios,
        "refused": refused,
        "kept": compressor.config is before,
        "largest": largest(expected),
    }


def two_optimizers() -> dict:
    """Both share one NCZ. One rank has a gradient less, which is known only when the second is synchronized."""
    compressor = NCZ(bounded())
    models = [new_model(), new_model()]
    plain_models = [new_model(), new_model()]

    def backward(models) -> None:
        branches = "ab" if hvd.rank() == 0 else "b"
        (loss_of(models[0], 0, branches=branches) + loss_of(models[1], 1, branches=branches)).backward()

    optimizers = [wrapped(m, compressor, f"{i}.") for i, m in enumerate(models)]
    plain_optimizers = [wrapped(m, hvd.Compression.none, f"{i}.plain.") for i, m in enumerate(plain_models)]
    for some, their_optimizers in ((models, optimizers), (plain_models, plain_optimizers)):
        backward(some)
        for optimizer in their_optimizers:
            optimizer.synchronize()
    for optimizer in optimizers:
        step(optimizer)
    ours, expected = ([*gradients(a), *gradients(b)] for a, b in (models, plain_models))
    return {
        "error": largest_error(ours, expected),
        "counts": counts(compressor),
        "sha256": sha256([*models[0].parameters(), *models[1].parameters()]),
    }


def empty_first_group() -> dict:
    """As where parameters are sorted into groups, one of which gets none."""
    model, compressor = new_model(), NCZ(bounded())
    sgd = torch.optim.SGD([{"params": []}, {"params": model.parameters()}], lr=0.05)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=compressor)
    loss_of(model, 0).backward()
    optimizer.step()
    return {"counts": counts(compressor), "sha256": sha256(model.parameters())}


def unfrozen() -> dict:
    """A layer that was frozen at first. A copy of the model has none of the hooks that Horovod gave the first one."""
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
    return {
        "bytes_in": [done.bytes_in for done in compressor.stats.steps],
        "all_bytes": sum(p.nbytes for p in model.parameters()),
        "sha256": sha256(model.parameters()),
    }


def average_of_a_metric() -> dict:
    """Between backward and synchronize, with the optimizer's own NCZ, while one rank has a gradient less."""
    compressor = NCZ(bounded())
    model = new_model()
    optimizer = wrapped(model, compressor)
    loss_of(model, 0, branches="ab" if hvd.rank() == 0 else "b").backward()
    metric = ncz_plugins.horovod.allreduce(torch.tensor([float(hvd.rank())] * 100), compression=compressor)
    optimizer.step()
    return {
        "error": (metric - (hvd.size() - 1) / 2).abs().max().item(),
        "sha256": sha256(model.parameters()),
    }


def transport() -> dict:
    """What the transport over Horovod's own runtime offers beside frames, and what it refuses."""
    opened = HorovodTransport(hvd.global_process_set, "transport")
    share = float(1 + hvd.rank())
    ops = {"sum": dist.ReduceOp.SUM, "average": dist.ReduceOp.AVG, "maximum": dist.ReduceOp.MAX}
    result = {}
    for name, op in ops.items():
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.full((1000,), share, dtype=dtype)
            work = opened.plain.all_reduce(tensor, op)
            assert work.wait() and work.wait() and work.is_completed()
            result[f"{name} {dtype}"] = tensor.unique().tolist()
    scaled = torch.full((1000,), share)
    opened.plain.all_reduce(scaled, scale=0.5).wait()
    result["scaled"] = scaled.unique().tolist()
    highest = torch.tensor([share, -share])
    opened.start_max(highest, Counters()).wait()
    result["highest"] = highest.tolist()
    result["refused"] = []
    for call in (
        lambda: opened.plain.broadcast(scaled, 0),
        lambda: opened.streams([(0, 1)], 1, 4096, Counters()),
        lambda: opened.streams([(0, 0)], 1, 4096, Counters())[0].send(scaled),
    ):
        try:
            call()
        except UnsupportedError as error:
            result["refused"].append(str(error))
    return result


def one_step_on(process_set, compressor: NCZ, **arguments) -> dict:
    """The gradients of an optimizer on some of the ranks."""
    model = new_model()
    plain = like(model, new_model)
    ours, expected = (
        reduced(m, wrapped(m, compression, prefix, process_set=process_set, **arguments), lambda m: loss_of(m, 0))
        for m, compression, prefix in ((model, compressor, ""), (plain, hvd.Compression.none, "plain."))
    )
    return {
        "included": process_set.included(),
        "error": largest_error(ours, expected),
        "sha256": sha256(ours),
        "compressed_calls": compressor.stats.total.compressed_calls,
    }


def of_a_group(tensor, **arguments) -> torch.Tensor:
    """The average of the second of a group."""
    return ncz_plugins.horovod.grouped_allreduce([torch.ones(3), tensor], **arguments)[1]


def process_sets() -> dict:
    """The optimizer on ranks 0 and 2; single tensors on overlapping sets; a set whose number is used again."""
    compressor = NCZ(bounded())
    result = {}
    pair = hvd.add_process_set([0, 2])
    result["optimizer"] = one_step_on(pair, compressor)
    result["optimizer with groups"] = one_step_on(pair, NCZ(bounded()), groups=2)

    sets = {"0 2": pair, "0 1": hvd.add_process_set([0, 1]), "1 2": hvd.add_process_set([1, 2])}
    mine = {name: process_set for name, process_set in sets.items() if process_set.included()}
    handles = {}
    for name in sorted(mine, reverse=hvd.rank() == 1):
        handles[name] = ncz_plugins.horovod.allreduce_async(
            own_values(5000), name=name, op=hvd.Sum, process_set=mine[name], compression=compressor
        )
    ours = {name: hvd.synchronize(handle) for name, handle in handles.items()}
    result["overlapping"] = {}
    for name in mine:
        expected = hvd.allreduce(own_values(5000), name=f"plain {name}", op=hvd.Sum, process_set=mine[name])
        error = largest_error([ours[name]], [expected])
        result["overlapping"][name] = {"error": error, "sha256": sha256([ours[name]])}

    on_ring = NCZ(bounded() | {"transport": {"min_bytes": 0, "schedule": "ring"}})
    others = {"ring": (on_ring, ncz_plugins.horovod.allreduce), "group": (compressor, of_a_group)}
    for kind, (its_compressor, average) in others.items():
        result[kind] = {}
        for name, process_set in mine.items():
            ours = average(own_values(5000), name=kind, process_set=process_set, compression=its_compressor)
            expected = hvd.allreduce(own_values(5000), name=f"plain {kind}", process_set=process_set)
            result[kind][name] = {"error": largest_error([ours], [expected]), "sha256": sha256([ours])}

    feeding_back = NCZ(quantizer={"value": 0.1, "error_feedback": True}, transport={"min_bytes": 0})
    for process_set in mine.values():
        ncz_plugins.horovod.allreduce(own_values(5000), name="same", process_set=process_set, compression=feeding_back)
    result["kept"] = sorted(feeding_back.training.residuals.by_name)

    # Ranks 0 and 1 have made another number of calls before they find themselves in a set of that number.
    number = pair.process_set_id
    for process_set in sets.values():
        hvd.remove_process_set(process_set)
    mixed = hvd.add_process_set([0, 1])
    result["reused"] = {"number": mixed.process_set_id == number}
    if mixed.included():
        ours, expected = (
            average(own_values(5000), name="reused", process_set=mixed)
            for average in (partial(ncz_plugins.horovod.allreduce, compression=compressor), hvd.allreduce)
        )
        result["reused"] |= {"error": largest_error([ours], [expected]), "sha256": sha256([ours])}

    alone = hvd.add_process_set([1])
    result["alone"] = {"included": alone.included()}
    if alone.included():
        ours = ncz_plugins.horovod.allreduce(own_values(5000), process_set=alone, compression=compressor)
        result["alone"] |= {"exact": torch.equal(ours, own_values(5000)), "counts": counts(compressor)[-1]}
    return result


def incomplete_groups() -> dict:
    """In the second of three steps no rank has a gradient for some members of both groups."""
    model, compressor = new_model(), NCZ(bounded())
    plain = like(model, new_model)
    optimizer, plain_optimizer = (
        wrapped(model, compressor, groups=2),
        wrapped(plain, hvd.Compression.none, "plain.", groups=2),
    )
    errors = []
    for number, branches in enumerate(["ab", "a", "ab"]):
        plain.load_state_dict(model.state_dict())
        ours, expected = (
            reduced(m, o, lambda m, number=number, branches=branches: loss_of(m, number, branches=branches))
            for m, o in ((model, optimizer), (plain, plain_optimizer))
        )
        errors.append(largest_error(ours, expected))
        step(optimizer)
    return {"errors": errors, "counts": counts(compressor), "sha256": sha256(model.parameters())}


def joined_before_the_optimizer() -> dict:
    """The first rank takes a step less than the others, which would else reduce their last gradients early."""
    model, compressor = new_model(), NCZ(bounded())
    optimizer = wrapped(model, compressor)
    for number in range(2):
        reduced(model, optimizer, lambda m, number=number: loss_of(m, number))
        step(optimizer)
    plain, errors = like(model, new_model), []
    if hvd.rank() > 0:
        loss = partial(loss_of, number=2)
        expected = reduced(plain, wrapped(plain, hvd.Compression.none, "plain."), loss)
        errors.append(largest_error(reduced(model, optimizer, loss), expected))
    hvd.join()
    return {"errors": errors, "largest": largest(gradients(plain)) if errors else 0, "counts": counts(compressor)}


def join() -> dict:
    """The first rank has run out of data, and contributes zeros; then all go on together."""
    compressor, results = NCZ(bounded()), []
    if hvd.rank() > 0:
        for _ in range(2):
            results.append(ncz_plugins.horovod.allreduce(own_values(5000), compression=compressor).tolist())
    last = hvd.join()
    ncz_plugins.horovod.allreduce(own_values(5000), compression=compressor)
    everyone = [torch.randn(5000, generator=torch.Generator().manual_seed(1000 * r)) for r in range(1, hvd.size())]
    exact = (sum(everyone) / hvd.size()).tolist()
    total = compressor.stats.total
    return {
        "exact": [torch.allclose(torch.tensor(each), torch.tensor(exact), atol=1e-6) for each in results],
        "bypasses": total.bypasses,
        "compressed": total.compressed_calls,
        "last": last,
    }


results = {
    "sparse": embedding(sparse_as_dense=False),
    "sparse as dense": embedding(sparse_as_dense=True),
    "not finite": not_finite(),
    "tiny": tiny(),
    "clipping": clipping(),
    "buffers": buffers(),
    "fed back": {name: fed_back(*case) for name, case in SKIPPED.items()},
    "restored": restored(),
    "schedule": schedule(),
    "two optimizers": two_optimizers(),
    "empty first group": empty_first_group(),
    "unfrozen": unfrozen(),
    "average of a metric": average_of_a_metric(),
    "incomplete groups": incomplete_groups(),
    "transport": transport(),
}
if hvd.size() == 3:
    results["process sets"] = process_sets()
results["joined before the optimizer"] = joined_before_the_optimizer()
results["join"] = join()
save(results)
