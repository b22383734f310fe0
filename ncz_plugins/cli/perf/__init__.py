"""`ncz perf`: collectives timed beside other ways to exchange a tensor, over links as slow as wanted.

command     the options, and the run from start to output
request     from the options to jobs
job         one job: what all ranks measure
run_jobs    runs the jobs, on a launcher's ranks or on new ones
launch      one process per rank, on this machine; rendezvous, where Horovod's ranks meet
ranks       which ranks there are, or are to be started
link        network namespaces joined by links of a given rate
rank        what one rank does
measure     contenders in turns on the same data: time, bytes and error
contenders  the ways to exchange a tensor that are compared; --peers names them
data        the tensors
verify      what a collective should have given
gather      what every rank tells all others
network     bytes that really left through an interface
show        the output; table and plot, its parts
"""

from .command import add_parser, run
from .job import COLLECTIVES, DATA, Job

__all__ = ["COLLECTIVES", "DATA", "Job", "add_parser", "run"]
