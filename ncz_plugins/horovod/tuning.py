"""Measuring subject for `core.tuning.measure`: Horovod's ranks, over Horovod's own runtime, which carries gradients."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch import Tensor

from ..core.config import Config
from ..core.runtime.statistics import Counters
from ..core.tuning.measure import Subject
from .compressor import NCZ
from .functions import allreduce
from .transport import HorovodTransport


class OfHorovod(Subject):
    """All ranks of Horovod, after `hvd.init`."""

    schedules = ("direct", "ring")  # the ring uses connections of our own, beside Horovod

    def __init__(self, config: Config):
        self.config = config
        self.rank = hvd.rank()
        self.world_size = self.exchanging = hvd.size()
        self.peers = [(peer, peer) for peer in range(self.world_size) if peer != self.rank]

    def highest(self, numbers):
        """Element-wise maximum of numbers over ranks."""
        found = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return hvd.allreduce(found, op=hvd.Max, name=f"ncz.tune.highest.{len(numbers)}").tolist()

    def exchange(self, frame, times=1):
        """Send `frame` (uint8) to every peer and receive theirs, `times` times."""
        transport = HorovodTransport(hvd.global_process_set, "ncz.tune.exchange")
        streams = transport.streams(self.peers, [1] * times, frame.numel(), Counters())
        for stream in times * streams:
            stream.exchange(frame)
        for stream in times * streams:
            stream.receive()

    def plain(self, tensor: Tensor) -> None:
        """Sum a tensor over ranks by Horovod's own all-reduce."""
        hvd.allreduce_(tensor, op=hvd.Sum, name=f"ncz.tune.plain.{tensor.numel()}")

    def compressed(self, tensor: Tensor, config: Config) -> None:
        """Sum a tensor over ranks by a compressed all-reduce with the settings in `config`."""
        # Policies, steps and records do not matter for the speed of a link.
        quantizer = config.quantizer.changed(error_feedback=False, rotation=False)
        compressor = NCZ(Config(quantizer=quantizer, entropy=config.entropy, transport=config.transport))
        allreduce(tensor, op=hvd.Sum, name="ncz.tune.compressed", compression=compressor)
