"""Statistics: bytes that were sent, bytes that plain calls would have sent, times, and why calls went plain."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import asdict, dataclass, field


@dataclass
class Counters:
    """Sums over calls, for one rank. Bytes are those that this rank sends; times are in seconds.

    Attributes:
        calls: collectives that were called.
        compressed_calls: calls that went compressed; the others are in `bypasses`.
        bytes_in: bytes of the tensors passed in.
        plain_bytes: bytes that a bandwidth-optimal plain collective would have sent. For a compressed call with nodes
            (`transport.hierarchy`), only bytes to other nodes.
        wire_bytes: bytes that were sent: frames, agreements, and plain calls in full.
        local_bytes: bytes that were sent uncompressed to ranks of the same node, on top of `wire_bytes`.
        copied_bytes: bytes that were copied between the caller's tensors and contiguous memory: of tensors that are not
            contiguous, and of several tensors that one call joins. To memory and back counts twice.
        bypasses: reason to go plain -> calls.
        bypassed_bytes: reason to go plain -> bytes that these calls sent, as part of `wire_bytes`.
        plain_bytes_by_role, wire_bytes_by_role: role -> `plain_bytes` and `wire_bytes` of calls with a role:
            "gradient", "parameter" or "activation".
        replayed_calls: compressed calls on a GPU whose launches were replayed, see recorded.py.
        not_replayed: reason -> compressed calls on a GPU that could have been replayed, were they like earlier ones.
        sent_whole: reason -> calls with a baseline in which the segment of some rank was sent whole, see `Baseline`.
        agree_seconds: from the start of a call until all ranks agree on the quantization steps, including sums inside
            the node.
        measure_seconds: measuring the tensor, as part of `agree_seconds`.
        local_seconds: transfers and sums inside the node.
        encode_seconds, decode_seconds: in the codec. Decoding and adding for a frame that is then encoded counts
            as encoding.
        wait_seconds: waiting for peers and the network, also while agreeing.
        plain_seconds: in the plain collective, for calls that went plain after they had begun. Calls that go plain
            from the start are not timed.
        seconds: from the start of a call to its end, on the thread that runs it.
        coders: coder -> frames that this rank wrote with it, in host memory.
    """

    calls: int = 0
    compressed_calls: int = 0
    bytes_in: int = 0
    plain_bytes: int = 0
    wire_bytes: int = 0
    local_bytes: int = 0
    copied_bytes: int = 0
    bypasses: dict[str, int] = field(default_factory=dict)
    bypassed_bytes: dict[str, int] = field(default_factory=dict)
    plain_bytes_by_role: dict[str, int] = field(default_factory=dict)
    wire_bytes_by_role: dict[str, int] = field(default_factory=dict)
    replayed_calls: int = 0
    not_replayed: dict[str, int] = field(default_factory=dict)
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
        """plain_bytes / wire_bytes; 1.0 if nothing was sent."""
        return self.plain_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def add(self, other: Counters) -> None:
        """Add all counters of `other`."""
        sums = vars(self)
        for name, theirs in vars(other).items():
            if not theirs:  # most counters of a call are zero: skipping them keeps small calls fast
                continue
            if isinstance(theirs, dict):
                mine = sums[name]
                for key, count in theirs.items():
                    mine[key] = mine.get(key, 0) + count
            else:
                sums[name] += theirs

    def describe(self) -> str:
        """A summary in one line."""
        bypassed = ", ".join(f"{calls} x {reason}" for reason, calls in self.bypasses.items())
        inside = f" and {self.local_bytes / 1e6:.2f} MB inside nodes" if self.local_bytes else ""
        return (
            f"{self.bytes_in / 1e6:.2f} MB handed in, {self.plain_bytes / 1e6:.2f} -> {self.wire_bytes / 1e6:.2f} MB "
            f"sent{inside}, ratio {self.ratio:.2f}, {self.seconds * 1e3:.0f} ms"
            + (f", plain: {bypassed}" if bypassed else "")
        )

    def to_dict(self) -> dict:
        """All counters and `ratio`, ready for JSON."""
        return {**asdict(self), "ratio": self.ratio}


class Statistics:
    """Counters of a run, in total and by training step. Safe to read while a collective runs.

    Attributes:
        steps: the counters of the latest `history` finished training steps, oldest first.
    """

    def __init__(self, history: int):
        self.steps: deque[Counters] = deque(maxlen=history)
        self._before = Counters()  # finished steps
        self._step = Counters()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Statistics({self.total.calls} calls, {self.total.describe()})"

    @property
    def total(self) -> Counters:
        """Counters of all calls so far."""
        with self._lock:
            return self._summed()

    def record(self, counters: Counters) -> None:
        """Add the counters of one call."""
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
