"""`ncz report`: what the records of a run (`statistics.jsonl`) say, as numbers, picture and words.

command  the options, and the run from start to output
read     reader of the file of records
summary  numbers of the run: sums, medians and shares
verdict  what limited the run, in words
planned  comparison of the run with what `ncz plan` predicted
show     the printed output, and JSON
plot     the picture
"""

from .command import add_parser, run

__all__ = ["add_parser", "run"]
