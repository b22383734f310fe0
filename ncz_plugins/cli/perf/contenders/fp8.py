"""Contender that sends 8-bit floats: E4M3 codes with a scale for each 128 values, around a plain collective.

That is how DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) and torchao send activations to experts. FP8 codes can't be
added, so collectives with a sum lack this contender.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .collectives import of_torch, send_around
from .exchange import Contender, Context, Exchange

_BLOCK = 128  # values that share a scale
_LARGEST = 448.0  # of E4M3
_SCALE_BYTES = 4
_BLOCK_BYTES = _BLOCK + _SCALE_BYTES
_COLLECTIVES = frozenset({"all_gather", "broadcast", "all_to_all", "sendrecv"})


class Fp8(Exchange):
    """Exchange of blocks of 128 codes and a float32 scale.

    The last block of each part may be shorter: it is filled up with zeros.
    """

    def __init__(self, context: Context):
        super().__init__(context)
        self._calls = of_torch(context.group)
        self._collective = getattr(self, f"_{context.collective}")

    def run(self) -> Tensor:
        return self._collective(self.tensor)

    def _all_gather(self, tensor: Tensor) -> Tensor:
        sent = self._encoded(tensor, 1)
        arrived = self.context.buffer("fp8 arrived", self.context.world_size * sent.numel(), tensor, torch.uint8)
        self._calls.all_gather_single(arrived, sent.view(-1))
        return self._decoded(arrived, self.context.world_size, tensor)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        sent = self._encoded(tensor, 1)
        self._calls.broadcast(sent, self.root)
        return self._decoded(sent, 1, tensor)

    def _all_to_all(self, tensor: Tensor) -> Tensor:
        sent = self._encoded(tensor, self.context.world_size)
        arrived = self.context.buffer("fp8 arrived", sent.numel(), tensor, torch.uint8)
        self._calls.all_to_all_single(arrived, sent.view(-1))
        return self._decoded(arrived, self.context.world_size, tensor)

    def _sendrecv(self, tensor: Tensor) -> Tensor:
        sent = self._encoded(tensor, 1)
        arrived = self.context.buffer("fp8 arrived", sent.numel(), tensor, torch.uint8)
        send_around(self._calls, sent.view(-1), arrived)
        return self._decoded(arrived, 1, tensor)

    def _encoded(self, tensor: Tensor, parts: int) -> Tensor:
        """Codes and scales of each part: uint8, [parts, bytes]."""
        # Blocks of each part, the last one with zeros behind its values.
        each = tensor.numel() // parts
        blocks = -(-each // _BLOCK)
        padded = self.context.buffer("fp8 padded", parts * blocks * _BLOCK, tensor).view(parts, -1)
        padded[:, each:] = 0
        padded[:, :each] = tensor.view(parts, each)

        # The largest magnitude of a block becomes the largest code.
        values = padded.view(parts, blocks, _BLOCK)
        scales = values.abs().amax(-1, keepdim=True).clamp_(min=1e-30).div_(_LARGEST)
        codes = values.div_(scales).to(torch.float8_e4m3fn).view(torch.uint8)
        encoded = self.context.buffer("fp8 sent", parts * blocks * _BLOCK_BYTES, tensor, torch.uint8).view(parts, -1)
        encoded[:, : blocks * _BLOCK] = codes.view(parts, -1)
        encoded[:, blocks * _BLOCK :] = scales.view(parts, blocks).view(torch.uint8)
        return encoded

    def _decoded(self, encoded: Tensor, parts: int, like: Tensor) -> Tensor:
        """The values of all parts, [parts * values of a part]."""
        encoded = encoded.view(parts, -1)
        blocks = encoded.shape[1] // _BLOCK_BYTES
        codes, scales = encoded[:, : blocks * _BLOCK], encoded[:, blocks * _BLOCK :]
        values = codes.contiguous().view(torch.float8_e4m3fn).to(like.dtype).view(parts, blocks, _BLOCK)
        values.mul_(scales.contiguous().view(torch.float32).view(parts, blocks, 1))
        each = like.numel() // (parts if self.context.collective == "all_to_all" else 1)
        return values.view(parts, -1)[:, :each].reshape(-1)


CONTENDERS = (
    Contender("fp8", "E4M3 with a float32 scale for each 128 values, torch.distributed, cast back", Fp8, _COLLECTIVES),
)
