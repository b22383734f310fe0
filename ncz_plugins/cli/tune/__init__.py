"""`ncz tune`: measures thoroughly on the ranks that there are, or on new ones, and writes the tuning file.

command  the options, and the run from start to output
run_job  the job, on all ranks
rank     what one rank does
show     the output
"""

from .command import add_parser, run

__all__ = ["add_parser", "run"]
