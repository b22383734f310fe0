"""Checks of which one fails on one rank: see test_checks.py."""

import torch
import torch.distributed as dist
from checks import check, run_checks
from common import start

rank, world_size = start()


@check
def passes(group):
    dist.all_reduce(torch.zeros(1), group=group)


@check
def fails_on_rank_1(group):
    assert rank != 1, "as it should"


@check
def passes_afterwards(group):
    dist.all_reduce(torch.zeros(1), group=group)


run_checks()
