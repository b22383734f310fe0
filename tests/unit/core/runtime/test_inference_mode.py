"""Collectives on tensors of inference mode, and what is left of them for the calls after."""

import pytest
import torch
from ranks import play_communicators

from ncz_plugins.core.communicator import Communicator
from ncz_plugins.core.runtime.inference_mode import ordinary, outside_of_inference_mode


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("numel", [10, 1_000, 70_000, 2_000_000])  # plain and compressed, on the caller's thread or not
def test_calls_in_and_out_of_inference_mode_take_turns(numel, async_op):
    def body(communicator: Communicator) -> list[tuple[torch.Tensor, torch.Tensor]]:
        n, rank = communicator.world_size, communicator.rank
        results = []
        for number in range(3):
            with torch.inference_mode(number == 1):
                values = torch.linspace(1, 2, numel)
                reduced, sent = values.clone(), values * (1 + rank)
                listed = [values.clone(), values[:7].clone()]
                part, whole = torch.zeros(numel), torch.zeros(n * numel)
                handles = [
                    communicator.all_reduce(reduced, async_op=async_op, name="reduced"),
                    communicator.all_reduce_coalesced(listed, async_op=async_op, names=["first", "second"]),
                    communicator.reduce_scatter_tensor(part, values.repeat(n), async_op=async_op, name="scattered"),
                    communicator.all_gather_into_tensor(whole, values, async_op=async_op, name="gathered"),
                    communicator.broadcast(sent, 1, async_op=async_op, name="sent"),
                ]
                for handle in handles if async_op else ():
                    handle.wait()
                for result, factor in ((reduced, n), (listed[0], n), (part, n), (sent, 2)):
                    results.append((result.clone() / factor, values.clone()))
                results.append((listed[1] / n, values[:7].clone()))
                results.append((whole.clone(), values.repeat(n)))
        return results

    for result, exact in play_communicators(2, {"quantizer": {"error_feedback": True}}, body)[0]:
        with torch.inference_mode():
            torch.testing.assert_close(result, exact, rtol=0, atol=1.2)  # the bound, and what is fed back


def test_an_ordinary_tensor_has_the_same_memory_and_can_be_written():
    with torch.inference_mode():
        tensor = torch.ones(3, dtype=torch.bfloat16)
        with outside_of_inference_mode():
            assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
            other = ordinary(tensor)
        assert torch.is_inference_mode_enabled()
    other += 1
    assert tensor.tolist() == [2, 2, 2] and not other.is_inference()
    assert ordinary(other) is other


def test_nothing_changes_outside_of_inference_mode():
    with outside_of_inference_mode():
        assert torch.is_grad_enabled()
    with torch.no_grad(), outside_of_inference_mode():
        assert not torch.is_grad_enabled()
