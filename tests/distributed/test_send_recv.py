"""send, recv, isend, irecv and batches of them, on real ranks."""

import copy
import gc
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from on_rank import attempt, be_silent, leave_alone, others_have_ended, rank, values, world_size
from scenarios import ranks, report, run_ranks

from ncz_plugins import Communicator, MismatchError, NczError, PeerError, Training, UnsupportedError
from ncz_plugins.core import call_queue

BOUND = 0.01
ABS = {"mode": "abs", "value": BOUND}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALF_ULP = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
PRIME = 100_003
NEXT, BEFORE = (rank + 1) % world_size, (rank - 1) % world_size


def opened(group, **settings) -> Communicator:
    """A communicator that compresses messages of any size."""
    settings = {"quantizer": ABS, "transport": {"min_bytes": 0}} | settings
    return Communicator(settings, group)


def around(communicator, tensor, receives_first=True, **options) -> torch.Tensor:
    """What the rank before this one sends, while this one sends `tensor` to the next."""
    received = torch.full_like(tensor, 7)
    handles = []
    for receives in (receives_first, not receives_first):
        if receives:
            handles.append(communicator.irecv(received, BEFORE, **options))
        else:
            handles.append(communicator.isend(tensor, NEXT, **options))
    for handle in handles:
        handle.wait()
    return received


def is_within_bound(received, sent) -> bool:
    slack = HALF_ULP[sent.dtype] * sent.abs().max().item() if sent.numel() else 0
    return not sent.numel() or (received.double() - sent.double()).abs().max() <= BOUND + slack


# ------------------------------------------------------------------ what arrives


@ranks(2, 3, 4)
@pytest.mark.parametrize("receives_first", [True, False])
def test_a_ring_of_messages_arrives_within_one_bound(group, receives_first):
    for frame_bytes in ("16KiB", "1MiB"):
        hierarchy = 2 if world_size == 4 else "off"  # messages pass nodes by
        with opened(
            group, transport={"min_bytes": 0, "frame_bytes": frame_bytes, "hierarchy": hierarchy}
        ) as communicator:
            for dtype in DTYPES:
                for numel in (0, 1, PRIME):
                    sent, expected = values(rank, numel, dtype), values(BEFORE, numel, dtype)
                    received = around(communicator, sent, receives_first)
                    assert is_within_bound(received, expected), (dtype, numel)
                    assert torch.equal(sent, values(rank, numel, dtype))  # the sender's stays as it is
                    assert not torch.equal(received, expected) or numel < 2
            total = communicator.stats.total
            assert total.calls == 2 * 3 * len(DTYPES)  # sends and receives
            assert total.plain_bytes == (PRIME + 1) * sum(dtype.itemsize for dtype in DTYPES)
            assert total.compressed_calls == total.calls - total.bypasses["too small"]  # an empty one has no frames


@ranks(3)
def test_integers_and_bool_keep_every_bit(group):
    with opened(group) as communicator:
        for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool):
            for numel in (0, 1, PRIME):
                sent, expected = (values(of, numel).mul(50).to(dtype) for of in (rank, BEFORE))
                assert torch.equal(around(communicator, sent), expected)
        total = communicator.stats.total
        assert total.bypasses == {"dtype": total.calls}
        assert total.plain_bytes == (PRIME + 1) * (8 + 4 + 1 + 1 + 1)


@ranks(2)
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
    expected = values(BEFORE, PRIME)
    with opened(group, quantizer=quantizer) as communicator:
        received = around(communicator, values(rank, PRIME))
        assert communicator.stats.total.compressed_calls == 2
    assert torch.equal(received, expected) == (quantizer.get("kind") == "lossless")
    largest = {"rms": expected.square().mean().sqrt() * 3, "range": 2 * expected.abs().max()}
    for block, its in zip(expected.split(256), received.split(256)):
        scale = largest.get(quantizer.get("mode"), block.abs().max())
        assert (its - block).abs().max() <= 1.001 * quantizer.get("value", 0) * scale


@ranks(2)
def test_a_fixed_rate(group):
    with opened(group, quantizer={"mode": "bits", "value": 8}) as communicator:
        received, expected = around(communicator, values(rank, PRIME)), values(BEFORE, PRIME)
        total = communicator.stats.total
        assert total.compressed_calls == 2 and total.ratio > 3
        for block, its in zip(expected.split(256), received.split(256)):
            assert 0 < (its - block).abs().max() <= block.abs().max() / 60


@ranks(2)
def test_the_two_directions_round_by_other_random_numbers(group):
    with opened(group, quantizer={"kind": "stochastic", "mode": "abs", "value": 1.0, "block": 0}) as communicator:
        same = values(0, PRIME)
        lost = around(communicator, same) - same
        both = [torch.empty_like(lost) for _ in range(world_size)]
        dist.all_gather(both, lost, group)
        assert (both[0] == both[1]).float().mean() < 0.9


@ranks(2)
def test_nan_and_infinity_arrive_where_they_were(group):
    def with_nan(source):
        tensor = values(source, PRIME)
        tensor[5], tensor[77] = float("nan"), float("inf")
        return tensor

    with opened(group) as communicator:
        received, expected = around(communicator, with_nan(rank)), with_nan(BEFORE)
        assert torch.equal(received.nan_to_num(9.0, 8.0), expected.nan_to_num(9.0, 8.0))  # with every bit
        assert is_within_bound(around(communicator, values(rank, PRIME)), values(BEFORE, PRIME))


@ranks(2)
def test_shapes_and_autograd_of_a_tensor_do_not_matter(group):
    with opened(group) as communicator:
        for shape in ((), (3, 5, 7)):
            tensor = torch.full(shape, float(rank), requires_grad=True)
            assert is_within_bound(around(communicator, tensor.detach()), torch.full(shape, float(BEFORE)))
            received = torch.zeros(shape, requires_grad=True)
            sent = (tensor * 2).tanh()  # whose backward pass needs it unchanged
            handles = [communicator.isend(sent, NEXT), communicator.irecv(received, BEFORE)]
            assert all(handle.wait() for handle in handles)
            sent.sum().backward()
            assert is_within_bound(received.detach(), torch.full(shape, 2.0 * BEFORE).tanh())
            with torch.inference_mode():
                here = torch.full(shape, 3.0 + rank)
                assert is_within_bound(around(communicator, here), torch.full(shape, 3.0 + BEFORE))


# ------------------------------------------------------------------ order


@ranks(3)
def test_receives_are_waited_for_in_any_order_and_sources_do_not_wait_for_each_other(group):
    with opened(group) as communicator:
        if rank == 0:
            received = {source: [torch.empty(1000) for _ in range(20)] for source in (1, 2)}
            handles = [
                communicator.irecv(tensor, source, tag)
                for source in (1, 2)
                for tag, tensor in enumerate(received[source])
            ]
            for handle in reversed(handles):
                handle.wait()
            for source in (1, 2):
                for number, tensor in enumerate(received[source]):
                    assert is_within_bound(tensor, values(source, 1000, seed=number))
        else:
            if rank == 1:  # whose messages rank 0 asked for first
                communicator.recv(torch.empty(1), 2)
            handles = [communicator.isend(values(rank, 1000, seed=number), 0, number) for number in range(20)]
            for handle in handles:
                handle.wait()
            if rank == 2:
                communicator.send(torch.ones(1), 1)


@ranks(2)
def test_many_messages_arrive_in_the_order_in_which_they_were_sent(group):
    sizes = [1 + 37 * number % 5000 for number in range(300)]
    with opened(group) as communicator:
        if rank == 0:
            handles = [communicator.isend(values(0, numel, seed=at), 1) for at, numel in enumerate(sizes)]
            for handle in handles:
                handle.wait()
        else:
            for at, numel in enumerate(sizes):
                received = torch.empty(numel)
                assert communicator.recv(received, 0) == 0
                assert is_within_bound(received, values(0, numel, seed=at))


@ranks(2)
def test_batches(group):
    with opened(group) as communicator:
        sent, received = values(rank, PRIME), torch.empty(PRIME)
        peer = 1 - rank
        operations = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
        for each in (operations, operations[::-1]):  # it's all the same in which order
            received.zero_()
            handles = communicator.batch_isend_irecv(each)
            assert [handle.wait() for handle in handles] == [True, True]
            assert is_within_bound(received, values(peer, PRIME))
        outputs = [handle.get_future().wait() for handle in handles]
        assert outputs[0][0] is received and outputs[1][0] is sent
        assert communicator.batch_isend_irecv([]) == []


@ranks(3)
def test_a_pipeline_of_three_stages(group):
    """Each stage adds one. Activations go forward and gradients back, one forward and one backward in turns."""
    micro_batches, shape = 8, (4, 257)
    policy = {"role": "activation", "quantizer": ABS}
    with opened(group, roles=["activation"], policies=[policy]) as communicator:
        handles, outputs = [], []
        backward = 0
        for number in range(micro_batches + world_size - 1 - rank):
            if number < micro_batches:
                tensor = torch.zeros(shape) + number
                if rank:
                    communicator.recv(tensor, rank - 1, role="activation")
                tensor += 1
                outputs.append(tensor)
                if rank < 2:
                    handles.append(communicator.isend(tensor, rank + 1, role="activation"))
            if number >= world_size - 1 - rank:  # the pipeline is full
                gradient = -outputs[backward].clone()
                if rank < 2:
                    communicator.recv(gradient, rank + 1, role="activation")
                assert (gradient + backward + 3).abs().max() <= 5 * BOUND
                if rank:
                    handles.append(communicator.isend(gradient, rank - 1, role="activation"))
                backward += 1
        assert backward == micro_batches
        for number, output in enumerate(outputs):
            assert (output - number - rank - 1).abs().max() <= 2 * BOUND
        for handle in handles:
            handle.wait()
        total = communicator.end_step()
        neighbors = 1 if rank in (0, 2) else 2
        assert total.calls == total.compressed_calls == 2 * neighbors * micro_batches
        assert total.plain_bytes_by_role == {"activation": neighbors * micro_batches * 4 * 4 * 257}


@ranks(3)
def test_collectives_and_messages_go_past_each_other(group):
    with opened(group) as communicator:
        late = torch.empty(PRIME)
        receiving = communicator.irecv(late, BEFORE)
        total = values(rank, PRIME)
        communicator.all_reduce(total)
        exact = sum(values(each, PRIME) for each in range(world_size))
        assert (total - exact).abs().max() <= world_size * BOUND + 1e-5
        assert not receiving.is_completed()
        communicator.isend(values(rank, PRIME), NEXT).wait()
        receiving.wait()
        assert is_within_bound(late, values(BEFORE, PRIME))


@ranks(4)
def test_groups_of_some_ranks_and_several_communicators(group):
    halves = [dist.new_group(each) for each in ([1, 0], [3, 2])]
    own, peer = halves[rank // 2], rank ^ 1
    with opened(own) as first, opened(own) as second, opened(group) as whole:
        handles, received = [], [torch.empty(PRIME) for _ in range(3)]
        for tensor, communicator in zip(received, (second, first, whole)):
            handles.append(communicator.irecv(tensor, peer))
        for number, communicator in enumerate((first, second, whole)):
            handles.append(communicator.isend(values(rank, PRIME, seed=number), peer))
        for handle in handles:
            handle.wait()
        for seed, tensor in zip((1, 0, 2), received):
            assert is_within_bound(tensor, values(peer, PRIME, seed=seed))


# ------------------------------------------------------------------ bytes and roles


@ranks(2)
def test_bytes_are_those_of_codes_and_only_the_sender_counts_them(group):
    with opened(group, quantizer={"mode": "rms", "value": 0.5}) as communicator:
        if rank == 0:
            communicator.send(values(0, 1_000_003), 1)
        else:
            communicator.recv(torch.empty(1_000_003), 0)
        total = communicator.stats.total
        assert (total.calls, total.compressed_calls) == (1, 1)
        if rank == 0:
            assert total.plain_bytes == total.bytes_in == 4 * 1_000_003
            assert total.ratio > 7, total
        else:
            assert total.plain_bytes == total.bytes_in == 0
            assert total.wire_bytes < 1000  # what ranks compare


@ranks(2)
def test_small_messages_and_roles_go_plain_on_both_ranks(group):
    with opened(group, transport={"min_bytes": "1GiB"}) as communicator:
        assert torch.equal(around(communicator, values(rank, PRIME)), values(BEFORE, PRIME))
        assert communicator.stats.total.bypasses == {"too small": 2}
    with opened(group) as communicator:
        large = 6_000_011  # more than a socket takes at once
        assert torch.equal(around(communicator, values(rank, large), role="activation"), values(BEFORE, large))
        total = communicator.stats.total
        assert total.bypasses == {"role not enabled": 2}
        assert total.bypassed_bytes == {"role not enabled": 4 * large}


@ranks(2)
def test_policies_know_a_message_by_its_name(group):
    policies = [{"name": "*norm*", "action": "skip"}]
    with opened(group, policies=policies) as communicator:
        assert torch.equal(around(communicator, values(rank, PRIME), name="a.norm"), values(BEFORE, PRIME))
        assert communicator.stats.total.bypasses == {"policy": 2}


@ranks(2)
def test_a_resumed_run_draws_the_random_numbers_of_one_that_was_not_stopped(group):
    quantizer = {"kind": "stochastic", "mode": "abs", "value": 1.0, "block": 0}
    with opened(group, quantizer=quantizer) as communicator:
        first, second = (around(communicator, values(rank, PRIME)) for _ in range(2))
        assert not torch.equal(first, second)
    with opened(group, quantizer=quantizer) as communicator:
        around(communicator, values(rank, PRIME))
        state = copy.deepcopy(communicator.training.state_dict())
    training = Training({"quantizer": quantizer, "transport": {"min_bytes": 0}})
    training.load_state_dict(state)
    with Communicator(None, group, training) as communicator:
        assert torch.equal(around(communicator, values(rank, PRIME)), second)


# ------------------------------------------------------------------ ranks that differ


@ranks(2)
@pytest.mark.parametrize("min_bytes", [0, "1GiB"])
@pytest.mark.parametrize("role", [None, "activation"])
def test_sizes_that_differ_are_told_on_both_ranks(group, min_bytes, role):
    with opened(group, transport={"min_bytes": min_bytes}) as communicator:
        with pytest.raises(MismatchError, match="rank 1 sends 40 elements to rank 0, which expects 38"):
            if rank == 0:
                communicator.recv(torch.empty(38), 1, role=role)
            else:
                communicator.send(torch.ones(40), 0, role=role)
        with pytest.raises(MismatchError):  # the communicator is broken, on both
            communicator.all_reduce(torch.ones(5))


@ranks(2)
@pytest.mark.parametrize(
    "of_source, of_destination, told",
    [
        ({}, {"dtype": "float16"}, "dtype float16 on rank 1, float32 on rank 0"),
        (
            {"tag": 3},
            {"tag": 5},
            "tag 5 on rank 1, 3 on rank 0. Messages from one rank to another arrive in the order in",
        ),
        ({"role": "activation"}, {}, "transfer plain .role not enabled. on rank 0, compressed on rank 1"),
    ],
)
def test_what_else_differs_is_told_on_both_ranks(group, of_source, of_destination, told):
    with opened(group) as communicator, pytest.raises(MismatchError, match=told):
        options = of_source if rank == 0 else of_destination
        tensor = torch.ones(10, dtype=getattr(torch, options.pop("dtype", "float32")))
        if rank == 0:
            communicator.send(tensor, 1, **options)
        else:
            communicator.recv(tensor, 0, **options)


@ranks(1, 3)
def test_what_can_not_be_is_refused_before_anything_is_sent(group):
    with opened(group) as communicator:
        tensor = torch.ones(4)
        for call in (communicator.send, communicator.recv, communicator.isend, communicator.irecv):
            with pytest.raises(UnsupportedError, match=f"={rank} is this rank itself"):
                call(tensor, rank)
            for peer in (world_size, -1, None):
                with pytest.raises(UnsupportedError, match=r"must be a global rank of this group, one of \[0"):
                    call(tensor, peer)
        if world_size == 3:
            assert torch.allclose(around(communicator, tensor), tensor, atol=BOUND)  # it goes on


@ranks(2)
@pytest.mark.parametrize(
    "error, told, tensor, options",
    [
        ("UnsupportedError", "to_dense", "sparse", {}),
        ("UnsupportedError", "resolve_conj", "conjugated", {}),
        ("ValueError", "role must be one of", "dense", {"role": "weights"}),
        ("ValueError", "tag must be a number from 0", "dense", {"tag": -1}),
    ],
)
def test_a_rank_that_refuses_its_message_tells_the_other_one(group, error, told, tensor, options):
    complex_numbers = torch.ones(4, dtype=torch.complex64)
    made = {"sparse": torch.ones(8).to_sparse(), "conjugated": complex_numbers.conj(), "dense": torch.ones(8)}
    with opened(group) as communicator:
        if rank == 0:
            with pytest.raises((UnsupportedError, ValueError), match=told) as caught:
                communicator.send(made[tensor], 1, **options)
            assert type(caught.value).__name__ == error
        else:
            with pytest.raises(MismatchError, match="rank 0 refused its call"):
                communicator.recv(torch.ones(8), 0)


@ranks(2)
def test_a_rank_that_comes_after_the_other_one_has_left_hears_that_it_refused_its_message(group):
    seconds, call_queue._CLOSE_SECONDS = call_queue._CLOSE_SECONDS, 0.1
    with opened(group) as communicator:
        if rank == 0:
            with pytest.raises(UnsupportedError):
                communicator.send(torch.ones(8).to_sparse(), 1)
            communicator.close()
        dist.barrier(group)
        if rank == 1:
            with pytest.raises(MismatchError, match="rank 0 refused its call"):
                communicator.recv(torch.ones(8), 0)
    call_queue._CLOSE_SECONDS = seconds


# ------------------------------------------------------------------ what is held


def held() -> tuple[int, int]:
    """Open descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@ranks(3)
def test_a_direction_takes_one_socket_and_one_thread(group):
    with opened(group) as communicator:
        communicator.all_reduce(values(rank, PRIME), async_op=True).wait()
        before = held()
        for _ in range(5):  # one direction to the next rank, one from the rank before
            for numel in (10, PRIME):
                around(communicator, values(rank, numel))
                around(communicator, torch.ones(numel, dtype=torch.int64))
        files, threads = (now - then for now, then in zip(held(), before))
        assert files <= 2 and threads <= 2, (files, threads)


@ranks(2)
def test_communicators_that_are_dropped_take_their_directions_along(group):
    before = held()
    gc.disable()
    for _ in range(5):
        communicator = opened(group)
        around(communicator, values(rank, PRIME))
        del communicator
    deadline = time.monotonic() + 20  # threads end by themselves, soon
    while len(os.listdir("/proc/self/task")) > before[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    gc.enable()
    assert files <= before[0] and threads <= before[1], (files, threads, before)


# ------------------------------------------------------------------ failures

SOON = 20.0  # seconds; the time-out of what must end before it is half an hour
LONG = 1800.0


@ranks(2)
@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize("what", ["send", "recv"])
def test_a_message_that_the_peer_does_not_take_part_in_ends_with_the_time_out(group, what, met):
    """Both ranks send, or both receive, and wait: before and after their first message."""
    with opened(group, transport={"min_bytes": 0, "timeout_seconds": 1}) as communicator:
        if met:
            around(communicator, values(rank, 10))
        dist.barrier(group)
        found = attempt(lambda: getattr(communicator, what)(values(rank, 10), 1 - rank))
        assert found["error"] == "PeerError" and found["seconds"] < SOON, found
        assert f"{what} {'to' if what == 'send' else 'from'} rank {1 - rank}, which ends with the" in found["message"]
        assert "within" in found["message"] or "has closed" in found["message"], found  # the other one was first
        assert isinstance(communicator.error, PeerError)
        dist.barrier(group)


@ranks(3)
@pytest.mark.parametrize("met", [False, True])
def test_a_failure_ends_all_messages_and_collectives_of_all_ranks(group, met):
    with opened(group, transport={"min_bytes": 0, "timeout_seconds": LONG}) as communicator:
        if met:
            around(communicator, values(rank, 10))
        started = time.monotonic()
        if rank == 0:
            waiting = [communicator.irecv(torch.empty(9), 1), communicator.irecv(torch.empty(9), 2)]
            communicator.isend(torch.ones(9), 1)
        elif rank == 1:
            waiting = [communicator.irecv(torch.empty(8), 0)]  # of another size
        else:
            waiting = [communicator.irecv(torch.empty(9), 0), communicator.irecv(torch.empty(9), 1)]
        errors = [attempt(handle.wait) for handle in waiting]
        assert all(errors), errors
        assert (rank == 2) or communicator.error is not None
        assert attempt(lambda: communicator.all_reduce(torch.ones(5))) is not None
        assert attempt(lambda: communicator.send(torch.ones(5), NEXT)) is not None
        assert time.monotonic() - started < SOON


@ranks(2)
def test_aborting_and_closing_with_messages_under_way(group):
    for met in (False, True):
        for ending in ("abort", "close"):
            communicator = opened(group, transport={"min_bytes": 0, "timeout_seconds": LONG})
            if met:
                around(communicator, values(rank, 10))
            started = time.monotonic()
            waiting = communicator.irecv(torch.empty(10), 1 - rank)
            if rank == 0:
                getattr(communicator, ending)()
            with pytest.raises(NczError):
                waiting.wait()
            assert time.monotonic() - started < SOON
            communicator.close()
            with pytest.raises(NczError):
                communicator.isend(torch.ones(10), 1 - rank)
            dist.barrier(group)


@ranks(2)
def test_what_was_asked_for_is_finished_before_a_communicator_closes(group):
    received = torch.empty(PRIME)
    with opened(group) as communicator:
        handles = [communicator.irecv(received, 1 - rank), communicator.isend(values(rank, PRIME), 1 - rank)]
    assert all(handle.is_success() for handle in handles)
    assert is_within_bound(received, values(1 - rank, PRIME))


@ranks(2)
def test_an_interrupted_message_breaks_the_communicator(group):
    """Ctrl-C while the main thread waits."""
    for way in ("send", "isend"):
        with opened(group, transport={"min_bytes": 0, "timeout_seconds": LONG}) as communicator:
            around(communicator, values(rank, 10))
            if rank == 0:
                timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
                timer.start()
                with pytest.raises(KeyboardInterrupt):
                    handle = getattr(communicator, way)(torch.ones(10), 1)
                    handle.wait()
                communicator.abort()
            else:
                with pytest.raises(PeerError, match="recv from rank 0, .*rank 0 has closed its connections"):
                    dist.barrier(group)
                    communicator.recv(torch.empty(10), 0)
            if rank == 0:
                dist.barrier(group)


@ranks(2)
def test_a_fork_can_not_send(group):
    with opened(group) as communicator:
        around(communicator, values(rank, 10))
        reads, writes = os.pipe()
        process = os.fork()
        if process == 0:
            os.write(writes, str(attempt(lambda: communicator.send(torch.ones(10), 1 - rank))).encode())
            os._exit(0)
        os.waitpid(process, 0)
        os.close(writes)
        with os.fdopen(reads) as answer:
            found = answer.read()
        assert "UnsupportedError" in found and "is a fork of process" in found, found
        around(communicator, values(rank, 10))  # the parent's goes on


def lose_a_peer(case: str) -> None:
    """Rank 1 of three dies or falls silent when the others wait for its messages."""
    dist.init_process_group("gloo")
    seconds = 2.0 if case.startswith("silent") else LONG
    communicator = Communicator({"quantizer": ABS, "transport": {"min_bytes": 0, "timeout_seconds": seconds}})
    if case.endswith("later"):
        around(communicator, values(rank, 10))
    if rank == 1:
        time.sleep(0.3)
        if case.startswith("silent"):
            be_silent(others_have_ended, SOON)
        os.kill(os.getpid(), signal.SIGKILL)
    found = attempt(lambda: communicator.recv(torch.empty(PRIME), 1))
    leave_alone(found)


@pytest.mark.parametrize("case", ["dead at first", "dead later", "silent at first", "silent later"])
def test_a_dead_or_silent_peer_is_noticed(case, tmp_path):
    finished = run_ranks(3, lose_a_peer, tmp_path, case)
    for each in (finished[0].result, finished[2].result):
        assert each["error"] == "PeerError" and each["seconds"] < SOON, report(finished)
        assert each["message"].startswith("recv from rank 1, which ends with the send there: "), each
        if case == "dead later":
            assert "rank 1 has closed its connections" in each["message"]
        if case == "dead at first":  # it may have died before it was met
            assert re.search("rank 1 has closed its connections|meeting rank 1 failed", each["message"]), each


def end_with_a_message_under_way() -> dict:
    dist.init_process_group("gloo")
    communicator = Communicator({"quantizer": ABS, "transport": {"min_bytes": 0, "timeout_seconds": LONG}})
    around(communicator, values(rank, 10))
    communicator.irecv(torch.empty(10), NEXT)  # which is never sent
    return {"ends": time.time()}


def test_a_program_that_ends_with_a_message_under_way_leaves_nothing_running(tmp_path):
    finished = run_ranks(2, end_with_a_message_under_way, tmp_path)
    assert [each.returncode for each in finished] == [0, 0], report(finished)
    assert all("terminate called" not in each.output for each in finished), report(finished)
    assert max(each.ended - each.result["ends"] for each in finished) < SOON, report(finished)
