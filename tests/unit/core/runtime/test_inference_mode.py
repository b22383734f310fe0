"""Collectives on tensors of inference mode, and what is left of them for the calls after."""

import pytest
import torch
from ranks import play_communicators

from ncz_plugins.core.communicator import Communicator
from ncz_plugins.core.runtime.inference_mode import ordinary, outside_of_inference_mode


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("numel", [10, 1_000, 70_000, 2_000_000])  # plain and compressed, on the caller's thread or not
def test_calls_in_and_out_of_inference_mode_take_turns(numel, async_op):
    """Rank r holds r + 1 times the same values, so that a result that is another rank's, or none, is far off."""
    bound = 0 if numel < 32_000 else 0.02  # an error bound for each rank's values; small tensors go plain

    def body(communicator: Communicator) -> list[tuple[torch.Tensor, torch.Tensor]]:
        n, rank = communicator.world_size, communicator.rank
        results = []
        for number in range(3):
            with torch.inference_mode(number == 1):
                values = torch.linspace(1, 2, numel)
                own = values * (rank + 1)
                reduced, sent, listed = own.clone(), own.clone(), [own.clone(), own[:7].clone()]
                part, whole = torch.zeros(numel), torch.zeros(n * numel)
                handles = [
                    communicator.all_reduce(reduced, async_op=async_op, name="reduced"),
                    communicator.all_reduce_coalesced(listed, async_op=async_op, names=["first", "second"]),
                    communicator.reduce_scatter_single(part, own.repeat(n), async_op=async_op, name="scattered"),
                    communicator.all_gather_single(whole, own, async_op=async_op, name="gathered"),
                    communicator.broadcast(sent, 1, async_op=async_op, name="sent"),
                ]
                if async_op:
                    given = [handle.get_future().wait()[0] for handle in handles]
                    assert all(one is other for one, other in zip(given[2:], (part, whole, sent)))
                total = 3 * values
                wanted = [total, total, total[:7], total, torch.cat([values, 2 * values]), 2 * values]
                found = [reduced, *listed, part, whole, sent]
                results += [(a.clone(), b.clone()) for a, b in zip(found, wanted, strict=True)]
        return results

    config = {"quantizer": {"mode": "abs", "value": max(bound, 0.01)}, "transport": {"min_bytes": "128KiB"}}
    for of_rank in play_communicators(2, config, body):
        assert len(of_rank) == 18
        for result, exact in of_rank:
            with torch.inference_mode():
                torch.testing.assert_close(result, exact, rtol=1e-5, atol=2 * bound)


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


def test_an_ordinary_view_has_the_same_elements():
    with torch.inference_mode():
        whole = torch.arange(12.0).view(3, 4)
        for view in (whole[1:], whole[:, 1:3], whole.t()[2]):
            with outside_of_inference_mode():
                other = ordinary(view)
            assert torch.equal(other, view) and other.data_ptr() == view.data_ptr()


def test_nothing_changes_outside_of_inference_mode():
    with outside_of_inference_mode():
        assert torch.is_grad_enabled()
    with torch.no_grad(), outside_of_inference_mode():
        assert not torch.is_grad_enabled()
