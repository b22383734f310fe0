"""Whatever a program has made the default of torch, of numpy or of the C library: the same results, to the bit.

Each test plays its calls under ordinary settings, and then under hostile ones.
"""

import locale
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_rank import digest, rank, same_on_all_ranks, world_size
from scenarios import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ncz_plugins.torch.backend  # noqa: F401
from ncz_plugins import Communicator, WeightSync, apply_patch, compress, decompress, make_patch
from ncz_plugins.cli.perf.contenders.collectives import all_gather_single, reduce_scatter_single
from ncz_plugins.torch import ddp, fsdp

FLOAT32 = {"dtype": torch.float32, "device": "cpu"}
SMALL = {"transport": {"min_bytes": 0}}
pytestmark = pytest.mark.skipif(not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="needs torch 2.9")


# ------------------------------------------------------------------ settings of a whole program


@contextmanager
def set_by(function: Callable, value: object, before: object) -> Iterator[None]:
    function(value)
    try:
        yield
    finally:
        function(before)


def locale_with_a_comma() -> str | None:
    """One that this machine has."""
    for name in ("de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "nl_NL.UTF-8"):
        try:
            locale.setlocale(locale.LC_ALL, name)
        except locale.Error:
            continue
        assert locale.localeconv()["decimal_point"] == ","
        locale.setlocale(locale.LC_ALL, "C")
        return name
    return None


COMMA = locale_with_a_comma()


@contextmanager
def hostile(dtype: torch.dtype, device: str, of_a_training: bool) -> Iterator[None]:
    """All of them at once. Those that change what a model computes are left out of a training."""
    with ExitStack() as settings:
        add = settings.enter_context
        add(set_by(torch.set_default_dtype, dtype, torch.float32))
        add(set_by(torch.set_default_device, device, None))
        add(np.errstate(all="raise"))
        add(set_by(torch.use_deterministic_algorithms, True, False))  # fresh memory is NaN, or the largest integer
        assert torch.utils.deterministic.fill_uninitialized_memory
        if COMMA:
            add(set_by(partial(locale.setlocale, locale.LC_ALL), COMMA, "C"))
        if not of_a_training:
            add(set_by(torch.set_flush_denormal, True, False))
            add(set_by(torch.set_num_threads, 3, 1))
            add(torch.autocast("cpu", torch.bfloat16))
            add(torch.inference_mode())
        yield


def unchanged(play: Callable[[], list[torch.Tensor]], of_a_training: bool = False) -> None:
    """Fail unless `play` returns the same bits under hostile settings, and draws nothing from torch's generator."""
    seed = torch.get_rng_state()
    expected = list(map(digest, play()))
    for defaults in ((torch.bfloat16, "cpu"), (torch.float64, "meta")):
        with hostile(*defaults, of_a_training):
            found = play()
        assert list(map(digest, found)) == expected, defaults
    assert torch.equal(torch.get_rng_state(), seed)


def own(numel: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """Values of this rank, some of them too small or too large for arithmetic in float32."""
    values = np.random.default_rng(100 * seed + rank).standard_normal(numel).astype(np.float32)
    values[: numel // 8] *= np.float32(1e-30)
    values[numel // 8 : numel // 4 : 128] = 0
    return torch.from_numpy(values).to(dtype)


# ------------------------------------------------------------------ collectives


def collectives(group, dtype: torch.dtype, config: dict) -> list[torch.Tensor]:
    """What every collective of a new communicator leaves, small and large tensors."""
    results = []
    with Communicator(SMALL | config, group) as communicator:
        for numel in (1, 7, 33_000):
            summed, averaged, sent = (own(numel, dtype) for _ in range(3))
            several = [own(numel, dtype, seed=1), own(5, dtype, seed=2)]
            part = own(numel, dtype)
            whole = own(world_size * numel, dtype)
            named = {"name": f"weight {numel}"}
            communicator.all_reduce(summed, **named)
            communicator.all_reduce(averaged, dist.ReduceOp.AVG, async_op=True, name=f"other {numel}").wait()
            communicator.all_reduce_coalesced(several, names=[f"{numel} a", f"{numel} b"])
            communicator.reduce_scatter_single(part, whole, name=f"part {numel}")
            communicator.all_gather_single(whole, part)
            communicator.broadcast(sent, 1)
            results += [summed, averaged, *several, part, whole, sent]
        total = communicator.stats.total
        assert total.compressed_calls or config.get("preset") == "off", total
    return results


@ranks(2)
def test_defaults(group):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        unchanged(lambda dtype=dtype: collectives(group, dtype, {}))


@ranks(2)
def test_modes_of_the_bound(group):
    for mode in ("abs", "rel", "rms", "range"):
        for kind in ("error_bound", "stochastic"):
            quantizer = {"kind": kind, "mode": mode, "value": 0.01, "block": 256}
            unchanged(lambda quantizer=quantizer: collectives(group, torch.float32, {"quantizer": quantizer}))


@ranks(2)
def test_fixed_rate(group):
    for dtype in (torch.float32, torch.bfloat16):
        quantizer = {"mode": "bits", "value": 4}
        unchanged(lambda dtype=dtype, quantizer=quantizer: collectives(group, dtype, {"quantizer": quantizer}))


def rotated(group) -> list[torch.Tensor]:
    """Sums of a matrix of tiny values, in the bases that earlier sums have given it."""
    quantizer = {"kind": "error_bound", "value": 0.05, "error_feedback": True, "rotation": True}
    with Communicator(SMALL | {"quantizer": quantizer}, group) as communicator:
        sums = [(1e-36 * own(64 * 96, seed=step)).view(64, 96) for step in range(3)]
        for each in sums:
            communicator.all_reduce(each, name="weight")
        assert communicator.stats.total.bypasses == {}
    return sums


@ranks(2)
def test_matrices_in_bases_of_their_own_are_the_same_on_ranks_with_other_settings(group):
    """The number of threads changes what products into a basis are rounded to, on that rank, and so the codes."""
    with hostile(torch.bfloat16, "cpu", False) if rank == 0 else nullcontext():
        sums = rotated(group)
    same_on_all_ranks(list(map(digest, sums)), group)


@ranks(2)
def test_lossless(group):
    for dtype in (torch.float32, torch.float64):
        unchanged(lambda dtype=dtype: collectives(group, dtype, {"quantizer": {"kind": "lossless"}}))


@ranks(2)
def test_plain(group):
    large = {"transport": {"min_bytes": "1GiB"}}

    def play():
        results = []
        with Communicator(large, group) as communicator:
            for numel in (3, 40_000):
                for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                    tensor = own(numel)
                    communicator.all_reduce(tensor, op)
                    results.append(tensor)
        return results

    unchanged(play)


@ranks(2)
def test_error_feedback_and_the_guard(group):
    def play():
        results = []
        config = {"quantizer": {"error_feedback": True, "value": 1.0}, "guard": {"every": 1}}
        with Communicator(SMALL | config, group) as communicator:
            for step in range(3):
                tensor = own(40_000, seed=step)
                communicator.all_reduce(tensor, dist.ReduceOp.AVG, name="weight")
                communicator.end_step()
                results.append(tensor)
            results += communicator.training.residuals.by_name.values()
        return results

    unchanged(play)


@ranks(2)
def test_changes_from_a_baseline(group):
    from ncz_plugins import Baseline

    def play():
        results = []
        with Communicator(SMALL | {"roles": ["gradient", "parameter"]}, group) as communicator:
            weights, baseline = own(40_000), Baseline()
            for _ in range(3):
                weights += 1e-3
                whole = torch.empty(world_size * 40_000, **FLOAT32)
                communicator.all_gather_single(whole, weights, role="parameter", baseline=baseline)
                results.append(whole)
        return results

    unchanged(play)


@ranks(2)
def test_measured_settings(group):
    """The link, the coders and the cores are measured when a communicator connects."""

    def play():
        with Communicator({}, group) as communicator:
            communicator.all_reduce(own(300_000))
        return []

    unchanged(play)


@ranks(2)
def test_the_backend_ncz(group):
    def play():
        of_backend = dist.new_group(backend="ncz")
        tensor, part, whole = own(100_000), own(50_000), own(100_000)
        dist.all_reduce(tensor, group=of_backend)
        reduce_scatter_single(part, whole, group=of_backend)
        all_gather_single(whole, part, group=of_backend)
        dist.destroy_process_group(of_backend)
        return [tensor, part, whole]

    unchanged(play)


# ------------------------------------------------------------------ trainings


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(nn.Linear(64, 307, **FLOAT32), nn.ReLU(), nn.Linear(307, 7, **FLOAT32))
    random = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(random.standard_normal(parameter.shape).astype(np.float32) / 8))
    return model


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(own(16 * 64, seed=step).view(16, 64)).square().mean().backward()
        optimizer.step()


@ranks(2)
def test_trainings_under_ddp(group):
    def play(config):
        model = DistributedDataParallel(net(), process_group=group)
        ddp.compress(model, SMALL | config)
        train(model)
        return [parameter.detach() for parameter in model.parameters()]

    for quantizer in ({}, {"error_feedback": True}, {"mode": "bits", "value": 4}):
        unchanged(partial(play, {"quantizer": quantizer}), of_a_training=True)


@ranks(2)
def test_trainings_under_fsdp(group):
    mesh = init_device_mesh("cpu", (world_size,))

    def play():
        model = net()
        fully_shard(model, mesh=mesh)
        fsdp.compress(model, SMALL | {"roles": ["gradient", "parameter"]})
        train(model)
        return [parameter.detach().full_tensor() for parameter in model.parameters()]

    unchanged(play, of_a_training=True)


# ------------------------------------------------------------------ tensors and weights


@ranks(2)
def test_compressed_tensors(group):
    def play():
        results = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for quantizer in (
                {},
                {"kind": "lossless"},
                {"mode": "rel", "value": 1e-3},
                {"mode": "range", "value": 1e-3},
            ):
                data = compress(own(40_000, dtype).view(8, 5000), {"quantizer": quantizer})
                results += [data, decompress(data)]
        return results

    unchanged(play)


@ranks(2)
def test_patches(group):
    def play():
        old = {"w": own(50_000, torch.bfloat16), "n": torch.tensor([0], dtype=torch.int64, device="cpu")}
        new = {"w": own(50_000, torch.bfloat16) + 1e-3, "n": torch.tensor([1], dtype=torch.int64, device="cpu")}
        patch = make_patch(new, old)
        return [*apply_patch(patch, old).values(), torch.frombuffer(bytearray(patch), dtype=torch.uint8)]

    unchanged(play)


@ranks(2)
def test_synchronized_weights(group):
    def play():
        sync, results = WeightSync(group, src=0), []
        for seed in range(3):
            weights = {"w": torch.from_numpy(np.random.default_rng(seed).standard_normal(50_000)).bfloat16()}
            if rank == 0:
                sync.publish(weights)
            else:
                weights = sync.receive()
            results.append(weights["w"])
        return results

    unchanged(play)
