"""all_to_all_single: even, uneven and empty pieces, on real ranks."""

import pytest
import torch
import torch.distributed as dist
from on_rank import PATIENCE, rank, values, world_size
from scenarios import ranks

from ncz_plugins import Communicator, MismatchError

BOUND = 0.01
ABS = {"mode": "abs", "value": BOUND}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALF_ULP = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ROW = 33  # elements; no chunk of a frame is a multiple of it


def splits(kind: str) -> list[list[int]]:
    """Rows that each rank sends to each rank."""
    rows = {
        "even": lambda source, to: 701,
        "uneven": lambda source, to: 97 * source + 311 * to,
        "empty": lambda source, to: 0,
        "one": lambda source, to: int((source, to) == (world_size - 1, 0)),
        "sparse": lambda source, to: 1009 if (source + to) % 2 else 0,
    }[kind]
    return [[rows(source, to) for to in range(world_size)] for source in range(world_size)]


def exchanged(communicator, table, dtype, fill=values, **options):
    """What this rank gets, and what it must get."""
    sent, received = table[rank], [of_one[rank] for of_one in table]
    inputs = [fill(source, sum(of_one) * ROW, dtype).view(-1, ROW) for source, of_one in enumerate(table)]
    output = torch.full((sum(received), ROW), 7.0, dtype=dtype)
    handle = communicator.all_to_all_single(output, inputs[rank], received, sent, **options)
    if handle is not None:
        handle.wait()
    exact = torch.cat([piece.split(of_one)[rank] for piece, of_one in zip(inputs, table)])
    return output, exact


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kind", ["even", "uneven", "empty", "one", "sparse"])
def test_each_piece_arrives_within_one_bound(group, kind):
    table = splits(kind)
    own = slice(sum(of_one[rank] for of_one in table[:rank]), sum(of_one[rank] for of_one in table[: rank + 1]))
    for frame_bytes in ("16KiB", "1MiB"):
        hierarchy = 2 if world_size == 4 else "off"  # four ranks are two nodes, which pieces pass by
        config = {"quantizer": ABS, "transport": {"min_bytes": 0, "frame_bytes": frame_bytes, "hierarchy": hierarchy}}
        with Communicator(config, group) as communicator:
            for dtype in DTYPES:
                got, exact = exchanged(communicator, table, dtype, async_op=dtype == torch.float64)
                slack = HALF_ULP[dtype] * exact.abs().max().item() if exact.numel() else 0
                error = (got.double() - exact.double()).abs()
                assert not exact.numel() or error.max() <= BOUND + slack
                assert torch.equal(got[own], exact[own])  # what stays is copied
                if kind == "even":
                    assert torch.equal(got, exact) == (world_size == 1)
            total = communicator.stats.total
            assert total.calls == len(DTYPES)
            rows = sum(table[rank]) - table[rank][rank]
            assert total.plain_bytes == rows * ROW * sum(dtype.itemsize for dtype in DTYPES)
            assert kind == "empty" or world_size == 1 or total.compressed_calls == total.calls


@ranks(3)
@pytest.mark.parametrize(
    "quantizer",
    [
        {"kind": "lossless"},
        {"kind": "error_bound", "mode": "rel", "value": 0.01, "block": 256},
        {"kind": "stochastic", "mode": "rms", "value": 0.3},
        {"mode": "range", "value": 0.001},
        {"mode": "rms", "value": 0.1, "block": 0},
    ],
    ids=lambda each: " ".join(map(str, each.values())),
)
def test_every_way_to_quantize(group, quantizer):
    table = splits("uneven")
    with Communicator({"quantizer": quantizer, "transport": {"min_bytes": 0}}, group) as communicator:
        got, exact = exchanged(communicator, table, torch.float32)
        assert communicator.stats.total.compressed_calls == 1
    if quantizer.get("kind") == "lossless":
        assert torch.equal(got, exact)
        return
    assert not torch.equal(got, exact)
    lengths = [of_one[rank] for of_one in table]
    for piece, result in zip(exact.split(lengths), got.split(lengths)):
        if not piece.numel():
            continue
        for block, its in zip(piece.flatten().split(256), result.flatten().split(256)):
            largest = {"rms": exact.square().mean().sqrt() * 3, "range": 2 * exact.abs().max()}
            scale = largest.get(quantizer["mode"], block.abs().max())
            assert (its - block).abs().max() <= 1.001 * quantizer["value"] * scale


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kind", ["even", "uneven", "empty", "one", "sparse"])
@pytest.mark.parametrize("quantizer", [{"value": 4}, {"value": 8, "kind": "stochastic", "seed": 3}], ids=str)
def test_a_fixed_rate(group, kind, quantizer):
    """Blocks of 256 begin with each piece; what a rank keeps is copied; float64 goes plain."""
    table, bits = splits(kind), quantizer["value"]
    config = {"quantizer": {"mode": "bits"} | quantizer, "transport": {"min_bytes": 0}}
    with Communicator(config, group) as communicator:
        for dtype in DTYPES:
            got, exact = exchanged(communicator, table, dtype, async_op=dtype == torch.bfloat16)
            lengths = [of_one[rank] for of_one in table]
            for source, (piece, result) in enumerate(zip(exact.split(lengths), got.split(lengths))):
                if source == rank or dtype == torch.float64 or not piece.numel():
                    assert torch.equal(piece, result)
                    continue
                for block, its in zip(piece.flatten().double().split(256), result.flatten().double().split(256)):
                    step = block.abs().max() * (1 + 2**-7) / (2 ** (bits - 1) - 1)
                    allowed = step * (1 if "seed" in quantizer else 0.5) + 2 * HALF_ULP[dtype] * block.abs()
                    assert ((its - block).abs() <= 1.0001 * allowed).all()
        total = communicator.stats.total
        peers = [rows * ROW for to, rows in enumerate(table[rank]) if to != rank]
        if world_size > 1 and kind != "empty":
            assert total.compressed_calls == 3 and total.bypasses == {"dtype": 1}, total
            coded = 3 * sum(-(-elements // 256) * (2 + 32 * bits) for elements in peers)
            assert coded <= total.wire_bytes - 8 * sum(peers) < coded + 2000 * world_size  # and comparisons


@ranks(3)
@pytest.mark.parametrize(
    "quantizer", [{"mode": "bits", "value": 4}, {"mode": "rms", "value": 0.5}], ids=["bits", "rms"]
)
def test_groups_that_make_equally_many_calls_draw_other_random_numbers(group, quantizer):
    """Rank 0 sends the same values to ranks 1 and 2, in a group with each."""
    config = {"quantizer": {"kind": "stochastic", **quantizer}, "transport": {"min_bytes": 0}}
    sent, got = values(0, 2 * 5003), torch.zeros(2 * 5003)
    for other in (1, 2):
        pair = dist.new_group([0, other], timeout=PATIENCE)
        if rank in (0, other):
            with Communicator(config, pair) as communicator:
                communicator.all_to_all_single(got if rank else torch.empty_like(got), sent)
    everyone = [torch.empty(5003) for _ in range(world_size)]
    dist.all_gather(everyone, got[:5003].clone(), group)
    assert everyone[1].any() and everyone[2].any() and not torch.equal(everyone[1], everyone[2])


@ranks(2)
def test_activations_have_a_bound_of_their_own(group):
    """Whatever `quantizer` says. A policy for the role replaces it."""
    table, block = [[400, 700], [900, 0]], 128
    config = {"quantizer": {"value": 5}, "roles": ["gradient", "activation"], "transport": {"min_bytes": 0}}
    policy = {"role": "activation", "quantizer": {"kind": "error_bound", "value": 0.01}}
    for policies, value in (([], 0.1), ([policy], 0.01)):
        with Communicator({**config, "policies": policies}, group) as communicator:
            got, exact = exchanged(communicator, table, torch.float32, role="activation")
            assert communicator.stats.total.compressed_calls == 1
        lengths = [of_one[rank] * ROW for of_one in table]
        for source, (piece, its) in enumerate(zip(exact.view(-1).split(lengths), got.view(-1).split(lengths))):
            if source != rank:
                blocks = zip(piece.split(block), its.split(block))
                errors = [((b - a).abs().max() / a.square().mean().sqrt()).item() for a, b in blocks]
                assert 0.8 * value < max(errors) <= value * 1.001


@ranks(2, 3)
def test_values_that_cannot_be_quantized_arrive_with_every_bit(group):
    def with_nan(source, numel, dtype):
        tensor = values(source, numel, dtype)
        if source == 1:
            tensor[5] = float("nan")
        return tensor

    table = splits("uneven")
    with Communicator({"quantizer": ABS, "transport": {"min_bytes": 0}}, group) as communicator:
        got, exact = exchanged(communicator, table, torch.float32, with_nan)
        assert communicator.stats.total.compressed_calls == 1  # other pieces are compressed all the same
    at = 0
    for _source, of_one in enumerate(table):
        piece, result = exact[at : at + of_one[rank]], got[at : at + of_one[rank]]
        at += of_one[rank]
        if piece.isnan().any():
            assert torch.equal(result.nan_to_num(9.0), piece.nan_to_num(9.0))
        elif piece.numel():
            assert (result - piece).abs().max() <= BOUND + 1e-6


@ranks(2, 3)
def test_bytes_are_those_of_codes(group):
    config = {"quantizer": {"mode": "rms", "value": 0.5}, "transport": {"min_bytes": 0}}
    with Communicator(config, group) as communicator:
        table = [[9000] * world_size] * world_size
        exchanged(communicator, table, torch.float32)
        total = communicator.stats.total
        assert total.plain_bytes == 4 * ROW * 9000 * (world_size - 1)
        assert total.ratio > 7, total


@ranks(2, 3)
def test_small_calls_and_roles_go_plain_on_all_ranks_alike(group):
    table = splits("uneven")
    with Communicator({"transport": {"min_bytes": "1GiB"}}, group) as communicator:
        got, exact = exchanged(communicator, table, torch.float32)
        assert torch.equal(got, exact)
        assert communicator.stats.total.bypasses == {"too small": 1}
    with Communicator({"transport": {"min_bytes": 0}}, group) as communicator:
        got, exact = exchanged(communicator, table, torch.float32, role="activation")
        assert torch.equal(got, exact)
        assert communicator.stats.total.bypasses == {"role not enabled": 1}
        output = torch.empty(2 * world_size, dtype=torch.int64)
        communicator.all_to_all_single(output, torch.arange(2 * world_size) + 100 * rank)
        assert output.tolist() == [100 * source + 2 * rank + i for source in range(world_size) for i in range(2)]
        assert communicator.stats.total.bypasses == {"role not enabled": 1, "dtype": 1}
    for min_bytes, reason in (("1GiB", "too small"), ("never", "link too fast")):
        config = {"quantizer": {"mode": "bits", "value": 4}, "transport": {"min_bytes": min_bytes}}
        with Communicator(config, group) as communicator:
            got, exact = exchanged(communicator, table, torch.float32)
            assert torch.equal(got, exact)
            assert communicator.stats.total.bypasses == {reason: 1}


@ranks(3)
@pytest.mark.parametrize("min_bytes", [0, "1GiB"])
@pytest.mark.parametrize("role", [None, "activation"])
def test_rows_that_do_not_match_are_told_on_all_ranks(group, min_bytes, role):
    with Communicator({"transport": {"min_bytes": min_bytes}}, group) as communicator:
        sent, received = [38] * 3, [38] * 3
        if rank == 2:
            sent[0] = 40
        with pytest.raises(MismatchError, match="rank 2 sends 40 rows to rank 0, which expects 38"):
            communicator.all_to_all_single(
                torch.empty(sum(received), 5), torch.ones(sum(sent), 5), received, sent, role=role
            )


@ranks(2)
def test_the_largest_pieces_that_travel_at_once_and_another_call_are_told_on_all_ranks(group):
    with Communicator({"transport": {"min_bytes": "never"}}, group) as communicator:
        with pytest.raises(MismatchError, match="all_reduce on rank 1|all_to_all_single on rank 0"):
            if rank == 0:
                communicator.all_to_all_single(torch.empty(8 << 20), torch.ones(8 << 20))  # pieces of 16 MiB
            else:
                communicator.all_reduce(torch.ones(10))


@ranks(2)
def test_rows_of_other_sizes_are_told_on_all_ranks(group):
    with Communicator({"transport": {"min_bytes": 0}}, group) as communicator:
        with pytest.raises(MismatchError, match="elements of a row 6 on rank 1, 5 on rank 0"):
            communicator.all_to_all_single(torch.empty(4, 5 + rank), torch.ones(4, 5 + rank))


@ranks(2)
@pytest.mark.parametrize(
    "output, input, received, sent, told",
    [
        [[5], [4], None, None, "output_split_sizes must be given: 5 rows can't be divided evenly among 2 ranks"],
        [[4], [4], [1, 2], None, r"output_split_sizes must be 2 numbers that add up to 4 rows, got \[1, 2\]"],
        [[4], [4], None, [5, -1], r"input_split_sizes must be 2 numbers that add up to 4 rows, got \[5, -1\]"],
        [[4], [4], None, [4], r"input_split_sizes must be 2 numbers that add up to 4 rows, got \[4\]"],
        [[4, 2], [4, 3], None, None, "rows of input and output must have one size, got 3 and 2"],
        [[], [4], None, None, "must have rows, got a tensor without dimensions"],
    ],
)
def test_what_can_not_be_is_refused(group, output, input, received, sent, told):
    with Communicator({"transport": {"min_bytes": 0}}, group) as communicator:
        with pytest.raises(ValueError, match=told):
            communicator.all_to_all_single(torch.empty(output), torch.ones(input), received, sent)
