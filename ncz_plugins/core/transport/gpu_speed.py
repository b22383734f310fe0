"""How fast uncompressed calls go on GPUs, which decides what is worth compressing there."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from ..config import Config
from ..config.fields import format_size
from ..runtime.device import Device
from .base import CollectiveTransport, peer_errors

_PROBES, _PROBE_BYTES = 4, (4, 256 << 10, 8 << 20)  # all-reduces of each of these sizes; the first ones connect
_SECONDS = 0.5  # that those of a size may take


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
        nbytes, seconds = larger, _seconds_of(larger, device, transport, where)
    sent = 2 * (transport.world_size - 1) / transport.world_size * nbytes  # by each rank
    gbps = min(max(8e-9 * sent / seconds, 1e-3), 1e4)  # what a configuration allows
    config = config.resolved(link_gbps=float(f"{gbps:.3g}"))
    if transport.rank == 0:
        print(
            f"ncz_plugins: uncompressed calls of GPUs carry {config.transport.link_gbps:g} Gbit/s; tensors of "
            f"{format_size(config.min_bytes_in_effect(on_gpu=True))} and more are compressed",
            file=sys.stderr,
            flush=True,
        )
    return config


def _seconds_of(nbytes: int, device: Device, transport: CollectiveTransport, where: torch.device) -> float:
    """Of the fastest of some all-reduces, on the rank where that is slowest."""
    tensor, times = torch.zeros(nbytes // 4, device=where), []
    with peer_errors("measuring how fast uncompressed calls go"):
        for _ in range(_PROBES):
            device.synchronize()
            started = time.perf_counter()
            transport.plain.all_reduce(tensor, dist.ReduceOp.SUM).wait()
            device.synchronize()
            times.append(time.perf_counter() - started)
        slowest = torch.tensor([min(times)], dtype=torch.float64, device=where)
        transport.plain.all_reduce(slowest, dist.ReduceOp.MAX).wait()
    return device.seen(slowest).item()
