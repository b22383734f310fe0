"""An array as libraries other than torch and numpy have it."""

from __future__ import annotations

import torch


class Foreign:
    """An array of another library, of which DLPack alone is known."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()
