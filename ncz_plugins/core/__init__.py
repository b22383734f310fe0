"""Compressed collectives, independent of any framework.

communicator      `Communicator`: the public API, one process group from construction to close
collectives       the collectives of a communicator: torch.distributed's signatures, which become calls
pairs             send and receive, and the directions between two ranks that carry them
arguments         what the arguments of collectives must be
arrays            tensors over the memory of what callers pass: torch, numpy, CuPy, DLPack
call              one call: its arguments, how it is treated, and what becomes of it; tensors that it joins
run               the five steps of every call, from decision to counters
group             state of one group on one rank that lasts from call to call
on_host           calls on tensors in host memory: on which thread they run
on_gpu            calls on tensors on a GPU: on which stream or thread they run, and what they wait for
planning          how a compressed call is carried out: segments and frames, schedule, addends
call_description  what the ranks compare before a call
call_comparison   how they compare it, and tell each other how many rows go where
call_queue        runs the calls of one communicator in order, and ends them all after a failure
bypass            rules that decide whether a call goes plain
reasons           reasons to go plain, and the remedy for each: the only place that states remedies
errors            every error that this package raises
messages          lines printed during a training
whole_files       output files, replaced as a whole
json_numbers      numbers that JSON can hold

codec/      tensors to frames and back
config/     settings, and how they are read
runtime/    threads, streams, devices and counters
schedules/  ring, direct and halving exchange
training/   state from step to step: policies, error feedback, guard, records, checkpoints
transport/  connections between ranks
tuning/     measurement of link and coders, and the tuning file

Imports `ncz_plugins.kernels`, and never an adapter, DeepSpeed, Horovod or CuPy.
"""
