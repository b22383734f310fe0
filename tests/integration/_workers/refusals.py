"""Starts an engine for each case of a JSON file, {name: [configuration of each rank]}, and saves the errors.

usage: refusals.py CASES.json [NAME of a case that is not caught]
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from common import finish, save, start
from deepspeed import init_distributed

import ncz_plugins.deepspeed  # noqa: F401

file, *uncaught = (argument for argument in sys.argv[1:] if not argument.startswith("-"))
init_distributed()
errors = {}
for name, configs in json.loads(Path(file).read_text()).items():
    try:
        start(configs[dist.get_rank()])
        errors[name] = None
    except Exception as error:
        if name in uncaught:
            raise
        errors[name] = {"kind": type(error).__name__, "message": str(error)}
save(errors)
finish()
