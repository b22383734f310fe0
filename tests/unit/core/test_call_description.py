"""What ranks compare of a call, and the words for what differs."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ncz_plugins.core import call_description
from ncz_plugins.core.bypass import Bypass
from ncz_plugins.core.call import Call
from ncz_plugins.core.call_description import (
    checksum_of,
    checksum_of_list,
    numbered,
    refusal,
    require_plain,
    require_same,
    signature_described,
)
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import MismatchError, UnsupportedError
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.transport.comparison import RankComparison

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX


def request(**changes) -> Call:
    tensor = changes.pop("tensor", torch.zeros(8))
    return replace(Call("all_reduce", tensor, tensor, SUM), **changes)


def described(call: Call, number: int, bypass: Bypass | None, **more: int) -> dict[str, int]:
    return numbered(signature_described(call), call, number, bypass, **more)


def plain(**changes) -> dict[str, int]:
    """The description of an uncompressed call."""
    return described(request(**changes), 1, Bypass.TOO_SMALL)


def compressed(config: dict | None = None, **changes) -> dict[str, int]:
    return described(request(**changes), 1, None, configuration=checksum_of(Config.load(config or "ncclz")))


def verdict(*ranks: dict[str, int], known_as=None) -> str:
    """What all ranks are told of these descriptions; empty if they may go on."""
    compared = [RankComparison(each, rank, len(ranks)) for rank, each in enumerate(ranks)]
    joined = torch.stack([each.tensor for each in compared]).amax(0)
    told = []
    for each in compared:
        each.tensor.copy_(joined)
        try:
            require_same("all_reduce", each, known_as or range(len(ranks)))
        except MismatchError as error:
            told.append(str(error))
    assert told in ([], told[:1] * len(ranks))
    return told[0] if told else ""


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (described(request(), 2, Bypass.TOO_SMALL), "call number 2 on rank 1, 1 on rank 0"),
        (plain(collective="broadcast", op=None), "collective broadcast on rank 1, all_reduce on rank 0"),
        (plain(tensor=torch.zeros(9)), "elements 9 on rank 1, 8 on rank 0"),
        (plain(tensor=torch.zeros(8, dtype=torch.int64)), "dtype int64 on rank 1, float32 on rank 0"),
        (plain(op=AVG), "reduce op AVG on rank 1, SUM on rank 0"),
        (plain(op=MAX), "reduce op MAX on rank 1, SUM on rank 0"),
        (plain(scale=0.5), "scale differs between rank 0 and rank 1"),
        (plain(scale=2.0), "scale differs between rank 0 and rank 1"),
        (plain(root=1), "root rank 1 on rank 1, 0 on rank 0"),
        (
            described(request(), 1, Bypass.ROLE),
            "transfer plain (too small) on rank 0, plain (role not enabled) on rank 1",
        ),
        (plain(together=5), "list of tensors differs between rank 0 and rank 1"),
        (compressed(), "transfer plain (too small) on rank 0, compressed on rank 1"),
        (described(request(), 1, Bypass.TOO_SMALL, uncompared=5), "calls on GPUs before it differs"),
        (described(request(), 1, Bypass.TOO_SMALL, step=1), "training step 1 on rank 1, 0 on rank 0"),
        (refusal(1), "rank 1 refused its call"),
    ],
)
def test_what_differs_is_said_in_words(other, words):
    assert words in verdict(plain(), other)


@pytest.mark.parametrize("before", [[], [ParameterSlice(None, 3)]])
def test_the_parameters_of_a_sum_must_be_the_same_also_if_only_some_have_names(before):
    assert "list of parameters differs" in verdict(
        *(plain(parts=[*before, ParameterSlice(name, 5)]) for name in ("key", "query"))
    )


def test_the_tensors_of_one_call_must_have_the_same_sizes_and_dtypes_in_the_same_order():
    """Else the calls, one for each dtype, could be of equal sizes, and sum tensors that have nothing in common."""
    floats, integers = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    lists = [floats, floats, integers], [floats, integers, floats], [torch.zeros(6), integers]
    assert len({checksum_of_list(tensors) for tensors in lists} | {0}) == 4
    assert checksum_of_list(lists[0]) == checksum_of_list([torch.ones(3), torch.ones(3), integers])


def test_ranks_are_called_by_their_global_numbers():
    assert "dtype int64 on rank 7, float32 on rank 3" in verdict(
        plain(), plain(tensor=torch.zeros(8, dtype=torch.int64)), known_as=[3, 7]
    )


def test_calls_that_are_alike_pass():
    assert verdict(plain(), plain(), plain()) == ""
    assert verdict(compressed(), compressed(), compressed()) == ""
    assert verdict(refusal(1), refusal(1)) == ""  # all refuse: nobody is left waiting


def test_settings_of_compressed_calls_must_be_the_same():
    assert "configuration differs" in verdict(compressed(), compressed({"quantizer": {"value": 0.5}}))


@pytest.mark.parametrize("number", [-5, 99, 1 << 40])
def test_numbers_of_a_peer_need_not_make_sense(number):
    for name in ("collective", "dtype", "reduce op", "transfer"):
        assert f"unknown ({number - (name in ('reduce op', 'transfer'))})" in verdict(plain(), plain() | {name: number})


# ------------------------------------------------------------------ what runs plain


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor": torch.zeros(8, dtype=torch.int16)}, ["all_reduce", "torch.int16", "int32"]),
        ({"tensor": torch.zeros(8).to(torch.float8_e4m3fn)}, ["float8_e4m3fn", "convert"]),
        ({"output": torch.zeros(8, dtype=torch.int32)}, ["torch.float32", "torch.int32", "one dtype"]),
        ({"tensor": torch.zeros(8, dtype=torch.int32), "op": AVG}, ["AVG", "torch.int32", "SUM"]),
        ({"op": dist.ReduceOp.BAND}, ["BAND", "torch.float32"]),
        ({"op": "sum"}, ["must be one of torch.distributed's own", "sum"]),
    ],
)
def test_what_no_backend_carries_is_refused(changes, words):
    with pytest.raises(UnsupportedError) as refused:
        require_plain(request(**changes))
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize("dtype", call_description.DTYPES, ids=str)
def test_what_backends_carry_is_not(dtype):
    require_plain(request(tensor=torch.zeros(8, dtype=dtype)))
    require_plain(request(tensor=torch.zeros(8, dtype=dtype), op=MAX))
