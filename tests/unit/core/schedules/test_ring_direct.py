"""Ring, direct and halving over real gloo, all ranks in one process: exact sums, and the same on every rank."""

import itertools
import threading
import time
from functools import partial

import pytest
import torch
from calls import planned, run_planned
from ranks import play, same_bits, values

from ncz_plugins import kernels
from ncz_plugins.core.bypass import scales_or_bypass
from ncz_plugins.core.codec.coded_tensor import CodedTensor
from ncz_plugins.core.codec.from_config import noise_for
from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.core.codec.quantize import measure
from ncz_plugins.core.codec.tensor_codec import LosslessCodec
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import FrameError, MismatchError, PeerError
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.schedules import direct, halving, ring
from ncz_plugins.kernels.format import (
    CHUNK,
    HAS_CHECKSUM,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Coder,
    Coding,
    Predictor,
)
from ncz_plugins.kernels.lossless import max_lossless_bytes

SCHEDULES = {"ring": ring, "direct": direct, "halving": halving}
BOUND = 0.01
BOUNDED = {"mode": "abs", "value": BOUND}
CONFIG = Config(quantizer=BOUNDED)
STOCHASTIC = Config(quantizer={"kind": "stochastic", "seed": 7, **BOUNDED})
LOSSLESS = Config(quantizer={"kind": "lossless"})
CHECKED = Config(quantizer=BOUNDED, entropy={"checksum": True})
LOSSLESS_CHECKED = Config(quantizer={"kind": "lossless"}, entropy={"checksum": True})
ALL = {  # name: configuration, and how frames travel
    "nearest": (CONFIG, "mesh"),
    "stochastic": (STOCHASTIC, "mesh"),
    "lossless": (LOSSLESS, "mesh"),
    "checked": (CHECKED, "mesh"),
    "few connected": (CONFIG, "sparse"),
    "over gloo": (CONFIG, "gloo"),
    "in rounds": (CONFIG, "rounds"),
}
WORLD_SIZES = (2, 3, 5)  # one rank never gets as far as a schedule
# Schedule, ranks, elements of a part, name in ALL. All of them with "nearest"; else each three but for the elements
# together, and each of these three with each number of elements.
PARTS = [
    (schedule, world_size, part, name)
    for (i, schedule), (j, world_size), (k, part), (at, name) in itertools.product(
        *map(enumerate, (SCHEDULES, WORLD_SIZES, (1, 4097, 3 * CHUNK), ALL))
    )
    if name == "nearest" or (i + j + k + at) % 3 == 0
]


def go(transport, config: Config, number: int = 1, device: Host | None = None, **call) -> Counters:
    """Run a call that must not go plain."""

    def plain(_):
        raise AssertionError("the call went plain")

    return run_planned(planned(plain=plain, config=config, number=number, **call), device or Host(), transport)


def expected_sum(world_size: int, numel: int) -> torch.Tensor:
    return sum(values(rank, numel).double() for rank in range(world_size))


def all_reduce(
    schedule,
    world_size: int,
    numel: int,
    frame_elements: int = CHUNK,
    config: Config = CONFIG,
    number: int = 1,
    dtype=torch.float32,
    average: bool = False,
    inputs=values,
    way: str = "mesh",
    two_threads: bool = False,
) -> list[torch.Tensor]:
    """The result on each rank."""

    def body(transport):
        tensor = inputs(transport.rank, numel, dtype)
        go(
            transport,
            config,
            number,
            Host(two_threads),
            collective="all_reduce",
            layout=Layout.split(numel, world_size, frame_elements, 0),
            source=Window(tensor),
            output=Window(tensor),
            measured=range(world_size),
            schedule=SCHEDULES[schedule].all_reduce,
            addends=world_size,
            addend=transport.rank,
            divisor=world_size if average else 1,
        )
        return tensor

    return play(world_size, body, way, reuse=True)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "config, numel",
    # How values are rounded changes nothing in how frames travel: the sizes at which frames end are tried with one way.
    [*((CONFIG, numel) for numel in (1, 3, 4099, 5 * CHUNK, 150_001)), (STOCHASTIC, 4099), (STOCHASTIC, 150_001)],
    ids=lambda value: value if isinstance(value, int) else "stochastic" if value is STOCHASTIC else "nearest",
)
def test_all_reduce_is_within_the_bound_and_the_same_for_all(world_size, numel, config):
    outcomes = [
        tensor
        for schedule in SCHEDULES
        for frames, way in (
            (1, "mesh"),
            (3, "mesh"),
            (256, "mesh"),
            (3, "sparse"),
            (1, "gloo"),
            (3, "gloo"),
            (3, "rounds"),
        )
        for tensor in all_reduce(schedule, world_size, numel, frames * CHUNK, config, way=way)
    ]
    assert (outcomes[0].double() - expected_sum(world_size, numel)).abs().max() <= world_size * BOUND
    # One set of bits: on all ranks, for all schedules, for every frame size and way to travel.
    assert same_bits(outcomes)


@pytest.mark.parametrize(("schedule", "world_size", "part", "name"), PARTS)
def test_reduce_scatter_gives_each_rank_its_part(schedule, world_size, part, name):
    config, way = ALL[name]

    def body(transport):
        layout = Layout.of([part] * world_size, CHUNK)
        output = torch.full((part,), float("nan"))
        go(
            transport,
            config,
            collective="reduce_scatter_single",
            layout=layout,
            source=Window(values(transport.rank, part * world_size)),
            output=Window(output, layout.segment(transport.rank).start),
            measured=range(world_size),
            schedule=SCHEDULES[schedule].reduce_scatter,
            addends=world_size,
            addend=transport.rank,
        )
        return output

    whole = torch.cat(play(world_size, body, way, reuse=True))
    bound = 1e-5 if config is LOSSLESS else world_size * BOUND
    assert (whole.double() - expected_sum(world_size, part * world_size)).abs().max() <= bound


@pytest.mark.parametrize(("schedule", "world_size", "part", "name"), PARTS)
def test_all_gather_gives_everyone_every_part(schedule, world_size, part, name):
    config, way = ALL[name]

    def body(transport):
        layout = Layout.of([part] * world_size, CHUNK)
        output = torch.full((part * world_size,), float("nan"))
        go(
            transport,
            config,
            collective="all_gather_single",
            layout=layout,
            source=Window(values(transport.rank, part), layout.segment(transport.rank).start),
            output=Window(output),
            measured=range(transport.rank, transport.rank + 1),
            schedule=SCHEDULES[schedule].all_gather,
        )
        return output

    outcomes = play(world_size, body, way, reuse=True)
    exact = torch.cat([values(rank, part) for rank in range(world_size)])
    assert (outcomes[0] - exact).abs().max() <= (0 if config is LOSSLESS else BOUND)
    assert same_bits(outcomes)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("root", [0, -1])
@pytest.mark.parametrize("config, way", ALL.values(), ids=ALL)
def test_broadcast_gives_everyone_what_the_root_has(schedule, world_size, root, config, way):
    root %= world_size
    numel = 5 * CHUNK + 1

    def body(transport):
        tensor = values(transport.rank, numel)
        go(
            transport,
            config,
            collective="broadcast",
            layout=Layout.of([numel], CHUNK),
            source=Window(tensor),
            output=Window(tensor),
            measured=range(1 if transport.rank == root else 0),
            schedule=lambda *args: SCHEDULES[schedule].broadcast(*args, root=root),
            root=root,
        )
        return tensor

    outcomes = play(world_size, body, way, reuse=True)
    assert (outcomes[0] - values(root, numel)).abs().max() <= (0 if config is LOSSLESS else BOUND)
    assert same_bits(outcomes)


def summed_codes(world_size: int, numel: int, config: Config, number: int) -> torch.Tensor:
    """What an all-reduce must give, by adding the ranks' codes in another order."""
    backend = kernels.cpu_backend()
    layout = Layout.split(numel, world_size, CHUNK, 0)
    measured = [
        measure(backend, Window(values(rank, numel)), layout, range(world_size), config.quantizer)
        for rank in range(world_size)
    ]
    scales = scales_or_bypass(torch.stack(measured).amax(0), layout, config.quantizer, torch.float32, world_size)
    codes = torch.zeros(numel, dtype=torch.int32)
    for rank in reversed(range(world_size)):
        own = torch.empty_like(codes)
        noise = noise_for(config, number, rank, world_size)
        backend.quantize(values(rank, numel), scales.inverse_steps, own, noise)
        codes += own
    expected = torch.empty(numel)
    backend.dequantize(codes, scales.scales, expected)
    return expected


@pytest.mark.parametrize("config", [CONFIG, STOCHASTIC], ids=["nearest", "stochastic"])
def test_the_sums_do_not_depend_on_who_sums_first(config):
    """Integers: the ranks' codes, added in any order, are what comes out; noise counts from the tensor's start."""
    out = all_reduce("ring", 4, 3 * CHUNK, config=config, number=9)[0]
    assert torch.equal(out, summed_codes(4, 3 * CHUNK, config, number=9))


def test_the_stochastic_quantizer_goes_by_call_and_seed():
    again = [all_reduce("ring", 2, 5000, config=STOCHASTIC, number=number)[0] for number in (1, 1, 2, 2**32 + 1)]
    assert torch.equal(again[0], again[1]) and not torch.equal(again[0], again[2])
    assert torch.equal(again[0], again[3])  # the number is one of 32 bits
    other = Config(quantizer={"kind": "stochastic", "seed": 8, **BOUNDED})
    assert not torch.equal(again[0], all_reduce("ring", 2, 5000, config=other)[0])


# ---------------------------------------------------------------- lossless


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_lossless_sums_are_those_of_plain_floats(world_size, dtype, average):
    numel = 3 * world_size * CHUNK + 5
    parts = [values(rank, numel, dtype) for rank in range(world_size)]
    wide = torch.promote_types(dtype, torch.float32)
    in_rank_order = sum(part.to(wide) for part in parts).to(dtype)
    hop_by_hop = torch.empty(numel, dtype=dtype)
    layout = Layout.split(numel, world_size, CHUNK, 0)
    for segment in range(world_size):  # the rank after the owner begins, the owner ends
        here = layout.segment(segment)
        hop_by_hop[here] = sum(parts[(segment + hop) % world_size][here] for hop in range(1, world_size + 1))
    for schedule, expected in (("ring", hop_by_hop), ("direct", in_rank_order)):
        outcomes = all_reduce(schedule, world_size, numel, config=LOSSLESS, dtype=dtype, average=average)
        assert same_bits([expected / world_size if average else expected, *outcomes])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_lossless_lets_anything_pass(schedule, world_size):
    """NaN, infinities, denormals and zeros of both signs, at their own places and with the same bits on every rank."""

    def special(rank: int, numel: int, dtype) -> torch.Tensor:
        tensor = values(rank, numel, dtype)
        tensor[5000] = -0.0
        tensor[5001] = 1e-42
        if rank == 1:
            tensor[0], tensor[4100], tensor[-1] = float("nan"), float("inf"), float("-inf")
        return tensor

    outcomes = all_reduce(schedule, world_size, 9001, config=LOSSLESS_CHECKED, inputs=special)
    assert same_bits(outcomes)
    out = outcomes[0]
    assert out[0].isnan() and out[4100] == float("inf") and out[-1] == float("-inf")
    assert out.isfinite().sum() == 9001 - 3
    assert torch.equal(out[5000].view(torch.int32), torch.tensor(-0.0).view(torch.int32))
    assert out[5001].double() == pytest.approx(world_size * 1e-42, rel=1e-2)


def test_lossless_ranks_still_compare_their_calls():
    def body(transport):
        tensor = values(transport.rank, 5000)
        with pytest.raises(MismatchError, match="call number 2 on rank 1, 1 on rank 0"):
            go(
                transport,
                LOSSLESS,
                described={"call number": 1 + transport.rank},
                collective="all_reduce",
                layout=Layout.split(5000, 2, CHUNK, 0),
                source=Window(tensor),
                output=Window(tensor),
                measured=range(2),
                schedule=ring.all_reduce,
                addends=2,
                addend=transport.rank,
            )

    play(2, body)


@pytest.mark.parametrize("segment", range(4))
def test_a_lossless_owner_adds_in_rank_order(segment):
    """1e8 + 1 - 1e8 + 1: only one order gives what rank order gives."""
    parts = [torch.full((10,), x) for x in (1e8, 1.0, -1e8, 1.0)]
    layout = Layout.of([10] * 4, CHUNK)
    counters = Counters()

    def codec(rank: int) -> LosslessCodec:
        window = Window(parts[rank].repeat(4))
        return LosslessCodec(Host(), CodedTensor(layout, window, Window(torch.zeros(40))), Coding(), False, counters)

    owner = codec(segment)
    frame = owner.encode(segment, 0, [codec((segment + i) % 4).encode(segment, 0) for i in (1, 2, 3)])
    owner.decode(segment, 0, frame)
    assert owner.output[layout.segment(segment)].tolist() == [1.0] * 10
    assert owner.frame_capacity == max_lossless_bytes(layout.frame_elements, 4)


# ---------------------------------------------------------------- checksums


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("config", [CHECKED, LOSSLESS_CHECKED], ids=["codes", "lossless"])
def test_with_checksums_every_frame_has_one_and_nothing_else_changes(schedule, world_size, config):
    flags = []

    def body(transport):
        streams = transport.streams

        def noting(receive):
            frame = receive()
            flags.append(HEADER.unpack(frame[:HEADER_BYTES].numpy())[-2])
            return frame

        def watched(*args):
            made = streams(*args)
            for stream in made:
                stream.receive = partial(noting, stream.receive)
            return made

        transport.streams = watched
        tensor = values(transport.rank, 20_001)
        go(
            transport,
            config,
            collective="all_reduce",
            layout=Layout.split(20_001, world_size, CHUNK, 0),
            source=Window(tensor),
            output=Window(tensor),
            measured=range(world_size),
            schedule=SCHEDULES[schedule].all_reduce,
            addends=world_size,
            addend=transport.rank,
        )
        return tensor

    outcomes = play(world_size, body, reuse=True)
    assert flags and set(flags) == {HAS_CHECKSUM}
    unchecked = CONFIG if config is CHECKED else LOSSLESS
    assert same_bits([*outcomes, *all_reduce(schedule, world_size, 20_001, config=unchecked)])


# ---------------------------------------------------------------- on the wire


def test_wire_bytes_are_what_the_peer_receives():
    """Counted at the sender: frames, beside the agreement."""
    received = []

    def body(transport):
        tensor = values(transport.rank, 8 * CHUNK)
        frames_only = []

        def schedule(transport, codec, counters):
            before = counters.wire_bytes
            sum_each, decode = codec.sum_each, codec.decode

            def noted(frames):
                for each in frames:
                    received.extend((transport.rank, frame.nbytes) for frame in each)
                    yield each

            def noted_decode(segment, index, frame):
                if segment != transport.rank:
                    received.append((transport.rank, frame.nbytes))
                decode(segment, index, frame)

            codec.sum_each = lambda segment, frames: sum_each(segment, noted(frames))
            codec.decode = noted_decode
            ring.all_reduce(transport, codec, counters)
            frames_only.append(counters.wire_bytes - before)

        go(
            transport,
            CONFIG,
            collective="all_reduce",
            layout=Layout.split(tensor.numel(), 2, CHUNK, 0),
            source=Window(tensor),
            output=Window(tensor),
            measured=range(2),
            schedule=schedule,
            addends=2,
            addend=transport.rank,
        )
        return frames_only[0]

    sent = play(2, body)
    for rank in range(2):
        frames = [nbytes for receiver, nbytes in received if receiver != rank]
        assert frames and sent[rank] == sum(frames)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("elements", [0, 1, 7919])
@pytest.mark.parametrize("world_size", [2, 5, 17])  # of 17 ranks, none tells all others
def test_an_agreement_is_the_maximum_over_ranks(world_size, elements, dtype):
    own = [torch.randint(-(1 << 40), 1 << 40, (elements,)).to(dtype) for _ in range(world_size)]

    def body(transport):
        counters, agreed = Counters(), own[transport.rank].clone()
        agreements = [transport.start_max(each, counters) for each in (agreed, -agreed)]
        for agreement in agreements:
            agreement.wait()
        return agreed, counters.wire_bytes

    expected = torch.stack(own).amax(0)
    for agreed, sent in play(world_size, body, reuse=True):
        assert torch.equal(agreed, expected)
        assert (sent > 0) == (elements > 0)


@pytest.mark.parametrize("announced", [0, -1, 1 << 40])
def test_an_impossible_size_is_refused_before_memory_is_taken(announced):
    """In rounds, sizes travel ahead of the frames."""

    def body(transport):
        if transport.rank == 1:
            transport._connections.send(torch.tensor([announced]), 0, 1).wait()
            return
        [stream] = transport.streams([(1, 1)], incoming=[1], frame_capacity=1000, counters=Counters())
        with pytest.raises(FrameError, match=f"{announced} bytes"):
            stream.receive()

    play(2, body, way="rounds")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        (0, MAGIC + 1, "magic"),
        (6, 1000 - HEADER_BYTES + 1, "1001 bytes"),
        (6, 2**32 - 1, "4294967319 bytes"),
    ],
)
@pytest.mark.parametrize("way", ["mesh", "gloo"])
def test_a_header_that_says_the_impossible_is_refused(field, value, words, way):
    """What is taken for the frame never goes beyond the memory that it was received in."""

    def body(transport):
        frame = torch.zeros(100, dtype=torch.uint8)
        fields = [MAGIC, VERSION, Coder.RAW, Predictor.NONE, 32, 0, frame.numel() - HEADER_BYTES, 0, 0]
        HEADER.pack_into(frame.numpy(), 0, *fields)
        [stream] = transport.streams([(1 - transport.rank,) * 2], [1, 1] * transport.rank, 1000, Counters())
        if transport.rank == 0:
            fields[field] = value
            damaged = frame.clone()
            HEADER.pack_into(damaged.numpy(), 0, *fields)
            stream.send(frame)
            stream.send(damaged)
            stream.finish()
            return
        assert torch.equal(stream.receive(), frame)
        with pytest.raises(FrameError, match=words):
            stream.receive()

    play(2, body, way)


def test_frames_may_come_long_before_they_are_wanted():
    """More of them than there are receives waiting, in order, and none is lost."""
    sizes = [HEADER_BYTES + i for i in range(40)]

    def body(transport):
        peer = 1 - transport.rank
        counters = Counters()
        [stream] = transport.streams([(peer, peer)], [1] * len(sizes), max(sizes), counters)
        for i, size in enumerate(sizes):
            frame = torch.full((size,), i, dtype=torch.uint8)
            HEADER.pack_into(frame.numpy(), 0, MAGIC, VERSION, Coder.RAW, Predictor.NONE, 32, 0, i, 0, 0)
            stream.send(frame)
        for i, size in enumerate(sizes):
            frame = stream.receive()
            assert frame.numel() == size and frame[HEADER_BYTES:].tolist() == [i] * i
        stream.finish()
        assert counters.wire_bytes == sum(sizes)

    play(2, body)


def numbered_frame(number: int) -> torch.Tensor:
    """A frame whose payload are so many bytes with this number."""
    frame = torch.full((HEADER_BYTES + number,), number, dtype=torch.uint8)
    HEADER.pack_into(frame.numpy(), 0, MAGIC, VERSION, Coder.RAW, Predictor.NONE, 32, 0, number, 0, 0)
    return frame


@pytest.mark.parametrize("way", ["mesh", "gloo", "rounds"])
def test_frames_travel_together(way):
    """Shorter messages after longer ones, and what a buffer held before is not taken for a frame."""
    messages = [3, 1, 40, 2, 1, 1]

    def body(transport):
        counters, numbers = Counters(), range(sum(messages))
        ends, rank = [(1 - transport.rank,) * 2], transport.rank
        [stream] = transport.streams(ends, messages * rank, HEADER_BYTES + len(numbers), counters)
        frames = [numbered_frame(number) for number in numbers]
        if rank == 0:
            for count in messages:
                stream.send(*(frames.pop(0) for _ in range(count)))
        for expected in frames * rank:
            assert torch.equal(stream.receive(), expected)
        stream.finish()

    play(2, body, way)


@pytest.mark.parametrize("way", ["mesh", "gloo"])
@pytest.mark.parametrize(
    ("sent", "due", "words"), [(2, 3, "rank 0|0 bytes with magic"), (3, 2, "rank 0 sent more than")]
)
def test_another_number_of_frames_in_a_message_is_refused(sent, due, words, way):
    if way == "gloo" and sent > due:
        return  # where nobody tells how long a message is

    def body(transport):
        [stream] = transport.streams([(1 - transport.rank,) * 2], [due] * transport.rank, 1000, Counters())
        if transport.rank == 0:
            stream.send(*map(numbered_frame, range(sent)))
            stream.finish()
            return
        with pytest.raises((FrameError, PeerError), match=words):
            stream.receive()

    play(2, body, way)


def test_a_frame_that_was_not_sent_is_not_taken_from_the_message_before():
    """Gloo receives both into the same memory, and does not tell how long a message is."""

    def body(transport):
        for sent in (3, 2):
            [stream] = transport.streams([(1 - transport.rank,) * 2], [3] * transport.rank, 1000, Counters())
            if transport.rank == 0:
                stream.send(*map(numbered_frame, range(sent)))
                stream.finish()
            elif sent == 3:
                assert [len(stream.receive()) for _ in range(3)] == [HEADER_BYTES + number for number in range(3)]
            else:
                with pytest.raises(FrameError, match="with magic 0x0"):
                    stream.receive()

    play(2, body, way="gloo")


@pytest.mark.parametrize("way", ["mesh", "gloo"])
def test_waiting_for_a_frame_is_counted_as_such(way):
    seconds, waits = 0.2, threading.Event()

    def body(transport):
        counters = Counters()
        [stream] = transport.streams([(1 - transport.rank,) * 2], [1] * (1 - transport.rank), 100, counters)
        if transport.rank == 1:
            frame = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
            HEADER.pack_into(frame.numpy(), 0, MAGIC, VERSION, Coder.RAW, Predictor.NONE, 32, 0, 0, 0, 0)
            assert waits.wait(20)
            time.sleep(seconds)
            stream.send(frame)
        else:
            waits.set()
            stream.receive()
        stream.finish()
        return counters.wait_seconds

    assert play(2, body, way)[0] > seconds / 2


def test_a_stream_ends_when_all_has_left():
    """More than sockets hold, to a rank that takes none of it for a while."""
    seconds, nbytes, sends = 0.05, 1 << 25, threading.Event()

    def body(transport):
        [stream] = transport.streams([(1 - transport.rank,) * 2], [1] * transport.rank, nbytes, Counters())
        started = time.perf_counter()
        if transport.rank == 0:
            sends.set()
            frame = torch.zeros(nbytes, dtype=torch.uint8)
            fields = [MAGIC, VERSION, Coder.RAW, Predictor.NONE, 32, 0, nbytes - HEADER_BYTES, 0, 0]
            HEADER.pack_into(frame.numpy(), 0, *fields)
            stream.send(frame)
        else:
            assert sends.wait(20)
            time.sleep(seconds)
            stream.receive()
        stream.finish()
        return time.perf_counter() - started

    assert play(2, body)[0] > seconds / 2


def test_the_owner_of_a_segment_adds_codes_and_makes_no_frame_of_them():
    part = 3 * CHUNK

    def body(transport):
        layout = Layout.of([part] * 3, CHUNK)
        counters = go(
            transport,
            CONFIG,
            collective="reduce_scatter_single",
            layout=layout,
            source=Window(values(transport.rank, 3 * part)),
            output=Window(torch.empty(part), layout.segment(transport.rank).start),
            measured=range(3),
            schedule=direct.reduce_scatter,
            addends=3,
            addend=transport.rank,
        )
        return sum(counters.coders.values())

    assert play(3, body, reuse=True) == [2 * 3] * 3  # what two others get


# ---------------------------------------------------------------- a second thread


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("config", [CONFIG, LOSSLESS], ids=["nearest", "lossless"])
def test_decoding_on_a_second_thread_changes_nothing(schedule, config):
    one, two = (
        all_reduce(schedule, 3, 20 * CHUNK + 5, config=config, two_threads=two_threads) for two_threads in (False, True)
    )
    assert same_bits([*one, *two])


def test_damage_that_the_second_thread_finds_is_raised():
    """Finished frames of rank 0 say another number of values."""

    def body(transport):
        tensor = values(transport.rank, 8 * CHUNK)

        def schedule(transport, codec, counters):
            if transport.rank == 0:
                whole = codec.encode_each

                def damaging(places):
                    for frame in whole(places):
                        frame[8] ^= 1
                        yield frame

                codec.encode_each = damaging
            ring.all_gather(transport, codec, counters)

        with pytest.raises(FrameError, match="damaged"):
            go(
                transport,
                CONFIG,
                device=Host(two_threads=True),
                collective="all_gather_single",
                layout=Layout.of([4 * CHUNK] * 2, CHUNK),
                source=Window(tensor[: 4 * CHUNK], transport.rank * 4 * CHUNK),
                output=Window(tensor),
                measured=range(transport.rank, transport.rank + 1),
                schedule=schedule,
            )

    play(2, body)
