"""What Python does first in every process that tests start: tests/conftest.py puts this folder on their path.

Imports make half a million objects that stay. Looking for garbage among them, while more are imported and again at the
end, is a third of what a process takes that imports PyTorch and does little else.
"""

import atexit
import gc
import sys

gc.set_threshold(100_000)


@atexit.register
def stop_looking() -> None:
    """What is still there goes with the process. Triton, where DeepSpeed has imported it, prints what was not found."""
    if "triton" in sys.modules:
        gc.disable()
    else:
        gc.freeze()
