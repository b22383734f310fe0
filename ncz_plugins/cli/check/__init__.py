"""`ncz check`: validates a configuration, and shows the treatment of each parameter of a model.

command     the options, and the printed table of settings
buckets     warning about DeepSpeed's buckets that are too small to be compressed
model       with --model: finds and builds the model, if possible without memory for its weights
treatments  treatment of each parameter, and what each policy matches
table       the printed tables of --model
"""

from .command import add_parser, run

__all__ = ["add_parser", "run"]
