"""What a CUDA graph can repeat, as far as that is decided without a GPU."""

import pytest

from ncz_plugins import UnsupportedError
from ncz_plugins.core.config import QuantizerConfig
from ncz_plugins.core.runtime.stream import require_capturable

BITS = {"mode": "bits", "value": 4}


def test_a_fixed_rate_can_be_captured():
    require_capturable("all_reduce", QuantizerConfig(**BITS))


@pytest.mark.parametrize(
    ("quantizer", "problem"),
    [
        ({}, "sizes that follow from the data. Set quantizer.mode: bits"),
        (BITS | {"kind": "stochastic"}, "the same numbers in every replay"),
        (BITS | {"error_feedback": True}, "error feedback is not offered in a graph"),
    ],
)
def test_what_a_graph_would_repeat_wrongly_is_refused(quantizer, problem):
    with pytest.raises(
        UnsupportedError, match=f"^all_reduce, compressed, can't be captured in a CUDA graph: .*{problem}"
    ):
        require_capturable("all_reduce", QuantizerConfig(**quantizer))
