"""Baseline of a tensor that is sent again and again, so that only its changes need to be sent.

The method is that of lossless weight patches, as in PULSE (arXiv 2602.03839).
"""

from __future__ import annotations

from torch import Tensor


class Baseline:
    """Copy of what this rank sent last. With it, an all-gather or broadcast sends only what has changed, without loss.

    Pass the same object with every call that writes into the same output. Receiving ranks find the previous version in
    the output itself. A sending rank has overwritten its previous version, so this object keeps a copy: it takes as
    much memory as the rank's input. In each call the ranks compare 32-bit checksums of their previous versions. A part
    whose checksums differ (in the first call, or after somebody has changed the output) is sent whole.
    """

    def __init__(self):
        self._sent: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Memory taken by the copy, in bytes."""
        return 0 if self._sent is None else self._sent.nbytes

    def sent(self, like: Tensor) -> Tensor | None:
        """What this rank sent last, 1-D. None before the first call, or if size, dtype or device differ from `like`."""
        same = self._sent is not None and self._sent.numel() == like.numel()
        return self._sent if same and (self._sent.dtype, self._sent.device) == (like.dtype, like.device) else None

    def keep(self, sent: Tensor) -> None:
        """Copy `sent`, 1-D, for the next call."""
        if self.sent(sent) is None:
            self._sent = sent.clone()
        else:
            self._sent.copy_(sent)

    def forget(self) -> None:
        """Make the next call send everything. One rank may call this alone."""
        self._sent = None
