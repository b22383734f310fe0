"""`ncz perf`: speed of collectives, compressed, plain and by other means, over links of any rate.

command      the options, and the run from start to output
request      from options to jobs
job          one job: what all ranks measure
run_jobs     runs jobs on a launcher's ranks or on new ranks
ranks        the ranks of a launcher, or those to start
launch       starts one process per rank on this machine
rendezvous   server at which Horovod's ranks meet
link         network namespaces, joined by links of a given rate
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
