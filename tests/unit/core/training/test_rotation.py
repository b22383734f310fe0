"""Matrices in the singular vectors of their sums' momentum: back comes what went in, exactly alike everywhere."""

import math

import numpy as np
import pytest
import torch
from ranks import play_communicators, same_bits

from ncz_plugins.core.codec.layout import Window
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import ConfigError, UnsupportedError
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.training.rotation import EVERY, FIRST, Rotation, Rotations
from ncz_plugins.core.training.state import Training

SHAPES = [(48, 120), (120, 48), (64, 64), (8, 3, 5), (100,), (1,), (0, 7)]


def parts(*shapes) -> list[ParameterSlice]:
    return [ParameterSlice(f"p{at}", math.prod(shape), shape=shape) for at, shape in enumerate(shapes)]


def gradient(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def learnt(*shapes, sums: int = 4) -> tuple[Rotations, Rotation]:
    """What the only rank knows after some sums."""
    rotations, given = Rotations(), parts(*shapes)
    rotation = Rotation(rotations, given, 0, (0,))
    for seed in range(sums):
        rotation.follow(gradient(sum(part.length for part in given), seed))
        if (message := rotation.new_bases(torch.device("cpu"))) is not None:
            rotation.take(message)
    return rotations, rotation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_goes_into_the_bases_comes_back(dtype):
    rotations, rotation = learnt(*SHAPES)
    values = gradient(sum(map(math.prod, SHAPES)), 9).to(dtype)
    turned, back = rotation.into(Window(values)).data, torch.empty_like(values)
    rotation.back(turned, back)
    of_16_bits = 1e-3 * values.float().abs().max().item()  # the rounding of a basis
    torch.testing.assert_close(back, values, rtol=0.01 if dtype == torch.bfloat16 else 0, atol=of_16_bits)
    sides = [48, 48, 64, 8, None, None]  # of vectors there is no shorter side
    assert [each.basis and len(each.basis.entries) for each in rotations.by_name.values()] == sides
    for matrix in filter(lambda each: each.basis, rotations.by_name.values()):
        basis = matrix.basis.exact()
        torch.testing.assert_close(basis.T @ basis, torch.eye(matrix.side, dtype=basis.dtype), rtol=0, atol=1e-3)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_back_is_computed_without_rounding_but_at_one_place(scale):
    """Integers of any size give the same: the law that no order of additions changes a bit rests on that."""
    rotations, _ = learnt((60, 200))
    [matrix] = rotations.by_name.values()
    values = scale * gradient(12_000, 5).view(200, 60)
    tilted = values.double() * matrix.basis.tilt()
    step = 2.0 ** (math.frexp(tilted.abs().max())[1] - (38 - 6))  # 60 products of so many bits and 15 have 53
    whole = np.array([[round(x / step) for x in row] for row in tilted.tolist()], dtype=object)
    entries = np.array(matrix.basis.entries.tolist(), dtype=object)
    assert (abs(whole) @ abs(entries.T)).max() <= 2**53
    exact = np.array((whole @ entries.T).tolist(), dtype=np.float64) * (step * 2.0**-matrix.basis.exponent)
    assert (matrix.back(values).numpy() == exact).all()


def test_all_bits_are_the_same_in_any_order_of_directions():
    rotations, _ = learnt((60, 200))
    [matrix] = rotations.by_name.values()
    values = gradient(12_000, 5).view(200, 60)
    wanted = matrix.back(values)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    matrix.basis = matrix.basis._replace(entries=matrix.basis.entries[:, order], worth=matrix.basis.worth[order])
    assert torch.equal(matrix.back(values[:, order]), wanted)


def test_directions_of_small_singular_values_have_less_noise():
    """In proportion to the square root of the value, where without bases all have the same."""
    basis = torch.linalg.qr(gradient(64 * 64).view(64, 64))[0]
    values = torch.logspace(0, -2, 64)

    def total(step: int) -> torch.Tensor:
        return (basis * values @ torch.linalg.qr(gradient(64 * 64, step + 1).view(64, 64))[0]).flatten()

    def noise(rotation: bool) -> torch.Tensor:
        quantizer = {"kind": "error_bound", "value": 0.1, "rotation": rotation}
        config = {"quantizer": quantizer, "transport": {"min_bytes": 0}}

        def body(communicator):
            found = []
            for step in range(8):
                tensor = total(step).clone()
                communicator.all_reduce(tensor, torch.distributed.ReduceOp.AVG, parts=parts((64, 64)))
                found.append(basis.T @ (tensor - total(step)).view(64, 64))
            return torch.stack(found[5:]).square().mean((0, 2)).sqrt()

        return play_communicators(2, config, body)[0]

    plain, turned = noise(False), noise(True)
    assert plain[-8:].mean() > 0.8 * plain[:8].mean()
    assert turned[-8:].mean() < 0.25 * turned[:8].mean()
    assert turned[-8:].mean() < 0.5 * plain[-8:].mean()


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_coefficient_keeps_the_bound(ranks):
    """In the basis, in the unit of the steps: the root mean square of its block, of the largest rank."""
    shapes, value = [(96, 80), (50,), (40, 30)], 0.2
    given = parts(*shapes)
    numel = sum(part.length for part in given)
    quantizer = {"kind": "error_bound", "value": value, "rotation": True}
    sums = 6

    def body(communicator):
        rotations, found = communicator.training.rotations, []
        for step in range(sums):
            rotation = Rotation(rotations, given, communicator.rank, range(ranks))
            own = [gradient(numel, 100 * step + rank) for rank in range(ranks)]
            into = torch.stack([rotation.into(Window(each)).data for each in own])
            blocks = into.split(communicator.config.quantizer.block_in_effect, dim=1)
            bounds = [ranks * value * each.square().mean(1).sqrt().max().expand(each.shape[1]) for each in blocks]
            tensor = own[communicator.rank].clone()
            before = {name: matrix.basis for name, matrix in rotations.by_name.items()}
            communicator.all_reduce(tensor, parts=given)
            after = {name: matrix.basis for name, matrix in rotations.by_name.items()}
            error = tensor.double() - sum(each.double() for each in own)
            for bases in (before, after):  # those of this call, and those that are due after it
                for name, basis in bases.items():
                    rotations.by_name[name].basis = basis
                error = rotation.into(Window(error)).data.abs() if bases is before else error
            assert (error <= torch.cat(bounds) * 1.001 + 1e-3 * into.abs().max()).all()
            found.append(tensor)
        assert communicator.stats.total.bypasses == {}
        return torch.stack(found)

    results = play_communicators(ranks, {"quantizer": quantizer, "transport": {"min_bytes": 0}}, body)
    assert same_bits(results)


def test_what_is_not_finite_goes_plain_and_teaches_nothing():
    quantizer = {"kind": "error_bound", "value": 0.1, "rotation": True, "error_feedback": True}
    given = parts((64, 64))

    def body(communicator):
        tensor = gradient(4096, communicator.rank)
        communicator.all_reduce(tensor, parts=given)
        state = communicator.training.rotations.state_dict()
        sums, momentum = state["0 1/p0"]["sums"], state["0 1/p0"]["momentum"]
        momentum = None if momentum is None else momentum.clone()
        bad = gradient(4096, communicator.rank)
        bad[7] = [math.nan, math.inf][communicator.rank]
        communicator.all_reduce(bad, parts=given)
        after = communicator.training.rotations.state_dict()["0 1/p0"]
        assert after["sums"] == sums == 1
        assert momentum is None or torch.equal(after["momentum"], momentum)
        assert not bad[7].isfinite() and bad.isfinite().sum() == 4095
        assert communicator.stats.total.bypasses == {"non-finite": 1}
        zeros = torch.zeros(4096)
        communicator.all_reduce(zeros, parts=[given[0]._replace(feeds_back=False)])
        assert zeros.eq(0).all()
        return momentum is not None

    config = {"quantizer": quantizer, "transport": {"min_bytes": 0}}
    assert sorted(play_communicators(2, config, body)) == [False, True]  # one rank keeps the momentum


def test_what_bases_take_is_counted():
    """They are sent after some of the first sums, and seldom later."""
    quantizer = {"kind": "error_bound", "value": 0.5, "rotation": True}
    given = parts((96, 96))
    of_bases = 2 * (96 * 96 + 2 * 96 + 1)  # entries, worths and an exponent in 16 bits

    def body(communicator):
        sent = []
        for step in range(6):
            communicator.all_reduce(gradient(96 * 96, 10 * step + communicator.rank), parts=given)
            sent.append(communicator.end_step().wire_bytes)
        return sent

    for sent in play_communicators(2, {"quantizer": quantizer, "transport": {"min_bytes": 0}}, body):
        others = [each for step, each in enumerate(sent, 1) if step not in FIRST]
        for step in FIRST:
            if step <= len(sent):
                assert sent[step - 1] - of_bases < 1.2 * max(others)
                assert sent[step - 1] - of_bases > 0.8 * min(others)
    assert EVERY > 10 * len(FIRST)


WHOLE, HALF = ParameterSlice("w", 4096, shape=(64, 64)), ParameterSlice("w", 2048, numel=4096, shape=(64, 64))
REFUSED = {
    "a tensor has no name": lambda of, tensor: of.all_reduce(tensor),
    "of w there is a part": lambda of, tensor: of.all_reduce(tensor, parts=[HALF, HALF._replace(start=2048)]),
    "got reduce_scatter_single": lambda of, tensor: of.reduce_scatter_single(tensor[:2048], tensor, parts=[WHOLE]),
    "got reduce:": lambda of, tensor: of.reduce(tensor, 0, parts=[WHOLE]),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_can_not_be_turned_is_refused(words):
    config = {"quantizer": {"rotation": True}, "transport": {"min_bytes": 0}}

    def body(communicator):
        with pytest.raises(UnsupportedError, match="set quantizer.rotation to false") as raised:
            REFUSED[words](communicator, gradient(4096))
        assert words in str(raised.value)

    play_communicators(2, config, body)


def test_rotation_and_a_fixed_rate_are_refused_together():
    at_rate = {"mode": "bits", "value": 4}
    with pytest.raises(ConfigError, match="rotation: true, and quantizer.value 4 with mode bits"):
        Config(quantizer=at_rate | {"rotation": True})
    with pytest.raises(ConfigError, match=r"rotation: true, and policies\[0\].quantizer.value 4"):
        Config(quantizer={"rotation": True}, policies=[{"quantizer": at_rate}])


def test_states_are_restored_and_damaged_ones_refused():
    rotations, _ = learnt((20, 30), (5,))
    training = Training()
    training.rank, training.world_size, training.rotations = 0, 1, rotations
    state = training.state_dict()
    restored = Training()
    restored.rank, restored.world_size = 0, 1
    restored.load_state_dict(state)
    for name, matrix in rotations.by_name.items():
        other = restored.rotations.by_name[name]
        assert (other.shape, other.owner, other.sums) == (matrix.shape, matrix.owner, matrix.sums)
        assert (other.basis is None) == (matrix.basis is None)
    mine, theirs = (each.rotations.by_name["0/p0"] for each in (training, restored))
    assert torch.equal(theirs.basis.exact(), mine.basis.exact()) and torch.equal(theirs.basis.worth, mine.basis.worth)
    assert torch.equal(restored.rotations.by_name["0/p0"].momentum, rotations.by_name["0/p0"].momentum)
    damaged = state["rank 0"][0]["rotations"]["0/p0"]
    for key, value in {
        "sums": -1,
        "owner": None,
        "basis": (None, 1, None),
        "momentum": torch.zeros(3),
        "shape": (20, 31),
    }.items():
        saved = {**state, "rank 0": ({**state["rank 0"][0], "rotations": {"0/p0": damaged | {key: value}}},)}
        with pytest.raises(ConfigError, match="rotations"):
            restored.load_state_dict(saved)
