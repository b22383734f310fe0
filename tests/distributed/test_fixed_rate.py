"""Calls at a fixed rate, in real processes: every collective, the bits of the CPU, and on a GPU without the host."""

import pytest
from processes import DEVICES, results, run


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_a_fixed_rate(device, ranks, tmp_path):
    outcomes = results(run("fixed_rate", ranks, tmp_path, device))
    assert all(outcome == outcomes[0] for outcome in outcomes)
