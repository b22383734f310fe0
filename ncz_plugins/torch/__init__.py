"""Plugins for PyTorch's own parallelism. Importing this package imports nothing; import the module you need.

ddp.py            DistributedDataParallel: `ddp.compress(model, "ncclz")`
fsdp.py           FSDP2: `fsdp.compress(model, "ncclz")`
replicas.py       the process group that FSDP2 averages replicas over
tensor_parallel.py  equal gradients for what tensor parallelism replicates
functional.py     collectives that autograd goes through
backend.py        the backend "ncz", for programs that offer no other place
backend_calls.py  its calls: which go compressed, and how they become those of a Communicator
roles.py          what it takes a tensor for: a gradient, a weight or an activation
torchft.py        a process group for torchft and DiLoCo
compression.py    base class of what `ddp.compress` and `fsdp.compress` return
work.py           works of torch that stand for handles of ours
private.py        torch's private names that these files use
"""
