"""Counters: what was sent, what it would have been uncompressed, and why some calls went uncompressed."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import asdict, dataclass, field


@dataclass
class Counters:
    """Sums over calls, as one rank sees them. Bytes are what this rank sends; times are in seconds.

    Attributes:
        calls: collectives that were called.
        compressed_calls: those that went compressed; the others are in `bypasses`.
        bytes_in: bytes of the tensors handed in.
        plain_bytes: what a bandwidth-optimal plain collective would have sent; where ranks are grouped into nodes
            (`transport.hierarchy`) and the call went compressed, to other nodes only.
        wire_bytes: what was sent: frames, agreements, and bypassed calls in full.
        local_bytes: what was sent uncompressed to ranks of the same node, on top of `wire_bytes`.
        bypasses: reason -> calls.
        bypassed_bytes: reason -> what these calls sent, as part of `wire_bytes`.
        plain_bytes_by_role, wire_bytes_by_role: both kinds of bytes, by what tensors were, where that was said:
            "gradient", "parameter" or "activation".
        sent_whole: reason -> calls with a baseline in which some rank's part was sent whole, see `Baseline`.
        agree_seconds: from the start of a call until all ranks agree on the quantization steps, including sums inside
            the node.
        measure_seconds: measuring the tensor, as part of `agree_seconds`.
        local_seconds: exchanging and adding up inside the node.
        encode_seconds, decode_seconds: inside the codec (decode + add + encode counts as encode).
        wait_seconds: waiting for peers and the network, also while agreeing.
        plain_seconds: in the plain collective, for calls that turned out to need it once they were under way. The time
            of calls that go plain at once is not measured.
        seconds: from the start of a call to its end, on the thread that runs it.
        coders: coder -> frames that this rank wrote with it, in host memory.
    """

    calls: int = 0
    compressed_calls: int = 0
    bytes_in: int = 0
    plain_bytes: int = 0
    wire_bytes: int = 0
    local_bytes: int = 0
    bypasses: dict[str, int] = field(default_factory=dict)
    bypassed_bytes: dict[str, int] = field(default_factory=dict)
    plain_bytes_by_role: dict[str, int] = field(default_factory=dict)
    wire_bytes_by_role: dict[str, int] = field(default_factory=dict)
    sent_whole: dict[str, int] = field(default_factory=dict)
    agree_seconds: float = 0.0
    measure_seconds: float = 0.0
    local_seconds: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    wait_seconds: float = 0.0
    plain_seconds: float = 0.0
    seconds: float = 0.0
    coders: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """plain_bytes / wire_bytes; 1.0 where nothing was sent."""
        return self.plain_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def add(self, other: Counters) -> None:
        for name, theirs in vars(other).items():
            if not theirs:  # most are zero in most calls, and this must not slow small calls down
                continue
            mine = getattr(self, name)
            if isinstance(mine, dict):
                for key, count in theirs.items():
                    mine[key] = mine.get(key, 0) + count
            else:
                setattr(self, name, mine + theirs)

    def describe(self) -> str:
        """One short line for people."""
        bypassed = ", ".join(f"{calls} x {reason}" for reason, calls in self.bypasses.items())
        inside = f" and {self.local_bytes / 1e6:.2f} MB inside nodes" if self.local_bytes else ""
        return (
            f"{self.bytes_in / 1e6:.2f} MB handed in, {self.plain_bytes / 1e6:.2f} -> {self.wire_bytes / 1e6:.2f} MB "
            f"sent{inside}, ratio {self.ratio:.2f}, {self.seconds * 1e3:.0f} ms"
            + (f", plain: {bypassed}" if bypassed else "")
        )

    def to_dict(self) -> dict:
        """Plain numbers, ready for JSON; includes the ratio."""
        return {**asdict(self), "ratio": self.ratio}


class Statistics:
    """Counters over a whole run and per training step. Safe to read while a collective runs.

    Attributes:
        steps: the counters of the latest `history` finished training steps, oldest first.
    """

    def __init__(self, history: int):
        self.steps: deque[Counters] = deque(maxlen=history)
        self._before = Counters()  # of all finished steps
        self._step = Counters()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Statistics({self.total.calls} calls, {self.total.describe()})"

    @property
    def total(self) -> Counters:
        """Those of all calls until now."""
        with self._lock:
            return self._summed()

    def record(self, counters: Counters) -> None:
        """Add one call."""
        with self._lock:
            self._step.add(counters)

    def end_step(self) -> Counters:
        """Close the current training step and return its counters. The caller decides when a step ends."""
        with self._lock:
            finished, self._step = self._step, Counters()
            self._before.add(finished)
            self.steps.append(finished)
            return finished

    def to_dict(self) -> dict:
        """`total` and `steps`, ready for JSON."""
        with self._lock:
            return {"total": self._summed().to_dict(), "steps": [step.to_dict() for step in self.steps]}

    def _summed(self) -> Counters:
        total = Counters()
        total.add(self._before)
        total.add(self._step)
        return total
