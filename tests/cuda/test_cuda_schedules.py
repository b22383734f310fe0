"""Whole collectives with the CUDA kernels, executed by the emulator: the bits of the CPU's, and errors in time."""

import time
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from calls import decided, planned, run_decided, run_planned
from ranks import play
from test_cuda_batches import CountingLauncher

from ncz_plugins.core.call import Call, Pieces
from ncz_plugins.core.codec.coded_tensor import CodedTensor
from ncz_plugins.core.codec.gpu_codec import GpuCodec, Outcome
from ncz_plugins.core.codec.layout import Layout, Window
from ncz_plugins.core.codec.quantize import Scales
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import FrameError, PeerError
from ncz_plugins.core.group import Group
from ncz_plugins.core.run import enter, queue, run
from ncz_plugins.core.runtime import forecast
from ncz_plugins.core.runtime.device import Gpu, Host
from ncz_plugins.core.runtime.forecast import Forecast
from ncz_plugins.core.runtime.recorded import RecordedCalls
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.schedules import direct, padded, ring
from ncz_plugins.core.training.baseline import Baseline
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.training.state import Training
from ncz_plugins.core.transport.base import replace_by_largest
from ncz_plugins.core.transport.striped import StripedCollectives
from ncz_plugins.core.transport.topology import Nodes
from ncz_plugins.kernels.cuda import CudaBackend
from ncz_plugins.kernels.format import (
    CHUNK,
    DTYPES,
    HEADER,
    HEADER_BYTES,
    RATE_BLOCK,
    Coder,
    Coding,
    blocks_of,
    packed_bytes,
)

SUM = torch.distributed.ReduceOp.SUM
SCHEDULES = {"ring": ring, "direct": direct}
NUMEL = 3 * CHUNK + 17
OF_ALL = 6 * CHUNK + 17  # elements of which every one of 3 ranks owns some


class EmulatedGpu(Gpu):
    """Host memory as that of a GPU, whose kernels the emulator executes.

    Attributes:
        launched: how many kernels were launched.
        waits: how often the host waited for the GPU.
        seen_bytes: how many bytes were copied to the host.
    """

    def __init__(self, seed: int = 1):
        self._launcher = CountingLauncher(seed=seed)
        self.backend = CudaBackend(self._launcher)
        self._device = torch.device("cpu")
        self.recorded = RecordedCalls(self.backend, self._device)
        self.waits = self.seen_bytes = 0

    @property
    def launched(self) -> int:
        return sum(self._launcher.launched.values())

    def synchronize(self) -> None:
        self.waits += 1

    def abandon(self, memory):
        self.recorded.forget()  # there are no streams

    def start_copy_to_host(self, tensor):
        def wait():
            self.synchronize()
            return copy

        copy = tensor.clone()
        self.seen_bytes += copy.nbytes
        return wait


def all_reduce(
    schedule: str,
    world_size: int,
    config: Config,
    device_of,
    damage=None,
    numel: int = NUMEL,
    layout=None,
    expected=None,
) -> list:
    """The result on each rank, or the FrameError that ended its call."""

    def body(transport):
        tensor = torch.randn(numel, generator=torch.Generator().manual_seed(transport.rank))
        device = device_of(transport.rank)
        if damage and transport.rank == 0:
            damage(device)
        call = planned(
            "all_reduce",
            config,
            layout or Layout.split(numel, world_size, CHUNK, 0),
            source=Window(tensor),
            output=Window(tensor),
            measured=range(len(layout.lengths) if layout else world_size),
            schedule=SCHEDULES[schedule].all_reduce,
            plain=lambda _: pytest.fail("the call went plain"),
            addends=world_size,
            addend=transport.rank,
        )
        if expected:
            forecast = Forecast()
            for _ in range(4):
                forecast.learn(expected)
            transport.forecasts = SimpleNamespace(of=lambda _: forecast)
        try:
            run_planned(call, device, transport)
        except FrameError as error:
            return error
        return tensor

    return play(world_size, body, "rounds")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "settings",
    [
        {"entropy": {"coder": "fixed", "predictor": "none"}},
        {"entropy": {"coder": "auto"}},
        {"entropy": {"coder": "huffman", "checksum": True}},
        {"entropy": {"coder": "auto"}, "quantizer": {"mode": "rms", "value": 1.0}},
        {"entropy": {"coder": "raw", "predictor": "delta"}},
        {"quantizer": {"kind": "stochastic", "mode": "abs", "value": 0.02, "seed": 3}, "entropy": {"coder": "fixed"}},
        {"quantizer": {"kind": "lossless"}, "entropy": {"checksum": True}},
    ],
    ids=["fixed", "auto", "huffman with checksum", "coarse", "raw", "stochastic", "lossless"],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bits_are_those_of_the_cpu(schedule, settings, world_size):
    config = Config(**{"quantizer": {"mode": "rms", "value": 0.1}} | settings)
    on_cpu = all_reduce(schedule, world_size, config, lambda rank: Host())
    on_gpu = all_reduce(schedule, world_size, config, EmulatedGpu)
    for tensor in (*on_cpu, *on_gpu):
        assert torch.equal(tensor.view(torch.int32), on_cpu[0].view(torch.int32))


@pytest.mark.parametrize("kind", ["error_bound", "stochastic"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_fixed_rate_needs_no_host(kind, world_size):
    """The bits of the CPU, some launches whatever the size, and nothing that waits for the device."""
    config = Config(quantizer={"kind": kind, "mode": "bits", "value": 4}, transport={"min_bytes": 0}).resolved()

    def body(transport, emulated):
        outcomes = []
        for numel in (1, NUMEL, 3 * OF_ALL):
            tensor = torch.randn(numel, generator=torch.Generator().manual_seed(transport.rank))
            ours = Group(Training(config), config, range(world_size), transport.rank)
            parts = [ParameterSlice(None, numel)]
            call = decided(ours, Call("all_reduce", tensor, tensor, SUM, parts=parts))
            enter(ours, call)
            if emulated:
                launcher = CountingLauncher(seed=1)
                queue(ours, call, CudaBackend(launcher), transport)
                at_random = "_at_random" if kind == "stochastic" else ""
                # Sums of two ranks are decoded at once; more ranks send each other sums.
                names = ["block_magnitudes", f"pack{at_random}", "unpack"] + ["add_packed"] * (world_size > 2)
                assert launcher.launched == {f"ncz_{name}": 1 for name in names}
            else:
                run(ours, call, Host(), transport)
            assert ours.training.stats.total.compressed_calls == 1
            outcomes.append(tensor)
        return torch.cat(outcomes)

    on_cpu = play(world_size, lambda transport: body(transport, emulated=False))
    on_gpu = play(world_size, lambda transport: body(transport, emulated=True))
    for tensor in (*on_cpu, *on_gpu):
        assert torch.equal(tensor.view(torch.int32), on_cpu[0].view(torch.int32))


# Elements that each of 3 ranks sends to each.
TABLES = {
    "even": [[CHUNK + 17] * 3] * 3,
    "even blocks": [[2 * RATE_BLOCK] * 3] * 3,
    "rows of blocks": [[256, 512, 0], [1024, 256, 768], [0, 0, 256]],
    "uneven": [[100, 4099, 1], [257, 255, 3 * CHUNK], [9, 0, 512]],
    "sparse": [[0, 300, 0], [0, 0, 0], [0, 0, 77]],
    "gather": [[0, 300, 0], [0, CHUNK + 17, 0], [0, 4099, 0]],
    "scatter": [[0, 0, 0], [0, 0, 0], [1, 3 * CHUNK, 4099]],
    "empty": [[0] * 3] * 3,
}


def pieces_call(rank: int, table: list[list[int]], dtype=torch.float32, fill=None) -> Call:
    """An all_to_all_single of rows of one element."""
    sent, received = table[rank], [of_one[rank] for of_one in table]
    tensor = torch.randn(sum(sent), generator=torch.Generator().manual_seed(rank)).to(dtype)
    if fill is not None:
        fill(rank, tensor)
    output = torch.full([sum(received)], 7.0, dtype=dtype)
    pieces = Pieces(tuple(sent), tuple(received), 1, rank)
    parts = [ParameterSlice(None, tensor.numel())]
    return Call("all_to_all_single", tensor, output, pieces=pieces, parts=parts)


@pytest.mark.parametrize("kind", ["error_bound", "stochastic"])
@pytest.mark.parametrize("name", TABLES)
def test_pieces_at_a_fixed_rate_need_no_host(name, kind):
    """The bits of the CPU, and nothing that waits for the device.

    A launch of each kernel for all pieces of the ranks before this one, and for all of those after it.
    """
    quantizer = {"kind": kind, "mode": "bits", "value": 4, "seed": 5}
    config = Config(quantizer=quantizer, transport={"min_bytes": 0}).resolved()
    table = TABLES[name]

    def body(transport, emulated):
        rank, outcomes = transport.rank, []
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            ours = Group(Training(config), config, range(3), rank)
            ours = ours.for_gpus() if emulated else ours
            call = decided(ours, pieces_call(rank, table, dtype))
            assert call.bypass is None
            enter(ours, call)
            if emulated:
                launcher = CountingLauncher(seed=1)
                queue(ours, call, CudaBackend(launcher), transport)
                pack = "ncz_pack_at_random" if kind == "stochastic" else "ncz_pack"
                sent, came = table[rank], [of_one[rank] for of_one in table]
                sent, came = (any(each[:rank]) + any(each[rank + 1 :]) for each in (sent, came))
                expected = Counter({"ncz_block_magnitudes": sent, pack: sent, "ncz_unpack": came})
                assert Counter(launcher.launched) == expected
            else:
                run(ours, call, Host(), transport)
            total = ours.training.stats.total
            assert total.compressed_calls == (emulated or any(map(any, table)))
            outcomes.append(call.output.view(torch.uint8))
        return torch.cat(outcomes), total.wire_bytes

    on_cpu = play(3, lambda transport: body(transport, emulated=False))
    on_gpu = play(3, lambda transport: body(transport, emulated=True))
    for rank, ((ours, sent), (expected, _)) in enumerate(zip(on_gpu, on_cpu)):
        assert torch.equal(ours, expected)
        blocks = sum(-(-length // RATE_BLOCK) for to, length in enumerate(table[rank]) if to != rank)
        assert sent == blocks * (2 + packed_bytes(4))


def exchanged_on(device, config: Config, table, dtype=torch.float32, fill=None) -> list:
    """Of each rank: its output, its statistics, and its device."""

    def body(transport):
        on = device()
        ours = Group(Training(config), config, range(3), transport.rank)
        call = pieces_call(transport.rank, table, dtype, fill)
        run_decided(ours.for_gpus() if on.in_batches else ours, call, on, transport)
        return call.output, ours.training.stats.total, on

    return play(3, body, "rounds")


PIECE_SETTINGS = {
    "default": {},
    "checksum": {"entropy": {"coder": "huffman", "checksum": True}},
    "at random": {"quantizer": {"kind": "stochastic", "mode": "rms", "value": 0.5, "seed": 3}},
    "abs": {"quantizer": {"mode": "abs", "value": 0.01}},
    "rel": {"quantizer": {"mode": "rel", "value": 0.01, "block": 256}},
    "rel of a piece": {"quantizer": {"mode": "rel", "value": 0.01, "block": 0}},
    "rel of many frames": {"quantizer": {"mode": "rel", "value": 0.01}, "transport": {"frame_bytes": 4 * CHUNK}},
    "range": {"quantizer": {"kind": "error_bound", "mode": "range", "value": 0.001}},
    "lossless": {"quantizer": {"kind": "lossless"}, "entropy": {"checksum": True}},
}


# All settings with all dtypes, and all tables with what is coded in steps and without loss.
PIECES = [(name, dtype, "uneven") for name in PIECE_SETTINGS for dtype in DTYPES]
PIECES += [(name, torch.float32, table) for name in ("default", "lossless") for table in TABLES if table != "uneven"]


@pytest.mark.parametrize(("name", "dtype", "table"), PIECES, ids=str)
def test_the_bits_of_pieces_are_those_of_the_cpu(name, dtype, table):
    settings, table = PIECE_SETTINGS[name], TABLES[table]
    transport = {"min_bytes": 0} | settings.get("transport", {})
    config = Config(**settings | {"transport": transport}).resolved()
    on_cpu, on_gpu = (exchanged_on(device, config, table, dtype) for device in (Host, EmulatedGpu))
    for (ours, counted, _), (expected, _, _) in zip(on_gpu, on_cpu):
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))
        assert counted.compressed_calls == any(map(any, table)), counted


def damaging(byte: int):
    """Makes a device damage each frame of its rank's own values."""

    def damage(device):
        encode_sums = device.backend.encode_sums

        def encode_and_damage(sums, *arguments):
            sizes = encode_sums(sums, *arguments)
            for each in sums:
                if not each.frames:
                    each.out[byte] ^= 0x55
            return sizes

        device.backend.encode_sums = encode_and_damage

    return damage


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("entropy", [{"coder": "fixed", "predictor": "none"}, {"coder": "auto"}], ids=["fixed", "auto"])
@pytest.mark.parametrize("byte", [0, 8, 24])  # of the header, and of what comes first behind it
def test_damage_is_an_error_on_every_rank_in_that_call(schedule, entropy, byte):
    """Also on those that get nothing but what others make of the damaged frames."""
    errors = all_reduce(schedule, 3, Config(entropy=entropy), EmulatedGpu, damaging(byte), OF_ALL)
    assert all(isinstance(error, FrameError) and "a frame is damaged" in str(error) for error in errors), errors
    assert any("made of a frame that was damaged" in str(error) for error in errors)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_so_it_is_where_only_a_checksum_tells(schedule):
    def damage(device):
        seal_frames = device.backend.seal_frames

        def seal_and_damage(frames):
            seal_frames(frames)
            for frame in frames:
                frame[30:31] ^= 0x55  # a spoiled frame ends before

        device.backend.seal_frames = seal_and_damage

    config = Config(entropy={"coder": "fixed", "checksum": True})
    errors = all_reduce(schedule, 3, config, EmulatedGpu, damage, OF_ALL)
    assert all(isinstance(error, FrameError) for error in errors), errors


@pytest.mark.parametrize("poison", [float("nan"), float("-inf"), 1e30], ids=str)  # no step is as wide as the last needs
@pytest.mark.parametrize("table", ["uneven", "even"])
def test_a_piece_that_can_not_be_quantized_arrives_with_every_bit(table, poison):
    """And all others as on the CPU. Rank 1 has it for rank 2."""
    table = TABLES[table]
    place = sum(table[1][:2]) + 3

    def fill(rank: int, tensor: torch.Tensor) -> None:
        if rank == 1:
            tensor[place] = poison

    config = Config(quantizer=ABSOLUTE | {"value": 1e-3}, transport={"min_bytes": 0}).resolved()
    on_cpu, on_gpu = (exchanged_on(device, config, table, fill=fill) for device in (Host, EmulatedGpu))
    for (ours, *_), (expected, *_) in zip(on_gpu, on_cpu):
        assert torch.equal(ours.view(torch.int32), expected.view(torch.int32))
    exact = pieces_call(1, table, fill=fill).input[sum(table[1][:2]) :]
    came = on_gpu[2][0][table[0][2] :][: len(exact)]
    assert torch.equal(came.view(torch.int32), exact.view(torch.int32))


def test_bfloat16_that_would_hardly_shrink_keeps_its_bits_too():
    config = Config(quantizer={"mode": "rel", "value": 3e-5}, transport={"min_bytes": 0}).resolved()
    for device in (Host, EmulatedGpu):
        for rank, (came, *_) in enumerate(exchanged_on(device, config, TABLES["uneven"], torch.bfloat16)):
            sent = [pieces_call(source, TABLES["uneven"], torch.bfloat16).input for source in range(3)]
            exact = [each.split(TABLES["uneven"][source])[rank] for source, each in enumerate(sent)]
            assert torch.equal(came, torch.cat(exact))


@pytest.mark.parametrize(
    ("damaged", "told"),
    [
        ("measured", "what rank 1 measured of its values is damaged"),
        ("frame", "a frame is damaged"),
        ("length", f"a frame between ranks 0 and 1 is said to have {1 << 40} bytes; 1 to "),
    ],
)
@pytest.mark.parametrize("mode", ["rms", "abs", "range"])
def test_a_damaged_message_is_an_error(damaged, told, mode, monkeypatch):
    """Of rank 1 for rank 0, in that call."""
    exchange = StripedCollectives.all_to_all_single

    def exchange_and_damage(self, output, input, received=(), sent=()):
        input, is_message = input.clone(), input.dtype == torch.uint8
        if sent[1] == 0 and is_message == (damaged != "length"):  # nothing for rank 1, so this is rank 1
            if is_message:
                input[0 if damaged == "measured" else sent[0] - 30] ^= 0x21
            else:
                input[sent[0] - 1] = 1 << 40
        return exchange(self, output, input, received, sent)

    def body(transport):
        ours = Group(Training(config), config, range(3), transport.rank).for_gpus()
        run_decided(ours, pieces_call(transport.rank, [[CHUNK] * 3] * 3), EmulatedGpu(), transport)

    monkeypatch.setattr(StripedCollectives, "all_to_all_single", exchange_and_damage)
    config = Config(
        quantizer={"mode": mode, "value": 0.01, "kind": "error_bound"},
        transport={"min_bytes": 0},
        entropy={"checksum": True},
    )
    config = config.resolved()
    with pytest.raises(FrameError, match=told):
        play(3, body, "rounds")


# What kernels of a coder launch to encode, and to add frames to what is encoded; see test_cuda_batches.py.
CODERS = {"fixed": (1, 3), "huffman": (4, 7), "auto": (4, 7)}
SCALES, DECODE, DECODE_SUMS = 3, 2, 2  # launches; for the first, chunks and blocks are measured, and steps derived
PAD = 1  # of a batch of two ranks
OUTCOME, SIZE, REPORT = 32, 8, 72  # bytes that the host sees of a segment's scales, of a frame that is sent, of a call
CALLS = [(schedule, n) for schedule in SCHEDULES for n in (2, 4) if (schedule, n) != ("direct", 2)]


@pytest.mark.parametrize(("schedule", "world_size"), CALLS)
@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("frames", [1, 3])
def test_what_a_call_costs_the_host(schedule, frames, coder, world_size):
    """Launches and waits for the GPU do not grow with the tensor, and of its contents the host sees next to nothing."""
    n = world_size
    config = Config(entropy={"coder": coder, "predictor": "auto" if coder == "auto" else "none"})
    devices = {}

    def device_of(rank: int) -> EmulatedGpu:
        devices[rank] = EmulatedGpu(rank)
        return devices[rank]

    lengths = *[frames * CHUNK] * (n - 1), frames * CHUNK - 5
    all_reduce(schedule, n, config, device_of, numel=sum(lengths), layout=Layout(lengths, CHUNK))
    encode, add = CODERS[coder]
    own, sums = {"direct": (1, 1), "ring": (1, n - 1)}[schedule]  # batches of own values, and of sums that are sent on
    for device in devices.values():
        assert device.launched == SCALES + own * encode + sums * add + DECODE
        assert device.waits == own + sums + 1  # sizes of what is encoded, and of sums; the end
        assert device.seen_bytes == OUTCOME * n + SIZE * n * frames + REPORT


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("name", TABLES)
def test_what_an_exchange_costs_the_host(name, coder):
    """As many launches and waits whatever the pieces are, and next to nothing of their contents is seen."""
    coding = {"coder": coder, "predictor": "auto" if coder == "auto" else "none"}
    config = Config(entropy=coding, transport={"min_bytes": 0}).resolved()
    table = TABLES[name]
    for rank, (_, counted, device) in enumerate(exchanged_on(EmulatedGpu, config, table)):
        if not any(map(any, table)):
            assert counted.bypasses == {"too small": 1}
            continue
        to, come = (
            [each for peer, each in enumerate(of) if peer != rank]
            for of in (table[rank], [of_one[rank] for of_one in table])
        )
        assert device.launched == SCALES + any(to) * CODERS[coder][0] + 1 + any(come) * DECODE
        assert device.waits == 2  # how long frames are; the end
        frames = sum(map(bool, to + come))
        assert device.seen_bytes == (OUTCOME + SIZE) * frames + REPORT + 3 * OUTCOME


# ------------------------------------------------------------------ two ranks, which expect frames of certain lengths


def calls_of_two(tensors_of, config: Config) -> list[list[tuple[int, int, int, int]]]:
    """What calls one after the other cost each rank: (launches, waits, bytes seen, bytes sent). Results are the CPU's.

    Args:
        tensors_of: gives the tensors of a rank, one for each call.
    """
    tensors = [tensors_of(rank) for rank in range(2)]
    layout = Layout.of([tensors[0][0].numel()], CHUNK)

    def body(transport, device_of):
        costs = []
        for tensor in tensors[transport.rank]:
            tensor, device = tensor.clone(), device_of(transport.rank)
            call = planned(
                "all_reduce",
                config,
                layout,
                source=Window(tensor),
                output=Window(tensor),
                measured=range(1),
                schedule=direct.all_reduce,
                plain=lambda plain, tensor=tensor: plain.all_reduce(tensor),
                addends=2,
                addend=transport.rank,
            )
            sent = run_planned(call, device, transport).wire_bytes
            on_gpu = device.in_batches
            costs.append((tensor, device.launched, device.waits, device.seen_bytes, sent) if on_gpu else (tensor,))
        return costs

    on_cpu = play(2, partial(body, device_of=lambda rank: Host()), "rounds")
    on_gpu = play(2, partial(body, device_of=EmulatedGpu), "rounds")
    for ours, expected in zip(on_gpu, on_cpu):
        for (tensor, *_), (right,) in zip(ours, expected):
            assert torch.equal(tensor.view(torch.int32), right.view(torch.int32))
    return [[tuple(costs) for _, *costs in ours] for ours in on_gpu]


def normal(seed: int) -> torch.Tensor:
    return torch.randn(4 * CHUNK - 60, generator=torch.Generator().manual_seed(seed))


ABSOLUTE = {"mode": "abs", "value": 0.05}  # larger values have longer frames
FIXED = {"coder": "fixed", "predictor": "none"}
PLACES = 4  # frames of `normal`


def test_calls_that_are_like_those_before_wait_for_no_sizes():
    config = Config(quantizer=ABSOLUTE, entropy=FIXED)
    costs = calls_of_two(lambda rank: [normal(10 * rank + call) for call in range(6)], config)
    launches = SCALES + CODERS["fixed"][0] + PAD + DECODE_SUMS
    end = REPORT + PLACES * 2 * (16 + HEADER_BYTES)  # of own frames and the peer's, with the lengths in front
    for ours in costs:
        assert {launched for launched, *_ in ours} == {launches}
        assert [waits for _, waits, *_ in ours] == [2] * 6  # sizes with the outcome, or the outcome; the end
        assert [seen for *_, seen, _ in ours] == [2 * PLACES * SIZE + OUTCOME + end] * 4 + [OUTCOME + end] * 2
    assert costs[0] == costs[1]  # both send as much


def test_the_first_frames_travel_before_the_last_are_encoded(monkeypatch):
    """In two batches where the host waits for each, and in more where it waits for none."""
    monkeypatch.setattr(padded, "BATCH_ELEMENTS", CHUNK)
    config = Config(quantizer=ABSOLUTE, entropy=FIXED)
    launches = [SCALES + batches * (CODERS["fixed"][0] + PAD) + DECODE_SUMS for batches in (2, PLACES)]
    for ours in calls_of_two(lambda rank: [normal(10 * rank + call) for call in range(6)], config):
        assert [launched for launched, *_ in ours] == [launches[0]] * 4 + [launches[1]] * 2


@pytest.mark.parametrize("frames", [[0], [3], [1, 2], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize(("checksum", "together"), [(False, 4 * CHUNK), (True, CHUNK)])
def test_frames_that_are_longer_than_expected_come_later(checksum, together, ranks, frames, monkeypatch):
    """In place, with the result of the CPU; and a call after some more like it expects as much."""
    monkeypatch.setattr(padded, "BATCH_ELEMENTS", together)
    config = Config(quantizer=ABSOLUTE, entropy=FIXED | {"checksum": checksum})

    def tensors_of(rank: int) -> list[torch.Tensor]:
        tensors = [normal(10 * rank + call) for call in range(9)]
        for tensor in tensors[4:] if rank in ranks else ():
            for frame in frames:
                tensor[frame * CHUNK : (frame + 1) * CHUNK] *= 1000
        return tensors

    for ours in calls_of_two(tensors_of, config):
        waits, sent = [waits for _, waits, *_ in ours], [sent for *_, sent in ours]
        agreeing = 2 if together > CHUNK else 3  # for one or two batches, and the end
        assert waits == [agreeing] * 4 + [3] + [agreeing] * 3 + [2]  # 3: once more for what was cut off
        assert sent[4] > sent[3] and abs(sent[8] - sent[7]) < sent[7] / 30


def test_calls_that_differ_agree_on_every_length():
    """So that small frames are not padded to those of the call before, nor large ones sent twice."""
    config = Config(quantizer=ABSOLUTE)
    costs = calls_of_two(lambda rank: [normal(call) * (1, 1000)[call % 2] for call in range(7)], config)
    for ours in costs:
        small, large = [sent for *_, sent in ours][::2], [sent for *_, sent in ours][1::2]
        assert 2 * max(small) < min(large) and [waits for _, waits, *_ in ours] == [2] * 7


def test_both_ranks_expect_the_same_after_pieces_whose_lengths_only_one_of_them_sees(monkeypatch):
    """They would gather other numbers of bytes otherwise, or one of them nothing yet, and so hang."""
    monkeypatch.setattr(forecast, "_MAX_KEYS", 3)
    config = Config(quantizer=ABSOLUTE, entropy=FIXED, transport={"min_bytes": 0}).resolved()

    def body(transport, device):
        rank, results, waits = transport.rank, [], []
        ours = Group(Training(config), config, range(2), rank)
        ours = ours.for_gpus() if device().in_batches else ours
        for turn in range(6):
            tensor, on = normal(10 * rank + turn), device()
            run_decided(ours, Call("all_reduce", tensor, tensor, SUM, parts=[ParameterSlice("it", 9)]), on, transport)
            results.append(tensor)
            waits.append(on.waits if on.in_batches else 0)
            for kept in range(4):  # by rank 0
                exchange = pieces_call(rank, [[kept, 300], [300, 0]])
                run_decided(ours, exchange, device(), transport)
        return torch.cat(results), waits

    on_cpu, on_gpu = (play(2, partial(body, device=device), "rounds") for device in (Host, EmulatedGpu))
    for (ours, waits), (expected, _) in zip(on_gpu, on_cpu):
        assert torch.equal(ours.view(torch.int32), expected.view(torch.int32))
        assert waits == [2] * 6


@pytest.mark.parametrize("longer_on", [[0], [1], [0, 1]], ids=str)
def test_a_reduce_scatter_of_two(longer_on):
    """With and without expectations, and of frames that are longer than expected: the CPU's result."""
    config = Config(quantizer=ABSOLUTE, transport={"min_bytes": 0, "frame_bytes": 4 * CHUNK}).resolved()

    def body(transport, device):
        ours, results, waits = Group(Training(config), config, range(2), transport.rank), [], []
        for call in range(7):
            tensor = normal(10 * transport.rank + call) * (1000 if call > 4 and transport.rank in longer_on else 1)
            part = tensor.new_empty(tensor.numel() // 2)
            request = Call("reduce_scatter_single", tensor, part, SUM, parts=[ParameterSlice(None, tensor.numel())])
            on = device()
            run_decided(ours, request, on, transport)
            results.append(part)
            waits.append(on.waits if on.in_batches else 0)
        assert ours.training.stats.total.compressed_calls == 7
        return torch.cat(results), waits

    on_cpu, on_gpu = (play(2, partial(body, device=device), "rounds") for device in (Host, EmulatedGpu))
    for (ours, waits), (expected, _) in zip(on_gpu, on_cpu):
        assert torch.equal(ours.view(torch.int32), expected.view(torch.int32))
        assert waits == [2, 2, 2, 2, 2, 3, 2]  # in the sixth once more for what was cut off


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per_node", [1, 2])
def test_error_feedback_and_frames_that_are_longer(per_node, dtype):
    """Of 16-bit gradients, whose sums have another dtype than what is kept for them; also between two nodes."""
    settings = {"quantizer": ABSOLUTE | {"error_feedback": True}, "transport": {"min_bytes": 0}}
    config = Config(**settings).resolved()

    def body(transport, device):
        n, rank = transport.world_size, transport.rank
        ranks = tuple(tuple(range(first, first + per_node)) for first in range(0, n, per_node))
        nodes = None if per_node == 1 else Nodes(ranks, rank // per_node, rank % per_node)
        ours, results = Group(Training(config), config, range(n), rank, nodes), []
        for call in range(7):
            tensor = (normal(10 * rank + call) * (1 if call < 5 or rank else 100)).to(dtype)
            parts = [ParameterSlice("weight", tensor.numel())]
            run_decided(ours, Call("all_reduce", tensor, tensor, SUM, parts=parts), device(), transport)
            results.append(tensor)
        assert ours.training.stats.total.compressed_calls == 7
        return torch.cat(results)

    on_cpu = play(2 * per_node, partial(body, device=Host), "rounds")
    on_gpu = play(2 * per_node, partial(body, device=EmulatedGpu), "rounds")
    for tensor in (*on_cpu, *on_gpu):
        assert torch.equal(tensor.view(torch.int16), on_cpu[0].view(torch.int16))


@pytest.mark.parametrize("longest", [0, 1 << 40])
def test_a_length_that_can_not_be_is_refused(longest, monkeypatch):
    def other(transport, tensor, counters):
        replace_by_largest(transport, tensor, counters)
        tensor.fill_(longest)

    monkeypatch.setattr(padded, "replace_by_largest", other)
    for error in all_reduce("direct", 2, Config(entropy=FIXED), EmulatedGpu):
        assert isinstance(error, FrameError) and f"is said to have {longest} bytes" in str(error)


@pytest.mark.parametrize("poison", [float("nan"), 1e30], ids=str)  # no step is as wide as the second one needs
@pytest.mark.parametrize("call", [0, 4])  # without and with expectations
def test_what_goes_plain_is_as_it_was(call, poison):
    """The host learns of it when frames are under way, but before any is decoded to where its values come from."""

    def tensors_of(rank: int) -> list[torch.Tensor]:
        tensors = [normal(10 * rank + each) for each in range(6)]
        tensors[call][-9 if rank else 5] = poison
        return tensors

    config = Config(quantizer=ABSOLUTE | {"value": 1e-3}, entropy=FIXED)
    for ours in calls_of_two(tensors_of, config):
        assert [waits for _, waits, *_ in ours][-1] == 2


@pytest.mark.parametrize("reason", [None, "code overflow"])
def test_a_frame_is_empty_if_the_host_learns_with_its_size_that_the_call_goes_plain(reason):
    """Otherwise codes of steps that can't be used would travel, as many bytes as the values themselves."""
    values, steps = torch.randn(CHUNK), torch.ones(blocks_of(CHUNK))
    tensor = CodedTensor(Layout.of([CHUNK], CHUNK), Window(values))
    outcome = Outcome(torch.zeros(3, dtype=torch.int64), lambda seen: reason)
    given = EmulatedGpu(), tensor, Coding(Coder.FIXED), False, Counters(), Scales(steps, steps)
    frame = GpuCodec(*given, outcome=outcome).encode(0, 0)
    *_, count, _, _, _ = HEADER.unpack(frame[:HEADER_BYTES].numpy())
    assert count == (0 if reason else CHUNK)


@pytest.mark.parametrize("expected", [None, [9000]])
@pytest.mark.parametrize("byte", [0, 8, 12, 13, 14, 15, HEADER_BYTES])  # from 12 on: how long the frame is
def test_damage_among_padding(byte, expected):
    """What is damaged on the way to one rank is an error there, at once, with and without expectations."""
    config, layout = Config(quantizer=ABSOLUTE, entropy=FIXED), Layout.of([CHUNK], CHUNK)
    errors = all_reduce("direct", 2, config, EmulatedGpu, damaging(byte), CHUNK, layout, expected)
    assert isinstance(errors[1], FrameError), errors
    assert "damaged" in str(errors[1]) or "sent a frame" in str(errors[1]), errors


def test_a_length_that_contradicts_its_frame_is_an_error():
    """It stands in front of the frame, and no seal of that covers it."""

    def damage(device):
        pad_frames = device.backend.pad_frames

        def pad_and_damage(memory, sizes):
            pad_frames(memory, sizes)
            memory[0][0] ^= 1

        device.backend.pad_frames = pad_and_damage

    config, layout = Config(quantizer=ABSOLUTE, entropy=FIXED), Layout.of([CHUNK], CHUNK)
    errors = all_reduce("direct", 2, config, EmulatedGpu, damage, CHUNK, layout)
    assert isinstance(errors[1], FrameError) and "a frame of rank 0 is damaged: its header says" in str(errors[1])


class SlowGpu(EmulatedGpu):
    """The host always waits for it."""

    seconds = 0.02

    def synchronize(self):
        super().synchronize()
        time.sleep(self.seconds)


def cost_of_one(transport, device) -> Counters:
    """What a call of two ranks with GPUs cost."""
    tensor = normal(transport.rank)
    call = planned(
        "all_reduce",
        Config(quantizer=ABSOLUTE, entropy=FIXED),
        Layout.of([tensor.numel()], CHUNK),
        source=Window(tensor),
        output=Window(tensor),
        measured=range(1),
        schedule=direct.all_reduce,
        plain=lambda _: pytest.fail("the call went plain"),
        addends=2,
        addend=transport.rank,
    )
    return run_planned(call, device, transport)


def test_waiting_for_the_gpu_is_counted_as_such():
    def body(transport):
        device = SlowGpu()
        return cost_of_one(transport, device).wait_seconds, device.waits

    for wait_seconds, waits in play(2, body, "rounds"):
        assert waits == 2 and wait_seconds >= waits * SlowGpu.seconds


def test_bytes_are_those_that_a_rank_sends():
    """Each frame once: what the CPU sends, and padding."""
    (on_cpu, _), (on_gpu, _) = (
        play(2, lambda transport, device=device: cost_of_one(transport, device()).wire_bytes, "rounds")
        for device in (Host, EmulatedGpu)
    )
    agreed = 4 * PLACES * torch.int64.itemsize  # on scales, and on lengths
    assert on_cpu <= on_gpu < on_cpu + PLACES * (16 + 512) + agreed


@pytest.mark.parametrize("when", ["lengths", "start", "wait"])
def test_a_peer_that_is_gone_is_told(when, monkeypatch):
    gather = StripedCollectives.all_gather_single

    def fail(*_):
        raise RuntimeError("Connection closed by peer")

    def fail_with_frames(self, output, input):
        if input.nbytes < 512:  # scales, or lengths
            return gather(self, output, input)
        return fail() if when == "start" else SimpleNamespace(wait=fail)

    def body(transport):
        with pytest.raises(PeerError, match=f"{subject} failed: Connection closed by peer"):
            cost_of_one(transport, EmulatedGpu())

    subject = "agreeing on the lengths of frames" if when == "lengths" else "exchanging frames"
    if when == "lengths":
        monkeypatch.setattr(padded, "replace_by_largest", fail)
    else:
        monkeypatch.setattr(StripedCollectives, "all_gather_single", fail_with_frames)
    play(2, body, "rounds")


# ------------------------------------------------------------------ all collectives, as users ask for them


def requests_of(rank: int, world_size: int, dtype: torch.dtype, poison: float | None) -> list[Call]:
    """One of each collective. A value of rank 1 is `poison`."""
    tensor = torch.randn(world_size * 2 * CHUNK, generator=torch.Generator().manual_seed(rank)).to(dtype)
    if poison is not None and rank == 1:
        tensor[-9] = poison
    part = tensor[-2 * CHUNK :].clone()
    new, parts = tensor.new_zeros, [ParameterSlice(None, 2 * CHUNK)]
    return [
        Call("all_reduce", (x := tensor.clone()), x, SUM, parts=[ParameterSlice(None, x.numel())]),
        Call("reduce_scatter_single", tensor, new(2 * CHUNK), SUM, parts=[ParameterSlice(None, tensor.numel())]),
        Call("all_gather_single", part, new(tensor.numel()), None, parts=parts),
        Call("broadcast", (y := tensor.clone()), y, None, root=1, parts=[ParameterSlice(None, y.numel())]),
        Call("reduce", (z := tensor.clone()), z, SUM, root=1, parts=[ParameterSlice(None, z.numel())]),
    ]


def outcomes_of(
    transport, config: Config, device, per_node: int = 1, dtype=torch.float32, poison: float | None = None
) -> tuple[torch.Tensor, dict, int]:
    """All results behind each other, how many calls went plain and why, and how many were compressed."""
    n, rank = transport.world_size, transport.rank
    ranks = tuple(tuple(range(first, first + per_node)) for first in range(0, n, per_node))
    nodes = None if per_node == 1 else Nodes(ranks, rank // per_node, rank % per_node)
    ours = Group(Training(config), config, range(n), rank, nodes)
    results = []
    for request in requests_of(rank, n, dtype, poison):
        run_decided(ours, request, device, transport)
        results.append(request.output)
    total = ours.training.stats.total
    return torch.cat(results), total.bypasses, total.compressed_calls


rounds = partial(play, way="rounds", reuse=True)
RANKS = pytest.mark.parametrize(("world_size", "per_node"), [(2, 1), (4, 2)])  # and how many share a node


@RANKS
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("quantizer", [{}, {"mode": "range", "value": 0.01, "block": 0}], ids=str)
def test_every_collective(quantizer, schedule, world_size, per_node):
    config = Config(quantizer=quantizer, transport={"schedule": schedule, "min_bytes": 0}).resolved()

    def on(device):
        return rounds(world_size, lambda transport: outcomes_of(transport, config, device(), per_node))

    for (ours, *counted), (expected, *_) in zip(on(EmulatedGpu), on(Host), strict=True):
        assert torch.equal(ours, expected) and counted == [{}, 5]


@RANKS
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("reason", "quantizer", "dtype", "poison"),
    [
        ("non-finite", {}, torch.float32, float("nan")),
        ("non-finite", {"mode": "rel", "value": 0.01}, torch.float16, float("-inf")),
        ("code overflow", {"mode": "rel", "value": 1e-9}, torch.float32, None),
        ("not worth it", {"mode": "rel", "value": 3e-5}, torch.bfloat16, None),
    ],
    ids=str,
)
def test_what_can_not_be_coded_goes_plain(reason, quantizer, dtype, poison, schedule, world_size, per_node):
    """The host hears of it late: with the sizes of the first frames, or at the end of a rank that only receives."""
    config = Config(quantizer=quantizer, transport={"schedule": schedule, "min_bytes": 0}).resolved()

    def on(device):
        how = config, device(), per_node, dtype, poison
        return rounds(world_size, lambda transport: outcomes_of(transport, *how))

    for (ours, *counted), (expected, *on_host) in zip(on(EmulatedGpu), on(Host), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
        assert counted == [{reason: 5}, 0] == on_host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_as_changes(schedule, dtype):
    """Gathered with and without an older version, to the bit."""
    settings = {"roles": ["parameter"], "entropy": {"checksum": True}}
    config = Config.load(settings | {"transport": {"min_bytes": 0, "schedule": schedule}}).resolved()
    random = torch.Generator().manual_seed(0)
    versions = [0.02 * torch.randn(3, CHUNK + 17, generator=random)]
    for _ in range(2):
        versions.append(versions[-1] + 1e-4 * torch.randn(3, CHUNK + 17, generator=random))
    versions = [version.to(dtype) for version in versions]

    def body(transport):
        collectives = Group(Training(config), config, range(3), transport.rank)
        device = EmulatedGpu(transport.rank)
        weights, baseline = torch.zeros(3, CHUNK + 17, dtype=dtype), Baseline()
        for version in versions:
            weights[transport.rank] = version[transport.rank]
            parts = [ParameterSlice(None, weights.numel())]
            own = weights[transport.rank]
            request = Call("all_gather_single", own, weights, role="parameter", parts=parts, baseline=baseline)
            run_decided(collectives, request, device, transport)
            assert torch.equal(weights.view(torch.uint8), version.view(torch.uint8))
        return collectives.training.stats.total.sent_whole

    assert play(3, body, "rounds") == [{"first call": 1}] * 3
