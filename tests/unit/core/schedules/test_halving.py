"""Halving for any number of ranks: the bits of ring and direct, few messages, and each value counted once."""

import queue
import threading
from collections import Counter, defaultdict
from functools import cache

import pytest
import torch
from calls import run_decided
from ranks import play, same_bits, values

from ncz_plugins.core.bypass import scales_or_bypass
from ncz_plugins.core.call import Call
from ncz_plugins.core.codec.coded_tensor import CodedTensor
from ncz_plugins.core.codec.from_config import codec_for, noise_for
from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.core.codec.quantize import measure
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import UnsupportedError
from ncz_plugins.core.group import Group
from ncz_plugins.core.planning import layout_of_sum, segments_of_sum
from ncz_plugins.core.run import decide
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.schedules import direct, halving, ring
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.training.state import Training
from ncz_plugins.core.transport.base import FrameStream, FrameTransport
from ncz_plugins.core.transport.topology import Nodes
from ncz_plugins.kernels.format import CHUNK

SUM = torch.distributed.ReduceOp.SUM
SCHEDULES = {"ring": ring, "direct": direct, "halving": halving}
BOUND = 0.01
CONFIGS = {
    "nearest": Config(quantizer={"mode": "abs", "value": BOUND}),
    "stochastic": Config(quantizer={"kind": "stochastic", "seed": 7, "mode": "abs", "value": BOUND}),
    "checked": Config(quantizer={"mode": "abs", "value": BOUND}, entropy={"checksum": True}),
    "lossless": Config(quantizer={"kind": "lossless"}, entropy={"checksum": True}),
}
SECONDS = 20


class Boxes(FrameTransport):
    """A transport between threads, which counts.

    Args:
        boxes: a queue for each (source, to), which all ranks share.

    Attributes:
        sent: the messages that this rank sent each other rank.
    """

    def __init__(self, boxes, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size
        self.boxes = boxes
        self.sent: Counter[int] = Counter()
        self.due: dict[int, list[int]] = defaultdict(list)
        self.peers: set[int] = set()  # with which it has opened streams

    def streams(self, peers, incoming, frame_capacity, counters):
        self.peers.update(rank for pair in peers for rank in pair)
        for _, source in peers:
            self.due[source] += incoming
        return [Box(self, to, source, counters) for to, source in peers]


class Box(FrameStream):
    def __init__(self, transport: Boxes, to: int, source: int, counters: Counters):
        self.transport, self.to, self.source, self.counters = transport, to, source, counters
        self.arrived = []

    def send(self, *frames):
        self.transport.sent[self.to] += 1
        self.counters.wire_bytes += sum(frame.nbytes for frame in frames)
        self.transport.boxes[self.transport.rank, self.to].put(frames)

    def receive(self):
        if not self.arrived:
            self.arrived += self.transport.boxes[self.source, self.transport.rank].get(timeout=SECONDS)
            assert len(self.arrived) == self.transport.due[self.source].pop(0)
        return self.arrived.pop(0)

    def finish(self):
        pass


def in_threads(world_size: int, body) -> list:
    """What `body` returns for the transport of each rank. All frames that were announced have been received.

    Of two ranks both have opened streams with each other, or none has, as they connect only then.
    """
    boxes, results = defaultdict(queue.Queue), [None] * world_size
    transports = [Boxes(boxes, rank, world_size) for rank in range(world_size)]
    for pair in ((a, b) for a in range(world_size) for b in range(world_size)):
        boxes[pair]  # made here, not by two threads at once

    def on_rank(rank: int) -> None:
        transport = transports[rank]
        results[rank] = body(transport)
        assert not any(transport.due.values()), f"rank {rank} was to get more messages: {transport.due}"

    threads = [threading.Thread(target=on_rank, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert all(result is not None for result in results), "a rank failed, or hangs"
    assert all(box.empty() for box in boxes.values())
    assert all(each.rank in transports[peer].peers for each in transports for peer in each.peers)
    return results


@cache
def of_rank(rank: int, numel: int) -> torch.Tensor:
    return values(rank, numel)


@cache
def scales_of(world_size: int, layout: Layout, name: str):
    config, backend = CONFIGS[name], Host().backend
    if config.quantizer.kind == "lossless":
        return None
    parts, every = range(world_size), range(len(layout.lengths))
    measured = [
        measure(backend, Window(of_rank(rank, layout.numel)), layout, every, config.quantizer) for rank in parts
    ]
    largest = torch.stack(measured).amax(0)
    return scales_or_bypass(largest, layout, config.quantizer, torch.float32, world_size)


def codec_of(transport: Boxes, layout: Layout, name: str, source: Window, output: Window, counters: Counters):
    """The codec of one rank, as a call makes it once the ranks have agreed on quantization steps."""
    n = transport.world_size
    noise = noise_for(CONFIGS[name], 1, transport.rank, n)
    scales = scales_of(n, layout, name)
    return codec_for(CONFIGS[name], Host(), CodedTensor(layout, source, output), scales, noise=noise, counters=counters)


def all_reduce(schedule: str, world_size: int, layout: Layout, name: str = "nearest", root: int | None = None) -> list:
    """(the result, the messages sent to each rank, bytes sent) of each rank. With a root it is a reduce."""

    def body(transport):
        tensor, counters = of_rank(transport.rank, layout.numel).clone(), Counters()
        codec = codec_of(transport, layout, name, Window(tensor), Window(tensor), counters)
        module, how = SCHEDULES[schedule], (transport, codec, counters)
        module.all_reduce(*how) if root is None else module.reduce(*how, root=root)
        codec.finish()
        return tensor, transport.sent, counters.wire_bytes

    return in_threads(world_size, body)


def bound_of(name: str, world_size: int) -> float:
    return 1e-5 * world_size**2 if name == "lossless" else world_size * BOUND


def exact(world_size: int, numel: int) -> torch.Tensor:
    return sum(of_rank(rank, numel).double() for rank in range(world_size))


# ---------------------------------------------------------------- bits


def ways_to_cut(numel: int, world_size: int) -> list[Layout]:
    """Frames of one chunk; one segment, some, and last as many as ranks."""
    return [
        Layout.split(numel, segments, CHUNK, 0) for segments in sorted({1, 2, 3, world_size}) if segments <= world_size
    ]


# Around the powers of two, and some in between, odd and even.
@pytest.mark.parametrize("world_size", [*range(1, 10), 11, 13, 16, 17, 24, 31, 32, 33])
def test_all_schedules_give_the_same_bits(world_size):
    few = world_size <= 5
    for numel in (1, 7919, 5 * CHUNK) if few else (3 * CHUNK + 1,):
        for name in ("nearest", "stochastic", "checked") if few else ("nearest",):
            cuts = ways_to_cut(numel, world_size)
            outcomes = [each[0] for layout in cuts for each in all_reduce("halving", world_size, layout, name)]
            assert (outcomes[0].double() - exact(world_size, numel)).abs().max() <= world_size * BOUND
            if world_size > 1:  # one rank has nobody to ask
                for schedule in ("ring", "direct"):
                    outcomes += [each[0] for each in all_reduce(schedule, world_size, cuts[-1], name)]
            assert same_bits(outcomes)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 11])
def test_lossless_sums_are_the_same_on_all_ranks(world_size):
    """In an order of their own, for each way to cut."""
    for numel in (1, 7919, 5 * CHUNK):
        for layout in ways_to_cut(numel, world_size):
            outcomes = [each[0] for each in all_reduce("halving", world_size, layout, "lossless")]
            error = (outcomes[0].double() - exact(world_size, numel)).abs().max()
            assert error <= bound_of("lossless", world_size) and same_bits(outcomes)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("world_size", [2, 3, 5, 8, 13])
def test_a_reduce_has_the_bits_of_an_all_reduce_on_its_root_and_changes_nothing_elsewhere(world_size, name):
    for layout in (Layout.split(7919, world_size, CHUNK, 0), Layout.split(7919, 1, CHUNK, 0)):
        expected = all_reduce("halving", world_size, layout, name)[0][0]
        for root in {0, 1, world_size - 1}:
            outcomes = all_reduce("halving", world_size, layout, name, root)
            for rank, (got, *_) in enumerate(outcomes):
                assert same_bits([got, expected if rank == root else of_rank(rank, 7919)])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 12])
def test_parts_are_scattered_gathered_and_broadcast(world_size, name):
    """Two frames a segment. Gathers and broadcasts forward frames unchanged: all have the same bits."""
    part = CHUNK + 77
    layout = Layout((part,) * world_size, CHUNK)

    def body(transport):
        rank, counters, outcomes = transport.rank, Counters(), {}
        whole, own = of_rank(rank, part * world_size), layout.segment(rank)
        for schedule, module in SCHEDULES.items():
            scattered = Window(torch.empty(part), own.start)
            codec = codec_of(transport, layout, name, Window(whole), scattered, counters)
            module.reduce_scatter(transport, codec, counters)
            codec.finish()
            gathered = torch.empty(part * world_size)
            codec = codec_of(transport, layout, name, Window(whole[own], own.start), Window(gathered), counters)
            module.all_gather(transport, codec, counters)
            codec.finish()
            spread = whole.clone()
            single = Layout((spread.numel(),), CHUNK)
            codec = codec_of(transport, single, name, Window(spread), Window(spread), counters)
            module.broadcast(transport, codec, counters, root=world_size - 1)
            codec.finish()
            outcomes[schedule] = scattered.data, gathered, spread
        return outcomes

    found = in_threads(world_size, body)
    sums = {schedule: torch.cat([each[schedule][0] for each in found]) for schedule in SCHEDULES}
    assert (sums["halving"].double() - exact(world_size, layout.numel)).abs().max() <= bound_of(name, world_size)
    if name != "lossless":
        assert same_bits(list(sums.values()))
    for place in (1, 2):
        assert same_bits([each[schedule][place] for each in found for schedule in SCHEDULES])


def test_values_that_are_not_finite_come_out_alike_without_loss():
    """NaN with other bits on several ranks, infinities that cancel, and zeros of both signs."""
    layout = Layout.split(3 * CHUNK, 5, CHUNK, 0)

    def body(transport):
        tensor, counters = of_rank(transport.rank, layout.numel).clone(), Counters()
        tensor[:3] = torch.tensor([float("nan"), (-1) ** transport.rank * float("inf"), -0.0])
        tensor.view(torch.int32)[0] += transport.rank
        codec = codec_of(transport, layout, "lossless", Window(tensor), Window(tensor), counters)
        halving.all_reduce(transport, codec, counters)
        codec.finish()
        return tensor

    outcomes = in_threads(5, body)
    assert same_bits(outcomes)
    assert outcomes[0][:2].isnan().all() and outcomes[0][2].signbit() and outcomes[0][3:].isfinite().all()


# ---------------------------------------------------------------- what travels


@pytest.mark.parametrize("world_size", [2, 4, 8, 16, 32])
def test_a_rank_talks_to_as_many_others_as_there_are_halvings(world_size):
    """To log2(ranks) others: one message of sums each, and one of what is finished, if the tensor is small."""
    layout = Layout.split(world_size * CHUNK, world_size, CHUNK, 0)
    for _, sent, _ in all_reduce("halving", world_size, layout):
        assert list(sent.values()) == [2] * (world_size - 1).bit_length()


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_large_segments_travel_alone(world_size):
    """So that one is coded while another one travels. A rank sends as many as in a ring."""
    layout = Layout.split(world_size * 64 * CHUNK, world_size, 64 * CHUNK, 0)
    for _, sent, _ in all_reduce("halving", world_size, layout):
        assert sorted(sent.values()) == [world_size // 2**level * 2 for level in range(len(sent), 0, -1)]
        assert sum(sent.values()) == 2 * (world_size - 1)


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("world_size", [8, 16, 32])
def test_fewer_segments_take_fewer_messages(world_size, segments):
    """One for each halving of the segments, both ways, and one for each further halving of the ranks."""
    layout = Layout.split(segments * CHUNK, segments, CHUNK, 0)
    most = 2 * (segments - 1).bit_length() + (world_size // segments).bit_length() - 1
    assert max(sum(sent.values()) for _, sent, _ in all_reduce("halving", world_size, layout)) == most


@pytest.mark.parametrize("world_size", [3, 4, 7, 8, 13, 16])
def test_all_ranks_together_send_about_the_bytes_of_a_ring_and_none_much_more(world_size):
    layout = Layout.split(2 * world_size * CHUNK, world_size, CHUNK, 0)
    in_ring, halved = (
        [nbytes for *_, nbytes in all_reduce(schedule, world_size, layout)] for schedule in ("ring", "halving")
    )
    # Sums of fewer ranks have less entropy.
    assert 0.9 * sum(in_ring) <= sum(halved) <= 1.02 * sum(in_ring)
    assert max(halved) <= 1.3 * max(in_ring)


@pytest.mark.parametrize("ranks", [*range(1, 40), 63, 64, 65, 100, 129])
def test_every_segment_is_sent_once_by_each_rank_or_kept_by_its_owner(ranks):
    for segments in {1, 2, ranks // 3 or 1, ranks}:
        routes = [halving.route_of(rank, ranks, segments) for rank in range(ranks)]
        for rank, route in enumerate(routes):
            passed_on = [segment for leg in route.sums for segment in leg.segments]
            assert sorted([*passed_on, *route.own]) == list(range(segments))
            for peer, sent in route.sums:
                # The peer is done with them in this order.
                order = [segment for leg in routes[peer].sums for segment in leg.segments] + list(routes[peer].own)
                assert [segment for segment in order if rank in routes[peer].sources.get(segment, ())] == list(sent)
        owned = [segment for route in routes for segment in route.own]
        assert owned == list(range(segments))
        if segments == ranks:  # as a reduce-scatter needs it
            assert all(list(route.own) == [rank] for rank, route in enumerate(routes))


def test_many_ranks_have_few_peers():
    """At 4,096 ranks a tensor of any size takes at most 132 frames, if a segment has one, to 12 others."""
    ranks, segments = 4096, halving.segments_for(1 << 30, 4096)
    for rank in (0, 1, 63, 64, 1365, 4095):
        route = halving.route_of(rank, ranks, segments)
        peers = {leg.peer for leg in route.sums} | {peer for each in route.sources.values() for peer in each}
        assert len(peers) <= 12
        frames = sum(len(leg.segments) for leg in route.sums) + sum(map(len, route.sources.values()))
        assert frames <= 2 * (segments - 1) + 6


# ---------------------------------------------------------------- plans


def test_a_plan_has_no_empty_segments_and_at_most_one_for_each_rank():
    config = CONFIGS["nearest"]
    for ranks in (2, 3, 8, 100):
        for numel in (0, 1, 4 * CHUNK, 100_003, 9 * 4 * CHUNK, 77 * CHUNK + 1, 1 << 24):
            tensor = torch.empty(numel, device="meta")
            segments = segments_of_sum(tensor, "halving", ranks, 1, config)
            layout = layout_of_sum(tensor, segments, config)
            assert 1 <= len(layout.lengths) <= ranks and (numel == 0 or all(layout.lengths))


@pytest.mark.parametrize(("world_size", "per_node"), [(3, 1), (5, 1), (4, 2), (6, 3), (6, 2)])
@pytest.mark.parametrize("name", CONFIGS)
def test_whole_calls_with_and_without_nodes(name, world_size, per_node):
    nodes = tuple(tuple(range(first, first + per_node)) for first in range(0, world_size, per_node))

    def body(transport):
        rank, outcomes = transport.rank, {}
        for schedule in SCHEDULES:
            given = CONFIGS[name].model_dump(exclude_unset=True)
            config = Config(**given, transport={"schedule": schedule, "min_bytes": 0}).resolved()
            place = None if per_node == 1 else Nodes(nodes, rank // per_node, rank % per_node)
            group, outcomes[schedule] = Group(Training(config), config, range(world_size), rank, place), []
            for numel in (1, 4099, 150_001):
                tensor = of_rank(rank, numel).clone()
                call = Call("all_reduce", tensor, tensor, SUM, parts=[ParameterSlice(None, numel)])
                run_decided(group, call, Host(), transport)
                outcomes[schedule].append(tensor)
        return outcomes

    found = play(world_size, body, reuse=True)
    for at, numel in enumerate((1, 4099, 150_001)):
        halved = [each["halving"][at] for each in found]
        assert (halved[0].double() - exact(world_size, numel)).abs().max() <= bound_of(name, world_size)
        assert same_bits(halved)
        if name != "lossless":
            assert same_bits([*halved, found[0]["ring"][at], found[0]["direct"][at]])


def test_tensors_on_gpus_are_refused():
    config = Config(transport={"schedule": "halving", "min_bytes": 0}).resolved()
    group = Group(Training(config), config, range(3), 0).for_gpus()
    tensor = torch.zeros(9)
    call = Call("all_reduce", tensor, tensor, SUM, parts=[ParameterSlice(None, 9)])
    with pytest.raises(
        UnsupportedError, match="schedule: halving moves tensors in host memory only.*set .* to auto, direct or ring"
    ):
        decide(group, call)
    assert group.calls == 0


def test_what_tuning_chose_for_host_memory_is_not_taken_for_gpus():
    """Nobody named a schedule. Other settings may have been replaced since."""
    tuned = Config(transport={"min_bytes": 0}).resolved(schedule="halving").with_transport(connections=4)
    group = Group(Training(tuned), tuned, range(40), 0)
    gpus = group.for_gpus()
    tensor = torch.zeros(9)
    call = Call("all_reduce", tensor, tensor, SUM, parts=[ParameterSlice(None, 9)])
    decide(gpus, call)
    assert (group.schedule_for(9), gpus.schedule_for(9)) == ("halving", "ring")
