"""What the ranks of one process group have in common from call to call and from step to step."""

from __future__ import annotations

from ..config import GuardConfig
from ..runtime.worker import Handle
from .guard import Guard


class GroupState:
    """The state that all ranks of a group hold alike.

    Attributes:
        calls: compressed collectives asked for so far. It numbers them, and says where the next one's random numbers
            begin.
        guard: verifies sums.
        sums: those among the calls of this step that are compressed sums.
    """

    def __init__(self, config: GuardConfig):
        self.calls = 0
        self.guard = Guard(config)
        self.sums = 0
        self._pending: list[Handle] = []

    def picks(self, step: int) -> bool:
        """Whether the compressed sum that is asked for now is to be verified. Asked once for each."""
        self.sums += 1
        return self.guard.picks(step, self.sums - 1)

    def wait_at_end_of_step(self, handle: Handle) -> None:
        """A step is not over before a call that verifies is complete."""
        self._pending = [each for each in self._pending if not each.is_success()]
        self._pending.append(handle)

    def wait_for_pending(self) -> None:
        """Return once the calls that the end of this step waits for are complete. Raises what went wrong with them."""
        self.sums = 0
        pending, self._pending = self._pending, []
        for handle in pending:
            handle.wait()

    def state_dict(self) -> dict:
        """Numbers, strings and mappings, for a checkpoint."""
        return {"calls": self.calls, "guard": self.guard.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Take over what `state_dict` gave."""
        self.calls = state["calls"]
        self.guard.load_state_dict(state["guard"])
