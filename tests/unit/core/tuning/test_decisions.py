"""What follows from measurements."""

import pytest

from ncz_plugins.core.config import MIN_BYTES
from ncz_plugins.core.tuning.decisions import best, connections_to_use, crossover, ranks_on_a_core, rans_costs
from ncz_plugins.core.tuning.tuning_file import SpeedComparison, Trial


def trials(*seconds: float) -> list[Trial]:
    return [Trial(schedule="ring", frame_bytes=1 << 20, nbytes=1 << 24, seconds=each) for each in seconds]


def test_the_usual_choice_wins_unless_another_is_clearly_faster():
    usual, other = trials(1.0, 0.98)
    assert best([usual, other]) is usual
    usual, other = trials(1.0, 0.9)
    assert best([usual, other]) is other


def compared(*plain_and_compressed: tuple[int, float, float]) -> list[SpeedComparison]:
    return [
        SpeedComparison(nbytes=nbytes, plain_seconds=plain, compressed_seconds=compressed)
        for nbytes, plain, compressed in plain_and_compressed
    ]


MIB = 1 << 20


@pytest.mark.parametrize(
    ("comparisons", "least"),
    [
        (compared((MIB, 1, 2), (4 * MIB, 4, 2), (16 * MIB, 16, 4)), 4 * MIB),
        (compared((MIB, 1, 0.5), (4 * MIB, 4, 5), (16 * MIB, 16, 4)), 16 * MIB),  # gains at 1 MiB may be luck
        (compared((MIB, 1, 0.5), (16 * MIB, 16, 4)), MIB),
        (compared((MIB, 1, 2), (16 * MIB, 16, 17)), "never"),
        (compared((MIB, 1, 2)), 4 * MIB),  # there was no time for a large one
        (compared((16, 1, 2)), MIN_BYTES),
        (compared((16 * MIB, 16, 15.9)), "never"),  # too little to be told from noise
    ],
)
def test_compression_begins_where_all_larger_sizes_gain(comparisons, least):
    assert crossover(comparisons) == least


def test_costs_of_two_arrays_give_those_of_each_value():
    per_value, per_rest = rans_costs([1.0 + 2.0 * 0.9, 1.0 + 2.0 * 0.1], [0.9, 0.1])
    assert (per_value, per_rest) == (pytest.approx(1.0), pytest.approx(2.0))


def test_costs_are_never_negative():
    assert rans_costs([1.0, 2.0], [0.9, 0.1]) == (1.0, 0.0)
    assert rans_costs([9.0, 1.0], [0.9, 0.1]) == (0.0, 10.0)


@pytest.mark.parametrize(
    ("each", "together", "used"),
    [(1, 100, 8), (1, 5.7, 8), (1, 5.5, 4), (1, 1.8, 4), (1, 1.6, 1), (1, 1, 1), (2, 2, 1)],
)
def test_connections_are_added_as_long_as_they_carry_more(each, together, used):
    assert connections_to_use(lambda count: min(count * each, together)) == (used, min(used * each, together))


@pytest.mark.parametrize(
    ("cores", "machines", "ranks"),
    [
        ([1.9, 0.1], [[0, 1]], 1),  # of two cores, which one rank has had for longer than the other one
        ([1.9, 0.1], [[0], [1]], 10),
        ([0.3, 0.9, 0.2, 0.6], [[0, 1, 2, 3]], 2),
        ([2, 2, 2, 0.1], [[0], [1], [2], [3]], 0.5),  # one is busy with other work
        ([2, 0.5, 0.4, 0.6], [[0], [1, 2, 3]], 2),
    ],
)
def test_ranks_of_a_machine_share_its_cores_evenly(cores, machines, ranks):
    assert ranks_on_a_core(cores, machines) == pytest.approx(ranks)
