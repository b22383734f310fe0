"""`ncz check`: validates a configuration, and shows what each parameter of a model would get.

command     the options, and the table of settings
model       with --model: the model that SPEC names, built without memory for its weights where possible
treatments  what each of its parameters gets, and what that comes to
table       how that is printed
"""

from .command import add_parser, run

__all__ = ["add_parser", "run"]
