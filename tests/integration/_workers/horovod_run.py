"""Hands an NCZ to functions that `horovod.run` starts, and saves what they return."""

import json
import os
from pathlib import Path

import horovod
import torch

from ncz_plugins.horovod import NCZ


def train(compression: NCZ) -> tuple[list[float], int]:
    """One step; the weights after it, and how many calls were compressed."""
    import horovod.torch as hvd  # in each rank: `train` travels by value

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(hvd.rank()))
    model(inputs).square().sum().backward()
    optimizer.step()
    return model.weight.flatten().tolist(), compression.stats.total.compressed_calls


if __name__ == "__main__":
    found = horovod.run(train, args=(NCZ({"transport": {"min_bytes": 0}}),), np=2, use_gloo=True)
    Path(os.environ["NCZ_TEST_RESULTS"], "rank0.json").write_text(json.dumps(found))
