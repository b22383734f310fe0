"""A program that ends while a call is under way ends as if it were not, and soon."""

import signal

import pytest
from processes import report, run

SOON = 20.0  # 10 seconds for calls under way, 5 for the connections, and some for a busy machine


@pytest.mark.parametrize(
    ("case", "codes"),
    [
        ("returns", [0, 0, 0]),
        ("raises", [1, 1, 1]),
        ("waited for", [0, 0, 0]),
        ("peer gone", [0, 0, -signal.SIGKILL]),
        ("peer silent", [0, 0, 0]),
    ],
)
def test_the_exit_status_is_that_of_the_program(case, codes, tmp_path):
    finished = run("endings", 3, tmp_path, case)
    assert [each.returncode for each in finished] == codes, report(finished)
    for each, code in zip(finished, codes):
        assert "terminate called" not in each.output
        assert ("ValueError: an error of the program" in each.output) == (code == 1)
    left = [each.result["seconds"] for each in finished if each.result]
    assert len(left) >= 2 and max(left) < SOON
