"""Plain inside nodes, compressed between them, over real gloo with all ranks in one process."""

import gc
import itertools
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import pytest
import torch
import torch.distributed as dist
from calls import planned, replanned, run_decided, run_planned
from ranks import play, same_bits, values

from ncz_plugins.core.call import Call, plain_wire_bytes
from ncz_plugins.core.codec.coded_tensor import Codec, CodedTensor
from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import MismatchError
from ncz_plugins.core.group import Group
from ncz_plugins.core.planning import layout_of_sum
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.schedules import direct, halving, ring
from ncz_plugins.core.schedules.hierarchy import in_nodes
from ncz_plugins.core.training.error_feedback import Feedback, Residuals
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.training.state import Training
from ncz_plugins.core.transport.intra_node import with_memory
from ncz_plugins.core.transport.topology import Nodes
from ncz_plugins.kernels.format import CHUNK

SHAPES = {  # nodes x ranks of each
    "2x2": ((0, 1), (2, 3)),
    "2x3": ((0, 1, 2), (3, 4, 5)),
    "3x2, dealt in turn": ((0, 3), (1, 4), (2, 5)),
}
UNEVEN = {"3 + 2 + 1": ((0, 1, 2), (3, 4), (5,)), "2 + 4": ((0, 2), (1, 3, 4, 5))}
SIZES = (1, 4099, 9 * CHUNK, 100_003)  # the last is a prime
PARTS = (1, 4097, 3 * CHUNK)
BOUND = 0.01
CONFIGS = {
    "nearest": Config(quantizer={"mode": "abs", "value": BOUND}),
    "stochastic": Config(quantizer={"kind": "stochastic", "mode": "abs", "value": BOUND}),
    "lossless": Config(quantizer={"kind": "lossless"}, entropy={"checksum": True}),
}
SMALL_FRAMES = Config(quantizer={"mode": "rms", "value": BOUND}, transport={"frame_bytes": "16KiB"})
SCHEDULES = {"ring": ring, "direct": direct, "halving": halving}
SUM = dist.ReduceOp.SUM


ANY_SHAPES = SHAPES | UNEVEN


def cells(shapes: Iterable[str], names: Iterable[str]) -> list[tuple[str, str, str]]:
    """Schedules, shapes and names in CONFIGS: all with "nearest" on 2x3, else each two together."""
    every = itertools.product(*map(enumerate, (SCHEDULES, shapes, names)))
    return [
        (schedule, shape, name)
        for (i, schedule), (j, shape), (k, name) in every
        if (shape, name) == ("2x3", "nearest") or (i + j + k) % 2 == 0
    ]


def nodes_of(shape: str, rank: int) -> Nodes:
    ranks = ANY_SHAPES[shape]
    node = next(i for i, members in enumerate(ranks) if rank in members)
    return Nodes(ranks, node, ranks[node].index(rank))


def world_size_of(shape: str) -> int:
    return sum(map(len, ANY_SHAPES[shape]))


def go(transport, shape: str, config: Config, call: Call, number: int = 1, by_messages: bool = False):
    """Run a flat call in nodes."""
    nodes = nodes_of(shape, transport.rank)
    if not by_messages:
        nodes = with_memory(nodes, transport)
        assert nodes.processes == dict.fromkeys(nodes.neighbors, os.getpid())
    call.plan = replace(in_nodes(call, call.plan, nodes), number=number)
    return run_planned(call, Host(two_threads=True), transport)


def never_plain(_):
    raise AssertionError("the call went plain")


def segments_of(shape: str) -> int:
    """One for each node in the share of each rank that speaks to others."""
    nodes = ANY_SHAPES[shape]
    return len(nodes) * min(map(len, nodes))


def sum_of(
    tensor, transport, config: Config, schedule, divisor: int = 1, plain=never_plain, segments: int | None = None
) -> Call:
    n, rank = transport.world_size, transport.rank
    flat = Window(tensor)
    segments = segments or n
    layout = layout_of_sum(tensor, segments, config)
    reduce = schedule.all_reduce
    return planned(
        "all_reduce",
        config,
        layout,
        flat,
        flat,
        range(segments),
        reduce,
        plain,
        addends=n,
        addend=rank,
        divisor=divisor,
    )


def equal_parts(numel: int, transport) -> Layout:
    return Layout.of([numel] * transport.world_size, 4 * CHUNK)


def exact_sum(world_size: int, numel: int, dtype=torch.float32) -> torch.Tensor:
    return sum(values(rank, numel, dtype).double() for rank in range(world_size))


def bound_of(name: str, world_size: int) -> float:
    return 1e-5 if name == "lossless" else world_size * BOUND


@pytest.mark.parametrize(("schedule", "shape", "name"), cells(ANY_SHAPES, CONFIGS))
def test_all_reduce(schedule, shape, name):
    world_size, config = world_size_of(shape), CONFIGS[name]

    def body(transport, by_messages):
        tensors = [values(transport.rank, numel) for numel in SIZES]
        for tensor in tensors:
            call = sum_of(tensor, transport, config, SCHEDULES[schedule], segments=segments_of(shape))
            counters = go(transport, shape, config, call, by_messages=by_messages)
            assert counters.bytes_in == tensor.nbytes and counters.compressed_calls == 1
        return tensors

    by_memory = play(world_size, partial(body, by_messages=False), reuse=True)
    in_rounds = play(world_size, partial(body, by_messages=True), "rounds", reuse=True)
    for numel, *outcomes in zip(SIZES, *by_memory, *in_rounds):
        assert (outcomes[0].double() - exact_sum(world_size, numel)).abs().max() <= bound_of(name, world_size)
        assert same_bits(outcomes)


@pytest.mark.parametrize(("schedule", "shape", "name"), cells(SHAPES, ["nearest", "lossless"]))
def test_reduce_scatter(schedule, shape, name):
    world_size, config = world_size_of(shape), CONFIGS[name]

    def scatter(transport, part):
        whole = values(transport.rank, part * world_size)
        layout = equal_parts(part, transport)
        given = whole.clone()
        output = torch.full((part,), float("nan"))
        call = planned(
            "reduce_scatter_single",
            config,
            layout,
            Window(whole),
            Window(output, layout.segment(transport.rank).start),
            range(world_size),
            SCHEDULES[schedule].reduce_scatter,
            never_plain,
            addends=world_size,
            addend=transport.rank,
        )
        go(transport, shape, config, call)
        assert torch.equal(whole, given)
        return output

    def body(transport):
        return [scatter(transport, part) for part in PARTS]

    for part, *outputs in zip(PARTS, *play(world_size, body, reuse=True)):
        whole = torch.cat(outputs)
        error = (whole.double() - exact_sum(world_size, part * world_size)).abs().max()
        assert error <= bound_of(name, world_size)


@pytest.mark.parametrize(("schedule", "shape", "name"), cells(SHAPES, ["nearest", "lossless"]))
def test_all_gather(schedule, shape, name):
    world_size, config = world_size_of(shape), CONFIGS[name]

    def gather(transport, part):
        layout = equal_parts(part, transport)
        rank = transport.rank
        output = torch.full((part * world_size,), float("nan"))
        own = output[layout.segment(rank)]  # the input may be a part of the output
        own.copy_(values(rank, part))
        call = planned(
            "all_gather_single",
            config,
            layout,
            Window(own, layout.segment(rank).start),
            Window(output),
            range(rank, rank + 1),
            SCHEDULES[schedule].all_gather,
            never_plain,
        )
        counters = go(transport, shape, config, call)
        assert counters.bytes_in == own.nbytes
        return output

    def body(transport):
        return [gather(transport, part) for part in PARTS]

    for part, *outcomes in zip(PARTS, *play(world_size, body, reuse=True)):
        exact = torch.cat([values(rank, part) for rank in range(world_size)])
        assert (outcomes[0] - exact).abs().max() <= (0 if name == "lossless" else BOUND)
        assert same_bits(outcomes)


@pytest.mark.parametrize(("schedule", "shape", "name"), cells(ANY_SHAPES, ["nearest", "lossless"]))
def test_broadcast(schedule, shape, name):
    world_size, config = world_size_of(shape), CONFIGS[name]
    cases = [(numel, root) for numel in (1, 100_003) for root in (0, 1, world_size - 1)]

    def cast(transport, numel, root):
        tensor = values(transport.rank, numel)
        call = planned(
            "broadcast",
            config,
            Layout.of([numel], 4 * CHUNK),
            Window(tensor),
            Window(tensor),
            range(1 if transport.rank == root else 0),
            partial(SCHEDULES[schedule].broadcast, root=root),
            never_plain,
            root=root,
        )
        go(transport, shape, config, call)
        return tensor

    def body(transport):
        return [cast(transport, *case) for case in cases]

    for (numel, root), *outcomes in zip(cases, *play(world_size, body, reuse=True)):
        assert (outcomes[0] - values(root, numel)).abs().max() <= (0 if name == "lossless" else BOUND)
        assert same_bits(outcomes)


# ---------------------------------------------------------------- what is promised


@pytest.mark.parametrize("block", [0, CHUNK])
@pytest.mark.parametrize("mode", ["rms", "rel", "range"])
@pytest.mark.parametrize("shape", ["2x2", "2x3"])
@pytest.mark.parametrize("alike", [False, True])
def test_the_bound_is_that_of_the_ranks_own_values(shape, mode, block, alike):
    """At most n times what the bound comes to for the rank with the largest values, block by block.

    Ranks that hold the same are the extreme: the sum of a node is then exactly as much larger.
    """
    world_size, numel, value = world_size_of(shape), 5 * CHUNK + 3, 0.01
    config = Config(quantizer={"mode": mode, "value": value, "block": block})
    scale = torch.linspace(0.1, 30, numel)  # a piece may differ much from the whole

    def held(rank: int) -> torch.Tensor:
        return values(0 if alike else rank, numel) * scale

    def body(transport):
        tensor = held(transport.rank)
        go(transport, shape, config, sum_of(tensor, transport, config, direct))
        return tensor

    outcomes = play(world_size, body, reuse=True)
    everyone = torch.stack([held(rank).double() for rank in range(world_size)])
    for start in range(0, numel, block or numel):
        here = slice(start, start + (block or numel))
        of = everyone[:, here]
        unit = {
            "rms": of.square().mean(1).sqrt().max(),
            "rel": of.abs().max(),
            "range": of.max() - of.min(),
        }[mode]
        rounding = world_size * 2.0**-24 * of.abs().sum(0).max()
        error = (outcomes[0][here].double() - of.sum(0)).abs().max()
        assert 0 < error <= world_size * value * unit + rounding
    assert same_bits(outcomes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_summed_in_their_own(dtype):
    config, numel = CONFIGS["nearest"], 20_011

    def body(transport):
        tensor = values(transport.rank, numel, dtype)
        go(transport, "2x2", config, sum_of(tensor, transport, config, direct, divisor=4))
        return tensor

    outcomes = play(4, body, reuse=True)
    exact = exact_sum(4, numel, dtype) / 4
    half_ulp = torch.finfo(dtype).eps / 2
    # The sum of a node is rounded, and so is the result.
    slack = 2 * half_ulp * sum(values(rank, numel, dtype).double().abs() for rank in range(4))
    assert ((outcomes[0].double() - exact).abs() <= BOUND + slack).all()
    assert same_bits(outcomes)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("config", [CONFIGS["nearest"], SMALL_FRAMES], ids=["one frame", "four frames"])
def test_one_value_that_is_not_finite_sends_the_call_plain_on_every_rank(poison, config):
    place = 4 * CHUNK - 1  # in the last frame of a segment

    def body(transport):
        tensor = values(transport.rank, 50_000)
        if transport.rank == 2:
            tensor[place] = poison

        counters = go(
            transport,
            "2x2",
            config,
            sum_of(tensor, transport, config, ring, plain=lambda plain: plain.all_reduce(tensor)),
        )
        assert counters.bypasses == {"non-finite": 1} and not counters.compressed_calls
        assert counters.wire_bytes > counters.plain_bytes == plain_wire_bytes("all_reduce", tensor.nbytes, 4)
        return tensor

    outcomes = play(4, body, reuse=True)
    assert same_bits(outcomes)
    assert not outcomes[0][place].isfinite() and outcomes[0].isfinite().sum() == 49_999
    error = (outcomes[0].double() - exact_sum(4, 50_000)).abs()
    assert error[torch.arange(50_000) != place].max() < 1e-5


@dataclass
class FoundHopeless(Codec):
    """Learns while frames travel that the call must go plain, as the codec of a GPU does."""

    tensor: CodedTensor
    bypass = "non-finite"

    def for_segments(self, segments):
        return replace(self, tensor=self.tensor.for_segments(segments))

    def finish(self):
        pass


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather_single", "broadcast"])
def test_nothing_is_shared_in_a_node_once_the_call_must_go_plain(collective):
    """The output may hold what the plain call is about to send, on each rank its own."""
    layout = Layout.of([10] * 4, CHUNK)
    whole = Window(torch.arange(40.0))
    source = Window(whole.data[:10]) if collective == "all_gather_single" else whole
    call = planned(
        collective, CONFIGS["nearest"], layout, source, whole, range(4), lambda *_, **root: None, never_plain
    )
    plan = in_nodes(call, call.plan, nodes_of("2x2", rank=0))
    codec = FoundHopeless(CodedTensor(plan.layout, plan.source, plan.output))
    plan.schedule(transport=None, codec=codec, counters=Counters())  # which sends nothing
    assert torch.equal(whole.data, torch.arange(40.0))


def test_lossless_lets_them_pass():
    config = CONFIGS["lossless"]

    def body(transport):
        tensor = values(transport.rank, 50_000)
        if transport.rank == 2:
            tensor[7], tensor[-1] = float("nan"), float("-inf")
        go(transport, "2x2", config, sum_of(tensor, transport, config, ring))
        return tensor

    outcomes = play(4, body, reuse=True)
    assert same_bits(outcomes)
    assert outcomes[0][7].isnan() and outcomes[0][-1] == float("-inf") and outcomes[0].isfinite().sum() == 49_998


def test_lossless_adds_each_nodes_sum():
    config, numel = CONFIGS["lossless"], 30_001

    def body(transport):
        tensor = values(transport.rank, numel)
        go(transport, "2x2", config, sum_of(tensor, transport, config, direct))
        return tensor

    parts = [values(rank, numel) for rank in range(4)]
    assert same_bits([(parts[0] + parts[1]) + (parts[2] + parts[3]), *play(4, body, reuse=True)])


def test_different_calls_are_refused_before_anything_is_exchanged():
    config = CONFIGS["nearest"]

    def body(transport):
        tensor = values(transport.rank, 50_000 + (transport.rank == 3))
        call = sum_of(tensor, transport, config, ring)
        call.described = {"elements": tensor.numel()}

        def within_node(*_):
            raise AssertionError("something was exchanged")

        with pytest.raises(MismatchError, match="elements"):
            plan = in_nodes(call, call.plan, nodes_of("2x2", transport.rank))
            call.plan = replace(plan, within_node=within_node)
            run_planned(call, Host(), transport)

    play(4, body)


def test_the_random_numbers_of_ranks_and_pieces_are_their_own():
    """All ranks hold the same values, so equal errors in two pieces would show equal random numbers."""
    config = Config(quantizer={"kind": "stochastic", "mode": "abs", "value": 0.5})
    numel = 4 * CHUNK

    def body(transport):
        tensor = torch.full((numel,), 0.3)
        go(transport, "2x2", config, sum_of(tensor, transport, config, ring))
        return tensor

    out = play(4, body, reuse=True)[0]
    assert out.mean() == pytest.approx(1.2, abs=0.05)  # 1.2 = 4 x 0.3, without a bias
    segments = out.view(4, CHUNK)
    assert not any(torch.equal(segments[i], segments[j]) for i in range(4) for j in range(i))


@pytest.mark.parametrize("shape", ["2x2", "2x3"])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter_single"])
def test_errors_of_nodes_that_hold_alike_cancel(shape, collective):
    """Both nodes hold half a step, and where one of them rounds up the other one rounds down."""
    config = Config(quantizer={"kind": "stochastic", "mode": "abs", "value": 0.5})
    world_size = world_size_of(shape)
    numel = world_size * CHUNK

    def body(transport):
        tensor = torch.full((numel,), 0.5 / world_size)
        call = sum_of(tensor, transport, config, ring)
        if collective == "reduce_scatter_single":
            layout = equal_parts(CHUNK, transport)
            here = layout.segment(transport.rank)
            output = Window(tensor.new_empty(CHUNK), here.start)
            call = replanned(
                replace(call, collective=collective, output=output.data),
                layout=layout,
                output=output,
                schedule=ring.reduce_scatter,
            )
        go(transport, shape, config, call)
        return call.output.data

    for out in play(world_size, body, reuse=True):
        assert (out - 0.5).abs().max() < 1e-5


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter_single"])
def test_what_overflows_is_told_by_sums_of_nodes(collective):
    """Twice 20,000 is a float16, and four times that would be none."""
    config = CONFIGS["nearest"]

    def body(transport):
        tensor = torch.full((4 * CHUNK,), 10_000.0, dtype=torch.float16)
        call = sum_of(tensor, transport, Config(quantizer={"mode": "rel", "value": 0.01}), ring)
        if collective == "reduce_scatter_single":
            layout = equal_parts(CHUNK, transport)
            output = Window(tensor.new_empty(CHUNK), layout.segment(transport.rank).start)
            call = replanned(
                replace(call, collective=collective, output=output.data),
                layout=layout,
                output=output,
                schedule=ring.reduce_scatter,
            )
        go(transport, "2x2", config, call)
        return call.output.data

    for out in play(4, body, reuse=True):
        assert ((out - 40_000).abs() <= 1_000).all()


@pytest.mark.parametrize("others", [1e6, float("nan")])
def test_the_bound_of_a_broadcast_is_that_of_the_roots_values(others):
    config, numel = Config(quantizer={"mode": "rel", "value": BOUND}), 3 * CHUNK + 5

    def body(transport):
        tensor = values(2, numel) if transport.rank == 2 else torch.full((numel,), others)
        cast = partial(ring.broadcast, root=2)
        flat, measured = Window(tensor), range(1 if transport.rank == 2 else 0)
        layout = Layout.of([numel], 4 * CHUNK)
        go(
            transport,
            "2x2",
            config,
            planned("broadcast", config, layout, flat, flat, measured, cast, never_plain, root=2),
        )
        return tensor

    outcomes = play(4, body, reuse=True)
    assert 0 < (outcomes[0] - values(2, numel)).abs().max() <= BOUND * values(2, numel).abs().max()
    assert same_bits(outcomes)


def test_a_broadcast_has_the_blocks_of_a_flat_one():
    numel = 5 * CHUNK + 3
    config = Config(quantizer={"kind": "error_bound", "mode": "rel", "value": BOUND, "block": 2 * CHUNK})

    def body(transport, in_nodes: bool):
        tensor = values(0, numel) * torch.linspace(0.1, 30, numel)
        flat, measured = Window(tensor), range(1 if transport.rank == 0 else 0)
        cast, layout = partial(ring.broadcast, root=0), Layout.of([numel], 4 * CHUNK)
        call = planned("broadcast", config, layout, flat, flat, measured, cast, never_plain)
        if in_nodes:
            go(transport, "2x2", config, call)
        else:
            run_planned(call, Host(), transport)
        return tensor

    results = [play(4, partial(body, in_nodes=in_nodes), reuse=True) for in_nodes in (True, False)]
    assert same_bits([*results[0], *results[1]])


def test_what_a_reduce_scatter_loses_is_kept_under_the_right_names():
    """Each piece is of parts that are not neighbours."""
    config, part = CONFIGS["nearest"], 300

    def body(transport):
        residuals = Residuals()
        whole = values(transport.rank, 4 * part)
        whole[2 * part :] = 0
        names = [ParameterSlice(name, 2 * part) for name in ("lossy", "zeros")]
        layout = equal_parts(part, transport)
        output = Window(torch.empty(part), layout.segment(transport.rank).start)
        scatter, feedback = ring.reduce_scatter, Feedback(residuals, names)
        call = planned("reduce_scatter_single", config, layout, Window(whole), output, range(4), scatter, never_plain)
        go(transport, "2x2", config, replanned(call, addends=4, addend=transport.rank, feedback=feedback))
        return residuals.by_name

    for rank, kept in enumerate(play(4, body, reuse=True)):
        own = slice(rank % 2 * part, (rank % 2 + 1) * part)  # of what is lost, which this rank's piece has
        assert kept["lossy"][own].any() and "zeros" not in kept


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
def test_tensors_go_with_their_last_reference(collective):
    """Without Python's garbage collector, which large trainings switch off."""
    config = CONFIGS["nearest"]

    def body(transport):
        tensor = values(transport.rank, 1000)
        if collective == "all_reduce":
            call = sum_of(tensor, transport, config, ring)
        else:
            flat, measured = Window(tensor), range(1 if transport.rank == 0 else 0)
            cast, layout = partial(ring.broadcast, root=0), Layout.of([1000], CHUNK)
            call = planned("broadcast", config, layout, flat, flat, measured, cast, never_plain)
        go(transport, "2x2", config, call)
        return weakref.ref(tensor)

    gc.collect()
    gc.disable()
    try:
        assert [there() for there in play(4, body)] == [None] * 4
    finally:
        gc.enable()


# ---------------------------------------------------------------- nodes of any shape


def shape_of(world_size: int) -> tuple[tuple[int, ...], ...]:
    """Ranks dealt to several nodes at random, of which one has several ranks."""
    random = Random(world_size)
    while True:
        found: dict[int, list[int]] = {}
        for rank in range(world_size):
            found.setdefault(random.randrange(1 + world_size // 2), []).append(rank)
        if 1 < len(found) < world_size:
            return tuple(map(tuple, found.values()))


def run_in_nodes(transport, nodes: Nodes, given: Config, collective: str, of_rank, root: int):
    """A whole call. Returns the result, and what was counted."""
    rank, n = transport.rank, transport.world_size
    config = given.with_transport(min_bytes=0, frame_bytes=16 << 10, schedule=given.transport.schedule).resolved()
    input = of_rank(rank)
    output, op = input, SUM
    if collective == "reduce_scatter_single":
        output = torch.full_like(input[: len(input) // n], float("nan"))
    elif collective == "all_gather_single":
        input, op = input[: len(input) // n], None
        output = torch.full_like(of_rank(rank), float("nan"))
    elif collective == "broadcast":
        op = None
    group = Group(Training(config), config, range(n), rank, with_memory(nodes, transport))
    parts = [ParameterSlice(None, max(input.numel(), output.numel()))]
    call = Call(collective, input, output, op, root=root, parts=parts, is_written=True)
    run_decided(group, call, Host(), transport)
    return output, call.counters


@pytest.mark.parametrize("world_size", [3, 4, 5, 6, 7, 8, 11, 17])
def test_nodes_of_any_shape_have_the_sums_of_a_flat_call(world_size):
    """The same bits where sums of floats are exact and nothing is lost, and the bound where something is."""
    shape, part = shape_of(world_size), 3001
    numel, root = part * world_size, world_size - 1

    def whole(rank: int) -> torch.Tensor:
        return values(rank, numel).round()

    collectives = "all_reduce", "reduce", "broadcast", "reduce_scatter_single", "all_gather_single"
    kinds = {
        **{f"exact, {name}": (CONFIGS["lossless"], name) for name in SCHEDULES},
        "lossy": (CONFIGS["nearest"], "auto"),
    }

    def body(transport):
        rank, outcomes = transport.rank, {}
        node = next(i for i, members in enumerate(shape) if rank in members)
        nodes = Nodes(shape, node, shape[node].index(rank))
        for kind, (config, schedule) in kinds.items():
            config = config.with_transport(schedule=schedule)
            for collective in collectives:
                outcomes[kind, collective] = run_in_nodes(transport, nodes, config, collective, whole, root)
        return outcomes

    found = play(world_size, body)
    total = sum(whole(rank).double() for rank in range(world_size))
    for kind, collective in found[0]:
        results = [each[kind, collective][0] for each in found]
        exact = {
            "all_reduce": [total] * world_size,
            "reduce": [total if rank == root else whole(rank).double() for rank in range(world_size)],
            "broadcast": [whole(root).double()] * world_size,
            "reduce_scatter_single": list(total.view(world_size, -1)),
            "all_gather_single": [torch.cat([whole(rank)[:part] for rank in range(world_size)]).double()] * world_size,
        }[collective]
        bound = world_size * BOUND if kind == "lossy" else 0
        for rank, (result, wanted) in enumerate(zip(results, exact)):
            assert (result.double() - wanted).abs().max() <= bound, (kind, collective, rank, shape)
        if collective in ("all_reduce", "broadcast", "all_gather_single"):
            assert same_bits(results)


# ---------------------------------------------------------------- what is counted


@pytest.mark.parametrize("shape", UNEVEN)
def test_in_uneven_nodes_speakers_lose_and_send(shape):
    """What error feedback keeps is what the result lacks, and what leaves a node is counted on those that send it."""
    nodes, numel = ANY_SHAPES[shape], 8 * CHUNK
    speakers, world_size = min(map(len, nodes)), world_size_of(shape)

    def body(transport):
        residuals, tensor = Residuals(), values(transport.rank, numel)
        call = sum_of(tensor, transport, CONFIGS["nearest"], direct, segments=segments_of(shape))
        feedback = Feedback(residuals, [ParameterSlice("weight", numel)])
        counters = go(transport, shape, CONFIGS["nearest"], replanned(call, feedback=feedback))
        return tensor, residuals.by_name.get("weight", torch.zeros(numel)), counters

    outcomes = play(world_size, body, reuse=True)
    lost = sum(kept.double() for _, kept, _ in outcomes)
    assert lost.abs().max() > BOUND / 4
    assert (outcomes[0][0].double() + lost - exact_sum(world_size, numel)).abs().max() < 1e-4
    of_share = plain_wire_bytes("all_reduce", numel // speakers * 4, len(nodes))
    for ranks in nodes:
        for local_rank, rank in enumerate(ranks):
            counters = outcomes[rank][2]
            assert counters.plain_bytes == (of_share if local_rank < speakers else 0)
            assert (counters.wire_bytes > 1 << 10) == (local_rank < speakers)  # others agree, and no more


@pytest.mark.parametrize("value", [1e-4, 1e-2])  # of which the first needs more bits than 16-bit gradients have
def test_in_uneven_nodes_ranks_choose_alike_also_with_16_bits_and_feedback(value):
    """Error feedback makes the values of speakers float32. Ranks that code nothing must go plain with them, or not."""

    def body(transport):
        quantizer = {"kind": "error_bound", "value": value, "error_feedback": True}
        config = Config(quantizer=quantizer).with_transport(min_bytes=0).resolved()
        nodes = with_memory(nodes_of("3 + 2 + 1", transport.rank), transport)
        group = Group(Training(config), config, range(6), transport.rank, nodes)
        tensor = values(transport.rank, 8 * CHUNK).to(torch.bfloat16)
        parts = [ParameterSlice("weight", tensor.numel())]
        call = Call("all_reduce", tensor, tensor, dist.ReduceOp.SUM, role="gradient", parts=parts, is_written=True)
        run_decided(group, call, Host(), transport)
        return tensor, call.counters.compressed_calls

    (tensor, compressed), *others = play(6, body)
    for other, has_compressed in others:
        assert torch.equal(other, tensor) and has_compressed == compressed


def test_bytes_are_counted_apart():
    """A rank gives half of its tensor to its neighbour, and later half of the result."""
    config, numel = CONFIGS["nearest"], 16 * CHUNK

    def body(transport):
        tensor = values(transport.rank, numel)
        return go(transport, "2x2", config, sum_of(tensor, transport, config, ring))

    for counters in play(4, body, reuse=True):
        assert counters.local_bytes == 2 * (numel // 2) * 4
        assert counters.plain_bytes == plain_wire_bytes("all_reduce", numel // 2 * 4, 2)
        assert 0 < counters.wire_bytes < counters.plain_bytes
        assert counters.local_seconds > 0
        assert "inside nodes" in counters.describe()
