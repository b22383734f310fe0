"""The classes of NCCL groups in torch: which ones there are, and how they differ.

Since torch 2.14 there are three: ProcessGroupNCCL, ProcessGroupNCCL2 and ProcessGroupNCCLLazy. None inherits from
another. From 2.15 on "nccl" makes a ProcessGroupNCCL2; TORCH_DIST_USE_NCCL2=0, or the name "nccl-legacy", a
ProcessGroupNCCL.

A ProcessGroupNCCL belongs to the GPU of its first tensor, and so does a ProcessGroupNCCL2 in torch 2.14. In torch 2.15
a ProcessGroupNCCL2 must be told its GPU when it is made.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

_NAMES = ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy")


def is_nccl(backend: object) -> bool:
    """Whether `backend` is an NCCL group of torch, of any class."""
    return isinstance(backend, tuple(getattr(dist, name) for name in _NAMES if hasattr(dist, name)))


def nccl_class_of(group: dist.ProcessGroup) -> type | None:
    """The class of NCCL groups that serves the GPUs of a process group. None if NCCL does not."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except (RuntimeError, AttributeError):  # nothing serves them
        return None
    return type(backend) if is_nccl(backend) else None


def make_nccl_group(
    nccl_class: type | None,
    store: dist.Store,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: timedelta,
) -> dist.ProcessGroup:
    """A new NCCL group of this rank's GPU. It connects in its first call, which all ranks must make.

    Args:
        nccl_class: the class of the user's NCCL group, which the new group gets too. None: the user has no NCCL group.
        timeout: how long to wait for the others when connecting, and until torch's watchdog ends a call.
    """
    options = dist.ProcessGroupNCCL.Options()  # of all classes
    options._timeout = timeout
    options.is_high_priority_stream = True
    if nccl_class in (None, dist.ProcessGroupNCCL):
        return dist.ProcessGroupNCCL(store, rank, world_size, options)

    # ProcessGroupNCCLLazy only adds groups of two ranks for single messages, and here messages go together.
    if not hasattr(options, "lazy_init"):  # torch 2.14
        return dist.ProcessGroupNCCL2(store, rank, world_size, options)
    options.lazy_init = True  # else it would connect here
    return dist.ProcessGroupNCCL2(store, rank, world_size, options, device)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the time-out of later calls of an NCCL group, and of its abort."""
    # ProcessGroupNCCL has the first name in all versions. ProcessGroupNCCL2 has the second one only.
    (getattr(group, "_set_default_timeout", None) or group.set_timeout)(timeout)
