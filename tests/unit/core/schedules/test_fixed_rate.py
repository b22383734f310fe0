"""Calls at a fixed rate, over real gloo with all ranks in one process: bounds, the same bits on all ranks, bytes."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from calls import decided, run_decided
from ranks import play, same_bits, values

from ncz_plugins.core.bypass import Bypass
from ncz_plugins.core.call import Call
from ncz_plugins.core.codec.fixed_rate import equal_rows, levels_of, sum_bits
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import MismatchError
from ncz_plugins.core.group import Group
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.schedules import fixed_rate
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.training.state import Training
from ncz_plugins.core.transport.topology import Nodes
from ncz_plugins.kernels.format import RATE_BLOCK, Rows, packed_bytes

SIZES = (1, 2 * RATE_BLOCK, 4099, 100_003)  # the last two are primes
PARTS = (1, 257, 4099)
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def collectives(transport, nodes=None, training=None, **quantizer) -> Group:
    quantizer = {"mode": "bits", "value": 4} | quantizer
    config = Config(quantizer=quantizer, transport={"min_bytes": 0}).resolved()
    training = training or Training(config)
    return Group(training, config, range(transport.world_size), transport.rank, nodes)


def reduced(transport, tensor, op=SUM, ours=None, name=None):
    """The counters of one all_reduce, in place."""
    ours = ours or collectives(transport)
    request = Call("all_reduce", tensor, tensor, op, parts=[ParameterSlice(name, tensor.numel())])
    run_decided(ours, request, Host(), transport)
    return ours.training.stats.total


def magnitudes_of(blocks_of_ranks: list[torch.Tensor], numel: int) -> torch.Tensor:
    """Of each element: the largest magnitude of its block over ranks, rounded up to bfloat16."""
    largest = torch.stack([each.float().abs() for each in blocks_of_ranks]).amax(0)
    padded = torch.nn.functional.pad(largest, (0, -numel % RATE_BLOCK)).view(-1, RATE_BLOCK).amax(1)
    bits = (padded.view(torch.int32) + 0xFFFF) >> 16 << 16
    return bits.view(torch.float32).double().repeat_interleave(RATE_BLOCK)[:numel]


def half_steps(blocks_of_ranks: list[torch.Tensor], numel: int, bits: int) -> torch.Tensor:
    """Of each element: half a quantization step, and what rounding in float32 may add."""
    return magnitudes_of(blocks_of_ranks, numel) / levels_of(bits) * (0.5 + 1e-5)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_all_reduce(world_size, bits):
    def body(transport):
        tensors = [values(transport.rank, numel) for numel in SIZES]
        ours = collectives(transport, value=bits)
        for tensor in tensors:
            reduced(transport, tensor, ours=ours)
        return tensors

    for numel, *outcomes in zip(SIZES, *play(world_size, body, reuse=True)):
        contributed = [values(rank, numel) for rank in range(world_size)]
        error = (outcomes[0].double() - sum(each.double() for each in contributed)).abs()
        assert (error <= world_size * half_steps(contributed, numel, bits)).all()
        assert error.any()  # it was compressed
        assert same_bits(outcomes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_average(dtype):
    numel = 4099

    def body(transport):
        tensor = values(transport.rank, numel, dtype)
        reduced(transport, tensor, AVG)
        return tensor

    outcomes = play(3, body, reuse=True)
    contributed = [values(rank, numel, dtype) for rank in range(3)]
    exact = sum(each.double() for each in contributed) / 3
    allowed = half_steps(contributed, numel, 4) + (exact.abs() + 1) * torch.finfo(dtype).eps
    assert ((outcomes[0].double() - exact).abs() <= allowed).all()
    assert same_bits(outcomes)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("part", PARTS)
def test_reduce_scatter_and_all_gather_are_an_all_reduce_in_two(world_size, part):
    """Where blocks lie alike, with the very same bits; elsewhere within the bound."""

    def body(transport):
        n = transport.world_size
        ours = collectives(transport)
        whole, own = values(transport.rank, n * part), torch.empty(part)
        request = Call("reduce_scatter_single", whole, own, SUM, parts=[ParameterSlice(None, n * part)])
        run_decided(ours, request, Host(), transport)
        gathered = torch.empty(n * part)
        request = Call("all_gather_single", own, gathered, parts=[ParameterSlice(None, n * part)])
        run_decided(ours, request, Host(), transport)
        return own, gathered

    outcomes = play(world_size, body, reuse=True)
    assert same_bits([gathered for _, gathered in outcomes])
    for rank, (own, _) in enumerate(outcomes):
        mine = [values(other, world_size * part)[rank * part : (rank + 1) * part] for other in range(world_size)]
        error = (own.double() - sum(each.double() for each in mine)).abs()
        assert (error <= world_size * half_steps(mine, part, 4)).all()
        came = outcomes[0][1][rank * part : (rank + 1) * part].double()
        assert ((came - own.double()).abs() <= half_steps([own], part, 4)).all()


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast(root):
    def body(transport):
        tensor = values(transport.rank, 4099)
        ours = collectives(transport)
        request = Call("broadcast", tensor, tensor, root=root, parts=[ParameterSlice(None, 4099)])
        run_decided(ours, request, Host(), transport)
        return tensor

    outcomes = play(3, body, reuse=True)
    sent = values(root, 4099)
    assert same_bits(outcomes)
    assert ((outcomes[0].double() - sent.double()).abs() <= half_steps([sent], 4099, 4)).all()


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_comes_out_so_and_stays_in_its_block(special):
    def body(transport):
        tensor = torch.ones(3 * RATE_BLOCK)
        if transport.rank == 1:
            tensor[RATE_BLOCK + 7] = special
        total = reduced(transport, tensor)
        assert total.compressed_calls == 1 and not total.bypasses
        return tensor

    for tensor in play(2, body, reuse=True):
        inside = slice(RATE_BLOCK, 2 * RATE_BLOCK)
        assert tensor[inside].isnan().all()
        tensor[inside] = 2
        assert (tensor == 2).all()


def test_rounding_at_random_is_unbiased_and_errors_of_equal_values_cancel():
    """Were both ranks rounded alike, every other sum would be missing; were they independent, 3/7 would occur."""
    numel, times = 64 * RATE_BLOCK, 8

    def body(transport):
        ours = collectives(transport, kind="stochastic")
        sums = []
        for _ in range(times):
            tensor = torch.full((numel,), 0.3)
            tensor[::RATE_BLOCK] = 1
            reduced(transport, tensor, ours=ours)
            sums.append(tensor)
        return torch.stack(sums)

    first, second = play(2, body, reuse=True)
    assert same_bits([first, second])
    inner = torch.ones(numel, dtype=torch.bool)
    inner[::RATE_BLOCK] = False
    drawn = first[:, inner].double()
    torch.testing.assert_close(drawn.unique(), torch.tensor([4 / 7, 5 / 7], dtype=torch.float64))  # 0.6 is between
    deviation = (1 / 7) * (0.2 * 0.8) ** 0.5 / drawn.numel() ** 0.5
    assert abs(drawn.mean() - 0.6) < 6 * deviation


@pytest.mark.parametrize("op", [SUM, AVG], ids=["sum", "average"])
def test_error_feedback_adds_what_was_lost_to_the_next_call(op):
    numel, steps = 3 * RATE_BLOCK + 5, 40

    def body(transport):
        ours = collectives(transport, value=3, error_feedback=True)
        total = torch.zeros(numel, dtype=torch.float64)
        for _ in range(steps):
            tensor = values(transport.rank, numel)
            reduced(transport, tensor, op, ours=ours, name="weight")
            total += tensor
        return total if op == SUM else 2 * total

    outcomes = play(2, body, reuse=True)
    contributed = [values(rank, numel) for rank in range(2)]
    exact = steps * sum(each.double() for each in contributed)
    # What is missing in the end is one call's loss, of values that hold at most the loss of one call besides.
    assert ((outcomes[0] - exact).abs() <= 4 * half_steps(contributed, numel, 3)).all()
    assert same_bits(outcomes)


def nodes_of_two(rank: int) -> Nodes:
    return Nodes(((0, 1), (2, 3)), rank // 2, rank % 2)


@pytest.mark.parametrize("numel", [1, 3 * RATE_BLOCK + 5])  # of one value, most ranks have none
def test_error_feedback_knows_what_was_lost_between_nodes(numel):
    steps = 20

    def body(transport):
        ours = collectives(transport, nodes_of_two(transport.rank), value=3, error_feedback=True)
        total = torch.zeros(numel, dtype=torch.float64)
        for _ in range(steps):
            tensor = values(transport.rank, numel)
            reduced(transport, tensor, ours=ours, name="weight")
            total += tensor
        return total

    outcomes = play(4, body, reuse=True)
    contributed = [values(rank, numel) for rank in range(4)]
    exact = steps * sum(each.double() for each in contributed)
    of_nodes = [contributed[0] + contributed[1], contributed[2] + contributed[3]]
    assert ((outcomes[0] - exact).abs() <= 4 * half_steps(of_nodes, numel, 3) + 1e-4).all()
    assert same_bits(outcomes)


def test_the_random_numbers_of_ranks_and_batches_are_their_own():
    """All ranks hold the same, so equal results in two places would show equal random numbers."""
    alike = torch.full((4 * RATE_BLOCK,), 0.3)
    alike[::RATE_BLOCK] = 1

    def body(transport):
        ours, summed = collectives(transport, nodes_of_two(transport.rank), kind="stochastic"), alike.clone()
        reduced(transport, summed, ours=ours)
        ours, gathered = collectives(transport, kind="stochastic"), torch.empty(4 * RATE_BLOCK)
        parts = [ParameterSlice(None, gathered.numel())]
        request = Call("all_gather_single", alike[:RATE_BLOCK], gathered, parts=parts)
        run_decided(ours, request, Host(), transport)
        return summed, gathered

    for summed, gathered in play(4, body, reuse=True):
        for blocks in (summed.view(4, RATE_BLOCK), gathered.view(4, RATE_BLOCK)):
            assert not any(torch.equal(blocks[i], blocks[j]) for i in range(4) for j in range(i))


@pytest.mark.parametrize("way", ["mesh", "rounds"], ids=["read from memory", "messages"])
@pytest.mark.parametrize(
    "ranks",
    [((0, 1), (2, 3)), ((0, 3), (1, 4), (2, 5)), ((0, 1, 2), (3, 4), (5,))],
    ids=["2x2", "3x2, dealt in turn", "3 + 2 + 1"],
)
def test_only_what_goes_between_nodes_is_compressed(ranks, way):
    world_size = sum(map(len, ranks))

    def body(transport):
        node = next(i for i, members in enumerate(ranks) if transport.rank in members)
        nodes = Nodes(ranks, node, ranks[node].index(transport.rank))
        tensors = [values(transport.rank, numel) for numel in SIZES]
        for tensor in tensors:
            reduced(transport, tensor, ours=collectives(transport, nodes))
        part, own = values(transport.rank, world_size * 300), torch.empty(300)
        gathered, sent = torch.empty(world_size * 300), values(transport.rank, 700)
        ours = collectives(transport, nodes)
        for request in (
            Call("reduce_scatter_single", part, own, SUM, parts=[ParameterSlice(None, part.numel())]),
            Call("all_gather_single", own, gathered, parts=[ParameterSlice(None, part.numel())]),
            Call("broadcast", sent, sent, root=3, parts=[ParameterSlice(None, 700)]),
        ):
            run_decided(ours, request, Host(), transport)
        return [*tensors, gathered, sent]

    outcomes = list(zip(*play(world_size, body, way=way, reuse=True)))
    for numel, tensors in zip(SIZES, outcomes):
        of_nodes = [sum(values(rank, numel) for rank in members) for members in ranks]
        error = (tensors[0].double() - sum(values(rank, numel).double() for rank in range(world_size))).abs()
        assert (error <= len(ranks) * half_steps(of_nodes, numel, 4)).all()
        assert same_bits(tensors)
    gathered, sent = outcomes[-2:]
    assert same_bits(gathered) and same_bits(sent)
    exact = sum(values(rank, world_size * 300).double() for rank in range(world_size))
    assert (gathered[0].double() - exact).norm() < 0.3 * exact.norm()
    assert (sent[0] - values(3, 700)).norm() < 0.2 * values(3, 700).norm()


def test_bytes_are_known_beforehand():
    """4 bits, and 16 bits for 256 values that are agreed on, there and back."""
    numel = 64 * RATE_BLOCK

    def body(transport):
        once = reduced(transport, values(transport.rank, numel)).wire_bytes
        zeros = reduced(transport, torch.zeros(numel)).wire_bytes
        thrice = reduced(transport, values(transport.rank, 3 * numel)).wire_bytes
        return once, zeros, thrice - once

    for once, zeros, of_more in play(2, body, reuse=True):
        assert once == zeros  # whatever the data
        assert of_more == 2 * (numel * 4 // 8 + 2 * numel // RATE_BLOCK)  # what ranks compare is the same


def bytes_sent(transport, request: Call) -> int:
    """By one call on values, or by what compares and announces it where `request` holds none."""
    ours = collectives(transport)
    run_decided(ours, request, Host(), transport)
    return ours.training.stats.total.wire_bytes


def test_bytes_of_three_ranks_are_known_beforehand():
    """A rank sends two of three rows to their owners, and its own row to two others. Sums of three take 6 bits."""
    of_block, of_sum, magnitude = packed_bytes(4), packed_bytes(6), torch.bfloat16.itemsize
    blocks = 30  # of a tensor

    def body(transport):
        def more(collective: str, before: int, after: int, **options) -> int:
            """Bytes sent for each block more of a tensor of three times as many blocks."""
            numel = blocks * RATE_BLOCK
            sent = []
            for times in (1, 3):
                input, output = torch.ones(times * numel // before), torch.ones(times * numel // after)
                output = input if before == after else output
                parts = [ParameterSlice(None, times * numel)]
                sent.append(bytes_sent(transport, Call(collective, input, output, parts=parts, **options)))
            return (sent[1] - sent[0]) / (2 * blocks)

        return (
            more("all_reduce", 1, 1, op=SUM),
            more("reduce_scatter_single", 1, 3, op=SUM),
            more("all_gather_single", 3, 1),
            more("broadcast", 1, 1),
        )

    agreed = 2 * 2 / 3 * magnitude
    for each in play(3, body, reuse=True):
        assert each == pytest.approx(
            (
                agreed + 2 / 3 * of_block + 2 / 3 * of_sum,
                agreed + 2 / 3 * of_block,
                2 / 3 * (of_block + magnitude),
                2 / 3 * (of_block + magnitude),
            ),
            rel=1e-3,
        )


def test_large_rows_on_a_cpu_go_in_batches():
    """Each is some neighbouring blocks of all rows, and together they are all blocks."""
    rows = Rows.of(6 << 20, 2, 3 << 20)
    batches = list(fixed_rate._batches(rows, 8, on_gpu=False))
    ends = [0, *(batch.first + batch.blocks for batch in batches)]
    assert [batch.first for batch in batches] == ends[:-1] and ends[-1] == rows.blocks
    assert [batch.blocks for batch in batches] == [rows.blocks // 3] * 3  # a row takes 3 MiB
    assert all(batch._replace(first=0, blocks=rows.blocks) == rows for batch in batches)
    assert list(fixed_rate._batches(rows, 8, on_gpu=True)) == [rows]


@pytest.mark.parametrize(("row_mib", "count"), [(0.5, 1), (1.75, 1), (2, 2), (4, 4), (9, 4)])
def test_batches_are_few_and_not_small(row_mib, count):
    numel = int(row_mib * 2**20)
    batches = list(fixed_rate._batches(Rows.of(2 * numel, 2, numel), 8, on_gpu=False))
    assert [batch.blocks for batch in batches] == [numel // RATE_BLOCK // count] * count


@pytest.mark.parametrize("world_size", [2, 3])
def test_batches_change_no_bit(world_size, monkeypatch):
    part = 9 * RATE_BLOCK + 5

    def body(transport):
        summed, whole = values(transport.rank, world_size * part), values(transport.rank, world_size * part)
        reduced(transport, summed)
        own = torch.empty(part)
        request = Call("reduce_scatter_single", whole, own, SUM, parts=[ParameterSlice(None, whole.numel())])
        ours = collectives(transport)
        run_decided(ours, request, Host(), transport)
        return torch.cat([summed, own])

    at_once = play(world_size, body, reuse=True)
    monkeypatch.setattr(fixed_rate, "_MIN_BATCH_BYTES", packed_bytes(4))
    in_batches = play(world_size, body, reuse=True)
    assert all(same_bits(both) for both in zip(at_once, in_batches))


class Slow:
    """Plain collectives whose results come late."""

    seconds = 0.02

    def __init__(self, plain):
        self._plain = plain
        self.works = 0

    def __getattr__(self, name):
        def start(*arguments):
            work = getattr(self._plain, name)(*arguments)
            return SimpleNamespace(wait=lambda: self._wait(work))

        return start

    def _wait(self, work):
        self.works += 1
        time.sleep(self.seconds)
        work.wait()


@pytest.mark.parametrize("world_size", [2, 3])
def test_waiting_for_others_is_counted_as_such(world_size):
    """Or `ncz report` would say that something else had the cores."""

    def body(transport):
        n, whole = transport.world_size, values(transport.rank, transport.world_size * RATE_BLOCK)
        part, all_of_it = torch.empty(RATE_BLOCK), [ParameterSlice(None, whole.numel())]
        found = []
        for request in (
            Call("all_reduce", whole, whole, SUM, parts=all_of_it),
            Call("reduce_scatter_single", whole, part, SUM, parts=all_of_it),
            Call("all_gather_single", part, torch.empty(n * RATE_BLOCK), parts=all_of_it),
            Call("broadcast", whole, whole, root=0, parts=all_of_it),
        ):
            ours, transport.plain = collectives(transport), Slow(plain := transport.plain)
            run_decided(ours, request, Host(), transport)
            found.append((transport.plain.works, ours.training.stats.total))
            transport.plain = plain
        return found

    for found in play(world_size, body, reuse=True):
        assert [works for works, _ in found] == [2 if world_size == 2 else 3, 2, 2, 2]
        for works, total in found:
            assert works * Slow.seconds <= total.wait_seconds <= total.seconds
        for _, total in found[:2]:  # sums agree on scales first
            assert Slow.seconds <= total.agree_seconds - total.measure_seconds < total.wait_seconds


def test_float64_goes_plain_by_its_dtype():
    def body(transport):
        tensor = values(transport.rank, 100, torch.float64)
        request = Call("all_reduce", tensor, tensor, SUM, parts=[ParameterSlice(None, 100)])
        return decided(collectives(transport), request).bypass

    assert play(2, body, reuse=True) == [Bypass.DTYPE] * 2


def test_ranks_that_differ_in_their_bits_are_told():
    def body(transport):
        with pytest.raises(MismatchError, match="configuration differs"):
            reduced(transport, values(transport.rank, 1000), ours=collectives(transport, value=4 + transport.rank))

    play(2, body)


def test_sums_fit_their_bits():
    for bits in range(3, 9):
        for addends in (1, 2, 3, 8, 1000):
            largest = addends * levels_of(bits)
            assert 2 * largest < 2 ** sum_bits(bits, addends) <= 4 * largest
    assert sum_bits(4, 1) == 4 and sum_bits(4, 2) == 5 and sum_bits(4, 4) == 6


@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 5000])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_rows_cover_the_tensor(numel, count):
    lengths = equal_rows(numel, count, 1 << 20).lengths
    assert sum(lengths) == numel and len(lengths) == count
    full = [length for length in lengths if length == lengths[0]]
    assert lengths[0] % RATE_BLOCK == 0 or lengths[0] == numel
    assert len(full) >= count - 1 or max(lengths[len(full) + 1 :], default=0) == 0
