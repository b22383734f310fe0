"""Why a call goes plain: every rule, and what calls learn from those before them."""

import math

import pytest
import torch
import torch.distributed as dist

from ncz_plugins.core.bypass import Bypass, before_call, by_op, by_size, by_warm_up, least_of_pieces, scales_or_bypass
from ncz_plugins.core.codec.layout import Layout
from ncz_plugins.core.config import Config, QuantizerConfig
from ncz_plugins.kernels.format import DTYPES

ANY = Config()


@pytest.mark.parametrize(
    ("world_size", "role", "op", "dtypes", "bypass"),
    [
        (2, None, dist.ReduceOp.SUM, (torch.float32,), None),
        (2, "gradient", dist.ReduceOp.AVG, (torch.bfloat16,), None),
        (2, None, None, (torch.float64, torch.float64), None),
        (1, None, dist.ReduceOp.SUM, (torch.float32,), Bypass.ONE_RANK),
        (2, "activation", dist.ReduceOp.SUM, (torch.float32,), Bypass.ROLE),
        (2, None, dist.ReduceOp.MAX, (torch.float32,), Bypass.OP),
        (2, None, dist.ReduceOp.SUM, (torch.int64,), Bypass.DTYPE),
        (2, None, None, (torch.float32, torch.float16), Bypass.DTYPE),
    ],
)
def test_before_a_call(world_size, role, op, dtypes, bypass):
    assert before_call(ANY, world_size, role, op, dtypes) is bypass


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_sum_that_is_multiplied_by_nothing_positive_goes_plain(scale):
    assert by_op(dist.ReduceOp.SUM, scale) is Bypass.OP
    assert by_op(dist.ReduceOp.SUM, 0.5) is None


def test_the_first_steps_go_plain_where_that_is_asked_for():
    config = Config.load({"steps": {"warmup": 2}})
    assert [by_warm_up(step, config) for step in range(4)] == [Bypass.WARM_UP, Bypass.WARM_UP, None, None]


def test_small_tensors_go_plain_and_empty_ones_always():
    config = Config.load({"transport": {"min_bytes": 100}})
    assert [by_size(nbytes, config) for nbytes in (0, 99, 100)] == [Bypass.TOO_SMALL, Bypass.TOO_SMALL, None]
    assert by_size(0, Config.load({"transport": {"min_bytes": 0}})) is Bypass.TOO_SMALL
    assert by_size(1 << 30, Config.load({"transport": {"min_bytes": "never"}})) is Bypass.FAST_LINK


@pytest.mark.parametrize(
    ("largest", "bound", "dtype", "found"),
    [
        (1.0, 1e-2, torch.float32, None),
        (math.inf, 1e-2, torch.float32, Bypass.NON_FINITE),
        (3e38, 1e30, torch.float32, Bypass.NON_FINITE),  # the sum of two could be
        (1.0, 1e-12, torch.float32, Bypass.CODE_OVERFLOW),
        (1.0, 1e-5, torch.float32, None),
        (1.0, 1e-5, torch.bfloat16, Bypass.NOT_WORTH),  # codes of 18 bits in place of 16
    ],
)
def test_measured_values_decide(largest, bound, dtype, found):
    quantizer = QuantizerConfig(mode="abs", value=bound)
    agreed = torch.tensor([largest], dtype=torch.float32)
    result = scales_or_bypass(agreed, Layout.of([64, 64], 64), quantizer, dtype, addends=2)
    assert result is found if found else not isinstance(result, Bypass)


def test_every_dtype_that_frames_know_can_be_compressed():
    assert all(before_call(ANY, 2, None, dist.ReduceOp.SUM, (dtype,)) is None for dtype in DTYPES)


def test_exchanges_of_more_ranks_and_on_shared_cores_must_be_larger():
    free = Config(transport={"link_gbps": 1})
    slow = {"raw": 2000, "fixed": 2000, "huffman": 5000, "rans": 4000, "rans_rest": 9000}
    shared = Config(transport={"link_gbps": 1}, entropy={"costs": slow})
    for config in (free, shared):
        found = [least_of_pieces(config, False, ranks) for ranks in (2, 4, 8, 16, 40)]
        assert found == sorted(found) and found[-1] > found[1] >= config.min_bytes_in_effect(ranks=4)
        assert least_of_pieces(config, True, 8) == config.min_bytes_in_effect(on_gpu=True)
    assert least_of_pieces(shared, False, 4) > least_of_pieces(free, False, 4)
    assert max(least_of_pieces(free, False, ranks) for ranks in (2, 4, 8)) <= 16 << 20
    for min_bytes in (0, 5, "never"):
        given = Config(transport={"link_gbps": 1, "min_bytes": min_bytes}, entropy={"costs": slow})
        assert least_of_pieces(given, False, 8) == min_bytes
