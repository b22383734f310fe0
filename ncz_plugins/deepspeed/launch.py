"""Launcher that runs an unchanged DeepSpeed training script with the plugin installed.

deepspeed --module ncz_plugins.deepspeed.launch train.py --deepspeed_config ds.json ...
"""

from __future__ import annotations

import os
import runpy
import sys

import ncz_plugins.deepspeed  # noqa: F401

_USAGE = "usage: deepspeed [launcher options] --module ncz_plugins.deepspeed.launch TRAIN.py [its arguments]"


def main() -> None:
    # DeepSpeed's launcher puts --local_rank=N before the script's name. Pass it on as the script's first argument.
    """Run the script in sys.argv as `__main__`. Exits with a message if there is no such file."""
    arguments = sys.argv[1:]
    at = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), None)
    if at is None:
        sys.exit(_USAGE)
    script = arguments[at]
    if not os.path.isfile(script):
        sys.exit(f"{script}: no such file (looked in {os.getcwd()})\n{_USAGE}")
    sys.argv = [script, *arguments[:at], *arguments[at + 1 :]]
    sys.path[0] = os.path.dirname(os.path.abspath(script))  # as if Python had been given the script
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
