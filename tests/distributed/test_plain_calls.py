"""Calls that go plain: in order with all others, and compared between ranks like compressed ones."""

import time

import numpy as np
import torch
import torch.distributed as dist
from on_rank import digest, raises, rank, same_on_all_ranks, values, world_size
from scenarios import ranks
from torch._subclasses.fake_tensor import FakeTensorMode

from ncz_plugins import Communicator, MismatchError, NczError, PeerError, UnsupportedError

SOON = 20.0  # half of the time-out of what must end before it
LARGE, SMALL = 400_000, 1000
SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
last = rank == world_size - 1


def differing(group, first, other, *words: str) -> None:
    """All ranks but the last make one call, the last one another: each is told soon, and further calls fail at once.

    Args:
        first, other: take the communicator.
    """
    with Communicator({"transport": {"timeout_seconds": 2 * SOON}}, group) as communicator:
        warm = torch.ones(SMALL)
        communicator.all_reduce(warm)
        started = time.monotonic()
        raises(MismatchError, lambda: (other if last else first)(communicator), *words)
        assert time.monotonic() - started < SOON
        raises(MismatchError, lambda: communicator.all_reduce(warm))


def reduce(elements: int = SMALL, dtype=torch.float32, op=SUM, **how):
    return lambda communicator: communicator.all_reduce(torch.ones(elements, dtype=dtype), op, **how)


def both(name: str, other: object, first: object) -> str:
    return f"{name} {other} on rank {world_size - 1}, {first} on rank 0"


# ------------------------------------------------------------------ order


@ranks(3)
def test_calls_run_in_the_order_in_which_they_were_made(group):
    """A small call on what a large one before it computes, ten times."""
    with Communicator({"quantizer": {"kind": "lossless"}}, group) as communicator:
        for _ in range(10):
            large = torch.full((4 * LARGE,), float(rank + 1))
            handle = communicator.all_reduce(large, async_op=True)
            communicator.broadcast(large[:100], world_size - 1)
            assert handle.is_completed()
            assert large.unique().tolist() == [world_size * (world_size + 1) / 2]


@ranks(3)
def test_asynchronous_calls_of_all_sizes_mix(group):
    """In any order of waiting, and alike on all ranks."""
    with Communicator(group=group) as communicator:
        sizes = [SMALL, LARGE, 1, 0, LARGE, 30_000, SMALL]
        tensors = [values(rank, size, seed=at) for at, size in enumerate(sizes)]
        handles = [communicator.all_reduce(tensor, async_op=True) for tensor in tensors]
        for handle in reversed(handles):
            assert handle.wait() is True and handle.is_success() and handle.exception() is None
        for at, (tensor, size) in enumerate(zip(tensors, sizes)):
            wanted = sum(values(r, size, seed=at) for r in range(world_size))
            assert size == 0 or (tensor - wanted).abs().max() < (world_size**2 if size == LARGE else 1e-4)
    same_on_all_ranks([digest(tensor) for tensor in tensors], group)


@ranks(3)
def test_a_handle_of_a_small_average_completes_without_being_waited_for(group):
    with Communicator(group=group) as communicator:
        tensor = torch.full((SMALL,), float(rank))
        handle = communicator.all_reduce(tensor, AVG, async_op=True)
        deadline = time.monotonic() + SOON
        while not handle.is_completed():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert handle.is_success() and handle.exception() is None
        assert tensor.unique().tolist() == [(world_size - 1) / 2]


# ------------------------------------------------------------------ ranks that differ


@ranks(3)
def test_dtypes_of_one_size_are_told_apart(group):
    half, bfloat = reduce(dtype=torch.float16), reduce(dtype=torch.bfloat16)
    differing(group, half, bfloat, both("dtype", "bfloat16", "float16"))


@ranks(3)
def test_dtypes_of_other_sizes_too(group):
    differing(group, reduce(), reduce(dtype=torch.float64), both("dtype", "float64", "float32"))


@ranks(3)
def test_reduce_ops(group):
    differing(group, reduce(), reduce(op=AVG), both("reduce op", "AVG", "SUM"))


@ranks(3)
def test_sizes(group):
    differing(group, reduce(), reduce(2 * SMALL), both("elements", 2 * SMALL, SMALL))


@ranks(3)
def test_sizes_of_many_bytes_and_few(group):
    differing(group, reduce(1), reduce(30_000), both("elements", 30_000, 1))


@ranks(3)
def test_sizes_of_large_tensors_that_go_plain(group):
    first, other = reduce(LARGE, role="parameter"), reduce(LARGE + 1, role="parameter")
    differing(group, first, other, both("elements", LARGE + 1, LARGE))


@ranks(3)
def test_collectives(group):
    def gather(communicator):
        communicator.all_gather_single(torch.ones(SMALL * world_size), torch.ones(SMALL))

    differing(group, reduce(SMALL * world_size), gather, both("collective", "all_gather_single", "all_reduce"))


@ranks(3)
def test_sources_of_a_broadcast(group):
    first, other = (lambda c, src=src: c.broadcast(torch.ones(SMALL), src) for src in (0, 1))
    differing(group, first, other, f"root rank 1 on rank {world_size - 1}, 0 on rank 0")


@ranks(3)
def test_small_and_large(group):
    differing(group, reduce(), reduce(LARGE), "elements", "plain (too small) on rank 0", "compressed on rank")


@ranks(3)
def test_floats_and_integers(group):
    differing(group, reduce(LARGE), reduce(LARGE, torch.int32), both("dtype", "int32", "float32"), "plain (dtype)")


@ranks(3)
def test_sums_and_maxima(group):
    differing(group, reduce(LARGE), reduce(LARGE, op=MAX), both("reduce op", "MAX", "SUM"))


@ranks(3)
def test_roles(group):
    words = "transfer plain (role not enabled) on rank"
    differing(group, reduce(LARGE, role="gradient"), reduce(LARGE, role="parameter"), words, "compressed on rank 0")


@ranks(3)
def test_numbers_of_calls(group):
    """The last rank leaves one out: the others are told at its next one."""

    def two(communicator):
        communicator.all_reduce(torch.ones(SMALL))
        communicator.all_reduce(torch.ones(SMALL + 1))

    def one(communicator):
        communicator.all_reduce(torch.ones(SMALL + 1))

    differing(group, two, one, both("elements", SMALL + 1, SMALL))


# ------------------------------------------------------------------ what can't be reduced


def refused(communicator: Communicator, call, error: type, *words: str) -> None:
    raises(error, call, *words)
    tensor = torch.ones(SMALL)
    communicator.all_reduce(tensor)  # all ranks refused it, so all can go on
    assert tensor.unique().tolist() == [world_size]


@ranks(3)
def test_what_no_rank_can_send_is_refused_by_name_and_all_go_on(group):
    with FakeTensorMode():
        fake = torch.ones(SMALL)
    with Communicator(group=group) as communicator:
        reduce = communicator.all_reduce
        for tensor, words in (
            ([1.0, 2.0], ("list", "torch.Tensor")),
            (np.float32(5), ("float32", "torch.Tensor")),
            (fake, ("FakeTensor",)),
            (torch.ones(SMALL).to_sparse(), ("sparse",)),
            (torch.ones(5, dtype=torch.int16), ("int16", "convert")),
            (torch.ones(5).to(torch.float8_e4m3fn), ("float8_e4m3fn", "convert")),
            (torch.ones(10, 1).expand(10, 10)[1:], ("clone()",)),
        ):
            refused(communicator, lambda t=tensor: reduce(t), UnsupportedError, *words)
        integers = torch.ones(5, dtype=torch.int32)
        refused(communicator, lambda: reduce(integers, AVG), UnsupportedError, "AVG", "int32")
        whole = torch.ones(5 * world_size, dtype=torch.float64)
        gather = communicator.all_gather_single
        refused(communicator, lambda: gather(whole, torch.ones(5)), UnsupportedError, "float32", "float64")
        refused(communicator, lambda: gather(whole, torch.ones(6)), ValueError, "elements")


def heard_of(group, size: int) -> None:
    tensor = torch.ones(2, size // 2)
    with Communicator({"transport": {"timeout_seconds": 2 * SOON}}, group) as communicator:
        started = time.monotonic()
        if last:
            raises(UnsupportedError, lambda: communicator.all_reduce(tensor.to_sparse()), "to_dense()")
        else:
            raises(MismatchError, lambda: communicator.all_reduce(tensor), f"rank {world_size - 1} refused")
        assert time.monotonic() - started < SOON
        raises(NczError, lambda: communicator.all_reduce(tensor))


@ranks(3)
def test_what_one_rank_refuses_its_peers_hear_of_at_once(group):
    heard_of(group, SMALL)
    heard_of(group, LARGE)


@ranks(3)
def test_errors_are_runtime_errors_for_who_knows_nothing_of_this_package(group):
    assert issubclass(MismatchError, RuntimeError) and issubclass(PeerError, RuntimeError)
    with Communicator(group=group) as communicator:
        raises(RuntimeError, lambda: communicator.all_reduce(torch.ones(SMALL + rank)), "elements")
