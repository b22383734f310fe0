"""`hvd.elastic.TorchState(..., ncz=compressor)`: what an NCZ knows goes back to the last commit with the model."""

from __future__ import annotations

import copy

from horovod.torch.elastic import state

from .compressor import NCZ
from .gathering import gathered


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
        self.value.training.config = gathered(self.value.config.model_dump(mode="json"), "ncz.config")[0]
