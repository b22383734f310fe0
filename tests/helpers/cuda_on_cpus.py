"""Lets programs that ask for CUDA devices run on a machine without: Megatron-Core makes all its tensors on "cuda"."""

import torch
from torch.overrides import TorchFunctionMode


class CudaOnCpus(TorchFunctionMode):
    """Within it, or after `enable`, tensors that are made on "cuda" are made on the CPU, and types say "torch.cuda".

    Nothing else is changed: collectives, autograd and optimizers are torch's own.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        # Megatron-Core sorts parameters by the names of their types, and refuses those of CPUs.
        is_name = function is torch.Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.") if is_name else result

    def enable(self) -> None:
        """Enter for good, and answer what is asked of the CUDA device outside of tensors."""
        torch.cuda.current_device = lambda: "cpu"
        torch.cuda.current_stream = lambda device=None: None  # Megatron-Core lets it wait for CUDA graphs only
        torch.cuda.synchronize = lambda device=None: None
        self.__enter__()
