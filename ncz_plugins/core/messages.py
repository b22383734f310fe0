"""Lines printed during a training."""

from __future__ import annotations

import sys
from typing import TextIO


def say(line: str, to: TextIO | None = None) -> None:
    """Print a line and flush. A character that the stream's encoding lacks is written as an escape, such as \\xfc.

    Args:
        to: stream to print to; None: standard output.
    """
    stream = sys.stdout if to is None else to
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
