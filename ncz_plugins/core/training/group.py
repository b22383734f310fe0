"""State that all ranks of one process group have in common, from call to call and from step to step."""

from __future__ import annotations

from ..config import GuardConfig
from ..runtime.worker import Handle
from .guard import Guard


class GroupState:
    """State of one process group. It is the same on all ranks of the group.

    Attributes:
        calls: number of compressed collectives so far. It numbers the next one, and selects its random numbers.
        guard: verifies some of the compressed sums.
    """

    def __init__(self, config: GuardConfig):
        self.calls = 0
        self.guard = Guard(config)
        self._pending: list[Handle] = []

    def wait_at_end_of_step(self, handle: Handle) -> None:
        """Have the end of this step wait for a call that verifies its result."""
        self._pending = [each for each in self._pending if not each.is_success()]
        self._pending.append(handle)

    def wait_for_pending(self) -> None:
        """Wait for the calls passed to `wait_at_end_of_step`. Raises the error of a call that failed."""
        pending, self._pending = self._pending, []
        for handle in pending:
            handle.wait()

    def state_dict(self) -> dict:
        """State for a checkpoint: numbers, strings and mappings."""
        return {"calls": self.calls, "guard": self.guard.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""
        self.calls = state["calls"]
        self.guard.load_state_dict(state["guard"])
