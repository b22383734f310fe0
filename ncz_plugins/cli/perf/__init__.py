"""`ncz perf`: speed of collectives, plain, cast to 16 bits, by DDP's hooks and compressed, as nccl-tests shows it.

command      the options, and the run from start to output
request      from options to a job
job          what all ranks measure
run_job      runs the job on a launcher's ranks or on new ranks
ranks        the ranks of a launcher, or those to start
launch       starts one process per rank on this machine
rank         the part of one rank
measure      times the contenders in turns on the same data: seconds, bytes and error
data         tensors to send
verify       exact results of collectives, and errors against them
gather       values from every rank to every rank
network      bytes that left through a network interface
show         the printed output, and JSON
table        the printed table
plot         the picture
contenders/  ways to exchange a tensor; --peers names them
"""

from .command import add_parser, run
from .job import COLLECTIVES, DATA, Job

__all__ = ["COLLECTIVES", "DATA", "Job", "add_parser", "run"]
