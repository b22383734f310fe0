"""A call: what ranks tell of it, and its plain collective."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ncz_plugins.core.call import Call, plain_wire_bytes
from ncz_plugins.core.transport.base import PlainCollectives


def test_calls_have_one_signature_only_if_ranks_tell_the_same_of_them():
    """What is decided of one, and what is told of it, goes for all others with its signature."""
    tensor = torch.zeros(8)
    call = Call("all_reduce", tensor, tensor, dist.ReduceOp.SUM, role="gradient")
    assert call.signature == replace(call, input=torch.ones(8), output=torch.ones(2, 4)).signature
    others = [
        {"collective": "broadcast"},
        {"op": None},
        {"op": dist.ReduceOp.AVG},
        {"scale": 0.5},
        {"root": 1},
        {"role": None},
        {"role": "parameter"},
        {"together": 7},
        {"input": torch.zeros(9), "output": torch.zeros(9)},
        {"input": tensor.double()},
        {"output": tensor.double()},
    ]
    kinds = {call.signature, *(replace(call, **changes).signature for changes in others)}
    assert len(kinds) == 1 + len(others)


@pytest.mark.parametrize(
    ("collective", "sent"),
    [
        ("all_reduce", 1500),
        ("reduce_scatter_single", 750),
        ("all_gather_single", 3000),
        ("broadcast", 750),
        ("reduce", 750),
    ],
)
def test_what_a_plain_collective_sends(collective, sent):
    assert plain_wire_bytes(collective, 1000, 4) == sent


class Started(PlainCollectives):
    """Notes what was started."""

    def all_reduce(self, *arguments):
        return "all_reduce", arguments

    def reduce_scatter_single(self, *arguments):
        return "reduce_scatter_single", arguments

    def all_gather_single(self, *arguments):
        return "all_gather_single", arguments

    def broadcast(self, *arguments):
        return "broadcast", arguments


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter_single", "all_gather_single", "broadcast"])
def test_a_call_starts_the_plain_collective_of_its_name(collective):
    small, large = torch.zeros(2), torch.zeros(4)
    given, result = {
        "all_reduce": (large, large),
        "reduce_scatter_single": (large, small),
        "all_gather_single": (small, large),
        "broadcast": (large, large),
    }[collective]
    call = Call(collective, given, result, op=dist.ReduceOp.AVG, scale=0.5, root=1)
    started, arguments = call.start_plain(Started())
    assert started == collective
    assert arguments[0].data_ptr() == result.data_ptr()
    assert call.larger is large
