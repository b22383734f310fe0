"""What the plugin asks of DeepSpeed's engine."""

import pytest

pytest.importorskip("deepspeed")

from deepspeed.comm.torch import TorchBackend

from ncz_plugins import UnsupportedError
from ncz_plugins.deepspeed.engine import require_replaced


class ReducesByItself(TorchBackend):
    """As DeepSpeed's backend for oneCCL does."""

    def all_reduce(self, *arguments, **more):
        pass


def test_a_backend_that_reduces_by_itself_is_refused():
    require_replaced(object.__new__(TorchBackend))
    with pytest.raises(UnsupportedError, match="communicates by ReducesByItself"):
        require_replaced(object.__new__(ReducesByItself))
