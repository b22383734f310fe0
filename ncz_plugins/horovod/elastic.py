"""`hvd.elastic.TorchState(..., ncz=compressor)`: what an NCZ knows goes back to the last commit with the model."""

from __future__ import annotations

import copy
import json

import horovod.torch as hvd
import torch
from horovod.torch.elastic import state

from .compressor import NCZ


def install() -> None:
    """Tell Horovod's states how to handle an NCZ."""
    state.set_handler_registry([*state.get_handler_registry(), (NCZ, _Handler)])


class _Handler(state.StateHandler):
    """Keeps a copy of this rank's own state, which it does not share with the others."""

    def __init__(self, value: NCZ):
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take over the configuration of the first rank, with what it found for `auto` at its number of ranks.

        There is nothing else to send: ranks that come later take the step from the others with their first reduction.
        """
        self.value.training.config = json.loads(_of_first_rank(self.value.config.model_dump_json()))


def _of_first_rank(text: str) -> str:
    """The text of rank 0. Horovod's own broadcast of objects would run what a rank sends."""
    data = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)
    size = hvd.broadcast(torch.tensor([data.numel()]), 0, name="ncz.config.size")
    sent = data if hvd.rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    return bytes(hvd.broadcast(sent, 0, name="ncz.config").tolist()).decode()
