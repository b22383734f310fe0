"""The way of every call: decided, compared, run and counted, on ranks in one process."""

import gc
import socket
import time
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from calls import call, decided, run_decided, run_planned
from ranks import play, play_communicators, same_bits, values

from ncz_plugins.core.bypass import Bypass
from ncz_plugins.core.call import Call, Pieces
from ncz_plugins.core.config import Config
from ncz_plugins.core.errors import MismatchError, PeerError, UnsupportedError
from ncz_plugins.core.group import Group
from ncz_plugins.core.planning import frames_of
from ncz_plugins.core.run import count_plain, decide, enter, run, run_plain
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.training.baseline import Baseline
from ncz_plugins.core.training.policy import ParameterSlice
from ncz_plugins.core.training.state import Training

RANKS = (0, 1)


def collectives(rank=0, ranks=RANKS, **sections) -> Group:
    config = Config.load({"transport": {"min_bytes": 0}} | sections).resolved()
    return Group(Training(config), config, ranks, rank)


def summed(tensor: torch.Tensor, *names: str, op=dist.ReduceOp.SUM) -> Call:
    parts = [ParameterSlice(name, tensor.numel() // len(names)) for name in names]
    return Call("all_reduce", tensor, tensor, op, parts=parts or [ParameterSlice(None, tensor.numel())])


def test_what_nothing_speaks_against_is_compressed():
    decision = decided(collectives(), summed(torch.zeros(4)))
    assert decision.bypass is None and decision.config.quantizer == Config().quantizer


def test_the_first_reason_to_go_plain_is_told():
    assert decided(collectives(), summed(torch.zeros(4), op=dist.ReduceOp.MAX)).bypass is Bypass.OP
    assert decided(collectives(), summed(torch.zeros(0))).bypass is Bypass.TOO_SMALL


def test_many_ranks_compress_small_tensors_only_where_plain_calls_pass_all_of_them():
    chosen, small = collectives(ranks=range(20), transport={"link_gbps": 100}), summed(torch.zeros(1 << 16))
    assert decided(chosen, small).bypass is None
    assert decided(chosen, replace(small, collective="broadcast", op=None)).bypass is Bypass.TOO_SMALL


MI = 1 << 20


@pytest.mark.parametrize(
    ("transport", "on_gpu", "frames"),
    [
        ({}, False, (MI, True)),
        ({"link_gbps": 10}, False, (2 * MI, False)),  # cores are what limits calls there, not the link
        ({}, True, (16 * MI, False)),  # each frame costs the same there
        ({"link_gbps": 10}, True, (16 * MI, False)),
        ({"frame_bytes": "4MiB"}, True, (MI, False)),
        ({"frame_bytes": "4MiB", "link_gbps": 10}, False, (MI, False)),
    ],
)
def test_how_frames_are_cut_follows_from_the_link_and_the_device(transport, on_gpu, frames):
    assert frames_of(torch.zeros(1), Config(transport=transport).resolved(), on_gpu) == frames
    if not on_gpu:
        assert frames_of(torch.zeros(1), Config(transport=transport).resolved()) == frames


def test_a_policy_decides_for_its_parameters():
    policies = [{"name": "*.bias", "action": "skip"}, {"name": "head.*", "quantizer": {"value": 0.5}}]
    chosen = collectives(policies=policies)
    assert decided(chosen, summed(torch.zeros(4), "a.bias")).bypass is Bypass.POLICY
    of_head = decided(chosen, summed(torch.zeros(4), "head.weight")).config
    assert of_head == chosen.config.model_copy(update={"quantizer": of_head.quantizer})
    assert of_head.quantizer.value == 0.5
    with pytest.raises(UnsupportedError, match="treated differently"):
        decided(chosen, summed(torch.zeros(4), "a.bias", "head.weight"))


def test_a_call_of_a_strided_tensor_works_on_a_contiguous_copy():
    tensor = torch.arange(20.0).view(4, 5).t()
    call = decided(collectives(), summed(tensor))
    assert call.input is call.output and call.input.is_contiguous() and call.input.shape == tensor.shape
    with call.pieces_in_place():
        assert torch.equal(call.input, tensor)
        call.output.add_(1)
    assert torch.equal(tensor, torch.arange(1.0, 21.0).view(4, 5).t())
    assert call.new_counters(3).copied_bytes == 2 * tensor.nbytes


def test_settings_that_a_training_has_had_are_not_kept_for_ever():
    """They may follow the loss, and be others in each of a million steps."""
    chosen, seen = collectives(), []
    for step in range(1000):
        chosen.training.config = chosen.config.model_copy(
            update={"quantizer": chosen.config.quantizer.changed(value=0.1 + step / 10_000)}
        )
        request = decided(chosen, summed(torch.zeros(4)))
        enter(chosen, request)
        assert request.config.quantizer.value == 0.1 + step / 10_000
        seen.append(weakref.ref(request.config))
    gc.collect()
    assert sum(each() is not None for each in seen) < 600


def test_error_feedback_needs_a_name():
    chosen = collectives(quantizer={"error_feedback": True})
    with pytest.raises(UnsupportedError, match="pass name="):
        decided(chosen, summed(torch.zeros(4)))
    request = summed(torch.zeros(4), "weight")
    parts = [ParameterSlice("weight", 3), ParameterSlice(None, 1)]  # of which only one is kept
    assert decided(chosen, replace(request, parts=parts)).bypass is None
    assert decided(chosen, replace(summed(torch.zeros(4)), collective="broadcast", op=None)).bypass is None
    with pytest.raises(UnsupportedError, match="pass name="):
        decided(chosen, replace(request, residual_parts=[ParameterSlice(None, 4)]))


def reduce(chosen: Group, transport, tensor: torch.Tensor) -> None:
    request = summed(tensor)
    run_decided(chosen, request, Host(), transport)


@pytest.mark.parametrize("numel", [1, 997, 65_536, 65_537])
@pytest.mark.parametrize("quantizer", [{}, {"error_feedback": True}, {"kind": "error_bound"}, {"kind": "lossless"}])
def test_two_ranks_send_each_other_a_small_tensor_as_one_frame(numel, quantizer):
    """Which changes no bit of the sum, nor of what is lost."""

    def body(transport):
        results = {}
        for schedule in ("direct", "ring"):
            chosen = collectives(transport.rank, quantizer=quantizer, transport={"min_bytes": 0, "schedule": schedule})
            for _ in range(2):
                tensor = values(transport.rank, numel)
                request = summed(tensor, "weight")
                run_decided(chosen, request, Host(), transport)
            frames = sum(chosen.training.stats.total.coders.values()) // 2
            results[schedule] = tensor, chosen.training.residuals.by_name.get("weight", tensor), frames
        return results

    first, second = play(2, body)
    whole = numel <= 65_536 and quantizer.get("kind") != "lossless"
    assert first["direct"][2] == (1 if whole else 2)
    assert same_bits([first["direct"][0], second["direct"][0], first["ring"][0], second["ring"][0]])
    for each in (first, second):
        assert same_bits([each["direct"][1], each["ring"][1]])


def test_a_call_is_compressed_and_counted():
    def body(transport):
        chosen, tensor = collectives(transport.rank), values(transport.rank, 10_000)
        reduce(chosen, transport, tensor)
        return tensor, chosen.training.stats.total

    (tensor, total), (other, _) = play(2, body)
    assert same_bits([tensor, other])
    exact = values(0, 10_000) + values(1, 10_000)
    assert 0 < (tensor - exact).abs().max() < 2
    assert (total.calls, total.compressed_calls, total.bypasses) == (1, 1, {})
    assert total.wire_bytes < total.plain_bytes == 40_000


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_compare_their_calls_and_agree_on_steps_in_one_exchange(world_size, monkeypatch):
    def body(transport):
        exchanges = []

        def counted(exchange):
            def start(*arguments, **more):
                exchanges.append(exchange.__name__)
                return exchange(*arguments, **more)

            return start

        for name in ("start_comparison", "start_max"):
            monkeypatch.setattr(transport, name, counted(getattr(transport, name)))
        config = Config.load({"transport": {"min_bytes": 0}}).resolved()
        group = Group(Training(config), config, range(world_size), transport.rank)
        reduce(group, transport, values(transport.rank, 10_000))
        assert group.training.stats.total.compressed_calls == 1
        return exchanges

    assert play(world_size, body) == [["start_comparison"]] * world_size


def exchanged(transport, rows, dtype, monkeypatch, sections) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """What this rank gets, what it must get, exchanges of short messages, and whether the call was compressed."""
    rank, told, mesh = transport.rank, [], transport._connections.mesh
    if mesh is not None:
        monkeypatch.setattr(mesh, "tell", lambda *given, tell=mesh.tell: told.append(1) or tell(*given))
    sent = [values(source, sum(of_one)).to(dtype) for source, of_one in enumerate(rows)]
    exact = torch.cat([tensor.split(of_one)[rank] for tensor, of_one in zip(sent, rows)])
    pieces = Pieces(tuple(rows[rank]), tuple(of_one[rank] for of_one in rows), 1, rank)
    chosen = collectives(rank, range(len(rows)), **sections)
    parts = [ParameterSlice(None, sum(rows[rank]))]
    request = Call("all_to_all_single", sent[rank], torch.empty_like(exact), parts=parts, pieces=pieces)
    decide(chosen, request)
    enter(chosen, request)
    (run if request.bypass is None else run_plain)(chosen, request, Host(), transport)
    return request.output, exact, len(told), chosen.training.stats.total.compressed_calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("rows", "messages"),
    [
        ([[5, 5, 5]] * 3, 1),
        ([[7, 0, 2], [0, 3, 4], [6, 0, 0]], 1),
        ([[0, 0, 0]] * 3, 1),
        ([[7, 0, 700], [0, 3, 4], [6, 0, 0]], 2),  # rank 1 has no large piece, so its own travel in the first
        ([[600, 600, 600]] * 3, 2),
    ],
)
def test_small_pieces_travel_in_the_message_that_compares_calls(rows, messages, dtype, monkeypatch):
    monkeypatch.setattr("ncz_plugins.core.call_comparison.MAX_BYTES_WITH_COMPARISON", 2000)
    sections = {"transport": {"min_bytes": 8000}}

    def body(transport):
        output, exact, *counts = exchanged(transport, rows, dtype, monkeypatch, sections)
        assert torch.equal(output, exact)
        return counts

    assert play(3, body) == [[messages, 0]] * 3


@pytest.mark.parametrize("meshed", [True, False])
@pytest.mark.parametrize(
    ("rows", "messages"),
    [([[2000, 0, 3000], [0, 2000, 2000], [2000, 2000, 0]], 1), ([[0, 0, 5000], [0, 3, 4], [6, 0, 0]], 2)],
)
def test_what_is_measured_travels_with_the_comparison_unless_a_rank_has_small_pieces(
    rows, messages, meshed, monkeypatch
):
    sections = {"quantizer": {"mode": "abs", "value": 0.01}, "transport": {"min_bytes": 6000}}

    def body(transport):
        if not meshed:  # as between more than 16 ranks
            transport.exchanges = None
        output, exact, told, compressed = exchanged(transport, rows, torch.float32, monkeypatch, sections)
        assert not exact.numel() or (output - exact).abs().max() <= 0.01
        assert compressed == 1 and (told == messages or not meshed)
        return torch.equal(output, exact)

    assert not all(play(3, body))


@pytest.mark.parametrize("elements", range(490, 502))
def test_pieces_just_below_the_most_that_may_travel_with_a_comparison_come_within_the_bound(elements, monkeypatch):
    """One rank has none that is larger, the other one keeps one that is."""
    monkeypatch.setattr("ncz_plugins.core.call_comparison.MAX_BYTES_WITH_COMPARISON", 2000)
    sections = {"quantizer": {"mode": "abs", "value": 0.01}, "transport": {"min_bytes": 8000}}

    def body(transport):
        rows = [[0, elements], [100, 3000]]
        output, exact, _, compressed = exchanged(transport, rows, torch.float32, monkeypatch, sections)
        assert compressed == 1
        return (output - exact).abs().max()

    assert max(play(2, body)) <= 0.01


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], ids=str)
@pytest.mark.parametrize("quantizer", [{"mode": "abs", "value": 0.01}, {"kind": "lossless"}])
def test_a_sum_is_multiplied_by_its_scale(quantizer, op):
    """Within the bound as well, which is that of the sum times the scale."""

    def body(transport):
        chosen, tensor = collectives(transport.rank, quantizer=quantizer), values(transport.rank, 1000)
        request = replace(summed(tensor, op=op), scale=0.25)
        run_decided(chosen, request, Host(), transport)
        assert chosen.training.stats.total.compressed_calls == 1
        return tensor

    times = 0.25 if op == dist.ReduceOp.SUM else 0.125
    exact = times * (values(0, 1000) + values(1, 1000))
    assert all((each - exact).abs().max() <= times * 0.02 + 1e-6 for each in play(2, body))


def test_a_call_that_fails_leaves_nobody_who_writes_to_its_tensors():
    """Its caller may free them at once."""

    def body(transport):
        device, written = Host(two_threads=True), []

        def schedule(transport, codec, counters):
            device.submit(lambda: (time.sleep(0.1), written.append(codec.output)))
            raise PeerError("gone")

        with pytest.raises(PeerError, match="gone"):
            run_planned(call(config=Config().resolved(), schedule=schedule), device, transport)
        assert len(written) == 1

    play(1, body)


def test_values_that_are_not_finite_go_plain_on_all_ranks_alike():
    def body(transport):
        chosen, tensor = collectives(transport.rank), values(transport.rank, 10_000)
        if transport.rank:
            tensor[7] = torch.inf
        reduce(chosen, transport, tensor)
        return tensor, chosen.training.stats.total.bypasses

    (tensor, bypasses), (other, _) = play(2, body)
    assert same_bits([tensor, other]) and tensor[7] == torch.inf
    assert bypasses == {"non-finite": 1}


@pytest.mark.parametrize("mode", ["rel", "rms"])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_values_whose_sum_overflows_go_plain_although_each_is_finite(dtype, feedback, mode):
    """Whoever scales the loss sees by the infinity which steps to leave out."""

    def body(transport):
        quantizer = {"mode": mode, "value": 0.01, "error_feedback": feedback}
        chosen, tensor = collectives(transport.rank, quantizer=quantizer), values(transport.rank, 10_000, dtype)
        tensor[7] = 0.9 * torch.finfo(dtype).max
        run_decided(chosen, summed(tensor, "weight"), Host(), transport)
        return tensor, chosen.training.stats.total

    for tensor, total in play(2, body):
        assert tensor[7] == torch.inf and tensor.isfinite().sum() == 9999
        assert total.bypasses == {"non-finite": 1} and total.bypassed_bytes == {"non-finite": tensor.nbytes}
        assert total.plain_bytes == tensor.nbytes < total.wire_bytes  # with what the ranks agreed on before


def test_the_transport_learns_from_calls_that_go_compressed_what_the_link_carries(monkeypatch):
    def body(transport):
        told = []
        monkeypatch.setattr(transport, "learn", lambda *arguments: told.append(arguments))
        chosen = collectives(transport.rank)
        reduce(chosen, transport, values(transport.rank, 10_000))
        total = chosen.training.stats.total
        reduce(chosen, transport, torch.full((10_000,), torch.nan))
        assert told == [(total.wire_bytes, total.seconds, total.wait_seconds)]

    play(2, body)


def test_a_communicator_that_takes_the_place_of_another_has_its_number():
    training = Training()

    class Open:
        error = None

        def __init__(self, ranks=RANKS):
            self.ranks = ranks
            self.number = training.free_number(ranks)
            training.number(self, self.number)

    first, second, other = Open(), Open(), Open((0, 1, 2))
    assert [first.number, second.number, other.number] == [0, 1, 0]
    first.error = MismatchError("broken, or closed")
    third = Open()
    assert third.number == 0
    del second
    assert [Open().number, third.number] == [1, 0]
    later = Open((2, 3))
    training.number(later, 2)  # as another rank has yet to forget two
    assert training.free_number((2, 3)) == 1


def test_each_communicator_of_a_training_keeps_what_its_own_calls_lose():
    """The parameters of two models may have the same names."""
    config = Config.load({"transport": {"min_bytes": 0}, "quantizer": {"error_feedback": True}}).resolved()

    def body(transport):
        training, kept = Training(config), []
        for number in range(2):
            ours = Group(training, config, RANKS, transport.rank, communicator=number)
            request = summed(values(transport.rank, 1000 + number), "weight")
            run_decided(ours, request, Host(), transport)
            kept.append({name: residual.numel() for name, residual in training.residuals.by_name.items()})
        return kept

    assert play(2, body) == [[{"weight": 1000}, {"weight": 1000, "communicator 2/weight": 1001}]] * 2


def test_a_call_that_turns_out_late_to_go_plain_leaves_what_error_feedback_keeps():
    """Frames of it have travelled by then, for nothing. What is sent plain loses nothing."""

    def body(transport):
        travel = {"min_bytes": 0, "frame_bytes": "16KiB", "schedule": "ring"}
        chosen = collectives(transport.rank, quantizer={"error_feedback": True}, transport=travel)

        def kept_after(tensor: torch.Tensor) -> torch.Tensor:
            request = summed(tensor, "weight")
            run_decided(chosen, request, Host(), transport)
            return chosen.training.residuals.by_name["weight"].clone()

        before, tensor = kept_after(values(transport.rank, 1 << 20)), values(transport.rank, 1 << 20)
        assert before.any()
        tensor[-1] = torch.inf
        assert torch.equal(kept_after(tensor), before)
        assert chosen.training.stats.total.bypasses == {"non-finite": 1}

    play(2, body)


def test_a_role_that_nobody_knows_is_none():
    request = summed(torch.zeros(4))
    request.role = "grad"
    with pytest.raises(ValueError, match="role must be one of 'gradient', .*, got 'grad'"):
        decided(collectives(), request)


def test_exact_calls_leave_the_random_numbers_of_others_as_they_are():
    """Such as those of weights that are sent as changes, or not at all in some runs."""
    chosen = collectives()

    def entered(config: Config = chosen.config, bypass: Bypass | None = None) -> Call:
        call = summed(torch.zeros(4))
        call.config, call.bypass = config, bypass
        enter(chosen, call)
        return call

    assert entered().plan.number == 1
    entered(Config.load({"quantizer": {"kind": "lossless"}}).resolved())
    assert entered(bypass=Bypass.OP).plan is None
    assert entered().plan.number == 2
    assert chosen.calls == 4


def test_a_baseline_is_forgotten_when_a_call_goes_plain():
    chosen, baseline = collectives(), Baseline()
    baseline.keep(torch.zeros(4))
    count_plain(chosen, replace(summed(torch.zeros(4)), baseline=baseline, bypass=Bypass.POLICY))
    assert baseline.nbytes == 0


def test_all_calls_that_ranks_did_not_compare_are_compared_with_the_next_one():
    """Not only the last of them, and on whatever way they went."""

    def before_next(*calls: tuple[int, Bypass | None]) -> tuple[int, int]:
        chosen = collectives()

        def entered(numel: int, bypass: Bypass | None) -> Call:
            call = decided(chosen, summed(torch.zeros(numel)))
            call.config, call.bypass = chosen.config, bypass
            enter(chosen, call)
            return call

        for numel, bypass in calls:
            chosen.note_uncompared(entered(numel, bypass).described)
        described = entered(4, Bypass.TOO_SMALL).described
        return described["call number"], described["calls on GPUs before it"]

    plain = Bypass.OP
    histories = [(4, plain), (5, plain)], [(6, plain), (5, plain)], [(4, plain), (6, plain)], [(4, None), (5, plain)]
    assert len({before_next(*calls)[1] for calls in histories} | {before_next()[1]}) == 5
    assert before_next(*histories[0]) == before_next(*histories[0])
    assert [before_next()[0], before_next((4, plain))[0]] == [1, 2]


def test_ranks_that_make_different_calls_are_told_on_all_of_them():
    def body(transport):
        chosen = collectives(transport.rank)
        with pytest.raises(MismatchError, match="elements"):
            reduce(chosen, transport, values(transport.rank, 1000 + transport.rank))

    play(2, body)


@pytest.mark.parametrize("world_size", [8, 16, 32])
def test_many_ranks(world_size):
    """All of them get the same bits, within the bound."""

    def body(transport):
        config = Config.load({"transport": {"min_bytes": 0}, "quantizer": {"mode": "abs", "value": 0.01}}).resolved()
        chosen = Group(Training(config), config, range(world_size), transport.rank)
        tensor = values(transport.rank, 5000)
        reduce(chosen, transport, tensor)
        assert chosen.training.stats.total.compressed_calls == 1
        return tensor

    results = play(world_size, body)
    exact = sum(values(rank, 5000).double() for rank in range(world_size))
    assert same_bits(results)
    assert (results[0] - exact).abs().max() <= 0.01 * world_size + 1e-4


@pytest.mark.parametrize("schedule", ["direct", "ring"])
def test_a_broadcast_does_not_wait_for_ranks_that_wait_for_its_frames(schedule):
    """Those of this size don't fit into what a socket buffers: they leave as the sender goes on."""
    count = 3 << 20
    transport = {"min_bytes": 0, "frame_bytes": "1MiB", "link_gbps": 1, "schedule": schedule, "timeout_seconds": 20}

    def body(communicator):
        for peer in communicator.transport._connections.frames._connections:
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        x = values(communicator.transport.rank, count)
        communicator.broadcast(x, 1)
        return x

    config = {"transport": transport, "roles": ["gradient"]}
    assert same_bits(play_communicators(3, config, body))


def test_ranks_compare_the_settings_that_a_policy_gives_a_call():
    def described(name: str) -> int:
        chosen = collectives(policies=[{"name": "head.*", "quantizer": {"value": 0.5}}])
        call = decided(chosen, summed(torch.zeros(1 << 18), name))
        enter(chosen, call)
        return call.described["configuration"]

    assert described("head.weight") == described("head.bias") != described("body.weight")
