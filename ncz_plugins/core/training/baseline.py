"""What ranks already have of a tensor that is sent again and again, so that only its changes need to be sent.

The idea is that of patches for weights without loss, as in PULSE (arXiv 2602.03839).
"""

from __future__ import annotations

from torch import Tensor


class Baseline:
    """Makes an all-gather or broadcast send what has changed since its last call, without loss.

    Pass the same object with every call into the same output. Ranks that receive find the version before in the output
    itself. A rank that sends has overwritten it, and keeps a copy of what it sent here: memory for one more of its
    input. In each call the ranks compare checksums of all versions, of 32 bits. What they don't hold alike, because it
    is the first call, or somebody has changed it in between, is sent whole.
    """

    def __init__(self):
        self._sent: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the copy takes."""
        return 0 if self._sent is None else self._sent.nbytes

    def sent(self, like: Tensor) -> Tensor | None:
        """What this rank sent last, 1-D; None if it was no tensor such as `like`, or there was none."""
        same = self._sent is not None and self._sent.numel() == like.numel()
        return self._sent if same and (self._sent.dtype, self._sent.device) == (like.dtype, like.device) else None

    def keep(self, sent: Tensor) -> None:
        """Copy what was sent."""
        if self.sent(sent) is None:
            self._sent = sent.clone()
        else:
            self._sent.copy_(sent)

    def forget(self) -> None:
        """The next call sends all. Not every rank has to call it."""
        self._sent = None
