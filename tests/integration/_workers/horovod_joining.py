"""Elastic training that a worker joins and leaves: 2 ranks, then 3, then 2 again.

Before the worker joins, the others change their configuration, which it is to take over.

usage: horovod_joining.py HOSTS
HOSTS is the file that the discovery script prints; rank 0 changes it.

Every rank that is left at the end saves its result.
"""

import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod_common import loss_of, new_model, save, sha256

from ncz_plugins.horovod import NCZ

STEPS_AT_A_SIZE = 4
CHANGING_STEP, CHANGED_VALUE = 2, 0.05
CONFIG = {
    "quantizer": {"kind": "stochastic", "mode": "rms", "value": 0.1, "error_feedback": True},
    "transport": {"min_bytes": 0},
}
SLOTS = {2: "localhost:2\n", 3: "localhost:2\n127.0.0.1:1\n"}  # two names of one machine are two hosts to Horovod


@hvd.elastic.run
def train(state) -> None:
    """Steps until 2, 3 and 2 ranks have taken enough of them. Each is committed, which looks for other hosts too."""
    seen.append({"size": hvd.size(), "step": state.step, "ncz_step": compressor.training.step})
    value = torch.tensor([compressor.config.quantizer.value], dtype=torch.float64)
    seen[-1]["values"] = hvd.allgather(value, name="values").tolist()
    taken = 0
    while True:
        optimizer.zero_grad()
        loss_of(model, state.step).backward()
        optimizer.step()
        state.step += 1
        taken += 1
        if state.step == CHANGING_STEP:
            compressor.config = {**CONFIG, "quantizer": {**CONFIG["quantizer"], "value": CHANGED_VALUE}}
        state.joined |= hvd.size() == 3
        if taken >= STEPS_AT_A_SIZE:
            if hvd.size() == 2 and state.joined:
                return
            if hvd.rank() == 0:
                unfinished = hosts.with_suffix(".part")
                unfinished.write_text(SLOTS[5 - hvd.size()])
                unfinished.rename(hosts)
            time.sleep(0.2)
        state.commit()


hvd.init()
hosts = Path(sys.argv[1])
model = new_model()
compressor = NCZ(CONFIG)
sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=compressor)
seen = []
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, ncz=compressor, step=0, joined=False)
train(state)
total = compressor.stats.total
save(
    {
        "seen": seen,
        "step": state.step,
        "ncz_step": compressor.training.step,
        "sha256": sha256(model.parameters()),
        "all_compressed": total.calls == total.compressed_calls > 0,
    }
)
