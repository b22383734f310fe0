"""Compressed gradients through hvd.DistributedOptimizer, beside Horovod's own in the same processes."""

import contextlib
import io
import json
import os

import pytest

pytest.importorskip("horovod")

import horovod.torch as hvd
import on_rank
import torch
from on_rank import folder, of_all_ranks, rank, same_on_all_ranks, world_size
from scenarios import HOROVOD, ranks
from torch import nn
from under_horovod import gradients, largest, largest_error, loss_of, new_model, sha256

from ncz_plugins.horovod import NCZ

pytestmark = pytest.mark.slow

STEPS = 3
BOUND = 2e-4  # of each rank's contribution, in the gradients' own unit
CONFIG = {"quantizer": {"mode": "abs", "value": BOUND}, "transport": {"min_bytes": 0}}
# Two roundings of half a unit in the last place, one in either run, as a share of the value.
ROUNDING = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# What a case may set:
#   arguments: of DistributedOptimizer; names for op and for the parameters in groups
#   unnamed: without named_parameters
#   dtype: of the model
#   branches: of the model, and in which order; one item per rank, taken in turn
CASES = {
    **{dtype: {"dtype": dtype} for dtype in ("float64", "float16", "bfloat16")},
    "sum": {"arguments": {"op": "Sum"}},
    "predivided": {"arguments": {"gradient_predivide_factor": 3.0}},
    "two backward passes": {"arguments": {"backward_passes_per_step": 2}},
    "two groups": {"arguments": {"groups": 2}},
    "groups by name": {"arguments": {"groups": [["exit.bias", "a.weight"], ["entry.weight"]]}},
    "sum in groups": {"arguments": {"op": "Sum", "groups": 3}},
    "unnamed": {"unnamed": True},
    "another order on each rank": {"branches": ["ab", "ba"]},
    "a gradient that only some ranks have": {"branches": ["ab", "a"]},
    "a gradient that no rank has": {"branches": ["b"]},
    "groups in another order": {"arguments": {"groups": 2}, "branches": ["ab", "ba"]},
}


def configured_by_the_environment() -> None:
    """Join the other ranks, with a file of CONFIG in NCZ_CONFIG."""
    file = folder() / f"config{rank}.json"
    file.write_text(json.dumps(CONFIG))
    os.environ["NCZ_CONFIG"] = str(file)
    on_rank.start()


@pytest.mark.parametrize("name", CASES)
@ranks(2, 3, start="configured_by_the_environment", **HOROVOD)
def test_gradients_are_compressed_and_replicas_stay_identical(group, name):
    train_beside_plain(CASES[name], NCZ(CONFIG))


@pytest.mark.parametrize("name", ["sum in groups", "a gradient that only some ranks have", "bfloat16"])
@pytest.mark.parametrize("schedule", ["ring", "halving"])
@ranks(3, start="configured_by_the_environment", **HOROVOD)
def test_connections_of_our_own_give_the_same_to_the_bit(group, name, schedule):
    on_our_own = NCZ({**CONFIG, "transport": {"min_bytes": 0, "schedule": schedule}})
    assert train_beside_plain(CASES[name], on_our_own) == train_beside_plain(CASES[name], NCZ(CONFIG))


@ranks(2, start="configured_by_the_environment", **HOROVOD)
def test_all_ways_to_write_it_mean_the_same(group):
    file = os.environ["NCZ_CONFIG"]
    ways = {"class": NCZ, "instance": NCZ(), "file": NCZ(file), "mapping": NCZ(CONFIG), "sections": NCZ(**CONFIG)}
    assert len({train_beside_plain({}, compression) for compression in ways.values()}) == 1


@pytest.mark.parametrize(("name", "warns"), [("ncclz", True), ("ncclz:muon", False)])
@ranks(2, start="configured_by_the_environment", **HOROVOD)
def test_the_first_rank_warns_of_a_bound_that_is_visible_under_muon(group, name, warns):
    model = new_model()
    named = [(name, each) for name, each in model.named_parameters() if each.dim() == 2]
    optimizer = torch.optim.Muon([each for _, each in named])
    with contextlib.redirect_stderr(io.StringIO()) as said:
        hvd.DistributedOptimizer(optimizer, named_parameters=iter(named), compression=NCZ(name))
    assert said.getvalue().count(f"warning: Muon trains {named[0][0]}, ") == int(warns and rank == 0)
    assert said.getvalue().count("warning") == int(warns and rank == 0)


class AsFloat32(hvd.Compression.none):
    """For the plain run: Horovod can't add bfloat16."""

    @staticmethod
    def compress(tensor):
        return tensor.float(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


def new_optimizer(compression, settings: dict):
    """A new model with its optimizer."""
    model = new_model(getattr(torch, settings.get("dtype", "float32")))
    arguments = dict(settings.get("arguments", {}))
    if "op" in arguments:
        arguments["op"] = getattr(hvd, arguments["op"])
    if isinstance(arguments.get("groups"), list):
        arguments["groups"] = [[model.get_parameter(name) for name in group] for group in arguments["groups"]]
    if not settings.get("unnamed"):
        arguments["named_parameters"] = model.named_parameters()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, hvd.DistributedOptimizer(sgd, compression=compression, **arguments)


def train_beside_plain(settings: dict, compression) -> str:
    """A few steps with compressed gradients, beside Horovod's own from the same weights. A hash of the weights."""
    stats = (NCZ.default() if compression is NCZ else compression).stats
    model, optimizer = new_optimizer(compression, settings)
    plain_compression = AsFloat32 if settings.get("dtype") == "bfloat16" else hvd.Compression.none
    plain_model, plain_optimizer = new_optimizer(plain_compression, settings)
    everyones = settings.get("branches", ["ab"])
    branches = everyones[rank % len(everyones)]
    passes = settings.get("arguments", {}).get("backward_passes_per_step", 1)
    bound = BOUND * (world_size if settings.get("arguments", {}).get("op") == "Sum" else 1)
    order, hooks = order_of_gradients(model)
    for step in range(STEPS):
        plain_model.load_state_dict(model.state_dict())
        for each, its_optimizer in ((model, optimizer), (plain_model, plain_optimizer)):
            its_optimizer.zero_grad()
            for number in range(step * passes, (step + 1) * passes):
                loss_of(each, number, branches=branches).backward()
            its_optimizer.synchronize()
        magnitude = largest(gradients(plain_model))
        rounding = ROUNDING[settings.get("dtype", "float32")] * magnitude
        assert 0 < largest_error(gradients(model), gradients(plain_model)) <= bound + rounding
        assert magnitude > 10 * bound
        with optimizer.skip_synchronize():
            optimizer.step()
        while hooks:  # those of the first step have told the order
            hooks.pop().remove()

    each_had_its_own(order, everyones)
    every_gradient_was_compressed(model, stats)
    digest = sha256(model.parameters())
    same_on_all_ranks(digest)
    return digest


def order_of_gradients(model: nn.Module):
    """A list in which backward passes note the names of parameters, and the hooks that do so."""
    order = []
    hooks = [p.register_hook(lambda _, name=name: order.append(name)) for name, p in model.named_parameters()]
    return order, hooks


def each_had_its_own(order: list[str], branches: list[str]) -> None:
    """Ranks really had their gradients in another order, and gradients that are missing really were."""
    first, second, *_ = of_all_ranks(order)
    if branches == ["ab", "ba"]:
        assert first != second and sorted(first) == sorted(second)
    if branches == ["ab", "a"]:
        assert set(first) - set(second) == {"b.weight", "b.bias"}


def every_gradient_was_compressed(model: nn.Module, stats) -> None:
    assert len(stats.steps) == STEPS
    for step in stats.steps:
        assert step.bypasses == {}
        assert step.compressed_calls == step.calls > 0
        assert step.bytes_in == sum(p.nbytes for p in model.parameters())
        assert step.wire_bytes < step.plain_bytes
