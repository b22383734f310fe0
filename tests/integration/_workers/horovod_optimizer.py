"""Takes a few steps for each case of a JSON file with compressed gradients, beside Horovod's own from the same weights.

usage: horovod_optimizer.py CASES.json CONFIG.json
The settings of a case are explained in test_horovod_optimizer.py. NCZ_CONFIG names CONFIG.json, too.
"""

import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod_common import gradients, largest, largest_error, loss_of, new_model, save, sha256

from ncz_plugins.horovod import NCZ

STEPS = 3
FILE = sys.argv[2]
CONFIG = json.loads(Path(FILE).read_text())
NCZ_AS = {
    "class": lambda: NCZ,
    "instance": lambda: NCZ(),
    "file": lambda: NCZ(FILE),
    "mapping": lambda: NCZ(CONFIG),
    "sections": lambda: NCZ(**CONFIG),
}


class AsFloat32(hvd.Compression.none):
    """For the plain run: Horovod can't add bfloat16."""

    @staticmethod
    def compress(tensor):
        return tensor.float(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


def start(compression, settings: dict):
    """A new model with its optimizer."""
    model = new_model(getattr(torch, settings.get("dtype", "float32")))
    arguments = dict(settings.get("arguments", {}))
    if "op" in arguments:
        arguments["op"] = getattr(hvd, arguments["op"])
    if isinstance(arguments.get("groups"), list):
        arguments["groups"] = [[model.get_parameter(name) for name in group] for group in arguments["groups"]]
    if not settings.get("unnamed"):
        arguments["named_parameters"] = model.named_parameters()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, hvd.DistributedOptimizer(sgd, compression=compression, **arguments)


def compare(settings: dict) -> dict:
    compression = NCZ_AS[settings.get("written", "mapping")]()
    stats = (NCZ.default() if compression is NCZ else compression).stats
    model, optimizer = start(compression, settings)
    plain_model, plain_optimizer = start(
        AsFloat32 if settings.get("dtype") == "bfloat16" else hvd.Compression.none, settings
    )
    everyones = settings.get("branches", ["ab"])
    branches = everyones[hvd.rank() % len(everyones)]
    passes = settings.get("arguments", {}).get("backward_passes_per_step", 1)
    order = []
    hooks = [p.register_hook(lambda _, name=name: order.append(name)) for name, p in model.named_parameters()]
    errors, magnitudes = [], []
    for step in range(STEPS):
        plain_model.load_state_dict(model.state_dict())
        for each, its_optimizer in ((model, optimizer), (plain_model, plain_optimizer)):
            its_optimizer.zero_grad()
            for number in range(step * passes, (step + 1) * passes):
                loss_of(each, number, branches=branches).backward()
            its_optimizer.synchronize()
        errors.append(largest_error(gradients(model), gradients(plain_model)))
        magnitudes.append(largest(gradients(plain_model)))
        with optimizer.skip_synchronize():
            optimizer.step()
        if step == 0:
            for hook in hooks:
                hook.remove()
    return {
        "order": order,
        "gradient_bytes": sum(p.nbytes for p in model.parameters()),
        "errors": errors,
        "magnitudes": magnitudes,
        "sha256": sha256(model.parameters()),
        "steps": [step.to_dict() for step in stats.steps],
    }


hvd.init()
save({name: compare(settings) for name, settings in json.loads(Path(sys.argv[1]).read_text()).items()})
