"""A user's DeepSpeed training script that knows nothing of ncz_plugins.

usage: script.py --deepspeed_config FILE.json [anything else]
"""

import argparse
import sys

import deepspeed
from common import finish, loss_of, parameters_sha256, save, start

STEPS = 4

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
arguments, _ = parser.parse_known_args()
engine = start(arguments.deepspeed_config)
losses = []
for step in range(STEPS):
    loss = loss_of(engine, step)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())

result = {
    "argv": sys.argv,
    "name": __name__,
    "file": __file__,
    "path": sys.path[0],
    "main": sys.modules["__main__"].__file__,
    "plugin_imported": "ncz_plugins" in sys.modules,
    "losses": losses,
    "sha256": parameters_sha256(engine),
}
if result["plugin_imported"]:
    compression = engine.communication_compression
    result["stats"] = None if compression is None else compression.stats.to_dict()
save(result)
finish()
