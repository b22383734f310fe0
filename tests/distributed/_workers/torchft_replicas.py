"""DiLoCo over torchft with compressed all-reduces. Replica 2 dies inside one of them; some time later replica 3 joins.

    torchft_replicas.py cpu | cuda

Every process is a replica. Those that are left at the end leave what they saw.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from common import digest, leave
from torch import nn
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

from ncz_plugins.torch.torchft import CompressedProcessGroup

FATAL_STEP, JOINED_STEP, LAST_STEP = 2, 4, 9
TIMEOUT = timedelta(seconds=20)
rank = int(os.environ["RANK"])
device = torch.device(sys.argv[1])
plain = ProcessGroupGloo if device.type == "cpu" else ProcessGroupNCCL
folder = Path(os.environ["NCZ_TEST_RESULT"]).parent
address, went_on = folder / "lighthouse", folder / "went on"


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)


class Group(CompressedProcessGroup):
    """Takes notes; that of replica 2 dies."""

    def __init__(self):
        super().__init__({"transport": {"min_bytes": 0}}, plain(TIMEOUT), TIMEOUT)
        self.sizes, self.seconds = [], []

    def configure(self, store_addr, replica_id, rank, world_size, *more, **named):
        started = time.monotonic()
        super().configure(store_addr, replica_id, rank, world_size, *more, **named)
        self.seconds.append(time.monotonic() - started)
        self.sizes.append(world_size)

    def allreduce(self, tensors, opts):
        if rank == 2 and manager.current_step() == FATAL_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().allreduce(tensors, opts)


if rank == 0:
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=5000, heartbeat_timeout_ms=2000)
    written = address.with_suffix(".new")
    written.write_text(f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}")
    written.rename(address)
if rank == 3:
    wait_for(went_on)
wait_for(address)

torch.set_num_threads(1)
torch.manual_seed(rank)  # torchft gives all of them the weights of one
model = nn.Sequential(nn.Linear(64, 307), nn.ReLU(), nn.Linear(307, 7)).to(device)
inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
group = Group()
manager = Manager(
    pg=group,
    load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["inner"])),
    state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
    min_replica_size=2,
    use_async_quorum=False,
    timeout=TIMEOUT,
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    hostname="127.0.0.1",
    lighthouse_addr=address.read_text(),
    replica_id=f"replica_{rank}",
)
(folder / f"ready {rank}").touch()
if rank < 3:  # they begin together
    for each in range(3):
        wait_for(folder / f"ready {each}")
generator = torch.Generator().manual_seed(rank)
steps = []  # at which a round began, as the manager counts
with DiLoCo(manager, [model], inner, outer, sync_every=2):
    while manager.current_step() < LAST_STEP:
        steps.append(manager.current_step())
        if steps[-1] > FATAL_STEP:
            went_on.touch()
        if steps[-1] == JOINED_STEP:
            wait_for(folder / "ready 3")
        for _ in range(2):
            x, target = torch.randn(16, 64, generator=generator), torch.randint(0, 7, (16,), generator=generator)
            inner.zero_grad()
            nn.functional.cross_entropy(model(x.to(device)), target.to(device)).backward()
            inner.step()
        time.sleep(0.2)  # so that replica 3 takes part before the end
leave(
    {
        "steps": steps,
        "sizes": group.sizes,
        "seconds": group.seconds,
        "weights": digest(torch.cat([each.view(-1).cpu() for each in model.parameters()])),
        "compressed_calls": group.stats.total.compressed_calls,
        "calls": group.stats.total.calls,
        "bypasses": group.stats.total.bypasses,
        "ratio": group.stats.total.ratio,
    }
)
(folder / f"done {rank}").touch()
if rank == 0:  # the lighthouse goes last
    wait_for(folder / "done 1")
    wait_for(folder / "done 3")
manager.shutdown(wait=False)
