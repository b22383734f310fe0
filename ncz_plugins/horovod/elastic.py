"""Handler for `hvd.elastic.TorchState(..., ncz=compressor)`: an NCZ returns to the last commit with the model."""

from __future__ import annotations

import copy

from horovod.torch.elastic import state

from ..core.config import Config
from .compressor import NCZ
from .gathering import gathered


def install() -> None:
    """Register the handler for NCZ with Horovod's elastic states."""
    state.set_handler_registry([*state.get_handler_registry(), (NCZ, _Handler)])


class _Handler(state.StateHandler):
    """Handler that keeps a copy of this rank's own state. Ranks do not share it."""

    def __init__(self, value: NCZ):
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take over the configuration of rank 0, in which `auto` has been replaced for its number of ranks.

        Ranks that join later take the step from the others in their first reduction.
        """
        config = self.value.config
        mine = {"settings": config.for_gpus().model_dump(mode="json"), "schedule": config.transport.schedule}
        first = gathered(mine, "ncz.config")[0]
        self.value.training.config = Config.load(first["settings"]).resolved(schedule=first["schedule"])
