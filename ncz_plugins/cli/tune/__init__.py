"""`ncz tune`: measures link and coders on a launcher's ranks or on new ones, and writes the tuning file.

command  the options, and the run from start to output
run_job  starts the job on all ranks
rank     the part of one rank
show     the printed output
"""

from .command import add_parser, run

__all__ = ["add_parser", "run"]
