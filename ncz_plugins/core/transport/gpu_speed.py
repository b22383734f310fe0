"""How fast calls go on GPUs: uncompressed ones, which decide what is worth compressing there, and gathers of frames."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ..config import Config
from ..config.fields import format_size
from ..messages import say
from ..runtime.device import Device
from .base import CollectiveTransport, Transport, Work, peer_errors
from .striped import MOST_GROUPS, STRIPED_BYTES

_PROBES, _PROBE_BYTES = 4, (4, 256 << 10, 8 << 20)  # all-reduces of each of these sizes; the first ones connect
_SECONDS = 0.5  # that those of a size may take
_GATHERED_BYTES = 16 << 20  # of all ranks together: of two, frames of 64 MiB of gradients or so
_SLOW, _FAST = 4, 200  # Gbit/s: one group fills a slower link, and faster ones don't go through sockets
_GAIN = 1.2  # times as fast: worth twice the groups


def measured_on_gpus(config: Config, device: Device, transport: CollectiveTransport, where: torch.device) -> Config:
    """The settings for tensors on GPUs, with the speed at which uncompressed calls go there, which rank 0 says.

    That counts whatever connects the GPUs: a network, or NVLink within a host. A collective of all ranks, which takes
    some tenths of a second at most. Raises PeerError.

    Args:
        where: this rank's GPU.
    """
    nbytes, seconds = 0, 0.0
    for larger in _PROBE_BYTES:
        if nbytes > _PROBE_BYTES[0] and _PROBES * seconds * larger / nbytes > _SECONDS:
            break
        tensor = torch.zeros(larger // 4, dtype=torch.float32, device=where)
        all_reduce = partial(transport.plain.all_reduce, tensor, dist.ReduceOp.SUM)
        nbytes, seconds = larger, _seconds_of(all_reduce, device, transport, where)
    sent = 2 * (transport.world_size - 1) / transport.world_size * nbytes  # by each rank
    gbps = min(max(8e-9 * sent / seconds, 1e-3), 1e4)  # what a configuration allows
    config = config.resolved(link_gbps=float(f"{gbps:.3g}"))
    least = format_size(config.min_bytes_in_effect(on_gpu=True))
    carried = f"uncompressed calls of GPUs carry {config.transport.link_gbps:g} Gbit/s"
    _say(transport, f"{carried}; tensors of {least} and more are compressed")
    return config


def _say(transport: CollectiveTransport, what: str) -> None:
    if transport.rank == 0:
        say(f"ncz_plugins: {what}", sys.stderr)


def use_fastest_groups(config: Config, device: Device, transport: Transport, where: torch.device) -> None:
    """Send large gathers over as many groups side by side as carry the most, if the settings leave that open.

    Calls at a fixed rate go over the user's own group. A collective of all ranks. Raises PeerError.

    Args:
        config: the settings, with the speed of uncompressed calls.
        where: this rank's GPU.
    """
    is_open = config.transport.connections == "auto" and config.quantizer.bits is None
    if not is_open or not _SLOW <= config.transport.link_gbps <= _FAST:
        return
    nbytes = max(STRIPED_BYTES, _GATHERED_BYTES // transport.world_size)
    own = torch.zeros(nbytes, dtype=torch.uint8, device=where)
    gathered = own.new_empty(transport.world_size * own.numel())

    def seconds_with(groups: int) -> float | None:
        if transport.use_groups(groups) != groups:
            return None
        return _seconds_of(lambda: transport.plain.all_gather_into_tensor(gathered, own), device, transport, where)

    groups, seconds = 1, seconds_with(1)
    while groups < MOST_GROUPS:
        with_more = seconds_with(2 * groups)
        if with_more is None or _GAIN * with_more > seconds:
            transport.use_groups(groups)
            break
        groups, seconds = 2 * groups, with_more
    if groups > 1:
        _say(transport, f"large frames of GPUs travel over {groups} NCCL groups side by side")


def _seconds_of(
    collective: Callable[[], Work], device: Device, transport: CollectiveTransport, where: torch.device
) -> float:
    """Of the fastest of some calls, on the rank where that is slowest."""
    times = []
    with peer_errors("measuring how fast uncompressed calls go"):
        for _ in range(_PROBES):
            device.synchronize()
            started = time.perf_counter()
            collective().wait()
            device.synchronize()
            times.append(time.perf_counter() - started)
        slowest = torch.tensor([min(times)], dtype=torch.float64, device=where)
        transport.plain.all_reduce(slowest, dist.ReduceOp.MAX).wait()
    return device.copy_to_host(slowest).item()
