"""A launcher for tests: kernels run on a real card, on copies of CPU tensors, as those of the emulator do."""

from __future__ import annotations

import torch
from torch import Tensor

from ncz_plugins.kernels.cuda.arguments import Table
from ncz_plugins.kernels.cuda.nvrtc import CupyLauncher


class CardLauncher:
    """Copies the memory of all arguments to the GPU and, once the kernel has run, back."""

    def __init__(self):
        self._launcher = CupyLauncher()

    def launch(self, kernel: str, dtype: torch.dtype, grid: int, block: int, *arguments) -> None:
        """As `Launcher` says, but for tensors on the CPU. Tensors that share memory share it on the GPU, too."""
        memory: dict[int, tuple[Tensor, Tensor]] = {}  # address: as it is here, and its copy there

        def there(argument):
            if isinstance(argument, Table):
                return argument.with_tensors(there)
            if not isinstance(argument, Tensor):
                return argument
            storage = argument.untyped_storage()
            if storage.data_ptr() not in memory:
                here = torch.empty(0, dtype=torch.uint8).set_(storage)
                memory[storage.data_ptr()] = here, here.cuda()
            first = argument.storage_offset() * argument.element_size()
            return memory[storage.data_ptr()][1][first : first + argument.nbytes]

        on_card = [there(argument) for argument in arguments]
        if not memory:
            raise TypeError(f"{kernel} needs a tensor to work on")
        self._launcher.launch(kernel, dtype, grid, block, *on_card)
        for here, copy in memory.values():
            here.copy_(copy)
