"""Elastic training in which one rank is killed in the middle of a step, once.

usage: horovod_elastic.py HOST
The rank on that host is killed.

Every rank that is left at the end saves its result.
"""

import os
import signal
import sys

import horovod.torch as hvd
import torch
from horovod_common import gradients, largest_error, loss_of, new_model, save, sha256

import ncz_plugins.horovod
from ncz_plugins.horovod import NCZ

STEPS, FATAL_STEP = 8, 5
BOUND = 2e-4


def die_in_the_fatal_step(gradient) -> None:
    if state.step == FATAL_STEP and os.environ["HOROVOD_HOSTNAME"] == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state) -> None:
    """All steps that are left, every second of which is committed."""
    started_with.append(
        {
            "step": state.step,
            "ncz_step": compressor.training.step,
            "size": hvd.size(),
            "sha256": sha256(model.parameters()),
        }
    )
    while state.step < STEPS:
        optimizer.zero_grad()
        loss_of(model, state.step).backward()
        local = gradients(model)
        optimizer.synchronize()
        average = [hvd.allreduce(g, name=f"plain {i}") for i, g in enumerate(local)]
        errors.append(largest_error(gradients(model), average))
        with optimizer.skip_synchronize():
            optimizer.step()
        state.step += 1
        if state.step % 2 == 0:
            state.commit()


hvd.init()
model = new_model()
quantizer = {"mode": "abs", "value": BOUND, "error_feedback": True}
compressor = NCZ(quantizer=quantizer, statistics={"report_every": 1})
sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=compressor)
# In the middle of the model: some gradients are pending by then, others are still to come.
model.b.weight.register_hook(die_in_the_fatal_step)
started_with, errors = [], []
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, ncz=compressor, step=0)
train(state)
# An unnamed tensor that goes Horovod's own way, and one that does not.
integers = ncz_plugins.horovod.allreduce(torch.arange(9) + hvd.rank(), op=hvd.Sum, compression=compressor)
save(
    {
        "started_with": started_with,
        "errors": errors,
        "sha256": sha256(model.parameters()),
        "ncz_step": compressor.training.step,
        "integers": integers.tolist(),
        "steps": [{"calls": s.calls, "compressed": s.compressed_calls} for s in compressor.stats.steps],
        "wire_bytes": compressor.stats.total.wire_bytes,
        "plain_bytes": compressor.stats.total.plain_bytes,
    }
)
