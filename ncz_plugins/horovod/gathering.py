"""What ranks tell each other over Horovod besides tensors."""

from __future__ import annotations

import json

import horovod.torch as hvd
import torch


def gathered(value, name: str, process_set=hvd.global_process_set) -> list:
    """What each rank of a process set gave, in order of the ranks. All of them must call this.

    It travels as JSON: Horovod's own functions for objects unpickle, which runs what a rank sends.

    Args:
        value: what JSON can hold.
        name: of the operations.
    """
    encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([encoded.numel()], dtype=torch.int64, device="cpu")
    sizes = hvd.allgather(size, name=f"{name}.sizes", process_set=process_set)
    texts = hvd.allgather(encoded, name=name, process_set=process_set).split(sizes.tolist())
    return [json.loads(text.numpy().tobytes()) for text in texts]
