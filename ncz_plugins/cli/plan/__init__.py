"""`ncz plan`: predicts a training step, plain, in bfloat16 and compressed, and whether compression pays.

command      the options, and the run from start to output
workload     the training: parameters, and seconds of computing
strategy     the collectives of a step, by strategy (DDP, ZeRO, FSDP ...)
catalogue    instances and costs, from catalogue.yaml and from users' files
step         the predicted time of a step
verdict      whether compression pays, what limits the step, and where that changes
show         the printed output, and JSON
plot         the picture
simulation/  the predicted time of one collective
"""

from .command import add_parser, run

__all__ = ["add_parser", "run"]
