"""A trainer and its workers: versions that follow each other, a worker that lost its weights, one that changed them."""

from contextlib import suppress

import torch
import torch.distributed as dist
from common import attempt, finish, start

from ncz_plugins import UnsupportedError, WeightSync

VERSIONS, LOST, CHANGED = 6, 3, 4  # the last two: before which version that happens to rank 2


def versions() -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    made = [{"w": 0.02 * torch.randn(50_000, generator=random), "n": torch.tensor(0)}]
    for number in range(1, VERSIONS):
        made.append({"w": made[-1]["w"] + 1e-4 * torch.randn(50_000, generator=random), "n": torch.tensor(number)})
    return [{"w": each["w"].bfloat16(), "n": each["n"]} for each in made]


rank, world_size = start()
sync, sent, exact = WeightSync(src=1), [], []
trainer = rank == 1
for number, state in enumerate(versions()):
    if rank == 2 and number == LOST:
        sync = WeightSync(src=1)  # as after a restart
    if rank == 2 and number == CHANGED:
        weights["w"].zero_()  # noqa: F821 - of the version before
    if trainer:
        assert sync.publish(state) == number + 1
        sent.append(sync.bytes_sent)
    else:
        weights = sync.receive()
        exact.append(all(torch.equal(weights[name], tensor) for name, tensor in state.items()))
unfit = {"w": torch.ones(3).to_sparse()}
unpublished = attempt((lambda: sync.publish(unfit)) if trainer else sync.receive)
if trainer:
    with suppress(UnsupportedError):
        sync.publish([torch.ones(3)])
no_mapping = None if trainer else attempt(sync.receive)
if not trainer:
    weights["w"] = unfit["w"]  # which the next version replaces
if trainer:
    published = sync.publish(state)
else:
    weights = sync.receive()
    published = all(torch.equal(weights[name], tensor) for name, tensor in state.items())
refused = attempt(sync.receive if trainer else lambda: sync.publish({}))
alone = WeightSync(dist.new_group([0]), src=0) if rank == 0 else dist.new_group([0]) and None
if alone is not None:
    assert alone.publish({"w": torch.ones(3)}) == 1 and alone.bytes_sent == 0
outcomes = {"refused": refused, "unpublished": unpublished, "no mapping": no_mapping}
finish({"sent": sent, "exact": exact, "published": published} | outcomes)
