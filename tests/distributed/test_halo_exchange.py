"""The example of a halo exchange: its fields against a solver of its own here, and its error against the budget."""

import math
import os
import re
import sys

import forking
import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_rank import rank, world_size
from repository import FORKED_RANKS, ROOT
from scenarios import IMPORTS, OF_ALL, ranks

from examples.halo_exchange import Part, Region, bound_of, hot_spots, largest_error, solve
from ncz_plugins import Communicator
from ncz_plugins.cli.perf.launch import free_port

SIZE, STEPS, DEPTH = 61, 50, 7  # nothing divides anything, and the last exchange is for one step
SECONDS = 120


def reference() -> np.ndarray:
    """The whole plate after all steps, without ranks and halos."""
    plate = hot_spots(Region(0, SIZE, 0, SIZE), SIZE).numpy()
    for _ in range(STEPS):
        around = plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
        plate[1:-1, 1:-1] = 0.2 * plate[1:-1, 1:-1] + 0.2 * around
    return plate


def new_part(depth: int = DEPTH, dtype: torch.dtype = torch.float64) -> Part:
    return Part(rank, world_size, SIZE, depth, dtype)


def opened(group, bound: float) -> Communicator:
    transport = {"min_bytes": 64, "link_gbps": 1}  # so that nothing is measured
    return Communicator({"quantizer": {"mode": "abs", "value": bound}, "transport": transport}, group)


def error_of(part: Part) -> float:
    """The largest error of this rank's own cells."""
    own = part.own
    return np.abs(part.own_field.numpy() - reference()[own.top : own.bottom, own.left : own.right]).max()


@ranks(1, 3, 4)
@pytest.mark.parametrize("depth", [1, DEPTH, 25])  # with 25, halos reach over the next rank's cells
def test_the_plain_solver_is_that_of_one_process(group, depth):
    part = new_part(depth)
    course = solve(part, dist, STEPS, depth)
    assert error_of(part) < 1e-13
    assert len(course.heat) == math.ceil(STEPS / depth)
    assert course.heat[-1] == pytest.approx(reference().sum(), rel=1e-12)


@ranks(1, 3, 4)
@pytest.mark.parametrize("budget, dtype", [(1e-1, "float64"), (1e-3, "float32"), (1e-6, "float64")])
def test_the_error_is_within_the_budget(group, budget, dtype):
    part = new_part(dtype=getattr(torch, dtype))
    with opened(group, bound_of(budget, STEPS, DEPTH)) as communicator:
        course = solve(part, communicator, STEPS, DEPTH)
        total = communicator.stats.total
    rounding = 10 * STEPS * torch.finfo(part.field.dtype).eps
    assert error_of(part) <= budget + rounding
    assert abs(course.heat[-1] - reference().sum()) <= (budget + rounding) * SIZE**2
    if world_size > 1:
        assert total.compressed_calls >= 2 * len(course.heat), total
        assert error_of(part) > 0.01 * bound_of(budget, STEPS, DEPTH)


class Worst:
    """Messages whose every element is off by the whole bound, to the same side."""

    all_reduce = staticmethod(dist.all_reduce)

    def __init__(self, bound: float):
        self._bound = bound

    def batch_isend_irecv(self, operations: list) -> list:
        for handle in dist.batch_isend_irecv(operations):
            handle.wait()
        for each in operations:
            if each.op is dist.irecv:
                each.tensor += self._bound
        return []


@ranks(3, 4)
def test_bounds_of_exchanges_add_up_to_no_more_than_the_budget(group):
    budget = 1e-3
    bound = bound_of(budget, STEPS, DEPTH)
    plain, worst = new_part(), new_part()
    solve(plain, dist, STEPS, DEPTH)
    solve(worst, Worst(bound), STEPS, DEPTH)
    assert bound < largest_error(plain, worst) <= budget  # one bound is not enough


@ranks(3)
def test_an_error_of_any_rank_is_found(group):
    for value, expected in ((2.0, 2.0), (math.nan, math.inf), (math.inf, math.inf)):
        plain, other = new_part(), new_part()
        plain.field.zero_()
        other.field.zero_()
        if rank == 1:
            other.own_field[-1, 3] = value
        assert largest_error(plain, other) == expected


# ------------------------------------------------------------------ the program


def run(folder, *options: str) -> tuple[int, str]:
    """The program's exit status on 2 ranks, and what it printed."""
    sizes = ["--size", "200", "--steps", "64", "--depth", "16", "--min-bytes", "1024"]
    script = [str(ROOT / "examples" / "halo_exchange.py"), *sizes, *options]
    command = [sys.executable, str(FORKED_RANKS), IMPORTS, "torch", "2", str(free_port()), *script]
    environment = os.environ | OF_ALL
    process = forking.start(command, cwd=folder, env=environment, log=(log := folder / "output.log"))
    try:
        status = process.wait(SECONDS)
    finally:
        forking.end(process)
    return status, log.read_text(errors="replace")


def test_the_program_ends_well_within_the_budget_and_draws(tmp_path):
    status, said = run(tmp_path, "--budget", "1e-4", "--picture", "halo.png")
    assert status == 0, said
    assert float(re.search(r"ratio ([\d.]+)", said)[1]) > 2, said
    assert "bound of an exchange  2.5e-05" in said and "more than the budget" not in said
    assert (tmp_path / "halo.png").read_bytes().startswith(b"\x89PNG")


def test_the_program_fails_beyond_the_budget(tmp_path):
    """The bound is forced to be a hundred times what the budget is."""
    status, said = run(tmp_path, "--budget", "1e-4", "--bound", "1e-2")
    assert status != 0, said
    [error] = re.findall(r"The field is off by ([\d.e-]+), more than the budget of 0.0001\.", said)
    assert 1e-4 < float(error) <= 4e-2
