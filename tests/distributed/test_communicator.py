"""Communicators of three ranks: bypasses, handles, groups, what is refused, opening and closing."""

import gc
import os
import threading

import torch
import torch.distributed as dist
from on_rank import digest, folder, raises, rank, same_on_all_ranks, values, world_size
from scenarios import ranks

from ncz_plugins import Communicator, Config, ConfigError, MismatchError, NczError, UnsupportedError
from ncz_plugins.cli.report.read import read
from ncz_plugins.cli.report.summary import summarize
from ncz_plugins.cli.report.verdict import verdict

everyone = [values(r, 100_000) for r in range(world_size)]
exact = sum(everyone)


def bypasses(communicator: Communicator) -> dict:
    return dict(communicator.stats.total.bypasses)


def mine(numel: int = 100_000) -> torch.Tensor:
    return everyone[rank][:numel].clone()


def plain_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(tensor, group=group)
    return tensor


@ranks(3)
def test_bypasses_before_measuring_are_counted_and_exact(group):
    with Communicator(group=group) as communicator:
        integers = torch.arange(50_000)
        communicator.all_reduce(integers)
        assert torch.equal(integers, torch.arange(50_000) * world_size)
        small = mine(100)
        communicator.all_reduce(small)
        assert torch.equal(small, sum(each[:100] for each in everyone))  # in the order of ranks
        largest = mine()
        communicator.all_reduce(largest, dist.ReduceOp.MAX)
        assert torch.equal(largest, torch.stack(everyone).amax(0))
        weights = mine()
        communicator.all_reduce(weights, role="parameter")
        assert torch.equal(weights, sum(everyone))
        empty = torch.empty(0)
        communicator.all_reduce(empty)
        average = mine(100)
        handle = communicator.all_reduce(average, dist.ReduceOp.AVG, async_op=True)  # plain, as it is small
        handle.wait()
        handle.wait()
        assert handle.is_completed()
        torch.testing.assert_close(average, exact[:100] / world_size)
        assert bypasses(communicator) == {"dtype": 1, "too small": 3, "reduce op": 1, "role not enabled": 1}


@ranks(3)
def test_nan_and_infinity_come_through_at_their_own_places(group):
    with Communicator(group=group) as communicator:
        for poison in (float("nan"), float("inf"), float("-inf")):
            tensor = mine()
            if rank == world_size - 1:
                tensor[77_777] = poison
            communicator.all_reduce(tensor)
            assert not tensor[77_777].isfinite()
            assert tensor.isfinite().sum() == tensor.numel() - 1
            part = torch.empty(100_000)
            whole = torch.cat(everyone)
            if rank == 0:
                whole[-1] = poison
            communicator.reduce_scatter_single(part, whole)
            assert part.isfinite().all() == (rank != world_size - 1)
        assert bypasses(communicator) == {"non-finite": 6}


@ranks(3)
def test_codes_that_overflow_go_plain(group):
    with Communicator({"quantizer": {"mode": "abs", "value": 1e-12}}, group) as communicator:
        tensor = mine()
        communicator.all_reduce(tensor)
        assert torch.equal(tensor, plain_sum(mine(), group))
        assert bypasses(communicator) == {"code overflow": 1}


@ranks(3)
def test_what_would_grow_goes_plain(group):
    with Communicator({"quantizer": {"mode": "rel", "value": 1e-5}}, group) as communicator:
        communicator.all_reduce(everyone[rank].bfloat16())
        assert bypasses(communicator) == {"not worth it": 1}


@ranks(3)
def test_without_loss_all_of_that_passes_compressed(group):
    """And a sum is what adding in the order of ranks gives."""
    config = {"quantizer": {"kind": "lossless"}, "transport": {"schedule": "direct"}, "entropy": {"checksum": True}}
    with Communicator(config, group) as communicator:
        poisoned = [tensor.clone() for tensor in everyone]
        poisoned[0][7], poisoned[-1][77_777] = float("nan"), float("inf")
        tensor = poisoned[rank].clone()
        communicator.all_reduce(tensor, dist.ReduceOp.AVG)
        assert digest(tensor) == digest(sum(poisoned) / world_size)
        gathered = torch.empty(100_000 * world_size)
        communicator.all_gather_single(gathered, poisoned[rank])
        assert digest(gathered) == digest(torch.cat(poisoned))
        total = communicator.stats.total
        assert total.compressed_calls == 2 and not total.bypasses and total.ratio > 1.05


@ranks(3)
def test_stochastic_errors_differ_from_call_to_call_and_not_from_rank_to_rank(group):
    config = {"quantizer": {"kind": "stochastic", "mode": "abs", "value": 0.5}}
    with Communicator(config, group) as communicator:
        errors = []
        for _ in range(20):
            tensor = mine()
            communicator.all_reduce(tensor)
            errors.append(tensor - exact)
        assert all(error.abs().max() <= 0.5 * world_size + 1e-4 for error in errors)
        assert sum(errors).abs().mean() < 0.5 * sum(error.abs().mean() for error in errors)
    same_on_all_ranks(digest(tensor), group)


@ranks(3)
def test_many_handles_are_waited_for_in_any_order(group):
    """From another thread too; results are in place, alike on all ranks, and counted."""
    with Communicator({"quantizer": {"mode": "rms", "value": 0.01}}, group) as communicator:
        tensors = [values(rank, 40_000 + i, seed=i) for i in range(12)]
        handles = [communicator.all_reduce(tensor, async_op=True) for tensor in tensors]
        dist.barrier(group)  # the group itself stays free for others meanwhile
        for handle in reversed(handles):
            assert handle.wait() is True and handle.is_completed() and handle.is_success()
            assert handle.exception() is None
        for i, tensor in enumerate(tensors):
            wanted = sum(values(r, 40_000 + i, seed=i) for r in range(world_size))
            assert (tensor - wanted).abs().max() < 0.05 * world_size**2
        tensor = mine()
        handle = communicator.all_reduce(tensor, async_op=True)
        waiter = threading.Thread(target=handle.wait)
        waiter.start()
        waiter.join(30)
        assert not waiter.is_alive()
        counted = communicator.stats.to_dict()["total"]
    assert counted["calls"] == counted["compressed_calls"] == 13
    assert counted["bytes_in"] == 4 * (sum(40_000 + i for i in range(12)) + 100_000)
    assert 0 < counted["wire_bytes"] < counted["plain_bytes"]
    assert counted["ratio"] == counted["plain_bytes"] / counted["wire_bytes"]
    assert counted["seconds"] >= counted["encode_seconds"] + counted["decode_seconds"] > 0
    same_on_all_ranks([digest(tensor) for tensor in tensors], group)


@ranks(3)
def test_rank_0_records_over_two_starts_what_it_counted(group):
    file = str(folder() / "recorded.jsonl")
    totals, state = [], None
    for _ in range(2):
        with Communicator({"statistics": {"jsonl": file}, "guard": {"every": 2}}, group) as communicator:
            if state is not None:
                communicator.training.load_state_dict(state)
            for _ in range(3):
                communicator.all_reduce(mine(), name="body")
                communicator.all_reduce(mine(100), name="bias")
                totals.append(communicator.end_step().to_dict())
            state = communicator.training.state_dict()
    if rank > 0:
        return
    run = read(file)
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5, 6] and list(run.starts) == [1, 4] and not run.notes
    for counted, step in zip(totals, run.steps):
        recorded = step.model_dump()
        assert {name: recorded.get(name, value) for name, value in counted.items()} == counted
        assert step.ratio == counted["ratio"] and step.bypasses == {"too small": 1}
        assert step.plain_bytes > 2 * step.wire_bytes > 2 * step.bypassed_bytes["too small"]
    assert [[finding.name for finding in step.guard] for step in run.steps] == [["body"], []] * 3
    summary = summarize(run)
    assert summary.runs == 2 and summary.times.steps == 4 and 0 < summary.times.share < 1
    assert run.header.ranks == world_size and len(verdict(summary, run.header)) == 4


@ranks(3)
def test_all_ranks_learn_that_rank_0_cannot_record(group):
    file = folder() / "a file"
    file.touch()
    config = {"statistics": {"jsonl": f"{file}/below a file"}}
    words = ("rank 0", "statistics.jsonl", "cannot be written")
    raises(MismatchError if rank else ConfigError, lambda: Communicator(config, group), *words)


@ranks(3)
def test_any_shape_is_taken_and_what_can_not_be_is_refused_with_the_remedy(group):
    with Communicator({"transport": {"min_bytes": 0}}, group) as communicator:
        cube = mine(99_000).view(10, 99, 100)
        communicator.all_reduce(cube)
        scalar = torch.tensor(float(rank))
        communicator.all_reduce(scalar)
        assert cube.shape == (10, 99, 100) and scalar.shape == ()
        raises(UnsupportedError, lambda: communicator.all_reduce(scalar.expand(5)), "share memory", "clone()")
        raises(UnsupportedError, lambda: communicator.all_reduce(torch.empty(9, device="meta")), "meta", "CPU")
        raises(ValueError, lambda: communicator.reduce_scatter_single(torch.empty(3), torch.empty(4)), "got 4 and 3")
        raises(UnsupportedError, lambda: communicator.broadcast(cube, 99), "src must be", "got 99")
        parts, elsewhere = torch.ones(world_size), torch.empty(1, device="meta")
        refused = lambda: communicator.reduce_scatter_single(elsewhere, parts)  # noqa: E731
        raises(UnsupportedError, refused, "cpu and meta", "one device")
        whole = torch.ones(3 * 50_000)
        for begin, size in ((1, 50_000), (25_000, 50_000), (99_999, 50_000)):
            own = whole[begin : begin + size]
            for call in (
                lambda: communicator.reduce_scatter_single(own, whole),  # noqa: B023
                lambda: communicator.all_gather_single(whole, own),  # noqa: B023
            ):
                raises(ValueError, call, "memory of its own", f"begins at byte {4 * begin}")
        assert (whole == 1).all()
        communicator.all_reduce(nothing := torch.empty(0), parts=[])
        assert not nothing.numel()


@ranks(3)
def test_ranks_that_sum_different_parameters_are_told_so(group):
    """Though their sizes are the same."""
    for make in (
        lambda c, names: c.all_reduce(mine(), name=names[0]),
        lambda c, names: c.all_reduce_coalesced([mine(), mine()], names=names),
        lambda c, names: c.reduce_scatter_single(mine(100), mine(100 * world_size), name=names[0]),
    ):
        with Communicator({"transport": {"min_bytes": 0}}, group) as communicator:
            names = ["key", "query"] if rank == 0 else ["query", "key"]
            raises(MismatchError, lambda: make(communicator, names), "parameters differs")  # noqa: B023


@ranks(3)
def test_ranks_that_ended_other_steps_are_told_so(group):
    """Where something depends on the step: at once, and not after the time-out of a sum that not all verify."""
    for section in ({"guard": {"every": 2}}, {"steps": {"bounds": [{"step": 1, "times": 0.5}]}}, {}):
        with Communicator({"transport": {"min_bytes": 0}} | section, group) as communicator:
            communicator.all_reduce(mine())
            if rank == 0:
                communicator.end_step()
            if section:
                words = "training step 1 on rank 0, 0 on rank 1", "end_step"
                raises(MismatchError, lambda: communicator.all_reduce(mine()), *words)  # noqa: B023
            else:
                communicator.all_reduce(mine())


@ranks(3)
def test_negated_views_and_a_name_twice_are_refused(group):
    config = {"transport": {"min_bytes": 0}, "quantizer": {"error_feedback": True}}
    with Communicator(config, group) as communicator:
        view = torch.complex(mine(), mine()).conj().imag
        raises(UnsupportedError, lambda: communicator.all_reduce(view.view(-1), name="a"), "resolve_neg")
        twice = lambda: communicator.all_reduce_coalesced([mine(), mine()], names=["a", "a"])  # noqa: E731
        raises(UnsupportedError, twice, "a: two tensors of one call")


@ranks(3)
def test_a_refused_call_is_told_at_once_and_to_the_others_when_they_make_it(group):
    for error, make in (
        (ValueError, lambda c: c.reduce_scatter_single(torch.empty(5), torch.empty(7))),
        (TypeError, lambda c: c.all_reduce(mine(), name=3)),
    ):
        with Communicator(group=group) as communicator:
            if rank == 0:  # whose error must not wait for the others
                raises(error, lambda: make(communicator))  # noqa: B023
            dist.all_reduce(torch.zeros(1))
            raises(MismatchError, lambda: communicator.all_reduce(mine()), "rank 0")  # noqa: B023


@ranks(3)
def test_closing_twice_is_fine_and_using_it_afterwards_is_not(group):
    communicator = Communicator(group=group)
    communicator.close()
    communicator.close()
    raises(NczError, lambda: communicator.all_reduce(mine()), "closed")


@ranks(3)
def test_several_communicators_serve_one_subgroup(group):
    """Groups of any shape, made in the same order by their members only."""
    pair = dist.new_group([0, world_size - 1])
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    if rank in (0, world_size - 1):
        first, second = Communicator(group=pair), Communicator({"transport": {"schedule": "direct"}}, pair)
        one, two = mine(), mine()
        handle = first.all_reduce(one, async_op=True)
        second.all_reduce(two)
        handle.wait()
        assert torch.equal(one, two)
        third = mine()
        first.broadcast(third, world_size - 1)  # src is a global rank, as in torch.distributed
        assert (third - everyone[-1]).abs().max() < world_size
        first.close()
        second.close()
    own = mine()
    Communicator(group=alone).all_reduce(own)
    assert torch.equal(own, everyone[rank])


@ranks(3)
def test_nothing_leaks(group):
    """Making and closing many leaves no file and no thread; here in the default group."""

    def cycle() -> None:
        with Communicator() as communicator:
            communicator.all_reduce(mine())
            assert Config.load("ncclz") == communicator.config

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    for _ in range(3):
        cycle()
    gc.collect()
    dist.barrier()
    files, threads = open_files(), threading.active_count()
    for _ in range(20):
        cycle()
    gc.collect()
    dist.barrier()
    assert [open_files(), threading.active_count()] == [files, threads]
