"""`ncz` in torch's names of backends for devices: `torch_backend_names.py BACKEND DEVICE`, on two ranks."""

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from common import leave

backends, device = sys.argv[1], torch.device(sys.argv[2])
torch.set_num_threads(1)
warnings.simplefilter("ignore")
# With a device, torch makes new groups by splitting, in which all ranks take part.
bound = {"device_id": torch.device("cpu", 0)} if backends == "cpu:ncz" and torch.__version__ >= "2.15" else {}
dist.init_process_group(backends, timeout=timedelta(seconds=60), **bound)

from ncz_plugins.torch import backend  # noqa: E402

rank = dist.get_rank()
values = torch.randn(100_000, generator=torch.Generator().manual_seed(rank)).to(device)
every = [torch.empty_like(values) for _ in range(2)]
dist.all_gather(every, values)
with backend.role("gradient"):
    dist.all_reduce(values)
error = float((values - sum(every)).norm() / sum(every).norm())
if bound:
    alone = dist.new_group([1])
    assert (alone is dist.GroupMember.NON_GROUP_MEMBER) == (rank == 0)
    if rank:
        dist.all_reduce(every[1], group=alone)
kinds = {each.type: dist.group.WORLD._get_backend(each) for each in dist.group.WORLD._device_types}
kinds = {kind: getattr(each, "wrapped_pg", each) for kind, each in kinds.items()}  # with TORCH_DISTRIBUTED_DEBUG
ours = sorted(kind for kind, each in kinds.items() if isinstance(each, backend.CompressedBackend))
assert "cpu" not in ours or backend.of_group().stats.total.compressed_calls == 1
leave({"error": error, "ours": ours})
dist.barrier()
dist.destroy_process_group()
