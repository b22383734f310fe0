"""Arrays of other libraries, strided tensors and complex numbers, in every collective, on real ranks."""

import gc

import numpy as np
import pytest
import torch
import torch.distributed as dist
from foreign import Foreign
from on_rank import of_all_ranks, raises, rank, values, world_size
from scenarios import ranks

from ncz_plugins import Communicator, MismatchError, UnsupportedError

BOUND = 0.01
SETTINGS = {
    "quantizer": {"kind": "error_bound", "mode": "abs", "value": BOUND},
    "transport": {"min_bytes": 0, "timeout_seconds": 60},
}
ROWS, COLUMNS = 60, 57  # of each rank
AVG = dist.ReduceOp.AVG
last = rank == world_size - 1


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The values in every second row and column of a larger tensor."""
    rows, columns = tensor.shape
    view = torch.full((2 * rows, 2 * columns), 9, dtype=tensor.dtype)[::2, ::2]
    return view.copy_(tensor)


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


# What makes an array of two dimensions from values, and whether it is strided.
WAYS = {
    "torch": (torch.clone, False),
    "transposed": (with_gaps, True),
    "every other": (every_other, True),
    "numpy": (lambda tensor: tensor.numpy().copy(), False),
    "Fortran": (lambda tensor: np.asfortranarray(tensor.numpy()), True),
    "numpy, every other": (lambda tensor: every_other(tensor).numpy(), True),
    "DLPack": (lambda tensor: Foreign(tensor.clone()), False),
    "DLPack, strided": (lambda tensor: Foreign(with_gaps(tensor)), True),
}
OF_NUMPY = [way for way in WAYS if "numpy" in way or way == "Fortran"]


def tensor_in(array) -> torch.Tensor:
    return torch.from_dlpack(array).clone(memory_format=torch.contiguous_format)


def exchanged(communicator, make, dtype, async_op) -> dict:
    """What each collective leaves in arrays that `make` makes of values."""
    c, n, several = communicator, world_size, []

    def of(source: int, rows: int = ROWS):
        return make(values(source, rows * COLUMNS, torch.float32).to(dtype).view(rows, COLUMNS))

    def empty(rows: int = ROWS):
        return make(torch.full((rows, COLUMNS), 7, dtype=dtype))

    def started(collective: str, outputs: list, *arguments, **options) -> list:
        handle = getattr(c, collective)(*arguments, async_op=async_op, **options)
        if async_op and n == 1:
            handle.wait()  # gloo has no futures for some works
        elif async_op:
            given = handle.get_future().wait()
            assert handle.wait() and handle.is_completed() and handle.is_success() and handle.exception() is None
            assert len(given) == len(outputs) and all(one is other for one, other in zip(given, outputs))
        return [tensor_in(each) for each in outputs]

    one, several = of(rank), [of(rank), of(rank + 7, 2)]
    found = {
        "all_reduce": started("all_reduce", [one], one),
        "average": started("all_reduce", [one], one, AVG if dtype.is_floating_point else dist.ReduceOp.MAX),
        "all_reduce_coalesced": started("all_reduce_coalesced", several, several),
    }
    one = of(rank)
    found["broadcast"] = started("broadcast", [one], one, n - 1)
    one = of(rank)
    found["reduce"] = started("reduce", [one], one, 0)
    for whole, part in (("reduce_scatter_single", empty()), ("all_to_all_single", empty(ROWS * n))):
        found[whole] = started(whole, [part], part, of(rank, ROWS * n))
    whole, own = empty(ROWS * n), of(rank)
    found["all_gather_single"] = started("all_gather_single", [whole], whole, own)
    many, mine = [empty() for _ in range(n)], [of(rank + 3 * to) for to in range(n)]
    found["all_to_all"] = started("all_to_all", many, many, mine)
    found["all_gather"] = started("all_gather", many, many, of(rank))
    gathered = many if rank == 0 else None
    found["gather"] = started("gather", gathered or [], of(rank), gathered, 0)
    found["scatter"] = started("scatter", [one], one, mine if last else None, n - 1)
    found["reduce_scatter"] = started("reduce_scatter", [one], one, mine)
    if n > 1:
        got = empty()
        handles = [c.irecv(got, (rank - 1) % n), c.isend(of(rank), (rank + 1) % n)]
        assert handles[0].get_future().wait()[0] is got
        for handle in handles:
            handle.wait()
        found["send and receive"] = [tensor_in(got)]
    return found


@ranks(1, 3)
@pytest.mark.parametrize(
    ("dtype", "async_op"),
    [("float32", False), ("float32", True), ("float64", False), ("float16", True), ("bfloat16", True), ("int64", True)],
)
def test_all_kinds_of_arrays_get_what_a_contiguous_tensor_gets(group, dtype, async_op):
    dtype = getattr(torch, dtype)
    with Communicator(SETTINGS, group) as communicator:
        wanted = exchanged(communicator, torch.clone, dtype, async_op)
        for way, (make, is_strided) in WAYS.items():
            if dtype == torch.bfloat16 and way in OF_NUMPY:
                continue
            before = communicator.stats.total.copied_bytes
            found = exchanged(communicator, make, dtype, async_op)
            for collective, results in wanted.items():
                same = zip(results, found[collective], strict=True)
                assert all(torch.equal(one, other) for one, other in same), (way, collective)
            copied = communicator.stats.total.copied_bytes - before
            if is_strided:  # there and back for six calls in place, and once for what is only read or written
                assert copied >= (12 + 4 + 4 * world_size) * ROWS * COLUMNS * dtype.itemsize
        if world_size > 1 and dtype != torch.int64:
            assert communicator.stats.total.compressed_calls == communicator.stats.total.calls
        one = torch.ones(ROWS, COLUMNS, dtype=dtype).t()
        for array, times in ((one, 2), (one.contiguous(), 0), (Foreign(one), 2)):
            before = communicator.stats.total.copied_bytes
            communicator.all_reduce(array)
            assert communicator.stats.total.copied_bytes - before == times * one.nbytes


@ranks(2, 3)
@pytest.mark.parametrize("kind", ["error_bound", "stochastic", "lossless"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_both_parts_of_complex_numbers_keep_the_bound(group, dtype, kind):
    dtype = getattr(torch, dtype)

    def of(source: int) -> torch.Tensor:
        return torch.complex(values(source, 5000), values(source, 5000, seed=5)).to(dtype).view(100, 50)

    exact = sum(of(source).to(torch.complex128) for source in range(world_size))
    settings = SETTINGS | {"quantizer": {"kind": kind, "mode": "abs", "value": BOUND}}
    with Communicator(settings, group) as communicator:
        for way in ("torch", "transposed", "numpy", "Fortran", "DLPack"):
            for op, divisor in ((dist.ReduceOp.SUM, 1), (AVG, world_size)):
                array = WAYS[way][0](of(rank))
                communicator.all_reduce(array, op)
                error = torch.view_as_real(tensor_in(array).to(torch.complex128) - exact / divisor).abs()
                bound = BOUND * world_size / divisor if kind != "lossless" else 0
                assert error.max() <= bound + 1e-5 and (bound == 0 or error.max() > bound / 100)
            pieces = WAYS[way][0](torch.cat([of(rank)] * world_size))
            got = WAYS[way][0](torch.zeros(100 * world_size, 50, dtype=dtype))
            communicator.all_to_all_single(got, pieces)
            wanted = torch.cat([of(source) for source in range(world_size)])
            error = torch.view_as_real(tensor_in(got) - wanted).abs().max()
            assert error <= (0 if kind == "lossless" else BOUND + 1e-5)
        assert communicator.stats.total.compressed_calls == communicator.stats.total.calls

        raises(ValueError, lambda: communicator.all_reduce(of(rank), dist.ReduceOp.MAX), "MAX", "complex")


@ranks(2, 3)
def test_complex_numbers_that_go_plain_are_exact(group):
    settings = SETTINGS | {"transport": {"min_bytes": "1GiB", "timeout_seconds": 60}}
    with Communicator(settings, group) as communicator:
        for rows in (2, 1100, 100_000):  # with what is compared, and over gloo
            for make in (torch.clone, with_gaps):
                base = torch.arange(rows * 12.0).view(rows, 12).to(torch.complex64) * (1 + 2j)
                own, total = base * (rank + 1), base * sum(range(1, world_size + 1))
                one, part = make(own), make(torch.zeros(rows, 4, dtype=torch.complex64))
                whole = make(torch.zeros(world_size * rows, 12, dtype=torch.complex64))
                communicator.all_gather_single(whole, one)
                assert torch.equal(whole[rank * rows : (rank + 1) * rows], own)
                communicator.all_reduce(one)
                assert torch.equal(one, total)
                communicator.reduce_scatter_single(part, make(own[:, : 4 * world_size]))
                assert torch.equal(part.flatten(), total[:, : 4 * world_size].flatten().chunk(world_size)[rank])
        assert communicator.stats.total.bypasses == {"too small": communicator.stats.total.calls}


@ranks(2)
def test_a_complex_parameter_has_a_name_a_residual_and_a_policy(group):
    settings = SETTINGS | {
        "quantizer": {"kind": "error_bound", "mode": "rms", "value": 1, "error_feedback": True},
        "policies": [{"name": "exact", "action": "skip"}],
    }
    with Communicator(settings, group) as communicator:
        sums = torch.zeros(3000, dtype=torch.complex64)
        mine = torch.complex(values(rank, 3000), values(rank, 3000, seed=5))
        for _ in range(20):
            tensor = mine.clone()
            communicator.all_reduce(tensor, AVG, name="phase")
            sums += tensor
        exact = torch.complex(values(rank, 3000), values(rank, 3000, seed=5))
        communicator.all_reduce(exact, AVG, name="exact")
        assert (sums / 20 - exact).abs().mean() < (tensor - exact).abs().mean() / 5  # what was lost came later
        assert communicator.stats.total.bypasses == {"policy": 1}
        both = [mine.clone(), mine.clone().view(60, 50).t()]
        communicator.all_reduce_coalesced(both, AVG, names=["exact", "phase"])
        assert torch.equal(both[0], exact)
        assert both[1].shape == (50, 60) and not torch.equal(both[1].t().flatten(), exact)


@ranks(3)
def test_numbers_and_empty_arrays(group):
    with Communicator(SETTINGS, group) as communicator:
        for dtype in (np.float32, np.float64, np.complex64, np.int32):
            number, nothing = np.array(rank, dtype), np.zeros((0, 3), dtype)
            communicator.all_reduce(number)
            communicator.all_reduce(nothing)
            assert number.shape == () and abs(number - 3) <= 3 * BOUND and nothing.shape == (0, 3)
        point = np.array(1j, np.complex64)
        raises(ValueError, lambda: communicator.all_to_all_single(np.zeros((), "c8"), point), "1 rows", "3 ranks")


@ranks(2)
def test_calls_in_the_background_copy_in_the_order_in_which_they_were_made(group):
    settings = SETTINGS | {"quantizer": {"kind": "lossless"}}
    with Communicator(settings, group) as communicator:
        large = np.ones(3_000_000, np.float32)
        array = np.ones((500, 300), np.float32, order="F")
        handles = [communicator.all_reduce(each, async_op=True) for each in (large, array, array, array)]
        for handle in reversed(handles):
            handle.wait()
        assert (array == 8).all() and (large == 2).all()


@ranks(2)
def test_a_call_keeps_the_memory_of_an_array_that_nobody_else_has(group):
    with Communicator(SETTINGS, group) as communicator:
        handles = [communicator.all_reduce(make(), async_op=True) for make in (ones, fortran_ones, foreign_ones) * 5]
        gc.collect()
        communicator.all_reduce(foreign_ones(), async_op=True)  # nor has anybody this handle
        for handle in handles:
            [result] = handle.get_future().wait()
            assert (tensor_in(result) - 2).abs().max() <= 2 * BOUND + 1e-5


def ones() -> np.ndarray:
    return np.ones((700, 300), np.float32)


def fortran_ones() -> np.ndarray:
    return np.ones((700, 300), np.float32, order="F")


def foreign_ones() -> Foreign:
    return Foreign(torch.ones(700, 300))


def read_only() -> np.ndarray:
    array = np.ones(500)
    array.flags.writeable = False
    return array


@ranks(2)
@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "recv", "gather"])
def test_a_rank_with_a_read_only_array_is_told_and_tells_the_others(group, call):
    make = read_only if last else (lambda: np.ones(500))
    with Communicator(SETTINGS, group) as communicator:
        calls = {
            "all_reduce": lambda array: communicator.all_reduce(array),
            "broadcast": lambda array: communicator.broadcast(array, 0),
            "recv": lambda array: communicator.recv(array, 0) if last else communicator.send(array, 1),
            "gather": lambda array: communicator.gather(np.ones(500), [array, np.ones(500)] if last else None, 1),
        }
        if last:
            named = ["gather: gather_list[0]"] if call == "gather" else []
            raises(UnsupportedError, lambda: calls[call](make()), "read-only numpy array", "array.copy()", *named)
        else:
            array = np.ones((2, 500))[:, ::2].T if call == "all_reduce" else make()
            raises(MismatchError, lambda: calls[call](array), "rank 1 refused its call")
            assert (array == 1).all()


@ranks(2)
def test_read_only_arrays_are_read(group):
    with Communicator(SETTINGS, group) as communicator:
        whole, half = np.zeros(1000), np.zeros(250)
        communicator.all_gather_single(whole, read_only())
        communicator.reduce_scatter_single(half, read_only())
        communicator.scatter(half, np.split(read_only(), 2) if rank == 0 else None, 0)
        communicator.reduce(read_only() if rank else np.ones(500), 0)
        communicator.reduce(np.broadcast_to(np.ones(1), 500) if rank else np.ones(500), 0)
        if rank == 0:
            communicator.send(read_only(), 1)
        else:
            communicator.recv(whole[:500], 0)
        assert abs(whole - 1).max() <= BOUND + 1e-6 and (read_only() == 1).all()
        # On rank 0 the list, as numpy does not say that its arrays lie one behind the other. On rank 1 what is strided.
        assert of_all_ranks(communicator.stats.total.copied_bytes, group) == [read_only().nbytes] * 2
