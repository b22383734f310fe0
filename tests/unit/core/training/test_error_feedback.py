"""Error feedback: over the steps nothing is lost but what residuals hold."""

import pytest
import torch
from calls import planned, run_decided, run_planned
from ranks import play

from ncz_plugins.core.call import Call
from ncz_plugins.core.codec.layout import Window
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import MismatchError, UnsupportedError
from ncz_plugins.core.group import Group
from ncz_plugins.core.planning import layout_of_sum
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.schedules import direct, ring
from ncz_plugins.core.training import error_feedback
from ncz_plugins.core.training.error_feedback import Feedback, Residuals
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.training.state import Training

SUM = torch.distributed.ReduceOp.SUM
SCHEDULES = {"ring": ring, "direct": direct}
NUMEL = 20_011
PARTS = [
    ParameterSlice("a", 5000),
    ParameterSlice(None, 11),
    ParameterSlice("b", 8000, numel=15_000),
    ParameterSlice("b", 7000, 8000),
]
STEPS = 6
ROUNDING = 1.5 * 2**-9  # of a residual to bfloat16, times `value`: blocks of normal numbers have an rms below 1.5


def config(**quantizer) -> Config:
    return Config(quantizer={"mode": "rms", "value": 2, "error_feedback": True} | quantizer)


def gradients(rank: int, step: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(NUMEL, generator=generator, dtype=torch.float64).to(dtype)


def reduce(transport, tensor, residuals, config, number=1, divisor=1, parts=PARTS, schedule="direct"):
    return run_planned(
        planned(
            "all_reduce",
            config,
            layout_of_sum(tensor, transport.world_size, config),
            source=Window(tensor),
            output=Window(tensor),
            measured=range(transport.world_size),
            schedule=SCHEDULES[schedule].all_reduce,
            plain=lambda plain: plain.all_reduce(tensor),
            number=number,
            addends=transport.world_size,
            addend=transport.rank,
            divisor=divisor,
            feedback=Feedback(residuals, parts) if residuals else None,
        ),
        Host(),
        transport,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["error_bound", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_lost_in_one_step_is_in_the_residuals(schedule, kind, dtype):
    """Results plus what residuals hold make the exact sum, but for roundings; and without them much is missing."""
    world_size = 3

    def body(transport):
        residuals, total = Residuals(), torch.zeros(NUMEL, dtype=torch.float64)
        for step in range(STEPS):
            tensor = gradients(transport.rank, step, dtype)
            done = reduce(transport, tensor, residuals, config(kind=kind), step, world_size, schedule=schedule)
            assert done.compressed_calls == 1
            total += tensor.double()
        return total, residuals.by_name

    outcomes = play(world_size, body)
    total = outcomes[0][0]
    assert all(torch.equal(total, other) for other, _ in outcomes)
    exact = (
        sum(gradients(rank, step, dtype).double() for rank in range(world_size) for step in range(STEPS)) / world_size
    )
    left = {name: sum(by_name[name].double() for _, by_name in outcomes) / world_size for name in ("a", "b")}
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 0.05}[dtype]  # results are rounded to dtype
    if dtype != torch.float64:
        tolerance += STEPS * config().quantizer.value * ROUNDING
    for name, elements in (("a", slice(0, 5000)), ("b", slice(5011, NUMEL))):
        missing = exact[elements] - total[elements]
        assert (missing - left[name]).abs().max() < tolerance
        assert missing.abs().max() > 10 * tolerance
        assert outcomes[0][1][name].dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
    assert set(outcomes[0][1]) == {"a", "b"}  # padding has none


def test_small_values_come_through_in_the_end():
    """Every element is far below the step: without feedback nothing ever arrives."""
    STEPS = 200  # their sum is 4 times what residuals may still hold

    def body(transport, on):
        residuals, total = Residuals() if on else None, torch.zeros(NUMEL)
        tensor = torch.full((NUMEL,), 0.01)
        tensor[::4096] = 100.0
        for step in range(STEPS):
            given = tensor.clone()
            assert reduce(transport, given, residuals, config(mode="abs", value=0.5), step).compressed_calls
            total += given
        return total[1]

    assert play(2, lambda transport: body(transport, False)) == [0, 0]
    assert all(abs(total - STEPS * 2 * 0.01) <= 2 * 0.51 for total in play(2, lambda transport: body(transport, True)))


def test_a_call_that_goes_plain_leaves_residuals_as_they_are():
    def body(transport):
        residuals = Residuals()
        reduce(transport, gradients(transport.rank, 0), residuals, config())
        before = {name: each.clone() for name, each in residuals.by_name.items()}
        tensor = gradients(transport.rank, 1)
        if transport.rank == 1:
            tensor[7] = float("nan")
        done = reduce(transport, tensor, residuals, config(), 2)
        assert done.bypasses == {"non-finite": 1} and torch.isnan(tensor[7])
        exact = gradients(0, 1) + gradients(1, 1)
        exact[7] = float("nan")
        assert torch.equal(tensor.nan_to_num(5), exact.nan_to_num(5))  # nothing was added to what went plain
        assert all(torch.equal(before[name], each) for name, each in residuals.by_name.items())
        assert all(each.isfinite().all() for each in residuals.by_name.values())

    play(2, body)


def test_residuals_follow_a_parameter_into_other_buckets():
    """Cut and put together differently, in another order, each element finds its own residual."""

    def body(transport):
        residuals = Residuals()
        reduce(transport, gradients(transport.rank, 0), residuals, config())
        kept = {name: each.float() for name, each in residuals.by_name.items()}
        slices = [ParameterSlice("b", 6000, 9000, 15_000), ParameterSlice("a", 3000, 1000, 5000)]
        window = Feedback(residuals, slices).added_to(Window(torch.ones(9000)))
        assert torch.equal(window.data, 1 + torch.cat([kept["b"][9000:], kept["a"][1000:4000]]))
        part = Feedback(residuals, PARTS).added_to(Window(torch.ones(2000), 4500))  # a node's piece
        assert torch.equal(part.data, 1 + torch.cat([kept["a"][4500:], torch.zeros(11), kept["b"][:1489]]))

    play(2, body)


def test_what_is_not_finite_is_no_residual():
    """As a fixed rate loses it where a gradient overflows."""
    residuals = Residuals()
    feedback = Feedback(residuals, [ParameterSlice("a", 4)])
    feedback.added_to(Window(torch.ones(4)))
    feedback.keep(Window(torch.tensor([1.0, torch.nan, torch.inf, -2.0])), is_finite=False)
    assert residuals.by_name["a"].tolist() == [1, 0, 0, -2]


@pytest.mark.parametrize("quantizer", [{}, {"kind": "stochastic"}, {"mode": "bits"}], ids=str)
@pytest.mark.parametrize("where", ["on a CPU", "on a GPU"])
def test_a_gradient_of_zeros_leaves_its_residual_for_the_next_step(where, quantizer, monkeypatch):
    """As its parameter may be unused, and what comes out dropped. It is so with each rank for itself."""
    if where == "on a GPU":  # whose host does not learn what is zero
        monkeypatch.setattr(error_feedback, "_is_used", torch.any)
    settings = Config(quantizer={"value": 3, "error_feedback": True} | quantizer, transport={"min_bytes": 0})
    zero = [[], [1], [0, 1], [1], []]  # the ranks whose gradient of "b" is zero, by step

    def body(transport):
        ours = Group(Training(settings), settings.resolved(), range(2), transport.rank)
        came_out, residuals = [], ours.training.residuals
        total = torch.zeros(NUMEL, dtype=torch.float64)
        for step, ranks in enumerate(zero):
            tensor = contributed(transport.rank, step)
            before = {name: each.clone() for name, each in residuals.by_name.items()}
            request = Call("all_reduce", tensor, tensor, SUM, parts=PARTS)
            run_decided(ours, request, Host(), transport)
            if step:
                assert torch.equal(before["b"], residuals.by_name["b"]) == (transport.rank in ranks)
                assert not torch.equal(before["a"], residuals.by_name["a"])
            came_out.append(bool(tensor[5011:].any()))
            total += tensor
        assert came_out == [True, True, False, True, True]  # nothing comes out where all have zeros
        return total, residuals.by_name

    def contributed(rank, step):
        tensor = gradients(rank, step)
        if rank in zero[step]:
            tensor[5011:] = 0
        return tensor

    outcomes = play(2, body, reuse=True)
    exact = sum(contributed(rank, step).double() for rank in range(2) for step in range(len(zero)))
    for name, elements in (("a", slice(0, 5000)), ("b", slice(5011, NUMEL))):
        kept = sum(by_name[name].double() for _, by_name in outcomes)
        tolerance = 2 * len(zero) * settings.quantizer.value * ROUNDING
        torch.testing.assert_close((exact - outcomes[0][0])[elements], kept, rtol=0, atol=tolerance)


def test_a_gradient_of_an_earlier_step_leaves_the_residual_as_it_is():
    residuals = Residuals()
    residuals.by_name["a"] = torch.ones(4)
    feedback = Feedback(residuals, [ParameterSlice("a", 3, 1, 4, feeds_back=False)])
    window = feedback.added_to(Window(torch.full((3,), 5.0)))
    assert window.data.tolist() == [5, 5, 5]
    feedback.keep(window)
    assert residuals.by_name["a"].tolist() == [1, 1, 1, 1]


def test_slices_of_one_parameter_may_not_overlap():
    residuals = Residuals()
    Feedback(residuals, [ParameterSlice("a", 4, 0, 8), ParameterSlice("a", 4, 4, 8), ParameterSlice("a", 0, 2, 8)])
    with pytest.raises(UnsupportedError, match="a: two tensors of one call"):
        Feedback(residuals, [ParameterSlice("a", 4, 0, 8), ParameterSlice("a", 4, 3, 8)])


def test_one_name_for_two_parameters_is_refused():
    residuals = Residuals()
    residuals.of(ParameterSlice("a", 10), torch.zeros(1))
    with pytest.raises(MismatchError, match="a has 11 elements and had 10 before.*one name for each parameter"):
        residuals.of(ParameterSlice("a", 11), torch.zeros(1))
    assert residuals.nbytes == 20


def test_a_model_that_has_changed_since_its_state_is_told_what_to_do():
    residuals = Residuals()
    residuals.by_name["head"] = torch.zeros(5)  # as loaded
    with pytest.raises(MismatchError, match="has 7 elements and had 5 before.*by_name.clear.. after loading it"):
        residuals.of(ParameterSlice("head", 7), torch.zeros(1))


def test_lossless_keeps_nothing():
    assert not config(kind="lossless").quantizer.feeds_back


def test_their_memory_can_be_asked_for_while_a_call_adds_some():
    residuals = Residuals()

    class Adding(torch.Tensor):
        @property
        def nbytes(self):
            residuals.of(ParameterSlice("b", 2), torch.zeros(1))  # as the background thread of a call does
            return 20

    residuals.by_name["a"] = torch.zeros(5).as_subclass(Adding)
    assert residuals.nbytes == 20 and residuals.by_name.keys() == {"a", "b"}
