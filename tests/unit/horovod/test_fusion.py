"""Which tensors are reduced in one call, and how they get their results."""

import pytest
import torch

pytest.importorskip("horovod.torch")

from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.training.state import Training
from ncz_plugins.horovod import fusion
from ncz_plugins.horovod.fusion import copy_back, flattened, fused
from ncz_plugins.horovod.pending import PendingTensor, Signature

RANKS = [0, 1]


def pending(name: str, tensor: torch.Tensor, prescale: float = 1.0) -> PendingTensor:
    signature = Signature(0, prescale, 1.0, str(tensor.dtype).removeprefix("torch."), "cpu")
    parameter = ParameterSlice(name, tensor.numel())
    return PendingTensor(signature, name, 0, tensor, parameter, parameter)


def names(tensors: list[PendingTensor], config=None) -> list[str]:
    """Those of each call, as one word."""
    return ["".join(each.name for each in together) for together in fused(tensors, Training(config), RANKS)]


def test_neighbours_are_reduced_together_up_to_a_size(monkeypatch):
    """And one that is larger by itself, wherever it stands."""
    monkeypatch.setattr(fusion, "FUSION_BYTES", 400)
    sizes = {"a": 101, "b": 50, "c": 50, "d": 1, "e": 200, "f": 99}  # of float32
    assert names([pending(name, torch.zeros(size)) for name, size in sizes.items()]) == ["a", "bc", "d", "e", "f"]


def test_only_tensors_with_one_signature_are_reduced_together():
    tensors = [pending("a", torch.zeros(3)), pending("b", torch.zeros(3)), pending("c", torch.zeros(3), 0.5)]
    assert names([*tensors, pending("d", torch.zeros(3).double())]) == ["ab", "c", "d"]


def test_tensors_that_are_treated_differently_are_reduced_apart():
    tensors = [pending(name, torch.zeros(3)) for name in "abc"]
    assert names(tensors, {"policies": [{"name": "b", "action": "skip"}]}) == ["ac", "b"]


def test_each_tensor_gets_its_own_values_back_in_its_memory_once_the_program_takes_them():
    """Until then the program may be changing it. It may have any strides."""
    given = [torch.arange(6.0).view(2, 3).t(), torch.arange(4.0), torch.tensor(5.0), torch.empty(0)]
    before = [tensor.clone() for tensor in given]
    tensors = [pending(str(at), tensor) for at, tensor in enumerate(given)]
    copy_back(2 * flattened(tensors), tensors)
    for each, tensor, was in zip(tensors, given, before):
        assert torch.equal(tensor, was)
        for _ in range(2):
            assert each.take_result() is tensor
            assert torch.equal(tensor, 2 * was)
