"""A program that ends while a call is under way, and has not closed its communicator, ends as if it had, and soon."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from on_rank import be_silent, leave, others_have_ended, rank, world_size
from scenarios import report, run_ranks

from ncz_plugins import Communicator

HALVES = {"schedule": "halving", "min_bytes": 0}
CALLS = {"raises": HALVES, "peer gone": HALVES}  # how the call under way travels; in the other cases as by default
TIMEOUT_SECONDS = 120.0  # which nobody may wait for
SOON = 60.0  # 10 seconds for calls under way, 5 for the connections, and more for a busy machine


def end_in_a_call(case: str) -> None:
    dist.init_process_group("gloo")
    last = rank == world_size - 1
    communicator = Communicator({"transport": {"timeout_seconds": TIMEOUT_SECONDS, **CALLS.get(case, {})}})
    tensor = torch.ones(1_000_000)
    communicator.all_reduce(tensor)
    leave({"program ends": time.time()})
    if last and case == "peer gone":
        os.kill(os.getpid(), signal.SIGKILL)
    if last and case == "peer silent":
        be_silent(others_have_ended, SOON + 2)
        os._exit(0)
    communicator.all_reduce(tensor, async_op=case != "waited for")
    if case == "raises":
        raise ValueError("an error of the program")
    leave({"program ends": time.time()})
    sys.exit()  # where a scenario returns, its process leaves out what Python and C++ tidy up: see forked_ranks.py


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
    finished = run_ranks(3, end_in_a_call, tmp_path, case)
    assert [each.returncode for each in finished] == codes, report(finished)
    for each, code in zip(finished, codes):
        assert "terminate called" not in each.output
        assert ("ValueError: an error of the program" in each.output) == (code == 1)
    others = finished[:2] if case.startswith("peer") else finished
    assert max(each.ended - each.result["program ends"] for each in others) < SOON, report(finished)
