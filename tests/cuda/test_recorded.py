"""Calls of two ranks with GPUs whose launches are replayed: the bits of those that are not, on the emulator."""

import ctypes
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from calls import run_decided
from ranks import play
from test_cuda_schedules import ABSOLUTE, FIXED, SUM, EmulatedGpu, normal
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ncz_plugins import kernels
from ncz_plugins.core.call import Call
from ncz_plugins.core.codec import gpu_codec
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import FrameError, PeerError
from ncz_plugins.core.group import Group
from ncz_plugins.core.runtime.device import Gpu, Host
from ncz_plugins.core.runtime.recorded import RecordedCalls
from ncz_plugins.core.runtime.statistics import Counters
from ncz_plugins.core.schedules import padded
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.training.state import Training
from ncz_plugins.core.transport.striped import StripedCollectives
from ncz_plugins.kernels.cuda.arguments import NoiseArgument, noise_argument
from ncz_plugins.kernels.cuda.recorded import Arena, Recorder
from ncz_plugins.kernels.format import CHUNK, Noise

AT_RANDOM = {"kind": "stochastic", "mode": "rms", "value": 0.5}
SETTINGS = [
    {"quantizer": ABSOLUTE, "entropy": FIXED},
    {"quantizer": AT_RANDOM, "entropy": {"coder": "auto"}},
    {"quantizer": AT_RANDOM, "entropy": {"coder": "huffman", "checksum": True}},
]
LEARNING = 4  # calls until lengths are expected
NOT_REPLAYED = {"new addresses": 1, "recorded": 1}  # of calls on one tensor


class Rank:
    """Calls of one rank, one after another on the same device."""

    def __init__(self, transport, settings: dict, device=EmulatedGpu):
        self.config = Config(**settings | {"transport": {"min_bytes": 0, "frame_bytes": 4 * CHUNK}}).resolved()
        self.group = Group(Training(self.config), self.config, range(2), transport.rank)
        self.transport, self.device = transport, device()

    def call(self, tensor: torch.Tensor, output: torch.Tensor | None = None, collective="all_reduce"):
        """Returns the counters."""
        parts = [ParameterSlice(None, tensor.numel())]
        call = Call(collective, tensor, tensor if output is None else output, SUM, parts=parts)
        run_decided(self.group, call, self.device, self.transport)
        return call.counters

    @property
    def total(self):
        return self.group.training.stats.total


def both(body) -> list[tuple]:
    """Results of `body` on each rank, with an emulated GPU and on the CPU, which must have the same bits.

    Args:
        body: takes the transport and the device; returns tensors and whatever else it finds.
    """
    on_gpu, on_cpu = (play(2, partial(body, device=device), "rounds") for device in (EmulatedGpu, Host))
    for (ours, *_), (expected, *_) in zip(on_gpu, on_cpu, strict=True):
        assert len(ours) == len(expected)
        for result, right in zip(ours, expected):
            assert torch.equal(result.view(torch.int32), right.view(torch.int32))
    return [found for _, *found in on_gpu]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("together", [4 * CHUNK, CHUNK])  # elements that are coded together
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_replayed_calls_have_the_bits_of_others(settings, together, dtype, monkeypatch):
    """With other values and other random numbers each time, and at the same cost of the GPU and of bytes."""
    for module in (padded, gpu_codec):
        monkeypatch.setattr(module, "BATCH_ELEMENTS", together)

    def body(transport, device):
        rank, tensor, results, costs = Rank(transport, settings, device), normal(0).to(dtype), [], []
        for call in range(LEARNING + 10):
            tensor.copy_(normal(100 * transport.rank + call))
            costs.append([-each for each in cost_of(rank.device)])
            sent = rank.call(tensor).wire_bytes
            costs[-1] = [sent, *map(sum, zip(costs[-1], cost_of(rank.device)))]
            results.append(tensor.clone())
        return results, costs[LEARNING:], rank.total

    for costs, total in both(body):
        assert total.compressed_calls == LEARNING + 10
        assert total.replayed_calls == 8 and total.not_replayed == NOT_REPLAYED
        assert all(cost == costs[0] for cost in costs)


def cost_of(device) -> tuple[int, int, int]:
    """Launches, waits, and bytes that the host saw."""
    return (device.launched, device.waits, device.seen_bytes) if device.in_batches else (0, 0, 0)


def test_a_reduce_scatter_is_replayed():
    def body(transport, device):
        rank, tensor, results = Rank(transport, SETTINGS[1], device), torch.empty_like(normal(0)), []
        part = tensor.new_empty(tensor.numel() // 2)
        for call in range(LEARNING + 4):
            tensor.copy_(normal(100 * transport.rank + call))
            rank.call(tensor, part, "reduce_scatter_single")
            results.append(part.clone())
        return results, rank.total

    for [total] in both(body):
        assert total.replayed_calls == 2 and total.not_replayed == NOT_REPLAYED


def test_buckets_in_turn_share_working_memory():
    """Of different lengths, so that what one call leaves in memory is not what the next one needs there."""

    def body(transport, device):
        rank, results = Rank(transport, SETTINGS[1], device), []
        buckets = [normal(0)[:length].clone() for length in (3 * CHUNK + 5, 700, 4 * CHUNK - 60)]
        for call in range(LEARNING + 6):
            for number, bucket in enumerate(buckets):
                bucket.copy_(normal(100 * transport.rank + 10 * call + number)[: bucket.numel()])
                rank.call(bucket)
                results.append(bucket.clone())
        return results, rank.total

    for [total] in both(body):
        assert total.replayed_calls == 3 * 4
        assert total.not_replayed == {reason: 3 * count for reason, count in NOT_REPLAYED.items()}


def test_tensors_that_change_their_addresses_are_counted():
    def body(transport, device):
        rank, results = Rank(transport, SETTINGS[0], device), []
        for call in range(LEARNING + 5):
            results.append(normal(100 * transport.rank + call))  # kept, so that no address comes again
            rank.call(results[-1])
        return results, rank.total

    for [total] in both(body):
        assert total.replayed_calls == 0 and total.not_replayed == {"new addresses": 5}


def test_other_settings_are_recorded_once_they_came_twice():
    calls = RecordedCalls(EmulatedGpu().backend, torch.device("cpu"))

    def call(given: str) -> str | None:
        """Returns what was done at which `given`, or why the call was not replayed."""
        counters = Counters()
        found = calls.of("key", given, counters)
        result = found.queue("stage", lambda: f"launched for {given}")
        found.finish()
        assert counters.replayed_calls == (not counters.not_replayed)
        return next(iter(counters.not_replayed), result)

    assert [call(given) for given in "aaa"] == ["new addresses", "recorded", "launched for a"]
    assert [call(given) for given in "bab"] == ["other lengths", "launched for a", "other lengths"]
    assert [call(given) for given in "bba"] == ["recorded", "launched for b", "other lengths"]


def test_nothing_keeps_the_tensors_of_the_caller():
    def body(transport):
        rank, tensor = Rank(transport, SETTINGS[1]), normal(transport.rank)
        for _ in range(LEARNING + 4):
            tensor.copy_(normal(transport.rank))
            rank.call(tensor)
        assert rank.total.replayed_calls == 2
        memory = StorageWeakRef(tensor.untyped_storage())
        del tensor
        return memory.expired()

    assert play(2, body, "rounds") == [True, True]


@pytest.mark.parametrize("call_of", [LEARNING + 1, LEARNING + 3], ids=["recorded", "replayed"])
@pytest.mark.parametrize("longer_on", [[0], [1], [0, 1]], ids=str)
def test_frames_that_are_longer_than_expected(longer_on, call_of):
    """They travel once more, in place. Once four calls were alike again, what was recorded before is replayed."""

    def body(transport, device):
        rank, tensor, results, sent = Rank(transport, SETTINGS[0], device), torch.empty_like(normal(0)), [], []
        for call in range(LEARNING + 12):
            times = 1000 if call == call_of and transport.rank in longer_on else 1
            tensor.copy_(normal(100 * transport.rank) * times)
            sent.append(rank.call(tensor).wire_bytes)
            results.append(tensor.clone())
        return results, sent, rank.total

    for sent, total in both(body):
        assert sent[call_of] > max(sent[:call_of])
        assert total.replayed_calls == 6 and total.not_replayed == NOT_REPLAYED


def test_what_can_not_be_coded_goes_plain():
    """When it is recorded, and when it is replayed. The calls after it are replayed."""

    def body(transport, device):
        rank, tensor, results = Rank(transport, SETTINGS[0], device), torch.empty_like(normal(0)), []
        for call in range(LEARNING + 8):
            tensor.copy_(normal(100 * transport.rank + call))
            if call in (LEARNING + 1, LEARNING + 4):
                tensor[7] = torch.nan
            rank.call(tensor)
            results.append(tensor.nan_to_num(1234))
        return results, rank.total

    for [total] in both(body):
        assert total.bypasses == {"non-finite": 2}
        assert total.replayed_calls == 5 and total.not_replayed == {"new addresses": 1, "recorded": 2}


def replaying(transport, settings: dict = SETTINGS[0]) -> tuple[Rank, torch.Tensor]:
    """A rank whose next call on this tensor is replayed."""
    rank, tensor = Rank(transport, settings), normal(transport.rank)
    for _ in range(LEARNING + 2):
        tensor.copy_(normal(transport.rank))
        rank.call(tensor)
    tensor.copy_(normal(transport.rank))
    return rank, tensor


def failing(monkeypatch, gather, error: type, match: str, settings: dict = SETTINGS[0]) -> None:
    """Replay a call with another `StripedCollectives.all_gather_single`, then make the same call again."""
    right, together = StripedCollectives.all_gather_single, Barrier(2)

    def body(transport):
        rank, tensor = replaying(transport, settings)
        together.wait()
        monkeypatch.setattr(StripedCollectives, "all_gather_single", gather)
        together.wait()
        with pytest.raises(error, match=match):
            rank.call(tensor)
        together.wait()
        monkeypatch.setattr(StripedCollectives, "all_gather_single", right)
        together.wait()
        rank.call(tensor)
        assert rank.total.not_replayed == {"new addresses": 2, "recorded": 1}  # nothing was kept

    play(2, body, "rounds")


def test_damage_is_an_error_in_a_call_that_is_replayed(monkeypatch):
    right = StripedCollectives.all_gather_single

    def damaging(self, output, input):
        if input.numel() > 512:  # of frames, and not of scales
            input[100] ^= 0x55
        return right(self, output, input)

    failing(monkeypatch, damaging, FrameError, "a frame is damaged", SETTINGS[2])


def test_a_peer_that_is_gone_is_told_in_a_call_that_is_replayed(monkeypatch):
    right = StripedCollectives.all_gather_single

    def fail(*_):
        raise RuntimeError("Connection closed by peer")

    def dying(self, output, input):
        return right(self, output, input) if input.numel() <= 512 else SimpleNamespace(wait=fail)

    failing(monkeypatch, dying, PeerError, "exchanging frames failed: Connection closed by peer")


def test_nothing_but_launches_is_queued_while_they_are_recorded(monkeypatch):
    """Anything else would be missing in a replay. An arena makes its zeros in new memory, and when a call begins."""
    record, seen = Recorder.recording, set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, arguments=(), options=None):
            seen.add(op.overloadpacket.__name__)
            return op(*arguments, **options or {})

    @contextmanager
    def watched(self, arena):
        with record(self, arena) as recording, Watch():
            yield recording

    monkeypatch.setattr(Recorder, "recording", watched)
    for settings in SETTINGS:
        play(2, partial(replaying, settings=settings), "rounds")
    assert "zeros" in seen
    assert seen <= {"zeros", "empty", "view", "slice", "select", "split", "unbind", "detach"}


def test_the_launcher_of_a_card_replays_the_arguments_with_other_random_numbers(monkeypatch):
    """With a driver that only notes what it is told, as there may be no card."""
    nvrtc = pytest.importorskip("ncz_plugins.kernels.cuda.nvrtc", reason="needs CuPy", exc_type=ImportError)
    launched = []

    def launch_kernel(function, *how):
        pointers = (ctypes.c_void_p * 3).from_address(how[-2])
        sizes = 4, ctypes.sizeof(NoiseArgument), 8
        launched.append((function, *how[:-2], *(ctypes.string_at(at, size) for at, size in zip(pointers, sizes))))

    monkeypatch.setattr(nvrtc.driver, "launchKernel", launch_kernel)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    launcher, tensor = nvrtc.CupyLauncher(), normal(0)
    device, first, second = tensor.get_device(), *(noise_argument(Noise(3, call, 9)) for call in (1, 2))
    launcher._functions["ncz_kernel", torch.float32, device] = 7
    replay = launcher.prepared("ncz_kernel", torch.float32, 11, 128, np.int32(4), first, tensor)
    for noise in (first, second):
        replay(bytes(noise))
    address = tensor.data_ptr().to_bytes(8, "little")
    grid_and_block = (11, 1, 1, 128, 1, 1, 0, 5)
    assert launched == [(7, *grid_and_block, b"\4\0\0\0", bytes(noise), address) for noise in (first, second)]


def test_the_memory_of_an_arena_is_used_again():
    arena = Arena(torch.device("cpu"))

    def taken() -> list[int]:
        arena.restart()
        return [arena.empty(nbytes).data_ptr() for nbytes in (5, 3 << 20, 1000, 9 << 20)]

    first = taken()
    assert len(set(first)) == 4 and taken() == first and arena.empty(3).data_ptr() not in first


def test_the_zeros_of_an_arena_are_zeros_in_each_call():
    arena, addresses = Arena(torch.device("cpu")), set()
    for _ in range(3):
        arena.restart()
        for zeros in map(arena.zeros, (8, 1 << 20, 700)):
            assert not zeros.any()
            addresses.add(zeros.fill_(7).data_ptr())
    assert len(addresses) == 3


def test_recording_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("NCZ_REPLAY", "0")
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    monkeypatch.setattr(kernels, "cuda_backend", lambda: EmulatedGpu().backend)
    given = torch.device("cpu"), timedelta(1), lambda: None
    assert Gpu(*given).recorded is None
    monkeypatch.delenv("NCZ_REPLAY")
    assert Gpu(*given).recorded is not None
