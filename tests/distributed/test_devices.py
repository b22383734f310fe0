"""Communicators on each kind of device, in real processes."""

import pytest
from processes import DEVICES, GPU, results, run


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_is_served_as_any_other(device, tmp_path):
    outcomes = results(run("devices", 3, tmp_path, device, seconds=150))
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize(("ranks", "node"), [(2, []), (3, []), (4, ["2"])])
@pytest.mark.parametrize("device", [GPU])
def test_every_collective_on_a_gpu(device, ranks, node, tmp_path):
    outcomes = results(run("collectives", ranks, tmp_path, device, *node, seconds=150))
    for name in outcomes[0]:
        if not name.startswith("reduce_scatter"):
            assert len({outcome[name] for outcome in outcomes}) == 1, name
