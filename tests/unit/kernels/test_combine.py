"""Values of several ranks are combined as by the reference, in the order of the ranks, whatever they are."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import assert_same

from ncz_plugins import kernels
from ncz_plugins.kernels.format import COMBINED_DTYPES, Combination

REFERENCE = kernels.load("reference")
SIZES = (0, 1, 7, 1023, 1024, 2500)


def any_values(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Any bits: NaN, infinities and denormals, and integers whose sums and products wrap."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (data % 2 == 1) if dtype == torch.bool else data.view(dtype)


def combined(backend, values: list[torch.Tensor], combination: Combination, divisor: int = 1) -> torch.Tensor:
    out = torch.empty_like(values[0])
    backend.combination(values, combination, out, divisor)()
    return out


@pytest.mark.parametrize("dtype", COMBINED_DTYPES, ids=str)
@pytest.mark.parametrize("combination", Combination)
def test_all_backends_combine_as_the_reference(backend, dtype, combination):
    for ranks, count in product([1, 2, 3, 5], SIZES):
        divisor = ranks if combination == Combination.ADD and dtype.is_floating_point else 1
        values = [any_values(dtype, count, seed) for seed in range(ranks)]
        found, wanted = (combined(each, values, combination, divisor) for each in (backend, REFERENCE))
        assert_same(found, wanted, f"{ranks} ranks, {count} elements")


def test_any_byte_but_zero_is_true(any_backend):
    """torch takes them so, and they come from tensors of bytes that are viewed as bool."""
    values = [torch.tensor(each, dtype=torch.uint8).view(torch.bool) for each in ([0, 1, 2, 255], [0, 2, 1, 4])]
    for combination in Combination:
        assert combined(any_backend, values, combination).view(torch.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_result_may_replace_the_values_of_any_rank(any_backend, place):
    values = [torch.arange(3000.0) + rank for rank in range(3)]
    wanted = combined(REFERENCE, values, Combination.ADD)
    any_backend.combination(values, Combination.ADD, values[place])()
    assert torch.equal(values[place], wanted)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32), min_size=2, max_size=6))
def test_sums_round_after_each_rank(numbers):
    """Not at the end, and in no other order: a rank that does so has other bits."""
    values = [torch.tensor([number]) for number in numbers]
    total = values[0]
    for each in values[1:]:
        total = total + each
    for name, status in kernels.statuses().items():
        if status == "ok":
            found = combined(kernels.load(name), values, Combination.ADD)
            torch.testing.assert_close(found, total, rtol=0, atol=0, equal_nan=True)
