"""Measurement over limited links: bytes must really cross them, and no idle time may help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ncz_plugins.cli.perf.job import Job
from ncz_plugins.cli.perf.measure import Measurement, Turns
from ncz_plugins.core.errors import NczError

from .peers import CONTENDERS

# Sent before every call over a limited link. An idle link lets a burst of 128 KiB through at once, which would be all
# of a small compressed tensor.
_DRAIN_BYTES = 256 << 10
_MIN_SHARE = 0.95  # smallest accepted share of the expected bytes


@dataclass(frozen=True)
class LinkJob(Job):
    """Job of ranks behind links.

    Attributes:
        link: rate of each link as in --link; None for no links.
    """

    link: str | None = None


class LinkMeasurement(Measurement):
    """Run of one job on one rank behind a link, with the contenders of the laboratory.

    Attributes:
        job: a LinkJob.
    """

    contenders = CONTENDERS

    def wait(self) -> None:
        """Use up the burst of each link, then wait until all ranks are ready for the next call."""
        if self.job.link:
            dist.all_reduce(torch.zeros(_DRAIN_BYTES, dtype=torch.uint8, device="cpu"), group=self.between)
        super().wait()

    def record(self, turn: Turns, nbytes: int, count: int, name: str, op: str) -> dict[str, Any]:
        """The record of one contender at one size. Raises NczError if its bytes took a way around the links."""
        record = super().record(turn, nbytes, count, name, op)
        # The bytes that all ranks together must send at least.
        least = record["wire_bytes"]
        if name == "plain":
            passes = 2 if self.job.collective == "all_reduce" else 1
            least = passes * (self.ranks - 1) * nbytes
        # Ranks that share a node also exchange bytes inside it, so only ranks with links of their own are checked.
        if self.job.link and len(set(self.namespaces)) == self.ranks and least:
            what = f"{name}, {self.job.collective} of {nbytes:,} bytes"
            require_crossing(what, self.job.link, least, record["network_bytes"])
        return record


def require_crossing(what: str, link: str, least: int, seen: float | None) -> None:
    """Raise NczError if clearly less than `least` bytes went through the links.

    Some tolerance is needed: the kernel may count bytes with the next call, and calls differ a little in size.

    Args:
        what: what was sent, for the message.
        link: rate of the links, for the message.
        least: bytes that must go through the links.
        seen: bytes that were counted; None if nothing is counted.
    """
    if seen is None or seen < _MIN_SHARE * least:
        counted = "no bytes are counted" if seen is None else f"only {seen:,.0f} did"
        raise NczError(
            f"{what}: {least:,} bytes must go through the links of {link}, but {counted}: the traffic takes another "
            "way, so its time means nothing; is GLOO_SOCKET_IFNAME or HOROVOD_GLOO_IFACE set to something else?"
        )
