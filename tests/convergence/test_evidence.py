"""What is missing in the evidence is told and trained, and the page shows what is there."""

from __future__ import annotations

import evidence
import frontier
from frontier import DEFAULT, PLAIN


def test_the_documentation_shows_the_committed_evidence():
    assert evidence.markdown(evidence.results(frontier.committed())) in evidence.PAGE.read_text()


def test_what_has_run_is_not_missing_and_the_cheapest_comes_first():
    left = [job for _, job in evidence.missing({}, seeds=1)]
    hours = [each for each, _ in evidence.missing({}, seeds=1)]
    assert hours == sorted(hours)
    record = {"loss": 2.0, "bits": 4.0}
    done = {job: record for job in left}
    assert list(evidence.missing(done, seeds=1)) == []
    assert {job.seed for _, job in evidence.missing(done, seeds=2)} == {1}


def test_a_cell_is_compared_with_plain_of_the_same_seed():
    cell = evidence.Cell("SGD", "GPT", 2)
    runs = {cell.job(PLAIN, 3): {"loss": 2.0, "bits": 32.0}, cell.job(DEFAULT, 3): {"loss": 2.1, "bits": 4.0}}
    found = evidence.results(runs)[cell, DEFAULT]
    assert f"{found}" == "+5.00% (1; 8.0 x)"
