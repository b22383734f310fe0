"""What a communicator refuses before anything is sent, and what the handles of its calls give."""

import threading

import pytest
import torch
from ranks import play_communicators

from ncz_plugins.core.communicator import Communicator
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import ConfigError, MismatchError, UnsupportedError
from ncz_plugins.core.training.policy import ParameterSlice

FOUR, SHORT, LONG = ([ParameterSlice("a", 1), ParameterSlice("b", length)] for length in (3, 2, 4))


def zeros(count: int = 4) -> torch.Tensor:
    return torch.zeros(count)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.reduce_scatter_single(zeros(3), zeros(4)), "input must have 1 .ranks. .* got 4 and 3"),
        (lambda c: c.reduce_scatter_single(zeros(4), zeros(3)), "got 3 and 4"),
        (lambda c: c.all_gather_single(zeros(3), zeros(4)), "output must have 1 .ranks. .* got 3 and 4"),
        (lambda c: c.all_gather_single(zeros(4), zeros(3)), "got 4 and 3"),
        (lambda c: c.all_reduce(zeros(), parts=SHORT), "parts must have the 4 elements of the tensor, got 3"),
        (lambda c: c.all_reduce(zeros(), parts=LONG), "parts must have the 4 elements of the tensor, got 5"),
        (lambda c: c.all_reduce(zeros(), name="a", parts=FOUR), "name or parts, not both, got name='a'"),
        (lambda c: c.all_reduce(zeros(), kept_as=FOUR), "kept_as needs a name"),
        (lambda c: c.all_reduce(zeros(), parts=FOUR, kept_as=FOUR[::-1]), r"lengths of parts, \[1, 3\], got \[3, 1\]"),
        (lambda c: c.all_reduce(zeros(), name="a", kept_as=SHORT), "kept_as must have the 4 elements .* got 3"),
        (lambda c: c.all_reduce(zeros(), name="a", kept_as=LONG), "kept_as must have the 4 elements .* got 5"),
        (
            lambda c: c.reduce_scatter_single(zeros(), zeros(), name="a", kept_as=LONG),
            "kept_as must have the 4 elements .* got 5",
        ),
        (lambda c: c.all_reduce_coalesced([]), "at least one tensor, got none"),
        (lambda c: c.all_reduce_coalesced([zeros()] * 2, names=["a"]), "names must .* 2 tensors, got 1"),
        (lambda c: c.all_reduce_coalesced([zeros()] * 2, names=["a"] * 3), "names must .* 2 tensors, got 3"),
        (lambda c: c.all_reduce_coalesced([zeros()], parts=[FOUR] * 2), "parts must .* 1 tensors, got 2"),
        (
            lambda c: c.all_reduce_coalesced([zeros()] * 2, parts=[FOUR, LONG]),
            "tensor 1: parts must have the 4 elements .* got 5",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(call, words):
    def body(communicator):
        with pytest.raises(ValueError, match=words):
            call(communicator)
        return communicator.stats.total.calls

    assert play_communicators(1, "ncclz", body) == [0]


def test_a_name_that_is_no_text_is_refused():
    def body(communicator):
        with pytest.raises(TypeError, match=r"all_reduce: name must be a string or None, got 3 \(int\)"):
            communicator.all_reduce(zeros(), name=3)

    play_communicators(1, "ncclz", body)


def test_calls_of_one_rank_are_counted():
    def body(communicator):
        communicator.all_reduce(torch.ones(4))
        communicator.all_reduce_coalesced([torch.ones(4), torch.ones(4)], async_op=True).wait()
        return communicator.stats.total.bypasses

    assert play_communicators(1, "ncclz", body) == [{"one rank": 2}]


def test_callbacks_of_one_rank_do_not_run_on_the_threads_of_its_group():
    """They may hold the last reference to the group, whose end waits for its threads."""

    def body(communicator):
        for _ in range(200):
            future = communicator.all_reduce(torch.ones(4), async_op=True).get_future()
            assert future.then(lambda done: threading.get_ident()).wait() == threading.get_ident()

    play_communicators(1, "ncclz", body)


def test_no_call_of_several_begins_if_one_is_refused():
    def body(communicator):
        tensors = [torch.ones(4), torch.ones(4, dtype=torch.int16)]
        with pytest.raises(UnsupportedError, match="int16"):
            communicator.all_reduce_coalesced(tensors)
        return tensors[0].tolist(), communicator.stats.total.calls

    assert play_communicators(2, "ncclz", body) == [([1.0] * 4, 0)] * 2


def test_parts_that_are_treated_differently_are_reduced_by_calls_of_their_own():
    def body(communicator):
        tensor = torch.tensor([1.0, 2.0, 3.0, 4.0])
        communicator.all_reduce(tensor, parts=FOUR)
        assert tensor[0] == 2.0 and (tensor - torch.tensor([2.0, 4.0, 6.0, 8.0])).abs().max() <= 0.02
        total = communicator.stats.total
        return total.compressed_calls, total.bypasses

    quantizer = {"mode": "abs", "value": 0.01}
    policies = [{"name": "a", "action": "skip"}]
    config = {"transport": {"min_bytes": 0}, "quantizer": quantizer, "policies": policies}
    assert play_communicators(2, config, body) == [(1, {"policy": 1})] * 2


def test_ranks_that_pass_other_lists_of_tensors_are_told_so():
    """Although the calls of each dtype have the same sizes: they would sum tensors that have nothing in common."""
    floats, integers = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    lists = [floats, floats, integers], [floats, integers, floats]

    def body(communicator):
        with pytest.raises(MismatchError, match="list of tensors differs"):
            communicator.all_reduce_coalesced([each.clone() for each in lists[communicator.rank]])

    play_communicators(2, {"transport": {"min_bytes": 0}}, body)


def test_the_older_names_of_torch_stay():
    assert Communicator.reduce_scatter_tensor is Communicator.reduce_scatter_single
    assert Communicator.all_gather_into_tensor is Communicator.all_gather_single


@pytest.mark.parametrize("min_bytes", [0, "1GiB"], ids=["compressed", "plain"])
def test_the_future_of_a_call_gives_what_the_result_is_in(min_bytes):
    def body(communicator):
        whole, part, gathered = zeros(8), zeros(4), zeros(8)
        for started, output in (
            (communicator.all_reduce(whole, async_op=True), whole),
            (communicator.reduce_scatter_single(part, whole, async_op=True), part),
            (communicator.all_gather_single(gathered, part, async_op=True), gathered),
            (communicator.broadcast(whole, 1, async_op=True), whole),
        ):
            [result] = started.get_future().wait()
            assert result is output
        several = [zeros(), zeros().double()]
        results = communicator.all_reduce_coalesced(several, async_op=True).get_future().wait()
        assert all(result is tensor for result, tensor in zip(results, several, strict=True))

    play_communicators(2, {"transport": {"min_bytes": min_bytes}}, body)


@pytest.mark.parametrize(
    ("section", "value"),
    [("transport", {"schedule": "ring"}), ("entropy", {"coder": "raw"}), ("roles", ["gradient", "activation"])],
)
def test_what_a_communicator_has_connected_with_can_not_be_replaced(section, value):
    def body(communicator):
        training = communicator.training
        before = training.config
        with pytest.raises(ConfigError, match=f"{section}: can't be changed while communicators of this training"):
            training.config = before.model_dump(mode="json") | {section: value}
        assert training.config == before
        training.config = {"quantizer": {"value": 0.5}}  # from the next call on
        communicator.close()
        training.config = {section: value}
        return training.config.quantizer.value

    assert play_communicators(2, {}, body) == [Config().quantizer.value] * 2


def test_a_step_ends_once_the_sum_that_the_guard_verifies_is_over():
    """Also if nobody has waited for it: else ranks would count it in different steps."""
    config = {"transport": {"min_bytes": 0}, "guard": {"every": 1}}

    def body(communicator):
        handle = communicator.all_reduce(torch.ones(1 << 22), async_op=True)
        done = communicator.end_step()
        return handle.is_completed(), done.compressed_calls

    assert play_communicators(2, config, body) == [(True, 1)] * 2
