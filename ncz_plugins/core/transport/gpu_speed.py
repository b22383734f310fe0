"""Speed of calls on GPUs, measured: of uncompressed calls, and of gathers over several NCCL groups."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..config import Config
from ..config.fields import format_size
from ..messages import say
from ..runtime.device import Device
from .base import CollectiveTransport, Transport, Work, peer_errors
from .striped import MOST_GROUPS, STRIPED_BYTES

_PROBES = 4  # calls of each size; the fastest one counts
_PROBE_BYTES = (4, 256 << 10, 8 << 20)  # sizes of all-reduces, from small to large; the smallest connects
_MAX_PROBE_SECONDS = 0.5  # expected for the calls of one size; larger sizes are skipped
_GATHERED_BYTES = 16 << 20  # of all ranks together: about the frames of 64 MiB of gradients of two ranks
_MIN_STRIPED_GBPS = 4  # one group fills a slower link
_MAX_STRIPED_GBPS = 200  # a faster link does not go through sockets
_MIN_SPEEDUP = 1.2  # twice the groups must be this many times as fast


def measured_on_gpus(config: Config, device: Device, transport: CollectiveTransport, where: torch.device) -> Config:
    """Measure uncompressed calls on GPUs, and return the settings with their speed as `transport.link_gbps`.

    The speed is that of whatever connects the GPUs: a network, or NVLink. All ranks must call this. It takes some
    tenths of a second at most, and rank 0 prints the result. Raises PeerError.

    Args:
        config: the settings.
        device, transport: the device and transport of the GPU.
        where: this rank's GPU.
    """
    # Time all-reduces of growing sizes, as long as the next size is expected to take less than half a second.
    nbytes, seconds = 0, 0.0
    for larger in _PROBE_BYTES:
        if nbytes > _PROBE_BYTES[0] and _PROBES * seconds * larger / nbytes > _MAX_PROBE_SECONDS:
            break
        tensor = torch.zeros(larger // 4, dtype=torch.float32, device=where)
        seconds = _seconds_of(transport.plain.all_reduce, (tensor, dist.ReduceOp.SUM), device, transport, where)
        nbytes = larger

    # The largest size tells the speed.
    sent = 2 * (transport.world_size - 1) / transport.world_size * nbytes  # bytes of each rank
    gbps = min(max(8e-9 * sent / seconds, 1e-3), 1e4)  # the limits of `transport.link_gbps`
    config = config.resolved(link_gbps=float(f"{gbps:.3g}"))
    least = format_size(config.min_bytes_in_effect(on_gpu=True))
    carried = f"uncompressed calls of GPUs carry {config.transport.link_gbps:g} Gbit/s"
    _say(transport, f"{carried}; tensors of {least} and more are compressed")
    return config


def _say(transport: CollectiveTransport, what: str) -> None:
    if transport.rank == 0:
        say(f"ncz_plugins: {what}", sys.stderr)


def use_fastest_groups(config: Config, device: Device, transport: Transport, where: torch.device) -> None:
    """Measure which number of NCCL groups is fastest for large gathers, and use it: see `Transport.use_groups`.

    Nothing is measured if `transport.connections` is a number, or if uncompressed calls carry less than 4 or more than
    200 Gbit/s. All ranks must call this. Raises PeerError.

    Args:
        config: the settings that `measured_on_gpus` returned.
        device, transport: the device and transport of the GPU.
        where: this rank's GPU.
    """
    is_open = config.transport.connections == "auto"
    if not is_open or not _MIN_STRIPED_GBPS <= config.transport.link_gbps <= _MAX_STRIPED_GBPS:
        return

    nbytes = max(STRIPED_BYTES, _GATHERED_BYTES // transport.world_size)
    own = torch.zeros(nbytes, dtype=torch.uint8, device=where)
    gathered = own.new_empty(transport.world_size * own.numel())

    # Double the number of groups as long as that makes gathers faster. All ranks see the same times.
    groups, seconds, count = 1, 0.0, 1
    while count <= MOST_GROUPS and transport.use_groups(count) == count:
        taken = _seconds_of(transport.plain.all_gather_single, (gathered, own), device, transport, where)
        if count > 1 and _MIN_SPEEDUP * taken > seconds:
            break
        groups, seconds, count = count, taken, 2 * count
    transport.use_groups(groups)
    if groups > 1:
        _say(transport, f"large messages of GPUs travel over {groups} NCCL groups side by side")


def _seconds_of(
    collective: Callable[..., Work],
    arguments: Sequence,
    device: Device,
    transport: CollectiveTransport,
    where: torch.device,
) -> float:
    """Duration of a collective in seconds: the fastest of 4 calls, on the slowest rank."""
    times = []
    with peer_errors("measuring how fast uncompressed calls go"):
        for _ in range(_PROBES):
            device.synchronize()
            started = time.perf_counter()
            collective(*arguments).wait()
            device.synchronize()
            times.append(time.perf_counter() - started)
        slowest = torch.tensor([min(times)], dtype=torch.float64, device=where)
        transport.plain.all_reduce(slowest, dist.ReduceOp.MAX).wait()
    return device.copy_to_host(slowest).item()
