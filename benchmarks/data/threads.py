"""One thread for torch: sums then have one order, so that a set has the same bits whoever makes it."""

from contextlib import contextmanager

import torch


@contextmanager
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
