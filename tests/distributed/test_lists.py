"""Lists of tensors: all_to_all, gather, scatter, all_gather and reduce_scatter, on real ranks."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from on_rank import (
    PATIENCE,
    attempt,
    be_silent,
    leave,
    leave_alone,
    others_have_left_results,
    raises,
    rank,
    same_on_all_ranks,
    start,
    values,
    world_size,
)
from scenarios import ranks, report, run_ranks

from ncz_plugins import Communicator, MismatchError, UnsupportedError

BOUND = 0.01
CONFIG = {"quantizer": {"mode": "abs", "value": BOUND}, "transport": {"min_bytes": 0}}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALF_ULP = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Elements that each rank sends to each.
SIZES = {
    "even": lambda source, to: 4099,  # a prime number
    "uneven": lambda source, to: 997 * source + 3001 * to,
    "empty": lambda source, to: 0,
    "one": lambda source, to: 1,
    "sparse": lambda source, to: 9001 if (source + to) % 2 else 0,
    "frames": lambda source, to: 300_007 if source != to else 5,
}
last = world_size - 1


def piece(size, source: int, to: int, dtype=torch.float32) -> torch.Tensor:
    """What `source` sends to `to`."""
    return values(source, size(source, to), dtype, seed=to)


def memory(pieces: list[torch.Tensor], apart: bool) -> list[torch.Tensor]:
    """Pieces that lie apart from each other, or one behind the other."""
    if apart:
        return [each.clone() for each in pieces]
    return list(torch.cat(pieces).split([each.numel() for each in pieces]))


def empty(pieces: list[torch.Tensor], apart: bool) -> list[torch.Tensor]:
    return memory([torch.full_like(each, 7.0) for each in pieces], apart)


def within_bound(got: list[torch.Tensor], exact: list[torch.Tensor], own: int | None) -> None:
    """Each tensor within one bound of what was sent, and this rank's own with every bit."""
    for at, (result, sent) in enumerate(zip(got, exact, strict=True)):
        slack = HALF_ULP[sent.dtype] * sent.abs().max().item() if sent.numel() else 0
        assert not sent.numel() or (result.double() - sent.double()).abs().max() <= BOUND + slack
        assert at != own or torch.equal(result, sent)


def exchanged(communicator: Communicator, size, dtype, apart: bool, **options) -> tuple[list, list]:
    """What this rank gets by an all_to_all, and what it must get."""
    sent = memory([piece(size, rank, to, dtype) for to in range(world_size)], apart)
    exact = [piece(size, source, rank, dtype) for source in range(world_size)]
    got = empty(exact, apart)
    done(communicator.all_to_all(got, sent, **options), got)
    assert all(torch.equal(each, piece(size, rank, to, dtype)) for to, each in enumerate(sent))
    return got, exact


def done(handle, outputs: list[torch.Tensor]) -> None:
    """Wait for a call, by its future if it has one."""
    if handle is not None:
        given = handle.get_future().wait()
        assert [each.data_ptr() for each in given] == [each.data_ptr() for each in outputs]


# ------------------------------------------------------------------ values


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kind", SIZES)
def test_each_tensor_arrives_within_one_bound(group, kind):
    size, hierarchy = SIZES[kind], 2 if world_size == 4 else "off"  # four ranks are two nodes, which pieces pass by
    with Communicator(CONFIG | {"transport": {"min_bytes": 0, "hierarchy": hierarchy}}, group) as communicator:
        for at, dtype in enumerate(DTYPES if kind == "uneven" else DTYPES[:1]):
            for apart in (False, True):
                options = {"async_op": (at + apart) % 2 == 1}
                got, exact = exchanged(communicator, size, dtype, apart, **options)
                within_bound(got, exact, rank)
                for root in {0, last}:
                    # Of a gather, a rank sends what it would send to the root of an all_to_all.
                    everyone = [piece(size, source, root, dtype) for source in range(world_size)]
                    gathered = empty(everyone, apart) if rank == root else None
                    done(communicator.gather(everyone[rank], gathered, root, **options), gathered or [])
                    within_bound(gathered or [], everyone if rank == root else [], rank)

                    everyone = [piece(size, root, to, dtype) for to in range(world_size)]
                    arrived = torch.full_like(everyone[rank], 7.0)
                    given = memory(everyone, apart) if rank == root else None
                    done(communicator.scatter(arrived, given, root, **options), [arrived])
                    within_bound([arrived], [everyone[rank]], 0 if rank == root else None)
        total = communicator.stats.total
        assert kind == "empty" or world_size == 1 or total.compressed_calls == total.calls


@ranks(2, 3)
def test_a_fixed_rate_serves_them_too(group):
    def close(got: torch.Tensor, exact: torch.Tensor) -> None:
        for block, result in zip(exact.split(256), got.split(256)):
            assert not len(block) or (result - block).abs().max() <= 1.01 * block.abs().max() / 127 / 2

    config = {"quantizer": {"kind": "error_bound", "mode": "bits", "value": 8}, "transport": {"min_bytes": 0}}
    with Communicator(config, group) as communicator:
        for got, exact in zip(*exchanged(communicator, SIZES["uneven"], torch.float32, True)):
            close(got, exact)
        everyone = [piece(SIZES["uneven"], source, 0) for source in range(world_size)]
        gathered = empty(everyone, True) if rank == 0 else None
        communicator.gather(everyone[rank], gathered)
        for got, exact in zip(gathered or [], everyone):
            close(got, exact)
        arrived = torch.empty_like(everyone[rank])
        communicator.scatter(arrived, everyone if rank == 0 else None)
        close(arrived, everyone[rank])
        assert communicator.stats.total.compressed_calls == 3


@ranks(1, 2, 3)
def test_lists_have_the_bits_of_one_tensor(group):
    """An all_gather and a reduce_scatter are those of a single tensor, whose error feedback they share by the name."""
    with Communicator(CONFIG, group) as communicator, Communicator(CONFIG, group) as other:
        for apart, numel in ((False, 4099), (True, 4099), (True, 1), (True, 0), (False, 300_007)):
            everyone = [values(source, numel) for source in range(world_size)]
            gathered, single = empty(everyone, apart), torch.empty(numel * world_size)
            done(communicator.all_gather(gathered, everyone[rank], async_op=apart), gathered)
            other.all_gather_single(single, everyone[rank])
            assert torch.equal(torch.cat(gathered), single)
            within_bound(gathered, everyone, None)

            inputs = memory([values(rank, numel, seed=to) for to in range(world_size)], apart)
            output, wanted = torch.empty(numel), torch.empty(numel)
            asynchronous = apart and world_size > 1  # gloo's own reduce_scatter has no future
            handle = communicator.reduce_scatter(output, inputs, dist.ReduceOp.AVG, asynchronous, name="a")
            done(handle, [output])
            other.reduce_scatter_single(wanted, torch.cat(inputs), dist.ReduceOp.AVG, name="a")
            assert torch.equal(output, wanted)
            assert all(torch.equal(each, values(rank, numel, seed=to)) for to, each in enumerate(inputs))
        assert communicator.stats.total.compressed_calls == other.stats.total.compressed_calls
        assert world_size == 1 or communicator.stats.total.compressed_calls == 8  # all that have elements


@ranks(2, 3)
def test_values_that_cannot_be_quantized_arrive_with_every_bit(group):
    with Communicator(CONFIG, group) as communicator:
        everyone = [values(source, 5003) for source in range(world_size)]
        everyone[last][[3, 5]] = torch.tensor([float("nan"), float("inf")])
        gathered = empty(everyone, True) if rank == 0 else None
        communicator.gather(everyone[rank], gathered)
        arrived = torch.empty(5003)
        communicator.scatter(arrived, everyone if rank == 0 else None)
        for sent, result in [(everyone[rank], arrived), *zip(everyone, gathered or [])]:
            if sent is everyone[last] or (result is arrived and rank == 0):
                assert torch.equal(result.view(torch.int32), sent.view(torch.int32))
            else:
                assert 0 <= (result - sent).abs().max() <= BOUND + 1e-6
        assert communicator.stats.total.compressed_calls == 2


@ranks(2, 3)
def test_ranks_of_a_smaller_group_are_global_or_within_it(group):
    members = dist.new_group(list(range(1, world_size)), timeout=PATIENCE)
    if rank == 0:
        return
    with Communicator(CONFIG | {"quantizer": {"kind": "lossless"}}, members) as communicator:
        own, others = torch.full((5,), float(rank)), range(1, world_size)
        raises(UnsupportedError, lambda: communicator.gather(own), "dst must be a global rank of this group", "got 0")
        for root in ({"dst": last}, {"group_dst": last - 1}):
            gathered = [torch.empty(5) for _ in others] if rank == last else None
            communicator.gather(own, gathered, **root)
            assert [each[0].item() for each in gathered or []] == ([*others] if rank == last else [])
        for root in ({"src": 1}, {"group_src": 0}):
            got = torch.empty(5)
            communicator.scatter(got, [torch.full((5,), 10.0 + each) for each in others] if rank == 1 else None, **root)
            assert got[0] == 10 + rank
            communicator.broadcast(got, **root)
            assert got[0] == 11


# ------------------------------------------------------------------ bytes, and what goes plain


@ranks(2, 3)
def test_only_pieces_are_sent_and_as_codes(group):
    """Without what ranks compare, whose bytes an empty call sends as well."""
    config = {"quantizer": {"mode": "rms", "value": 0.5}, "transport": {"min_bytes": 0}}
    numel = 300_000
    senders = {
        "gather": ({*range(1, world_size)}, 4 * numel),
        "scatter": ({0}, 4 * numel * (world_size - 1)),
        "all_to_all": ({*range(world_size)}, 4 * numel * (world_size - 1)),
    }
    for collective, (sending, plain_bytes) in senders.items():
        sent = {}
        for elements in (0, numel):
            own, several = values(rank, elements), [values(rank, elements, seed=to) for to in range(world_size)]
            with Communicator(config, group) as communicator:
                if collective == "all_to_all":
                    communicator.all_to_all(empty(several, True), several)
                else:
                    getattr(communicator, collective)(own, several if rank == 0 else None)
                total = communicator.stats.total
                assert total.plain_bytes == (plain_bytes * elements // numel if rank in sending else 0)
                sent[elements] = total.wire_bytes
        codes = sent[numel] - sent[0]
        assert 0 < codes < plain_bytes / 7 if rank in sending else codes == 0, (collective, sent)


@ranks(2, 3)
def test_what_goes_plain_is_exact_and_counted_on_all_ranks_alike(group):
    def calls(communicator, dtype=torch.float32, **options):
        assert all(map(torch.equal, *exchanged(communicator, SIZES["uneven"], dtype, True, **options)))
        everyone = [values(source, 99 + source).to(dtype) for source in range(world_size)]
        gathered = empty(everyone, True) if rank == last else None
        communicator.gather(everyone[rank], gathered, last, **options)
        assert all(map(torch.equal, gathered or [], everyone))
        got = torch.empty_like(everyone[rank])
        communicator.scatter(got, everyone if rank == last else None, last, **options)
        assert torch.equal(got, everyone[rank])

    with Communicator({"transport": {"min_bytes": "1GiB"}}, group) as communicator:
        calls(communicator)
        assert communicator.stats.total.bypasses == {"too small": 3}
    with Communicator(CONFIG, group) as communicator:
        calls(communicator, role="activation")
        calls(communicator, torch.int64)
        assert communicator.stats.total.bypasses == {"role not enabled": 3, "dtype": 3}
    with Communicator(CONFIG | {"quantizer": {"kind": "lossless"}}, group) as communicator:
        calls(communicator)
        assert communicator.stats.total.compressed_calls == 3
    # A policy that asks for a size would decide otherwise on each rank.
    policies = [{"min_elements": 100, "action": "skip"}, {"name": "a*", "action": "skip"}]
    with Communicator(CONFIG | {"policies": policies}, group) as communicator:
        communicator.gather(
            values(rank, 99 + rank), empty([values(r, 99 + r) for r in range(world_size)], True) if rank == 0 else None
        )
        assert communicator.stats.total.compressed_calls == 1
        calls(communicator, name="abc")
        assert communicator.stats.total.bypasses == {"policy": 3}


# ------------------------------------------------------------------ ranks that differ


@ranks(3)
@pytest.mark.parametrize("how", [{}, {"role": "activation"}])
def test_sizes_that_do_not_match_are_told_on_all_ranks(group, how):
    def told(call, *words):
        with Communicator(CONFIG, group) as communicator:
            raises(MismatchError, lambda: call(communicator), *words)

    ones = [torch.ones(38) for _ in range(world_size)]
    larger = torch.ones(40 if rank == 2 else 38)
    words = "rank 2 sends 40 elements to rank 0, which expects 38"
    told(lambda c: c.gather(larger, ones if rank == 0 else None, **how), "gather: " + words, "gather_list")
    told(
        lambda c: c.scatter(larger, ones if rank == 0 else None, **how),
        "scatter: rank 0 sends 38 elements to rank 2, which expects 40. scatter_list of the rank",
    )
    first = torch.ones(40 if rank == 2 else 38)
    told(lambda c: c.all_to_all(ones, [first, torch.ones(38), torch.ones(38)], **how), "all_to_all: " + words)
    told(
        lambda c: c.gather(ones[0], ones if rank == rank // 2 else None, rank // 2, **how),
        "root rank 1 on rank 2, 0 on",
    )
    told(
        lambda c: c.gather(ones[0], ones if rank == 0 else None, **how) if rank else c.scatter(ones[0], ones, **how),
        "collective scatter on rank 0, gather on rank",
    )
    double = ones[0].double() if rank == 1 else ones[0]
    told(lambda c: c.gather(double, ones if rank == 0 else None, **how), "dtype float64 on rank 1, float32 on rank")


FIVE = torch.ones(5)
REFUSED = {
    "no list on the root": (lambda c: c.gather(FIVE), ValueError, "gather_list must be given", 0),
    "a list on another rank": (
        lambda c: c.scatter(FIVE, [FIVE] * 3, 1),
        ValueError,
        "None on all ranks but the root",
        0,
    ),
    "a short list": (lambda c: c.gather(FIVE, [FIVE]), ValueError, "a list of 2 tensors, one for each rank", 0),
    "no list": (lambda c: c.all_to_all(torch.ones(2, 5), [FIVE] * 2), ValueError, "got Tensor", 1),
    "the root": (lambda c: c.scatter(FIVE, None, 2), UnsupportedError, "src must be a global rank of this group", 1),
    "the root within the group": (lambda c: c.gather(FIVE, group_dst=-1), UnsupportedError, "0 to 1, got -1", 1),
    "two roots": (lambda c: c.gather(FIVE, None, 1, group_dst=1), ValueError, "dst or group_dst, not both", 1),
    "dtypes": (
        lambda c: c.all_to_all([torch.ones(5), torch.ones(5).double()], [FIVE] * 2),
        UnsupportedError,
        "output_tensor_list[1]: all tensors must have one dtype",
        1,
    ),
    "a dtype that nobody carries": (
        lambda c: c.scatter(FIVE.to(torch.int16), None, 1),
        UnsupportedError,
        "int16: neither gloo nor NCCL",
        0,
    ),
    "strides": (
        lambda c: c.gather(FIVE, [torch.ones(1).expand(5), torch.ones(5)]),
        UnsupportedError,
        "gather: gather_list[0]: tensor with strides (0,), whose elements share memory",
        0,
    ),
    "layout": (
        lambda c: c.gather(FIVE, [torch.ones(5).to_sparse(), torch.ones(5)]),
        UnsupportedError,
        "gather: gather_list[0]: tensor of layout torch.sparse_coo: pass tensor.to_dense()",
        0,
    ),
    "no tensor": (lambda c: c.gather([1.0], None, 1), UnsupportedError, "list: not a torch.Tensor", 0),
    "sizes of all parts": (
        lambda c: c.all_gather([torch.ones(5), torch.ones(6)], FIVE),
        ValueError,
        "tensor_list[1] must have the 5 elements",
        1,
    ),
    "sizes to reduce": (
        lambda c: c.reduce_scatter(FIVE, [FIVE, torch.ones(4)]),
        ValueError,
        "must have the 5 elements",
        1,
    ),
    "the own size": (
        lambda c: c.gather(FIVE, [torch.ones(4), torch.ones(5)]),
        ValueError,
        "a rank's input and output for itself must have one size, got 5 and 4 elements",
        0,
    ),
    "the same memory": (
        lambda c: c.all_to_all([FIVE, torch.ones(5)], [torch.ones(5), FIVE]),
        ValueError,
        "got the output for rank 0 in that of the input for rank 1",
        0,
    ),
}


@ranks(2)
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("min_bytes", [0, "1GiB"])
def test_what_one_rank_can_not_call_is_an_error_on_all(group, case, min_bytes):
    call, error, words, refuses = REFUSED[case]
    with Communicator({"transport": {"min_bytes": min_bytes}}, group) as communicator:
        if rank == refuses:
            raises(error, lambda: call(communicator), words)
        else:
            tensor = torch.ones(5)
            raises(MismatchError, lambda: communicator.all_reduce(tensor), f"rank {refuses} refused its call")
    same_on_all_ranks(case, group)


@ranks(2)
def test_what_a_rank_keeps_may_stay_where_it_is(group):
    with Communicator(CONFIG | {"quantizer": {"kind": "lossless"}}, group) as communicator:
        gathered = [torch.full((5,), float(rank)) for _ in range(world_size)]
        communicator.gather(gathered[rank], gathered if rank == 0 else None)
        assert [each[0].item() for each in gathered] == ([0, 1] if rank == 0 else [1, 1])
        whole = torch.tensor([[3.0] * 5, [4.0] * 5])
        parts = list(whole.unbind())
        communicator.scatter(parts[rank], parts if rank == 1 else None, 1)
        assert whole[rank].tolist() == [3.0 + rank] * 5


@ranks(2)
def test_calls_take_effect_in_order(group):
    with Communicator(CONFIG | {"quantizer": {"kind": "lossless"}}, group) as communicator:
        large = torch.full((200_000,), float(rank + 1))
        handles = []
        for _ in range(5):
            large.fill_(rank + 1.0)
            handles.append(communicator.all_reduce(large, async_op=True))
            gathered = [torch.empty(100), torch.empty(100)]
            handles.append(communicator.gather(large[:100], gathered if rank == 0 else None, async_op=True))
            got = torch.empty(100)
            communicator.scatter(got, [large[:100], large[100:200]] if rank == 1 else None, 1)
            assert got.unique().tolist() == [3.0]
            for handle in reversed(handles):
                handle.wait()
            assert rank == 1 or all(each.unique().tolist() == [3.0] for each in gathered)


# ------------------------------------------------------------------ a rank that is lost

SILENT, LONG, SOON = (
    2.0,
    120.0,
    60.0,
)  # seconds: time-outs of a silent and of a dead peer, and what ends before the latter


def listed(communicator: Communicator, collective: str) -> None:
    own, several = values(rank, 50_000), [values(rank, 50_000, seed=to) for to in range(world_size)]
    match collective:
        case "all_to_all":
            communicator.all_to_all(empty(several, True), several)
        case "reduce" | "reduce by halving":
            communicator.reduce(own, 0)
        case _:
            getattr(communicator, collective)(own, several if rank == 0 else None)


CALLS = ("all_to_all", "gather", "scatter", "reduce", "reduce by halving")  # the first three have no schedule


def lose_the_last_rank() -> None:
    """It is silent first, and then dead. All calls wait for it at the same time."""
    start()
    opened = {}
    for case, seconds in (("silent", SILENT), ("dead", LONG)):
        for collective in CALLS:
            schedule = "halving" if collective.endswith("halving") else "auto"
            transport = {"min_bytes": 0, "timeout_seconds": seconds, "schedule": schedule, "link_gbps": 1}
            communicator = opened[f"{case}, {collective}"] = Communicator(CONFIG | {"transport": transport})
            listed(communicator, collective)
    if rank == last:
        be_silent(others_have_left_results, 2 * SILENT * len(CALLS))
        os.kill(os.getpid(), signal.SIGKILL)
    found = {}
    with ThreadPoolExecutor(len(CALLS)) as pool:
        for kind in ("silent", "dead"):
            cases = [case for case in opened if case.startswith(kind)]
            found |= zip(cases, pool.map(failures, map(opened.get, cases), CALLS))
            leave(found)  # which the last rank waits for
    leave_alone(found)


def failures(communicator: Communicator, collective: str) -> list[dict | None]:
    return [attempt(partial(listed, communicator, collective)) for _ in range(2)]


def test_a_silent_or_dead_rank_is_noticed(tmp_path):
    finished = run_ranks(3, lose_the_last_rank, tmp_path)
    for each in finished[:2]:
        assert each.result is not None and len(each.result) == 2 * len(CALLS), report(finished)
        for first, second in each.result.values():
            assert first["error"] == second["error"] == "PeerError" and "look at its log" in first["message"], first
            assert first["seconds"] < SOON and second["seconds"] < 1, (first, second)
