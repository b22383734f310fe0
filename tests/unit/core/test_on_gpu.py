"""What begins calls of a GPU, with the streams of a machine that has none: everything queued runs at once.

On a card: tests/distributed/test_devices.py and test_fixed_rate.py.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import play_communicators, same_bits, values

from ncz_plugins import kernels
from ncz_plugins.core import on_gpu
from ncz_plugins.core.call import Call, Joined
from ncz_plugins.core.errors import MismatchError, UnsupportedError
from ncz_plugins.core.on_gpu import GpuCalls
from ncz_plugins.core.training.policy import ParameterSlice

HOST = torch.device("cpu")
SIZES = {"transport": {"min_bytes": 4096, "timeout_seconds": 30}}
AT_BOUND = SIZES | {"quantizer": {"kind": "error_bound", "mode": "abs", "value": 0.01}}
FIXED_RATE = SIZES | {"quantizer": {"kind": "error_bound", "mode": "bits", "value": 8}}


class Stream:
    """A stream whose work is always done."""

    def record_event(self):
        return SimpleNamespace(query=lambda: True)

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """torch.cuda as these calls use it. `capturing` says whether a CUDA graph records them."""
    card, stream = SimpleNamespace(capturing=False), Stream()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: card.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(dist.ProcessGroupGloo, "_get_backend", lambda group, _: group, raising=False)
    monkeypatch.setattr(kernels, "cuda_backend", kernels.cpu_backend)
    return card


def calls_of(communicator) -> GpuCalls:
    return GpuCalls(communicator._group.for_gpus(), HOST, communicator._queue, communicator.group, None)


def begun(
    calls: GpuCalls, tensor: torch.Tensor, async_op: bool = False, joined: Sequence[Joined] = (), op=dist.ReduceOp.SUM
) -> Call:
    parts = [ParameterSlice(None, tensor.numel())]
    call = Call("all_reduce", tensor, tensor, op, parts=parts, joined=joined)
    calls.decide(call)
    handle = calls.begin(call, async_op)
    if handle is not None:
        handle.giving(tensor).wait()
    return call


@pytest.mark.parametrize("config", [AT_BOUND, FIXED_RATE], ids=["at a bound", "at a fixed rate"])
@pytest.mark.parametrize("async_op", [False, True])
def test_plain_and_compressed_calls_in_turns(config, async_op):
    def body(communicator):
        calls, results = calls_of(communicator), []
        for numel in (100, 10_000, 101, 102, 10_001):
            tensor = values(communicator.rank, numel)
            begun(calls, tensor, async_op)
            results.append(tensor)
        for numel in (100, 10_000):
            strided = torch.empty(2 * numel)[::2].copy_(values(communicator.rank, numel))
            begun(calls, strided, async_op)
            results.append(strided.contiguous())
        pieces = list(values(communicator.rank, 90).split(30))
        begun(calls, (joined := Joined(pieces)).whole, async_op, [joined])
        total = communicator.stats.total
        assert (total.calls, total.compressed_calls, total.bypasses) == (8, 3, {"too small": 5})
        assert total.copied_bytes == 2 * 4 * (100 + 10_000 + 90)
        return [*results, torch.cat(pieces)]

    by_rank = play_communicators(2, config, body)
    for ours, theirs in zip(*by_rank):
        assert same_bits([ours, theirs])
        exact = values(0, ours.numel()) + values(1, ours.numel())
        assert (ours - exact).abs().max() < (0.1 if ours.numel() > 1000 else 1e-6)


@pytest.mark.parametrize("role", [None, "activation"])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("root", [0, 1])
def test_tensors_of_lists_are_there_once_a_call_was_waited_for(role, async_op, root):
    """At a fixed rate or plain, in turns. A rank that is not the root gets nothing."""
    sizes = [10_000 + 700 * each for each in range(3)]

    def body(communicator):
        calls, rank, nothing = calls_of(communicator), communicator.rank, torch.empty(0)
        gathered = [torch.empty(size) for size in sizes] if rank == root else [nothing] * 3
        for _ in range(2):
            mine = values(rank, sizes[rank])
            call = communicator._exchange(
                "gather", [mine if at == root else nothing for at in range(3)], gathered, role, None, root
            )
            calls.decide(call)
            handle = calls.begin(call, async_op)
            if async_op:
                outputs = gathered if rank == root else []
                assert handle.giving(*outputs).get_future().wait() == outputs
        total = communicator.stats.total
        assert (total.compressed_calls, total.bypasses) == ((2, {}) if role is None else (0, {"role not enabled": 2}))
        return gathered

    gathered = play_communicators(3, FIXED_RATE, body)[root]
    for source, found in enumerate(gathered):
        exact = values(source, sizes[source])
        assert (found - exact).abs().max() < 0.05
        assert torch.equal(found, exact) == (role is not None or source == root)


def test_no_plain_call_begins_after_one_before_it_has_failed():
    """A rank that has heard of the failure makes no such call, and NCCL would wait for it without a limit."""

    def body(communicator):
        calls = calls_of(communicator)
        compressed, plain = (
            Call("all_reduce", *2 * (tensor,), dist.ReduceOp.SUM, parts=[ParameterSlice(None, tensor.numel())])
            for tensor in (torch.zeros(10_000 + communicator.rank), torch.zeros(4))
        )
        calls.decide(compressed)
        calls.decide(plain)
        handle = calls.begin(compressed, async_op=True)
        with pytest.raises(MismatchError, match="elements"):
            calls.begin(plain, async_op=False)
        with pytest.raises(MismatchError, match="elements"):
            handle.wait()
        assert communicator.stats.total.bypasses == {}

    play_communicators(2, AT_BOUND, body)


def test_a_plain_call_that_differs_is_told_with_the_next_compared_one():
    def body(communicator):
        calls = calls_of(communicator)
        call = Call("all_reduce", *2 * (torch.zeros(4),), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][communicator.rank])
        calls.decide(call)
        calls.begin(call, async_op=False)
        with pytest.raises(MismatchError, match="calls on GPUs before it differs"):
            begun(calls, torch.zeros(10_000))

    play_communicators(2, AT_BOUND, body)


def test_a_call_at_a_fixed_rate_that_differs_is_told_with_the_next_compared_one():
    def body(communicator):
        ops = dist.ReduceOp.SUM, dist.ReduceOp.AVG
        begun(calls_of(communicator), values(communicator.rank, 10_000), op=ops[communicator.rank])
        with pytest.raises(MismatchError, match="calls on GPUs before it differs"):
            communicator.all_reduce(torch.zeros(10_000))

    play_communicators(2, FIXED_RATE, body)


@pytest.mark.parametrize("capturing", [False, True])
def test_a_sum_is_verified_unless_a_graph_captures_it(card, capturing):
    """The host would have to look at it."""

    def body(communicator):
        call = begun(calls_of(communicator), values(communicator.rank, 10_000), async_op=True)
        assert (call.plan.verify_as is None) == capturing

    card.capturing = capturing
    play_communicators(2, FIXED_RATE | {"guard": {"every": 1}}, body)


def test_tensors_on_gpus_are_cut_as_gpus_want_it():
    def body(communicator):
        call = begun(calls_of(communicator), torch.zeros(8 << 20))
        assert call.plan.layout.frames == 1  # where a CPU has one or more for each rank

    play_communicators(2, AT_BOUND, body)


@pytest.mark.parametrize("settings", [AT_BOUND, SIZES | {"quantizer": {"kind": "lossless"}}], ids=["bound", "lossless"])
def test_a_coder_of_cpus_alone_is_refused_before_anything_is_sent(settings):
    """At a fixed rate nothing is coded."""

    def body(communicator):
        calls, tensor = calls_of(communicator), values(communicator.rank, 10_000)
        is_coded = communicator.config.quantizer.bits is None
        with (
            pytest.raises(UnsupportedError, match="entropy.coder: rans .* set auto or huffman")
            if is_coded
            else nullcontext()
        ):
            begun(calls, tensor)
        assert communicator.stats.total.calls == (not is_coded)

    for its_settings in (settings, FIXED_RATE):
        play_communicators(2, its_settings | {"entropy": {"coder": "rans"}}, body)


def test_a_graph_captures_only_what_it_can_repeat(card):
    """What is refused is refused before any call of a batch begins."""

    def body(communicator):
        calls, tensor = calls_of(communicator), values(communicator.rank, 10_000)
        call = Call("all_reduce", tensor, tensor, parts=[ParameterSlice(None, tensor.numel())])
        with pytest.raises(UnsupportedError, match="can't be captured"):
            calls.decide(call)

    card.capturing = True
    play_communicators(2, AT_BOUND, body)


def test_a_graph_captures_calls_at_a_fixed_rate_and_plain_ones(card):
    def body(communicator):
        calls, tensors = calls_of(communicator), [values(communicator.rank, numel) for numel in (100, 10_000)]
        for tensor in tensors:
            begun(calls, tensor, async_op=True)
        return torch.cat(tensors)

    card.capturing = True
    assert same_bits(play_communicators(2, FIXED_RATE, body))


class Counted:
    """A process group, and how many gathers and exchanges it has begun."""

    def __init__(self, group: dist.ProcessGroup):
        self._group, self.begun = group, 0

    def __getattr__(self, name):
        self.begun += name in ("_allgather_base", "alltoall_base")
        return getattr(self._group, name)


@pytest.mark.parametrize("world_size", [2, 3])
def test_large_calls_at_a_fixed_rate_go_over_several_groups_unless_a_graph_captures_them(world_size, card, monkeypatch):
    """With the same bits, and the same bytes sent."""
    monkeypatch.setattr(on_gpu, "nccl_class_of", type)

    def body(communicator):
        rank, calls, found = communicator.rank, calls_of(communicator), []
        groups = [
            Counted(dist.ProcessGroupGloo(dist.PrefixStore(f"{i}", store), rank, world_size, timedelta(seconds=30)))
            for i in range(2)
        ]
        communicator._queue.routes.further_groups = lambda device: groups
        for large in (False, True):
            tensor = values(rank, (world_size << 20) + 4099 if large else 4099)
            begun(calls, tensor, async_op=True)
            found.append(tensor)
            operations = world_size - 1  # one gather of two ranks, else an exchange and a gather
            used = large and not card.capturing
            assert [group.begun for group in groups] == [used * operations] * 2
        return torch.cat(found), communicator.stats.total.wire_bytes

    outcomes = []
    for card.capturing in (False, True):
        store = dist.HashStore()
        outcomes += play_communicators(world_size, FIXED_RATE, body)
    assert same_bits([tensor for tensor, _ in outcomes])
    assert len({wire_bytes for _, wire_bytes in outcomes}) == 1
