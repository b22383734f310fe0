"""Real processes over gloo: right, within the bound, and bit-identical on every rank."""

import pytest
from processes import results, run


@pytest.mark.parametrize("world_size", [1, 2, 3])  # four of them below, in nodes
def test_every_collective_on_every_rank(world_size, tmp_path):
    outcomes = results(run("collectives", world_size, tmp_path, seconds=200))
    names = [name for name in outcomes[0] if not name.startswith("reduce_scatter")]
    assert len(names) > 60
    for name in names:
        assert len({outcome[name] for outcome in outcomes}) == 1, name


def test_every_collective_with_two_ranks_to_a_node(tmp_path):
    outcomes = results(run("collectives", 4, tmp_path, "cpu", "2", seconds=200))
    for name in outcomes[0]:
        if not name.startswith("reduce_scatter"):
            assert len({outcome[name] for outcome in outcomes}) == 1, name
