"""`ncz report`: what the records of a run (`statistics.jsonl`) say about it, in figures, a picture and words.

command    the options, and the run from start to output
read       the records, from their file
summary    their figures
verdict    what limited the run, in words
show plot  what people see
"""

from .command import add_parser, run

__all__ = ["add_parser", "run"]
