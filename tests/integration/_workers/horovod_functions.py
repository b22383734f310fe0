"""Single tensors, each beside Horovod's own function; NCZ_CONFIG names the configuration."""

import gc
import itertools
import weakref
from functools import partial

import horovod.torch as hvd
import torch
from horovod_common import largest, largest_error, loss_of, new_model, own_values, save, sha256, wrapped

import ncz_plugins.horovod as ncz
from ncz_plugins import MismatchError
from ncz_plugins.horovod import NCZ, pending

SIZE = 5001
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32)  # Horovod adds no smaller ones


def compare(ours, plain, *inputs, scale: float = 1.0, **arguments) -> dict:
    """Both functions on the same tensors, which they must not change; one tensor stands for a list of one."""
    before = [tensor.clone() for tensor in inputs]
    calls = NCZ.default().stats.total.compressed_calls
    results = ours(*inputs, **arguments)
    expected = plain(*inputs, **arguments)
    results, expected = ([r] if isinstance(r, torch.Tensor) else list(r) for r in (results, expected))
    return {
        "unchanged": all(map(torch.equal, inputs, before)),
        "dtypes": [str(r.dtype) for r in results] == [str(t.dtype) for t in inputs],
        "compressed_calls": NCZ.default().stats.total.compressed_calls - calls,
        "error": largest_error([r.double() for r in results], [e.double() for e in expected]),
        "largest": largest(expected),
        "scale": scale,
        "sha256": sha256(results),
    }


def grouped(function):
    return lambda *tensors, **arguments: function(list(tensors), **arguments)


def in_float64(tensor, **arguments):
    """Horovod's own all-reduce takes no bfloat16, and rounds often in float16."""
    return hvd.allreduce(tensor.double(), **arguments)


def through_handle(start):
    """An asynchronous function together with its wait."""
    return lambda *args, **kwargs: hvd.synchronize(start(*args, **kwargs))


def compressed() -> dict:
    n = hvd.size()
    mine = own_values(SIZE)
    pair = partial(compare, ncz.allreduce, hvd.allreduce)
    groups = partial(
        compare, grouped(ncz.grouped_allreduce), grouped(hvd.grouped_allreduce), mine, own_values((30, 40))
    )
    cases = {
        "average": pair(mine),
        "sum": pair(mine, op=hvd.Sum, scale=n),
        "deprecated average=False": pair(mine, average=False, scale=n),
        "prescaled": pair(mine, prescale_factor=0.5, scale=0.5),
        "postscaled sum": pair(mine, op=hvd.Sum, postscale_factor=3.0, scale=3.0 * n),
        "both factors": pair(mine, prescale_factor=0.25, postscale_factor=2.0, scale=0.5),
        "named": pair(mine, name="named"),
        "no dimension": pair(own_values(())),
        "with an empty one": compare(
            grouped(ncz.grouped_allreduce), grouped(hvd.grouped_allreduce), mine, own_values((0, 3))
        ),
        "asynchronous": compare(through_handle(ncz.allreduce_async), through_handle(hvd.allreduce_async), mine),
        "group": groups(),
        "sum of a group": groups(op=hvd.Sum, scale=n),
        "scaled group": groups(prescale_factor=0.25, postscale_factor=2.0, scale=0.5),
        "asynchronous group": compare(
            grouped(through_handle(ncz.grouped_allreduce_async)),
            grouped(through_handle(hvd.grouped_allreduce_async)),
            mine,
        ),
        "hvd.allreduce with the class": compare(partial(hvd.allreduce, compression=NCZ), hvd.allreduce, mine),
        "hvd.grouped_allreduce with the class": compare(
            grouped(partial(hvd.grouped_allreduce, compression=NCZ)), grouped(hvd.grouped_allreduce), mine
        ),
        "not contiguous": compare(
            ncz.allreduce, lambda t: hvd.allreduce(t.contiguous()), own_values((30, 50, 4)).transpose(0, 2)
        ),
    }
    for dtype in FLOATS:
        # Smaller, as with that bound 16 bits would gain nothing else.
        cases[str(dtype)] = compare(ncz.allreduce, in_float64, own_values(SIZE, dtype=dtype) / 32)
    return cases


def plain() -> dict:
    """What takes Horovod's own path: exact, and counted with its reason."""

    def case(function, expected, tensor, **arguments) -> dict:
        before = NCZ.default().stats.total.bypasses
        ours = function(tensor, **arguments)
        after = NCZ.default().stats.total.bypasses
        return {
            "exact": torch.equal(ours, expected(tensor, **arguments)),
            "bypasses": {k: v - before.get(k, 0) for k, v in after.items() if v > before.get(k, 0)},
        }

    cases = {}
    for dtype in INTEGERS:
        tensor = own_values(SIZE, dtype=dtype)
        cases[f"sum of {dtype}"] = case(ncz.allreduce, hvd.allreduce, tensor, op=hvd.Sum)
        cases[f"average of {dtype}"] = case(partial(hvd.allreduce, compression=NCZ), hvd.allreduce, tensor)
    for op in ("Min", "Max", "Product"):
        for ours in (ncz.allreduce, partial(hvd.allreduce, compression=NCZ)):
            name = f"{op} {'by us' if ours is ncz.allreduce else 'by hvd'}"
            cases[name] = case(ours, hvd.allreduce, own_values(SIZE), op=getattr(hvd, op))
    for scale in (0.0, -2.0):
        cases[f"factor {scale}"] = case(ncz.allreduce, hvd.allreduce, own_values(SIZE), prescale_factor=scale)
    return cases


def exact() -> dict:
    """Whether results are Horovod's to the bit: without loss, and where tensors are too small to be compressed."""
    kinds = {
        "lossless": NCZ(quantizer={"kind": "lossless"}, transport={"min_bytes": 0}),
        "plain": NCZ(roles=["gradient"]),
    }
    factors = [
        {},
        {"prescale_factor": 0.3},
        {"postscale_factor": 0.7},
        {"prescale_factor": 0.3, "postscale_factor": 0.7},
    ]
    results = {}
    for kind, compressor in kinds.items():
        for dtype in (torch.float32, torch.float16):
            for how in factors:
                tensor = own_values(SIZE, dtype=dtype)
                ours, theirs = ncz.allreduce(tensor, compression=compressor, **how), hvd.allreduce(tensor, **how)
                results[f"{kind} {dtype} {how}"] = torch.equal(ours, theirs)
        total = compressor.stats.total
        results[f"{kind}, as meant"] = total.compressed_calls == (total.calls if kind == "lossless" else 0)
    return results


def fixed_rate() -> dict:
    """Sums and averages at 8 bits per value, as shares of the largest one."""
    compressor = NCZ(quantizer={"mode": "bits", "value": 8}, transport={"min_bytes": 0})
    cases = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for op in (hvd.Average, hvd.Sum):
            tensor = own_values(SIZE, dtype=dtype)
            result = hvd.allreduce(tensor, op=op, postscale_factor=0.5, compression=compressor)
            expected = in_float64(tensor, op=op, postscale_factor=0.5)
            error = largest_error([result.double()], [expected]) / largest([expected])
            cases[f"{op} of {dtype}"] = {"error": error, "sha256": sha256([result])}
    return {"cases": cases, "compressed_calls": compressor.stats.total.compressed_calls}


def handles() -> dict:
    """Waited for in the order of their start on one rank, in reverse on the others."""
    tensors = [own_values(SIZE, number) for number in range(3)]
    started = [ncz.allreduce_async(t, name=f"handle {i}") for i, t in enumerate(tensors)]
    before = [hvd.poll(handle) for handle in started]
    results = {i: hvd.synchronize(started[i]) for i in (range(3) if hvd.rank() == 0 else reversed(range(3)))}
    after = [hvd.poll(handle) for handle in started]
    again = [hvd.synchronize(handle) for handle in started]
    expected = [hvd.allreduce(t) for t in tensors]
    only_polled, polls = ncz.allreduce_async(tensors[0], name="only polled"), 1
    while not hvd.poll(only_polled):
        polls += 1
    return {
        "before": before,
        "polls": polls,
        "after": after,
        "error": largest_error([results[i] for i in range(3)], expected),
        "again": all(a is results[i] for i, a in enumerate(again)),
        "sha256": sha256([results[i] for i in range(3)]),
    }


def unnamed() -> dict:
    """The ranks have made other numbers of calls without a name, and are about to need another digit for them."""
    pending._unnamed = itertools.count(9 - hvd.rank())
    tensors = [own_values(SIZE, number) for number in range(3)]
    started = [ncz.allreduce_async(t) for t in tensors]
    results = [hvd.synchronize(handle) for handle in started]
    return {"errors": [largest_error([ours], [hvd.allreduce(t)]) for ours, t in zip(results, tensors)]}


def backward() -> dict:
    """Gradients through the averages, where Horovod's own reduces with the same op."""

    def gradient(function, grouped: bool, how: dict):
        tensor = own_values(SIZE).requires_grad_()
        result = function([tensor, 2 * tensor], **how)[1] if grouped else function(tensor, **how)
        (result * own_values(SIZE, 1)).sum().backward()
        return tensor.grad

    functions = {"one": (ncz.allreduce, hvd.allreduce), "group": (ncz.grouped_allreduce, hvd.grouped_allreduce)}
    ways = {
        "": {},
        ", a sum": {"op": hvd.Sum},
        ", factors": {"prescale_factor": 0.5, "postscale_factor": 0.25},
    }
    return {
        name + way: {
            "error": largest_error([gradient(ours, name == "group", how)], [gradient(theirs, name == "group", how)])
        }
        for name, (ours, theirs) in functions.items()
        for way, how in ways.items()
    }


def inference() -> dict:
    """Averages in inference mode, as evaluation makes them."""
    tensor = own_values(SIZE)
    expected = hvd.allreduce(tensor)
    with torch.inference_mode():
        mine = tensor.clone()
        results = [hvd.allreduce(mine, compression=NCZ), *hvd.grouped_allreduce([mine, mine], compression=NCZ)]
    return {"errors": [largest_error([result], [expected]) for result in results]}


def other_defaults() -> list[str]:
    """Sums and trained weights, of a program with each default dtype."""

    def results(default: torch.dtype) -> list[torch.Tensor]:
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
        return found

    digests = []
    try:
        for default in (torch.float32, torch.bfloat16, torch.float64):
            torch.set_default_dtype(default)
            digests.append(sha256(results(default)))
    finally:
        torch.set_default_dtype(torch.float32)
    return digests


def kept() -> dict:
    """How many tensors and handles outlive their last reference, of two calls, where Python collects no garbage."""

    def succeed() -> list:
        tensor = own_values(SIZE)
        handle = ncz.allreduce_async(tensor, name="x")
        return [weakref.ref(each) for each in (tensor, handle, hvd.synchronize(handle))]

    def fail() -> list:
        tensor = own_values(SIZE + hvd.rank())
        handle = ncz.allreduce_async(tensor, name="x")
        watched = [weakref.ref(each) for each in (tensor, handle, handle.tensors[0].tensor)]
        try:
            hvd.synchronize(handle)
        except MismatchError:
            return watched
        raise AssertionError("no error")

    gc.collect()
    gc.disable()
    watched = {"success": succeed(), "failure": fail()}
    succeed()  # a thread that has something else to do has let go of what was before
    found = {name: sum(each() is not None for each in those) for name, those in watched.items()}
    gc.enable()
    return found


hvd.init()
checks = (compressed, plain, exact, fixed_rate, handles, unnamed, backward, inference, other_defaults, kept)
save({check.__name__: check() for check in checks})
