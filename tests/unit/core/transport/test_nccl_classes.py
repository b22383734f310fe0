"""Torch's own classes of NCCL groups, as far as they go without a GPU: made, asked and called, but never connected."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ncz_plugins.core.communicator import Communicator
from ncz_plugins.core.errors import PeerError
from ncz_plugins.core.on_gpu import GpuCalls
from ncz_plugins.core.transport import nccl
from ncz_plugins.core.transport.nccl_classes import is_nccl, make_nccl_group, nccl_class_of, set_timeout
from ncz_plugins.core.transport.plain import TorchCollectives

GPU = torch.device("cuda", 0)
SECONDS = timedelta(seconds=7)
TYPES = dist.ProcessGroup.BackendType
CLASSES = [
    getattr(dist, name)
    for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy")
    if hasattr(dist, name)
]
METHODS = (
    *("allreduce", "_reduce_scatter_base", "_allgather_base", "alltoall_base", "broadcast", "send", "recv"),
    *("_start_coalescing", "_end_coalescing", "rank", "size", "abort"),
)

needs_nccl2 = pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL2"), reason="a torch without ProcessGroupNCCL2")


def kept(group):
    """`group`, which lives for ever: the end of a ProcessGroupNCCL2 ends a process without a CUDA driver."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    return group


def nccl2(rank: int = 0, size: int = 1):
    return kept(make_nccl_group(dist.ProcessGroupNCCL2, dist.HashStore(), rank, size, GPU, SECONDS))


def alone() -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, SECONDS)


def users_group(backend, kind=TYPES.CUSTOM, gloo=None) -> dist.ProcessGroup:
    """A process group in which `backend` serves GPUs and gloo the CPU."""
    gloo = gloo or alone()
    group = dist.ProcessGroup(dist.HashStore(), gloo.rank(), gloo.size())
    group._set_default_backend(TYPES.GLOO)
    group._register_backend(torch.device("cpu"), TYPES.GLOO, gloo)
    if backend is not None:
        group.bound_device_id = GPU  # as torch does before it makes a ProcessGroupNCCL2
        group._register_backend(torch.device("cuda"), kind, backend)
    return group


@pytest.mark.parametrize("which", CLASSES)
def test_every_class_is_nccl_and_has_what_is_called(which):
    assert is_nccl(which.__new__(which))
    assert [name for name in METHODS if not hasattr(which, name)] == []
    assert hasattr(which, "_set_default_timeout") or hasattr(which, "set_timeout")


def test_what_is_not_nccl():
    """With a torch that has no NCCL as well."""
    gloo = alone()
    assert not any(map(is_nccl, (None, gloo, users_group(None))))
    assert nccl_class_of(gloo) is None  # has no backends
    assert nccl_class_of(users_group(None)) is None
    assert nccl_class_of(users_group(gloo, TYPES.GLOO)) is None


@needs_nccl2
def test_the_class_of_the_users_group_is_found():
    assert nccl_class_of(users_group(nccl2())) is dist.ProcessGroupNCCL2
    options = dist.ProcessGroupNCCL.Options()
    options.lazy_init = True
    lazy = kept(dist.ProcessGroupNCCLLazy(dist.HashStore(), 0, 1, options, GPU))
    assert nccl_class_of(users_group(lazy)) is dist.ProcessGroupNCCLLazy
    beside = kept(make_nccl_group(dist.ProcessGroupNCCLLazy, dist.HashStore(), 0, 1, GPU, SECONDS))
    assert type(beside) is dist.ProcessGroupNCCL2


@needs_nccl2
def test_a_group_of_the_new_class_has_its_gpu_and_its_options():
    group = kept(make_nccl_group(dist.ProcessGroupNCCL2, dist.HashStore(), 2, 4, torch.device("cuda", 3), SECONDS))
    assert (group.rank(), group.size(), group.bound_device_id) == (2, 4, torch.device("cuda", 3))
    assert group.options._timeout == SECONDS and group.options.is_high_priority_stream
    set_timeout(group, 2 * SECONDS)
    assert group.options._timeout == 2 * SECONDS
    nccl.require_healthy([group])


@pytest.mark.skipif(not dist.is_nccl_available(), reason="a torch without NCCL")
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be made")
@pytest.mark.parametrize("which", [None, getattr(dist, "ProcessGroupNCCL", None)])
def test_beside_other_groups_the_first_class_is_made(which):
    with pytest.raises(ValueError, match="ProcessGroupNCCL is only supported with GPUs"):
        make_nccl_group(which, dist.HashStore(), 0, 1, GPU, SECONDS)


@needs_nccl2
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would connect")
def test_groups_of_our_own_are_of_the_class_of_the_users_group(monkeypatch):
    """Their first call finds no driver."""
    opened = []
    monkeypatch.setattr(nccl, "keep_in_forks", lambda group: opened.append(kept(group)))
    store = dist.HashStore()

    def open_one(rank: int) -> None:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, 2, SECONDS)
        group = users_group(nccl2(rank, 2), gloo=gloo)
        with Communicator(None, group, store=store) as communicator:
            with pytest.raises(PeerError, match="connecting to the other GPUs failed"):
                communicator._queue.routes.of(GPU)

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(open_one, range(2)))
    assert [type(group) for group in opened] == [dist.ProcessGroupNCCL2] * 2
    assert all(group.bound_device_id == GPU and group.options._timeout > 2 * SECONDS for group in opened)


@needs_nccl2
def test_calls_at_a_fixed_rate_run_over_the_users_own_group_and_further_ones_of_ours():
    mine, further = nccl2(), [object(), object()]
    routes = SimpleNamespace(further_groups=lambda device: further)
    group = SimpleNamespace(rank=0, world_size=1)
    calls = GpuCalls(group, GPU, SimpleNamespace(routes=routes), users_group(mine), None)
    for captured, expected in ((False, [mine, *further]), (True, [mine])):
        plain = calls._fixed_rate_transport(captured).plain
        assert plain._groups() == expected and plain._group() is mine


@needs_nccl2
@pytest.mark.parametrize(
    "call",
    [
        lambda plain, x: plain.all_reduce(x, dist.ReduceOp.AVG),
        lambda plain, x: plain.reduce_scatter_single(x, x.clone()),
        lambda plain, x: plain.all_gather_single(x, x.clone()),
        lambda plain, x: plain.all_to_all_single(x, x.clone()),
        lambda plain, x: plain.broadcast(x, 0),
        lambda plain, x: plain.exchange([(0, x)], [(0, x.clone())]),
    ],
    ids=["all_reduce", "reduce_scatter_single", "all_gather_single", "all_to_all_single", "broadcast", "exchange"],
)
def test_the_new_class_takes_the_arguments_of_each_collective(call):
    """It refuses nothing but that there is no driver, or that a tensor is in host memory."""
    with pytest.raises(RuntimeError, match="(?i)cuda|device|driver"):
        call(TorchCollectives(nccl2), torch.zeros(4))


@needs_nccl2
def test_messages_of_the_new_class_go_together():
    group = nccl2()
    with pytest.raises(RuntimeError) as caught:
        TorchCollectives(lambda: group).exchange([(0, torch.zeros(4))], [(0, torch.zeros(4))])
    assert "_end_coalescing" in str(caught.traceback[-1].statement)
