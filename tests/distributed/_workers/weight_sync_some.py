"""A trainer and a worker in a group of ranks 1 and 2, with two versions each of how many are kept."""

import torch
import torch.distributed as dist
from common import attempt, finish, start

from ncz_plugins import WeightSync

rank, _ = start()
random = torch.Generator().manual_seed(0)
first = 0.02 * torch.randn(50_000, generator=random)
versions = [first.bfloat16(), (first + 1e-4 * torch.randn(50_000, generator=random)).bfloat16()]
some, sent, exact, no_member = dist.new_group([1, 2]), [], [], None
if rank != 0:
    for keep in (2, 1):
        sync = WeightSync(some, src=2, keep=keep)
        for weights in versions:
            if rank == 2:
                sync.publish({"w": weights})
                sent.append(sync.bytes_sent)
            else:
                exact.append(torch.equal(sync.receive()["w"], weights))
    no_member = attempt(lambda: WeightSync(some, src=0))
finish({"sent": sent, "exact": exact, "no member": no_member})
