"""Routes own the connections of a group, and end with them."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ncz_plugins.core.errors import PeerError
from ncz_plugins.core.runtime.device import Host
from ncz_plugins.core.transport.gloo import GlooTransport
from ncz_plugins.core.transport.routes import Routes, forget_tensors

CPU = torch.device("cpu")


def pair() -> list[Routes]:
    """The routes of two ranks."""
    store, made = dist.HashStore(), [None, None]

    def make(rank: int) -> None:
        made[rank] = Routes(store, rank, 2, timedelta(seconds=30))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def test_host_tensors_go_over_gloo():
    routes = pair()
    for rank, each in enumerate(routes):
        device, transport = each.of(CPU)
        assert isinstance(device, Host) and isinstance(transport, GlooTransport)
        assert (transport.rank, transport.world_size) == (rank, 2)
        assert each.of(CPU).transport is transport
    for each in routes:
        each.close()


def test_gpus_are_not_connected_to_say_that_there_are_no_further_groups():
    """Where one group is asked for: NCCL, which can't connect here, would say so."""
    for each in pair():
        assert each.further_groups(torch.device("cuda", 0)) == []
        assert each.further_groups(CPU) == []
        each.close()


def test_after_closing_there_is_no_route():
    first, second = pair()
    first.close()
    first.close()
    with pytest.raises(PeerError, match="closed"):
        first.of(CPU)
    second.abort(PeerError("gone"))
    second.close()
    with pytest.raises(PeerError, match="closed"):
        second.of(CPU)


def test_an_error_that_is_kept_keeps_no_tensor():
    def fail(tensor):
        raise ValueError("no")

    try:
        fail(torch.zeros(3))
    except ValueError as error:
        kept = error
    inner = kept.__traceback__.tb_next.tb_frame
    assert "tensor" in inner.f_locals
    forget_tensors(kept)
    assert "tensor" not in inner.f_locals
