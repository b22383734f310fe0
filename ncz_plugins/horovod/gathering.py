"""Exchange of small values other than tensors between ranks, over Horovod."""

from __future__ import annotations

import json

import horovod.torch as hvd
import torch


def gathered(value, name: str, process_set=hvd.global_process_set) -> list:
    """The values that all ranks of a process set passed, in order of the ranks. All of them must call this.

    Values travel as JSON. Horovod's own functions for objects unpickle what other ranks send, which can run code.

    Args:
        value: anything that JSON can hold.
        name: the name of Horovod's operations.
    """
    encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([encoded.numel()], dtype=torch.int64, device="cpu")
    sizes = hvd.allgather(size, name=f"{name}.sizes", process_set=process_set)
    texts = hvd.allgather(encoded, name=name, process_set=process_set).split(sizes.tolist())
    return [json.loads(text.numpy().tobytes()) for text in texts]
