"""Named checks of a worker: a failure is that of its check and its rank, and the others go on."""

import pytest
from processes import names, passed, results, run


def test_a_failure_hides_nothing(tmp_path):
    finished = run("failing", 2, tmp_path)
    assert names("failing") == ["passes", "fails_on_rank_1", "passes_afterwards"]
    assert all(list(result) == names("failing") for result in results(finished))
    passed(finished, "passes")
    passed(finished, "passes_afterwards")
    with pytest.raises(AssertionError, match="--- rank 1\nTraceback(.|\n)*as it should") as failure:
        passed(finished, "fails_on_rank_1")
    assert "rank 0" not in str(failure.value)
    with pytest.raises(AssertionError, match="rank 0 exited with 0 and did not finish it"):
        passed(finished, "is not there")
