"""`ncz plan`: would compression pay? Predicts a training step, plain, in bfloat16 and compressed.

`workload` says what is trained, `strategy` what it sends, `catalogue` what machines there are, `simulation` how long a
collective takes, `step` how long a step takes, `verdict` what follows.
"""

from .command import add_parser, run

__all__ = ["add_parser", "run"]
