"""A user's DeepSpeed training script that knows nothing of ncz_plugins: a program, as launchers start it by its path.

Leaves what it found in the folder NCZ_TEST_RESULTS. usage: user_script.py --deepspeed_config FILE.json [anything else]
"""

import argparse
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch.distributed as dist
from small_engine import engine_of, loss_of, parameters_sha256

STEPS = 4

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
arguments, _ = parser.parse_known_args()
engine = engine_of(arguments.deepspeed_config)
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
Path(os.environ["NCZ_TEST_RESULTS"], f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
dist.barrier()  # a rank that leaves early can abort the others
dist.destroy_process_group()
