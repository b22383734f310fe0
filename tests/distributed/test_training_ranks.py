"""Policies, error feedback and checkpoints with real processes; the workers check the numbers."""

from processes import results, run


def test_what_lasts_from_step_to_step(tmp_path):
    first, *others = results(run("training", 4, tmp_path))
    assert set(first) == {
        "all_reduce off",
        "reduce_scatter off",
        "all_reduce 2",
        "reduce_scatter 2",
        "policies",
        "resumed off",
        "resumed 2",
    }
    assert all(other == first for other in others)  # on all ranks the same, to the bit
