"""Ring and direct over real gloo, all ranks in one process: exact integers, and the same on every rank."""

import pytest
import torch
from ranks import play

from ncz_plugins import kernels
from ncz_plugins.core import direct, ring
from ncz_plugins.core.codec import TensorCodec
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import FrameError
from ncz_plugins.core.frame import Layout, Window
from ncz_plugins.core.quantize import derive, measure
from ncz_plugins.core.stats import Counters
from ncz_plugins.kernels.format import CHUNK

SCHEDULES = {"ring": ring, "direct": direct}
BOUND = 0.01
CONFIG = Config.load({"quantizer": {"mode": "abs", "value": BOUND}})
WORLD_SIZES = (2, 3, 4, 8)  # one rank never gets as far as a schedule


def values(rank: int, numel: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(numel, generator=generator).mul_(1 + rank).to(dtype)


def codec_for(transport, layout, source, output, addends, counters, measured=None):
    """What the communicator does before it hands over to a schedule."""
    backend = kernels.cpu_backend()
    measured = range(len(layout.lengths)) if measured is None else measured
    agreed = measure(backend, source, layout, measured, CONFIG.quantizer)
    transport.start_max(agreed, counters).wait()
    scales = derive(agreed, layout, CONFIG.quantizer, source.data.dtype, addends)
    return TensorCodec(backend, layout, scales, CONFIG.entropy, source, output, counters)


def expected_sum(world_size: int, numel: int) -> tuple[torch.Tensor, float]:
    """The sum of what all ranks hold, and how far from it a result may be."""
    return sum(values(rank, numel).double() for rank in range(world_size)), world_size * BOUND


def all_reduce(schedule, world_size: int, numel: int, frame_elements: int) -> list[torch.Tensor]:
    def body(transport):
        counters = Counters()
        tensor = values(transport.rank, numel)
        flat = Window(tensor)
        layout = Layout.split(numel, world_size, frame_elements, 0)
        codec = codec_for(transport, layout, flat, flat, world_size, counters)
        SCHEDULES[schedule].all_reduce(transport, codec, counters)
        return tensor

    return play(world_size, body)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("numel", [1, 3, 4099, 5 * CHUNK, 150_001])
def test_all_reduce_is_within_the_bound_and_the_same_for_all(world_size, numel):
    outcomes = [
        tensor
        for schedule in SCHEDULES
        for frame_elements in (CHUNK, 3 * CHUNK, 1 << 20)
        for tensor in all_reduce(schedule, world_size, numel, frame_elements)
    ]
    exact, bound = expected_sum(world_size, numel)
    assert (outcomes[0].double() - exact).abs().max() <= bound
    # One set of bits: on all ranks, for both schedules, for every frame size.
    assert all(torch.equal(outcomes[0], other) for other in outcomes[1:])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("part", [1, 4097, 3 * CHUNK])
def test_reduce_scatter_gives_each_rank_its_part(schedule, world_size, part):
    def body(transport):
        counters = Counters()
        source = Window(values(transport.rank, part * world_size))
        layout = Layout.of([part] * world_size, CHUNK)
        output = torch.full((part,), float("nan"))
        own = Window(output, layout.segment(transport.rank).start)
        codec = codec_for(transport, layout, source, own, world_size, counters)
        SCHEDULES[schedule].reduce_scatter(transport, codec, counters)
        return output

    whole = torch.cat(play(world_size, body))
    exact, bound = expected_sum(world_size, part * world_size)
    assert (whole.double() - exact).abs().max() <= bound


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("part", [1, 4097, 3 * CHUNK])
def test_all_gather_gives_everyone_every_part(schedule, world_size, part):
    def body(transport):
        counters = Counters()
        layout = Layout.of([part] * world_size, CHUNK)
        own = Window(values(transport.rank, part), layout.segment(transport.rank).start)
        output = torch.full((part * world_size,), float("nan"))
        codec = codec_for(
            transport, layout, own, Window(output), 1, counters, range(transport.rank, transport.rank + 1)
        )
        SCHEDULES[schedule].all_gather(transport, codec, counters)
        return output

    outcomes = play(world_size, body)
    exact = torch.cat([values(rank, part) for rank in range(world_size)])
    assert (outcomes[0] - exact).abs().max() <= BOUND
    assert all(torch.equal(outcomes[0], other) for other in outcomes[1:])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("root", [0, -1])
def test_broadcast_gives_everyone_what_the_root_has(schedule, world_size, root):
    root %= world_size
    numel = 5 * CHUNK + 1

    def body(transport):
        counters = Counters()
        tensor = values(transport.rank, numel)
        layout = Layout.of([numel], CHUNK)
        codec = codec_for(transport, layout, Window(tensor), Window(tensor), 1, counters)
        SCHEDULES[schedule].broadcast(transport, codec, counters, root=root)
        return tensor

    outcomes = play(world_size, body)
    assert (outcomes[0] - values(root, numel)).abs().max() <= BOUND
    assert all(torch.equal(outcomes[0], other) for other in outcomes[1:])


def test_the_sums_do_not_depend_on_who_sums_first():
    """Integers: the ranks' codes, added in any order, are what comes out."""
    world_size, numel = 4, 3 * CHUNK
    out = all_reduce("ring", world_size, numel, CHUNK)[0]
    backend = kernels.cpu_backend()
    layout = Layout.split(numel, world_size, CHUNK, 0)
    agreed = torch.stack(
        [
            measure(backend, Window(values(rank, numel)), layout, range(world_size), CONFIG.quantizer)
            for rank in range(world_size)
        ]
    ).amax(0)
    scales = derive(agreed, layout, CONFIG.quantizer, torch.float32, world_size)
    codes = torch.zeros(numel, dtype=torch.int32)
    for rank in reversed(range(world_size)):
        own = torch.empty_like(codes)
        backend.quantize(values(rank, numel), scales.inverse_steps, own)
        codes += own
    expected = torch.empty(numel)
    backend.dequantize(codes, scales.scales, expected)
    assert torch.equal(out, expected)


def test_wire_bytes_are_what_the_peer_receives():
    """Counted at the sender: frames, their sizes, and the agreement."""
    received = []

    def body(transport):
        counters = Counters()
        tensor = values(transport.rank, 8 * CHUNK)
        layout = Layout.split(tensor.numel(), 2, CHUNK, 0)
        codec = codec_for(transport, layout, Window(tensor), Window(tensor), 2, counters)
        before = counters.wire_bytes
        original = codec.reduce
        codec.reduce = lambda s, i, frame: received.append((transport.rank, frame.nbytes)) or original(s, i, frame)
        original_decode = codec.decode

        def decode(segment, index, frame):
            if segment != transport.rank:
                received.append((transport.rank, frame.nbytes))
            original_decode(segment, index, frame)

        codec.decode = decode
        ring.all_reduce(transport, codec, counters)
        return counters.wire_bytes - before

    sent = play(2, body)
    for rank in range(2):
        frames = [nbytes for receiver, nbytes in received if receiver != rank]
        assert sent[rank] == sum(frames) + 8 * len(frames)


@pytest.mark.parametrize("announced", [0, -1, 1 << 40])
def test_an_impossible_size_is_refused_before_memory_is_taken(announced):
    def body(transport):
        if transport.rank == 1:
            transport._group.send([torch.tensor([announced])], 0, 1).wait()
            return
        stream = transport.stream(1, 1, frame_capacity=1000, counters=Counters())
        stream.expect()
        with pytest.raises(FrameError, match=f"{announced} bytes"):
            stream.receive()

    play(2, body)
